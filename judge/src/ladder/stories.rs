//! What explanations of a wrong row have in common: the work that they are worth, and how wide a row must be for them.

use seamproof_oracle::Problem;

/// Work that an explanation is worth: sets of keys, or keys of other heads, times lanes.
pub(super) const WORK_MAX: usize = 1 << 24;

/// Fewest lanes of a row that tells something: in fewer dimensions any error is near some pair's direction, and any row near some
/// other head's.
pub(super) const LANES_MIN: usize = 8;

/// The KV heads beside a row's own, as many as are worth the work of each.
pub(super) fn other_heads(problem: &Problem, own: usize, work: usize) -> impl Iterator<Item = usize> {
    let most = WORK_MAX / work.max(1);
    (0..problem.heads.kv).filter(move |&other| other != own).take(most)
}
