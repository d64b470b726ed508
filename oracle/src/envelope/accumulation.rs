//! How a subject sums, and what that costs: the factors of a sum's magnitudes that bound its error.

use super::constants::{F32_ROUNDOFF, ROW_SUM_TAIL};

/// Smallest normal f32: what a unit that flushes subnormals to zero may lose.
const F32_NORMAL_MIN: f64 = f32::MIN_POSITIVE as f64;
/// The smallest subnormal f32: more than gradual underflow may lose.
const F32_SUBNORMAL_STEP: f64 = 1.401_298_464_324_817e-45;

/// How a subject sums, as it declares. All of its sums: where some are made in one way and others in another, it declares
/// one whose bounds hold for each. Sums in less than f32 fit none of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accumulation {
    /// One after the other in f32, each product and each sum rounded to nearest, subnormals kept. No term passes through more
    /// roundings in any other order, nor with fused multiplication and addition, nor in f64: this holds for any mix of
    /// those, where subnormals are kept.
    F32Serial,
    /// `width` serial partial sums in f32, then a binary tree over them, in every sum: tighter than the serial one.
    F32Tree {
        /// Partial sums; at least 1.
        width: usize,
    },
    /// Hopper's `wgmma`: 16 products and the addend aligned to the largest exponent, cut to 25 fractional bits, the
    /// result truncated to f32. Row sums are FlashAttention-3's: four threads a row, then a shuffle.
    WgmmaTruncating,
    /// Not declared: for each sum the weaker of the serial one and the tensor core's. Also for a subject that has both, and
    /// for one on ordinary units that flushes subnormals to zero.
    Unknown,
}

/// Products of one step of Hopper's `wgmma`.
const STEP: usize = 16;
/// Error of one such step relative to the largest magnitude in it: (K + 1)·2^-F + 2^-23 with K = 16 products and
/// F = 25 fractional bits.
const KAPPA: f64 = 17.0 / (1u64 << 25) as f64 + 1.0 / (1u64 << 23) as f64;

/// Steps that `n` neighbouring products touch, of sums that are cut into tiles and, from each tile's start, into steps:
/// one more than they fill, since they may begin anywhere.
fn steps(n: usize, tile: usize) -> usize {
    let tile = tile.max(1);
    let touched = if tile < STEP || tile.is_multiple_of(STEP) {
        n.div_ceil(tile.min(STEP)) + 1
    } else {
        (n.div_ceil(tile) + 1) * tile.div_ceil(STEP)
    };
    touched.min(n)
}

/// `γ_n`: n roundings of f32.
fn gamma(roundings: usize) -> f64 {
    let n = roundings as f64 * F32_ROUNDOFF;
    n / (1.0 - n)
}

impl Accumulation {
    /// `g(n)`: error of a matrix unit's sum of `n` products, relative to the sum of their magnitudes.
    pub fn products(self, n: usize) -> f64 {
        match self {
            Accumulation::F32Serial => gamma(n + 1),
            Accumulation::F32Tree { width } => gamma(tree_roundings(n, width) + 1),
            Accumulation::WgmmaTruncating => n.div_ceil(STEP) as f64 * KAPPA,
            Accumulation::Unknown => {
                Accumulation::F32Serial.products(n).max(Accumulation::WgmmaTruncating.products(n))
            }
        }
    }

    /// `g` of a sum of `n` neighbouring products of a longer sum that is cut into tiles, and the tiles into steps of the
    /// matrix unit.
    pub fn cut_products(self, n: usize, tile: usize) -> f64 {
        let steps = || KAPPA * steps(n, tile) as f64;
        match self {
            Accumulation::WgmmaTruncating => steps(),
            Accumulation::Unknown => Accumulation::F32Serial.products(n).max(steps()),
            _ => self.products(n),
        }
    }

    /// Relative error of a row sum of `n` positive terms that are added tile by tile. Ordinary units add them, which
    /// round to nearest.
    pub fn row_sum(self, n: usize, tiles: usize) -> f64 {
        gamma(self.row_sum_roundings(n, tiles))
    }

    /// The same in tier T.
    pub fn row_sum_dithered(self, n: usize, tiles: usize) -> f64 {
        let roundings = self.row_sum_roundings(n, tiles);
        // Partial sums exceed the exact ones by `γ` at most.
        let tail = ROW_SUM_TAIL * F32_ROUNDOFF * (roundings as f64).sqrt() * (1.0 + gamma(roundings));
        tail.min(gamma(roundings))
    }

    /// Roundings that a term of a row sum passes through at most.
    fn row_sum_roundings(self, n: usize, tiles: usize) -> usize {
        match self {
            Accumulation::F32Serial | Accumulation::Unknown => n + tiles + 1,
            Accumulation::F32Tree { width } => tree_roundings(n, width) + tiles + 1,
            Accumulation::WgmmaTruncating => n.div_ceil(4) + tiles + 4,
        }
    }

    /// Error of `rowsum(dout · out)` over `n` lanes on ordinary units, relative to the sum of magnitudes.
    pub fn row_dot(self, n: usize) -> f64 {
        match self {
            Accumulation::F32Serial | Accumulation::Unknown => gamma(n + 1),
            Accumulation::F32Tree { width } => gamma(tree_roundings(n, width) + 1),
            Accumulation::WgmmaTruncating => gamma(n.div_ceil(16) + 6),
        }
    }

    /// `g` of dq: products over `n` keys, `tile` of them at a time, the tiles' results added in any order.
    pub fn tiled_products(self, n: usize, tile: usize) -> f64 {
        match self {
            Accumulation::WgmmaTruncating => {
                let steps = steps(n, tile).min(tile.div_ceil(STEP).max(1));
                KAPPA * steps as f64 + gamma(n.div_ceil(tile.max(1)) + 1)
            }
            _ => self.products(n) + gamma(n.div_ceil(tile.max(1)) + 1),
        }
    }

    /// Whether products are aligned by the exponents of their factors, of which a subnormal's is its format's smallest.
    pub(super) fn aligns(self) -> bool {
        matches!(self, Accumulation::WgmmaTruncating | Accumulation::Unknown)
    }

    /// What one operation may lose to underflow.
    #[inline]
    pub fn underflow(self) -> f64 {
        match self {
            Accumulation::F32Serial | Accumulation::F32Tree { .. } => F32_SUBNORMAL_STEP,
            Accumulation::WgmmaTruncating | Accumulation::Unknown => F32_NORMAL_MIN,
        }
    }
}

fn tree_roundings(n: usize, width: usize) -> usize {
    let width = width.max(1);
    n.div_ceil(width) + width.next_power_of_two().trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::{STEP, steps};

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
                assert!(most <= steps(n, tile), "{n} products in tiles of {tile}: {most}");
                let whole = tile <= STEP || tile % STEP == 0;
                assert!(!whole || n < 2 || most + 1 >= steps(n, tile), "{n} in tiles of {tile}: {most}");
            }
        }
    }
}
