//! Planted faults of the passes in FP8. A campaign's judge must find them.

use super::entry::{
    BACKWARD_IN_FP8, BugClass, Detector, IN_FP8, LONG_ROWS_IN_FP8, READS, SPREADS, SourceEdit, SourceFault,
    VALUES, faults,
};

/// The faults of every tile in FP8, and of the turned copy that it takes.
pub(super) const FP8_FAULTS: &[SourceFault] = faults! { IN_FP8;
    "columns-of-codes-not-cleared", MissingGuard, ("0 · NaN of V behind the end", "https://github.com/Dao-AILab/flash-attention/issues/2374"), "forward.cu",
        "if (kept != 0xffffffffu) and_shared(at, kept);"
            => "",
        READS;
    "keys-before-the-run-seen", WrongSeam, ("a block takes keys of the sequence before", "https://github.com/NVIDIA/TransformerEngine/pull/2596"), "forward.cu",
        "IS_FP8 ? max(r + bounds.lo, block.first + block.hidden) : r + bounds.lo"
            => "r + bounds.lo",
        READS;
    "sums-of-blocks-run-on", Arithmetic, ("the sum of a block begins with that of the block before", "https://github.com/vllm-project/flash-attention/pull/104"), "forward.cu",
        "v + step * 2, step > 0);"
            => "v + step * 2, 1);",
        READS;
    "lanes-above-128-left-out", Arithmetic, ("results with head dim 256 are wrong", "https://github.com/flashinfer-ai/flashinfer/issues/1993"), "forward.cu",
        "s[key / 2 + i] += others[i];"
            => "s[key / 2 + i] += 0.0f * others[i];",
        VALUES;
    "lanes-above-128-of-the-first-keys", WrongSeam, ("results with head dim 256 are wrong", "https://github.com/flashinfer-ai/flashinfer/issues/1993"), "forward.cu",
        "k + ((C::KEYS + key) * 128 >> 4)"
            => "k + (C::KEYS * 128 >> 4)",
        VALUES;
    "out-above-64-of-the-first-lanes", WrongSeam, ("results with head dim 256 are wrong", "https://github.com/flashinfer-ai/flashinfer/issues/1993"), "forward.cu",
        "v + (lane * 128 >> 4)"
            => "v",
        VALUES;
    "part-added-by-the-other-rows-factor", Arithmetic, ("out is rescaled by another row's maximum", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "fmaf(o[lane / 2 + i], factor[i / 2 % 2], of_part[i])"
            => "fmaf(o[lane / 2 + i], factor[1 - i / 2 % 2], of_part[i])",
        VALUES;
    "descale-of-k-not-applied", WrongSeam, ("the scale of k is not applied", "https://github.com/flashinfer-ai/flashinfer/issues/4984"), "forward.cu",
        "a.scale * a.descales[Q][of_q] * a.descales[K][of_kv]"
            => "a.scale * a.descales[Q][of_q]",
        VALUES;
    "descale-of-v-by-segment", WrongSeam, ("every KV head is given the scale of the first", "https://github.com/vllm-project/vllm/issues/47037"), "forward.cu",
        "a.descales[V][of_kv]"
            => "a.descales[V][of_kv - head / a.group]",
        VALUES;
    "factor-of-codes-in-the-lse", Arithmetic, ("the LSE keeps the logarithm of the factor of the weights", "https://github.com/flashinfer-ai/flashinfer/issues/3372"), "forward.cu",
        "return exponent_of(base - lost);"
            => "return exponent_of(base - lost) - WEIGHT_EXPONENT;",
        VALUES;
    "far-levels-saturate", MissingGuard, ("P scaled by a rounded maximum exceeds 448 and saturates", "https://github.com/Dao-AILab/flash-attention/issues/2716"), "forward.cu",
        "fabsf(base) * scale_log2 > FUSED_LEVEL ? base : 0.0f"
            => "0.0f",
        Detector::Levels;
    "scores-below-0-by-their-integers", MissingGuard, ("the maximum of scores that are all negative", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "if (largest[half] < 0) largest[half] = smallest;"
            => ";",
        VALUES;
    "codes-turned-in-natural-order", WrongSeam, ("P and V have other orders of keys", "https://github.com/flashinfer-ai/flashinfer/issues/3864"), "turned.cu",
        "16 * group + row_at(at)"
            => "16 * group + at",
        READS;
    "codes-moved-as-16-bits", WrongSeam, ("codes of other ranks are copied as if they had two bytes", "https://github.com/NVIDIA/TransformerEngine/pull/1574"), "pairs.cu",
        "if (view.format == E4M3) return ((const u8*)view.base)[place];"
            => "",
        READS;
};

/// The faults of how a block's sum is added to those of blocks before.
pub(super) const FP8_ROW_FAULTS: &[SourceFault] = faults! { LONG_ROWS_IN_FP8;
    "block-added-by-its-own-level", Arithmetic, ("out is rescaled by the next block's maximum", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "if constexpr (follows) add_block(by);"
            => "if constexpr (follows) add_block(factor);",
        VALUES;
};

/// The faults of the backward in FP8, and of the gradient of sinks on codes.
pub(super) const FP8_BACKWARD_FAULTS: &[SourceFault] = faults! { BACKWARD_IN_FP8;
    "padding-in-turned-copies", MissingGuard, ("0 · NaN of rows behind the end", "https://github.com/Dao-AILab/flash-attention/issues/1990"), "backward.cu",
        "if (row < from.real && lane < dim)"
            => "if (row < from.owned && lane < dim)",
        SPREADS;
    "keys-turned-as-queries", WrongSeam, ("two operands have other orders of keys", "https://github.com/flashinfer-ai/flashinfer/issues/3864"), "backward.cu",
        "OF_KEYS ? position / 2 + position % 2 * 8 :"
            => "false ? 0 :",
        VALUES;
    "dout-in-place-of-queries", WrongSeam, ("a gradient's operand is another tensor's", "https://github.com/NVIDIA/TransformerEngine/pull/1597"), "backward.cu",
        "turn<false, ROWS>(rows, to, 0);"
            => "turn<false, ROWS>(of_dout, to, 0);",
        VALUES;
    "factor-of-one-warp", Arithmetic, ("the factor of a tile's dS comes of a part of it", "https://github.com/pytorch/torchtitan/issues/3109"), "backward.cu",
        "power_of((u32)max(max(four.x, four.y), max(four.z, four.w)))"
            => "power_of((u32)four.x)",
        VALUES;
    "factor-saturates", Arithmetic, ("the largest numbers of a tile saturate", "https://github.com/uxlfoundation/oneDNN/pull/5626"), "backward.cu",
        "int biased = min(max(262 - exponent, 1), 253);"
            => "int biased = min(max(263 - exponent, 1), 253);",
        VALUES;
    "factor-of-the-other-group", WrongSeam, ("a block of keys is divided by its neighbour's factor", "https://github.com/NVIDIA/cudnn-frontend/issues/520"), "backward.cu",
        "__fmaf_rn(other[i], inverses.y, dq[i] * inverses.x)"
            => "__fmaf_rn(other[i], inverses.x, dq[i] * inverses.x)",
        VALUES;
    "lanes-of-the-first-half", WrongSeam, ("the second half of the lanes repeats the first", "https://github.com/Dao-AILab/flash-attention/issues/2651"), "backward.cu",
        "sum_rows<E4M3>(other, ds, q + LANES);"
            => "sum_rows<E4M3>(other, ds, q);",
        VALUES;
    "sums-of-rows-run-on", Arithmetic, ("a product begins with the sum of the one before", "https://github.com/vllm-project/flash-attention/pull/104"), "backward.cu",
        "const int add = step > 0;"
            => "const int add = 1;",
        READS;
    "dk-without-descale-of-q", WrongSeam, ("the scale of q is not applied to dk", "https://github.com/NVIDIA/cudnn-frontend/issues/520"), "backward.cu",
        "dout * a.descales[V][of_keys], q / WEIGHT_FACTOR,"
            => "dout * a.descales[V][of_keys], a.scale / WEIGHT_FACTOR,",
        VALUES;
    "dq-without-descale-of-k", WrongSeam, ("the scale of k is not applied to dq", "https://github.com/NVIDIA/cudnn-frontend/issues/520"), "backward.cu",
        "a.scale / WEIGHT_FACTOR * a.descales[K][(i64)tile.opening * (a.heads / a.group) + tile.head]"
            => "a.scale / WEIGHT_FACTOR",
        VALUES;
    "d-of-codes", WrongSeam, ("D is made of dout's codes, without their scale", "https://github.com/flashinfer-ai/flashinfer/issues/4984"), "backward.cu",
        "return a.descales[DOUT][(i64)a.q_tile_segment[tile] * a.heads + head];"
            => "return 1.0f;",
        VALUES;
    "descale-of-keys-by-query-head", WrongSeam, ("query heads of a group have the scales of other KV heads", "https://github.com/vllm-project/vllm/issues/47037"), "backward.cu",
        "(a.heads / a.group) + head / a.group;\n    const float dout"
            => "(a.heads / a.group) + head % (a.heads / a.group);\n    const float dout",
        VALUES;
    "dout-of-e5m2-as-e4m3", WrongSeam, ("a gradient of e5m2 is read as e4m3", "https://github.com/NVIDIA/TransformerEngine/pull/2718"), "backward.cu",
        "cvt.rn.f16x2.e5m2x2"
            => "cvt.rn.f16x2.e4m3x2",
        VALUES;
    "ragged-tiles-at-the-end-not-masked", MissingGuard, ("keys behind a window have gradients", "https://github.com/NVIDIA/TransformerEngine/pull/1212"), "backward.cu",
        "if (now < whole || now >= whole_end) mask(s, dp"
            => "if (now < whole) mask(s, dp",
        READS;
    "sink-gradient-of-codes", WrongSeam, ("the gradient of a sink is made of dout's codes", "https://github.com/flashinfer-ai/flashinfer/issues/4984"), "pairs.cu",
        "if (counts && a.codes != 0)"
            => "if (false)",
        VALUES;
};
