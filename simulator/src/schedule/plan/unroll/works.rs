//! The work of each operation of a rank.

use seamproof_oracle::Run;

use super::super::Plan;
use super::super::act::{Act, Mark, Own};
use crate::schedule::embed;
use crate::schedule::program::{Buffer, BufferId, EventId, Region, Work};

/// A rank whose operations are unrolled.
pub(super) struct Works<'p> {
    pub(super) plan: &'p Plan<'p>,
    pub(super) rank: usize,
}

impl Works<'_> {
    /// Returns the work of an operation: a send and a receive of a group for an exchange, one for most others.
    pub(super) fn of(&self, act: &Act, group: usize) -> Vec<Work> {
        if let Some(work) = self.of_region(act) {
            return vec![work];
        }
        let mut works = self.inside(act, group);
        if self.plan.region.is_some() {
            let (ranks, size) = (self.plan.region_ranks(), self.plan.size());
            let first = 1 + size + self.rank % ranks * self.plan.of_group().len();
            let communicators = works.iter_mut().filter_map(embed::communicator);
            communicators.for_each(|communicator| *communicator += first);
        }
        works
    }

    /// Returns the work of an operation on a rank's heads.
    fn inside(&self, act: &Act, group: usize) -> Vec<Work> {
        let work = match *act {
            Act::Attend { ref launch, table, inputs, results } => self.attend(launch, table, inputs, results),
            Act::AttendStep { ref launch, table, inputs, sink, results } => {
                self.attend_step(launch, table, (inputs, sink), results)
            }
            Act::AttendWhole { table, inputs, sink, results } => {
                self.attend_whole(table, (inputs, sink), results)
            }
            Act::AttendBackward { ref launch, table, inputs, results } => {
                self.attend_backward(launch, table, inputs, results)
            }
            Act::AttendBackwardEach { ref launches, table, inputs, results, sums } => {
                return self.attend_backward_each(launches, (table, inputs), results, sums);
            }
            Act::AttendBackwardWhole { table, inputs, sink, results } => {
                self.attend_backward_whole(table, inputs, sink, results)
            }
            Act::AttendGathered { ref launch, inputs, results } => {
                self.attend_gathered(launch, inputs, results)
            }
            Act::CopyValid { ref launch, table, from, to } => self.copy_valid(launch, table, from, to),
            Act::MakeSegments { to, owner } => return self.make_segments(to, owner).into_iter().collect(),
            Act::Merge { style, ref launch, step, running } => self.merge(style, launch, step, running),
            Act::Accumulate { ref launch, side, from, to } => self.accumulate(launch, side, from, to),
            Act::Add { side, from, to } => self.add(side, from, to),
            Act::ApplySink { sink, results } => self.apply_sink(sink, results),
            Act::SinkGradient { inputs, dsink } => self.sink_gradient(inputs, dsink),
            Act::Fill { to, rows, value } => self.fill(to, rows, value),
            Act::Copy { from, to, rows } => self.copy(from, to, rows),
            Act::Reorder { from, to, side, way } => self.reorder(from, to, side, way),
            Act::Exchange { to, sent, from, received } => {
                return self.exchange((to, sent), (from, received), group).into();
            }
            Act::AllToAll { side, way, from, to, landings } => {
                self.all_to_all((side, way), from, to, landings)
            }
            Act::AllGather { from, to } => self.all_gather(from, to),
            Act::ReduceScatter { from, to } => self.reduce_scatter(from, to),
            Act::GatherHeads { from, to } => self.gather_heads(from, to),
            Act::AllReduce { buffer } => self.all_reduce(buffer),
            Act::Pack { from, to, loan } => self.pack(from, to, loan),
            Act::Trade { loan, from, to } => self.trade(loan, from, to),
            Act::Unpack { from, to } => self.unpack(from, to),
            Act::Repay { from, to } => return self.repay(from, to),
            Act::Spread { from, to } => self.spread(from, to),
            Act::Unspread { from, to } => return self.unspread(from, to),
            Act::Record(Mark(mark)) => Work::RecordEvent(EventId(mark as usize)),
            Act::Wait(Mark(mark)) => Work::WaitEvent(EventId(mark as usize)),
            Act::GatherHidden { .. }
            | Act::ScatterHidden { .. }
            | Act::Linear { .. }
            | Act::Rotate { .. } => return Vec::new(),
        };
        vec![work]
    }

    pub(super) fn all(&self, own: Own) -> Region {
        let Buffer { rows, heads, .. } = self.plan.buffers[usize::from(own.0)];
        Region { buffer: id(own), rows: Run::packed(0, rows, rows), heads: 0..heads }
    }

    /// Returns the `index`-th `rows` rows of a buffer.
    pub(super) fn part(&self, own: Own, index: usize, rows: usize) -> Region {
        Region { rows: Run::packed(index * rows, rows, rows), ..self.all(own) }
    }
}

/// Returns a plan's buffer as one of a rank.
pub(super) fn id(own: Own) -> BufferId {
    BufferId(own.0.into())
}
