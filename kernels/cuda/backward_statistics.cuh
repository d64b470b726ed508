// Statistics of query rows: LSE, and D = <dout, out>. For backward.cu.
//
// The tile of keys that opens a tile of rows makes them. A warp beside the producer brings LSE and out to shared memory; consumers,
// who have dout there, make D while their first products are under way. Where other tiles of keys see the rows too the warp
// writes both to memory and says so; those wait for that, and have them from there.
#pragma once

__device__ __forceinline__ Packed<TYPE, 8> get_packed(u32 at) {
    const int4 four = get_words(at);
    return {{(u32)four.x, (u32)four.y, (u32)four.z, (u32)four.w}};
}

// Of eight lanes.
__device__ __forceinline__ float product(u32 dout, u32 out) {
    const Packed<TYPE, 8> x = get_packed(dout), y = get_packed(out);
    float d = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) d = __fmaf_rn(unpacked(x, j), unpacked(y, j), d);
    return d;
}

// D of a stage's rows, of which `real` are real, in a phase of those that are opened: all consumers, a warp some of the rows. A
// row's lanes are added up by eights: those that are four eights apart, panels, and others that are neighbours at last. dout and
// out are swizzled alike, which gives the eights of a panel other places and leaves those together that are added up together.
__device__ __forceinline__ void make_d(const Shared& shared, u32 stage, u32 phase, int real) {
    constexpr int EACH = ROWS / (CONSUMERS / 32), LANES = 32 / EACH;
    const u32 thread = kept(threadIdx.x), r = thread / LANES;
    barrier_wait(shared.out_full(), phase % 2);
    float d = 0.0f;
#pragma unroll 1
    for (u32 panel = 0; panel < PANELS; ++panel) {
        const u32 row = panel * ROWS * 128 + r * 128;
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 4; i += LANES) {
            const u32 one = row + (thread + i) % 8 * 16, other = row + (thread + i + 4) % 8 * 16;
            sum += product(shared.dout(stage) + one, shared.out() + one) +
                   product(shared.dout(stage) + other, shared.out() + other);
        }
        d += sum;
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) d += __shfl_xor_sync(FULL, d, step);
    if (thread % LANES == 0) put_one(shared.statistics(stage) + 4 * (ROWS + r), (int)r < real ? d : 0.0f);
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(shared.d_full());
}

// A turn: tile `t` of a tile's query rows and a head of the group. The tile is read again where it is needed, for registers.
struct Turn {
    u32 at;
    int left;
    int t;
    int member;

    __device__ __forceinline__ Rows rows(const Args& a) const { return rows_of_turn(a, get_tile(at), t, member); }
    __device__ __forceinline__ i64 part(const Args& a) const {
        const Tile tile = get_tile(at);
        return part_of(a, tile.q_tile + t, tile.head * a.group + member);
    }
    __device__ __forceinline__ bool opens() const { return 2 * left > get_tile<Sight>(at).opening; }
    // Of out and D, where it opens.
    __device__ __forceinline__ u32 phase() const { return (left + get_tile<Sight>(at).opening) % 2; }
    __device__ __forceinline__ bool closes(const Args& a) const { return left <= get_tile(at).closes * a.group; }
};

// LSE and out of a turn whose rows are opened. A lane has rows 32 apart.
__device__ __forceinline__ void bring_rows(const Args& a, const Shared& shared, const Ring<STAGES>& ring, const Turn& turn) {
    const u32 stage = ring.stage(), lane = threadIdx.x % 32;
    const Rows rows = turn.rows(a);
    if (lane == 0) {
        barrier_expect(shared.out_full(), Q_BYTES);
        load_panels(shared.out(), &a.saved, shared.out_full(), ROWS, rows.head, rows.phase, rows.index);
    }
    float lse[ROWS / 32];
#pragma unroll
    for (int i = 0; i < ROWS / 32; ++i) {
        const i64 at = (i64)rows.step * (rows.index + min((int)lane + 32 * i, rows.real - 1)) + rows.phase;
        lse[i] = ((const float*)a.lse.base)[place_of(a.lse, at, rows.head)];
    }
    barrier_wait(shared.q_empty(stage), ring.parity() ^ 1);
    const int real = rows.real - lane;
#pragma unroll
    for (int i = 0; i < ROWS / 32; ++i)
        put_one(shared.statistics(stage) + 4 * lane + 128 * i, lse_if(32 * i < real, lse[i]));
}

// Has a turn's statistics, which the tile of keys that opened its rows has made.
__device__ __forceinline__ void fetch_statistics(const Args& a, const Shared& shared, const Ring<STAGES>& ring, i64 part) {
    const float* const from = a.statistics + part * STATISTICS + threadIdx.x % 32 * 4;
    while (load_acquire(a.described + part) == 0) {}
    // Some, where there is no short form.
    constexpr int COUNT = STATISTICS < 128 ? 1 : STATISTICS / 128;
    float4 four[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) four[i] = *(const float4*)(from + 128 * i);
    barrier_wait(shared.q_empty(ring.stage()), ring.parity() ^ 1);
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        put_four(shared.statistics(ring.stage()) + threadIdx.x % 32 * 16 + 512 * i, four[i]);
}

// What has been made of a turn, for tiles of keys that see its rows too.
__device__ __forceinline__ void share_statistics(const Args& a, u32 from, i64 part) {
    float* const to = a.statistics + part * STATISTICS;
#pragma unroll
    for (int i = threadIdx.x % 32 * 4; i < STATISTICS; i += 128) *(float4*)(to + i) = get_four(from + 4 * i);
    __syncwarp();
    if (threadIdx.x % 32 == 0) add_release(a.described + part, 1);
}

// A turn's statistics.
__device__ __forceinline__ void describe_turn(const Args& a, const Shared& shared, const Ring<STAGES>& ring, const Turn& turn) {
    const bool opens = turn.opens();
    if (opens) bring_rows(a, shared, ring, turn);
    else fetch_statistics(a, shared, ring, turn.part(a));
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.q_full(ring.stage()));
    if (!opens) return;
    // Out has been read then, too.
    barrier_wait(shared.d_full(), turn.phase());
    if (!turn.closes(a)) share_statistics(a, shared.statistics(ring.stage()), turn.part(a));
}

// A warp that has each turn's statistics in its stage.
__device__ __forceinline__ void describe(const Args& a, const Shared& all) {
    Ring<STAGES> ring;
    for (Ring<TILES> tiles;; tiles.advance()) {
        barrier_wait(all.tile_full(tiles.stage()), tiles.parity());
        const Tile tile = get_tile(all.tile(tiles.stage()));
        if (tile.first < 0) return;
        const u32 at = all.tile(tiles.stage());
        Turn turn = {at, (tile.end - tile.first) * a.group, start_of<true>(a, tile, at), 0};
#pragma unroll 1
        for (; turn.left > 0; --turn.left, ring.advance()) {
            describe_turn(a, all, ring, turn);
            if (++turn.member == a.group) turn.member = 0, turn.t = around<true>(turn.t + step_of<true>(a, tile.head), tile.end);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(all.kv_empty(tiles.stage()));
    }
}
