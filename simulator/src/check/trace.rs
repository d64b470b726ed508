//! What launches read: the rows of every segment as positions of the problem's sequences.
//!
//! The same symbolic execution as the checker's, which also follows rows through messages, collectives and copies; this
//! only looks, just before each launch, at what its queries and keys are. It judges nothing.

use std::ops::Range;

use seamproof_oracle::{Problem, Run, TensorName};

use super::error::{CheckError, Errors, OperationId};
use super::machine::Machine;
use super::order::{Action, steps};
use super::shape;
use super::symbol::{SymbolRows, What};
use crate::Segment;
use crate::schedule::{BufferId, Layer, Schedule, Work};

/// A launch of attention, forward or backward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedLaunch {
    /// Where it is.
    pub at: OperationId,
    /// What its segments read, for each band of heads whose rows are alike.
    pub readings: Vec<Reading>,
}

/// What one segment reads, for some heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Index of the segment in the call.
    pub segment: usize,
    /// Its queries, in order.
    pub queries: Vec<Held>,
    /// Its keys, in order, all runs counted.
    pub keys: Vec<Held>,
}

/// Rows of a segment, from local row `at` on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The first, among the segment's real queries or keys.
    pub at: usize,
    /// Rows.
    pub len: usize,
    /// What they hold.
    pub holds: HeldRows,
}

/// What rows hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeldRows {
    /// The positions `start, start + step, …` of a sequence.
    Positions {
        /// Index of the sequence.
        sequence: usize,
        /// The first.
        start: usize,
        /// From one to the next.
        step: usize,
        /// Heads of the problem's tensor.
        heads: Range<usize>,
    },
    /// No real row of q (or k): padding, nothing yet, another tensor.
    Other(String),
}

/// Every launch of a schedule, in an order in which they may run, or why it does not run.
pub fn trace(problem: &Problem, schedule: &Schedule) -> Result<Vec<TracedLaunch>, Vec<CheckError>> {
    traced(problem, schedule, |_| true)
}

/// The same where no sum makes queries or keys, as no right schedule's: sums, launches' results among them, are not
/// followed.
pub fn trace_moves(problem: &Problem, schedule: &Schedule) -> Result<Vec<TracedLaunch>, Vec<CheckError>> {
    traced(problem, schedule, |work| match work {
        Work::Copy { .. } | Work::Fill { .. } | Work::Rotate { .. } => true,
        Work::Linear { layer, .. } => *layer == Layer::Column,
        Work::Send { .. } | Work::Recv { .. } | Work::AllGather { .. } | Work::AllToAll { .. } => true,
        _ => false,
    })
}

/// Every launch, where some work is followed.
fn traced(
    problem: &Problem,
    schedule: &Schedule,
    follows: impl Fn(&Work) -> bool,
) -> Result<Vec<TracedLaunch>, Vec<CheckError>> {
    let mut errors = Errors::default();
    shape::check(problem, schedule, &mut errors);
    if !errors.0.is_empty() {
        return Err(errors.0);
    }
    let Some(steps) = steps(schedule, &mut errors) else { return Err(errors.0) };
    let mut machine = Machine::new(problem, schedule, errors);
    let mut launches = Vec::new();
    for step in &steps {
        if let Action::Local(place) = step {
            launches.extend(machine.launch(*place));
        }
        if step.places().next().is_some_and(|place| follows(machine.work(*place))) {
            machine.step(step);
        }
    }
    Ok(launches)
}

impl Machine<'_> {
    fn launch(&self, at: OperationId) -> Option<TracedLaunch> {
        let (segments, q, k) = match self.work(at) {
            Work::Attend(attend) => (&attend.call.segments, attend.q, attend.k),
            Work::AttendBackward(attend) => (&attend.call.segments, attend.q, attend.k),
            _ => return None,
        };
        let bands = self.launch_heads(&[q], &[k]);
        let of_band = bands.iter().flat_map(|heads| {
            segments.iter().enumerate().map(|(segment, runs)| {
                let Segment { q: queries, kv, .. } = runs;
                Reading {
                    segment,
                    queries: self.held(TensorName::Q, q, std::slice::from_ref(queries), &heads.q),
                    keys: self.held(TensorName::K, k, kv, &heads.kv),
                }
            })
        });
        Some(TracedLaunch { at, readings: of_band.collect() })
    }

    fn held(&self, tensor: TensorName, buffer: BufferId, runs: &[Run], heads: &Range<usize>) -> Vec<Held> {
        let held = |SymbolRows { at, len, symbol }: SymbolRows| {
            let holds = match symbol.tokens() {
                Some(tokens) if tokens.what == What::Input(tensor) => {
                    let (first, sequence) = (tokens.head.max(0) as usize, tokens.sequence);
                    let line = tokens.line(len);
                    let heads = first..first + heads.len();
                    HeldRows::Positions { sequence, start: line.start, step: line.step, heads }
                }
                _ => HeldRows::Other(symbol.to_string()),
            };
            Held { at, len, holds }
        };
        self.read(buffer, runs, heads).into_iter().map(held).collect()
    }
}
