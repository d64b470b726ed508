//! The sequence of cuDNN in FP8 on the emulated kernel: scales of weights, logit gradients and results are inputs.
//!
//! Weights are relative to the running maximum. They are multiplied by the scale of S and rounded to e4m3, and sums of
//! their products by the descale. out is multiplied by its scale and rounded to FP8. The backward reads that out for D.
//! dS takes the softmax's scale before its own, and is rounded to the format of dout. dq, dk and dv have scales too.
//! TransformerEngine's delayed recipe is this sequence with scales of earlier steps. Whatever the scales are, a number
//! past a format's range becomes its largest.
//!
//! Sources: `sdpa_fp8.h`, `sdpa_fp8_bwd.h` of <https://github.com/NVIDIA/cudnn-frontend>, and the convention for S in
//! <https://github.com/NVIDIA/cudnn-frontend/pull/509>.

use ndarray::Axis;
use seamproof_oracle::amax::Amaxes;
use seamproof_oracle::{Element, Format, Inputs, Precision, Problem, Quantity, Scaling, sharding};
use seamproof_simulator::emulated::{Factor, Factors};
use seamproof_simulator::faults::{Catcher, codes};
use seamproof_simulator::schedule::{Buffer, Role};

use super::fp8::{Fp8Fault, fault};
use crate::subject::{Parallelism, RankOutputs};

/// The sequence of operations that the kernel in FP8 has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fp8Sequence {
    /// That of FlashAttention-3, with a backward of this project's own: results in bf16, and a factor of dS for each
    /// tile.
    #[default]
    FlashAttention3,
    /// That of cuDNN: what the kernel quantises has scales that are given, and results are in FP8.
    Cudnn,
}

impl Fp8Sequence {
    /// Every sequence.
    pub const ALL: [Fp8Sequence; 2] = [Fp8Sequence::FlashAttention3, Fp8Sequence::Cudnn];

    /// Returns the name in options.
    pub fn name(self) -> &'static str {
        match self {
            Fp8Sequence::FlashAttention3 => "flash-attention-3",
            Fp8Sequence::Cudnn => "cudnn",
        }
    }

    /// Returns the name of the numeric profile: each sequence has its own.
    pub fn profile(self) -> &'static str {
        match self {
            Fp8Sequence::FlashAttention3 => "emulated-fp8",
            Fp8Sequence::Cudnn => "emulated-fp8:sequence=cudnn",
        }
    }
}

/// The amaxes that the kernel has kept, and a rank's results.
#[derive(Clone, Copy, Debug)]
pub struct Kept<'a> {
    /// The problem.
    pub problem: &'a Problem,
    /// The inputs.
    pub inputs: &'a Inputs,
    /// Place of the rank among those that returned results.
    pub place: usize,
    /// Results of the rank.
    pub rank: &'a RankOutputs,
    /// The largest magnitudes over all launches of all ranks.
    pub all: Amaxes,
}

impl Kept<'_> {
    /// Returns the amaxes with another one of a quantity.
    fn with(&self, quantity: Quantity, amax: f32) -> Amaxes {
        Amaxes::new(|other| {
            let right = self.all.of(other)?;
            Some(if other == quantity { amax } else { right })
        })
    }

    /// Returns the largest magnitude of out in a rank's own rows.
    fn of_own_rows(&self) -> f32 {
        let layouts = sharding::members(self.problem).unwrap_or_default();
        let own = layouts.get(self.place).map_or(&[][..], |layout| &layout.q.runs);
        let rows = own.iter().flat_map(|placed| placed.local.real_rows());
        rows.flat_map(|row| self.rank.out.index_axis(Axis(0), row).to_owned())
            .fold(0.0, |most, out| most.max(out.abs()))
    }

    /// Returns the largest magnitude of out where queries of padding attend to keys of padding.
    fn over_padding(&self) -> f32 {
        let descale = self.inputs.scales.v.as_ref().map_or(1.0, |scales| scales.descale()[[0, 0, 0]]);
        let own = self.all.of(Quantity::Out).unwrap_or_default();
        let runs = self.problem.sequences.iter().flat_map(|sequence| sequence.kv.padding_rows());
        let values = runs.flat_map(|row| self.inputs.v.index_axis(Axis(0), row).to_owned());
        let bits = values.map(|v| (v * descale).abs().to_bits()).max().unwrap_or(0);
        f32::from_bits(bits.max(own.to_bits()))
    }
}

/// Returns the groups in which the sequence runs: all, outside of regions. A launch makes codes in FP8 of partial results
/// too, with the scales of whole ones, and they are merged and added as values.
pub(super) fn parallel() -> Parallelism {
    Parallelism { regions: false, ..Parallelism::all() }
}

/// Returns the formats of cuDNN that are taken together. In a backward, dS has the format of dout.
pub(super) fn precisions(backward: bool) -> Vec<Precision> {
    let tensor = |format: Format| Element { format, scaling: Scaling::PerTensor };
    let (code, wide) = (tensor(Format::E4m3), tensor(Format::E5m2));
    let forward =
        Precision { q: code, k: code, v: code, p: code, out: code, ..Precision::uniform(Format::Bf16) };
    let with = |dout: Element, gradients: Element| Precision { dout, ds: dout, gradients, ..forward };
    if backward { vec![with(code, code), with(wide, wide), with(code, wide)] } else { vec![forward] }
}

/// The faults of a kernel that is given scales of what it quantises, in its forward.
pub const FP8_GIVEN_FAULTS: &[Fp8Fault] = &[
    fault(
        "weight-scales-dropped",
        "neither the scale of S nor its descale is applied, and small weights vanish",
        "https://github.com/NVIDIA/cudnn-frontend/issues/520",
        |recipe| recipe.factors = |own| Factors { p: Factor::ONE, ..Factors::of(own) },
    ),
    fault(
        "weight-descale-dropped",
        "the descale of S is not applied",
        "https://github.com/NVIDIA/cudnn-frontend/issues/520",
        |recipe| {
            recipe.factors = |own| {
                let right = Factors::of(own);
                Factors { p: Factor { descale: 1.0, ..right.p }, ..right }
            };
        },
    ),
    fault(
        "out-scale-of-one",
        "the scale of out is bound to 1, whatever is given",
        "https://github.com/flashinfer-ai/flashinfer/issues/4224",
        |recipe| {
            recipe.factors = |own| {
                let right = Factors::of(own);
                Factors { out: Factor { scale: 1.0, ..right.out }, ..right }
            };
        },
    ),
    fault(
        "weights-not-saturated",
        "a conversion to e4m3 does not saturate, and gives NaN past 448",
        "https://github.com/pytorch/pytorch/issues/178817",
        |recipe| recipe.stages = codes::WEIGHTS_NOT_SATURATED,
    ),
    Fp8Fault {
        caught_by: &[Catcher::Envelope],
        ..fault(
            "scaled-weights-rounded-twice",
            "weights are rounded to bf16 once they have their scale, and then to e4m3",
            "https://github.com/triton-lang/triton/pull/11753",
            |recipe| recipe.stages = codes::WEIGHTS_THROUGH_BF16,
        )
    },
    Fp8Fault {
        caught_by: &[Catcher::Envelope],
        ..fault(
            "scaled-sums-not-promoted",
            "the unit's sums are never promoted to f32",
            "https://github.com/vllm-project/vllm/issues/23813",
            |recipe| recipe.promoted_after = None,
        )
    },
    Fp8Fault {
        caught_by: &[Catcher::Envelope],
        ..fault(
            "amax-over-padding-rows",
            "the amax of out counts rows of padding",
            "https://github.com/NVIDIA/cudnn-frontend/issues/524",
            |recipe| recipe.amax = |kept| kept.with(Quantity::Out, kept.over_padding()),
        )
    },
    Fp8Fault {
        caught_by: &[Catcher::Structure, Catcher::Envelope],
        ..fault(
            "amax-of-a-ranks-own-rows",
            "the amax of out is of a rank's own rows, and the next step's scales differ between ranks",
            "https://github.com/NVIDIA/TransformerEngine/pull/74",
            |recipe| recipe.amax = |kept| kept.with(Quantity::Out, kept.of_own_rows()),
        )
    },
    Fp8Fault {
        caught_by: &[Catcher::Envelope],
        ..fault(
            "amax-lost",
            "the amax of weights is not written, and stays 0",
            "https://github.com/NVIDIA/cudnn-frontend/pull/602",
            |recipe| recipe.amax = |kept| kept.with(Quantity::P, 0.0),
        )
    },
];

/// Those of its backward.
pub const FP8_GIVEN_BACKWARD_FAULTS: &[Fp8Fault] = &[
    fault(
        "ds-descale-dropped",
        "the descale of dP is not applied",
        "https://github.com/NVIDIA/cudnn-frontend/issues/520",
        |recipe| {
            recipe.factors = |own| {
                let right = Factors::of(own);
                Factors { ds: Factor { descale: 1.0, ..right.ds }, ..right }
            };
        },
    ),
    fault(
        "out-descale-dropped-in-d",
        "D is made of the codes of out, without its descale",
        "https://github.com/NVIDIA/TransformerEngine/pull/592",
        |recipe| {
            recipe.factors = |own| {
                let right = Factors::of(own);
                Factors { out: Factor { descale: 1.0, ..right.out }, ..right }
            };
        },
    ),
    fault(
        "gradient-scales-in-another-order",
        "scales are passed in another order: dq has that of dk, and dk that of dv",
        "https://github.com/NVIDIA/TransformerEngine/pull/592",
        |recipe| {
            recipe.factors = |own| {
                let Factors { dq, dk, dv, .. } = Factors::of(own);
                let scaled = |right: Factor, wrong: Factor| Factor { scale: wrong.scale, ..right };
                Factors { dq: scaled(dq, dk), dk: scaled(dk, dv), ..Factors::of(own) }
            };
        },
    ),
    fault(
        "gradient-codes-in-the-forwards-format",
        "codes of a step's gradients, which are in e5m2, are made and read as e4m3",
        "https://github.com/NVIDIA/TransformerEngine/pull/1566",
        |recipe| {
            recipe.schedule = |schedule| {
                let of_steps = |buffer: &&mut Buffer| {
                    buffer.role == Role::Scratch
                        && buffer.format == Format::E5m2
                        && !buffer.name.starts_with("dout")
                };
                schedule.buffers.iter_mut().filter(of_steps).for_each(|buffer| buffer.format = Format::E4m3);
            };
        },
    ),
    Fp8Fault {
        caught_by: &[Catcher::Envelope],
        ..fault(
            "scaled-gradients-rounded-twice",
            "weights and logit gradients are rounded to bf16 once they have their scales, and then to codes",
            "https://github.com/triton-lang/triton/pull/11753",
            |recipe| recipe.stages = codes::GRADIENTS_THROUGH_BF16,
        )
    },
    fault(
        "softmax-scale-beside-ds",
        "dS is given its scale without the softmax's scale, which comes to the sums once more",
        "https://github.com/NVIDIA/cudnn-frontend/pull/904",
        |recipe| recipe.stages = codes::SCALE_TWICE_IN_DS,
    ),
];
