//! [`AttentionCall`]: what one kernel launch receives.
//!
//! A *segment* pairs a run of query rows with runs of key rows; local query `i` sees local key `j` iff
//! `i + lo ≤ j ≤ i + hi`. Everything that a mask, an alignment, a chunk or a gathered buffer says is in those two
//! signed numbers and in the runs: a kernel needs no other rule. A call *owns* the `span` rows of its segments.

use std::ops::Range;

use seamproof_oracle::{Problem, Run, Softmax};

/// Query rows and the key rows that they may see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Query rows; padding rows are `q.padding_rows()`.
    pub q: Run,
    /// Key rows: the real rows of each run, one run after the other, are local keys 0, 1, ….
    pub kv: Vec<Run>,
    /// Smallest visible `j − i`; absent means unbounded.
    pub lo: Option<i64>,
    /// Largest visible `j − i`; absent means unbounded.
    pub hi: Option<i64>,
}

impl Segment {
    /// Local keys, all runs counted.
    pub fn keys(&self) -> usize {
        self.kv.iter().map(|run| run.len).sum()
    }

    /// The local keys that local query `i` sees.
    pub fn visible(&self, i: usize) -> Range<usize> {
        let first = self.lo.map_or(0, |lo| (i as i64).saturating_add(lo)).max(0);
        let last = self.hi.map_or(i64::MAX, |hi| (i as i64).saturating_add(hi)).min(self.keys() as i64 - 1);
        if first > last { 0..0 } else { first as usize..last as usize + 1 }
    }
}

/// What happens to the rows that a call owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowPolicy {
    /// Real rows are overwritten, padding rows become zero (LSE −∞).
    Overwrite,
    /// Real rows are overwritten, padding rows keep every bit.
    Leave,
}

/// One kernel launch over all heads.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionCall {
    /// The segments; a query row is in at most one of them.
    pub segments: Vec<Segment>,
    /// Scale, soft cap and sink.
    pub softmax: Softmax,
    /// What becomes of padding rows.
    pub policy: RowPolicy,
}

/// Why a call cannot be launched on tensors of the given rows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// A run that does not fit its tensor.
    #[error("segment {segment}, {side} rows: {error}")]
    Run {
        /// Which segment.
        segment: usize,
        /// `q` or `kv`.
        side: &'static str,
        /// What is wrong.
        error: seamproof_oracle::RunError,
    },
    /// A query row in two segments.
    #[error("query row {row} is owned by two segments")]
    QueryRowOwnedTwice {
        /// The row.
        row: usize,
    },
}

impl AttentionCall {
    /// The whole problem as one launch on one rank.
    pub fn whole(problem: &Problem) -> AttentionCall {
        let mask = problem.mask;
        let segments = problem.sequences.iter().map(|sequence| {
            let shift = mask.shift(sequence.q.len, sequence.kv.len);
            Segment {
                q: sequence.q,
                kv: vec![sequence.kv],
                lo: mask.left.map(|left| shift - i64::from(left)),
                hi: mask.right.map(|right| shift + i64::from(right)),
            }
        });
        AttentionCall { segments: segments.collect(), softmax: problem.softmax, policy: RowPolicy::Overwrite }
    }

    /// Checks every run against the tensors' rows, and that no query row is owned twice.
    pub fn check(&self, q_rows: usize, kv_rows: usize) -> Result<(), CallError> {
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
