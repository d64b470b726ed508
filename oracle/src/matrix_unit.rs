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

use multiversion::multiversion;

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

    /// Returns a finite number of a format. The value may be off by roundings of f64.
    pub fn new(value: f64, format: Format) -> Code {
        // A power of two that is a little too small would have the place below its own.
        let value = f64::from(value as f32);
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

/// The number of lanes that are made together, in vector code.
const LANES: usize = 8;

/// Makes a step in each lane: adds `Σ factors[n] · rows[n][lane]` to what the unit has made there. The rows' numbers are of
/// a format in FP8.
#[multiversion(targets("x86_64+avx2+fma"))]
pub fn steps(sums: &mut [f32], factors: &[Code], rows: &[&[f32]], format: Format) {
    let (blocks, rest) = sums.as_chunks_mut::<LANES>();
    let begin = blocks.len() * LANES;
    for (block, sums) in blocks.iter_mut().enumerate() {
        let first = block * LANES;
        step_lanes(sums, factors, |n| std::array::from_fn(|lane| rows[n][first + lane]), format);
    }
    if !rest.is_empty() {
        let mut last = [0.0; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let row = |n: usize| std::array::from_fn(|lane| rows[n].get(begin + lane).copied().unwrap_or(0.0));
        step_lanes(&mut last, factors, row, format);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// Makes the steps of [`steps`] in a few lanes. Products of two codes have 8 bits, and a cut term is a whole number below
/// 2^15, so that each product, each term and their sum are exact in f32.
#[inline(always)]
fn step_lanes(
    sums: &mut [f32; LANES],
    factors: &[Code],
    row: impl Fn(usize) -> [f32; LANES],
    format: Format,
) {
    let least = format.exponent_min();
    let mut places = sums.map(|sum| if sum == 0.0 { NO_PLACE } else { exponent_f32(sum) });
    for (n, factor) in factors.iter().enumerate() {
        let row = row(n);
        for lane in 0..LANES {
            let place = factor.place + exponent_f32(row[lane]).max(least);
            places[lane] = places[lane].max(if row[lane] == 0.0 { NO_PLACE } else { place });
        }
    }
    // Lanes of zeros have no place, and any will do.
    let places = places.map(|place| if place <= NO_PLACE / 2 { 0 } else { place });
    let units = places.map(|place| power_of_two_f32(FRACTION_BITS - place));
    let mut totals = [0.0f32; LANES];
    for lane in 0..LANES {
        totals[lane] = (sums[lane] * units[lane]).trunc();
    }
    for (n, factor) in factors.iter().enumerate() {
        let (row, factor) = (row(n), factor.value as f32);
        for lane in 0..LANES {
            totals[lane] += (factor * row[lane] * units[lane]).trunc();
        }
    }
    for lane in 0..LANES {
        let kept = f32::from_bits(totals[lane].to_bits() & KEPT_BITS);
        sums[lane] = kept * power_of_two_f32(places[lane] - FRACTION_BITS);
    }
}

/// The bits of an f32 that a result keeps: the leading one and the next 13.
const KEPT_BITS: u32 = u32::MAX << (23 - FRACTION_BITS);

/// Returns the exponent of a normal f32; a small number for others.
#[inline(always)]
fn exponent_f32(value: f32) -> i32 {
    (value.to_bits() >> 23 & 0xff) as i32 - 127
}

/// Returns 2^exponent, within the normal range of f32.
#[inline(always)]
fn power_of_two_f32(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
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

    /// Test of lanes against single steps, one step after the other, with subnormals and zeros among the numbers.
    #[test]
    fn lanes_have_the_sums_of_single_steps() {
        let mut state = 1u64;
        let mut draw = |format: Format| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let code = (state >> 40) as u32 & 0xff;
            let number = format.decode(code);
            if number.is_finite() && state >> 60 != 0 { number } else { 0.0 }
        };
        for (a_format, format) in [(Format::E4m3, Format::E4m3), (Format::E4m3, Format::E5m2)] {
            for lanes in [1, 7, 8, 19] {
                let (mut sums, mut right) = (vec![0.0f32; lanes], vec![0.0f64; lanes]);
                for count in [32, 0, 5, 32, 1] {
                    let factors: Vec<Code> =
                        (0..count).map(|_| Code::new(draw(a_format), a_format)).collect();
                    let rows: Vec<Vec<f32>> =
                        (0..count).map(|_| (0..lanes).map(|_| draw(format) as f32).collect()).collect();
                    let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
                    steps(&mut sums, &factors, &rows, format);
                    for (lane, right) in right.iter_mut().enumerate() {
                        let products = factors
                            .iter()
                            .zip(&rows)
                            .map(|(a, row)| (*a, Code::new(row[lane].into(), format)));
                        *right = step(*right, products);
                    }
                    assert!(sums.iter().zip(&right).all(|(sum, right)| f64::from(*sum) == *right));
                }
            }
        }
    }

    /// Test that a number which was divided by a factor and multiplied by it again is the same code.
    #[test]
    fn roundings_of_f64_move_no_place() {
        let format = Format::E4m3;
        for code in (1..=format.encode(448.0)).map(|code| format.decode(code)) {
            let (below, above) = (code * (1.0 - f64::EPSILON), code * (1.0 + f64::EPSILON));
            assert!([below, above].iter().all(|near| Code::new(*near, format) == Code::new(code, format)));
        }
    }

    #[test]
    fn zeros_make_no_sum() {
        assert_eq!(step(0.0, [(Code::ZERO, Code::new(448.0, Format::E4m3)); 3].into_iter()), 0.0);
        assert_eq!(sum(&[], &[], None), 0.0);
    }
}
