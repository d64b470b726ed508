//! The touches of operations: buffers, their rows and heads, and the kind of access.

use seamproof_oracle::Run;

use super::order::Action;
use crate::schedule::{Axes, Buffer, BufferId, Region, Rotated, RowPair, Schedule, Work};
use crate::{AttentionCall, RowPolicy};

/// Kind of access to rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Access {
    Read,
    Write,
    /// Raises max_logit. Raises commute and are atomic.
    Raise,
}

impl Access {
    /// Whether two touches of these kinds must be ordered.
    pub(super) fn conflicts(self, other: Access) -> bool {
        self == Access::Write || self != other
    }
}

/// Rows of a buffer that are touched, with every head. Only a region has some heads.
#[derive(Clone, Copy, Debug)]
pub(super) enum TouchedRows<'a> {
    /// First `len` rows of each run.
    Runs(&'a [Run]),
    /// First runs of the pairs.
    From(&'a [RowPair]),
    /// Second runs of the pairs.
    To(&'a [RowPair]),
    /// Rows of the rotations.
    Rotated(&'a [Rotated]),
    /// Queries of a call: all rows that it owns, or only the real ones.
    Queries(&'a AttentionCall, bool),
    /// Keys of a call: all rows that it owns, or only the real ones.
    Keys(&'a AttentionCall, bool),
    Region(&'a Region),
    /// Every row.
    Whole,
    /// Values of a buffer without rows.
    Values,
}

impl TouchedRows<'_> {
    /// Returns runs whose first `len` rows are touched.
    pub(super) fn runs(&self, buffer: &Buffer) -> Vec<Run> {
        if buffer.axes == Axes::Heads {
            return vec![Run::packed(0, 1, 1)];
        }
        let writes = |call: &AttentionCall, own: bool, run: &Run| match own {
            true => Run { len: owned(call, run), ..*run },
            false => *run,
        };
        match *self {
            TouchedRows::Runs(runs) => runs.to_vec(),
            TouchedRows::From(pairs) => pairs.iter().map(|(from, _)| *from).collect(),
            TouchedRows::To(pairs) => pairs.iter().map(|(_, to)| *to).collect(),
            TouchedRows::Rotated(rotated) => rotated.iter().map(|rotated| rotated.rows).collect(),
            TouchedRows::Queries(call, own) => {
                call.segments.iter().map(|segment| writes(call, own, &segment.q)).collect()
            }
            TouchedRows::Keys(call, own) => {
                let keys = call.segments.iter().flat_map(|segment| &segment.kv);
                keys.map(|run| writes(call, own, run)).collect()
            }
            TouchedRows::Region(region) => vec![rows_of(buffer, region)],
            TouchedRows::Whole => vec![Run::packed(0, buffer.rows, buffer.rows)],
            TouchedRows::Values => Vec::new(),
        }
    }
}

/// One touch: the buffer, the kind of access, and the rows.
pub(super) type Touch<'a> = (BufferId, Access, TouchedRows<'a>);

/// Returns everything that an operation touches.
pub(super) fn touches(work: &Work) -> Vec<Touch<'_>> {
    use Access::{Raise, Read, Write};
    match work {
        Work::Attend(a) => {
            let (q, kv, queries) = (
                TouchedRows::Queries(&a.call, false),
                TouchedRows::Keys(&a.call, false),
                TouchedRows::Queries(&a.call, true),
            );
            let reads = [(a.q, Read, q), (a.k, Read, kv), (a.v, Read, kv)];
            let writes = [(a.out, Write, queries), (a.lse, Write, queries)];
            let sink = a.sink.map(|sink| (sink, Read, TouchedRows::Values));
            let raise = (a.max_logit, Raise, TouchedRows::Values);
            let table = every(&a.table, Read);
            reads.into_iter().chain(writes).chain(sink).chain([raise]).chain(table).collect()
        }
        Work::AttendBackward(a) => {
            let (q, kv) = (TouchedRows::Queries(&a.call, false), TouchedRows::Keys(&a.call, false));
            let (queries, keys) = (TouchedRows::Queries(&a.call, true), TouchedRows::Keys(&a.call, true));
            let reads = [a.q, a.dout, a.out, a.lse].map(|id| (id, Read, q)).into_iter();
            let reads = reads.chain([a.k, a.v].map(|id| (id, Read, kv)));
            let writes = [(a.dq, Write, queries), (a.dk, Write, keys), (a.dv, Write, keys)];
            let sinks = a.sink.map(|(sink, dsink)| {
                [(sink, Read, TouchedRows::Values), (dsink, Write, TouchedRows::Values)]
            });
            reads.chain(writes).chain(sinks.into_iter().flatten()).chain(every(&a.table, Read)).collect()
        }
        Work::Merge(m) => {
            let reads = [m.step_out, m.step_lse].map(|id| (id, Read, TouchedRows::From(&m.rows)));
            let writes = [m.out, m.lse].map(|id| (id, Write, TouchedRows::To(&m.rows)));
            reads.into_iter().chain(writes).collect()
        }
        Work::ApplySink { sink, out, lse, rows } => {
            let writes = [*out, *lse].map(|id| (id, Write, TouchedRows::Runs(rows)));
            sink.map(|sink| (sink, Read, TouchedRows::Values)).into_iter().chain(writes).collect()
        }
        Work::SinkGradient { sink, dout, out, lse, dsink, rows, .. } => {
            let reads = [*dout, *out, *lse].map(|id| (id, Read, TouchedRows::Runs(rows)));
            let values = [(*sink, Read, TouchedRows::Values), (*dsink, Write, TouchedRows::Values)];
            values.into_iter().chain(reads).collect()
        }
        Work::Accumulate { from, to, rows }
        | Work::Copy { from, to, rows }
        | Work::Linear { from, to, rows, .. } => {
            vec![(*from, Read, TouchedRows::From(rows)), (*to, Write, TouchedRows::To(rows))]
        }
        Work::MakeSegments { to, .. } => vec![(*to, Write, TouchedRows::Whole)],
        Work::CopyValid { from, to, table, rows } => {
            let copied = [(*from, Read, TouchedRows::From(rows)), (*to, Write, TouchedRows::To(rows))];
            copied.into_iter().chain(every([table], Read)).collect()
        }
        Work::Rotate { buffer, rows, .. } => vec![(*buffer, Write, TouchedRows::Rotated(rows))],
        Work::Fill { to, rows, .. } => vec![(*to, Write, TouchedRows::Runs(rows))],
        Work::Send { regions, .. } => every(regions, Read).collect(),
        Work::Recv { regions, .. } => every(regions, Write).collect(),
        Work::AllGather { from, to, .. } => every([from], Read).chain(every(to, Write)).collect(),
        Work::ReduceScatter { from, to, .. } => every(from, Read).chain(every([to], Write)).collect(),
        Work::AllToAll { send, recv, .. } => every(send, Read).chain(every(recv, Write)).collect(),
        Work::AllReduce { region, .. } | Work::HostRead(region) => every([region], Write).collect(),
        Work::RecordEvent(_) | Work::WaitEvent(_) => Vec::new(),
    }
}

/// Returns the buffers that an operation reads or writes. One may be named more than once.
pub fn buffers_of(work: &Work) -> Vec<BufferId> {
    touches(work).into_iter().map(|(buffer, ..)| buffer).collect()
}

fn every<'a>(regions: impl IntoIterator<Item = &'a Region>, kind: Access) -> impl Iterator<Item = Touch<'a>> {
    regions.into_iter().map(move |region| (region.buffer, kind, TouchedRows::Region(region)))
}

/// Returns for each step the buffers that no later step touches.
pub(super) fn last_touches(schedule: &Schedule, steps: &[Action]) -> Vec<Vec<BufferId>> {
    let mut last: Vec<Option<usize>> = vec![None; schedule.buffers.len()];
    for (index, step) in steps.iter().enumerate() {
        for place in step.places() {
            let work = &schedule.ranks[place.rank].operations[place.operation].work;
            touches(work).iter().for_each(|(buffer, ..)| last[buffer.0] = Some(index));
        }
    }
    let mut done = vec![Vec::new(); steps.len()];
    for (buffer, step) in last.into_iter().enumerate() {
        if let Some(step) = step {
            done[step].push(BufferId(buffer));
        }
    }
    done
}

/// Returns the number of a run's rows that a call writes.
pub(super) fn owned(call: &AttentionCall, run: &Run) -> usize {
    if call.policy == RowPolicy::Overwrite { run.span } else { run.len }
}

/// Returns a region's rows, or the one row of a buffer without rows.
pub(super) fn rows_of(buffer: &Buffer, region: &Region) -> Run {
    if buffer.axes == Axes::Heads { Run::packed(0, 1, 1) } else { region.rows }
}
