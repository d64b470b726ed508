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

// The rows that belong together, both -1 where there is no real row. All lanes of the warp together, rows in order.
__device__ __forceinline__ Pair pair_of_lane(const Part& part, i64 row) {
    if (part.half == WHOLE) {
        const int s = slot_of_lane(part.slots, row);
        return row < part.slots.rows && is_real(part.slots, s, row) ? Pair{(int)row, (int)row} : Pair{-1, -1};
    }
    const HalfRow found = half_row_of_lane(part.slots, part.half, row);
    if (found.row < 0 || row >= part.half_rows || !is_real(part.slots, found.slot, found.row)) return {-1, -1};
    return {found.row, part.compact ? (int)row : found.row};
}

__device__ __forceinline__ float larger(float a, float b) { return b > a ? b : a; }

__device__ __forceinline__ float log_add(float a, float b) {
    const float largest = larger(a, b);
    if (largest == neg_infinity()) return largest;
    // e^0 is 1, and a sum has no order.
    return largest + exact_ln(1.0f + exact_exp((a == largest ? b : a) - largest));
}

__device__ __forceinline__ float share(float a, float total) {
    return a == neg_infinity() ? 0.0f : exact_exp(a - total);
}

__device__ __forceinline__ float scaled(float value, float weight) {
    return weight == 0.0f ? 0.0f : value * weight;
}

// Statistics alone. A thread has one row and HEADS heads, AT_ONCE of them in flight, so that a warp reads 32 neighbours.
constexpr int HEADS = 16;
constexpr int AT_ONCE = 8;

extern "C" __global__ void __launch_bounds__(THREADS, 4) merge_statistics(
    const __grid_constant__ Part part, float* __restrict__ lse, const float* __restrict__ step_lse, int heads,
    i64 step_rows
) {
    const Pair pair = pair_of_lane(part, (i64)blockIdx.x * THREADS + threadIdx.x);
    if (pair.running < 0) return;
    const int first = blockIdx.y * HEADS, end = min(first + HEADS, heads);
    for (int head = first; head < end; head += AT_ONCE) {
        float* const running = lse + (i64)head * part.slots.rows + pair.running;
        const float* const step = step_lse + head * step_rows + pair.step;
        float old[AT_ONCE], added[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (head + i < end) old[i] = running[(i64)i * part.slots.rows], added[i] = step[i * step_rows];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (head + i < end) running[(i64)i * part.slots.rows] = log_add(old[i], added[i]);
    }
}

// One half of a statistic to or from the layout of halves; whole halves, padding included.
extern "C" __global__ void __launch_bounds__(THREADS, 4) half_statistics(
    const __grid_constant__ Part part, u32* whole, u32* halves, int heads, int write,
    int fill_rest, u32 pattern
) {
    const i64 row = (i64)blockIdx.x * THREADS + threadIdx.x;
    const i64 there = half_row_of_lane(part.slots, part.half, row).row;
    if (row >= part.half_rows || (there < 0 && !fill_rest)) return;
    const int first = blockIdx.y * HEADS, end = min(first + HEADS, heads);
    const i64 from_rows = write ? part.half_rows : part.slots.rows, to_rows = write ? part.slots.rows : part.half_rows;
    const u32* const from = (write ? halves : whole) + (write ? row : there);
    u32* const to = (write ? whole : halves) + (write ? there : row);
    for (i64 head = first; head < end; head += AT_ONCE) {
        u32 value[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            value[i] = head + i < end && there >= 0 ? __ldcs(from + (head + i) * from_rows) : pattern;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (head + i < end) __stcs(to + (head + i) * to_rows, value[i]);
    }
}

// Rows and heads of a tile have a pair of weights each. A thread has IN_FLIGHT vectors at once: two where f32 takes what
// is 16-bit; where both are of one format, more threads at once do better than more vectors a thread.
constexpr u32 WEIGHTS_MAX = 1024;
constexpr u32 MERGE_ROWS_MAX = 32;
template <int ACC, int STEP>
constexpr u32 IN_FLIGHT = ACC == F32 && STEP != F32 ? 2 : 1;
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

// A vector of a tile's elements: where it is, and of which row and head of the tile. `place` is -1 for none.
struct Vector {
    i64 place;
    i64 step;
    u32 row;
    u32 head;
};

template <int N>
__device__ __forceinline__ Vector vector_at(const Tile& tile, const Shape& shape, const Pair* pairs, u32 i) {
    const u32 lanes = shape.dim / N, row_vectors = tile.heads * lanes, row = i / row_vectors;
    if (row >= tile.rows || pairs[row].running < 0) return {-1, -1, 0, 0};
    const u32 column = i - row * row_vectors;
    const i64 width = (i64)shape.heads * shape.dim, base = (i64)tile.head * shape.dim + (i64)column * N;
    return {pairs[row].running * width + base, pairs[row].step * width + base, row, column / lanes};
}

// Weights of a tile: what is kept of the running out, what is added of the step's.
template <int STYLE>
__device__ __forceinline__ void weigh(
    const Part& part, const Shape& shape, const Tile& tile, const Pair* pairs, float* lse, const float* step_lse,
    float* keep, float* add
) {
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
    if (threadIdx.x < 32) pairs[threadIdx.x] = pair_of_lane(part, tile.first + threadIdx.x);
    __syncthreads();
    weigh<STYLE>(part, shape, tile, pairs, lse, step_lse, keep, add);
    __syncthreads();
    constexpr u32 FLIGHT = IN_FLIGHT<ACC, STEP>;
    const u32 total = tile.rows * tile.heads * (shape.dim / N);
    for (u32 base = threadIdx.x; base < total; base += THREADS * FLIGHT) {
        Packed<ACC, N> running[FLIGHT];
        Packed<STEP, N> step[FLIGHT];
        Vector vector[FLIGHT];
#pragma unroll
        for (u32 j = 0; j < FLIGHT; ++j) {
            vector[j] = vector_at<N>(tile, shape, pairs, base + j * THREADS);
            if (vector[j].place < 0) continue;
            load<ACC, N>(out, vector[j].place, running[j]);
            load<STEP, N>(step_out, vector[j].step, step[j]);
        }
#pragma unroll
        for (u32 j = 0; j < FLIGHT; ++j) {
            if (vector[j].place < 0) continue;
            const u32 weight = vector[j].row * tile.heads + vector[j].head;
            const float kept = keep[weight], adding = add[weight];
            float merged[N];
#pragma unroll
            for (int lane = 0; lane < N; ++lane) {
                const float product = scaled(unpacked(step[j], lane), adding);
                merged[lane] = scaled(unpacked(running[j], lane), kept)
                    + (STYLE == WEIGHTED_ROUNDED ? rounded<ACC>(product) : product);
            }
            store<ACC, N>(out, vector[j].place, merged);
        }
    }
}

// Gradients of a step, for each half by itself: left alone, copied or added.
constexpr int LEAVE = 0, ADD = 2;

template <int ACC, int STEP, int N>
__device__ __forceinline__ void accumulate(
    const Part& part, const Shape& shape, int first_op, int second_op, void* sum, const void* step
) {
    __shared__ Pair pairs[MERGE_ROWS_MAX];
    __shared__ int operation[MERGE_ROWS_MAX];
    const Tile tile = tile_of(part, shape);
    if (threadIdx.x < 32) {
        const i64 row = tile.first + threadIdx.x;
        Pair pair = pair_of_lane(part, row);
        int half = part.half;
        if (half == WHOLE) {
            const int s = slot_of_lane(part.slots, row);
            half = s >= 0 && row - __ldg(part.slots.offset + s) >= __ldg(part.slots.span + s) / 2;
        }
        operation[threadIdx.x] = half ? second_op : first_op;
        if (operation[threadIdx.x] == LEAVE) pair.running = -1;
        pairs[threadIdx.x] = pair;
    }
    __syncthreads();
    constexpr u32 FLIGHT = STEP == F32 ? 1 : 2;
    const u32 total = tile.rows * tile.heads * (shape.dim / N);
    for (u32 base = threadIdx.x; base < total; base += THREADS * FLIGHT) {
        Packed<STEP, N> value[FLIGHT];
        Packed<ACC, N> old[FLIGHT];
        Vector vector[FLIGHT];
#pragma unroll
        for (u32 j = 0; j < FLIGHT; ++j) {
            vector[j] = vector_at<N>(tile, shape, pairs, base + j * THREADS);
            if (vector[j].place < 0) continue;
            load<STEP, N>(step, vector[j].step, value[j]);
            if (operation[vector[j].row] == ADD) load<ACC, N>(sum, vector[j].place, old[j]);
        }
#pragma unroll
        for (u32 j = 0; j < FLIGHT; ++j) {
            if (vector[j].place < 0) continue;
            const bool added = operation[vector[j].row] == ADD;
            float result[N];
#pragma unroll
            for (int lane = 0; lane < N; ++lane) {
                const float of_step = unpacked(value[j], lane);
                result[lane] = added ? unpacked(old[j], lane) + of_step : of_step;
            }
            store<ACC, N>(sum, vector[j].place, result);
        }
    }
}

#define MERGE(style, STYLE, acc, ACC, step, STEP, n)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, ACC == F32 ? 4 : 1) merge_##style##_##acc##_##step##_##n(                     \
        const __grid_constant__ Part part, const __grid_constant__ Shape shape, void* __restrict__ out,             \
        const void* __restrict__ step_out, float* lse, const float* __restrict__ step_lse                           \
    ) {                                                                                                             \
        merge_out<ACC, STEP, STYLE, n>(part, shape, out, step_out, lse, step_lse);                                  \
    }
#define ACCUMULATE(acc, ACC, step, STEP, n)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) accumulate_##acc##_##step##_##n(                          \
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
constexpr int LOGIT_HEADS = 32;

__device__ __forceinline__ int key_of(float value) {
    const int bits = __float_as_int(value);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ __forceinline__ void raise(float* to, int key) {
    const int bits = key ^ ((key >> 31) & 0x7fffffff);
    if (bits >= 0) atomicMax((int*)to, bits);
    else atomicMin((u32*)to, (u32)bits);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    max_logit(const __grid_constant__ Slots slots, const float* __restrict__ rows_max, int heads, float* largest) {
    __shared__ int keys[LOGIT_HEADS][THREADS / 32];
    const i64 row = (i64)blockIdx.x * THREADS + threadIdx.x;
    const int head = blockIdx.y * LOGIT_HEADS, lowest = key_of(neg_infinity());
    const bool real = is_real(slots, slot_of_lane(slots, row), row) && row < slots.rows;
#pragma unroll 8
    for (int h = 0; h < LOGIT_HEADS; ++h) {
        int key = lowest;
        if (real && head + h < heads) key = key_of(__ldcs(rows_max + (i64)(head + h) * slots.rows + row));
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
