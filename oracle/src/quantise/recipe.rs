//! Recipes: from the largest magnitude of a group to its two factors.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{E8m0, Format};

/// The rule that makes a group's factors of its largest magnitude `a > 0`. `M` is the format's largest number times
/// `2^−margin`.
///
/// | rule | scale σ | descale δ |
/// |---|---|---|
/// | `f32` | `M / a`, rounded to f32; the largest f32 where that overflows | `1 / σ`, rounded to f32 |
/// | `power-of-two` | the largest power of two up to `M / a` | `1 / σ`, exactly |
/// | `e8m0-up` | as `power-of-two` | `1 / σ`, exactly |
/// | `e8m0-down` | `1 / δ`, exactly | `2^(⌊log₂ a⌋ − e + margin)` with e the exponent of the format's largest number |
///
/// Exponents of the last three are kept from −127 to 127. With the first three no value saturates while the margin is
/// not negative: a quotient that f32 rounds up leaves products below the midpoint past the largest number. With
/// `e8m0-down` values past the largest number saturate, which is legal there.
///
/// Where `a` is 0, σ and δ are 1 by the first two rules, and the factors of an earlier step in a
/// [`Delayed`](super::Delayed) recipe. By the last two δ is the least number of E8M0, 2^−127.
///
/// Sources: `f32` and `power-of-two` are
/// [`compute_scale_from_amax`](https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/recipe/recipe_common.cuh)
/// without and with `force_pow_2_scales`, `e8m0-up` is TransformerEngine's MXFP8, and `e8m0-down` the OCP Microscaling
/// Formats Specification, section 6.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum ScaleRule {
    F32,
    PowerOfTwo,
    E8m0Up,
    E8m0Down,
}

impl fmt::Display for ScaleRule {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            ScaleRule::F32 => "f32",
            ScaleRule::PowerOfTwo => "power-of-two",
            ScaleRule::E8m0Up => "e8m0-up",
            ScaleRule::E8m0Down => "e8m0-down",
        })
    }
}

/// The factors of a group: a value x has the code `Q(x · scale)`, and a code c stands for `c · descale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors {
    /// σ.
    pub scale: f32,
    /// δ.
    pub descale: f32,
}

impl Factors {
    /// The factors that change nothing.
    pub const ONE: Factors = Factors { scale: 1.0, descale: 1.0 };

    /// Returns the factors with this scale, and the descale that is its reciprocal rounded to f32.
    pub fn of_scale(scale: f32) -> Factors {
        Factors { scale, descale: 1.0 / scale }
    }

    /// Returns the factors whose descale is `2^exponent`, with the exponent kept from −127 to 127.
    fn of_exponent(exponent: i32) -> Factors {
        let exponent = exponent.clamp(-127, 127);
        let power = |exponent| E8m0::of_exponent(exponent).value() as f32;
        Factors { scale: power(-exponent), descale: power(exponent) }
    }
}

impl ScaleRule {
    /// Every rule.
    pub const ALL: [ScaleRule; 4] =
        [ScaleRule::F32, ScaleRule::PowerOfTwo, ScaleRule::E8m0Up, ScaleRule::E8m0Down];

    /// Whether descales are numbers of E8M0.
    pub fn is_e8m0(self) -> bool {
        matches!(self, ScaleRule::E8m0Up | ScaleRule::E8m0Down)
    }

    /// Returns the factors for a largest magnitude, which is finite; those for 0 are `otherwise`, or the rule's own.
    pub fn factors(self, format: Format, margin: i32, amax: f32, otherwise: Factors) -> Factors {
        let largest = libm::ldexp(format.max_finite(), -margin);
        match self {
            ScaleRule::F32 | ScaleRule::PowerOfTwo if amax == 0.0 => otherwise,
            ScaleRule::E8m0Up | ScaleRule::E8m0Down if amax == 0.0 => Factors::of_exponent(-127),
            ScaleRule::F32 => Factors::of_scale((largest as f32 / amax).min(f32::MAX)),
            ScaleRule::PowerOfTwo | ScaleRule::E8m0Up => {
                Factors::of_exponent(exponent_of_quotient(amax, largest))
            }
            ScaleRule::E8m0Down => {
                Factors::of_exponent(libm::ilogb(f64::from(amax)) - format.exponent_max() + margin)
            }
        }
    }
}

/// Returns the least e with `amax ≤ largest · 2^e`, exactly.
fn exponent_of_quotient(amax: f32, largest: f64) -> i32 {
    let amax = f64::from(amax);
    let exponent = libm::ilogb(amax) - libm::ilogb(largest);
    exponent + i32::from(amax > libm::ldexp(largest, exponent))
}
