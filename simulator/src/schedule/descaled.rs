//! Descales of a schedule's launches: what a caller in FP8 tells each of them.
//!
//! *Codes* travel as they are, and a launch reads those of many ranks. Its *descales* are the factors that turn them
//! into values. They belong to sequences and heads of the problem, whatever rank they are on, so every rank knows all
//! of them. A launch counts its segments and its heads from 0; which sequence and which heads of the problem these are
//! follows from the moves that bring the rows to it ([`trace_moves`]).

use seamproof_oracle::{Pass, Problem, Scales, TensorName};

use super::program::{Attend, AttendBackward, Schedule, Work};
use crate::check::{CheckError, Held, HeldRows, Reading, trace_moves};

/// The factors that turn codes of a sequence and query head into values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Descales {
    /// That of q.
    pub q: f32,
    /// That of k.
    pub k: f32,
    /// That of v.
    pub v: f32,
    /// That of dout; 1 in a forward.
    pub dout: f32,
}

impl Descales {
    /// Returns those of a sequence, a query head and its KV head, where each scaling has one for all rows. What has no
    /// scales has 1.
    pub fn of(scales: &Scales, sequence: usize, head: usize, kv_head: usize) -> Descales {
        let of =
            |tensor, head| scales.of(tensor).map_or(1.0, |scales| scales.of(sequence, 0, head, 0) as f32);
        let [k, v] = [TensorName::K, TensorName::V].map(|tensor| of(tensor, kv_head));
        let [q, dout] = [TensorName::Q, TensorName::Dout].map(|tensor| of(tensor, head));
        Descales { q, k, v, dout }
    }
}

/// A query head of a launch's segment, as the launch counts it and as the problem does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchedHead {
    /// The pass of the launch.
    pub pass: Pass,
    /// Rank of the world on which the launch is.
    pub rank: usize,
    /// Index of the segment in the launch's call, or of the run among the rows of a sink's gradient.
    pub segment: usize,
    /// Index of the sequence in the problem.
    pub sequence: usize,
    /// Query head of the launch.
    pub local: usize,
    /// Query head of the problem.
    pub head: usize,
}

impl Schedule {
    /// Gives every launch, and every gradient of a sink, the descales that `of` says. A segment without queries gets
    /// none. An error is the reason why the schedule does not run.
    pub fn descale(
        &mut self,
        problem: &Problem,
        of: impl Fn(LaunchedHead) -> Descales,
    ) -> Result<(), Vec<CheckError>> {
        for launch in trace_moves(problem, self)? {
            let at = launch.at;
            let (pass, segments, told) = match &mut self.ranks[at.rank].operations[at.operation].work {
                Work::Attend(Attend { call, descales, .. }) => (Pass::Forward, call.segments.len(), descales),
                Work::AttendBackward(AttendBackward { call, descales, .. }) => {
                    (Pass::Backward, call.segments.len(), descales)
                }
                Work::SinkGradient { rows, descales, .. } => (Pass::Backward, rows.len(), descales),
                _ => continue,
            };
            *told = vec![Vec::new(); segments];
            for reading in &launch.readings {
                tell(&mut told[reading.segment], (pass, at.rank), reading, &of);
            }
        }
        Ok(())
    }
}

/// Appends the descales of the heads of a reading to those of its segment. Readings come in order of heads.
fn tell(
    told: &mut Vec<Descales>,
    (pass, rank): (Pass, usize),
    reading: &Reading,
    of: impl Fn(LaunchedHead) -> Descales,
) {
    let Some(Held { holds: HeldRows::Positions { sequence, heads, .. }, .. }) = reading.queries.first()
    else {
        return;
    };
    let (segment, sequence) = (reading.segment, *sequence);
    for head in heads.clone() {
        told.push(of(LaunchedHead { pass, rank, segment, sequence, local: told.len(), head }));
    }
}
