//! The backward of the emulated kernel in FP8: codes of q, k, v and dout with descales, weights and dS in e4m3, and sums
//! of Hopper's tensor core.
//!
//! D is made of the stored out and of dout's values in f32. Weights are recomputed from the LSE; multiplied by a power
//! of two and rounded, they enter dv. `dS = P·(dP − D)` is made of unrounded ones. A tile's dS is multiplied by a power
//! of two that its own largest number gives, and rounded. The tile's products are divided by it and added in f32. dq,
//! dk and dv of a query head take the softmax's scale and descales at the end. The heads of a group are then added, and
//! the sum is rounded to bf16.
//!
//! Over several ranks a launch's dq, dk and dv are values, in the formats in which the schedule keeps partial gradients.
//!
//! Its faults are edits of the [`Recipe`](super::fp8::Recipe), as those of the forward are.

use seamproof_oracle::{Inputs, Problem, Scales};
use seamproof_simulator::faults::codes;
use seamproof_simulator::schedule::Descales;

use super::fp8::{Fp8Fault, LocalPlace, Place, descales, fault, last_sequence};
use super::fp8_schedule::{dout_of_own_rows, of_own_rows};

/// What the backward does with the numbers around its sums.
#[derive(Clone, Copy, Debug)]
pub struct BackwardRecipe {
    /// The scales that a rank of the world knows.
    pub known: fn(&Problem, &Inputs, usize) -> Scales,
    /// The descales of a sequence and query head.
    pub descales: fn(&Scales, Place) -> Descales,
    /// Whether dS is made of rounded weights.
    pub rounds_ds_weights: bool,
}

/// The faults of the backward in FP8.
pub const FP8_BACKWARD_FAULTS: &[Fp8Fault] = &[
    fault(
        "dout-descale-ignored",
        "the scale of dout is not applied",
        "https://github.com/NVIDIA/cudnn-frontend/issues/520",
        |recipe| recipe.backward.descales = |scales, place| Descales { dout: 1.0, ..descales(scales, place) },
    ),
    fault(
        "dout-descale-of-the-first-sequence",
        "every sequence of the batch is given the scale that dout has in the first",
        "https://github.com/vllm-project/vllm/issues/34863",
        |recipe| {
            recipe.backward.descales = |scales, place| {
                let first = descales(scales, Place { sequence: 0, ..place });
                Descales { dout: first.dout, ..descales(scales, place) }
            };
        },
    ),
    fault(
        "dout-and-v-descales-exchanged",
        "dout is given the scale of v, and v that of dout",
        "https://github.com/flashinfer-ai/flashinfer/issues/1023",
        |recipe| {
            recipe.backward.descales = |scales, place| {
                let own = descales(scales, place);
                Descales { v: own.dout, dout: own.v, ..own }
            };
        },
    ),
    fault(
        "q-and-k-descales-exchanged-behind",
        "dq is multiplied by the scale of q, and dk by that of k",
        "https://github.com/flashinfer-ai/flashinfer/issues/1023",
        |recipe| {
            recipe.backward.descales = |scales, place| {
                let own = descales(scales, place);
                Descales { q: own.k, k: own.q, ..own }
            };
        },
    ),
    fault(
        "backward-descales-of-another-step",
        "the backward has scales that were updated after the forward",
        "https://github.com/NVIDIA/TransformerEngine/pull/1597",
        |recipe| {
            recipe.backward.descales = |scales, place| {
                let own = descales(scales, place);
                Descales { q: 1.25 * own.q, ..own }
            };
        },
    ),
    fault(
        "d-without-descale",
        "D is made of the codes of dout, without their scale",
        "https://github.com/flashinfer-ai/flashinfer/issues/4984",
        |recipe| recipe.stages = codes::DOTS_NOT_DESCALED,
    ),
    fault(
        "d-of-another-row-in-fp8",
        "D is that of the row before: the output is read with a wrong stride",
        "https://github.com/Dao-AILab/flash-attention/commit/9ee0ff1d",
        |recipe| recipe.stages = codes::DOTS_OF_ANOTHER_ROW,
    ),
    fault(
        "rounded-weights-in-ds",
        "dS is made of the weights that were rounded for dv, as memory-efficient attention has it",
        "https://github.com/facebookresearch/xformers",
        |recipe| recipe.backward.rounds_ds_weights = true,
    ),
    fault(
        "ds-factor-of-one-row",
        "the factor of a tile's dS comes of the largest number of one row, not of the tile",
        "https://github.com/pytorch/torchtitan/issues/3109",
        |recipe| recipe.stages = codes::FACTOR_OF_ONE_ROW,
    ),
    fault(
        "ds-factor-too-large",
        "the factor of a tile's dS is too large, and large numbers saturate",
        "https://github.com/uxlfoundation/oneDNN/pull/5626",
        |recipe| recipe.stages = codes::FACTOR_TOO_LARGE,
    ),
    fault(
        "ds-factor-of-zeros",
        "the factor of a tile is divided by its largest dS, which is 0 where all of it is",
        "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/recipe/recipe_common.cuh",
        |recipe| recipe.stages = codes::FACTOR_OF_ZEROS,
    ),
    fault(
        "ds-factor-not-undone",
        "products with dS keep its factor",
        "https://github.com/NVIDIA/cudnn-frontend/issues/520",
        |recipe| recipe.stages = codes::FACTOR_NOT_UNDONE,
    ),
    fault(
        "weight-factor-in-dv",
        "dv keeps the factor of the weights",
        "https://github.com/NVIDIA/cudnn-frontend/pull/904",
        |recipe| recipe.stages = codes::WEIGHT_FACTOR_IN_DV,
    ),
    fault(
        "scale-twice-behind",
        "dq and dk are multiplied by the softmax's scale before and after they are summed",
        "https://github.com/Dao-AILab/flash-attention/issues/2651",
        |recipe| recipe.stages = codes::SCALE_TWICE,
    ),
    fault(
        "backward-kv-descale-of-own-rows",
        "the backward decodes keys and values of other ranks with scales of the amax of the receiver's own rows",
        "https://github.com/pytorch/torchtitan/issues/3109",
        |recipe| recipe.backward.known = of_own_rows,
    ),
    fault(
        "dout-descale-of-own-rows",
        "the scale of dout is of the amax of a rank's own rows, not of the group's",
        "https://github.com/pytorch/torchtitan/issues/3109",
        |recipe| recipe.backward.known = dout_of_own_rows,
    ),
    fault(
        "dout-descale-of-the-segment",
        "scales of dout are counted by the launch's segments, which are parts of sequences once rows are dealt",
        "https://github.com/sgl-project/sglang/pull/37785",
        |recipe| {
            recipe.backward.descales = |scales, place| {
                let sequence = place.local.segment.min(last_sequence(scales));
                let of_segment = descales(scales, Place { sequence, ..place });
                Descales { dout: of_segment.dout, ..descales(scales, place) }
            };
        },
    ),
    fault(
        "dout-descale-of-the-local-head",
        "a rank with a block of the heads takes their scales of dout from the first head on",
        "https://github.com/sgl-project/sglang/pull/26436",
        |recipe| {
            recipe.backward.descales = |scales, place| {
                let LocalPlace { head, kv_head, .. } = place.local;
                let of_local = descales(scales, Place { head, kv_head, ..place });
                Descales { dout: of_local.dout, ..descales(scales, place) }
            };
        },
    ),
];
