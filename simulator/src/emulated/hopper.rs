//! [`Hopper`]: the arithmetic of a FlashAttention-3-style kernel on Hopper's tensor cores, bit by bit as far as it is
//! known.
//!
//! Sums of products are those of [`TensorCore`], in 16-bit factors or in FP8. In FP8 a sum may be *promoted*: after some
//! steps, and at a tile's end, the unit's sum is added to one in f32 and begins anew.
//!
//! The rest follows FlashAttention-3 (<https://github.com/Dao-AILab/flash-attention/tree/main/hopper>). The maximum is
//! taken of bare products, and `scale · log2 e` is folded into the exponential's argument. A row's sum is kept by four
//! threads, each of which holds two columns in eight. Each tile of keys has its own accumulator for dq, and these are
//! added in a drawn order, or in that of the keys. The exponential is `ex2.approx.ftz`: it is wrong by up to 2 ulp,
//! flushes results below 2^-126 and is exact at 0. Its error in ulp is drawn here by a hash of its argument.

use std::f32::consts::LOG2_E;
use std::num::NonZeroUsize;
use std::ops::Range;

use seamproof_oracle::{Format, Softmax};

use super::arithmetic::{HeadRows, RowSum, TileWeights, UnitArithmetic, Weights};
use super::columns::Panel;
use super::tensor_core::{STEP_MAX, TensorCore, truncated};

/// Number of partial sums of a row's dot product on ordinary units.
const DOT_THREADS: usize = 16;
/// 2⁶⁴ ÷ the golden ratio, made odd. It spreads the bits of a hash's input.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Arithmetic of tensor cores and `ex2.approx`.
#[derive(Clone, Copy, Debug)]
pub struct Hopper {
    /// Number that draws the order in which the tiles' shares of dq are added; `None` for that of the keys.
    pub order: Option<u64>,
    /// The matrix unit.
    pub core: TensorCore,
    /// Number of steps after which the unit's sum is promoted; `None` for never.
    pub promoted_after: Option<NonZeroUsize>,
}

impl Hopper {
    /// Returns the arithmetic of 16-bit factors with this order of dq's tiles.
    pub const fn wide(order: u64) -> Hopper {
        Hopper { order: Some(order), core: TensorCore::WIDE, promoted_after: None }
    }

    /// Begins a sum that is added to `to`.
    fn chain<'a>(&'a self, to: &'a mut [f32], formats: [Format; 2]) -> Chain<'a> {
        let promoted = self.promoted_after.map(|after| (after, vec![0.0; to.len()]));
        Chain { core: &self.core, formats, to, promoted, made: 0 }
    }
}

/// A sum of products in steps, promoted as the unit does.
struct Chain<'a> {
    core: &'a TensorCore,
    formats: [Format; 2],
    to: &'a mut [f32],
    /// The number of steps between promotions, and the unit's own sum; `None` where that is `to` itself.
    promoted: Option<(NonZeroUsize, Vec<f32>)>,
    made: usize,
}

impl Chain<'_> {
    /// Makes a step: adds `Σ a[n] · rows[n]`.
    fn step<'r>(&mut self, a: &[f32], rows: impl Iterator<Item = &'r [f32]>) {
        let mut lanes: [&[f32]; STEP_MAX] = [&[]; STEP_MAX];
        lanes.iter_mut().zip(rows).for_each(|(lane, row)| *lane = row);
        self.made += 1;
        match &mut self.promoted {
            None => self.core.steps(self.to, a, &lanes[..a.len()], self.formats),
            Some((after, sum)) => {
                self.core.steps(sum, a, &lanes[..a.len()], self.formats);
                if self.made % *after == 0 {
                    self.promote();
                }
            }
        }
    }

    fn promote(&mut self) {
        if let Some((_, sum)) = &mut self.promoted {
            self.to.iter_mut().zip(&*sum).for_each(|(to, sum)| *to += sum);
            sum.fill(0.0);
        }
    }
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
    fn products(&self, formats: [Format; 2], a: &[f32], b: Panel<'_, f32>, to: &mut [f32]) {
        to.fill(0.0);
        let (mut chain, mut rows) = (self.chain(to, formats), b.rows());
        for a in a.chunks(self.core.step) {
            chain.step(a, rows.by_ref().take(a.len()));
        }
        chain.promote();
    }

    fn add_rows(&self, to: &mut [f32], weights: Weights<'_, f32>, rows: HeadRows<'_, f32>) {
        let (step, count) = (self.core.step, weights.values.len());
        let mut chain = self.chain(to, [weights.format, rows.tensor.format()]);
        // Steps count from the tile's begin, those of hidden columns too.
        chain.made = weights.first / step;
        let mut next = 0;
        while next < count {
            // Steps are aligned to the tile, whatever its first visible column.
            let place = weights.first + next;
            let end = count.min(next + step - place % step);
            chain.step(&weights.values[next..end], rows.slice(next..end).lanes());
            next = end;
        }
        chain.promote();
    }

    fn add_tile(&self, to: &mut [f32], weights: Weights<'_, f32>, rows: HeadRows<'_, f32>) {
        let mut tile = vec![0.0; to.len()];
        self.add_rows(&mut tile, weights, rows);
        to.iter_mut().zip(tile).for_each(|(to, tile)| *to += tile);
    }

    fn add_columns(&self, to: &mut [f32], weights: &TileWeights<f32>, rows: HeadRows<'_, f32>) {
        let dim = rows.tensor.shape()[2];
        let mut column = Vec::with_capacity(weights.seen.len());
        for (j, to) in to.chunks_exact_mut(dim).enumerate() {
            column.clear();
            column.extend((0..weights.seen.len()).map(|i| weights.row(i)[j]));
            if column.iter().any(|weight| *weight != 0.0) {
                self.add_rows(to, Weights { values: &column, format: weights.format, first: 0 }, rows);
            }
        }
    }

    fn order(&self, tile: [usize; 2], tiles: &mut [Range<usize>]) {
        let Some(order) = self.order else { return };
        let mut state = tile.iter().fold(mix(order), |state, part| mix(state ^ *part as u64));
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
    use crate::emulated::tensor_core::tests::{Draws, restated};
    use crate::emulated::tensor_core::{exponent, power_of_two};

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
        let (tensor, hopper) = (drawn(40, 3, &mut draws), Hopper::wide(0));
        let all: Vec<usize> = (0..40).collect();
        let (first, seen) = (5, 5..37);
        let weights: Vec<f32> = seen.clone().map(|_| draws.number(Format::Bf16, 6)).collect();
        let rows = HeadRows { tensor: &tensor, rows: &all, head: 0 }.slice(seen.clone());
        let mut got = [0.5f32; 3];
        hopper.add_rows(&mut got, Weights { values: &weights, format: Format::Bf16, first }, rows);
        for (c, got) in got.iter().enumerate() {
            let right = [5..16, 16..32, 32..37].into_iter().fold(0.5, |sum, group: Range<usize>| {
                let column: Vec<f32> = group.clone().map(|row| tensor.lane(row, 0)[c]).collect();
                restated(
                    TensorCore::WIDE,
                    sum,
                    &weights[group.start - 5..group.end - 5],
                    &column,
                    [Format::Bf16; 2],
                )
            });
            assert_eq!(got.to_bits(), right.to_bits());
        }
    }

    #[test]
    fn units_agree_up_to_rounding() {
        let mut draws = Draws(3);
        let tensor = drawn(20, 70, &mut draws);
        let (hopper, softmax) =
            (Hopper::wide(0), Softmax { scale: 0.3, softcap: Some(5.0), sink: seamproof_oracle::Sink::None });
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
