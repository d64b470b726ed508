//! For each element of the answer, the largest error that an honest subject can show, in two tiers: W, the worst case
//! for any input, and T, in which the roundings of dithered weights may cancel.
//!
//! An *honest subject* rounds its inputs, weights, logit gradients and results to the problem's formats, computes in
//! f32 between, and sums as it declares ([`Accumulation`], [`Partition`]). The bound is a sum of named rounding terms
//! evaluated with the exact answer's own quantities. Nothing here is tuned: each constant is a unit roundoff, a count
//! of roundings, or a documented accuracy of an instruction.
//!
//! Terms, for query i and key j (all quantities exact; `A_ij = Σ_c |q_ic||k_jc|`, `B_ij = Σ_c |dout_ic||v_jc|`, `m` the
//! row's largest logit, `l = Σ exp(s − m)`, `u` the unit roundoff of a stored format):
//!
//! | term | what it bounds |
//! |---|---|
//! | `logit_error` | absolute error of a logit: `scale·A·(g(d) + 2ε)`, and the soft cap's tanh |
//! | `weight_error` | error `p·θ` of an unrounded weight: the exponent's, exp's own, `R` rescalings of a running max, merges |
//! | `weight_rounding` | absolute error of rounding P: `u·p`, or the format's floor, whichever is larger |
//! | `gamma` | relative error of the row sum |
//! | `g(n)` | error of a sum of n products relative to the sum of their magnitudes; a tensor core cuts a subnormal factor off where it would a factor of its format's smallest exponent, so that counts as its magnitude there |
//! | half spacing | the final rounding to the stored format |
//!
//! Tier T differs from W in two terms, both for certified sums alone (`blocked/dither.rs`). Errors of rounding weights
//! are independent there and of mean 0, so that their sum is within eight standard deviations ([`NOISE`]), or within
//! the sum of all magnitudes where that is less. A row sum's roundings are bounded by a martingale's tail
//! ([`ROW_SUM_TAIL`]). A truncating unit's error is biased and stays linear, and so does every other term.
//!
//! Used by the judge and nowhere else. Sources: Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1
//! (`γ_n = nε/(1 − nε)`); MMA-Sim (arXiv 2511.10909) and arXiv 2512.07004 for the tensor core's truncation; the PTX ISA
//! for `ex2.approx` (2^-22 relative) and `lg2.approx`; Higham and Mary, "A New Approach to Probabilistic Rounding Error
//! Analysis" (SIAM J. Sci. Comput. 41, 2019), and Ipsen and Zhou, "Probabilistic Error Analysis for Inner Products"
//! (SIAM J. Matrix Anal. Appl. 41, 2020), for sums of independent roundings.

use crate::replay::Profile;
use crate::{Format, Precision, Problem};

/// Unit roundoff of f32, round to nearest: 2^-24.
pub const F32_ROUNDOFF: f64 = 1.0 / (1u64 << 24) as f64;
/// Relative error of an honest `exp`: 2^-22 (`ex2.approx` after its input scaling).
pub const EXP_ERROR: f64 = 1.0 / (1u64 << 22) as f64;
/// Relative error of an honest `tanh`: 2^-21 (an accurate f32 library function, a few ulp).
pub const TANH_ERROR: f64 = 1.0 / (1u64 << 21) as f64;
/// Absolute error of an honest `log` for arguments near 1: 2^-21.4 (`lg2.approx` times ln 2).
pub const LOG_ERROR: f64 = 3.613_2e-7;
/// Further relative error of an honest `log`: 3 ulp.
const LOG_RELATIVE_ERROR: f64 = 3.0 / (1u64 << 23) as f64;
/// Smallest normal f32: what a unit that flushes subnormals to zero may lose.
const F32_NORMAL_MIN: f64 = f32::MIN_POSITIVE as f64;
/// The smallest subnormal f32: more than gradual underflow may lose.
const F32_SUBNORMAL_STEP: f64 = 1.401_298_464_324_817e-45;
/// Largest exponent of a bound: past it a bound says nothing, and it keeps `exp` finite.
const EXPONENT_MAX: f64 = 60.0;
/// Where the relative errors of a row add up to more than this, the first-order form no longer holds.
const DENOMINATOR_ERROR_MAX: f64 = 0.5;

/// Eight standard deviations of rounding a weight to nearest, in its unit roundoffs: the error is uniform in a cell of
/// half width `u·2^e ≤ u·p`, whose deviation is that over √3, hence `8/√3`, wherever the weights lie in their binades.
/// (Spread evenly in their logarithm they would need 3.4; those of a row whose logits differ little lie close together.)
/// Eight, because 1.2e-15 of a normal law lies outside.
pub const NOISE: f64 = 4.619;
/// Azuma's `√(2·ln(2/δ))` for δ = 1e-15: a sum of n roundings, each at most a in magnitude and of mean 0 given the ones
/// before, is within this times `a·√n`.
pub const ROW_SUM_TAIL: f64 = 8.4;

/// How a subject sums, as it declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulation {
    /// One after the other in f32, each product and each sum rounded to nearest, subnormals kept.
    F32Serial,
    /// `width` serial partial sums in f32, then a binary tree over them.
    F32Tree {
        /// Partial sums; at least 1.
        width: usize,
    },
    /// Hopper's `wgmma`: 16 products and the addend aligned to the largest exponent, cut to 25 fractional bits, the
    /// result truncated to f32. Row sums are FlashAttention-3's: four threads a row, then a shuffle.
    WgmmaTruncating,
    /// Not declared: for each sum the weakest of the others.
    Unknown,
}

/// Products of one step of Hopper's `wgmma`.
const STEP: usize = 16;
/// Error of one such step relative to the largest magnitude in it: (K + 1)·2^-F + 2^-23 with K = 16 products and
/// F = 25 fractional bits.
const KAPPA: f64 = 17.0 / (1u64 << 25) as f64 + 1.0 / (1u64 << 23) as f64;

/// Steps that `n` neighbouring products touch, of sums that are cut into tiles and, from each tile's start, into steps:
/// one more than they fill, since they may begin anywhere.
fn steps(n: usize, tile: usize) -> usize {
    let tile = tile.max(1);
    let touched = if tile < STEP || tile.is_multiple_of(STEP) {
        n.div_ceil(tile.min(STEP)) + 1
    } else {
        (n.div_ceil(tile) + 1) * tile.div_ceil(STEP)
    };
    touched.min(n)
}

/// `γ_n`: n roundings of f32.
fn gamma(roundings: usize) -> f64 {
    let n = roundings as f64 * F32_ROUNDOFF;
    n / (1.0 - n)
}

impl Accumulation {
    /// `g(n)`: error of a matrix unit's sum of `n` products, relative to the sum of their magnitudes.
    pub fn products(self, n: usize) -> f64 {
        match self {
            Accumulation::F32Serial => gamma(n + 1),
            Accumulation::F32Tree { width } => gamma(tree_roundings(n, width) + 1),
            Accumulation::WgmmaTruncating => n.div_ceil(STEP) as f64 * KAPPA,
            Accumulation::Unknown => {
                Accumulation::F32Serial.products(n).max(Accumulation::WgmmaTruncating.products(n))
            }
        }
    }

    /// `g` of a sum of `n` neighbouring products of a longer sum that is cut into tiles, and the tiles into steps of the
    /// matrix unit.
    pub fn cut_products(self, n: usize, tile: usize) -> f64 {
        let steps = || KAPPA * steps(n, tile) as f64;
        match self {
            Accumulation::WgmmaTruncating => steps(),
            Accumulation::Unknown => Accumulation::F32Serial.products(n).max(steps()),
            _ => self.products(n),
        }
    }

    /// Relative error of a row sum of `n` positive terms that are added tile by tile. Ordinary units add them, which
    /// round to nearest.
    pub fn row_sum(self, n: usize, tiles: usize) -> f64 {
        gamma(self.row_sum_roundings(n, tiles))
    }

    /// The same in tier T.
    pub fn row_sum_dithered(self, n: usize, tiles: usize) -> f64 {
        let roundings = self.row_sum_roundings(n, tiles);
        // Partial sums exceed the exact ones by `γ` at most.
        let tail = ROW_SUM_TAIL * F32_ROUNDOFF * (roundings as f64).sqrt() * (1.0 + gamma(roundings));
        tail.min(gamma(roundings))
    }

    /// Roundings that a term of a row sum passes through at most.
    fn row_sum_roundings(self, n: usize, tiles: usize) -> usize {
        match self {
            Accumulation::F32Serial | Accumulation::Unknown => n + tiles + 1,
            Accumulation::F32Tree { width } => tree_roundings(n, width) + tiles + 1,
            Accumulation::WgmmaTruncating => n.div_ceil(4) + tiles + 4,
        }
    }

    /// Error of `rowsum(dout · out)` over `n` lanes on ordinary units, relative to the sum of magnitudes.
    pub fn row_dot(self, n: usize) -> f64 {
        match self {
            Accumulation::F32Serial | Accumulation::Unknown => gamma(n + 1),
            Accumulation::F32Tree { width } => gamma(tree_roundings(n, width) + 1),
            Accumulation::WgmmaTruncating => gamma(n.div_ceil(16) + 6),
        }
    }

    /// `g` of dq: products over `n` keys, `tile` of them at a time, the tiles' results added in any order.
    pub fn tiled_products(self, n: usize, tile: usize) -> f64 {
        match self {
            Accumulation::WgmmaTruncating => {
                let steps = steps(n, tile).min(tile.div_ceil(STEP).max(1));
                KAPPA * steps as f64 + gamma(n.div_ceil(tile.max(1)) + 1)
            }
            _ => self.products(n) + gamma(n.div_ceil(tile.max(1)) + 1),
        }
    }

    /// Whether products are aligned by the exponents of their factors, of which a subnormal's is its format's smallest.
    fn aligns(self) -> bool {
        matches!(self, Accumulation::WgmmaTruncating | Accumulation::Unknown)
    }

    /// What one operation may lose to underflow.
    #[inline]
    pub fn underflow(self) -> f64 {
        match self {
            Accumulation::F32Serial | Accumulation::F32Tree { .. } => F32_SUBNORMAL_STEP,
            Accumulation::WgmmaTruncating | Accumulation::Unknown => F32_NORMAL_MIN,
        }
    }
}

fn tree_roundings(n: usize, width: usize) -> usize {
    let width = width.max(1);
    n.div_ceil(width) + width.next_power_of_two().trailing_zeros() as usize
}

/// How a subject cuts a problem's sums into separately rounded pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Query rows of a tile.
    pub q_tile: usize,
    /// Keys of a tile: the running maximum and sum change once a tile.
    pub kv_tile: usize,
    /// How a row's partial results are merged.
    pub merges: Merges,
    /// How partial gradients are added up.
    pub sums: Sums,
}

/// Partial outs and LSEs of one row, computed by separate launches and merged (ring steps, splits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merges {
    /// Merges that a row goes through at most; 0 where one launch makes the final row.
    pub count: usize,
    /// What a launch's partial out is stored in.
    pub step: Format,
    /// What the running out is stored in.
    pub running: Format,
    /// Whether the weighted partial out is rounded to the running format before it is added.
    pub product_rounded: bool,
}

/// Partial gradients of one row, computed by separate launches, stored and added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sums {
    /// Roundings of a partial sum on its way, in all; 0 where one launch makes the final gradient.
    pub count: usize,
    /// What they round to.
    pub format: Format,
}

impl Partition {
    /// One launch makes every row: tiles only.
    pub fn single(q_tile: usize, kv_tile: usize) -> Partition {
        let f32 = Format::F32;
        Partition {
            q_tile,
            kv_tile,
            merges: Merges { count: 0, step: f32, running: f32, product_rounded: false },
            sums: Sums { count: 0, format: f32 },
        }
    }
}

/// The declared arithmetic of a subject on one problem: everything that the terms need besides exact quantities.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    accumulation: Accumulation,
    partition: Partition,
    p: Format,
    out: Format,
    ds: Format,
    gradients: Format,
    scale: f64,
    softcap: Option<f64>,
    dims_v: usize,
    group: usize,
    /// What a non-zero input counts as at least where products are aligned by their factors' exponents.
    input_floor: f64,
    /// The same of a weight, and of a logit gradient.
    p_floor: f64,
    ds_floor: f64,
    /// `g` of a product of a query with a key, and of dout with a value.
    products_qk: f64,
    products_v: f64,
}

/// Per-row quantities of the forward bound.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Visible keys.
    pub keys: usize,
    /// Largest logit, the sink included.
    pub max: f64,
    /// Largest magnitude of a logit, the sink included.
    pub max_abs: f64,
    /// Largest minus smallest logit, the sink included.
    pub range: f64,
    /// `Σ exp(s − max)`, the sink included.
    pub sum: f64,
    /// The exact LSE.
    pub lse: f64,
    /// Whether the row's denominator has a sink.
    pub sink: Option<f64>,
}

/// What the forward bound needs of one (query, key) pair.
#[derive(Clone, Copy, Debug)]
pub struct PairError {
    /// `p·θ`, the weight's error before it is rounded.
    pub weight: f64,
    /// Coefficient of `|v|` in the numerator's error, but for the rounding of P.
    pub value: f64,
    /// The rounding of P, another coefficient of `|v|`.
    pub rounding: Rounding,
}

/// The rounding of one weight.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// Its largest magnitude.
    pub most: f64,
    /// Whether it may be taken as noise: below the normal range a value may vanish, which is no noise.
    pub is_noise: bool,
}

/// Which row sums a tier counts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Any input.
    Worst,
    /// Certified as dithered.
    Dithered,
}

/// The exact quantities of one pair in the backward.
#[derive(Clone, Copy, Debug)]
pub struct GradientPair {
    /// The logit.
    pub logit: f64,
    /// The saved LSE of the row.
    pub lse: f64,
    /// How far the LSE that the subject used may be from that; 0 where it is the subject's own.
    pub lse_error: f64,
    /// The weight, exact given the saved LSE.
    pub p: f64,
    /// `dP − D`.
    pub x: f64,
    /// The soft cap's derivative.
    pub derivative: f64,
    /// `Σ|q||k|`.
    pub a: f64,
    /// `Σ|dout||v|`.
    pub b: f64,
    /// [`Model::d_error`] of the row.
    pub d_error: f64,
}

impl GradientPair {
    /// A pair of which the weight alone is looked at: no gradient, no soft cap, the subject's own LSE.
    pub fn of_weight(logit: f64, lse: f64, p: f64, a: f64) -> GradientPair {
        GradientPair { logit, lse, lse_error: 0.0, p, x: 0.0, derivative: 1.0, a, b: 0.0, d_error: 0.0 }
    }
}

/// One pair of the backward, replayed.
#[derive(Clone, Copy, Debug)]
pub struct ReplayedPair {
    /// The rounded weight.
    pub p: f64,
    /// The rounded logit gradient.
    pub ds: f64,
    /// What is left as a coefficient of `|dout|` in dv.
    pub dv: f64,
    /// Of `|q|` in dk, without the scale.
    pub dk: f64,
    /// Of `|k|` in dq, without the scale.
    pub dq: f64,
}

/// Errors of the gradients' coefficients for one pair, but for the roundings of P and dS, which come apart.
#[derive(Clone, Copy, Debug)]
pub struct GradientPairError {
    /// Coefficient of `|dout|` in dv.
    pub dv: f64,
    /// Coefficient of `|q|` in dk, without the scale.
    pub dk: f64,
    /// Coefficient of `|k|` in dq, without the scale.
    pub dq: f64,
    /// The rounding of P: another coefficient of `|dout|` in dv.
    pub p: Rounding,
    /// The rounding of dS: another coefficient of `|q|` in dk and of `|k|` in dq.
    pub ds: Rounding,
}

/// How far `e^(log p ± error)` can be from `p = e^(log p)`, for an error ≥ 0 of the exponent: `p·(error + error²)` up to
/// 1, since `e^x − 1 ≤ x + x²` there. Past that p itself may have underflowed while the computed weight has not, so
/// the bound is the largest computed weight.
#[inline]
fn exponential_error(p: f64, log_p: f64, error: f64) -> f64 {
    if error <= 1.0 { p * (error + error * error) } else { libm::exp((log_p + error).min(EXPONENT_MAX)) }
}

/// Error of rounding a value of magnitude `magnitude` to `format`: relative `u`, or the floor of its subnormals.
#[inline]
fn rounding(format: Format, magnitude: f64, floor: f64) -> Rounding {
    let relative = format.unit_roundoff() * magnitude;
    Rounding { most: relative.max(magnitude.min(floor)), is_noise: relative >= floor }
}

/// A value as it is rounded, and how far from that a value within `error` of it can be rounded: 0 but for near-ties.
#[inline]
fn replayed(format: Format, value: f64, error: f64) -> (f64, f64) {
    let rounded = format.round(value);
    let apart = |other: f64| (format.round(other) - rounded).abs();
    (rounded, apart(value + error).max(apart((value - error).max(0.0))))
}

/// The smallest normal number of a format where products are aligned by their factors' exponents; 0 elsewhere.
fn smallest_normal(accumulation: Accumulation, format: Format) -> f64 {
    if accumulation.aligns() { libm::exp2(f64::from(format.exponent_min())) } else { 0.0 }
}

/// The magnitude of a weight or logit gradient in sums of products, where its format has a floor.
#[inline]
fn factor(magnitude: f64, floor: f64) -> f64 {
    if magnitude == 0.0 { 0.0 } else { magnitude.max(floor) }
}

/// Error of rounding a result of at most this magnitude, where it does not overflow: an infinity stands for any value
/// past the format's largest, and is compared as such by the judge.
#[inline]
fn final_rounding(format: Format, magnitude: f64) -> f64 {
    format.half_spacing(magnitude.min(format.max_finite()))
}

/// [`Model`] for the weights of one row.
#[derive(Clone, Copy, Debug)]
pub struct RowModel<'a> {
    model: &'a Model,
    row: &'a Row,
    /// Relative error of every weight, beside that of its exponent.
    relative: f64,
    /// What rounding a weight may lose below the normal range.
    rounding_floor: f64,
    /// What a weight counts as at least in sums of products.
    factor_floor: f64,
}

impl RowModel<'_> {
    /// Error of an unrounded weight `p` whose logit has the absolute error `logit_error` (`p·θ`).
    #[inline]
    fn weight_error(&self, p: f64, logit: f64, logit_error: f64) -> f64 {
        let row = self.row;
        let eta =
            logit_error + F32_ROUNDOFF * ((logit - row.max).abs() + 2.0 * row.max_abs + 2.0 * row.range);
        exponential_error(p, logit - row.lse, eta) * (1.0 + self.relative) + p * self.relative
    }

    /// The errors that one pair adds to its row. `p` is the exact weight, `g` is [`Model::value_sum`] of the row.
    #[inline]
    pub fn pair(&self, logit: f64, p: f64, a: f64, g: f64) -> PairError {
        let error = self.weight_error(p, logit, self.model.logit_error(a, logit));
        let computed = p + error;
        let rounding = rounding(self.model.p, computed, self.rounding_floor);
        let factor = factor(computed + rounding.most, self.factor_floor);
        PairError { weight: error, value: error + g * factor, rounding }
    }
}

impl Model {
    /// The model of a subject that declares `accumulation` and `partition` for `problem`.
    pub fn new(problem: &Problem, accumulation: Accumulation, partition: Partition) -> Model {
        let Precision { q, k, v, dout, .. } = problem.precision;
        Model {
            accumulation,
            partition,
            p: problem.precision.p.format,
            out: problem.precision.out.format,
            ds: problem.precision.ds.format,
            gradients: problem.precision.gradients.format,
            scale: f64::from(problem.softmax.scale),
            softcap: problem.softmax.softcap.map(f64::from),
            dims_v: problem.dims.v,
            group: problem.group(),
            input_floor: [q, k, v, dout]
                .map(|input| smallest_normal(accumulation, input.format))
                .into_iter()
                .fold(0.0, f64::max),
            p_floor: smallest_normal(accumulation, problem.precision.p.format),
            ds_floor: smallest_normal(accumulation, problem.precision.ds.format),
            products_qk: accumulation.products(problem.dims.qk),
            products_v: accumulation.products(problem.dims.v),
        }
    }

    /// The magnitude of an input in sums of products.
    #[inline]
    pub fn magnitude(&self, input: f64) -> f64 {
        if input == 0.0 { 0.0 } else { input.abs().max(self.input_floor) }
    }

    /// What enters a sum of products for a weight of this magnitude, relative to a row's sum.
    #[inline]
    pub fn weight_factor(&self, magnitude: f64, row_sum: f64) -> f64 {
        factor(magnitude, self.p_floor / row_sum)
    }

    /// The same subject at another scale.
    pub fn with_scale(self, scale: f64) -> Model {
        Model { scale, ..self }
    }

    /// The same model with other merges of partial results.
    pub fn with_merges(self, merges: Merges) -> Model {
        Model { partition: Partition { merges, ..self.partition }, ..self }
    }

    /// Absolute error of a logit. `a` is `Σ|q||k|`; `2ε·scale·a` covers the roundings of `scale·S`.
    #[inline]
    pub fn logit_error(&self, a: f64, logit: f64) -> f64 {
        let scaled = self.scale * a * (self.products_qk + 2.0 * F32_ROUNDOFF);
        let underflow = self.accumulation.underflow();
        // tanh is 1-Lipschitz, so the scaled product's error passes through at most whole; what the quotient by the cap
        // loses to underflow comes back multiplied by it.
        let capped = self.softcap.map_or(0.0, |cap| TANH_ERROR * logit.abs() + 2.0 * cap * underflow);
        scaled + capped + underflow
    }

    /// Tiles that a row of `keys` visible keys can touch.
    fn tiles(&self, keys: usize) -> usize {
        keys.div_ceil(self.partition.kv_tile.max(1)) + 1
    }

    /// Largest magnitude of an LSE of part of a row: every logit is at most `max_abs`, and there are `keys + 1` terms.
    fn partial_lse(row: &Row) -> f64 {
        row.max_abs + libm::log(row.keys as f64 + 1.0)
    }

    /// What merging adds to the relative error of a weight. A step's share of the final row is `e^(step lse − lse)`
    /// times its normalised weights; the step's own row sum cancels between the two, and what is left is the error of
    /// storing the step's LSE, and for each merge an exponential, its argument, a product and a sum.
    fn merge_theta(&self, row: &Row) -> f64 {
        let count = self.partition.merges.count as f64;
        if count == 0.0 {
            return 0.0;
        }
        let lse = Model::partial_lse(row);
        let stored = F32_ROUNDOFF * (5.0 * lse + 4.0) + LOG_ERROR + LOG_RELATIVE_ERROR * lse;
        let each = EXP_ERROR + F32_ROUNDOFF * (2.0 * lse + 4.0);
        2.0 * (stored + count * each)
    }

    /// What merging adds to the error of the LSE: each merge is an `ln(e^a + e^b)`.
    fn merge_lse(&self, row: &Row) -> f64 {
        let each = EXP_ERROR + LOG_ERROR + F32_ROUNDOFF * (4.0 * Model::partial_lse(row) + 4.0);
        self.partition.merges.count as f64 * each
    }

    /// What storing partial outs adds to a row's error, relative to `Σ p|v|`: a rounding of each partial out, and for
    /// each merge one of the running out and perhaps one of the product.
    fn merge_out(&self) -> f64 {
        let Merges { count, step, running, product_rounded } = self.partition.merges;
        if count == 0 {
            return 0.0;
        }
        // Where steps cancel, the f32 operations that normalise and weigh a partial out no longer shrink with the out.
        let each = running.unit_roundoff() * if product_rounded { 2.0 } else { 1.0 } + 4.0 * F32_ROUNDOFF;
        1.01 * (step.unit_roundoff() + 4.0 * F32_ROUNDOFF + count as f64 * each)
    }

    /// What storing partial outs loses below the formats' normal ranges: half a smallest spacing for each rounding.
    /// Partial outs are then weighed, and their weights add up to at most 1.
    #[inline]
    fn merge_floor(&self) -> f64 {
        let Merges { count, step, running, product_rounded } = self.partition.merges;
        if count == 0 {
            return 0.0;
        }
        let each = running.tiny_half() * if product_rounded { 2.0 } else { 1.0 };
        1.01 * (step.tiny_half() + count as f64 * each)
    }

    /// The same of partial gradients.
    #[inline]
    fn sum_floor(&self) -> f64 {
        let Sums { count, format } = self.partition.sums;
        1.01 * count as f64 * format.tiny_half()
    }

    /// What adding partial gradients adds to their error, relative to the sum of magnitudes.
    fn sum_error(&self) -> f64 {
        1.01 * self.partition.sums.count as f64 * self.partition.sums.format.unit_roundoff()
    }

    /// What the errors of a row's weights have in common.
    pub fn of_row<'a>(&'a self, row: &'a Row) -> RowModel<'a> {
        // R: how often the running maximum can grow, the sink's turn at the end included.
        let rescalings = self.tiles(row.keys) as f64;
        RowModel {
            model: self,
            row,
            relative: EXP_ERROR * (1.0 + rescalings)
                + 3.0 * F32_ROUNDOFF * rescalings
                + self.merge_theta(row),
            // The kernel rounds exp(s − running max), so the formats' floors are relative to the row's sum.
            rounding_floor: self.p.tiny_half().max(self.accumulation.underflow()) / row.sum,
            factor_floor: self.p_floor / row.sum,
        }
    }

    /// `g(n)` of the product of weights and values for a row of `keys` visible keys.
    pub fn value_sum(&self, keys: usize) -> f64 {
        self.accumulation.cut_products(keys, self.partition.kv_tile) + self.merge_out()
    }

    /// Relative error of a row's denominator, given `Σ p·θ` over its keys.
    pub fn denominator(&self, row: &Row, weight_errors: f64, tier: Tier) -> f64 {
        let sink = row.sink.map_or(0.0, |sink| {
            self.of_row(row).weight_error(libm::exp(sink - row.lse), sink, F32_ROUNDOFF * sink.abs())
        });
        let (terms, tiles) = (row.keys + 1, self.tiles(row.keys));
        let sum = match tier {
            Tier::Worst => self.accumulation.row_sum(terms, tiles),
            Tier::Dithered => self.accumulation.row_sum_dithered(terms, tiles),
        };
        weight_errors + sink + sum + self.merge_lse(row)
    }

    /// Bound of one element of out. `value_errors` is `Σ_j (PairError::value + rounding)·|v|`, `value_max` the largest `|v|` seen.
    #[inline]
    pub fn out_bound(&self, row: &Row, out: f64, value_errors: f64, denominator: f64, value_max: f64) -> f64 {
        let relative = denominator + 6.0 * F32_ROUNDOFF;
        let error = if relative < DENOMINATOR_ERROR_MAX {
            let underflow = (row.keys + 8) as f64 * self.accumulation.underflow() + self.merge_floor();
            (value_errors + out.abs() * relative) / (1.0 - relative) + underflow
        } else {
            // Whatever the weights, the output stays in the values' hull, but for roundings, and for shares of merged
            // steps that add up to more than 1.
            let shares = libm::exp(self.merge_theta(row).min(EXPONENT_MAX));
            (out.abs() + value_max * shares) * (1.0 + 4.0 * self.p.unit_roundoff())
        };
        error + final_rounding(self.out, out.abs() + error)
    }

    /// Bound of one row's LSE.
    pub fn lse_bound(&self, row: &Row, denominator: f64) -> f64 {
        let log_sum = libm::log(row.sum);
        let relative = denominator.min(DENOMINATOR_ERROR_MAX);
        // |ln(1 + x)| ≤ |x| / (1 − |x|). Past the limit only the exponent's own error is left.
        let sum = if denominator < DENOMINATOR_ERROR_MAX { relative / (1.0 - relative) } else { denominator };
        sum + F32_ROUNDOFF * (4.0 * row.max.abs() + row.lse.abs() + 4.0)
            + LOG_ERROR
            + LOG_RELATIVE_ERROR * log_sum.abs()
    }

    /// Error of the backward's recomputed weight `exp(s − lse)` (`p·θ'`, and underflow): there is no running maximum.
    #[inline]
    fn backward_weight_error(&self, p: f64, logit: f64, lse: f64, logit_error: f64) -> f64 {
        let eta = logit_error + F32_ROUNDOFF * (3.0 * lse.abs() + (logit - lse).abs());
        let exponent = exponential_error(p, logit - lse, eta);
        exponent * (1.0 + EXP_ERROR) + p * EXP_ERROR + p.min(self.accumulation.underflow())
    }

    /// Error of `D = rowsum(dout · out)`; `magnitudes` is `Σ|dout||out|`.
    pub fn d_error(&self, magnitudes: f64) -> f64 {
        self.accumulation.row_dot(self.dims_v) * magnitudes
            + self.dims_v as f64 * self.accumulation.underflow()
    }

    /// The sums over queries and keys that [`Model::gradient_pair`] needs: `g` of dk and dv for `queries` rows in all
    /// (of every query head of the group), and `g` of dq for `keys` keys.
    pub fn gradient_sums(&self, queries: usize, keys: usize) -> (f64, f64) {
        let by_query = match self.accumulation {
            // Each head of the group begins its own steps.
            Accumulation::WgmmaTruncating | Accumulation::Unknown => {
                let head = self.accumulation.cut_products(queries / self.group, self.partition.q_tile);
                (head * self.group as f64).max(self.accumulation.products(queries))
            }
            _ => self.accumulation.products(queries),
        } + self.sum_error();
        (by_query, self.accumulation.tiled_products(keys, self.partition.kv_tile) + self.sum_error())
    }

    /// Errors of `p` and `dS` before they are rounded, and the exact `|dS|`. `p` is exact given the saved out and lse;
    /// `x` is `dP − D`, `b` is `Σ|dout||v|`, `derivative` the soft cap's derivative.
    #[inline]
    fn gradient_errors(&self, pair: &GradientPair) -> (f64, f64, f64) {
        let &GradientPair { logit, lse, lse_error, p, x, derivative, a, b, d_error } = pair;
        let underflow = self.accumulation.underflow();
        let logit_error = self.logit_error(a, logit);
        let p_error = self.backward_weight_error(p, logit, lse, logit_error + lse_error);
        let x_error = self.products_v * b + d_error + 3.0 * F32_ROUNDOFF * x.abs() + underflow;
        let px_error = p_error * x.abs() + (p + p_error) * x_error + underflow;
        let derivative_error = self.softcap.map_or(0.0, |cap| {
            let t = (logit / cap).abs();
            let t_error = logit_error / cap + 2.0 * F32_ROUNDOFF * t;
            2.0 * t * t_error + t_error * t_error + 2.0 * F32_ROUNDOFF
        });
        let ds = p * x.abs() * derivative;
        let ds_error = px_error * (derivative + derivative_error)
            + p * x.abs() * derivative_error
            + 2.0 * F32_ROUNDOFF * ds;
        (p_error, ds, ds_error)
    }

    /// The errors that one pair adds to the gradients; `sums` is [`Model::gradient_sums`].
    #[inline]
    pub fn gradient_pair(&self, pair: &GradientPair, sums: (f64, f64)) -> GradientPairError {
        let (by_query, by_key) = sums;
        let (p_error, ds, ds_error) = self.gradient_errors(pair);
        let p_rounding = rounding(self.p, pair.p + p_error, self.p.tiny_half());
        let ds_rounding = rounding(self.ds, ds + ds_error, self.ds.tiny_half());

        let p_rounded = pair.p + p_error + p_rounding.most;
        let ds_rounded = ds + ds_error + ds_rounding.most;
        GradientPairError {
            dv: p_error + by_query * factor(p_rounded, self.p_floor),
            dk: ds_error + (by_query + 3.0 * F32_ROUNDOFF) * factor(ds_rounded, self.ds_floor),
            dq: ds_error + (by_key + 3.0 * F32_ROUNDOFF) * factor(ds_rounded, self.ds_floor),
            p: p_rounding,
            ds: ds_rounding,
        }
    }

    /// What is left of one pair's errors when its roundings are replayed, and the rounded p and dS.
    #[inline]
    pub fn replayed_gradient_pair(
        &self,
        profile: &Profile,
        pair: &GradientPair,
        sums: (f64, f64),
    ) -> ReplayedPair {
        let (by_query, by_key) = sums;
        let (p_error, ds, ds_error) = self.gradient_errors(pair);
        let (p, p_left) = replayed(self.weight_format(profile), pair.p, p_error);
        // What is rounded is dS times this; dividing by it again is exact enough in f64.
        let scale = if profile.scales_logit_gradients { self.scale } else { 1.0 };
        let (ds, ds_left) = replayed(self.ds, ds * scale, (ds_error + F32_ROUNDOFF * ds) * scale);
        let (ds, ds_left) = (ds / scale, ds_left / scale);
        ReplayedPair {
            p,
            ds: ds.copysign(pair.x),
            dv: p_left + by_query * factor(p + p_left, self.p_floor),
            dk: ds_left + (by_query + 3.0 * F32_ROUNDOFF) * factor(ds + ds_left, self.ds_floor),
            dq: ds_left + (by_key + 3.0 * F32_ROUNDOFF) * factor(ds + ds_left, self.ds_floor),
        }
    }

    /// What weights are rounded to.
    #[inline]
    fn weight_format(&self, profile: &Profile) -> Format {
        if profile.rounds_weights { self.p } else { Format::F32 }
    }

    /// The rounded `exp(logit − running max)`, and what near-ties leave of its error. `max_error` is the largest error of
    /// any logit of the row, the running maximum's among them.
    #[inline]
    pub fn replayed_weight(
        &self,
        profile: &Profile,
        row: &Row,
        [logit, running_max]: [f64; 2],
        [logit_error, max_error]: [f64; 2],
    ) -> (f64, f64) {
        let weight = libm::exp(logit - running_max);
        let exponent = logit_error
            + max_error
            + F32_ROUNDOFF * (2.0 * logit.abs() + (running_max - logit) + 2.0 * row.max_abs);
        let error = exponential_error(weight, logit - running_max, exponent) * (1.0 + EXP_ERROR)
            + weight * EXP_ERROR
            + weight.min(self.accumulation.underflow());
        replayed(self.weight_format(profile), weight, error)
    }

    /// Relative error of a rounded weight on its way into the row: the running maximum's error, `tiles` rescalings of the
    /// sum, and merges.
    pub fn replayed_row_error(&self, row: &Row, max_error: f64, tiles: usize) -> f64 {
        let shift = max_error + F32_ROUNDOFF * 2.0 * (row.max_abs + row.range);
        let rescalings = (tiles + 1) as f64 * (EXP_ERROR + 3.0 * F32_ROUNDOFF);
        exponential_error(1.0, 0.0, shift) + rescalings + self.merge_theta(row)
    }

    /// Bound of one element of dq, dk or dv: the summed errors, underflow of `terms` operations and the rounding.
    #[inline]
    pub fn gradient_bound(&self, exact: f64, errors: f64, terms: usize) -> f64 {
        let underflow = (terms + 8) as f64 * self.accumulation.underflow() + self.sum_floor();
        let error = errors + underflow;
        error + final_rounding(self.gradients, exact.abs() + error)
    }

    /// What one row adds to the error of dsink: `p_sink = exp(sink − lse)` times D, both with their errors;
    /// `lse_error` and `d_error` are those of the saved values.
    pub fn sink_row(&self, sink: f64, (lse, lse_error): (f64, f64), (d, d_error): (f64, f64)) -> (f64, f64) {
        let p = libm::exp(sink - lse);
        let p_error = self.backward_weight_error(p, sink, lse, F32_ROUNDOFF * sink.abs() + lse_error);
        let term = p * d.abs();
        let error = p_error * d.abs() + (p + p_error) * d_error + F32_ROUNDOFF * term;
        (term, error)
    }

    /// Bound of one head's dsink over `rows` rows, from the summed terms and errors of [`Model::sink_row`].
    pub fn sink_bound(&self, terms: f64, errors: f64, rows: usize) -> f64 {
        errors
            + self.accumulation.row_sum(rows, rows) * (terms + errors)
            + (rows + 8) as f64 * self.accumulation.underflow()
    }
}

#[cfg(test)]
mod tests {
    use super::{STEP, steps};

    #[test]
    fn neighbours_touch_no_more_steps_than_counted_and_may_touch_as_many() {
        for tile in 1..=50 {
            for n in 0..=70 {
                let step = |product: usize| (product / tile, product % tile / STEP);
                let touched = |start: usize| {
                    let mut places: Vec<(usize, usize)> = (start..start + n).map(step).collect();
                    places.dedup();
                    places.len()
                };
                let most = (0..tile).map(touched).max().unwrap_or(0);
                assert!(most <= steps(n, tile), "{n} products in tiles of {tile}: {most}");
                let whole = tile <= STEP || tile % STEP == 0;
                assert!(!whole || n < 2 || most + 1 >= steps(n, tile), "{n} in tiles of {tile}: {most}");
            }
        }
    }
}
