//! Unrolling: a plan's operations with their segments and rows, one rank at a time.

use std::collections::BTreeMap;

use seamproof_oracle::sharding::{PlacedRun, held};
use seamproof_oracle::{Run, Side};

use super::act::{Act, Extent, Launch, Loan, Mark, Op, Own, Way};
use super::gather::GatherPlan;
use super::region::RegionPlan;
use super::ring::RingPlan;
use super::{Core, Plan, Programs};
use crate::schedule::all_gather;
use crate::schedule::all_to_all::whole_sequences;
use crate::schedule::build::{self, Builder};
use crate::schedule::collect::{inverse, rank_order};
use crate::schedule::embed;
use crate::schedule::hierarchical::ring_order;
use crate::schedule::lending::Counter;
use crate::schedule::place::placed;
use crate::schedule::program::{
    Attend, AttendBackward, Buffer, BufferId, EventId, FillValue, KeySource, Merge, MergeOrder, Operation,
    Placement, RankProgram, Reduction, Region, RowPair, Schedule, SegmentSource, Step, Work,
};
use crate::schedule::ring::{RingCore, owned};
use crate::schedule::sequence_parallel::{cut, rotated};
use crate::schedule::tables::Told;
use crate::{AttentionCall, RowPolicy};

/// What a schedule has of one rank. Buffers, events and groups are numbered by their order on the rank, and launches have no
/// step, which people alone read.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedRank {
    /// The rank's buffers.
    pub buffers: Vec<Buffer>,
    /// The placements of these buffers.
    pub placements: Vec<Placement>,
    /// The program. Peers are places in the group in what a plan makes, and ranks of the world in what a schedule has.
    pub program: RankProgram,
}

impl PlannedRank {
    /// Returns what a schedule has of a rank of the world.
    pub fn of(schedule: &Schedule, rank: usize) -> PlannedRank {
        let own = schedule.buffers.iter().enumerate().filter(|(_, buffer)| buffer.rank == rank);
        let numbers: BTreeMap<usize, usize> =
            own.clone().enumerate().map(|(number, (id, _))| (id, number)).collect();
        // A buffer of another rank has no number here.
        let number = |id: BufferId| BufferId(numbers.get(&id.0).copied().unwrap_or(usize::MAX));
        let placements = schedule.placements.iter().filter(|placed| numbers.contains_key(&placed.buffer.0));
        let placements =
            placements.map(|placed| Placement { buffer: number(placed.buffer), ..placed.clone() });
        let mut program = schedule.ranks.get(rank).cloned().unwrap_or_default();
        let mut names = Names::default();
        for Operation { work, .. } in &mut program.operations {
            embed::buffers(work).into_iter().for_each(|id| *id = number(*id));
            names.rename(work);
        }
        let buffers = own.map(|(_, buffer)| buffer.clone()).collect();
        PlannedRank { buffers, placements: placements.collect(), program }
    }
}

/// Numbers of events and groups, by the order in which a rank's program first names them.
#[derive(Default)]
struct Names {
    events: BTreeMap<usize, usize>,
    groups: BTreeMap<usize, usize>,
}

impl Names {
    fn rename(&mut self, work: &mut Work) {
        match work {
            Work::RecordEvent(event) | Work::WaitEvent(event) => {
                let next = self.events.len();
                event.0 = *self.events.entry(event.0).or_insert(next);
            }
            Work::Send { group: Some(group), .. } | Work::Recv { group: Some(group), .. } => {
                let next = self.groups.len();
                *group = *self.groups.entry(*group).or_insert(next);
            }
            Work::Attend(attend) => attend.step = Step::default(),
            Work::AttendBackward(attend) => attend.step = Step::default(),
            _ => {}
        }
    }
}

impl Plan<'_> {
    /// Returns one rank of the group, by its place, as a schedule has it, with the programs that are given.
    pub fn rank(&self, programs: &dyn Programs, rank: usize) -> PlannedRank {
        let (mut ops, mut operations, mut backward, mut groups) = (Vec::new(), Vec::new(), None, 0);
        for index in 0..programs.sections() {
            if self.has_backward() && index == self.of_pass() {
                backward = Some(operations.len());
            }
            ops.clear();
            programs.section(rank, index, &mut ops);
            for Op { stream, act } in &ops {
                let stream = usize::from(*stream);
                let works = self.works(rank, act, groups).into_iter();
                operations.extend(works.map(|work| Operation { stream, work }));
                groups += usize::from(matches!(act, Act::Exchange { .. }));
            }
        }
        let mut names = Names::default();
        operations.iter_mut().for_each(|Operation { work, .. }| names.rename(work));
        let mut builder = Builder::new(1);
        let member = self.member(rank);
        let sinks = self.heads.sinks(&self.own, member % self.members);
        build::local_with_sinks(&mut builder, &self.own, &self.shards, member, sinks);
        let mut placements = builder.finish().placements;
        if let Some(lend) = &self.lend {
            placements.iter_mut().for_each(|placed| placed.buffer = lend.outside(placed.buffer));
        }
        if let Some(region) = &self.region {
            placements = self.hidden_placements(region, rank, placements);
        }
        let buffers = self.own_buffers(rank, &mut operations, &mut placements);
        PlannedRank { buffers, placements, program: RankProgram { operations, backward } }
    }

    /// Returns the placements of a rank in a region, where those of its heads are given.
    fn hidden_placements(&self, region: &RegionPlan, rank: usize, all: Vec<Placement>) -> Vec<Placement> {
        let place = rank % region.ranks;
        let first = region.deal.of(Side::Q, place).start;
        let seen = all.into_iter().filter(|placed| !self.hides(placed.tensor));
        let seen = seen.map(|placed| {
            let heads = first + placed.heads.start..first + placed.heads.end;
            Placement { heads, ..placed }
        });
        let heads = self.problem.heads;
        let hidden = region.placed().map(|(tensor, own)| {
            let (side, buffer) = (tensor.side(), BufferId(own.0.into()));
            let heads = 0..if side == Side::Q { heads.q } else { heads.kv };
            Placement { tensor, buffer, heads, rows: self.shard(rank, side) }
        });
        seen.chain(hidden).collect()
    }

    /// Returns the rows of a member of the group that are inputs and results.
    pub(crate) fn placed(&self, member: usize, side: Side) -> Vec<PlacedRun> {
        held(&self.own, side, self.shards.of(side).placed(member).into_iter())
    }

    /// Returns the rows of a rank's shard in its region that sequences own.
    pub(crate) fn shard(&self, rank: usize, side: Side) -> Vec<PlacedRun> {
        let (place, rows) = (rank % self.region_ranks(), self.rows(side).div_ceil(self.region_ranks()));
        let shard = place * rows..(place + 1) * rows;
        self.placed(self.member(rank), side).iter().filter_map(|placed| cut(placed, &shard)).collect()
    }

    /// Returns the rows of one side of a rank's loans.
    fn counter(&self, rank: usize, loan: Loan) -> Option<&Counter> {
        let desk = self.desks().get(self.member(rank))?;
        Some(if loan == Loan::Lent { &desk.lent } else { &desk.holes })
    }

    /// Returns a member's rows of a side that no sequence borrows, padding included.
    pub(crate) fn held(&self, member: usize, side: Side) -> Vec<Run> {
        owned_rows(self.placed(member, side))
    }

    /// Returns the buffers of a rank, without those of launches that it does not make, and numbers them anew.
    fn own_buffers(
        &self,
        rank: usize,
        operations: &mut [Operation],
        placements: &mut [Placement],
    ) -> Vec<Buffer> {
        let mut is_there = vec![true; self.buffers.len()];
        self.kept().for_each(|own| is_there[usize::from(own.0)] = false);
        for Operation { work, .. } in operations.iter_mut() {
            embed::buffers(work).into_iter().for_each(|id| is_there[id.0] = true);
        }
        let before = is_there.iter().scan(0, |next, is_there| {
            *next += usize::from(*is_there);
            Some(*next - usize::from(*is_there))
        });
        let numbers: Vec<usize> = before.collect();
        for Operation { work, .. } in operations {
            embed::buffers(work).into_iter().for_each(|id| id.0 = numbers[id.0]);
        }
        placements.iter_mut().for_each(|placed| placed.buffer.0 = numbers[placed.buffer.0]);
        let all = (0..).zip(self.buffers.iter().zip(is_there)).filter(|(_, (_, is_there))| *is_there);
        let of_rank = |(own, (buffer, _)): (u16, (&Buffer, bool))| {
            let counter = self.loan(Own(own)).and_then(|loan| self.counter(rank, loan));
            Buffer { rank, rows: counter.map_or(buffer.rows, |counter| counter.rows), ..buffer.clone() }
        };
        all.map(of_rank).collect()
    }

    /// Returns the buffers that a rank has for launches that it makes.
    fn kept(&self) -> impl Iterator<Item = Own> {
        let (ring, gather) = match &self.core {
            Core::Ring(ring) => (Some(ring), None),
            Core::Gather(gather) => (None, Some(gather)),
            Core::Whole(_) => (None, None),
        };
        let of_steps = gather.into_iter().flat_map(GatherPlan::of_steps);
        ring.into_iter().flat_map(RingPlan::kept).chain(of_steps)
    }

    /// Returns the whole schedule, with the programs that are given.
    pub fn unroll(&self, programs: &dyn Programs) -> Schedule {
        let mut schedule = Builder::new(self.ranks()).finish();
        schedule.communicators = self.communicators();
        schedule.sequence_parallel = self.region.as_ref().map(|region| region.ranks);
        for rank in 0..self.ranks() {
            let first = schedule.buffers.len();
            let PlannedRank { buffers, placements, mut program } = self.rank(programs, rank);
            for Operation { work, .. } in &mut program.operations {
                embed::buffers(work).into_iter().for_each(|id| id.0 += first);
            }
            schedule.buffers.extend(buffers);
            let moved = |placed: Placement| Placement { buffer: BufferId(placed.buffer.0 + first), ..placed };
            schedule.placements.extend(placements.into_iter().map(moved));
            schedule.ranks[rank] = program;
        }
        placed(schedule, &self.problem.parallel)
    }

    /// Returns the communicators: all ranks, and where exchanges are around a ring, those of each exchange and then those
    /// of each ring. Ranks are places in the group.
    /// In regions, the group has them once for each rank of one, behind all ranks and the regions.
    pub(crate) fn communicators(&self) -> Vec<Vec<usize>> {
        let (inside, ranks) = (self.of_group(), self.region_ranks());
        if self.region.is_none() {
            return inside;
        }
        let regions = (0..self.size()).map(|member| (member * ranks..(member + 1) * ranks).collect());
        let of_place = |place: usize| {
            let at =
                move |members: &Vec<usize>| members.iter().map(|member| member * ranks + place).collect();
            inside.iter().map(at).collect::<Vec<_>>()
        };
        [(0..self.ranks()).collect()]
            .into_iter()
            .chain(regions)
            .chain((0..ranks).flat_map(of_place))
            .collect()
    }

    /// Returns the communicators of a group without regions.
    fn of_group(&self) -> Vec<Vec<usize>> {
        let (ranks, members) = (self.size(), self.members);
        let mut all = vec![(0..ranks).collect()];
        let is_paired = self.exchange.is_some() && !self.is_whole();
        if is_paired {
            all.extend((0..ranks / members).map(|group| (group * members..(group + 1) * members).collect()));
            all.extend((0..members).map(|member| (member..ranks).step_by(members).collect()));
        }
        if self.lend.is_some() {
            all.push((0..ranks).collect());
        }
        all
    }

    fn loan_communicator(&self) -> usize {
        self.of_group().len() - 1
    }

    /// Returns the index of the communicator of a rank's ring.
    fn ring_communicator(&self, rank: usize) -> usize {
        if self.exchange.is_some() { 1 + self.places() + self.member(rank) % self.members } else { 0 }
    }

    fn core(&self) -> RingCore<'_> {
        let (mask, softmax) = (self.problem.mask, self.problem.softmax);
        let (shards, order) = (&self.pieces, MergeOrder::Running);
        RingCore { mask, softmax, shards, members: &[], communicator: 0, order }
    }

    /// Returns the call of a launch, and the rows of its table that say it.
    fn told(&self, rank: usize, launch: &Launch, table: Option<Own>) -> (AttentionCall, Option<Region>) {
        if self.has_steps() {
            return self.step_call(rank, launch, (self.is_apart(), table));
        }
        let (Some(from), Some(table)) = (self.source(rank, KeySource::Of(launch.owner as usize)), table)
        else {
            return (self.call(rank, launch), None);
        };
        let told = Told::new(BufferId(table.0.into()), &from);
        let Launch { queries: [first, end], keys, .. } = *launch;
        let (call, rows) = self.core().told_launch(&told, first.into()..end.into(), keys.into());
        (call, Some(rows))
    }

    /// Returns the keys of which a table says the segments.
    fn keys_of(&self, table: Own, owner: u32) -> KeySource {
        match (self.has_steps(), Some(table) == self.step_table(false)) {
            (false, _) => KeySource::Of(owner as usize),
            (true, true) => KeySource::Gathered,
            (true, false) => KeySource::Residues,
        }
    }

    /// Returns what the table of a rank's launches on some keys is made from.
    pub(super) fn source(&self, rank: usize, keys: KeySource) -> Option<SegmentSource> {
        let place = self.place(rank);
        self.told.as_ref().map(|from| SegmentSource { place, keys, ..from.clone() })
    }

    /// Returns the call of a launch.
    fn call(&self, rank: usize, launch: &Launch) -> AttentionCall {
        let Launch { owner, queries: [first, end], keys } = *launch;
        if let Some(from) = self.source(rank, KeySource::Of(owner as usize)) {
            let told = Told::new(BufferId(0), &from);
            return self.core().told_launch(&told, first.into()..end.into(), keys.into()).0;
        }
        if self.gathers() {
            let (whole, mut parts) = all_gather::calls(&self.own, &self.shards, self.member(rank));
            let index = usize::from(if self.is_apart() { keys } else { first });
            return if index < parts.len() { parts.swap_remove(index) } else { whole };
        }
        let ends = (self.place(rank), owner as usize);
        let segments = self.core().all_segments(ends, first.into()..end.into(), keys.into());
        self.core().partial(segments)
    }

    /// Returns the rows of a side that a launch writes.
    fn written(&self, rank: usize, launch: &Launch, side: Side) -> Vec<RowPair> {
        if self.has_steps() {
            let all = Run::packed(0, self.ranked_rows(side), self.ranked_rows(side));
            return match side {
                Side::Q => self.valid(rank, launch, self.is_apart()),
                Side::Kv => vec![(all, all)],
            };
        }
        let call = self.call(rank, launch);
        match side {
            Side::Kv if self.gathers() => {
                let keys = call.segments.iter().flat_map(|segment| segment.kv.iter().copied());
                build::same_rows(&keys.filter(|run| run.len > 0).collect::<Vec<_>>())
            }
            Side::Q if self.gathers() => {
                let queries = call.segments.iter().map(|segment| Run { len: segment.q.span, ..segment.q });
                build::same_rows(&queries.collect::<Vec<_>>())
            }
            Side::Q => owned(call.segments.iter().map(|segment| segment.q)),
            Side::Kv => owned(call.segments.iter().flat_map(|segment| segment.kv.iter().copied())),
        }
    }

    fn extent(&self, rank: usize, buffer: BufferId, extent: Extent) -> Vec<Run> {
        match extent {
            Extent::Slots(side) => build::slots(self.pieces.of(side)),
            Extent::LocalSlots(side) => build::slots(self.shards.of(side)),
            Extent::Held(side) => self.held(self.member(rank), side),
            Extent::Shard(side) => owned_rows(self.shard(rank, side)),
            Extent::All => vec![self.all(buffer).rows],
            Extent::Values => Vec::new(),
        }
    }

    fn all(&self, buffer: BufferId) -> Region {
        let Buffer { rows, heads, .. } = self.buffers[buffer.0];
        Region { buffer, rows: Run::packed(0, rows, rows), heads: 0..heads }
    }

    /// Returns row pairs from rank order to collected order.
    pub(crate) fn collected(&self, member: usize, side: Side) -> Vec<RowPair> {
        let group = member / self.members;
        let members = group * self.members..(group + 1) * self.members;
        match self.is_whole() {
            true if self.gathers() => rank_order(self.shards.of(side), 0..self.size()),
            true => rank_order(self.shards.of(side), members),
            false => ring_order(self.shards.of(side), self.pieces.of(side), group, members),
        }
    }

    /// Returns the work of an operation: a send and a receive of a group for an exchange, one for any other.
    fn works(&self, rank: usize, act: &Act, group: usize) -> Vec<Work> {
        if let Some(work) = self.of_region(rank, act) {
            return vec![work];
        }
        let mut works = self.works_inside(rank, act, group);
        if self.region.is_some() {
            let first = 1 + self.size() + rank % self.region_ranks() * self.of_group().len();
            let communicators = works.iter_mut().filter_map(embed::communicator);
            communicators.for_each(|communicator| *communicator += first);
        }
        works
    }

    /// Returns the work of an operation around a rank's heads; `None` for any other.
    fn of_region(&self, rank: usize, act: &Act) -> Option<Work> {
        let region = self.region.as_ref()?;
        let (place, communicator) = (rank % region.ranks, 1 + self.member(rank));
        let id = |own: Own| BufferId(own.0.into());
        let shards = |whole: Own, shard: Own| {
            let rows = self.buffers[id(shard).0].rows;
            (0..region.ranks).map(|place| self.part(id(whole), place, rows)).collect()
        };
        let work = match *act {
            Act::GatherHidden { from, to } => {
                Work::AllGather { communicator, from: self.all(id(from)), to: shards(to, from) }
            }
            Act::ScatterHidden { from, to } => {
                Work::ReduceScatter { communicator, from: shards(from, to), to: self.all(id(to)) }
            }
            Act::Linear { layer, side, from, to } => {
                let rows = Run::packed(0, self.rows(side), self.rows(side));
                let heads = region.deal.of(side, place);
                Work::Linear { layer, heads, from: id(from), to: id(to), rows: vec![(rows, rows)] }
            }
            Act::Rotate { buffer, side, inverse } => {
                let rows = rotated(&self.placed(self.member(rank), side));
                Work::Rotate { buffer: id(buffer), rows, inverse }
            }
            _ => return None,
        };
        Some(work)
    }

    fn works_inside(&self, rank: usize, act: &Act, group: usize) -> Vec<Work> {
        let id = |own: Own| BufferId(own.0.into());
        let work = match *act {
            Act::Attend { ref launch, table, inputs, results } => {
                attend(self.told(rank, launch, table), inputs, None, results)
            }
            Act::AttendStep { ref launch, table, inputs, sink, results } => {
                attend(self.step_call(rank, launch, (false, table)), inputs, sink, results)
            }
            Act::CopyValid { ref launch, table, from, to } => {
                let (from, to, rows) = (id(from), id(to), self.valid(rank, launch, false));
                match self.step_call(rank, launch, (false, table)).1 {
                    Some(table) => Work::CopyValid { from, to, table, rows },
                    None => Work::Copy { from, to, rows },
                }
            }
            Act::AttendWhole { table, inputs, sink, results } => {
                attend(self.whole_call(rank, table), inputs, sink, results)
            }
            Act::AttendBackward { ref launch, table, inputs, results } => {
                attend_backward(self.told(rank, launch, table), inputs, None, results)
            }
            Act::AttendBackwardEach { ref launches, table, inputs, results, sums } => {
                let each = self.each_launch(self.place(rank), launches);
                let acts = each.flat_map(|launch| self.one_of_each(launch, (table, inputs), results, sums));
                return acts.flat_map(|act| self.works_inside(rank, &act, group)).collect();
            }
            Act::AttendBackwardWhole { table, inputs, sink, results } => {
                attend_backward(self.whole_call(rank, table), inputs, sink, results)
            }
            Act::AttendGathered { ref launch, inputs, results } => {
                attend_backward((self.call(rank, launch), None), inputs, None, results)
            }
            Act::MakeSegments { to, owner } => match self.source(rank, self.keys_of(to, owner)) {
                Some(from) => Work::MakeSegments { to: id(to), from },
                None => return Vec::new(),
            },
            Act::Merge { style, ref launch, step, running } => {
                let ([step_out, step_lse], [out, lse]) = (step.map(id), running.map(id));
                let rows = self.written(rank, launch, Side::Q);
                Work::Merge(Merge { style, step_out, step_lse, out, lse, rows })
            }
            Act::Accumulate { ref launch, side, from, to } => {
                Work::Accumulate { from: id(from), to: id(to), rows: self.written(rank, launch, side) }
            }
            Act::Add { side, from, to } => {
                let rows = build::same_rows(&self.extent(rank, id(to), Extent::LocalSlots(side)));
                Work::Accumulate { from: id(from), to: id(to), rows }
            }
            Act::ApplySink { sink, results } => {
                let ([out, lse], rows) = (results.map(id), self.core().real_queries(self.place(rank)));
                Work::ApplySink { sink: sink.map(id), out, lse, rows }
            }
            Act::SinkGradient { inputs, dsink } => {
                let ([sink, dout, out, lse], dsink) = (inputs.map(id), id(dsink));
                let rows = self.core().real_queries(self.place(rank));
                Work::SinkGradient { sink, dout, out, lse, dsink, rows, descales: Vec::new() }
            }
            Act::Fill { to, rows, value } => {
                Work::Fill { to: id(to), rows: self.extent(rank, id(to), rows), value }
            }
            Act::Copy { from, to, rows } => {
                let rows = build::same_rows(&self.extent(rank, id(to), rows));
                Work::Copy { from: id(from), to: id(to), rows }
            }
            Act::Reorder { from, to, side, way } => {
                let pairs = self.collected(self.member(rank), side);
                let rows = if way == Way::Collect { pairs } else { inverse(&pairs) };
                Work::Copy { from: id(from), to: id(to), rows }
            }
            Act::Exchange { to, sent, from, received } => {
                let (group, sent, received) = (Some(group), self.regions(sent), self.regions(received));
                return vec![
                    Work::Send { to: to as usize, group, regions: sent },
                    Work::Recv { from: from as usize, group, regions: received },
                ];
            }
            Act::AllToAll { side, way, from, to, landings } => {
                self.all_to_all(rank, side, way, (id(from), id(to)), landings.into())
            }
            Act::Pack { from, to, loan } => {
                let rows = self.counter(rank, loan).into_iter().flat_map(Counter::rows).collect();
                Work::Copy { from: id(from), to: id(to), rows }
            }
            Act::Trade { loan, from, to } => {
                let regions = |own: Own, loan| {
                    let heads = 0..self.buffers[id(own).0].heads;
                    let region = |rows: &Run| Region { buffer: id(own), rows: *rows, heads: heads.clone() };
                    self.counter(rank, loan).into_iter().flat_map(|of| &of.regions).map(region).collect()
                };
                let (send, recv) = (regions(from, loan), regions(to, loan.other()));
                Work::AllToAll { communicator: self.loan_communicator(), send, recv }
            }
            Act::Unpack { from, to } => {
                let rows = self.counter(rank, Loan::Holes).into_iter().flat_map(Counter::rows);
                Work::Copy { from: id(from), to: id(to), rows: inverse(&rows.collect::<Vec<_>>()) }
            }
            Act::Repay { from, to } => {
                let turns = self.counter(rank, Loan::Lent).map_or(Vec::new(), Counter::turns).into_iter();
                let add =
                    |rows: Vec<_>| Work::Accumulate { from: id(from), to: id(to), rows: inverse(&rows) };
                return turns.map(add).collect();
            }
            Act::Spread { from, to } => {
                let shared = self.shared.iter();
                let rows = shared.flat_map(|shared| shared.held.iter().chain(shared.lent.iter().flatten()));
                Work::Copy { from: id(from), to: id(to), rows: rows.copied().collect() }
            }
            Act::Unspread { from, to } => {
                let Some(shared) = &self.shared else { return Vec::new() };
                let (from, to) = (id(from), id(to));
                let zeros = Work::Fill { to, rows: vec![self.all(to).rows], value: FillValue::Zero };
                let copy = Work::Copy { from, to, rows: shared.held.clone() };
                let add = |lent: &Vec<RowPair>| Work::Accumulate { from, to, rows: inverse(lent) };
                return [zeros, copy].into_iter().chain(shared.lent.iter().map(add)).collect();
            }
            Act::AllGather { from, to } => {
                let part = |member| self.part(id(to), member, self.rows(Side::Kv));
                let to = (0..self.size()).map(part).collect();
                Work::AllGather { communicator: 0, from: self.all(id(from)), to }
            }
            Act::ReduceScatter { from, to } => {
                let part = |member| self.part(id(from), member, self.rows(Side::Kv));
                let from = (0..self.size()).map(part).collect();
                Work::ReduceScatter { communicator: 0, from, to: self.all(id(to)) }
            }
            Act::GatherHeads { from, to } => {
                let whole = self.all(id(to));
                let of = |member| Region { heads: self.heads.of(Side::Q, member), ..whole.clone() };
                let to = (0..self.members).map(of).collect();
                Work::AllGather {
                    communicator: self.exchange_communicator(rank),
                    from: self.all(id(from)),
                    to,
                }
            }
            Act::AllReduce { buffer } => Work::AllReduce {
                communicator: self.ring_communicator(rank),
                region: self.all(id(buffer)),
                reduction: Reduction::Max,
            },
            Act::GatherHidden { .. }
            | Act::ScatterHidden { .. }
            | Act::Linear { .. }
            | Act::Rotate { .. } => return Vec::new(),
            Act::Record(Mark(mark)) => Work::RecordEvent(EventId(mark as usize)),
            Act::Wait(Mark(mark)) => Work::WaitEvent(EventId(mark as usize)),
        };
        vec![work]
    }

    /// Returns one of the launches of [`Act::AttendBackwardEach`], and the sums behind it. An all-gather adds dq last.
    fn one_of_each(
        &self,
        launch: Launch,
        (table, inputs): (Option<Own>, [Own; 6]),
        results: [Own; 3],
        sums: [Own; 3],
    ) -> [Act; 4] {
        let attend = Act::AttendBackward { launch, table, inputs, results };
        let sum = |of: usize| {
            let side = if of == 0 { Side::Q } else { Side::Kv };
            Act::Accumulate { launch, side, from: results[of], to: sums[of] }
        };
        let [first, second, third] = if self.gathers() { [1, 2, 0] } else { [0, 1, 2] }.map(sum);
        [attend, first, second, third]
    }

    /// Returns the `index`-th `rows` rows of a buffer.
    fn part(&self, buffer: BufferId, index: usize, rows: usize) -> Region {
        Region { rows: Run::packed(index * rows, rows, rows), ..self.all(buffer) }
    }

    /// Returns the call of a launch on all queries of a rank, and the rows of its table that say it.
    fn whole_call(&self, rank: usize, table: Option<Own>) -> (AttentionCall, Option<Region>) {
        let whole = match self.gathers() {
            true => all_gather::calls(&self.own, &self.shards, self.member(rank)).0,
            false => whole_sequences(&self.own, &self.shards),
        };
        let Some((from, table)) = self.told.as_ref().zip(table) else { return (whole, None) };
        let told = Told::new(BufferId(table.0.into()), from);
        let (segments, policy) = (told.segments(0..1), RowPolicy::Leave);
        (AttentionCall { segments, policy, ..whole }, Some(told.region(0..1)))
    }

    fn regions(&self, buffers: [Own; 2]) -> Vec<Region> {
        buffers.map(|own| self.all(BufferId(own.0.into()))).to_vec()
    }

    /// Returns the index of the communicator of a rank's exchanges.
    pub(crate) fn exchange_communicator(&self, rank: usize) -> usize {
        if self.is_whole() { 0 } else { 1 + self.place(rank) }
    }

    fn all_to_all(
        &self,
        rank: usize,
        side: Side,
        way: Way,
        (from, to): (BufferId, BufferId),
        landings: usize,
    ) -> Work {
        let members = 0..self.members;
        let rows = self.rows(side);
        let part = |buffer, index: usize| self.part(buffer, index, rows);
        let heads = |member| self.heads.of(side, member);
        let landing = |member: usize| BufferId(to.0 + member % landings.max(1));
        let of_heads = |buffer, member| Region { heads: heads(member), ..self.all(buffer) };
        let (send, recv) = match way {
            Way::Collect => (
                members.clone().map(|member| of_heads(from, member)).collect(),
                members.map(|member| part(to, member)).collect(),
            ),
            Way::Deal => (
                members.clone().map(|member| part(from, member)).collect(),
                members.map(|member| of_heads(landing(member), member)).collect(),
            ),
        };
        Work::AllToAll { communicator: self.exchange_communicator(rank), send, recv }
    }
}

/// Returns the rows of placed runs, padding included.
fn owned_rows(placed: Vec<PlacedRun>) -> Vec<Run> {
    placed.into_iter().map(|PlacedRun { local, .. }| Run { len: local.span, ..local }).collect()
}

/// Returns a launch of the forward kernel.
fn attend(
    (call, table): (AttentionCall, Option<Region>),
    inputs: [Own; 3],
    sink: Option<Own>,
    results: [Own; 3],
) -> Work {
    let id = |own: Own| BufferId(own.0.into());
    let ([q, k, v], [out, lse, max_logit]) = (inputs.map(id), results.map(id));
    let (step, sink, descales) = (Step::default(), sink.map(id), Vec::new());
    Work::Attend(Attend { step, call, table, descales, q, k, v, sink, out, lse, max_logit })
}

/// Returns a launch of the backward kernel.
fn attend_backward(
    (call, table): (AttentionCall, Option<Region>),
    inputs: [Own; 6],
    sink: Option<[Own; 2]>,
    results: [Own; 3],
) -> Work {
    let id = |own: Own| BufferId(own.0.into());
    let ([q, k, v, dout, out, lse], [dq, dk, dv]) = (inputs.map(id), results.map(id));
    let sink = sink.map(|[sink, dsink]| (id(sink), id(dsink)));
    let (step, descales) = (Step::default(), Vec::new());
    Work::AttendBackward(AttendBackward {
        step,
        call,
        table,
        descales,
        q,
        k,
        v,
        dout,
        out,
        lse,
        sink,
        dq,
        dk,
        dv,
    })
}
