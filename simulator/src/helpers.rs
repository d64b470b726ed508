//! The packed-sequence helper operations on plain slices. The CUDA kernels must give their results bit for bit.
//!
//! Tables of slots are [`Run`]s in order of rows that do not overlap: `span` rows from `offset`, of which `len` are
//! real. The *layout of halves* has every offset and span divided by two, rounded down: one half of each slot, packed
//! closer. out and gradients are `[rows, heads, dim]`, and statistics are `[heads, rows]`. These helpers go slot by
//! slot, while a kernel finds the slot of a row: the two share no index arithmetic.

pub mod exponential;

use std::collections::HashSet;
use std::ops::Neg;

use exponential::{log_add, share};
use seamproof_oracle::region::{rotated, rotated_back};
use seamproof_oracle::sharding::Piece;
use seamproof_oracle::{Balance, Band, Format, Mask, Run};

use crate::Segment;
use crate::schedule::{Layer, Rotated, band, stripe_rows};
use crate::shard::{ShardedSide, Slot};

/// Direction in which rows are reordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Order of ranks' rows, one after the other, to order of whole sequences.
    ToSequences,
    /// Order of whole sequences to order of ranks' rows, one after the other.
    ToRanks,
}

/// Treatment of the rows that an operation does not write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// The rows keep every bit.
    Leave,
    /// Every byte of these rows becomes this one: 0 for zeros, 0xff for NaN in f32, bf16 and fp16.
    Fill(u8),
}

/// A half of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// The first half.
    First = 0,
    /// The second half.
    Second = 1,
}

/// Rows on which a step worked, and layout of its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotPart {
    /// All rows, in the layout of the running tensors.
    Whole,
    /// One half of each slot, in the layout of the running tensors.
    HalfInPlace(Half),
    /// One half of each slot, in the layout of halves.
    Compact(Half),
}

/// Manner in which a step's out enters the running one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Both outs are weighted by their shares of the new total. The running statistic becomes this total.
    Running,
    /// The step's out is weighted by its share of a known total, as in TransformerEngine's correction after the last
    /// step.
    Weighted {
        /// Whether the product is rounded to the running format before it is added.
        product_rounded: bool,
    },
}

/// Treatment of one half of a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// The half keeps every bit.
    Leave = 0,
    /// The step's gradient replaces it.
    Copy = 1,
    /// The step's gradient is added to it.
    Add = 2,
}

/// Layout of a batch of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchLayout {
    /// Sequences at their slots.
    Thd = 0,
    /// A block of equally many rows for each sequence, one sequence after the other.
    Bshd = 1,
    /// A block of a row of each sequence for each position, one position after the other.
    Sbhd = 2,
}

impl BatchLayout {
    /// Every layout.
    pub const ALL: [BatchLayout; 3] = [BatchLayout::Thd, BatchLayout::Bshd, BatchLayout::Sbhd];

    /// Returns the name in texts.
    pub fn name(self) -> &'static str {
        match self {
            BatchLayout::Thd => "THD",
            BatchLayout::Bshd => "BSHD",
            BatchLayout::Sbhd => "SBHD",
        }
    }

    /// Returns the row of a position of a sequence. Layouts other than THD have `positions` rows for each sequence.
    fn row(self, slots: &[Run], positions: usize, sequence: usize, position: usize) -> usize {
        match self {
            BatchLayout::Thd => slots[sequence].row(position),
            BatchLayout::Bshd => sequence * positions + position,
            BatchLayout::Sbhd => position * slots.len() + sequence,
        }
    }
}

/// Returns the real rows of every sequence in one layout, with their rows in another. Real rows past `positions` have
/// no place in layouts other than THD, and are left out.
pub fn converted_pairs(slots: &[Run], positions: usize, [from, to]: [BatchLayout; 2]) -> Vec<(usize, usize)> {
    let of = |(sequence, slot): (usize, &Run)| {
        let row = move |layout: BatchLayout, position| layout.row(slots, positions, sequence, position);
        (0..slot.len.min(positions)).map(move |position| (row(from, position), row(to, position)))
    };
    slots.iter().enumerate().flat_map(of).collect()
}

/// Returns the number of rows in the layout of halves.
pub fn half_rows(rows: usize) -> usize {
    rows.div_ceil(2)
}

impl SlotPart {
    /// Returns the number of rows of a step's tensors.
    pub fn step_rows(self, rows: usize) -> usize {
        if let SlotPart::Compact(_) = self { half_rows(rows) } else { rows }
    }

    /// Returns pairs of real rows: in the running tensors and in the step's.
    pub fn pairs(self, slots: &[Run]) -> Vec<(usize, usize)> {
        let (half, compact) = match self {
            SlotPart::Whole => return slots.iter().flat_map(Run::real_rows).map(|row| (row, row)).collect(),
            SlotPart::HalfInPlace(half) => (half, false),
            SlotPart::Compact(half) => (half, true),
        };
        let real: Vec<usize> = slots.iter().flat_map(Run::real_rows).collect();
        half_pairs(slots, half)
            .into_iter()
            .filter(|(row, _)| real.binary_search(row).is_ok())
            .map(|(row, half_row)| (row, if compact { half_row } else { row }))
            .collect()
    }
}

/// Returns the rows of one half of every slot, padding included, with their rows in the layout of halves.
pub fn half_pairs(slots: &[Run], half: Half) -> Vec<(usize, usize)> {
    let pairs = slots.iter().flat_map(|slot| {
        let chunk = slot.span / 2;
        let first = slot.offset + half as usize * chunk;
        (0..chunk).map(move |i| (first + i, slot.offset / 2 + i))
    });
    pairs.collect()
}

/// Returns the row in sequence order of each row in rank order.
pub fn rank_order(shard: &ShardedSide) -> Vec<usize> {
    (0..shard.cp).flat_map(|rank| shard.partition_indices(rank)).collect()
}

/// Returns a rank's slots with the number of their real rows.
pub fn rank_slots(shard: &ShardedSide, rank: usize) -> Vec<Run> {
    let slots = shard.slots.iter().enumerate().map(|(sequence, slot)| {
        let len = shard.pieces(sequence, rank).map(|piece| shard.real(sequence, &piece)).sum();
        Run { offset: slot.offset, step: 1, len, span: slot.span }
    });
    slots.collect()
}

/// Returns tables of 64 bits in 32: a number that does not fit is the nearest that does.
pub fn narrowed(numbers: &[i64]) -> Vec<i32> {
    let fits = |number: &i64| (*number).clamp(i32::MIN.into(), i32::MAX.into()) as i32;
    numbers.iter().map(fits).collect()
}

/// Returns for each row whether it is real.
pub fn valid_mask(slots: &[Run], rows: usize) -> Vec<bool> {
    let mut mask = vec![false; rows];
    slots.iter().flat_map(Run::real_rows).for_each(|row| mask[row] = true);
    mask
}

/// Copies rows of `row_bytes`. Each pair is a row of `from` and a row of `to`; `rest` says how the other rows of `to`
/// are treated.
pub fn move_rows(pairs: &[(usize, usize)], from: &[u8], to: &mut [u8], row_bytes: usize, rest: Rest) {
    if let Rest::Fill(byte) = rest {
        to.fill(byte);
    }
    let bytes = |row: usize| row * row_bytes..(row + 1) * row_bytes;
    for &(source, target) in pairs {
        to[bytes(target)].copy_from_slice(&from[bytes(source)]);
    }
}

/// Fills every row that is not real.
pub fn fill_padding(slots: &[Run], to: &mut [u8], row_bytes: usize, byte: u8) {
    let rows = to.len() / row_bytes;
    for (row, _) in valid_mask(slots, rows).iter().enumerate().filter(|(_, real)| !**real) {
        to[row * row_bytes..(row + 1) * row_bytes].fill(byte);
    }
}

/// Applies a linear layer that copies heads. A row of `row_bytes` is a rank's heads on one side, and part `index` of
/// `count` equal parts of a hidden row on the other. Hidden rows that are written hold zeros in other parts.
pub fn layer(layer: Layer, (index, count): (usize, usize), from: &[u8], to: &mut [u8], row_bytes: usize) {
    match layer {
        Layer::Column => {
            let hidden = from.chunks(count * row_bytes);
            let parts = hidden.map(|row| &row[index * row_bytes..][..row_bytes]);
            to.chunks_mut(row_bytes).zip(parts).for_each(|(to, part)| to.copy_from_slice(part));
        }
        Layer::Row => {
            to.fill(0);
            for (hidden, row) in to.chunks_mut(count * row_bytes).zip(from.chunks(row_bytes)) {
                hidden[index * row_bytes..][..row_bytes].copy_from_slice(row);
            }
        }
    }
}

/// Code of a number, and its bit of the sign.
#[derive(Clone, Copy)]
struct Code {
    bits: u32,
    sign: u32,
}

impl Neg for Code {
    type Output = Code;

    fn neg(self) -> Code {
        Code { bits: self.bits ^ self.sign, ..self }
    }
}

/// Rotates rows of numbers by their positions, or turns them back. A row has `heads` times `dim` numbers of one, two or
/// four bytes each.
pub fn rotate(rows: &[Rotated], inverse: bool, [heads, dim, number_bytes]: [usize; 3], bytes: &mut [u8]) {
    let turn: fn(&[Code], usize) -> Vec<Code> = if inverse { rotated_back } else { rotated };
    let sign = 1 << (8 * number_bytes - 1);
    let code = |bytes: &[u8]| bytes.iter().rev().fold(0, |code, &byte| code << 8 | u32::from(byte));
    for Rotated { rows, position, step } in rows {
        for (i, row) in rows.real_rows().enumerate() {
            let of_head = dim * number_bytes;
            for head in bytes[row * heads * of_head..][..heads * of_head].chunks_mut(of_head) {
                let lanes: Vec<Code> =
                    head.chunks(number_bytes).map(|bytes| Code { bits: code(bytes), sign }).collect();
                let turned = turn(&lanes, position + step * i);
                for (to, lane) in head.chunks_mut(number_bytes).zip(turned) {
                    to.copy_from_slice(&lane.bits.to_le_bytes()[..number_bytes]);
                }
            }
        }
    }
}

/// Returns `value · weight`, or 0 if the weight is 0. An empty row's out may be any value.
fn scaled(value: f32, weight: f32) -> f32 {
    if weight == 0.0 { 0.0 } else { value * weight }
}

/// A statistic with the shape `[heads, rows]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistic {
    /// Number of rows.
    pub rows: usize,
    /// The numbers, head after head.
    pub values: Vec<f32>,
}

impl Statistic {
    fn at(&mut self, head: usize, row: usize) -> &mut f32 {
        &mut self.values[head * self.rows + row]
    }

    fn get(&self, head: usize, row: usize) -> f32 {
        self.values[head * self.rows + row]
    }

    /// Returns the number of heads; 0 for a statistic without rows.
    pub fn heads(&self) -> usize {
        self.values.len().checked_div(self.rows).unwrap_or(0)
    }
}

/// Folds a step's statistic into the running one.
pub fn merge_statistics(pairs: &[(usize, usize)], lse: &mut Statistic, step: &Statistic) {
    for head in 0..lse.heads() {
        for &(running, row) in pairs {
            *lse.at(head, running) = log_add(lse.get(head, running), step.get(head, row));
        }
    }
}

/// A tensor `[rows, heads, dim]` whose numbers are of one format.
#[derive(Clone, Debug, PartialEq)]
pub struct Numbers {
    /// Number of heads.
    pub heads: usize,
    /// Number of elements of a row and head.
    pub dim: usize,
    /// The format.
    pub format: Format,
    /// The numbers.
    pub values: Vec<f32>,
}

impl Numbers {
    fn first(&self, row: usize, head: usize) -> usize {
        (row * self.heads + head) * self.dim
    }
}

/// Folds a step's out into the running one. [`Style::Running`] also folds the statistic.
pub fn merge_out(
    pairs: &[(usize, usize)],
    style: Style,
    (out, lse): (&mut Numbers, &mut Statistic),
    (step_out, step_lse): (&Numbers, &Statistic),
) {
    let format = out.format;
    let rounded = style == Style::Weighted { product_rounded: true };
    for &(running, row) in pairs {
        for head in 0..out.heads {
            let (old, added) = (lse.get(head, running), step_lse.get(head, row));
            let (total, keep) = match style {
                Style::Running => {
                    let total = log_add(old, added);
                    (total, share(old, total))
                }
                Style::Weighted { .. } => (old, 1.0),
            };
            let add = share(added, total);
            *lse.at(head, running) = total;
            let (place, source) = (out.first(running, head), step_out.first(row, head));
            for lane in 0..out.dim {
                let product = scaled(step_out.values[source + lane], add);
                let product = if rounded { format.round_f32(product) } else { product };
                let value = &mut out.values[place + lane];
                *value = format.round_f32(scaled(*value, keep) + product);
            }
        }
    }
}

/// Copies or adds a step's gradient. Each half of every slot is treated by itself.
pub fn accumulate(
    slots: &[Run],
    part: SlotPart,
    [first, second]: [Update; 2],
    sum: &mut Numbers,
    step: &Numbers,
) {
    let seconds: Vec<usize> = half_pairs(slots, Half::Second).into_iter().map(|(row, _)| row).collect();
    let format = sum.format;
    for (running, row) in part.pairs(slots) {
        let update = if seconds.binary_search(&running).is_ok() { second } else { first };
        let (place, source) = (sum.first(running, 0), step.first(row, 0));
        for lane in 0..sum.heads * sum.dim {
            let (value, step) = (&mut sum.values[place + lane], step.values[source + lane]);
            match update {
                Update::Leave => {}
                Update::Copy => *value = format.round_f32(step),
                Update::Add => *value = format.round_f32(*value + step),
            }
        }
    }
}

/// Returns the largest number of each head over real rows; −∞ if there is no real row. +0 is larger than −0: the result
/// does not show the order of comparisons.
pub fn max_logit(slots: &[Run], rows_max: &Statistic) -> Vec<f32> {
    let real: Vec<usize> = slots.iter().flat_map(Run::real_rows).collect();
    let largest = |head: usize| {
        let values = real.iter().map(|&row| rows_max.get(head, row));
        values.max_by(f32::total_cmp).unwrap_or(f32::NEG_INFINITY)
    };
    (0..rows_max.heads()).map(largest).collect()
}

/// Table entry of a launch for one sequence, one piece of queries and one piece of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SegmentRow {
    /// First row and real rows of the queries.
    pub q: (usize, usize),
    /// First row and real rows of the keys.
    pub kv: (usize, usize),
    /// Rows from a key to the next. A launch has one such step for all its keys, and its caller knows it: a table on a
    /// GPU does not say it.
    pub key_step: usize,
    /// Smallest visible `j − i`; absent means unbounded.
    pub lo: Option<i64>,
    /// Largest visible `j − i`; absent means unbounded.
    pub hi: Option<i64>,
}

impl SegmentRow {
    /// An entry without rows.
    pub(crate) const EMPTY: SegmentRow =
        SegmentRow { q: (0, 0), kv: (0, 0), key_step: 1, lo: Some(0), hi: Some(0) };

    /// Returns the entry as a segment of a launch, without padding.
    pub fn segment(&self) -> Segment {
        let SegmentRow { q, kv, key_step, lo, hi } = *self;
        let kv = vec![Run { step: key_step, ..Run::packed(kv.0, kv.1, kv.1) }];
        Segment { q: Run::packed(q.0, q.1, q.1), kv, lo, hi, prefix: 0, sink_tokens: 0 }
    }
}

/// Returns the segments of a ring step: the queries of `rank` against the keys of `owner`. There is one for each piece
/// of keys, piece of queries and sequence, and the sequence varies fastest: a launch on a piece of keys has its
/// segments together. Stripes of several rows have a segment of all rows for each sequence, and for each of the two
/// bounds one for each stripe of the longest slot and sequence. The result is `None` if the mask is no
/// band.
pub fn ring_segments(
    mask: &Mask,
    [q, kv]: [&ShardedSide; 2],
    rank: usize,
    owner: usize,
) -> Option<Vec<SegmentRow>> {
    let [q, kv] = &[q.in_ring(), kv.in_ring()];
    if let Balance::Striped { stripe: stripe @ 2.. } = q.balance {
        return stripe_rows(mask, [q, kv], [rank, owner], stripe);
    }
    let parts = q.parts()?;
    let sequences = 0..q.slots.len();
    let mut segments = Vec::new();
    for (kv_part, q_part) in (0..parts).flat_map(|a| (0..parts).map(move |b| (a, b))) {
        for sequence in sequences.clone() {
            let queries = q.piece(sequence, rank, q_part);
            let keys = kv.piece(sequence, owner, kv_part);
            segments.push(ring_segment(mask, [q, kv], sequence, (queries, keys))?);
        }
    }
    Some(segments)
}

/// Returns the entry of a sequence, a piece of queries and a piece of keys.
pub(crate) fn ring_segment(
    mask: &Mask,
    [q, kv]: [&ShardedSide; 2],
    sequence: usize,
    (queries, keys): (Piece, Piece),
) -> Option<SegmentRow> {
    let rows = kv.local(sequence, &keys);
    segment(mask, [q, kv], sequence, (queries, keys), (rows.offset, rows.len))
}

/// Returns the forward segments of an all-gather: the queries of `rank` against the visible prefix of each sequence in
/// sequence order.
///
/// There is a segment for each piece of queries and each sequence, and the sequence varies fastest. Stripes are pieces;
/// a slot with fewer stripes than the longest one has entries without rows at its end for the others. Stripes of 1 on
/// one rank are one piece. On several ranks they are one launch, and there the stripe varies fastest. So queries of a
/// launch follow each other in memory, as copies of valid rows ask for. The result is `None` for a mask that is no band.
pub fn all_gather_segments(mask: &Mask, [q, kv]: [&ShardedSide; 2], rank: usize) -> Option<Vec<SegmentRow>> {
    mask.is_band().then(|| all_gather_bands(mask, [q, kv], rank))
}

fn all_gather_bands(mask: &Mask, [q, kv]: [&ShardedSide; 2], rank: usize) -> Vec<SegmentRow> {
    // Stripes of one row on several ranks are a piece whose rows lie apart. Here each is a piece.
    let stripe = match q.balance {
        Balance::Striped { stripe } if stripe.max(q.cp) > 1 => Some(stripe),
        _ => None,
    };
    let pieces = stripe.map_or(q.parts().unwrap_or_default(), |_| q.stripes_most());
    let piece = |sequence: usize, part: usize| match stripe {
        None => Some(q.piece(sequence, rank, part)),
        Some(stripe) => (part < q.slots[sequence].span / stripe).then(|| Piece {
            start: (part * q.cp + rank) * stripe,
            step: 1,
            span: stripe,
            at: part * stripe,
        }),
    };
    let of = |(part, sequence): (usize, usize)| {
        all_gather_segment(mask, [q, kv], sequence, &piece(sequence, part)?)
    };
    let entry = |(part, sequence): (usize, usize)| {
        let Slot { offset, span, .. } = q.slots[sequence];
        of((part, sequence)).unwrap_or(SegmentRow { q: (offset + span, 0), ..SegmentRow::EMPTY })
    };
    let sequences = 0..q.slots.len();
    match stripe {
        Some(1) => {
            sequences.flat_map(|sequence| (0..pieces).map(move |part| entry((part, sequence)))).collect()
        }
        _ => (0..pieces)
            .flat_map(|part| sequences.clone().map(move |sequence| entry((part, sequence))))
            .collect(),
    }
}

/// Returns the entry of a sequence and a piece of queries.
pub(crate) fn all_gather_segment(
    mask: &Mask,
    [q, kv]: [&ShardedSide; 2],
    sequence: usize,
    queries: &Piece,
) -> Option<SegmentRow> {
    let keys = visible_prefix(mask, [q, kv], sequence, queries);
    let rows = (kv.gathered(sequence).offset, keys);
    let piece = Piece { start: 0, step: 1, span: keys, at: 0 };
    segment(mask, [q, kv], sequence, (*queries, piece), rows)
}

/// Returns the backward segments of an all-gather. They are those of the forward, but the segments of one sequence go
/// to different launches. Stripes of 1 on several ranks are an exception.
///
/// Such stripes have a launch for each *residue*: the rank's queries of a sequence against every cp-th key of the
/// visible prefix, from the residue on. There is a segment for each residue and each sequence, and the sequence varies
/// fastest.
pub fn all_gather_backward_segments(
    mask: &Mask,
    [q, kv]: [&ShardedSide; 2],
    rank: usize,
) -> Option<Vec<SegmentRow>> {
    let cp = q.cp;
    if q.balance != (Balance::Striped { stripe: 1 }) || cp == 1 {
        return all_gather_segments(mask, [q, kv], rank);
    }
    let of = |(residue, sequence): (usize, usize)| {
        let row = residue_segment(mask, [q, kv], sequence, &q.piece(sequence, rank, 0), residue);
        row.unwrap_or(SegmentRow { key_step: cp, ..SegmentRow::EMPTY })
    };
    let sequences = 0..q.slots.len();
    let places = (0..cp).flat_map(|residue| sequences.clone().map(move |sequence| (residue, sequence)));
    mask.is_band().then(|| places.map(of).collect())
}

/// Returns the entry of a sequence, a piece of stripes of 1 and a residue.
pub(crate) fn residue_segment(
    mask: &Mask,
    [q, kv]: [&ShardedSide; 2],
    sequence: usize,
    queries: &Piece,
    residue: usize,
) -> Option<SegmentRow> {
    let cp = q.cp;
    let keys = visible_prefix(mask, [q, kv], sequence, queries).saturating_sub(residue).div_ceil(cp);
    let first = kv.gathered(sequence).offset + if keys > 0 { residue } else { 0 };
    let piece = Piece { start: residue, step: cp, span: keys, at: 0 };
    let row = segment(mask, [q, kv], sequence, (*queries, piece), (first, keys))?;
    Some(SegmentRow { key_step: cp, ..row })
}

/// Returns the number of a sequence's keys up to the last one that a piece's last real query sees; 0 for a piece of
/// padding.
fn visible_prefix(mask: &Mask, [q, kv]: [&ShardedSide; 2], sequence: usize, queries: &Piece) -> usize {
    let (lq, lk) = (q.slots[sequence].len, kv.slots[sequence].len);
    let Some(last) = q.real(sequence, queries).checked_sub(1) else { return 0 };
    mask.sight(lq, lk).end(queries.start + last * queries.step)
}

fn segment(
    mask: &Mask,
    [q, kv]: [&ShardedSide; 2],
    sequence: usize,
    (queries, keys): (Piece, Piece),
    kv_rows: (usize, usize),
) -> Option<SegmentRow> {
    let lengths = (q.slots[sequence].len, kv.slots[sequence].len);
    let Band { lo, hi } = band(mask.band(lengths.0, lengths.1)?, &queries, &keys)?;
    let rows = q.local(sequence, &queries);
    Some(SegmentRow { q: (rows.offset, rows.len), kv: kv_rows, key_step: 1, lo, hi })
}

/// A longest stretch of rows of one batch row that have one segment id other than 0 and positions that grow by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentRun {
    /// First row.
    pub offset: usize,
    /// Number of rows.
    pub len: usize,
    /// Segment id.
    pub id: i32,
    /// Position of the first row.
    pub position: i32,
}

/// First row and number of rows of a sequence, of queries and of keys.
pub type PairedRows = [(usize, usize); 2];

/// Returns the sequences of each batch row: the first row and the number of rows of queries and of keys. They are the
/// runs of queries, each with the run of keys of its id, and then the runs of keys alone. A sequence without rows on a
/// side is at the first one of the batch row. `None` stands for a batch row where an id is below 0 or comes twice, or
/// where a run does not begin at position 0.
///
/// `row_lengths` has the numbers of rows of a batch row of queries and of keys.
pub fn paired_runs(
    [q, kv]: [&[SegmentRun]; 2],
    row_lengths: [usize; 2],
    batch_rows: usize,
) -> Vec<Option<Vec<PairedRows>>> {
    let of = |runs: &[SegmentRun], side: usize, batch_row: usize| -> Vec<SegmentRun> {
        runs.iter().copied().filter(|run| run.offset / row_lengths[side] == batch_row).collect()
    };
    let is_said = |runs: &[SegmentRun]| {
        let mut met = HashSet::new();
        runs.iter().all(|run| run.id > 0 && run.position == 0 && met.insert(run.id))
    };
    let paired = |batch_row: usize| {
        let [q, kv] = [of(q, 0, batch_row), of(kv, 1, batch_row)];
        let rows = |run: Option<&SegmentRun>, side: usize| {
            run.map_or((batch_row * row_lengths[side], 0), |run| (run.offset, run.len))
        };
        let of_id = |runs: &'_ [SegmentRun], id: i32| runs.iter().copied().find(|run| run.id == id);
        let with_q = q.iter().map(|run| [rows(Some(run), 0), rows(of_id(&kv, run.id).as_ref(), 1)]);
        let alone = kv.iter().filter(|run| of_id(&q, run.id).is_none());
        let sequences = with_q.chain(alone.map(|run| [rows(None, 0), rows(Some(run), 1)])).collect();
        (is_said(&q) && is_said(&kv)).then_some(sequences)
    };
    (0..batch_rows).map(paired).collect()
}

/// Returns the runs of rows, each an id and a position, in batch rows of `row_length`, in order of rows. A change of
/// the id and a break of positions both end a run. If lengths come from one of them and offsets from the other, the two
/// lists have different lengths (<https://github.com/NVIDIA/TransformerEngine>, `transformer_engine/jax/attention.py`,
/// striped all-gather).
pub fn segment_runs(rows: &[(i32, i32)], row_length: usize) -> Vec<SegmentRun> {
    let mut runs: Vec<SegmentRun> = Vec::new();
    for (row, &(id, position)) in rows.iter().enumerate() {
        match runs.last_mut() {
            _ if id == 0 => {}
            Some(run)
                if !row.is_multiple_of(row_length)
                    && run.offset + run.len == row
                    && run.id == id
                    && rows[row - 1].1.wrapping_add(1) == position =>
            {
                run.len += 1;
            }
            _ => runs.push(SegmentRun { offset: row, len: 1, id, position }),
        }
    }
    runs
}
