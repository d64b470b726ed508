//! Planted faults of quantising. The judge of quantisers must find them.

use super::entry::{BugClass, BugSource, Detector, SIMPLE, SourceEdit, SourceFault, faults};

const TE_2892: BugSource = (
    "the largest magnitude is taken over padding",
    "https://github.com/NVIDIA/TransformerEngine/issues/2892",
);
const TE_335: BugSource = (
    "the descale is made of the amax, and not of the scale",
    "https://github.com/NVIDIA/TransformerEngine/issues/335",
);
const TORCHTITAN_3109: BugSource =
    ("a rank's scale is of another rank's values alone", "https://github.com/pytorch/torchtitan/issues/3109");
const FA_1990: BugSource = (
    "padding gets the codes of what it holds, NaN included",
    "https://github.com/Dao-AILab/flash-attention/issues/1990",
);
const FLASHINFER_4984: BugSource =
    ("a scale is another head's", "https://github.com/flashinfer-ai/flashinfer/issues/4984");
const AMAX: &str = "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/recipe/current_scaling.cu";
const DELAYED: &str = "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/recipe/delayed_scaling.cu";
const CVT: &str =
    "https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt";

/// The faults of magnitudes, factors and codes.
pub(super) const QUANTISER_FAULTS: &[SourceFault] = faults! { SIMPLE;
    "padding-in-the-magnitude", WrongSeam, TE_2892, "quantise.cu",
        "if (real) most = larger(most, values[i]);"
            => "most = larger(most, values[i]);",
        Detector::Codes;
    "magnitude-with-its-sign", Arithmetic, ("a negative number is compared with its sign", AMAX), "quantise.cu",
        "values.word[i] & ~SIGNS"
            => "values.word[i]",
        Detector::Codes;
    "magnitude-of-one-half", LastSequence, ("of two elements in a word the second is left out", AMAX), "quantise.cu",
        "max(most & 0xffff, most >> 16)"
            => "most & 0xffff",
        Detector::Codes;
    "magnitude-of-one-lane", LastSequence, ("a warp sends what one lane of it found", AMAX), "quantise.cu",
        "const u32 most = __reduce_max_sync(alike, bits);"
            => "const u32 most = bits;",
        Detector::Codes;
    "magnitude-of-the-group-before", WrongSeam, ("a group begins with the largest of the group before", AMAX), "quantise.cu",
        "                most = 0;"
            => "                ;",
        Detector::Codes;
    "magnitude-of-the-last-rank", GlobalOffset, TORCHTITAN_3109, "quantise.cu",
        "amax[i] = max(amax[i], other[i])"
            => "amax[i] = other[i]",
        Detector::Codes;
    "scale-of-the-next-head", WrongSeam, FLASHINFER_4984, "quantise.cu",
        "return head / a.heads_each * a.lane_groups"
            => "return (head / a.heads_each + 1) % a.head_groups * a.lane_groups",
        Detector::Codes;
    "descale-of-the-magnitude", Arithmetic, TE_335, "quantise.cu",
        "make_float2(scale, 1.0f / scale)"
            => "make_float2(scale, amax / recipe.largest)",
        Detector::Codes;
    "largest-where-the-newest-counts", WrongSeam, ("a delayed recipe takes the largest of its history, not the newest", DELAYED), "quantise.cu",
        "entry < recipe.entries && !recipe.newest"
            => "entry < recipe.entries",
        Detector::Codes;
    "scale-of-0-forgotten", MissingGuard, ("the scale of the step before is lost where the history holds zeros", DELAYED), "quantise.cu",
        "if (amax == 0.0f && recipe.rule != E8M0_UP) scale = recipe.otherwise;"
            => "if (amax == 0.0f && recipe.rule != E8M0_UP) scale = 1.0f;",
        Detector::Codes;
    "quotient-past-f32", MissingGuard, ("a quotient that overflows is an infinity", DELAYED), "quantise.cu",
        "fminf(recipe.largest / amax, 3.402823466e38f)"
            => "recipe.largest / amax",
        Detector::Codes;
    "codes-of-padding", MissingGuard, FA_1990, "quantise.cu",
        "if (is_group(a, group)) codes_of_values"
            => "codes_of_values",
        Detector::Codes;
    "codes-of-neighbours-exchanged", Arithmetic, ("codes of two neighbours are exchanged", CVT), "quantise.cu",
        "codes_of<CODES>(product(i), product(i + 1), product(i + 2), product(i + 3))"
            => "codes_of<CODES>(product(i), product(i + 2), product(i + 1), product(i + 3))",
        Detector::Codes;
    "magnitude-of-a-part-of-a-row", LastSequence, ("an amax of some lanes alone", AMAX), "quantise.cu",
        "apart < together; apart *= 2"
            => "apart < 4; apart *= 2",
        Detector::Codes;
    "factors-of-two-heads-in-one-place", WrongSeam, FLASHINFER_4984, "quantise.cu",
        "column.element / N >> __ffs(together) - 1"
            => "column.element / N >> __ffs(together)",
        Detector::Codes;
    "turned-codes-of-another-format", WrongSeam, ("codes of e5m2 are written as e4m3", CVT), "turned.cu",
        "Values<E5M2, FORMAT>"
            => "Values<E4M3, FORMAT>",
        Detector::Codes;
    "turned-without-the-half", LastSequence, ("of 16 lanes of a row the second half is that of the first", CVT), "turned.cu",
        "a.values, element + i * N, values[i]"
            => "a.values, element, values[i]",
        Detector::Codes;
};
