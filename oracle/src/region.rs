//! Sequence-parallel regions: what a problem means where each rank of its group is a region of several ranks.
//!
//! The ranks of a region share the work of one rank by heads. Between regions, token rows are cut among them, so that
//! norms and the like are not computed twice (sequence parallelism as in
//! [Megatron-LM](https://arxiv.org/abs/2205.05198)). A *hidden row* is such a row, of every head, as it enters or
//! leaves:
//!
//! ```text
//! hidden q, k, v ─ gather of rows ─ column-parallel layer ─ rotation of q, k ─┐
//!                                                                attention of the rank's heads
//!     hidden out ─ sum, and scatter of rows ─ row-parallel layer ─────────────┘
//! ```
//!
//! The backward is the mirror image: it takes hidden rows of dout, and returns hidden rows of dq, dk and dv, after dq
//! and dk are rotated back. lse, max_logit, the sink and dsink stay with their heads.
//!
//! The problem's own tensors are those at attention, so a region changes nothing of its answer: it says how the rows
//! are given and returned. Both layers and the rotation are exact in every format, and so is the way from hidden rows
//! to the problem's own and back.
//!
//! - *Layers.* The weights are 0 and 1. Head h of a hidden row becomes head h of the tensor. A rank's summand of a
//!   hidden row holds the rank's own heads, and zeros in all others.
//! - *Rotation.* The n lanes of a row at position p of its sequence are the coefficients of a polynomial, which is
//!   multiplied by x^p modulo x^n + 1 ([`rotated`]). As with rotary embeddings, the product of two rotated rows depends
//!   on their rows and on the difference of their positions alone.
//!
//! A KV head that several ranks of a region hold has a partial dk and dv on each of them. Each is stored as a gradient
//! is, and the region adds them up: that alone rounds.

use std::ops::Neg;

/// Returns a row of q, k, dq or dk at attention, given its hidden row, and its position in its sequence: lane j moves
/// `position` lanes to the end, and comes back at the front with the other sign.
pub fn rotated<T: Copy + Neg<Output = T>>(hidden: &[T], position: usize) -> Vec<T> {
    let lanes = hidden.len();
    let from = |lane: usize| (lane + 2 * lanes - position % (2 * lanes)) % (2 * lanes);
    let value = |from: usize| if from < lanes { hidden[from] } else { -hidden[from - lanes] };
    (0..lanes).map(|lane| value(from(lane))).collect()
}

/// Returns the hidden row of a row at attention: undoes [`rotated`].
pub fn rotated_back<T: Copy + Neg<Output = T>>(row: &[T], position: usize) -> Vec<T> {
    // x^2n is 1: a whole turn and its half with the other sign bring every lane back.
    let turns = 2 * row.len();
    rotated(row, turns - position.checked_rem(turns).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(a: &[i32], b: &[i32]) -> i32 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    #[test]
    fn a_rotation_moves_lanes_and_turns_signs() {
        let row = [1, 2, 3];
        let expected = [[1, 2, 3], [-3, 1, 2], [-2, -3, 1], [-1, -2, -3], [3, -1, -2], [1, 2, 3]];
        for (position, expected) in [0, 1, 2, 3, 4, 6].into_iter().zip(expected) {
            assert_eq!(rotated(&row, position), expected, "position {position}");
        }
        assert_eq!([0, 1, 2].map(|position| rotated(&[7], position)[0]), [7, -7, 7]);
        assert!(rotated::<i32>(&[], 3).is_empty());
    }

    #[test]
    fn a_rotation_is_undone() {
        for position in 0..13 {
            assert_eq!(rotated_back(&rotated(&[1, 2, 3], position), position), [1, 2, 3], "{position}");
        }
        assert!(rotated_back::<i32>(&[], 3).is_empty());
    }

    #[test]
    fn the_product_of_two_rows_depends_on_the_difference_of_their_positions() {
        let (q, k) = ([5, -1, 2, 8], [3, 3, -4, 1]);
        for (i, j) in (0..9).flat_map(|i| (0..9).map(move |j| (i, j))) {
            let both = |i, j| product(&rotated(&q, i), &rotated(&k, j));
            assert_eq!(both(i, j), both(i + 5, j + 5));
            assert_ne!(both(i, j), both(i + 1, j), "{i} {j}");
        }
    }
}
