//! The tables that steps need, made on the device: nothing waits for the host.
//!
//! Here the `len` of [`Slots`] counts the real positions of whole sequences, on every rank, as
//! `seamproof_simulator::shard::Slot` does.
#![allow(unsafe_code, reason = "says which types kernels receive")]

use seamproof_oracle::{Alignment, Balance, Mask};

use crate::block::{SCAN_THREADS, THREADS};
use crate::error::KernelError;
use crate::gpu::Gpu;
use crate::memory::{Area, Argument};
use crate::tables::{Cut, ROWS_MAX, RawSlots, Slots, blocks, check_apart, hold_i32, holds_i32};

/// `TILE` of the source.
const RUN_TILE: usize = 1024;
/// Bytes of a segment: query offset and length, key offset and length as i32, the band's two ends as i64.
pub const SEGMENT_BYTES: usize = 32;

#[repr(C)]
#[derive(Clone, Copy)]
struct RawMask {
    left: i64,
    right: i64,
    bottom_right: i32,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct RawIds {
    id: u64,
    position: u64,
    rows: i32,
    row_length: i32,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct RawRuns {
    offset: u64,
    len: u64,
    id: u64,
    position: u64,
    room: i32,
}
// SAFETY: repr(C), the fields of `Mask` in metadata.cu.
unsafe impl Argument for RawMask {}
// SAFETY: repr(C), the fields of `Ids` in metadata.cu.
unsafe impl Argument for RawIds {}
// SAFETY: repr(C), the fields of `Runs` in metadata.cu.
unsafe impl Argument for RawRuns {}

fn raw_mask(mask: &Mask) -> RawMask {
    let side = |bound: Option<u32>| bound.map_or(-1, i64::from);
    let bottom_right = i32::from(mask.align == Alignment::BottomRight);
    RawMask { left: side(mask.left), right: side(mask.right), bottom_right }
}

/// Where a rank's slots go, i32 each.
#[derive(Clone, Copy, Debug)]
pub struct SlotTables<'a> {
    /// First rows.
    pub offset: Area<'a>,
    /// Rows.
    pub span: Area<'a>,
    /// Real rows of the slot.
    pub len: Area<'a>,
}

/// Segment ids and positions, i32 each; id 0 is padding.
#[derive(Clone, Copy, Debug)]
pub struct SegmentIds<'a> {
    /// Ids, `[rows]`.
    pub id: Area<'a>,
    /// Positions, `[rows]`.
    pub position: Area<'a>,
    /// Rows of all batch rows together.
    pub rows: usize,
    /// Rows of a batch row: no run crosses its end. Divides `rows`.
    pub row_length: usize,
}

/// Where runs go, i32 each; all four tables have room for the same number.
#[derive(Clone, Copy, Debug)]
pub struct RunTables<'a> {
    /// First rows; `rows` behind the last run.
    pub offset: Area<'a>,
    /// Rows; 0 behind the last run.
    pub len: Area<'a>,
    /// Segment ids.
    pub id: Area<'a>,
    /// Positions of first rows.
    pub position: Area<'a>,
    /// Runs that fit.
    pub room: usize,
    /// How many runs there are, one i32: more than fit means that the last ones are missing.
    pub count: Area<'a>,
}

impl SegmentIds<'_> {
    /// Bytes of scratch that [`Gpu::runs`] needs.
    pub fn scratch_bytes(&self) -> usize {
        blocks(self.rows, RUN_TILE) * 4
    }
}

impl Gpu {
    /// A rank's slots from those of the whole batch: offsets, spans and gaps divided by cp, real rows counted.
    pub fn rank_slots(&self, batch: Slots, cut: Cut, rank: usize, to: SlotTables) -> Result<(), KernelError> {
        let (raw, written) = (batch.raw()?, [("offset", to.offset), ("span", to.span), ("len", to.len)]);
        hold_i32(&written, batch.count)?;
        check_apart(&written, &batch.tables())?;
        let (rank, [cp, balance, stripe]) = (cut.check_rank(rank)?, cut.numbers()?);
        let arguments: [&dyn Argument; 8] = [
            &raw,
            &cp,
            &balance,
            &stripe,
            &rank,
            &to.offset.address(),
            &to.span.address(),
            &to.len.address(),
        ];
        let block = usize::from(batch.count > 0);
        self.launch("rank_slots", (block, 1, SCAN_THREADS), &arguments)
    }

    /// TransformerEngine's `get_cu_seqlens_on_cp_rank`: the real rows of each slot's first and second chunk, counted
    /// where asked for, summed up from 0; count + 1 i32.
    pub fn cu_seqlens_on_rank(
        &self,
        slots: Slots,
        cp: usize,
        rank: usize,
        [first, second]: [bool; 2],
        cu_seqlens: Area,
    ) -> Result<(), KernelError> {
        let raw = slots.raw()?;
        holds_i32("cu_seqlens", cu_seqlens, slots.count + 1)?;
        check_apart(&[("cu_seqlens", cu_seqlens)], &slots.tables())?;
        let cut = Cut { cp, balance: Balance::DualChunk };
        let (rank, [cp, ..]) = (cut.check_rank(rank)?, cut.numbers()?);
        let arguments: [&dyn Argument; 6] =
            [&raw, &cp, &rank, &i32::from(first), &i32::from(second), &cu_seqlens.address()];
        self.launch("cu_seqlens_on_rank", (1, 1, SCAN_THREADS), &arguments)
    }

    /// A step of the ring, forward or backward: [`SEGMENT_BYTES`] for each piece of `rank`'s queries, piece of `owner`'s keys
    /// and sequence, in this order, the last fastest.
    ///
    /// Stripes of more than one row are refused, as a schedule's ring refuses them: what a query sees of another rank's
    /// stripes is no band of rows, so that no launch with one band for a segment could say it. TransformerEngine's ring takes
    /// stripes of 1 alone too (<https://github.com/NVIDIA/TransformerEngine>, `transformer_engine/jax`, ring attention on
    /// packed sequences). All-gather takes any stripe.
    pub fn ring_segments(
        &self,
        [q, kv]: [Slots; 2],
        mask: &Mask,
        cut: Cut,
        [rank, owner]: [usize; 2],
        segments: Area,
    ) -> Result<(), KernelError> {
        let raw = check_sequences([q, kv])?;
        let parts = match cut.balance {
            Balance::Contiguous | Balance::Striped { stripe: 1 } => 1,
            Balance::DualChunk => 2,
            Balance::Striped { stripe } => {
                let what = format!("a ring's step has no band between stripes of {stripe}; all-gather has");
                return Err(KernelError::shape(what));
            }
        };
        let (rank, owner) = (cut.check_rank(rank)?, cut.check_rank(owner)?);
        let count = parts * parts * q.count;
        check_segments(segments, count, [q, kv])?;
        let [cp, balance, _] = cut.numbers()?;
        let arguments: [&dyn Argument; 8] =
            [&raw[0], &raw[1], &raw_mask(mask), &cp, &balance, &rank, &owner, &segments.address()];
        self.launch("ring_segments", (blocks(count, THREADS), 1, THREADS), &arguments)
    }

    /// All-gather, forward: [`SEGMENT_BYTES`] for each piece of `rank`'s queries and sequence, or for each of
    /// `q.rows / stripe` places (rounded up) in the layout of stripes, stripes of 1 on one rank apart; keys are the visible
    /// prefix, in sequence order.
    pub fn all_gather_segments(
        &self,
        [q, kv]: [Slots; 2],
        mask: &Mask,
        cut: Cut,
        rank: usize,
        segments: Area,
    ) -> Result<(), KernelError> {
        let raw = check_sequences([q, kv])?;
        let cut = match cut.balance {
            // All in one piece.
            Balance::Striped { stripe: 1 } if cut.cp == 1 => Cut { balance: Balance::Contiguous, ..cut },
            _ => cut,
        };
        let [cp, balance, stripe] = cut.numbers()?;
        let count = match cut.balance {
            Balance::Contiguous => q.count,
            Balance::DualChunk => 2 * q.count,
            Balance::Striped { stripe } => blocks(q.rows, stripe),
        };
        let rank = cut.check_rank(rank)?;
        check_segments(segments, count, [q, kv])?;
        check_gathered(kv, cut)?;
        let arguments: [&dyn Argument; 8] =
            [&raw[0], &raw[1], &raw_mask(mask), &cp, &balance, &stripe, &rank, &segments.address()];
        self.launch("all_gather_segments", (blocks(count, THREADS), 1, THREADS), &arguments)
    }

    /// All-gather, backward: the forward's table, whose segments of one sequence go to different launches. Apart from stripes
    /// of 1 on several ranks: [`SEGMENT_BYTES`] for each residue below cp and sequence, the last fastest, a launch for each
    /// residue; keys are every cp-th row from the segment's first one.
    pub fn all_gather_backward_segments(
        &self,
        [q, kv]: [Slots; 2],
        mask: &Mask,
        cut: Cut,
        rank: usize,
        segments: Area,
    ) -> Result<(), KernelError> {
        if cut.balance != (Balance::Striped { stripe: 1 }) || cut.cp == 1 {
            return self.all_gather_segments([q, kv], mask, cut, rank, segments);
        }
        let raw = check_sequences([q, kv])?;
        let [cp, ..] = cut.numbers()?;
        let rank = cut.check_rank(rank)?;
        let count = cut.cp * q.count;
        check_segments(segments, count, [q, kv])?;
        check_gathered(kv, cut)?;
        let arguments: [&dyn Argument; 6] =
            [&raw[0], &raw[1], &raw_mask(mask), &cp, &rank, &segments.address()];
        self.launch("all_gather_residues", (blocks(count, THREADS), 1, THREADS), &arguments)
    }

    /// Runs of rows with one id and growing positions. `scratch`: [`SegmentIds::scratch_bytes`].
    pub fn runs(&self, ids: SegmentIds, scratch: Area, to: RunTables) -> Result<(), KernelError> {
        hold_i32(&[("id", ids.id), ("position", ids.position)], ids.rows)?;
        let tables =
            [("offset", to.offset), ("len", to.len), ("run id", to.id), ("run position", to.position)];
        hold_i32(&tables, to.room)?;
        hold_i32(&[("count", to.count)], 1)?;
        let tile_count = blocks(ids.rows, RUN_TILE);
        holds_i32("scratch", scratch, tile_count)?;
        let written: Vec<(&str, Area)> =
            tables.into_iter().chain([("count", to.count), ("scratch", scratch)]).collect();
        check_apart(&written, &[("id", ids.id), ("position", ids.position)])?;
        let divides = ids.row_length > 0 && ids.rows.is_multiple_of(ids.row_length);
        if !divides || ids.row_length > ROWS_MAX {
            let what = format!("{} rows in batch rows of {}", ids.rows, ids.row_length);
            return Err(KernelError::shape(what));
        }
        let (rows, row_length) = (ids.rows as i32, ids.row_length as i32);
        let raw = RawIds { id: ids.id.address(), position: ids.position.address(), rows, row_length };
        let runs = RawRuns {
            offset: to.offset.address(),
            len: to.len.address(),
            id: to.id.address(),
            position: to.position.address(),
            room: to.room as i32,
        };
        let (tiles, count) = (scratch.address(), to.count.address());
        self.launch("count_runs", (tile_count, 1, THREADS), &[&raw, &tiles])?;
        self.launch("sum_runs", (1, 1, SCAN_THREADS), &[&tiles, &(tile_count as i32), &count])?;
        self.launch("write_runs", (tile_count, 1, THREADS), &[&raw, &tiles, &runs])?;
        self.launch("finish_runs", (blocks(to.room, THREADS), 1, THREADS), &[&count, &rows, &runs])
    }
}

/// Two checked batches of as many sequences.
fn check_sequences([q, kv]: [Slots; 2]) -> Result<[RawSlots; 2], KernelError> {
    if q.count != kv.count {
        return Err(KernelError::shape(format!("{} sequences of q and {} of kv", q.count, kv.count)));
    }
    Ok([q.raw()?, kv.raw()?])
}

/// Room for `count` segments, apart from the tables that they are made of.
fn check_segments(segments: Area, count: usize, from: [Slots; 2]) -> Result<(), KernelError> {
    let bytes = count.checked_mul(SEGMENT_BYTES);
    if bytes != Some(segments.bytes()) || !segments.address().is_multiple_of(16) {
        let what = format!("segments: {} bytes, not {count} of {SEGMENT_BYTES} on 16", segments.bytes());
        return Err(KernelError::shape(what));
    }
    check_apart(&[("segments", segments)], &from.map(|slots| slots.tables()).concat())
}

/// Rows of all ranks are numbered in 32 bits too.
fn check_gathered(kv: Slots, cut: Cut) -> Result<(), KernelError> {
    if kv.rows.saturating_mul(cut.cp) > ROWS_MAX {
        return Err(KernelError::shape(format!(
            "{} × {} gathered rows; at most {ROWS_MAX}",
            kv.rows, cut.cp
        )));
    }
    Ok(())
}
