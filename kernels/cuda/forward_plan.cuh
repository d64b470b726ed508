// The forward's plan: segments in falling order of their keys. For forward.cu, which says what the plan is made of.
#pragma once

struct PlanArgs {
    const QuerySegment* segments;
    const KeyRun* runs;
    Plan* plan;
    PlannedRows* rows;
    PlannedKeys* keys;
    u32* tile_segment;
    i64 q_rows;
    int segment_count;
    int run_count;
    int q_step;
    int kv_step;
    int tile_rows;
    // What a first tile has fewer rows than others is a multiple of this.
    int part_rows;
    // Tiles that the plan has room for.
    int tile_capacity;
    // For the split shape, which alone counts pieces: they are 2^longer times as long as they need be.
    int longer;
    TilePieces* tile_pieces;
    // Segments of so many real rows have tiles, and others none.
    i64 rows_from;
    i64 rows_to;
};

// A segment's keys, tiles and owned rows, and what its first tile has fewer rows than others.
struct Cut {
    i64 length;
    Tiles<1> tiles;
    int span;
    int skipped;
};

// Under a bound to the right the last rows see most, so that tiles are counted from the last real row: what is left over is
// the first tile's, which sees least.
__device__ __forceinline__ Cut cut_of(const PlanArgs& a, int s) {
    const QuerySegment& segment = a.segments[s];
    const int span = span_of(a.segments, s, a.segment_count, a.q_rows);
    const u32 real = (u32)max(min(segment.q_len, (i64)span), (i64)0);
    const u32 over = (real + a.part_rows - 1) / a.part_rows * a.part_rows % a.tile_rows;
    const u32 skipped = over == 0 || segment.hi >= FAR ? 0 : a.tile_rows - over;
    const bool taken = segment.q_len >= a.rows_from && segment.q_len < a.rows_to;
    const u32 tiles = span == 0 || !taken ? 0 : (span + skipped + a.tile_rows - 1) / a.tile_rows;
    return {segment.keys, {tiles}, span, (int)skipped};
}

__device__ __forceinline__ void put_segment(const PlanArgs& a, int s, const Cut& cut, const Tiles<1>& first) {
    const QuerySegment& segment = a.segments[s];
    a.rows[s] = {
        (int)(segment.q_offset / a.q_step), (int)(segment.q_offset % a.q_step), (int)segment.q_len, cut.span,
        (int)segment.keys, bound(segment.lo), bound(segment.hi), first.of[0], cut.tiles.of[0],
        (int)segment.first_run, (int)segment.runs, cut.skipped, (int)segment.sink_tokens,
    };
}

__device__ __forceinline__ void put_total(const PlanArgs& a, const Tiles<1>& tiles) {
    a.plan->tiles = tiles.of[0];
    a.plan->next = 0;
}

// Counts the pieces of tiles.
__device__ __forceinline__ void put_pieces(const PlanArgs& a) {
    __shared__ TilePieces sums[PLANNERS];
    const u32 thread = threadIdx.x, tiles = a.plan->tiles;
    TilePieces before = {};
    for (u32 from = 0; from < tiles; from += planners()) {
        const u32 tile = from + thread;
        TilePieces own = {};
        if (tile < tiles) {
            const PlannedRows& rows = a.rows[a.tile_segment[tile]];
            const u64 count = pieces_of(rows.keys, split_tile(rows, tile, a.tile_rows).seen, a.longer).count;
            own = {count, count > 1 ? count : 0};
        }
        TilePieces sum = own;
        sums[thread] = sum;
        __syncthreads();
        for (u32 step = 1; step < planners(); step *= 2) {
            const TilePieces others = thread >= step ? sums[thread - step] : TilePieces{};
            __syncthreads();
            sum.pieces += others.pieces, sum.left += others.left;
            sums[thread] = sum;
            __syncthreads();
        }
        if (tile < tiles)
            a.tile_pieces[tile] = {before.pieces + sum.pieces - own.pieces, before.left + sum.left - own.left};
        before.pieces += sums[planners() - 1].pieces, before.left += sums[planners() - 1].left;
        __syncthreads();
    }
    if (thread == 0) a.plan->pieces = before.pieces;
}

extern "C" __global__ void __launch_bounds__(PLANNERS, 1) forward_plan(const __grid_constant__ PlanArgs a) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    make_plan<1>(a, {{a.tile_segment}, {(u32)a.tile_capacity}});
    for (int r = threadIdx.x; r < a.run_count; r += planners()) {
        const KeyRun run = a.runs[r];
        a.keys[r] = {(int)(run.offset / a.kv_step), (int)(run.offset % a.kv_step), (int)run.first_key, (int)run.len};
    }
    if (a.tile_pieces == nullptr) return;
    __syncthreads();
    put_pieces(a);
}
