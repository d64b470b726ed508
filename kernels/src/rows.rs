//! Rows moved whole: between rank order and sequence order, between THD, BSHD and SBHD, valid rows, halves, padding;
//! and the mask of valid rows. Rows that a layer moves are in [`region`](crate::region).
//!
//! A row has any number of bytes. Rows whose length and address are multiples of 16 move at full speed; others move
//! 8, 4, 2 or 1 bytes at a time. The twins on the CPU are in `seamproof_simulator::helpers`.
#![allow(unsafe_code, reason = "says which types kernels receive")]

use seamproof_simulator::helpers::{BatchLayout, Direction, Half, Rest};

use crate::block::{THREADS, WARP};
use crate::error::KernelError;
use crate::gpu::Launch;
use crate::memory::{Area, Argument};
use crate::tables::{Cut, ROWS_MAX, RawCut, RawSlots, Slots, blocks, check_apart, on_bytes};

/// The bytes of the widest vector.
const VECTOR: usize = 16;
/// The bytes that a block moves, unless a row is longer: four vectors of 16 bytes a thread.
const TILE_BYTES: usize = THREADS * 16 * 4;
/// The constant `TILE_ROWS_MAX` of the source.
const TILE_ROWS_MAX: usize = 256;
/// The constant `BULK_BYTES` of the source.
const BULK_BYTES: usize = 24576;
/// The bytes of a tile of the bulk copy engine, unless a row is longer. The source says why.
const BULK_TILE_BYTES: usize = 12288;
/// The bytes of a row that is worth a request of its own to the bulk copy engine.
const BULK_ROW_BYTES_MIN: usize = 512;
/// The rows of the mask that a thread writes.
const MASK_EACH: usize = 16;

/// A tensor as rows of bytes.
#[derive(Clone, Copy, Debug)]
pub struct ByteRows<'a> {
    /// The memory.
    pub area: Area<'a>,
    /// The number of rows.
    pub rows: usize,
    /// The bytes of a row, at least 1.
    pub row_bytes: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ReorderMap(RawSlots, RawCut, i32);
#[repr(C)]
#[derive(Clone, Copy)]
struct CopyValidMap(RawSlots, i32);
#[repr(C)]
#[derive(Clone, Copy)]
struct FillPaddingMap(RawSlots);
#[repr(C)]
#[derive(Clone, Copy)]
struct HalfMap(RawSlots, i32, i32, i32);
// SAFETY: repr(C), the fields of the maps in rows.cu.
unsafe impl Argument for ReorderMap {}
// SAFETY: repr(C), the fields of the maps in rows.cu.
unsafe impl Argument for CopyValidMap {}
// SAFETY: repr(C), the fields of the maps in rows.cu.
unsafe impl Argument for FillPaddingMap {}
#[repr(C)]
#[derive(Clone, Copy)]
struct ConvertMap(RawSlots, i32, i32, i32, i32);
// SAFETY: repr(C), the fields of the maps in rows.cu.
unsafe impl Argument for HalfMap {}
// SAFETY: repr(C), the fields of the maps in rows.cu.
unsafe impl Argument for ConvertMap {}

impl ByteRows<'_> {
    /// Returns the rows if they move at full speed, 16 bytes at a time, and otherwise says what is not aligned to 16
    /// bytes. All rows move without this, if more slowly; it is for whoever cannot be slow.
    pub fn in_vectors(self, name: &str) -> Result<Self, KernelError> {
        on_bytes(name, self.area.address(), VECTOR)?;
        if !self.row_bytes.is_multiple_of(VECTOR) {
            let what =
                format!("{name}: rows of {} bytes, which are not aligned to {VECTOR} bytes", self.row_bytes);
            return Err(KernelError::shape(what));
        }
        Ok(self)
    }

    fn check(&self, name: &str) -> Result<(), KernelError> {
        let ByteRows { area, rows, row_bytes } = *self;
        if row_bytes == 0 || row_bytes > ROWS_MAX || rows.checked_mul(row_bytes) != Some(area.bytes()) {
            let what = format!("{name}: {} bytes are not {rows} rows of {row_bytes}", area.bytes());
            return Err(KernelError::shape(what));
        }
        Ok(())
    }
}

/// Returns whether the rest is filled, and with which word.
fn fill(rest: Rest) -> (i32, u32) {
    match rest {
        Rest::Leave => (0, 0),
        Rest::Fill(byte) => (1, u32::from_ne_bytes([byte; 4])),
    }
}

/// Refuses two tensors whose rows differ in length, or that overlap.
pub(crate) fn check_pair(from: ByteRows, to: ByteRows) -> Result<(), KernelError> {
    from.check("from")?;
    to.check("to")?;
    if from.row_bytes != to.row_bytes {
        let what = format!("rows of {} bytes cannot move to rows of {}", from.row_bytes, to.row_bytes);
        return Err(KernelError::shape(what));
    }
    if from.area.overlaps(to.area) {
        return Err(KernelError::shape("rows are read and written in one place; the tensors must lie apart"));
    }
    Ok(())
}

pub(crate) fn same(name: &str, have: usize, want: usize) -> Result<(), KernelError> {
    if have == want { Ok(()) } else { Err(KernelError::shape(format!("{name}: {have} rows, not {want}"))) }
}

/// The launches of this module.
pub trait RowKernels: Launch {
    /// Moves ranks' rows, one rank after the other, to whole sequences, or back. `slots` are a rank's. Both tensors
    /// have `cp` times the rank's rows. The move is a bijection: every row is written, even one that no sequence
    /// owns.
    fn reorder(
        &self,
        slots: Slots,
        cut: Cut,
        order: Direction,
        from: ByteRows,
        to: ByteRows,
    ) -> Result<(), KernelError> {
        check_pair(from, to)?;
        let map = ReorderMap(slots.raw()?, cut.raw()?, i32::from(order == Direction::ToSequences));
        // Both numbers are checked by now, so that their product fits 64 bits.
        let rows = slots.rows * cut.cp;
        same("from", from.rows, rows)?;
        same("to", to.rows, rows)?;
        move_rows(self, "reorder", (&slots.tables(), &map), rows, [from, to], Rest::Leave)
    }

    /// Copies real rows to the same rows of another tensor.
    fn copy_valid(&self, slots: Slots, from: ByteRows, to: ByteRows, rest: Rest) -> Result<(), KernelError> {
        check_pair(from, to)?;
        same("from", from.rows, slots.rows)?;
        same("to", to.rows, slots.rows)?;
        let map = CopyValidMap(slots.raw()?, fill(rest).0);
        move_rows(self, "copy_valid", (&slots.tables(), &map), slots.rows, [from, to], rest)
    }

    /// Fills every row that is not real.
    fn fill_padding(&self, slots: Slots, to: ByteRows, byte: u8) -> Result<(), KernelError> {
        to.check("to")?;
        same("to", to.rows, slots.rows)?;
        let raw = slots.raw()?;
        if (to.area.address() | to.row_bytes as u64).is_multiple_of(16) {
            check_apart(&[("the target", to.area)], &slots.tables())?;
            let (address, pattern) = (to.area.address(), fill(Rest::Fill(byte)).1);
            let arguments: [&dyn Argument; 4] = [&raw, &address, &(to.row_bytes as u32), &pattern];
            return self.launch("fill_padding_16", (blocks(slots.rows, THREADS), 1, THREADS), &arguments);
        }
        let map = FillPaddingMap(raw);
        move_rows(self, "fill_padding", (&slots.tables(), &map), slots.rows, [to, to], Rest::Fill(byte))
    }

    /// Copies one half of every slot, padding included, to the layout of halves, whose offsets and spans are divided
    /// by two and rounded down. `rest` says what happens to rows of that layout that no slot owns.
    fn read_half(
        &self,
        slots: Slots,
        half: Half,
        whole: ByteRows,
        halves: ByteRows,
        rest: Rest,
    ) -> Result<(), KernelError> {
        check_pair(whole, halves)?;
        same("whole", whole.rows, slots.rows)?;
        check_half_rows(halves.rows)?;
        let map = HalfMap(slots.raw()?, half as i32, 0, fill(rest).0);
        move_rows(self, "half", (&slots.tables(), &map), halves.rows, [whole, halves], rest)
    }

    /// Copies the layout of halves back to one half of every slot. No other row changes.
    fn write_half(
        &self,
        slots: Slots,
        half: Half,
        halves: ByteRows,
        whole: ByteRows,
    ) -> Result<(), KernelError> {
        check_pair(halves, whole)?;
        same("whole", whole.rows, slots.rows)?;
        check_half_rows(halves.rows)?;
        let map = HalfMap(slots.raw()?, half as i32, 1, 0);
        move_rows(self, "half", (&slots.tables(), &map), halves.rows, [halves, whole], Rest::Leave)
    }

    /// Copies the real rows of a batch from one layout to another. Layouts other than THD have `positions` rows for
    /// each sequence, of which the real ones come first; real rows past those are left out. `rest` says what happens to
    /// the other rows of the target.
    fn convert(
        &self,
        slots: Slots,
        positions: usize,
        [from_layout, to_layout]: [BatchLayout; 2],
        [from, to]: [ByteRows; 2],
        rest: Rest,
    ) -> Result<(), KernelError> {
        check_pair(from, to)?;
        let batch = slots.count.checked_mul(positions).filter(|rows| *rows <= ROWS_MAX);
        let Some(batch) = batch.filter(|_| positions <= ROWS_MAX) else {
            let what = format!("{} sequences of {positions} rows; at most {ROWS_MAX} rows", slots.count);
            return Err(KernelError::shape(what));
        };
        let rows = |layout| if layout == BatchLayout::Thd { slots.rows } else { batch };
        same("from", from.rows, rows(from_layout))?;
        same("to", to.rows, rows(to_layout))?;
        let layouts = (from_layout as i32, to_layout as i32);
        let map = ConvertMap(slots.raw()?, positions as i32, layouts.0, layouts.1, fill(rest).0);
        move_rows(self, "convert", (&slots.tables(), &map), to.rows, [from, to], rest)
    }

    /// Writes a byte for each row: 1 where the row is real, else 0.
    fn valid_mask(&self, slots: Slots, mask: Area) -> Result<(), KernelError> {
        same("mask", mask.bytes(), slots.rows)?;
        check_apart(&[("mask", mask)], &slots.tables())?;
        let shape = (blocks(slots.rows, THREADS * MASK_EACH), 1, THREADS);
        self.launch("valid_mask", shape, &[&slots.raw()?, &mask.address()])
    }

    /// Writes, for each row of a rank's tensor, its row in sequence order as i64.
    fn partition_indices(
        &self,
        slots: Slots,
        cut: Cut,
        rank: usize,
        indices: Area,
    ) -> Result<(), KernelError> {
        let raw = slots.raw()?;
        if indices.bytes() != slots.rows * 8 {
            return Err(KernelError::shape(format!(
                "indices: {} bytes, not {} i64",
                indices.bytes(),
                slots.rows
            )));
        }
        on_bytes("indices", indices.address(), 8)?;
        let rank = cut.check_rank(rank)?;
        check_apart(&[("indices", indices)], &slots.tables())?;
        let arguments: [&dyn Argument; 4] = [&raw, &cut.raw()?, &rank, &indices.address()];
        self.launch("partition_indices", (blocks(slots.rows, THREADS), 1, THREADS), &arguments)
    }
}

impl<L: Launch + ?Sized> RowKernels for L {}

/// Moves rows as the map of a kernel says, which reads these tables, to `rows` rows.
pub(crate) fn move_rows<L: Launch + ?Sized>(
    gpu: &L,
    kernel: &str,
    (tables, map): (&[(&str, Area)], &dyn Argument),
    rows: usize,
    [from, to]: [ByteRows; 2],
    rest: Rest,
) -> Result<(), KernelError> {
    check_apart(&[("the target", to.area)], tables)?;
    let bits = from.area.address() | to.area.address() | to.row_bytes as u64;
    let vector = 1_usize << bits.trailing_zeros().min(4);
    let in_bulk = vector == 16 && to.row_bytes >= BULK_ROW_BYTES_MIN;
    let (unit, tile_bytes, tile_rows_max) = match in_bulk {
        true => (1, BULK_TILE_BYTES, WARP),
        false => (vector, TILE_BYTES, TILE_ROWS_MAX),
    };
    let tile_rows = (tile_bytes / to.row_bytes).clamp(1, tile_rows_max);
    let arguments: [&dyn Argument; 7] = [
        map,
        &(rows as i64),
        &from.area.address(),
        &to.area.address(),
        &((to.row_bytes / unit) as u32),
        &(tile_rows as u32),
        &fill(rest).1,
    ];
    let tiles = blocks(rows, tile_rows);
    if in_bulk {
        let pieces = blocks(to.row_bytes, BULK_BYTES);
        return gpu.launch(&format!("{kernel}_bulk"), (tiles, pieces, WARP), &arguments);
    }
    gpu.launch(&format!("{kernel}_{vector}"), (tiles, 1, THREADS), &arguments)
}

pub(crate) fn check_half_rows(rows: usize) -> Result<(), KernelError> {
    if rows > ROWS_MAX {
        return Err(KernelError::shape(format!("{rows} rows of halves; at most {ROWS_MAX}")));
    }
    Ok(())
}
