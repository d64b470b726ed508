//! [`OutRow`]: the bounds of elements of out, apart from what they share with their row.

use super::rounding::{EXPONENT_MAX, final_rounding};
use super::{DENOMINATOR_ERROR_MAX, Model, RowStatistics};
use crate::Stored;
use crate::envelope::constants::F32_ROUNDOFF;

/// The bounds of a row of out.
#[derive(Clone, Copy, Debug)]
pub struct OutRow {
    /// The relative error of the row's sum, and underflow; `None` where the sum may be anything.
    known: Option<(f64, f64)>,
    /// The largest magnitude of a weighted mean of values.
    hull: f64,
    /// The factor by which roundings of weights may widen the hull.
    roundings: f64,
    /// The most that the floors of weights add to it.
    floors: f64,
    /// The error of a merge by a difference.
    difference: f64,
    /// The most that codes of partial results lose.
    lost: f64,
    stored: Stored,
}

impl OutRow {
    /// Returns the bound of one element. `value_errors` is `Σ_j (PairError::value + rounding)·|v|`.
    #[inline]
    pub fn bound(&self, out: f64, value_errors: f64) -> f64 {
        let error = match self.known {
            Some((relative, underflow)) => {
                (value_errors + out.abs() * relative) / (1.0 - relative) + underflow
            }
            None => (out.abs() + self.hull) * self.roundings + self.floors,
        };
        let error = error + self.difference + self.lost;
        error + final_rounding(self.stored, out.abs() + error)
    }
}

impl Model {
    /// Returns the bounds of a row of out. `value_max` is the largest `|v|` seen.
    pub fn out_row(&self, row: &RowStatistics, denominator: f64, value_max: f64) -> OutRow {
        let relative = denominator + self.out_roundings * F32_ROUNDOFF;
        let known = (relative < DENOMINATOR_ERROR_MAX).then(|| {
            let underflow = (row.keys + 8) as f64 * self.accumulation.underflow() + self.merge_floor();
            (relative, underflow)
        });
        // With any weights, the output stays in the values' hull, apart from roundings and from shares of merged
        // steps that add up to more than 1.
        let shares = || libm::exp(self.merge_theta(row).min(EXPONENT_MAX));
        let shares = if known.is_none() { shares() } else { 1.0 };
        OutRow {
            known,
            hull: value_max * shares,
            roundings: 1.0 + 4.0 * self.p.unit_roundoff(),
            // Weights may each be rounded up from below the format's normal range.
            floors: row.keys as f64 * self.p_least * value_max * shares,
            difference: self.difference(value_max),
            lost: self.merge_lost(value_max),
            stored: self.out,
        }
    }
}
