// The backward's products: 64 keys of a tile against tiles of query rows. For backward.cu.
#pragma once

// Query rows of a tile that see a key: those from `first` to `last`.
struct Seen {
    int first;
    int last;
};
// Of the key of one half of a thread's rows; `first` is the tile's first row. In a general instance the segment's own bounds
// say it.
__device__ __forceinline__ Seen seen_by(const Sight& tile, const Widened& own, int half, int first) {
    const u32 thread = SHARES_KEYS ? kept(threadIdx.x) % 128 : kept(threadIdx.x);
    const int r = thread / 32 * 16 + thread % 32 / 4 + 8 * half, key = tile.key + r, last = tile.rows - 1;
    if (!IS_GENERAL) return {key - tile.hi - first, r < tile.real ? min(key - tile.lo, last) - first : -1};
    const int from = key < own.prefix ? 0 : key - own.hi, to = key < own.sink_tokens ? last : min(key - own.lo, last);
    return {from - first, r < tile.real ? to - first : -1};
}

// Rounded weights, and gradients of scores, of pairs that are not seen become zero, whatever they were: bit by bit, so that nothing
// but products ends what lies beside exponentials.
__device__ __forceinline__ void mask(u32 (&p)[ROWS / 4], u32 (&ds)[ROWS / 4], const Args& a, u32 at, int first) {
    const int lane = 2 * (kept(threadIdx.x) % 4);
    const Sight tile = get_tile<Sight>(at);
    const Widened own = get_widened(a, tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Seen seen = seen_by(tile, own, half, first);
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
            const int query = 8 * j + lane;
            const bool low = query >= seen.first && query <= seen.last;
            const bool high = query + 1 >= seen.first && query + 1 <= seen.last;
            const u32 bits = (low ? 0xffffu : 0) | (high ? 0xffff0000u : 0);
            p[2 * j + half] &= bits, ds[2 * j + half] &= bits;
        }
    }
}

// Two rows' numbers.
__device__ __forceinline__ float2 get_two(u32 at) {
    float2 two;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(at) : "memory");
    return two;
}

// The numbers of the rows that a thread has, of the eights of rows from FROM to END. The first are `at`.
template <int FROM, int END>
__device__ __forceinline__ void get_numbers(float2 (&numbers)[ROWS / 8], u32 at) {
#pragma unroll
    for (int j = FROM; j < END; ++j) numbers[j] = get_two(at + 32 * j + 8 * (threadIdx.x % 4));
}

// Scores become exponents of weights, to base 2.
__device__ __forceinline__ void level(float (&s)[ROWS / 2], const float2 (&lse)[ROWS / 8], float scale) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& x = s[4 * j + i];
            x = __fmaf_rn(x, scale, i % 2 == 0 ? -lse[j].x : -lse[j].y) * LOG2_E;
        }
    }
}

// Exponents become weights, which are rounded for dV, of 16 rows from the eight `j` on.
__device__ __forceinline__ void weigh(float (&s)[ROWS / 2], u32 (&p)[ROWS / 4], int j) {
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 8; ++i) s[i] = exp2_of(s[i]);
#pragma unroll
    for (int i = 2 * j; i < 2 * j + 4; ++i) p[i] = pair_of(s[2 * i], s[2 * i + 1]);
}

// In a general instance: scores become weights, which are rounded for dV, times the slope of a soft cap, 1 - tanh².
__device__ __forceinline__ void weigh(
    const Args& a, float (&s)[ROWS / 2], u32 (&p)[ROWS / 4], u32 at, int first, u32 lse
) {
    const Sight tile = get_tile<Sight>(at);
    const Widened own = get_widened(a, tile);
    const Seen seen[2] = {seen_by(tile, own, 0, first), seen_by(tile, own, 1, first)};
    const bool capped = a.cap != 0.0f;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
        const float2 of = get_two(lse + 32 * j + 8 * (threadIdx.x % 4));
        float weight[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int query = 8 * j + 2 * (threadIdx.x % 4) + i % 2;
            const bool hidden = query < seen[i / 2].first || query > seen[i / 2].last;
            float& x = s[4 * j + i];
            const float t = capped ? tanh_of(x * a.inner) : x;
            const float logit = __fmaf_rn(t, capped ? a.cap : a.scale, i % 2 == 0 ? -of.x : -of.y);
            weight[i] = hidden ? 0.0f : exp2_of(logit * LOG2_E);
            x = !capped || hidden ? weight[i] : weight[i] * __fmaf_rn(-t, t, 1.0f);
        }
        p[2 * j] = pair_of(weight[0], weight[1]), p[2 * j + 1] = pair_of(weight[2], weight[3]);
    }
}

// dP becomes dS, without the scale and rounded, of 16 rows from the eight `j` on.
__device__ __forceinline__ void differentiate(
    const float (&dp)[ROWS / 2], const float (&p)[ROWS / 2], const float2 (&d)[ROWS / 8], u32 (&ds)[ROWS / 4], int j
) {
#pragma unroll
    for (int i = 2 * j; i < 2 * j + 4; ++i) {
        const float2 of = d[i / 2];
        ds[i] = pair_of(p[2 * i] * (dp[2 * i] - of.x), p[2 * i + 1] * (dp[2 * i + 1] - of.y));
    }
}

// sᵀ = a · bᵀ: 64 keys, a tile of query rows.
__device__ __forceinline__ void scores(float (&s)[ROWS / 2], u32 a, u32 b) {
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
        const int panel = step / 4, in_panel = step % 4 * 2;
        score_step<ROWS>(s, a + panel * (KEYS * 128 >> 4) + in_panel, b + panel * (ROWS * 128 >> 4) + in_panel, step > 0);
    }
}

// d += p · b: 64 keys, a group's lanes of a tile of query rows.
__device__ __forceinline__ void values(float (&d)[GROUP_LANES / 2], const u32 (&p)[ROWS / 4], u32 b) {
#pragma unroll
    for (int step = 0; step < ROWS / 16; ++step)
        value_step<GROUP_LANES>(d, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], b + step * (2048 >> 4));
}

// dq = dsᵀᵀ · k: a panel of query rows, a panel of lanes, all keys.
__device__ __forceinline__ void queries(float (&dq)[32], u32 ds, u32 k) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
        gradient_step(dq, ds + step * (2048 >> 4), k + step * (2048 >> 4), step > 0);
}

// dqᵀ = kᵀ · dsᵀ: a panel of lanes, 32 query rows, all keys. In 16 of dq from number FIRST on.
template <int FIRST>
__device__ __forceinline__ void turned_queries(float (&dq)[32], u32 k, u32 ds) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
        turned_step<FIRST>(dq, k + step * (2048 >> 4), ds + step * (2048 >> 4), step > 0);
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
    const u32 own = at + threadIdx.x / 32 * 2048;
    put_rows<0>(own, ds);
    if constexpr (ROWS > 64) put_rows<16>(own + KEYS * 128, ds);
}

// A warp's own part of a group's place of dQ: 4 KB.
__device__ __forceinline__ u32 own_sums(u32 at) { return at + kept(threadIdx.x) % 128 / 32 * 4096; }

__device__ __forceinline__ void store_sums(u32 own, const float (&dq)[32]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        put_four(own + (i * 32 + threadIdx.x % 32) * 16,
                 make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]));
}

__device__ __forceinline__ void add_sums(u32 own, float (&dq)[32]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float4 sums = get_four(own + (i * 32 + threadIdx.x % 32) * 16);
        dq[4 * i] += sums.x, dq[4 * i + 1] += sums.y, dq[4 * i + 2] += sums.z, dq[4 * i + 3] += sums.w;
    }
}

// A group's sums that nobody reads again: what the cache has of them need not go to memory. A line a thread, of those that are
// the group's alone.
__device__ __forceinline__ void forget_sums(const float* sums) {
    const u64 line = ((u64)sums + 127) / 128 * 128 + 128 * (threadIdx.x % 128);
    if (line + 128 <= (u64)sums + PART_BYTES) asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

__device__ __forceinline__ void release(u32 barrier) {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Whether none of a group's keys is seen by one of the rows from `first` on.
__device__ __forceinline__ bool is_blind(const Sight& tile, int first, u32 group) {
    const int from = group * 64, end = min(from + 64, tile.real), last = min(first + ROWS, tile.rows) - 1;
    return end <= from || last + tile.hi < tile.key + from || first + tile.lo >= tile.key + end;
}

// dQ = dS K: the group's rows, or its lanes, in one panel or, with 32 query rows, in two, turned.
__device__ __forceinline__ void begin_queries(const Shared& shared, u32 stage, u32 group, float (&dq)[32]) {
    const u32 panel = group * KEYS * 128, at = shared.ds(stage);
    if constexpr (SHARES_KEYS) {
        const u32 k = shared.k() + 2 * panel, own = at + panel;
        turned_queries<0>(dq, descriptor(k, 0), descriptor(own, 0));
        turned_queries<16>(dq, descriptor(k + KEYS * 128, 0), descriptor(own, 0));
    } else if constexpr (PANELS > 1) queries(dq, descriptor(at, 0), descriptor(shared.k() + panel, 0));
    else queries(dq, descriptor(at + panel, 0), descriptor(shared.k(), 0));
    wgmma_commit();
}

// What dQ is multiplied with.
__device__ __forceinline__ float factor_of_queries(const Args& a, const Tile& tile) {
    if (!IS_FP8) return a.scale;
    return a.scale / WEIGHT_FACTOR * a.descales[K][(i64)tile.opening * (a.heads / a.group) + tile.head];
}

// The rows of the turn before: a tile of query rows, and a head of the group.
struct Before {
    int t;
    int member;
};

// Hands a turn's dQ, which is in its place, to the adders.
__device__ __forceinline__ void hand_queries(const Shared& shared, u32 group, u32 turn) {
    shared_stores_done();
    __syncwarp();
    release(shared.dq_full(group, turn));
}

// dQ to the adders, or, with the sums that are there, to its rows: of tile `t` of query rows and a head of the group, with
// `left` turns of the walk. `at`: the tile of keys. Returns whether it is still to be handed over.
template <bool DEFERS>
__device__ __forceinline__ bool pass_queries(
    const Args& a, const Shared& shared, u32 at, u32 group, u32 turn, int left, bool closes, int t, int member,
    float (&dq)[32]
) {
    barrier_wait(shared.dq_empty(group, turn - 1), (turn - 1) / ADDERS % 2);
    const u32 own = own_sums(shared.dq(group));
    if (closes) {
        const Tile tile = get_tile(at);
        if (left <= tile.opens * a.group) {
            barrier_wait(shared.dq_ready(group, turn), turn / ADDERS % 2);
            add_sums(own, dq);
            const i64 part = part_of(a, tile.q_tile + t, tile.head * a.group + member);
            forget_sums(a.sums + part * SUMS + group * (PART_BYTES / 4));
        }
        // A general instance, which is in step, takes dS's place of the next turn: it has no registers for the wait for the warp's sums.
        const u32 place = IS_GENERAL ? shared.ds(turn + 1) + kept(threadIdx.x) / 32 * 2048 : own;
        const Rows rows = rows_of_turn(a, tile, t, member);
        if constexpr (SHARES_KEYS) {
            const int lane = group * GROUP_LANES;
            store_turned<0>(a.dq, a, rows, place, dq, lane, a.scale, a.dim);
            store_turned<16>(a.dq, a, rows, place, dq, lane + 64, a.scale, a.dim);
        } else {
            store(a.dq, a, rows, place, dq, factor_of_queries(a, tile), a.dim);
        }
    } else {
        store_sums(own, dq);
        if (DEFERS) return true;
    }
    shared_stores_done();
    __syncwarp();
    release(shared.dq_full(group, turn));
    return false;
}

// Where dQ is late, until the other group is through with the turn before `turn`: its dS of that one is there, and that of the one
// before is free.
__device__ __forceinline__ void wait_before(const Shared& shared, u32 turn) {
    if (turn > 0) barrier_wait(shared.met(), (turn - 1) % 2);
}

// Where dQ is late, that of the turn before `turn`, if it is of the same walk of `turns`; `before` says its rows.
__device__ __forceinline__ bool pass_before(
    const Args& a, const Shared& shared, u32 at, u32 group, u32 turn, int left, int turns, int closing, const Before& before,
    float (&dq)[32]
) {
    return left < turns &&
           pass_queries<true>(a, shared, at, group, turn - 1, left + 1, left < closing, before.t, before.member, dq);
}

// No dS of a group's keys.
__device__ __forceinline__ void store_no_gradients(const Shared& shared, u32 stage) {
    u32 ds[ROWS / 4];
#pragma unroll
    for (int i = 0; i < ROWS / 4; ++i) ds[i] = 0;
    store_gradients(shared.ds(stage), ds);
    shared_stores_done();
}

// dQ of a turn, from dS in the place of `stage`.
__device__ __forceinline__ void make_queries(const Shared& shared, u32 stage, u32 group, float (&dq)[32]) {
    hold(dq);
    wgmma_fence();
    begin_queries(shared, stage, group, dq);
    wgmma_wait<0>();
    hold(dq);
}

// A turn of a group whose keys are not seen: its part of dQ is all that it makes.
__device__ __forceinline__ void pass_blind(
    const Args& a, const Shared& shared, u32 at, u32 group, u32 stage, u32 turn, int left, bool closes, int t, int member
) {
    store_no_gradients(shared, stage);
    barrier_meet(shared.met());
    release(shared.q_empty(stage));
    float dq[32];
    make_queries(shared, stage, group, dq);
    release(shared.dout_empty(stage));
    pass_queries<false>(a, shared, at, group, turn, left, closes, t, member, dq);
}

template <bool SHORT>
__device__ __forceinline__ void consume(const Args& a, const Shared& all) {
    // Whether descriptors are made from what all threads of a warp have alike: a tenth fewer instructions, and registers for D beside
    // products. A general instance would spill two.
    constexpr bool ALIKE = !IS_GENERAL;
    // Whether dQ is handed over behind the next scores' start, so that nobody waits until it is stored. In the short form those may
    // wait for other blocks, which may wait for this dQ.
    constexpr bool DEFERS = !SHORT && !IS_GENERAL, LATE = IS_LATE<SHORT>;
    // How many eights of rows have their numbers read before products are waited for: as many as there are registers for.
    constexpr int EARLY_LSE = 8, EARLY_D = SHORT || IS_GENERAL ? 0 : 4;
    // And how many become weights before dP is waited for. Weights are that far ahead of dS then.
    constexpr int EARLY = SHORT || IS_GENERAL ? 2 : 4;
    Ring<TILES> tiles;
    // Of Q and dout; its turns are those of dS and dQ too.
    Ring<STAGES> ring;
    float dk[GROUP_LANES / 2], dv[GROUP_LANES / 2];
    for (;;) {
        const Shared shared = all.again();
        barrier_wait(shared.kv_full(tiles.stage()), tiles.parity());
        const u32 at = uniform(shared.tile(tiles.stage()));
        const Tile tile = get_tile(at);
        if (tile.first < 0) return;
#pragma unroll
        for (int i = 0; i < GROUP_LANES / 2; ++i) dk[i] = 0.0f, dv[i] = 0.0f;
        if (tile.first < tile.end && tile.real < KEYS) {
            clear_rows(shared.k(), tile.real, KEYS);
            shared_stores_done();
            named_barrier(1, CONSUMERS);
        }
        const int whole = (int)uniform(tile.whole), whole_end = (int)uniform(tile.whole_end);
        // Turns from the end on that close sums: read once, for all warps alike; and of turns that describe rows.
        const int opening = SHORT ? (int)uniform(tile.opening) : 0;
        const int closing = (int)uniform(tile.closes * a.group);
        const int end = SHORT ? (int)uniform(tile.end) : 0;
        int t = start_of<SHORT>(a, tile, at), member = 0;
        const int step = (int)uniform(step_of<SHORT>(a, tile.head));
        const u32 base = ALIKE ? uniform(all.base) : all.base, own = ALIKE ? uniform(threadIdx.x / 128) : 0;
        // Whether dQ of the last turn that made one is still to be handed over.
        bool pending = false;
        Before before = {0, 0};
        const int turns = (int)uniform((tile.end - tile.first) * a.group);
#pragma unroll 1
        for (int left = turns; left > 0; --left) {
            const Shared shared = {ALIKE ? base : kept(base)};
            const u32 group = ALIKE ? own : kept(threadIdx.x) / 128;
            const int now = t, head = member;
            if (++member == a.group) member = 0, t = around<SHORT>(t + step, end);
            const u32 stage = ring.stage();
            barrier_wait(shared.q_full(stage), ring.parity());
            const bool ragged = now < whole || now >= whole_end;
            // Whether the other group sees nothing.
            bool alone = false;
            // Elsewhere the scores are begun before.
            if (IS_GENERAL || ragged) barrier_wait(shared.dout_full(stage), ring.parity());
            if (ragged) {
                const Sight tile = get_tile<Sight>(at);
                // A general instance has no registers to pass over what a group does not see.
                alone = !IS_GENERAL && is_blind(tile, now * ROWS, group ^ 1);
                clear_queries(shared, stage, tile.rows - now * ROWS);
                if (!IS_GENERAL && is_blind(tile, now * ROWS, group)) {
                    if (pending) hand_queries(shared, group, ring.turns - 1 - LATE);
                    pending = false;
                    if constexpr (LATE) {
                        wait_before(shared, ring.turns);
                        store_no_gradients(shared, stage);
                        float dq[32];
                        make_queries(shared, stage ^ 1, group, dq);
                        __syncwarp();
                        release(shared.met());
                        release(shared.q_empty(stage));
                        if (left > 1) release(shared.dout_empty(stage));
                        pending = pass_before(a, shared, at, group, ring.turns, left, turns, closing, before, dq);
                        before = {now, head};
                        ring.advance();
                        continue;
                    }
                    if (SHORT && 2 * left > opening) make_d(shared, stage, left + opening, tile.rows - now * ROWS);
                    pass_blind(a, shared, at, group, stage, ring.turns, left, left <= closing, now, head);
                    ring.advance();
                    continue;
                }
            }
            // Where the group's keys begin in K and V, and its lanes in Q and dout.
            const u32 keys_at = SHARES_KEYS ? 0 : group * 64 * 128, lanes_at = SHARES_KEYS ? group * 2 * ROWS * 128 : 0;
            float s[ROWS / 2], dp[ROWS / 2];
            u32 p[ROWS / 4], ds[ROWS / 4];
            auto start_dp = [&]() {
                scores(dp, descriptor(shared.v() + keys_at, 0), descriptor(shared.dout(stage), 0));
                wgmma_commit();
            };
            auto start_dv = [&]() {
                hold(p);
                hold(dv);
                wgmma_fence();
                values(dv, p, descriptor(shared.dout(stage) + lanes_at, ROWS * 128));
                wgmma_commit();
            };
            // Before products, which keep shared memory busy.
            float2 numbers[ROWS / 8];
            if constexpr (!IS_GENERAL) get_numbers<0, EARLY_LSE>(numbers, shared.statistics(stage));
            hold(s);
            if constexpr (!IS_GENERAL) hold(dp);
            wgmma_fence();
            scores(s, descriptor(shared.k() + keys_at, 0), descriptor(shared.q(stage), 0));
            wgmma_commit();
            if (pending) hand_queries(shared, group, ring.turns - 1 - LATE);
            if constexpr (!IS_GENERAL) {
                barrier_wait(shared.dout_full(stage), ring.parity());
                wgmma_fence();
                start_dp();
            }
            if (SHORT && 2 * left > opening) make_d(shared, stage, left + opening, get_tile<Sight>(at).rows - now * ROWS);
            wgmma_wait<IS_GENERAL ? 0 : 1>();
            hold(s);
            if constexpr (IS_GENERAL) {
                weigh(a, s, p, at, now * ROWS, shared.statistics(stage));
                // One after the other, as weights and slopes leave no registers for dP.
                start_dv();
                wgmma_wait<0>();
                hold(dv);
                hold(dp);
                wgmma_fence();
                start_dp();
            } else {
                get_numbers<EARLY_LSE, ROWS / 8>(numbers, shared.statistics(stage));
                level(s, numbers, a.scale);
#pragma unroll
                for (int j = 0; j < EARLY; j += 2) weigh(s, p, j);
                // For what is there: the assembler, which would make them behind dP, moves no exponentials past its branch.
                if constexpr (EARLY > 2) barrier_wait(shared.q_full(stage), ring.parity());
            }
            get_numbers<0, EARLY_D>(numbers, shared.statistics(stage) + ROWS * 4);
            wgmma_wait<0>();
            hold(dp);
            if (SHORT && 2 * left > opening) barrier_wait(shared.d_full(), (left + opening) % 2);
            get_numbers<EARLY_D, ROWS / 8>(numbers, shared.statistics(stage) + ROWS * 4);
            if constexpr (LATE) wait_before(shared, ring.turns);
            const u32 place = place_of_square(shared.ds(stage) + kept(threadIdx.x) / 32 * 2048);
#pragma unroll
            for (int j = 0; j < ROWS / 8; j += 2) {
                // They are ahead, so that the unit of exponentials has work.
                if (!IS_GENERAL && j + EARLY < ROWS / 8) weigh(s, p, j + EARLY);
                differentiate(dp, s, numbers, ds, j);
                put_square_if(!ragged, place + j / 8 * KEYS * 128, j % 8 * 8, ds[2 * j], ds[2 * j + 1], ds[2 * j + 2], ds[2 * j + 3]);
            }
            hold(ds);
            if (ragged) {
                mask(p, ds, a, at, now * ROWS);
                store_gradients(shared.ds(stage), ds);
            }
            if constexpr (!IS_GENERAL) start_dv();
            shared_stores_done();
            if constexpr (!LATE) {
                // Groups that come from different places of the program do not meet at a named barrier, as tools ask for.
                if (alone) barrier_meet(shared.met());
                else named_barrier(1, CONSUMERS);
            }
            float dq[32];
            hold(dq);
            hold(dk);
            hold(ds);
            wgmma_fence();
            // Of the turn before where dQ is late: in a walk's first turn nobody asks for it.
            begin_queries(shared, stage ^ LATE, group, dq);
            values(dk, ds, descriptor(shared.q(stage) + lanes_at, ROWS * 128));
            wgmma_commit();
            wgmma_wait<1>();
            hold(dq);
            hold(dv);
            if constexpr (!IS_GENERAL) hold(p);
            if constexpr (LATE) {
                __syncwarp();
                release(shared.met());
                // The last turn's is given back when the walk's last dQ is made, as K's place is.
                if (left > 1) release(shared.dout_empty(stage));
                pending = pass_before(a, shared, at, group, ring.turns, left, turns, closing, before, dq);
                before = {now, head};
            } else {
                release(shared.dout_empty(stage));
                pending = pass_queries<DEFERS>(a, shared, at, group, ring.turns, left, left <= closing, now, head, dq);
            }
            wgmma_wait<0>();
            hold(dk);
            hold(ds);
            release(shared.q_empty(stage));
            ring.advance();
        }
        if constexpr (!LATE) {
            if (pending) hand_queries({base}, own, ring.turns - 1);
        } else if (turns > 0) {
            const Shared shared = {base};
            const u32 turn = ring.turns - 1, stage = turn % STAGES;
            if (pending) hand_queries(shared, own, turn - 1);
            barrier_wait(shared.met(), turn % 2);
            float dq[32];
            make_queries(shared, stage, own, dq);
            __syncwarp();
            release(shared.dout_empty(stage));
            if (pass_queries<true>(a, shared, at, own, turn, 1, 1 <= closing, before.t, before.member, dq))
                hand_queries(shared, own, turn);
        }
        const Tile done = get_tile(at);
        __syncwarp();
        release(shared.kv_empty(tiles.stage()));
        tiles.advance();
        const Rows keys = keys_of_tile(a, done);
        const u32 place = shared.ds(ring.turns) + kept(threadIdx.x) / 32 * 2048;
        store(a.dk, a, keys, place, dk, a.scale, a.dim);
        store(a.dv, a, keys, place, dv, 1.0f, a.dim_v);
    }
}
