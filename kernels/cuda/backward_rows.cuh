// Rows of the backward: what is made of them before the tiles, D and cleared sums, and after, dq of the sums. For backward.cu.
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

// ---------------------------------------------------------------------------------------------------------------------
// Before: statistics of rows, and sums of zero.

__device__ __forceinline__ void prepare(const Args& a) {
    constexpr int LANES = DIM / 8, EACH = THREADS / LANES;
    const u32 tile = blockIdx.x, head = blockIdx.y;
    if (tile >= a.plan->q_tiles) return;
    const PlannedSegment& segment = a.segments[a.q_tile_segment[tile]];
    const int first = (tile - segment.first_q_tile) * ROWS;
    if (first >= segment.len) return;
    const i64 part = part_of(a, tile, head);
    float* const statistics = a.statistics + part * 2 * ROWS;
    const int column = threadIdx.x % LANES * 8;
    for (int row = threadIdx.x / LANES; row < ROWS; row += EACH) {
        const bool real = first + row < segment.len;
        const i64 at = (i64)a.q_step * (segment.index + first + row) + segment.phase;
        float d = 0.0f;
        if (real && column < a.dim_v) {
            float dout[8], out[8];
            get_eight(a.gradient, place_of(a.gradient, at, head) + column, dout);
            get_eight(a.out, place_of(a.out, at, head) + column, out);
#pragma unroll
            for (int i = 0; i < 8; ++i) d = __fmaf_rn(dout[i], out[i], d);
        }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) d += __shfl_xor_sync(FULL, d, step);
        if (column != 0) continue;
        // No weight is left of a row that is not there.
        statistics[row] = real ? get(a.lse, place_of(a.lse, at, head)) : __uint_as_float(0x7f800000u);
        statistics[ROWS + row] = d;
    }
    if (a.added) {
        if (threadIdx.x == 0) a.added[part] = 0;
        return;
    }
    float4* const sums = (float4*)(a.sums + part * SUMS);
    for (int i = threadIdx.x; i < SUMS / 4; i += THREADS) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// ---------------------------------------------------------------------------------------------------------------------
// After: sums become dq.

template <int HALF>
__device__ __forceinline__ void finish_rows(
    const Args& a, const PlannedSegment& segment, int row, int head, int column, const float4 (&sums)[4]
) {
    const int r = row + 8 * HALF;
    const bool real = r < segment.len;
    float even[4], odd[4], value[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        even[i] = (HALF == 0 ? sums[i].x : sums[i].z) * a.scale;
        odd[i] = (HALF == 0 ? sums[i].y : sums[i].w) * a.scale;
    }
    neighbours(even, odd, value);
    const bool write = real || (a.clear && r < segment.span && !a.accumulate);
    if (!write || column >= a.dim) return;
    const i64 at = (i64)a.q_step * (segment.index + r) + segment.phase;
    put_eight(a.dq, place_of(a.dq, at, head) + column, value, a.accumulate);
}

__device__ __forceinline__ void finish(const Args& a) {
    const u32 tile = blockIdx.x, head = blockIdx.y;
    if (tile >= a.plan->q_tiles) return;
    const PlannedSegment& segment = a.segments[a.q_tile_segment[tile]];
    const int first = (tile - segment.first_q_tile) * ROWS;
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int row = first + (ROWS > 64 ? 64 * group : 0) + thread / 32 * 16 + thread % 32 / 4;
    const i64 part = part_of(a, tile, head);
    const bool any = first < segment.len && (!a.added || a.added[part] > 0);
    const float4* const from = (const float4*)(a.sums + part * SUMS + group * (PART_BYTES / 4));
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
        float4 sums[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sums[i] = any ? from[(j + i) * 128 + thread] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const int column = (PANELS > 1 ? 64 * group : 0) + 8 * (j + thread % 4);
        finish_rows<0>(a, segment, row, head, column, sums);
        finish_rows<1>(a, segment, row, head, column, sums);
    }
}
