//! The order of one rank's operations: races, and waits without a record.
//!
//! A *clock* counts for each stream the operations that have surely ended, by streams and marks of the rank alone. Two
//! operations that touch a buffer, of which one writes, must be ordered by it. Rows are not looked at, and neither is
//! the order that messages add: what passes here has no race.

use super::super::touch::Access::{self, Raise, Read, Write};
use super::error::PlanFault;
use crate::schedule::plan::{Act, Mark, Op, Own, STREAMS};

type Clock = [u32; STREAMS];

/// The clocks of a rank's streams, and the last touches of its buffers.
pub(super) struct Clocks {
    now: [Clock; STREAMS],
    marks: Vec<Option<Clock>>,
    /// For each buffer, the number of the last read, write and raise of each stream.
    touched: Vec<[Clock; 3]>,
}

impl Clocks {
    pub(super) fn new(buffers: usize, marks: usize) -> Clocks {
        Clocks {
            now: [[0; STREAMS]; STREAMS],
            marks: vec![None; marks],
            touched: vec![[[0; STREAMS]; 3]; buffers],
        }
    }

    /// Lets an operation begin and end.
    pub(super) fn run(&mut self, Op { stream, act }: &Op) -> Result<(), PlanFault> {
        let lane = usize::from(*stream);
        let before = *self.now.get(lane).ok_or(PlanFault::Stream(*stream))?;
        let number = before[lane] + 1;
        let mut fault = None;
        touches(act, |own, kind| {
            let race = self.touch(own, kind, lane, number, &before);
            fault = fault.take().or(race);
        });
        if let Some(fault) = fault {
            return Err(fault);
        }
        if let Act::Wait(Mark(mark)) = act {
            let recorded = self.marks.get(*mark as usize).copied().flatten();
            let recorded = recorded.ok_or(PlanFault::Unrecorded(*mark))?;
            self.now[lane].iter_mut().zip(recorded).for_each(|(mine, other)| *mine = (*mine).max(other));
        }
        self.now[lane][lane] = number;
        if let Act::Record(Mark(mark)) = act {
            let slot = self.marks.get_mut(*mark as usize).ok_or(PlanFault::Unrecorded(*mark))?;
            *slot = Some(self.now[lane]);
        }
        Ok(())
    }

    fn touch(
        &mut self,
        own: Own,
        kind: Access,
        lane: usize,
        number: u32,
        before: &Clock,
    ) -> Option<PlanFault> {
        let Some(last) = self.touched.get_mut(usize::from(own.0)) else {
            return Some(PlanFault::Shape(own.0));
        };
        let unordered = KINDS.into_iter().enumerate().any(|(index, other)| {
            // A stream runs its own operations in order.
            let others = (0..STREAMS).filter(|stream| *stream != lane);
            kind.conflicts(other) && others.into_iter().any(|stream| last[index][stream] > before[stream])
        });
        last[KINDS.iter().position(|other| *other == kind).unwrap_or(0)][lane] = number;
        unordered.then_some(PlanFault::Race(own.0))
    }
}

const KINDS: [Access; 3] = [Read, Write, Raise];

/// Calls `each` for every buffer that an operation touches.
pub(super) fn touches(act: &Act, mut each: impl FnMut(Own, Access)) {
    let mut all = |buffers: &[Own], kind| buffers.iter().for_each(|own| each(*own, kind));
    match act {
        Act::Attend { table, inputs, results: [out, lse, max_logit], .. } => {
            all(table.as_slice(), Read);
            all(inputs, Read);
            all(&[*out, *lse], Write);
            all(&[*max_logit], Raise);
        }
        Act::AttendWhole { table, inputs, sink, results: [out, lse, max_logit] } => {
            all(table.as_slice(), Read);
            all(inputs, Read);
            all(sink.as_slice(), Read);
            all(&[*out, *lse], Write);
            all(&[*max_logit], Raise);
        }
        // Parts of a result are different rows. Values have each part once.
        Act::AttendStep { table, inputs, sink, results: [out, lse, max_logit], .. } => {
            all(table.as_slice(), Read);
            all(inputs, Read);
            all(sink.as_slice(), Read);
            all(&[*out], Write);
            all(&[*lse, *max_logit], Raise);
        }
        Act::CopyValid { table, from, to, .. } => {
            all(table.as_slice(), Read);
            all(&[*from], Read);
            all(&[*to], Raise);
        }
        Act::AttendBackward { table, inputs, results, .. } => {
            all(table.as_slice(), Read);
            all(inputs, Read);
            all(results, Write);
        }
        Act::AttendBackwardEach { table, inputs, results, sums, .. } => {
            all(table.as_slice(), Read);
            all(inputs, Read);
            all(results, Write);
            all(sums, Write);
        }
        Act::AttendGathered { inputs, results, .. } => {
            all(inputs, Read);
            all(results, Write);
        }
        Act::MakeSegments { to, .. } => all(&[*to], Write),
        Act::AttendBackwardWhole { table, inputs, sink, results } => {
            all(table.as_slice(), Read);
            all(inputs, Read);
            all(results, Write);
            if let Some([sink, dsink]) = sink {
                all(&[*sink], Read);
                all(&[*dsink], Write);
            }
        }
        Act::Merge { step, running, .. } => {
            all(step, Read);
            all(running, Write);
        }
        Act::Accumulate { from, to, .. }
        | Act::Add { from, to, .. }
        | Act::Copy { from, to, .. }
        | Act::Reorder { from, to, .. }
        | Act::Pack { from, to, .. }
        | Act::Trade { from, to, .. }
        | Act::Unpack { from, to }
        | Act::Repay { from, to }
        | Act::Spread { from, to }
        | Act::GatherHidden { from, to }
        | Act::ScatterHidden { from, to }
        | Act::Linear { from, to, .. }
        | Act::Unspread { from, to }
        | Act::AllGather { from, to }
        | Act::ReduceScatter { from, to }
        | Act::GatherHeads { from, to } => {
            all(&[*from], Read);
            all(&[*to], Write);
        }
        Act::ApplySink { sink, results } => {
            all(sink.as_slice(), Read);
            all(results, Write);
        }
        Act::SinkGradient { inputs, dsink } => {
            all(inputs, Read);
            all(&[*dsink], Write);
        }
        Act::Fill { to, .. } => all(&[*to], Write),
        Act::Exchange { sent, received, .. } => {
            all(sent, Read);
            all(received, Write);
        }
        Act::AllToAll { from, to, landings, .. } => {
            all(&[*from], Read);
            (0..*landings).for_each(|landing| all(&[Own(to.0.saturating_add(landing))], Write));
        }
        Act::AllReduce { buffer } | Act::Rotate { buffer, .. } => all(&[*buffer], Write),
        Act::Record(_) | Act::Wait(_) => {}
    }
}
