//! `exp` over a slice, in plain arithmetic that a compiler turns into vector code. The bits are the same on every
//! machine.
//!
//! With `x = k·ln 2 + r` and |r| ≤ ln 2 / 2, `exp(x) = 2^k · exp(r)`. exp(r) is computed as its Taylor polynomial of
//! degree 13 (remainder below 4e-18). ln 2 is subtracted in two parts. The first part has trailing zeros, which keeps r
//! accurate.

use std::f64::consts::LOG2_E;

use multiversion::multiversion;

use crate::lanes::map_blocks;

/// ln 2 in two parts: its upper 33 bits, whose products with |k| < 2^20 are exact, and the rest.
const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
/// The number 1.5·2^52. Adding it rounds to an integer, whose low bits end up in the low bits of the sum.
const ROUND: f64 = 6_755_399_441_055_744.0;
/// The argument below which exp is about the smallest normal number or less. 0 is close enough for a weight.
const UNDERFLOW: f64 = -708.0;
/// The argument above which exp overflows. Weights never get here.
const OVERFLOW: f64 = 709.0;
/// The Taylor coefficients 1/13!, 1/12!, …, 1/1!, 1/0!.
const TAYLOR: [f64; 14] = [
    1.0 / 6_227_020_800.0,
    1.0 / 479_001_600.0,
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
];

/// Replaces each x by exp(x), within 4 ulp; 0 below −708.
#[multiversion(targets("x86_64+avx512f+avx512dq+avx2+fma", "x86_64+avx2+fma"))]
pub(super) fn exp(values: &mut [f64]) {
    map_blocks(values, exp_one);
}

#[inline(always)]
fn exp_one(x: f64) -> f64 {
    let clamped = x.clamp(UNDERFLOW, OVERFLOW);
    let shifted = clamped * LOG2_E + ROUND;
    let k = shifted - ROUND;
    let r = (clamped - k * LN2_HIGH) - k * LN2_LOW;
    let mantissa = TAYLOR.iter().fold(0.0, |sum, coefficient| sum * r + coefficient);
    let scaled = f64::from_bits((shifted.to_bits() << 52).wrapping_add(mantissa.to_bits()));
    if x < UNDERFLOW { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_library_function() {
        for step in -70_800..3_000 {
            let x = f64::from(step) * 0.01 + 0.003;
            let (got, right) = (exp_one(x), libm::exp(x));
            assert!((got - right).abs() <= 4.0 * f64::EPSILON * right, "exp({x}): {got} against {right}");
        }
        for length in 0..20 {
            let arguments: Vec<f64> = (0..length).map(|n| 3.1 - 40.7 * f64::from(n)).collect();
            let mut got = arguments.clone();
            exp(&mut got);
            assert!(got.into_iter().eq(arguments.into_iter().map(exp_one)), "{length} numbers");
        }
        assert_eq!(exp_one(0.0), 1.0);
        assert_eq!(exp_one(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp_one(-1e300), 0.0);
        assert!(exp_one(f64::NAN).is_nan());
    }
}
