//! Buffers as bytes: where each lies, and its elements in its storage format.
//!
//! The patterns of guards and of unwritten elements are patterns of each format too, and come back as what they are: in 16
//! bits −0.0 and a signalling NaN, which adding zero disturbs, and a NaN with a payload that no conversion makes.

use half::f16;
use seamproof_oracle::Format;
use seamproof_simulator::device::Buffers;
use seamproof_simulator::schedule::{Axes, BufferId};
use seamproof_simulator::{Real, UNWRITTEN_BITS};

use crate::error::KernelError;
use crate::gpu::Area;
use crate::merge::{Statistic, Tensor};
use crate::rows::Rows;
use crate::view::{View, format_number};

/// What elements (guards apart) begin at multiples of.
const ALIGNMENT: usize = 16;
/// The unwritten pattern of 16-bit formats: in bf16 the upper half of that of f32.
const UNWRITTEN: u16 = 0x7fe5;
/// Signalling guards of bf16 (the upper half of that of f32) and fp16.
const GUARD_BF16: u16 = 0x7fa5;
const GUARD_FP16: u16 = 0x7ca5;

/// Where a buffer lies, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed {
    /// Bytes before the first guard.
    start: usize,
    guard: usize,
    /// Elements, guards apart.
    elements: usize,
    pub(super) axes: Axes,
    pub(super) rows: usize,
    pub(super) heads: usize,
    pub(super) dim: usize,
    pub(super) format: Format,
}

/// Places every buffer; the places and the bytes of all.
pub(super) fn place(image: &Buffers<f32>) -> Result<(Vec<Placed>, usize), KernelError> {
    let (mut places, mut end) = (Vec::new(), 0_usize);
    for (index, tensor) in image.tensors().iter().enumerate() {
        let (id, format) = (BufferId(index), tensor.format());
        format_number(tensor.name(), format)?;
        let element = format.bits() as usize / 8;
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
        self.format.bits() as usize / 8
    }

    fn raw_bytes(&self) -> usize {
        (2 * self.guard + self.elements) * self.element()
    }

    /// The elements, guards apart.
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

    pub(super) fn tensor<'a>(&self, memory: Area<'a>) -> Result<Tensor<'a>, KernelError> {
        let Placed { rows, heads, dim, format, .. } = *self;
        Ok(Tensor { area: self.area(memory)?, rows, heads, dim, format })
    }

    pub(super) fn statistic<'a>(&self, memory: Area<'a>) -> Result<Statistic<'a>, KernelError> {
        let Placed { rows, heads, .. } = *self;
        Ok(Statistic { area: self.area(memory)?, heads, rows })
    }

    pub(super) fn as_rows<'a>(&self, memory: Area<'a>) -> Result<Rows<'a>, KernelError> {
        let row_bytes = self.heads * self.dim * self.element();
        Ok(Rows { area: self.area(memory)?, rows: self.rows, row_bytes })
    }
}

/// Elements, guards included, into their place among `bytes`.
pub(super) fn encode(place: &Placed, elements: &[f32], bytes: &mut [u8]) {
    store(place.format, elements, &mut bytes[place.start..place.start + place.raw_bytes()]);
}

/// Elements that a format holds, as it stores them.
pub(crate) fn store(format: Format, elements: &[f32], bytes: &mut [u8]) {
    let pairs = |code: fn(u32) -> u16, bytes: &mut [u8]| {
        for (to, value) in bytes.chunks_exact_mut(2).zip(elements) {
            to.copy_from_slice(&code(value.to_bits()).to_le_bytes());
        }
    };
    match format {
        // A bf16 is the upper half of an f32. Cut off, the NaNs of poison stay signalling, which a conversion makes quiet.
        Format::Bf16 => pairs(|bits| (bits >> 16) as u16, bytes),
        Format::Fp16 => pairs(fp16_code, bytes),
        _ => {
            for (to, value) in bytes.chunks_exact_mut(4).zip(elements) {
                to.copy_from_slice(&value.to_bits().to_le_bytes());
            }
        }
    }
}

/// The way back.
pub(super) fn decode(place: &Placed, bytes: &[u8], elements: &mut [f32]) {
    load(place.format, &bytes[place.start..place.start + place.raw_bytes()], elements);
}

/// Elements as a format stores them.
pub(crate) fn load(format: Format, bytes: &[u8], elements: &mut [f32]) {
    let pairs = |bits: fn(u16) -> u32, elements: &mut [f32]| {
        for (from, value) in bytes.chunks_exact(2).zip(elements) {
            *value = f32::from_bits(bits(u16::from_le_bytes([from[0], from[1]])));
        }
    };
    match format {
        Format::Bf16 => pairs(bf16_bits, elements),
        Format::Fp16 => pairs(fp16_bits, elements),
        _ => {
            for (from, value) in bytes.chunks_exact(4).zip(elements) {
                *value = f32::from_le_bytes([from[0], from[1], from[2], from[3]]);
            }
        }
    }
}

fn bf16_bits(code: u16) -> u32 {
    match code {
        UNWRITTEN => UNWRITTEN_BITS,
        GUARD_BF16 => f32::GUARD[1].to_bits(),
        code => u32::from(code) << 16,
    }
}

/// The code of a number that fp16 holds, or of a pattern; any other NaN loses its payload.
fn fp16_code(bits: u32) -> u16 {
    let code = f16::from_f32(f32::from_bits(bits));
    match bits & 0x7fff_ffff {
        UNWRITTEN_BITS => UNWRITTEN,
        _ if bits == f32::GUARD[1].to_bits() => GUARD_FP16,
        _ if code.is_nan() => f16::NAN.copysign(code).to_bits(),
        _ => code.to_bits(),
    }
}

fn fp16_bits(code: u16) -> u32 {
    let value = f16::from_bits(code).to_f32();
    match code {
        UNWRITTEN => UNWRITTEN_BITS,
        GUARD_FP16 => f32::GUARD[1].to_bits(),
        _ if value.is_nan() => f32::NAN.copysign(value).to_bits(),
        _ => value.to_bits(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_formats_own() {
        for code in 0..=u16::MAX {
            for (format, bits) in [(Format::Bf16, bf16_bits as fn(u16) -> u32), (Format::Fp16, fp16_bits)] {
                let (value, decoded) = (format.decode(code.into()) as f32, f32::from_bits(bits(code)));
                assert_eq!(value.is_nan(), decoded.is_nan(), "{format} {code:#x}");
                if !value.is_nan() {
                    assert_eq!(value.to_bits(), decoded.to_bits(), "{format} {code:#x}");
                }
            }
            let value = Format::Fp16.decode(code.into()) as f32;
            if !value.is_nan() {
                assert_eq!(fp16_code(value.to_bits()), code);
            }
        }
        let sweep = (0..1_u32 << 20).map(|index| f32::from_bits(index.wrapping_mul(0x9e37_79b9)));
        for value in sweep.filter(|value| !value.is_nan()) {
            let code = u32::from(fp16_code(value.to_bits()));
            assert_eq!(code, Format::Fp16.encode(f64::from(value)), "{value:e}");
        }
        assert_eq!([0x7f81_0000, 0xff81_0000].map(fp16_code), [0x7e00, 0xfe00], "a NaN that is no pattern");
    }

    #[test]
    fn patterns_come_back_and_differ_from_every_conversions_nan() {
        let patterns = [UNWRITTEN_BITS, f32::GUARD[0].to_bits(), f32::GUARD[1].to_bits()];
        for bits in patterns {
            assert_eq!(bf16_bits((bits >> 16) as u16), bits);
            assert_eq!(fp16_bits(fp16_code(bits)), bits);
        }
        // The NaN of conversions on the GPU.
        for bits in [bf16_bits(0x7fff), fp16_bits(0x7fff)] {
            assert!(!patterns.contains(&bits));
        }
    }
}
