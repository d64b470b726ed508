//! The two arithmetics of the CPU device: f32 with the roundings of a real kernel, and f64 without roundings. f64 shows
//! a schedule's logic to 12 digits.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

use seamproof_oracle::Format;

use crate::exponential;

/// Bits of an element that nobody wrote: a quiet NaN with a payload that no arithmetic produces.
pub const UNWRITTEN_BITS: u32 = 0x7fe5_ea11;

/// Whether an element still holds its initial pattern.
#[inline]
pub fn is_unwritten(value: f32) -> bool {
    value.to_bits() == UNWRITTEN_BITS
}

/// Number type in which kernels compute.
pub trait Real:
    Copy
    + Debug
    + PartialEq
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + 'static
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// −∞.
    const NEG_INFINITY: Self;
    /// Value of an element that nobody wrote: a quiet NaN with a payload that no arithmetic produces.
    const UNWRITTEN: Self;
    /// Guard elements at even and odd places. −0.0 becomes +0.0 when zero is added, and a signalling NaN becomes quiet
    /// in any arithmetic.
    const GUARD: [Self; 2];

    /// Returns the value of an f32.
    fn from_f32(value: f32) -> Self;
    /// Returns the value nearest to an f64.
    fn from_f64(value: f64) -> Self;
    /// Returns the value as f64.
    fn to_f64(self) -> f64;
    /// Returns the bits, widened.
    fn bits(self) -> u64;
    /// Returns `e^x`.
    fn exp(self) -> Self;
    /// Replaces each x by `e^x`.
    fn exp_all(values: &mut [Self]);
    /// Returns the natural logarithm.
    fn ln(self) -> Self;
    /// Returns the hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Returns the value as the device stores it in `format`. f64 stores everything unrounded.
    fn round(self, format: Format) -> Self;
    /// Applies [`Real::round`] to each number.
    fn round_all(values: &mut [Self], format: Format);

    /// Returns the larger of two numbers.
    fn larger(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
}

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;
    const UNWRITTEN: f32 = f32::from_bits(UNWRITTEN_BITS);
    const GUARD: [f32; 2] = [f32::from_bits(0x8000_0000), f32::from_bits(0x7fa5_5a11)];

    #[inline]
    fn from_f32(value: f32) -> f32 {
        value
    }

    fn from_f64(value: f64) -> f32 {
        value as f32
    }

    #[inline]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    #[inline]
    fn bits(self) -> u64 {
        u64::from(self.to_bits())
    }

    #[inline]
    fn exp(self) -> f32 {
        libm::expf(self)
    }

    #[inline]
    fn exp_all(values: &mut [f32]) {
        exponential::exp(values);
    }

    #[inline]
    fn ln(self) -> f32 {
        libm::logf(self)
    }

    #[inline]
    fn tanh(self) -> f32 {
        libm::tanhf(self)
    }

    #[inline(always)]
    fn round(self, format: Format) -> f32 {
        format.round_f32(self)
    }

    #[inline]
    fn round_all(values: &mut [f32], format: Format) {
        format.round_all(values);
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;
    const UNWRITTEN: f64 = f64::from_bits(0x7ffc_bd42_2000_0000);
    const GUARD: [f64; 2] = [f64::from_bits(0x8000_0000_0000_0000), f64::from_bits(0x7ff4_ab42_2000_0000)];

    #[inline]
    fn from_f32(value: f32) -> f64 {
        f64::from(value)
    }

    fn from_f64(value: f64) -> f64 {
        value
    }

    #[inline]
    fn to_f64(self) -> f64 {
        self
    }

    #[inline]
    fn bits(self) -> u64 {
        self.to_bits()
    }

    fn exp(self) -> f64 {
        libm::exp(self)
    }

    fn exp_all(values: &mut [f64]) {
        values.iter_mut().for_each(|value| *value = libm::exp(*value));
    }

    fn ln(self) -> f64 {
        libm::log(self)
    }

    fn tanh(self) -> f64 {
        libm::tanh(self)
    }

    fn round(self, _format: Format) -> f64 {
        self
    }

    fn round_all(_values: &mut [f64], _format: Format) {}
}
