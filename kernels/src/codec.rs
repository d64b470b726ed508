//! Elements in the formats that kernels take: f32, bf16, fp16, and codes of e4m3.
//!
//! The patterns of guards and of unwritten elements have a code in each format and come back as themselves. In 16 bits
//! they are −0.0, a signalling NaN, which adding zero disturbs, and a NaN with a payload that no conversion makes. In
//! e4m3 they are −0.0 and its two NaN; any other NaN becomes that of the guards.

use half::f16;
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
pub(crate) fn store(format: Format, elements: &[f32], bytes: &mut [u8]) {
    let pairs = |code: fn(u32) -> u16, bytes: &mut [u8]| {
        for (to, value) in bytes.chunks_exact_mut(2).zip(elements) {
            to.copy_from_slice(&code(value.to_bits()).to_le_bytes());
        }
    };
    match format {
        // A bf16 is the upper half of an f32. Cut off, the NaNs of poison stay signalling, which a conversion makes
        // quiet.
        Format::Bf16 => pairs(|bits| (bits >> 16) as u16, bytes),
        Format::Fp16 => pairs(fp16_code, bytes),
        Format::E4m3 | Format::E5m2 => {
            for (to, value) in bytes.iter_mut().zip(elements) {
                *to = match value.to_bits() {
                    UNWRITTEN_BITS => UNWRITTEN_FP8,
                    _ if value.is_nan() => GUARD_FP8,
                    _ => format.encode(f64::from(*value)) as u8,
                };
            }
        }
        Format::F32 => {
            for (to, value) in bytes.chunks_exact_mut(4).zip(elements) {
                to.copy_from_slice(&value.to_bits().to_le_bytes());
            }
        }
    }
}

/// Loads elements that [`store`] stored.
pub(crate) fn load(format: Format, bytes: &[u8], elements: &mut [f32]) {
    let pairs = |bits: fn(u16) -> u32, elements: &mut [f32]| {
        for (from, value) in bytes.chunks_exact(2).zip(elements) {
            *value = f32::from_bits(bits(u16::from_le_bytes([from[0], from[1]])));
        }
    };
    match format {
        Format::Bf16 => pairs(bf16_bits, elements),
        Format::Fp16 => pairs(fp16_bits, elements),
        Format::E4m3 | Format::E5m2 => {
            for (from, value) in bytes.iter().zip(elements) {
                *value = match *from {
                    UNWRITTEN_FP8 => f32::from_bits(UNWRITTEN_BITS),
                    GUARD_FP8 => f32::GUARD[1],
                    code => format.decode(u32::from(code)) as f32,
                };
            }
        }
        Format::F32 => {
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

/// Returns the fp16 code of a number that fp16 holds, or of a pattern. Any other NaN loses its payload.
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
            for format in [Format::E4m3, Format::E5m2] {
                let (mut code, mut back) = ([0], [0.0]);
                store(format, &[f32::from_bits(bits)], &mut code);
                load(format, &code, &mut back);
                assert_eq!(back[0].to_bits(), bits, "{format}");
            }
        }
        // This NaN is what conversions on the GPU make.
        for bits in [bf16_bits(0x7fff), fp16_bits(0x7fff)] {
            assert!(!patterns.contains(&bits));
        }
    }
}
