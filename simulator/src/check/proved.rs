//! Covers for which a proof has been tried, and the outcomes.

use std::collections::HashMap;

use super::symbol::Cover;

/// A claim about a cover: its hash, whether its rows are keys, the sequence, and the rows' first position, step and
/// number.
pub(super) type CoverKey = (u64, bool, usize, usize, usize, usize);

/// Covers for which a proof has been tried.
#[derive(Debug, Default)]
pub(super) struct ProvedCovers {
    /// Exact covers and their numbers of pairs, one cover for each claim. A claim that is replaced only costs a second
    /// proof.
    pub(super) exact: HashMap<CoverKey, (Cover, u64)>,
    /// Covers that are not exact. Each is an error.
    pub(super) wrong: HashMap<CoverKey, Vec<Cover>>,
}

impl ProvedCovers {
    /// Returns the number of pairs of a cover for which a proof has been tried, or 0 if it is not exact; `None` for a
    /// new cover.
    pub(super) fn find(&self, claim: &CoverKey, cover: &Cover) -> Option<u64> {
        if let Some((_, pairs)) = self.exact.get(claim).filter(|(other, _)| cover.alike(other)) {
            return Some(*pairs);
        }
        self.wrong.get(claim)?.iter().any(|wrong| wrong.same(cover)).then_some(0)
    }
}
