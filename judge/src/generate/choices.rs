//! The generator's way to draw numbers from bytes.

use arbitrary::Unstructured;

/// Draws that never fail. Where the bytes run out, every draw is the smallest number.
pub(super) struct Choices<'u, 'a>(pub(super) &'u mut Unstructured<'a>);

impl Choices<'_, '_> {
    pub(super) fn range(&mut self, least: u32, most: u32) -> u32 {
        self.0.int_in_range(least..=most.max(least)).unwrap_or(least)
    }

    pub(super) fn below(&mut self, n: u32) -> u32 {
        self.range(0, n.saturating_sub(1))
    }

    pub(super) fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == n - 1
    }

    pub(super) fn of(&mut self, table: &[u32]) -> u32 {
        let index = self.below(table.len() as u32);
        table.get(index as usize).copied().unwrap_or(0)
    }

    /// Returns 0 for none, n for entry n − 1.
    pub(super) fn entry<T>(&mut self, table: &[T]) -> u32 {
        self.range(0, table.len() as u32)
    }

    pub(super) fn word(&mut self) -> u64 {
        self.0.int_in_range(0..=u64::MAX).unwrap_or(0)
    }

    /// Returns a number that is at most one off a multiple of an entry, and hardly above `reach`.
    pub(super) fn near_multiple(&mut self, table: &[u32], reach: u32) -> u32 {
        let fitting = table.iter().filter(|&&size| size <= reach).count().max(1);
        let size = self.of(table.get(..fitting).unwrap_or(table));
        let multiple = size.saturating_mul(self.range(1, reach / size.max(1)));
        multiple.saturating_add(self.below(3)).saturating_sub(1)
    }
}
