// Rows of the backward: what is done before the tiles, and how gradients are written. For backward.cu.
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
        value[i] = view.format == F32 ? __uint_as_float(words[i]) : decode<RESULTS>(code);
    }
}

// Of eight lanes those that a tensor has: `lanes`, all where the copy engine brings tensors.
__device__ __forceinline__ void put_eight(const Args& a, const View& view, i64 place, float (&value)[8], bool add, int lanes) {
    if (!by_engine(a)) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < lanes) put(view, place + i, add ? value[i] + get(view, place + i) : value[i]);
        return;
    }
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

// A segment's query rows from one on.
__device__ __forceinline__ Rows rows_of_segment(const Args& a, const PlannedSegment& segment, int first, int head) {
    return {segment.index + first, segment.phase, a.q_step, head, segment.len - first, segment.span - first};
}

// The first row and lane that a warp has of the accumulators of two groups of threads: it has 16 rows, a group 64 with all lanes,
// or all rows with COUNT pairs of lanes.
struct Corner {
    int row;
    int lane;
};
template <int COUNT>
__device__ __forceinline__ Corner corner_of_warp() {
    constexpr int LANES = 2 * COUNT;
    const u32 thread = kept(threadIdx.x);
    return {(int)((LANES < DIM ? thread % 128 : thread) / 32 * 16), LANES < DIM ? (int)(thread / 128 * LANES) : 0};
}
// Whether a row is written, if only with zeros.
__device__ __forceinline__ bool is_written(const Args& a, const Rows& rows, int r) {
    return r < rows.real || (a.clear && r < rows.owned && !a.accumulate);
}

// Puts 16 rows of 16 lanes, from `lane` of 64 on, which a warp holds in pairs, into shared memory as the copy engine would swizzle
// them. All threads of the warp have `whether`: no branch, so that what is computed beside it can be moved past it.
__device__ __forceinline__ void put_square_if(bool whether, u32 at, int lane, u32 a, u32 b, u32 c, u32 d) {
    asm volatile(
        "{\n.reg .pred whether;\nsetp.ne.b32 whether, %5, 0;\n"
        "@whether stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n}" ::"r"(at ^ lane * 2),
        "r"(a), "r"(b), "r"(c), "r"(d), "r"((u32)whether)
        : "memory");
}

// The address that a thread gives for the first of these lanes, where the rows begin `at` a multiple of 1024.
__device__ __forceinline__ u32 place_of_square(u32 at) {
    const u32 thread = kept(threadIdx.x) % 32, row = thread % 16;
    return at + row * 128 + (thread / 16 ^ row % 8) * 16;
}

// Puts 16 rows of 64 lanes so, or of as many as there are.
template <int FIRST, int COUNT>
__device__ __forceinline__ void put_rows(u32 at, const u32 (&pairs)[COUNT]) {
    const u32 place = place_of_square(at);
#pragma unroll
    for (int i = FIRST; i < (COUNT < 16 ? COUNT : FIRST + 16); i += 4)
        put_square_if(true, place, (i - FIRST) * 4, pairs[i], pairs[i + 1], pairs[i + 2], pairs[i + 3]);
}

// Four lanes of shared memory.
__device__ __forceinline__ float4 get_four(u32 at) {
    float4 four;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                 : "r"(at)
                 : "memory");
    return four;
}

__device__ __forceinline__ void put_four(u32 at, const float4& four) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(four.x), "f"(four.y), "f"(four.z), "f"(four.w)
                 : "memory");
}
__device__ __forceinline__ void put_one(u32 at, float one) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(one) : "memory");
}

// Writes 64 lanes of accumulators, from pair FIRST on, rounded, over what is there: through 2 KB of shared memory at `at`, of
// this warp alone, so that eight threads write 128 bytes of a row.
template <int FIRST, int COUNT>
__device__ __forceinline__ void store_panel(
    const View& view, const Args& a, const Rows& rows, u32 at, const float (&d)[COUNT], float factor, int dim
) {
    u32 pairs[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) pairs[i] = pair_of(d[FIRST + 2 * i] * factor, d[FIRST + 2 * i + 1] * factor);
    put_rows<0>(at, pairs);
    __syncwarp();
    const Corner corner = corner_of_warp<COUNT>();
    const u32 lane = kept(threadIdx.x) % 32;
    const int row = lane / 8, eighth = lane % 8, column = corner.lane + 2 * FIRST + 8 * eighth;
    const i64 first = (i64)rows.step * (rows.index + corner.row + row) + rows.phase;
    u16* to = (u16*)view.base + place_of(view, first, rows.head) + column;
#pragma unroll
    for (int r = row; r < 16; r += 4, to += 4 * rows.step * view.row) {
        uint4 eight;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                     : "r"(at + r * 128 + (eighth ^ r % 8) * 16)
                     : "memory");
        if (corner.row + r >= rows.real) eight = make_uint4(0, 0, 0, 0);
        if (is_written(a, rows, corner.row + r) && column < dim) *(uint4*)to = eight;
    }
    __syncwarp();
}

// Writes eight lanes of a row, or adds them to what is there where that is asked for.
__device__ __forceinline__ void put_lanes(
    const View& view, const Args& a, const Rows& rows, int row, int column, float (&value)[8], int dim
) {
    if (row >= rows.real) {
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = 0.0f;
    }
    const i64 place = place_of(view, (i64)rows.step * (rows.index + row) + rows.phase, rows.head);
    if (is_written(a, rows, row) && column < dim) put_eight(a, view, place + column, value, a.accumulate, dim - column);
}

// Writes 32 lanes of accumulators, from pair FIRST on, in any format, and adds them to what is there where that is asked for:
// as f32 through the same place.
template <int FIRST, int COUNT>
__device__ __forceinline__ void store_lanes(
    const View& view, const Args& a, const Rows& rows, u32 at, const float (&d)[COUNT], float factor, int dim
) {
    const u32 lane = kept(threadIdx.x) % 32;
    // Sums that were in the same place have been read by all.
    if (!IS_GENERAL) __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int r = lane / 4 + i % 2 * 8, sixteenth = i / 2 * 2 + lane % 4 / 2;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + r * 128 + (sixteenth ^ r % 4 * 2) * 16 + lane % 2 * 8),
                     "f"(d[FIRST + 2 * i] * factor), "f"(d[FIRST + 2 * i + 1] * factor)
                     : "memory");
    }
    __syncwarp();
    const Corner corner = corner_of_warp<COUNT>();
    const int column = corner.lane + 2 * FIRST + 8 * (lane % 4);
#pragma unroll 1
    for (int r = lane / 4; r < 16; r += 8) {
        const u32 from = at + r * 128 + (lane % 4 ^ r % 4) * 32;
        const float4 low = get_four(from), high = get_four(from + 16);
        float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        put_lanes(view, a, rows, corner.row + r, column, value, dim);
    }
    __syncwarp();
}

// Writes accumulators through 2 KB of shared memory that are the warp's own.
template <int COUNT>
__device__ __forceinline__ void store(
    const View& view, const Args& a, const Rows& rows, u32 own, const float (&d)[COUNT], float factor, int dim
) {
    if (view.format == RESULTS && !a.accumulate && by_engine(a)) {
        store_panel<0>(view, a, rows, own, d, factor, dim);
        if constexpr (COUNT > 32) store_panel<32>(view, a, rows, own, d, factor, dim);
    } else {
        store_lanes<0>(view, a, rows, own, d, factor, dim);
        store_lanes<16>(view, a, rows, own, d, factor, dim);
        if constexpr (COUNT > 32) {
            store_lanes<32>(view, a, rows, own, d, factor, dim);
            store_lanes<48>(view, a, rows, own, d, factor, dim);
        }
    }
}

// Writes accumulators whose rows are lanes, 16 of 64 a warp, and whose columns are 32 rows of the tensor, and adds them to what is
// there where that is asked for: through the same place, a row a thread. `lane`: the first of the 64. From number FIRST on.
template <int FIRST>
__device__ __forceinline__ void store_turned(
    const View& view, const Args& a, const Rows& rows, u32 at, const float (&d)[32], int lane, float factor, int dim
) {
    const u32 thread = kept(threadIdx.x) % 128, row = thread % 32;
#pragma unroll
    for (int i = 0; i < 16; ++i)
        put_one(at + (i / 4 * 8 + row % 4 * 2 + i % 2) * 64 + (row / 4 + i / 2 % 2 * 8) * 4, d[FIRST + i] * factor);
    __syncwarp();
#pragma unroll 1
    for (int eighth = 0; eighth < 2; ++eighth) {
        const u32 from = at + row * 64 + eighth * 32;
        const float4 low = get_four(from), high = get_four(from + 16);
        float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        put_lanes(view, a, rows, row, lane + (int)(thread / 32) * 16 + eighth * 8, value, dim);
    }
    __syncwarp();
}

// ---------------------------------------------------------------------------------------------------------------------
// Before: statistics of rows, counts, and dq of tiles of rows that see no key.

__device__ __forceinline__ void clear_gradients(const Args& a, const Rows& rows) {
    if (a.accumulate) return;
    for (int i = threadIdx.x; i < ROWS * DIM / 8; i += THREADS) {
        const int r = i / (DIM / 8), column = i % (DIM / 8) * 8;
        const i64 place = place_of(a.dq, (i64)rows.step * (rows.index + r) + rows.phase, rows.head);
        float zeros[8] = {};
        if (is_written(a, rows, r) && column < a.dim) put_eight(a, a.dq, place + column, zeros, false, a.dim - column);
    }
}

// A row's LSE, or what leaves no weight of a row that is not there.
__device__ __forceinline__ float lse_if(bool real, float lse) { return real ? lse : __uint_as_float(0x7f800000u); }

// What statistics have of an LSE. In FP8 it is what a score's exponent of two is added to, where weights are multiplied.
__device__ __forceinline__ float level_of(float lse) { return IS_FP8 ? __fmaf_rn(-lse, LOG2_E, WEIGHT_EXPONENT) : lse; }

// Of eight lanes from one on, of those that the tensors have.
__device__ __forceinline__ float product_of_elements(const Args& a, i64 at, int head, int lane) {
    const i64 dout = place_of(a.gradient, at, head), out = place_of(a.out, at, head);
    float d = 0.0f;
#pragma unroll 1
    for (int i = lane; i < min(lane + 8, a.dim_v); ++i) d = __fmaf_rn(get(a.gradient, dout + i), get(a.out, out + i), d);
    return d;
}

// LSE and D of a tile's rows, of which `real` are real, at least one. Everything is asked for before anything is used, by
// all threads: from a real row where there is none, and from real lanes.
template <int OUT, class Gradients = Packed<TYPE, 8>>
__device__ __forceinline__ void put_statistics(const Args& a, const Rows& rows, float* statistics, float factor = 1.0f) {
    constexpr int LANES = DIM / 8, EACH = THREADS / LANES, COUNT = ROWS / EACH;
    const int column = threadIdx.x % LANES * 8, lane = min(column, a.dim_v - 8), first = threadIdx.x / LANES;
    Gradients dout[COUNT];
    Packed<OUT, 8> out[COUNT];
    float lse[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const i64 at = (i64)rows.step * (rows.index + min(first + i * EACH, rows.real - 1)) + rows.phase;
        if (by_engine(a)) {
            load((const void*)a.gradient.base, place_of(a.gradient, at, rows.head) + lane, dout[i]);
            load((const void*)a.out.base, place_of(a.out, at, rows.head) + lane, out[i]);
        }
        lse[i] = ((const float*)a.lse.base)[place_of(a.lse, at, rows.head)];
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int row = first + i * EACH;
        const bool real = row < rows.real;
        float d = 0.0f;
        if (by_engine(a)) {
#pragma unroll
            for (int j = 0; j < 8; ++j) d = __fmaf_rn(unpacked(dout[i], j), unpacked(out[i], j), d);
            if (!real || column >= a.dim_v) d = 0.0f;
        } else if (real) {
            d = product_of_elements(a, (i64)rows.step * (rows.index + row) + rows.phase, rows.head, column);
        }
        // In the order of `make_d`: a row's D has the same bits in both forms.
        constexpr int STEPS[] = {4, DIM > 64 ? 8 : 2, 1, 2, 16}, COUNT_OF_STEPS = DIM == 64 ? 3 : DIM == 128 ? 4 : 5;
#pragma unroll
        for (int step = 0; step < COUNT_OF_STEPS; ++step) d += __shfl_xor_sync(FULL, d, STEPS[step]);
        if (column != 0) continue;
        statistics[row] = level_of(lse_if(real, lse[i]));
        statistics[ROWS + row] = d * factor;
    }
}

// What D is multiplied with, of a tile of rows and a head.
__device__ __forceinline__ float of_dout(const Args& a, u32 tile, int head) {
    if (!IS_FP8) return 1.0f;
    return a.descales[DOUT][(i64)a.q_tile_segment[tile] * a.heads + head];
}

// What is to be done before tiles of keys are taken, for a tile of rows and a head. Gradients is what eight lanes of dout come as.
template <class Gradients>
__device__ __forceinline__ void prepare(const Args& a, u32 tile, int head, const Rows& rows, bool seeing) {
    const i64 part = part_of(a, tile, head);
    float* const statistics = a.statistics + part * STATISTICS;
    if (!seeing) clear_gradients(a, rows);
    else if (!a.describes && a.out.format == F32) put_statistics<F32, Gradients>(a, rows, statistics, of_dout(a, tile, head));
    else if (!a.describes) put_statistics<RESULTS, Gradients>(a, rows, statistics, of_dout(a, tile, head));
    if (seeing && threadIdx.x == 0) a.added[part] = 0, a.described[part] = 0;
}

// The same for all heads of a block's tile.
__device__ __forceinline__ void prepare(const Args& a) {
    const u32 tile = blockIdx.x;
    if (tile >= a.plan->q_tiles) return;
    const PlannedSegment& segment = a.segments[a.q_tile_segment[tile]];
    const u32 t = tile - segment.first_q_tile;
    const int first = t * ROWS;
    const bool seeing = sees_keys(segment, t);
    for (int head = blockIdx.y; head < a.heads; head += gridDim.y) {
        prepare<Packed<TYPE, 8>>(a, tile, head, rows_of_segment(a, segment, first, head), seeing);
    }
}
