//! Tables of segments: what launches are told on the device, made there from the lengths of whole sequences.
//!
//! In TransformerEngine's shipped order ([`MergeOrder::Deferred`](super::MergeOrder::Deferred)) the segments of a
//! launch are rows of a table, where one can say them: the mask is a band, and sequences follow each other in memory.
//! Any other problem has its segments in the calls. A table knows real lengths alone. Its launches leave padding as it
//! is.

use std::ops::Range;
use std::sync::Arc;

use seamproof_oracle::{Balance, Format, Mask, Run};

use super::build::{Builder, Shards};
use super::program::{BufferId, KeySource, Region, SegmentSource, Work};
use crate::Segment;
use crate::helpers::{SegmentRow, all_gather_backward_segments, all_gather_segments, ring_segments};
use crate::shard::{ShardedSide, Slot};

impl SegmentSource {
    /// Number of 4-byte words of a table's row: both offsets and lengths, and each end of the band in two.
    pub const WORDS: usize = 8;

    /// Returns what a table of a rank's launches is made from; `None` if no table says their segments.
    pub(super) fn told(mask: Mask, shards: &Shards, place: usize, keys: KeySource) -> Option<SegmentSource> {
        let follow = |pair: &[Slot]| pair[0].offset + pair[0].span <= pair[1].offset;
        let is_packed = |side: &ShardedSide| !side.slots.is_empty() && side.slots.windows(2).all(follow);
        let sides = Arc::new([shards.q.clone(), shards.kv.clone()]);
        let source = SegmentSource { sides, mask, place, keys };
        (source.has_bands() && source.sides.iter().all(is_packed)).then_some(source)
    }

    /// Whether the mask is a band, rows follow each other, and queries have a band against the pieces of keys.
    pub(crate) fn has_bands(&self) -> bool {
        let is_cut = |side: &ShardedSide| match self.keys {
            KeySource::Residues => side.balance == Balance::Striped { stripe: 1 } && side.cp > 1,
            KeySource::Gathered | KeySource::Of(_) => true,
        };
        self.mask.is_band() && self.sides.iter().all(|side| is_cut(side) && side.lanes.is_none())
    }

    /// Returns the number of pieces of a slot of stripes, which the lengths of whole sequences do not say: in a ring of
    /// stripes of one row the members of each rank, and otherwise the stripes of the longest slot of queries.
    pub fn pieces(&self) -> usize {
        match (&self.sides[0], self.keys) {
            (q, KeySource::Of(_)) if q.balance == Balance::Striped { stripe: 1 } => q.members,
            (q, _) => q.stripes_most(),
        }
    }

    /// Returns the table, in pieces that each have a row for each sequence: pieces of queries, for each piece of a rank's
    /// keys. Stripes of one row before gathered keys are one launch, and come sequence by sequence. `None` for segments
    /// that no table says.
    pub fn rows(&self) -> Option<Vec<SegmentRow>> {
        let [q, kv] = &*self.sides;
        match self.keys {
            KeySource::Gathered => all_gather_segments(&self.mask, [q, kv], self.place),
            KeySource::Of(owner) => ring_segments(&self.mask, [q, kv], self.place, owner),
            KeySource::Residues => all_gather_backward_segments(&self.mask, [q, kv], self.place),
        }
    }
}

/// Returns both sides as they are where every sequence is whole: cut over one rank.
pub(super) fn whole_sequences(shards: &Shards) -> Shards {
    let whole = |side: &ShardedSide| {
        let cp = side.cp;
        let slot = |slot: &Slot| Slot { offset: slot.offset * cp, span: slot.span * cp, len: slot.len };
        ShardedSide {
            cp: 1,
            balance: Balance::Contiguous,
            members: 1,
            rows: side.rows * cp,
            slots: side.slots.iter().map(slot).collect(),
            lanes: side.lanes.map(|lanes| lanes.whole(cp)),
        }
    };
    Shards { q: whole(&shards.q), kv: whole(&shards.kv) }
}

/// A table in a buffer, and what its rows will say.
pub(super) struct Told {
    table: BufferId,
    rows: Vec<SegmentRow>,
    /// Number of sequences: rows of a piece of queries and a piece of keys.
    sequences: usize,
}

impl Told {
    pub(super) fn new(table: BufferId, from: &SegmentSource) -> Told {
        Told { table, rows: from.rows().unwrap_or_default(), sequences: from.sides[0].slots.len() }
    }

    /// Returns the number of pieces of queries, or of pairs with a piece of keys.
    pub(super) fn pieces(&self) -> usize {
        self.rows.len() / self.sequences
    }

    /// Returns the segments of some pieces that follow each other; none of pieces that are not there.
    pub(super) fn segments(&self, pieces: Range<usize>) -> Vec<Segment> {
        let rows = self.rows.get(pieces.start * self.sequences..pieces.end * self.sequences);
        rows.unwrap_or_default().iter().map(SegmentRow::segment).collect()
    }

    /// Returns the rows that say them.
    pub(super) fn region(&self, pieces: Range<usize>) -> Region {
        let count = pieces.len() * self.sequences;
        let rows = Run::packed(pieces.start * self.sequences, count, count);
        Region { buffer: self.table, rows, heads: 0..1 }
    }
}

/// Adds a buffer for such a table.
pub(super) fn buffer(builder: &mut Builder, rank: usize, name: &str, of: &SegmentSource) -> BufferId {
    let rows = of.rows().map_or(0, |rows| rows.len());
    builder.scratch(rank, name, [rows, 1, SegmentSource::WORDS], Format::F32)
}

/// Makes a table on a stream of a rank.
pub(super) fn make(builder: &mut Builder, (rank, stream): (usize, usize), to: BufferId, from: SegmentSource) {
    builder.push(rank, stream, Work::MakeSegments { to, from });
}
