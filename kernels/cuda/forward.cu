// The forward on Hopper: tiles of query rows against blocks of keys on tensor cores, for packs of sequences.
//
// A block of threads stays for the whole launch. One thread of it, the *producer*, takes tiles from the plan and asks the
// copy engine for their rows (Q) and, block after block from the last key to the first, for K and V; *consumers*, groups of
// 128 threads with 64 query rows each, multiply and weigh, and pass over blocks of which their rows see nothing. Rings of
// shared memory lie between them. Several such *teams* may share a block's registers, each with its own tiles and rings. A
// tile's shape follows from the segment alone, so that results do not depend on which block of threads took it, nor when.
//
// The copy engine knows tensors and no sequences: boxes run on into padding and into other sequences. What lies there stays
// out: scores of keys that a row does not see are replaced and not multiplied, V behind the last key is overwritten with
// zeros in shared memory, and rows that are not real are written as zeros or not at all. Head dims below DIM are filled with
// zeros by the copy engine.
//
// Two blocks of threads may be a *cluster*: they take tiles that follow each other, and share K and V, of which each asks for
// one half for both, so that the L2 cache is read half as often. Blocks of keys that one of the tiles sees alone are passed
// over in the other.
//
// The plan is made by forward_plan.cuh.
//
// Instances: DIM (64 or 128: the largest head dim) and TYPE (BF16 or FP16). PLAN: with the planning kernel.
#include "common.cuh"
#include "hopper.cuh"

// What the planning kernel makes of the tables. A row of the tensors is `step * index + phase`, the same step for all.
struct alignas(16) PlannedRows {
    int index;
    int phase;
    int len;
    int span;
    int keys;
    int lo;
    int hi;
    // In the order of tiles; where blocks of threads are clusters, in that of a cluster's tiles together.
    u32 first_tile;
    u32 tiles;
    int first_run;
    int runs;
    // Rows that the first tile has fewer than others.
    int skipped;
};

struct alignas(16) PlannedKeys {
    int index;
    int phase;
    int first;
    int len;
};

struct alignas(16) Plan {
    // The next item: a tile and a head.
    u32 next;
    u32 tiles;
};

struct Args {
    TensorMap q;
    TensorMap k;
    TensorMap v;
    Plan* plan;
    const PlannedRows* rows;
    const PlannedKeys* keys;
    // Of each tile its segment.
    const u32* tile_segment;
    View out;
    View lse;
    View max_logit;
    View sink;
    // Here and below, heads in packs of 2^packed_log2: those of a tile.
    int heads;
    // Query heads of a KV head.
    int group;
    // Heads whose keys stay in the L2 cache together.
    int head_chunk;
    int q_step;
    int dim_v;
    // Whether padding rows become zero.
    int clear;
    int sink_kind;
    int packed_log2;
    float scale;
    // scale · log2 e.
    float scale_log2;
};

// ---------------------------------------------------------------------------------------------------------------------
// Tiles.

// Rows of a segment and a head.
struct Tile {
    int index;
    int phase;
    int head;
    // Real rows and owned rows; owned ones may be more than the tile has, real ones less than 0.
    int owned;
    int real;
};

// Row r sees key k where r + lo <= k <= r + hi.
struct Bounds {
    int lo;
    int hi;
};

// Blocks of keys that are brought for a tile.
struct Brought {
    // -1: there are no more tiles.
    int all;
    // Of one run: the first one's end and the last one's beginning, in blocks of the run, and the run's keys; of more: len is -1.
    int high;
    int low;
    int len;
};

// What a group of 64 rows takes of them.
struct Blocks {
    // Passed over before and after those that some row sees.
    int before;
    int after;
    int all;
    // Of all, how many come first that some row sees in part, and how many after them that all rows see whole.
    int ragged;
    int whole;
};

// Keys `first` to `end` of the segment lie in a block from its beginning.
struct Block {
    int first;
    int end;
};

// GROUPS consumers of 64 rows, blocks of KEYS keys, so many tiles and blocks in the rings of Q, K and V, CLUSTER blocks of
// threads together. A block has TEAMS of consumers, each with its own producer, tiles and rings.
template <int GROUPS_, int KEYS_, int Q_STAGES_, int K_STAGES_, int V_STAGES_, int CLUSTER_ = 1, int TEAMS_ = 1>
struct Config {
    static constexpr int GROUPS = GROUPS_, KEYS = KEYS_, CLUSTER = CLUSTER_, TEAMS = TEAMS_;
    static constexpr int Q_STAGES = Q_STAGES_, K_STAGES = K_STAGES_, V_STAGES = V_STAGES_;
    static constexpr int ROWS = 64 * GROUPS, TEAM = 128 * GROUPS, CONSUMERS = TEAM * TEAMS;
    static constexpr int Q_BYTES = ROWS * DIM * 2, KV_BYTES = KEYS * DIM * 2;
    static constexpr int TEAM_BYTES = 1024 + Q_STAGES * Q_BYTES + (K_STAGES + V_STAGES) * KV_BYTES;
    // Behind the consumers 128 threads, of which each team has one producer; they leave most of their registers to consumers.
    // A block has those of its launch and no more: it would wait for others for ever.
    static constexpr int THREADS_ALL = CONSUMERS + 128, REGISTERS = 65536 / THREADS_ALL / 8 * 8 * THREADS_ALL;
    // Whether a tile's rows may be of several heads.
    static constexpr bool PACKS = GROUPS > 1 && KEYS == 64;
    static constexpr int PRODUCER_REGISTERS = DIM == 64 ? 32 : 40;
    static constexpr int CONSUMER_REGISTERS = (REGISTERS - 128 * PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;
};

// A row of a tile is row r >> packed_log2 of the sequence, of head r % 2^packed_log2 of the pack.
template <class C>
__device__ __forceinline__ int packed_log2(const Args& a) {
    return C::PACKS ? a.packed_log2 : 0;
}

// A block's shared memory: barriers, tiles and blocks in the first kilobyte, then rings of Q, K and V. Addresses.
template <class C>
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 q_full(u32 stage) const { return base + 8 * stage; }
    __device__ __forceinline__ u32 q_empty(u32 stage) const { return base + 64 + 8 * stage; }
    __device__ __forceinline__ u32 k_full(u32 stage) const { return base + 128 + 8 * stage; }
    __device__ __forceinline__ u32 k_empty(u32 stage) const { return base + 192 + 8 * stage; }
    __device__ __forceinline__ u32 v_full(u32 stage) const { return base + 256 + 8 * stage; }
    __device__ __forceinline__ u32 v_empty(u32 stage) const { return base + 320 + 8 * stage; }
    __device__ __forceinline__ u32 block(u32 stage) const { return base + 384 + 8 * stage; }
    __device__ __forceinline__ u32 item_full(u32 stage) const { return base + 448 + 8 * stage; }
    __device__ __forceinline__ u32 item_empty(u32 stage) const { return base + 464 + 8 * stage; }
    __device__ __forceinline__ u32 item(u32 stage) const { return base + 480 + 4 * stage; }
    __device__ __forceinline__ u32 tile_empty(u32 stage) const { return base + 488 + 8 * stage; }
    __device__ __forceinline__ u32 tile(u32 stage) const { return base + 512 + 48 * stage; }
    __device__ __forceinline__ u32 q(u32 stage) const { return base + 1024 + stage * C::Q_BYTES; }
    __device__ __forceinline__ u32 k(u32 stage) const { return q(C::Q_STAGES) + stage * C::KV_BYTES; }
    __device__ __forceinline__ u32 v(u32 stage) const { return k(C::K_STAGES) + stage * C::KV_BYTES; }
};

// A tile's record: index, phase, head and owned rows; real rows, bounds and keys of the segment; what is brought.
__device__ __forceinline__ void put_four(u32 tile, int place, int a, int b, int c, int d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(tile + 16 * place), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ int4 get_four(u32 tile, int place) {
    int4 four;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                 : "r"(tile + 16 * place)
                 : "memory");
    return four;
}
__device__ __forceinline__ Tile get_tile(u32 tile) {
    const int4 four = get_four(tile, 0);
    return {four.x, four.y, four.z, four.w, get_four(tile, 1).x};
}
__device__ __forceinline__ Bounds get_bounds(u32 tile) {
    const int4 four = get_four(tile, 1);
    return {four.y, four.z};
}
__device__ __forceinline__ Brought get_brought(u32 tile) {
    const int4 four = get_four(tile, 2);
    return {(int)uniform(four.x), four.y, four.z, four.w};
}
__device__ __forceinline__ void put_block(u32 at, Block block) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(block.first), "r"(block.end) : "memory");
}
__device__ __forceinline__ Block get_block(u32 at) {
    Block block;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(block.first), "=r"(block.end) : "r"(at) : "memory");
    return block;
}
// Rows and keys are fewer than 2^29, and bounds are cut to that, so that their sums and differences stay in 32 bits. A
// bound below the keys' beginning by more rows than a tile has is as good as any further one.
constexpr int FAR_ROWS = 1024;

// ---------------------------------------------------------------------------------------------------------------------
// The producer: takes tiles, and asks for their rows and keys.

// Keys from `from` to `to`.
struct Span {
    int from;
    int to;
};

// Blocks of a run begin at its beginning; those from `low` to `high` hold keys of the span.
template <class C>
__device__ __forceinline__ void blocks_of(const PlannedKeys& run, Span span, int& low, int& high) {
    const int from = max(span.from - run.first, 0), to = min(span.to - run.first, run.len);
    low = (u32)from / C::KEYS;
    high = from < to ? (u32)(to + C::KEYS - 1) / C::KEYS : low;
}

template <class C>
__device__ __forceinline__ void load_rows(
    u32 to, const TensorMap* map, u32 bar, int rows, int head, int phase, int index
) {
    barrier_expect(bar, rows * DIM * 2);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
        load_box(to + panel * rows * 128, map, bar, panel * 64, head, phase, index);
}

// KEYS rows of K or V; in a cluster the part of this block's rank, for all its blocks.
template <class C>
__device__ __forceinline__ void load_keys(u32 to, const TensorMap* map, u32 bar, int head, int phase, int index) {
    if constexpr (C::CLUSTER == 1) {
        load_rows<C>(to, map, bar, C::KEYS, head, phase, index);
    } else {
        constexpr int PART = C::KEYS / C::CLUSTER;
        const int first = cluster_rank() * PART;
        barrier_expect(bar, C::KEYS * DIM * 2);
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            load_box_for((1 << C::CLUSTER) - 1, to + (panel * C::KEYS + first) * 128, map, bar, panel * 64, head, phase,
                         index + first);
    }
}

// The items of a launch, one after the other; those of a cluster are taken by its first block, one ahead, for all its blocks.
template <class C>
struct Items {
    const Args& a;
    const Shared<C>& shared;
    Ring<2> ring;

    __device__ __forceinline__ u32 take() const { return atomicAdd(&a.plan->next, 1); }
    __device__ __forceinline__ void send(Ring<2> to) const {
        barrier_wait(shared.item_empty(to.stage()), to.parity() ^ 1);
        const u32 item = take();
#pragma unroll
        for (u32 rank = 0; rank < C::CLUSTER; ++rank)
            store_in(shared.item(to.stage()), shared.item_full(to.stage()), rank, item);
    }
    __device__ __forceinline__ u32 next() {
        if constexpr (C::CLUSTER == 1) return take();
        if (cluster_rank() == 0) {
            if (ring.turns == 0) send(ring);
            send({ring.turns + 1});
        }
        receive();
        u32 item;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(item) : "r"(shared.item(ring.stage())) : "memory");
        barrier_arrive_in(shared.item_empty(ring.stage()), 0);
        ring.advance();
        return item;
    }
    __device__ __forceinline__ void receive() const {
        barrier_expect(shared.item_full(ring.stage()), 4);
        barrier_wait(shared.item_full(ring.stage()), ring.parity());
    }
    // The item that was sent ahead of the last one: nothing may be under way to a block that ends.
    __device__ __forceinline__ void end() const {
        if constexpr (C::CLUSTER > 1) receive();
    }
};

// What some of `real` rows see, of which row r sees r + lo to r + hi.
__device__ __forceinline__ Span span_seen(Bounds bounds, int real, int keys) {
    return {max(bounds.lo, 0), real > 0 ? min(real + bounds.hi, keys) : 0};
}

template <class C>
__device__ __forceinline__ void produce(const Args& a, const Shared<C>& shared) {
    Ring<2> tile_ring;
    auto q_ring = [&]() { return Ring<C::Q_STAGES>{tile_ring.turns}; };
    Ring<C::K_STAGES> ring;
    Items<C> items = {a, shared, {}};
    for (;;) {
        const u32 item = items.next();
        if (item >= a.plan->tiles * a.heads) break;
        const PlannedRows& rows = a.rows[a.tile_segment[item / a.heads]];
        u32 rest = item - rows.first_tile * a.heads;
        // Heads in chunks, whose keys stay in the cache; the longest tiles of a chunk first.
        const u32 chunk = rest / (rows.tiles * a.head_chunk);
        rest -= chunk * rows.tiles * a.head_chunk;
        const u32 heads = min((u32)a.head_chunk, a.heads - chunk * a.head_chunk);
        // The first tile has fewer rows, so that the last real rows end with a tile.
        const int of_cluster = C::ROWS * C::CLUSTER >> packed_log2<C>(a);
        const int place = (int)(rows.tiles - 1 - rest / heads) * of_cluster - rows.skipped, end = place + of_cluster;
        const int first_of_cluster = max(place, 0), last = min(rows.len, end);
        const int first = first_of_cluster + (C::CLUSTER > 1 ? cluster_rank() * C::ROWS : 0);
        const int pack = (int)(chunk * a.head_chunk + rest % heads), head = pack << packed_log2<C>(a);
        barrier_wait(shared.tile_empty(tile_ring.stage()), tile_ring.parity() ^ 1);
        const u32 tile = shared.tile(tile_ring.stage());
        put_four(tile, 0, rows.index + first, rows.phase, head, min(rows.span, end) - first);
        const Bounds bounds = {max(first + rows.lo, -FAR_ROWS), max(first + rows.hi, -FAR_ROWS)};
        put_four(tile, 1, min(last - first, C::ROWS), bounds.lo, bounds.hi, rows.keys);
        const Span seen = span_seen({first_of_cluster + rows.lo, first_of_cluster + rows.hi}, last - first_of_cluster,
                                    rows.keys);
        const u32 first_run = rows.first_run;
        auto run_of = [&](int r) -> const PlannedKeys& { return a.keys[first_run + r]; };
        const int run_count = seen.from < seen.to ? rows.runs : 0;
        int blocks = 0, low, high;
        for (int r = 0; r < run_count; ++r) {
            blocks_of<C>(run_of(r), seen, low, high);
            blocks += high - low;
        }
        put_four(tile, 2, blocks, high, low, run_count == 1 ? run_of(0).len : -1);
        barrier_wait(shared.q_empty(q_ring().stage()), q_ring().parity() ^ 1);
        if (blocks == 0)
            barrier_arrive(shared.q_full(q_ring().stage()));
        else
            load_rows<C>(shared.q(q_ring().stage()), &a.q, shared.q_full(q_ring().stage()), C::ROWS, head, rows.phase,
                         rows.index + first);
        tile_ring.advance();
        if (blocks == 0) continue;

        const int kv_head = pack / a.group;
        // V of a block is asked for after K of the next.
        int v_phase = 0, v_index = -1;
        auto load_v = [&](Ring<C::V_STAGES> of) {
            barrier_wait(shared.v_empty(of.stage()), of.parity() ^ 1);
            load_keys<C>(shared.v(of.stage()), &a.v, shared.v_full(of.stage()), kv_head, v_phase, v_index);
        };
        for (int r = run_count - 1; r >= 0; --r) {
            const PlannedKeys& run = run_of(r);
            blocks_of<C>(run, seen, low, high);
            for (int block = high - 1; block >= low; --block) {
                barrier_wait(shared.k_empty(ring.stage()), ring.parity() ^ 1);
                const int key = block * C::KEYS;
                put_block(shared.block(ring.stage()), {run.first + key, run.first + min(key + C::KEYS, run.len)});
                load_keys<C>(shared.k(ring.stage()), &a.k, shared.k_full(ring.stage()), kv_head, run.phase,
                             run.index + key);
                if (v_index >= 0) load_v({ring.turns - 1});
                v_index = run.index + key, v_phase = run.phase;
                ring.advance();
            }
        }
        load_v({ring.turns - 1});
    }
    items.end();
    barrier_wait(shared.tile_empty(tile_ring.stage()), tile_ring.parity() ^ 1);
    put_four(shared.tile(tile_ring.stage()), 2, -1, 0, 0, 0);
    barrier_wait(shared.q_empty(q_ring().stage()), q_ring().parity() ^ 1);
    barrier_arrive(shared.q_full(q_ring().stage()));
}

// What a group of the first `rows` rows of `bounds`, `real` real ones from there on, takes.
template <class C>
__device__ __forceinline__ Blocks blocks_for(const Brought& brought, Bounds bounds, int real, int keys, int rows) {
    const Span seen = span_seen(bounds, min(real, rows), keys);
    if (seen.from >= seen.to) return {brought.all, 0, 0, 0, 0};
    // Of more runs than one, every block may end early.
    if (brought.len < 0) return {0, 0, brought.all, brought.all, 0};
    const int low = (u32)seen.from / C::KEYS, high = (u32)(seen.to + C::KEYS - 1) / C::KEYS, all = high - low;
    const int whole_from = (u32)(max(bounds.lo + rows - 1, 0) + C::KEYS - 1) / C::KEYS;
    const int whole_to = (u32)(max(min(bounds.hi, brought.len - 1), -1) + 1) / C::KEYS;
    // V of a block is used with the scores of the next: one more where V has a tail.
    const int ragged = min(max(high - whole_to, 0) + (high * C::KEYS > brought.len), all);
    const int whole = min(max(high - ragged - max(whole_from, low), 0), all - ragged);
    return {brought.high - high, low - brought.low, all, ragged, whole};
}

struct Yes {
    __device__ constexpr operator bool() const { return true; }
};
struct No {
    __device__ constexpr operator bool() const { return false; }
};

// ---------------------------------------------------------------------------------------------------------------------
// A consumer: 64 rows of a tile.

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(FULL, x, 1);
    return x + __shfl_xor_sync(FULL, x, 2);
}

constexpr float LN_2 = 0.693147182464599609375f;

// What a thread keeps of its two rows.
struct Rows {
    float largest[2];
    float sum[2];
};

// Of a thread's keys in a row of a block, 8 j + i of them from its first one on with i < 2, those below `bound`.
__device__ __forceinline__ int keys_below(int bound, int keys) {
    bound = min(max(bound, 0), keys);
    return bound / 8 * 2 + min(bound % 8, 2);
}

// Scores of keys that a row does not see become -inf, whatever they were.
template <class C>
__device__ __forceinline__ void mask(float (&s)[C::KEYS / 2], Bounds bounds, Block block, int row, int packed) {
    static_assert(C::KEYS <= 128, "a thread's keys of a row have a bit each");
    const int first_key = block.first + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half >> packed;
        const int left = keys_below(r + bounds.lo - first_key, C::KEYS);
        const int right = keys_below(min(r + bounds.hi + 1, block.end) - first_key, C::KEYS);
        u32 seen;
        asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(seen) : "r"(left), "r"(max(right - left, 0)));
#pragma unroll
        for (int i = 0; i < C::KEYS / 4; ++i)
            if (!(seen >> i & 1)) s[i / 2 * 4 + 2 * half + i % 2] = neg_infinity();
    }
}

// `value`, but not before `earlier` is there: the assembler orders instructions by what they need, and by nothing else.
__device__ __forceinline__ float after(float value, float earlier) {
    u32 none;
    asm("mov.u32 %0, %%ctaid.y;" : "=r"(none));
    return __uint_as_float(__float_as_uint(value) | (__float_as_uint(earlier) & none));
}

// The largest score of a row, that of the blocks before included.
template <class C, int HALF>
__device__ __forceinline__ float largest_of(const float (&s)[C::KEYS / 2], float old) {
    float top[4] = {old, old, old, old};
#pragma unroll
    for (int j = 0; j < C::KEYS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) top[j % 2 * 2 + i] = fmaxf(top[j % 2 * 2 + i], s[4 * j + 2 * HALF + i]);
    return quad_max(fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3])));
}

// A row's weights are 2 to the power of `score · scale + shift`, one fused operation: `shift` is minus the *level* of the
// largest score so far, its product with the scale, rounded, so that the largest weight is 2 to the power of what rounding
// left out, the row's *rest*, of which the end takes account: at most 64 for levels below 2^31, or 8 below 2^28 where weights
// are fp16. Above that the scale is a power of two, so that nothing is rounded: by rounding alone, a score that is not the
// largest one could be anything there, and weighs next to nothing.
struct Level {
    float base;
    float scale;
    float shift;
};

constexpr u32 LEVEL_EXPONENT = TYPE == BF16 ? 30 : 27;

__device__ __forceinline__ Level level_of(float largest, float scale_log2) {
    Level level;
    // A row that has seen no key yet: any number will do.
    level.base = largest == neg_infinity() ? 0.0f : largest;
    // 2^LEVEL_EXPONENT over the score's power of two. Without a sign, that of a tiny score is larger than any scale.
    const u32 power = (LEVEL_EXPONENT + 2 * 127 << 23) - (__float_as_uint(level.base) & 0x7f800000u);
    level.scale = __uint_as_float(min(__float_as_uint(scale_log2), power));
    level.shift = -level.base * level.scale;
    return level;
}

__device__ __forceinline__ float rest_of(float largest, float scale_log2) {
    const Level level = level_of(largest, scale_log2);
    return fmaf(level.base, level.scale, level.shift);
}

// What weights by an older largest score are worth by this level.
__device__ __forceinline__ float factor_of(float old, const Level& level) {
    return exp2_of(old * level.scale + level.shift);
}

// Scores of a row become weights; their sum.
template <class C, int HALF>
__device__ __forceinline__ float weights_of(float (&s)[C::KEYS / 2], const Level& level) {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < C::KEYS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float& x = s[4 * j + 2 * HALF + i];
            x = exp2_of(fmaf(x, level.scale, level.shift));
            sum[i] += x;
        }
    return sum[0] + sum[1];
}

// Scores become weights by the new largest scores; `factor` is what older weights are worth by them.
template <class C>
__device__ __forceinline__ void weigh(float (&s)[C::KEYS / 2], Rows& rows, float (&factor)[2], float scale_log2) {
    const float old[2] = {rows.largest[0], rows.largest[1]};
    rows.largest[0] = largest_of<C, 0>(s, old[0]);
    const Level first = level_of(rows.largest[0], scale_log2);
    // While the first row's exponentials are made, which with three groups others do as well.
    rows.largest[1] = largest_of<C, 1>(s, C::GROUPS == 2 ? after(old[1], first.base) : old[1]);
    const Level second = level_of(rows.largest[1], scale_log2);
    factor[0] = factor_of(old[0], first);
    rows.sum[0] = rows.sum[0] * factor[0] + weights_of<C, 0>(s, first);
    factor[1] = factor_of(old[1], second);
    rows.sum[1] = rows.sum[1] * factor[1] + weights_of<C, 1>(s, second);
}

template <class C>
__device__ __forceinline__ void pack(const float (&s)[C::KEYS / 2], u32 (&p)[C::KEYS / 4]) {
#pragma unroll
    for (int i = 0; i < C::KEYS / 4; ++i) p[i] = pair_of(s[2 * i], s[2 * i + 1]);
}

template <class C>
__device__ __forceinline__ void scores(float (&s)[C::KEYS / 2], u32 q, u32 k) {
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
        const int panel = step / 4, in_panel = step % 4 * 2;
        score_step<C::KEYS>(s, q + panel * (C::ROWS * 128 >> 4) + in_panel,
                                       k + panel * (C::KEYS * 128 >> 4) + in_panel, step > 0);
    }
}

template <class C>
__device__ __forceinline__ void values(float (&o)[DIM / 2], const u32 (&p)[C::KEYS / 4], u32 v) {
#pragma unroll
    for (int step = 0; step < C::KEYS / 16; ++step)
        value_step(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                                      v + step * (2048 >> 4));
}

// The first of the groups' named barriers.
constexpr int CLEARED = 1;

// Rows of V past the end of the keys become zero: their weights are, but 0 · NaN is not. Each group does so for itself and
// waits for no other, which writes the same zeros.
template <class C>
__device__ __forceinline__ void clear_tail(u32 v_at, int valid) {
    const int count = (C::KEYS - valid) * PANELS * 8;
    for (int i = threadIdx.x % 128; i < count; i += 128) {
        const int row = valid + i / (PANELS * 8), panel = i / 8 % PANELS;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v_at + panel * C::KEYS * 128 + row * 128 + i % 8 * 16),
                     "r"(0)
                     : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    named_barrier(CLEARED + threadIdx.x / 128, 128);
}

// The largest logit of a warp's rows of each head: rows of 2^packed heads follow each other, at most 8.
__device__ __forceinline__ void raise_head(const View& largest, int head, float value, int packed) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        const float other = __shfl_xor_sync(FULL, value, step);
        if (step >= 4 << packed) value = fmaxf(value, other);
    }
    if (threadIdx.x % 4 == 0 && threadIdx.x % 32 < 4 << packed && value > neg_infinity()) raise(largest, place_of(largest, 0, head), value);
}

template <class C, int HALF>
__device__ __forceinline__ void store(const Args& a, const Tile& tile, const Rows& rows, const float (&o)[DIM / 2], int row) {
    const int packed = packed_log2<C>(a), r = row + 8 * HALF >> packed;
    const int head = tile.head + (row + 8 * HALF & (1 << packed) - 1);
    const bool real = r < tile.real, write = real || (a.clear && r < tile.owned);
    const float sum = quad_sum(rows.sum[HALF]);
    float largest = rows.largest[HALF] * a.scale, total = sum, weight = 1.0f;
    float rest = rest_of(rows.largest[HALF], a.scale_log2) * LN_2;
    raise_head(a.max_logit, head, real ? largest : neg_infinity(), packed);
    if (a.sink_kind != 0) {
        const float sink = a.sink_kind == 1 ? 0.0f : get(a.sink, place_of(a.sink, 0, head));
        const float top = fmaxf(largest, sink);
        weight = sum == 0.0f ? 0.0f : exact_exp(largest - top - rest);
        total = sum * weight + exact_exp(sink - top);
        largest = top, rest = 0.0f;
    }
    // Not multiplied where the row is empty: there may be anything.
    const bool empty = !real || sum == 0.0f;
    const float factor = weight / total;
    const i64 at = (i64)a.q_step * (tile.index + r) + tile.phase;
    if (threadIdx.x % 4 == 0 && write)
        put(a.lse, place_of(a.lse, at, head),
            !real || total == 0.0f ? neg_infinity() : largest + (exact_ln(total) - rest));
    float mine[DIM / 4];
#pragma unroll
    for (int i = 0; i < DIM / 4; ++i) mine[i] = empty ? 0.0f : o[i / 2 * 4 + 2 * HALF + i % 2] * factor;
    const i64 place = place_of(a.out, at, head);
    if (a.out.format == F32) {
        if (!write) return;
#pragma unroll
        for (int j = 0; j < DIM / 8; ++j)
            if (8 * j < a.dim_v)
            *(float2*)((float*)a.out.base + place + 8 * j + 2 * (threadIdx.x % 4)) =
                make_float2(mine[2 * j], mine[2 * j + 1]);
        return;
    }
#pragma unroll
    for (int j = 0; j < DIM / 8; j += 4) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = pair_of(mine[2 * (j + i)], mine[2 * (j + i) + 1]);
        transpose(words);
        if (write && 8 * (j + (int)threadIdx.x % 4) < a.dim_v)
            *(uint4*)((u16*)a.out.base + place + 8 * (j + threadIdx.x % 4)) =
                make_uint4(words[0], words[1], words[2], words[3]);
    }
}

__device__ __forceinline__ void release(u32 barrier, u32 thread) {
    if (thread % 32 == 0) barrier_arrive(barrier);
}
// What all blocks of the cluster wait for: each refills its own half of both.
template <class C>
__device__ __forceinline__ void release_keys(u32 barrier, u32 thread) {
    if constexpr (C::CLUSTER == 1) release(barrier, thread);
    else if (thread % 32 < C::CLUSTER) barrier_arrive_in(barrier, thread % 32);
}

template <class C>
__device__ __forceinline__ void consume(const Args& a, const Shared<C>& shared) {
    const u32 thread = kept(C::TEAMS == 1 ? threadIdx.x : threadIdx.x % C::TEAM), group = uniform(thread / 128);
    const int row = thread / 32 * 16 + thread % 32 / 4;
    Ring<2> tile_ring;
    auto q_ring = [&]() { return Ring<C::Q_STAGES>{tile_ring.turns}; };
    Ring<C::K_STAGES> k_ring;
    float o[DIM / 2], s[C::KEYS / 2];
    u32 p[C::KEYS / 4];
    auto pass_over = [&](int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            const Ring<C::V_STAGES> v_ring = {k_ring.turns};
            barrier_wait(shared.k_full(k_ring.stage()), k_ring.parity());
            release_keys<C>(shared.k_empty(k_ring.stage()), thread);
            barrier_wait(shared.v_full(v_ring.stage()), v_ring.parity());
            release_keys<C>(shared.v_empty(v_ring.stage()), thread);
            k_ring.advance();
        }
    };
    for (;;) {
        barrier_wait(shared.q_full(q_ring().stage()), q_ring().parity());
        const Brought brought = get_brought(shared.tile(tile_ring.stage()));
        if (brought.all < 0) return;
        const int4 limits = get_four(shared.tile(tile_ring.stage()), 1);
        const int rows_of_group = 64 >> packed_log2<C>(a), first = rows_of_group * group;
        Blocks blocks =
            blocks_for<C>(brought, {limits.y + first, limits.z + first}, limits.x - first, limits.w, rows_of_group);
        blocks.all = uniform(blocks.all);
        Rows rows = {{neg_infinity(), neg_infinity()}, {0.0f, 0.0f}};
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) o[i] = 0.0f;
        if constexpr (C::GROUPS * C::CLUSTER > 1) pass_over(blocks.before);
        if (blocks.all > 0) {
            const u32 q = descriptor(shared.q(q_ring().stage()) + group * 64 * 128, 0);
            float factor[2];
            // Keys of the block whose weights were made last.
            int valid;
            auto wait_keys = [&]() { barrier_wait(shared.k_full(k_ring.stage()), k_ring.parity()); };
            // V of the block whose scores were taken last.
            auto v_ring = [&]() { return Ring<C::V_STAGES>{k_ring.turns - 1}; };
            auto wait_values = [&]() { barrier_wait(shared.v_full(v_ring().stage()), v_ring().parity()); };
            auto start_scores = [&]() {
                hold(s);
                wgmma_fence();
                scores<C>(s, q, uniform(descriptor(shared.k(k_ring.stage()), 0)));
                wgmma_commit();
            };
            auto weigh_block = [&](auto ragged) {
                hold(s);
                Block block;
                if constexpr (ragged) {
                    block = get_block(shared.block(k_ring.stage()));
                    valid = block.end - block.first;
                    __syncwarp();
                }
                release_keys<C>(shared.k_empty(k_ring.stage()), thread);
                k_ring.advance();
                if constexpr (ragged)
                    mask<C>(s, get_bounds(shared.tile(tile_ring.stage())), block, thread / 32 * 16 + thread % 32 / 4,
                            packed_log2<C>(a));
                weigh<C>(s, rows, factor, a.scale_log2);
            };
            auto grown = [&]() { return __any_sync(FULL, factor[0] != 1.0f || factor[1] != 1.0f); };
            auto clear_values = [&]() {
                wait_values();
                if (valid < C::KEYS) clear_tail<C>(shared.v(v_ring().stage()), valid);
            };
            // O += P · V of the block whose weights were made last.
            auto start_values = [&](bool grew) {
                if (grew) {
#pragma unroll
                    for (int i = 0; i < DIM / 2; ++i) o[i] *= factor[i / 2 % 2];
                }
                hold(o);
                wgmma_fence();
                values<C>(o, p, uniform(descriptor(shared.v(v_ring().stage()), C::KEYS * 128)));
                wgmma_commit();
            };
            auto finish_values = [&]() {
                wgmma_wait<0>();
                hold(o);
                hold(p);
            };
            auto release_values = [&](u32 turns) {
                release_keys<C>(shared.v_empty(Ring<C::V_STAGES>{turns}.stage()), thread);
            };
            bool used = false;
            // While weights are made, P · V of the block before is under way. The wait for it begins the next turn: at the end
            // of one, the assembler would move it before the weights.
            auto turn = [&](auto ragged) {
                wait_keys();
                const bool grew = grown();
                finish_values();
                pack<C>(s, p);
                hold(p);
                start_scores();
                if (used) release_values(k_ring.turns - 2);
                used = true;
                if constexpr (ragged) clear_values();
                wait_values();
                start_values(grew);
                wgmma_wait<1>();
                weigh_block(ragged);
            };
            wait_keys();
            start_scores();
            wgmma_wait<0>();
            weigh_block(Yes());
            // Ragged blocks, whole ones, and ragged ones behind them.
            int left = blocks.all - 1, ragged = blocks.ragged - 1, whole = blocks.whole + min(ragged, 0);
            while (left > 0) {
#pragma unroll 1
                for (; ragged > 0; --ragged, --left) turn(Yes());
#pragma unroll 1
                for (; whole > 0; --whole, --left) turn(No());
                ragged = left;
            }
            release(shared.q_empty(q_ring().stage()), thread);
            finish_values();
            if (used) release_values(k_ring.turns - 2);
            pack<C>(s, p);
            hold(p);
            clear_values();
            start_values(grown());
            wgmma_wait<0>();
            hold(o);
            release_values(k_ring.turns - 1);
        } else {
            release(shared.q_empty(q_ring().stage()), thread);
        }
        if constexpr (C::GROUPS * C::CLUSTER > 1) pass_over(blocks.after);
        const Tile done = get_tile(shared.tile(tile_ring.stage()));
        __syncwarp();
        release(shared.tile_empty(tile_ring.stage()), thread);
        tile_ring.advance();
        store<C, 0>(a, done, rows, o, row);
        store<C, 1>(a, done, rows, o, row);
    }
}

template <class C>
__device__ __forceinline__ void forward(const Args& a) {
    extern __shared__ u8 dynamic[];
    const Shared<C> all = {uniform((shared_address(dynamic) + 1023) / 1024 * 1024)};
    const int team = threadIdx.x < C::CONSUMERS ? threadIdx.x / C::TEAM : (threadIdx.x - C::CONSUMERS) / 32;
    const Shared<C> shared = C::TEAMS == 1 ? all : Shared<C>{uniform(all.base + team * C::TEAM_BYTES)};
    if (threadIdx.x < C::CONSUMERS && threadIdx.x % C::TEAM == 0) {
        for (int i = 0; i < C::Q_STAGES; ++i) {
            barrier_init(shared.q_full(i), 1);
            barrier_init(shared.q_empty(i), 4 * C::GROUPS);
        }
        for (int i = 0; i < C::K_STAGES; ++i) {
            barrier_init(shared.k_full(i), 1);
            barrier_init(shared.k_empty(i), 4 * C::GROUPS * C::CLUSTER);
        }
        for (int i = 0; i < C::V_STAGES; ++i) {
            barrier_init(shared.v_full(i), 1);
            barrier_init(shared.v_empty(i), 4 * C::GROUPS * C::CLUSTER);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared.item_full(i), 1);
            barrier_init(shared.item_empty(i), C::CLUSTER);
            barrier_init(shared.tile_empty(i), 4 * C::GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // No block writes to another one that has not begun, or has ended.
    if constexpr (C::CLUSTER > 1) cluster_barrier();
    else __syncthreads();
    if (threadIdx.x >= C::CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(C::PRODUCER_REGISTERS));
        if (threadIdx.x % 32 == 0 && team < C::TEAMS) produce<C>(a, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(C::CONSUMER_REGISTERS));
        consume<C>(a, shared);
    }
    if constexpr (C::CLUSTER > 1) cluster_barrier();
}

#define PASTED(KIND, DIM, TYPE) forward_##KIND##_##DIM##_##TYPE
#define NAMED(KIND, DIM, TYPE) PASTED(KIND, DIM, TYPE)

#define KERNEL(CONFIG, KIND, ...)                                                                                      \
    extern "C" __global__ void __VA_ARGS__ __launch_bounds__(CONFIG::THREADS_ALL, 1)                                   \
        NAMED(KIND, DIM, TYPE)(const __grid_constant__ Args a) {                                                       \
        forward<CONFIG>(a);                                                                                            \
    }

// Three groups of 64 rows where registers hold them, and blocks of 128 keys.
using Long = Config<DIM == 128 ? 2 : 3, 128, 2, 2, 2>;
KERNEL(Long, long)

// 64 rows a team, and blocks of 64 keys: for packs of the shortest sequences, which move memory more than they multiply.
#if DIM == 64
using Short = Config<1, 64, 2, 2, 2, 1, 4>;
KERNEL(Short, short)
#else
using Short = Config<1, 64, 1, 2, 1, 1, 3>;
KERNEL(Short, short)

// 192 rows that share blocks of 64 keys: what teams would read three times from the L2 cache.
using Middle = Config<3, 64, 1, 4, 4>;
KERNEL(Middle, middle)

// The long shape in clusters of two: for sequences so long that what the L2 cache delivers costs more than waiting for another
// block.
using Paired = Config<2, 128, 2, 2, 2, 2>;
KERNEL(Paired, paired, __cluster_dims__(Paired::CLUSTER, 1, 1))
#endif

#ifdef PLAN
#include "plan.cuh"
#include "forward_plan.cuh"
#endif
