//! Symbolic execution: each operation as a function of [`Symbol`](super::symbol::Symbol)s.
//!
//! An operation that reads unfit rows is an error at that place. Later operations take the remaining rows unchanged:
//! one mistake is one error. A launch is taken as its call says it; the table that its device reads must say the same.
//! There are four kinds of work. *Moves* (`moves.rs`) carry symbols of any kind. *Layers* and
//! rotations (`linear.rs`) change the form of rows. *Launches* (`attend.rs`) make patches from rows. *Sums* (`sums.rs`,
//! and `sink.rs` for the sink) collect the patches of both sides. A result must be whole (`whole.rs`) for the backward
//! and at the end; only there is it proved that the patches are exactly the visible pairs.

use super::error::OperationId;
use super::machine::Machine;
use super::order::Action;
use crate::helpers::SegmentRow;
use crate::schedule::{Region, Work};
use crate::{AttentionCall, Segment};

impl Machine<'_> {
    /// Checks that a launch's table says the segments of its call.
    fn expect_segments(&mut self, place: OperationId, table: Option<&Region>, call: &AttentionCall) {
        if let Some(table) = table {
            self.expect_table(place, table, &call.segments, Segment::clone);
        }
    }

    pub(super) fn step(&mut self, step: &Action) {
        match step {
            Action::Local(place) => self.local(*place),
            Action::Message(send, receive) => self.message(*send, *receive),
            Action::Collective(places) => self.collective(places),
        }
    }

    fn local(&mut self, place: OperationId) {
        match self.work(place) {
            Work::Attend(attend) => {
                self.expect_segments(place, attend.table.as_ref(), &attend.call);
                self.attend(place, attend);
            }
            Work::AttendBackward(attend) => {
                self.expect_segments(place, attend.table.as_ref(), &attend.call);
                self.attend_backward(place, attend);
            }
            Work::MakeSegments { to, from } => {
                let rows = from.rows().unwrap_or_default();
                self.tables.insert(*to, rows.iter().map(SegmentRow::segment).collect());
            }
            Work::CopyValid { from, to, table, rows } => {
                self.expect_table(place, table, rows, |segment| (segment.q, segment.q));
                self.copy(*from, *to, rows);
            }
            Work::Merge(merge) => self.merge(place, merge),
            Work::ApplySink { sink, out, lse, rows } => self.apply_sink(place, *sink, [*out, *lse], rows),
            Work::SinkGradient { sink, dout, out, lse, dsink, rows, .. } => {
                self.sink_gradient(place, [*sink, *dout, *out, *lse], *dsink, rows);
            }
            Work::Accumulate { from, to, rows } => self.accumulate(place, *from, *to, rows),
            Work::Copy { from, to, rows } => self.copy(*from, *to, rows),
            Work::Linear { layer, heads, from, to, rows } => {
                self.linear(place, *layer, heads, [*from, *to], rows);
            }
            Work::Rotate { buffer, rows, inverse } => self.rotate(*buffer, rows, *inverse),
            Work::Fill { to, rows, value } => self.fill(*to, rows, *value),
            _ => {}
        }
    }
}
