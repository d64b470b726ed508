//! Kernels in FP8 with one wrong stage of the backward. They are not in the catalogue of this crate, whose kernels are
//! in 16 bits: the subject in FP8 plants them.

use seamproof_oracle::{Format, Softmax, TensorName};

use super::entry::{kernels, right};
use crate::emulated::{HeadRows, Stages, TileWeights, UnitArithmetic, Variant};

/// Sums of a tile are not divided by the factor of its dS.
pub const FACTOR_NOT_UNDONE: &dyn Variant = &FactorNotUndone;
/// The factor of a tile's dS follows from the largest number of its first row alone.
pub const FACTOR_OF_ONE_ROW: &dyn Variant = &FactorOfOneRow;
/// The factor of a tile's dS is 2⁴ times too large.
pub const FACTOR_TOO_LARGE: &dyn Variant = &FactorTooLarge;
/// D lacks the descale of dout.
pub const DOTS_NOT_DESCALED: &dyn Variant = &DotsNotDescaled;
/// D is that of the row before.
pub const DOTS_OF_ANOTHER_ROW: &dyn Variant = &DotsOfAnotherRow;
/// dv is not divided by the factor of weights, 2⁸.
pub const WEIGHT_FACTOR_IN_DV: &dyn Variant = &WeightFactorInDv;
/// dq and dk are multiplied by the softmax's scale twice.
pub const SCALE_TWICE: &dyn Variant = &ScaleTwice;

kernels! {
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
