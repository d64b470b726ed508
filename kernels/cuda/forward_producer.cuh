// The forward's producer, which takes tiles and asks for their rows and keys. For forward.cu.
#pragma once

// Rows and keys are fewer than 2^29, and bounds are cut to that, so that their sums and differences stay in 32 bits. A
// bound below the keys' beginning by more rows than a tile has is as good as any further one.
constexpr int FAR_ROWS = 1024;

// Blocks of a run of which some row sees a key: the first ones, which hold sink tokens, and those from `low` to `high`, which
// hold keys of a span.
struct RunBlocks {
    int first;
    int low;
    int high;

    __device__ __forceinline__ int count() const { return first + high - low; }
    __device__ __forceinline__ int at(int i) const { return i < first ? i : i - first + low; }
};
// Keys that come with a run's first ones, before them.
__device__ __forceinline__ int hidden_before(const PlannedKeys& run) { return IS_FP8 ? (u32)run.index % 16 : 0; }

// Blocks of a run begin at its beginning, or in FP8 with the group of its first key. `sink_tokens`: keys that are seen beside
// the span.
template <class C>
__device__ __forceinline__ RunBlocks blocks_of(const PlannedKeys& run, Span span, int sink_tokens) {
    const int from = max(span.from - run.first, 0), to = min(span.to - run.first, run.len);
    const int hidden = hidden_before(run);
    RunBlocks blocks = {};
    blocks.low = (u32)(from + hidden) / C::KEYS;
    blocks.high = from < to ? (u32)(to + hidden + C::KEYS - 1) / C::KEYS : blocks.low;
    const int first = max(min(sink_tokens - run.first, run.len), 0);
    blocks.first = IS_GENERAL ? (first + C::KEYS - 1) / C::KEYS : 0;
    // Those of the span are not taken twice. Where it has none, it begins anywhere.
    if (blocks.low < blocks.high) blocks.first = min(blocks.first, blocks.low);
    return blocks;
}

// Tensor `which` of q, k and v.
enum { Q, K, V };
template <int WHICH>
__device__ __forceinline__ const TensorMap* map_of(const Args& a) {
    return WHICH == Q ? &a.q : WHICH == K ? &a.k : &a.v;
}

template <int WHICH>
__device__ __forceinline__ void load_rows(
    const Args& a, u32 to, u32 bar, int rows, int head, int phase, int index, int packed_log2 = 0
) {
    if (IS_GENERAL && a.by_threads) {
        bring_elements<WHICH == V ? LANES_OF_V : DIM>(to, a.elements[WHICH], rows, head, phase, index, packed_log2);
        arrive_together(bar);
        return;
    }
    constexpr int COUNT = WHICH == V ? PANELS_OF_V : PANELS;
    expect_together(bar, rows * COUNT * 128);
    if (leads())
#pragma unroll
        for (int panel = 0; panel < COUNT; ++panel)
            load_box(to + panel * rows * 128, map_of<WHICH>(a), bar, panel * PANEL_LANES, head, phase, index);
}

// KEYS rows of K or V; in a cluster the part of this block's rank, for all its blocks.
template <class C, int WHICH>
__device__ __forceinline__ void load_keys(const Args& a, u32 to, u32 bar, int head, int phase, int index) {
    if constexpr (IS_FP8 && WHICH == V) {
        // Columns: KEYS of each lane.
        barrier_expect(bar, C::V_BYTES);
        load_box(to, &a.v, bar, index, 0, 0, head);
    } else if constexpr (C::CLUSTER == 1) {
        load_rows<WHICH>(a, to, bar, C::KEYS, head, phase, index);
    } else {
        constexpr int PART = C::KEYS / C::CLUSTER;
        const int first = cluster_rank() * PART;
        barrier_expect(bar, C::KEYS * DIM * 2);
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
            load_box_for((1 << C::CLUSTER) - 1, to + (panel * C::KEYS + first) * 128, map_of<WHICH>(a), bar, panel * 64, head,
                         phase, index + first);
    }
}

// The items of a launch, one after the other; those of a cluster are taken by its first block, one ahead, for all its blocks.
template <class C>
struct Items {
    const Args& a;
    const Shared<C>& shared;
    Ring<2> ring;

    __device__ __forceinline__ u32 take() const { return take_next(&a.plan->next); }
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

template <class C>
__device__ __forceinline__ void produce(const Args& a, const Shared<C>& shared) {
    Ring<2> tile_ring;
    auto q_ring = [&]() { return Ring<C::Q_STAGES>{tile_ring.turns}; };
    Ring<C::K_STAGES> ring;
    Items<C> items = {a, shared, {}};
    for (;;) {
        const u32 item = items.next();
        if (item >= a.plan->tiles * a.heads) break;
        const u32 segment = a.tile_segment[item / a.heads];
        const PlannedRows& rows = a.rows[segment];
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
        if constexpr (IS_FP8) {
            const u32 of_q = segment * a.heads + head, of_kv = of_q / a.group;
            put_four(tile, 3, __float_as_int(a.scale * a.descales[Q][of_q] * a.descales[K][of_kv]),
                     __float_as_int(a.descales[V][of_kv]), rows.runs > 0 ? hidden_before(a.keys[rows.first_run]) : 0, 0);
        }
        put_four(tile, 0, rows.index + first, rows.phase, head, min(rows.span, end) - first);
        const Bounds bounds = {max(first + rows.lo, -FAR_ROWS), max(first + rows.hi, -FAR_ROWS)};
        put_four(tile, 1, min(last - first, C::ROWS), bounds.lo, bounds.hi, rows.keys);
        const Span seen = span_seen({first_of_cluster + rows.lo, first_of_cluster + rows.hi}, last - first_of_cluster,
                                    rows.keys);
        const int sink_tokens = IS_GENERAL ? min(rows.sink_tokens, seen.to) : 0;
        if constexpr (IS_GENERAL) put_four(tile, 3, rows.sink_tokens, 0, 0, 0);
        const u32 first_run = rows.first_run;
        auto run_of = [&](int r) -> const PlannedKeys& { return a.keys[first_run + r]; };
        const int run_count = seen.from < seen.to || sink_tokens > 0 ? rows.runs : 0;
        int blocks = 0;
        RunBlocks of_run = {};
        for (int r = 0; r < run_count; ++r) {
            of_run = blocks_of<C>(run_of(r), seen, sink_tokens);
            blocks += of_run.count();
        }
        const bool alone = run_count == 1 && sink_tokens <= 0;
        put_four(tile, 2, blocks, of_run.high, of_run.low, alone ? run_of(0).len + hidden_before(run_of(0)) : -1);
        barrier_wait(shared.q_empty(q_ring().stage()), q_ring().parity() ^ 1);
        if (blocks == 0)
            arrive_together(shared.q_full(q_ring().stage()));
        else
            load_rows<Q>(a, shared.q(q_ring().stage()), shared.q_full(q_ring().stage()), C::ROWS, head, rows.phase,
                         rows.index + first, packed_log2<C>(a));
        tile_ring.advance();
        if (blocks == 0) continue;

        const int kv_head = pack / a.group;
        // V of a block is asked for after K of the next.
        int v_phase = 0, v_index = -1;
        auto load_v = [&](Ring<C::V_STAGES> of) {
            barrier_wait(shared.v_empty(of.stage()), of.parity() ^ 1);
            load_keys<C, V>(a, shared.v(of.stage()), shared.v_full(of.stage()), kv_head, v_phase, v_index);
        };
        for (int r = run_count - 1; r >= 0; --r) {
            const PlannedKeys& run = run_of(r);
            const int hidden = hidden_before(run);
            of_run = blocks_of<C>(run, seen, sink_tokens);
            for (int i = of_run.count() - 1; i >= 0; --i) {
                barrier_wait(shared.k_empty(ring.stage()), ring.parity() ^ 1);
                const int key = of_run.at(i) * C::KEYS - hidden;
                put_block(shared.block(ring.stage()),
                          {run.first + key, run.first + min(key + C::KEYS, run.len), max(-key, 0)});
                load_keys<C, K>(a, shared.k(ring.stage()), shared.k_full(ring.stage()), kv_head, IS_FP8 ? 0 : run.phase,
                                run.index + key);
                if (v_index >= 0) load_v({ring.turns - 1});
                v_index = run.index + key, v_phase = IS_FP8 ? 0 : run.phase;
                ring.advance();
            }
        }
        load_v({ring.turns - 1});
    }
    items.end();
    barrier_wait(shared.tile_empty(tile_ring.stage()), tile_ring.parity() ^ 1);
    put_four(shared.tile(tile_ring.stage()), 2, -1, 0, 0, 0);
    barrier_wait(shared.q_empty(q_ring().stage()), q_ring().parity() ^ 1);
    arrive_together(shared.q_full(q_ring().stage()));
}
