//! The envelope of a row in tiers W and T, from sums over its pairs. It serves a reference that runs elsewhere and
//! cannot bring every pair here.
//!
//! Every term is [`Model`]'s own, taken at the worst pair of the row. While the error of its exponent is at most 1, a
//! pair's error `W` is proportional to its weight `p` and convex in its logit and in `a = Σ|q||k|`. The worst logit is
//! then one of the row's two ends, and `Σ p·W(a) ≤ W(0)·Σ p + (W(A) − W(0))/A · Σ p·a` for the largest `a`, `A`. Past
//! an error of 1 nothing is bounded. A bound is therefore never below that of [`crate::blocked::forward`], and exceeds
//! that bound by the spread of `a` at most. Tier T has the same certificate and the same noise as there. Every key
//! counts as often as the most repeated one.

use ndarray::ArrayView2;

use super::constants::NOISE;
use super::dither::{Spread, fill_enough, multiplicities};
use super::model::{BoundTier, Denominator, Model, RowStatistics};

/// Sums over the keys that a row sees. Sums of magnitudes may be larger than the exact ones; all others are exact.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSums {
    /// The number of visible keys.
    pub keys: usize,
    /// The largest logit, −∞ where there is no key.
    pub largest: f64,
    /// The smallest logit.
    pub smallest: f64,
    /// `Σ e^(s − largest)`.
    pub sum: f64,
    /// `Σ e^(s − largest)·a`, where a is `Σ|q||k|` of a logit, each of [`Model::magnitude`].
    pub sum_a: f64,
    /// The largest `a` of a visible key.
    pub largest_a: f64,
    /// The row's sink.
    pub sink: Option<f64>,
    /// The largest magnitude of a value that the row sees, or more.
    pub value_max: f64,
}

/// The further sums over a row's visible keys that tier T needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DitherSums {
    /// `Σ (s − largest)` over visible keys.
    pub sum: f64,
    /// `Σ (s − largest)²`.
    pub sum_squares: f64,
    /// The share of weights `e^(s − largest)` other than 0 that have company in their slot, or the share of their
    /// squares, whichever is larger. A binade has [`SLOTS`](super::SLOTS) slots for each visible key.
    pub shared: f64,
    /// The number of copies of the most repeated key, among the row's keys or more ([`largest_multiplicity`]).
    pub copies: f64,
}

/// Returns the number of copies of a matrix's most repeated row.
pub fn largest_multiplicity(rows: &ArrayView2<'_, f64>) -> f64 {
    multiplicities(rows).into_iter().fold(0.0, f64::max)
}

/// The quantities of a row's tier T, where the row is dithered.
#[derive(Clone, Copy, Debug)]
struct Dithered {
    denominator: Denominator,
    copies: f64,
}

/// A row's exact statistics, and what all lanes of its output have in common.
#[derive(Clone, Copy, Debug)]
pub struct RowEnvelope<'a> {
    model: &'a Model,
    row: RowStatistics,
    value_max: f64,
    /// The factor that turns `e^(s − largest)` into a weight.
    share: f64,
    /// Errors of the numerator, in three parts. `value` is relative to `Σ p·|v|` and leaves out the roundings of P.
    /// `rounding` holds these roundings. `floor` is the part that does not shrink with the weights.
    value: f64,
    rounding: f64,
    floor: f64,
    /// `Σ p·θ`.
    weight_errors: f64,
    denominator: Denominator,
    max_logit_error: f64,
    dithered: Option<Dithered>,
}

/// Returns the statistics of the row with its sink.
fn row(sums: &RowSums) -> RowStatistics {
    let &RowSums { keys, largest, smallest, sum, sink, .. } = sums;
    let max = sink.map_or(largest, |sink| sink.max(largest));
    let min = sink.map_or(smallest, |sink| sink.min(smallest));
    if max == f64::NEG_INFINITY {
        return RowStatistics { keys, max, max_abs: 0.0, range: 0.0, sum: 0.0, lse: f64::NEG_INFINITY, sink };
    }
    let of_keys = if keys == 0 { 0.0 } else { sum * libm::exp(largest - max) };
    let sum = of_keys + sink.map_or(0.0, |sink| libm::exp(sink - max));
    let lse = max + libm::log(sum);
    RowStatistics { keys, max, max_abs: min.abs().max(max.abs()), range: max - min, sum, lse, sink }
}

impl<'a> RowEnvelope<'a> {
    /// Returns the envelope of a row in tier W.
    pub fn new(model: &'a Model, sums: &RowSums) -> RowEnvelope<'a> {
        let row = row(sums);
        let mut envelope = RowEnvelope {
            model,
            row,
            value_max: sums.value_max,
            share: 0.0,
            value: 0.0,
            rounding: 0.0,
            floor: 0.0,
            weight_errors: 0.0,
            denominator: Denominator::default(),
            max_logit_error: 0.0,
            dithered: None,
        };
        if row.max == f64::NEG_INFINITY {
            return envelope;
        }
        if row.keys > 0 {
            envelope.share = libm::exp(sums.largest - row.max) / row.sum;
            envelope.add_keys(sums);
        }
        envelope.denominator = model.denominator(&row, envelope.weight_errors, BoundTier::Worst);
        envelope
    }

    /// Returns the envelope with tier T, where the row has its certificate.
    pub fn with_dither(self, sums: &DitherSums) -> RowEnvelope<'a> {
        let spread = Spread { terms: self.row.keys, sum: sums.sum, squares: sums.sum_squares };
        let certified = spread.is_wide() && fill_enough(sums.shared);
        let dithered = certified.then(|| Dithered {
            denominator: self.model.denominator(&self.row, self.weight_errors, BoundTier::Dithered),
            copies: sums.copies,
        });
        RowEnvelope { dithered, ..self }
    }

    /// Adds the errors of the visible keys.
    fn add_keys(&mut self, sums: &RowSums) {
        let &RowSums { keys, largest, smallest, sum, sum_a, largest_a, .. } = sums;
        let (of_row, g) = (self.model.of_row(&self.row), self.model.value_sum(keys));
        let ends = [largest, smallest];
        let worst = |of: &dyn Fn(f64) -> f64| ends.into_iter().map(of).fold(0.0, f64::max);
        self.floor = of_row.floor(g);
        self.max_logit_error = worst(&|logit| self.model.logit_error(largest_a, logit));
        if worst(&|logit| of_row.exponent_error(logit, largest_a)) > 1.0 {
            (self.value, self.weight_errors) = (f64::INFINITY, f64::INFINITY);
            return;
        }
        let pair = |logit: f64, a: f64| of_row.pair(logit, 1.0, a, g);
        self.value = worst(&|logit| pair(logit, largest_a).value);
        self.rounding = worst(&|logit| pair(logit, largest_a).rounding.most);
        let weight = |a: f64| worst(&|logit| pair(logit, a).weight);
        let (least, most) = (weight(0.0), weight(largest_a));
        let slope = if largest_a > 0.0 { (most - least) / largest_a } else { 0.0 };
        self.weight_errors = self.share * (least * sum + slope * sum_a);
    }

    /// Returns the exact LSE and its bound, which is infinite where nothing is bounded.
    pub fn lse(&self) -> (f64, f64) {
        let sees_nothing = self.row.lse == f64::NEG_INFINITY;
        let bound = if sees_nothing { 0.0 } else { self.model.lse_bound(&self.row, self.denominator) };
        (self.row.lse, bound)
    }

    /// Returns the LSE's bound in tier T, which is infinite without a certificate.
    pub fn dithered_lse(&self) -> f64 {
        let bound = |dithered: Dithered| self.model.lse_bound(&self.row, dithered.denominator);
        self.dithered.map_or(f64::INFINITY, bound)
    }

    /// Returns a lane of the exact output and its bound, from `Σ e^(s − largest)·v` and `Σ e^(s − largest)·|v|`.
    pub fn out(&self, numerator: f64, magnitudes: f64) -> (f64, f64) {
        if self.row.keys == 0 {
            return (0.0, 0.0);
        }
        let out = numerator * self.share;
        let errors = (self.value + self.rounding) * magnitudes * self.share + self.floors();
        (out, self.model.out_row(&self.row, self.denominator, self.value_max).bound(out, errors))
    }

    /// Returns a lane's bound in tier T, from the two sums of [`RowEnvelope::out`] and `Σ (e^(s − largest)·v)²`. The
    /// bound is infinite without a certificate.
    pub fn dithered_out(&self, numerator: f64, magnitudes: f64, squares: f64) -> f64 {
        let Some(Dithered { denominator, copies }) = self.dithered else { return f64::INFINITY };
        let (out, magnitudes) = (numerator * self.share, magnitudes * self.share);
        let noise = NOISE * (copies * squares).sqrt() * self.share;
        let errors = self.value * magnitudes + self.rounding * noise.min(magnitudes) + self.floors();
        self.model.out_row(&self.row, denominator, self.value_max).bound(out, errors)
    }

    /// Returns the most that all keys may lose together, however small their weights are.
    fn floors(&self) -> f64 {
        self.floor * self.row.keys as f64 * self.value_max
    }

    /// Returns the error of the row's largest logit. A head's largest logit may be off by the largest error of its
    /// rows.
    pub fn max_logit_error(&self) -> f64 {
        self.max_logit_error
    }
}
