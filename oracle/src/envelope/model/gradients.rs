//! The bounds of the backward, given the saved out and lse.

use super::{
    Model, Rounding, exponential_error, factor, final_rounding, place_of, replayed, rounding, saturation,
};
use crate::envelope::arithmetic::{Delta, DsFold, DsScale, DsWeights};
use crate::envelope::constants::{EXP_ERROR, F32_ROUNDOFF};
use crate::envelope::profile::NumericProfile;
use crate::{Stored, TensorName};

/// The exact quantities of one pair in the backward.
#[derive(Clone, Copy, Debug)]
pub struct GradientPair {
    /// The logit.
    pub logit: f64,
    /// The saved LSE of the row.
    pub lse: f64,
    /// The most by which the subject's LSE may differ from `lse`; 0 where `lse` is the subject's own.
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
    /// The error of the row's D, [`Model::row_delta`].
    pub d_error: f64,
    /// The largest magnitude of dS in the pair's tile, its errors included, or more. It counts where
    /// [`Model::scales_tiles`] says so.
    pub ds_most: f64,
}

impl GradientPair {
    /// Returns a pair for its weight alone: without a gradient and a soft cap, and with the subject's own LSE.
    pub fn of_weight(logit: f64, lse: f64, p: f64, a: f64) -> GradientPair {
        let (lse_error, x, derivative, b, d_error, ds_most) = (0.0, 0.0, 1.0, 0.0, 0.0, 0.0);
        GradientPair { logit, lse, lse_error, p, x, derivative, a, b, d_error, ds_most }
    }
}

/// One pair of the backward, replayed.
#[derive(Clone, Copy, Debug)]
pub struct ReplayedPair {
    /// The rounded weight.
    pub p: f64,
    /// The rounded logit gradient.
    pub ds: f64,
    /// The error left as a coefficient of `|dout|` in dv.
    pub dv: f64,
    /// The error left as a coefficient of `|q|` in dk, without the scale.
    pub dk: f64,
    /// The error left as a coefficient of `|k|` in dq, without the scale.
    pub dq: f64,
}

/// Errors of the gradients' coefficients for one pair. The roundings of P and dS are kept apart.
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

impl Model {
    /// Returns the error of the backward's recomputed weight `exp(s − lse)` (`p·θ'`, and underflow). There is no
    /// running maximum.
    #[inline(always)]
    fn backward_weight_error(&self, p: f64, logit: f64, lse: f64, logit_error: f64) -> f64 {
        let roundings = F32_ROUNDOFF * (3.0 * lse.abs() + (logit - lse).abs());
        let eta = logit_error + roundings + self.factor_in_exponent;
        let exponent = exponential_error(p, logit - lse, eta);
        exponent * (1.0 + EXP_ERROR) + p * EXP_ERROR + p.min(self.accumulation.underflow())
    }

    /// Returns the error of a sum `rowsum(dout · out)` whose magnitudes add up to `magnitudes`. Descales of dout and of
    /// out are factors more, with a rounding of each product or of the sum.
    fn row_dot_error(&self, magnitudes: f64) -> f64 {
        (self.accumulation.row_dot(self.dims_v) + self.delta_roundings * F32_ROUNDOFF) * magnitudes
            + self.dims_v as f64 * self.accumulation.underflow()
    }

    /// Returns the magnitude of the largest change by which the last rounding may have made this element of out.
    pub fn last_rounding(&self, out: f64) -> f64 {
        self.out.moved(out)
    }

    /// Whether D may be `Σ P·dP`, which takes all keys of a row.
    pub fn weighs_dots(&self) -> bool {
        matches!(self.delta, Delta::WeightedDots | Delta::Unknown)
    }

    /// Returns the error of `D` as [`Delta::StoredOut`] and [`Delta::UnroundedOut`] make it, against `Σ dout·out` of
    /// the stored out. `magnitudes` is `Σ|dout||out|`, and `roundings` is `Σ|dout|` times [`Model::last_rounding`].
    pub fn out_dot_error(&self, magnitudes: f64, roundings: f64) -> f64 {
        match self.delta {
            Delta::StoredOut | Delta::WeightedDots => self.row_dot_error(magnitudes),
            Delta::UnroundedOut | Delta::Unknown => roundings + self.row_dot_error(magnitudes + roundings),
        }
    }

    /// Returns the value and the error of a row's D, from those of the two ways of making it: `Σ dout·out` of the
    /// stored out, and `Σ P·dP` where it counts.
    pub fn row_delta(&self, stored: (f64, f64), dots: Option<(f64, f64)>) -> (f64, f64) {
        match (self.delta, dots) {
            (Delta::WeightedDots, Some(dots)) => dots,
            (Delta::Unknown, Some((dots, error))) => {
                (stored.0, stored.1.max((dots - stored.0).abs() + error))
            }
            _ => stored,
        }
    }

    /// Returns the magnitude and the error that one pair adds to `Σ P·dP`, before the sum's own: `|P·dP|` and that of
    /// both factors. The pair's `x` is dP itself here.
    #[inline(always)]
    pub fn weighted_dot(&self, pair: &GradientPair) -> (f64, f64) {
        let &GradientPair { logit, lse, lse_error, p, x, a, b, .. } = pair;
        let underflow = self.accumulation.underflow();
        let p_error = self.backward_weight_error(p, logit, lse, self.logit_error(a, logit) + lse_error);
        // A subject whose dS is made of rounded weights may make D of the same ones.
        let p_error = p_error + self.ds_weight_rounding(p + p_error);
        let x_error = self.dot_error(b);
        (p * x.abs(), p_error * x.abs() + (p + p_error) * x_error + underflow)
    }

    /// Returns the error of dP, where `b` is `Σ|dout||v|`. Descales of both are a factor more: the product of two, with
    /// a rounding of it and one of the product with the sum.
    #[inline(always)]
    pub(super) fn dot_error(&self, b: f64) -> f64 {
        (self.products_v + self.dp_roundings * F32_ROUNDOFF) * b + self.accumulation.underflow()
    }

    /// Returns the error of `Σ P·dP` over `keys` keys, from the sums of [`Model::weighted_dot`].
    pub fn weighted_dots_error(&self, keys: usize, magnitudes: f64, errors: f64) -> f64 {
        let tiles = self.tiles(keys);
        errors
            + self.accumulation.tiled_dot(keys, tiles) * (magnitudes + errors)
            + (keys + tiles) as f64 * self.accumulation.underflow()
    }

    /// Returns the choice of D's source.
    pub fn delta(&self) -> Delta {
        self.delta
    }

    /// Returns the errors of sums over queries and over keys that [`Model::gradient_pair`] needs:
    /// [`Model::query_sum`] and [`Model::key_sum`].
    pub fn gradient_sums(&self, queries: usize, keys: usize) -> (f64, f64) {
        (self.query_sum(queries), self.key_sum(keys))
    }

    /// Returns `g` of dk and dv for `queries` rows in all, of every query head of the group.
    pub fn query_sum(&self, queries: usize) -> f64 {
        let sum = self.accumulation.grouped_products(queries, self.group, self.partition.q_tile);
        sum + self.sum_error() + self.heads_error()
    }

    /// Returns `g` of dq for `keys` keys.
    pub fn key_sum(&self, keys: usize) -> f64 {
        self.accumulation.tiled_products(keys, self.intervals, self.partition.kv_tile) + self.sum_error()
    }

    /// Returns the error of `p`, the exact `|dS|` and the error of `dS`, before dS is rounded. `p` is exact given the
    /// saved out and lse, `x` is `dP − D`, `b` is `Σ|dout||v|`, and `derivative` is the soft cap's derivative.
    #[inline(always)]
    pub(super) fn gradient_errors(&self, pair: &GradientPair) -> (f64, f64, f64) {
        let &GradientPair { logit, lse, lse_error, p, a, .. } = pair;
        let p_error = self.backward_weight_error(p, logit, lse, self.logit_error(a, logit) + lse_error);
        let (ds, ds_error) = self.ds_errors(pair, p, p_error + self.ds_weight_rounding(p + p_error));
        (p_error, ds, ds_error)
    }

    /// Returns `|dS|` of a weight `p`, and its error before dS is rounded, where the subject's weight is off by
    /// `p_error`.
    #[inline(always)]
    pub(super) fn ds_errors(&self, pair: &GradientPair, p: f64, p_error: f64) -> (f64, f64) {
        let &GradientPair { logit, x, derivative, a, b, d_error, .. } = pair;
        let underflow = self.accumulation.underflow();
        let x_error = self.dot_error(b) + d_error + 3.0 * F32_ROUNDOFF * x.abs();
        let px_error = p_error * x.abs() + (p + p_error) * x_error + underflow;
        let derivative_error = self.softcap.map_or(0.0, |cap| slope_error(self, cap, logit, a));
        let ds = p * x.abs() * derivative;
        let ds_error = px_error * (derivative + derivative_error)
            + p * x.abs() * derivative_error
            + 2.0 * F32_ROUNDOFF * ds;
        (ds, ds_error)
    }

    /// Returns the most that rounding a weight changes it before dS is made of it.
    #[inline(always)]
    fn ds_weight_rounding(&self, weight: f64) -> f64 {
        if self.may_round_ds_weights { self.p_rounding(weight).most } else { 0.0 }
    }

    /// Returns the error of rounding a weight of this magnitude.
    #[inline(always)]
    fn p_rounding(&self, weight: f64) -> Rounding {
        rounding(self.p, weight, self.p_least, saturation(self.p) / self.weight_scale)
    }

    /// Returns the error of rounding a logit gradient of this magnitude.
    #[inline(always)]
    fn ds_rounding(&self, ds: f64, ds_most: f64) -> Rounding {
        let most = saturation(self.ds) * self.ds_descale;
        let largest = match (self.ds_scale, self.ds_fold) {
            (DsScale::Tile, _) => f64::INFINITY,
            (_, DsFold::Before) => most / self.scale,
            (_, DsFold::After) => most,
            (_, DsFold::Unknown) => most / self.scale.max(1.0),
        };
        rounding(self.ds, ds, self.logit_gradient_floor(ds_most), largest)
    }

    /// Returns the magnitude and the error of dS before it is rounded.
    pub fn logit_gradient(&self, pair: &GradientPair) -> (f64, f64) {
        let (_, ds, error) = self.gradient_errors(pair);
        (ds, error)
    }

    /// Whether dS may be rounded in units of its largest magnitude in a tile, so that bounds need
    /// [`GradientPair::ds_most`].
    pub fn scales_tiles(&self) -> bool {
        self.ds_scale != DsScale::None
    }

    /// Returns the most that a number near dS's own is in units of dS. A subject may work on `scale·dS`, which a scale
    /// below 1 brings nearer to the floors of formats; there a given descale counts too.
    #[inline(always)]
    fn unscaled(&self, number: f64) -> f64 {
        match self.ds_fold {
            DsFold::Before => number / self.scale,
            DsFold::After => number,
            DsFold::Unknown => number / self.scale.min(1.0),
        }
    }

    /// Returns the most that a number of dS's format is in units of dS. `most` is the largest magnitude in the tile,
    /// which a tile's factor brings above a quarter of the format's largest number.
    #[inline(always)]
    fn in_ds(&self, number: f64, most: f64) -> f64 {
        // Nothing is known of the largest magnitude where an exponent's error is large: it may be infinite, and 0 of it is 0.
        let of_tile = || if number == 0.0 { 0.0 } else { number * (4.0 * most / self.ds.max_finite()) };
        match self.ds_scale {
            DsScale::None => self.unscaled(number * self.ds_descale),
            DsScale::Tile => of_tile(),
            DsScale::Unknown => self.unscaled(number).max(of_tile()),
        }
    }

    /// Returns the most that rounding dS may lose below the normal range, where `most` is as in
    /// [`GradientPair::ds_most`].
    #[inline(always)]
    pub(super) fn logit_gradient_floor(&self, most: f64) -> f64 {
        self.in_ds(self.ds.tiny_half(), most).max(self.unscaled(self.accumulation.underflow()))
    }

    /// Returns the least magnitude that a logit gradient other than 0 counts as in sums of products.
    #[inline(always)]
    pub(super) fn ds_factor_floor(&self, most: f64) -> f64 {
        self.in_ds(self.ds_floor, most)
    }

    /// Returns the most of the coefficients in [`Model::gradient_pair`] that does not shrink with a pair's weight: that
    /// of `|dout|` in dv.
    pub fn weight_floors(&self, (by_query, _): (f64, f64)) -> f64 {
        self.p_least * (1.0 + by_query) + by_query * self.p_floor
    }

    /// Returns the same of the coefficients of `|q|` in dk and of `|k|` in dq, where `most` is as in
    /// [`GradientPair::ds_most`].
    pub fn logit_gradient_floors(&self, (by_query, by_key): (f64, f64), most: f64) -> f64 {
        let g = by_query.max(by_key);
        self.logit_gradient_floor(most) * (1.0 + g) + g * self.ds_factor_floor(most)
    }

    /// Returns the errors that one pair adds to the gradients; `sums` is [`Model::gradient_sums`].
    #[inline(always)]
    pub fn gradient_pair(&self, pair: &GradientPair, sums: (f64, f64)) -> GradientPairError {
        let (by_query, by_key) = sums;
        let (p_error, ds, ds_error) = self.gradient_errors(pair);
        let p_error = p_error + self.weight_roundings * F32_ROUNDOFF * (pair.p + p_error);
        let p_rounding = self.p_rounding(pair.p + p_error);
        let ds_rounding = self.ds_rounding(ds + ds_error, pair.ds_most);
        let ds_floor = self.ds_factor_floor(pair.ds_most);

        let p_rounded = pair.p + p_error + p_rounding.most;
        let ds_rounded = ds + ds_error + ds_rounding.most;
        GradientPairError {
            dv: p_error + (by_query + self.dv_roundings * F32_ROUNDOFF) * factor(p_rounded, self.p_floor),
            dk: ds_error + (by_query + self.dqk_roundings * F32_ROUNDOFF) * factor(ds_rounded, ds_floor),
            dq: ds_error + (by_key + self.dqk_roundings * F32_ROUNDOFF) * factor(ds_rounded, ds_floor),
            p: p_rounding,
            ds: ds_rounding,
        }
    }

    /// Returns the rounded p and dS of one pair, and the errors that are left when the pair's roundings are replayed.
    #[inline(always)]
    pub fn replayed_gradient_pair(
        &self,
        profile: &NumericProfile,
        pair: &GradientPair,
        sums: (f64, f64),
    ) -> ReplayedPair {
        let (by_query, by_key) = sums;
        let (p_error, ds, ds_error) = self.gradient_errors(pair);
        let (p, p_left) = self.replayed_p(profile, pair.p, p_error);
        let (ds, ds_error) = match profile.ds_weights {
            DsWeights::Rounded => self.ds_errors(pair, p, p_left),
            DsWeights::Unrounded | DsWeights::Unknown => (ds, ds_error),
        };
        // The subject rounds dS times this scale. A division by the scale afterwards is exact enough in f64.
        let scale = if profile.scales_logit_gradients { self.scale } else { 1.0 };
        let scaled_error = (ds_error + F32_ROUNDOFF * ds) * scale + self.accumulation.underflow();
        let (ds, ds_left) = replayed(self.ds, ds * scale, scaled_error);
        let (ds, ds_left, ds_floor) = (ds / scale, ds_left / scale, self.ds_floor / scale);
        ReplayedPair {
            p,
            ds: ds.copysign(pair.x),
            dv: p_left + by_query * factor(p + p_left, self.p_floor),
            dk: ds_left + (by_query + 3.0 * F32_ROUNDOFF) * factor(ds + ds_left, ds_floor),
            dq: ds_left + (by_key + 3.0 * F32_ROUNDOFF) * factor(ds + ds_left, ds_floor),
        }
    }

    /// Returns the bounds of a row of dq, dk or dv, which are sums of `terms` products.
    pub fn gradient_row(&self, gradient: TensorName, terms: usize) -> GradientRow<'_> {
        // Where tiles have factors of their own, each tile's sum is divided by its factor.
        let operations = if self.scales_tiles() { 2 * terms } else { terms } + 8;
        let floor =
            operations as f64 * self.accumulation.underflow() + self.sum_floor(gradient) + self.heads_floor();
        GradientRow { model: self, gradient, floor, stored: self.gradients[place_of(gradient)] }
    }

    /// Returns the term that one row adds to dsink, and its error. The term is `p_sink = exp(sink − lse)` times D, and
    /// the error is that of both. `lse_error` and `d_error` are the errors of the saved values.
    pub fn sink_row(&self, sink: f64, (lse, lse_error): (f64, f64), (d, d_error): (f64, f64)) -> (f64, f64) {
        let p = libm::exp(sink - lse);
        let p_error = self.backward_weight_error(p, sink, lse, F32_ROUNDOFF * sink.abs() + lse_error);
        let term = p * d.abs();
        let error = p_error * d.abs() + (p + p_error) * d_error + F32_ROUNDOFF * term;
        (term, error)
    }

    /// Returns the bound of one head's dsink over `rows` rows, from the summed terms and errors of [`Model::sink_row`].
    pub fn sink_bound(&self, terms: f64, errors: f64, rows: usize) -> f64 {
        errors
            + self.accumulation.row_sum(rows, rows) * (terms + errors)
            + (rows + 8) as f64 * self.accumulation.underflow()
    }
}

/// The bounds of a row of a gradient.
#[derive(Clone, Copy, Debug)]
pub struct GradientRow<'a> {
    model: &'a Model,
    gradient: TensorName,
    /// Underflow of the row's operations, and roundings of partial sums below the normal range.
    floor: f64,
    stored: Stored,
}

impl GradientRow<'_> {
    /// Returns the bound of one element: the summed errors, the floor, and the rounding.
    #[inline(always)]
    pub fn bound(&self, exact: f64, errors: f64) -> f64 {
        let error = errors + self.floor + self.model.sum_lost(self.gradient, errors);
        error + final_rounding(self.stored, exact.abs() + error)
    }
}

/// Returns the error of a soft cap's derivative at a logit whose products have magnitudes that sum to `a`.
#[inline(always)]
pub(super) fn slope_error(model: &Model, cap: f64, logit: f64, a: f64) -> f64 {
    let t = (logit / cap).abs();
    let t_error = model.logit_error(a, logit) / cap + 2.0 * F32_ROUNDOFF * t;
    2.0 * t * t_error + t_error * t_error + 2.0 * F32_ROUNDOFF
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::envelope::{Accumulation, Arithmetic, DsScale, Partition};
    use crate::{Format, Problem, ProblemFields};

    /// Test of a head whose largest dS may be anything. A sum in f32 has no least magnitude, and 0 times infinity is NaN,
    /// which no result is within: kernels that were right failed by it.
    #[test]
    fn floors_are_numbers_where_nothing_is_known_of_the_largest_gradient() {
        let mut fields = ProblemFields::packed(&[(1, 1)], 1);
        fields.precision.ds = Format::E4m3.into();
        let problem = Problem::new(fields).expect("a problem");
        let accumulations = [
            (Accumulation::F32Serial, 0.0),
            (Accumulation::WgmmaFp8 { promoted_after: None }, f64::INFINITY),
        ];
        for (accumulation, floor) in accumulations {
            let arithmetic =
                Arithmetic { ds_scale: DsScale::Tile, ..Arithmetic::flash_attention(accumulation) };
            let model = Model::new(&problem, arithmetic, Partition::single(1, 1));
            assert_eq!(model.ds_factor_floor(f64::INFINITY), floor, "{accumulation:?}");
            assert_eq!(model.logit_gradient_floor(f64::INFINITY), f64::INFINITY, "{accumulation:?}");
        }
    }
}
