//! The operations of sequence-parallel regions: a linear layer that copies heads, and the rotation of rows by their
//! positions ([`seamproof_oracle::region`]). Both move bits and are exact. The twins on the CPU are in
//! `seamproof_simulator::helpers`.
#![allow(unsafe_code, reason = "says which types kernels receive")]

use seamproof_oracle::Run;
use seamproof_simulator::helpers::Rest;
use seamproof_simulator::schedule::{Layer, Rotated};

use crate::block::THREADS;
use crate::codec::element_bytes;
use crate::error::KernelError;
use crate::gpu::Launch;
use crate::memory::{Area, Argument};
use crate::merge::DeviceTensor;
use crate::pairs::{check_once, end_of};
use crate::rows::{ByteRows, check_pair, move_rows, same};
use crate::tables::{ROWS_MAX, blocks, check_apart, on_bytes};
use crate::view::Table;

/// The constant `TILE_BYTES` of the source: the most bytes of a row's head.
const TILE_BYTES: usize = 16384;
/// The bytes that threads move at once where heads and addresses are multiples of them.
const VECTOR: usize = 16;

#[repr(C)]
#[derive(Clone, Copy)]
struct LayerMap {
    parts: i32,
    part: i32,
    to_hidden: i32,
}
#[repr(C)]
#[derive(Clone, Copy)]
struct RawRotation {
    turns: u64,
    count: i32,
    heads: i32,
    rows: i64,
    dim: u32,
    inverse: i32,
    tile_rows: u32,
    tile_heads: u32,
}
// SAFETY: repr(C), the fields of `Layer` in rows.cu.
unsafe impl Argument for LayerMap {}
// SAFETY: repr(C), the fields of `Rotation` in rotation.cu.
unsafe impl Argument for RawRotation {}

/// The part of hidden rows that is a rank's: its heads are part `index` of `count` equal parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadPart {
    /// The part, from 0.
    pub index: usize,
    /// The number of parts.
    pub count: usize,
}

/// Rows and their positions, as a table in the making.
#[derive(Clone, Debug, Default)]
pub struct RotationTable {
    table: Table,
    count: usize,
    rows: usize,
    /// The rows that the tensor must have.
    end: usize,
    written: Vec<Run>,
}

impl RotationTable {
    /// Returns the table of these rows.
    pub fn new(rotated: &[Rotated]) -> RotationTable {
        let mut of = RotationTable::default();
        for Rotated { rows, position, step } in rotated.iter().filter(|rotated| rotated.rows.len > 0) {
            of.table.rows(&[rows.offset, rows.step, *position, *step, of.rows]);
            of.count += 1;
            of.rows += rows.len;
            of.end = of.end.max(end_of(*rows));
            of.written.push(*rows);
        }
        of
    }

    /// Returns the table as the kernel reads it.
    pub fn bytes(&self) -> &[u8] {
        self.table.bytes()
    }

    /// Refuses memory that is not this table, and rows that the tensor lacks or that come twice.
    fn check(&self, table: Area, to: &DeviceTensor) -> Result<(), KernelError> {
        if table.bytes() != self.bytes().len() {
            let what = format!("{} bytes are not the table of {} turns", table.bytes(), self.count);
            return Err(KernelError::shape(what));
        }
        on_bytes("the table", table.address(), 8)?;
        if self.end > to.rows {
            let what = format!("rows up to {} are rotated, and the tensor has {}", self.end, to.rows);
            return Err(KernelError::shape(what));
        }
        check_once(&self.written)
    }
}

/// The launches of this module.
pub trait RegionKernels: Launch {
    /// Applies a linear layer that copies heads. A row is a rank's heads on one side, and a hidden row is as long as
    /// `of.count` rows and counts as that many. Hidden rows that are written hold zeros in other parts.
    fn layer(&self, layer: Layer, of: HeadPart, from: ByteRows, to: ByteRows) -> Result<(), KernelError> {
        check_pair(from, to)?;
        let HeadPart { index, count } = of;
        if index >= count || count > ROWS_MAX {
            return Err(KernelError::shape(format!("part {index} of {count} parts of a hidden row")));
        }
        let (rows, hidden) = match layer {
            Layer::Column => (to.rows, ("from", from.rows)),
            Layer::Row => (from.rows, ("to", to.rows)),
        };
        same(hidden.0, hidden.1, rows.saturating_mul(count))?;
        let to_hidden = i32::from(layer == Layer::Row);
        let map = LayerMap { parts: count as i32, part: index as i32, to_hidden };
        move_rows(self, "layer", (&[], &map), to.rows, [from, to], Rest::Fill(0))
    }

    /// Rotates rows by their positions in place, all heads; `inverse` turns them back. `table` holds `rows`.
    fn rotate(
        &self,
        rows: &RotationTable,
        table: Area,
        inverse: bool,
        to: DeviceTensor,
    ) -> Result<(), KernelError> {
        to.check("to", to.rows)?;
        let element = element_bytes(to.format);
        let head_bytes = to.dim * element;
        if head_bytes > TILE_BYTES {
            let what = format!("a head of {head_bytes} bytes is rotated; at most {TILE_BYTES}");
            return Err(KernelError::shape(what));
        }
        rows.check(table, &to)?;
        check_apart(&[("to", to.area)], &[("the table", table)])?;
        let items = (TILE_BYTES / head_bytes).clamp(1, THREADS);
        let tile_heads = items.min(to.heads).max(1);
        let tile_rows = items / tile_heads;
        let rotation = RawRotation {
            turns: table.address(),
            count: rows.count as i32,
            heads: to.heads as i32,
            rows: rows.rows as i64,
            dim: to.dim as u32,
            inverse: i32::from(inverse),
            tile_rows: tile_rows as u32,
            tile_heads: tile_heads as u32,
        };
        let in_vectors = (to.area.address() | head_bytes as u64).is_multiple_of(VECTOR as u64);
        let kernel = format!("rotate_{element}_{}", if in_vectors { VECTOR } else { element });
        let tiles = (blocks(rows.rows, tile_rows), to.heads.div_ceil(tile_heads), THREADS);
        self.launch(&kernel, tiles, &[&rotation, &to.area.address()])
    }
}

impl<L: Launch + ?Sized> RegionKernels for L {}
