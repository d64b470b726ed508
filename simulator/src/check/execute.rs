//! Symbolic execution: each operation as a function of [`Symbol`](super::symbol::Symbol)s.
//!
//! An operation that reads unfit rows is an error at that place. Later operations take the remaining rows unchanged:
//! one mistake is one error. There are four kinds of work. *Moves* (`moves.rs`) carry symbols of any kind. *Layers* and
//! rotations (`linear.rs`) change the form of rows. *Launches* (`attend.rs`) make patches from rows. *Sums* (`sums.rs`,
//! and `sink.rs` for the sink) collect the patches of both sides. A result must be whole (`whole.rs`) for the backward
//! and at the end; only there is it proved that the patches are exactly the visible pairs.

use super::error::OperationId;
use super::machine::Machine;
use super::order::Action;
use crate::schedule::Work;

impl Machine<'_> {
    pub(super) fn step(&mut self, step: &Action) {
        match step {
            Action::Local(place) => self.local(*place),
            Action::Message(send, receive) => self.message(*send, *receive),
            Action::Collective(places) => self.collective(places),
        }
    }

    fn local(&mut self, place: OperationId) {
        match self.work(place) {
            Work::Attend(attend) => self.attend(place, attend),
            Work::AttendBackward(attend) => self.attend_backward(place, attend),
            Work::Merge(merge) => self.merge(place, merge),
            Work::ApplySink { sink, out, lse, rows } => self.apply_sink(place, *sink, [*out, *lse], rows),
            Work::SinkGradient { sink, dout, out, lse, dsink, rows } => {
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
