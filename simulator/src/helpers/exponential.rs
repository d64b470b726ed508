//! e^x and ln(e^a + e^b) in f32, in steps that a GPU takes at the speed of its memory. The merges of the helper kernels
//! take their weights from them.
//!
//! Every step is one IEEE operation: a sum, a product, or a product that is added with one rounding. There is no
//! division, and no bit depends on the machine. The polynomials are minimax fits to relative error, rounded to f32.
//! Over all arguments (see the tests), e^x is within 1.1 ulp and ln(1 + e) within 1.6 ulp of the exact number. The CPU
//! device's own merges use libm and differ by a similar amount.

/// ln 2 in two parts. Products of the first part and a whole number below 2^9 are exact.
const LN_2: [f32; 2] = [0.693_145_75, 1.4286068e-06];
/// 1.5 · 2^23. Adding it rounds to an integer, which is then in the lowest bits.
const ROUNDER: f32 = 12_582_912.0;
/// `(e^r − 1 − r) / r²` for |r| up to half of ln 2, the highest power first.
const EXPONENTIAL: [f32; 5] = [0.001_381_454, 0.008_368_745, 0.041_668_39, 0.166_665_21, 0.499_999_94];
/// `(ln(1 + e) − e) / e²` for e from 0 to 1, the highest power first.
const LOGARITHM: [f32; 9] = [
    -0.003_318_474_6,
    0.020_204_594,
    -0.057_664_46,
    0.106_805_57,
    -0.153_553_98,
    0.196_954_01,
    -0.249_585_88,
    0.333_305_12,
    -0.499_999_3,
];
/// Ends of the range of x, within f32's normal numbers. Below the first, e^x counts as 0; above the second, as
/// infinite.
const ENDS: [f32; 2] = [-87.0, 88.0];

fn series(coefficients: &[f32], x: f32) -> f32 {
    let [first, rest @ ..] = coefficients else { return 0.0 };
    rest.iter().fold(*first, |sum, &coefficient| libm::fmaf(sum, x, coefficient))
}

/// Returns e^x; 0 below −87, infinite above 88.
pub fn exp(x: f32) -> f32 {
    if x < ENDS[0] {
        return 0.0;
    }
    if x > ENDS[1] {
        return f32::INFINITY;
    }
    let shifted = libm::fmaf(x, std::f32::consts::LOG2_E, ROUNDER);
    let k = shifted - ROUNDER;
    let r = libm::fmaf(k, -LN_2[1], libm::fmaf(k, -LN_2[0], x));
    let power = 1.0 + libm::fmaf(series(&EXPONENTIAL, r), r * r, r);
    power * f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0_f32.to_bits()))
}

/// Returns ln(1 + e) for e from 0 to 1.
pub fn log_of_one_and(e: f32) -> f32 {
    libm::fmaf(series(&LOGARITHM, e), e * e, e)
}

/// Returns `ln(e^a + e^b)`. −∞ is the identity, also for two −∞, whose difference is taken as 0. NaN stays.
pub fn log_add(a: f32, b: f32) -> f32 {
    let difference = if a == b { 0.0 } else { a - b };
    a.max(b) + log_of_one_and(exp(-difference.abs()))
}

/// Returns `e^(a − total)`; 0 for an empty a.
pub fn share(a: f32, total: f32) -> f32 {
    if a == f32::NEG_INFINITY { 0.0 } else { exp(a - total) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the distance from an exact number in units of the last place of the nearest f32.
    fn ulps(got: f32, exact: f64) -> f64 {
        let nearest = exact as f32;
        let unit = f64::from(nearest.next_up()) - f64::from(nearest);
        (f64::from(got) - exact).abs() / unit
    }

    /// Returns every 97th f32 in a range of positive numbers, and both ends.
    fn samples(from: f32, to: f32) -> impl Iterator<Item = f32> {
        (from.to_bits()..=to.to_bits()).step_by(97).chain([to.to_bits()]).map(f32::from_bits)
    }

    #[test]
    fn e_to_the_x_is_within_1_1_ulp() {
        let both = |x: f32| [x, -x].into_iter().filter(|x| ENDS[0] <= *x && *x <= ENDS[1]);
        let errors = samples(1e-9, 88.0).flat_map(both).map(|x| (ulps(exp(x), libm::exp(f64::from(x))), x));
        let (worst, x) = errors.fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a });
        assert!(worst <= 1.1, "{worst} ulp at {x}");
        assert!(worst > 0.5, "{worst}: the measure is too kind");
        assert_eq!([exp(0.0), exp(-0.0), exp(f32::NEG_INFINITY)], [1.0, 1.0, 0.0]);
        assert_eq!([exp(-87.000_01), exp(88.000_01)], [0.0, f32::INFINITY]);
    }

    #[test]
    fn ln_of_one_and_e_is_within_1_6_ulp() {
        let errors = samples(1e-30, 1.0).map(|e| (ulps(log_of_one_and(e), libm::log1p(f64::from(e))), e));
        let (worst, e) = errors.fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a });
        assert!(worst <= 1.6, "{worst} ulp at {e}");
        assert_eq!(log_of_one_and(0.0), 0.0);
    }

    #[test]
    fn minus_infinity_is_the_identity_and_order_does_not_show() {
        for a in [f32::NEG_INFINITY, -3.5, 0.0, -0.0, 1e-30, 88.5, 1e30] {
            assert_eq!([log_add(a, f32::NEG_INFINITY), log_add(f32::NEG_INFINITY, a)], [a, a]);
            assert!(log_add(a, f32::NAN).is_nan() && log_add(f32::NAN, a).is_nan());
            for b in [-3.4_f32, 0.25, 100.0] {
                assert_eq!(log_add(a, b), log_add(b, a));
            }
        }
        assert_eq!(log_add(1.0, 1.0), 1.0 + std::f32::consts::LN_2);
        assert_eq!(share(f32::NEG_INFINITY, f32::NEG_INFINITY), 0.0);
    }
}
