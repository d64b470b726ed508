// The backward's plan: segments in falling order of their query rows. For backward.cu, which says what the plan is made of.
#pragma once

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
    // Query rows of a tile, and its keys, as a power of two.
    int tile_rows;
    int tile_keys_log2;
    // Tiles that the plan has room for.
    int q_capacity;
    int kv_capacity;
};

// Tiles of keys of a segment that go around, at most.
constexpr u32 MOST_AROUND = 8;

// Kinds of tiles.
constexpr int OF_QUERIES = 0, OF_KEYS = 1;

// A segment's query rows, tiles, and owned query rows.
struct Cut {
    i64 length;
    Tiles<2> tiles;
    int span;
};

__device__ __forceinline__ int keys_of(const PlanArgs& a, int r) { return span_of(a.runs, r, a.run_count, a.kv_rows); }

__device__ __forceinline__ u32 tiles_of_keys(const PlanArgs& a, u32 keys) {
    return keys + (1u << a.tile_keys_log2) - 1 >> a.tile_keys_log2;
}

__device__ __forceinline__ Cut cut_of(const PlanArgs& a, int s) {
    const QuerySegment& segment = a.segments[s];
    const int span = span_of(a.segments, s, a.segment_count, a.q_rows);
    u32 keys = 0;
    for (int r = 0; r < (int)segment.runs; ++r) keys += tiles_of_keys(a, keys_of(a, segment.first_run + r));
    return {segment.q_len, {(u32)(span + a.tile_rows - 1) / a.tile_rows, keys}, span};
}

__device__ __forceinline__ void put_segment(const PlanArgs& a, int s, const Cut& cut, const Tiles<2>& first) {
    const QuerySegment segment = a.segments[s];
    const Widened own = {bound(segment.lo), bound(segment.hi), (int)segment.sink_tokens, (int)segment.prefix};
    PlannedSegment planned = {
        (int)(segment.q_offset / a.q_step), (int)(segment.q_offset % a.q_step), (int)segment.q_len, cut.span,
        own.sink_tokens > 0 ? -FAR : own.lo, own.prefix > 0 ? max(own.hi, own.prefix - 1) : own.hi,
        (int)segment.first_run, (int)segment.runs,
        first.of[OF_QUERIES], cut.tiles.of[OF_QUERIES], first.of[OF_KEYS], cut.tiles.of[OF_KEYS],
    };
    planned.own = own;
    u32 before = 0;
    // Tiles with real keys, and whether none comes behind one without.
    u32 real = 0;
    bool together = true;
    for (int r = (int)segment.first_run; r < (int)(segment.first_run + segment.runs); ++r) {
        const KeyRun run = a.runs[r];
        const int span = keys_of(a, r);
        a.planned_runs[r] = {
            (int)(run.offset / a.kv_step), (int)(run.offset % a.kv_step), (int)run.first_key, (int)run.len, span, before,
        };
        together = together && (run.len == 0 || real == before);
        before += tiles_of_keys(a, span), real += tiles_of_keys(a, (u32)run.len);
        planned.keys = (int)(run.first_key + run.len);
    }
    const Range seeing = rows_seeing(0, planned.keys, planned.lo, planned.hi, planned.len);
    planned.seeing = seeing.from / a.tile_rows, planned.seeing_end = (seeing.to + a.tile_rows - 1) / a.tile_rows;
    const bool all_seen = planned.lo + planned.len <= 1 && planned.hi >= planned.keys - 1;
    planned.around = together && all_seen && planned.len > 0 && real <= MOST_AROUND ? real : 0;
    a.planned[s] = planned;
}

__device__ __forceinline__ void put_total(const PlanArgs& a, const Tiles<2>& tiles) {
    *a.plan = {0, tiles.of[OF_QUERIES], tiles.of[OF_KEYS]};
}

extern "C" __global__ void __launch_bounds__(PLANNERS, 1) backward_plan(const __grid_constant__ PlanArgs a) {
    make_plan<2>(a, {{a.q_tile_segment, a.kv_tile_segment}, {(u32)a.q_capacity, (u32)a.kv_capacity}});
}
