//! Names and windows of the field, both ways. A name must show what its options say, and a mask written in a form
//! must come back as one that shows the same.

use seamproof_oracle::Mask;
use seamproof_oracle::names::{FaMask, Lengths, TeKind, TeMask};

/// Checks every conversion of these options for one shape. `pick` selects a kind and a flag. A side of the window
/// beyond ±100 is the largest of its form.
///
/// # Panics
/// Panics where a conversion shows other pairs.
pub fn masks(pick: u8, window: [i8; 2], lengths: [u8; 2]) {
    let [left, right] = window.map(side);
    let shape = lengths.map(|length| usize::from(length % 12));
    let kind = TeKind::ALL[usize::from(pick) % TeKind::ALL.len()];
    let flag = [None, Some(false), Some(true)][usize::from(pick / 8) % 3];
    let pair = (pick < 128).then_some((left, right));
    if let Ok(mask) = (TeMask { kind, window: pair, bottom_right_diagonal: flag }).to_mask() {
        both_ways(&mask, shape);
    }
    for causal in [false, true] {
        let told = FaMask { causal, window: (left, right) };
        let Ok(mask) = told.to_mask() else {
            assert!(left < -1 || right < -1, "{told:?} is refused");
            continue;
        };
        assert_eq!(pairs(&mask, shape), fa_pairs(&told, shape), "{told:?} {shape:?}");
        both_ways(&mask, shape);
    }
    assert_eq!(kind.name().parse(), Ok(kind));
}

fn side(side: i8) -> i32 {
    match side {
        101.. => i32::MAX,
        ..=-101 => i32::MIN,
        near => near.into(),
    }
}

/// Converts the mask to both forms and back, for all that may be known about lengths.
fn both_ways(mask: &Mask, shape: [usize; 2]) {
    for dense in [false, true] {
        let lengths = Lengths { square: shape[0] == shape[1], dense };
        let told = TeMask::from_mask(mask, lengths).map(TeMask::to_mask);
        if let Ok(back) = told {
            let back = back.unwrap_or_else(|error| panic!("{mask:?} is told as what is refused: {error}"));
            assert_eq!(pairs(&back, shape), pairs(mask, shape), "{mask:?} {lengths:?}");
        }
        if let Ok(told) = FaMask::from_mask(mask, lengths) {
            assert_eq!(fa_pairs(&told, shape), pairs(mask, shape), "{mask:?} {lengths:?}");
        }
    }
}

/// Returns the pairs that a mask shows.
fn pairs(mask: &Mask, [queries, keys]: [usize; 2]) -> Vec<(usize, usize)> {
    (0..queries).flat_map(|i| mask.visible(i, queries, keys).map(move |j| (i, j))).collect()
}

/// Returns the pairs that FlashAttention's options show, by their own rule:
/// `i + seqlen_k − seqlen_q − left ≤ j ≤ i + seqlen_k − seqlen_q + right`, with −1 for a side without bound
/// (<https://github.com/Dao-AILab/flash-attention>, `flash_attn_func`).
fn fa_pairs(told: &FaMask, [queries, keys]: [usize; 2]) -> Vec<(usize, usize)> {
    let (left, right) = (i64::from(told.window.0), if told.causal { 0 } else { told.window.1.into() });
    let shows = |i: usize, j: usize| {
        let diagonal = i as i64 + keys as i64 - queries as i64;
        let j = j as i64;
        (left == -1 || j >= diagonal - left) && (right == -1 || j <= diagonal + right)
    };
    (0..queries).flat_map(|i| (0..keys).map(move |j| (i, j))).filter(|&(i, j)| shows(i, j)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_hold_for_small_options() {
        for pick in 0..=255 {
            for window in (-3..=4).flat_map(|left| (-3..=4).map(move |right| [left, right])) {
                masks(pick, window, [pick / 7, pick / 3]);
            }
            masks(pick, [127, -128], [5, 7]);
            masks(pick, [127, 127], [7, 5]);
        }
    }
}
