// The forward on Hopper: tiles of query rows against blocks of keys on tensor cores, for packs of sequences.
//
// A block of threads stays for the whole launch. One thread of it, the *producer*, takes tiles from the plan and asks the
// copy engine for their rows (Q) and, block after block from the last key to the first, for K and V; *consumers*, groups of
// 128 threads with 64 query rows each, multiply and weigh. Rings of shared memory lie between them. A tile's shape follows
// from the segment alone, so that results do not depend on which block of threads took it, nor when.
//
// The copy engine knows tensors and no sequences: boxes run on into padding and into other sequences. What lies there stays
// out: scores of keys that a row does not see are replaced and not multiplied, V behind the last key is overwritten with
// zeros in shared memory, and rows that are not real are written as zeros or not at all. Head dims below DIM are filled with
// zeros by the copy engine.
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
    // In the order of tiles.
    u32 first_tile;
    u32 tiles;
    int first_run;
    int runs;
    int unused;
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
    float scale;
    // scale · log2 e.
    float scale_log2;
};

// ---------------------------------------------------------------------------------------------------------------------
// Tiles.

// Rows of a segment and a head, and what they see: row r sees key k where r + lo <= k <= r + hi.
struct Tile {
    int index;
    int phase;
    int head;
    // Real rows and owned rows; owned ones may be more than the tile has, real ones less than 0.
    int owned;
    int real;
    int lo;
    int hi;
    int unused;
    // Blocks of keys; 0: the rows see none; -1: there are no more tiles.
    int blocks;
    // Of these, how many come first that some row sees in part, and how many after them that all rows see whole.
    int ragged;
    int whole;
    int unused_too;
};

// Keys `first` to `end` of the segment lie in a block from its beginning.
struct Block {
    int first;
    int end;
};

// GROUPS consumers of 64 rows, blocks of KEYS keys, STAGES blocks in the rings of K and V.
template <int GROUPS_, int KEYS_, int STAGES_>
struct Config {
    static constexpr int GROUPS = GROUPS_, KEYS = KEYS_, STAGES = STAGES_;
    static constexpr int ROWS = 64 * GROUPS, CONSUMERS = 128 * GROUPS;
    static constexpr int Q_BYTES = ROWS * DIM * 2, KV_BYTES = KEYS * DIM * 2;
    static constexpr int Q_STAGES = 2;
    // Threads of a block: one consumer has a warp beside it and keeps its registers, several have a group of 128 and take
    // over most of its registers. A block has those of its launch and no more: it would wait for others for ever.
    static constexpr int THREADS_ALL = CONSUMERS + (GROUPS == 1 ? 32 : 128);
    static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
    static_assert(GROUPS == 1 || 128 * PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
                                     65536 / THREADS_ALL / 8 * 8 * THREADS_ALL,
                  "more registers than the launch gives");
};

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
    __device__ __forceinline__ u32 tile(u32 stage) const { return base + 512 + 48 * stage; }
    __device__ __forceinline__ u32 q(u32 stage) const { return base + 1024 + stage * C::Q_BYTES; }
    __device__ __forceinline__ u32 k(u32 stage) const { return q(C::Q_STAGES) + stage * C::KV_BYTES; }
    __device__ __forceinline__ u32 v(u32 stage) const { return k(C::STAGES) + stage * C::KV_BYTES; }
};

// The first, second or third four numbers of a tile.
__device__ __forceinline__ void put_tile(u32 at, int third, int a, int b, int c, int d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at + 16 * third), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ Tile get_tile(u32 at) {
    int w[12];
#pragma unroll
    for (int i = 0; i < 12; i += 4)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3])
                     : "r"(at + 4 * i)
                     : "memory");
    return {w[0], w[1], w[2], w[3], w[4], w[5], w[6], 0, w[8], w[9], w[10], 0};
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

// Blocks of a run begin at its beginning; those from `low` to `high` hold keys from `from` to `to`.
template <class C>
__device__ __forceinline__ void blocks_of(const PlannedKeys& run, int from, int to, int& low, int& high) {
    from = max(from - run.first, 0), to = min(to - run.first, run.len);
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

template <class C>
__device__ __forceinline__ void produce(const Args& a, const Shared<C>& shared) {
    Ring<C::Q_STAGES> q_ring;
    Ring<C::STAGES> k_ring, v_ring;
    for (;;) {
        const u32 item = atomicAdd(&a.plan->next, 1);
        if (item >= a.plan->tiles * a.heads) break;
        const PlannedRows& rows = a.rows[a.tile_segment[item / a.heads]];
        u32 rest = item - rows.first_tile * a.heads;
        // Heads in chunks, whose keys stay in the cache; the longest tiles of a chunk first.
        const u32 chunk = rest / (rows.tiles * a.head_chunk);
        rest -= chunk * rows.tiles * a.head_chunk;
        const u32 heads = min((u32)a.head_chunk, a.heads - chunk * a.head_chunk);
        const int first = (int)(rows.tiles - 1 - rest / heads) * C::ROWS;
        const int head = (int)(chunk * a.head_chunk + rest % heads), kv_head = head / a.group;
        barrier_wait(shared.q_empty(q_ring.stage()), q_ring.parity() ^ 1);
        const u32 tile = shared.tile(q_ring.stage());
        put_tile(tile, 0, rows.index + first, rows.phase, head, rows.span - first);

        const int lo = max(first + rows.lo, -FAR_ROWS), hi = max(first + rows.hi, -FAR_ROWS);
        const int real = min(rows.len - first, C::ROWS);
        put_tile(tile, 1, real, lo, hi, 0);
        const int from = max(first + rows.lo, 0), to = min(first + real + rows.hi, rows.keys);
        const PlannedKeys* const runs = a.keys + rows.first_run;
        const int run_count = real > 0 && from < to ? rows.runs : 0;
        int blocks = 0, low, high;
        for (int r = 0; r < run_count; ++r) {
            blocks_of<C>(runs[r], from, to, low, high);
            blocks += high - low;
        }
        // Of more runs than one, every block may end early.
        int ragged = blocks, whole = 0;
        if (run_count == 1) {
            const int len = runs[0].len, whole_from = (u32)(max(lo + C::ROWS - 1, 0) + C::KEYS - 1) / C::KEYS;
            const int whole_to = (u32)(max(min(hi, len - 1), -1) + 1) / C::KEYS;
            // V of a block is used with the scores of the next: one more where V has a tail.
            ragged = min(max(high - whole_to, 0) + (high * C::KEYS > len), blocks);
            whole = min(max(high - ragged - max(whole_from, low), 0), blocks - ragged);
        }
        put_tile(tile, 2, blocks, ragged, whole, 0);
        if (blocks == 0) {
            barrier_arrive(shared.q_full(q_ring.stage()));
            q_ring.advance();
            continue;
        }
        load_rows<C>(shared.q(q_ring.stage()), &a.q, shared.q_full(q_ring.stage()), C::ROWS, head, rows.phase,
                     rows.index + first);
        q_ring.advance();

        // V of a block is asked for after K of the next.
        int v_phase = 0, v_index = -1;
        auto load_v = [&]() {
            barrier_wait(shared.v_empty(v_ring.stage()), v_ring.parity() ^ 1);
            load_rows<C>(shared.v(v_ring.stage()), &a.v, shared.v_full(v_ring.stage()), C::KEYS, kv_head,
                         v_phase, v_index);
            v_ring.advance();
        };
        for (int r = run_count - 1; r >= 0; --r) {
            const PlannedKeys& run = runs[r];
            blocks_of<C>(run, from, to, low, high);
            for (int block = high - 1; block >= low; --block) {
                barrier_wait(shared.k_empty(k_ring.stage()), k_ring.parity() ^ 1);
                const int key = block * C::KEYS;
                put_block(shared.block(k_ring.stage()), {run.first + key, run.first + min(key + C::KEYS, run.len)});
                load_rows<C>(shared.k(k_ring.stage()), &a.k, shared.k_full(k_ring.stage()), C::KEYS, kv_head,
                             run.phase, run.index + key);
                k_ring.advance();
                if (v_index >= 0) load_v();
                v_index = run.index + key, v_phase = run.phase;
            }
        }
        load_v();
    }
    barrier_wait(shared.q_empty(q_ring.stage()), q_ring.parity() ^ 1);
    put_tile(shared.tile(q_ring.stage()), 2, -1, 0, 0, 0);
    barrier_arrive(shared.q_full(q_ring.stage()));
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

// What a thread keeps of its two rows.
struct Rows {
    float largest[2];
    float sum[2];
};

// Scores of keys that a row does not see become -inf, whatever they were.
template <class C>
__device__ __forceinline__ void mask(float (&s)[C::KEYS / 2], const Tile& tile, Block block, int row) {
    const int lane = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half;
        const int left = r + tile.lo - block.first, right = min(r + tile.hi, block.end - 1) - block.first;
#pragma unroll
        for (int j = 0; j < C::KEYS / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int key = 8 * j + lane + i;
                if (key < left || key > right) s[4 * j + 2 * half + i] = neg_infinity();
            }
    }
}

// Scores become weights relative to the new largest score; `factor` is what older weights are worth by it.
template <class C>
__device__ __forceinline__ void weigh(float (&s)[C::KEYS / 2], Rows& rows, float (&factor)[2], float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top[4] = {neg_infinity(), neg_infinity(), neg_infinity(), neg_infinity()};
#pragma unroll
        for (int j = 0; j < C::KEYS / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = j % 2 * 2 + i;
                top[at] = fmaxf(top[at], s[4 * j + 2 * half + i]);
            }
        const float old = rows.largest[half];
        const float largest = fmaxf(old, quad_max(fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]))));
        rows.largest[half] = largest;
        // A row that has seen no key yet: any number will do.
        const float base = largest == neg_infinity() ? 0.0f : largest;
        factor[half] = exp2_of((old - base) * scale_log2);
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < C::KEYS / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& x = s[4 * j + 2 * half + i];
                // Subtracted first: the largest weight is exactly 1.
                x = exp2_of((x - base) * scale_log2);
                sum[i] += x;
            }
        rows.sum[half] = rows.sum[half] * factor[half] + (sum[0] + sum[1]);
    }
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

// Rows of V past the end of the keys become zero: their weights are, but 0 · NaN is not.
template <class C>
__device__ __forceinline__ void clear_tail(u32 v_at, int valid) {
    const int count = (C::KEYS - valid) * PANELS * 8;
    for (int i = threadIdx.x; i < count; i += C::CONSUMERS) {
        const int row = valid + i / (PANELS * 8), panel = i / 8 % PANELS;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v_at + panel * C::KEYS * 128 + row * 128 + i % 8 * 16),
                     "r"(0)
                     : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    named_barrier(1, C::CONSUMERS);
}

// The largest logit of a warp's rows.
__device__ __forceinline__ void raise_head(const View& largest, int head, float value) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) value = fmaxf(value, __shfl_xor_sync(FULL, value, step));
    if (threadIdx.x % 32 == 0 && value > neg_infinity()) raise(largest, place_of(largest, 0, head), value);
}

template <class C, int HALF>
__device__ __forceinline__ void store(const Args& a, const Tile& tile, const Rows& rows, const float (&o)[DIM / 2], int row) {
    const int r = row + 8 * HALF;
    const bool real = r < tile.real, write = real || (a.clear && r < tile.owned);
    const float sum = quad_sum(rows.sum[HALF]);
    float largest = rows.largest[HALF] * a.scale, total = sum, weight = 1.0f;
    raise_head(a.max_logit, tile.head, real ? largest : neg_infinity());
    if (a.sink_kind != 0) {
        const float sink = a.sink_kind == 1 ? 0.0f : get(a.sink, place_of(a.sink, 0, tile.head));
        const float top = fmaxf(largest, sink);
        weight = sum == 0.0f ? 0.0f : exact_exp(largest - top);
        total = sum * weight + exact_exp(sink - top);
        largest = top;
    }
    // Not multiplied where the row is empty: there may be anything.
    const bool empty = !real || sum == 0.0f;
    const float factor = weight / total;
    const i64 at = (i64)a.q_step * (tile.index + r) + tile.phase;
    if (threadIdx.x % 4 == 0 && write)
        put(a.lse, place_of(a.lse, at, tile.head), !real || total == 0.0f ? neg_infinity() : largest + exact_ln(total));
    float mine[DIM / 4];
#pragma unroll
    for (int i = 0; i < DIM / 4; ++i) mine[i] = empty ? 0.0f : o[i / 2 * 4 + 2 * HALF + i % 2] * factor;
    const i64 place = place_of(a.out, at, tile.head);
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

template <class C>
__device__ __forceinline__ void consume(const Args& a, const Shared<C>& shared) {
    const u32 thread = kept(threadIdx.x);
    const int group = thread / 128, row = thread / 32 * 16 + thread % 32 / 4;
    Ring<C::Q_STAGES> q_ring;
    Ring<C::STAGES> k_ring, v_ring;
    float o[DIM / 2], s[C::KEYS / 2];
    u32 p[C::KEYS / 4];
    for (;;) {
        barrier_wait(shared.q_full(q_ring.stage()), q_ring.parity());
        const Tile tile = get_tile(shared.tile(q_ring.stage()));
        if (tile.blocks < 0) return;
        Rows rows = {{neg_infinity(), neg_infinity()}, {0.0f, 0.0f}};
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) o[i] = 0.0f;
        if (tile.blocks > 0) {
            const u32 q = kept(descriptor(shared.q(q_ring.stage()) + group * 64 * 128, 0));
            float factor[2];
            int valid;
            Block block;
            auto wait_keys = [&](auto ragged) {
                barrier_wait(shared.k_full(k_ring.stage()), k_ring.parity());
                if constexpr (ragged) block = get_block(shared.block(k_ring.stage()));
            };
            auto wait_values = [&]() { barrier_wait(shared.v_full(v_ring.stage()), v_ring.parity()); };
            auto start_scores = [&]() {
                hold(s);
                wgmma_fence();
                scores<C>(s, q, descriptor(shared.k(k_ring.stage()), 0));
                wgmma_commit();
            };
            auto weigh_block = [&](auto ragged) {
                hold(s);
                release(shared.k_empty(k_ring.stage()), thread);
                k_ring.advance();
                if constexpr (ragged) {
                    mask<C>(s, tile, block, row);
                    valid = block.end - block.first;
                }
                weigh<C>(s, rows, factor, a.scale_log2);
            };
            // O += P · V of the block before.
            auto start_values = [&](auto ragged, u32 stage, bool grown) {
                if (grown) {
#pragma unroll
                    for (int i = 0; i < DIM / 2; ++i) o[i] *= factor[i / 2 % 2];
                }
                const u32 at = shared.v(stage);
                if constexpr (ragged)
                    if (valid < C::KEYS) clear_tail<C>(at, valid);
                hold(o);
                wgmma_fence();
                values<C>(o, p, descriptor(at, C::KEYS * 128));
                wgmma_commit();
            };
            bool used = false;
            auto grown = [&]() { return __any_sync(FULL, factor[0] != 1.0f || factor[1] != 1.0f); };
            // While weights are made, P · V of the block before is under way. The wait for it begins the next turn: at the end
            // of one, the assembler would move it before the weights.
            auto turn = [&](auto ragged) {
                wait_keys(ragged);
                const bool grew = grown();
                wgmma_wait<0>();
                hold(o);
                hold(p);
                if (used) {
                    release(shared.v_empty(v_ring.stage()), thread);
                    v_ring.advance();
                }
                used = true;
                pack<C>(s, p);
                hold(p);
                start_scores();
                wait_values();
                start_values(ragged, v_ring.stage(), grew);
                wgmma_wait<1>();
                weigh_block(ragged);
            };
            wait_keys(Yes());
            start_scores();
            wgmma_wait<0>();
            weigh_block(Yes());
            // Ragged blocks, whole ones, and ragged ones behind them.
            int left = tile.blocks - 1, ragged = tile.ragged - 1, whole = tile.whole + min(ragged, 0);
            while (left > 0) {
#pragma unroll 1
                for (; ragged > 0; --ragged, --left) turn(Yes());
#pragma unroll 1
                for (; whole > 0; --whole, --left) turn(No());
                ragged = left;
            }
            wgmma_wait<0>();
            hold(o);
            if (used) {
                release(shared.v_empty(v_ring.stage()), thread);
                v_ring.advance();
            }
            hold(p);
            pack<C>(s, p);
            hold(p);
            wait_values();
            start_values(Yes(), v_ring.stage(), grown());
            wgmma_wait<0>();
            hold(o);
            release(shared.v_empty(v_ring.stage()), thread);
            v_ring.advance();
        }
        const Tile done = get_tile(shared.tile(q_ring.stage()));
        __syncwarp();
        release(shared.q_empty(q_ring.stage()), thread);
        q_ring.advance();
        store<C, 0>(a, done, rows, o, row);
        store<C, 1>(a, done, rows, o, row);
    }
}

template <class C>
__device__ __forceinline__ void forward(const Args& a) {
    extern __shared__ u8 dynamic[];
    const Shared<C> shared = {kept((shared_address(dynamic) + 1023) / 1024 * 1024)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::Q_STAGES; ++i) {
            barrier_init(shared.q_full(i), 1);
            barrier_init(shared.q_empty(i), 4 * C::GROUPS);
        }
        for (int i = 0; i < C::STAGES; ++i) {
            barrier_init(shared.k_full(i), 1);
            barrier_init(shared.v_full(i), 1);
            barrier_init(shared.k_empty(i), 4 * C::GROUPS);
            barrier_init(shared.v_empty(i), 4 * C::GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= C::CONSUMERS) {
        if constexpr (C::GROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(C::PRODUCER_REGISTERS));
        if (threadIdx.x == C::CONSUMERS) produce<C>(a, shared);
    } else {
        if constexpr (C::GROUPS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(C::CONSUMER_REGISTERS));
        consume<C>(a, shared);
    }
}

#define PASTED(KIND, DIM, TYPE) forward_##KIND##_##DIM##_##TYPE
#define NAMED(KIND, DIM, TYPE) PASTED(KIND, DIM, TYPE)

// 128 rows, and blocks of 128 keys.
using Long = Config<2, 128, DIM == 128 ? 2 : 4>;
extern "C" __global__ void __launch_bounds__(Long::THREADS_ALL, 1) NAMED(long, DIM, TYPE)(const __grid_constant__ Args a) {
    forward<Long>(a);
}

// 64 rows, and blocks of 64 keys: for packs of short sequences, which move memory more than they multiply.
using Short = Config<1, 64, DIM == 128 ? 2 : 4>;
extern "C" __global__ void __launch_bounds__(Short::THREADS_ALL, 2) NAMED(short, DIM, TYPE)(const __grid_constant__ Args a) {
    forward<Short>(a);
}

#ifdef PLAN
// ---------------------------------------------------------------------------------------------------------------------
// The plan: segments in falling order of their keys, each with all its tiles.

constexpr u32 PLANNERS = 1024;
// Bounds are cut to this; there are no more rows and keys.
constexpr int FAR = 1 << 29;

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
    // Tiles that the plan has room for.
    int tile_capacity;
};

__device__ __forceinline__ i64 span_of(const PlanArgs& a, int s) {
    const i64 end = s + 1 < a.segment_count ? a.segments[s + 1].first_row : a.q_rows;
    return max(min(end, a.q_rows) - max(a.segments[s].first_row, (i64)0), (i64)0);
}
__device__ __forceinline__ u32 tiles_of(const PlanArgs& a, int s) {
    return (u32)((span_of(a, s) + a.tile_rows - 1) / a.tile_rows);
}
__device__ __forceinline__ u32 bucket_of(const PlanArgs& a, int s) {
    return PLANNERS - 1 - (u32)min(max(a.segments[s].keys, (i64)0) / 128, (i64)PLANNERS - 1);
}
__device__ __forceinline__ int bound(i64 value) { return (int)min(max(value, (i64)-FAR), (i64)FAR); }

extern "C" __global__ void __launch_bounds__(PLANNERS, 1) forward_plan(const __grid_constant__ PlanArgs a) {
    __shared__ u32 starts[PLANNERS];
    const u32 lane = threadIdx.x;
    starts[lane] = 0;
    __syncthreads();
    for (int s = lane; s < a.segment_count; s += PLANNERS) atomicAdd(&starts[bucket_of(a, s)], tiles_of(a, s));
    __syncthreads();
    // Tiles of the buckets before.
    const u32 own = starts[lane];
    u32 sum = own;
    for (u32 step = 1; step < PLANNERS; step *= 2) {
        const u32 before = lane >= step ? starts[lane - step] : 0;
        __syncthreads();
        sum += before;
        starts[lane] = sum;
        __syncthreads();
    }
    starts[lane] = sum - own;
    if (lane == PLANNERS - 1) {
        a.plan->tiles = min(sum, (u32)a.tile_capacity);
        a.plan->next = 0;
    }
    __syncthreads();
    for (int s = lane; s < a.segment_count; s += PLANNERS) {
        const QuerySegment segment = a.segments[s];
        const u32 tiles = tiles_of(a, s), first = atomicAdd(&starts[bucket_of(a, s)], tiles);
        a.rows[s] = {
            (int)(segment.q_offset / a.q_step), (int)(segment.q_offset % a.q_step), (int)segment.q_len,
            (int)span_of(a, s), (int)segment.keys, bound(segment.lo), bound(segment.hi), first, tiles,
            (int)segment.first_run, (int)segment.runs, 0,
        };
    }
    for (int r = lane; r < a.run_count; r += PLANNERS) {
        const KeyRun run = a.runs[r];
        a.keys[r] = {(int)(run.offset / a.kv_step), (int)(run.offset % a.kv_step), (int)run.first_key, (int)run.len};
    }
    __syncthreads();
    for (int s = lane / 32; s < a.segment_count; s += PLANNERS / 32) {
        const u32 first = a.rows[s].first_tile, tiles = a.rows[s].tiles;
        for (u32 tile = lane % 32; tile < tiles && first + tile < (u32)a.tile_capacity; tile += 32)
            a.tile_segment[first + tile] = s;
    }
}
#endif
