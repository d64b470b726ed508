//! A subject's declared arithmetic, and the bounds of the forward that follow. Those of an element of out are in
//! [`out`], and the bounds of the backward in [`gradients`].

mod denominator;
pub(super) mod gradients;
pub(super) mod majorant;
pub(super) mod out;
mod replayed;
mod rounding;
mod unit;

use super::accumulation::{Accumulation, touched};
use super::arithmetic::{Arithmetic, Delta, DsFold, DsScale, DsWeights, GroupSums, SoftCap, WeightRounding};
use super::constants::{
    DIFFERENCE_ERROR, EXP_ERROR, F32_ROUNDOFF, LOG_ERROR, LOG_RELATIVE_ERROR, TANH_APPROXIMATE_ERROR,
    TANH_ERROR,
};
use super::partition::{GradientSums, Joints, MergeBy, Merges, Partition};
use super::profile::NumericProfile;
use crate::{Format, Precision, Problem, Quantity, Scales, Stored, TensorName, TensorScales};
pub use denominator::Denominator;
pub use rounding::Rounding;
use rounding::{exponential_error, final_rounding, replayed, rounding, saturation, weight_lost};
pub use unit::{DsFactor, Promotion, ReplayedTile, TilePair};

/// The largest sum of a row's relative errors for which the first-order form holds.
const DENOMINATOR_ERROR_MAX: f64 = 0.5;

/// The declared arithmetic of a subject on one problem: everything that the terms need besides exact quantities.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    accumulation: Accumulation,
    /// Whether the forward may divide weights by the row's sum before it rounds them.
    may_normalise_first: bool,
    delta: Delta,
    /// Whether dS may be made of weights that were rounded before.
    may_round_ds_weights: bool,
    /// Roundings of dk and dv of single query heads, before they are summed over a group.
    heads: GradientSums,
    partition: Partition,
    p: Format,
    /// The numbers in which out, dq, dk and dv are stored.
    out: Stored,
    gradients: [Stored; 3],
    ds: Format,
    scale: f64,
    softcap: Option<f64>,
    /// The relative error of the soft cap's `tanh`.
    tanh_error: f64,
    dims_v: usize,
    group: usize,
    /// The most intervals of keys that a row sees.
    intervals: usize,
    /// The least magnitude that a non-zero input counts as, where products are aligned by their factors' exponents.
    input_floor: f64,
    /// The smallest normal code of q, k, v and dout there.
    normal_codes: [f64; 4],
    /// The factor of dS before it is rounded, and the place of the softmax's scale beside that.
    ds_scale: DsScale,
    ds_fold: DsFold,
    /// The roundings of f32 with which scales enter a logit, a weight before it is rounded, an element of out, dP, D, and
    /// an element of dv, and of dq or dk.
    logit_roundings: f64,
    weight_roundings: f64,
    out_roundings: f64,
    dp_roundings: f64,
    delta_roundings: f64,
    dv_roundings: f64,
    dqk_roundings: f64,
    /// The power of two with which a row's sum is multiplied.
    sum_scale: f64,
    /// The error of a weight's exponent that this power brings: `e·ln 2` is added to the maximum, or to the exponent, and
    /// two sums are rounded.
    factor_in_exponent: f64,
    /// The factor with which weights are multiplied before they are rounded: that power of two, and the reciprocal of a
    /// given descale.
    weight_scale: f64,
    /// The share of a weight that saturation may take: a weight is 1 at most, relative to a maximum that is never stale.
    weight_lost: f64,
    /// The given descale of logit gradients.
    ds_descale: f64,
    /// The most that rounding a weight loses below the normal range: half the smallest number of its format, divided by
    /// that factor.
    p_least: f64,
    /// The least magnitudes that a non-zero weight and a non-zero logit gradient count as, where products are aligned
    /// by their factors' exponents.
    p_floor: f64,
    ds_floor: f64,
    /// `g` of a product of a query with a key, and of dout with a value.
    products_qk: f64,
    products_v: f64,
    /// Whether a launch rounds its results to codes in FP8, partial ones too, which are then added as values.
    makes_codes: bool,
    /// Whether a replay rounds the out of each launch to such codes.
    replays_codes: bool,
    /// Whether the accumulation is the declared one.
    is_declared: bool,
    /// The promotion of the matrix unit's sums, where these are replayed.
    promotion: Option<Promotion>,
}

/// The quantities of a row that the forward bound needs.
#[derive(Clone, Copy, Debug)]
pub struct RowStatistics {
    /// The number of visible keys.
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
    /// The sink in the row's denominator, where there is one.
    pub sink: Option<f64>,
}

/// The errors of one (query, key) pair that the forward bound needs.
#[derive(Clone, Copy, Debug)]
pub struct PairError {
    /// `p·θ`, the weight's error before it is rounded.
    pub weight: f64,
    /// The coefficient of `|v|` in the numerator's error, without the rounding of P.
    pub value: f64,
    /// The rounding of P, another coefficient of `|v|`.
    pub rounding: Rounding,
}

/// The tiers of a bound on row sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoundTier {
    /// Tier W, for any input.
    Worst,
    /// Tier T, for rows that are certified as dithered.
    Dithered,
}

/// Whether weights may be divided by the row's sum before they are rounded. The order is left open where P is in f32.
fn may_normalise_first(weights: WeightRounding, p: Format) -> bool {
    weights != WeightRounding::BeforeNormalisation || p == Format::F32
}

/// Returns the relative error of a soft cap's `tanh`.
fn tanh_error(soft_cap: SoftCap) -> f64 {
    match soft_cap {
        SoftCap::Accurate => TANH_ERROR,
        SoftCap::Approximate | SoftCap::Unknown => TANH_APPROXIMATE_ERROR,
    }
}

/// Returns the roundings of dk and dv of single query heads: as many as a group has heads, whether the stored gradients
/// are added in f32 or one after the other in their format.
fn stored_heads(sums: GroupSums, problem: &Problem) -> GradientSums {
    let count = match sums {
        GroupSums::F32 => 0,
        _ if problem.group() == 1 => 0,
        GroupSums::Stored | GroupSums::Unknown => problem.group(),
    };
    GradientSums { count, format: problem.precision.gradients.format, codes: 0, through: None }
}

/// Returns the numbers of a format, to which a result in FP8 comes through another one.
fn coded(format: Format, through: Option<Format>) -> Stored {
    Stored { through: through.filter(|_| format.saturates()), ..format.into() }
}

/// Returns the smallest normal number of a format where products are aligned by their factors' exponents, and 0
/// elsewhere.
fn smallest_normal(accumulation: Accumulation, format: Format) -> f64 {
    if accumulation.aligns() { libm::exp2(f64::from(format.exponent_min())) } else { 0.0 }
}

/// Returns the magnitude that a weight or logit gradient counts as in sums of products: 0, or the floor at least.
#[inline(always)]
fn factor(magnitude: f64, floor: f64) -> f64 {
    if magnitude == 0.0 { 0.0 } else { magnitude.max(floor) }
}

/// Returns the place of a gradient among those with rows.
fn place_of(gradient: TensorName) -> usize {
    match gradient {
        TensorName::Dq => 0,
        TensorName::Dk => 1,
        _ => 2,
    }
}

/// A [`Model`] with the quantities of one row, for the row's weights.
#[derive(Clone, Copy, Debug)]
pub struct RowModel<'a> {
    model: &'a Model,
    row: &'a RowStatistics,
    /// The relative error of every weight, apart from its exponent's.
    relative: f64,
    /// The relative error of dividing each weight by the row's sum before the product with the values, 0 where only
    /// the product is divided, and of multiplying it by a given scale.
    normalisation: f64,
    /// The most that rounding a weight may lose below the normal range.
    rounding_floor: f64,
    /// The least magnitude that a weight counts as in sums of products.
    factor_floor: f64,
}

impl RowModel<'_> {
    /// Returns the error of an unrounded weight `p` whose logit has the absolute error `logit_error` (`p·θ`).
    #[inline(always)]
    fn weight_error(&self, p: f64, logit: f64, logit_error: f64) -> f64 {
        let eta = self.eta(logit, logit_error);
        exponential_error(p, logit - self.row.lse, eta) * (1.0 + self.relative) + p * self.relative
    }

    /// Returns the error of a weight's exponent, given that of its logit.
    #[inline(always)]
    fn eta(&self, logit: f64, logit_error: f64) -> f64 {
        let row = self.row;
        let roundings = F32_ROUNDOFF * ((logit - row.max).abs() + 2.0 * row.max_abs + 2.0 * row.range);
        logit_error + roundings + self.model.factor_in_exponent
    }

    /// Returns the error of the exponent of a weight whose logit's products have magnitudes that sum to `a`.
    pub fn exponent_error(&self, logit: f64, a: f64) -> f64 {
        self.eta(logit, self.model.logit_error(a, logit))
    }

    /// Returns the most of a pair's coefficient of `|v|` in [`RowModel::pair`] that does not shrink with the pair's
    /// weight.
    pub fn floor(&self, g: f64) -> f64 {
        self.rounding_floor * (1.0 + g) + g * self.factor_floor
    }

    /// Returns the errors that one pair adds to its row. `p` is the exact weight, and `g` is [`Model::value_sum`] of
    /// the row.
    #[inline(always)]
    pub fn pair(&self, logit: f64, p: f64, a: f64, g: f64) -> PairError {
        let error = self.weight_error(p, logit, self.model.logit_error(a, logit));
        let normalised = error + self.normalisation * (p + error);
        let computed = p + normalised;
        let rounding = rounding(self.model.p, computed, self.rounding_floor, f64::INFINITY);
        let rounding = Rounding { most: rounding.most.max(self.model.weight_lost * computed), ..rounding };
        let factor = factor(computed + rounding.most, self.factor_floor);
        PairError { weight: error, value: normalised + g * factor, rounding }
    }
}

impl Model {
    /// Returns the model of a subject that declares `arithmetic` and `partition` for `problem`.
    pub fn new(problem: &Problem, arithmetic: Arithmetic, partition: Partition) -> Model {
        let Precision { q, k, v, dout, ds, out, gradients, .. } = problem.precision;
        let Arithmetic { weights, delta, group_sums, soft_cap, ds_weights, ds_scale, ds_fold, .. } =
            arithmetic;
        let p = problem.precision.p.format;
        let given = |quantity: Quantity, roundings: f64| {
            if quantity.is_given(&problem.precision) { roundings } else { 0.0 }
        };
        let accumulation = arithmetic.accumulation.with_factors(&[q, k, v, dout, p.into()].map(|e| e.format));
        let factor = libm::exp2(f64::from(arithmetic.weight_exponent));
        let normal_codes = [q, k, v, dout].map(|input| smallest_normal(accumulation, input.format));
        Model {
            accumulation,
            may_normalise_first: may_normalise_first(weights, p),
            delta,
            may_round_ds_weights: ds_weights != DsWeights::Unrounded,
            heads: stored_heads(group_sums, problem),
            partition,
            p,
            out: coded(out.format, partition.merges.through),
            gradients: [coded(gradients.format, partition.sums.through); 3],
            ds: ds.format,
            scale: f64::from(problem.softmax.scale),
            softcap: problem.softmax.softcap.map(f64::from),
            tanh_error: tanh_error(soft_cap),
            dims_v: problem.dims.v,
            group: problem.group(),
            intervals: if problem.mask.sink_tokens > 0 { 2 } else { 1 },
            input_floor: normal_codes.into_iter().fold(0.0, f64::max),
            normal_codes,
            ds_scale: match ds.format.saturates() && given(Quantity::Ds, 1.0) == 0.0 {
                true => ds_scale,
                false => DsScale::None,
            },
            ds_fold,
            logit_roundings: if q.is_scaled() || k.is_scaled() { 4.0 } else { 2.0 },
            weight_roundings: given(Quantity::P, 2.0),
            out_roundings: if v.is_scaled() { 8.0 } else { 6.0 }
                + given(Quantity::P, 1.0)
                + given(Quantity::Out, 3.0),
            dp_roundings: if v.is_scaled() || dout.is_scaled() { 3.0 } else { 0.0 },
            delta_roundings: if dout.is_scaled() { 3.0 } else { 0.0 } + given(Quantity::Out, 2.0),
            dv_roundings: if dout.is_scaled() { 3.0 } else { 0.0 }
                + given(Quantity::P, 1.0)
                + given(Quantity::Dv, 3.0),
            dqk_roundings: 3.0 + given(Quantity::Ds, 4.0) + given(Quantity::Dq, 3.0),
            sum_scale: factor,
            factor_in_exponent: 2.0 * F32_ROUNDOFF * libm::log(factor),
            weight_scale: factor,
            weight_lost: weight_lost(p, factor),
            ds_descale: 1.0,
            p_least: p.tiny_half() / factor,
            p_floor: smallest_normal(accumulation, p) / factor,
            ds_floor: smallest_normal(accumulation, ds.format),
            products_qk: accumulation.products(problem.dims.qk),
            products_v: accumulation.products(problem.dims.v),
            makes_codes: given(Quantity::Out, 1.0) > 0.0 || given(Quantity::Dq, 1.0) > 0.0,
            replays_codes: false,
            is_declared: accumulation == arithmetic.accumulation,
            promotion: None,
        }
    }

    /// Returns the magnitude that an input counts as in sums of products.
    #[inline(always)]
    pub fn magnitude(&self, input: f64) -> f64 {
        if input == 0.0 { 0.0 } else { input.abs().max(self.input_floor) }
    }

    /// Returns the magnitude that a weight counts as in sums of products, relative to a row's sum.
    #[inline(always)]
    pub fn weight_factor(&self, magnitude: f64, row_sum: f64) -> f64 {
        factor(magnitude, self.p_floor / self.least_divisor(row_sum))
    }

    /// Returns the most that rounding a weight may lose below the normal range, relative to the row's largest weight.
    pub fn weight_floor(&self) -> f64 {
        self.p_least
    }

    /// Returns the least number by which a weight is divided between its rounding and the row: the row's sum, or 1
    /// where it was divided before.
    #[inline(always)]
    fn least_divisor(&self, row_sum: f64) -> f64 {
        if self.may_normalise_first { 1.0 } else { row_sum }
    }

    /// Returns the model for inputs with these descales: the smallest normal code is then another value, and so are the
    /// numbers that what a kernel quantises is rounded to.
    pub fn with_scales(self, scales: &Scales) -> Model {
        let largest = |tensor: TensorName| {
            let descales = scales.of(tensor).map(TensorScales::descale);
            descales.map_or(1.0, |descales| descales.iter().fold(0.0, |most, d| d.abs().max(most)).into())
        };
        let floors = Scales::TENSORS.into_iter().zip(self.normal_codes);
        let input_floor = floors.map(|(tensor, code)| code * largest(tensor)).fold(0.0, f64::max);
        let own = |quantity: Quantity| f64::from(scales.own.of(quantity));
        let stored = |stored: Stored, quantity: Quantity| Stored { descale: own(quantity), ..stored };
        let [dq, dk, dv] = self.gradients;
        let weight_scale = self.sum_scale / own(Quantity::P);
        Model {
            input_floor,
            out: stored(self.out, Quantity::Out),
            gradients: [stored(dq, Quantity::Dq), stored(dk, Quantity::Dk), stored(dv, Quantity::Dv)],
            weight_scale,
            weight_lost: weight_lost(self.p, weight_scale),
            p_least: self.p.tiny_half() / weight_scale,
            p_floor: smallest_normal(self.accumulation, self.p) / weight_scale,
            ds_descale: own(Quantity::Ds),
            ..self
        }
    }

    /// Returns the model of the subject at another scale.
    pub fn with_scale(self, scale: f64) -> Model {
        Model { scale, ..self }
    }

    /// Returns the model of the subject with the choices of a profile, in place of those that it declares.
    pub fn with_profile(self, problem: &Problem, profile: &NumericProfile) -> Model {
        let &NumericProfile { weights, delta, group_sums, ds_weights, .. } = profile;
        let may_normalise_first = may_normalise_first(weights, self.weight_format(profile));
        let may_round_ds_weights = ds_weights != DsWeights::Unrounded;
        let heads = stored_heads(group_sums, problem);
        Model { may_normalise_first, may_round_ds_weights, delta, heads, ..self }
    }

    /// Returns the factor with which weights are multiplied before they are rounded.
    pub fn weight_scale(&self) -> f64 {
        self.weight_scale
    }

    /// Returns the model with other joints of partial results.
    pub fn with_joints(self, Joints { merges, sums }: Joints) -> Model {
        let out = Stored { through: coded(self.out.format, merges.through).through, ..self.out };
        let gradient = |of: Stored| Stored { through: coded(of.format, sums.through).through, ..of };
        let gradients = self.gradients.map(gradient);
        Model { partition: Partition { merges, sums, ..self.partition }, out, gradients, ..self }
    }

    /// Returns the numbers in which out, dq, dk or dv is stored.
    pub fn stored(&self, result: TensorName) -> Stored {
        if result == TensorName::Out { self.out } else { self.gradients[place_of(result)] }
    }

    /// Returns the absolute error of a logit. `a` is `Σ|q||k|`, and `2ε·scale·a` covers the roundings of `scale·S`. Two
    /// descales are two factors more, with a rounding each.
    #[inline(always)]
    pub fn logit_error(&self, a: f64, logit: f64) -> f64 {
        let scaled = self.scale * a * (self.products_qk + self.logit_roundings * F32_ROUNDOFF);
        let underflow = self.accumulation.underflow();
        // tanh is 1-Lipschitz: the scaled product's error passes through whole at most, and the error of tanh is
        // relative to what comes of it. The quotient by the cap loses a part to underflow, which comes back multiplied
        // by the cap.
        let capped = |cap| self.tanh_error * (logit.abs() + scaled) + 2.0 * cap * underflow;
        let capped = self.softcap.map_or(0.0, capped);
        scaled + capped + underflow
    }

    /// Returns the most tiles that a row of `keys` visible keys can touch.
    fn tiles(&self, keys: usize) -> usize {
        touched(keys, self.intervals, self.partition.kv_tile)
    }

    /// Returns the largest magnitude of an LSE of part of a row: every logit is at most `max_abs`, and there are
    /// `keys + 1` terms.
    fn partial_lse(row: &RowStatistics) -> f64 {
        row.max_abs + libm::log(row.keys as f64 + 1.0)
    }

    /// Returns the relative error that merging adds to a weight. A step's share of the final row is
    /// `e^(step lse − lse)` times its normalised weights, and the step's own row sum cancels between the two. The error
    /// of storing the step's LSE is left, and for each merge that of an exponential, its argument, a product and a sum.
    /// By a difference, shares add up to 1 whatever the LSEs are: the error of each running LSE is left in them, and
    /// the share's own error is absolute ([`Model::difference`]).
    fn merge_theta(&self, row: &RowStatistics) -> f64 {
        let count = self.partition.merges.count as f64;
        if count == 0.0 {
            return 0.0;
        }
        let lse = Model::partial_lse(row);
        // A step's sum of multiplied weights has their factor's logarithm more, which is subtracted again.
        let largest = lse + libm::log(self.sum_scale);
        let stored = F32_ROUNDOFF * (5.0 * largest + 4.0) + LOG_ERROR + LOG_RELATIVE_ERROR * largest;
        let each = match self.partition.merges.by {
            MergeBy::Weights => EXP_ERROR + F32_ROUNDOFF * (2.0 * lse + 4.0),
            MergeBy::Difference => self.one_merge_lse(lse),
        };
        2.0 * (stored + count * each)
    }

    /// Returns the error that one merge adds to an LSE, where partial LSEs have magnitudes of at most `lse`.
    ///
    /// By weights it is that of `ln(e^a + e^b)`. By a difference it is that of `L − ln σ(L − b)`, where
    /// `ln σ(x) = min(x, 0) − ln(1 + e^−|x|)`. Rounding `L − b`, and its logarithm of at most `|L − b| + ln 2`, costs
    /// `ε·(|L| + |b|)` each. Rounding the result costs `ε·|L'|`.
    fn one_merge_lse(&self, lse: f64) -> f64 {
        let roundings = match self.partition.merges.by {
            MergeBy::Weights => 4.0,
            MergeBy::Difference => 5.0,
        };
        EXP_ERROR + LOG_ERROR + F32_ROUNDOFF * (roundings * lse + 4.0)
    }

    /// Returns the error that merging adds to the LSE.
    fn merge_lse(&self, row: &RowStatistics) -> f64 {
        self.partition.merges.count as f64 * self.one_merge_lse(Model::partial_lse(row))
    }

    /// Returns the absolute error that merging by differences adds to an element of out, where no value that the row
    /// sees is larger than `value_max`. A later merge takes an earlier one's error with a share of at most 1. Rounded
    /// weights may leave the hull by their roundings.
    fn difference(&self, value_max: f64) -> f64 {
        let Merges { count, step, running, by, .. } = self.partition.merges;
        let leaves = 1.0 + 4.0 * self.p.unit_roundoff() + step.unit_roundoff() + running.unit_roundoff();
        match by {
            MergeBy::Weights => 0.0,
            MergeBy::Difference => 1.01 * count as f64 * DIFFERENCE_ERROR * leaves * value_max,
        }
    }

    /// Returns the error that storing partial outs adds to a row, relative to `Σ p|v|`: a rounding of each partial out,
    /// and for each merge one of the running out and perhaps one of the product.
    fn merge_out(&self) -> f64 {
        let Merges { count, step, running, product_rounded, .. } = self.partition.merges;
        if count == 0 {
            return 0.0;
        }
        // Where steps cancel, the f32 operations that normalise and weigh a partial out no longer shrink with the out.
        let each = running.unit_roundoff() * if product_rounded { 2.0 } else { 1.0 } + 4.0 * F32_ROUNDOFF;
        let code = if self.makes_codes { self.out.format.unit_roundoff() } else { 0.0 };
        1.01 * (code + step.unit_roundoff() + 4.0 * F32_ROUNDOFF + count as f64 * each)
    }

    /// Returns the most that the range of codes of partial outs takes from a row: what a share of its values with
    /// magnitudes up to `value_max` may be past it.
    #[inline(always)]
    fn merge_lost(&self, value_max: f64) -> f64 {
        let loses = self.makes_codes && self.partition.merges.count > 0;
        if loses { (value_max - self.out.most()).max(0.0) } else { 0.0 }
    }

    /// Returns the most that storing partial outs loses below the formats' normal ranges: half a smallest spacing for
    /// each rounding. Partial outs are then weighed, and their weights add up to at most 1.
    #[inline(always)]
    fn merge_floor(&self) -> f64 {
        let Merges { count, step, running, product_rounded, .. } = self.partition.merges;
        if count == 0 {
            return 0.0;
        }
        let each = running.tiny_half() * if product_rounded { 2.0 } else { 1.0 };
        let code = if self.makes_codes { self.out.tiny_half() } else { 0.0 };
        1.01 * (code + step.tiny_half() + count as f64 * each)
    }

    /// Returns the most that storing partial sums of a gradient loses below their format's normal range.
    #[inline(always)]
    fn sum_floor(&self, gradient: TensorName) -> f64 {
        let GradientSums { count, format, codes, .. } = self.partition.sums;
        let code = if self.makes_codes { self.gradients[place_of(gradient)].tiny_half() } else { 0.0 };
        1.01 * count as f64 * (format.tiny_half() + codes as f64 * code)
    }

    /// Returns that of the gradient that loses most.
    pub fn largest_sum_floor(&self) -> f64 {
        [TensorName::Dq, TensorName::Dk, TensorName::Dv]
            .map(|of| self.sum_floor(of))
            .into_iter()
            .fold(0.0, f64::max)
    }

    /// Whether partial results are codes in FP8.
    pub fn makes_partial_codes(&self) -> bool {
        self.makes_codes && (self.partition.merges.count > 0 || self.partition.sums.count > 0)
    }

    /// Returns the relative error of a partial gradient's codes; 0 where one launch makes the gradient.
    #[inline(always)]
    fn code_of_sum(&self) -> f64 {
        let roundings = if self.makes_codes { self.partition.sums.codes } else { 0 };
        let once = 1.0 + self.gradients[0].format.unit_roundoff();
        (0..roundings).fold(1.0, |all, _| all * once) - 1.0
    }

    /// Returns the most that the range of codes of partial sums takes from a gradient with these errors. They count each
    /// term's magnitude with at least [`Model::code_of_sum`], so that they tell how large all are together.
    #[inline(always)]
    fn sum_lost(&self, gradient: TensorName, errors: f64) -> f64 {
        let unit = self.code_of_sum();
        if unit == 0.0 { 0.0 } else { (errors / unit - self.gradients[place_of(gradient)].most()).max(0.0) }
    }

    /// Returns the error that adding partial gradients adds to them, relative to the sum of magnitudes.
    fn sum_error(&self) -> f64 {
        let GradientSums { count, format, .. } = self.partition.sums;
        1.01 * (self.code_of_sum() + count as f64 * format.unit_roundoff())
    }

    /// Returns the bound of one element of dk or dv that several sequences share: its lender and `borrowers`. `total`
    /// is the exact sum, `errors` the sum of the sequences' own bounds, and `magnitudes` that of the most that each may
    /// be. Each sequence's part and each running sum may be stored in the format of partial sums, or in f32.
    pub fn shared_bound(
        &self,
        gradient: TensorName,
        total: f64,
        (errors, magnitudes): (f64, f64),
        borrowers: usize,
    ) -> f64 {
        if errors == 0.0 && magnitudes == 0.0 {
            return 0.0;
        }
        let stored = 1.01 * (2 * borrowers + 1) as f64;
        let GradientSums { count, format, .. } = self.partition.sums;
        let (unit, least) = match count {
            0 => (F32_ROUNDOFF, 0.0),
            _ => (format.unit_roundoff().max(F32_ROUNDOFF), format.tiny_half()),
        };
        let error = errors + stored * (unit * magnitudes + least);
        error + final_rounding(self.gradients[place_of(gradient)], total.abs() + error)
    }

    /// Returns the error that storing dk and dv of single query heads adds to them, relative to the sum of magnitudes.
    fn heads_error(&self) -> f64 {
        1.01 * self.heads.count as f64 * self.heads.format.unit_roundoff()
    }

    /// Returns the most that storing dk and dv of single query heads loses below the format's normal range. Each launch
    /// stores its own, and there are at most as many launches as partial sums.
    #[inline(always)]
    pub fn heads_floor(&self) -> f64 {
        let stored = self.heads.count * self.partition.sums.count.max(1);
        let descale = self.gradients.iter().fold(1.0f64, |most, stored| most.max(stored.descale));
        1.01 * stored as f64 * self.heads.format.tiny_half() * descale
    }

    /// Returns the model of a row's weights: what their errors have in common.
    pub fn of_row<'a>(&'a self, row: &'a RowStatistics) -> RowModel<'a> {
        // R is how often the running maximum can grow, the sink's turn at the end included.
        let rescalings = self.tiles(row.keys) as f64;
        RowModel {
            model: self,
            row,
            relative: EXP_ERROR * (1.0 + rescalings)
                + 3.0 * F32_ROUNDOFF * rescalings
                + self.merge_theta(row),
            // A reciprocal of 1 ulp, its product with a rescaling, and the weight's product with it.
            normalisation: (if self.may_normalise_first { 4.0 } else { 0.0 } + self.weight_roundings)
                * F32_ROUNDOFF,
            // A kernel that rounds exp(s − running max) has floors relative to the row's sum. One that divides first
            // has the formats' own, and its share in a merged row is 1 at most.
            rounding_floor: self.p_least.max(self.accumulation.underflow()) / self.least_divisor(row.sum),
            factor_floor: self.p_floor / self.least_divisor(row.sum),
        }
    }

    /// Returns `g(n)` of the product of weights and values for a row of `keys` visible keys.
    pub fn value_sum(&self, keys: usize) -> f64 {
        let (intervals, tile) = (self.intervals, self.partition.kv_tile);
        let own = match self.promotion {
            Some(_) => self.accumulation.promotions(keys, intervals, tile),
            None => self.accumulation.cut_products(keys, intervals, tile),
        };
        own + self.merge_out()
    }

    /// Whether partial results of several launches are merged.
    pub fn merges(&self) -> bool {
        self.partition.merges.count > 0
    }
}
