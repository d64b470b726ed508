// The backward's plan: segments in falling order of their query rows, each with all its tiles. For backward.cu, which says what
// the plan is made of.
#pragma once

constexpr u32 PLANNERS = 1024;
// Bounds are cut to this; there are no more rows and keys.
constexpr int FAR = 1 << 29;

struct PlanArgs {
    const QuerySegment* segments;
    const KeyRun* runs;
    Plan* plan;
    PlannedSegment* planned;
    PlannedRun* planned_runs;
    u32* q_tile_segment;
    u32* kv_tile_segment;
    i64 q_rows;
    i64 kv_rows;
    int segment_count;
    int run_count;
    int q_step;
    int kv_step;
    // Query rows of a tile.
    int tile_rows;
    // Tiles that the plan has room for.
    int q_capacity;
    int kv_capacity;
};

// From one first row to the next, or to the last.
__device__ __forceinline__ int span_of(i64 first, i64 next, i64 rows) {
    return (int)max(min(next, rows) - max(first, (i64)0), (i64)0);
}
__device__ __forceinline__ int rows_of(const PlanArgs& a, int s) {
    return span_of(a.segments[s].first_row, s + 1 < a.segment_count ? a.segments[s + 1].first_row : a.q_rows, a.q_rows);
}
__device__ __forceinline__ int keys_of(const PlanArgs& a, int r) {
    return span_of(a.runs[r].first_row, r + 1 < a.run_count ? a.runs[r + 1].first_row : a.kv_rows, a.kv_rows);
}
// Tiles of query rows, and of keys.
struct Tiles {
    u32 q;
    u32 kv;
};
__device__ __forceinline__ Tiles tiles_of(const PlanArgs& a, int s) {
    u32 keys = 0;
    for (int r = 0; r < (int)a.segments[s].runs; ++r) keys += (keys_of(a, a.segments[s].first_run + r) + KEYS - 1) / KEYS;
    return {(u32)(rows_of(a, s) + a.tile_rows - 1) / a.tile_rows, keys};
}
// What is there, to which tiles are added: by two words, as the additions of one that has 64 bits are tried again and again
// where many segments have one bucket.
__device__ __forceinline__ Tiles add_tiles(Tiles& to, Tiles tiles) {
    return {atomicAdd(&to.q, tiles.q), atomicAdd(&to.kv, tiles.kv)};
}
__device__ __forceinline__ u32 bucket_of(const PlanArgs& a, int s) {
    return PLANNERS - 1 - (u32)min(max(a.segments[s].q_len, (i64)0) / 128, (i64)PLANNERS - 1);
}
__device__ __forceinline__ int bound(i64 value) { return (int)min(max(value, (i64)-FAR), (i64)FAR); }

__device__ __forceinline__ void plan_segment(const PlanArgs& a, int s, Tiles tiles, Tiles first) {
    const QuerySegment segment = a.segments[s];
    PlannedSegment planned = {
        (int)(segment.q_offset / a.q_step), (int)(segment.q_offset % a.q_step), (int)segment.q_len, rows_of(a, s),
        bound(segment.lo), bound(segment.hi), (int)segment.first_run, (int)segment.runs,
        first.q, tiles.q, first.kv, tiles.kv,
    };
    u32 before = 0;
    for (int r = (int)segment.first_run; r < (int)(segment.first_run + segment.runs); ++r) {
        const KeyRun run = a.runs[r];
        const int span = keys_of(a, r);
        a.planned_runs[r] = {
            (int)(run.offset / a.kv_step), (int)(run.offset % a.kv_step), (int)run.first_key, (int)run.len, span, before,
        };
        before += (span + KEYS - 1) / KEYS;
        planned.keys = (int)(run.first_key + run.len);
    }
    const Range seeing = rows_seeing(0, planned.keys, planned.lo, planned.hi, planned.len);
    planned.seeing = seeing.from / a.tile_rows, planned.seeing_end = (seeing.to + a.tile_rows - 1) / a.tile_rows;
    a.planned[s] = planned;
}

// Says of the tiles of 32 segments whose they are: a warp reads them at once, and takes one after the other.
__device__ __forceinline__ void name_tiles(const PlanArgs& a, int from) {
    const u32 lane = threadIdx.x % 32;
    const PlannedSegment mine = a.planned[min(from + (int)lane, a.segment_count - 1)];
    for (int j = 0; j < 32 && from + j < a.segment_count; ++j) {
        const u32 q = __shfl_sync(FULL, mine.first_q_tile, j), kv = __shfl_sync(FULL, mine.first_kv_tile, j);
        const u32 q_end = min(q + __shfl_sync(FULL, mine.q_tiles, j), (u32)a.q_capacity);
        const u32 kv_end = min(kv + __shfl_sync(FULL, mine.kv_tiles, j), (u32)a.kv_capacity);
        for (u32 i = q + lane; i < q_end; i += 32) a.q_tile_segment[i] = from + j;
        for (u32 i = kv + lane; i < kv_end; i += 32) a.kv_tile_segment[i] = from + j;
    }
}

extern "C" __global__ void __launch_bounds__(PLANNERS, 1) backward_plan(const __grid_constant__ PlanArgs a) {
    __shared__ Tiles starts[PLANNERS];
    const u32 lane = threadIdx.x;
    starts[lane] = {};
    __syncthreads();
    for (int s = lane; s < a.segment_count; s += PLANNERS) add_tiles(starts[bucket_of(a, s)], tiles_of(a, s));
    __syncthreads();
    // Tiles of the buckets before.
    const Tiles own = starts[lane];
    Tiles sum = own;
    for (u32 step = 1; step < PLANNERS; step *= 2) {
        const Tiles before = lane >= step ? starts[lane - step] : Tiles{};
        __syncthreads();
        sum.q += before.q, sum.kv += before.kv;
        starts[lane] = sum;
        __syncthreads();
    }
    starts[lane] = {sum.q - own.q, sum.kv - own.kv};
    if (lane == PLANNERS - 1) *a.plan = {0, min(sum.q, (u32)a.q_capacity), min(sum.kv, (u32)a.kv_capacity)};
    __syncthreads();
    for (int s = lane; s < a.segment_count; s += PLANNERS) {
        const Tiles tiles = tiles_of(a, s);
        plan_segment(a, s, tiles, add_tiles(starts[bucket_of(a, s)], tiles));
    }
    __syncthreads();
    for (int s = lane / 32 * 32; s < a.segment_count; s += PLANNERS) name_tiles(a, s);
}
