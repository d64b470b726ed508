//! Turned copies of codes: of each head and lane all rows, one after the other (see `turned.cu`). Tensor cores take V
//! in FP8 this way.
#![allow(unsafe_code, reason = "says which types kernels receive")]

use crate::block::THREADS;
use crate::error::KernelError;
use crate::gpu::{Gpu, Launch};
use crate::memory::{Area, Argument};
use crate::tables::{ROWS_MAX, blocks, check_apart, on_bytes};
use crate::view::View;

/// The rows of a group, within which keys have an order of their own.
const GROUP: usize = 16;
/// The rows and lanes of a tile.
const ROWS: usize = 64;
const LANES: usize = 128;
/// The bytes of a vector.
pub(crate) const VECTOR: usize = 16;

/// The shape of a turned copy: `[heads, dim, positions]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnedShape {
    /// The heads.
    pub heads: usize,
    /// The lanes of a head.
    pub dim: usize,
    /// The rows of the tensor, filled up to whole groups of 16.
    pub positions: usize,
}

/// The struct `Turned` of the source.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawTurned {
    to: u64,
    rows: u32,
    lanes: u32,
    positions: u32,
}
// SAFETY: repr(C), the fields of `Turned` in turned.cu.
unsafe impl Argument for RawTurned {}

impl TurnedShape {
    /// Returns the shape of the copy of a tensor `[rows, heads, dim]`.
    pub fn of([rows, heads, dim]: [usize; 3]) -> TurnedShape {
        TurnedShape { heads, dim, positions: rows.next_multiple_of(GROUP) }
    }

    /// Returns the bytes of the copy.
    pub fn bytes(self) -> usize {
        self.heads * self.dim * self.positions
    }

    /// Refuses memory that is no copy of this shape: of another length, or off 16 bytes.
    pub(crate) fn check(self, copy: Area) -> Result<(), KernelError> {
        if copy.bytes() != self.bytes() {
            let what = format!("{} bytes for a turned copy, not {}", copy.bytes(), self.bytes());
            return Err(KernelError::shape(what));
        }
        on_bytes("the turned copy", copy.address(), VECTOR)
    }

    /// Returns the grid of blocks that writes it.
    pub(crate) fn grid(self) -> (usize, usize, usize) {
        (blocks(self.heads * self.dim, LANES) * blocks(self.positions, ROWS), 1, THREADS)
    }

    /// Returns the position of a row among the positions.
    pub fn position_of(row: usize) -> usize {
        let (group, key) = (row / GROUP * GROUP, row % GROUP);
        group + key % 8 / 2 * 4 + key / 8 * 2 + key % 2
    }
}

impl RawTurned {
    /// Returns what kernels receive, for the copy of a tensor `[rows, heads, dim]`.
    pub(crate) fn new([rows, heads, dim]: [usize; 3], to: Area) -> Result<RawTurned, KernelError> {
        let shape = TurnedShape::of([rows, heads, dim]);
        if !dim.is_multiple_of(VECTOR) || dim == 0 {
            let what = format!("codes of head dim {dim}; use a multiple of {VECTOR}");
            return Err(KernelError::shape(what));
        }
        if heads * dim > ROWS_MAX {
            return Err(KernelError::shape(format!(
                "{heads} heads of {dim} lanes; a row has at most {ROWS_MAX}"
            )));
        }
        shape.check(to)?;
        let [rows, lanes, positions] = [rows, heads * dim, shape.positions].map(|number| number as u32);
        Ok(RawTurned { to: to.address(), rows, lanes, positions })
    }
}

impl Gpu {
    /// Writes the turned copy of codes of e4m3. Both begin on 16 bytes, and head dims are multiples of 16.
    pub fn turn(&self, codes: &View, to: Area) -> Result<(), KernelError> {
        let from = codes.raw_codes("the codes")?;
        on_bytes("the codes", from.base, VECTOR)?;
        let raw = RawTurned::new(codes.shape(), to)?;
        check_apart(&[("the turned copy", to)], &[codes.named("the codes")])?;
        let grid = TurnedShape::of(codes.shape()).grid();
        self.launch("turn_codes", grid, &[&raw, &from.base])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_keeps_its_rows() {
        let positions: Vec<usize> = (0..2 * GROUP).map(TurnedShape::position_of).collect();
        assert_eq!(positions[..GROUP], [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]);
        let second: Vec<usize> = positions[..GROUP].iter().map(|position| position + GROUP).collect();
        assert_eq!(positions[GROUP..], second);
    }

    #[test]
    fn positions_are_whole_groups() {
        let positions = |rows| TurnedShape::of([rows, 3, 48]).positions;
        assert_eq!([0, 1, 16, 17].map(positions), [0, 16, 16, 32]);
        assert_eq!(TurnedShape::of([17, 3, 48]).bytes(), 3 * 48 * 32);
    }
}
