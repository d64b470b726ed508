//! [`OutRow`]: what the bounds of a row's elements of out have in common.

use super::rounding::{EXPONENT_MAX, final_rounding};
use super::{DENOMINATOR_ERROR_MAX, Denominator, Model, RowStatistics};
use crate::Stored;
use crate::envelope::constants::F32_ROUNDOFF;

/// The bounds of a row of out.
#[derive(Clone, Copy, Debug)]
pub struct OutRow {
    sums: Sums,
    /// The error of a merge by a difference.
    difference: f64,
    /// The most that codes of partial results lose.
    lost: f64,
    stored: Stored,
}

/// What a row's sums say about its elements.
#[derive(Clone, Copy, Debug)]
enum Sums {
    /// The relative error of the row's sum of weights is this, and the elements lose so much to underflow.
    Known { relative: f64, underflow: f64 },
    /// The sum of weights may be anything. With any weights, an element lies in the hull of the values, apart from
    /// roundings and from shares of merged steps that add up to more than 1.
    Any { hull: f64, roundings: f64, floors: f64 },
}

impl OutRow {
    /// Returns the bound of one element. `value_errors` is `Σ_j (PairError::value + rounding)·|v|`.
    #[inline(always)]
    pub fn bound(&self, out: f64, value_errors: f64) -> f64 {
        let error = match self.sums {
            Sums::Known { relative, underflow } => {
                (value_errors + out.abs() * relative) / (1.0 - relative) + underflow
            }
            Sums::Any { hull, roundings, floors } => (out.abs() + hull) * roundings + floors,
        };
        let error = error + self.difference + self.lost;
        error + final_rounding(self.stored, out.abs() + error)
    }
}

impl Model {
    /// Returns the bounds of a row of out. `value_max` is the largest `|v|` seen.
    pub fn out_row(&self, row: &RowStatistics, denominator: Denominator, value_max: f64) -> OutRow {
        let relative = denominator.relative() + self.out_roundings * F32_ROUNDOFF;
        let sums = if relative < DENOMINATOR_ERROR_MAX {
            let underflow = (row.keys + 8) as f64 * self.accumulation.underflow() + self.merge_floor();
            Sums::Known { relative, underflow }
        } else {
            let shares = libm::exp(self.merge_theta(row).min(EXPONENT_MAX));
            // Weights may each be rounded up from below the format's normal range.
            let floors = row.keys as f64 * self.p_least * value_max * shares;
            Sums::Any { hull: value_max * shares, roundings: 1.0 + 4.0 * self.p.unit_roundoff(), floors }
        };
        OutRow {
            sums,
            difference: self.difference(value_max),
            lost: self.merge_lost(value_max),
            stored: self.out,
        }
    }
}
