//! [`Hopper`]: the arithmetic of a FlashAttention-3-style kernel on Hopper's tensor cores, bit by bit as far as it is
//! known.
//!
//! A `wgmma` step takes [`STEP`] exact products and an f32 addend. All are aligned to the largest exponent among them
//! and cut to [`FRACTION_BITS`] bits below it, towards zero. The exponent of a product is the sum of its factors'
//! exponents, not normalised; a subnormal factor has its format's smallest exponent. The sum of the cut terms is exact
//! and is cut to f32, again towards zero. Zeros take no part in the alignment. Sources: MMA-Sim
//! (<https://arxiv.org/abs/2511.10909>, <https://github.com/microsoft/MMA-Sim>), and the observation on an H200 that
//! `1 + n·2^-24` gives `1 + ⌊n/2⌋` ulp, `1 + n·2^-25` gives `1 + ⌊n/4⌋` ulp, and `1 + n·2^-26` gives 1 for n up to 15.
//!
//! The rest follows FlashAttention-3 (<https://github.com/Dao-AILab/flash-attention/tree/main/hopper>). The maximum is
//! taken of bare products, and `scale · log2 e` is folded into the exponential's argument. A row's sum is kept by four
//! threads, each of which holds two columns in eight. Each tile of keys has its own accumulator for dq, and these are
//! added in any order. The exponential is `ex2.approx.ftz`: it is wrong by up to 2 ulp, flushes results below 2^-126
//! and is exact at 0. Its error in ulp is drawn here by a hash of its argument.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use seamproof_oracle::{Format, Softmax};

use super::arithmetic::{HeadRows, RowSum, TileWeights, UnitArithmetic, Weights};

/// Number of products in one step of 16-bit factors.
pub const STEP: usize = 16;
/// Number of bits that are kept below the largest exponent of a step.
pub const FRACTION_BITS: i32 = 25;
/// Number of partial sums of a row's dot product on ordinary units.
const DOT_THREADS: usize = 16;
/// 2⁶⁴ ÷ the golden ratio, made odd. It spreads the bits of a hash's input.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Arithmetic of tensor cores and `ex2.approx`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hopper {
    /// Number that draws the order in which the tiles' shares of dq are added.
    pub order: u64,
}

/// Number of lanes whose steps are made together, in vector code.
const LANES: usize = 8;

/// Returns one step: `addend + Σ a[n] · b[n]` with at most [`STEP`] products of numbers of the two formats.
///
/// If a factor or the addend is not finite, the step is the plain sum.
pub fn step(addend: f32, a: &[f32], b: &[f32], formats: [Format; 2]) -> f32 {
    let mut rows = [[0.0]; STEP];
    rows.iter_mut().zip(b).for_each(|(row, b)| row[0] = *b);
    step_lanes([addend], &a[..a.len().min(b.len())], &rows, formats)[0]
}

/// Returns one step in each of some lanes: `addends[l] + Σ a[n] · rows[n][l]`.
#[inline(always)]
fn step_lanes<const N: usize>(
    addends: [f32; N],
    a: &[f32],
    rows: &[[f32; N]; STEP],
    [a_format, b_format]: [Format; 2],
) -> [f32; N] {
    let (a_min, b_min) = (a_format.exponent_min(), b_format.exponent_min());
    let mut largest = addends.map(|addend| match addend == 0.0 {
        true => i32::MIN,
        false => exponent(addend, Format::F32.exponent_min()),
    });
    let (mut plain, mut products) = (addends.map(f64::from), [[0.0; N]; STEP]);
    for ((products, &a), row) in products.iter_mut().zip(a).zip(rows) {
        let (factor, place) = (f64::from(a), exponent(a, a_min));
        for lane in 0..N {
            // f64 holds the product of two f32 exactly. The product is 0 if a factor is 0.
            let product = factor * f64::from(row[lane]);
            products[lane] = product;
            plain[lane] += product;
            let place = place.wrapping_add(exponent(row[lane], b_min));
            largest[lane] = largest[lane].max(if product == 0.0 { i32::MIN } else { place });
        }
    }
    // A lane of zeros has no exponent, and any exponent will do.
    let exponents = largest.map(|largest| if largest == i32::MIN { 0 } else { largest });
    let units = exponents.map(|largest| power_of_two(FRACTION_BITS.wrapping_sub(largest)));
    // Scaling by a power of two is exact. Sums of whole numbers far below 2^52 are exact too.
    let mut sums = [0.0; N];
    for products in &products[..a.len()] {
        for lane in 0..N {
            sums[lane] += cut(products[lane] * units[lane]);
        }
    }
    let mut results = [0.0; N];
    for lane in 0..N {
        let sum = sums[lane] + cut(f64::from(addends[lane]) * units[lane]);
        results[lane] = match largest[lane] {
            _ if !plain[lane].is_finite() => plain[lane] as f32,
            i32::MIN => 0.0,
            largest => truncated(sum * power_of_two(largest - FRACTION_BITS)),
        };
    }
    results
}

/// Makes a step in every lane: `to[l] += Σ a[n] · rows[n][l]`.
fn steps(to: &mut [f32], a: &[f32], rows: &[&[f32]], formats: [Format; 2]) {
    for first in (0..to.len()).step_by(LANES) {
        let lanes = first..to.len().min(first + LANES);
        let mut block = [[0.0; LANES]; STEP];
        for (block, row) in block.iter_mut().zip(rows) {
            block[..lanes.len()].copy_from_slice(&row[lanes.clone()]);
        }
        let mut addends = [0.0; LANES];
        addends[..lanes.len()].copy_from_slice(&to[lanes.clone()]);
        let results = step_lanes(addends, a, &block, formats);
        to[lanes.clone()].copy_from_slice(&results[..lanes.len()]);
    }
}

/// Returns the whole number next to `value` towards zero. The magnitude of `value` is below 2^51.
#[inline(always)]
fn cut(value: f64) -> f64 {
    const WHOLE: f64 = (1u64 << 52) as f64;
    let magnitude = value.abs();
    let nearest = magnitude + WHOLE - WHOLE;
    (if nearest > magnitude { nearest - 1.0 } else { nearest }).copysign(value)
}

/// Returns the exponent of a number whose format has the smallest exponent `min`.
#[inline(always)]
fn exponent(value: f32, min: i32) -> i32 {
    ((value.to_bits() >> 23 & 0xff) as i32 - 127).max(min)
}

/// Returns 2^exponent, within f64's normal range.
#[inline(always)]
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((1023 + i64::from(exponent)) as u64) << 52)
}

/// Returns the f32 next to `value` towards zero.
fn truncated(value: f64) -> f32 {
    let nearest = value as f32;
    let away = f64::from(nearest).abs() > value.abs();
    let overflows = value.abs() >= power_of_two(128);
    if away && !overflows { f32::from_bits(nearest.to_bits() - 1) } else { nearest }
}

/// Returns `2^x` as `ex2.approx.ftz.f32` computes it.
pub fn ex2(x: f32) -> f32 {
    let exact = libm::exp2(f64::from(x));
    if x == 0.0 || !exact.is_finite() || exact < f64::from(f32::MIN_POSITIVE) || exact > f64::from(f32::MAX) {
        // Results below the normal range are flushed, and the result at 0 is exact.
        return if exact < f64::from(f32::MIN_POSITIVE) { 0.0 } else { exact as f32 };
    }
    // Truncation errs downwards by less than one ulp. Adding −1, 0, 1 or 2 ulp makes an error of up to two either way.
    let ulps = (mix(u64::from(x.to_bits())) >> 62) as u32;
    let result = f32::from_bits(truncated(exact).to_bits() + ulps - 1);
    if result < f32::MIN_POSITIVE { 0.0 } else { result }
}

fn mix(x: u64) -> u64 {
    let x = (x ^ GOLDEN).wrapping_mul(GOLDEN);
    (x ^ (x >> 29)).wrapping_mul(GOLDEN)
}

/// Returns the factor that turns a score into a logit: the scale, or the cap if the product is capped.
fn factor(softmax: &Softmax) -> f32 {
    softmax.softcap.unwrap_or(softmax.scale)
}

impl UnitArithmetic<f32> for Hopper {
    fn products(&self, format: Format, a: &[f32], b: &[f32], to: &mut [f32]) {
        to.fill(0.0);
        let columns = to.len();
        for (a, b) in a.chunks(STEP).zip(b.chunks(STEP * columns)) {
            let mut rows: [&[f32]; STEP] = [&[]; STEP];
            rows.iter_mut().zip(b.chunks(columns)).for_each(|(row, b)| *row = b);
            steps(to, a, &rows[..a.len()], [format; 2]);
        }
    }

    fn add_rows(&self, to: &mut [f32], weights: Weights<'_, f32>, rows: HeadRows<'_, f32>) {
        let formats = [weights.format, rows.tensor.format()];
        let mut next = 0;
        while next < weights.values.len() {
            // Steps are aligned to the tile, whatever its first visible column.
            let place = weights.first + next;
            let end = weights.values.len().min(next + STEP - place % STEP);
            let (weights, rows) = (&weights.values[next..end], rows.slice(next..end));
            let mut lanes: [&[f32]; STEP] = [&[]; STEP];
            lanes.iter_mut().zip(rows.lanes()).for_each(|(to, lane)| *to = lane);
            steps(to, weights, &lanes[..weights.len()], formats);
            next = end;
        }
    }

    fn add_tile(&self, to: &mut [f32], weights: Weights<'_, f32>, rows: HeadRows<'_, f32>) {
        let mut tile = vec![0.0; to.len()];
        self.add_rows(&mut tile, weights, rows);
        to.iter_mut().zip(tile).for_each(|(to, tile)| *to += tile);
    }

    fn add_columns(&self, to: &mut [f32], weights: &TileWeights<f32>, rows: HeadRows<'_, f32>) {
        let dim = rows.tensor.shape()[2];
        for (j, to) in to.chunks_exact_mut(dim).enumerate() {
            let column: Vec<f32> = (0..weights.seen.len()).map(|i| weights.row(i)[j]).collect();
            if column.iter().any(|weight| *weight != 0.0) {
                self.add_rows(to, Weights { values: &column, format: weights.format, first: 0 }, rows);
            }
        }
    }

    fn order(&self, tile: [usize; 2], tiles: &mut [Range<usize>]) {
        let mut state = tile.iter().fold(mix(self.order), |state, part| mix(state ^ *part as u64));
        for last in (1..tiles.len()).rev() {
            state = mix(state);
            tiles.swap(last, (state >> 32) as usize % (last + 1));
        }
    }

    fn add_weights(&self, sum: &mut RowSum<f32>, first: usize, weights: &[f32]) {
        // A thread holds two neighbouring columns in every eight of the accumulator.
        for (place, weight) in (first..).zip(weights) {
            sum[place % 8 / 2] += weight;
        }
    }

    fn total(&self, sum: &RowSum<f32>) -> f32 {
        (sum[0] + sum[2]) + (sum[1] + sum[3])
    }

    fn row_dot(&self, a: &[f32], b: &[f32]) -> f32 {
        let mut sums = [0.0f32; DOT_THREADS];
        for (c, (a, b)) in a.iter().zip(b).enumerate() {
            sums[c % DOT_THREADS] = a.mul_add(*b, sums[c % DOT_THREADS]);
        }
        let mut width = DOT_THREADS;
        while width > 1 {
            width /= 2;
            (0..width).for_each(|thread| sums[thread] += sums[thread + width]);
        }
        sums[0]
    }

    fn scores(&self, softmax: &Softmax, products: &mut [f32]) {
        if let Some(cap) = softmax.softcap {
            let scale = softmax.scale / cap;
            products.iter_mut().for_each(|product| *product = libm::tanhf(*product * scale));
        }
    }

    fn logit(&self, softmax: &Softmax, score: f32) -> f32 {
        score * factor(softmax)
    }

    fn weight(&self, softmax: &Softmax, score: f32, max: f32) -> f32 {
        let factor = factor(softmax) * LOG2_E;
        ex2(score.mul_add(factor, -(max * factor)))
    }

    fn rescale(&self, softmax: &Softmax, old: f32, new: f32) -> f32 {
        ex2((old - new) * (factor(softmax) * LOG2_E))
    }

    fn probability(&self, softmax: &Softmax, score: f32, lse: f32) -> f32 {
        ex2(score.mul_add(factor(softmax) * LOG2_E, -(lse * LOG2_E)))
    }

    fn cap_derivative(&self, softmax: &Softmax, score: f32) -> f32 {
        softmax.softcap.map_or(1.0, |_| 1.0 - score * score)
    }

    fn exp(&self, x: f32) -> f32 {
        ex2(x * LOG2_E)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GuardedTensor;
    use crate::emulated::Serial;

    /// Returns 1 + n products of 2^(−e) in ulps above 1, where the 1 is in the addend.
    fn ulps_above_one(n: usize, e: i32) -> u32 {
        let half = [power_of_two(-e / 2) as f32; STEP - 1];
        let other = [power_of_two(-e + e / 2) as f32; STEP - 1];
        step(1.0, &half[..n], &other[..n], [Format::Bf16; 2]).to_bits() - 1.0f32.to_bits()
    }

    #[test]
    fn what_lies_below_25_bits_is_lost() {
        for n in 0..STEP {
            assert_eq!(ulps_above_one(n, 24), n as u32 / 2);
            assert_eq!(ulps_above_one(n, 25), n as u32 / 4);
            assert_eq!(ulps_above_one(n, 26), 0);
        }
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

    /// Returns [`step`], restated on integers alone: shifts of significands, bit after bit.
    fn restated(addend: f32, a: &[f32], b: &[f32], formats: [Format; 2]) -> f32 {
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
        let sum: i128 = terms.iter().map(|&(s, e, m)| s * cut(largest - e + 46 - FRACTION_BITS, m)).sum();
        let (mut exponent, mut magnitude) = (largest - FRACTION_BITS, sum.abs());
        while magnitude >= 1 << 24 || (magnitude != 0 && exponent < -149) {
            (exponent, magnitude) = (exponent + 1, magnitude >> 1);
        }
        (sum.signum() as f64 * magnitude as f64 * power_of_two(exponent)) as f32
    }

    struct Draws(u64);

    impl Draws {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(GOLDEN);
            let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x ^ (x >> 29)
        }

        fn number(&mut self, format: Format, spread: i32) -> f32 {
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

    #[test]
    fn a_step_agrees_with_its_restatement() {
        let mut draws = Draws(1);
        for case in 0..100_000 {
            let format = if case % 2 == 0 { Format::Bf16 } else { Format::Fp16 };
            let spread = [2, 8, 20, 28][case / 2 % 4];
            let n = case % (STEP + 1);
            let mut numbers = || (0..n).map(|_| draws.number(format, spread)).collect::<Vec<f32>>();
            let (a, b) = (numbers(), numbers());
            let addend = draws.number(Format::F32, spread);
            let (got, right) = (step(addend, &a, &b, [format; 2]), restated(addend, &a, &b, [format; 2]));
            assert_eq!(got.to_bits(), right.to_bits(), "{addend} + {a:?} · {b:?}: {got} {right}");
        }
    }

    #[test]
    fn an_exponential_is_wrong_by_two_ulp_at_most_and_by_more_than_one_somewhere() {
        let mut worst = 0.0f64;
        for n in 0..200_000 {
            let x = -(n as f32) * 6.3e-4;
            let (got, exact) = (f64::from(ex2(x)), libm::exp2(f64::from(x)));
            if exact < 2.0 * f64::from(f32::MIN_POSITIVE) {
                assert!((got - exact).abs() <= 2.0 * f64::from(f32::MIN_POSITIVE), "{x}");
                continue;
            }
            let ulp = power_of_two(exponent(got.max(exact) as f32, -126) - 23);
            worst = worst.max((got - exact).abs() / ulp);
        }
        assert!(worst > 1.5 && worst <= 2.0, "{worst}");
        assert_eq!([ex2(0.0), ex2(-127.0), ex2(f32::NEG_INFINITY)], [1.0, 0.0, 0.0]);
        assert!(ex2(f32::NAN).is_nan());
    }

    /// Returns a tensor of one head with drawn rows.
    fn drawn(rows: usize, dim: usize, draws: &mut Draws) -> GuardedTensor<f32> {
        let mut tensor = GuardedTensor::unwritten("drawn", [rows, 1, dim], Format::Bf16);
        tensor.values_mut().iter_mut().for_each(|value| *value = draws.number(Format::Bf16, 6));
        tensor
    }

    #[test]
    fn steps_are_aligned_to_the_tile() {
        let mut draws = Draws(2);
        let (tensor, hopper) = (drawn(40, 3, &mut draws), Hopper::default());
        let all: Vec<usize> = (0..40).collect();
        let (first, seen) = (5, 5..37);
        let weights: Vec<f32> = seen.clone().map(|_| draws.number(Format::Bf16, 6)).collect();
        let rows = HeadRows { tensor: &tensor, rows: &all, head: 0 }.slice(seen.clone());
        let mut got = [0.5f32; 3];
        hopper.add_rows(&mut got, Weights { values: &weights, format: Format::Bf16, first }, rows);
        for (c, got) in got.iter().enumerate() {
            let right = [5..16, 16..32, 32..37].into_iter().fold(0.5, |sum, group: Range<usize>| {
                let column: Vec<f32> = group.clone().map(|row| tensor.lane(row, 0)[c]).collect();
                restated(sum, &weights[group.start - 5..group.end - 5], &column, [Format::Bf16; 2])
            });
            assert_eq!(got.to_bits(), right.to_bits());
        }
    }

    #[test]
    fn units_agree_up_to_rounding() {
        let mut draws = Draws(3);
        let tensor = drawn(20, 70, &mut draws);
        let (hopper, softmax) = (
            Hopper::default(),
            Softmax { scale: 0.3, softcap: Some(5.0), sink: seamproof_oracle::Sink::None },
        );
        let (a, b) = (tensor.lane(0, 0), tensor.lane(1, 0));
        let close = |got: f32, right: f32| assert!((got - right).abs() <= 1e-4 * (1.0 + right.abs()));
        close(hopper.row_dot(a, b), Serial.row_dot(a, b));
        let (mut bare, mut plain) = ([1.5f32, -20.0, 3.0], [1.5f32, -20.0, 3.0]);
        hopper.scores(&softmax, &mut bare);
        Serial.scores(&softmax, &mut plain);
        for (score, logit) in bare.into_iter().zip(plain) {
            close(hopper.logit(&softmax, score), logit);
            close(hopper.weight(&softmax, score, bare[2]), Serial.weight(&softmax, logit, plain[2]));
            close(hopper.probability(&softmax, score, 2.0), Serial.probability(&softmax, logit, 2.0));
            close(hopper.cap_derivative(&softmax, score), Serial.cap_derivative(&softmax, logit));
            close(hopper.rescale(&softmax, score, bare[0]), Serial.rescale(&softmax, logit, plain[0]));
        }
    }
}
