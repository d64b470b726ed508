//! Traces of launches: the rows of every segment as positions of the problem's sequences.
//!
//! A trace uses the checker's symbolic execution, which follows rows through messages, collectives and copies. Just
//! before each launch, it records the content of the launch's queries and keys. It judges nothing.

use std::ops::Range;

use seamproof_oracle::{Positions, Problem, Run, TensorName};

use super::cover::range_of;
use super::error::{CheckError, Errors, OperationId};
use super::machine::Machine;
use super::order::{Action, steps, steps_so_far};
use super::shape;
use super::symbol::{SymbolRows, What};
use crate::Segment;
use crate::schedule::{BufferId, Layer, Schedule, Work};

/// A launch of attention, forward or backward, or a gradient of a sink ([`trace_moves`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedLaunch {
    /// The operation of the launch.
    pub at: OperationId,
    /// The rows that its segments read, for each band of heads whose rows are alike.
    pub readings: Vec<Reading>,
}

/// Rows that one segment reads, for some heads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Index of the segment in the call.
    pub segment: usize,
    /// Queries of the segment, in order.
    pub queries: Vec<Held>,
    /// Keys of the segment, in order, over all runs.
    pub keys: Vec<Held>,
}

/// Rows of a segment, from local row `at` on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Index of the first row among the segment's real queries or keys.
    pub at: usize,
    /// Number of rows.
    pub len: usize,
    /// Content of the rows.
    pub holds: HeldRows,
}

/// Content of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeldRows {
    /// The positions `start, start + step, …` of a sequence.
    Positions {
        /// Index of the sequence.
        sequence: usize,
        /// The first position.
        start: usize,
        /// Distance from one position to the next.
        step: usize,
        /// Heads of the problem's tensor.
        heads: Range<usize>,
    },
    /// No real row of q (or k), but padding, nothing yet or another tensor.
    Other(String),
}

/// Returns every launch of a schedule in an order in which they may run, or the reason why the schedule does not run.
pub fn trace(problem: &Problem, schedule: &Schedule) -> Result<Vec<TracedLaunch>, Vec<CheckError>> {
    traced(problem, schedule, false, |_| true)
}

/// Returns every launch like [`trace`], but does not follow sums, among which are launches' results. This is enough if
/// no sum makes queries or keys, as in every right schedule. Gradients of a sink are among them, each run of their rows
/// as a segment without keys.
pub fn trace_moves(problem: &Problem, schedule: &Schedule) -> Result<Vec<TracedLaunch>, Vec<CheckError>> {
    traced(problem, schedule, true, |work| match work {
        Work::Copy { .. } | Work::CopyValid { .. } | Work::Fill { .. } | Work::Rotate { .. } => true,
        Work::Linear { layer, .. } => *layer == Layer::Column,
        Work::Send { .. } | Work::Recv { .. } | Work::AllGather { .. } | Work::AllToAll { .. } => true,
        _ => false,
    })
}

/// Returns what the ranks do in an order in which it may happen, and the operations that never begin since they wait
/// for each other. An error is the reason why no rank begins.
pub fn actions(
    problem: &Problem,
    schedule: &Schedule,
) -> Result<(Vec<Action>, Vec<OperationId>), Vec<CheckError>> {
    let mut errors = Errors::default();
    shape::check(problem, schedule, &mut errors);
    if !errors.0.is_empty() {
        return Err(errors.0);
    }
    let Some(done) = steps_so_far(schedule, &mut errors) else { return Err(errors.0) };
    let stuck = |error: &CheckError| match error {
        CheckError::Deadlock { at, .. } => Some(*at),
        _ => None,
    };
    Ok((done, errors.0.iter().filter_map(stuck).collect()))
}

/// Returns every launch, and every gradient of a sink where they are asked for. Only the work that `follows` accepts is
/// followed.
fn traced(
    problem: &Problem,
    schedule: &Schedule,
    has_sinks: bool,
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
            launches.extend(has_sinks.then(|| machine.gradient_of_sink(*place)).flatten());
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
                let queries = self.held(TensorName::Q, q, std::slice::from_ref(queries), &heads.q);
                let mut keys = self.held(TensorName::K, k, kv, &heads.kv);
                self.name_shared(&queries, &mut keys);
                Reading { segment, queries, keys }
            })
        });
        Some(TracedLaunch { at, readings: of_band.collect() })
    }

    fn gradient_of_sink(&self, at: OperationId) -> Option<TracedLaunch> {
        let Work::SinkGradient { dout, rows, .. } = self.work(at) else { return None };
        let of_band = self.bands(&[(*dout, 0)], self.heads(*dout)).into_iter().flat_map(|heads| {
            let of_run = move |(segment, run): (usize, &Run)| {
                let queries = self.held(TensorName::Dout, *dout, std::slice::from_ref(run), &heads);
                Reading { segment, queries, keys: Vec::new() }
            };
            rows.iter().enumerate().map(of_run)
        });
        Some(TracedLaunch { at, readings: of_band.collect() })
    }

    /// Names keys as those of the queries' sequence, if it shares them.
    fn name_shared(&self, queries: &[Held], keys: &mut [Held]) {
        let Some(HeldRows::Positions { sequence: own, .. }) = queries.first().map(|held| &held.holds) else {
            return;
        };
        for Held { len, holds, .. } in keys {
            if let HeldRows::Positions { sequence, start, step, .. } = holds
                && self.shares(
                    *own,
                    *sequence,
                    range_of(&Positions { start: *start, step: *step, len: *len }),
                )
            {
                *sequence = *own;
            }
        }
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
