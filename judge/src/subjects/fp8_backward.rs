//! The backward of the emulated kernel in FP8, on one rank: codes of q, k, v and dout with descales, weights and dS in
//! e4m3, and sums of Hopper's tensor core.
//!
//! D is made of the stored out and of dout's values in f32. Weights are recomputed from the LSE; multiplied by a power
//! of two and rounded, they enter dv. `dS = P·(dP − D)` is made of unrounded ones. A tile's dS is multiplied by a power
//! of two that its own largest number gives, and rounded. The tile's products are divided by it and added in f32. dq,
//! dk and dv of a query head take the softmax's scale and descales at the end. The heads of a group are then added, and
//! the sum is rounded to bf16.
//!
//! Each sequence has a launch of its own, after the forward that gives out and LSE.
//!
//! An [`Fp8BackwardFault`] is an edit of the [`BackwardRecipe`]. What the kernel declares stays as it is.

use std::num::NonZeroUsize;

use ndarray::{Array1, Array3, ArrayView, Dimension};
use seamproof_oracle::{Element, Format, Inputs, Problem, ProblemFields, Scales};
use seamproof_simulator::emulated::{BackwardLaunch, Kernel, Roundings, Units, Variant};
use seamproof_simulator::faults::{Catcher, Fault, codes};
use seamproof_simulator::schedule::Descales;
use seamproof_simulator::{AttentionCall, GuardedTensor};

use super::fp8::{Fp8, LocalPlace, Place, Recipe, descales};
use crate::subject::{RankGradients, RankOutputs, RunError};

/// What the backward does with the numbers around its sums.
#[derive(Clone, Copy, Debug)]
pub struct BackwardRecipe {
    /// The descales of a sequence and query head.
    pub descales: fn(&Scales, Place) -> Descales,
    /// Number of steps after which a sum is promoted.
    pub promoted_after: Option<NonZeroUsize>,
    /// Whether dS is made of rounded weights.
    pub rounds_ds_weights: bool,
    /// The kernel's stages.
    pub stages: &'static dyn Variant,
}

/// A planted fault of the backward in FP8: an edit of its recipe.
pub type Fp8BackwardFault = Fault<fn(&mut BackwardRecipe)>;

const fn fault(
    id: &'static str,
    imitates: &'static str,
    source: &'static str,
    edit: fn(&mut BackwardRecipe),
) -> Fp8BackwardFault {
    Fault { id, imitates, source, entries: &[], caught_by: &[Catcher::Envelope, Catcher::Identity], edit }
}

/// The faults of the backward in FP8.
pub const FP8_BACKWARD_FAULTS: &[Fp8BackwardFault] = &[
    fault(
        "dout-descale-ignored",
        "the scale of dout is not applied",
        "https://github.com/NVIDIA/cudnn-frontend/issues/520",
        |recipe| recipe.descales = |scales, place| Descales { dout: 1.0, ..descales(scales, place) },
    ),
    fault(
        "dout-descale-of-the-first-sequence",
        "every sequence of the batch is given the scale that dout has in the first",
        "https://github.com/vllm-project/vllm/issues/34863",
        |recipe| {
            recipe.descales = |scales, place| {
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
            recipe.descales = |scales, place| {
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
            recipe.descales = |scales, place| {
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
            recipe.descales = |scales, place| {
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
        |recipe| recipe.rounds_ds_weights = true,
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
];

/// Returns a tensor of a launch.
fn tensor<D: Dimension>(name: &str, values: ArrayView<'_, f32, D>, element: Element) -> GuardedTensor<f32> {
    GuardedTensor::from_array(name, values, element.format)
}

/// Copies a tensor of a launch into results.
fn copy<D: Dimension>(to: &mut ndarray::Array<f32, D>, from: &GuardedTensor<f32>) {
    to.iter_mut().zip(from.values()).for_each(|(to, from)| *to = *from);
}

impl Fp8 {
    /// Makes the gradients of a problem whose forward has these results.
    pub(super) fn differentiate(
        &self,
        recipe: &Recipe,
        problem: &Problem,
        inputs: &Inputs,
        whole: &mut RankOutputs,
    ) -> Result<(), RunError> {
        let (Some(gradients), Some(saved)) = (&mut whole.gradients, &whole.lse) else { return Ok(()) };
        let precision = &problem.precision;
        let [q, dout, out] = [
            ("q", &inputs.q, precision.q),
            ("dout", &inputs.dout, precision.dout),
            ("out", &whole.out, precision.out),
        ]
        .map(|(name, values, element): (_, &Array3<f32>, _)| tensor(name, values.view(), element));
        let [k, v] = [("k", &inputs.k, precision.k), ("v", &inputs.v, precision.v)]
            .map(|(name, values, element)| tensor(name, values.view(), element));
        let lse = tensor("lse", saved.view(), Format::F32.into());
        let RankGradients { dq: to_dq, dk: to_dk, dv: to_dv, dsink: to_dsink } = gradients;
        let [mut dq, mut dk, mut dv] = [("dq", &*to_dq), ("dk", &*to_dk), ("dv", &*to_dv)]
            .map(|(name, values)| tensor(name, values.view(), precision.gradients));
        let kernel = self.backward_kernel(recipe, problem);
        let mut total = Array1::zeros(to_dsink.len());
        for sequence in 0..problem.sequences.len() {
            let call = AttentionCall::whole(&one_sequence(problem, sequence)?);
            let descales = self.descales(recipe, problem, inputs, sequence);
            let mut dsink = tensor("dsink", total.view(), Format::F32.into());
            let tensors = BackwardLaunch {
                q: &q,
                k: &k,
                v: &v,
                sink: inputs.sink.as_slice().unwrap_or(&[]),
                descales: &vec![descales; call.segments.len()],
                dout: &dout,
                out: &out,
                lse: &lse,
                dq: &mut dq,
                dk: &mut dk,
                dv: &mut dv,
                dsink: &mut dsink,
            };
            kernel.backward(&call, tensors);
            total.iter_mut().zip(dsink.values()).for_each(|(total, part)| *total += part);
        }
        copy(to_dq, &dq);
        copy(to_dk, &dk);
        copy(to_dv, &dv);
        to_dsink.assign(&total);
        Ok(())
    }

    fn backward_kernel(&self, recipe: &Recipe, problem: &Problem) -> Box<dyn Kernel<f32>> {
        let (p, ds) = (problem.precision.p.format, problem.precision.ds.format);
        let roundings = Roundings {
            weight_exponent: recipe.weight_exponent,
            scales_tiles: true,
            rounds_ds_weights: recipe.backward.rounds_ds_weights,
            ..Roundings::new(p, ds)
        };
        Units::HopperFp8(recipe.backward.promoted_after).variant(
            self.tiles,
            roundings,
            recipe.backward.stages,
        )
    }

    /// Returns the descales of each query head of a sequence.
    fn descales(
        &self,
        recipe: &Recipe,
        problem: &Problem,
        inputs: &Inputs,
        sequence: usize,
    ) -> Vec<Descales> {
        let of_head = |head| {
            let kv_head = head / problem.group();
            let local = LocalPlace { segment: sequence, head, kv_head };
            (recipe.backward.descales)(&inputs.scales, Place { sequence, head, kv_head, local })
        };
        (0..problem.heads.q).map(of_head).collect()
    }
}

/// Returns the problem with one sequence alone, whose rows stay where they are.
fn one_sequence(problem: &Problem, sequence: usize) -> Result<Problem, RunError> {
    let sequences = vec![problem.sequences[sequence]];
    let fields = ProblemFields { sequences, ..problem.clone().into() };
    Problem::new(fields).map_err(|error| RunError::Crash(error.to_string()))
}
