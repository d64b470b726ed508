//! The tables that steps need. They are made on the device, so that nothing waits for the host.
//!
//! Here the `len` of [`Slots`] counts the real positions of whole sequences, on every rank, as
//! `seamproof_simulator::shard::Slot` does.
#![allow(unsafe_code, reason = "says which types kernels receive")]

use seamproof_oracle::{Alignment, Balance, Mask};

use crate::attend::{CallTables, SEGMENT_BYTES as CALL_SEGMENT_BYTES};
use crate::block::{SCAN_THREADS, THREADS};
use crate::error::KernelError;
use crate::gpu::Launch;
use crate::memory::{Area, Argument};
use crate::tables::{
    Cut, ROWS_MAX, RawSlots, Slots, WideSlots, blocks, check_apart, hold_i32, holds_i32, on_bytes,
};

/// The constant `TILE` of the source.
const RUN_TILE: usize = 1024;
/// The bytes of a segment: query offset and length, key offset and length as i32, the two ends of the band as i64.
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
    id_rows: i32,
    position_rows: i32,
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
#[repr(C)]
#[derive(Clone, Copy)]
struct RawSequences {
    q_offset: u64,
    q_len: u64,
    kv_offset: u64,
    kv_len: u64,
    count: u64,
    most: i32,
}
// SAFETY: repr(C), the fields of `Sequences` in metadata.cu.
unsafe impl Argument for RawSequences {}
// SAFETY: repr(C), the fields of `Mask` in metadata.cu.
unsafe impl Argument for RawMask {}
// SAFETY: repr(C), the fields of `Ids` in metadata.cu.
unsafe impl Argument for RawIds {}
// SAFETY: repr(C), the fields of `Runs` in metadata.cu.
unsafe impl Argument for RawRuns {}

fn raw_mask(mask: &Mask) -> Result<RawMask, KernelError> {
    if !mask.is_band() {
        return Err(KernelError::shape(format!(
            "a table of segments is made of a band, and the mask is {mask:?}"
        )));
    }
    let side = |bound: Option<u32>| bound.map_or(-1, i64::from);
    let bottom_right = i32::from(mask.align == Alignment::BottomRight);
    Ok(RawMask { left: side(mask.left), right: side(mask.right), bottom_right })
}

/// The tables that a rank's slots are written to, i32 each.
#[derive(Clone, Copy, Debug)]
pub struct SlotTables<'a> {
    /// The first rows.
    pub offset: Area<'a>,
    /// The owned rows.
    pub span: Area<'a>,
    /// The real rows.
    pub len: Area<'a>,
}

/// Segment ids and positions, i32 each. Id 0 is padding. An array may have whole batch rows whose number divides that
/// of all, and is repeated.
#[derive(Clone, Copy, Debug)]
pub struct SegmentIds<'a> {
    /// The ids, `[rows]` or fewer.
    pub id: Area<'a>,
    /// The positions, `[rows]` or fewer; without them the rows of each segment count from 0.
    pub position: Option<Area<'a>>,
    /// The rows of all batch rows together.
    pub rows: usize,
    /// The rows of a batch row, which divide `rows`. No run crosses the end of a batch row.
    pub row_length: usize,
}

/// The tables that runs are written to, i32 each. All four have room for the same number.
#[derive(Clone, Copy, Debug)]
pub struct RunTables<'a> {
    /// The first rows; `rows` behind the last run.
    pub offset: Area<'a>,
    /// The number of rows; 0 behind the last run.
    pub len: Area<'a>,
    /// The segment ids.
    pub id: Area<'a>,
    /// The positions of first rows.
    pub position: Area<'a>,
    /// The number of runs that fit.
    pub room: usize,
    /// The number of runs, one i32. If it is larger than `room`, the last runs are missing.
    pub count: Area<'a>,
}

/// The tables that sequences are written to, i32 each: `most` places for each batch row. Places behind the last
/// sequence are empty, at the first row of the batch row.
#[derive(Clone, Copy, Debug)]
pub struct SequenceTables<'a> {
    /// The first rows of queries, and of the batch row where a sequence has none.
    pub q_offset: Area<'a>,
    /// The numbers of queries.
    pub q_len: Area<'a>,
    /// The first rows of keys, and of the batch row where a sequence has none.
    pub kv_offset: Area<'a>,
    /// The numbers of keys.
    pub kv_len: Area<'a>,
    /// The number of sequences that fit into a batch row's part.
    pub most: usize,
    /// The number of sequences of each batch row. If it is larger than `most`, the last ones are missing; −1 where ids
    /// and positions say something that sequences do not.
    pub count: Area<'a>,
}

impl<'a> SegmentIds<'a> {
    /// Returns the bytes of scratch that [`TableKernels::runs`] needs.
    pub fn scratch_bytes(&self) -> usize {
        blocks(self.rows, RUN_TILE) * 4
    }

    /// Returns the bytes of a side's scratch that [`TableKernels::sequences`] needs.
    pub fn sequence_scratch_bytes(&self) -> usize {
        self.scratch_bytes() + (4 * self.rows + 1) * 4
    }

    /// Returns the arrays, by name.
    fn arrays(&self) -> Vec<(&'static str, Area<'a>)> {
        [("id", Some(self.id)), ("position", self.position)]
            .into_iter()
            .filter_map(|(name, area)| Some((name, area?)))
            .collect()
    }

    /// Checks that batch rows divide the rows, and that whole batch rows of each array do.
    fn check(&self) -> Result<(), KernelError> {
        let divides = |rows: usize| {
            self.row_length > 0
                && rows.is_multiple_of(self.row_length)
                && (if rows == 0 { self.rows == 0 } else { self.rows.is_multiple_of(rows) })
        };
        if !divides(self.rows) || self.rows > ROWS_MAX || self.row_length > ROWS_MAX {
            let what = format!("{} rows do not divide into batch rows of {}", self.rows, self.row_length);
            return Err(KernelError::shape(what));
        }
        for (name, area) in self.arrays() {
            let rows = area.bytes() / 4;
            holds_i32(name, area, rows)?;
            if !divides(rows) {
                let what = format!(
                    "{name}: {rows} rows are not repeated to {} in batch rows of {}",
                    self.rows, self.row_length
                );
                return Err(KernelError::shape(what));
            }
        }
        Ok(())
    }

    fn raw(&self) -> RawIds {
        let rows_of = |area: Option<Area>| area.map_or(0, |area| area.bytes() / 4) as i32;
        RawIds {
            id: self.id.address(),
            position: self.position.map_or(0, |area| area.address()),
            rows: self.rows as i32,
            row_length: self.row_length as i32,
            id_rows: rows_of(Some(self.id)),
            position_rows: rows_of(self.position),
        }
    }
}

impl RunTables<'_> {
    fn raw(&self) -> RawRuns {
        RawRuns {
            offset: self.offset.address(),
            len: self.len.address(),
            id: self.id.address(),
            position: self.position.address(),
            room: self.room as i32,
        }
    }
}

/// The launches of this module.
pub trait TableKernels: Launch {
    /// Makes a rank's slots from those of the whole batch: offsets, spans and gaps are divided by cp, and real rows
    /// are counted.
    fn rank_slots(&self, batch: Slots, cut: Cut, rank: usize, to: SlotTables) -> Result<(), KernelError> {
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

    /// Makes TransformerEngine's `get_cu_seqlens_on_cp_rank`: the running sum, from 0, of the real rows of each
    /// slot's first and second chunk, each counted where it is asked for. It has count + 1 i32.
    fn cu_seqlens_on_rank(
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

    /// Makes the segments of a step of the ring, forward or backward: [`SEGMENT_BYTES`] for each piece of `owner`'s
    /// keys, piece of `rank`'s queries and sequence, in this order, the last fastest. Whole sequences, which an
    /// all-to-all collects on every rank, are a ring of one rank. In stripes of one row, each rank has the rows of
    /// `pieces` ranks of a finer cut, one after the other, as in the ring of a hierarchy.
    ///
    /// In stripes of several rows, `pieces` is the number of stripes of the longest slot of queries. There is a segment
    /// of all rows for each sequence, and for each of the two bounds one for each stripe and sequence. Other cuts do not
    /// read `pieces`.
    fn ring_segments(
        &self,
        [q, kv]: [Slots; 2],
        mask: &Mask,
        (cut, pieces): (Cut, usize),
        [rank, owner]: [usize; 2],
        segments: Area,
    ) -> Result<(), KernelError> {
        let raw = check_sequences([q, kv])?;
        let cut = in_ring(cut);
        let (rank, owner) = (cut.check_rank(rank)?, cut.check_rank(owner)?);
        let tables = both_tables([q, kv]);
        let ([cp, balance, stripe], most) = (cut.numbers()?, check_pieces(pieces)?);
        let (mask, to) = (raw_mask(mask)?, segments.address());
        if stripe > 1 {
            let count = q.count.saturating_mul(1 + 2 * pieces);
            check_segments(segments, count, &tables)?;
            let arguments: [&dyn Argument; 9] =
                [&raw[0], &raw[1], &mask, &cp, &stripe, &most, &rank, &owner, &to];
            return self.launch("ring_stripes", (blocks(count, THREADS), 1, THREADS), &arguments);
        }
        let parts = match cut.balance {
            Balance::Contiguous => 1,
            Balance::DualChunk => 2,
            Balance::Striped { .. } => pieces,
        };
        let count = q.count.saturating_mul(parts * parts);
        check_segments(segments, count, &tables)?;
        let arguments: [&dyn Argument; 9] =
            [&raw[0], &raw[1], &mask, &cp, &balance, &most, &rank, &owner, &to];
        self.launch("ring_segments", (blocks(count, THREADS), 1, THREADS), &arguments)
    }

    /// Makes the segments of an all-gather's forward: [`SEGMENT_BYTES`] for each piece of `rank`'s queries and
    /// sequence, the last fastest. Keys are the visible prefix, in sequence order. Stripes are pieces, unless those of
    /// one row are on one rank: `stripes` is their number in the longest slot, and other cuts do not read it. Of
    /// stripes of one row on several ranks the piece comes fastest. Queries of a launch thereby follow each other in
    /// memory, and [`copy_valid`](crate::RowKernels::copy_valid) takes them as slots.
    fn all_gather_segments(
        &self,
        [q, kv]: [Slots; 2],
        mask: &Mask,
        (cut, stripes): (Cut, usize),
        rank: usize,
        segments: Area,
    ) -> Result<(), KernelError> {
        let raw = check_sequences([q, kv])?;
        let cut = match cut.balance {
            // Such a cut is one piece.
            Balance::Striped { stripe: 1 } if cut.cp == 1 => Cut { balance: Balance::Contiguous, ..cut },
            _ => cut,
        };
        let [cp, balance, stripe] = cut.numbers()?;
        let count = match cut.balance {
            Balance::Contiguous => q.count,
            Balance::DualChunk => 2 * q.count,
            Balance::Striped { .. } => q.count.saturating_mul(stripes),
        };
        let (rank, most) = (cut.check_rank(rank)?, check_pieces(stripes)?);
        check_segments(segments, count, &both_tables([q, kv]))?;
        check_gathered(kv, cut)?;
        let (mask, to) = (raw_mask(mask)?, segments.address());
        let arguments: [&dyn Argument; 9] =
            [&raw[0], &raw[1], &mask, &cp, &balance, &stripe, &most, &rank, &to];
        self.launch("all_gather_segments", (blocks(count, THREADS), 1, THREADS), &arguments)
    }

    /// Writes what segments say into the tables of a call, which has a run of keys for each of them. The call's own
    /// lengths and bounds are not read.
    fn fill_call(&self, segments: Area, call: &CallTables, tables: Area) -> Result<(), KernelError> {
        let [count, runs] = call.counts();
        if call.has_bands_of_keys() {
            return Err(KernelError::shape("a prefix, which segments of a table do not have"));
        }
        if call.has_sink_tokens() {
            return Err(KernelError::shape("sink tokens, which segments of a table do not have"));
        }
        if runs != count {
            let what =
                format!("{runs} runs of keys; segments of a table have one each, and there are {count}");
            return Err(KernelError::shape(what));
        }
        if tables.bytes() != call.bytes().len() {
            return Err(KernelError::shape(format!("{} bytes are not the call's tables", tables.bytes())));
        }
        on_bytes("the call's tables", tables.address(), 8)?;
        check_segments(segments, count, &[("the call's tables", tables)])?;
        let runs = tables.address() + (count * CALL_SEGMENT_BYTES) as u64;
        let arguments: [&dyn Argument; 4] = [&segments.address(), &(count as i32), &tables.address(), &runs];
        self.launch("fill_call", (blocks(count, THREADS), 1, THREADS), &arguments)
    }

    /// Makes slots of the queries of `count` segments, without padding.
    fn query_slots(&self, segments: Area, count: usize, to: SlotTables) -> Result<(), KernelError> {
        let written = [("offset", to.offset), ("span", to.span), ("len", to.len)];
        hold_i32(&written, count)?;
        check_segments(segments, count, &written)?;
        check_apart(&written, &[])?;
        let arguments: [&dyn Argument; 5] = [
            &segments.address(),
            &(count as i32),
            &to.offset.address(),
            &to.span.address(),
            &to.len.address(),
        ];
        self.launch("query_slots", (blocks(count, THREADS), 1, THREADS), &arguments)
    }

    /// Makes the segments of an all-gather's backward. They are the forward's table, and the segments of one sequence
    /// go to different launches. For stripes of 1 on several ranks there are [`SEGMENT_BYTES`] for each residue below
    /// cp and sequence, the last fastest, and a launch for each residue; keys are every cp-th row from the segment's
    /// first one.
    fn all_gather_backward_segments(
        &self,
        [q, kv]: [Slots; 2],
        mask: &Mask,
        (cut, stripes): (Cut, usize),
        rank: usize,
        segments: Area,
    ) -> Result<(), KernelError> {
        if cut.balance != (Balance::Striped { stripe: 1 }) || cut.cp == 1 {
            return self.all_gather_segments([q, kv], mask, (cut, stripes), rank, segments);
        }
        let raw = check_sequences([q, kv])?;
        let [cp, ..] = cut.numbers()?;
        let rank = cut.check_rank(rank)?;
        let count = cut.cp * q.count;
        check_segments(segments, count, &both_tables([q, kv]))?;
        check_gathered(kv, cut)?;
        let arguments: [&dyn Argument; 6] =
            [&raw[0], &raw[1], &raw_mask(mask)?, &cp, &rank, &segments.address()];
        self.launch("all_gather_residues", (blocks(count, THREADS), 1, THREADS), &arguments)
    }

    /// Writes tables of i64 as tables of i32 into `room`, which has 12 bytes for each slot, and returns these for later
    /// launches. A number past 32 bits becomes the nearest that fits: no tensor has its row, before or after.
    fn narrow<'r>(&self, wide: WideSlots, room: Area<'r>) -> Result<Slots<'r>, KernelError> {
        let (raw, slots) = wide.narrowed(room)?;
        let shape = (blocks(3 * wide.count, THREADS), 1, THREADS);
        self.launch("narrow_slots", shape, &[&raw, &room.address()])?;
        Ok(slots)
    }

    /// Finds the runs of rows with one id and growing positions. `scratch` has [`SegmentIds::scratch_bytes`].
    fn runs(&self, ids: SegmentIds, scratch: Area, to: RunTables) -> Result<(), KernelError> {
        ids.check()?;
        let tables =
            [("offset", to.offset), ("len", to.len), ("run id", to.id), ("run position", to.position)];
        hold_i32(&tables, to.room)?;
        hold_i32(&[("count", to.count)], 1)?;
        let tile_count = blocks(ids.rows, RUN_TILE);
        holds_i32("scratch", scratch, tile_count)?;
        let written: Vec<(&str, Area)> =
            tables.into_iter().chain([("count", to.count), ("scratch", scratch)]).collect();
        check_apart(&written, &ids.arrays())?;
        let (raw, rows, runs) = (ids.raw(), ids.rows as i32, to.raw());
        let (tiles, count) = (scratch.address(), to.count.address());
        self.launch("count_runs", (tile_count, 1, THREADS), &[&raw, &tiles])?;
        self.launch("sum_runs", (1, 1, SCAN_THREADS), &[&tiles, &(tile_count as i32), &count])?;
        self.launch("write_runs", (tile_count, 1, THREADS), &[&raw, &tiles, &runs])?;
        self.launch("finish_runs", (blocks(to.room, THREADS), 1, THREADS), &[&count, &rows, &runs])
    }

    /// Makes the sequences of each batch row from ids and positions of both sides, as
    /// [`seamproof_oracle::segments::Segments::sequences`] does, batch row by batch row. `scratch` has
    /// [`SegmentIds::sequence_scratch_bytes`] of q, and behind them those of kv.
    fn sequences(
        &self,
        [q, kv]: [SegmentIds; 2],
        scratch: Area,
        to: SequenceTables,
    ) -> Result<(), KernelError> {
        [q, kv].iter().try_for_each(SegmentIds::check)?;
        let batch_rows = q.rows / q.row_length;
        if kv.rows / kv.row_length != batch_rows {
            let what = format!("{batch_rows} batch rows of q and {} of kv", kv.rows / kv.row_length);
            return Err(KernelError::shape(what));
        }
        let tables = [
            ("q offset", to.q_offset),
            ("q len", to.q_len),
            ("kv offset", to.kv_offset),
            ("kv len", to.kv_len),
        ];
        hold_i32(&tables, batch_rows.saturating_mul(to.most))?;
        holds_i32("count", to.count, batch_rows)?;
        let written: Vec<(&str, Area)> =
            tables.into_iter().chain([("count", to.count), ("scratch", scratch)]).collect();
        check_apart(&written, &[q.arrays(), kv.arrays()].concat())?;
        let (of_q, of_kv) = (q.sequence_scratch_bytes(), kv.sequence_scratch_bytes());
        if scratch.bytes() < of_q + of_kv {
            let what = format!("scratch: {} bytes, not {}", scratch.bytes(), of_q + of_kv);
            return Err(KernelError::shape(what));
        }
        let q_runs = runs_in(self, q, scratch.part(0..of_q)?)?;
        let kv_runs = runs_in(self, kv, scratch.part(of_q..of_q + of_kv)?)?;
        let raw = RawSequences {
            q_offset: to.q_offset.address(),
            q_len: to.q_len.address(),
            kv_offset: to.kv_offset.address(),
            kv_len: to.kv_len.address(),
            count: to.count.address(),
            most: to.most as i32,
        };
        let lengths = [q.row_length, kv.row_length].map(|length| length as i32);
        let arguments: [&dyn Argument; 5] = [&q_runs.raw(), &kv_runs.raw(), &lengths[0], &lengths[1], &raw];
        self.launch("pair_runs", (batch_rows, 1, THREADS), &arguments)
    }
}

impl<L: Launch + ?Sized> TableKernels for L {}

/// Finds all runs of a side, in its scratch.
fn runs_in<'a, L: Launch + ?Sized>(
    gpu: &L,
    ids: SegmentIds,
    scratch: Area<'a>,
) -> Result<RunTables<'a>, KernelError> {
    let part = |first: usize, numbers: usize| scratch.part(4 * first..4 * (first + numbers));
    let (room, tiles) = (ids.rows, blocks(ids.rows, RUN_TILE));
    let table = |index: usize| part(index * room, room);
    let to = RunTables {
        offset: table(0)?,
        len: table(1)?,
        id: table(2)?,
        position: table(3)?,
        room,
        count: part(4 * room, 1)?,
    };
    gpu.runs(ids, part(4 * room + 1, tiles)?, to)?;
    Ok(to)
}

/// Checks two batches, which must have as many sequences.
fn check_sequences([q, kv]: [Slots; 2]) -> Result<[RawSlots; 2], KernelError> {
    if q.count != kv.count {
        return Err(KernelError::shape(format!("{} sequences of q and {} of kv", q.count, kv.count)));
    }
    Ok([q.raw()?, kv.raw()?])
}

/// Returns the tables of both sides' slots.
fn both_tables<'a>(sides: [Slots<'a>; 2]) -> Vec<(&'static str, Area<'a>)> {
    sides.map(|slots| slots.tables()).concat()
}

/// Returns a cut as a ring takes it: the stripes of a rank alone are one piece.
fn in_ring(cut: Cut) -> Cut {
    match cut.balance {
        Balance::Striped { stripe: 2.. } if cut.cp == 1 => Cut { balance: Balance::Contiguous, ..cut },
        _ => cut,
    }
}

/// Refuses numbers of pieces that no slot has.
fn check_pieces(pieces: usize) -> Result<i32, KernelError> {
    if pieces > ROWS_MAX {
        return Err(KernelError::shape(format!("{pieces} pieces of a slot; at most {ROWS_MAX}")));
    }
    Ok(pieces as i32)
}

/// Refuses memory that has not room for `count` segments apart from other tables.
fn check_segments(segments: Area, count: usize, others: &[(&str, Area)]) -> Result<(), KernelError> {
    let bytes = count.checked_mul(SEGMENT_BYTES);
    if bytes != Some(segments.bytes()) {
        let what = format!("segments: {} bytes, not {count} of {SEGMENT_BYTES}", segments.bytes());
        return Err(KernelError::shape(what));
    }
    on_bytes("segments", segments.address(), 16)?;
    check_apart(&[("segments", segments)], others)
}

/// Refuses gathered rows past 32 bits.
fn check_gathered(kv: Slots, cut: Cut) -> Result<(), KernelError> {
    if kv.rows.saturating_mul(cut.cp) > ROWS_MAX {
        return Err(KernelError::shape(format!(
            "{} × {} gathered rows; at most {ROWS_MAX}",
            kv.rows, cut.cp
        )));
    }
    Ok(())
}
