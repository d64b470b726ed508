// Tiles of the backward, the shared memory of a block that takes them, and the threads that move rows: the producer and the
// adders. For backward.cu.
#pragma once

// Who sees what: key k is seen by row r where r + lo <= k <= r + hi.
struct Sight {
    int lo;
    int hi;
    // The first key among those of its segment.
    int key;
    // Real keys, which may be less than 0.
    int real;
    // Real query rows, and the tiles of them that see a key; none: an empty range; no more tiles: -1.
    int rows;
    int first;
    int end;
    // Where tiles describe rows: turns with more than half of this left, rounded down, do; their phases are counted from its
    // lowest bit. In a general instance and in FP8, where none do: the segment's number.
    int opening;
};

// Keys of a KV head.
struct Tile : Sight {
    int index;
    int phase;
    int head;
    // Owned keys, which may be more than the tile has.
    int owned;
    // The first tile of query rows in the order of the plan.
    u32 q_tile;
    // Its run, those where tiles are that add before it, and the tile within its run.
    int run;
    int runs_from;
    int runs_end;
    int in_run;
    // The tiles whose rows are all real and all see all keys, which are all real.
    int whole;
    int whole_end;
    // Where the segment's query rows are, and how many it owns.
    int q_index;
    int q_phase;
    int q_owned;
    // Whose sums it opens and closes, in tiles of query rows: those with more than `opens` left of its walk, the tile itself
    // counted, and those with `closes` at most.
    int opens;
    int closes;
};
constexpr int TILE_WORDS = sizeof(Tile) / 4;

// How a tile of keys goes through tiles of query rows in the short form.
struct Walk {
    // The first of them.
    int start;
    // Its number among its segment's tiles of keys that go around, and how many these are; 0: it does not.
    int place;
    int places;
    // How many items are taken when all that it waits for are.
    u32 taken;
};
static_assert(sizeof(Tile) + sizeof(Walk) <= 128 && TILE_WORDS % 4 == 0 && sizeof(Walk) == 16, "a tile has no place");

// A block's shared memory: barriers and two tiles in the first kilobyte, then K and V, rings of Q and dout, dS twice, dQ,
// statistics of the ring's rows, and out. In FP8 turned copies are behind K and V and behind dout, and rows on their way out
// are behind dQ. Addresses.
struct Shared {
    u32 base;

    // The same, of which nothing is known: addresses are made from it when they are needed, and not kept.
    __device__ __forceinline__ Shared again() const { return {kept(base)}; }
    // A tile's K and V are there, or it needs none; a tile is read no more; a tile is there.
    __device__ __forceinline__ u32 kv_full(u32 number) const { return base + 8 * number; }
    __device__ __forceinline__ u32 kv_empty(u32 number) const { return base + 16 + 8 * number; }
    __device__ __forceinline__ u32 tile_full(u32 number) const { return base + 32 + 8 * number; }
    // Out of rows that are opened is there; their D is.
    __device__ __forceinline__ u32 out_full() const { return base + 48; }
    __device__ __forceinline__ u32 d_full() const { return base + 56; }
    // All consumers are here, in a turn of which one group sees nothing. Where dQ is late: dS of a turn is there, and that of the turn
    // before is read no more.
    __device__ __forceinline__ u32 met() const { return base + 80; }
    __device__ __forceinline__ u32 q_full(u32 stage) const { return base + 64 + 8 * stage; }
    __device__ __forceinline__ u32 q_empty(u32 stage) const { return base + 128 + 8 * stage; }
    __device__ __forceinline__ u32 dout_full(u32 stage) const { return base + 192 + 8 * stage; }
    __device__ __forceinline__ u32 dout_empty(u32 stage) const { return base + 256 + 8 * stage; }
    // One for each adder, who take turns with the one place.
    __device__ __forceinline__ u32 dq_full(u32 group, u32 turn) const { return base + 320 + 16 * group + 8 * (turn % ADDERS); }
    __device__ __forceinline__ u32 dq_empty(u32 group, u32 turn) const { return base + 384 + 16 * group + 8 * (turn % ADDERS); }
    // Sums to be closed are in the place.
    __device__ __forceinline__ u32 dq_ready(u32 group, u32 turn) const { return base + 448 + 16 * group + 8 * (turn % ADDERS); }
    __device__ __forceinline__ u32 tile(u32 number) const { return base + 512 + 128 * number; }
    __device__ __forceinline__ u32 k() const { return base + 1024; }
    __device__ __forceinline__ u32 v() const { return k() + KV_BYTES; }
    __device__ __forceinline__ u32 turned_k() const { return v() + KV_BYTES; }
    __device__ __forceinline__ u32 q(u32 stage) const { return turned_k() + TURNED_K_BYTES + stage * Q_BYTES; }
    __device__ __forceinline__ u32 dout(u32 stage) const { return q(STAGES) + stage * Q_BYTES; }
    __device__ __forceinline__ u32 turned_q(u32 stage) const { return dout(STAGES) + stage * TURNED_Q_BYTES; }
    __device__ __forceinline__ u32 ds(u32 turn) const { return turned_q(STAGES) + turn % STAGES * DS_BYTES; }
    __device__ __forceinline__ u32 dq(u32 group) const { return turned_q(STAGES) + STAGES * DS_BYTES + group * PART_BYTES; }
    __device__ __forceinline__ u32 outward() const { return dq(GROUPS); }
    __device__ __forceinline__ u32 statistics(u32 stage) const { return outward() + OUTWARD_BYTES + stage * STATISTICS * 4; }
    // In FP8: the largest |dS| of each warp, and the inverses of the factors of groups. One place for each parity of turns.
    __device__ __forceinline__ u32 largest(u32 turn) const { return base + 768 + turn % 2 * 32; }
    __device__ __forceinline__ u32 inverses(u32 turn) const { return base + 832 + turn % 2 * 8; }
    __device__ __forceinline__ u32 out() const { return statistics(STAGES); }
};

__device__ __forceinline__ void put_tile(u32 at, const Tile& tile) {
    const int* const w = (const int*)&tile;
#pragma unroll
    for (int i = 0; i < TILE_WORDS; i += 4) put_words(at + 4 * i, w[i], w[i + 1], w[i + 2], w[i + 3]);
}
__device__ __forceinline__ Walk get_walk(u32 tile) {
    const int4 four = get_words(tile + 4 * TILE_WORDS);
    return {four.x, four.y, four.z, (u32)four.w};
}
// A tile, or what of it comes first: a Sight.
template <class T = Tile>
__device__ __forceinline__ T get_tile(u32 at) {
    T tile;
    int* const w = (int*)&tile;
#pragma unroll
    for (int i = 0; i < sizeof(T) / 4; i += 4) {
        const int4 four = get_words(at + 4 * i);
        w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
    }
    return tile;
}

// The own bounds of a tile's segment.
__device__ __forceinline__ Widened get_widened(const Args& a, const Sight& tile) {
    if (!IS_GENERAL) return {};
    return a.segments[tile.opening].own;
}

__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ void add_release(u32* to, u32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// ---------------------------------------------------------------------------------------------------------------------
// The producer: takes tiles, and asks for their rows.

// Whether the walks of a KV head's tiles go up. All walks of the short form have one direction.
template <bool SHORT>
__device__ __forceinline__ bool goes_up(const Args& a, int head) {
    return SHORT ? a.down == 0 : ((head | EVERY) & a.down) == 0;
}

// What a tile of keys opens and closes: rows that see no key before it, or none behind it.
template <bool SHORT>
__device__ __forceinline__ void set_ends(const Args& a, const PlannedSegment& segment, Tile& tile) {
    const int behind = tile.key + tile.real;
    // From `low` on no key before, up to `high` no key behind.
    const int low = tile.key <= 0 ? tile.first : max(tile.key - tile.lo + ROWS - 1, 0) / ROWS;
    const int high = behind >= min(segment.keys, tile.rows + tile.hi) ? tile.end : max(behind - tile.hi, 0) / ROWS;
    const int opens = goes_up<SHORT>(a, tile.head) ? tile.end - high : low - tile.first;
    const int closes = goes_up<SHORT>(a, tile.head) ? tile.end - low : high - tile.first;
    // No further than the walk, as they are multiplied with the heads of a group: far bounds and 256 heads are 2^31.
    tile.opens = min(max(opens, 0), tile.end - tile.first);
    tile.closes = min(max(closes, 0), tile.end - tile.first);
}

// The tile of an item: heads in chunks (`head_chunk`), and in a chunk first the tiles that add first.
template <bool SHORT>
__device__ __forceinline__ Tile tile_of(const Args& a, u32 item) {
    const int kv_heads = a.heads / a.group;
    const PlannedSegment& segment = a.segments[a.kv_tile_segment[item / kv_heads]];
    u32 rest = item - segment.first_kv_tile * kv_heads;
    const u32 most = a.head_chunk > 0 ? a.head_chunk : max(gridDim.x / segment.kv_tiles, 1u);
    const u32 chunk = rest / (segment.kv_tiles * most);
    rest -= chunk * segment.kv_tiles * most;
    const u32 heads = min(most, kv_heads - chunk * most);
    const int head = chunk * most + rest % heads;
    const u32 number = goes_up<SHORT>(a, head) ? segment.kv_tiles - 1 - rest / heads : rest / heads;
    int run = 0;
    while (run + 1 < segment.runs && a.runs[segment.first_run + run + 1].first_tile <= number) ++run;
    const PlannedRun& keys = a.runs[segment.first_run + run];
    Tile tile = {};
    tile.in_run = number - keys.first_tile;
    const int first = tile.in_run * KEYS;
    tile.index = keys.index + first, tile.phase = keys.phase;
    tile.head = head;
    tile.real = min(keys.len - first, KEYS), tile.owned = keys.span - first;
    tile.key = keys.first + first;
    tile.lo = segment.lo, tile.hi = segment.hi;
    tile.rows = segment.len;
    const Range seeing = rows_seeing(tile.key, tile.real, tile.lo, tile.hi, tile.rows);
    tile.first = seeing.from / ROWS;
    tile.end = (seeing.to + ROWS - 1) / ROWS;
    tile.q_tile = segment.first_q_tile;
    tile.run = segment.first_run + run;
    tile.runs_from = goes_up<SHORT>(a, head) ? tile.run : segment.first_run;
    tile.runs_end = goes_up<SHORT>(a, head) ? segment.first_run + segment.runs : tile.run + 1;
    tile.whole = max(tile.key + KEYS - 1 - segment.own.hi + ROWS - 1, 0) / ROWS;
    tile.whole_end = tile.real < KEYS ? 0 : min(tile.rows, max(tile.key - segment.own.lo + 1, 0)) / ROWS;
    if (IS_GENERAL || IS_FP8) tile.opening = a.kv_tile_segment[item / kv_heads];
    tile.q_index = segment.index, tile.q_phase = segment.phase, tile.q_owned = segment.span;
    set_ends<SHORT>(a, segment, tile);
    return tile;
}

// The tile of query rows that a walk over a tile's begins with.
template <bool SHORT>
__device__ __forceinline__ int start_of(const Args& a, const Tile& tile) {
    return goes_up<SHORT>(a, tile.head) ? tile.first : tile.end - 1;
}
template <bool SHORT>
__device__ __forceinline__ int start_of(const Args& a, const Tile& tile, u32 at) {
    return SHORT ? get_walk(at).start : start_of<SHORT>(a, tile);
}
// Where a walk is that has come to `t`: one that goes around begins again behind the last.
template <bool SHORT>
__device__ __forceinline__ int around(int t, int end) { return SHORT && t >= end ? t - end : t; }

// Where tile `place` of `places` that go around begins.
__device__ __forceinline__ int start_around(int place, int places, int tiles) {
    return (int)((u32)(place * tiles) / (u32)places);
}

// From a tile of query rows of a walk to the next.
template <bool SHORT>
__device__ __forceinline__ int step_of(const Args& a, int head) { return goes_up<SHORT>(a, head) ? 1 : -1; }

template <int WHICH>
__device__ __forceinline__ const TensorMap* map_of(const Args& a) {
    return WHICH == Q ? &a.q : WHICH == K ? &a.k : WHICH == V ? &a.v : &a.dout;
}

__device__ __forceinline__ void load_panels(
    u32 to, const TensorMap* map, u32 bar, int rows, int head, int phase, int index
) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
        load_box(to + panel * rows * 128, map, bar, panel * 64, head, phase, index);
}

// Rows of a tensor. What the copy engine brings is expected by whoever calls; what threads bring is there.
template <int WHICH>
__device__ __forceinline__ void load(const Args& a, u32 to, u32 bar, int rows, int head, int phase, int index) {
    if (!by_engine(a)) bring_elements(to, a.elements[WHICH], rows, head, phase, index);
    else if (leads()) load_panels(to, map_of<WHICH>(a), bar, rows, head, phase, index);
}

// Brings a tile's keys into the L2 cache while their place is taken.
__device__ __forceinline__ void fetch_keys(const Args& a, const Tile& tile) {
    if (!by_engine(a) || !leads()) return;
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
        fetch_box(&a.k, panel * 64, tile.head, tile.phase, tile.index);
        fetch_box(&a.v, panel * 64, tile.head, tile.phase, tile.index);
    }
}

// K and V of tile `number`, of which there is one place: it is free when the turn before the ring's has given its dout back, after
// its last product with keys.
__device__ __forceinline__ void load_keys(const Args& a, const Shared& shared, const Ring<STAGES>& ring, u32 number) {
    const Ring<STAGES> last = {ring.turns + STAGES - 1};
    barrier_wait(shared.dout_empty(last.stage()), last.parity() ^ 1);
    const Tile tile = get_tile(shared.tile(number));
    const u32 full = shared.kv_full(number);
    if (by_engine(a)) expect_together(full, 2 * KV_BYTES + TURNED_K_BYTES);
    if constexpr (IS_FP8) {
        const u32 place = a.segments[tile.opening].first_kv_tile + a.runs[tile.run].first_tile + tile.in_run;
        const i64 of = (i64)place * (a.heads / a.group) + tile.head;
        load_bulk(shared.turned_k(), a.turned_k + of * TURNED_K_BYTES, full, TURNED_K_BYTES);
    }
    load<K>(a, shared.k(), full, KEYS, tile.head, tile.phase, tile.index);
    load<V>(a, shared.v(), full, KEYS, tile.head, tile.phase, tile.index);
    if (!by_engine(a)) arrive_together(full);
}

// Query rows of a head, their dout, and statistics where the first kernel has made them.
template <bool SHORT>
__device__ __forceinline__ void load_queries(
    const Args& a, const Shared& shared, const Ring<STAGES>& ring, u32 q_tile, int t, int head, int phase, int index
) {
    const u32 stage = ring.stage(), parity = ring.parity() ^ 1;
    barrier_wait(shared.q_empty(stage), parity);
    constexpr u32 NUMBERS = STATISTICS * 4, BESIDE = SHORT ? 0 : NUMBERS + TURNED_Q_BYTES;
    if (by_engine(a)) expect_together(shared.q_full(stage), Q_BYTES + BESIDE);
    load<Q>(a, shared.q(stage), shared.q_full(stage), ROWS, head, phase, index);
    if (!by_engine(a)) expect_together(shared.q_full(stage), BESIDE);
    const i64 part = part_of(a, q_tile + t, head);
    if (!SHORT && leads())
        load_bulk(shared.statistics(stage), a.statistics + part * STATISTICS, shared.q_full(stage), NUMBERS);
    if constexpr (IS_FP8)
        load_bulk(shared.turned_q(stage), a.turned_q + part * TURNED_Q_BYTES, shared.q_full(stage), TURNED_Q_BYTES);
    barrier_wait(shared.dout_empty(stage), parity);
    if (by_engine(a)) expect_together(shared.dout_full(stage), Q_BYTES);
    load<DOUT>(a, shared.dout(stage), shared.dout_full(stage), ROWS, head, phase, index);
    if (!by_engine(a)) arrive_together(shared.dout_full(stage));
}

// Puts the walk of a tile that is in its place, which is an item. Rows are opened by the tile of keys that begins last before them;
// then come those that began before that one, and what a tile closes is what the one behind it opened.
__device__ __forceinline__ void put_walk(const Args& a, u32 at, u32 item) {
    const Tile tile = get_tile(at);
    Walk walk = {start_of<true>(a, tile), 0, 0, 0};
    const PlannedSegment& segment = a.segments[a.kv_tile_segment[item / (a.heads / a.group)]];
    const bool neighbours = goes_up<true>(a, tile.head) && a.head_chunk == 1;
    if (tile.first < tile.end && neighbours && segment.around > 0 && segment.around <= gridDim.x) {
        const int tiles = tile.end, places = segment.around, place = a.runs[tile.run].first_tile + tile.in_run;
        walk = {start_around(place, places, tiles), place, places, item + place + 1};
        const int behind = place > 0 ? start_around(place - 1, places, tiles) : start_around(places - 1, places, tiles) - tiles;
        const int opens = tiles - (start_around(place + 1, places, tiles) - walk.start), closes = walk.start - behind;
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at + 4 * TILE_WORDS - 8), "r"(opens), "r"(closes) : "memory");
    }
    put_words(at + 4 * TILE_WORDS, walk.start, walk.place, walk.places, walk.taken);
}

// Puts the `opening` of a tile that is in its place, behind that of the tile before.
__device__ __forceinline__ void put_opening(const Args& a, const Shared& shared, const Ring<TILES>& tiles) {
    const Tile tile = get_tile(shared.tile(tiles.stage()));
    const u32 before = tiles.turns == 0 ? 0 : get_tile<Sight>(shared.tile(tiles.stage() ^ 1)).opening;
    const int turns = (tile.end - tile.first) * a.group;
    const int opening = 2 * tile.opens * a.group + ((before ^ before >> 1) + turns) % 2;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared.tile(tiles.stage()) + 28), "r"(opening) : "memory");
}

// Hands a tile, which is an item, to all others, once its place is free. Its rows may come later.
template <bool SHORT>
__device__ __forceinline__ void hand_over(
    const Args& a, const Shared& shared, const Ring<TILES>& tiles, const Tile& tile, u32 item
) {
    const u32 number = tiles.stage();
    barrier_wait(shared.kv_empty(number), tiles.parity() ^ 1);
    put_tile(shared.tile(number), tile);
    if constexpr (SHORT) {
        if (tile.first >= 0) put_walk(a, shared.tile(number), item);
        put_opening(a, shared, tiles);
        barrier_arrive(shared.tile_full(number));
    }
    if (tile.first >= tile.end) arrive_together(shared.kv_full(number));
}

__device__ __forceinline__ void wait_taken(const Args& a, u32 items) {
    while (load_acquire(&a.plan->next) < items) {}
}

template <bool SHORT>
__device__ __forceinline__ void produce(const Args& a, const Shared& all) {
    Ring<TILES> tiles;
    Ring<STAGES> ring;
    for (;; tiles.advance()) {
        if (SHORT && tiles.turns > 0) wait_taken(a, get_walk(all.tile(tiles.stage() ^ 1)).taken);
        // Read for each item: there are no registers to keep it in.
        const u32 items = *(const volatile u32*)&a.plan->kv_tiles * (a.heads / a.group), item = take_next(&a.plan->next);
        // What is read of the tile is not asked for before: there are no registers for it.
        if constexpr (SHORT) __syncwarp(1);
        if (item >= items) break;
        Tile tile = tile_of<SHORT>(a, item);
        if (tile.first < tile.end) fetch_keys(a, tile);
        const Shared shared = all.again();
        hand_over<SHORT>(a, shared, tiles, tile, item);
        if (SHORT) tile = get_tile(shared.tile(tiles.stage()));
        if (tile.first >= tile.end) continue;
        const int phase = tile.q_phase, index = tile.q_index, head = tile.head;
        const u32 q_tile = tile.q_tile;
        const int turns = (tile.end - tile.first) * a.group;
        int t = start_of<SHORT>(a, tile, shared.tile(tiles.stage())), i = 0;
        const int end = tile.end;
#pragma unroll 1
        for (int turn = 0; turn < turns; ++turn) {
            load_queries<SHORT>(a, all.again(), ring, q_tile, t, head * a.group + i, phase, index + t * ROWS);
            // The place of the first rows is free before that of the keys is.
            if (turn == 0) load_keys(a, all.again(), ring, tiles.stage());
            ring.advance();
            if (++i == a.group) i = 0, t = around<SHORT>(t + step_of<SHORT>(a, head), end);
        }
    }
    Tile none = {};
    none.first = none.end = -1;
    hand_over<SHORT>(a, all.again(), tiles, none, 0);
}

// A tile's keys.
__device__ __forceinline__ Rows keys_of_tile(const Args& a, const Tile& done) {
    return {done.index, done.phase, a.kv_step, done.head, done.real, done.owned};
}

// The query rows of a turn: tile `t` of them, and a head of the group.
__device__ __forceinline__ Rows rows_of_turn(const Args& a, const Tile& tile, int t, int member) {
    const int first = t * ROWS, head = tile.head * a.group + member;
    return {tile.q_index + first, tile.q_phase, a.q_step, head, tile.rows - first, tile.q_owned - first};
}

// ---------------------------------------------------------------------------------------------------------------------
// The adders: add dQ of each tile to the sums in memory.

// Tiles of keys that rows `first` to `end` see and that add before this one.
template <bool SHORT>
__device__ __forceinline__ u32 tiles_before(const Args& a, const Tile& tile, int first, int end) {
    u32 count = 0;
#pragma unroll 1
    for (int r = tile.runs_from; r < tile.runs_end; ++r) {
        const PlannedRun& run = a.runs[r];
        const int from = max(first + tile.lo - run.first, 0), to = min(end + tile.hi - run.first, run.len);
        if (from >= to) continue;
        const bool own = r == tile.run;
        const int low = own && goes_up<SHORT>(a, tile.head) ? tile.in_run + 1 : from / KEYS;
        const int high = own && !goes_up<SHORT>(a, tile.head) ? tile.in_run : (to + KEYS - 1) / KEYS;
        count += max(high - low, 0);
    }
    return count;
}

// The same of tiles that go around, at tile `t` of query rows.
__device__ __forceinline__ u32 tiles_before(const Walk& walk, int t, int tiles) {
    const u32 opener = (u32)((t + 1) * walk.places - 1) / (u32)tiles;
    return (opener + walk.places - walk.place) % walk.places;
}

// Orders ordinary accesses of memory and those of the copy engine.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Until it is a tile's turn: all that add before it have, or, between the first and the last in any order, the first. `at`: the
// tile.
template <bool SHORT>
__device__ __forceinline__ void wait_turn(const Args& a, const Tile& tile, u32 at, int t, i64 part, bool closes) {
    const bool all = closes || a.fixed;
    const Walk walk = SHORT ? get_walk(at) : Walk{};
    const u32 least = !all              ? 1
                      : walk.places > 0 ? tiles_before(walk, t, tile.end)
                                        : tiles_before<SHORT>(a, tile, t * ROWS, min((t + 1) * ROWS, tile.rows));
    while (load_acquire(a.added + part) < least) {}
    proxy_fence();
}

// Ends a phase in which no consumer waits for sums to be closed. It is waited for here, as one that nobody waits for is an error
// to tools that check barriers.
__device__ __forceinline__ void pass_ready(const Shared& shared, u32 group, u32 turn) {
    barrier_arrive(shared.dq_ready(group, turn));
    barrier_wait(shared.dq_ready(group, turn), turn / ADDERS % 2);
}

// dQ of a tile of query rows and a head, from both consumers.
__device__ __forceinline__ void add_part(const Shared& shared, u32 turn, float* sums, bool opens) {
    for (int group = 0; group < GROUPS; ++group) {
        pass_ready(shared, group, turn);
        barrier_wait(shared.dq_full(group, turn), turn / ADDERS % 2);
        float* const to = sums + group * (PART_BYTES / 4);
        if (opens) store_bulk(to, shared.dq(group), PART_BYTES);
        else add_bulk(to, shared.dq(group), PART_BYTES);
        bulk_commit();
    }
    bulk_wait_read<1>();
    barrier_arrive(shared.dq_empty(0, turn));
    bulk_wait_read<0>();
    barrier_arrive(shared.dq_empty(1, turn));
}

// Brings consumers the sums that they close; their dQ goes another way, and the place is free at once.
__device__ __forceinline__ void close_part(const Shared& shared, u32 turn, const float* sums, bool opens) {
    for (int group = 0; group < GROUPS; ++group) {
        const u32 ready = shared.dq_ready(group, turn);
        barrier_wait(shared.dq_empty(group, turn - 1), (turn - 1) / ADDERS % 2);
        if (opens) {
            pass_ready(shared, group, turn);
        } else {
            barrier_expect(ready, PART_BYTES);
            load_bulk(shared.dq(group), sums + group * (PART_BYTES / 4), ready, PART_BYTES);
        }
    }
    for (int group = 0; group < GROUPS; ++group) {
        barrier_wait(shared.dq_full(group, turn), turn / ADDERS % 2);
        barrier_arrive(shared.dq_empty(group, turn));
    }
}

// dQ of a turn: a tile of query rows, with `left` of the walk, and a head. `at`: the tile of keys.
template <bool SHORT>
__device__ __forceinline__ void add_turn(
    const Args& a, const Shared& shared, const Tile& tile, u32 at, u32 turn, int left, int t, int head
) {
    const bool opens = left > tile.opens, closes = left <= tile.closes;
    const i64 part = part_of(a, tile.q_tile + t, head);
    float* const sums = a.sums + part * SUMS;
    if (!opens) wait_turn<SHORT>(a, tile, at, t, part, closes);
    if (closes) {
        close_part(shared, turn, sums, opens);
        return;
    }
    add_part(shared, turn, sums, opens);
    bulk_wait();
    proxy_fence();
    add_release(a.added + part, 1);
}

// One of the adders: they take turns, so that one waits for its additions to be made while the other asks for the next.
template <bool SHORT>
__device__ __forceinline__ void add(const Args& a, const Shared& shared, u32 mine) {
    u32 turn = 0;
    for (Ring<TILES> tiles;; tiles.advance()) {
        barrier_wait(SHORT ? shared.tile_full(tiles.stage()) : shared.kv_full(tiles.stage()), tiles.parity());
        const u32 at = shared.tile(tiles.stage());
        const Tile tile = get_tile(at);
        int t = start_of<SHORT>(a, tile, at);
        if (!SHORT) barrier_arrive(shared.kv_empty(tiles.stage()));
        if (tile.first < 0) return;
        for (int left = tile.end - tile.first; left > 0; --left, t = around<SHORT>(t + step_of<SHORT>(a, tile.head), tile.end))
            for (int i = 0; i < a.group; ++i, ++turn)
                if (turn % ADDERS == mine)
                    add_turn<SHORT>(a, shared.again(), tile, at, turn, left, t, tile.head * a.group + i);
        // Its number is made again, as it would be kept over all turns.
        if (SHORT) barrier_arrive(shared.kv_empty(kept(tiles.turns) % TILES));
    }
}
