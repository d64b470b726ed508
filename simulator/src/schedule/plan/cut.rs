//! The *cut* of a problem: which rows and heads each rank has, the pieces that attend each other, and the core that is made
//! for them.

use seamproof_oracle::{Algorithm, Balance, Pass, Problem};

use super::gather::{GatherLaunches, GatherPlan, GatherShape};
use super::pairs::{Lowering, PiecePairs, WrongSegments};
use super::ring::RingShape;
use super::{Core, CoreShape, Exchanged, PlanError};
use crate::schedule::build::{self, Builder, Local, Shards};
use crate::schedule::exchange::HeadDeal;
use crate::schedule::hierarchical::joined;
use crate::schedule::program::{KeySource, MergeOrder, SegmentSource};
use crate::schedule::shared::SharedRows;
use crate::schedule::tables;

/// A problem that is cut over ranks.
#[derive(Debug)]
pub(super) struct Cut {
    algorithm: Algorithm,
    /// Number of ranks of an exchange, which are one member of a ring together; 1 where there is none.
    pub(super) members: usize,
    /// The heads of each of them.
    pub(super) heads: HeadDeal,
    /// Both sides, cut over all ranks.
    pub(super) shards: Shards,
    /// Both sides, cut over the members of a ring; whole sequences where no ring is.
    pub(super) pieces: Shards,
    lowering: Lowering,
    /// Number of parts of a slot of queries, and of a slot of keys.
    parts: [usize; 2],
}

impl Cut {
    /// Cuts a problem, whose heads are those of one rank of a region.
    pub(super) fn new(problem: &Problem) -> Result<Cut, PlanError> {
        let algorithm = problem.parallel.algorithm;
        let members = members(problem)?;
        let heads = HeadDeal::new(problem.heads, members)?;
        let shards = Shards::new(problem)?;
        let (pieces, lowering) = pieces(algorithm, &shards, members);
        let parts = parts(&pieces, lowering)?;
        Ok(Cut { algorithm, members, heads, shards, pieces, lowering, parts })
    }

    /// Returns what tables are made from on place 0 of a ring, where launches read their segments in tables.
    pub(super) fn told(&self, problem: &Problem, order: MergeOrder) -> Option<SegmentSource> {
        let (of_table, keys) = match self.algorithm {
            Algorithm::AllGather => (&self.shards, KeySource::Gathered),
            _ => (&self.pieces, KeySource::Of(0)),
        };
        let told = SegmentSource::told(problem.mask, of_table, 0, keys);
        told.filter(|_| order == MergeOrder::Deferred)
    }

    /// Returns the pairs of pieces in the forward, and in the backward where they are others.
    pub(super) fn pairs(&self, problem: &Problem, is_told: bool) -> Result<Vec<PiecePairs>, WrongSegments> {
        let mut pairs = vec![PiecePairs::new(&problem.mask, &self.pieces, (self.lowering, is_told))?];
        if self.lowering == Lowering::Rows && problem.pass == Pass::Backward {
            pairs.push(PiecePairs::new(&problem.mask, &self.shards, (Lowering::Residues, is_told))?);
        }
        Ok(pairs)
    }

    /// Returns the rows of gathered keys that sequences share.
    pub(super) fn shared(&self, problem: &Problem) -> Option<SharedRows> {
        let shared = SharedRows::of(problem, |sequence| self.shards.kv.gathered(sequence));
        shared.filter(|_| self.algorithm == Algorithm::AllGather)
    }

    /// Returns the number of steps of a ring.
    fn steps(&self) -> usize {
        if build::slots(&self.pieces.kv).is_empty() { 1 } else { self.pieces.q.cp }
    }

    /// Refuses a ring that keeps gradients in FP8, of which there is no plan.
    pub(super) fn refuse_kept_codes(&self, problem: &Problem, order: MergeOrder) -> Result<(), PlanError> {
        let is_code = problem.pass == Pass::Backward && problem.precision.gradients.format.saturates();
        let is_ring = !matches!(self.algorithm, Algorithm::AllToAll | Algorithm::AllGather);
        match order == MergeOrder::Deferred && is_ring && is_code && self.steps() > 1 {
            true => Err(PlanError::None("gradients in FP8 that are kept")),
            false => Ok(()),
        }
    }

    /// Makes the buffers of what attends, in the order in which the builder of the schedule makes them, with those of an
    /// exchange around it.
    pub(super) fn core(
        &self,
        builder: &mut Builder,
        local: &Local,
        (problem, order): (&Problem, MergeOrder),
        told: Option<&SegmentSource>,
    ) -> (Option<Exchanged>, Core) {
        if self.algorithm == Algorithm::AllGather {
            let launches = match self.lowering == Lowering::Rows {
                true => GatherLaunches::Residues(self.shards.kv.cp as u16),
                false => GatherLaunches::Parts(self.parts[0] as u16),
            };
            let (rows, shares) = (self.pieces.kv.rows, !problem.sharing.is_empty());
            let is_deferred = order == MergeOrder::Deferred;
            let shape = GatherShape { rows, launches, shares, is_deferred, told };
            return (None, Core::Gather(GatherPlan::new(builder, local, &shape)));
        }
        let shape = match self.algorithm {
            Algorithm::AllToAll => CoreShape::Whole(told),
            _ => CoreShape::Ring(RingShape { steps: self.steps(), key_parts: self.parts[1], order, told }),
        };
        if self.algorithm == Algorithm::Ring {
            let core = shape.forward(builder, local);
            return (None, shape.with_backward(core, builder, local));
        }
        let (exchange, core) = Exchanged::new(builder, local, &self.shards, self.members, self.heads, &shape);
        (Some(exchange), core)
    }
}

/// Returns the number of ranks of an exchange, which are one member of a ring together.
fn members(problem: &Problem) -> Result<usize, PlanError> {
    match problem.parallel.algorithm {
        Algorithm::Ring | Algorithm::AllGather => Ok(1),
        Algorithm::Hierarchical { all_to_all } => Ok(all_to_all),
        Algorithm::AllToAll => Ok(problem.parallel.size()),
        Algorithm::Single => Err(PlanError::None("a single rank")),
    }
}

/// Returns both sides as the core has them, with the manner in which their segments are made.
fn pieces(algorithm: Algorithm, shards: &Shards, members: usize) -> (Shards, Lowering) {
    match algorithm {
        Algorithm::AllToAll => (tables::whole_sequences(shards), Lowering::Whole),
        Algorithm::AllGather => {
            let whole = tables::whole_sequences(shards);
            let is_apart = shards.q.cp > 1 && shards.q.balance == (Balance::Striped { stripe: 1 });
            let lowering = if is_apart { Lowering::Rows } else { Lowering::Prefix };
            (Shards { q: shards.q.clone(), kv: whole.kv }, lowering)
        }
        Algorithm::Hierarchical { .. } => of_steps(joined_sides(shards, members).of_ring()),
        Algorithm::Ring | Algorithm::Single => of_steps(shards.of_ring()),
    }
}

/// Returns the number of parts of a slot of queries and of a slot of keys, if they can be numbered.
fn parts(pieces: &Shards, lowering: Lowering) -> Result<[usize; 2], PlanError> {
    let gathers = matches!(lowering, Lowering::Prefix | Lowering::Rows);
    if gathers && build::slots(&pieces.q).is_empty() {
        return Err(PlanError::None("an all-gather without queries"));
    }
    let parts = lowering.parts(pieces);
    match parts.iter().all(|parts| *parts < usize::from(u16::MAX)) {
        true => Ok(parts),
        false => Err(PlanError::None("more pieces of a slot than can be numbered")),
    }
}

/// Returns pieces with the manner in which a ring's steps have them.
fn of_steps(pieces: Shards) -> (Shards, Lowering) {
    let lowering = match pieces.q.balance {
        Balance::Striped { stripe: width @ 2.. } => Lowering::Stripes(width),
        _ => Lowering::Step,
    };
    (pieces, lowering)
}

fn joined_sides(shards: &Shards, members: usize) -> Shards {
    Shards { q: joined(&shards.q, members), kv: joined(&shards.kv, members) }
}
