//! Buffers as bytes: where each lies, in its storage format.

use std::ops::Range;

use seamproof_oracle::Format;
use seamproof_simulator::device::Buffers;
use seamproof_simulator::schedule::{Axes, BufferId};

use crate::codec::{element_bytes, format_number, load, store};
use crate::error::KernelError;
use crate::memory::Area;
use crate::merge::{DeviceStatistic, DeviceTensor};
use crate::rows::ByteRows;
use crate::view::{View, is_codes};

/// The multiple on which elements begin, guards apart.
const ALIGNMENT: usize = 16;

/// The place of a buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    /// The bytes before the first guard.
    start: usize,
    guard: usize,
    /// The elements between the guards.
    elements: usize,
    pub(super) axes: Axes,
    pub(super) rows: usize,
    pub(super) heads: usize,
    pub(super) dim: usize,
    pub(super) format: Format,
}

/// Returns the place of every buffer, and the bytes of all together.
pub(super) fn place(image: &Buffers<f32>) -> Result<(Vec<Placed>, usize), KernelError> {
    let (mut places, mut end) = (Vec::new(), 0_usize);
    for (index, tensor) in image.tensors().iter().enumerate() {
        let (id, format) = (BufferId(index), tensor.format());
        if !is_codes(format) {
            format_number(tensor.name(), format)?;
        }
        let element = element_bytes(format);
        let guard = tensor.guard();
        let place = Placed {
            start: (end + guard * element).next_multiple_of(ALIGNMENT) - guard * element,
            guard,
            elements: tensor.values().len(),
            axes: image.axes(id),
            rows: image.rows(id),
            heads: image.heads(id),
            dim: image.dim(id),
            format,
        };
        end = place.start + place.raw_bytes();
        places.push(place);
    }
    Ok((places, end))
}

impl Placed {
    fn element(&self) -> usize {
        element_bytes(self.format)
    }

    fn raw_bytes(&self) -> usize {
        (2 * self.guard + self.elements) * self.element()
    }

    /// Returns the memory of the elements between the guards.
    pub(super) fn area<'a>(&self, memory: Area<'a>) -> Result<Area<'a>, KernelError> {
        let start = self.start + self.guard * self.element();
        memory.part(start..start + self.elements * self.element())
    }

    pub(super) fn view<'a>(&self, memory: Area<'a>) -> Result<View<'a>, KernelError> {
        let area = self.area(memory)?;
        let Placed { rows, heads, dim, format, .. } = *self;
        Ok(match self.axes {
            Axes::Rows => View::rows(area, [rows, heads, dim], format),
            Axes::Statistic => View::statistic(area, [heads, rows], format),
            Axes::Heads => View::heads(area, heads, format),
        })
    }

    pub(super) fn tensor<'a>(&self, memory: Area<'a>) -> Result<DeviceTensor<'a>, KernelError> {
        let Placed { rows, heads, dim, format, .. } = *self;
        Ok(DeviceTensor { area: self.area(memory)?, rows, heads, dim, format })
    }

    pub(super) fn statistic<'a>(&self, memory: Area<'a>) -> Result<DeviceStatistic<'a>, KernelError> {
        let Placed { rows, heads, .. } = *self;
        Ok(DeviceStatistic { area: self.area(memory)?, heads, rows })
    }

    /// Returns the bytes of so many heads of a row.
    pub(super) fn bytes_of(&self, heads: usize) -> usize {
        heads * self.dim * self.element()
    }

    pub(super) fn as_rows<'a>(&self, memory: Area<'a>) -> Result<ByteRows<'a>, KernelError> {
        self.stretch(&(0..self.rows), self.bytes_of(self.heads), memory)
    }

    /// Returns some of the rows as rows of so many bytes.
    pub(super) fn stretch<'a>(
        &self,
        rows: &Range<usize>,
        row_bytes: usize,
        memory: Area<'a>,
    ) -> Result<ByteRows<'a>, KernelError> {
        let whole = self.bytes_of(self.heads);
        let area = self.area(memory)?.part(rows.start * whole..rows.end * whole)?;
        Ok(ByteRows { area, rows: area.bytes().checked_div(row_bytes).unwrap_or(0), row_bytes })
    }
}

/// Stores elements, guards included, in their place among `bytes`.
pub(super) fn encode(place: &Placed, elements: &[f32], bytes: &mut [u8]) {
    store(place.format, elements, &mut bytes[place.start..place.start + place.raw_bytes()]);
}

/// Loads elements, guards included, from their place among `bytes`.
pub(super) fn decode(place: &Placed, bytes: &[u8], elements: &mut [f32]) {
    load(place.format, &bytes[place.start..place.start + place.raw_bytes()], elements);
}
