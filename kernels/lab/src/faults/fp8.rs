//! Planted faults of the forward in FP8. A campaign's judge must find them.

use super::entry::{BugClass, Detector, IN_FP8, READS, SourceEdit, SourceFault, VALUES, faults};

/// The faults of every tile in FP8, and of the turned copy that it takes.
pub(super) const FP8_FAULTS: &[SourceFault] = faults! { IN_FP8;
    "columns-of-codes-not-cleared", MissingGuard, ("0 · NaN of V behind the end", "https://github.com/Dao-AILab/flash-attention/issues/2374"), "forward.cu",
        "if (columns.code != C::KEYS) clear_columns<C>(shared.v(v_ring().stage()), columns);"
            => ";",
        READS;
    "keys-before-the-run-seen", WrongSeam, ("a block takes keys of the sequence before", "https://github.com/NVIDIA/TransformerEngine/pull/2596"), "forward.cu",
        "IS_FP8 ? max(r + bounds.lo, block.first + block.hidden) : r + bounds.lo"
            => "r + bounds.lo",
        READS;
    "sums-of-blocks-run-on", Arithmetic, ("the sum of a block begins with that of the block before", "https://github.com/vllm-project/flash-attention/pull/104"), "forward.cu",
        "v + step * 2, step > 0);"
            => "v + step * 2, 1);",
        VALUES;
    "block-added-by-its-own-level", Arithmetic, ("out is rescaled by the next block's maximum", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "if constexpr (follows) add_block(by);"
            => "if constexpr (follows) add_block(factor);",
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
        "16 * group + j / 2 * 8 + 2 * i + j % 2"
            => "16 * group + 4 * i + j",
        VALUES;
    "codes-moved-as-16-bits", WrongSeam, ("codes of other ranks are copied as if they had two bytes", "https://github.com/NVIDIA/TransformerEngine/pull/1574"), "pairs.cu",
        "if (view.format == E4M3) return ((const u8*)view.base)[place];"
            => "",
        VALUES;
};
