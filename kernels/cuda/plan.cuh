// What planning kernels have in common: one block, of PLANNERS threads or fewer, puts a call's segments in falling order of a
// length, each with all its tiles, which are of one kind or of several. For forward_plan.cuh and backward_plan.cuh.
//
// Segments whose lengths are about the same have one *bucket*, in which they are in any order.
#pragma once

// The most threads of a planning kernel.
constexpr u32 PLANNERS = 1024;
// Bounds are cut to this; there are no more rows and keys.
constexpr int FAR = 1 << 29;

// The threads of this launch, whole warps. There are as many buckets.
__device__ __forceinline__ u32 planners() { return blockDim.x; }
__device__ __forceinline__ int bound(i64 value) { return (int)min(max(value, (i64)-FAR), (i64)FAR); }

// Rows that a segment or a run owns: from its first row to the next one's, or to the last of all.
template <class T>
__device__ __forceinline__ int span_of(const T* of, int i, int count, i64 rows) {
    const i64 end = i + 1 < count ? of[i + 1].first_row : rows;
    return (int)max(min(end, rows) - max(of[i].first_row, (i64)0), (i64)0);
}

// How many tiles of each kind.
template <int KINDS>
struct Tiles {
    u32 of[KINDS];
};

// Where the segment of each tile is written, and for how many tiles there is room.
template <int KINDS>
struct Names {
    u32* segment[KINDS];
    Tiles<KINDS> room;
};

// Adds tiles to those of the bucket of a length; gives what was there. By words, as the additions of one that has 64 bits are
// tried again and again where many segments have one bucket.
template <int KINDS>
__device__ __forceinline__ Tiles<KINDS> add_tiles(Tiles<KINDS>* buckets, i64 length, const Tiles<KINDS>& tiles) {
    Tiles<KINDS>& to = buckets[planners() - 1 - (u32)min(max(length, (i64)0) / 128, (i64)planners() - 1)];
    Tiles<KINDS> before;
#pragma unroll
    for (int kind = 0; kind < KINDS; ++kind) before.of[kind] = atomicAdd(&to.of[kind], tiles.of[kind]);
    return before;
}

// Each bucket's tiles become those of the buckets before it. Gives those up to this thread's bucket.
template <int KINDS>
__device__ __forceinline__ Tiles<KINDS> sum_buckets(Tiles<KINDS>* buckets) {
    const u32 thread = threadIdx.x;
    __syncthreads();
    const Tiles<KINDS> own = buckets[thread];
    Tiles<KINDS> sum = own;
    for (u32 step = 1; step < planners(); step *= 2) {
        const Tiles<KINDS> before = thread >= step ? buckets[thread - step] : Tiles<KINDS>{};
        __syncthreads();
#pragma unroll
        for (int kind = 0; kind < KINDS; ++kind) sum.of[kind] += before.of[kind];
        buckets[thread] = sum;
        __syncthreads();
    }
#pragma unroll
    for (int kind = 0; kind < KINDS; ++kind) buckets[thread].of[kind] = sum.of[kind] - own.of[kind];
    __syncthreads();
    return sum;
}

// Says of the tiles of a warp's segments whose they are: lane j has those of segment `from + j`.
template <int KINDS>
__device__ __forceinline__ void name_tiles(
    const Names<KINDS>& names, const Tiles<KINDS>& first, const Tiles<KINDS>& tiles, int from, int segment_count
) {
    for (int j = 0; j < 32 && from + j < segment_count; ++j)
#pragma unroll
        for (int kind = 0; kind < KINDS; ++kind) {
            const u32 begin = __shfl_sync(FULL, first.of[kind], j), count = __shfl_sync(FULL, tiles.of[kind], j);
            const u32 end = min(begin + count, names.room.of[kind]);
            for (u32 i = begin + threadIdx.x % 32; i < end; i += 32) names.segment[kind][i] = from + j;
        }
}

// Makes a plan. `cut_of(a, s)` says of a segment what its `length` and its `tiles` are, `put_segment(a, s, cut, first)` keeps
// it, and `put_total(a, tiles)` how many tiles there are.
template <int KINDS, class Args>
__device__ __forceinline__ void make_plan(const Args& a, const Names<KINDS>& names) {
    __shared__ Tiles<KINDS> buckets[PLANNERS];
    const u32 thread = threadIdx.x;
    buckets[thread] = {};
    __syncthreads();
    for (int s = thread; s < a.segment_count; s += planners()) {
        const auto cut = cut_of(a, s);
        add_tiles(buckets, cut.length, cut.tiles);
    }
    Tiles<KINDS> total = sum_buckets(buckets);
#pragma unroll
    for (int kind = 0; kind < KINDS; ++kind) total.of[kind] = min(total.of[kind], names.room.of[kind]);
    if (thread == planners() - 1) put_total(a, total);
    // Segments of a bucket stay about in their order: tiles that are taken together read memory that lies together.
    for (int from = thread / 32 * 32; from < a.segment_count; from += planners()) {
        const int s = from + thread % 32;
        Tiles<KINDS> first = {}, tiles = {};
        if (s < a.segment_count) {
            const auto cut = cut_of(a, s);
            first = add_tiles(buckets, cut.length, cut.tiles), tiles = cut.tiles;
            put_segment(a, s, cut, first);
        }
        name_tiles(names, first, tiles, from, a.segment_count);
    }
}
