//! The checker of plans: proves that a [`Plan`] computes its problem, without writing out its segments and rows.
//!
//! `docs/proof.md` says what it proves, from which definitions, and what it does not prove. In short:
//!
//! 1. *Pieces* ([`PiecePairs`](crate::schedule::plan::PiecePairs), `dealt.rs`, `loans.rs`, `hidden.rs`): every position is
//!    in one piece of one rank, keys that sequences share and hidden rows go where they belong, and the segments of two
//!    pieces are what the mask shows of them.
//! 2. *Each rank alone* (`form`, `clocks.rs`, `launched.rs`): shapes fit, nothing races, and the launches of a pass are
//!    all pairs of its queries, each once.
//! 3. *All ranks together* (`meet.rs`, `values`): going through their programs in the host's order, ranks meet in every
//!    message and collective. Launches find the keys that they name, and each contribution gets into its result once.
//!
//! Ranks that meet in the host's order cannot wait for each other in any other: streams and marks demand less than the
//! host's order does.
//!
//! [`is_plan`] proves that a schedule is a plan that is unrolled. A schedule of which both are proved computes its problem.

mod clocks;
mod dealt;
mod error;
mod form;
mod hidden;
mod launched;
mod loans;
mod meet;
mod value;
mod values;

use rayon::prelude::*;
use seamproof_oracle::Side;

pub use error::{PlanFault, Unproved};

use crate::schedule::plan::{Act, Op, Plan, PlannedRank, Programs};
use crate::schedule::{Schedule, peer};
use clocks::Clocks;
use form::Forms;
use launched::Launched;

/// Sizes of a proof of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanProof {
    /// Number of operations of all ranks, as the schedule has them.
    pub operations: usize,
    /// Number of (query, key, query head) triples of the forward.
    pub pairs: u64,
}

/// Proves that a plan computes its problem with the programs that are given, which are mostly its own, or returns the first
/// reason why that is not proved.
pub fn prove_plan(plan: &Plan<'_>, programs: &dyn Programs) -> Result<PlanProof, Unproved> {
    if programs.sections() != plan.sections() {
        return Err(Unproved::Sections(programs.sections()));
    }
    dealt::check(plan)?;
    loans::check(plan)?;
    hidden::check(plan)?;
    let forms = Forms::new(plan);
    let alone = (0..plan.ranks()).into_par_iter().map(|rank| alone(plan, &forms, programs, rank));
    let sum = |a: PlanProof, b: PlanProof| PlanProof {
        operations: a.operations + b.operations,
        pairs: a.pairs + b.pairs,
    };
    let proof = alone.try_reduce(PlanProof::default, |a, b| Ok(sum(a, b)))?;
    meet::check(plan, programs)?;
    Ok(proof)
}

/// Proves what can be proved of one rank without the others.
fn alone(
    plan: &Plan<'_>,
    forms: &Forms<'_>,
    programs: &dyn Programs,
    rank: usize,
) -> Result<PlanProof, Unproved> {
    let mut clocks = Clocks::new(plan.buffers().len(), plan.events());
    let (mut ops, mut operations, mut pairs) = (Vec::new(), 0, 0);
    let passes = programs.sections().div_ceil(plan.of_pass());
    for pass in 0..passes {
        let mut launched = Launched::new(plan, rank, pass > 0);
        for section in pass * plan.of_pass()..(pass + 1) * plan.of_pass() {
            ops.clear();
            programs.section(rank, section, &mut ops);
            for (operation, op) in ops.iter().enumerate() {
                let checked = forms.check(&op.act).and_then(|()| clocks.run(op));
                checked.and_then(|()| launched.run(&op.act)).map_err(|fault| Unproved::Operation {
                    rank,
                    section,
                    operation,
                    fault,
                })?;
                operations += works(plan, rank, op);
            }
        }
        let shown = launched.finish()?;
        pairs += if pass > 0 { 0 } else { shown * plan.block_heads(Side::Q) as u64 };
    }
    Ok(PlanProof { operations, pairs })
}

/// Returns the number of a schedule's operations that an operation of a plan is.
fn works(plan: &Plan<'_>, rank: usize, op: &Op) -> usize {
    match &op.act {
        Act::Exchange { .. } => 2,
        Act::Repay { .. } => plan.desks().get(plan.member(rank)).map_or(0, |desk| desk.lent.turns().len()),
        Act::Unspread { .. } => 2 + plan.shared().map_or(0, |shared| shared.lent.len()),
        // A launch, and three sums.
        Act::AttendBackwardEach { launches, .. } => 4 * plan.each_launch(plan.place(rank), launches).count(),
        _ => 1,
    }
}

/// Proves that a schedule is a plan with the programs that are given, but for the numbers of buffers, events and groups and the
/// steps that only people read, or returns the first difference.
pub fn is_plan(plan: &Plan<'_>, programs: &dyn Programs, schedule: &Schedule) -> Result<(), Unproved> {
    let ranks: Vec<usize> = plan.problem().parallel.world_ranks().collect();
    let in_world = |place: usize| ranks.get(place).copied().unwrap_or(usize::MAX);
    let whole = |what, is_right: bool| {
        if is_right { Ok(()) } else { Err(Unproved::Unlike { rank: 0, what, index: None }) }
    };
    whole("the members", schedule.members == ranks)?;
    whole("the number of ranks", schedule.ranks.len() == plan.problem().parallel.all_of_world())?;
    let region = Some(plan.region_ranks()).filter(|ranks| *ranks > 1);
    whole("the regions", schedule.sequence_parallel == region)?;
    let communicators: Vec<Vec<usize>> =
        plan.communicators().into_iter().map(|members| members.into_iter().map(in_world).collect()).collect();
    whole("the communicators", schedule.communicators == communicators)?;
    let owned = schedule.buffers.iter().filter(|buffer| ranks.contains(&buffer.rank)).count();
    whole("the buffers", owned == schedule.buffers.len())?;
    let placed = schedule.placements.iter().filter(|placed| placed.buffer.0 < owned).count();
    whole("the placements", placed == schedule.placements.len())?;
    let idle = schedule.ranks.iter().enumerate().filter(|(rank, _)| !ranks.contains(rank));
    for (rank, program) in idle {
        if !program.operations.is_empty() || program.backward.is_some() {
            return Err(Unproved::Unlike { rank, what: "the program of an idle rank", index: None });
        }
    }
    ranks.par_iter().enumerate().try_for_each(|(place, &rank)| {
        let mut wanted = plan.rank(programs, place);
        wanted.buffers.iter_mut().for_each(|buffer| buffer.rank = rank);
        for operation in &mut wanted.program.operations {
            if let Some(peer) = peer(&mut operation.work) {
                *peer = in_world(*peer);
            }
        }
        same(rank, &wanted, &PlannedRank::of(schedule, rank))
    })
}

/// Compares what a plan and a schedule have of a rank.
fn same(rank: usize, wanted: &PlannedRank, got: &PlannedRank) -> Result<(), Unproved> {
    let unlike = |what, index| Err(Unproved::Unlike { rank, what, index });
    if let Some(index) = differs(&wanted.buffers, &got.buffers) {
        return unlike("buffers", Some(index));
    }
    if let Some(index) = differs(&wanted.placements, &got.placements) {
        return unlike("placements", Some(index));
    }
    if let Some(index) = differs(&wanted.program.operations, &got.program.operations) {
        return unlike("operations", Some(index));
    }
    match wanted.program.backward == got.program.backward {
        true => Ok(()),
        false => unlike("the begin of the backward", None),
    }
}

/// Returns the first index at which two lists differ.
fn differs<T: PartialEq>(one: &[T], other: &[T]) -> Option<usize> {
    let first = one.iter().zip(other).position(|(a, b)| a != b);
    first.or_else(|| (one.len() != other.len()).then(|| one.len().min(other.len())))
}
