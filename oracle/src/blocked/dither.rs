//! The certificate of dither: whether the roundings of a sum's weights may be taken as independent.
//!
//! Rounding is a function of a value's place between two numbers of the format: equal significands are rounded alike,
//! and weights that hardly differ lie in one cell. What is measured is therefore the weights that are summed, on the
//! inputs at hand: their logarithms must be spread over many cells ([`LOG_DEVIATION_MIN`]), nearly all significands
//! must be different ([`SHARED_SHARE_MAX`]: integers, ramps and copies share them), and what repeats because a whole
//! key or query repeats is counted ([`multiplicities`]). Without a certificate a sum's roundings add up, as in tier W.

use std::collections::HashMap;

use ndarray::ArrayView2;

/// Least standard deviation of the logarithms of a sum's weights: 77 cells of bf16, whose cells are 2^-8 wide at least.
const LOG_DEVIATION_MIN: f64 = 0.3;
/// Fewest terms of a sum that are worth a certificate: of fewer, eight standard deviations are more than all of them
/// (`(8/√3)² = 21.3`).
const TERMS_MIN: usize = 22;
/// Largest share of weights whose significand another weight of the sum has too.
const SHARED_SHARE_MAX: f64 = 1.0 / 8.0;
/// Bits of a significand that are compared: far below the accuracy of an f64 logit, and enough that the weights of a row
/// of 2^14 keys share none by chance.
const SIGNIFICAND_BITS: u32 = 32;

/// Spread of the logarithms of some weights, from their number, sum and sum of squares.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spread {
    pub(crate) terms: usize,
    pub(crate) sum: f64,
    pub(crate) squares: f64,
}

impl Spread {
    /// Of the given logarithms.
    pub(super) fn of(logs: impl Iterator<Item = f64>) -> Spread {
        let mut spread = Spread::default();
        logs.for_each(|log| spread.add(log));
        spread
    }

    /// Counts one more.
    pub(super) fn add(&mut self, log: f64) {
        self.terms += 1;
        self.sum += log;
        self.squares += log * log;
    }

    /// Whether there are enough weights, spread far enough.
    pub(crate) fn is_wide(&self) -> bool {
        let terms = self.terms as f64;
        let variance = self.squares / terms - (self.sum / terms).powi(2);
        self.terms >= TERMS_MIN && variance >= LOG_DEVIATION_MIN * LOG_DEVIATION_MIN
    }
}

/// Whether nearly every weight has a significand of its own. Weights of 0 are rounded exactly and not counted.
pub(super) fn significands_differ(weights: &[f64]) -> bool {
    let significand = |weight: &f64| (weight.to_bits() >> (52 - SIGNIFICAND_BITS)) as u32;
    let mut all: Vec<u32> = weights.iter().filter(|weight| **weight != 0.0).map(significand).collect();
    all.sort_unstable();
    let own: usize = all.chunk_by(|a, b| a == b).filter(|equal| equal.len() == 1).count();
    few_are_shared(all.len() - own, all.len())
}

/// The same, given how many weights share theirs.
pub(crate) fn few_are_shared(shared: usize, weights: usize) -> bool {
    shared as f64 <= SHARED_SHARE_MAX * weights as f64
}

/// For each row of a matrix how often it is there: the roundings of as many weights may be one and the same. With n
/// equal roundings in a sum, `(Σ a)² ≤ n·Σ a²`.
pub(crate) fn multiplicities(rows: &ArrayView2<'_, f64>) -> Vec<f64> {
    // A collision of hashes counts too much, which is no error.
    let hash = |row: &[f64]| {
        row.iter()
            .fold(0u64, |hash, x| (hash.rotate_left(5) ^ x.to_bits()).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    };
    let hashes: Vec<u64> = rows.outer_iter().map(|row| hash(&row.to_vec())).collect();
    let mut counts: HashMap<u64, f64> = HashMap::with_capacity(hashes.len());
    hashes.iter().for_each(|hash| *counts.entry(*hash).or_default() += 1.0);
    hashes.iter().map(|hash| counts[hash]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(log: impl Fn(usize) -> f64) -> Vec<f64> {
        (0..256).map(|index| libm::exp(log(index))).collect()
    }

    #[test]
    fn what_repeats_or_hardly_varies_has_no_certificate() {
        let spread = |log: fn(usize) -> f64| Spread::of((0..256).map(log)).is_wide();
        let wild = |index: usize| libm::sin(index as f64 * 12.9898) * 2.0;
        assert!(spread(wild) && significands_differ(&weights(wild)));
        assert!(
            !spread(|index| libm::sin(index as f64) * 0.3),
            "the deviation of a sine is 0.71 of its height"
        );
        assert!(!Spread::of((0..11).map(wild)).is_wide(), "too few");
        assert!(!significands_differ(&weights(|_| 0.5)), "equal");
        assert!(!significands_differ(&weights(|index| (index % 40) as f64 / 8.0)), "integers");
        let ln_2 = std::f64::consts::LN_2;
        assert!(
            !significands_differ(&weights(|index| index as f64 * ln_2 / 4.0)),
            "a ramp that repeats every binade"
        );
    }

    #[test]
    fn copies_are_counted() {
        let rows = ndarray::array![[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [1.0, 2.0], [2.0, 1.0]];
        assert_eq!(multiplicities(&rows.view()), [3.0, 1.0, 3.0, 3.0, 1.0]);
    }
}
