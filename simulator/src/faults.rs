//! Planted bugs, each an edit of an [`AttentionCall`]; no production code knows of them.

use crate::AttentionCall;

/// A planted bug.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Its name in reports.
    pub name: &'static str,
    /// What it imitates.
    pub story: &'static str,
    /// The edit.
    pub edit: fn(&mut AttentionCall),
}

/// The campaign's canary: every window's left bound one key too narrow, a causal bound one key too narrow.
///
/// Imitates the off-by-one windows of TransformerEngine pull request 1212, which lie below the tolerance of the tests
/// that were meant to guard them.
pub const WINDOW_OFF_BY_ONE: Fault = Fault {
    name: "window-off-by-one",
    story: "each bounded side of the mask is one key too narrow (TransformerEngine pull request 1212)",
    edit: |call| {
        for segment in &mut call.segments {
            segment.lo = segment.lo.map(|lo| lo + 1);
            segment.hi = segment.hi.map(|hi| hi - 1);
        }
    },
};
