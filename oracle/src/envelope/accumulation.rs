//! Accumulation: how a subject sums, and the factors of a sum's magnitudes that bound its error.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use super::constants::{F32_ROUNDOFF, ROW_SUM_TAIL};

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
    /// An undeclared way: each sum has the weaker bound of the serial sum and the tensor core's. It also fits a subject
    /// that has both, and one on ordinary units that flushes subnormals to zero.
    #[default]
    Unknown,
}

/// The number of products in one step of Hopper's `wgmma`.
const STEP: usize = 16;
/// The error of one step of `wgmma`, relative to the largest magnitude in the step: (K + 1)·2^-F + 2^-23 with K = 16
/// products and F = 25 fractional bits.
const KAPPA: f64 = 17.0 / (1u64 << 25) as f64 + 1.0 / (1u64 << 23) as f64;

/// Returns the most pieces of a length that `n` numbers touch, in so many intervals. Each interval touches one more
/// than it fills, since it may begin anywhere.
pub(super) fn touched(n: usize, intervals: usize, length: usize) -> usize {
    n.div_ceil(length.max(1)) + 2 * intervals.max(1) - 1
}

/// Returns the most steps that `n` products in so many intervals touch, in sums that are cut into tiles and, from each
/// tile's start, into steps.
fn steps(n: usize, intervals: usize, tile: usize) -> usize {
    let tile = tile.max(1);
    let most = if tile < STEP || tile.is_multiple_of(STEP) {
        touched(n, intervals, tile.min(STEP))
    } else {
        touched(n, intervals, tile) * tile.div_ceil(STEP)
    };
    most.min(n)
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
            Accumulation::WgmmaTruncating => n.div_ceil(STEP) as f64 * KAPPA,
            Accumulation::Unknown => {
                Accumulation::F32Serial.products(n).max(Accumulation::WgmmaTruncating.products(n))
            }
        }
    }

    /// Returns `g` of `n` products of a longer sum, in so many intervals of it. The sum is cut into tiles, and the
    /// tiles into steps of the matrix unit.
    pub fn cut_products(self, n: usize, intervals: usize, tile: usize) -> f64 {
        let steps = || KAPPA * steps(n, intervals, tile) as f64;
        match self {
            Accumulation::WgmmaTruncating => steps(),
            Accumulation::Unknown => Accumulation::F32Serial.products(n).max(steps()),
            _ => self.products(n),
        }
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
            Accumulation::F32Serial | Accumulation::Unknown => n + tiles + 1,
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
            Accumulation::F32Serial | Accumulation::Unknown => gamma(n + 1),
            Accumulation::F32Tree(width) => gamma(tree_roundings(n, width) + 1),
            Accumulation::WgmmaTruncating => gamma(n.div_ceil(16) + 6),
        }
    }

    /// Returns `g` of dq: products over `n` keys in so many intervals, `tile` of them at a time, with the tiles' results
    /// added in any order.
    pub fn tiled_products(self, n: usize, intervals: usize, tile: usize) -> f64 {
        let added = gamma(touched(n, intervals, tile));
        match self {
            Accumulation::WgmmaTruncating => {
                let steps = steps(n, intervals, tile).min(tile.div_ceil(STEP).max(1));
                KAPPA * steps as f64 + added
            }
            _ => self.products(n) + added,
        }
    }

    /// Whether products are aligned by the exponents of their factors. A subnormal factor has its format's smallest
    /// exponent.
    pub(super) fn aligns(self) -> bool {
        matches!(self, Accumulation::WgmmaTruncating | Accumulation::Unknown)
    }

    /// Returns the most that one operation may lose to underflow.
    #[inline]
    pub fn underflow(self) -> f64 {
        match self {
            Accumulation::F32Serial | Accumulation::F32Tree(_) => F32_SUBNORMAL_STEP,
            Accumulation::WgmmaTruncating | Accumulation::Unknown => F32_NORMAL_MIN,
        }
    }
}

fn tree_roundings(n: usize, width: NonZeroUsize) -> usize {
    let width = width.get();
    n.div_ceil(width) + width.next_power_of_two().trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::{Accumulation, KAPPA, STEP, steps};

    /// Test that dq's sum counts what two intervals touch: a sink token and a window of 18 keys, four steps of one tile.
    #[test]
    fn a_sum_over_keys_counts_the_steps_of_both_intervals() {
        let [one, two] =
            [1, 2].map(|intervals| Accumulation::WgmmaTruncating.tiled_products(19, intervals, 128));
        assert!(two >= 4.0 * KAPPA && one < 4.0 * KAPPA, "{one} and {two}");
    }

    #[test]
    fn two_intervals_touch_no_more_steps_than_counted() {
        for tile in [1, 3, 8, 16, 20, 32, 48] {
            let step = |product: usize| (product / tile, product % tile / STEP);
            for (first, second) in (1..20usize).flat_map(|a| (1..20usize).map(move |b| (a, b))) {
                for (start, gap) in (0..tile).flat_map(|start| (1..tile + 2).map(move |gap| (start, gap))) {
                    let end = start + first;
                    let products = (start..end).chain(end + gap..end + gap + second);
                    let mut places: Vec<(usize, usize)> = products.map(step).collect();
                    places.dedup();
                    let most = steps(first + second, 2, tile);
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
        for tile in 1..=50 {
            for n in 0..=70 {
                let step = |product: usize| (product / tile, product % tile / STEP);
                let touched = |start: usize| {
                    let mut places: Vec<(usize, usize)> = (start..start + n).map(step).collect();
                    places.dedup();
                    places.len()
                };
                let most = (0..tile).map(touched).max().unwrap_or(0);
                assert!(most <= steps(n, 1, tile), "{n} products in tiles of {tile}: {most}");
                let whole = tile <= STEP || tile % STEP == 0;
                assert!(!whole || n < 2 || most + 1 >= steps(n, 1, tile), "{n} in tiles of {tile}: {most}");
            }
        }
    }
}
