//! E8M0: the format of a scale that is a power of two, in eight bits.
//!
//! Code c stands for 2^(c − 127), and code 255 for NaN. There is no sign, no zero and no infinity. Source: the OCP
//! Microscaling Formats (MX) Specification, section 5.4.1.

/// A scale in E8M0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct E8m0(u8);

/// The exponent of code 0, which is also the negative exponent of the largest code that is a number.
const BIAS: i32 = 127;

impl E8m0 {
    /// The code that stands for no number.
    pub const NAN: E8m0 = E8m0(255);

    /// Returns the scale of a code.
    pub fn from_code(code: u8) -> E8m0 {
        E8m0(code)
    }

    /// Returns the code.
    pub fn code(self) -> u8 {
        self.0
    }

    /// Returns `2^exponent`. An exponent past −127 or 127 gives that end of the range.
    pub fn of_exponent(exponent: i32) -> E8m0 {
        E8m0((exponent.clamp(-BIAS, BIAS) + BIAS) as u8)
    }

    /// Returns the least power of two that is not below `value`, as the conversion `cvt.rp.satfinite.ue8m0x2` of PTX
    /// does for values that are not negative. Past the largest power it is the largest, and NaN for NaN.
    pub fn at_least(value: f64) -> E8m0 {
        E8m0::near(value, |value, power| value > power)
    }

    /// Returns the largest power of two that is not above `value`, as `cvt.rz.satfinite.ue8m0x2` does for values that
    /// are not negative. Below the smallest power it is the smallest, and NaN for NaN.
    pub fn at_most(value: f64) -> E8m0 {
        E8m0::near(value, |_, _| false)
    }

    /// Returns the power of two at the bottom of the binade of `value`, or the next one where `goes_up` says so of the
    /// value and that power.
    fn near(value: f64, goes_up: fn(f64, f64) -> bool) -> E8m0 {
        if value.is_nan() {
            return E8m0::NAN;
        }
        if value <= 0.0 {
            return E8m0(0);
        }
        let exponent = libm::ilogb(value);
        let up = exponent.abs() <= BIAS && goes_up(value, libm::exp2(f64::from(exponent)));
        E8m0::of_exponent(exponent.saturating_add(i32::from(up)))
    }

    /// Returns the number that the code stands for. It is exact in f32 too, where the smallest is subnormal.
    pub fn value(self) -> f64 {
        match self {
            E8m0::NAN => f64::NAN,
            E8m0(code) => f64::from_bits(((i64::from(code) - i64::from(BIAS) + 1023) as u64) << 52),
        }
    }
}
