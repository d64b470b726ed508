//! Kernels in FP8 with one wrong stage. They are not in the catalogue of this crate, whose kernels are
//! in 16 bits: the subject in FP8 plants them.

use seamproof_oracle::{Format, Pass, Softmax, TensorName};

use super::entry::{kernels, right};
use crate::emulated::{HeadRows, Online, Pair, Panel, RowSum, Stages, TileWeights, UnitArithmetic, Variant};

/// Weights are cut to their format towards zero.
pub const WEIGHTS_CUT_OFF: &dyn Variant = &WeightsCutOff;
/// Weights are rounded to fp16 before they are rounded to their format.
pub const WEIGHTS_ROUNDED_TWICE: &dyn Variant = &WeightsRoundedTwice;
/// Weights of the forward are rounded to bf16, with their given scale, before they are rounded to their format.
pub const WEIGHTS_THROUGH_BF16: &dyn Variant = &WeightsThroughBf16;
/// Weights and logit gradients of the backward are rounded to bf16, with their given scales, before they are rounded to
/// their formats.
pub const GRADIENTS_THROUGH_BF16: &dyn Variant = &GradientsThroughBf16;
/// A conversion to the format of weights does not saturate.
pub const WEIGHTS_NOT_SATURATED: &dyn Variant = &WeightsNotSaturated;
/// A row's maximum is kept while it grows by less than four binades of a weight.
pub const STALE_MAXIMUM: &dyn Variant = &StaleMaximum;
/// A row's maximum begins at a finite number in place of minus infinity, the least of fp16.
pub const FINITE_LEAST_MAXIMUM: &dyn Variant = &FiniteLeastMaximum;
/// With head dims above 128, the first eighth of the scores that are made together lies over the seventh.
pub const SCORES_OVERWRITTEN: &dyn Variant = &ScoresOverwritten;
/// dS is multiplied by the softmax's scale once more.
pub const SCALE_TWICE_IN_DS: &dyn Variant = &ScaleTwiceInDs;
/// The row's sum is that of rounded weights, without the factor of weights, 2⁸.
pub const ROW_SUM_OF_ROUNDED_WEIGHTS: &dyn Variant = &RowSumOfRoundedWeights;
/// Sums of a tile are not divided by the factor of its dS.
pub const FACTOR_NOT_UNDONE: &dyn Variant = &FactorNotUndone;
/// The factor of a tile's dS follows from the largest number of its first row alone.
pub const FACTOR_OF_ONE_ROW: &dyn Variant = &FactorOfOneRow;
/// The factor of a tile's dS is 2⁴ times too large.
pub const FACTOR_TOO_LARGE: &dyn Variant = &FactorTooLarge;
/// The factor of a tile's dS is infinite where all of it is 0.
pub const FACTOR_OF_ZEROS: &dyn Variant = &FactorOfZeros;
/// D lacks the descale of dout.
pub const DOTS_NOT_DESCALED: &dyn Variant = &DotsNotDescaled;
/// D is that of the row before.
pub const DOTS_OF_ANOTHER_ROW: &dyn Variant = &DotsOfAnotherRow;
/// dv is not divided by the factor of weights, 2⁸.
pub const WEIGHT_FACTOR_IN_DV: &dyn Variant = &WeightFactorInDv;
/// dq and dk are multiplied by the softmax's scale twice.
pub const SCALE_TWICE: &dyn Variant = &ScaleTwice;

kernels! {
    WeightsCutOff {
        fn round(&self, pass: Pass, values: &mut [f32], format: Format) {
            if pass == Pass::Backward {
                return right::<A>().round(pass, values, format);
            }
            for value in values {
                let rounded = format.round_f32(*value);
                // Codes of positive numbers are in the order of these.
                let below = || format.decode(format.encode(rounded.into()) - 1) as f32;
                *value = if rounded <= *value { rounded } else { below() };
            }
        }
    }
    WeightsRoundedTwice {
        fn round(&self, pass: Pass, values: &mut [f32], format: Format) {
            if pass == Pass::Forward {
                Format::Fp16.round_all(values);
            }
            right::<A>().round(pass, values, format);
        }
    }
    WeightsThroughBf16 {
        fn round(&self, pass: Pass, values: &mut [f32], format: Format) {
            if pass == Pass::Forward {
                Format::Bf16.round_all(values);
            }
            right::<A>().round(pass, values, format);
        }
    }
    GradientsThroughBf16 {
        fn round(&self, pass: Pass, values: &mut [f32], format: Format) {
            if pass == Pass::Backward {
                Format::Bf16.round_all(values);
            }
            right::<A>().round(pass, values, format);
        }
    }
    WeightsNotSaturated {
        fn round(&self, _: Pass, values: &mut [f32], format: Format) {
            values.iter_mut().for_each(|value| *value = format.round_unsaturated((*value).into()) as f32);
        }
    }
    StaleMaximum {
        fn grow(&self, units: &A, softmax: &Softmax, state: &mut Online<f32>, max: f32) {
            let is_new = state.max == f32::NEG_INFINITY;
            if is_new || max > state.max && units.rescale(softmax, state.max, max) < 1.0 / 16.0 {
                right::<A>().grow(units, softmax, state, max);
            }
        }
    }
    FiniteLeastMaximum {
        fn grow(&self, units: &A, softmax: &Softmax, state: &mut Online<f32>, max: f32) {
            right::<A>().grow(units, softmax, state, max.max(-Format::Fp16.max_finite() as f32));
        }
    }
    ScoresOverwritten {
        fn products(&self, units: &A, pass: Pass, formats: [Format; 2], a: &[f32], b: Panel<'_, f32>, to: &mut [f32]) {
            right::<A>().products(units, pass, formats, a, b, to);
            let eighth = to.len() / 8;
            if a.len() > 128 && pass == Pass::Forward {
                to.copy_within(..eighth, 6 * eighth);
            }
        }
    }
    ScaleTwiceInDs {
        fn logit_gradient(&self, units: &A, softmax: &Softmax, pair: Pair<f32>) -> f32 {
            right::<A>().logit_gradient(units, softmax, pair) * softmax.scale
        }
    }
    RowSumOfRoundedWeights {
        fn add_weights(&self, units: &A, sum: &mut RowSum<f32>, first: usize, weights: &[f32]) {
            let rounded = |weight: &f32| Format::E4m3.round_f32(256.0 * weight) / 256.0;
            right::<A>().add_weights(units, sum, first, &weights.iter().map(rounded).collect::<Vec<_>>());
        }
    }
    FactorNotUndone {
        fn undone(&self, _: f32) -> f32 {
            1.0
        }
    }
    FactorOfOneRow {
        fn tile_factor(&self, ds: &TileWeights<f32>, format: Format) -> f32 {
            let mut first = TileWeights::new(1, ds.columns(), format);
            first.row_mut(0).copy_from_slice(ds.row(0));
            right::<A>().tile_factor(&first, format)
        }
    }
    FactorTooLarge {
        fn tile_factor(&self, ds: &TileWeights<f32>, format: Format) -> f32 {
            16.0 * right::<A>().tile_factor(ds, format)
        }
    }
    FactorOfZeros {
        fn tile_factor(&self, ds: &TileWeights<f32>, format: Format) -> f32 {
            let is_zero = ds.values().iter().all(|value| *value == 0.0);
            if is_zero { f32::INFINITY } else { right::<A>().tile_factor(ds, format) }
        }
    }
    DotsNotDescaled {
        fn descale_dots(&self, _: &mut [f32], _: f32) {}
    }
    DotsOfAnotherRow {
        fn row_dots(&self, units: &A, dout: HeadRows<'_, f32>, out: HeadRows<'_, f32>) -> Vec<f32> {
            let mut dots = right::<A>().row_dots(units, dout, out);
            dots.rotate_right(1);
            dots
        }
    }
    WeightFactorInDv {
        fn factor(&self, gradient: TensorName, softmax: &Softmax) -> f32 {
            right::<A>().factor(gradient, softmax) * if gradient == TensorName::Dv { 256.0 } else { 1.0 }
        }
    }
    ScaleTwice {
        fn factor(&self, gradient: TensorName, softmax: &Softmax) -> f32 {
            right::<A>().factor(gradient, softmax) * if gradient == TensorName::Dv { 1.0 } else { softmax.scale }
        }
    }
}
