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

use seamproof_oracle::{Element, Format, OwnScales, Precision, Scaling};
use seamproof_simulator::emulated::{Factor, Factors};
use seamproof_simulator::faults::{Catcher, codes};

use super::fp8::{Fp8Fault, Recipe};

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
}

/// Returns the factors of the descales that a problem gives.
pub(super) fn given(own: &OwnScales) -> Factors {
    Factors::of(own)
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

const fn fault(
    id: &'static str,
    imitates: &'static str,
    source: &'static str,
    edit: fn(&mut Recipe),
) -> Fp8Fault {
    Fp8Fault { id, imitates, source, entries: &[], caught_by: &[Catcher::Envelope, Catcher::Identity], edit }
}

/// The faults of a kernel that is given scales of what it quantises.
pub const FP8_GIVEN_FAULTS: &[Fp8Fault] = &[
    fault(
        "weight-scales-dropped",
        "neither the scale of S nor its descale is applied, and small weights vanish",
        "https://github.com/NVIDIA/cudnn-frontend/issues/520",
        |recipe| recipe.factors = |own| Factors { p: Factor::ONE, ..given(own) },
    ),
    fault(
        "weight-descale-dropped",
        "the descale of S is not applied",
        "https://github.com/NVIDIA/cudnn-frontend/issues/520",
        |recipe| {
            recipe.factors = |own| {
                let right = given(own);
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
                let right = given(own);
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
    fault(
        "ds-descale-dropped",
        "the descale of dP is not applied",
        "https://github.com/NVIDIA/cudnn-frontend/issues/520",
        |recipe| {
            recipe.factors = |own| {
                let right = given(own);
                Factors { ds: Factor { descale: 1.0, ..right.ds }, ..right }
            };
        },
    ),
    fault(
        "gradient-scales-in-another-order",
        "scales are passed in another order: dq has that of dk, and dk that of dv",
        "https://github.com/NVIDIA/TransformerEngine/pull/592",
        |recipe| {
            recipe.factors = |own| {
                let Factors { dq, dk, dv, .. } = given(own);
                let scaled = |right: Factor, wrong: Factor| Factor { scale: wrong.scale, ..right };
                Factors { dq: scaled(dq, dk), dk: scaled(dk, dv), ..given(own) }
            };
        },
    ),
    fault(
        "softmax-scale-beside-ds",
        "dS is given its scale without the softmax's scale, which comes to the sums once more",
        "https://github.com/NVIDIA/cudnn-frontend/pull/904",
        |recipe| recipe.stages = codes::SCALE_TWICE_IN_DS,
    ),
];
