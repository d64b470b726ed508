//! The bounds of the backward, given the saved out and lse.

use super::{Model, Rounding, exponential_error, factor, final_rounding, replayed, rounding};
use crate::envelope::accumulation::Accumulation;
use crate::envelope::arithmetic::{Delta, DsWeights};
use crate::envelope::constants::{EXP_ERROR, F32_ROUNDOFF};
use crate::envelope::profile::NumericProfile;

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
}

impl GradientPair {
    /// Returns a pair for its weight alone: without a gradient and a soft cap, and with the subject's own LSE.
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
    #[inline]
    fn backward_weight_error(&self, p: f64, logit: f64, lse: f64, logit_error: f64) -> f64 {
        let eta = logit_error + F32_ROUNDOFF * (3.0 * lse.abs() + (logit - lse).abs());
        let exponent = exponential_error(p, logit - lse, eta);
        exponent * (1.0 + EXP_ERROR) + p * EXP_ERROR + p.min(self.accumulation.underflow())
    }

    /// Returns the error of a sum `rowsum(dout · out)` whose magnitudes add up to `magnitudes`.
    fn row_dot_error(&self, magnitudes: f64) -> f64 {
        self.accumulation.row_dot(self.dims_v) * magnitudes
            + self.dims_v as f64 * self.accumulation.underflow()
    }

    /// Returns the magnitude of the largest change by which the last rounding may have made this element of out.
    pub fn last_rounding(&self, out: f64) -> f64 {
        let (unit, least) = (self.out.unit_roundoff(), self.out.tiny_half());
        final_rounding(self.out, out.abs() * (1.0 + 2.0 * unit) + 2.0 * least)
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
    #[inline]
    pub fn weighted_dot(&self, pair: &GradientPair) -> (f64, f64) {
        let &GradientPair { logit, lse, lse_error, p, x, a, b, .. } = pair;
        let underflow = self.accumulation.underflow();
        let p_error = self.backward_weight_error(p, logit, lse, self.logit_error(a, logit) + lse_error);
        // A subject whose dS is made of rounded weights may make D of the same ones.
        let p_error = p_error + self.ds_weight_rounding(p + p_error);
        let x_error = self.products_v * b + underflow;
        (p * x.abs(), p_error * x.abs() + (p + p_error) * x_error + underflow)
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
        let sum = match self.accumulation {
            // Each head of the group begins its own steps.
            Accumulation::WgmmaTruncating | Accumulation::Unknown => {
                let head = self.accumulation.cut_products(queries / self.group, 1, self.partition.q_tile);
                (head * self.group as f64).max(self.accumulation.products(queries))
            }
            _ => self.accumulation.products(queries),
        };
        sum + self.sum_error() + self.heads_error()
    }

    /// Returns `g` of dq for `keys` keys.
    pub fn key_sum(&self, keys: usize) -> f64 {
        self.accumulation.tiled_products(keys, self.intervals, self.partition.kv_tile) + self.sum_error()
    }

    /// Returns the error of `p`, the exact `|dS|` and the error of `dS`, before dS is rounded. `p` is exact given the
    /// saved out and lse, `x` is `dP − D`, `b` is `Σ|dout||v|`, and `derivative` is the soft cap's derivative.
    #[inline]
    fn gradient_errors(&self, pair: &GradientPair) -> (f64, f64, f64) {
        let &GradientPair { logit, lse, lse_error, p, a, .. } = pair;
        let p_error = self.backward_weight_error(p, logit, lse, self.logit_error(a, logit) + lse_error);
        let (ds, ds_error) = self.ds_errors(pair, p, p_error + self.ds_weight_rounding(p + p_error));
        (p_error, ds, ds_error)
    }

    /// Returns `|dS|` of a weight `p`, and its error before dS is rounded, where the subject's weight is off by
    /// `p_error`.
    #[inline]
    fn ds_errors(&self, pair: &GradientPair, p: f64, p_error: f64) -> (f64, f64) {
        let &GradientPair { logit, x, derivative, a, b, d_error, .. } = pair;
        let underflow = self.accumulation.underflow();
        let x_error = self.products_v * b + d_error + 3.0 * F32_ROUNDOFF * x.abs() + underflow;
        let px_error = p_error * x.abs() + (p + p_error) * x_error + underflow;
        let derivative_error = self.softcap.map_or(0.0, |cap| slope_error(self, cap, logit, a));
        let ds = p * x.abs() * derivative;
        let ds_error = px_error * (derivative + derivative_error)
            + p * x.abs() * derivative_error
            + 2.0 * F32_ROUNDOFF * ds;
        (ds, ds_error)
    }

    /// Returns the most that rounding a weight changes it before dS is made of it.
    #[inline]
    fn ds_weight_rounding(&self, weight: f64) -> f64 {
        if self.may_round_ds_weights { rounding(self.p, weight, self.p_least).most } else { 0.0 }
    }

    /// Returns the most that a number near dS's own is in units of dS. A subject may work on `scale·dS`, which a scale
    /// below 1 brings nearer to the floors of formats.
    #[inline]
    pub(super) fn unscaled(&self, number: f64) -> f64 {
        number / self.scale.min(1.0)
    }

    /// Returns the most that rounding dS may lose below the normal range.
    #[inline]
    pub fn logit_gradient_floor(&self) -> f64 {
        self.unscaled(self.ds.tiny_half().max(self.accumulation.underflow()))
    }

    /// Returns the errors that one pair adds to the gradients; `sums` is [`Model::gradient_sums`].
    #[inline]
    pub fn gradient_pair(&self, pair: &GradientPair, sums: (f64, f64)) -> GradientPairError {
        let (by_query, by_key) = sums;
        let (p_error, ds, ds_error) = self.gradient_errors(pair);
        let p_rounding = rounding(self.p, pair.p + p_error, self.p_least);
        let ds_rounding = rounding(self.ds, ds + ds_error, self.logit_gradient_floor());
        let ds_floor = self.unscaled(self.ds_floor);

        let p_rounded = pair.p + p_error + p_rounding.most;
        let ds_rounded = ds + ds_error + ds_rounding.most;
        GradientPairError {
            dv: p_error + by_query * factor(p_rounded, self.p_floor),
            dk: ds_error + (by_query + 3.0 * F32_ROUNDOFF) * factor(ds_rounded, ds_floor),
            dq: ds_error + (by_key + 3.0 * F32_ROUNDOFF) * factor(ds_rounded, ds_floor),
            p: p_rounding,
            ds: ds_rounding,
        }
    }

    /// Returns the rounded p and dS of one pair, and the errors that are left when the pair's roundings are replayed.
    #[inline]
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

    /// Returns the bound of one element of dq, dk or dv: the summed errors, underflow of `terms` operations, roundings
    /// of partial sums below the normal range, and the rounding.
    #[inline]
    pub fn gradient_bound(&self, exact: f64, errors: f64, terms: usize) -> f64 {
        let underflow =
            (terms + 8) as f64 * self.accumulation.underflow() + self.sum_floor() + self.heads_floor();
        let error = errors + underflow;
        error + final_rounding(self.gradients, exact.abs() + error)
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

/// Returns the error of a soft cap's derivative at a logit whose products have magnitudes that sum to `a`.
#[inline]
pub(super) fn slope_error(model: &Model, cap: f64, logit: f64, a: f64) -> f64 {
    let t = (logit / cap).abs();
    let t_error = model.logit_error(a, logit) / cap + 2.0 * F32_ROUNDOFF * t;
    2.0 * t * t_error + t_error * t_error + 2.0 * F32_ROUNDOFF
}
