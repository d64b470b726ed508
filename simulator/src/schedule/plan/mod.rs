//! Plans: schedules that name whole pieces instead of rows.
//!
//! A *plan* is the program of every rank as a function of the rank and of the step. All ranks have the same buffers,
//! named by [`Own`]. A *launch* names the parts of the queries and of an owner's keys that it attends, and no segment; a
//! sum names the launch whose rows it adds; a message names whole buffers. A step of a ring is therefore some twenty
//! [operations](Op), however many sequences there are.
//!
//! A program comes in *sections*: what is before a ring, each step of it, and what is behind it, once for each pass.
//! A section is made when it is asked for, and no rank's program is ever there as a whole.
//!
//! [`Plan::rank`] *unrolls* a plan: it writes out the segments and rows of one rank's operations. A plan that is unrolled is
//! the schedule that the builder of its algorithm makes, but for the numbers of buffers, events and groups
//! ([`crate::check::plan::is_plan`] compares the two).
//!
//! | has a plan | |
//! |---|---|
//! | ring, all-to-all, hierarchical | every balance |
//! | all-gather | every balance |
//! | around them | keys that sequences share, sequence-parallel regions |
//!
//! There is none for a single rank, and none for a ring in the order [`MergeOrder::Deferred`] with gradients in FP8.

mod act;
mod barrier;
mod cut;
mod exchange;
mod gather;
mod gather_steps;
mod lend;
mod pairs;
mod region;
mod ring;
mod striped;
mod unroll;
mod whole;

use std::borrow::Cow;
use std::ops::Range;

use seamproof_oracle::TensorName::{self, Dk, Dout, Dq, Dv, K, Out, Q, V};
use seamproof_oracle::{Pass, Problem, Side};

pub use act::{Act, Extent, Launch, Launches, Loan, Mark, Op, Own, STREAMS, Way};
pub use pairs::{PieceId, PiecePairs, WrongSegments};
pub use unroll::PlannedRank;

use super::build::{self, BuildError, Builder, Local, Shards};
use super::exchange::HeadDeal;
pub(crate) use super::lending::Counter;
use super::lending::{Desk, alone};
use super::program::{Buffer, BufferId, MergeOrder, SegmentSource};
pub(crate) use super::sequence_parallel::rotated;
use super::sequence_parallel::{hidden, of_member};
use super::shared::SharedRows;
use crate::shard::ShardedSide;
use cut::Cut;
use exchange::Exchanged;
use gather::GatherPlan;
use lend::LendPlan;
use region::RegionPlan;
use ring::{RingPlan, RingShape};
use whole::WholePlan;

/// The reason why a problem has no plan, or one that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A problem of which no builder makes a schedule.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A problem whose builder has no plan.
    #[error("there is no plan for {0}")]
    None(&'static str),
    /// Segments of two pieces that do not show what the mask does.
    #[error(transparent)]
    Segments(#[from] WrongSegments),
}

/// Programs of ranks, section by section. A [`Plan`] has those of its builder.
pub trait Programs: Sync {
    /// Returns the number of sections of every rank.
    fn sections(&self) -> usize;
    /// Appends the operations of a section of a rank, which is given by its place in the group.
    fn section(&self, rank: usize, index: usize, to: &mut Vec<Op>);
}

/// A schedule on whole pieces.
#[derive(Debug)]
pub struct Plan<'a> {
    problem: &'a Problem,
    /// The problem with the heads of a rank of a region; the same where there is none.
    own: Cow<'a, Problem>,
    region: Option<RegionPlan>,
    /// Both sides, cut over all ranks.
    shards: Shards,
    /// Both sides, cut over the members of a ring; whole sequences where no ring is.
    pieces: Shards,
    /// Number of ranks of an exchange, which are one member of a ring together; 1 where there is none.
    members: usize,
    heads: HeadDeal,
    buffers: Vec<Buffer>,
    /// Pairs of pieces in the forward, and in the backward where they are others.
    pairs: Vec<PiecePairs>,
    /// What tables are made from on place 0 of a ring, where launches read their segments in tables.
    told: Option<SegmentSource>,
    lend: Option<LendPlan>,
    /// Rows of gathered keys that sequences share.
    shared: Option<SharedRows>,
    exchange: Option<Exchanged>,
    core: Core,
}

impl<'a> Plan<'a> {
    /// Returns the plan of a problem's own algorithm whose rings merge in an order.
    pub fn new(problem: &'a Problem, order: MergeOrder) -> Result<Plan<'a>, PlanError> {
        let ranks = problem.parallel.region.max(1);
        let deal = HeadDeal::new(problem.heads, ranks)?;
        let own = if ranks > 1 { Cow::Owned(of_member(problem, &deal, 0)?) } else { Cow::Borrowed(problem) };
        let cut = Cut::new(&own)?;
        let told = cut.told(&own, order);
        let pairs = cut.pairs(&own, told.is_some())?;
        let shared = cut.shared(&own);
        let lends = !own.sharing.is_empty() && shared.is_none();
        let inside = if lends { Cow::Owned(alone(&own)) } else { Cow::Borrowed(&*own) };
        cut.refuse_kept_codes(&inside, order)?;
        let mut builder = Builder::new(1);
        let sinks = cut.heads.sinks(&own, 0);
        let local = build::local_with_sinks(&mut builder, &inside, &cut.shards, 0, sinks);
        let (exchange, core) = cut.core(&mut builder, &local, (&own, order), told.as_ref());
        let streams = core.streams(exchange.is_some());
        let of_core = (core.events(), &streams[..]);
        let lend = lends.then(|| LendPlan::new(&mut builder, &own, (&cut.shards, &local), of_core));
        let events = lend.as_ref().map_or(core.events(), LendPlan::events);
        let of_inside = (events, &streams_around(&streams, lends)[..]);
        let tensors = tensors(&local, lend.as_ref());
        let region = (ranks > 1)
            .then(|| RegionPlan::new(&mut builder, (ranks, deal, problem.heads), &tensors, of_inside));
        let buffers = builder.finish().buffers;
        if buffers.len() > usize::from(u16::MAX) {
            return Err(PlanError::None("more buffers of a rank than can be numbered"));
        }
        let Cut { shards, pieces, members, heads, .. } = cut;
        Ok(Plan {
            problem,
            own,
            region,
            shards,
            pieces,
            members,
            heads,
            buffers,
            pairs,
            told,
            lend,
            shared,
            exchange,
            core,
        })
    }

    /// Returns the problem.
    pub fn problem(&self) -> &'a Problem {
        self.problem
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.size() * self.region_ranks()
    }

    /// Returns the number of ranks of a sequence-parallel region; 1 where there is none.
    pub fn region_ranks(&self) -> usize {
        self.region.as_ref().map_or(1, |region| region.ranks)
    }

    /// Returns the number of members of the group: of ranks that have rows of their own.
    pub fn size(&self) -> usize {
        self.shards.q.cp
    }

    /// Returns the member of the group whose rows a rank has.
    pub fn member(&self, rank: usize) -> usize {
        rank / self.region_ranks()
    }

    /// Returns the heads of a rank of a region, by its place there.
    pub(crate) fn region_heads(&self, side: Side, place: usize) -> Option<Range<usize>> {
        self.region.as_ref().map(|region| region.deal.of(side, place))
    }

    /// Returns the number of ranks of a region that have each head of a side.
    pub(crate) fn region_replicas(&self, side: Side) -> usize {
        self.region.as_ref().map_or(1, |region| region.deal.replicas(side))
    }

    /// Returns the number of heads of a side in hidden rows.
    pub fn hidden_heads(&self, side: Side) -> usize {
        if side == Side::Q { self.problem.heads.q } else { self.problem.heads.kv }
    }

    /// Returns the problem with the heads of a rank of a region.
    pub(crate) fn own(&self) -> &Problem {
        &self.own
    }

    /// Whether a tensor is an input or result of a rank as hidden rows.
    pub(crate) fn hides(&self, tensor: TensorName) -> bool {
        self.region.is_some() && hidden(tensor).is_some()
    }

    /// Returns the number of ranks of an exchange, which are one member of a ring together.
    pub fn members(&self) -> usize {
        self.members
    }

    /// Returns the number of members of a ring.
    pub fn places(&self) -> usize {
        self.pieces.q.cp
    }

    /// Returns the number of parts of a member's slot of queries, and of an owner's slot of keys, for launches that name
    /// both.
    pub fn parts(&self) -> [usize; 2] {
        self.pairs(true).parts()
    }

    /// Returns the number of owners of keys.
    pub fn owners(&self) -> usize {
        self.pieces.kv.cp
    }

    /// Returns the number of rows of a rank's tensors of a side.
    pub fn rows(&self, side: Side) -> usize {
        self.shards.of(side).rows
    }

    /// Returns the number of rows of a ring member's tensors of a side.
    pub fn piece_rows(&self, side: Side) -> usize {
        self.pieces.of(side).rows
    }

    /// Returns the number of rows of a side in rank order.
    pub fn ranked_rows(&self, side: Side) -> usize {
        self.rows(side) * if self.gathers() { self.size() } else { self.members }
    }

    /// Both sides as ranks hold them, and as members of a ring do.
    pub(crate) fn cuts(&self, side: Side) -> [&ShardedSide; 2] {
        [self.shards.of(side), self.pieces.of(side)]
    }

    /// Returns the number of heads of a side on a rank while it attends.
    pub fn block_heads(&self, side: Side) -> usize {
        self.heads.of(side, 0).len()
    }

    /// Returns the heads of a side that a member of an exchange has while it attends.
    pub fn heads_of(&self, side: Side, member: usize) -> Range<usize> {
        self.heads.of(side, member)
    }

    /// Returns the number of heads of a side.
    pub fn all_heads(&self, side: Side) -> usize {
        match side {
            Side::Q => self.own.heads.q,
            Side::Kv => self.own.heads.kv,
        }
    }

    /// Returns the number of members of an exchange that hold each head of a side.
    pub fn replicas(&self, side: Side) -> usize {
        self.heads.replicas(side)
    }

    /// Whether exchanges are around the ring.
    pub fn has_exchange(&self) -> bool {
        self.exchange.is_some()
    }

    /// Returns the number of sections of each pass.
    pub fn of_pass(&self) -> usize {
        self.core.sections() + 2 * self.layers().count()
    }

    /// Returns what is around the core, from the outermost on. Each has a section of a pass before the core, and one behind
    /// it.
    fn layers(&self) -> impl Iterator<Item = &dyn Around> {
        let region = self.region.iter().map(|layer| layer as &dyn Around);
        let lend = self.lend.iter().map(|layer| layer as &dyn Around);
        let exchange = self.exchange.iter().map(|layer| layer as &dyn Around);
        region.chain(lend).chain(exchange)
    }

    /// Returns a rank's place in its ring.
    pub fn place(&self, rank: usize) -> usize {
        self.member(rank) / self.members
    }

    /// Returns a rank's buffers. Their rank is 0.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Returns the pairs of pieces of a pass.
    pub fn pairs(&self, is_backward: bool) -> &PiecePairs {
        &self.pairs[if is_backward { self.pairs.len() - 1 } else { 0 }]
    }

    /// Returns the launches of a member of a ring, by its place, in order. Parts that do not exist are left out.
    pub fn each_launch(&self, place: usize, launches: &Launches) -> impl Iterator<Item = Launch> {
        let Launches { owner, queries: [first, end], keys: [first_key, keys_end] } = *launches;
        let seen = move |part: u16| {
            let queries = PieceId { member: place, part: part.into() };
            let of_owner = self.pairs(true).seen(queries, owner as usize);
            let seen = of_owner.iter().zip(0..).take(keys_end.into()).skip(first_key.into());
            let launch = move |keys| Launch { owner, queries: [part, part + 1], keys };
            seen.filter(|(sees, _)| **sees).map(move |(_, keys)| launch(keys))
        };
        (first..end).flat_map(seen)
    }

    fn first_launch(&self, place: usize, launches: &Launches) -> Option<Launch> {
        self.each_launch(place, launches).next()
    }

    /// Whether queries of an all-gather lie apart, and a backward has a launch for each residue of the keys.
    pub fn is_apart(&self) -> bool {
        matches!(&self.core, Core::Gather(gather) if gather.is_apart())
    }

    /// Returns the number of marks of a rank.
    pub fn events(&self) -> usize {
        let inside = self.lend.as_ref().map_or(self.core.events(), LendPlan::events);
        self.region.as_ref().map_or(inside, RegionPlan::events)
    }

    /// Whether sequences share keys.
    pub fn shares(&self) -> bool {
        !self.problem.sharing.is_empty()
    }

    /// Whether ranks lend each other keys that sequences share.
    pub fn lends(&self) -> bool {
        self.lend.is_some()
    }

    /// Returns the rows of gathered keys that sequences share.
    pub(crate) fn shared(&self) -> Option<&SharedRows> {
        self.shared.as_ref()
    }

    /// Returns what each rank lends and borrows of others; nothing where keys are gathered.
    pub(crate) fn desks(&self) -> &[Desk] {
        self.lend.as_ref().map_or(&[], |lend| &lend.desks)
    }

    /// Returns which rows of loans a buffer has, if it has such rows alone.
    pub fn loan(&self, own: Own) -> Option<Loan> {
        self.lend.as_ref()?.loan(own)
    }

    /// Whether a launch has all queries of its rank and all keys that they see, so that nothing is merged.
    pub fn is_whole(&self) -> bool {
        !matches!(self.core, Core::Ring(_))
    }

    /// Whether launches read their segments in tables.
    pub fn has_tables(&self) -> bool {
        self.told.is_some()
    }

    /// Whether a buffer of the plan is a table.
    pub fn is_table(&self, own: Own) -> bool {
        match &self.core {
            Core::Ring(ring) => ring.tables().any(|table| table == own),
            Core::Whole(whole) => whole.table == Some(own),
            Core::Gather(gather) => gather.tables().contains(&Some(own)),
        }
    }

    /// Whether parts of the queries are steps on two streams, before gathered keys.
    pub fn has_steps(&self) -> bool {
        matches!(&self.core, Core::Gather(gather) if gather.steps.is_some())
    }

    /// Returns the table of the steps of a pass on gathered keys, where they read one.
    pub fn step_table(&self, is_backward: bool) -> Option<Own> {
        match &self.core {
            Core::Gather(gather) => gather.tables()[usize::from(is_backward)],
            _ => None,
        }
    }

    /// Whether keys are gathered, and one owner has them all.
    pub fn gathers(&self) -> bool {
        matches!(self.core, Core::Gather(_))
    }

    /// Whether a statistic is reduced over the members of a ring, or over all ranks that gather.
    pub fn reduces(&self) -> bool {
        self.gathers() || self.places() > 1
    }

    /// Returns the place of the owner of the keys that a rank has at the beginning.
    pub fn owner(&self, rank: usize) -> usize {
        if self.gathers() { 0 } else { self.place(rank) }
    }

    fn push_core(&self, (rank, is_backward): (usize, bool), index: usize, to: &mut Vec<Op>) {
        match (&self.core, is_backward) {
            (Core::Ring(ring), false) => self.forward(ring, rank, index, to),
            (Core::Ring(ring), true) => self.backward(ring, rank, index, to),
            (Core::Whole(whole), false) => whole.push_forward(to),
            (Core::Whole(whole), true) => whole.push_backward(to),
            (Core::Gather(gather), false) => self.forward_gathered(gather, rank, index, to),
            (Core::Gather(gather), true) => self.backward_gathered(gather, rank, index, to),
        }
    }

    fn has_backward(&self) -> bool {
        self.problem.pass == Pass::Backward
    }
}

impl Programs for Plan<'_> {
    fn sections(&self) -> usize {
        let passes = if self.has_backward() { 2 } else { 1 };
        passes * self.of_pass()
    }

    fn section(&self, rank: usize, index: usize, to: &mut Vec<Op>) {
        let (is_backward, index) = (index >= self.of_pass(), index % self.of_pass());
        let before = self.layers().count();
        let behind = before + self.core.sections();
        if (before..behind).contains(&index) {
            return self.push_core((rank, is_backward), index - before, to);
        }
        let mut around = Vec::new();
        let depth = if index < before { index } else { self.of_pass() - 1 - index };
        match self.layers().nth(depth) {
            Some(layer) if index < before => layer.before(is_backward, &mut around),
            Some(layer) => layer.behind(is_backward, &mut around),
            None => {}
        }
        self.append_barriers((rank, is_backward), around, to);
    }
}

/// What is around a core: it makes what the core reads in a pass, and takes its results.
trait Around {
    /// Appends the section of a pass before what it is around.
    fn before(&self, is_backward: bool, to: &mut Vec<Op>);
    /// Appends the section behind it.
    fn behind(&self, is_backward: bool, to: &mut Vec<Op>);
}

/// What attends.
#[derive(Debug)]
enum Core {
    Ring(RingPlan),
    /// One launch on whole sequences.
    Whole(WholePlan),
    Gather(GatherPlan),
}

/// What the buffers of a core are made for.
enum CoreShape<'a> {
    Ring(RingShape<'a>),
    /// One launch on whole sequences, with what its table is made from.
    Whole(Option<&'a SegmentSource>),
}

impl CoreShape<'_> {
    /// Returns the number of steps.
    fn steps(&self) -> usize {
        match self {
            CoreShape::Ring(ring) => ring.steps,
            CoreShape::Whole(_) => 1,
        }
    }

    /// Makes the buffers of the forward.
    fn forward(&self, builder: &mut Builder, local: &Local) -> Core {
        match self {
            CoreShape::Ring(shape) => Core::Ring(RingPlan::forward(builder, local, shape)),
            CoreShape::Whole(told) => Core::Whole(WholePlan::forward(builder, local, *told)),
        }
    }

    /// Makes the buffers of the backward, if there is one.
    fn with_backward(&self, core: Core, builder: &mut Builder, local: &Local) -> Core {
        match (core, self) {
            (Core::Ring(ring), CoreShape::Ring(shape)) => {
                Core::Ring(ring.with_backward(builder, local, shape))
            }
            (Core::Whole(whole), _) => Core::Whole(whole.with_backward(local)),
            (other, _) => other,
        }
    }
}

impl Core {
    /// Returns the number of marks, with those of exchanges around.
    fn events(&self) -> usize {
        match self {
            Core::Ring(ring) => ring.events(),
            Core::Whole(_) => RingPlan::other(1, ring::OTHERS).0 as usize,
            Core::Gather(gather) => gather.marks(),
        }
    }

    /// Returns the streams other than the first one, with those of exchanges around.
    fn streams(&self, has_exchange: bool) -> Vec<u8> {
        let is_long = match self {
            Core::Ring(ring) => ring.is_long(),
            Core::Whole(_) => false,
            Core::Gather(gather) => gather.is_long(),
        };
        let communicates = has_exchange || matches!(self, Core::Gather(_)) || is_long;
        [(1, is_long), (2, communicates)]
            .into_iter()
            .filter(|(_, is_there)| *is_there)
            .map(|of| of.0)
            .collect()
    }

    /// Returns the number of sections of a pass.
    fn sections(&self) -> usize {
        match self {
            Core::Ring(ring) => ring.sections(),
            Core::Whole(_) => 1,
            Core::Gather(gather) => gather.sections(),
        }
    }
}

/// Returns the buffers of inputs and results that a region hides.
fn tensors(local: &Local, lend: Option<&LendPlan>) -> Vec<(TensorName, BufferId)> {
    let forward = [(K, local.k), (V, local.v), (Q, local.q), (Out, local.out)];
    let backward = local.backward.map(|to| [(Dout, to.dout), (Dq, to.dq), (Dk, to.dk), (Dv, to.dv)]);
    let all = forward.into_iter().chain(backward.into_iter().flatten());
    all.map(|(name, buffer)| (name, lend.map_or(buffer, |lend| lend.outside(buffer)))).collect()
}

/// Returns the streams other than the first one, with those of loans around.
fn streams_around(streams: &[u8], lends: bool) -> Vec<u8> {
    let loans = (lends && !streams.contains(&2)).then_some(2);
    streams.iter().copied().chain(loans).collect()
}

/// Returns a builder's buffer as one of a plan.
fn own(buffer: BufferId) -> Own {
    Own(u16::try_from(buffer.0).unwrap_or(u16::MAX))
}
