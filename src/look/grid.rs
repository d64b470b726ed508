//! The pairs of query and key of a sequence, counted in tiles.

use std::ops::Range;

use seamproof_oracle::{Band, Sight};

/// Counts of the pairs of one tile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tile {
    /// Pairs that the mask shows.
    pub(super) visible: u64,
    /// Pairs that the mask shows and no launch does.
    pub(super) missing: u64,
    /// Pairs that a launch shows and the mask does not.
    pub(super) extra: u64,
    /// Pairs that are shown more than once.
    pub(super) twice: u64,
    /// Pairs of queries of which nobody knows what they saw.
    pub(super) unclear: u64,
}

/// Field of a [`Tile`].
pub(super) type Field = fn(&mut Tile) -> &mut u64;

/// A rectangle of tiles over all pairs of a sequence. Tiles are squares, cut off at the ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    queries: usize,
    keys: usize,
    /// Queries and keys of a tile.
    pub(super) side: usize,
    tiles: Vec<Tile>,
}

impl Grid {
    /// Returns the grid of `queries` × `keys` pairs, of at most `most` tiles on each side, without any pair counted.
    pub(super) fn new(queries: usize, keys: usize, most: usize) -> Grid {
        let side = queries.max(keys).div_ceil(most).max(1);
        let tiles = vec![Tile::default(); queries.div_ceil(side) * keys.div_ceil(side)];
        Grid { queries, keys, side, tiles }
    }

    /// Counts the pairs of a mask as visible.
    pub(super) fn show(&mut self, sight: &Sight) {
        for row in 0..self.rows() {
            let queries = self.queries_of(row);
            for block in sight.tiles(queries.clone(), 0..0) {
                let own = both(&block.queries, &queries);
                for column in block.keys.start / self.side..block.keys.end.div_ceil(self.side) {
                    let keys = both(&block.keys, &self.keys_of(column));
                    let of_band = |(part, band)| pairs_in(band, own.clone(), both(&keys, &part));
                    self.tile_mut(row, column).visible += block.bands().map(of_band).sum::<u64>();
                }
            }
        }
    }

    /// Counts the pairs of a query with these keys.
    pub(super) fn count(&mut self, query: usize, keys: &Range<usize>, field: Field) {
        if query >= self.queries || keys.is_empty() {
            return;
        }
        let keys = keys.start..keys.end.min(self.keys);
        let last = keys.end.div_ceil(self.side);
        for column in keys.start / self.side..last {
            let tile = self.keys_of(column);
            let shared = tile.end.min(keys.end).saturating_sub(tile.start.max(keys.start));
            *field(self.tile_mut(query / self.side, column)) += shared as u64;
        }
    }

    /// Returns the number of rows of tiles.
    pub(super) fn rows(&self) -> usize {
        self.queries.div_ceil(self.side)
    }

    /// Returns the number of columns of tiles.
    pub(super) fn columns(&self) -> usize {
        self.keys.div_ceil(self.side)
    }

    /// Returns the queries of a row of tiles.
    pub(super) fn queries_of(&self, row: usize) -> Range<usize> {
        row * self.side..((row + 1) * self.side).min(self.queries)
    }

    /// Returns the keys of a column of tiles.
    pub(super) fn keys_of(&self, column: usize) -> Range<usize> {
        column * self.side..((column + 1) * self.side).min(self.keys)
    }

    /// Returns the number of pairs of a tile, visible or not.
    pub(super) fn area(&self, row: usize, column: usize) -> u64 {
        self.queries_of(row).len() as u64 * self.keys_of(column).len() as u64
    }

    /// Returns the counts of a tile.
    pub(super) fn tile(&self, row: usize, column: usize) -> Tile {
        self.tiles[row * self.columns() + column]
    }

    fn tile_mut(&mut self, row: usize, column: usize) -> &mut Tile {
        let at = row * self.columns() + column;
        &mut self.tiles[at]
    }

    /// Returns the counts of all tiles together.
    pub(super) fn total(&self) -> Tile {
        self.tiles.iter().fold(Tile::default(), |sum, tile| Tile {
            visible: sum.visible + tile.visible,
            missing: sum.missing + tile.missing,
            extra: sum.extra + tile.extra,
            twice: sum.twice + tile.twice,
            unclear: sum.unclear + tile.unclear,
        })
    }
}

/// Returns what two ranges share.
fn both(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// Returns the number of pairs of a band in a rectangle.
fn pairs_in(band: Band, queries: Range<usize>, keys: Range<usize>) -> u64 {
    let all = queries.len() as u64 * keys.len() as u64;
    let up_to = |distance: i64| pairs_up_to(distance, &queries, &keys);
    let right = band.hi.map_or(all, up_to);
    let left = band.lo.map_or(0, |lo| up_to(lo - 1));
    right.saturating_sub(left)
}

/// Returns the number of pairs of a rectangle with `j − i ≤ distance`.
fn pairs_up_to(distance: i64, queries: &Range<usize>, keys: &Range<usize>) -> u64 {
    let [first, end] = [queries.start, queries.end].map(|i| i as i64);
    let [left, right] = [keys.start, keys.end].map(|j| j as i64);
    // From query `some` on a key is left of the end, and from query `every` on all are.
    let some = (left - distance).clamp(first, end);
    let every = (right - 1 - distance).clamp(some, end);
    let rising = i128::from(every - some);
    let least = i128::from(some + distance + 1 - left);
    let rising = rising * least + rising * (rising - 1) / 2;
    (rising + i128::from(end - every) * i128::from(right - left)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;

    use seamproof_oracle::{Alignment, Blocks, Borders, Mask};

    /// Test that the counts of tiles are those of the mask's own definition, pair by pair.
    #[test]
    fn tiles_count_what_the_mask_shows() {
        let sides = [None, Some(0), Some(1), Some(3), Some(u32::MAX)];
        let blocks = [
            (None, 0, 0),
            (None, 3, 0),
            (None, 1, 2),
            (Borders::new(&[2, 5]).ok().map(Blocks::Documents), 1, 1),
            (NonZeroU32::new(3).map(Blocks::Chunks), 0, 0),
        ];
        let kinds = [Alignment::TopLeft, Alignment::BottomRight]
            .into_iter()
            .flat_map(|align| blocks.map(|(blocks, prefix, sinks)| (align, blocks, prefix, sinks)));
        for (align, blocks, prefix, sink_tokens) in kinds {
            for (left, right) in sides.into_iter().flat_map(|left| sides.map(|right| (left, right))) {
                let mask = Mask { left, right, align, blocks, prefix, sink_tokens };
                for (queries, keys, most) in
                    (0..8).flat_map(|q| (0..8).flat_map(move |k| (1..5).map(move |most| (q, k, most))))
                {
                    let (mut by_band, mut by_query) =
                        (Grid::new(queries, keys, most), Grid::new(queries, keys, most));
                    by_band.show(&mask.sight(queries, keys));
                    for query in 0..queries {
                        let visible = mask.visible(query, queries, keys);
                        visible
                            .parts()
                            .for_each(|keys| by_query.count(query, &keys, |tile| &mut tile.visible));
                    }
                    assert_eq!(by_band.tiles, by_query.tiles, "{mask:?} {queries} × {keys} in {most}");
                    assert_eq!(by_band.total().visible, mask.pairs(queries, keys));
                }
            }
        }
    }
}
