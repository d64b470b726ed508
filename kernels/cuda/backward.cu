// The backward on Hopper: tiles of keys against tiles of query rows on tensor cores, for packs of sequences.
//
// Three kernels follow the plan. The first makes D = <dout, out> of each row and clears sums. In the second a block of threads
// stays for the whole launch: it takes tiles of KEYS keys of a KV head and, for each query head of the group, goes through all
// tiles of ROWS query rows that see one of its keys. One thread, the *producer*, asks the copy engine for rows. Two *consumers*
// of 128 threads have 64 keys each: with the keys as rows, the scores Sᵀ = K Qᵀ and dPᵀ = V doutᵀ are made in registers and
// are, weighed, the operands of dV += Pᵀ dout and dK += dSᵀ Q, which stay there until the tile is done; so dk and dv are sums
// in one order. dS goes through shared memory for dQ = dS K. Two more threads, the *adders*, add that to f32 sums in memory: as
// it comes, or in the order of the tiles of keys where the launch is to give the same bits each time. The third kernel turns
// the sums into dq.
//
// The copy engine knows tensors and no sequences: boxes run on into padding and into other sequences. What lies there stays
// out: rows of K, Q and dout behind the last real one are overwritten with zeros in shared memory, weights and gradients of
// pairs that are not seen are replaced and not multiplied, and rows that are not real are written as zeros or not at all.
//
// Instances: DIM (64 or 128: the largest head dim) and TYPE (BF16 or FP16). PLAN: with the planning kernel.
#include "common.cuh"
#include "hopper.cuh"

constexpr int KEYS = 128, ROWS = 8192 / DIM;
constexpr int GROUPS = 2, CONSUMERS = 128 * GROUPS, THREADS_ALL = CONSUMERS + 128;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(128 * PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= 65536 / THREADS_ALL / 8 * 8 * THREADS_ALL,
              "more registers than the launch gives");
constexpr int STAGES = 2, ADDERS = 2;
// Whether consumers make descriptors from what warps have alike: a tenth fewer instructions, which count where products are
// short. With 128 lanes the registers that are read once more cost as much.
constexpr bool ALIKE = DIM <= 64;
constexpr int KV_BYTES = KEYS * DIM * 2, Q_BYTES = ROWS * DIM * 2, DS_BYTES = KEYS * ROWS * 2;
// Of dQ, f32: a group's part of 64 rows and 64 lanes, and all.
constexpr int PART_BYTES = 64 * 64 * 4, SUMS = ROWS * DIM;
constexpr float LOG2_E = 1.44269504088896340736f;

// What the planning kernel makes of the tables. A row of the tensors is `step * index + phase`, the same step for all.
struct alignas(16) PlannedSegment {
    int index;
    int phase;
    int len;
    int span;
    int lo;
    int hi;
    int first_run;
    int runs;
    // Tiles of query rows, and of keys, in the order of the plan.
    u32 first_q_tile;
    u32 q_tiles;
    u32 first_kv_tile;
    u32 kv_tiles;
};

struct alignas(16) PlannedRun {
    int index;
    int phase;
    // Its first key among those of its segment.
    int first;
    int len;
    int span;
    // Tiles of the segment's runs before.
    u32 first_tile;
    int unused[2];
};

struct alignas(16) Plan {
    // The next item: a tile of keys and a KV head.
    u32 next;
    u32 q_tiles;
    u32 kv_tiles;
};

struct Args {
    TensorMap q;
    TensorMap k;
    TensorMap v;
    TensorMap dout;
    Plan* plan;
    const PlannedSegment* segments;
    const PlannedRun* runs;
    // Of each tile its segment.
    const u32* q_tile_segment;
    const u32* kv_tile_segment;
    // Of each tile of query rows and head: ROWS · DIM sums of dQ, as consumers hold them.
    float* sums;
    // LSE and D of its rows.
    float* statistics;
    // How many tiles of keys have been added; none: in any order.
    u32* added;
    // As elements, where the copy engine has no part in it.
    View gradient;
    View out;
    View lse;
    View dq;
    View dk;
    View dv;
    int heads;
    // Query heads of a KV head.
    int group;
    // KV heads whose rows stay in the L2 cache together.
    int head_chunk;
    int q_step;
    int kv_step;
    int dim;
    int dim_v;
    // Whether padding rows become zero, and whether gradients are added to what is there.
    int clear;
    int accumulate;
    float scale;
};

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

// A tile of query rows and a head.
__device__ __forceinline__ i64 part_of(const Args& a, u32 tile, int head) { return (i64)tile * a.heads + head; }

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
// Tiles.

// Keys of a KV head; key k is seen by row r where r + lo <= k <= r + hi.
struct Tile {
    int index;
    int phase;
    int head;
    // Real keys and owned ones; owned ones may be more than the tile has, real ones less than 0.
    int real;
    int owned;
    // The first key among those of its segment.
    int key;
    int lo;
    int hi;
    // Real query rows, and the tiles of them that see a key; none: an empty range; no more tiles: -1.
    int rows;
    int first;
    int end;
    // The first tile of query rows in the order of the plan.
    u32 q_tile;
    // Runs of the segment from the tile's own on, and the tile within that.
    int run;
    int runs;
    int in_run;
    // The tiles whose rows are all real and all see all keys, which are all real.
    int whole;
    int whole_end;
    int unused[3];
};
constexpr int TILE_WORDS = sizeof(Tile) / 4;

// A block's shared memory: barriers and the tile in the first kilobyte, then K and V, rings of Q and dout, dS twice, and dQ.
// Addresses.
struct Shared {
    u32 base;

    // The same, of which nothing is known: addresses are made from it when they are needed, and not kept.
    __device__ __forceinline__ Shared again() const { return {kept(base)}; }
    __device__ __forceinline__ u32 kv_full() const { return base; }
    __device__ __forceinline__ u32 kv_empty() const { return base + 8; }
    __device__ __forceinline__ u32 q_full(u32 stage) const { return base + 64 + 8 * stage; }
    __device__ __forceinline__ u32 q_empty(u32 stage) const { return base + 128 + 8 * stage; }
    __device__ __forceinline__ u32 dout_full(u32 stage) const { return base + 192 + 8 * stage; }
    __device__ __forceinline__ u32 dout_empty(u32 stage) const { return base + 256 + 8 * stage; }
    // One for each adder, who take turns with the one place.
    __device__ __forceinline__ u32 dq_full(u32 group, u32 turn) const { return base + 320 + 16 * group + 8 * (turn % ADDERS); }
    __device__ __forceinline__ u32 dq_empty(u32 group, u32 turn) const { return base + 384 + 16 * group + 8 * (turn % ADDERS); }
    __device__ __forceinline__ u32 tile() const { return base + 448; }
    __device__ __forceinline__ u32 k() const { return base + 1024; }
    __device__ __forceinline__ u32 v() const { return k() + KV_BYTES; }
    __device__ __forceinline__ u32 q(u32 stage) const { return v() + KV_BYTES + stage * Q_BYTES; }
    __device__ __forceinline__ u32 dout(u32 stage) const { return q(STAGES) + stage * Q_BYTES; }
    __device__ __forceinline__ u32 ds(u32 turn) const { return dout(STAGES) + turn % STAGES * DS_BYTES; }
    __device__ __forceinline__ u32 dq(u32 group) const { return dout(STAGES) + STAGES * DS_BYTES + group * PART_BYTES; }
    __device__ __forceinline__ u32 statistics(u32 stage) const { return dq(GROUPS) + stage * ROWS * 8; }
};

__device__ __forceinline__ void put_tile(u32 at, const Tile& tile) {
    const int* const w = (const int*)&tile;
#pragma unroll
    for (int i = 0; i < TILE_WORDS; i += 4)
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at + 4 * i), "r"(w[i]), "r"(w[i + 1]),
                     "r"(w[i + 2]), "r"(w[i + 3])
                     : "memory");
}
__device__ __forceinline__ Tile get_tile(u32 at) {
    Tile tile;
    int* const w = (int*)&tile;
#pragma unroll
    for (int i = 0; i < TILE_WORDS; i += 4)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3])
                     : "r"(at + 4 * i)
                     : "memory");
    return tile;
}

// ---------------------------------------------------------------------------------------------------------------------
// The producer: takes tiles, and asks for their rows.

// The tile of an item: heads in chunks, whose rows stay in the cache, and the first keys of a chunk first, which most rows see.
// In a fixed order the last keys come first, and no tile waits for one that is taken later.
__device__ __forceinline__ Tile tile_of(const Args& a, u32 item) {
    const int kv_heads = a.heads / a.group;
    const PlannedSegment& segment = a.segments[a.kv_tile_segment[item / kv_heads]];
    u32 rest = item - segment.first_kv_tile * kv_heads;
    const u32 chunk = rest / (segment.kv_tiles * a.head_chunk);
    rest -= chunk * segment.kv_tiles * a.head_chunk;
    const u32 heads = min((u32)a.head_chunk, kv_heads - chunk * a.head_chunk);
    const u32 number = a.added ? segment.kv_tiles - 1 - rest / heads : rest / heads;
    int run = 0;
    while (run + 1 < segment.runs && a.runs[segment.first_run + run + 1].first_tile <= number) ++run;
    const PlannedRun& keys = a.runs[segment.first_run + run];
    Tile tile = {};
    tile.in_run = number - keys.first_tile;
    const int first = tile.in_run * KEYS;
    tile.index = keys.index + first, tile.phase = keys.phase;
    tile.head = chunk * a.head_chunk + rest % heads;
    tile.real = min(keys.len - first, KEYS), tile.owned = keys.span - first;
    tile.key = keys.first + first;
    tile.lo = segment.lo, tile.hi = segment.hi;
    tile.rows = segment.len;
    const int from = max(tile.key - tile.hi, 0), to = min(tile.key + tile.real - tile.lo, tile.rows);
    const bool seen = tile.real > 0 && from < to && tile.lo <= tile.hi;
    tile.first = seen ? from / ROWS : 0;
    tile.end = seen ? (to + ROWS - 1) / ROWS : 0;
    tile.q_tile = segment.first_q_tile;
    tile.run = segment.first_run + run, tile.runs = segment.runs - run;
    tile.whole = max(tile.key + KEYS - 1 - tile.hi + ROWS - 1, 0) / ROWS;
    tile.whole_end = tile.real < KEYS ? 0 : min(tile.rows, max(tile.key - tile.lo + 1, 0)) / ROWS;
    return tile;
}

__device__ __forceinline__ void load_panels(
    u32 to, const TensorMap* map, u32 bar, int rows, int head, int phase, int index
) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
        load_box(to + panel * rows * 128, map, bar, panel * 64, head, phase, index);
}

// Query rows of a head, their dout and statistics.
__device__ __forceinline__ void load_queries(
    const Args& a, const Shared& shared, const Ring<STAGES>& ring, u32 q_tile, int t, int head, int phase, int index
) {
    const u32 stage = ring.stage(), parity = ring.parity() ^ 1;
    barrier_wait(shared.q_empty(stage), parity);
    barrier_expect(shared.q_full(stage), Q_BYTES + ROWS * 8);
    load_panels(shared.q(stage), &a.q, shared.q_full(stage), ROWS, head, phase, index);
    load_bulk(shared.statistics(stage), a.statistics + part_of(a, q_tile + t, head) * 2 * ROWS, shared.q_full(stage),
              ROWS * 8);
    barrier_wait(shared.dout_empty(stage), parity);
    barrier_expect(shared.dout_full(stage), Q_BYTES);
    load_panels(shared.dout(stage), &a.dout, shared.dout_full(stage), ROWS, head, phase, index);
}

__device__ __forceinline__ void produce(const Args& a, const Shared& all) {
    Ring<1> kv_ring;
    Ring<STAGES> ring;
    const u32 items = a.plan->kv_tiles * (a.heads / a.group);
    for (;;) {
        const u32 item = atomicAdd(&a.plan->next, 1);
        if (item >= items) break;
        const Tile tile = tile_of(a, item);
        const Shared shared = all.again();
        barrier_wait(shared.kv_empty(), kv_ring.parity() ^ 1);
        kv_ring.advance();
        put_tile(shared.tile(), tile);
        if (tile.first >= tile.end) {
            barrier_arrive(shared.kv_full());
            continue;
        }
        barrier_expect(shared.kv_full(), 2 * KV_BYTES);
        load_panels(shared.k(), &a.k, shared.kv_full(), KEYS, tile.head, tile.phase, tile.index);
        load_panels(shared.v(), &a.v, shared.kv_full(), KEYS, tile.head, tile.phase, tile.index);
        const PlannedSegment& segment = a.segments[a.q_tile_segment[tile.q_tile]];
        const int phase = segment.phase, index = segment.index, from = tile.first, end = tile.end;
        const u32 q_tile = tile.q_tile;
        int head = tile.head * a.group, t = from;
#pragma unroll 1
        for (int left = (end - from) * a.group; left > 0; --left) {
            load_queries(a, all.again(), ring, q_tile, t, head, phase, index + t * ROWS);
            ring.advance();
            if (++t == end) t = from, ++head;
        }
    }
    const Shared shared = all.again();
    barrier_wait(shared.kv_empty(), kv_ring.parity() ^ 1);
    Tile none = {};
    none.first = -1;
    put_tile(shared.tile(), none);
    barrier_arrive(shared.kv_full());
}

// ---------------------------------------------------------------------------------------------------------------------
// The adders: add dQ of each tile to the sums in memory.

// Tiles of keys behind this one that rows `first` to `end` see: they add before it.
__device__ __forceinline__ u32 tiles_before(const Args& a, const Tile& tile, int first, int end) {
    u32 count = 0;
    for (int r = 0; r < tile.runs; ++r) {
        const PlannedRun& run = a.runs[tile.run + r];
        const int from = max(first + tile.lo - run.first, 0), to = min(end + tile.hi - run.first, run.len);
        if (from >= to) continue;
        const int low = r == 0 ? tile.in_run + 1 : from / KEYS, high = (to + KEYS - 1) / KEYS;
        count += max(high - low, 0);
    }
    return count;
}

__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(u32* to, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
// Orders ordinary accesses of memory and those of the copy engine.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Until it is a tile's turn to add; its number.
__device__ __forceinline__ u32 wait_turn(const Args& a, const Tile& tile, int t, i64 part) {
    const u32 turn = tiles_before(a, tile, t * ROWS, min((t + 1) * ROWS, tile.rows));
    while (load_acquire(a.added + part) != turn) {}
    proxy_fence();
    return turn;
}

// dQ of a tile of query rows and a head, from both consumers.
__device__ __forceinline__ void add_part(const Shared& shared, u32 turn, float* sums, bool first) {
    for (int group = 0; group < GROUPS; ++group) {
        barrier_wait(shared.dq_full(group, turn), turn / ADDERS % 2);
        float* const to = sums + group * (PART_BYTES / 4);
        if (first) store_bulk(to, shared.dq(group), PART_BYTES);
        else add_bulk(to, shared.dq(group), PART_BYTES);
        bulk_commit();
    }
    bulk_wait_read<1>();
    barrier_arrive(shared.dq_empty(0, turn));
    bulk_wait_read<0>();
    barrier_arrive(shared.dq_empty(1, turn));
}

// One of the adders: they take turns, so that one waits for its additions to be made while the other asks for the next.
__device__ __forceinline__ void add(const Args& a, const Shared& shared, u32 mine) {
    Ring<1> kv_ring;
    u32 turn = 0;
    for (;;) {
        barrier_wait(shared.kv_full(), kv_ring.parity());
        const Tile tile = get_tile(shared.tile());
        barrier_arrive(shared.kv_empty());
        kv_ring.advance();
        if (tile.first < 0) return;
        for (int head = tile.head * a.group; head < (tile.head + 1) * a.group; ++head)
            for (int t = tile.first; t < tile.end; ++t, ++turn) {
                if (turn % ADDERS != mine) continue;
                const i64 part = part_of(a, tile.q_tile + t, head);
                // In order, the first one needs no sums of zero.
                const u32 before = a.added ? wait_turn(a, tile, t, part) : 1;
                add_part(shared, turn, a.sums + part * SUMS, before == 0);
                if (!a.added) continue;
                bulk_wait();
                proxy_fence();
                store_release(a.added + part, before + 1);
            }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// A consumer: 64 keys of a tile.

// Weights, and gradients of scores, of pairs that are not seen become zero, whatever they were.
__device__ __forceinline__ void mask(float (&p)[ROWS / 2], float (&ds)[ROWS / 2], const Tile& tile, int first) {
    const u32 thread = kept(threadIdx.x);
    const int lane = 2 * (thread % 4), row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half, key = tile.key + r;
        const int left = key - tile.hi - first;
        const int right = r < tile.real ? min(key - tile.lo, tile.rows - 1) - first : -1;
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = 4 * j + 2 * half + i, query = 8 * j + lane + i;
                if (query < left || query > right) p[at] = 0.0f, ds[at] = 0.0f;
            }
    }
}

// Two rows' numbers.
__device__ __forceinline__ float2 get_two(u32 at) {
    float2 two;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(at) : "memory");
    return two;
}

// Scores become weights.
__device__ __forceinline__ void weigh(float (&s)[ROWS / 2], u32 lse, float scale) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
        const float2 of = get_two(lse + 32 * j + 8 * (threadIdx.x % 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& x = s[4 * j + i];
            x = exp2_of(__fmaf_rn(x, scale, i % 2 == 0 ? -of.x : -of.y) * LOG2_E);
        }
    }
}

// dP becomes dS, without the scale.
__device__ __forceinline__ void differentiate(float (&dp)[ROWS / 2], const float (&p)[ROWS / 2], u32 d) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
        const float2 of = get_two(d + 32 * j + 8 * (threadIdx.x % 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) dp[4 * j + i] = p[4 * j + i] * (dp[4 * j + i] - (i % 2 == 0 ? of.x : of.y));
    }
}

__device__ __forceinline__ void pack(const float (&s)[ROWS / 2], u32 (&p)[ROWS / 4]) {
#pragma unroll
    for (int i = 0; i < ROWS / 4; ++i) p[i] = pair_of(s[2 * i], s[2 * i + 1]);
}

// sᵀ = a · bᵀ: 64 keys, a tile of query rows.
__device__ __forceinline__ void scores(float (&s)[ROWS / 2], u32 a, u32 b) {
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
        const int panel = step / 4, in_panel = step % 4 * 2;
        score_step<ROWS>(s, a + panel * (KEYS * 128 >> 4) + in_panel, b + panel * (ROWS * 128 >> 4) + in_panel, step > 0);
    }
}

// d += p · b: 64 keys, lanes of a tile of query rows.
__device__ __forceinline__ void values(float (&d)[DIM / 2], const u32 (&p)[ROWS / 4], u32 b) {
#pragma unroll
    for (int step = 0; step < ROWS / 16; ++step)
        value_step(d, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], b + step * (2048 >> 4));
}

// dq = dsᵀᵀ · k: a panel of query rows, a panel of lanes, all keys.
__device__ __forceinline__ void queries(float (&dq)[32], u32 ds, u32 k) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
        gradient_step(dq, ds + step * (2048 >> 4), k + step * (2048 >> 4), step > 0);
}

// Rows `valid` to `rows` of a tile become zero: what they are multiplied with is, but 0 · NaN is not. Made by all consumers.
__device__ __forceinline__ void clear_rows(u32 at, int valid, int rows) {
    const int count = (rows - valid) * PANELS * 8;
#pragma unroll 1
    for (int i = kept(threadIdx.x); i < count; i += CONSUMERS) {
        const int row = valid + i / (PANELS * 8), panel = i / 8 % PANELS;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + panel * rows * 128 + row * 128 + i % 8 * 16),
                     "r"(0)
                     : "memory");
    }
}

__device__ __forceinline__ void clear_queries(const Shared& shared, u32 stage, int valid) {
    if (valid >= ROWS) return;
    clear_rows(shared.q(stage), valid, ROWS);
    clear_rows(shared.dout(stage), valid, ROWS);
    shared_stores_done();
    named_barrier(1, CONSUMERS);
}

// dSᵀ of 64 keys in rows of 64 query rows, as the copy engine would swizzle them.
__device__ __forceinline__ void store_gradients(u32 at, const u32 (&ds)[ROWS / 4]) {
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j += 2) {
        const u32 to = at + j / 8 * (KEYS * 128) + row * 128 + ((j % 8 + lane / 16) ^ lane % 8) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(ds[2 * j]),
                     "r"(ds[2 * j + 1]), "r"(ds[2 * j + 2]), "r"(ds[2 * j + 3])
                     : "memory");
    }
}

__device__ __forceinline__ void store_sums(u32 at, const float (&dq)[32]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at + (i * 128 + threadIdx.x % 128) * 16),
                     "f"(dq[4 * i]), "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                     : "memory");
}

__device__ __forceinline__ void release(u32 barrier) {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
__device__ __forceinline__ void release_stores(u32 barrier) {
    shared_stores_done();
    __syncwarp();
    release(barrier);
}

template <int HALF>
__device__ __forceinline__ void store(
    const View& view, const Args& a, const Tile& tile, const float (&d)[DIM / 2], float factor, int dim
) {
    const u32 thread = kept(threadIdx.x);
    const int r = thread / 32 * 16 + thread % 32 / 4 + 8 * HALF;
    const bool real = r < tile.real, write = real || (a.clear && r < tile.owned && !a.accumulate);
    const i64 place = place_of(view, (i64)a.kv_step * (tile.index + r) + tile.phase, tile.head);
#pragma unroll
    for (int j = 0; j < DIM / 8; j += 4) {
        float even[4], odd[4], value[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            even[i] = real ? d[4 * (j + i) + 2 * HALF] * factor : 0.0f;
            odd[i] = real ? d[4 * (j + i) + 2 * HALF + 1] * factor : 0.0f;
        }
        neighbours(even, odd, value);
        const int column = 8 * (j + thread % 4);
        if (write && column < dim) put_eight(view, place + column, value, a.accumulate);
    }
}

__device__ __forceinline__ void consume(const Args& a, const Shared& all) {
    Ring<1> kv_ring;
    // Of Q and dout; its turns are those of dS and dQ too.
    Ring<STAGES> ring;
    float dk[DIM / 2], dv[DIM / 2];
    for (;;) {
        const Shared shared = all.again();
        barrier_wait(shared.kv_full(), kv_ring.parity());
        kv_ring.advance();
        const Tile tile = get_tile(shared.tile());
        if (tile.first < 0) return;
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) dk[i] = 0.0f, dv[i] = 0.0f;
        if (tile.first < tile.end && tile.real < KEYS) {
            clear_rows(shared.k(), tile.real, KEYS);
            shared_stores_done();
            named_barrier(1, CONSUMERS);
        }
        const int from = tile.first, end = tile.end, whole = tile.whole, whole_end = tile.whole_end;
        int t = from;
#pragma unroll 1
        for (int left = (end - from) * a.group; left > 0; --left) {
            const Shared shared = {ALIKE ? uniform(all.base) : kept(all.base)};
            const u32 group = ALIKE ? uniform(threadIdx.x / 128) : kept(threadIdx.x) / 128;
            const int now = t;
            t = t + 1 < end ? t + 1 : from;
            const u32 stage = ALIKE ? uniform(ring.stage()) : ring.stage();
            barrier_wait(shared.q_full(stage), ring.parity());
            barrier_wait(shared.dout_full(stage), ring.parity());
            const bool ragged = now < whole || now >= whole_end;
            if (ragged) clear_queries(shared, stage, get_tile(shared.tile()).rows - now * ROWS);
            float s[ROWS / 2], dp[ROWS / 2];
            u32 p[ROWS / 4], ds[ROWS / 4];
            hold(s);
            hold(dp);
            wgmma_fence();
            scores(s, descriptor(shared.k() + group * 64 * 128, 0), descriptor(shared.q(stage), 0));
            wgmma_commit();
            scores(dp, descriptor(shared.v() + group * 64 * 128, 0), descriptor(shared.dout(stage), 0));
            wgmma_commit();
            wgmma_wait<1>();
            hold(s);
            weigh(s, shared.statistics(stage), a.scale);
            wgmma_wait<0>();
            hold(dp);
            differentiate(dp, s, shared.statistics(stage) + ROWS * 4);
            if (ragged) mask(s, dp, get_tile(shared.tile()), now * ROWS);
            pack(s, p);
            pack(dp, ds);
            hold(p);
            hold(ds);
            hold(dv);
            wgmma_fence();
            values(dv, p, descriptor(shared.dout(stage), ROWS * 128));
            wgmma_commit();
            store_gradients(shared.ds(stage), ds);
            shared_stores_done();
            named_barrier(1, CONSUMERS);
            float dq[32];
            hold(dq);
            hold(dk);
            hold(ds);
            wgmma_fence();
            // The group's rows, or its lanes.
            const u32 panel = group * KEYS * 128, at = shared.ds(stage);
            if constexpr (PANELS > 1) queries(dq, descriptor(at, 0), descriptor(shared.k() + panel, 0));
            else queries(dq, descriptor(at + panel, 0), descriptor(shared.k(), 0));
            wgmma_commit();
            values(dk, ds, descriptor(shared.q(stage), ROWS * 128));
            wgmma_commit();
            wgmma_wait<1>();
            hold(dq);
            hold(dv);
            hold(p);
            release(shared.dout_empty(stage));
            barrier_wait(shared.dq_empty(group, ring.turns - 1), (ring.turns - 1) / ADDERS % 2);
            store_sums(shared.dq(group), dq);
            release_stores(shared.dq_full(group, ring.turns));
            wgmma_wait<0>();
            hold(dk);
            hold(ds);
            release(shared.q_empty(stage));
            ring.advance();
        }
        const Tile done = get_tile(shared.tile());
        __syncwarp();
        release(shared.kv_empty());
        store<0>(a.dk, a, done, dk, a.scale, a.dim);
        store<1>(a.dk, a, done, dk, a.scale, a.dim);
        store<0>(a.dv, a, done, dv, 1.0f, a.dim_v);
        store<1>(a.dv, a, done, dv, 1.0f, a.dim_v);
    }
}

__device__ __forceinline__ void backward(const Args& a) {
    extern __shared__ u8 dynamic[];
    const Shared shared = {kept((shared_address(dynamic) + 1023) / 1024 * 1024)};
    if (threadIdx.x == 0) {
        constexpr int WARPS = CONSUMERS / 32;
        barrier_init(shared.kv_full(), 1);
        barrier_init(shared.kv_empty(), WARPS + ADDERS);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.q_full(i), 1);
            barrier_init(shared.dout_full(i), 1);
            barrier_init(shared.q_empty(i), WARPS);
            barrier_init(shared.dout_empty(i), WARPS);
        }
        for (int i = 0; i < GROUPS * ADDERS; ++i) {
            barrier_init(shared.dq_full(i / ADDERS, i), WARPS / GROUPS);
            barrier_init(shared.dq_empty(i / ADDERS, i), 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == CONSUMERS) produce(a, shared);
        if (threadIdx.x == CONSUMERS + 32 || threadIdx.x == CONSUMERS + 64) add(a, shared, threadIdx.x / 32 % 2 == 0);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume(a, shared);
    }
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

#define PASTED(KIND, DIM, TYPE) backward_##KIND##_##DIM##_##TYPE
#define NAMED(KIND, DIM, TYPE) PASTED(KIND, DIM, TYPE)

extern "C" __global__ void __launch_bounds__(THREADS, 4) NAMED(before, DIM, TYPE)(const __grid_constant__ Args a) {
    prepare(a);
}
extern "C" __global__ void __launch_bounds__(THREADS_ALL, 1) NAMED(tiles, DIM, TYPE)(const __grid_constant__ Args a) {
    backward(a);
}
extern "C" __global__ void __launch_bounds__(THREADS, 4) NAMED(after, DIM, TYPE)(const __grid_constant__ Args a) {
    finish(a);
}

#ifdef PLAN
// ---------------------------------------------------------------------------------------------------------------------
// The plan: segments in falling order of their query rows, each with all its tiles.

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
// Tiles of query rows, and above them those of keys.
__device__ __forceinline__ u64 tiles_of(const PlanArgs& a, int s) {
    u32 keys = 0;
    for (int r = 0; r < (int)a.segments[s].runs; ++r) keys += (keys_of(a, a.segments[s].first_run + r) + KEYS - 1) / KEYS;
    return (u64)keys << 32 | (u32)(rows_of(a, s) + a.tile_rows - 1) / a.tile_rows;
}
__device__ __forceinline__ u32 bucket_of(const PlanArgs& a, int s) {
    return PLANNERS - 1 - (u32)min(max(a.segments[s].q_len, (i64)0) / 128, (i64)PLANNERS - 1);
}
__device__ __forceinline__ int bound(i64 value) { return (int)min(max(value, (i64)-FAR), (i64)FAR); }

__device__ __forceinline__ void plan_segment(const PlanArgs& a, int s, u64 first) {
    const QuerySegment segment = a.segments[s];
    const u64 tiles = tiles_of(a, s);
    a.planned[s] = {
        (int)(segment.q_offset / a.q_step), (int)(segment.q_offset % a.q_step), (int)segment.q_len, rows_of(a, s),
        bound(segment.lo), bound(segment.hi), (int)segment.first_run, (int)segment.runs,
        (u32)first, (u32)tiles, (u32)(first >> 32), (u32)(tiles >> 32),
    };
    u32 before = 0;
    for (int r = (int)segment.first_run; r < (int)(segment.first_run + segment.runs); ++r) {
        const KeyRun run = a.runs[r];
        const int span = keys_of(a, r);
        a.planned_runs[r] = {
            (int)(run.offset / a.kv_step), (int)(run.offset % a.kv_step), (int)run.first_key, (int)run.len, span, before,
        };
        before += (span + KEYS - 1) / KEYS;
    }
}

extern "C" __global__ void __launch_bounds__(PLANNERS, 1) backward_plan(const __grid_constant__ PlanArgs a) {
    __shared__ u64 starts[PLANNERS];
    const u32 lane = threadIdx.x;
    starts[lane] = 0;
    __syncthreads();
    for (int s = lane; s < a.segment_count; s += PLANNERS) atomicAdd(&starts[bucket_of(a, s)], tiles_of(a, s));
    __syncthreads();
    // Tiles of the buckets before.
    const u64 own = starts[lane];
    u64 sum = own;
    for (u32 step = 1; step < PLANNERS; step *= 2) {
        const u64 before = lane >= step ? starts[lane - step] : 0;
        __syncthreads();
        sum += before;
        starts[lane] = sum;
        __syncthreads();
    }
    starts[lane] = sum - own;
    if (lane == PLANNERS - 1)
        *a.plan = {0, min((u32)sum, (u32)a.q_capacity), min((u32)(sum >> 32), (u32)a.kv_capacity)};
    __syncthreads();
    for (int s = lane; s < a.segment_count; s += PLANNERS)
        plan_segment(a, s, atomicAdd(&starts[bucket_of(a, s)], tiles_of(a, s)));
    __syncthreads();
    for (int s = lane / 32; s < a.segment_count; s += PLANNERS / 32) {
        const PlannedSegment planned = a.planned[s];
        for (u32 i = lane % 32; i < planned.q_tiles && planned.first_q_tile + i < (u32)a.q_capacity; i += 32)
            a.q_tile_segment[planned.first_q_tile + i] = s;
        for (u32 i = lane % 32; i < planned.kv_tiles && planned.first_kv_tile + i < (u32)a.kv_capacity; i += 32)
            a.kv_tile_segment[planned.first_kv_tile + i] = s;
    }
}
#endif
