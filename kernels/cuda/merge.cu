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

// Where a lane's row lies, both -1 where there is no such row; and its slot, for which a whole part only has a guessed
// window by then. All lanes of the warp together, rows in order.
struct Place {
    Pair pair;
    Slot slot;
};

__device__ __forceinline__ Place place_of_lane(const Part& part, u32 row) {
    if (part.half == WHOLE) {
        const Slot guess = guessed_window(part.slots, __shfl_sync(ALL_LANES, (u32)row, 0));
        return {row < part.slots.rows ? Pair{(int)row, (int)row} : Pair{-1, -1}, guess};
    }
    const HalfRow found = half_row_of_lane(part.slots, part.half, row);
    if (found.row < 0 || row >= part.half_rows) return {{-1, -1}, found.slot};
    return {{found.row, part.compact ? (int)row : found.row}, found.slot};
}

__device__ __forceinline__ Slot slot_of_place(const Part& part, const Place& place, u32 row) {
    return part.half == WHOLE ? slot_of_lane(part.slots, row, place.slot) : place.slot;
}

// Whether the row is a real one, which takes time to find: what lies at the place can be asked for before.
__device__ __forceinline__ bool is_real_of_lane(const Part& part, const Place& place, u32 row) {
    const Slot slot = slot_of_place(part, place, row);
    return place.pair.running >= 0 && is_real(slot, place.pair.running);
}

__device__ __forceinline__ float share(float a, float total) {
    return a == neg_infinity() ? 0.0f : exponential(a - total);
}

// What is not weighed is never multiplied.
template <int FORMAT, int N>
__device__ __forceinline__ Packed<FORMAT, N> weighed(const Packed<FORMAT, N>& packed, float weight) {
    Packed<FORMAT, N> kept;
    for (u32 i = 0; i < sizeof(kept.word) / sizeof(u32); ++i) kept.word[i] = weight == 0.0f ? 0 : packed.word[i];
    return kept;
}

// Statistics alone. A thread has EACH neighbouring rows (four of a whole part, else one) of HEADS heads, all of them in
// flight.
template <int EACH, int COUNT>
__device__ __forceinline__ void merge_rows(
    const Part& part, float* lse, const float* step_lse, int heads, i64 step_rows
) {
    const u32 row = (blockIdx.x * THREADS + threadIdx.x) * EACH;
    const i64 rows = part.slots.rows;
    const Place place = place_of_lane(part, row);
    const int first = blockIdx.y * COUNT, count = heads - first;
    u32* const running = (u32*)lse + first * rows + place.pair.running;
    const u32* const step = (const u32*)step_lse + first * step_rows + place.pair.step;
    const bool there = place.pair.running >= 0;
    u32 old[COUNT][EACH], added[COUNT][EACH];
#pragma unroll
    for (int h = 0; h < COUNT; ++h) {
        const bool any = there && h < count;
        load_words<EACH>(any ? running + h * rows : (u32*)lse, old[h]);
        load_words<EACH>(any ? step + h * step_rows : (const u32*)step_lse, added[h]);
    }
    const u32 real = EACH == 1 ? is_real_of_lane(part, place, row) : real_rows<EACH>(part.slots, row, place.slot);
    if (real == 0) return;
#pragma unroll
    for (int h = 0; h < COUNT; ++h) {
        if (h >= count) return;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            added[h][i] = __float_as_uint(log_add(__uint_as_float(old[h][i]), __uint_as_float(added[h][i])));
        store_words<EACH>(running + h * rows, added[h], real);
    }
}

constexpr int HEADS_OF_4 = 2, HALF_HEADS_OF_4 = 8, HEADS = 8;

#define MERGE_STATISTICS(each, count)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 5) merge_statistics_##each(                               \
        const __grid_constant__ Part part, float* lse, const float* step_lse, int heads, i64 step_rows              \
    ) {                                                                                                             \
        after_earlier_launches();                                                                                   \
        merge_rows<each, count>(part, lse, step_lse, heads, step_rows);                                             \
    }
MERGE_STATISTICS(4, HEADS_OF_4)
MERGE_STATISTICS(1, HEADS)

// One half of a statistic to or from the layout of halves; whole halves, padding included. A thread has EACH neighbouring
// half rows of COUNT heads. Four of them that lie in one slot, on 16 bytes, are moved at once; four of no slot are filled at
// once, or left alone.
template <int EACH>
struct HalfRows {
    // -1 for none.
    int row[EACH];
    bool at_once;
    bool none;
};

// All lanes of the warp together. A warp of which some rows lie otherwise looks for each in the window that it has: a table
// asked for by then would wait behind all the rows that are under way.
template <int EACH>
__device__ __forceinline__ HalfRows<EACH> half_rows_of_lane(const Part& part, u32 first) {
    const u32 row_of_warp = __shfl_sync(ALL_LANES, 2 * first + 1, 0);
    const Slot window = window_of(part.slots, row_of_warp, guessed_window(part.slots, row_of_warp));
    auto half_row = [&](u32 row) {
        return half_row_of_slot(part.slots, part.half, row, slot_of_lane(part.slots, 2 * row + 1, window));
    };
    const HalfRow found = half_row(first);
    HalfRows<EACH> rows;
    // All EACH rows lie in the tensor, whatever wrong tables say of the slot; -1, unsigned, is no such row.
    const bool within = (u32)found.row <= (u32)part.slots.rows - EACH;
    rows.at_once = first < part.half_rows && within && found.in_half + EACH <= found.slot.span >> 1;
    rows.none = found.row < 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) rows.row[i] = found.row + i;
    if (EACH > 1 && __any_sync(ALL_LANES, !rows.at_once)) {
#pragma unroll
        for (int i = 1; i < EACH; ++i) {
            rows.row[i] = half_row(first + i).row;
            rows.none &= rows.row[i] < 0;
        }
    }
    rows.at_once &= EACH == 1 || rows.row[0] % 4 == 0;
    return rows;
}

// One vector of rows of COUNT heads, all loads under way together; in place of a head that there is not the last is loaded,
// so that none waits for a condition. Pointers walk from head to head: no load begins before the search has ended, and products for
// its address would come in between (`kernels/NOTES.md`).
template <int EACH, int COUNT>
__device__ __forceinline__ void move_vectors(const u32* from, i64 from_rows, u32* to, i64 to_rows, int count) {
    u32 values[COUNT][EACH];
#pragma unroll
    for (int h = 0; h < COUNT; ++h) {
        load_words<EACH>(from, values[h]);
        from += h + 1 < count ? from_rows : 0;
    }
#pragma unroll
    for (int h = 0; h < COUNT; ++h, to += to_rows)
        if (h < count) store_words<EACH>(to, values[h], (1u << EACH) - 1);
}

// `load(h, values)` for COUNT heads, all under way together, then `store(h, values)` for those that there are. In place of one
// that there is not the first is loaded, so that no load waits for a condition.
template <int EACH, int COUNT, class Load, class Store>
__device__ __forceinline__ void move_heads(int count, Load load, Store store) {
    u32 values[COUNT][EACH];
#pragma unroll
    for (int h = 0; h < COUNT; ++h) load(h < count ? h : 0, values[h]);
#pragma unroll
    for (int h = 0; h < COUNT; ++h)
        if (h < count) store(h, values[h]);
}

template <int EACH, int COUNT>
__device__ __forceinline__ void move_half(
    const Part& part, u32* whole, u32* halves, int heads, int write, int fill_rest, u32 pattern
) {
    const u32 row = (blockIdx.x * THREADS + threadIdx.x) * EACH;
    const HalfRows<EACH> there = half_rows_of_lane<EACH>(part, row);
    const int first = blockIdx.y * COUNT, count = min(heads - first, COUNT);
    const i64 rows = part.slots.rows, half_rows = part.half_rows;
    whole += first * rows, halves += first * half_rows + row;
    if (there.at_once) {
        if (write) move_vectors<EACH, COUNT>(halves, half_rows, whole + there.row[0], rows, count);
        else move_vectors<EACH, COUNT>(whole + there.row[0], rows, halves, half_rows, count);
        return;
    }
    if (row >= part.half_rows) return;
    if (there.none) {
        auto fill = [&](i64, u32 (&values)[EACH]) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) values[i] = pattern;
        };
        auto store = [&](i64 h, u32 (&values)[EACH]) { store_words<EACH>(halves + h * half_rows, values, (1u << EACH) - 1); };
        move_heads<EACH, COUNT>(fill_rest ? count : 0, fill, store);
        return;
    }
    // A row of no slot loads the first one.
    auto load = [&](i64 h, u32 (&values)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            values[i] = __ldcs(write ? halves + h * half_rows + i : whole + h * rows + max(there.row[i], 0));
    };
    auto store = [&](i64 h, u32 (&values)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            u32* const half = halves + h * half_rows + i;
            if (there.row[i] >= 0) __stcs(write ? whole + h * rows + there.row[i] : half, values[i]);
            else if (fill_rest) __stcs(half, pattern);
        }
    };
    // Few rows lie so, and some heads' are under way together: a launch ends with its last warp.
    constexpr int AT_ONCE = COUNT < 4 ? COUNT : 4;
#pragma unroll 1
    for (int left = count; left > 0; left -= AT_ONCE, whole += AT_ONCE * rows, halves += AT_ONCE * half_rows)
        move_heads<EACH, AT_ONCE>(left, load, store);
}

#define HALF_STATISTICS(each, count)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) half_statistics_##each(                                \
        const __grid_constant__ Part part, u32* whole, u32* halves, int heads, int write, int fill_rest,            \
        u32 pattern                                                                                                 \
    ) {                                                                                                             \
        after_earlier_launches();                                                                                   \
        move_half<each, count>(part, whole, halves, heads, write, fill_rest, pattern);                              \
    }
HALF_STATISTICS(4, HALF_HEADS_OF_4)
HALF_STATISTICS(1, HEADS)

// A warp has a tile of rows and heads: at most 32 *pairs* of a row and a head, heads fastest. Lane p finds where pair p
// lies and what its weights are; then the lanes go over the vectors of the tile and ask the pair's lane.
struct Shape {
    int heads;
    int dim;
    // Rows and heads of a tile.
    int tile_rows;
    int tile_heads;
    // Vectors of a row of a head, and 2^31 over that, rounded up.
    u32 lanes;
    u32 per_lane;
    // 2^16 over the heads of a tile, rounded up; tiles of a row, and 2^32 - 1 over that.
    u32 per_head;
    u32 groups;
    u32 per_group;
    // Rows of the step's statistics.
    i64 step_rows;
};

// The tile of a warp: how many tiles of rows lie before it, and how many of heads.
struct Tile {
    u32 rows;
    u32 heads;
};

// Nothing is divided here: it would take longer than all else that is done before the first access.
__device__ __forceinline__ Tile tile_at(const Shape& shape, u32 number) {
    u32 rows = __umulhi(number, shape.per_group);
    if (number - rows * shape.groups >= shape.groups) ++rows;
    return {rows, number - rows * shape.groups};
}

// Tiles in the order of memory; or the warps of a block have tiles of the same heads, one below the other.
template <bool BELOW>
__device__ __forceinline__ Tile tile_of_warp(const Shape& shape) {
    const u32 warp = threadIdx.x / 32;
    if (!BELOW) return tile_at(shape, blockIdx.x * WARPS + warp);
    const Tile tile = tile_at(shape, blockIdx.x);
    return {tile.rows * WARPS + warp, tile.heads};
}

// A pair; its row is beyond the tile's, and the head -1, where the tile has fewer pairs.
struct Owned {
    u32 row;
    int head;
};

__device__ __forceinline__ Owned pair_of(const Shape& shape, const Tile& tile, u32 pair) {
    const u32 row = pair * shape.per_head >> 16;
    const int head = tile.heads * shape.tile_heads + (pair - row * shape.tile_heads);
    const bool none = row >= shape.tile_rows || head >= shape.heads;
    return {tile.rows * shape.tile_rows + min(row, (u32)shape.tile_rows), none ? -1 : head};
}

// Where the tile's first vector would lie if all its pairs were in one piece with the lane's; the tensor's first elements
// for a lane whose pair is not there. Of a whole part all pairs are, and all lanes have the same.
template <int ACC, int STEP>
struct Origins {
    const u8* running;
    const u8* step;

    __device__ __forceinline__ Origins(
        const Part& part, const Shape& shape, const Tile& tile, const Pair& pair, u32 pairs, const void* out,
        const void* step_out
    ) {
        const int row = shape.heads * shape.dim;
        i64 first = 0, step_first = 0;
        if (part.half == WHOLE) {
            const i64 row_of_tile = tile.rows * shape.tile_rows;
            if (pairs != 0) first = row_of_tile * row + tile.heads * shape.tile_heads * shape.dim;
            step_first = first;
        } else if (pairs >> threadIdx.x % 32 & 1) {
            const int before = threadIdx.x % 32 * shape.per_head >> 16;
            const int in_row = (int)(tile.heads - before) * shape.tile_heads * shape.dim;
            first = (i64)pair.running * row + in_row;
            step_first = (i64)pair.step * row + in_row;
        }
        running = (const u8*)out + first * (ACC == F32 ? 4 : 2);
        step = (const u8*)step_out + step_first * (STEP == F32 ? 4 : 2);
    }
};

// A vector of the tile: the lane that has its pair, that lane's bit, or none, and how many elements it lies behind the
// origin.
struct Vector {
    u32 owner;
    u32 bit;
    u32 elements;
};

template <int N>
__device__ __forceinline__ Vector vector_at(const Shape& shape, u32 pairs, u32 i, u32 total) {
    const u32 owner = __umulhi(2 * i, shape.per_lane), bit = i < total ? pairs & 1u << owner % 32 : 0;
    return {owner, bit, bit ? i * N : 0};
}

// The vector's own origin. All lanes together.
__device__ __forceinline__ const u8* origin_of(const Part& part, const u8* origin, const Vector& vector) {
    return part.half == WHOLE ? origin : (const u8*)__shfl_sync(ALL_LANES, (u64)origin, vector.owner);
}

constexpr int RUNNING = 0, WEIGHTED = 1, WEIGHTED_ROUNDED = 2;

// out and, with RUNNING, its statistic. RUNNING: both weighted by their shares of the new total. WEIGHTED: the step
// weighted by its share of a total that is known already.
//
// A tile of one row and some heads is in memory's order, and has 4 bytes of a sector of each head's statistic. What is
// written to one has to fill it, so that the block's warps have rows one below the other and write statistics together.
template <int ACC, int STEP, int STYLE, int N>
__device__ __forceinline__ void merge_out(
    const Part& part, const Shape& shape, void* out, const void* step_out, float* lse, const float* step_lse
) {
    constexpr u32 FLIGHT = 2;
    __shared__ float sums[WARPS][32];
    __shared__ int sum_rows[WARPS][32];
    const u32 lane = threadIdx.x % 32, total = shape.tile_rows * shape.tile_heads * shape.lanes;
    const Tile tile = tile_of_warp<STYLE == RUNNING>(shape);
    const Owned owned = pair_of(shape, tile, lane);
    const Place place = place_of_lane(part, owned.row);
    const bool there = owned.head >= 0 && place.pair.running >= 0;
    // Pairs that are there, and when it is known, those of real rows.
    u32 pairs = __ballot_sync(ALL_LANES, there);
    const Origins<ACC, STEP> origins(part, shape, tile, place.pair, pairs, out, step_out);
    float keep = 1.0f, add = 0.0f;
    for (u32 base = lane; base - lane < total; base += 32 * FLIGHT) {
        Packed<ACC, N> running[FLIGHT];
        Packed<STEP, N> step[FLIGHT];
#pragma unroll
        for (u32 j = 0; j < FLIGHT; ++j) {
            const Vector vector = vector_at<N>(shape, pairs, base + j * 32, total);
            load<ACC, N>(origin_of(part, origins.running, vector), vector.elements, running[j]);
            load<STEP, N>(origin_of(part, origins.step, vector), vector.elements, step[j]);
        }
        // The first vectors are on their way before it is known which rows are real. Statistics are asked for here: a
        // weight that does not change in the loop is made before it, and all would wait for that.
        if (base == lane) {
            float old = 0.0f, added = 0.0f;
            if (there) {
                old = lse[(i64)owned.head * part.slots.rows + place.pair.running];
                added = step_lse[owned.head * shape.step_rows + place.pair.step];
            }
            const bool real = is_real_of_lane(part, place, owned.row) && there;
            pairs = __ballot_sync(ALL_LANES, real);
            const float sum = STYLE == RUNNING ? log_add(old, added) : old;
            if (STYLE == RUNNING) keep = share(old, sum);
            add = share(added, sum);
            if (STYLE == RUNNING) {
                sums[threadIdx.x / 32][lane] = sum;
                sum_rows[threadIdx.x / 32][lane] = real ? place.pair.running : -1;
            }
        }
#pragma unroll
        for (u32 j = 0; j < FLIGHT; ++j) {
            const Vector vector = vector_at<N>(shape, pairs, base + j * 32, total);
            const float kept = __shfl_sync(ALL_LANES, keep, vector.owner);
            const float adding = __shfl_sync(ALL_LANES, add, vector.owner);
            u8* const to = (u8*)origin_of(part, origins.running, vector);
            if (!vector.bit) continue;
            const Packed<ACC, N> held = STYLE == RUNNING ? weighed(running[j], kept) : running[j];
            const Packed<STEP, N> of_step = weighed(step[j], adding);
            float merged[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float product = unpacked(of_step, i) * adding;
                merged[i] = (STYLE == RUNNING ? unpacked(held, i) * kept : unpacked(held, i))
                    + (STYLE == WEIGHTED_ROUNDED ? rounded<ACC>(product) : product);
            }
            store<ACC, N>(to, vector.elements, merged);
        }
    }
    if (STYLE != RUNNING) return;
    __syncthreads();
    const u32 warp = threadIdx.x % WARPS, pair = threadIdx.x / WARPS;
    const int row = sum_rows[warp][pair];
    if (row >= 0) lse[(i64)pair_of(shape, tile, pair).head * part.slots.rows + row] = sums[warp][pair];
}

// Gradients of a step, for each half by itself: left alone, copied or added.
constexpr int LEAVE = 0, ADD = 2;

template <int ACC, int STEP, int N>
__device__ __forceinline__ void accumulate(
    const Part& part, const Shape& shape, int first_op, int second_op, void* sum, const void* step
) {
    constexpr u32 FLIGHT = ACC == F32 ? 1 : 2;
    const Tile tile = tile_of_warp<false>(shape);
    const Owned owned = pair_of(shape, tile, threadIdx.x % 32);
    const Place place = place_of_lane(part, owned.row);
    const Slot slot = slot_of_place(part, place, owned.row);
    const int half = part.half == WHOLE ? owned.row - slot.offset >= slot.span / 2 : part.half;
    const int operation = half ? second_op : first_op;
    const bool there = owned.head >= 0 && place.pair.running >= 0 && operation != LEAVE;
    const u32 pairs = __ballot_sync(ALL_LANES, there && is_real(slot, place.pair.running));
    const Origins<ACC, STEP> origins(part, shape, tile, place.pair, pairs, sum, step);
    const u32 lane = threadIdx.x % 32, adds = __ballot_sync(ALL_LANES, operation == ADD);
    const u32 total = shape.tile_rows * shape.tile_heads * shape.lanes;
    for (u32 base = lane; base - lane < total; base += 32 * FLIGHT) {
        Packed<STEP, N> value[FLIGHT];
        Packed<ACC, N> old[FLIGHT];
        const u8* to[FLIGHT];
        Vector vector[FLIGHT];
#pragma unroll
        for (u32 j = 0; j < FLIGHT; ++j) {
            vector[j] = vector_at<N>(shape, pairs, base + j * 32, total);
            to[j] = origin_of(part, origins.running, vector[j]);
            load<STEP, N>(origin_of(part, origins.step, vector[j]), vector[j].elements, value[j]);
            load<ACC, N>(to[j], adds & vector[j].bit ? vector[j].elements : 0, old[j]);
        }
#pragma unroll
        for (u32 j = 0; j < FLIGHT; ++j) {
            if (!vector[j].bit) continue;
            const bool added = adds & vector[j].bit;
            float result[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float of_step = unpacked(value[j], i);
                result[i] = added ? unpacked(old[j], i) + of_step : of_step;
            }
            store<ACC, N>((u8*)to[j], vector[j].elements, result);
        }
    }
}

#define MERGE(style, STYLE, acc, ACC, step, STEP, n)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, ACC == F32 ? 3 : 4) merge_##style##_##acc##_##step##_##n( \
        const __grid_constant__ Part part, const __grid_constant__ Shape shape, void* out, const void* step_out,    \
        float* lse, const float* step_lse                                                                           \
    ) {                                                                                                             \
        after_earlier_launches();                                                                                   \
        merge_out<ACC, STEP, STYLE, n>(part, shape, out, step_out, lse, step_lse);                                  \
    }
#define ACCUMULATE(acc, ACC, step, STEP, n)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) accumulate_##acc##_##step##_##n(                       \
        const __grid_constant__ Part part, const __grid_constant__ Shape shape, int first_op, int second_op,        \
        void* sum, const void* step_sum                                                                             \
    ) {                                                                                                             \
        after_earlier_launches();                                                                                   \
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

// The largest logit of a head over valid rows, of one number for each head and row. A thread has EACH neighbouring rows of
// LOGIT_HEADS heads. Every order gives the same bits: numbers are compared as integers, +0 above -0.
constexpr int LOGIT_HEADS = 8;

__device__ __forceinline__ int key_of(u32 bits) { return (int)(bits ^ (u32)((int)bits >> 31) >> 1); }

__device__ __forceinline__ void raise(u32* to, int key) {
    const u32 bits = (u32)key ^ (u32)(key >> 31) >> 1;
    if (key >= 0) atomicMax((int*)to, (int)bits);
    else atomicMin(to, bits);
}

template <int EACH>
__device__ __forceinline__ void largest_of_heads(const Slots& slots, const u32* rows_max, int heads, u32* largest) {
    __shared__ int keys[LOGIT_HEADS][WARPS];
    const u32 row = (blockIdx.x * THREADS + threadIdx.x) * EACH;
    const i64 rows = slots.rows;
    const int first = blockIdx.y * LOGIT_HEADS, count = heads - first, lowest = key_of(NEG_INFINITY_BITS);
    const u32* const from = rows_max + first * rows + row;
    // Asked for before it is known which rows are real.
    const Slot guess = guessed_window(slots, __shfl_sync(ALL_LANES, row, 0));
    u32 bits[LOGIT_HEADS][EACH];
#pragma unroll
    for (int h = 0; h < LOGIT_HEADS; ++h) load_words<EACH>(row < rows && h < count ? from + h * rows : rows_max, bits[h]);
    const u32 real = real_rows<EACH>(slots, row, guess);
#pragma unroll
    for (int h = 0; h < LOGIT_HEADS; ++h) {
        int key = lowest;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (h < count && (real >> i & 1)) key = max(key, key_of(bits[h][i]));
        key = __reduce_max_sync(ALL_LANES, key);
        if (threadIdx.x % 32 == 0) keys[h][threadIdx.x / 32] = key;
    }
    __syncthreads();
    if (threadIdx.x < LOGIT_HEADS && (int)threadIdx.x < count) {
        int key = lowest;
        for (u32 warp = 0; warp < WARPS; ++warp) key = max(key, keys[threadIdx.x][warp]);
        if (key > lowest) raise(largest + first + threadIdx.x, key);
    }
}

#define MAX_LOGIT(each)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) max_logit_##each(                                      \
        const __grid_constant__ Slots slots, const u32* rows_max, int heads, u32* largest                           \
    ) {                                                                                                             \
        after_earlier_launches();                                                                                   \
        largest_of_heads<each>(slots, rows_max, heads, largest);                                                    \
    }
MAX_LOGIT(4)
MAX_LOGIT(1)

// The start of a maximum.
extern "C" __global__ void __launch_bounds__(THREADS) fill_words(u32* words, i64 count, u32 pattern) {
    after_earlier_launches();
    const i64 word = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (word < count) words[word] = pattern;
}
