// The simple attention kernels on a CPU: as much of CUDA and of common.cuh as they use, and tensors of f32.
#pragma once
#include "threads.h"

#include <cstdio>

constexpr u32 WARPS = THREADS / LANES_OF_A_WARP;
inline float neg_infinity() { return -INFINITY; }
// Numbers are f32 here.
inline u16 f32_to_bf16(float) { return 0; }
inline u16 f32_to_fp16(float) { return 0; }
inline float rounded_to(int, float value) { return value; }
inline void atomicMax(int* at, int value) { *at = max(*at, value); }
inline void atomicMin(u32* at, u32 value) { *at = min(*at, value); }
// Rows are 64 bits wide.
inline i64 rows_shown[THREADS];
inline i64 __shfl_sync(u32, i64 value, int lane) {
    rows_shown[threadIdx.x] = value;
    sync_warp();
    const i64 other = rows_shown[warp() + lane % 32];
    sync_warp();
    return other;
}

#include "common.cuh"

#include "source.cu"

struct Tensor {
    std::vector<float> values;
    int heads, dim;

    Tensor(int rows, int heads, int dim, float value) : values(rows * heads * dim, value), heads(heads), dim(dim) {}
    // lse is [heads, rows], and has one lane.
    View rows() { return {(u64)values.data(), heads * dim, dim, F32}; }
    View statistic(int rows) { return {(u64)values.data(), 1, rows, F32}; }
};
