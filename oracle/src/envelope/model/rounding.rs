//! The errors of single roundings and exponentials.

use crate::envelope::constants::EXP_ERROR;
use crate::{Format, Stored};

/// The largest unit roundoff of a format whose roundings may be noise, that of bf16. A certificate asks for a quarter of
/// a binade, which is 31 of bf16's cells. In FP8 it is two, of which weights may fill one in part and err one way.
const NOISE_UNIT_MOST: f64 = 1.0 / 256.0;
/// The largest exponent of a bound. A bound past this limit says nothing, and the limit keeps `exp` finite.
pub(super) const EXPONENT_MAX: f64 = 60.0;

/// The rounding of one weight.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// The largest magnitude of the rounding.
    pub most: f64,
    /// Whether the rounding may be taken as noise. Below the normal range a value may vanish, which is no noise.
    pub is_noise: bool,
}

/// Returns how far `e^(log p ± error)` can be from `p = e^(log p)`, for an error ≥ 0 of the exponent. Up to an error of
/// 1 the bound is `p·(error + error²)`, since `e^x − 1 ≤ x + x²` there. Past 1, p itself may have underflowed while the
/// computed weight has not, or the other way round, and the bound is the larger of p and the largest computed weight.
#[inline(always)]
pub(super) fn exponential_error(p: f64, log_p: f64, error: f64) -> f64 {
    if error <= 1.0 {
        p * (error + error * error)
    } else {
        libm::exp((log_p + error).min(EXPONENT_MAX)).max(p)
    }
}

/// Returns the error of rounding a value of magnitude `magnitude` to `format`: relative `u`, or the floor of its
/// subnormals, or what lies past the largest number that the format holds.
#[inline(always)]
pub(super) fn rounding(format: Format, magnitude: f64, floor: f64, largest: f64) -> Rounding {
    let relative = format.unit_roundoff() * magnitude;
    let is_noise = relative >= floor && format.unit_roundoff() <= NOISE_UNIT_MOST;
    Rounding { most: relative.max(magnitude.min(floor)).max(magnitude - largest), is_noise }
}

/// Returns the largest number of a format that saturates, and infinity for one that does not.
pub(super) fn saturation(format: Format) -> f64 {
    if format.saturates() { format.max_finite() } else { f64::INFINITY }
}

/// Part of the distance to the middle of two numbers within which a value may lie and be no near-tie, whatever f64 adds.
const CLEAR: f64 = 0.999;

/// Returns the rounded value, and how far from the rounded value another one within `error` can be rounded: 0 apart
/// from near-ties.
#[inline(always)]
pub(super) fn replayed(format: Format, value: f64, error: f64) -> (f64, f64) {
    let rounded = format.round(value);
    // Nearly every value is so far from the middle of two numbers that nobody has to round its neighbours.
    if (value - rounded).abs() + error < CLEAR * format.reach(rounded) {
        return (rounded, 0.0);
    }
    let apart = |other: f64| (format.round(other) - rounded).abs();
    (rounded, apart(value + error).max(apart((value - error).max(0.0))))
}

/// Returns the error of rounding a result of at most this magnitude, where the result does not overflow. An infinity
/// stands for any value past the format's largest, and the judge compares it as such. An exact result is cut to the range
/// of a format that saturates.
#[inline(always)]
pub(super) fn final_rounding(stored: Stored, magnitude: f64) -> f64 {
    stored.half_spacing(magnitude.min(stored.most()))
}

/// Returns the share of a weight that saturation may take, where 1 is multiplied by this factor.
pub(super) fn weight_lost(p: Format, factor: f64) -> f64 {
    (1.0 + EXP_ERROR - saturation(p) / factor).max(0.0)
}
