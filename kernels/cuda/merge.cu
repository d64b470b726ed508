// Partial results folded into running ones: statistics, out, gradients; and the largest logit of valid rows.
//
// out and gradients are [rows, heads, dim], statistics [heads, rows]. Only real rows are read and written. A *part* says
// which rows of the slots a step worked on: all of them, or the first or second half; the step's tensors have the same
// layout as the running ones, or (compact) that of halves. An empty statistic is -inf: it is the identity, and the
// element that goes with it is never multiplied, so that whatever lies there stays out.
#include "common.cuh"

constexpr int WHOLE = -1;

struct Part {
    Slots slots;
    // WHOLE, 0 or 1.
    int half;
    int compact;
    // Rows of the layout of halves.
    int half_rows;
};

struct Pair {
    int running;
    int step;
};

__device__ __forceinline__ i64 part_rows(const Part& part) {
    return part.half == WHOLE ? part.slots.rows : part.half_rows;
}

// The rows that belong together, both -1 where there is no real row.
__device__ __forceinline__ Pair pair_at(const Part& part, int row) {
    if (part.half == WHOLE) return is_real(part.slots, row) ? Pair{row, row} : Pair{-1, -1};
    const HalfRow found = half_row_of(part.slots, part.half, row);
    if (found.row < 0) return {-1, -1};
    const i64 in_slot = found.row - __ldg(part.slots.offset + found.slot);
    if (in_slot >= __ldg(part.slots.len + found.slot)) return {-1, -1};
    return {found.row, part.compact ? row : found.row};
}

__device__ __forceinline__ float larger(float a, float b) { return b > a ? b : a; }

__device__ __forceinline__ float log_add(float a, float b) {
    const float largest = larger(a, b);
    if (largest == neg_infinity()) return largest;
    return largest + exact_ln(exact_exp(a - largest) + exact_exp(b - largest));
}

__device__ __forceinline__ float share(float a, float total) {
    return a == neg_infinity() ? 0.0f : exact_exp(a - total);
}

__device__ __forceinline__ float scaled(float value, float weight) {
    return weight == 0.0f ? 0.0f : value * weight;
}

// Statistics alone. A thread has one row and HEADS heads, so that a warp reads 32 neighbours.
constexpr int HEADS = 4;

extern "C" __global__ void __launch_bounds__(THREADS) merge_statistics(
    const __grid_constant__ Part part, float* __restrict__ lse, const float* __restrict__ step_lse, int heads,
    i64 step_rows
) {
    const i64 row = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (row >= part_rows(part)) return;
    const Pair pair = pair_at(part, (int)row);
    if (pair.running < 0) return;
    float old[HEADS], added[HEADS];
    const int first = blockIdx.y * HEADS;
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
        const i64 head = first + i;
        if (head < heads) {
            old[i] = lse[head * part.slots.rows + pair.running];
            added[i] = step_lse[head * step_rows + pair.step];
        }
    }
#pragma unroll
    for (int i = 0; i < HEADS; ++i)
        if (first + i < heads) lse[(i64)(first + i) * part.slots.rows + pair.running] = log_add(old[i], added[i]);
}

// One half of a statistic to or from the layout of halves; whole halves, padding included.
extern "C" __global__ void __launch_bounds__(THREADS) half_statistics(
    const __grid_constant__ Part part, u32* __restrict__ whole, u32* __restrict__ halves, int heads, int write,
    int fill_rest, u32 pattern
) {
    const i64 row = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (row >= part.half_rows) return;
    const i64 there = half_row_of(part.slots, part.half, (int)row).row;
    const int first = blockIdx.y * HEADS;
#pragma unroll
    for (int i = 0; i < HEADS; ++i) {
        const i64 head = first + i;
        if (head >= heads) break;
        u32* in_half = halves + head * part.half_rows + row;
        if (there < 0) {
            if (fill_rest) *in_half = pattern;
        } else if (write) {
            whole[head * part.slots.rows + there] = *in_half;
        } else {
            *in_half = whole[head * part.slots.rows + there];
        }
    }
}

// Weights of a tile: a pair for each row and head.
constexpr u32 WEIGHTS_MAX = 1024;
constexpr u32 MERGE_ROWS_MAX = 64;
constexpr int RUNNING = 0, WEIGHTED = 1, WEIGHTED_ROUNDED = 2;

struct Shape {
    int heads;
    int dim;
    // Rows and heads of a tile.
    int tile_rows;
    int tile_heads;
    // Rows of the step's statistics.
    i64 step_rows;
};

struct Tile {
    i64 first;
    u32 rows;
    int head;
    u32 heads;
};

__device__ __forceinline__ Tile tile_of(const Part& part, const Shape& shape) {
    const i64 first = (i64)blockIdx.x * shape.tile_rows, left = part_rows(part) - first;
    const int head = blockIdx.y * shape.tile_heads, heads_left = shape.heads - head;
    return {
        first, (u32)(left < shape.tile_rows ? left : shape.tile_rows), head,
        (u32)(heads_left < shape.tile_heads ? heads_left : shape.tile_heads)
    };
}

__device__ __forceinline__ void place_rows(const Part& part, const Tile& tile, Pair* pairs) {
    if (threadIdx.x < tile.rows) pairs[threadIdx.x] = pair_at(part, (int)(tile.first + threadIdx.x));
    __syncthreads();
}

// out and, with RUNNING, its statistic. RUNNING: both weighted by their shares of the new total. WEIGHTED: the step
// weighted by its share of a total that is known already.
template <int ACC, int STEP, int STYLE, int N>
__device__ __forceinline__ void merge_out(
    const Part& part, const Shape& shape, void* out, const void* step_out, float* lse, const float* step_lse
) {
    __shared__ Pair pairs[MERGE_ROWS_MAX];
    __shared__ float keep[WEIGHTS_MAX];
    __shared__ float add[WEIGHTS_MAX];
    const Tile tile = tile_of(part, shape);
    place_rows(part, tile, pairs);
    for (u32 i = threadIdx.x; i < tile.rows * tile.heads; i += THREADS) {
        const u32 row = i % tile.rows, head = i / tile.rows;
        const Pair pair = pairs[row];
        if (pair.running < 0) continue;
        float* const statistic = lse + (i64)(tile.head + head) * part.slots.rows + pair.running;
        const float old = *statistic, added = step_lse[(tile.head + head) * shape.step_rows + pair.step];
        const float total = STYLE == RUNNING ? log_add(old, added) : old;
        keep[row * tile.heads + head] = STYLE == RUNNING ? share(old, total) : 1.0f;
        add[row * tile.heads + head] = share(added, total);
        if (STYLE == RUNNING) *statistic = total;
    }
    __syncthreads();
    const u32 lanes = shape.dim / N, row_vectors = tile.heads * lanes;
    const i64 width = (i64)shape.heads * shape.dim, base = (i64)tile.head * shape.dim;
    for (u32 i = threadIdx.x; i < tile.rows * row_vectors; i += THREADS) {
        const u32 row = i / row_vectors, column = i - row * row_vectors;
        const Pair pair = pairs[row];
        if (pair.running < 0) continue;
        const u32 weight = row * tile.heads + column / lanes;
        const float kept = keep[weight], adding = add[weight];
        const i64 place = pair.running * width + base + (i64)column * N;
        float running[N], step[N];
        load<ACC, N>(out, place, running);
        load<STEP, N>(step_out, pair.step * width + base + (i64)column * N, step);
#pragma unroll
        for (int lane = 0; lane < N; ++lane) {
            const float product = scaled(step[lane], adding);
            running[lane] = scaled(running[lane], kept)
                + (STYLE == WEIGHTED_ROUNDED ? rounded<ACC>(product) : product);
        }
        store<ACC, N>(out, place, running);
    }
}

// Gradients of a step copied or added, for each half by itself.
// 0: left alone; 1: copied; 2: added.
constexpr int LEAVE = 0, ADD = 2;

template <int ACC, int STEP, int N>
__device__ __forceinline__ void accumulate(
    const Part& part, const Shape& shape, int first_op, int second_op, void* sum, const void* step
) {
    __shared__ Pair pairs[MERGE_ROWS_MAX];
    __shared__ int operation[MERGE_ROWS_MAX];
    const Tile tile = tile_of(part, shape);
    if (threadIdx.x < tile.rows) {
        const int row = (int)(tile.first + threadIdx.x);
        pairs[threadIdx.x] = pair_at(part, row);
        int half = part.half;
        if (half == WHOLE) {
            const int s = slot_of(part.slots, row);
            half = s >= 0 && row - __ldg(part.slots.offset + s) >= __ldg(part.slots.span + s) / 2;
        }
        operation[threadIdx.x] = half ? second_op : first_op;
    }
    __syncthreads();
    const u32 row_vectors = tile.heads * (shape.dim / N);
    const i64 width = (i64)shape.heads * shape.dim, base = (i64)tile.head * shape.dim;
#pragma unroll 2
    for (u32 i = threadIdx.x; i < tile.rows * row_vectors; i += THREADS) {
        const u32 row = i / row_vectors, column = i - row * row_vectors;
        const Pair pair = pairs[row];
        if (pair.running < 0 || operation[row] == LEAVE) continue;
        const i64 place = pair.running * width + base + (i64)column * N;
        float value[N], old[N];
        load<STEP, N>(step, pair.step * width + base + (i64)column * N, value);
        if (operation[row] == ADD) {
            load<ACC, N>(sum, place, old);
#pragma unroll
            for (int lane = 0; lane < N; ++lane) value[lane] = old[lane] + value[lane];
        }
        store<ACC, N>(sum, place, value);
    }
}

#define MERGE(style, STYLE, acc, ACC, step, STEP, n)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) merge_##style##_##acc##_##step##_##n(                     \
        const __grid_constant__ Part part, const __grid_constant__ Shape shape, void* __restrict__ out,             \
        const void* __restrict__ step_out, float* lse, const float* __restrict__ step_lse                           \
    ) {                                                                                                             \
        merge_out<ACC, STEP, STYLE, n>(part, shape, out, step_out, lse, step_lse);                                  \
    }
#define ACCUMULATE(acc, ACC, step, STEP, n)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) accumulate_##acc##_##step##_##n(                          \
        const __grid_constant__ Part part, const __grid_constant__ Shape shape, int first_op, int second_op,        \
        void* __restrict__ sum, const void* __restrict__ step_sum                                                   \
    ) {                                                                                                             \
        accumulate<ACC, STEP, n>(part, shape, first_op, second_op, sum, step_sum);                                  \
    }
#define FORMATS_N(acc, ACC, step, STEP, n)                                                                          \
    MERGE(running, RUNNING, acc, ACC, step, STEP, n)                                                                \
    MERGE(weighted, WEIGHTED, acc, ACC, step, STEP, n)                                                              \
    MERGE(weighted_rounded, WEIGHTED_ROUNDED, acc, ACC, step, STEP, n)                                              \
    ACCUMULATE(acc, ACC, step, STEP, n)
#define FORMATS(acc, ACC, step, STEP) FORMATS_N(acc, ACC, step, STEP, 8) FORMATS_N(acc, ACC, step, STEP, 1)

FORMATS(f32, F32, f32, F32)
FORMATS(f32, F32, bf16, BF16)
FORMATS(f32, F32, fp16, FP16)
FORMATS(bf16, BF16, bf16, BF16)
FORMATS(fp16, FP16, fp16, FP16)

// The largest logit of a head over valid rows, of one number for each head and row. Every order gives the same bits:
// numbers are compared as integers, +0 above -0.
constexpr int LOGIT_HEADS = 8;
constexpr int LOGIT_ROWS = 4;

__device__ __forceinline__ int key_of(float value) {
    const int bits = __float_as_int(value);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ __forceinline__ void raise(float* to, int key) {
    const int bits = key ^ ((key >> 31) & 0x7fffffff);
    if (bits >= 0) atomicMax((int*)to, bits);
    else atomicMin((u32*)to, (u32)bits);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    max_logit(const __grid_constant__ Slots slots, const float* __restrict__ rows_max, int heads, float* largest) {
    __shared__ int keys[LOGIT_HEADS][THREADS / 32];
    const i64 first = (i64)blockIdx.x * THREADS * LOGIT_ROWS + threadIdx.x;
    const int head = blockIdx.y * LOGIT_HEADS, lowest = key_of(neg_infinity());
    bool real[LOGIT_ROWS];
#pragma unroll
    for (int i = 0; i < LOGIT_ROWS; ++i) {
        const i64 row = first + i * THREADS;
        real[i] = row < slots.rows && is_real(slots, (int)row);
    }
#pragma unroll
    for (int h = 0; h < LOGIT_HEADS; ++h) {
        int key = lowest;
#pragma unroll
        for (int i = 0; i < LOGIT_ROWS; ++i)
            if (real[i] && head + h < heads)
                key = max(key, key_of(__ldcs(rows_max + (i64)(head + h) * slots.rows + first + i * THREADS)));
        key = __reduce_max_sync(0xffffffffu, key);
        if (threadIdx.x % 32 == 0) keys[h][threadIdx.x / 32] = key;
    }
    __syncthreads();
    if (threadIdx.x < LOGIT_HEADS && head + threadIdx.x < heads) {
        int key = lowest;
        for (u32 warp = 0; warp < THREADS / 32; ++warp) key = max(key, keys[threadIdx.x][warp]);
        if (key > lowest) raise(largest + head + threadIdx.x, key);
    }
}

// The start of a maximum.
extern "C" __global__ void __launch_bounds__(THREADS) fill_words(u32* words, i64 count, u32 pattern) {
    const i64 word = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (word < count) words[word] = pattern;
}
