//! Planted faults of barriers: a barrier of a block, or of a group of warps, becomes one of each warp.
//!
//! Warps of a block run nearly in step, so that such a race may pass for years. Here some warps are late before they
//! write what others read.

use super::entry::{
    BACKWARD_IN_FP8, BugClass, BugSource, Detector, READS, SIMPLE, SPLIT, SourceEdit, SourceFault, TUNED,
    WALKING, faults,
};

const TILELANG_2612: BugSource = (
    "a barrier between what some threads write and others read is dropped",
    "https://github.com/tile-ai/tilelang/issues/2612",
);

/// The faults of helpers and of turned copies.
pub(super) const HELPER_BARRIER_FAULTS: &[SourceFault] = faults! { SIMPLE;
    "rotated-rows-not-awaited", WrongSeam, TILELANG_2612, "rotation.cu",
        "if (base + i * THREADS < total) tile[base + i * THREADS] = value[i];\n    }\n    __syncthreads();"
            => "if (base + i * THREADS < total) {\n                if (threadIdx.x >= 64) __nanosleep(4000);\n                tile[base + i * THREADS] = value[i];\n            }\n    }\n    __syncwarp();",
        Detector::Bits(&["rotation"]);
    "largest-logits-of-warps-not-awaited", WrongSeam, TILELANG_2612, "merge.cu",
        "if (threadIdx.x % 32 == 0) keys[h][threadIdx.x / 32] = key;\n    }\n    __syncthreads();"
            => "if (threadIdx.x >= 32) __nanosleep(4000);\n        if (threadIdx.x % 32 == 0) keys[h][threadIdx.x / 32] = key;\n    }\n    __syncwarp();",
        Detector::Bits(&["largest logit"]);
    "turned-rows-not-awaited", WrongSeam, TILELANG_2612, "turned.cu",
        "tile[place_of_vector(row, i % VECTORS)] = lanes;\n    }\n    __syncthreads();"
            => "if (threadIdx.x >= 64) __nanosleep(4000);\n        tile[place_of_vector(row, i % VECTORS)] = lanes;\n    }\n    __syncwarp();",
        Detector::Codes;
};

/// The faults of warps that share a tile's keys.
pub(super) const SPLIT_BARRIER_FAULTS: &[SourceFault] = faults! { SPLIT;
    "parts-of-warps-not-awaited", WrongSeam, TILELANG_2612, "forward.cu",
        "if (lane % 4 == 0) put_part(row, {done.largest[half], done.rest[half], sum});\n        }\n        __syncthreads();"
            => "if (warp != 0) __nanosleep(4000);\n            if (lane % 4 == 0) put_part(row, {done.largest[half], done.rest[half], sum});\n        }\n        __syncwarp();",
        READS;
};

/// The faults of groups of warps in a backward.
pub(super) const BACKWARD_BARRIER_FAULTS: &[SourceFault] = faults! { TUNED;
    "other-groups-ds-not-awaited", WrongSeam, TILELANG_2612, "backward.cu",
        "put_square_if(!ragged, place + j / 8 * KEYS * 128, j % 8 * 8, ds[2 * j], ds[2 * j + 1], ds[2 * j + 2], ds[2 * j + 3]);\n            }\n            hold(ds);\n            if (ragged) {\n                mask(p, ds, a, at, now * ROWS);\n                store_gradients(shared.ds(stage), ds);\n            }\n            if constexpr (!IS_GENERAL) start_dv();\n            shared_stores_done();\n            if constexpr (!LATE) {\n                // Groups that come from different places of the program do not meet at a named barrier, as tools ask for.\n                if (alone) barrier_meet(shared.met());\n                else named_barrier(1, CONSUMERS);"
            => "}\n            hold(ds);\n            if (ragged) mask(p, ds, a, at, now * ROWS);\n            if (threadIdx.x >= 128) __nanosleep(4000);\n            store_gradients(shared.ds(stage), ds);\n            if constexpr (!IS_GENERAL) start_dv();\n            shared_stores_done();\n            if constexpr (!LATE) {\n                if (alone) barrier_meet(shared.met());\n                else __syncwarp();",
        READS;
    "dq-handed-over-before-it-is-stored", WrongSeam, TILELANG_2612, "backward.cu",
        "store_sums(own, dq);\n        if (DEFERS) return true;"
            => "__syncwarp();\n        release(shared.dq_full(group, turn));\n        __nanosleep(4000);\n        store_sums(own, dq);\n        return false;",
        READS;
};

/// The faults of walks whose dQ is that of the turn before.
pub(super) const WALK_BARRIER_FAULTS: &[SourceFault] = faults! { WALKING;
    "ds-of-the-turn-before-not-awaited", WrongSeam, TILELANG_2612, "backward.cu",
        "if (turn > 0) barrier_wait(shared.met(), (turn - 1) % 2);"
            => "if (threadIdx.x >= 128) __nanosleep(4000);",
        READS;
};

/// The faults of groups of warps in a backward in FP8.
pub(super) const FP8_BARRIER_FAULTS: &[SourceFault] = faults! { BACKWARD_IN_FP8;
    "largest-ds-of-warps-not-awaited", WrongSeam, TILELANG_2612, "backward.cu",
        "if (thread % 32 == 0) put_one(of_group + thread / 32 % 4 * 4, __uint_as_float(of_warp));\n}\n__device__ __forceinline__ Power power_of_group(u32 of_group) {\n    named_barrier(2 + kept(threadIdx.x) / 128, 128);"
            => "if (thread / 32 % 4 != 0) __nanosleep(4000);\n    if (thread % 32 == 0) put_one(of_group + thread / 32 % 4 * 4, __uint_as_float(of_warp));\n}\n__device__ __forceinline__ Power power_of_group(u32 of_group) {\n    __syncwarp();",
        READS;
};
