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

/// The campaign's canary: the left bound of each window is one key too narrow.
///
/// TransformerEngine pull request 1212: below the tolerance of the very tests that were meant to guard it.
pub const WINDOW_OFF_BY_ONE: Fault = Fault {
    name: "window-off-by-one",
    story: "the left bound of each window is one key too narrow (TransformerEngine pull request 1212)",
    edit: |call| {
        for segment in &mut call.segments {
            segment.lo = segment.lo.map(|lo| lo + 1);
        }
    },
};
