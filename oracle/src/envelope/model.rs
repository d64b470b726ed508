//! A subject's declared arithmetic, and the bounds of the forward that follow from it; those of the backward are
//! [`gradients`].

pub(super) mod gradients;

use super::accumulation::Accumulation;
use super::constants::{EXP_ERROR, F32_ROUNDOFF, LOG_ERROR, LOG_RELATIVE_ERROR, TANH_ERROR};
use super::partition::{GradientSums, Merges, Partition};
use super::profile::NumericProfile;
use crate::{Format, Precision, Problem};

/// Largest exponent of a bound: past it a bound says nothing, and it keeps `exp` finite.
const EXPONENT_MAX: f64 = 60.0;
/// Where the relative errors of a row add up to more than this, the first-order form no longer holds.
const DENOMINATOR_ERROR_MAX: f64 = 0.5;

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
pub struct RowStatistics {
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
pub enum BoundTier {
    /// Any input.
    Worst,
    /// Certified as dithered.
    Dithered,
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
    row: &'a RowStatistics,
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
        let eta = self.eta(logit, logit_error);
        exponential_error(p, logit - self.row.lse, eta) * (1.0 + self.relative) + p * self.relative
    }

    /// Error of the exponent of a weight.
    #[inline]
    fn eta(&self, logit: f64, logit_error: f64) -> f64 {
        let row = self.row;
        logit_error + F32_ROUNDOFF * ((logit - row.max).abs() + 2.0 * row.max_abs + 2.0 * row.range)
    }

    /// Error of the exponent of a weight whose logit's products have magnitudes that sum to `a`.
    pub fn exponent_error(&self, logit: f64, a: f64) -> f64 {
        self.eta(logit, self.model.logit_error(a, logit))
    }

    /// What a pair's coefficient of `|v|` in [`RowModel::pair`] has that does not shrink with its weight, at most.
    pub fn floor(&self, g: f64) -> f64 {
        self.rounding_floor * (1.0 + g) + g * self.factor_floor
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
    fn partial_lse(row: &RowStatistics) -> f64 {
        row.max_abs + libm::log(row.keys as f64 + 1.0)
    }

    /// What merging adds to the relative error of a weight. A step's share of the final row is `e^(step lse − lse)`
    /// times its normalised weights; the step's own row sum cancels between the two, and what is left is the error of
    /// storing the step's LSE, and for each merge an exponential, its argument, a product and a sum.
    fn merge_theta(&self, row: &RowStatistics) -> f64 {
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
    fn merge_lse(&self, row: &RowStatistics) -> f64 {
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
        let GradientSums { count, format } = self.partition.sums;
        1.01 * count as f64 * format.tiny_half()
    }

    /// What adding partial gradients adds to their error, relative to the sum of magnitudes.
    fn sum_error(&self) -> f64 {
        1.01 * self.partition.sums.count as f64 * self.partition.sums.format.unit_roundoff()
    }

    /// What the errors of a row's weights have in common.
    pub fn of_row<'a>(&'a self, row: &'a RowStatistics) -> RowModel<'a> {
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
    pub fn denominator(&self, row: &RowStatistics, weight_errors: f64, tier: BoundTier) -> f64 {
        let sink = row.sink.map_or(0.0, |sink| {
            self.of_row(row).weight_error(libm::exp(sink - row.lse), sink, F32_ROUNDOFF * sink.abs())
        });
        let (terms, tiles) = (row.keys + 1, self.tiles(row.keys));
        let sum = match tier {
            BoundTier::Worst => self.accumulation.row_sum(terms, tiles),
            BoundTier::Dithered => self.accumulation.row_sum_dithered(terms, tiles),
        };
        weight_errors + sink + sum + self.merge_lse(row)
    }

    /// Bound of one element of out. `value_errors` is `Σ_j (PairError::value + rounding)·|v|`, `value_max` the largest `|v|` seen.
    #[inline]
    pub fn out_bound(
        &self,
        row: &RowStatistics,
        out: f64,
        value_errors: f64,
        denominator: f64,
        value_max: f64,
    ) -> f64 {
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
    pub fn lse_bound(&self, row: &RowStatistics, denominator: f64) -> f64 {
        let log_sum = libm::log(row.sum);
        let relative = denominator.min(DENOMINATOR_ERROR_MAX);
        // |ln(1 + x)| ≤ |x| / (1 − |x|). Past the limit only the exponent's own error is left.
        let sum = if denominator < DENOMINATOR_ERROR_MAX { relative / (1.0 - relative) } else { denominator };
        sum + F32_ROUNDOFF * (4.0 * row.max.abs() + row.lse.abs() + 4.0)
            + LOG_ERROR
            + LOG_RELATIVE_ERROR * log_sum.abs()
    }

    /// What weights are rounded to.
    #[inline]
    fn weight_format(&self, profile: &NumericProfile) -> Format {
        if profile.rounds_weights { self.p } else { Format::F32 }
    }

    /// The rounded `exp(logit − running max)`, and what near-ties leave of its error. `max_error` is the largest error of
    /// any logit of the row, the running maximum's among them.
    #[inline]
    pub fn replayed_weight(
        &self,
        profile: &NumericProfile,
        row: &RowStatistics,
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
    pub fn replayed_row_error(&self, row: &RowStatistics, max_error: f64, tiles: usize) -> f64 {
        let shift = max_error + F32_ROUNDOFF * 2.0 * (row.max_abs + row.range);
        let rescalings = (tiles + 1) as f64 * (EXP_ERROR + 3.0 * F32_ROUNDOFF);
        exponential_error(1.0, 0.0, shift) + rescalings + self.merge_theta(row)
    }
}
