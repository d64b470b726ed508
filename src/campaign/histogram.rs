//! Counts over log-spaced bins: the distribution of positive numbers in bounded memory.
//!
//! Quantiles are the upper edge of their bin (at most 4.5 % too large) and do not depend on the order of additions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Bins of one factor of two.
const BINS_PER_BINADE: f64 = 16.0;
/// Numbers below 2 to this power share the first bin.
const EXPONENT_MIN: f64 = -32.0;
/// Numbers above 2 to this power share the last bin.
const EXPONENT_MAX: f64 = 32.0;
const BINS: usize = ((EXPONENT_MAX - EXPONENT_MIN) * BINS_PER_BINADE) as usize;

/// A distribution of positive numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub struct Histogram {
    counts: Vec<u64>,
    max: f64,
}

/// The same on disk: only the bins that hold something.
#[derive(Serialize, Deserialize)]
struct Stored {
    bins: BTreeMap<usize, u64>,
    max: f64,
}

impl From<Histogram> for Stored {
    fn from(histogram: Histogram) -> Stored {
        let counts = histogram.counts.into_iter().enumerate();
        Stored { bins: counts.filter(|(_, count)| *count > 0).collect(), max: histogram.max }
    }
}

impl From<Stored> for Histogram {
    /// A bin that there is not counts as the last one.
    fn from(stored: Stored) -> Histogram {
        let mut histogram = Histogram { max: stored.max, ..Histogram::default() };
        stored.bins.into_iter().for_each(|(bin, count)| {
            let all = &mut histogram.counts[bin.min(BINS - 1)];
            *all = all.saturating_add(count);
        });
        histogram
    }
}

/// Numbers between two borders.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bar {
    /// The numbers are above this; those of the first bin of all may be below.
    pub above: f64,
    /// The numbers are at most this; those of the last bin of all may be larger.
    pub to: f64,
    /// How many they are.
    pub count: u64,
}

/// Bars of one factor of two.
const BARS_PER_BINADE: usize = 4;

/// What a report says of a distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quantiles {
    /// Numbers counted.
    pub count: u64,
    /// Half of them are at most this.
    pub p50: f64,
    /// 95 of 100.
    pub p95: f64,
    /// 99 of 100.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

/// Numbers that must lie above a quantile, at least: of fewer it is noise.
pub const ABOVE_MIN: u64 = 10;

impl Quantiles {
    /// Whether so many numbers were counted that the quantile of this share says something: p50 of 20, p99 of 1000.
    pub fn tells(&self, share: f64) -> bool {
        tells(self.count, share)
    }
}

/// Whether the quantile of this share says something of so many numbers.
pub fn tells(count: u64, share: f64) -> bool {
    count - count.min(rank(count, share)) >= ABOVE_MIN
}

/// How many numbers are at most a quantile.
fn rank(count: u64, share: f64) -> u64 {
    (share * count as f64).ceil() as u64
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: vec![0; BINS], max: 0.0 }
    }
}

impl Histogram {
    /// Counts a number; zero and less, and what is not a number, says nothing here.
    pub fn add(&mut self, value: f64) {
        if value > 0.0 {
            let bin = (value.log2() - EXPONENT_MIN) * BINS_PER_BINADE;
            self.counts[(bin.max(0.0) as usize).min(BINS - 1)] += 1;
            self.max = self.max.max(value);
        }
    }

    /// Adds another distribution's numbers.
    pub fn merge(&mut self, other: &Histogram) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        self.max = self.max.max(other.max);
    }

    /// The distribution, if anything was counted.
    pub fn quantiles(&self) -> Option<Quantiles> {
        let count: u64 = self.counts.iter().sum();
        let quantile = |share| self.quantile(count, share);
        (count > 0).then(|| Quantiles {
            count,
            p50: quantile(0.5),
            p95: quantile(0.95),
            p99: quantile(0.99),
            max: self.max,
        })
    }

    /// Returns the numbers by size, four bars to a factor of two. Bars without numbers are left out.
    pub fn bars(&self) -> Vec<Bar> {
        let edge = |bar: usize| (bar as f64 / BARS_PER_BINADE as f64 + EXPONENT_MIN).exp2();
        let bars = self.counts.chunks(BINS_PER_BINADE as usize / BARS_PER_BINADE).enumerate();
        let counted =
            bars.map(|(at, bins)| Bar { above: edge(at), to: edge(at + 1), count: bins.iter().sum() });
        counted.filter(|bar| bar.count > 0).collect()
    }

    fn quantile(&self, count: u64, share: f64) -> f64 {
        let rank = rank(count, share);
        let mut below = 0;
        let bin = self.counts.iter().position(|&here| {
            below += here;
            below >= rank
        });
        let edge = |bin: usize| ((bin + 1) as f64 / BINS_PER_BINADE + EXPONENT_MIN).exp2();
        bin.map_or(self.max, edge).min(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_numbers_to_a_bin() {
        let mut histogram = Histogram::default();
        (1..=1000).for_each(|value| histogram.add(f64::from(value)));
        let quantiles = histogram.quantiles().expect("numbers were counted");
        for (got, exact) in [(quantiles.p50, 500.0), (quantiles.p95, 950.0), (quantiles.p99, 990.0)] {
            assert!((exact..=exact * 1.05).contains(&got), "{got} for {exact}");
        }
        assert_eq!((quantiles.count, quantiles.max), (1000, 1000.0));
        assert!(quantiles.tells(0.99) && !Quantiles { count: 999, ..quantiles }.tells(0.99));
        assert!(tells(20, 0.5) && !tells(19, 0.5));
    }

    #[test]
    fn bars_hold_every_number_once() {
        let mut histogram = Histogram::default();
        [0.3, 0.31, 0.5, 1.0, 1.01, 900.0].into_iter().for_each(|value| histogram.add(value));
        let bars: Vec<(f64, f64, u64)> =
            histogram.bars().iter().map(|bar| (bar.above, bar.to, bar.count)).collect();
        let near = |exponent: f64| exponent.exp2();
        let expected = [(-1.75, 2), (-1.0, 1), (0.0, 2), (9.75, 1)];
        assert_eq!(bars, expected.map(|(from, count)| (near(from), near(from + 0.25), count)));
    }

    #[test]
    fn parts_stored_and_merged_are_the_whole() {
        let (mut whole, mut merged) = (Histogram::default(), Histogram::default());
        for part in 0..3 {
            let mut histogram = Histogram::default();
            for value in (part..100).step_by(3) {
                whole.add(f64::from(value) / 7.0);
                histogram.add(f64::from(value) / 7.0);
            }
            let text = serde_json::to_string(&histogram).expect("a histogram is JSON");
            merged.merge(&serde_json::from_str(&text).expect("it reads back"));
        }
        assert_eq!(merged, whole);
    }

    #[test]
    fn numbers_past_either_end_are_counted_and_nothing_is_no_distribution() {
        let mut histogram = Histogram::default();
        [0.0, -1.0, f64::NAN].into_iter().for_each(|value| histogram.add(value));
        assert_eq!(histogram.quantiles(), None);
        [1e-300, 1e300, f64::INFINITY].into_iter().for_each(|value| histogram.add(value));
        assert_eq!(histogram.quantiles().map(|quantiles| quantiles.count), Some(3));
    }
}
