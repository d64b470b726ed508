//! Weights of a forward that a replay rounds as the subject does: what is left of their errors, and of their row's.

use super::rounding::{exponential_error, replayed};
use super::{DENOMINATOR_ERROR_MAX, Model, RowStatistics};
use crate::envelope::constants::{EXP_ERROR, F32_ROUNDOFF};
use crate::envelope::profile::NumericProfile;
use crate::{Format, Stored};

impl Model {
    /// Returns the format that weights are rounded to.
    #[inline(always)]
    pub(super) fn weight_format(&self, profile: &NumericProfile) -> Format {
        if profile.rounds_weights { self.p } else { Format::F32 }
    }

    /// Returns the rounded weight, multiplied before and divided after, and the error that near-ties leave.
    #[inline(always)]
    pub(super) fn replayed_p(&self, profile: &NumericProfile, weight: f64, error: f64) -> (f64, f64) {
        let scale = self.weight_scale;
        // A given scale is a reciprocal that was rounded, and the product with it is.
        let error = error + self.weight_roundings * F32_ROUNDOFF * (weight + error);
        let (rounded, left) = replayed(self.weight_format(profile), weight * scale, error * scale);
        (rounded / scale, left / scale)
    }

    /// Returns the rounded `weight = exp(logit − running max)`, and the error that near-ties leave. `max_error` is the
    /// largest error of any logit of the row, the running maximum's among them.
    #[inline(always)]
    pub fn replayed_weight(
        &self,
        profile: &NumericProfile,
        row: &RowStatistics,
        weight: f64,
        [logit, running_max]: [f64; 2],
        [logit_error, max_error]: [f64; 2],
    ) -> (f64, f64) {
        let exponent = logit_error
            + max_error
            + F32_ROUNDOFF * (2.0 * logit.abs() + (running_max - logit) + 2.0 * row.max_abs)
            + self.factor_in_exponent;
        let error = exponential_error(weight, logit - running_max, exponent) * (1.0 + EXP_ERROR)
            + weight * EXP_ERROR
            + weight.min(self.accumulation.underflow());
        self.replayed_p(profile, weight, error)
    }

    /// Returns the rounded `weight = exp(logit − lse)` of a weight that is divided by its launch's own sum first, and the error
    /// that near-ties leave. `lse` is that of the launch's keys, and `sum_error` the relative error of their sum.
    #[inline(always)]
    pub fn replayed_normalised_weight(
        &self,
        profile: &NumericProfile,
        row: &RowStatistics,
        weight: f64,
        [logit, lse]: [f64; 2],
        [logit_error, sum_error]: [f64; 2],
    ) -> (f64, f64) {
        let of_row = self.of_row(row);
        let eta = of_row.eta(logit, logit_error);
        let unnormalised = exponential_error(weight, logit - lse, eta) * (1.0 + of_row.relative)
            + weight * of_row.relative
            + weight.min(self.accumulation.underflow());
        let normalisation = of_row.normalisation - self.weight_roundings * F32_ROUNDOFF;
        let relative = sum_error / (1.0 - sum_error.min(DENOMINATOR_ERROR_MAX)) + normalisation;
        let error = unnormalised + (weight + unnormalised) * relative;
        // Neither the exact weight nor the subject's is much larger than 1.
        let error = error.min(2.0);
        self.replayed_p(profile, weight, error)
    }

    /// Returns the relative error of the row sum of a launch that sees these keys, given the largest relative error of
    /// any weight of the row.
    pub fn replayed_sum_error(&self, row: &RowStatistics, largest: f64) -> f64 {
        let lost = row.keys as f64 * self.accumulation.underflow();
        largest + self.accumulation.row_sum(row.keys + 1, self.tiles(row.keys)) + lost
    }

    /// Returns the relative error of a rounded weight on its way into the row: the running maximum's error, `tiles`
    /// rescalings of the sum, and merges.
    pub fn replayed_row_error(&self, row: &RowStatistics, max_error: f64, tiles: usize) -> f64 {
        let shift = max_error + F32_ROUNDOFF * 2.0 * (row.max_abs + row.range);
        let rescalings = (tiles + 1) as f64 * (EXP_ERROR + 3.0 * F32_ROUNDOFF);
        exponential_error(1.0, 0.0, shift) + rescalings + self.merge_theta(row)
    }

    /// Returns the model of a replay that rounds the out of each launch to a code, where partial outs are codes.
    pub fn replaying_partial_outs(self) -> Model {
        let replays_codes = self.makes_codes && self.merges();
        Model { makes_codes: self.makes_codes && !replays_codes, replays_codes, ..self }
    }

    /// Returns the numbers that the out of each launch is rounded to, where a replay rounds it.
    pub fn partial_code(&self) -> Option<Stored> {
        self.replays_codes.then_some(self.out)
    }

    /// Whether a launch's share of its row is known, where the relative error of its row sum is this.
    pub fn knows_shares(sum_error: f64) -> bool {
        sum_error < DENOMINATOR_ERROR_MAX
    }

    /// Returns the error of an element of a launch's out before it becomes a code. `value_errors` is that of the sum of
    /// its weighted values, `keys` are those of the row, and `sum_error` is the relative error of the launch's row sum.
    pub fn partial_out_error(&self, out: f64, value_errors: f64, (keys, sum_error): (usize, f64)) -> f64 {
        let relative = sum_error + self.out_roundings * F32_ROUNDOFF;
        let underflow = (keys + 8) as f64 * self.accumulation.underflow();
        (value_errors + out.abs() * relative) / (1.0 - relative) + underflow
    }

    /// Returns the relative error with which a launch's out enters its row, once it is a code: the launch's row sum no
    /// longer cancels between its out and its share.
    pub fn partial_share_error(&self, row: &RowStatistics, sum_error: f64) -> f64 {
        self.merge_theta(row) + sum_error / (1.0 - sum_error) + self.merge_out()
    }

    /// Returns what a weight, relative to a row's sum, may lose where a factor that it is made of (its exponential, a
    /// rescaling, a share beside a sink) falls below the range of f32. Factors are at most 1, so that such a weight is
    /// below that range too, or within roundings of its end: below twice the smallest normal number. It loses all of
    /// itself, and others nothing that shows.
    #[inline(always)]
    pub fn flushed(&self, weight: f64) -> f64 {
        weight.min(2.0 * self.accumulation.underflow())
    }
}
