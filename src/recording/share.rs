//! Shares: a recording is judged in parts that fit into memory.
//!
//! A KV head with its query heads is attention by itself. So a recording is judged by *shares*, each some KV heads and
//! their query heads: as many as fit, often all. For each share the rank files are read once more, one after the other,
//! and of each only the share's heads are kept. Memory thus grows with the rows of one share and with one rank's file.
//! Ranks of a region deal heads among them, so that all heads are one share there.

use std::ops::Range;

use seamproof_judge::finding::Finding;
use seamproof_judge::ladder::ELEMENTS_MAX;
use seamproof_judge::subject::TensorName;
use seamproof_oracle::{Heads, Problem, ProblemError, ProblemFields, Side};

/// Largest number of tensor elements of one KV head, where a sample of rows is judged. Each takes 4 bytes; what the
/// oracle widens of them at once is little.
pub const SAMPLED_ELEMENTS_MAX: u64 = 3 << 29;

/// Neighbouring KV heads and their query heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// First KV head.
    pub first: usize,
    /// Number of KV heads.
    pub count: usize,
}

impl Share {
    /// No head at all: a file is then checked, and nothing of it is kept.
    pub const NONE: Share = Share { first: 0, count: 0 };

    /// Returns the share that has all heads.
    pub fn all(problem: &Problem) -> Share {
        Share { first: 0, count: problem.heads.kv }
    }

    /// Returns the heads of a side.
    pub(super) fn heads(self, problem: &Problem, side: Side) -> Range<usize> {
        let size = if side == Side::Q { problem.group() } else { 1 };
        self.first * size..(self.first + self.count) * size
    }

    /// Returns the problem of these heads alone.
    pub(super) fn problem(self, problem: &Problem) -> Result<Problem, ProblemError> {
        let heads = Heads { q: self.count * problem.group(), kv: self.count };
        Problem::new(ProblemFields { heads, ..problem.clone().into() })
    }

    /// Returns a finding about the problem of these heads as one about the whole.
    pub(super) fn whole(self, problem: &Problem, finding: Finding) -> Finding {
        let side = finding.tensor.map_or(Side::Q, TensorName::side);
        let first = self.heads(problem, side).start;
        let mut finding = finding;
        finding.place.head = finding.place.head.map(|head| head + first);
        if first > 0 && finding.what.contains("head ") {
            finding.what += &format!(" (heads in these words count from KV head {})", self.first);
        }
        finding
    }
}

/// Returns the shares of a problem, in order.
pub(super) fn shares(problem: &Problem) -> Vec<Share> {
    let heads = problem.heads.kv;
    if problem.parallel.region > 1 {
        return vec![Share::all(problem)];
    }
    let of_head = (problem.elements() / heads as u64).max(1);
    let count = (ELEMENTS_MAX / of_head).clamp(1, heads as u64) as usize;
    (0..heads).step_by(count).map(|first| Share { first, count: count.min(heads - first) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_hold_as_many_heads_as_fit_and_each_head_once() {
        let of = |rows: usize| {
            let fields =
                ProblemFields { heads: Heads { q: 12, kv: 6 }, ..ProblemFields::packed(&[(rows, rows)], 64) };
            shares(&Problem::new(fields).expect("a problem"))
        };
        assert_eq!(of(100), [Share { first: 0, count: 6 }]);
        // A KV head has 2 · 6 · 64 elements a row in a backward, and 2²⁷ elements hold five heads of this length.
        assert_eq!(of(33_000), [Share { first: 0, count: 5 }, Share { first: 5, count: 1 }]);
        assert_eq!(of(1 << 20).len(), 6);
    }
}
