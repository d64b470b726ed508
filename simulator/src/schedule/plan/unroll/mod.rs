//! Unrolling: a plan's operations with their segments and rows, one rank at a time.

mod launches;
mod loans;
mod messages;
mod regions;
mod rows;
mod sums;
mod works;

use std::collections::BTreeMap;

use seamproof_oracle::sharding::{PlacedRun, held};
use seamproof_oracle::{Run, Side};

use super::act::{Act, Loan, Op, Own};
use super::gather::GatherPlan;
use super::region::RegionPlan;
use super::ring::RingPlan;
use super::{Core, Plan, Programs};
use crate::schedule::build::{self, Builder};
use crate::schedule::collect::rank_order;
use crate::schedule::embed;
use crate::schedule::hierarchical::ring_order;
use crate::schedule::lending::Counter;
use crate::schedule::place::placed;
use crate::schedule::program::{
    Buffer, BufferId, KeySource, Operation, Placement, RankProgram, RowPair, Schedule, SegmentSource, Step,
    Work,
};
use crate::schedule::sequence_parallel::cut;
use works::Works;

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
        let works = Works { plan: self, rank };
        for index in 0..programs.sections() {
            if self.has_backward() && index == self.of_pass() {
                backward = Some(operations.len());
            }
            ops.clear();
            programs.section(rank, index, &mut ops);
            for Op { stream, act } in &ops {
                let stream = usize::from(*stream);
                let works = works.of(act, groups).into_iter();
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

    /// Returns what the table of a rank's launches on some keys is made from.
    pub(super) fn source(&self, rank: usize, keys: KeySource) -> Option<SegmentSource> {
        let place = self.place(rank);
        self.told.as_ref().map(|from| SegmentSource { place, keys, ..from.clone() })
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

    fn loan_communicator(&self) -> usize {
        self.of_group().len() - 1
    }

    /// Returns the index of the communicator of a rank's ring.
    fn ring_communicator(&self, rank: usize) -> usize {
        if self.exchange.is_some() { 1 + self.places() + self.member(rank) % self.members } else { 0 }
    }

    /// Returns the index of the communicator of a rank's exchanges.
    pub(crate) fn exchange_communicator(&self, rank: usize) -> usize {
        if self.is_whole() { 0 } else { 1 + self.place(rank) }
    }
}

/// Returns the rows of placed runs, padding included.
fn owned_rows(placed: Vec<PlacedRun>) -> Vec<Run> {
    placed.into_iter().map(|PlacedRun { local, .. }| Run { len: local.span, ..local }).collect()
}
