//! The step of a ring between stripes of several rows: the pairs of rows that the mask shows, as a few bands.
//!
//! Let stripes of `w` rows be dealt round `cp` ≥ 2 ranks. Row `s·w + a` of rank r, with `a < w`, has position
//! `(s·cp + r)·w + a`. A query of rank r and a key of rank o, `g` stripes and `e = b − a` rows apart, are therefore
//! `d = g·cp·w + (o − r)·w + e` positions apart, and `g·w + e` rows. An upper bound of positions, `d ≤ hi`, meets at
//! most one g in part, because `|e| < w` and `cp·w > 2·w − 2`: let G be the largest g that it shows any pair of, and
//! `e ≤ E` what it shows of it. Then it shows
//!
//! - the *whole band* of rows `≤ G·w + min(E, 0)`, where no stripe has to be told from another, and
//! - an *edge*: pairs of stripes of one distance, each with one band. These are the stripes G apart with `0 < e ≤ E`;
//!   or, where E < 0, those G − 1 apart with `e > w + E`.
//!
//! A lower bound is the same with all signs changed. Both together show the band of rows that both whole bands have,
//! the upper edge as far as the lower bound shows it, and the lower edge as far as it lies in the upper whole band. No
//! two of these three share a pair. Each is a *part* of a step, and one launch of its own, forward and backward: a part
//! has each query and each key in one segment. There are as many launches as before where the bounds lie between
//! stripes, at most three times as many elsewhere, and never more for more rows.
//!
//! A table says the parts of a band: a row of the whole band for each sequence, and for each edge a row for each stripe
//! and sequence.
//!
//! Keys that a prefix or sink tokens keep have fewer bounds than others. They are a range of keys, in one band with the
//! others (see [`Segment`]) and in edges of their own.

use std::ops::Range;

use seamproof_oracle::{Band, Mask, Run, Tile};

use super::build::part;
use crate::Segment;
use crate::helpers::SegmentRow;
use crate::shard::ShardedSide;

/// Number of parts of a step: the band, and two edges for each of the three ranges of keys with bounds of their own.
pub(super) const PARTS: usize = 7;

/// Queries of a rank and keys of another, in stripes of one width.
#[derive(Clone, Copy)]
struct Stripes {
    /// Rows of a stripe.
    width: i64,
    /// Positions from a stripe to the next of the same rank.
    period: i64,
    /// Positions from the first query to the first key.
    apart: i64,
}

/// Pairs of stripes of one distance, and a band of rows: pairs at the edge of a bound.
#[derive(Clone, Copy)]
struct Edge {
    /// Number of stripes from the query's to the key's.
    distance: i64,
    /// Smallest and largest number of rows from the query to the key.
    rows: [i64; 2],
}

impl Edge {
    /// Returns the edge with queries and keys exchanged.
    fn transposed(self) -> Edge {
        let [first, last] = self.rows;
        Edge { distance: -self.distance, rows: [-last, -first] }
    }
}

impl Stripes {
    fn of(queries: &Side, keys: &Side) -> Stripes {
        let (width, period) = (queries.width as i64, queries.period as i64);
        Stripes { width, period, apart: keys.first - queries.first }
    }

    fn transposed(self) -> Stripes {
        Stripes { apart: -self.apart, ..self }
    }

    /// Returns the last row of the whole band that an upper bound of positions shows, and the rest.
    fn below(self, hi: i64) -> (i64, Edge) {
        let Stripes { width, period, apart } = self;
        let distance = (hi - apart + width - 1).div_euclid(period);
        let inside = (hi - apart - distance * period).min(width - 1);
        let last = distance * width + inside.min(0);
        let edge = match inside {
            0.. => Edge { distance, rows: [last + 1, last + inside] },
            _ => Edge { distance: distance - 1, rows: [last + 1, distance * width - 1] },
        };
        (last, edge)
    }

    /// Returns the first row of the whole band that a lower bound of positions shows, and the rest.
    fn above(self, lo: i64) -> (i64, Edge) {
        let (last, edge) = self.transposed().below(-lo);
        (-last, edge.transposed())
    }

    /// Returns a band of positions as the band of rows that needs no edge.
    fn whole(self, Band { lo, hi }: Band) -> Band {
        Band { lo: lo.map(|lo| self.above(lo).0), hi: hi.map(|hi| self.below(hi).0) }
    }

    /// Returns the pairs of a band of positions that the whole band lacks: at its upper bound, and at its lower one.
    fn edges(self, band: Band) -> [Option<Edge>; 2] {
        let upper = band.hi.map(|hi| {
            let edge = self.below(hi).1;
            let of_rows = |lo: i64| lo - self.apart - edge.distance * (self.period - self.width);
            let first = band.lo.map_or(edge.rows[0], |lo| edge.rows[0].max(of_rows(lo)));
            Edge { rows: [first, edge.rows[1]], ..edge }
        });
        let lower = band.lo.map(|lo| {
            let edge = self.above(lo).1;
            let last = self.whole(band).hi.map_or(edge.rows[1], |hi| edge.rows[1].min(hi));
            Edge { rows: [edge.rows[0], last], ..edge }
        });
        [upper, lower].map(|edge| edge.filter(|edge| edge.rows[0] <= edge.rows[1]))
    }
}

/// A rank's real rows of a sequence, in stripes.
struct Side {
    /// The rows, without padding.
    rows: Run,
    /// Position of the first row.
    first: i64,
    width: usize,
    period: usize,
}

impl Side {
    fn new(side: &ShardedSide, sequence: usize, rank: usize, width: usize) -> Side {
        let slot = side.slot(sequence);
        let len = side.pieces(sequence, rank).map(|piece| side.real(sequence, &piece)).sum();
        let period = side.cp * width;
        Side { rows: Run { len, span: len, ..slot }, first: (rank * width) as i64, width, period }
    }

    /// Returns the rows whose positions lie in a range.
    fn within(&self, positions: &Range<usize>) -> Range<usize> {
        let before = |position: usize| {
            let position = position.saturating_sub(self.first as usize);
            let rows = position / self.period * self.width + (position % self.period).min(self.width);
            rows.min(self.rows.len)
        };
        before(positions.start)..before(positions.end)
    }
}

/// Returns the segments of part `index` of a step, below [`PARTS`]: the queries of rank `place` against keys of rank
/// `owner`, of one sequence, in stripes of `width` rows.
pub(super) fn segments(
    mask: &Mask,
    [q, kv]: [&ShardedSide; 2],
    sequence: usize,
    [place, owner]: [usize; 2],
    (width, index): (usize, usize),
) -> Vec<Segment> {
    let sides = [Side::new(q, sequence, place, width), Side::new(kv, sequence, owner, width)];
    let [queries, keys] = &sides;
    let stripes = Stripes::of(queries, keys);
    let sight = mask.sight(q.slots[sequence].len, kv.slots[sequence].len);
    let of_tile = |tile: Tile| {
        let own = queries.within(&tile.queries);
        let Some(edge) = index.checked_sub(1) else {
            return vec![whole(&sides, stripes, own, &tile)];
        };
        let Some((range, band)) = tile.bands().nth(edge / 2) else { return Vec::new() };
        let of = keys.within(&range);
        let pairs = stripes.edges(band)[edge % 2];
        pairs.map_or(Vec::new(), |edge| along(&sides, width, edge, (&own, &of)))
    };
    let all = sight.tiles(0..q.slots[sequence].len, 0..0);
    all.flat_map(of_tile).filter(Segment::sees).collect()
}

/// Returns the rows of a table of a step: the whole band of each sequence, the upper edge and the lower one. An edge has
/// a row for each stripe of a slot of queries, of the longest one, and sequence. The sequence varies fastest. Returns
/// `None` for a mask that is no band.
pub(crate) fn rows(
    mask: &Mask,
    [q, kv]: [&ShardedSide; 2],
    [place, owner]: [usize; 2],
    width: usize,
) -> Option<Vec<SegmentRow>> {
    let pieces = [(0, 0)]
        .into_iter()
        .chain((1..3).flat_map(|part| (0..q.stripes_most()).map(move |stripe| (part, stripe))));
    let of_piece = |(part, stripe)| {
        let of_sequence = move |sequence| row(mask, [q, kv], sequence, [place, owner], (width, part, stripe));
        (0..q.slots.len()).map(of_sequence)
    };
    pieces.flat_map(of_piece).collect()
}

/// Returns the row of a sequence: of the whole band, which is part 0, or of a stripe of queries on the upper or lower
/// edge, parts 1 and 2.
pub(super) fn row(
    mask: &Mask,
    [q, kv]: [&ShardedSide; 2],
    sequence: usize,
    [place, owner]: [usize; 2],
    (width, part, stripe): (usize, usize, usize),
) -> Option<SegmentRow> {
    let sides = [Side::new(q, sequence, place, width), Side::new(kv, sequence, owner, width)];
    let band = mask.band(q.slots[sequence].len, kv.slots[sequence].len)?;
    let stripes = Stripes::of(&sides[0], &sides[1]);
    let Some(edge) = part.checked_sub(1) else {
        let [q, kv] = sides.each_ref().map(|side| (side.rows.offset, side.rows.len));
        let Band { lo, hi } = stripes.whole(band);
        return Some(SegmentRow { q, kv, key_step: 1, lo, hi });
    };
    let spans = [q, kv].map(|side| side.slots[sequence].span);
    let edge = *stripes.edges(band).get(edge)?;
    Some(edge_row(&sides, spans, edge, (width, stripe)))
}

/// Returns the row of a stripe of queries on an edge; an empty one where the slot has no such stripe, or no key is there.
fn edge_row(
    sides: &[Side; 2],
    spans: [usize; 2],
    edge: Option<Edge>,
    (width, stripe): (usize, usize),
) -> SegmentRow {
    let row = || {
        let Edge { distance, rows } = edge?;
        let key = usize::try_from(stripe as i64 + distance).ok()?;
        let there = [stripe, key].into_iter().zip(spans).all(|(stripe, span)| stripe < span / width);
        let of = |side: &Side, stripe: usize| {
            let before = stripe * width;
            (side.rows.offset + before, side.rows.len.saturating_sub(before).min(width))
        };
        let [lo, hi] = rows.map(|bound| Some(bound - distance * width as i64));
        there.then(|| SegmentRow { q: of(&sides[0], stripe), kv: of(&sides[1], key), key_step: 1, lo, hi })
    };
    row().unwrap_or(SegmentRow::EMPTY)
}

/// Returns the segment of the whole band.
fn whole([queries, keys]: &[Side; 2], stripes: Stripes, own: Range<usize>, tile: &Tile) -> Segment {
    let of = keys.within(&tile.keys);
    let kept = |end: usize| keys.within(&(tile.keys.start..end)).len();
    let (prefix, sink_tokens) = (kept(tile.prefix), kept(tile.sink_tokens));
    let Band { lo, hi } = moved(stripes.whole(tile.band), &own, &of);
    Segment { q: part(queries.rows, &own), kv: vec![part(keys.rows, &of)], lo, hi, prefix, sink_tokens }
}

/// Returns the segments of an edge, one for each stripe of queries.
fn along(
    [queries, keys]: &[Side; 2],
    width: usize,
    Edge { distance, rows: [lo, hi] }: Edge,
    (own, of): (&Range<usize>, &Range<usize>),
) -> Vec<Segment> {
    let band = Band { lo: Some(lo), hi: Some(hi) };
    let inside = |stripe: usize, rows: &Range<usize>| {
        (stripe * width).max(rows.start)..((stripe + 1) * width).min(rows.end)
    };
    let of_stripe = |stripe: usize| {
        let own = inside(stripe, own);
        let of = inside(usize::try_from(stripe as i64 + distance).ok()?, of);
        let Band { lo, hi } = moved(band, &own, &of);
        let (q, kv) = (part(queries.rows, &own), vec![part(keys.rows, &of)]);
        (!of.is_empty()).then_some(Segment { q, kv, lo, hi, prefix: 0, sink_tokens: 0 })
    };
    (own.start / width..own.end.div_ceil(width)).filter_map(of_stripe).collect()
}

/// Returns a band of rows as the band of some of them, counted from their first ones.
fn moved(Band { lo, hi }: Band, own: &Range<usize>, of: &Range<usize>) -> Band {
    let moved = |bound: i64| bound + own.start as i64 - of.start as i64;
    Band { lo: lo.map(moved), hi: hi.map(moved) }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use seamproof_oracle::{Balance, Blocks, Borders};

    use super::*;
    use crate::schedule::build::masks_of;
    use crate::shard::Slot;

    fn masks() -> impl Iterator<Item = Mask> {
        let sides = [None, Some(0), Some(1), Some(3), Some(4), Some(9)];
        let documents = Borders::new(&[2, 7, 8]).ok().map(Blocks::Documents);
        let blocks = [None, documents, NonZeroU32::new(5).map(Blocks::Chunks)];
        masks_of(sides, blocks, [(0, 0), (2, 0), (0, 3), (1, 5), (6, 2)])
    }

    /// Returns one sequence of a length in stripes, with rows before it.
    fn side(len: usize, (cp, stripe): (usize, usize), first: usize) -> ShardedSide {
        let span = len.next_multiple_of(cp * stripe) / cp;
        let (balance, slots) = (Balance::Striped { stripe }, vec![Slot { offset: first, span, len }]);
        ShardedSide { cp, balance, members: 1, rows: first + span, slots, lanes: None }
    }

    /// Returns the position of each real row of a rank's tensor.
    fn positions(side: &ShardedSide, rank: usize) -> Vec<(usize, usize)> {
        let of = |piece| side.local(0, &piece).real_rows().zip(piece.start..).collect::<Vec<_>>();
        side.pieces(0, rank).flat_map(of).collect()
    }

    #[test]
    fn parts_are_the_mask_and_name_each_row_once() {
        let (mut edges, mut both) = (0, 0);
        for (mask, cut) in masks().flat_map(|mask| [(2, 2), (2, 3), (3, 2)].map(|cut| (mask, cut))) {
            for (lq, lk) in [(13, 13), (7, 16), (16, 5), (1, 9)] {
                let sides = [side(lq, cut, 3), side(lk, cut, 1)];
                for (place, owner) in (0..cut.0).flat_map(|q| (0..cut.0).map(move |kv| (q, kv))) {
                    let (mut shown, mut parts) = (Vec::new(), 0);
                    for index in 0..PARTS {
                        let [q, kv] = &sides;
                        let made = segments(&mask, [q, kv], 0, [place, owner], (cut.1, index));
                        let rows = |runs: Vec<Run>| {
                            let rows: Vec<usize> = runs.iter().flat_map(Run::real_rows).collect();
                            let mut once = rows.clone();
                            once.sort_unstable();
                            once.dedup();
                            assert_eq!(once.len(), rows.len(), "{mask:?} {cut:?} part {index}: {made:?}");
                        };
                        rows(made.iter().map(|segment| segment.q).collect());
                        rows(made.iter().flat_map(|segment| segment.kv.clone()).collect());
                        parts += usize::from(!made.is_empty());
                        edges += usize::from(index > 0 && !made.is_empty());
                        for segment in &made {
                            let keys: Vec<usize> = segment.kv.iter().flat_map(Run::real_rows).collect();
                            for (i, row) in segment.q.real_rows().enumerate() {
                                shown.extend(segment.visible(i).map(|j| (row, keys[j])));
                            }
                        }
                    }
                    shown.sort_unstable();
                    let keys = positions(&sides[1], owner);
                    let wanted = positions(&sides[0], place).into_iter().flat_map(|(row, i)| {
                        let sees = mask.visible(i, lq, lk);
                        keys.iter().filter(move |(_, j)| sees.contains(j)).map(move |(key, _)| (row, *key))
                    });
                    assert_eq!(
                        shown,
                        wanted.collect::<Vec<_>>(),
                        "{mask:?} {cut:?} {lq} × {lk}, {place} on {owner}"
                    );
                    assert!(parts <= 3 || !mask.is_band(), "{mask:?} {cut:?}: {parts} parts");
                    both += usize::from(parts == 3 && mask.is_band());
                }
            }
        }
        assert!(edges > 1000 && both > 100, "{edges} edges, {both} steps with two");
    }
}
