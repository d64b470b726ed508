//! Limits that all explanations of a wrong row share: the work that they are worth, the width that a row must have, and
//! what they may leave of its error.

use seamproof_oracle::Problem;

/// Largest work that an explanation is worth: sets of keys, or keys of other heads, times lanes.
pub(super) const WORK_MAX: usize = 1 << 24;

/// Smallest number of lanes of a row that tells anything. In fewer dimensions any error is near some pair's
/// direction, and any row is near some other head's.
pub(super) const LANES_MIN: usize = 8;

/// Largest share of an error's size that may be left where another KV head, the rows of a rank, or a mistake in the whole
/// case explains it: the roundings of a 16-bit format.
pub(super) const REST_MAX: f64 = 1.0 / 16.0;

/// Returns the KV heads other than a row's own, as many as the work allows.
pub(super) fn other_heads(problem: &Problem, own: usize, work: usize) -> impl Iterator<Item = usize> {
    let most = WORK_MAX / work.max(1);
    (0..problem.heads.kv).filter(move |&other| other != own).take(most)
}
