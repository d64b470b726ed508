// Rows of the backward: what is made of them before the tiles, and how gradients are written. For backward.cu.
#pragma once

// Of a row of a view eight neighbouring lanes, each rounded once.
__device__ __forceinline__ void get_eight(const View& view, i64 place, float (&value)[8]) {
    u32 words[8];
    const u8* const from = (const u8*)view.base + place * (view.format == F32 ? 4 : 2);
    *(uint4*)words = *(const uint4*)from;
    if (view.format == F32) *(uint4*)(words + 4) = *(const uint4*)(from + 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u16 code = (u16)(words[i / 2] >> 16 * (i % 2));
        value[i] = view.format == F32 ? __uint_as_float(words[i]) : decode<TYPE>(code);
    }
}

__device__ __forceinline__ void put_eight(const View& view, i64 place, float (&value)[8], bool add) {
    if (add) {
        float before[8];
        get_eight(view, place, before);
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] += before[i];
    }
    if (view.format == F32) {
        float4* const to = (float4*)((float*)view.base + place);
        to[0] = make_float4(value[0], value[1], value[2], value[3]);
        to[1] = make_float4(value[4], value[5], value[6], value[7]);
    } else {
        *(uint4*)((u16*)view.base + place) = make_uint4(pair_of(value[0], value[1]), pair_of(value[2], value[3]),
                                                        pair_of(value[4], value[5]), pair_of(value[6], value[7]));
    }
}

// Four accumulators' pairs of a row, 8 lanes from one to the next, become eight neighbours of the pair with the thread's
// number in its quad.
__device__ __forceinline__ void neighbours(const float (&even)[4], const float (&odd)[4], float (&value)[8]) {
    u32 low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) low[i] = __float_as_uint(even[i]), high[i] = __float_as_uint(odd[i]);
    transpose(low);
    transpose(high);
#pragma unroll
    for (int i = 0; i < 4; ++i) value[2 * i] = __uint_as_float(low[i]), value[2 * i + 1] = __uint_as_float(high[i]);
}

// Rows of a head: row r is `step * (index + r) + phase`.
struct Rows {
    int index;
    int phase;
    int step;
    int head;
    // Real rows and owned ones, which may be more than are written from here, or less than 0.
    int real;
    int owned;
};

// Writes accumulators of two groups of threads, of 16 rows the first or the second 8. A group holds 64 rows with all lanes, or
// all rows with COUNT pairs of lanes.
template <int HALF, int COUNT>
__device__ __forceinline__ void store(
    const View& view, const Args& a, const Rows& rows, const float (&d)[COUNT], float factor, int dim
) {
    constexpr int LANES = 2 * COUNT;
    const u32 thread = kept(threadIdx.x);
    const int r = (LANES < DIM ? thread % 128 : thread) / 32 * 16 + thread % 32 / 4 + 8 * HALF;
    const int first = LANES < DIM ? thread / 128 * LANES : 0;
    const bool real = r < rows.real, write = real || (a.clear && r < rows.owned && !a.accumulate);
    const i64 place = place_of(view, (i64)rows.step * (rows.index + r) + rows.phase, rows.head);
#pragma unroll
    for (int j = 0; j < LANES / 8; j += 4) {
        float even[4], odd[4], value[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            even[i] = real ? d[4 * (j + i) + 2 * HALF] * factor : 0.0f;
            odd[i] = real ? d[4 * (j + i) + 2 * HALF + 1] * factor : 0.0f;
        }
        neighbours(even, odd, value);
        const int column = first + 8 * (j + thread % 4);
        if (write && column < dim) put_eight(view, place + column, value, a.accumulate);
    }
}

__device__ __forceinline__ void store_queries(const Args& a, const Rows& rows, const float (&dq)[32]) {
    store<0>(a.dq, a, rows, dq, a.scale, a.dim);
    store<1>(a.dq, a, rows, dq, a.scale, a.dim);
}

// ---------------------------------------------------------------------------------------------------------------------
// Before: statistics of rows, and dq of tiles of them that see no key.

__device__ __forceinline__ void clear_gradients(const Args& a, const Rows& rows) {
    float dq[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) dq[i] = 0.0f;
    store_queries(a, rows, dq);
}

// LSE and D of a tile's rows, of which `real` are real, at least one. Everything is asked for before anything is used, by
// all threads: from a real row where there is none, and from real lanes.
template <int OUT>
__device__ __forceinline__ void put_statistics(const Args& a, const Rows& rows, float* statistics) {
    constexpr int LANES = DIM / 8, EACH = THREADS / LANES, COUNT = ROWS / EACH;
    const int column = threadIdx.x % LANES * 8, lane = min(column, a.dim_v - 8), first = threadIdx.x / LANES;
    Packed<TYPE, 8> dout[COUNT];
    Packed<OUT, 8> out[COUNT];
    float lse[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const i64 at = (i64)rows.step * (rows.index + min(first + i * EACH, rows.real - 1)) + rows.phase;
        load((const void*)a.gradient.base, place_of(a.gradient, at, rows.head) + lane, dout[i]);
        load((const void*)a.out.base, place_of(a.out, at, rows.head) + lane, out[i]);
        lse[i] = ((const float*)a.lse.base)[place_of(a.lse, at, rows.head)];
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int row = first + i * EACH;
        const bool real = row < rows.real;
        float d = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) d = __fmaf_rn(unpacked(dout[i], j), unpacked(out[i], j), d);
        if (!real || column >= a.dim_v) d = 0.0f;
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) d += __shfl_xor_sync(FULL, d, step);
        if (column != 0) continue;
        // No weight is left of a row that is not there.
        statistics[row] = real ? lse[i] : __uint_as_float(0x7f800000u);
        statistics[ROWS + row] = d;
    }
}

__device__ __forceinline__ void prepare(const Args& a) {
    const u32 tile = blockIdx.x;
    const int head = blockIdx.y;
    if (tile >= a.plan->q_tiles) return;
    const PlannedSegment& segment = a.segments[a.q_tile_segment[tile]];
    const u32 t = tile - segment.first_q_tile;
    const int first = t * ROWS;
    const int index = segment.index + first;
    const Rows rows = {index, segment.phase, a.q_step, head, segment.len - first, segment.span - first};
    if (!sees_keys(segment, t)) {
        clear_gradients(a, rows);
        return;
    }
    const i64 part = part_of(a, tile, head);
    float* const statistics = a.statistics + part * 2 * ROWS;
    if (a.out.format == F32) put_statistics<F32>(a, rows, statistics);
    else put_statistics<TYPE>(a, rows, statistics);
    if (threadIdx.x == 0) a.added[part] = 0;
}
