//! Faults of quantisers: each puts another function in place of one stage of the right one.

use ndarray::Array3;
use seamproof_oracle::quantise::{Factors, Quantisation, QuantisationFields, ScaleRule};
use seamproof_oracle::{Format, Scaling};

use super::fault::Catcher::{Exact, Poison, Structure};
use super::fault::Fault;
use crate::quantiser::{Stages, factors, largest};

/// A fault of a quantiser.
pub type QuantiserFault = Fault<fn(&mut Stages)>;

/// An amax kernel that reads a whole tensor, padding included.
const AMAX: &str = "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/recipe/current_scaling.cu";
/// A delayed recipe: its margin, its history and its scale for an amax of 0.
const DELAYED: &str = "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/recipe/delayed_scaling.cu";
/// The rule from an amax to a scale.
const RULE: &str = "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/recipe/recipe_common.cuh";
/// A scale from one rank's values where that of the group is wanted.
const LOCAL: &str = "https://github.com/pytorch/torchtitan/issues/3109";
/// A conversion that does not saturate.
const CAST: &str = "https://github.com/pytorch/pytorch/issues/178817";
/// A k or v scale that is ignored, or another tensor's.
const WRONG_SCALE: &str = "https://github.com/flashinfer-ai/flashinfer/issues/4984";
/// Blocks that hold tokens of more than one sequence.
const BLOCKS: &str = "https://github.com/NVIDIA/TransformerEngine/issues/3248";
/// Instructions that convert to FP8 and their roundings.
const CVT: &str =
    "https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt";
/// The MX formats.
const MX: &str = "https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf";

/// Every fault of a quantiser.
pub const FAULTS: &[QuantiserFault] = &[
    QuantiserFault {
        id: "amax-over-padding",
        imitates: "the largest magnitude is taken over all owned rows, padding included",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/2892",
        entries: &[],
        caught_by: &[Exact, Poison],
        edit: |stages| stages.counted = |run| run.span,
    },
    QuantiserFault {
        id: "amax-over-the-buffer",
        imitates: "the largest magnitude is taken over the whole tensor, gaps and slack included",
        source: AMAX,
        entries: &[],
        caught_by: &[Exact, Poison],
        edit: |stages| {
            stages.start = |shard| shard.values.iter().fold(0.0, |largest, value| value.abs().max(largest));
        },
    },
    QuantiserFault {
        id: "amax-without-the-last-row",
        imitates: "a loop over rows ends one early",
        source: AMAX,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| stages.counted = |run| run.len.saturating_sub(1),
    },
    QuantiserFault {
        id: "amax-of-signed-values",
        imitates: "the largest value is taken, and large negative ones saturate",
        source: AMAX,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| stages.magnitude = |value| value.max(0.0),
    },
    QuantiserFault {
        id: "scale-in-bf16",
        imitates: "the scale is kept in the tensor's 16-bit format",
        source: RULE,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.factors =
                |asked, amax| Factors::of_scale(Format::Bf16.round_f32(factors(asked, amax).scale));
        },
    },
    QuantiserFault {
        id: "amax-of-one-rank",
        imitates: "no rank asks the others: each scales by its own rows",
        source: LOCAL,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| stages.reduce = |rank, ranks| ranks[rank].clone(),
    },
    QuantiserFault {
        id: "amax-of-half-the-group",
        imitates: "the reduction is over one of the two groups that a hierarchical schedule has",
        source: "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py",
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| stages.reduce = |rank, ranks| largest(half(rank, ranks)),
    },
    QuantiserFault {
        id: "amax-of-the-first-tensor",
        imitates: "one scale for q, k and v, made of q alone",
        source: WRONG_SCALE,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| stages.share = |tensors| tensors.first().copied().unwrap_or(0.0),
    },
    QuantiserFault {
        id: "scale-of-the-first-head",
        imitates: "every head is scaled by the factors of head 0",
        source: WRONG_SCALE,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.group =
                |shard, [sequence, position, _, lane]| shard.groups.of(sequence, position, 0, lane);
        },
    },
    QuantiserFault {
        id: "scale-of-the-first-sequence",
        imitates: "every sequence of a pack is scaled by the factors of the first",
        source: WRONG_SCALE,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.group = |shard, [sequence, position, head, lane]| {
                let sequence = if shard.groups.are_of_rows() { sequence } else { 0 };
                shard.groups.of(sequence, position, head, lane)
            };
        },
    },
    QuantiserFault {
        id: "blocks-one-row-late",
        imitates: "blocks are counted from another row than the sequence's first",
        source: BLOCKS,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.group = |shard, [sequence, position, head, lane]| {
                shard.groups.of(sequence, position.saturating_sub(1), head, lane)
            };
        },
    },
    QuantiserFault {
        id: "blocks-transposed",
        imitates: "the lanes of a block are cut as its rows should be",
        source: BLOCKS,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.group = |shard, [sequence, position, head, lane]| {
                let place = shard.groups.of(sequence, position, head, lane);
                match shard.asked.element.scaling {
                    Scaling::PerBlock { rows, .. } => {
                        let last = shard.groups.shape()[2].saturating_sub(1);
                        [place[0], place[1], (lane / rows).min(last)]
                    }
                    _ => place,
                }
            };
        },
    },
    QuantiserFault {
        id: "blocks-along-the-sequence",
        imitates: "rows that have scales of their own share one, and later tokens move the codes of earlier ones",
        source: BLOCKS,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.group = |shard, [sequence, position, head, lane]| {
                let position = if shard.groups.are_of_rows() { position / 32 * 32 } else { position };
                shard.groups.of(sequence, position, head, lane)
            };
        },
    },
    QuantiserFault {
        id: "margin-negated",
        imitates: "a margin makes codes larger where it should leave room above them",
        source: DELAYED,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| stages.factors = |asked, amax| factors(&with_margin(asked, -asked.margin), amax),
    },
    QuantiserFault {
        id: "margin-dropped",
        imitates: "a margin is not looked at",
        source: DELAYED,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| stages.factors = |asked, amax| factors(&with_margin(asked, 0), amax),
    },
    QuantiserFault {
        id: "history-oldest-taken",
        imitates: "the newest entry of a history is looked for at its other end",
        source: DELAYED,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| stages.taken = |delayed, _| delayed.history.last().copied().unwrap_or(0.0),
    },
    QuantiserFault {
        id: "history-with-the-present",
        imitates: "a delayed recipe takes the present amax, which only the next step may",
        source: DELAYED,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| stages.taken = |_, amax| amax,
    },
    QuantiserFault {
        id: "history-not-rolled",
        imitates: "a step's amax overwrites the newest entry of the history",
        source: DELAYED,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.after = |delayed, amax| {
                let mut history = delayed.history.clone();
                history[0] = amax;
                history
            };
        },
    },
    QuantiserFault {
        id: "history-lost-at-zero",
        imitates: "where the history holds zeros, the scale of the step before is forgotten",
        source: DELAYED,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.factors = |asked, amax| match amax == 0.0 && asked.delayed.is_some() {
                true => Factors::ONE,
                false => factors(asked, amax),
            };
        },
    },
    QuantiserFault {
        id: "scale-of-zeros-infinite",
        imitates: "an amax of 0 is divided by",
        source: RULE,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.factors = |asked, amax| match amax == 0.0 {
                true => Factors::of_scale(f32::INFINITY),
                false => factors(asked, amax),
            };
        },
    },
    QuantiserFault {
        id: "descale-from-the-amax",
        imitates: "the descale is amax / 448, rounded apart from the scale that codes are made with",
        source: "https://github.com/NVIDIA/TransformerEngine/issues/335",
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.factors = |asked, amax| {
                let right = factors(asked, amax);
                let apart = asked.scale == ScaleRule::F32 && amax > 0.0;
                let descale =
                    libm::ldexpf(amax * (1.0 / asked.element.format.max_finite() as f32), asked.margin);
                if apart { Factors { descale, ..right } } else { right }
            };
        },
    },
    QuantiserFault {
        id: "scale-rounded-up-to-a-power",
        imitates: "a scale becomes the power of two above it, and the largest values saturate",
        source: RULE,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.factors = |asked, amax| {
                let right = factors(asked, amax);
                let power = asked.scale != ScaleRule::F32 && right.scale < 1e30;
                if power { Factors::of_scale(2.0 * right.scale) } else { right }
            };
        },
    },
    QuantiserFault {
        id: "mx-scale-rounded-the-other-way",
        imitates: "the shared exponent is rounded down where the recipe rounds it up, or up where it rounds down",
        source: MX,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.factors = |asked, amax| {
                let mut fields = QuantisationFields::from(asked.clone());
                fields.scale = match fields.scale {
                    ScaleRule::E8m0Up => ScaleRule::E8m0Down,
                    ScaleRule::E8m0Down => ScaleRule::E8m0Up,
                    other => other,
                };
                Quantisation::new(fields).map_or(Factors::ONE, |other| factors(&other, amax))
            };
        },
    },
    QuantiserFault {
        id: "codes-do-not-saturate",
        imitates: "a value past the range becomes NaN or an infinity",
        source: CAST,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.code =
                |format, value, factors| format.encode_unsaturated(f64::from(value * factors.scale));
        },
    },
    QuantiserFault {
        id: "codes-cut-off",
        imitates: "values are cut off towards zero, not rounded to nearest",
        source: CVT,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.code = |format, value, factors| {
                let product = f64::from(value * factors.scale);
                let code = format.encode(product);
                let above = format.decode(code).abs() > product.abs();
                if above { code - 1 } else { code }
            };
        },
    },
    QuantiserFault {
        id: "codes-with-ties-away-from-zero",
        imitates: "a value halfway between two codes becomes the larger one, not the even one",
        source: CVT,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.code = |format, value, factors| {
                format.encode(f64::from(value * factors.scale) * (1.0 + f64::EPSILON))
            };
        },
    },
    QuantiserFault {
        id: "codes-of-a-product-in-f64",
        imitates: "the product with the scale is not rounded to f32 before it becomes a code",
        source: CVT,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.code = |format, value, factors| format.encode(f64::from(value) * f64::from(factors.scale));
        },
    },
    QuantiserFault {
        id: "codes-of-bf16-products",
        imitates: "the product with the scale is rounded to the tensor's format before it becomes a code",
        source: CVT,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.code = |format, value, factors| {
                format.encode(f64::from(Format::Bf16.round_f32(value * factors.scale)))
            };
        },
    },
    QuantiserFault {
        id: "codes-flushed-to-zero",
        imitates: "subnormal numbers of the format become zeros",
        source: CVT,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.code = |format, value, factors| {
                let product = f64::from(value * factors.scale);
                let smallest = libm::ldexp(1.0, format.exponent_min());
                format.encode(if product.abs() < smallest { 0.0 } else { product })
            };
        },
    },
    QuantiserFault {
        id: "codes-divided-by-the-descale",
        imitates: "values are divided by the rounded descale, not multiplied by the scale",
        source: RULE,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| {
            stages.code = |format, value, factors| format.encode(f64::from(value / factors.descale));
        },
    },
    QuantiserFault {
        id: "codes-in-padding",
        imitates: "padding rows get the codes of what they hold, and a NaN there meets a weight of 0",
        source: "https://github.com/Dao-AILab/flash-attention/issues/1990",
        entries: &[],
        caught_by: &[Structure],
        edit: |stages| stages.encoded = |run| run.span,
    },
    QuantiserFault {
        id: "codes-without-the-last-row",
        imitates: "the last real row of a run keeps codes of zero",
        source: CVT,
        entries: &[],
        caught_by: &[Exact],
        edit: |stages| stages.encoded = |run| run.len.saturating_sub(1),
    },
];

/// Returns the half of a group that a rank is in; the whole group where it is odd.
fn half(rank: usize, ranks: &[Array3<f32>]) -> &[Array3<f32>] {
    let size = if ranks.len().is_multiple_of(2) { ranks.len() / 2 } else { ranks.len() };
    &ranks[rank / size * size..][..size]
}

fn with_margin(asked: &Quantisation, margin: i32) -> Quantisation {
    let fields = QuantisationFields { margin, ..asked.clone().into() };
    Quantisation::new(fields).unwrap_or_else(|_| asked.clone())
}
