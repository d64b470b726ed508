//! The mask: the visible keys of each query of a sequence, in at most two intervals.
//!
//! With `lq` real queries and `lk` real keys of a sequence, let `shift = 0` ([`Alignment::TopLeft`]) or
//! `shift = lk − lq` ([`Alignment::BottomRight`]). Query `i` has the *place* `i + shift` among the keys. It sees key
//! `j` iff `0 ≤ j < lk` and
//!
//! - **band:** `place − left ≤ j ≤ place + right`. Both bounds are inclusive and either may be absent (unbounded). A
//!   causal mask is `right = 0`;
//! - **blocks:** no border lies between `place` and `j`: for every border `b`, both are below `b` or neither is.
//!   Borders are those that are listed ([`Blocks::Documents`]), or all multiples of a length ([`Blocks::Chunks`]);
//! - **prefix:** the first `prefix` keys of a block, or of a sequence without borders, are not hidden by `right`;
//! - **sink tokens:** the first `sink_tokens` keys of a block, or of a sequence without borders, are not hidden by
//!   `left`.
//!
//! Only real lengths enter: padding is never visible and never moves the diagonal.
//!
//! Sink tokens are the first tokens of a sequence that a sliding window keeps: StreamingLLM, arXiv 2309.17453. They are
//! keys, unlike the [softmax's sink](crate::Sink), which is a logit. They stay visible beside the window, and a causal
//! mask still hides those that lie past a query's place. Where `left` is absent they change nothing. They are keys of
//! the sequence and not of a call: a step that appends to a KV cache counts them from the cache's first key, in pages
//! as well. Each document is a sequence to its model and has sink tokens of its own, and the same rule holds for
//! chunks. A key that is both in the prefix and a sink token is visible to every query of its block.
//!
//! A query's keys are one interval without sink tokens, and with them two: the sink tokens and the window, which join
//! where they meet. The ends of both grow with the query, and may jump. A query whose place is on a key sees that key.
//! The queries that see a key are therefore neighbours, and without sink tokens so are the keys that some query sees.
//!
//! [`Sight`] alone states this rule, for one sequence. All other code calls [`Mask::sight`] or [`Mask::visible`] to
//! learn what is visible. What knows bands alone calls [`Mask::band`], which other masks do not have.

use std::num::NonZeroU32;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Intervals;

/// The corner of the query × key rectangle that the diagonal runs through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Alignment {
    /// Query 0 sits on key 0.
    TopLeft,
    /// The last real query sits on the last real key, in each sequence by itself.
    BottomRight,
}

/// Largest number of borders of documents.
pub const BORDERS_MAX: usize = 15;

/// The first keys of all documents of a sequence but the first: numbers above 0 that ascend. The last document takes
/// the rest of the sequence, and a border past the last key cuts nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<u32>", into = "Vec<u32>")]
pub struct Borders {
    /// The borders, and in unused places `u32::MAX`, which is past every key.
    at: [u32; BORDERS_MAX],
    count: usize,
}

/// The reason why numbers are no [`Borders`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BordersError {
    /// Too many documents, or one alone, which is a mask without documents.
    #[error("{0} borders of documents; use 1 to {BORDERS_MAX}")]
    Count(usize),
    /// A border that is not past the one before it.
    #[error("border {index} of the documents is {got}; use more than {least}")]
    Order {
        /// The place in the list.
        index: usize,
        /// The border.
        got: u32,
        /// The border before it, or 0.
        least: u32,
    },
}

impl Borders {
    /// Returns borders at these keys.
    pub fn new(keys: &[u32]) -> Result<Borders, BordersError> {
        if keys.is_empty() || keys.len() > BORDERS_MAX {
            return Err(BordersError::Count(keys.len()));
        }
        let mut at = [u32::MAX; BORDERS_MAX];
        let mut least = 0;
        for (index, &got) in keys.iter().enumerate() {
            if got <= least {
                return Err(BordersError::Order { index, got, least });
            }
            (at[index], least) = (got, got);
        }
        Ok(Borders { at, count: keys.len() })
    }

    /// Returns the borders, in order.
    pub fn keys(&self) -> &[u32] {
        &self.at[..self.count]
    }
}

impl TryFrom<Vec<u32>> for Borders {
    type Error = BordersError;

    fn try_from(keys: Vec<u32>) -> Result<Borders, BordersError> {
        Borders::new(&keys)
    }
}

impl From<Borders> for Vec<u32> {
    fn from(borders: Borders) -> Vec<u32> {
        borders.keys().to_vec()
    }
}

/// The parts of a sequence that do not see each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Blocks {
    /// Documents that are packed into a sequence.
    Documents(Borders),
    /// Chunks of one length, counted from the first key.
    Chunks(NonZeroU32),
}

impl Blocks {
    /// Returns the places of the block in which a place lies.
    fn around(&self, place: i64) -> Range<i64> {
        match self {
            Blocks::Documents(borders) => {
                let keys = borders.keys();
                let below = keys.partition_point(|&border| i64::from(border) <= place);
                let at = |index: usize| keys.get(index).map(|&border| i64::from(border));
                below.checked_sub(1).and_then(at).unwrap_or(-FAR)..at(below).unwrap_or(FAR)
            }
            Blocks::Chunks(length) => {
                let length = i64::from(length.get());
                let start = place.div_euclid(length) * length;
                start..start + length
            }
        }
    }
}

/// Stand-in for an absent border: beyond every place, and far from overflow.
const FAR: i64 = 1 << 40;

/// A mask: the visible keys of each query, by the rule in the module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mask {
    /// Keys visible to the left of the diagonal, the diagonal not counted; absent means unbounded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<u32>,
    /// Keys visible to the right of the diagonal; absent means unbounded, 0 means causal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub right: Option<u32>,
    /// The place of the diagonal where query and key lengths differ.
    pub align: Alignment,
    /// The parts of each sequence that do not see each other; absent means one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<Blocks>,
    /// The first keys of each block that the right bound does not hide.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub prefix: u32,
    /// The first keys of each block that the left bound does not hide.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub sink_tokens: u32,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// The pairs of a query `i` and a key `j` of one sequence with `lo ≤ j − i ≤ hi`; an absent bound holds for every pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band {
    /// The least `j − i`.
    pub lo: Option<i64>,
    /// The largest `j − i`.
    pub hi: Option<i64>,
}

impl Band {
    /// Returns the band with queries and keys exchanged.
    pub fn transposed(self) -> Band {
        Band { lo: self.hi.map(|hi| -hi), hi: self.lo.map(|lo| -lo) }
    }

    /// Returns the end, among `keys` keys, of those that do not lie to the right of the band in row `i`.
    pub fn end(self, i: usize, keys: usize) -> usize {
        self.hi.map_or(keys, |hi| (i as i64 + hi + 1).clamp(0, keys as i64) as usize)
    }

    /// Returns the keys that query `i` sees in a sequence of `keys` keys. Empty ranges are `0..0`.
    pub fn keys(self, i: usize, keys: usize) -> Range<usize> {
        let first = self.lo.map_or(0, |lo| (i as i64 + lo).max(0) as usize);
        let end = self.end(i, keys);
        if first < end { first..end } else { 0..0 }
    }

    /// Returns the queries that see any key, in a sequence of `queries` queries and `keys` keys. Empty ranges are
    /// `0..0`.
    pub fn seeing(self, queries: usize, keys: usize) -> Range<usize> {
        let none = keys == 0 || self.lo.zip(self.hi).is_some_and(|(lo, hi)| lo > hi);
        let first = self.hi.map_or(0, |hi| (-hi).max(0) as usize);
        let end = self.transposed().end(keys.saturating_sub(1), queries);
        if none || first >= end { 0..0 } else { first..end }
    }
}

/// The visible pairs of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Sight {
    mask: Mask,
    shift: i64,
    lq: usize,
    lk: usize,
}

/// Queries and keys of one block: query `i` sees key `j` of them iff the band holds `j − i`, without its lower bound if
/// `j < sink_tokens` and without its upper bound if `j < prefix`. No query of a tile sees a key of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The queries.
    pub queries: Range<usize>,
    /// The keys.
    pub keys: Range<usize>,
    /// The band, in positions of the sequence.
    pub band: Band,
    /// The first key that the band's upper bound may hide.
    pub prefix: usize,
    /// The first key that the band's lower bound may hide.
    pub sink_tokens: usize,
}

impl Tile {
    /// Returns the tile's keys in order, in ranges that each have one band: a query sees those of them that it holds.
    pub fn bands(&self) -> impl Iterator<Item = (Range<usize>, Band)> + use<> {
        let Tile { keys, band: Band { lo, hi }, prefix, sink_tokens, .. } = self.clone();
        let [first, second] =
            [prefix.min(sink_tokens), prefix.max(sink_tokens)].map(|cut| cut.clamp(keys.start, keys.end));
        let parts =
            [keys.start..first, first..second, second..keys.end].into_iter().filter(|keys| !keys.is_empty());
        parts.map(move |keys| {
            let band = Band {
                lo: lo.filter(|_| keys.start >= sink_tokens),
                hi: hi.filter(|_| keys.start >= prefix),
            };
            (keys, band)
        })
    }
}

impl Sight {
    fn place(&self, i: usize) -> i64 {
        i as i64 + self.shift
    }

    fn block(&self, place: i64) -> Range<i64> {
        self.mask.blocks.map_or(-FAR..FAR, |blocks| blocks.around(place))
    }

    /// Returns the first key of a block that the right bound may hide.
    fn prefix(&self, block: &Range<i64>) -> i64 {
        after_first(block, self.mask.prefix)
    }

    /// Returns the first key of a block that the left bound may hide.
    fn sink_tokens(&self, block: &Range<i64>) -> i64 {
        after_first(block, self.mask.sink_tokens)
    }

    fn among_keys(&self, place: i64) -> usize {
        place.clamp(0, self.lk as i64) as usize
    }

    fn among_queries(&self, place: i64) -> usize {
        (place - self.shift).clamp(0, self.lq as i64) as usize
    }

    /// Returns the first key that the left bound does not hide from a query at `place`, which lies in `block`, sink tokens
    /// aside.
    fn start_at(&self, place: i64, block: &Range<i64>) -> usize {
        self.among_keys(self.mask.left.map_or(block.start, |left| block.start.max(place - i64::from(left))))
    }

    /// Returns the end of the keys that do not lie to the right of what a query at `place`, which lies in `block`, sees.
    fn end_at(&self, place: i64, block: &Range<i64>) -> usize {
        let reach = |right| (place + i64::from(right) + 1).max(self.prefix(block)).min(block.end);
        self.among_keys(self.mask.right.map_or(block.end, reach))
    }

    /// Returns the first key that the left bound does not hide from query `i`, sink tokens aside.
    fn start(&self, i: usize) -> usize {
        self.start_at(self.place(i), &self.block(self.place(i)))
    }

    /// Returns the end of the keys that do not lie to the right of what query `i` sees.
    pub fn end(&self, i: usize) -> usize {
        self.end_at(self.place(i), &self.block(self.place(i)))
    }

    /// Returns the keys that query `i` sees.
    pub fn keys(&self, i: usize) -> Intervals {
        let (place, block) = (self.place(i), self.block(self.place(i)));
        let (first, end) = (self.among_keys(block.start), self.end_at(place, &block));
        let of_sinks = first..self.among_keys(self.sink_tokens(&block)).min(end);
        Intervals::new(of_sinks, self.start_at(place, &block)..end)
    }

    /// Returns the queries that see key `j`. Empty ranges are `0..0`.
    pub fn queries(&self, j: usize) -> Range<usize> {
        let (key, block) = (j as i64, self.block(j as i64));
        let right = self.mask.right.filter(|_| key >= self.prefix(&block)).map(i64::from);
        let first = right.map_or(block.start, |right| block.start.max(key - right));
        let left = self.mask.left.filter(|_| key >= self.sink_tokens(&block)).map(i64::from);
        let end = left.map_or(block.end, |left| (key + left + 1).min(block.end));
        let (first, end) = (self.among_queries(first), self.among_queries(end));
        if first < end { first..end } else { 0..0 }
    }

    /// Returns the queries that see any key. Empty ranges are `0..0`.
    pub fn seeing(&self) -> Range<usize> {
        let first = first_of(self.lq, |i| self.end(i) > 0);
        let start = |i| {
            if self.mask.sink_tokens > 0 {
                self.among_keys(self.block(self.place(i)).start)
            } else {
                self.start(i)
            }
        };
        let end = first_of(self.lq, |i| start(i) >= self.lk);
        if first < end { first..end } else { 0..0 }
    }

    /// Returns the bounds of the mask's band, which blocks narrow, and a prefix and sink tokens widen.
    pub fn bounds(&self) -> Band {
        self.mask.bounds(self.shift)
    }

    /// Returns the tiles in which one of these queries or keys lies, in order. Every tile has a query or
    /// a key, and all tiles together have each of them once.
    pub fn tiles(&self, queries: Range<usize>, keys: Range<usize>) -> impl Iterator<Item = Tile> + use<> {
        let sight = *self;
        let sides = [self.place(queries.start)..self.place(queries.end), keys.start as i64..keys.end as i64];
        let places = sides.into_iter().filter(|places| !places.is_empty());
        let places = places.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        let of = move |place: i64| (place < places.end).then(|| sight.block(place));
        let blocks = std::iter::successors(of(places.start), move |block| of(block.end));
        blocks
            .map(move |block| sight.tile(&block))
            .filter(|tile| !tile.queries.is_empty() || !tile.keys.is_empty())
    }

    fn tile(&self, block: &Range<i64>) -> Tile {
        Tile {
            queries: self.among_queries(block.start)..self.among_queries(block.end),
            keys: self.among_keys(block.start)..self.among_keys(block.end),
            band: self.bounds(),
            prefix: self.among_keys(if self.mask.right.is_some() { self.prefix(block) } else { block.start }),
            sink_tokens: self.among_keys(if self.mask.left.is_some() {
                self.sink_tokens(block)
            } else {
                block.start
            }),
        }
    }
}

/// Returns the key after the first `count` keys of a block, or the block's end.
fn after_first(block: &Range<i64>, count: u32) -> i64 {
    (block.start.max(0) + i64::from(count)).min(block.end)
}

/// Returns the first number below `end` that holds, where all after it hold too; `end` where none does.
fn first_of(end: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, end);
    while low < high {
        let middle = low + (high - low) / 2;
        (low, high) = if holds(middle) { (low, middle) } else { (middle + 1, high) };
    }
    low
}

impl Mask {
    /// The mask that shows every real key.
    pub const FULL: Mask =
        Mask { left: None, right: None, align: Alignment::TopLeft, blocks: None, prefix: 0, sink_tokens: 0 };
    /// The causal mask with query 0 on key 0.
    pub const CAUSAL: Mask = Mask { right: Some(0), ..Mask::FULL };

    /// Returns the mask of a band.
    pub const fn window(left: Option<u32>, right: Option<u32>, align: Alignment) -> Mask {
        Mask { left, right, align, ..Mask::FULL }
    }

    /// Returns how far the diagonal is moved to the right, for a sequence of `lq` queries and `lk` keys.
    pub fn shift(&self, lq: usize, lk: usize) -> i64 {
        match self.align {
            Alignment::TopLeft => 0,
            Alignment::BottomRight => lk as i64 - lq as i64,
        }
    }

    /// Whether no query sees a key past its place, by the right bound and no other.
    pub fn is_causal(&self) -> bool {
        self.right == Some(0) && self.prefix == 0
    }

    /// Whether the mask is a band: it has neither blocks nor a prefix nor sink tokens.
    pub fn is_band(&self) -> bool {
        self.blocks.is_none() && self.prefix == 0 && self.sink_tokens == 0
    }

    /// Returns the visible pairs of a sequence of `lq` queries and `lk` keys.
    pub fn sight(&self, lq: usize, lk: usize) -> Sight {
        Sight { mask: *self, shift: self.shift(lq, lk), lq, lk }
    }

    /// Returns the visible pairs of a sequence of `lq` queries and `lk` keys as a band; `None` where the mask is none.
    pub fn band(&self, lq: usize, lk: usize) -> Option<Band> {
        self.is_band().then(|| self.bounds(self.shift(lq, lk)))
    }

    fn bounds(&self, shift: i64) -> Band {
        Band {
            lo: self.left.map(|left| shift - i64::from(left)),
            hi: self.right.map(|right| shift + i64::from(right)),
        }
    }

    /// Returns the keys that query `i` sees in a sequence of `lq` queries and `lk` keys.
    pub fn visible(&self, i: usize, lq: usize, lk: usize) -> Intervals {
        self.sight(lq, lk).keys(i)
    }

    /// Returns the number of visible (query, key) pairs of a sequence of `lq` queries and `lk` keys.
    pub fn pairs(&self, lq: usize, lk: usize) -> u64 {
        (0..lq).map(|i| self.visible(i, lq, lk).len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether query `i` sees key `j`, by the rule of the module's text in its most literal form.
    fn sees(mask: &Mask, i: i64, j: i64, lq: i64, lk: i64) -> bool {
        let place = if mask.align == Alignment::BottomRight { i + lk - lq } else { i };
        let borders: Vec<i64> = match mask.blocks {
            None => Vec::new(),
            Some(Blocks::Documents(borders)) => borders.keys().iter().map(|&b| i64::from(b)).collect(),
            Some(Blocks::Chunks(length)) => (-40..40).map(|n| n * i64::from(length.get())).collect(),
        };
        let together = borders.iter().all(|b| (place < *b) == (j < *b));
        let first = borders.iter().copied().filter(|b| (0..=j).contains(b)).max().unwrap_or(0);
        let in_prefix = j < first + i64::from(mask.prefix);
        let is_sink = j < first + i64::from(mask.sink_tokens);
        let above = mask.left.is_none_or(|left| place - i64::from(left) <= j);
        let below = mask.right.is_none_or(|right| j <= place + i64::from(right));
        (0..lk).contains(&j) && together && (above || is_sink) && (below || in_prefix)
    }

    /// Returns masks of every kind whose bounds are small, absent or very large.
    fn masks() -> impl Iterator<Item = Mask> {
        let sides = [None, Some(0), Some(1), Some(2), Some(5), Some(u32::MAX)];
        let documents = |keys: &[u32]| Some(Blocks::Documents(Borders::new(keys).unwrap()));
        let chunks = |length| NonZeroU32::new(length).map(Blocks::Chunks);
        let blocks =
            [None, documents(&[1]), documents(&[2, 3, 5, 90]), chunks(1), chunks(2), chunks(4), chunks(50)];
        let bounds = sides.into_iter().flat_map(move |left| sides.map(move |right| (left, right)));
        bounds.flat_map(move |(left, right)| {
            let aligned = [Alignment::TopLeft, Alignment::BottomRight].into_iter();
            aligned.flat_map(move |align| {
                let counts = |count: u32| [0, 1, 3, u32::MAX].map(move |other| (count, other));
                let cut = move |blocks| {
                    let all = [0, 1, 3, u32::MAX].into_iter().flat_map(counts);
                    all.map(move |(prefix, sink_tokens)| Mask {
                        left,
                        right,
                        align,
                        blocks,
                        prefix,
                        sink_tokens,
                    })
                };
                blocks.into_iter().flat_map(cut)
            })
        })
    }

    #[test]
    fn queries_that_see_a_key_are_the_rule_for_every_small_band() {
        let bounds = || std::iter::once(None).chain((-6..=6).map(Some));
        for band in bounds().flat_map(|lo| bounds().map(move |hi| Band { lo, hi })) {
            let Band { lo, hi } = band;
            let sees = |i: usize, j: usize| {
                let distance = j as i64 - i as i64;
                lo.is_none_or(|lo| lo <= distance) && hi.is_none_or(|hi| distance <= hi)
            };
            for (lq, lk) in (0..5usize).flat_map(|a| (0..5usize).map(move |b| (a, b))) {
                for j in 0..lk {
                    let queries = (0..lq).filter(|&i| sees(i, j));
                    assert!(band.transposed().keys(j, lq).eq(queries), "{band:?} lq {lq} lk {lk} key {j}");
                }
                let seeing = (0..lq).filter(|&i| (0..lk).any(|j| sees(i, j)));
                assert!(band.seeing(lq, lk).eq(seeing), "{band:?} lq {lq} lk {lk}");
            }
        }
    }

    #[test]
    fn the_intervals_are_the_rule_for_every_small_case() {
        for mask in masks() {
            for (lq, lk) in (0..7usize).flat_map(|a| (0..7usize).map(move |b| (a, b))) {
                let sight = mask.sight(lq, lk);
                let rule = |i: usize, j: usize| sees(&mask, i as i64, j as i64, lq as i64, lk as i64);
                for i in 0..lq {
                    let keys = (0..lk).filter(|&j| rule(i, j));
                    assert!(mask.visible(i, lq, lk).eq(keys), "{mask:?} lq {lq} lk {lk} query {i}");
                }
                for j in 0..lk {
                    let queries = (0..lq).filter(|&i| rule(i, j));
                    assert!(sight.queries(j).eq(queries), "{mask:?} lq {lq} lk {lk} key {j}");
                }
                let seeing = (0..lq).filter(|&i| (0..lk).any(|j| rule(i, j)));
                assert!(sight.seeing().eq(seeing), "{mask:?} lq {lq} lk {lk}");
            }
        }
    }

    #[test]
    fn both_ends_grow_and_seen_keys_are_neighbours_without_sink_tokens() {
        for mask in masks() {
            for (lq, lk) in (1..7usize).flat_map(|a| (1..7usize).map(move |b| (a, b))) {
                let sight = mask.sight(lq, lk);
                let ends = |i: usize| (sight.start(i), sight.end(i));
                let grows = |i: usize| ends(i - 1).0 <= ends(i).0 && ends(i - 1).1 <= ends(i).1;
                assert!((1..lq).all(grows), "{mask:?} lq {lq} lk {lk}");
                let seeing = sight.seeing();
                let all = sight.keys(seeing.start).hull().start..sight.keys(seeing.end - 1).hull().end;
                let seen = (0..lk).filter(|&j| !sight.queries(j).is_empty());
                assert!(mask.sink_tokens > 0 || all.eq(seen), "{mask:?} lq {lq} lk {lk}");
            }
        }
    }

    #[test]
    fn tiles_are_the_mask_and_hold_every_row() {
        for mask in masks() {
            for (lq, lk) in (0..6usize).flat_map(|a| (0..6usize).map(move |b| (a, b))) {
                let sight = mask.sight(lq, lk);
                let tiles: Vec<Tile> = sight.tiles(0..lq, 0..lk).collect();
                assert!(
                    tiles.iter().flat_map(|tile| tile.queries.clone()).eq(0..lq),
                    "{mask:?} lq {lq} lk {lk}"
                );
                assert!(
                    tiles.iter().flat_map(|tile| tile.keys.clone()).eq(0..lk),
                    "{mask:?} lq {lq} lk {lk}"
                );
                assert!(!mask.is_band() || tiles.len() <= 1, "{mask:?}");
                for tile in tiles {
                    for i in tile.queries.clone() {
                        let sees = |j: &usize| {
                            let distance = *j as i64 - i as i64;
                            let Band { lo, hi } = tile.band;
                            let below = hi.is_none_or(|hi| distance <= hi);
                            let above = lo.is_none_or(|lo| lo <= distance);
                            (above || *j < tile.sink_tokens) && (below || *j < tile.prefix)
                        };
                        let shown = tile.keys.clone().filter(sees);
                        assert!(sight.keys(i).eq(shown), "{mask:?} lq {lq} lk {lk} query {i} {tile:?}");
                        let held = tile.bands().flat_map(|(keys, band)| {
                            let seen = band.keys(i, lk);
                            keys.filter(move |key| seen.contains(key))
                        });
                        assert!(sight.keys(i).eq(held), "{mask:?} lq {lq} lk {lk} query {i} {tile:?}");
                    }
                }
                let some: Vec<Tile> = sight.tiles(lq / 2..lq, 0..0).collect();
                let all = sight
                    .tiles(0..lq, 0..lk)
                    .filter(|tile| tile.queries.end.min(lq) > tile.queries.start.max(lq / 2));
                assert!(all.eq(some), "{mask:?} lq {lq} lk {lk}");
            }
        }
    }

    #[test]
    fn borders_ascend_and_are_few() {
        let borders = |text: &str| serde_json::from_str::<Blocks>(text).map_err(|error| error.to_string());
        let blocks = Blocks::Documents(Borders::new(&[3, 8]).unwrap());
        assert_eq!(borders(r#"{"documents":[3,8]}"#), Ok(blocks));
        assert_eq!(serde_json::to_string(&blocks).unwrap(), r#"{"documents":[3,8]}"#);
        let Err(error) = borders(r#"{"documents":[3,3]}"#) else { panic!("borders twice the same") };
        assert!(error.contains("border 1 of the documents is 3; use more than 3"), "{error}");
        assert_eq!(Borders::new(&[0]), Err(BordersError::Order { index: 0, got: 0, least: 0 }));
        assert_eq!(Borders::new(&[]), Err(BordersError::Count(0)));
        assert_eq!(Borders::new(&[7; 16]), Err(BordersError::Count(16)));
        assert!(borders(r#"{"chunks":0}"#).is_err());
    }
}
