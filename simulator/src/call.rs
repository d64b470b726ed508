//! [`AttentionCall`]: the data that one kernel launch receives.
//!
//! A *segment* pairs a run of query rows with runs of key rows. Local query `i` sees local key `j` iff
//! `i + lo ≤ j ≤ i + hi`, where keys before the *prefix* need not meet the upper bound, nor *sink tokens* the lower
//! one. These four numbers and the runs express every mask, alignment, chunk and gathered buffer: a kernel needs no
//! other rule. Each document or chunk of a mask is a segment of its own. A call *owns* the `span` rows of its segments.

use seamproof_oracle::sharding::{Piece, PlacedRun};
use seamproof_oracle::{Band, Intervals, Problem, Run, Sequence, Softmax, runs_of};

use crate::schedule::{Unseeing, segments};

/// Query rows and the key rows that they may see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Query rows; padding rows are `q.padding_rows()`.
    pub q: Run,
    /// Key rows. The real rows of each run, one run after the other, are local keys 0, 1, ….
    pub kv: Vec<Run>,
    /// Smallest visible `j − i`; absent means unbounded.
    pub lo: Option<i64>,
    /// Largest visible `j − i`; absent means unbounded.
    pub hi: Option<i64>,
    /// First local key that `hi` may hide.
    pub prefix: usize,
    /// First local key that `lo` may hide.
    pub sink_tokens: usize,
}

impl Segment {
    /// Returns the number of local keys, over all runs.
    pub fn keys(&self) -> usize {
        self.kv.iter().map(|run| run.len).sum()
    }

    /// Whether any query sees a key.
    pub(crate) fn sees(&self) -> bool {
        let (Segment { lo, hi, prefix, sink_tokens, .. }, keys) = (self, self.keys());
        let seeing = |lo, hi, keys| !Band { lo, hi }.seeing(self.q.len, keys).is_empty();
        let [prefix, sink_tokens] = [prefix, sink_tokens].map(|end| keys.min(*end));
        seeing(*lo, *hi, keys)
            || seeing(*lo, None, prefix)
            || seeing(None, *hi, sink_tokens)
            || seeing(None, None, prefix.min(sink_tokens))
    }

    /// Returns the local keys that local query `i` sees.
    pub fn visible(&self, i: usize) -> Intervals {
        let keys = self.keys() as i64;
        let among = |key: i64| key.clamp(0, keys) as usize;
        let first = self.lo.map_or(0, |lo| (i as i64).saturating_add(lo));
        let reach = |hi| (i as i64).saturating_add(hi).saturating_add(1).max(self.prefix as i64);
        let end = among(self.hi.map_or(keys, reach));
        Intervals::new(0..self.sink_tokens.min(end), among(first)..end)
    }
}

/// Treatment of the rows that a call owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowPolicy {
    /// Real rows are overwritten, and padding rows become zero (LSE −∞).
    Overwrite,
    /// Real rows are overwritten, and padding rows keep every bit.
    Leave,
}

/// One kernel launch over all heads.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionCall {
    /// The segments. A query row is in at most one of them.
    pub segments: Vec<Segment>,
    /// Scale, soft cap and sink.
    pub softmax: Softmax,
    /// Treatment of padding rows.
    pub policy: RowPolicy,
}

/// Reason why a call cannot be launched on tensors of the given rows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// A run that does not fit its tensor.
    #[error("segment {segment}, {side} rows: {error}")]
    Run {
        /// Index of the segment.
        segment: usize,
        /// `q` or `kv`.
        side: &'static str,
        /// The error in the run.
        error: seamproof_oracle::RunLayoutError,
    },
    /// A query row in two segments.
    #[error("query row {row} is owned by two segments")]
    QueryRowOwnedTwice {
        /// The row.
        row: usize,
    },
    /// A scale or a softcap that cannot be a factor or a divisor.
    #[error("the {what} is {value}, and has to be a finite number above 0")]
    Factor {
        /// `scale` or `softcap`.
        what: &'static str,
        /// The value.
        value: String,
    },
}

impl AttentionCall {
    /// Returns the whole problem as one launch on one rank. Keys in pages are read where the table says.
    pub fn whole(problem: &Problem) -> AttentionCall {
        match &problem.pages {
            None => launch(problem, |kv| kv, |_, run| vec![run]),
            Some(pages) => {
                AttentionCall::through(problem, |sequence, position| pages.row(sequence, position))
            }
        }
    }

    /// Returns the whole problem as one launch on one rank that reads each key in the row of a pool which `row`
    /// returns, given the sequence and the position. A launch does not own rows of the pool past the real ones.
    pub fn through(problem: &Problem, row: impl Fn(usize, usize) -> usize) -> AttentionCall {
        let positions = |kv: Run| Run::packed(0, kv.len, kv.len);
        launch(problem, positions, |sequence, Run { offset, len, .. }| {
            runs_of((offset..offset + len).map(|position| row(sequence, position)))
        })
    }

    /// Checks every run against the tensors' rows, the single ownership of every query row, and the scale and softcap.
    pub fn check(&self, q_rows: usize, kv_rows: usize) -> Result<(), CallError> {
        for (what, factor) in [("scale", Some(self.softmax.scale)), ("softcap", self.softmax.softcap)] {
            if let Some(value) = factor.filter(|factor| !(factor.is_finite() && *factor > 0.0)) {
                return Err(CallError::Factor { what, value: value.to_string() });
            }
        }
        let mut owned = vec![false; q_rows];
        for (segment, Segment { q, kv, .. }) in self.segments.iter().enumerate() {
            q.check(q_rows).map_err(|error| CallError::Run { segment, side: "q", error })?;
            for run in kv {
                run.check(kv_rows).map_err(|error| CallError::Run { segment, side: "kv", error })?;
            }
            for row in q.real_rows().chain(q.padding_rows()) {
                if std::mem::replace(&mut owned[row], true) {
                    return Err(CallError::QueryRowOwnedTwice { row });
                }
            }
        }
        Ok(())
    }
}

/// Returns the whole problem as one launch. The keys of each sequence are the run that `keys` makes of its own, and a
/// part of them lies in the runs that `place` returns for it.
fn launch(
    problem: &Problem,
    keys: impl Fn(Run) -> Run,
    place: impl Fn(usize, Run) -> Vec<Run>,
) -> AttentionCall {
    let whole = |run: Run| Piece { start: 0, step: 1, span: run.span, at: 0 };
    let of_sequence = |(sequence, &Sequence { q, kv, .. }): (usize, &Sequence)| {
        let (placed, kv) = (PlacedRun { sequence, piece: whole(q), local: q }, keys(kv));
        let mut made = segments(&problem.mask, (q.len, kv.len), &placed, (&whole(kv), kv), Unseeing::Kept);
        for segment in &mut made {
            segment.kv = segment.kv.drain(..).flat_map(|run| place(sequence, run)).collect();
        }
        made
    };
    let segments = problem.sequences.iter().enumerate().flat_map(of_sequence).collect();
    AttentionCall { segments, softmax: problem.softmax, policy: RowPolicy::Overwrite }
}
