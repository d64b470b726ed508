//! Tensors on the device, addressed by row, head and lane whatever their layout, and tables of numbers.
#![allow(unsafe_code, reason = "says which types kernels receive")]

use seamproof_oracle::Format;

use crate::codec::{element_bytes, format_number};
use crate::error::KernelError;
use crate::forward::ALIGNMENT;
use crate::memory::{Area, Argument};
use crate::tables::{ROWS_MAX, on_bytes};

/// The number of e4m3 in the sources.
const CODES: i32 = 3;
/// The bytes that a table has room for from its first number on.
const ROOM: usize = 512;

/// A tensor in device memory. The lanes of a row and head are neighbours.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    area: Area<'a>,
    rows: usize,
    heads: usize,
    dim: usize,
    strides: [usize; 2],
    format: Format,
}

/// The struct `View` of the sources.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawView {
    pub(crate) base: u64,
    pub(crate) row: i64,
    pub(crate) head: i64,
    pub(crate) format: i32,
}
// SAFETY: repr(C), the fields of `View` in common.cuh.
unsafe impl Argument for RawView {}

/// The struct `Elements` of hopper.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RawElements {
    pub(crate) view: RawView,
    pub(crate) rows: i32,
    pub(crate) step: i32,
    pub(crate) dim: i32,
}

/// Returns whether a format is one of FP8, whose elements are codes of one byte.
pub(crate) fn is_codes(format: Format) -> bool {
    matches!(format, Format::E4m3 | Format::E5m2)
}

/// Returns the number by which kernels know the format of codes; 0 for any other format.
pub(crate) fn number_of_codes(format: Format) -> i32 {
    match format {
        Format::E4m3 => 3,
        Format::E5m2 => 4,
        _ => 0,
    }
}

impl<'a> View<'a> {
    /// Returns the view of a tensor `[rows, heads, dim]`.
    pub fn rows(area: Area<'a>, [rows, heads, dim]: [usize; 3], format: Format) -> View<'a> {
        // A product past 64 bits is refused with the shape.
        View { area, rows, heads, dim, strides: [heads.saturating_mul(dim), dim], format }
    }

    /// Returns the view of a statistic `[heads, rows]`.
    pub fn statistic(area: Area<'a>, [heads, rows]: [usize; 2], format: Format) -> View<'a> {
        View { area, rows, heads, dim: 1, strides: [1, rows], format }
    }

    /// Returns the view of one number a head, which stands for every row.
    pub fn heads(area: Area<'a>, heads: usize, format: Format) -> View<'a> {
        View { area, rows: 1, heads, dim: 1, strides: [0, 1], format }
    }

    /// Returns `[rows, heads, dim]`.
    pub fn shape(&self) -> [usize; 3] {
        [self.rows, self.heads, self.dim]
    }

    /// Returns the memory, with a name for messages.
    pub(crate) fn named(&self, name: &'static str) -> (&'static str, Area<'a>) {
        (name, self.area)
    }

    /// Returns whether the tensor begins on 16 bytes.
    pub(crate) fn is_on_vectors(&self) -> bool {
        self.area.address().is_multiple_of(ALIGNMENT as u64)
    }

    /// Returns the storage format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns the view as kernels take it, checked to lie in its area.
    pub fn raw(&self, name: &str) -> Result<RawView, KernelError> {
        self.checked(name, format_number(name, self.format)?)
    }

    /// Returns the view as kernels take it that move elements, codes of one byte among them.
    pub(crate) fn raw_moved(&self, name: &str) -> Result<RawView, KernelError> {
        if is_codes(self.format) { self.raw_codes(name) } else { self.raw(name) }
    }

    /// Returns the view of codes of one byte, which only kernels in FP8 take.
    pub(crate) fn raw_codes(&self, name: &str) -> Result<RawView, KernelError> {
        if !is_codes(self.format) {
            return Err(KernelError::shape(format!("{name} in {}, not in e4m3 or e5m2", self.format)));
        }
        self.checked(name, CODES)
    }

    /// Refuses codes that do not lie in their area.
    pub(crate) fn check(&self, name: &str) -> Result<(), KernelError> {
        self.checked(name, CODES).map(drop)
    }

    fn checked(&self, name: &str, number: i32) -> Result<RawView, KernelError> {
        let View { area, rows, heads, dim, strides: [row, head], format } = *self;
        let element = element_bytes(format);
        let bytes = [rows, heads, dim, element].into_iter().try_fold(1_usize, usize::checked_mul);
        if bytes != Some(area.bytes()) || rows > ROWS_MAX || heads > ROWS_MAX || dim > ROWS_MAX {
            let bytes = area.bytes();
            return Err(KernelError::shape(format!("{name}: [{rows}, {heads}, {dim}] in {bytes} bytes")));
        }
        on_bytes(name, area.address(), element)?;
        Ok(RawView { base: area.address(), row: row as i64, head: head as i64, format: number })
    }
}

/// A table in the making: numbers as kernels read them.
#[derive(Clone, Debug, Default)]
pub struct Table(pub(crate) Vec<u8>);

impl Table {
    /// Returns the table as bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn i64(&mut self, numbers: &[i64]) {
        self.append(numbers.iter().map(|number| number.to_le_bytes()));
    }

    /// Appends rows and counts as 64-bit numbers.
    pub(crate) fn rows(&mut self, numbers: &[usize]) {
        self.append(numbers.iter().map(|&number| (number as i64).to_le_bytes()));
    }

    /// Appends 32-bit numbers.
    pub fn i32(&mut self, numbers: &[i32]) {
        self.append(numbers.iter().map(|number| number.to_le_bytes()));
    }

    pub(crate) fn view(&mut self, view: RawView) {
        self.append([view.base as i64, view.row, view.head].into_iter().map(i64::to_le_bytes));
        self.i32(&[view.format, 0]);
    }

    /// Appends numbers. A table that has no room left gets [`ROOM`] at least: a vector of bytes would begin with eight
    /// of them, and move at every few numbers.
    fn append<const N: usize>(&mut self, numbers: impl ExactSizeIterator<Item = [u8; N]>) {
        let more = N * numbers.len();
        if self.0.capacity() - self.0.len() < more {
            self.0.reserve(more.max(ROOM));
        }
        numbers.for_each(|number| self.0.extend_from_slice(&number));
    }
}
