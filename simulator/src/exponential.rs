//! `e^x` in f32 over a slice, in plain arithmetic without branches, which a compiler turns into vector code. The bits are
//! those of libm's `expf`, and the same on every machine.
//!
//! These are the steps of FreeBSD's msun (`e_expf.c`), which libm takes too. With `x = k·ln 2 + r` and |r| ≤ ln 2 / 2,
//! `e^x = 2^k · e^r`, and `e^r = 1 + r + r·c / (2 − c)` with a polynomial c. ln 2 is subtracted in two parts.
//!
//! Copyright (C) 1993 by Sun Microsystems, Inc. Permission to use, copy, modify, and distribute this software is freely
//! granted, provided that this notice is preserved.

use std::f32::consts::LOG2_E;

use multiversion::multiversion;
use seamproof_oracle::lanes::map_blocks;

/// ln 2 in two parts: its upper bits, whose products with k are exact, and the rest.
const LN2_HIGH: f32 = 6.931_457_5e-1;
const LN2_LOW: f32 = 1.428_606_8e-6;
/// The coefficients of c.
const C1: f32 = 1.666_662_5e-1;
const C2: f32 = -2.766_733_3e-3;
/// The magnitudes, as bits, up to which k is 0, and up to which it is 1 or −1: 0.5 ln 2 and 1.5 ln 2.
const HALF: u32 = 0x3eb1_7218;
const ONE_AND_A_HALF: u32 = 0x3f85_1592;
/// The magnitude, as bits, up to which `e^x` is taken as 1 + x: 2^-13.
const TINY: u32 = 0x3900_0000;
/// The argument from which on `e^x` overflows, and that from which down it is 0.
const OVERFLOW: f32 = f32::from_bits(0x42b1_7218);
const UNDERFLOW: f32 = f32::from_bits(0xc2cf_f1b5);

/// Replaces each x by `e^x`.
#[multiversion(targets("x86_64+avx2+fma", "x86_64+sse4.1"))]
pub(crate) fn exp(values: &mut [f32]) {
    map_blocks(values, exp_one);
}

#[inline(always)]
fn exp_one(x: f32) -> f32 {
    let magnitude = x.to_bits() & 0x7fff_ffff;
    // Bounded, so that k is small. Results past the range are replaced below.
    let near = x.clamp(-128.0, 128.0);
    let half = 0.5f32.copysign(near);
    let far = (LOG2_E * near + half).trunc();
    let k = if magnitude > ONE_AND_A_HALF { far } else { 2.0 * half };
    let k = if magnitude > HALF { k } else { 0.0 };
    let (high, low) = (near - k * LN2_HIGH, k * LN2_LOW);
    let r = high - low;
    let square = r * r;
    let c = r - square * (C1 + square * C2);
    let mantissa = 1.0 + (r * c / (2.0 - c) - low + high);
    let scaled = scaled(mantissa, whole(k));
    let result = if magnitude <= TINY { 1.0 + x } else { scaled };
    let result = if x >= OVERFLOW { f32::INFINITY } else { result };
    let result = if x <= UNDERFLOW { 0.0 } else { result };
    if x.is_nan() { x } else { result }
}

/// Returns a whole number of a small magnitude as an integer. A conversion would look for NaN and for large numbers, one by
/// one.
#[inline(always)]
fn whole(number: f32) -> i32 {
    /// 1.5·2^23. Behind the sum's leading bits lies the number.
    const SHIFT: f32 = 12_582_912.0;
    ((number + SHIFT).to_bits() as i32).wrapping_sub(SHIFT.to_bits() as i32)
}

/// Returns a mantissa near 1 times 2^k, rounded once.
#[inline(always)]
fn scaled(mantissa: f32, k: i32) -> f32 {
    // Below the normal range the first factor leaves a normal number, so that the second alone rounds.
    let first = if k < -126 { -102 } else { k.min(127) };
    let power = |exponent: i32| f32::from_bits((exponent.wrapping_add(127) as u32) << 23);
    mantissa * power(first) * power(k.wrapping_sub(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_same(bits: impl Iterator<Item = u32>) {
        let arguments: Vec<f32> = bits.map(f32::from_bits).collect();
        let mut got = arguments.clone();
        exp(&mut got);
        for (x, got) in arguments.iter().zip(got) {
            let right = libm::expf(*x);
            let is_same = got.to_bits() == right.to_bits() || got.is_nan() && right.is_nan();
            assert!(is_same, "exp({x:e}): {got:e} against {right:e}");
        }
    }

    #[test]
    fn the_bits_are_those_of_the_library() {
        let edges = [0, HALF, ONE_AND_A_HALF, TINY, 0x42ae_ac50, 0x42b1_7218, 0x42cf_f1b5, 0x7f80_0000];
        let near = edges.into_iter().flat_map(|edge: u32| edge.saturating_sub(500)..edge + 500);
        assert_same(near.flat_map(|bits| [bits, bits | 1 << 31]));
        // A prime step meets every exponent and low bits of all kinds.
        assert_same((0..u32::MAX).step_by(2003));
    }

    /// Test that vector code, where the processor has it, and code without it give the same bits, for slices of any length.
    #[test]
    fn vector_code_gives_the_bits_of_plain_code() {
        for length in 0..40 {
            let arguments: Vec<f32> = (0..length).map(|n| (n as f32 - 20.0) * 5.3).collect();
            let mut got = arguments.clone();
            exp(&mut got);
            let plain = arguments.iter().map(|&x| exp_one(x).to_bits());
            assert!(got.iter().map(|x| x.to_bits()).eq(plain), "{arguments:?}");
        }
    }

    #[test]
    #[ignore = "every f32 takes half a minute"]
    fn every_number_has_the_bits_of_the_library() {
        for chunk in 0..=0xffu32 {
            assert_same((0..=0xff_ffffu32).map(|low| chunk << 24 | low));
        }
    }
}
