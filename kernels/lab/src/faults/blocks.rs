//! Planted faults of what a block takes along from one tile to the next, and of plans with more segments than threads.
//! They show where a launch has few blocks.

use super::entry::{
    BugClass, BugSource, FEW_BLOCKS, FEW_BLOCKS_IN_FP8, READS, SPREADS, SourceEdit, SourceFault, faults,
};

/// Bugs that several faults imitate.
const TILELANG_2674: BugSource = (
    "every tile of a persistent block but its first is wrong",
    "https://github.com/tile-ai/tilelang/pull/2674",
);
const LLAMA_26434: BugSource = (
    "tiles in shared memory are overwritten while others still read them",
    "https://github.com/ggml-org/llama.cpp/pull/26434",
);
const AITER_1352: BugSource =
    ("a plan of more sequences than it was made for", "https://github.com/ROCm/aiter/pull/1352");

/// The faults of a block's later tiles, and of a planner's later segments.
pub(super) const FEW_BLOCKS_FAULTS: &[SourceFault] = faults! { FEW_BLOCKS;
    "first-place-of-queries", WrongSeam, TILELANG_2674, "forward.cu",
        "descriptor(shared.q(q_ring().stage()) + rows_at"
            => "descriptor(shared.q(0) + rows_at",
        READS;
    "gradients-of-the-tile-before-kept", WrongSeam, TILELANG_2674, "backward.cu",
        "dk[i] = 0.0f, dv[i] = 0.0f;\n        if (tile.first"
            => "dk[i] = tiles.turns > 0 ? dk[i] : 0.0f, dv[i] = tiles.turns > 0 ? dv[i] : 0.0f;\n        if (tile.first",
        READS;
    "keys-overwritten-by-the-next-tiles", MissingGuard, LLAMA_26434, "backward.cu",
        "barrier_wait(shared.dout_empty(last.stage()), last.parity() ^ 1);"
            => ";",
        READS;
    "later-segments-not-counted", LastSequence, AITER_1352, "forward.cu",
        "for (int s = thread; s < a.segment_count; s += planners())"
            => "for (int s = thread; s < a.segment_count; s += a.segment_count)",
        SPREADS;
    "later-segments-cut-as-the-first-ones", WrongSeam, AITER_1352, "forward.cu",
        "const auto cut = cut_of(a, s);\n            first ="
            => "const auto cut = cut_of(a, s % planners());\n            first =",
        SPREADS;
    "later-runs-taken-for-the-first-ones", WrongSeam, AITER_1352, "forward.cu",
        "const KeyRun run = a.runs[r];"
            => "const KeyRun run = a.runs[r % planners()];",
        READS;
    "later-segments-not-counted-backward", LastSequence, AITER_1352, "backward.cu",
        "for (int s = thread; s < a.segment_count; s += planners())"
            => "for (int s = thread; s < a.segment_count; s += a.segment_count)",
        SPREADS;
};

/// The fault of a team's later tiles in FP8.
pub(super) const FEW_BLOCKS_FP8_FAULTS: &[SourceFault] = faults! { FEW_BLOCKS_IN_FP8;
    "scales-of-another-tile", WrongSeam, TILELANG_2674, "forward.cu",
        "get_factors(a, shared.tile(tile_ring.stage())).of_scores"
            => "get_factors(a, shared.tile(0)).of_scores",
        READS;
};
