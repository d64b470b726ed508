//! A row's denominator `Σ e^(s − max)`, and its logarithm, the LSE: how far off they may be.

use super::rounding::EXPONENT_MAX;
use super::{
    BoundTier, DENOMINATOR_ERROR_MAX, F32_ROUNDOFF, LOG_ERROR, LOG_RELATIVE_ERROR, Model, RowStatistics,
};

/// Part of an LSE's error by which roundings of the computed numbers, which are off by that error, may be larger than
/// those of the exact ones.
const ROUNDINGS_MORE: f64 = 1e-3;

/// The errors of a row's denominator, relative to it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Denominator {
    /// Those of the weights, `Σ p·θ`, the sink's included.
    weights: f64,
    /// Those of adding the weights up.
    sum: f64,
}

impl Denominator {
    /// Returns all of them to first order.
    pub fn relative(self) -> f64 {
        self.weights + self.sum
    }

    /// Returns the error of the denominator's logarithm, however large the weights' errors W are; `relative` is the part
    /// of θ that is no error of an exponent.
    ///
    /// A computed weight is p·f with `(1 − relative²) / (1 + θ) ≤ f ≤ 1 + θ`: an exponent is off by as much to either
    /// side. Shares add up to 1, so `Σ p·f` is at most `1 + W` and, since 1/x is convex, at least
    /// `(1 − relative²) / (1 + W)`.
    fn log_error(self, relative: f64) -> f64 {
        let is_known =
            self.weights < libm::exp(EXPONENT_MAX) && relative.max(self.sum) < DENOMINATOR_ERROR_MAX;
        if !is_known {
            return f64::INFINITY;
        }
        libm::log1p(self.weights) * (1.0 + ROUNDINGS_MORE) - libm::log1p(-relative * relative)
            + self.sum / (1.0 - self.sum)
    }
}

impl Model {
    /// Returns the errors of a row's denominator, given `Σ p·θ` over its keys.
    pub fn denominator(&self, row: &RowStatistics, weight_errors: f64, tier: BoundTier) -> Denominator {
        let sink = row.sink.map_or(0.0, |sink| {
            self.of_row(row).weight_error(libm::exp(sink - row.lse), sink, F32_ROUNDOFF * sink.abs())
        });
        let (terms, tiles) = (row.keys + 1, self.tiles(row.keys));
        let sum = match tier {
            BoundTier::Worst => self.accumulation.row_sum(terms, tiles),
            BoundTier::Dithered => self.accumulation.row_sum_dithered(terms, tiles),
        };
        Denominator { weights: weight_errors + sink, sum: sum + self.merge_lse(row) }
    }

    /// Returns the bound of one row's LSE.
    pub fn lse_bound(&self, row: &RowStatistics, denominator: Denominator) -> f64 {
        let log_sum = libm::log(row.sum);
        let relative = denominator.relative();
        // |ln(1 + x)| ≤ |x| / (1 − |x|).
        let sum = match relative < DENOMINATOR_ERROR_MAX {
            true => relative / (1.0 - relative),
            false => denominator.log_error(self.of_row(row).relative),
        };
        // A sum of multiplied weights has its factor's logarithm more, which is subtracted again.
        let shift = libm::log(self.sum_scale);
        sum + F32_ROUNDOFF * (4.0 * row.max.abs() + row.lse.abs() + 4.0 + 2.0 * shift)
            + LOG_ERROR
            + LOG_RELATIVE_ERROR * (log_sum.abs() + shift)
    }
}

#[cfg(test)]
mod tests {
    use super::super::rounding::exponential_error;
    use super::*;

    /// Part of θ that is no error of an exponent.
    const RELATIVE: f64 = 1e-3;

    /// Returns the errors of a denominator whose weights have these shares and errors of exponents.
    fn denominator(shares: &[f64], errors: &[f64]) -> Denominator {
        let error = |(&p, &error): (&f64, &f64)| {
            exponential_error(p, libm::log(p), error) * (1.0 + RELATIVE) + p * RELATIVE
        };
        Denominator { weights: shares.iter().zip(errors).map(error).sum(), sum: 0.0 }
    }

    #[test]
    fn a_logarithm_is_off_by_no_more_than_the_exponents_wherever_they_go() {
        for shares in [vec![1.0], vec![0.5, 0.5], vec![0.9, 0.0999, 0.0001], vec![1.0 / 16.0; 16]] {
            for largest in [0.3, 0.9, 1.1, 5.0, 34.0, 55.0] {
                let errors: Vec<f64> = (0..shares.len()).map(|key| largest / (1 + key % 3) as f64).collect();
                let bound = denominator(&shares, &errors).log_error(RELATIVE);
                assert!(bound < 1.01 * largest + 0.35, "{bound} for errors up to {largest}");
                for signs in 0..1 << shares.len().min(8) {
                    let computed = shares.iter().zip(&errors).enumerate().map(|(key, (p, error))| {
                        let up = signs >> (key % 8) & 1 == 1;
                        let (sign, more) = if up { (1.0, 1.0 + RELATIVE) } else { (-1.0, 1.0 - RELATIVE) };
                        p * libm::exp(sign * error) * more
                    });
                    let off = libm::log(computed.sum()).abs();
                    assert!(off <= bound, "{off}, not {bound}: {shares:?} off by {errors:?}, {signs:b}");
                }
            }
        }
    }

    #[test]
    fn errors_without_an_end_bound_nothing() {
        let infinite =
            |weights, sum, relative| Denominator { weights, sum }.log_error(relative).is_infinite();
        assert!(infinite(libm::exp(EXPONENT_MAX), 0.0, 0.0));
        assert!(infinite(1.0, DENOMINATOR_ERROR_MAX, 0.0));
        assert!(infinite(1.0, 0.0, 1.0));
        assert!(!infinite(1.0, 0.0, 0.0));
    }
}
