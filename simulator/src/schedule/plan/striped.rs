//! The pairs of slots in stripes of several rows. A launch has a part of a step between two slots
//! ([`super::super::stripes`]); all parts together must be what the mask shows of the two.

use std::ops::Range;

use seamproof_oracle::{Intervals, Mask, Run};

use super::super::stripes::{self, PARTS};
use super::pairs::indices;
use crate::Segment;
use crate::schedule::build::Shards;
use crate::shard::ShardedSide;

/// Two slots of a sequence: the queries of one member of a ring, and the keys of another.
pub(super) struct Slots<'a> {
    pub(super) mask: &'a Mask,
    pub(super) shards: &'a Shards,
    pub(super) sequence: usize,
    /// Positions of the queries and of the keys, in order of rows.
    pub(super) positions: [&'a [usize]; 2],
    pub(super) members: [usize; 2],
    /// Rows of a stripe.
    pub(super) width: usize,
    /// Whether a table says the segments.
    pub(super) is_told: bool,
}

/// Returns the real positions of a member's slot, in order of rows.
pub(super) fn positions(side: &ShardedSide, sequence: usize, member: usize) -> Vec<usize> {
    let of_piece = |piece| (0..side.real(sequence, &piece)).map(move |row| piece.start + row * piece.step);
    side.pieces(sequence, member).flat_map(of_piece).collect()
}

impl Slots<'_> {
    /// Returns the number of pairs of each part, or the position of a query for which the parts are not what the mask shows.
    /// Segments of a part name real rows of their slots alone, each at most once.
    pub(super) fn pairs(&self) -> Result<[u64; PARTS], usize> {
        let [queries, keys] = self.positions;
        let first = queries.first().copied().unwrap_or(0);
        let (mut counts, mut shown) = ([0; PARTS], vec![Vec::new(); queries.len()]);
        for (part, count) in counts.iter_mut().enumerate() {
            *count = self.part(part, &mut shown).ok_or(first)?;
        }
        let lengths = [&self.shards.q, &self.shards.kv].map(|side| side.slots[self.sequence].len);
        for (position, mut shown) in queries.iter().zip(shown) {
            let wanted = self.mask.visible(*position, lengths[0], lengths[1]);
            let wanted = Intervals::new(
                wanted.parts().next().map_or(0..0, |part| among(keys, &part)),
                wanted.parts().nth(1).map_or(0..0, |part| among(keys, &part)),
            );
            shown.sort_by_key(|range: &Range<usize>| range.start);
            let once = shown.windows(2).all(|pair| pair[0].end <= pair[1].start);
            if !once || !joined(shown).eq(wanted.parts()) {
                return Err(*position);
            }
        }
        Ok(counts)
    }

    /// Returns the segments of a part. A table has those of parts 0 to 2, and there are no others of a band.
    fn segments(&self, part: usize) -> Vec<Segment> {
        let Shards { q, kv } = self.shards;
        let (sides, sequence, members) = ([q, kv], self.sequence, self.members);
        if !self.is_told {
            return stripes::segments(self.mask, sides, sequence, members, (self.width, part));
        }
        let stripes = match part {
            0 => 1,
            1 | 2 => q.slots[sequence].span / self.width,
            _ => 0,
        };
        let row = |stripe| stripes::row(self.mask, sides, sequence, members, (self.width, part, stripe));
        (0..stripes).filter_map(row).map(|row| row.segment()).collect()
    }

    /// Adds what a part shows each query to `shown`. Returns the number of pairs; `None` if the part names other rows, or a
    /// row twice.
    fn part(&self, part: usize, shown: &mut [Vec<Range<usize>>]) -> Option<u64> {
        let Shards { q, kv } = self.shards;
        let made = self.segments(part);
        let run = |side: &ShardedSide, positions: &[usize]| Run {
            len: positions.len(),
            span: positions.len(),
            ..side.slot(self.sequence)
        };
        let runs = [run(q, self.positions[0]), run(kv, self.positions[1])];
        let (mut next, mut pairs) = ([0; 2], 0);
        for segment in &made {
            let [keys] = &segment.kv[..] else { return None };
            let rows = indices(&runs[0], &segment.q, next[0])?;
            let of = indices(&runs[1], keys, next[1])?;
            next = [rows.end, of.end];
            for (local, row) in rows.enumerate() {
                let visible = segment.visible(local).moved(|key| key + of.start);
                pairs += visible.len() as u64;
                shown.get_mut(row)?.extend(visible.parts());
            }
        }
        Some(pairs)
    }
}

/// Returns the indices of positions, which rise, that lie in a range.
fn among(positions: &[usize], range: &Range<usize>) -> Range<usize> {
    let before = |end: usize| positions.partition_point(|position| *position < end);
    before(range.start)..before(range.end)
}

/// Returns ranges in order, those joined that touch, without empty ones.
fn joined(ranges: Vec<Range<usize>>) -> impl Iterator<Item = Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined.into_iter()
}
