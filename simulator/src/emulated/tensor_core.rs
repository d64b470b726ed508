//! [`TensorCore`]: the sums of Hopper's `wgmma`, bit by bit as far as they are known.
//!
//! A step takes K exact products and an f32 addend. All are aligned to the largest exponent among them and cut to F bits
//! below it, towards zero. The exponent of a product is the sum of its factors' exponents, not normalised; a subnormal
//! factor has its format's smallest exponent. The sum of the cut terms is exact. Its first R bits behind the leading
//! one are kept, again towards zero, and the result is an f32. Zeros take no part in the alignment.
//!
//! | factors | K | F | R |
//! |---|---|---|---|
//! | bf16, fp16 ([`TensorCore::WIDE`]) | 16 | 25 | 23, all of f32's |
//! | e4m3, e5m2 ([`TensorCore::FP8`]) | 32 | 13 | 13 |
//!
//! Sources: MMA-Sim (<https://arxiv.org/abs/2511.10909>, <https://github.com/microsoft/MMA-Sim>), and observations on an
//! H200. In bf16, `1 + n·2^-24` gives `1 + ⌊n/2⌋` ulp, `1 + n·2^-25` gives `1 + ⌊n/4⌋` ulp, and `1 + n·2^-26` gives 1 for
//! n up to 15. In e4m3, addends of 2^-13 beside 1 are kept exactly, and addends of 2^-14 vanish, 31 of them at a time.

use std::num::NonZeroUsize;

use multiversion::multiversion;
use seamproof_oracle::Format;

use crate::Real;

/// The width of a matrix unit's step and of its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorCore {
    /// Number K of products in one step.
    pub step: usize,
    /// Number F of bits that are kept below the largest exponent of a step.
    pub fraction_bits: i32,
    /// Number R of bits that are kept behind the leading one of a result; at most 23.
    pub result_bits: u32,
}

/// Largest number of products in a step of any kind.
pub(super) const STEP_MAX: usize = 32;

/// Number of lanes whose steps are made together, in vector code.
pub(super) const LANES: usize = 8;

impl TensorCore {
    /// Steps of 16-bit factors.
    pub const WIDE: TensorCore = TensorCore { step: 16, fraction_bits: 25, result_bits: 23 };
    /// Steps of FP8 factors.
    pub const FP8: TensorCore = TensorCore { step: 32, fraction_bits: 13, result_bits: 13 };

    /// Returns one step: `addend + Σ a[n] · b[n]` with at most [`TensorCore::step`] products of numbers of the two
    /// formats.
    ///
    /// If a factor or the addend is not finite, the step is the plain sum.
    pub fn step(&self, addend: f32, a: &[f32], b: &[f32], formats: [Format; 2]) -> f32 {
        self.step_lanes::<f64, 1>([addend], &a[..a.len().min(b.len())], |n| [b[n]], formats)[0]
    }

    /// Returns `Σ a[n] · b[n]`, step after step. After so many steps the unit's sum is *promoted*: added to a sum in f32
    /// on ordinary units, and the unit begins anew. Without a number it is never promoted.
    pub fn sum(
        &self,
        a: &[f32],
        b: &[f32],
        formats: [Format; 2],
        promoted_after: Option<NonZeroUsize>,
    ) -> f32 {
        let chain = promoted_after.map_or(usize::MAX, |steps| steps.get().saturating_mul(self.step));
        let of_chain = |(a, b): (&[f32], &[f32])| {
            let steps = a.chunks(self.step).zip(b.chunks(self.step));
            steps.fold(0.0, |sum, (a, b)| self.step(sum, a, b, formats))
        };
        a.chunks(chain).zip(b.chunks(chain)).map(of_chain).fold(0.0, |sum, chain| sum + chain)
    }

    /// Makes a step in every lane: `to[l] += Σ a[n] · rows[n][l]`.
    pub(super) fn steps(&self, to: &mut [f32], a: &[f32], rows: &[&[f32]], formats: [Format; 2]) {
        steps(self, to, a, rows, formats);
    }

    /// Returns one step in each of some lanes, in f32 where that holds all terms of it.
    #[inline(always)]
    fn block(
        &self,
        addends: [f32; LANES],
        a: &[f32],
        row: impl Fn(usize) -> [f32; LANES],
        formats: [Format; 2],
    ) -> [f32; LANES] {
        // Products of FP8 have 8 bits, and lie from 2^-32 to 2^32. Cut terms are whole numbers below 2^15, 33 at most.
        // Addends from 2^-64 to 2^64 keep the units of a step in f32's normal range.
        let are_short = self.fraction_bits <= 13 && formats.iter().all(|format| format.bits() == 8);
        let is_near = |addend: &f32| {
            *addend == 0.0 || exponent(*addend, Format::F32.exponent_min()).unsigned_abs() < 64
        };
        if are_short && addends.iter().all(is_near) {
            self.step_lanes::<f32, LANES>(addends, a, row, formats)
        } else {
            self.step_lanes::<f64, LANES>(addends, a, row, formats)
        }
    }

    /// Returns one step in each of some lanes: `addends[l] + Σ a[n] · row(n)[l]`. Terms and their sums are exact in `W`.
    #[inline(always)]
    fn step_lanes<W: Wide, const N: usize>(
        &self,
        addends: [f32; N],
        a: &[f32],
        row: impl Fn(usize) -> [f32; N],
        [a_format, b_format]: [Format; 2],
    ) -> [f32; N] {
        let (a_min, b_min) = (a_format.exponent_min(), b_format.exponent_min());
        let mut largest = addends.map(|addend| match addend == 0.0 {
            true => i32::MIN,
            false => exponent(addend, Format::F32.exponent_min()),
        });
        // The product is 0 if a factor is 0.
        let product = |a: f32, b: f32| W::from_f32(a) * W::from_f32(b);
        let mut plain = addends.map(W::from_f32);
        for (n, &a) in a.iter().enumerate() {
            let (row, place) = (row(n), exponent(a, a_min));
            for lane in 0..N {
                let product = product(a, row[lane]);
                plain[lane] += product;
                let place = place.wrapping_add(exponent(row[lane], b_min));
                largest[lane] = largest[lane].max(if product == W::ZERO { i32::MIN } else { place });
            }
        }
        // A lane of zeros has no exponent, and any exponent will do.
        let exponents = largest.map(|largest| if largest == i32::MIN { 0 } else { largest });
        let units = exponents.map(|largest| W::power_of_two(self.fraction_bits.wrapping_sub(largest)));
        // Scaling by a power of two is exact. Sums of whole numbers that have few bits are exact too.
        let mut sums = [W::ZERO; N];
        for (n, &a) in a.iter().enumerate() {
            let row = row(n);
            for lane in 0..N {
                sums[lane] += (product(a, row[lane]) * units[lane]).cut();
            }
        }
        let mut results = [0.0; N];
        for lane in 0..N {
            let sum = sums[lane] + (W::from_f32(addends[lane]) * units[lane]).cut();
            let plain = plain[lane].to_f64();
            results[lane] = match largest[lane] {
                _ if !plain.is_finite() => plain as f32,
                i32::MIN => 0.0,
                largest => self.kept((sum * W::power_of_two(largest - self.fraction_bits)).truncated()),
            };
        }
        results
    }

    /// Returns the f32 whose bits past the first R of its fraction are cut off.
    #[inline(always)]
    fn kept(&self, result: f32) -> f32 {
        let cut = 23 - self.result_bits;
        f32::from_bits(result.to_bits() >> cut << cut)
    }
}

/// Makes the steps of [`TensorCore::steps`].
#[multiversion(targets("x86_64+avx2+fma", "x86_64+sse4.1"))]
fn steps(core: &TensorCore, to: &mut [f32], a: &[f32], rows: &[&[f32]], formats: [Format; 2]) {
    for (block, to) in to.chunks_mut(LANES).enumerate() {
        let first = block * LANES;
        match <&mut [f32; LANES]>::try_from(&mut *to) {
            Ok(to) => *to = core.block(*to, a, |n| lanes(&rows[n][first..first + LANES]), formats),
            Err(_) => {
                let end = first + to.len();
                let results = core.block(lanes(to), a, |n| lanes(&rows[n][first..end]), formats);
                to.copy_from_slice(&results[..to.len()]);
            }
        }
    }
}

/// Returns some lanes, with zeros behind them.
#[inline(always)]
fn lanes(of_row: &[f32]) -> [f32; LANES] {
    std::array::from_fn(|lane| of_row.get(lane).copied().unwrap_or(0.0))
}

/// Numbers in which the terms of a step are cut and added.
trait Wide: Real {
    /// Returns 2^exponent, within the normal range.
    fn power_of_two(exponent: i32) -> Self;
    /// Returns the next whole number towards zero.
    fn cut(self) -> Self;
    /// Returns the next f32 towards zero.
    fn truncated(self) -> f32;
}

impl Wide for f64 {
    #[inline(always)]
    fn power_of_two(exponent: i32) -> f64 {
        power_of_two(exponent)
    }

    #[inline(always)]
    fn cut(self) -> f64 {
        self.trunc()
    }

    #[inline(always)]
    fn truncated(self) -> f32 {
        truncated(self)
    }
}

impl Wide for f32 {
    #[inline(always)]
    fn power_of_two(exponent: i32) -> f32 {
        f32::from_bits(((127 + exponent) as u32) << 23)
    }

    #[inline(always)]
    fn cut(self) -> f32 {
        self.trunc()
    }

    #[inline(always)]
    fn truncated(self) -> f32 {
        self
    }
}

/// Returns the exponent of a number whose format has the smallest exponent `min`.
#[inline(always)]
pub(super) fn exponent(value: f32, min: i32) -> i32 {
    ((value.to_bits() >> 23 & 0xff) as i32 - 127).max(min)
}

/// Returns 2^exponent, within f64's normal range.
#[inline(always)]
pub(super) fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + i64::from(exponent)) as u64) << 52)
}

/// Returns the f32 next to `value` towards zero.
pub(super) fn truncated(value: f64) -> f32 {
    let nearest = value as f32;
    let away = f64::from(nearest).abs() > value.abs();
    let overflows = value.abs() >= power_of_two(128);
    if away && !overflows { f32::from_bits(nearest.to_bits() - 1) } else { nearest }
}

#[cfg(test)]
pub(super) mod tests {
    use seamproof_oracle::matrix_unit::{self, Code};

    use super::*;

    /// Returns 1 + n products of 2^(−e) less 1, in units of 2^-23, where the 1 is in the addend.
    fn above_one(core: TensorCore, n: usize, e: i32, format: Format) -> u32 {
        let half = [power_of_two(-e / 2) as f32; STEP_MAX - 1];
        let other = [power_of_two(-e + e / 2) as f32; STEP_MAX - 1];
        core.step(1.0, &half[..n], &other[..n], [format; 2]).to_bits() - 1.0f32.to_bits()
    }

    #[test]
    fn what_lies_below_25_bits_is_lost_in_16_bits() {
        for n in 0..TensorCore::WIDE.step {
            let above = |e| above_one(TensorCore::WIDE, n, e, Format::Bf16);
            assert_eq!([above(24), above(25), above(26)], [n as u32 / 2, n as u32 / 4, 0]);
        }
    }

    #[test]
    fn what_lies_below_13_bits_is_lost_in_fp8() {
        for n in 0..TensorCore::FP8.step {
            // 2^-12 = 2^-6 · 2^-6 are normal numbers of e4m3; 2^-13 and 2^-14 have subnormal factors, which are aligned
            // by the exponent −6. E5M2 has these powers as normal numbers.
            for format in [Format::E4m3, Format::E5m2] {
                let above = |e| above_one(TensorCore::FP8, n, e, format);
                assert_eq!(
                    [above(12), above(13), above(14)],
                    [2048 * n as u32, 1024 * n as u32, 0],
                    "{format}"
                );
            }
        }
    }

    #[test]
    fn a_result_in_fp8_keeps_13_bits_behind_the_leading_one() {
        // 2 + 2^-12 needs 13 bits behind the leading one, 2 + 2^-13 needs 14: 1 + 1 + 2^-13 loses it at the end.
        let sum = |small: f32| {
            let b = [1.0, 0.0625, 0.0625];
            TensorCore::FP8.step(1.0, &[1.0, small, small], &b, [Format::E5m2; 2])
        };
        // Two addends of 2^-13 are 2^-12 together.
        assert_eq!(sum(2f32.powi(-9)), 2.0 + 2f32.powi(-12));
        let one = TensorCore::FP8.step(1.0, &[1.0, 2f32.powi(-9)], &[1.0, 0.0625], [Format::E5m2; 2]);
        assert_eq!(one, 2.0);
    }

    /// Returns sign, exponent and significand (24 bits) of a number of a format.
    fn parts(value: f32, format: Format) -> (i128, i32, i128) {
        let bits = value.to_bits();
        let field = (bits >> 23 & 0xff) as i32;
        let (mut exponent, mut significand) = (field.max(1) - 127, i128::from(bits & 0x7f_ffff));
        significand += if field > 0 { 1 << 23 } else { 0 };
        while exponent < format.exponent_min() {
            assert_eq!(significand % 2, 0, "not a number of the format");
            (exponent, significand) = (exponent + 1, significand / 2);
        }
        (if bits >> 31 == 1 { -1 } else { 1 }, exponent, significand)
    }

    /// Returns [`TensorCore::step`], restated on integers alone: shifts of significands, bit after bit.
    pub(in crate::emulated) fn restated(
        core: TensorCore,
        addend: f32,
        a: &[f32],
        b: &[f32],
        formats: [Format; 2],
    ) -> f32 {
        // Terms are (sign, exponent, significand with 46 fraction bits).
        let mut terms = Vec::new();
        let (sign, exponent, significand) = parts(addend, Format::F32);
        terms.push((sign, exponent, significand << 23));
        for (a, b) in a.iter().zip(b) {
            let ((sa, ea, ma), (sb, eb, mb)) = (parts(*a, formats[0]), parts(*b, formats[1]));
            terms.push((sa * sb, ea + eb, ma * mb));
        }
        terms.retain(|(_, _, significand)| *significand != 0);
        let Some(largest) = terms.iter().map(|(_, exponent, _)| *exponent).max() else { return 0.0 };
        let cut = |shift: i32, significand: i128| if shift > 100 { 0 } else { significand >> shift };
        let sum: i128 =
            terms.iter().map(|&(s, e, m)| s * cut(largest - e + 46 - core.fraction_bits, m)).sum();
        let (mut exponent, mut magnitude) = (largest - core.fraction_bits, sum.abs());
        let (last, whole) = (23 - core.result_bits as i32 - 149, 1 << (core.result_bits + 1));
        while magnitude >= whole || (magnitude != 0 && exponent < last) {
            (exponent, magnitude) = (exponent + 1, magnitude >> 1);
        }
        (sum.signum() as f64 * magnitude as f64 * power_of_two(exponent)) as f32
    }

    pub(in crate::emulated) struct Draws(pub(in crate::emulated) u64);

    impl Draws {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x ^ (x >> 29)
        }

        pub(in crate::emulated) fn number(&mut self, format: Format, spread: i32) -> f32 {
            let (low, draw) = (format.exponent_min() - 12, self.next());
            let exponent = match draw % 8 {
                0 => return 0.0,
                1 => low + (draw >> 8) as i32 % 16,
                _ => (draw >> 8) as i32 % spread - spread / 2,
            };
            let sign = if draw >> 63 == 1 { -1.0 } else { 1.0 };
            let fraction = 1.0 + (draw >> 32 & 0xffff) as f64 / 65536.0;
            format.round(sign * fraction * power_of_two(exponent)) as f32
        }
    }

    /// Returns a drawn step: an addend that is a result of the unit, and factors of the formats.
    fn drawn(
        draws: &mut Draws,
        core: TensorCore,
        formats: [Format; 2],
        case: usize,
    ) -> (f32, Vec<f32>, Vec<f32>) {
        let (n, spread) = (case % (core.step + 1), [2, 8, 20, 28][case / 2 % 4]);
        let [a, b] = formats.map(|format| (0..n).map(|_| draws.number(format, spread)).collect::<Vec<f32>>());
        (core.kept(draws.number(Format::F32, spread)), a, b)
    }

    #[test]
    fn a_step_agrees_with_its_restatement() {
        let mut draws = Draws(1);
        let kinds = [
            (TensorCore::WIDE, [Format::Bf16; 2]),
            (TensorCore::WIDE, [Format::Fp16; 2]),
            (TensorCore::FP8, [Format::E4m3; 2]),
            (TensorCore::FP8, [Format::E5m2, Format::E4m3]),
        ];
        for case in 0..200_000 {
            let (core, formats) = kinds[case % kinds.len()];
            let (addend, a, b) = drawn(&mut draws, core, formats, case / kinds.len());
            let (got, right) = (core.step(addend, &a, &b, formats), restated(core, addend, &a, &b, formats));
            assert_eq!(got.to_bits(), right.to_bits(), "{addend} + {a:?} · {b:?}: {got} {right}");
        }
    }

    /// Test that a block of lanes makes the steps of each, in f32 and in f64: with near and far addends, zeros and what
    /// is not finite.
    #[test]
    fn a_block_of_lanes_makes_the_step_of_each() {
        let mut draws = Draws(5);
        let far = [0.0, 1e-30, -1e-44, 3e33, f32::NAN, f32::INFINITY, 1.5, f32::MAX];
        for case in 0..20_000 {
            let formats = [[Format::E4m3; 2], [Format::E5m2, Format::E4m3]][case % 2];
            let (addend, a, _) = drawn(&mut draws, TensorCore::FP8, formats, case / 2);
            let mut addends = [(); LANES].map(|()| draws.number(Format::F32, 8));
            addends[0] = addend;
            let rows: Vec<[f32; LANES]> =
                a.iter().map(|_| [(); LANES].map(|()| draws.number(formats[1], 20))).collect();
            if case % 5 == 0 {
                addends[case % LANES] = far[case / 5 % far.len()];
            }
            let got = TensorCore::FP8.block(addends, &a, |n| rows[n], formats);
            for lane in 0..LANES {
                let b: Vec<f32> = rows.iter().map(|row| row[lane]).collect();
                let right = TensorCore::FP8.step(addends[lane], &a, &b, formats);
                let is_same = got[lane].to_bits() == right.to_bits() || got[lane].is_nan() && right.is_nan();
                assert!(is_same, "{} + {a:?} · {b:?}: {} {right}", addends[lane], got[lane]);
            }
        }
    }

    /// Test that vector code, where the processor has it, gives the bits of plain code, for rows of any width.
    #[test]
    fn rows_of_lanes_get_the_step_of_each() {
        let mut draws = Draws(7);
        for (core, format) in [(TensorCore::WIDE, Format::Bf16), (TensorCore::FP8, Format::E4m3)] {
            for width in 0..36 {
                let mut row = |of| (0..width).map(|_| draws.number(of, 12)).collect::<Vec<f32>>();
                let (before, rows) = (row(Format::F32), [(); 5].map(|()| row(format)));
                let a = [(); 5].map(|()| draws.number(format, 8));
                let mut got = before.clone();
                core.steps(&mut got, &a, &rows.each_ref().map(Vec::as_slice), [format; 2]);
                for lane in 0..width {
                    let b = rows.each_ref().map(|row| row[lane]);
                    let right = core.step(before[lane], &a, &b, [format; 2]);
                    assert_eq!(got[lane].to_bits(), right.to_bits(), "lane {lane} of {width}");
                }
            }
        }
    }

    /// Test that the oracle's unit, which a replay takes, makes the same sums.
    #[test]
    fn sums_in_fp8_are_those_of_the_oracle() {
        let (mut draws, formats) = (Draws(9), [Format::E5m2, Format::E4m3]);
        for case in 0..20_000 {
            let n = case % 260;
            let [a, b] = formats.map(|format| {
                (0..n).map(|_| draws.number(format, [4, 12, 20][case % 3])).collect::<Vec<f32>>()
            });
            let codes = |values: &[f32], format| {
                values.iter().map(|value| Code::new(f64::from(*value), format)).collect::<Vec<Code>>()
            };
            let promoted_after = NonZeroUsize::new(case / 3 % 4);
            let right = matrix_unit::sum(&codes(&a, formats[0]), &codes(&b, formats[1]), promoted_after);
            let got = TensorCore::FP8.sum(&a, &b, formats, promoted_after);
            assert_eq!(f64::from(got), right, "{a:?} · {b:?}, promoted after {promoted_after:?}");
        }
    }

    #[test]
    fn an_fp8_step_errs_by_34_units_of_its_largest_magnitude_at_most() {
        let (core, formats, mut worst, mut draws) = (TensorCore::FP8, [Format::E4m3; 2], 0f64, Draws(5));
        for case in 0..50_000 {
            let (addend, a, b) = drawn(&mut draws, core, formats, case);
            let terms: Vec<f64> = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).collect();
            let exact = f64::from(addend) + terms.iter().sum::<f64>();
            // A subnormal factor is aligned as if it were the smallest normal number.
            let normal =
                |factor: &f32| f64::from(factor.abs()).max(if *factor == 0.0 { 0.0 } else { 2f64.powi(-6) });
            let aligned = a.iter().zip(&b).map(|(a, b)| normal(a) * normal(b));
            let largest = aligned.fold(f64::from(addend.abs()).max(exact.abs()), f64::max);
            let error = (f64::from(core.step(addend, &a, &b, formats)) - exact).abs();
            assert!(error <= 34.0 / 8192.0 * largest, "{error:e} of {largest:e}");
            worst = worst.max(error / largest);
        }
        assert!(worst > 1.0 / 8192.0, "{worst:e}: the bound is not for nothing");
    }

    #[test]
    fn a_sum_is_made_of_chains_of_steps() {
        let (core, formats, mut draws) = (TensorCore::FP8, [Format::E4m3; 2], Draws(8));
        for n in [0, 1, 31, 32, 33, 100, 256, 300] {
            let [a, b] =
                [(); 2].map(|()| (0..n).map(|_| draws.number(Format::E4m3, 6)).collect::<Vec<f32>>());
            let step = |sum: f32, from: usize| {
                let part = from..n.min(from + 32);
                restated(core, sum, &a[part.clone()], &b[part], formats)
            };
            let never = (0..n).step_by(32).fold(0.0, step);
            assert_eq!(core.sum(&a, &b, formats, None), never, "{n}");
            let each = (0..n).step_by(32).fold(0.0, |sum, from| sum + step(0.0, from));
            assert_eq!(core.sum(&a, &b, formats, NonZeroUsize::new(1)), each, "{n}");
            let pairs = (0..n).step_by(64).fold(0.0, |sum, from| {
                let first = step(0.0, from);
                sum + if from + 32 < n { step(first, from + 32) } else { first }
            });
            assert_eq!(core.sum(&a, &b, formats, NonZeroUsize::new(2)), pairs, "{n}");
        }
    }

    /// Returns the error of the product of P and V over a row of so many keys, relative to the exact sum. Weights are
    /// `256·e^−x` with x spread over [0, 4), values are spread over [½, 1½). Truncation makes every error negative.
    fn error_of_a_row(keys: usize, promoted_after: Option<NonZeroUsize>) -> f64 {
        let mut draws = Draws(9);
        let mut uniform = || (draws.next() >> 40) as f64 / f64::from(1 << 24);
        let mut number = |of: fn(f64) -> f64| Format::E4m3.round(of(uniform())) as f32;
        let weights: Vec<f32> = (0..keys).map(|_| number(|u| 256.0 * libm::exp(-4.0 * u))).collect();
        let values: Vec<f32> = (0..keys).map(|_| number(|u| 0.5 + u)).collect();
        let exact: f64 = weights.iter().zip(&values).map(|(p, v)| f64::from(*p) * f64::from(*v)).sum();
        let got = TensorCore::FP8.sum(&weights, &values, [Format::E4m3; 2], promoted_after);
        (f64::from(got) - exact) / exact
    }

    /// Test of the table in `docs/fp8.md`: errors in 10^-5, never promoted and after 16, 4 and 1 steps.
    #[test]
    fn without_promotion_a_long_row_loses_what_promotion_keeps() {
        let errors = [128, 1024, 8192, 65_536].map(|keys| {
            [0, 16, 4, 1].map(|steps| (error_of_a_row(keys, NonZeroUsize::new(steps)) * 1e5).round() as i32)
        });
        let table =
            [[-79, -79, -79, -4], [-1453, -540, -58, -3], [-13_989, -529, -54, -3], [-49_142, -536, -55, -3]];
        assert_eq!(errors, table);
    }
}
