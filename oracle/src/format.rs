//! Number formats: how a real number is rounded to bf16, fp16, e4m3 or e5m2, and what each code means.

use std::fmt;
use std::str::FromStr;

use multiversion::multiversion;

use crate::lanes::map_blocks;

/// A storage format. All but f32 are exact in f32, and f32 is exact in f64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE binary32.
    F32,
    /// bfloat16: 8 exponent bits, 7 mantissa bits.
    Bf16,
    /// IEEE binary16: 5 exponent bits, 10 mantissa bits.
    Fp16,
    /// OCP FP8 E4M3 ("fn"): no infinity, largest 448, conversions saturate.
    E4m3,
    /// OCP FP8 E5M2: has codes for infinity, but conversions saturate at 57344 and never make them.
    E5m2,
}

/// A text that names no [`Format`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no format; use f32, bf16, fp16, e4m3 or e5m2")]
pub struct FormatNameError(String);

impl Format {
    /// Every format.
    pub const ALL: [Format; 5] = [Format::F32, Format::Bf16, Format::Fp16, Format::E4m3, Format::E5m2];

    /// Returns the name in texts and case files.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::Bf16 => "bf16",
            Format::Fp16 => "fp16",
            Format::E4m3 => "e4m3",
            Format::E5m2 => "e5m2",
        }
    }

    /// Returns the bits of precision, the implicit one included: 24, 8, 11, 4, 3.
    #[inline]
    pub fn precision_bits(self) -> i32 {
        match self {
            Format::F32 => 24,
            Format::Bf16 => 8,
            Format::Fp16 => 11,
            Format::E4m3 => 4,
            Format::E5m2 => 3,
        }
    }

    /// Returns the exponent of the smallest normal number: −126, −126, −14, −6, −14.
    #[inline]
    pub fn exponent_min(self) -> i32 {
        match self {
            Format::F32 | Format::Bf16 => -126,
            Format::Fp16 | Format::E5m2 => -14,
            Format::E4m3 => -6,
        }
    }

    /// Returns the exponent of the largest finite number: 127, 127, 15, 8, 15.
    #[inline]
    pub fn exponent_max(self) -> i32 {
        match self {
            Format::F32 | Format::Bf16 => 127,
            Format::Fp16 | Format::E5m2 => 15,
            Format::E4m3 => 8,
        }
    }

    /// Returns the bits of a code: 32, 16, 16, 8, 8.
    pub fn bits(self) -> u32 {
        match self {
            Format::F32 => 32,
            Format::Bf16 | Format::Fp16 => 16,
            Format::E4m3 | Format::E5m2 => 8,
        }
    }

    /// Returns the largest finite number: 2^128 − 2^(128 − precision) with 8 exponent bits (f32, bf16), 65504, 448,
    /// 57344.
    #[inline]
    pub fn max_finite(self) -> f64 {
        // E4M3 gives the top code of its top binade to NaN.
        let steps_below = if self == Format::E4m3 { 2.0 } else { 1.0 };
        let top = power_of_two(self.exponent_max());
        2.0 * top - steps_below * top * power_of_two(1 - self.precision_bits())
    }

    /// Whether conversions give the largest finite number where IEEE 754 gives an infinity.
    #[inline]
    pub fn saturates(self) -> bool {
        matches!(self, Format::E4m3 | Format::E5m2)
    }

    /// Returns the unit roundoff, 2^−precision: the largest relative error of rounding a number of the normal range.
    #[inline]
    pub fn unit_roundoff(self) -> f64 {
        power_of_two(-self.precision_bits())
    }

    /// Returns half the smallest subnormal number: the largest error of rounding a number below the normal range.
    #[inline]
    pub fn tiny_half(self) -> f64 {
        power_of_two(self.exponent_min() - self.precision_bits())
    }

    /// Returns the number of this format that is nearest to `value`: a fast `decode(encode(value))`.
    #[inline]
    pub fn round(self, value: f64) -> f64 {
        // Each arm is compiled for its own format, which makes a loop of roundings twice as fast.
        match self {
            Format::F32 => Format::F32.round_any(value),
            Format::Bf16 => Format::Bf16.round_any(value),
            Format::Fp16 => Format::Fp16.round_any(value),
            Format::E4m3 => Format::E4m3.round_any(value),
            Format::E5m2 => Format::E5m2.round_any(value),
        }
    }

    /// Returns [`Format::round`] of an f32's exact value.
    #[inline(always)]
    pub fn round_f32(self, value: f32) -> f32 {
        let rounded = match self {
            Format::F32 => value,
            Format::Bf16 => {
                // A bf16 is the upper half of an f32. Adding just under half an ulp, or half an ulp where the code is
                // odd, carries into that half exactly when rounding goes up. The carry also takes numbers past the
                // largest one to infinity.
                let bits = value.to_bits();
                f32::from_bits(bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
            }
            Format::Fp16 => Format::Fp16.round_narrow(value),
            Format::E4m3 => Format::E4m3.round_narrow(value),
            Format::E5m2 => Format::E5m2.round_narrow(value),
        };
        // A choice at the end: a branch before would keep loops from becoming vector code.
        if value.is_nan() { f32::NAN } else { rounded }
    }

    /// Returns [`Format::round`] of an f32 that is not NaN, in a format of a smaller range than f32.
    #[inline(always)]
    fn round_narrow(self, value: f32) -> f32 {
        // As in `round_or`, in f32. Its anchors are numbers of f32 too, as their exponents are small.
        let magnitude = value.abs();
        let power = f32::from_bits(magnitude.to_bits() & f32::INFINITY.to_bits());
        let [lowest, highest] = [self.exponent_min(), self.exponent_max()].map(|e| power_of_two(e) as f32);
        let power = if power < lowest { lowest } else { power };
        let power = if power > highest { highest } else { power };
        let anchor = power * (1.5 * power_of_two(24 - self.precision_bits()) as f32);
        let rounded = magnitude + anchor - anchor;
        let max_finite = self.max_finite() as f32;
        let overflow = if self.saturates() { max_finite } else { f32::INFINITY };
        let kept = if rounded > max_finite { overflow } else { rounded };
        kept.copysign(value)
    }

    /// Rounds each number as [`Format::round_f32`] does.
    pub fn round_all(self, values: &mut [f32]) {
        round_all(self, values);
    }

    /// Returns the code of the number that is nearest to `value`.
    pub fn encode(self, value: f64) -> u32 {
        self.code(self.round(value))
    }

    /// Returns the number that a conversion without saturation gives. Past the largest number that is an infinity, and
    /// NaN in E4M3, which has no infinity (OCP 8-bit Floating Point Specification, table of conversions). For the
    /// formats of IEEE 754 it is [`Format::round`].
    pub fn round_unsaturated(self, value: f64) -> f64 {
        self.round_or(value, if self == Format::E4m3 { f64::NAN } else { f64::INFINITY })
    }

    /// Returns the code of [`Format::round_unsaturated`].
    pub fn encode_unsaturated(self, value: f64) -> u32 {
        self.code(self.round_unsaturated(value))
    }

    /// Returns the number that `code` stands for. Bits above the format's width are ignored.
    pub fn decode(self, code: u32) -> f64 {
        let fraction_bits = self.precision_bits() - 1;
        let sign_bit = 1 << (self.bits() - 1);
        let magnitude = code & (sign_bit - 1);
        let (exponent, fraction) = (magnitude >> fraction_bits, magnitude & ((1 << fraction_bits) - 1));
        let decoded = match exponent {
            _ if magnitude > self.last_number_code() => f64::NAN,
            _ if magnitude == self.infinity_code() => f64::INFINITY,
            0 => f64::from(fraction) * 2.0 * self.tiny_half(),
            _ => {
                let significand = 1.0 + f64::from(fraction) * power_of_two(-fraction_bits);
                significand * power_of_two(exponent as i32 - 1 + self.exponent_min())
            }
        };
        if code & sign_bit == 0 || decoded.is_nan() { decoded } else { -decoded }
    }

    /// Returns the largest error of rounding any real number whose magnitude is at most `magnitude`.
    ///
    /// The error is half the spacing in the binade of `magnitude`. It is less at and just above a power of two, and
    /// below [`Format::tiny_half`]: no number that far from its neighbours lies below `magnitude` there. Where rounding
    /// can overflow, the error is infinite. In a format that saturates, it grows with the distance to the largest
    /// finite number. NaN gives NaN, and a comparison with NaN fails.
    #[inline(always)]
    pub fn half_spacing(self, magnitude: f64) -> f64 {
        // As in `round`.
        match self {
            Format::F32 => Format::F32.half_spacing_any(magnitude),
            Format::Bf16 => Format::Bf16.half_spacing_any(magnitude),
            Format::Fp16 => Format::Fp16.half_spacing_any(magnitude),
            Format::E4m3 => Format::E4m3.half_spacing_any(magnitude),
            Format::E5m2 => Format::E5m2.half_spacing_any(magnitude),
        }
    }

    /// Returns a distance within which each number that is no less than 0 is rounded to `number`, which is of this format:
    /// half of the smaller of its two spacings. It is 0 for infinity and NaN, and for the largest number.
    #[inline(always)]
    pub(crate) fn reach(self, number: f64) -> f64 {
        let lowest = power_of_two(self.exponent_min());
        let below = number.next_down().max(lowest);
        if number < self.max_finite() { binade(below) * self.unit_roundoff() } else { 0.0 }
    }

    #[inline(always)]
    fn half_spacing_any(self, magnitude: f64) -> f64 {
        let (lowest, highest) = (power_of_two(self.exponent_min()), power_of_two(self.exponent_max()));
        if magnitude < lowest {
            return magnitude.min(self.tiny_half());
        }
        let power = binade(magnitude).min(highest);
        let half = power * self.unit_roundoff();
        let below = if power > lowest { half / 2.0 } else { half };
        let beyond = magnitude - self.max_finite();
        match self.saturates() {
            true if beyond > half => beyond,
            false if beyond >= half => f64::INFINITY,
            _ => (magnitude - power).clamp(below, half),
        }
    }

    #[inline(always)]
    fn round_any(self, value: f64) -> f64 {
        self.round_or(value, if self.saturates() { self.max_finite() } else { f64::INFINITY })
    }

    /// Returns the number nearest to `value`, or `overflow` with the sign of `value` past the largest number.
    #[inline(always)]
    fn round_or(self, value: f64, overflow: f64) -> f64 {
        // Next to `anchor` the spacing of f64 is this format's spacing in the binade of `value`. The addition itself
        // therefore rounds, to nearest even because `anchor` is an even multiple of that spacing.
        let magnitude = value.abs();
        let power = binade(magnitude);
        let (lowest, highest) = (power_of_two(self.exponent_min()), power_of_two(self.exponent_max()));
        let power = if power < lowest { lowest } else { power };
        let power = if power > highest { highest } else { power };
        let anchor = power * (1.5 * power_of_two(53 - self.precision_bits()));
        let rounded = magnitude + anchor - anchor;
        let kept = if rounded > self.max_finite() { overflow } else { rounded };
        if value.is_nan() { f64::NAN } else { kept.copysign(value) }
    }

    /// Returns the code of a number of this format, or of NaN.
    fn code(self, number: f64) -> u32 {
        if number.is_nan() {
            return self.nan_code();
        }
        let sign = u32::from(number.is_sign_negative()) << (self.bits() - 1);
        sign | self.magnitude_code(number.abs())
    }

    /// Returns the code of a number of this format that is not negative.
    fn magnitude_code(self, number: f64) -> u32 {
        let fraction_bits = self.precision_bits() - 1;
        if number == f64::INFINITY {
            return self.infinity_code();
        }
        if number < power_of_two(self.exponent_min()) {
            return (number / (2.0 * self.tiny_half())) as u32;
        }
        // Exponent and fraction lie side by side as in f64. The bias and the fraction's width differ.
        let bias_gap = (F64_BIAS + self.exponent_min() - 1) as u64;
        ((number.to_bits() - (bias_gap << F64_FRACTION_BITS)) >> (F64_FRACTION_BITS - fraction_bits)) as u32
    }

    /// Returns the code with all exponent bits set and no fraction: infinity, where the format has one.
    fn infinity_code(self) -> u32 {
        match self {
            Format::F32 => 0x7f80_0000,
            Format::Bf16 => 0x7f80,
            Format::Fp16 => 0x7c00,
            // Not below the NaN codes: E4M3 has no infinity.
            Format::E4m3 => 0x7f,
            Format::E5m2 => 0x7c,
        }
    }

    /// Returns the largest positive code that is not NaN.
    fn last_number_code(self) -> u32 {
        if self == Format::E4m3 { 0x7e } else { self.infinity_code() }
    }

    /// Returns the code of the NaN that conversions give.
    fn nan_code(self) -> u32 {
        match self {
            Format::F32 => 0x7fc0_0000,
            Format::Bf16 => 0x7fc0,
            Format::Fp16 => 0x7e00,
            Format::E4m3 | Format::E5m2 => 0x7f,
        }
    }
}

/// Rounds each number to a format, in vector code where the machine has it.
#[multiversion(targets("x86_64+avx2+fma"))]
fn round_all(format: Format, values: &mut [f32]) {
    // Each arm is compiled for its own format, without a branch for each number. A closure would not be inlined.
    match format {
        Format::F32 => map_blocks(values, round_to::<{ Format::F32 as u8 }>),
        Format::Bf16 => map_blocks(values, round_to::<{ Format::Bf16 as u8 }>),
        Format::Fp16 => map_blocks(values, round_to::<{ Format::Fp16 as u8 }>),
        Format::E4m3 => map_blocks(values, round_to::<{ Format::E4m3 as u8 }>),
        Format::E5m2 => map_blocks(values, round_to::<{ Format::E5m2 as u8 }>),
    }
}

/// Rounds a number to the format of this place in [`Format::ALL`].
#[inline(always)]
fn round_to<const FORMAT: u8>(value: f32) -> f32 {
    Format::ALL[FORMAT as usize].round_f32(value)
}

const F64_BIAS: i32 = 1023;
const F64_FRACTION_BITS: i32 = 52;

/// Returns `2^exponent`, for an exponent in the normal range of f64.
#[inline]
pub(crate) fn power_of_two(exponent: i32) -> f64 {
    debug_assert!((1 - F64_BIAS..=F64_BIAS).contains(&exponent));
    f64::from_bits(((F64_BIAS + exponent) as u64) << F64_FRACTION_BITS)
}

/// Returns the power of two at the bottom of the binade of `magnitude`: 0 for zero and subnormals, ∞ for ∞ and NaN.
#[inline]
fn binade(magnitude: f64) -> f64 {
    f64::from_bits(magnitude.to_bits() & f64::INFINITY.to_bits())
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Format {
    type Err = FormatNameError;

    fn from_str(text: &str) -> Result<Format, FormatNameError> {
        Format::ALL
            .into_iter()
            .find(|format| format.name() == text)
            .ok_or_else(|| FormatNameError(text.chars().take(40).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test that slices of any length are rounded number by number, to the format that is named and no other.
    #[test]
    fn slices_are_rounded_as_their_numbers_are() {
        let special = [f32::NAN, f32::INFINITY, -f32::INFINITY, -0.0, 1e-42, 3e38, 65_519.0, 449.0, 0.0019];
        let number = |n: usize| special.get(n % 23).copied().unwrap_or((n as f32 * 1.37).sin() * 1e3);
        for format in Format::ALL {
            for length in 0..40 {
                let numbers: Vec<f32> = (length..2 * length).map(number).collect();
                let mut got = numbers.clone();
                format.round_all(&mut got);
                let right = numbers.iter().map(|&x| format.round_f32(x).to_bits());
                assert!(got.iter().map(|x| x.to_bits()).eq(right), "{format}: {numbers:?}");
            }
        }
    }

    /// Test of every number of 16 bits or less that values within its reach are rounded to it, and that one past the
    /// nearer middle is not.
    #[test]
    fn what_is_within_the_reach_of_a_number_is_rounded_to_it() {
        for format in Format::ALL.into_iter().filter(|format| *format != Format::F32) {
            let numbers = (0..1u32 << (format.bits() - 1)).map(|code| format.decode(code));
            for number in numbers.filter(|number| number.is_finite() && *number < format.max_finite()) {
                let reach = format.reach(number);
                for share in [-0.999, -0.5, 0.5, 0.999] {
                    let value = number + share * reach;
                    assert!(value < 0.0 || format.round(value) == number, "{format}: {value}, {number}");
                }
                let beyond = [number - 1.001 * reach, number + 2.001 * reach];
                assert!(beyond.iter().any(|value| format.round(*value) != number), "{format}: {number}");
            }
            for none in [format.max_finite(), f64::INFINITY, f64::NAN] {
                assert_eq!(format.reach(none), 0.0, "{format}: {none}");
            }
        }
    }
}
