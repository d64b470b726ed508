// The forward's products and weights in FP8: 64 rows of a tile against blocks of 128 keys, on codes. For forward.cu.
//
// A turn takes a block, in one of two ways. *Side by side*: while the tensor cores multiply, the scores of the block give a level
// to each row, which needs no more than their largest. Then P · V of the block before has come. It is added to O while the
// weights are made, which keeps both kinds of units at work, and its words of P take the new ones. *In turn*: each product is
// waited for. Scores, P · V and words of P are then not all in registers at once, which leaves room for a third group, or for
// 256 lanes of O.
#pragma once

// Weights are multiplied by 2 to this power. The largest number of e4m3 is 448.
constexpr float WEIGHT_EXPONENT = 8.0f;
// Up to this level, rounding leaves less than 2^-11 out of a fused weight's exponent: the largest weight is the code 256.
constexpr float FUSED_LEVEL = 8192.0f;

// The thread's number, from which nothing is made that would be kept in registers for masks to come.
template <class C>
__device__ __forceinline__ u32 thread_of_team() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % C::TEAM;
}

// `value`, but not before `earlier` is there: the assembler orders instructions by what they need, and by nothing else.
__device__ __forceinline__ float after(float value, float earlier) {
    u32 none;
    asm("mov.u32 %0, %%ctaid.y;" : "=r"(none));
    return __uint_as_float(__float_as_uint(value) | (__float_as_uint(earlier) & none));
}

// A row's weights are 2 to the power of `score · scale + shift`, where `shift` is what the largest score so far leaves of the
// exponent of weights. Its *rest* is that exponent as it was rounded. From a far level, scores lose the largest one before.
struct CodeLevel {
    float base;
    float scale;
    float shift;
    // The base of a far level, or 0.
    float lost;

    __device__ __forceinline__ float exponent_of(float score) const { return fmaf(score, scale, shift); }
    __device__ __forceinline__ float rest() const { return exponent_of(base - lost); }
    // What weights by an older largest score, which have its rest, are worth by this level.
    __device__ __forceinline__ float factor_of(float old, float old_rest) const {
        return exp2_of(exponent_of(old - lost) - old_rest);
    }
};

__device__ __forceinline__ CodeLevel code_level_of(float largest, float scale_log2) {
    // A row that has seen no key yet: any number will do.
    const float base = largest == neg_infinity() ? 0.0f : largest;
    const float lost = fabsf(base) * scale_log2 > FUSED_LEVEL ? base : 0.0f;
    return {base, scale_log2, fmaf(lost - base, scale_log2, WEIGHT_EXPONENT), lost};
}

// The largest of the integers that the floats of a row are, or the smallest: three at a time, as floats are not compared.
template <class C, bool LARGEST>
__device__ __forceinline__ int end_of(const float (&s)[C::KEYS / 2], int half) {
    auto end = [](int a, int b, int c) { return LARGEST ? __vimax3_s32(a, b, c) : __vimin3_s32(a, b, c); };
    int ends[2];
#pragma unroll
    for (int chain = 0; chain < 2; ++chain) {
        const int at = 2 * half + 4 * chain;
        ends[chain] = __float_as_int(s[at]);
        ends[chain] = end(ends[chain], ends[chain], __float_as_int(s[at + 1]));
#pragma unroll
        for (int i = 8; i < C::KEYS / 2; i += 8)
            ends[chain] = end(ends[chain], __float_as_int(s[at + i]), __float_as_int(s[at + i + 1]));
    }
    int all = end(ends[0], ends[0], ends[1]);
    const int next = __shfl_xor_sync(FULL, all, 1);
    all = end(all, all, next);
    const int other = __shfl_xor_sync(FULL, all, 2);
    return end(all, all, other);
}

// The levels of a block's scores; `factor` is what older weights are worth by them. Scores lose what their level takes first.
template <class C>
__device__ __forceinline__ void next_levels(
    float (&s)[C::KEYS / 2], Rows& rows, CodeLevel (&level)[2], float (&factor)[2], float scale_log2
) {
    const float old[2] = {rows.largest[0], rows.largest[1]};
    int largest[2] = {end_of<C, true>(s, 0), end_of<C, true>(s, 1)};
    // Below 0, floats are in the opposite order as integers.
    if (__any_sync(FULL, (largest[0] | largest[1]) < 0)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int smallest = end_of<C, false>(s, half);
            if (largest[half] < 0) largest[half] = smallest;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.largest[half] = fmaxf(__int_as_float(largest[half]), old[half]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        level[half] = code_level_of(rows.largest[half], scale_log2);
        factor[half] = level[half].factor_of(old[half], rows.rest[half]);
        rows.rest[half] = level[half].rest();
        // Weights that begin before their row's rest is made need registers that three teams do not have.
        if constexpr (C::TEAMS > 2) level[half].shift = after(level[half].shift, rows.rest[half]);
    }
    if (__any_sync(FULL, level[0].lost != 0.0f || level[1].lost != 0.0f)) {
#pragma unroll
        for (int i = 0; i < C::KEYS / 2; ++i) s[i] -= level[i / 2 % 2].lost;
    }
}

// A thread's words of P.
template <class C>
constexpr int WORDS = C::KEYS / 8;

// Scores become weights and their codes. A thread's word has four keys that follow each other in the turned copy: two of eight,
// and two of the next eight. The sum is that of weights which are not rounded.
template <class C>
__device__ __forceinline__ void weigh_codes(
    float (&s)[C::KEYS / 2], u32 (&p)[WORDS<C>], Rows& rows, const CodeLevel (&level)[2], const float (&factor)[2]
) {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < C::KEYS / 2; i += 8) {
#pragma unroll
        for (int j = i; j < i + 8; ++j) s[j] = exp2_of(level[j / 2 % 2].exponent_of(s[j]));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float four[4] = {s[i + 2 * half], s[i + 2 * half + 1], s[i + 2 * half + 4], s[i + 2 * half + 5]};
            sum[half] += (four[0] + four[1]) + (four[2] + four[3]);
            p[i / 4 + half] = codes_of<E4M3>(four[0], four[1], four[2], four[3]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.sum[half] = fmaf(rows.sum[half], factor[half], sum[half]);
}

// Scores of a block, which are waited for. The unit keeps 13 bits: sums of more than 128 lanes are added in f32, 32 keys at a time.
template <class C>
__device__ __forceinline__ void scores_in_turn(float (&s)[C::KEYS / 2], u32 q, u32 k_at) {
    constexpr int PART = 32, LANES = PANELS > 1 ? PANEL_LANES : DIM;
    hold(s);
    wgmma_fence();
    // Made behind the fence: before it, the loop would be 5 % slower.
    const u32 k = uniform(descriptor(k_at, 0));
    scores<C, LANES>(s, q, k);
    wgmma_commit();
    if constexpr (PANELS == 1) wgmma_wait<0>();
#pragma unroll
    for (int key = 0; key < (PANELS > 1 ? C::KEYS : 0); key += PART) {
        float others[PART / 2];
        hold(others);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < LANES / STEP; ++step)
            score_step<PART>(others, q + (C::ROWS * 128 >> 4) + 2 * step, k + ((C::KEYS + key) * 128 >> 4) + 2 * step, step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        hold(others);
        if (key == 0) hold(s);
#pragma unroll
        for (int i = 0; i < PART / 2; ++i) s[key / 2 + i] += others[i];
    }
}

// P · V of a block for LANES lanes: a sum of its own.
template <class C, int LANES>
__device__ __forceinline__ void code_values(float (&of_block)[LANES / 2], const u32 (&p)[WORDS<C>], u32 v) {
#pragma unroll
    for (int step = 0; step < C::KEYS / STEP; ++step)
        value_step<LANES>(of_block, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], v + step * 2, step > 0);
}

// The columns of a block: how many keys it has, and how many of them are hidden, in one register.
struct Columns {
    u32 code;

    __device__ __forceinline__ bool has(int key) const { return key >= (int)(code >> 16) && key < (int)(code & 0xffff); }
};

// Columns of V that are not the block's become zero. In the turned copy, key 8 j + 2 i + l of a group, with l < 2, lies at
// 4 i + 2 j + l.
template <class C>
__device__ __forceinline__ void clear_columns(u32 v_at, Columns columns) {
    constexpr int WORDS_OF_LANE = C::KEYS / 4;
#pragma unroll 1
    for (int i = thread_of_team<C>() % 128; i < DIM * WORDS_OF_LANE; i += 128) {
        const int word = i % WORDS_OF_LANE, first = word / 4 * 16 + word % 4 * 2;
        u32 kept = 0;
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            const int key = first + byte / 2 * 8 + byte % 2;
            if (columns.has(key)) kept |= 0xffu << 8 * byte;
        }
        const u32 at = v_at + i / WORDS_OF_LANE * 128 + (word * 4 ^ i / WORDS_OF_LANE % 8 * 16);
        if (kept != 0xffffffffu) and_shared(at, kept);
    }
    shared_stores_done();
    named_barrier(OF_GROUP + threadIdx.x / 128, 128);
}

// Takes scores that have come: gives K of their block back, and makes levels of them. In a ragged block, scores that a row does
// not see become -inf first. Returns the block's columns.
template <class C, class Ragged>
__device__ __forceinline__ Columns take_scores(
    const Shared<C>& shared, Ring<2> tile_ring, Ring<C::K_STAGES> k_ring, float scale_log2, float (&s)[C::KEYS / 2], Rows& rows,
    CodeLevel (&level)[2], float (&factor)[2], Ragged ragged
) {
    hold(s);
    Block block = {0, C::KEYS, 0};
    if constexpr (ragged) {
        block = get_block(shared.block(k_ring.stage()));
        __syncwarp();
    }
    release_keys<C>(shared.k_empty(k_ring.stage()), thread_of_team<C>());
    if constexpr (ragged) mask<C>(s, get_bounds(shared.tile(kept(tile_ring.stage()))), 0, block, thread_of_team<C>(), 0);
    next_levels<C>(s, rows, level, factor, scale_log2);
    return {(u32)(block.end - block.first | block.hidden << 16)};
}

// Blocks side by side.
template <class C>
__device__ __forceinline__ void attend_codes_side_by_side(
    const Shared<C>& shared, Ring<2> tile_ring, u32 q, const Blocks& blocks, float scale_log2, Ring<C::K_STAGES>& k_ring,
    Rows& rows, float (&o)[DIM / 2]
) {
    float s[C::KEYS / 2], of_block[DIM / 2];
    u32 p[WORDS<C>];
    // What weights before the block are worth by its level.
    float factor[2] = {0.0f, 0.0f};
    // The columns of V of the block whose weights were made last.
    Columns columns = {C::KEYS};
    // Blocks that follow those whose weights were made.
    int left = blocks.all;
    auto wait_keys = [&](Ring<C::K_STAGES> of) { barrier_wait(shared.k_full(of.stage()), of.parity()); };
    auto start_scores = [&]() {
        hold(s);
        wgmma_fence();
        scores<C>(s, q, uniform(descriptor(shared.k(k_ring.stage()), 0)));
        wgmma_commit();
    };
    // V of the block whose weights were made last.
    auto v_ring = [&]() { return Ring<C::V_STAGES>{k_ring.turns - 1}; };
    // While a product is under way: for V of its block, and for the keys of the next.
    auto wait_ahead = [&]() {
        const Ring<C::V_STAGES> own = {k_ring.turns};
        barrier_wait(shared.v_full(own.stage()), own.parity());
        if (left > 1) wait_keys({k_ring.turns + 1});
    };
    auto clear_values = [&]() {
        if (columns.code != C::KEYS) clear_columns<C>(shared.v(v_ring().stage()), columns);
    };
    auto start_values = [&]() {
        hold(p);
        hold(of_block);
        wgmma_fence();
        code_values<C, DIM>(of_block, p, uniform(descriptor(shared.v(v_ring().stage()), 0)));
        wgmma_commit();
    };
    auto finish_values = [&]() {
        wgmma_wait<0>();
        hold(of_block);
        hold(p);
        release_keys<C>(shared.v_empty(v_ring().stage()), thread_of_team<C>());
    };
    auto add_block = [&](const float (&by)[2]) {
#pragma unroll
        for (int i = 0; i < DIM / 2; ++i) o[i] = fmaf(o[i], by[i / 2 % 2], of_block[i]);
    };
    // `follows`: P · V of a block before is under way.
    auto take = [&](auto ragged, auto follows) {
        const float by[2] = {factor[0], factor[1]};
        CodeLevel level[2];
        const Columns taken = take_scores<C>(shared, tile_ring, k_ring, scale_log2, s, rows, level, factor, ragged);
        if constexpr (follows) finish_values();
        k_ring.advance();
        if constexpr (ragged) columns = taken;
        weigh_codes<C>(s, p, rows, level, factor);
        if constexpr (follows) add_block(by);
    };
    auto turn = [&](auto ragged) {
        start_scores();
        if constexpr (ragged) clear_values();
        start_values();
        wait_ahead();
        wgmma_wait<1>();
        take(ragged, Yes());
    };
    wait_keys(k_ring);
    start_scores();
    wait_ahead();
    wgmma_wait<0>();
    take(Yes(), No());
    const int ragged = blocks.ragged - 1;
    walk(--left, ragged, blocks.whole + min(ragged, 0), turn);
    clear_values();
    start_values();
    finish_values();
    add_block(factor);
}

// Blocks one product after the other, while other groups make their weights. Scores have left their registers when P · V comes,
// in parts of 64 lanes.
template <class C>
__device__ __forceinline__ void attend_codes_in_turn(
    const Shared<C>& shared, Ring<2> tile_ring, u32 q, const Blocks& blocks, float scale_log2, Ring<C::K_STAGES>& k_ring,
    Rows& rows, float (&o)[DIM / 2]
) {
    constexpr int PART = 64;
    float s[C::KEYS / 2], of_part[PART / 2];
    u32 p[WORDS<C>];
    auto turn = [&](auto ragged) {
        const Ring<C::V_STAGES> v_ring = {k_ring.turns};
        barrier_wait(shared.k_full(k_ring.stage()), k_ring.parity());
        scores_in_turn<C>(s, q, shared.k(k_ring.stage()));
        CodeLevel level[2];
        float factor[2];
        const Columns columns = take_scores<C>(shared, tile_ring, k_ring, scale_log2, s, rows, level, factor, ragged);
        k_ring.advance();
        weigh_codes<C>(s, p, rows, level, factor);
        barrier_wait(shared.v_full(v_ring.stage()), v_ring.parity());
        if (columns.code != C::KEYS) clear_columns<C>(shared.v(v_ring.stage()), columns);
        const u32 v = uniform(descriptor(shared.v(v_ring.stage()), 0));
#pragma unroll
        for (int lane = 0; lane < DIM; lane += PART) {
            hold(p);
            hold(of_part);
            wgmma_fence();
            code_values<C, PART>(of_part, p, v + (lane * 128 >> 4));
            wgmma_commit();
            wgmma_wait<0>();
            hold(of_part);
            if (lane + PART == DIM) release_keys<C>(shared.v_empty(v_ring.stage()), thread_of_team<C>());
#pragma unroll
            for (int i = 0; i < PART / 2; ++i) o[lane / 2 + i] = fmaf(o[lane / 2 + i], factor[i / 2 % 2], of_part[i]);
        }
        hold(p);
    };
    int left = blocks.all;
    walk(left, blocks.ragged, blocks.whole, turn);
}

// `o` becomes the rows' weighted sum of V, and `rows` their largest scores and sums.
template <class C>
__device__ __forceinline__ void attend_codes(
    const Shared<C>& shared, Ring<2> tile_ring, u32 q, const Blocks& blocks, float scale_log2, Ring<C::K_STAGES>& k_ring,
    Rows& rows, float (&o)[DIM / 2]
) {
    if constexpr (C::IN_TURN) attend_codes_in_turn<C>(shared, tile_ring, q, blocks, scale_log2, k_ring, rows, o);
    else attend_codes_side_by_side<C>(shared, tile_ring, q, blocks, scale_log2, k_ring, rows, o);
}
