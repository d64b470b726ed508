//! Covers that have been looked at.

use std::collections::HashMap;

use super::symbol::Cover;

/// A cover's hash, whether its rows are keys, the sequence, and the rows' first position, step and number.
pub(super) type CoverKey = (u64, bool, usize, usize, usize, usize);

/// Covers that have been looked at.
#[derive(Debug, Default)]
pub(super) struct ProvedCovers {
    /// Exact ones, and their pairs. One for each claim: forgetting another costs a second proof, no more.
    pub(super) exact: HashMap<CoverKey, (Cover, u64)>,
    /// The others, each of which is an error.
    pub(super) wrong: HashMap<CoverKey, Vec<Cover>>,
}

impl ProvedCovers {
    /// The pairs of a cover that has been looked at; 0 if it is not exact.
    pub(super) fn find(&self, claim: &CoverKey, cover: &Cover) -> Option<u64> {
        if let Some((_, pairs)) = self.exact.get(claim).filter(|(other, _)| cover.alike(other)) {
            return Some(*pairs);
        }
        self.wrong.get(claim)?.iter().any(|wrong| wrong.same(cover)).then_some(0)
    }
}
