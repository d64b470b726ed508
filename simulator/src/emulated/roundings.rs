//! [`Roundings`]: the formats to which a kernel rounds, the factors with which it does, and the places.

use seamproof_oracle::{Format, OwnScales, Quantity, TensorName};

use crate::Real;

/// A scale, with which numbers are multiplied before they are rounded, and the descale that turns codes into values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factor {
    /// The factor before a rounding.
    pub scale: f32,
    /// The factor after it.
    pub descale: f32,
}

impl Factor {
    /// That of numbers which are rounded as they are.
    pub const ONE: Factor = Factor { scale: 1.0, descale: 1.0 };

    /// Returns the factor of a descale: the scale is its rounded reciprocal.
    pub fn of(descale: f32) -> Factor {
        Factor { scale: 1.0 / descale, descale }
    }

    /// Turns numbers into codes of a format.
    pub(super) fn quantise<T: Real>(self, values: &mut [T], format: Format) {
        if self != Factor::ONE {
            values.iter_mut().for_each(|value| *value *= T::from_f32(self.scale));
        }
        T::round_all(values, format);
    }
}

/// The factors of what a kernel quantises.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors {
    /// That of weights.
    pub p: Factor,
    /// That of logit gradients.
    pub ds: Factor,
    /// That of the output. A launch returns codes, and the backward's D takes the descale.
    pub out: Factor,
    /// That of the queries' gradient, of which a launch returns codes too.
    pub dq: Factor,
    /// That of the keys' gradient.
    pub dk: Factor,
    /// That of the values' gradient.
    pub dv: Factor,
}

impl Factors {
    /// Those of a kernel that is given none.
    pub const NONE: Factors = Factors {
        p: Factor::ONE,
        ds: Factor::ONE,
        out: Factor::ONE,
        dq: Factor::ONE,
        dk: Factor::ONE,
        dv: Factor::ONE,
    };

    /// Returns the factors of given descales.
    pub fn of(own: &OwnScales) -> Factors {
        let of = |quantity| Factor::of(own.of(quantity));
        let [p, ds, out, dq, dk, dv] = Quantity::ALL.map(of);
        Factors { p, ds, out, dq, dk, dv }
    }

    /// Returns the factor of a gradient.
    pub(super) fn of_gradient(&self, gradient: TensorName) -> Factor {
        match gradient {
            TensorName::Dq => self.dq,
            TensorName::Dk => self.dk,
            _ => self.dv,
        }
    }
}

/// Roundings of a kernel, and the places where it makes them. [`Roundings::new`] are those of a FlashAttention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roundings {
    /// Format of the rounded weights.
    pub p: Format,
    /// Format of the rounded logit gradients.
    pub ds: Format,
    /// Whether weights are divided by the row's sum before they are rounded. The forward then goes over its tiles
    /// twice.
    pub normalises_first: bool,
    /// Whether D is `Σ P·dP` over the keys of a launch, which must be all keys of its rows. Otherwise it is
    /// `rowsum(dout · out)` of the out that is stored.
    pub weighs_dots: bool,
    /// Format in which dk and dv of each query head are stored before they are summed over a group; `None` where they
    /// stay in registers.
    pub stored_heads: Option<Format>,
    /// Whether the soft cap's `tanh` has 11 bits, as `tanh.approx.f32` has.
    pub coarse_cap: bool,
    /// Whether dS is made of rounded weights, and D of the same where it is `Σ P·dP`.
    pub rounds_ds_weights: bool,
    /// The power of two with which weights are multiplied before they are rounded, and by which their sums of values
    /// and of dout are divided, as exponent.
    pub weight_exponent: u8,
    /// Whether dS of a tile is multiplied by a power of two before it is rounded, and its products are divided by it.
    pub scales_tiles: bool,
    /// Whether the softmax's scale is a factor of dS before it is rounded. Otherwise it comes to the sums.
    pub folds_scale: bool,
    /// The given factors of what the kernel quantises.
    pub factors: Factors,
    /// Whether the kernel keeps the largest magnitudes of what it quantises.
    pub keeps_amax: bool,
}

impl Roundings {
    /// Returns the roundings of a FlashAttention with these formats of P and dS.
    pub const fn new(p: Format, ds: Format) -> Roundings {
        Roundings {
            p,
            ds,
            normalises_first: false,
            weighs_dots: false,
            stored_heads: None,
            coarse_cap: false,
            rounds_ds_weights: false,
            weight_exponent: 0,
            scales_tiles: false,
            folds_scale: false,
            factors: Factors::NONE,
            keeps_amax: false,
        }
    }
}
