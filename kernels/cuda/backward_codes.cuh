// The backward in FP8: codes of q, k, v and dout, and sums in blocks of their own. For backward.cu.
//
// With descales δ, weights P, and σ, a power of two that the largest |dS| of a group's tile gives, of 64 keys:
//
//     P = 2^8 exp(scale δq δk Sᵀ - LSE)     dP = δdout δv dPᵀ     dS = P (dP - D)     D = δdout <dout's codes, out>
//     dV += δdout / 2^8 · (Q(Pᵀ) dout)      dK += scale δq / 2^8 / σ · (Q(σ dSᵀ) Q)      dQ += (Q(σ dS) K) / σ
//
// Weights are multiplied where their exponents are made, and so is dS. Q rounds to e4m3. Each product in brackets is a sum of the
// tensor cores over no more than 128 rows or keys; what is added to is f32. dQ's factor scale δk / 2^8 comes when its sums are
// closed.
//
// Tensor cores take both operands along the sum. Q, dout and K lie along lanes for the scores, and have *turned* copies for what
// is summed over rows: of each lane the rows of a tile, one after the other, with zeros for rows that are not real. The kernel
// before the tiles makes them, as they are to lie in shared memory. In a group of 16, query 8 j + 2 i + l, with l < 2, lies at
// 4 i + 2 j + l, as a thread has weights in registers, and key 8 h + i lies at 2 i + h, as dS comes to shared memory. In Q's and
// dout's copies a line of 128 bytes has a lane's 128 rows of one, or its 64 of both.
#pragma once

// Steps of a product over the rows of a tile, and over a group's keys.
constexpr int ROW_STEPS = ROWS / 32, KEY_STEPS = 2;

#define GRADIENT_TYPES "k32.f32.e4m3.e5m2"

// ---------------------------------------------------------------------------------------------------------------------
// Before: statistics, factors and turned copies.

// Eight codes.
template <int FORMAT>
struct EightCodes {
    uint2 codes;
};
template <int FORMAT>
__device__ __forceinline__ void load(const void* base, i64 element, EightCodes<FORMAT>& eight) {
    eight.codes = *(const uint2*)((const u8*)base + element);
}
template <int FORMAT>
__device__ __forceinline__ float unpacked(const EightCodes<FORMAT>& eight, int i) {
    const u32 word = i < 4 ? eight.codes.x : eight.codes.y;
    const u16 pair = (u16)(word >> i % 4 / 2 * 16);
    return fp16_to_f32((u16)(halves_of<FORMAT>(pair) >> i % 2 * 16));
}

// The row of a group of 16 at a position in the copies of Q and dout, or of keys.
template <bool OF_KEYS>
__device__ __forceinline__ u32 row_of_copy(u32 position) {
    return OF_KEYS ? position / 2 + position % 2 * 8 : row_at(position);
}

// Rows of a tile in registers, on their way to shared memory: a vector of 16 lanes after the other, and zeros where a row is
// not real.
template <int COUNT>
struct Fetched {
    static constexpr int VECTORS = DIM / 16, EACH = COUNT * VECTORS / THREADS;
    uint4 lanes[EACH];

    __device__ __forceinline__ void fetch(const View& view, const Rows& from, int dim) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int vector = threadIdx.x + i * THREADS, row = vector / VECTORS, lane = vector % VECTORS * 16;
            const i64 place = place_of(view, (i64)from.step * (from.index + row) + from.phase, from.head) + lane;
            lanes[i] = make_uint4(0, 0, 0, 0);
            if (row < from.real && lane < dim) lanes[i] = *(const uint4*)((const u8*)view.base + place);
        }
    }
    // The places of vectors change from group to group, so that threads which read neighbouring groups meet few at their bank.
    static __device__ __forceinline__ int place(int row, int vector) {
        return row * VECTORS + (vector ^ row / 16 % VECTORS);
    }
    __device__ __forceinline__ void put(uint4* rows) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int vector = threadIdx.x + i * THREADS;
            rows[place(vector / VECTORS, vector % VECTORS)] = lanes[i];
        }
    }
};

// The turned copy of COUNT rows, from group `first` of the copy's on.
template <bool OF_KEYS, int COUNT>
__device__ __forceinline__ void turn(const uint4* rows, u8* to, u32 first) {
    // A thread has four lanes of a group; threads beside each other have groups of the same lanes, which are neighbours there.
#pragma unroll
    for (u32 i = threadIdx.x; i < COUNT / 16 * DIM / 4; i += THREADS) {
        const u32 group = i % (COUNT / 16), four = i / (COUNT / 16);
        uint4 turned[4];
        turn_lanes(turned, [&](u32 at) {
            const u32 row = 16 * group + row_of_copy<OF_KEYS>(at);
            return ((const u32*)&rows[Fetched<COUNT>::place(row, four / 4)])[four % 4];
        });
        const u32 line_group = first + group, block = line_group / 8 * DIM * 128;
#pragma unroll
        for (u32 lane = 0; lane < 4; ++lane) {
            const u32 line = 4 * four + lane;
            *(uint4*)(to + block + line * 128 + (line_group % 8 ^ line % 8) * 16) = turned[lane];
        }
    }
}

// Factors of a tile of rows and a head: of scores in exponents of two, of dP, of dK's sums and of dV's.
__device__ __forceinline__ void put_factors(const Args& a, u32 segment, int head, float* to) {
    const i64 of = (i64)segment * a.heads + head, of_keys = (i64)segment * (a.heads / a.group) + head / a.group;
    const float dout = a.descales[DOUT][of], q = a.scale * a.descales[Q][of];
    const float score = q * a.descales[K][of_keys] * LOG2_E;
    *(float4*)to = make_float4(score, dout * a.descales[V][of_keys], q / WEIGHT_FACTOR, dout / WEIGHT_FACTOR);
}

// What is to be done before tiles of keys are taken, for a tile of query rows. Rows are asked for before statistics are made.
template <int FORMAT>
__device__ __forceinline__ void prepare_rows(const Args& a, uint4* rows) {
    const u32 tile = blockIdx.x;
    if (tile >= a.plan->q_tiles) return;
    const u32 of_segment = a.q_tile_segment[tile];
    const PlannedSegment& segment = a.segments[of_segment];
    const u32 t = tile - segment.first_q_tile;
    const int first = t * ROWS;
    for (int head = blockIdx.y; head < a.heads; head += gridDim.y) {
        const Rows from = rows_of_segment(a, segment, first, head);
        if (!sees_keys(segment, t)) {
            prepare<EightCodes<FORMAT>>(a, tile, head, from, false);
            continue;
        }
        Fetched<ROWS> q, dout;
        q.fetch(a.elements[Q].view, from, a.dim);
        dout.fetch(a.gradient, from, a.dim_v);
        const i64 part = part_of(a, tile, head);
        prepare<EightCodes<FORMAT>>(a, tile, head, from, true);
        if (threadIdx.x == 0) put_factors(a, of_segment, head, a.statistics + part * STATISTICS + 2 * ROWS);
        uint4* const of_dout = rows + ROWS * DIM / 16;
        q.put(rows);
        dout.put(of_dout);
        __syncthreads();
        u8* const to = a.turned_q + part * TURNED_Q_BYTES;
        turn<false, ROWS>(rows, to, 0);
        turn<false, ROWS>(of_dout, to, ROWS / 16);
        __syncthreads();
    }
}

// The same for a tile of keys.
__device__ __forceinline__ void prepare_keys(const Args& a, u32 tile, uint4* rows) {
    if (tile >= a.plan->kv_tiles) return;
    const PlannedSegment& segment = a.segments[a.kv_tile_segment[tile]];
    const u32 number = tile - segment.first_kv_tile, kv_heads = a.heads / a.group;
    int run = 0;
    while (run + 1 < segment.runs && a.runs[segment.first_run + run + 1].first_tile <= number) ++run;
    const PlannedRun& keys = a.runs[segment.first_run + run];
    const int first = (number - keys.first_tile) * KEYS;
    for (u32 head = blockIdx.y; head < kv_heads; head += gridDim.y) {
        const Rows from = {keys.index + first, keys.phase, a.kv_step, (int)head, keys.len - first, keys.span - first};
        Fetched<KEYS> k;
        k.fetch(a.elements[K].view, from, a.dim);
        k.put(rows);
        __syncthreads();
        turn<true, KEYS>(rows, a.turned_k + ((i64)tile * kv_heads + head) * TURNED_K_BYTES, 0);
        __syncthreads();
    }
}

template <int FORMAT>
__device__ __forceinline__ void prepare_codes(const Args& a, uint4* rows) {
    if (blockIdx.x < a.q_capacity) prepare_rows<FORMAT>(a, rows);
    else prepare_keys(a, blockIdx.x - a.q_capacity, rows);
}

// ---------------------------------------------------------------------------------------------------------------------
// Products.

// A step of a score whose second operand is in a format.
template <int FORMAT>
__device__ __forceinline__ void score_of(float (&d)[ROWS / 2], u32 a, u32 b, int add) {
    if constexpr (FORMAT == E4M3) score_step<ROWS>(d, a, b, add);
#if DIM == 64
    else
        WGMMA("m64n128" GRADIENT_TYPES, NAMES_64, BINDS_64, "mov.b64 da, {%64, 0x40000040};\n", "da", "65", "66", "1, 1", "r"(a));
#else
    else WGMMA("m64n64" GRADIENT_TYPES, NAMES_32, BINDS_32, "mov.b64 da, {%32, 0x40000040};\n", "da", "33", "34", "1, 1", "r"(a));
#endif
}

// s = a · bᵀ: 64 keys, a tile of query rows, all lanes.
template <int FORMAT>
__device__ __forceinline__ void score_codes(float (&s)[ROWS / 2], u32 a, u32 b) {
#pragma unroll
    for (int step = 0; step < DIM / 32; ++step) score_of<FORMAT>(s, a + 2 * step, b + 2 * step, step > 0);
    wgmma_commit();
}

// d = w · bᵀ: 64 keys, whose codes are in registers, 64 lanes, a tile of query rows.
template <int FORMAT>
__device__ __forceinline__ void sum_rows(float (&d)[32], const u32 (&w)[ROWS / 8], u32 b) {
#pragma unroll
    for (int step = 0; step < ROW_STEPS; ++step, b += 2) {
        const u32* const four = w + 4 * step;
        const int add = step > 0;
        if constexpr (FORMAT == E4M3)
            WGMMA("m64n64" TYPES, NAMES_32, BINDS_32, "", "{%32, %33, %34, %35}", "36", "37", "1, 1", "r"(four[0]), "r"(four[1]),
                  "r"(four[2]), "r"(four[3]));
        else
            WGMMA("m64n64" GRADIENT_TYPES, NAMES_32, BINDS_32, "", "{%32, %33, %34, %35}", "36", "37", "1, 1", "r"(four[0]),
                  "r"(four[1]), "r"(four[2]), "r"(four[3]));
    }
    wgmma_commit();
}

// d = a · bᵀ: 64 query rows, 64 lanes, a group's keys.
__device__ __forceinline__ void sum_keys(float (&d)[32], u32 a, u32 b) {
#pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step) score_step<64>(d, a + 2 * step, b + 2 * step, step > 0);
    wgmma_commit();
}

// ---------------------------------------------------------------------------------------------------------------------
// Numbers.

// The numbers of a thread's rows: in registers where there are some, as products are waited for, and else read when they are
// needed.
struct OfRows {
    static constexpr bool KEPT = DIM > 64;
    u32 at;
    float2 two[KEPT ? ROWS / 8 : 1];

    __device__ __forceinline__ float2 of(int j) const { return KEPT ? two[j] : get_two(at + 32 * j); }
};
__device__ __forceinline__ OfRows get_rows(u32 at) {
    OfRows rows = {at + 8 * (threadIdx.x % 4)};
    if constexpr (OfRows::KEPT)
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) rows.two[j] = get_two(rows.at + 32 * j);
    return rows;
}

// Scores become weights, by levels of rows.
__device__ __forceinline__ void weigh(float (&s)[ROWS / 2], const OfRows& levels, float factor) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
        const float2 of = levels.of(j);
#pragma unroll
        for (int i = 0; i < 4; ++i) s[4 * j + i] = exp2_of(__fmaf_rn(s[4 * j + i], factor, i % 2 == 0 ? of.x : of.y));
    }
}

// dP becomes dS, by D of rows.
__device__ __forceinline__ void differentiate(
    float (&dp)[ROWS / 2], const float (&p)[ROWS / 2], const OfRows& d, float factor
) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
        const float2 of = d.of(j);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            dp[4 * j + i] = p[4 * j + i] * __fmaf_rn(dp[4 * j + i], factor, i % 2 == 0 ? -of.x : -of.y);
    }
}

// Weights, and gradients of scores, of pairs that are not seen become zero, whatever they were.
__device__ __forceinline__ void mask(float (&p)[ROWS / 2], float (&ds)[ROWS / 2], const Args& a, u32 at, int first) {
    const int lane = 2 * (kept(threadIdx.x) % 4);
    const Sight tile = get_tile<Sight>(at);
    const Widened own = get_widened(a, tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Seen seen = seen_by(tile, own, half, first);
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int pair = 4 * j + 2 * half + i, query = 8 * j + lane + i;
                if (query < seen.first || query > seen.last) p[pair] = 0.0f, ds[pair] = 0.0f;
            }
    }
}

// Codes of numbers. A word has four queries that follow each other in the turned copies.
__device__ __forceinline__ void encode(const float (&s)[ROWS / 2], u32 (&w)[ROWS / 8]) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i += 8)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* const two = s + i + 2 * half;
            w[i / 4 + half] = codes_of<E4M3>(two[0], two[1], two[4], two[5]);
        }
}

// A power of two and its inverse.
struct Power {
    float factor;
    float inverse;
};
// The largest that brings no number of a group past 448, for |dS|, of which `largest` is the largest as an integer. It
// is kept within 2^±126.
__device__ __forceinline__ Power power_of(u32 largest) {
    const int exponent = (int)(largest >> 23) + ((largest & 0x7fffff) > 0x600000);
    const int biased = min(max(262 - exponent, 1), 253);
    return {__int_as_float(biased << 23), __int_as_float(254 - biased << 23)};
}

// The largest of a warp's |dS| goes to a place of the group's warps, from which the group's power comes once all of theirs are there.
__device__ __forceinline__ void put_largest(u32 of_group, const float (&ds)[ROWS / 2]) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) most = fmaxf(most, fabsf(ds[i]));
    const u32 of_warp = __reduce_max_sync(FULL, __float_as_uint(most)), thread = kept(threadIdx.x);
    if (thread % 32 == 0) put_one(of_group + thread / 32 % 4 * 4, __uint_as_float(of_warp));
}
__device__ __forceinline__ Power power_of_group(u32 of_group) {
    named_barrier(2 + kept(threadIdx.x) / 128, 128);
    const int4 four = get_words(of_group);
    return power_of((u32)max(max(four.x, four.y), max(four.z, four.w)));
}

// dSᵀ of 64 keys in rows of a query: 16 bytes of each row for each warp, swizzled.
__device__ __forceinline__ void put_gradients(u32 at, const u32 (&w)[ROWS / 8]) {
    const u32 lane = threadIdx.x % 32, keys = kept(threadIdx.x) / 32;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j += 4) {
        u32 keys_of[4];
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            keys_of[i] = __byte_perm(w[j + i], w[j + i + 1], 0x5140);
            keys_of[i + 1] = __byte_perm(w[j + i], w[j + i + 1], 0x7362);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         at + (8 * j + lane) * 128 + (keys ^ lane % 8) * 16),
                     "r"(keys_of[0]), "r"(keys_of[1]), "r"(keys_of[2]), "r"(keys_of[3])
                     : "memory");
    }
}

// d += factor · product, lanes from FIRST on.
template <int FIRST>
__device__ __forceinline__ void add_product(float (&d)[DIM / 2], const float (&product)[32], float factor) {
#pragma unroll
    for (int i = 0; i < 32; ++i) d[FIRST + i] = __fmaf_rn(product[i], factor, d[FIRST + i]);
}

// dQ of its products with both groups' dS, which have been multiplied.
__device__ __forceinline__ void join_products(float (&dq)[32], const float (&other)[32], const float2& inverses) {
#pragma unroll
    for (int i = 0; i < 32; ++i) dq[i] = __fmaf_rn(other[i], inverses.y, dq[i] * inverses.x);
}

template <int FORMAT>
__device__ __forceinline__ void consume_codes(const Args& a, const Shared& all) {
    Ring<TILES> tiles;
    Ring<STAGES> ring;
    float dk[DIM / 2], dv[DIM / 2];
    const Shared shared = {uniform(all.base)};
    const u32 group = uniform(threadIdx.x / 128);
    for (;;) {
        barrier_wait(shared.kv_full(tiles.stage()), tiles.parity());
        const u32 at = uniform(shared.tile(tiles.stage()));
        const Tile tile = get_tile(at);
        if (tile.first < 0) return;
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) dk[i] = 0.0f, dv[i] = 0.0f;
        const int whole = (int)uniform(tile.whole), whole_end = (int)uniform(tile.whole_end);
        const int closing = (int)uniform(tile.closes * a.group);
        int t = start_of<false>(a, tile), member = 0;
        const int step = (int)uniform(step_of<false>(a, tile.head));
        const int turns = (tile.end - tile.first) * a.group;
        // Whether dQ of the last turn that made one is still to be handed over.
        bool pending = false;
        Before before = {0, 0};
        const u32 of_keys = descriptor(shared.turned_k() + (DIM > 64 ? group * 64 * 128 : 0), 0);
        auto of_ds = [&](u32 turn) { return descriptor(shared.ds(turn) + (DIM > 64 ? 0 : group * 64 * 128), 0); };
#pragma unroll 1
        for (int left = turns; left > 0; --left) {
            const u32 stage = ring.stage(), turn = ring.turns;
            const int now = t, head = member;
            if (++member == a.group) member = 0, t += step;
            barrier_wait(shared.q_full(stage), ring.parity());
            const u32 statistics = shared.statistics(stage);
            u32 p[ROWS / 8], ds[ROWS / 8];
            float inverse;
            // Products take turns with two places: while one is added, the next is made.
            float one[32], other[32];
            const u32 q = descriptor(shared.turned_q(stage), 0), dout = q + (DIM > 64 ? ROWS : DIM * 128) / 16;
            constexpr u32 LANES = 64 * 128 / 16;
            auto start_dv = [&]() {
                hold(p);
                hold(one);
                wgmma_fence();
                sum_rows<FORMAT>(one, p, dout);
            };
            {
                float s[ROWS / 2], dp[ROWS / 2];
                const float4 factors = get_four(statistics + ROWS * 8);
                const OfRows levels = get_rows(statistics);
                hold(s);
                hold(dp);
                wgmma_fence();
                score_codes<E4M3>(s, descriptor(shared.k() + group * 64 * 128, 0), descriptor(shared.q(stage), 0));
                if (pending) hand_queries(shared, group, turn - 2);
                barrier_wait(shared.dout_full(stage), ring.parity());
                wgmma_fence();
                score_codes<FORMAT>(dp, descriptor(shared.v() + group * 64 * 128, 0), descriptor(shared.dout(stage), 0));
                wgmma_wait<1>();
                hold(s);
                weigh(s, levels, factors.x);
                const OfRows d = get_rows(statistics + ROWS * 4);
                wgmma_wait<0>();
                hold(dp);
                differentiate(dp, s, d, factors.y);
                if (now < whole || now >= whole_end) mask(s, dp, a, at, now * ROWS);
                put_largest(shared.largest(turn) + 16 * group, dp);
                encode(s, p);
                // Under the wait for the group's largest number.
                if constexpr (DIM > 64) start_dv();
                const Power power = power_of_group(shared.largest(turn) + 16 * group);
#pragma unroll
                for (int i = 0; i < ROWS / 2; ++i) dp[i] *= power.factor;
                encode(dp, ds);
                inverse = power.inverse;
            }
            wait_before(shared, turn);
            put_gradients(shared.ds(turn), ds);
            if (threadIdx.x % 128 == 0) put_one(shared.inverses(turn) + 4 * group, inverse);
            shared_stores_done();
            const float2 behind = get_two(statistics + ROWS * 8 + 8);
            const float of_k = behind.x * inverse, of_v = behind.y;
            if constexpr (DIM == 64) start_dv();
            hold(ds);
            hold(other);
            wgmma_fence();
            if constexpr (DIM > 64) {
                sum_rows<FORMAT>(other, p, dout + LANES);
                wgmma_wait<1>();
                hold(one);
                add_product<0>(dv, one, of_v);
                hold(one);
                wgmma_fence();
                sum_rows<E4M3>(one, ds, q);
                wgmma_wait<1>();
                hold(other);
                add_product<DIM / 2 - 32>(dv, other, of_v);
                hold(other);
                wgmma_fence();
                sum_rows<E4M3>(other, ds, q + LANES);
                wgmma_wait<1>();
                hold(one);
                add_product<0>(dk, one, of_k);
            } else {
                sum_rows<E4M3>(other, ds, q);
                wgmma_wait<1>();
                hold(one);
                add_product<0>(dv, one, of_v);
            }
            // Of the turn before: in a walk's first turn nobody asks for it.
            const float2 inverses = get_two(shared.inverses(turn - 1));
            hold(one);
            wgmma_fence();
            sum_keys(one, of_ds(turn - 1), of_keys);
            wgmma_wait<1>();
            hold(other);
            hold(p);
            hold(ds);
            add_product<DIM / 2 - 32>(dk, other, of_k);
            hold(other);
            wgmma_fence();
            sum_keys(other, of_ds(turn - 1) + 4, of_keys + 4);
            wgmma_wait<0>();
            hold(one);
            hold(other);
            __syncwarp();
            release(shared.met());
            release(shared.q_empty(stage));
            // The last turn's is given back when the walk's last dQ is made, as K's place is.
            if (left > 1) release(shared.dout_empty(stage));
            if (left < turns) join_products(one, other, inverses);
            pending = pass_before(a, shared, at, group, turn, left, turns, closing, before, one);
            before = {now, head};
            ring.advance();
        }
        if (turns > 0) {
            const u32 turn = ring.turns - 1;
            if (pending) hand_queries(shared, group, turn - 1);
            barrier_wait(shared.met(), turn % 2);
            const float2 inverses = get_two(shared.inverses(turn));
            float one[32], other[32];
            hold(one);
            hold(other);
            wgmma_fence();
            sum_keys(one, of_ds(turn), of_keys);
            sum_keys(other, of_ds(turn) + 4, of_keys + 4);
            wgmma_wait<0>();
            hold(one);
            hold(other);
            __syncwarp();
            release(shared.dout_empty(turn % STAGES));
            join_products(one, other, inverses);
            if (pass_queries<true>(a, shared, at, group, turn, 1, 1 <= closing, before.t, before.member, one))
                hand_queries(shared, group, turn);
        }
        const Tile done = get_tile(at);
        __syncwarp();
        release(shared.kv_empty(tiles.stage()));
        tiles.advance();
        const Rows keys = keys_of_tile(a, done);
        const u32 own = shared.outward() + kept(threadIdx.x) / 32 * 2048;
        store(a.dk, a, keys, own, dk, 1.0f, a.dim);
        store(a.dv, a, keys, own, dv, 1.0f, a.dim_v);
    }
}
