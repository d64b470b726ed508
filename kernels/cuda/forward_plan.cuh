// The forward's plan: segments in falling order of their keys. For forward.cu, which says what the plan is made of.
//
// The split shape (forward_split.cuh) has pieces of tiles besides. A call of few segments and tiles is planned by each of its
// blocks for itself, in shared memory, with segments in their own order.
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
    // For the split shape, where it puts pieces together itself: how many of each tile and head have ended, and their number.
    u32* ended;
    int ended_count;
    // Whether blocks plan for themselves.
    int by_blocks;
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

// ---------------------------------------------------------------------------------------------------------------------
// Pieces.

// A segment's keys make so many pieces at most, on which the room for what they leave relies, of so many keys at least.
constexpr int PIECES = 16, PIECE_KEYS_LOG2 = 6;

// Rows of the sequence from `first` on, of which `real` are real and `owned` owned: either may be more than the tile has, or less
// than none. And the keys of which each is seen by some row; with sink tokens all keys before these, too.
struct SplitTile {
    int first;
    int real;
    int owned;
    Span seen;
};

__device__ __forceinline__ SplitTile split_tile(const PlannedRows& rows, u32 tile, int tile_rows) {
    const int first = (int)(tile - rows.first_tile) * tile_rows, real = rows.len - first;
    Span seen = span_seen({first + rows.lo, first + rows.hi}, min(real, tile_rows), rows.keys);
    if (rows.sink_tokens > 0) seen.from = 0;
    if (seen.from >= seen.to) seen = {0, 0};
    return {first, real, rows.span - first, seen};
}

// The pieces of which a tile sees something, each of 2^log2 keys. A tile that sees nothing has one.
struct Pieces {
    int first;
    int count;
    int log2;
};

__device__ __forceinline__ Pieces pieces_of(int keys, Span seen, int longer) {
    const int even = 32 - __clz(max(keys - 1, 0) / PIECES), log2 = min(max(even, PIECE_KEYS_LOG2) + longer, 30);
    const int first = seen.from >> log2, end = (seen.to - 1 >> log2) + 1;
    return {first, max(end - first, 1), log2};
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

// The most segments and tiles of a plan that a block makes for itself, as many as a warp has threads.
constexpr int FEW_TILES = 32;

struct FewTiles {
    PlannedRows rows[FEW_TILES];
    TilePieces tile_pieces[FEW_TILES];
    u32 tile_segment[FEW_TILES];
    Plan plan;
};

// The sum of the numbers of the warp's threads before this one; `all` becomes that of all.
__device__ __forceinline__ u32 sum_before(u32 own, u32& all) {
    u32 sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 before = __shfl_up_sync(FULL, sum, step);
        if (threadIdx.x % 32 >= step) sum += before;
    }
    all = __shfl_sync(FULL, sum, 31);
    return sum - own;
}

// Plans for few segments, by one warp.
__device__ __forceinline__ void plan_few(const PlanArgs& of_call, FewTiles& few) {
    PlanArgs a = of_call;
    a.rows = few.rows;
    const int lane = threadIdx.x % 32;
    const bool is_segment = lane < a.segment_count;
    const Cut cut = is_segment ? cut_of(a, lane) : Cut{};
    u32 tiles, pieces, left;
    const u32 first = sum_before(cut.tiles.of[0], tiles);
    tiles = min(tiles, (u32)FEW_TILES);
    if (is_segment) put_segment(a, lane, cut, {{first}});
    for (u32 tile = first; tile < min(first + cut.tiles.of[0], tiles); ++tile) few.tile_segment[tile] = lane;
    __syncwarp();
    u32 count = 0;
    if (lane < tiles) {
        const PlannedRows& rows = few.rows[few.tile_segment[lane]];
        count = pieces_of(rows.keys, split_tile(rows, lane, a.tile_rows).seen, a.longer).count;
    }
    const u32 before = sum_before(count, pieces), left_before = sum_before(count > 1 ? count : 0, left);
    few.tile_pieces[lane] = {before, left_before};
    if (lane == 0) few.plan = {0, tiles, pieces};
}

// Plans for few segments where blocks plan for themselves, and waits for the planning kernel then, which clears what is
// counted. That kernel is not started early: whatever was launched before it has ended, and so have the call's tables been
// written.
__device__ __forceinline__ void plan_before_waiting(const PlanArgs& a, FewTiles& few) {
    if (a.by_blocks && threadIdx.x < 32) plan_few(a, few);
    after_earlier_launches();
    __syncthreads();
}

#ifdef PLAN
extern "C" __global__ void __launch_bounds__(PLANNERS, 1) forward_plan(const __grid_constant__ PlanArgs a) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    for (int i = threadIdx.x; i < a.ended_count; i += planners()) a.ended[i] = 0;
    if (a.by_blocks) return;
    make_plan<1>(a, {{a.tile_segment}, {(u32)a.tile_capacity}});
    if (a.tile_pieces != nullptr) {
        __syncthreads();
        put_pieces(a);
        return;
    }
    for (int r = threadIdx.x; r < a.run_count; r += planners()) {
        const KeyRun run = a.runs[r];
        a.keys[r] = {(int)(run.offset / a.kv_step), (int)(run.offset % a.kv_step), (int)run.first_key, (int)run.len};
    }
}
#endif
