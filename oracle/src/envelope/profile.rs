//! A numeric profile: the roundings of a subject, and the order in which it takes the keys.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::arithmetic::{Delta, DsWeights, GroupSums, WeightRounding};
use crate::Format;

/// The roundings of a subject, and the order in which it takes the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NumericProfile {
    /// Whether weights are rounded to the format of P before the product with the values.
    pub rounds_weights: bool,
    /// Whether logit gradients are multiplied by the scale before they are rounded.
    pub scales_logit_gradients: bool,
    /// Whether queries are multiplied by the scale and rounded to their format before the product with the keys.
    pub scales_queries: bool,
    /// Whether weights are rounded before or after they are divided by their sum. An unknown order cannot be replayed,
    /// and counts as that of FlashAttention.
    pub weights: WeightRounding,
    /// The source of D.
    pub delta: Delta,
    /// The format of dk and dv of one query head.
    pub group_sums: GroupSums,
    /// The weights that dS is made of.
    pub ds_weights: DsWeights,
    /// The number of keys of a tile.
    pub kv_tile: usize,
    /// The order in which a launch takes its tiles.
    pub kv_order: KeyOrder,
    /// The rule of the factor that a tile's dS has before it is rounded; `None` where it has none, or where the rule is
    /// not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tile_factor: Option<TileFactor>,
}

/// The rule by which a tile's factor of dS, a power of two, follows from the tile's largest magnitude. The exponent of a
/// factor lies within ±126, and zeros have the factor 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TileFactor {
    /// The largest that brings no number past the format's largest one.
    Largest,
    /// The one that brings every number to the binade below the format's last. It follows from the exponent alone.
    OfExponent,
}

/// Exponents of a tile's factor: neither the factor nor its reciprocal is subnormal.
const FACTOR_EXPONENTS: RangeInclusive<i32> = -126..=126;

#[cfg(test)]
impl NumericProfile {
    /// Returns the profile of tests: weights are rounded before they are divided, and nothing else is.
    pub(crate) fn of_tests() -> NumericProfile {
        NumericProfile {
            rounds_weights: true,
            scales_logit_gradients: false,
            scales_queries: false,
            weights: WeightRounding::BeforeNormalisation,
            delta: Delta::StoredOut,
            group_sums: GroupSums::F32,
            ds_weights: DsWeights::Unrounded,
            kv_tile: 4,
            kv_order: KeyOrder::Ascending,
            tile_factor: None,
        }
    }
}

impl TileFactor {
    /// Returns the factor for a largest magnitude and a format.
    pub fn of(self, amax: f64, format: Format) -> f64 {
        if amax == 0.0 || !amax.is_finite() {
            return 1.0;
        }
        let most = format.max_finite();
        let exponent = libm::ilogb(most) - libm::ilogb(amax);
        let is_less = match self {
            TileFactor::Largest => libm::ldexp(amax, exponent) > most,
            TileFactor::OfExponent => true,
        };
        let exponent = exponent - i32::from(is_less);
        libm::exp2(exponent.clamp(*FACTOR_EXPONENTS.start(), *FACTOR_EXPONENTS.end()).into())
    }
}

/// The order of a launch's tiles of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeyOrder {
    /// Tiles from the first to the last.
    Ascending,
    /// Tiles from the last to the first, as in FlashAttention-3.
    Descending,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_brings_the_largest_magnitude_above_a_quarter_of_the_range() {
        for format in [Format::E4m3, Format::E5m2] {
            let most = format.max_finite();
            for amax in [1e-30, 0.011, 1.0, 1.75, 1.750_000_1, 448.0, 449.0, 57_344.0, 3e30] {
                let [largest, of_exponent] =
                    [TileFactor::Largest, TileFactor::OfExponent].map(|rule| amax * rule.of(amax, format));
                assert!(largest <= most && 2.0 * largest > most, "{format}: {amax} becomes {largest}");
                assert!(of_exponent <= most && 4.0 * of_exponent > most, "{format}: {amax}: {of_exponent}");
            }
            let kept = [1e-300, 1e300].map(|amax| TileFactor::Largest.of(amax, format));
            assert_eq!(kept, [libm::exp2(126.0), libm::exp2(-126.0)]);
            assert_eq!(TileFactor::Largest.of(0.0, format), 1.0);
        }
    }
}
