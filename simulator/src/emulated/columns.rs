//! [`Columns`]: tiles of keys or values as the products of a tile of queries take them.

use std::ops::Range;

use crate::{GuardedTensor, Real};

/// Transposed tiles of keys or values of one head. Each tile is made once for all tiles of queries.
pub(super) struct Columns<T> {
    /// The head.
    pub(super) head: usize,
    /// Number of keys of a tile.
    size: usize,
    /// Tiles in order. A tile that no query has met is empty.
    tiles: Vec<Vec<T>>,
}

impl<T: Real> Columns<T> {
    /// Returns an empty cache for tiles of `size` keys.
    pub(super) fn new(size: usize) -> Columns<T> {
        Columns { head: 0, size: size.max(1), tiles: Vec::new() }
    }

    /// Sets the head of the next tiles.
    pub(super) fn turn_to(&mut self, head: usize) {
        if head != self.head {
            self.tiles.clear();
        }
        self.head = head;
    }

    /// Returns the tile of these columns of a segment. The segment's rows are `rows`.
    pub(super) fn tile(&mut self, tensor: &GuardedTensor<T>, rows: &[usize], columns: &Range<usize>) -> &[T] {
        let index = columns.start / self.size;
        if self.tiles.len() <= index {
            self.tiles.resize_with(index + 1, Vec::new);
        }
        let tile = &mut self.tiles[index];
        if tile.is_empty() {
            *tile = transposed(tensor, &rows[columns.clone()], self.head);
        }
        tile
    }
}

/// Returns the given rows of one head as `[dim][rows]`. The lane is outermost, and products run along keys.
fn transposed<T: Real>(tensor: &GuardedTensor<T>, rows: &[usize], head: usize) -> Vec<T> {
    let dim = tensor.shape()[2];
    let mut columns = vec![T::ZERO; dim * rows.len()];
    for (j, &row) in rows.iter().enumerate() {
        for (c, &value) in tensor.lane(row, head).iter().enumerate() {
            columns[c * rows.len() + j] = value;
        }
    }
    columns
}
