// The forward's split shape: few query rows against many keys, as where a cache of keys is decoded. For forward.cu.
//
// There are too few tiles for all multiprocessors, and to read a tile's keys takes longer than to multiply them. So the keys of a
// tile are cut into *pieces*, each an item of its own. A block of threads takes item after item; its warps take blocks of 16 keys
// in turn, each with a ring of its own, and multiply 16 rows at once: the query heads of a KV head, of one row of the sequence or
// of several. What the warps have is put together, in their order. A tile of one piece is ended then. Of others each piece leaves
// what it has, which is put together in the order of keys: where there are few pieces, by the block that ends a tile's last one,
// and else by a launch of its own.
//
// Where pieces begin follows from the segment's number of keys, and in calls with very many rows from `longer`, which the host
// chooses so that there is room for what pieces leave. Results do not depend on how many blocks there are.
#pragma once

// Rows of a tile, and keys of a block.
constexpr int SPLIT_ROWS = 16, SPLIT_KEYS = 16;

struct SplitArgs {
    const TilePieces* tile_pieces;
    // What pieces leave: for each one SPLIT_ROWS rows.
    float* left;
    // How many pieces of each tile and head have ended; null where a launch of its own puts them together.
    u32* ended;
    // Query heads that share a tile, and rows of the sequence in one.
    int pack;
    int tile_rows;
    // Pieces are 2^longer times as long as they need be.
    int longer;
};

// ---------------------------------------------------------------------------------------------------------------------
// Products of a warp: 16 rows by 16 keys, or by 16 lanes.

__device__ __forceinline__ void multiply(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
#if TYPE == 1
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define PRODUCT "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
    asm(PRODUCT " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#undef PRODUCT
}
// Four matrices of 8 rows of 16 bytes; as they lie, or turned.
template <bool TURNED>
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 row) {
    if constexpr (TURNED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(row)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(row)
                     : "memory");
}
// 16 bytes, of which the first `bytes` come from memory and the others are zeros.
__device__ __forceinline__ void copy_16(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// What `raise_bases`, `weigh_row` and `pack` of forward_consumer.cuh are told.
struct Split {
    // Memory is the limit here, so that a row's base is its largest score.
    static constexpr int KEYS = SPLIT_KEYS, SLACK = 0;
    static constexpr int WARPS = 4, THREADS_ALL = 32 * WARPS, STAGES = DIM == 64 ? 6 : 3;
    static constexpr int ROW_BYTES = 2 * DIM, BLOCK_BYTES = KEYS * ROW_BYTES, STAGE_BYTES = 2 * BLOCK_BYTES;
    static constexpr int WARP_BYTES = STAGES * STAGE_BYTES;
    // Lanes of a row that a thread has where a warp has the row, and 32-bit numbers of what is left of a row: its lanes, the
    // largest score, the rest and the sum.
    static constexpr int LANES = DIM / 32, LEFT = DIM + 4;
};

// 16 bytes of a row of a block, which lies on a multiple of ROW_BYTES: so that eight rows' are in different banks. Chunks
// whose numbers differ by `chunk ^ other` are at places that differ by 16 times that.
__device__ __forceinline__ u32 at_chunk(u32 block, int row, int chunk) {
    return block + row * Split::ROW_BYTES + (chunk ^ row % 8) * 16;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows.

// A segment's keys, which are asked for in rising order.
struct KeyRows {
    const KeyRun* runs;
    int count;
    // The run of the last block's first key.
    int at;

    // The row of a thread's key; the first thread has the warp's first key. -1 for a key that is not real.
    __device__ __forceinline__ int row_of(int key, bool real, int step) {
        int run = at, row = -1;
        if (real) {
            while (run + 1 < count && runs[run + 1].first_key <= key) ++run;
            row = (int)runs[run].offset + step * (key - (int)runs[run].first_key);
        }
        at = __shfl_sync(FULL, run, 0);
        return row;
    }
};

__device__ __forceinline__ KeyRows key_rows(const KeyRun* runs, int count, int first_key) {
    int low = 0, high = count;
    while (low + 1 < high) {
        const int middle = (low + high) / 2;
        if (runs[middle].first_key <= first_key) low = middle;
        else high = middle;
    }
    return {runs, count, low};
}

// Where a thread's part of a block goes, of the keys from its first one on, KEYS_AT_ONCE apart: one chunk of each.
constexpr int KEYS_AT_ONCE = 256 / DIM;
__device__ __forceinline__ int first_key_of_thread() { return threadIdx.x % 32 / (DIM / 8); }
__device__ __forceinline__ int chunk_of_thread() { return threadIdx.x % (DIM / 8); }

// Where a thread's chunk of a key goes that is `later` than its first one, a multiple of KEYS_AT_ONCE: no bit of the first key
// is changed.
__device__ __forceinline__ u32 place_of_later(u32 first, int later) {
    return (first ^ later % 8 * 16) + later * Split::ROW_BYTES;
}

// A tensor's head: a thread's chunk of row 0, how many of its lanes there are, and an address where nothing is read.
struct HeadRows {
    const u16* codes;
    i64 stride;
    int lanes;
    const u16* any;
};
__device__ __forceinline__ HeadRows head_rows(const Elements& from, int head) {
    const int lane = 8 * chunk_of_thread();
    const u16* const any = (const u16*)from.view.base;
    return {any + head * from.view.head + lane, from.view.row, from.dim - lane, any};
}

// Brings the rows of a block; a thread's `row` is that of its key, -1 for zeros.
__device__ __forceinline__ void bring_rows(const Args& a, u32 to, const HeadRows& from, int row) {
    const u32 mine = at_chunk(to, first_key_of_thread(), chunk_of_thread());
#pragma unroll
    for (int later = 0; later < SPLIT_KEYS; later += KEYS_AT_ONCE) {
        const int its_row = __shfl_sync(FULL, row, first_key_of_thread() + later);
        const int lanes = its_row < 0 ? 0 : from.lanes;
        const u16* const codes = lanes > 0 ? from.codes + its_row * from.stride : from.any;
        const u32 at = place_of_later(mine, later);
        if (IS_GENERAL && a.by_threads) put_elements(at, codes, lanes);
        else copy_16(at, codes, lanes > 0 ? 16 : 0);
    }
}

// Brings the rows of a block that are all real and `step` apart; the first one is `row`.
__device__ __forceinline__ void bring_run(u32 to, const HeadRows& from, i64 row, int step) {
    const u32 mine = at_chunk(to, first_key_of_thread(), chunk_of_thread());
    const int bytes = from.lanes > 0 ? 16 : 0;
    const i64 stride = from.lanes > 0 ? step * from.stride : 0;
    const u16* codes = from.lanes > 0 ? from.codes + row * from.stride + first_key_of_thread() * stride : from.any;
#pragma unroll
    for (int later = 0; later < SPLIT_KEYS; later += KEYS_AT_ONCE) {
        copy_16(place_of_later(mine, later), codes, bytes);
        codes += KEYS_AT_ONCE * stride;
    }
}

// A row of a tile: of the sequence, and its head.
struct SplitRow {
    int in_tile;
    int head;
};
__device__ __forceinline__ SplitRow split_row(const SplitArgs& b, int row) { return {row / b.pack, row % b.pack}; }

// A thread's part of Q: lanes 16 s + 8 i + 2 j of row 8 h + r in q[s][2 i + h], with r and j by the thread's number.
__device__ __forceinline__ void get_queries(
    const Args& a, const SplitArgs& b, const PlannedRows& rows, const SplitTile& tile, int head, u32 (&q)[DIM / 16][4]
) {
    const Elements& from = a.elements[Q];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const SplitRow row = split_row(b, threadIdx.x % 32 / 4 + 8 * half);
        const bool real = row.in_tile < min(tile.real, b.tile_rows);
        const i64 at = (i64)a.q_step * (rows.index + tile.first + row.in_tile) + rows.phase;
        const u16* const codes = (const u16*)from.view.base + (real ? place_of(from.view, at, head + row.head) : 0);
#pragma unroll
        for (int i = 0; i < DIM / 8; ++i) {
            const int lane = 8 * i + 2 * (threadIdx.x % 4);
            u32& pair = q[i / 2][i % 2 * 2 + half];
            pair = 0;
            if (!real || lane >= from.dim) continue;
            if (!IS_GENERAL || !a.by_threads) pair = *(const u32*)(codes + lane);
            else pair = codes[lane] | (lane + 1 < from.dim ? (u32)codes[lane + 1] << 16 : 0);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// A piece.

// Scores of keys that a row does not see become -inf, as in forward_consumer.cuh. `bounds` of the sequence's rows of both halves.
__device__ __forceinline__ void mask_split(
    float (&s)[SPLIT_KEYS / 2], const Bounds (&bounds)[2], int sink_tokens, int first_key, int keys
) {
#pragma unroll
    for (int i = 0; i < SPLIT_KEYS / 2; ++i) {
        const int key = first_key + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        const Bounds of = bounds[i / 2 % 2];
        const bool left = key >= of.lo || (IS_GENERAL && key < sink_tokens);
        if (!left || key > of.hi || key >= keys) s[i] = neg_infinity();
    }
}

// A warp's blocks of a piece's keys, every fourth one.
__device__ __forceinline__ void attend_blocks(
    const Args& a, const SplitArgs& b, const KeyRun* runs, const PlannedRows& rows, const SplitTile& tile, int head_pack,
    Span of_piece, u32 ring, Rows& done, float (&o)[DIM / 2]
) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = head_pack / a.group;
    const int first = of_piece.from / SPLIT_KEYS + warp, end = (of_piece.to + SPLIT_KEYS - 1) / SPLIT_KEYS;
    const int count = first < end ? (end - first + Split::WARPS - 1) / Split::WARPS : 0;
    const int sink_tokens = IS_GENERAL ? rows.sink_tokens : 0;
    const int kv_step = a.elements[K].step;
    // Between sink tokens and the window nothing is seen.
    const int window = tile.first + rows.lo;
    auto key_of = [&](int i) { return (first + i * Split::WARPS) * SPLIT_KEYS; };
    auto is_seen = [&](int key) { return !IS_GENERAL || key < sink_tokens || key + SPLIT_KEYS > window; };
    KeyRows keys = key_rows(runs + rows.first_run, rows.runs, key_of(0));
    const HeadRows k_rows = head_rows(a.elements[K], kv_head), v_rows = head_rows(a.elements[V], kv_head);
    const bool alone = rows.runs == 1 && (!IS_GENERAL || !a.by_threads);
    const int alone_row = alone ? (int)keys.runs[0].offset : 0;
    // Stages that are filled and used, one after the other.
    const u32 ring_end = ring + Split::WARP_BYTES;
    auto after = [&](u32 stage) { return stage + Split::STAGE_BYTES == ring_end ? ring : stage + Split::STAGE_BYTES; };
    u32 stage = ring, k = ring;
    auto bring = [&](int i) {
        const int key = key_of(i);
        if (i < count && is_seen(key)) {
            if (alone && key + SPLIT_KEYS <= tile.seen.to) {
                const i64 row = alone_row + kv_step * key;
                bring_run(stage, k_rows, row, kv_step);
                bring_run(stage + Split::BLOCK_BYTES, v_rows, row, kv_step);
            } else {
                const int of_thread = key + lane % SPLIT_KEYS;
                const int row = keys.row_of(of_thread, of_thread < tile.seen.to, kv_step);
                bring_rows(a, stage, k_rows, row);
                bring_rows(a, stage + Split::BLOCK_BYTES, v_rows, row);
            }
        }
        stage = after(stage);
        copies_commit();
    };
#pragma unroll 1
    for (int i = 0; i < Split::STAGES - 1; ++i) bring(i);

    u32 q[DIM / 16][4];
    get_queries(a, b, rows, tile, head_pack * b.pack, q);
    Bounds bounds[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = tile.first + split_row(b, lane / 4 + 8 * half).in_tile;
        bounds[half] = {row + rows.lo, row + rows.hi};
    }
    const int last_row = tile.first + min(tile.real, b.tile_rows) - 1;
#pragma unroll 1
    for (int i = 0; i < count; ++i, k = after(k)) {
        copies_wait<Split::STAGES - 2>();
        __syncwarp();
        bring(i + Split::STAGES - 1);
        const int key = key_of(i);
        if (!is_seen(key)) continue;
        const u32 v = k + Split::BLOCK_BYTES;
        float s[SPLIT_KEYS / 2] = {};
        const u32 of_k = at_chunk(k, lane / 16 * 8 + lane % 8, lane / 8 % 2);
        const u32 of_v = at_chunk(v, lane / 8 % 2 * 8 + lane % 8, lane / 16);
#pragma unroll
        for (int step = 0; step < DIM / 16; ++step) {
            u32 m[4];
            load_matrices<false>(m, of_k ^ 2 * step * 16);
            multiply(s, q[step], m[0], m[1]);
            multiply(s + 4, q[step], m[2], m[3]);
        }
        if (IS_GENERAL && a.inner != 0.0f)
#pragma unroll
            for (int j = 0; j < SPLIT_KEYS / 2; ++j) s[j] = tanh_of(s[j] * a.inner);
        const bool whole = key >= last_row + rows.lo && key + SPLIT_KEYS <= min(tile.first + rows.hi + 1, tile.seen.to);
        if (!whole) mask_split(s, bounds, sink_tokens, key, tile.seen.to);
        float factor[2];
        const bool grew = raise_bases<Split>(s, done, factor, a.scale_log2, false);
        weigh_row<Split, 0>(s, done, a.scale_log2, 0, SPLIT_KEYS / 8);
        weigh_row<Split, 1>(s, done, a.scale_log2, 0, SPLIT_KEYS / 8);
        if (grew) {
#pragma unroll
            for (int j = 0; j < DIM / 2; ++j) o[j] *= factor[j / 2 % 2];
        }
        u32 p[SPLIT_KEYS / 4];
        pack<Split>(s, p);
#pragma unroll
        for (int lanes = 0; lanes < DIM / 16; ++lanes) {
            u32 m[4];
            load_matrices<true>(m, of_v ^ 2 * lanes * 16);
            multiply(o + 8 * lanes, p, m[0], m[1]);
            multiply(o + 8 * lanes + 4, p, m[2], m[3]);
        }
    }
    copies_wait<0>();
    __syncwarp();
}

// ---------------------------------------------------------------------------------------------------------------------
// What is put together: parts of a row, each with its largest score, rest and sum behind its lanes.

struct Part {
    float largest;
    float rest;
    float sum;
};
__device__ __forceinline__ Part part_at(const float* row) {
    const float4 part = *(const float4*)(row + DIM);
    return {part.x, part.y, part.z};
}
__device__ __forceinline__ void put_part(float* row, const Part& part) {
    *(float4*)(row + DIM) = make_float4(part.largest, part.rest, part.sum, 0.0f);
}

// A thread's lanes of a part.
struct alignas(4 * Split::LANES) Lanes {
    float of[Split::LANES];
};

// What parts of a row are together, in their order: `count` of them, MOST at most, `stride` numbers apart. Of lanes a thread of
// the warp has LANES, from its number times LANES on; of the numbers behind them it has those of one part, whose number is its
// own modulo MOST. All are asked for before one is used.
template <int MOST>
__device__ __forceinline__ Part put_together(
    const float* parts, int stride, int count, float scale_log2, float (&sum)[Split::LANES]
) {
    const int lane = threadIdx.x % 32;
    Part own = {neg_infinity(), 0.0f, 0.0f};
    if (lane % MOST < count) own = part_at(parts + lane % MOST * stride);
    Lanes lanes[MOST] = {};
#pragma unroll
    for (int part = 0; part < MOST; ++part)
        if (part < count) lanes[part] = *(const Lanes*)(parts + part * stride + lane * Split::LANES);
    float largest = own.largest;
#pragma unroll
    for (int step = MOST / 2; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, step));
    const Level level = level_of(largest, scale_log2);
    const float factor = factor_of(own.largest, own.rest, level);
    Part all = {largest, level.rest(), 0.0f};
#pragma unroll
    for (int i = 0; i < Split::LANES; ++i) sum[i] = 0.0f;
#pragma unroll
    for (int part = 0; part < MOST; ++part) {
        const float of_part = __shfl_sync(FULL, factor, part);
        all.sum += of_part * __shfl_sync(FULL, own.sum, part);
#pragma unroll
        for (int i = 0; i < Split::LANES; ++i) sum[i] += of_part * lanes[part].of[i];
    }
    return all;
}

// What a warp has of a row.
__device__ __forceinline__ void put_row(float* row, const float (&sum)[Split::LANES], const Part& part) {
#pragma unroll
    for (int i = 0; i < Split::LANES; i += 2)
        *(float2*)(row + threadIdx.x % 32 * Split::LANES + i) = make_float2(sum[i], sum[i + 1]);
    if (threadIdx.x % 32 == 0) put_part(row, part);
}

// Ends a row of a tile: what a warp has of it becomes out, and the first thread writes the statistics.
__device__ __forceinline__ void end_row(
    const Args& a, const SplitArgs& b, const PlannedRows& rows, const SplitTile& tile, int first_head, int row, const Part& part,
    const float (&sum)[Split::LANES]
) {
    const SplitRow of = split_row(b, row);
    const int head = first_head + of.head;
    const bool real = of.in_tile < tile.real;
    if (!real && !(a.clear && of.in_tile < tile.owned)) return;
    const i64 at = (i64)a.q_step * (rows.index + tile.first + of.in_tile) + rows.phase;
    const Ended ended = end_of(a, a.scale, head, real, part.largest, part.rest * LN_2, part.sum);
    if (threadIdx.x % 32 == 0) {
        const float largest = part.largest * a.scale;
        if (real && largest > neg_infinity()) raise(a.max_logit, place_of(a.max_logit, 0, head), largest);
        put(a.lse, place_of(a.lse, at, head), ended.lse);
    }
    const int lane = threadIdx.x % 32 * Split::LANES;
    const i64 place = place_of(a.out, at, head) + lane;
#pragma unroll
    for (int i = 0; i < Split::LANES; i += 2) {
        const float low = ended.empty ? 0.0f : sum[i] * ended.factor, high = ended.empty ? 0.0f : sum[i + 1] * ended.factor;
        if (IS_GENERAL && a.by_threads) {
            if (lane + i < a.dim_v) put(a.out, place + i, low);
            if (lane + i + 1 < a.dim_v) put(a.out, place + i + 1, high);
        } else if (lane + i < a.dim_v) {
            if (a.out.format == F32) *(float2*)((float*)a.out.base + place + i) = make_float2(low, high);
            else *(u32*)((u16*)a.out.base + place + i) = pair_of(low, high);
        }
    }
}

// The rows of a tile that are written.
__device__ __forceinline__ int rows_of(const SplitArgs& b, const SplitTile& tile) {
    return b.pack * min(b.tile_rows, max(tile.owned, 0));
}

// The tile of an item: the last one before which there are so many at most. All lanes of a warp ask for one.
__device__ __forceinline__ u32 tile_of(const TilePieces* tile_pieces, u32 tiles, u64 item, u32 packs) {
    u32 low = 0;
    while (tiles > 1) {
        const u32 step = (tiles + 31) / 32, lane = threadIdx.x % 32 * step;
        const bool before = lane < tiles && tile_pieces[low + lane].pieces * packs <= item;
        const u32 skipped = (__popc(__ballot_sync(FULL, before)) - 1) * step;
        low += skipped, tiles = min(step, tiles - skipped);
    }
    return low;
}

// What pieces of a tile and pack leave: `before` pieces of the tiles before it, and its own number.
struct LeftOf {
    u64 before;
    int count;
};
__device__ __forceinline__ u64 place_left(const Args& a, const LeftOf& of, int head_pack, int piece) {
    return of.before * a.heads + head_pack * of.count + piece;
}

// Ends a row of a tile whose pieces have all left what they have, by one warp.
__device__ __forceinline__ void end_left_row(
    const Args& a, const SplitArgs& b, const PlannedRows& rows, const SplitTile& tile, const LeftOf& of, int head_pack, int row
) {
    const float* const first = b.left + (place_left(a, of, head_pack, 0) * SPLIT_ROWS + row) * Split::LEFT;
    float sum[Split::LANES];
    const Part all = put_together<PIECES>(first, SPLIT_ROWS * Split::LEFT, of.count, a.scale_log2, sum);
    end_row(a, b, rows, tile, head_pack * b.pack, row, all, sum);
}

// Whether this block has ended a tile's last piece. What the blocks of the others left can be read then.
__device__ __forceinline__ bool is_last_piece(u32* ended, int count) {
    __shared__ u32 before;
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(ended) : "memory");
    __syncthreads();
    return before + 1 == count;
}

extern "C" __global__ void __launch_bounds__(Split::THREADS_ALL, 2) NAMED(split, DIM, TYPE)(
    const __grid_constant__ Args a, const __grid_constant__ SplitArgs b, const __grid_constant__ PlanArgs of_call
) {
    __shared__ FewTiles few;
    plan_before_waiting(of_call, few);
    extern __shared__ u8 rings[];
    __shared__ u32 taken;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool by_blocks = of_call.by_blocks;
    const Plan& plan = by_blocks ? few.plan : *a.plan;
    const PlannedRows* const all_rows = by_blocks ? few.rows : a.rows;
    const u32* const tile_segment = by_blocks ? few.tile_segment : a.tile_segment;
    const TilePieces* const tile_pieces = by_blocks ? few.tile_pieces : b.tile_pieces;
    u8* const all_rings = rings + (0u - shared_address(rings)) % Split::ROW_BYTES;
    u8* const mine = all_rings + warp * Split::WARP_BYTES;
    const u64 items = plan.pieces * a.heads;
    u32 next = blockIdx.x;
    for (u64 item = next; item < items; item = next) {
        // Blocks that plan take items in a fixed stride, as no earlier launch has cleared a counter for them.
        if (threadIdx.x == 0) taken = by_blocks ? (u32)item + gridDim.x : gridDim.x + atomicAdd(&a.plan->next, 1);
        const u32 number = tile_of(tile_pieces, plan.tiles, item, a.heads);
        const PlannedRows& rows = all_rows[tile_segment[number]];
        const SplitTile tile = split_tile(rows, number, b.tile_rows);
        const Pieces pieces = pieces_of(rows.keys, tile.seen, b.longer);
        const u32 rest = (u32)(item - tile_pieces[number].pieces * a.heads), head_pack = rest % a.heads, piece = rest / a.heads;
        const LeftOf left = {tile_pieces[number].left, pieces.count};
        const int begin = (int)(pieces.first + piece) << pieces.log2;
        const Span of_piece = {max(begin, tile.seen.from), min(begin + (1 << pieces.log2), tile.seen.to)};
        Rows done;
        float o[DIM / 2];
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) o[i] = 0.0f;
        attend_blocks(a, b, of_call.runs, rows, tile, head_pack, of_piece, shared_address(mine), done, o);
        // The ring is empty, and takes what the warp has.
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* const row = (float*)mine + (lane / 4 + 8 * half) * Split::LEFT;
#pragma unroll
            for (int j = 0; j < DIM / 8; ++j)
                *(float2*)(row + 8 * j + 2 * (lane % 4)) = make_float2(o[4 * j + 2 * half], o[4 * j + 2 * half + 1]);
            const float sum = quad_sum(done.sum[half]);
            if (lane % 4 == 0) put_part(row, {done.largest[half], done.rest[half], sum});
        }
        __syncthreads();
        next = taken;
#pragma unroll 1
        for (int row = warp; row < rows_of(b, tile); row += Split::WARPS) {
            float sum[Split::LANES];
            const float* const first = (const float*)all_rings + row * Split::LEFT;
            const Part all = put_together<Split::WARPS>(first, Split::WARP_BYTES / 4, Split::WARPS, a.scale_log2, sum);
            if (pieces.count == 1) end_row(a, b, rows, tile, head_pack * b.pack, row, all, sum);
            else put_row(b.left + (place_left(a, left, head_pack, piece) * SPLIT_ROWS + row) * Split::LEFT, sum, all);
        }
        if (b.ended != nullptr && pieces.count > 1 && is_last_piece(b.ended + number * a.heads + head_pack, pieces.count))
#pragma unroll 1
            for (int row = warp; row < rows_of(b, tile); row += Split::WARPS)
                end_left_row(a, b, rows, tile, left, head_pack, row);
        __syncthreads();
    }
}

// Puts together what pieces left, where there are many. A warp takes rows of a tile and head.
extern "C" __global__ void __launch_bounds__(Split::THREADS_ALL, 4)
    NAMED(merge, DIM, TYPE)(const __grid_constant__ Args a, const __grid_constant__ SplitArgs b) {
    after_earlier_launches();
    const u64 units = (u64)a.plan->tiles * a.heads;
    for (u64 unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const u32 number = (u32)(unit / a.heads), head_pack = (u32)(unit % a.heads);
        const PlannedRows& rows = a.rows[a.tile_segment[number]];
        const SplitTile tile = split_tile(rows, number, b.tile_rows);
        const LeftOf left = {b.tile_pieces[number].left, pieces_of(rows.keys, tile.seen, b.longer).count};
        if (left.count == 1) continue;
        for (int row = blockIdx.y * Split::WARPS + threadIdx.x / 32; row < rows_of(b, tile); row += gridDim.y * Split::WARPS)
            end_left_row(a, b, rows, tile, left, head_pack, row);
    }
}
