//! Limits that all explanations of a wrong row share: the work that they are worth, and the width that a row must
//! have.

use seamproof_oracle::Problem;

/// Largest work that an explanation is worth: sets of keys, or keys of other heads, times lanes.
pub(super) const WORK_MAX: usize = 1 << 24;

/// Smallest number of lanes of a row that tells anything. In fewer dimensions any error is near some pair's
/// direction, and any row is near some other head's.
pub(super) const LANES_MIN: usize = 8;

/// Returns the KV heads other than a row's own, as many as the work allows.
pub(super) fn other_heads(problem: &Problem, own: usize, work: usize) -> impl Iterator<Item = usize> {
    let most = WORK_MAX / work.max(1);
    (0..problem.heads.kv).filter(move |&other| other != own).take(most)
}
