//! The sums of Hopper's matrix unit in FP8, in whole numbers.
//!
//! A *step* adds at most [`STEP`] products of codes to an addend. The *place* of a code is its exponent, or that of its
//! format's smallest normal number where it is subnormal; the place of a product is the sum of its factors' places. All
//! terms are counted in *units* of 2^(P − 13), where P is the largest place of a term that is not 0. What is less than
//! a unit is cut off, towards zero. Of the sum, the leading 14 bits are kept, again towards zero.
//!
//! A sum may be *promoted*: after some steps it is added to a sum in f32, and the unit begins anew.
//!
//! Sources: MMA-Sim (<https://arxiv.org/abs/2511.10909>), and observations on an H200: in e4m3, addends of 2^-13 beside 1
//! are kept, and addends of 2^-14 vanish, 31 of them at a time.

use std::num::NonZeroUsize;

use crate::Format;
use crate::format::power_of_two;

/// The most products of a step.
pub const STEP: usize = 32;
/// Bits behind the leading one of the largest term, and of a result.
const FRACTION_BITS: i32 = 13;
/// Place of a code of 0. A product with it has no say in the largest place.
const NO_PLACE: i32 = i32::MIN / 4;

/// A number of a format in FP8, with its place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Code {
    value: f64,
    place: i32,
}

impl Code {
    /// The number 0.
    pub const ZERO: Code = Code { value: 0.0, place: NO_PLACE };

    /// Returns a finite number of a format.
    pub fn new(value: f64, format: Format) -> Code {
        let place = if value == 0.0 { NO_PLACE } else { exponent(value).max(format.exponent_min()) };
        Code { value, place }
    }
}

/// Returns the exponent of a normal f64.
fn exponent(value: f64) -> i32 {
    (value.to_bits() >> 52 & 0x7ff) as i32 - 1023
}

/// Returns one step: the sum of an addend, which the unit has made, and of at most [`STEP`] products.
pub fn step(addend: f64, products: impl Iterator<Item = (Code, Code)> + Clone) -> f64 {
    let of_addend = if addend == 0.0 { NO_PLACE } else { exponent(addend) };
    let place = products.clone().map(|(a, b)| a.place + b.place).fold(of_addend, i32::max);
    if place <= NO_PLACE / 2 {
        return 0.0;
    }
    let units = power_of_two(FRACTION_BITS - place);
    // A conversion to whole numbers cuts towards zero.
    let cut = |term: f64| (term * units) as i64;
    let sum = products.fold(cut(addend), |sum, (a, b)| sum + cut(a.value * b.value));
    let bits = i64::BITS - sum.unsigned_abs().leading_zeros();
    let dropped = bits.saturating_sub(FRACTION_BITS as u32 + 1);
    let kept = sum.unsigned_abs() >> dropped << dropped;
    (kept as f64).copysign(sum as f64) / units
}

/// Returns `Σ a[n] · b[n]`, in steps from the first product on. After so many steps the unit's sum is promoted; without
/// a number it never is.
pub fn sum(a: &[Code], b: &[Code], promoted_after: Option<NonZeroUsize>) -> f64 {
    let part = promoted_after.map_or(usize::MAX, |steps| steps.get().saturating_mul(STEP));
    let of_part = |(a, b): (&[Code], &[Code])| {
        let steps = a.chunks(STEP).zip(b.chunks(STEP));
        steps.fold(0.0, |sum, (a, b)| step(sum, a.iter().copied().zip(b.iter().copied())))
    };
    let parts = a.chunks(part).zip(b.chunks(part)).map(of_part);
    parts.fold(0.0, |sum, part| f64::from((sum + part) as f32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_beside(count: usize, value: f64) -> f64 {
        let code = |value| Code::new(value, Format::E4m3);
        let half = (code(value), code(0.0625));
        step(0.0, std::iter::once((code(1.0), code(1.0))).chain(std::iter::repeat_n(half, count)))
    }

    #[test]
    fn what_lies_13_bits_below_the_largest_is_kept_and_what_is_less_is_cut() {
        for count in 0..STEP {
            // 2^-9 is subnormal in e4m3, and has the place −6: 2^-13 is still one unit.
            assert_eq!(one_beside(count, libm::exp2(-9.0)), 1.0 + count as f64 * libm::exp2(-13.0));
        }
        let small = Code::new(libm::exp2(-7.0), Format::E4m3);
        assert_eq!(step(1.0, std::iter::repeat_n((small, small), 31)), 1.0);
    }

    #[test]
    fn a_result_has_14_bits() {
        let code = |value| Code::new(value, Format::E4m3);
        let products = [(code(1.0), code(1.0)), (code(libm::exp2(-9.0)), code(0.0625))];
        assert_eq!(step(1.0, products.into_iter()), 2.0);
        assert_eq!(step(-1.0, products.map(|(a, b)| (code(-a.value), b)).into_iter()), -2.0);
    }

    #[test]
    fn zeros_make_no_sum() {
        assert_eq!(step(0.0, [(Code::ZERO, Code::new(448.0, Format::E4m3)); 3].into_iter()), 0.0);
        assert_eq!(sum(&[], &[], None), 0.0);
    }
}
