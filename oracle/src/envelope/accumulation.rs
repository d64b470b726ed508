//! Accumulation: how a subject sums, and the factors of a sum's magnitudes that bound its error.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use super::constants::{F32_ROUNDOFF, ROW_SUM_TAIL};
use crate::Format;

/// The smallest normal f32, which a unit that flushes subnormals to zero may lose.
const F32_NORMAL_MIN: f64 = f32::MIN_POSITIVE as f64;
/// The smallest subnormal f32, which is more than gradual underflow may lose.
const F32_SUBNORMAL_STEP: f64 = 1.401_298_464_324_817e-45;

/// The way in which a subject makes all of its sums, as declared. A subject that makes sums in several ways declares
/// one whose bounds hold for each. Sums in less than f32 fit none of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Accumulation {
    /// Serial sums in f32: each product and each sum is rounded to nearest, and subnormals are kept. No term passes
    /// through more roundings in any other order, nor with fused multiplication and addition, nor in f64. The bounds
    /// therefore hold for any mix of these, where subnormals are kept.
    F32Serial,
    /// This number of serial partial sums in f32, and a binary tree over them, in every sum. The bounds are
    /// tighter than those of serial sums.
    F32Tree(NonZeroUsize),
    /// Sums of Hopper's `wgmma`: 16 products and the addend are aligned to the largest exponent and cut to 25
    /// fractional bits, and the result is truncated to f32. Row sums are FlashAttention-3's: four threads for each row,
    /// then a shuffle.
    WgmmaTruncating,
    /// Sums of Hopper's `wgmma` in FP8: 32 products and the addend are aligned to the largest exponent and cut to 13
    /// fractional bits, and the result keeps 13 bits behind its leading one. Row sums are as serial ones.
    WgmmaFp8 {
        /// Number of steps after which the unit's sum is *promoted*: added to one in f32, to begin anew. Steps are
        /// counted from the begin of a sum, and of each tile. Without a number the unit's sum is never promoted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        promoted_after: Option<NonZeroUsize>,
    },
    /// An undeclared way: each sum has the weaker bound of the serial sum and the tensor core's, in the width of the
    /// problem's formats. It also fits a subject that has both, and one on ordinary units that flushes subnormals to
    /// zero.
    #[default]
    Unknown,
}

/// A kind of step of Hopper's `wgmma`.
#[derive(Clone, Copy)]
struct Unit {
    /// The number of products in one step.
    step: usize,
    /// The error of one step, relative to the largest magnitude in it.
    kappa: f64,
}

impl Unit {
    /// Factors of 16 bits: K + 1 terms lose less than 2^-F each, and the result less than an ulp of f32, with K = 16
    /// and F = 25.
    const WIDE: Unit = Unit { step: 16, kappa: 17.0 / (1u64 << 25) as f64 + 1.0 / (1u64 << 23) as f64 };
    /// Factors in FP8: 33 terms and the result lose less than 2^-13 each.
    const FP8: Unit = Unit { step: 32, kappa: 34.0 / (1u64 << 13) as f64 };

    /// Returns the error of a sum of `n` products, one step after the other.
    fn products(self, n: usize) -> f64 {
        n.div_ceil(self.step) as f64 * self.kappa
    }

    /// Returns the most steps that `n` products in so many intervals touch, in sums that are cut into tiles and, from
    /// each tile's start, into steps.
    fn steps(self, n: usize, intervals: usize, tile: usize) -> usize {
        let (tile, step) = (tile.max(1), self.step);
        let most = if tile < step || tile.is_multiple_of(step) {
            touched(n, intervals, tile.min(step))
        } else {
            touched(n, intervals, tile) * tile.div_ceil(step)
        };
        most.min(n)
    }

    /// Returns the error of the additions in f32 of such a sum, where those of its steps are known.
    fn additions(self, steps: usize, tiles: usize, promoted_after: Option<NonZeroUsize>) -> f64 {
        let after = promoted_after.map_or(usize::MAX, NonZeroUsize::get);
        let own = steps.min(after) as f64 * self.kappa;
        gamma(steps.div_ceil(after) + tiles) * (1.0 + own)
    }

    /// Returns the error of a sum whose unit takes so many steps, promoted after some of them. A promoted sum has the
    /// error of its own steps, and each of its parts passes through as many additions in f32 as there are promotions.
    /// A tile's end promotes too.
    fn promoted(self, steps: usize, tiles: usize, promoted_after: Option<NonZeroUsize>) -> f64 {
        match promoted_after {
            None => steps as f64 * self.kappa,
            Some(after) => {
                steps.min(after.get()) as f64 * self.kappa + self.additions(steps, tiles, promoted_after)
            }
        }
    }
}

/// Returns the most pieces of a length that `n` numbers touch, in so many intervals. Each interval touches one more
/// than it fills, since it may begin anywhere.
pub(super) fn touched(n: usize, intervals: usize, length: usize) -> usize {
    n.div_ceil(length.max(1)) + 2 * intervals.max(1) - 1
}

/// Returns `γ_n`, the bound of n roundings of f32.
fn gamma(roundings: usize) -> f64 {
    let n = roundings as f64 * F32_ROUNDOFF;
    n / (1.0 - n)
}

impl Accumulation {
    /// Returns `g(n)`: the error of a matrix unit's sum of `n` products, relative to the sum of their magnitudes.
    pub fn products(self, n: usize) -> f64 {
        match self {
            Accumulation::F32Serial => gamma(n + 1),
            Accumulation::F32Tree(width) => gamma(tree_roundings(n, width) + 1),
            Accumulation::WgmmaTruncating => Unit::WIDE.products(n),
            Accumulation::WgmmaFp8 { promoted_after } => {
                Unit::FP8.promoted(n.div_ceil(Unit::FP8.step), 1, promoted_after)
            }
            Accumulation::Unknown => gamma(n + 1).max(Unit::WIDE.products(n)),
        }
    }

    /// Returns `g` of `n` products of a longer sum, in so many intervals of it. The sum is cut into tiles, and the
    /// tiles into steps of the matrix unit.
    pub fn cut_products(self, n: usize, intervals: usize, tile: usize) -> f64 {
        let wide = || Unit::WIDE.steps(n, intervals, tile) as f64 * Unit::WIDE.kappa;
        match self {
            Accumulation::WgmmaTruncating => wide(),
            Accumulation::WgmmaFp8 { promoted_after } => {
                let (steps, tiles) = (Unit::FP8.steps(n, intervals, tile), touched(n, intervals, tile));
                Unit::FP8.promoted(steps, tiles, promoted_after)
            }
            Accumulation::Unknown => gamma(n + 1).max(wide()),
            _ => self.products(n),
        }
    }

    /// Returns `g` of dk and dv: `n` products in all, of as many queries of each of the `heads` of a group. Each head, and
    /// each of its tiles of queries, begins its own steps.
    pub fn grouped_products(self, n: usize, heads: usize, tile: usize) -> f64 {
        let of_head = n / heads;
        let cut = match self {
            Accumulation::WgmmaTruncating | Accumulation::Unknown => {
                self.cut_products(of_head, 1, tile) * heads as f64
            }
            Accumulation::WgmmaFp8 { promoted_after } => {
                let (steps, tiles) = (Unit::FP8.steps(of_head, 1, tile), touched(of_head, 1, tile));
                // A head's sum is added to those of the others once its descales are in it.
                Unit::FP8.promoted(heads * steps, heads * (tiles + 1), promoted_after)
            }
            Accumulation::F32Serial | Accumulation::F32Tree(_) => 0.0,
        };
        cut.max(self.products(n))
    }

    /// Returns the relative error of a row sum of `n` positive terms that are added tile by tile. The terms are added
    /// on ordinary units, which round to nearest.
    pub fn row_sum(self, n: usize, tiles: usize) -> f64 {
        gamma(self.row_sum_roundings(n, tiles))
    }

    /// Returns the relative error of a row sum in tier T.
    pub fn row_sum_dithered(self, n: usize, tiles: usize) -> f64 {
        let roundings = self.row_sum_roundings(n, tiles);
        // Partial sums exceed the exact ones by `γ` at most.
        let tail = ROW_SUM_TAIL * F32_ROUNDOFF * (roundings as f64).sqrt() * (1.0 + gamma(roundings));
        tail.min(gamma(roundings))
    }

    /// Returns the most roundings that a term of a row sum passes through.
    fn row_sum_roundings(self, n: usize, tiles: usize) -> usize {
        match self {
            Accumulation::F32Serial | Accumulation::WgmmaFp8 { .. } | Accumulation::Unknown => n + tiles + 1,
            Accumulation::F32Tree(width) => tree_roundings(n, width) + tiles + 1,
            Accumulation::WgmmaTruncating => n.div_ceil(4) + tiles + 4,
        }
    }

    /// Returns the error of a sum of `n` products that are added tile by tile on ordinary units, relative to the sum of
    /// magnitudes: that of a row sum, and the rounding of each product.
    pub fn tiled_dot(self, n: usize, tiles: usize) -> f64 {
        gamma(self.row_sum_roundings(n, tiles) + 1)
    }

    /// Returns the error of `rowsum(dout · out)` over `n` lanes on ordinary units, relative to the sum of magnitudes.
    pub fn row_dot(self, n: usize) -> f64 {
        match self {
            Accumulation::F32Serial | Accumulation::WgmmaFp8 { .. } | Accumulation::Unknown => gamma(n + 1),
            Accumulation::F32Tree(width) => gamma(tree_roundings(n, width) + 1),
            Accumulation::WgmmaTruncating => gamma(n.div_ceil(16) + 6),
        }
    }

    /// Returns the error of `n` steps of the matrix unit in FP8, relative to the sum of magnitudes.
    pub(super) fn unit_steps(n: usize) -> f64 {
        n as f64 * Unit::FP8.kappa
    }

    /// Returns `g` of the products of [`Accumulation::cut_products`] whose promoted parts are known: that of adding them.
    pub(super) fn promotions(self, n: usize, intervals: usize, tile: usize) -> f64 {
        match self {
            Accumulation::WgmmaFp8 { promoted_after: Some(after) } => {
                let (steps, tiles) = (Unit::FP8.steps(n, intervals, tile), touched(n, intervals, tile));
                Unit::FP8.additions(steps, tiles, Some(after))
            }
            _ => self.cut_products(n, intervals, tile),
        }
    }

    /// Returns `g` of the products of [`Accumulation::grouped_products`] where the unit's sum of each tile is known, and
    /// each part of it that is promoted: that of adding them.
    pub(super) fn grouped_promotions(self, n: usize, heads: usize, tile: usize) -> f64 {
        match self {
            Accumulation::WgmmaFp8 { promoted_after } => {
                let of_head = n / heads.max(1);
                let (steps, tiles) = (Unit::FP8.steps(of_head, 1, tile), touched(of_head, 1, tile));
                Unit::FP8.additions(heads * steps, heads * (tiles + 1), promoted_after)
            }
            _ => self.grouped_products(n, heads, tile),
        }
    }

    /// Returns the same of the products of [`Accumulation::tiled_products`].
    pub(super) fn tiled_promotions(self, n: usize, intervals: usize, tile: usize) -> f64 {
        match self {
            Accumulation::WgmmaFp8 { promoted_after } => {
                let steps = Unit::FP8.steps(n, intervals, tile).min(tile.div_ceil(Unit::FP8.step).max(1));
                Unit::FP8.additions(steps, touched(n, intervals, tile), promoted_after)
            }
            _ => self.tiled_products(n, intervals, tile),
        }
    }

    /// Returns `g` of dq: products over `n` keys in so many intervals, `tile` of them at a time, with the tiles' results
    /// added in any order.
    pub fn tiled_products(self, n: usize, intervals: usize, tile: usize) -> f64 {
        let added = gamma(touched(n, intervals, tile));
        let of_tile = |unit: Unit| unit.steps(n, intervals, tile).min(tile.div_ceil(unit.step).max(1));
        match self {
            Accumulation::WgmmaTruncating => of_tile(Unit::WIDE) as f64 * Unit::WIDE.kappa + added,
            Accumulation::WgmmaFp8 { promoted_after } => {
                Unit::FP8.promoted(of_tile(Unit::FP8), 1, promoted_after) + added
            }
            _ => self.products(n) + added,
        }
    }

    /// Returns the way that stands for this one with factors of these formats: an undeclared one may be Hopper's unit in
    /// FP8, whose bounds hold for the others too.
    pub(super) fn with_factors(self, formats: &[Format]) -> Accumulation {
        let is_fp8 = formats.iter().any(|format| matches!(format, Format::E4m3 | Format::E5m2));
        if self == Accumulation::Unknown && is_fp8 {
            Accumulation::WgmmaFp8 { promoted_after: None }
        } else {
            self
        }
    }

    /// Whether products are aligned by the exponents of their factors. A subnormal factor has its format's smallest
    /// exponent.
    pub(super) fn aligns(self) -> bool {
        matches!(self, Accumulation::WgmmaTruncating | Accumulation::WgmmaFp8 { .. } | Accumulation::Unknown)
    }

    /// Returns the most that one operation may lose to underflow.
    #[inline]
    pub fn underflow(self) -> f64 {
        match self {
            Accumulation::F32Serial | Accumulation::F32Tree(_) => F32_SUBNORMAL_STEP,
            Accumulation::WgmmaTruncating | Accumulation::WgmmaFp8 { .. } | Accumulation::Unknown => {
                F32_NORMAL_MIN
            }
        }
    }
}

fn tree_roundings(n: usize, width: NonZeroUsize) -> usize {
    let width = width.get();
    // The logarithm of the next power of two, which for the largest widths is no number.
    n.div_ceil(width) + (usize::BITS - (width - 1).leading_zeros()) as usize
}

#[cfg(test)]
mod tests {
    use super::{Accumulation, Unit};

    const UNITS: [Unit; 2] = [Unit::WIDE, Unit::FP8];

    /// Test that dq's sum counts what two intervals touch: a sink token and a window of 18 keys, four steps of one tile.
    #[test]
    fn a_sum_over_keys_counts_the_steps_of_both_intervals() {
        let [one, two] =
            [1, 2].map(|intervals| Accumulation::WgmmaTruncating.tiled_products(19, intervals, 128));
        assert!(two >= 4.0 * Unit::WIDE.kappa && one < 4.0 * Unit::WIDE.kappa, "{one} and {two}");
    }

    #[test]
    fn a_tree_of_any_width_has_a_depth() {
        let depth = |width: usize| super::tree_roundings(1, width.try_into().unwrap()) - 1;
        let widths = [1, 2, 3, 4, 5, 1 << 62, (1 << 63) + 1, usize::MAX];
        assert_eq!(widths.map(depth), [0, 1, 2, 2, 3, 62, 64, 64]);
    }

    #[test]
    fn two_intervals_touch_no_more_steps_than_counted() {
        for (unit, tile) in
            UNITS.into_iter().flat_map(|unit| [1, 3, 8, 16, 20, 32, 48].map(|tile| (unit, tile)))
        {
            let step = |product: usize| (product / tile, product % tile / unit.step);
            for (first, second) in (1..20usize).flat_map(|a| (1..20usize).map(move |b| (a, b))) {
                for (start, gap) in (0..tile).flat_map(|start| (1..tile + 2).map(move |gap| (start, gap))) {
                    let end = start + first;
                    let products = (start..end).chain(end + gap..end + gap + second);
                    let mut places: Vec<(usize, usize)> = products.map(step).collect();
                    places.dedup();
                    let most = unit.steps(first + second, 2, tile);
                    assert!(
                        places.len() <= most,
                        "{first} and {second} in tiles of {tile}: {}",
                        places.len()
                    );
                }
            }
        }
    }

    #[test]
    fn neighbours_touch_no_more_steps_than_counted_and_may_touch_as_many() {
        for (unit, tile) in UNITS.into_iter().flat_map(|unit| (1..=50).map(move |tile| (unit, tile))) {
            for n in 0..=70 {
                let step = |product: usize| (product / tile, product % tile / unit.step);
                let touched = |start: usize| {
                    let mut places: Vec<(usize, usize)> = (start..start + n).map(step).collect();
                    places.dedup();
                    places.len()
                };
                let most = (0..tile).map(touched).max().unwrap_or(0);
                assert!(most <= unit.steps(n, 1, tile), "{n} products in tiles of {tile}: {most}");
                let whole = tile <= unit.step || tile % unit.step == 0;
                assert!(
                    !whole || n < 2 || most + 1 >= unit.steps(n, 1, tile),
                    "{n} in tiles of {tile}: {most}"
                );
            }
        }
    }
}
