//! Planted faults of the forward's split shape: of tiles whose rows are heads, of pieces of keys, and of what puts these
//! together. A campaign's judge must find them.

use super::entry::{BugClass, BugSource, READS, SPLIT, SourceEdit, SourceFault, VALUES, faults};

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
        "for (int piece = warp; piece < count; piece += Split::WARPS) {"
            => "for (int piece = warp; piece < count - 1; piece += Split::WARPS) {",
        VALUES;
    "pieces-summed-without-weights", Arithmetic, FLASHINFER_58, "forward.cu",
        "all.sum += factor * part.sum;\n                add_part(sum, factor, of_piece(piece));"
            => "all.sum += part.sum;\n                add_part(sum, factor, of_piece(piece));",
        VALUES;
    "pieces-not-rescaled", Arithmetic, ("out is not rescaled", "https://arxiv.org/abs/1805.02867"), "forward.cu",
        "factor_of(part.largest, part.rest, level);\n                all.sum += factor * part.sum;\n                add_part(sum, factor, of_piece"
            => "1.0f;\n                all.sum += factor * part.sum;\n                add_part(sum, factor, of_piece",
        VALUES;
    "last-warp-left-out", LastSequence, FLASH_ATTENTION_2745, "forward.cu",
        "for (int w = 0; w < Split::WARPS; ++w) {\n                const Part part"
            => "for (int w = 0; w < Split::WARPS - 1; ++w) {\n                const Part part",
        VALUES;
    "last-piece-not-counted", LastSequence, FLASH_ATTENTION_2745, "forward.cu",
        "end = (seen.to - 1 >> log2) + 1;"
            => "end = seen.to >> log2;",
        VALUES;
    "pieces-of-heads-in-one-place", WrongSeam, FLASH_ATTENTION_2388, "forward.cu",
        "left * a.heads + head_pack * pieces.count + piece;"
            => "left * a.heads + piece;",
        VALUES;
    "pieces-read-with-another-stride", WrongSeam, FLASH_ATTENTION_2388, "forward.cu",
        "left * a.heads + head_pack * count;"
            => "left * a.heads + head_pack;",
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
        "while (run + 1 < count && runs[run + 1].first <= key) ++run;"
            => "while (run + 1 < count && runs[run + 1].first <= key - (int)(threadIdx.x % SPLIT_KEYS)) ++run;",
        READS;
};
