//! The barriers around a plan that is inside another one: its other streams begin behind the first one, which goes on
//! behind them.

use super::act::{Act, Mark, Op};

const COMPUTE: u8 = 0;

/// Barriers around one pass.
#[derive(Debug)]
pub(super) struct Barrier {
    /// The other streams of the plan inside, in order.
    streams: Vec<u8>,
    /// The first mark.
    first: u32,
    /// The end of the marks.
    pub(super) end: u32,
}

impl Barrier {
    /// Returns barriers with the next marks.
    pub(super) fn new(next: &mut u32, streams: &[u8]) -> Barrier {
        let first = *next;
        *next += 1 + streams.len() as u32;
        Barrier { streams: streams.to_vec(), first, end: *next }
    }

    /// Lets other streams begin.
    pub(super) fn begin(&self, ops: &mut Vec<Op>) {
        let mark = Mark(self.first);
        if !self.streams.is_empty() {
            ops.push(Op { stream: COMPUTE, act: Act::Record(mark) });
        }
        ops.extend(self.streams.iter().map(|stream| Op { stream: *stream, act: Act::Wait(mark) }));
    }

    /// Waits for their ends.
    pub(super) fn end(&self, ops: &mut Vec<Op>) {
        for (stream, number) in self.streams.iter().zip(self.first + 1..) {
            ops.push(Op { stream: *stream, act: Act::Record(Mark(number)) });
            ops.push(Op { stream: COMPUTE, act: Act::Wait(Mark(number)) });
        }
    }
}
