//! Planted faults of the forward's split shape: of tiles whose rows are heads, of pieces of keys, and of what puts these
//! together; and of the mixed shape: of which sequences each of its launches takes. A campaign's judge must find them.

use super::entry::{
    BugClass, BugSource, FORGETS, MIXED, READS, SPLIT, SourceEdit, SourceFault, VALUES, faults,
};

/// Bugs that several faults imitate.
const FLASHINFER_58: BugSource =
    ("the LSE is wrong where keys are split", "https://github.com/flashinfer-ai/flashinfer/pull/58");
const FLASH_ATTENTION_2388: BugSource = (
    "partial results are written where others are read",
    "https://github.com/Dao-AILab/flash-attention/pull/2388",
);
const VLLM_87: BugSource = (
    "LSE of heads that share a tile is written in another order",
    "https://github.com/vllm-project/flash-attention/pull/87",
);
const FLASH_ATTENTION_2745: BugSource = (
    "the last part is dropped, as a quotient is rounded down",
    "https://github.com/Dao-AILab/flash-attention/pull/2745",
);
const FLASHINFER_5090: BugSource =
    ("keys behind the sequence's end are seen", "https://github.com/flashinfer-ai/flashinfer/pull/5090");

/// The faults of the split shape.
pub(super) const SPLIT_FAULTS: &[SourceFault] = faults! { SPLIT;
    "last-piece-left-out", LastSequence, FLASH_ATTENTION_2745, "forward.cu",
        "(first, SPLIT_ROWS * Split::LEFT, of.count, a.scale_log2, sum);"
            => "(first, SPLIT_ROWS * Split::LEFT, of.count - 1, a.scale_log2, sum);",
        VALUES;
    "pieces-summed-without-weights", Arithmetic, FLASHINFER_58, "forward.cu",
        "all.sum += of_part * __shfl_sync(FULL, own.sum, part);"
            => "all.sum += __shfl_sync(FULL, own.sum, part);",
        VALUES;
    "pieces-not-rescaled", Arithmetic, ("out is not rescaled", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "const float factor = factor_of(own.largest, own.rest, level);"
            => "const float factor = 1.0f;",
        VALUES;
    "last-warp-left-out", LastSequence, FLASH_ATTENTION_2745, "forward.cu",
        "(first, Split::WARP_BYTES / 4, Split::WARPS, a.scale_log2, sum);"
            => "(first, Split::WARP_BYTES / 4, Split::WARPS - 1, a.scale_log2, sum);",
        VALUES;
    "last-piece-not-counted", LastSequence, FLASH_ATTENTION_2745, "forward.cu",
        "end = (seen.to - 1 >> log2) + 1;"
            => "end = seen.to >> log2;",
        VALUES;
    "pieces-of-heads-in-one-place", WrongSeam, FLASH_ATTENTION_2388, "forward.cu",
        "place_left(a, left, head_pack, piece)"
            => "place_left(a, left, 0, piece)",
        VALUES;
    "pieces-read-with-another-stride", WrongSeam, FLASH_ATTENTION_2388, "forward.cu",
        "place_left(a, of, head_pack, 0)"
            => "(of.before * a.heads + head_pack)",
        VALUES;
    "ended-before-the-last-piece", WrongSeam, FLASH_ATTENTION_2388, "forward.cu",
        "return before + 1 == count;"
            => "return before + 2 == count;",
        READS;
    "few-segments-of-one-tile", WrongSeam, FLASH_ATTENTION_2388, "forward.cu",
        "put_segment(a, lane, cut, {{first}});"
            => "put_segment(a, lane, cut, {{(u32)lane}});",
        VALUES;
    "lse-of-shared-tile-in-another-order", WrongSeam, VLLM_87, "forward.cu",
        "        put(a.lse, place_of(a.lse, at, head), ended.lse);\n    }\n    const int lane"
            => "        put(a.lse, place_of(a.lse, at, first_head + b.pack - 1 - of.head), ended.lse);\n    }\n    const int lane",
        VALUES;
    "end-of-a-block-read", WrongSeam, FLASHINFER_5090, "forward.cu",
        "if (alone && key + SPLIT_KEYS <= tile.seen.to) {"
            => "if (alone) {",
        READS;
    "end-of-a-block-unmasked", WrongSeam, FLASHINFER_5090, "forward.cu",
        "if (!left || key > of.hi || key >= keys)"
            => "if (!left || key > of.hi)",
        VALUES;
    "split-diagonal-not-seen", WrongSeam, ("≥ for > at the right bound", "https://github.com/SandAI-org/MagiAttention/pull/117"), "forward.cu",
        "key > of.hi || key >= keys"
            => "key >= of.hi || key >= keys",
        VALUES;
    "split-window-one-short", WrongSeam, ("a window one key short", "https://github.com/NVIDIA/TransformerEngine/pull/1212"), "forward.cu",
        "const bool left = key >= of.lo ||"
            => "const bool left = key > of.lo ||",
        VALUES;
    "one-run-for-a-block", WrongSeam, ("keys are loaded together, as if they lay in one page", "https://github.com/hw-native-sys/pypto/pull/470"), "forward.cu",
        "while (run + 1 < count && runs[run + 1].first_key <= key) ++run;"
            => "while (run + 1 < count && runs[run + 1].first_key <= key - (int)(threadIdx.x % SPLIT_KEYS)) ++run;",
        READS;
};

/// The faults of the mixed shape.
pub(super) const MIXED_FAULTS: &[SourceFault] = faults! { MIXED;
    "sequences-between-short-and-long-left-out", WrongSeam, FLASH_ATTENTION_2745, "forward.cu",
        "segment.q_len < a.rows_to;"
            => "segment.q_len < a.rows_to / 2;",
        FORGETS;
};
