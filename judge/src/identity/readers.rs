//! The queries that read a key, and the amounts by which errors and roundings move a gradient.

use crate::ladder::evidence::Evidence;

/// A KV head of a sequence and its readers: the queries that see a key, in each query head of the group.
pub(super) struct Readers<'a> {
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) queries: &'a [usize],
    pub(super) group: usize,
}

impl Readers<'_> {
    /// Calls `visit(position, query head)` for each reader.
    pub(super) fn each(&self, mut visit: impl FnMut(usize, usize)) {
        for &position in self.queries {
            (self.kv_head * self.group..(self.kv_head + 1) * self.group)
                .for_each(|head| visit(position, head));
        }
    }
}

/// Returns the queries of a sequence that see a key.
pub(super) fn seeing(evidence: &Evidence<'_>, sequence: usize) -> Vec<usize> {
    let (mask, both) = (&evidence.problem.mask, evidence.problem.sequences[sequence]);
    (0..both.q.len).filter(|&i| !mask.visible(i, both.q.len, both.kv.len).is_empty()).collect()
}

/// Returns the most that an error moves a product with a number of this magnitude, and that the product may lose
/// below the normal range. An unbounded error does not move a product with 0.
pub(super) fn moved_by(magnitude: f64, error: f64) -> f64 {
    let moved = if magnitude == 0.0 { 0.0 } else { magnitude * error };
    moved + f64::from(f32::MIN_POSITIVE)
}
