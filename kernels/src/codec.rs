//! Elements in the formats that kernels take: f32, bf16, fp16, and codes of e4m3.
//!
//! The patterns of guards and of unwritten elements have a code in each format and come back as themselves. In 16 bits
//! they are −0.0, a signalling NaN, which adding zero disturbs, and a NaN with a payload that no conversion makes. In
//! e4m3 they are −0.0 and its two NaN; any other NaN becomes that of the guards.

use std::sync::LazyLock;

use multiversion::multiversion;
use seamproof_oracle::Format;
use seamproof_simulator::{Real, UNWRITTEN_BITS};

use crate::error::KernelError;

/// The unwritten pattern of both 16-bit formats: in bf16 the upper half of that of f32.
const UNWRITTEN: u16 = 0x7fe5;
/// The signalling guards of bf16 (the upper half of that of f32) and of fp16.
const GUARD_BF16: u16 = 0x7fa5;
const GUARD_FP16: u16 = 0x7ca5;

/// The patterns of both formats of 8 bits: NaN in each.
const UNWRITTEN_FP8: u8 = 0xff;
const GUARD_FP8: u8 = 0x7f;

/// The signalling guard of f32.
const GUARD_BITS: u32 = f32::GUARD[1].to_bits();
/// All bits of an f32 but the sign.
const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY_BITS: u32 = f32::INFINITY.to_bits();
const NAN_FP16: u16 = 0x7e00;

static NUMBERS_OF_E4M3: LazyLock<[u32; 256]> = LazyLock::new(|| fp8_numbers(Format::E4m3));
static NUMBERS_OF_E5M2: LazyLock<[u32; 256]> = LazyLock::new(|| fp8_numbers(Format::E5m2));

/// Returns a format's number in the sources. An error names the tensor whose format kernels do not take.
pub(crate) fn format_number(name: &str, format: Format) -> Result<i32, KernelError> {
    match format {
        Format::F32 => Ok(0),
        Format::Bf16 => Ok(1),
        Format::Fp16 => Ok(2),
        Format::E4m3 | Format::E5m2 => {
            Err(KernelError::shape(format!("{name}: {format}; kernels take f32, bf16 and fp16")))
        }
    }
}

/// Returns the bytes of an element.
pub(crate) fn element_bytes(format: Format) -> usize {
    format.bits() as usize / 8
}

/// Stores elements, which the format must hold.
#[multiversion(targets("x86_64+avx2"))]
pub(crate) fn store(format: Format, elements: &[f32], bytes: &mut [u8]) {
    // Functions have names here, since a closure would not be inlined into vector code.
    match format {
        Format::F32 => store_each(elements, bytes, u32::to_le_bytes),
        Format::Bf16 => store_each(elements, bytes, bf16_code),
        Format::Fp16 => store_each(elements, bytes, fp16_code),
        Format::E4m3 => store_each(elements, bytes, e4m3_code),
        Format::E5m2 => store_each(elements, bytes, e5m2_code),
    }
}

/// Loads elements that [`store`] stored.
#[multiversion(targets("x86_64+avx2"))]
pub(crate) fn load(format: Format, bytes: &[u8], elements: &mut [f32]) {
    match format {
        Format::F32 => load_each(bytes, elements, u32::from_le_bytes),
        Format::Bf16 => load_each(bytes, elements, bf16_bits),
        Format::Fp16 => load_each(bytes, elements, fp16_bits),
        Format::E4m3 => load_codes(bytes, elements, &NUMBERS_OF_E4M3),
        Format::E5m2 => load_codes(bytes, elements, &NUMBERS_OF_E5M2),
    }
}

#[inline(always)]
fn store_each<const N: usize>(elements: &[f32], bytes: &mut [u8], code: impl Fn(u32) -> [u8; N]) {
    for (to, value) in bytes.as_chunks_mut().0.iter_mut().zip(elements) {
        *to = code(value.to_bits());
    }
}

#[inline(always)]
fn load_each<const N: usize>(bytes: &[u8], elements: &mut [f32], bits: impl Fn([u8; N]) -> u32) {
    for (from, value) in bytes.as_chunks().0.iter().zip(elements) {
        *value = f32::from_bits(bits(*from));
    }
}

#[inline(always)]
fn load_codes(bytes: &[u8], elements: &mut [f32], numbers: &[u32; 256]) {
    for (from, value) in bytes.iter().zip(elements) {
        *value = f32::from_bits(numbers[usize::from(*from)]);
    }
}

/// A format with fewer exponent bits than f32.
#[derive(Clone, Copy)]
struct Narrow {
    /// The fraction bits that f32 has more.
    dropped: u32,
    /// The exponent of the smallest normal number.
    exponent_min: i32,
    /// The code of numbers past the largest one: infinity, or the largest one where conversions saturate.
    beyond: u32,
}

const FP16: Narrow = Narrow { dropped: 13, exponent_min: -14, beyond: 0x7c00 };
const E4M3: Narrow = Narrow { dropped: 20, exponent_min: -6, beyond: 0x7e };
const E5M2: Narrow = Narrow { dropped: 21, exponent_min: -14, beyond: 0x7b };

/// Returns the bits of the f32 `2^exponent`.
const fn power_of_two(exponent: i32) -> u32 {
    ((127 + exponent) as u32) << 23
}

impl Narrow {
    /// Returns the code of the number that is nearest to that of these bits, which is neither negative nor NaN. Ties
    /// go to even codes. There is no branch, so that compilers make vector code of it.
    #[inline(always)]
    fn code(self, magnitude: u32) -> u32 {
        let lowest = power_of_two(self.exponent_min);
        // Next to `anchor` the spacing of f32 is that of subnormals here, so that the addition rounds to them.
        let anchor = power_of_two(self.exponent_min + self.dropped as i32);
        let subnormal = (f32::from_bits(magnitude) + f32::from_bits(anchor)).to_bits().wrapping_sub(anchor);
        // Exponent and fraction lie side by side as in f32, and the carry of rounding goes from one to the other.
        // Adding just under half a unit, or half a unit where the code is odd, carries exactly when rounding goes up.
        let half_down = (1 << (self.dropped - 1)) - 1;
        let rounded = magnitude.wrapping_add(half_down + (magnitude >> self.dropped & 1));
        let normal = rounded.wrapping_sub(lowest - power_of_two(-126)) >> self.dropped;
        if magnitude < lowest { subnormal } else { normal.min(self.beyond) }
    }
}

#[inline(always)]
fn bf16_code(bits: u32) -> [u8; 2] {
    // A bf16 is the upper half of an f32. Cut off, the NaNs of poison stay signalling, which a conversion makes quiet.
    ((bits >> 16) as u16).to_le_bytes()
}

#[inline(always)]
fn bf16_bits(code: [u8; 2]) -> u32 {
    match u16::from_le_bytes(code) {
        UNWRITTEN => UNWRITTEN_BITS,
        GUARD_BF16 => GUARD_BITS,
        code => u32::from(code) << 16,
    }
}

/// Returns the fp16 code of a number that fp16 holds, or of a pattern. Any other NaN loses its payload.
#[inline(always)]
fn fp16_code(bits: u32) -> [u8; 2] {
    let (magnitude, sign) = (bits & MAGNITUDE, (bits >> 16 & 0x8000) as u16);
    let number = sign | FP16.code(magnitude) as u16;
    let code = if magnitude > INFINITY_BITS { sign | NAN_FP16 } else { number };
    let code = if magnitude == UNWRITTEN_BITS { UNWRITTEN } else { code };
    let code = if bits == GUARD_BITS { GUARD_FP16 } else { code };
    code.to_le_bytes()
}

#[inline(always)]
fn fp16_bits(code: [u8; 2]) -> u32 {
    let code = u16::from_le_bytes(code);
    let (magnitude, sign) = (u32::from(code & 0x7fff), u32::from(code & 0x8000) << 16);
    // Exponent and fraction lie side by side as in f32. The product sets the bias right, that of subnormals too.
    let bias = f32::from_bits(power_of_two(127 - 15));
    let number = sign | (f32::from_bits(magnitude << FP16.dropped) * bias).to_bits();
    let bits = if magnitude == FP16.beyond { sign | INFINITY_BITS } else { number };
    let bits = if magnitude > FP16.beyond { sign | f32::NAN.to_bits() } else { bits };
    let bits = if code == UNWRITTEN { UNWRITTEN_BITS } else { bits };
    if code == GUARD_FP16 { GUARD_BITS } else { bits }
}

#[inline(always)]
fn e4m3_code(bits: u32) -> [u8; 1] {
    fp8_code(E4M3, bits)
}

#[inline(always)]
fn e5m2_code(bits: u32) -> [u8; 1] {
    fp8_code(E5M2, bits)
}

#[inline(always)]
fn fp8_code(format: Narrow, bits: u32) -> [u8; 1] {
    let (magnitude, sign) = (bits & MAGNITUDE, (bits >> 24 & 0x80) as u8);
    let number = sign | format.code(magnitude) as u8;
    let code = if magnitude > INFINITY_BITS { GUARD_FP8 } else { number };
    [if bits == UNWRITTEN_BITS { UNWRITTEN_FP8 } else { code }]
}

/// Returns the bits of the number or pattern of each code of a format of 8 bits.
fn fp8_numbers(format: Format) -> [u32; 256] {
    std::array::from_fn(|code| match code as u8 {
        UNWRITTEN_FP8 => UNWRITTEN_BITS,
        GUARD_FP8 => GUARD_BITS,
        code => (format.decode(code.into()) as f32).to_bits(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(format: Format, elements: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; elements.len() * element_bytes(format)];
        store(format, elements, &mut bytes);
        bytes
    }

    fn loaded(format: Format, bytes: &[u8]) -> Vec<f32> {
        let mut elements = vec![0.0; bytes.len() / element_bytes(format)];
        load(format, bytes, &mut elements);
        elements
    }

    fn bytes_of(format: Format, code: u32) -> Vec<u8> {
        code.to_le_bytes()[..element_bytes(format)].to_vec()
    }

    #[test]
    fn codes_are_the_formats_own() {
        for format in [Format::Bf16, Format::Fp16, Format::E4m3, Format::E5m2] {
            let codes: Vec<u32> = (0..1 << format.bits()).collect();
            let bytes: Vec<u8> = codes.iter().flat_map(|&code| bytes_of(format, code)).collect();
            let elements = loaded(format, &bytes);
            for (code, loaded) in codes.iter().zip(&elements) {
                let value = format.decode(*code) as f32;
                assert_eq!(value.is_nan(), loaded.is_nan(), "{format} {code:#x}");
                if !value.is_nan() {
                    assert_eq!(value.to_bits(), loaded.to_bits(), "{format} {code:#x}");
                }
            }
            // Conversions to e5m2 never give an infinity, so that no kernel is given one.
            let is_number = |value: &&f32| value.is_finite() || format != Format::E5m2 && value.is_infinite();
            let numbers: Vec<f32> = elements.iter().filter(is_number).copied().collect();
            let bits = |elements: &[f32]| elements.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&loaded(format, &stored(format, &numbers))), bits(&numbers), "{format}");
        }
    }

    #[test]
    fn numbers_that_a_format_does_not_hold_are_rounded() {
        let sweep = (0..1_u32 << 18).map(|index| f32::from_bits(index.wrapping_mul(0x9e37_79b9)));
        // The ends of ranges, and the numbers half-way between two codes next to them.
        let ends = [65_504.0, 65_519.99, 65_520.0, 448.0, 464.0, 57_344.0, 61_440.0, f32::INFINITY]
            .into_iter()
            .chain((-27..=-5).flat_map(|exponent| [1.0, 1.25, 1.5, 1.75].map(|x| x * 2_f32.powi(exponent))));
        let signed = ends.flat_map(|value| [value, -value]);
        let values: Vec<f32> = sweep.filter(|value| !value.is_nan()).chain(signed).collect();
        for format in [Format::Fp16, Format::E4m3, Format::E5m2] {
            let codes = stored(format, &values);
            for (code, value) in codes.chunks_exact(element_bytes(format)).zip(&values) {
                let right = format.encode(f64::from(*value));
                assert_eq!(code, bytes_of(format, right), "{format} {value:e}");
            }
        }
    }

    #[test]
    fn nans_that_are_no_pattern_become_one_nan() {
        let nans = [0x7f81_0000, 0xff81_0000, 0x7fff_ffff].map(f32::from_bits);
        assert_eq!(stored(Format::Fp16, &nans), [0x00, 0x7e, 0x00, 0xfe, 0x00, 0x7e]);
        for format in [Format::E4m3, Format::E5m2] {
            assert_eq!(stored(format, &nans), [GUARD_FP8; 3], "{format}");
        }
    }

    #[test]
    fn patterns_come_back_and_differ_from_every_conversions_nan() {
        let patterns = [f32::from_bits(UNWRITTEN_BITS), f32::GUARD[0], f32::GUARD[1]];
        let bits = |elements: &[f32]| elements.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        for format in Format::ALL {
            let back = loaded(format, &stored(format, &patterns));
            assert_eq!(bits(&back), bits(&patterns), "{format}");
        }
        // This NaN is what conversions on the GPU make.
        for format in [Format::Bf16, Format::Fp16] {
            let made = loaded(format, &bytes_of(format, 0x7fff));
            assert!(made[0].is_nan() && !bits(&patterns).contains(&made[0].to_bits()), "{format}");
        }
    }
}
