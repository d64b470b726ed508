// The forward's products and weights: 64 rows of a tile against blocks of keys. For forward.cu.
#pragma once

// What a group of 64 rows takes of the blocks that are brought for its tile.
struct Blocks {
    // Passed over before and after those that some row sees.
    int before;
    int after;
    int all;
    // Of all, how many come first that some row sees in part, and how many after them that all rows see whole.
    int ragged;
    int whole;
};

// What a group of the first `rows` rows of `bounds`, `real` real ones from there on, takes. The one run begins with `hidden`
// keys of another one, which are counted in `brought`.
template <class C>
__device__ __forceinline__ Blocks blocks_for(
    const Brought& brought, Bounds bounds, int real, int keys, int rows, int hidden
) {
    const Span seen = span_seen(bounds, min(real, rows), keys);
    // A group that sees nothing of its window may see sink tokens.
    if (seen.from >= seen.to && (!IS_GENERAL || brought.len >= 0)) return {brought.all, 0, 0, 0, 0};
    // Of more runs than one, every block may end early; beside sink tokens, any may be seen in part.
    if (brought.len < 0) return {0, 0, brought.all, brought.all, 0};
    const int low = (u32)(seen.from + hidden) / C::KEYS, high = (u32)(seen.to + hidden + C::KEYS - 1) / C::KEYS;
    const int all = high - low;
    const int whole_from = (u32)(max(bounds.lo + rows - 1, 0) + hidden + C::KEYS - 1) / C::KEYS;
    const int whole_to = (u32)(max(min(bounds.hi + hidden, brought.len - 1), -1) + 1) / C::KEYS;
    // Side by side, V of a block is used with the scores of the next: one more where V has a tail. In turn it is not needed.
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

// A turn for each of the blocks that are left: ragged ones, whole ones, and ragged ones behind them.
template <class Turn>
__device__ __forceinline__ void walk(int& left, int ragged, int whole, Turn& turn) {
    while (left > 0) {
#pragma unroll 1
        for (; ragged > 0; --ragged, --left) turn(Yes());
#pragma unroll 1
        for (; whole > 0; --whole, --left) turn(No());
        ragged = left;
    }
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(FULL, x, 1);
    return x + __shfl_xor_sync(FULL, x, 2);
}

constexpr float LN_2 = 0.693147182464599609375f;
constexpr float LOG2_E = 1.44269502162933349609375f;

// What a thread keeps of its two rows.
struct Rows {
    // Where weights are in 16 bits, of its own keys at least, and of all when the row ends.
    float largest[2] = {neg_infinity(), neg_infinity()};
    // What weights in 16 bits are made by: the largest score so far, or one before it.
    float base[2] = {neg_infinity(), neg_infinity()};
    float rest[2] = {0.0f, 0.0f};
    float sum[2] = {0.0f, 0.0f};
};

// Of a thread's keys in a row of a block, 8 j + i of them from its first one on with i < 2, those below `bound`.
__device__ __forceinline__ int keys_below(int bound, int keys) {
    bound = min(max(bound, 0), keys);
    return bound / 8 * 2 + min(bound % 8, 2);
}

// `count` bits from bit `first` on, as far as a word has them.
__device__ __forceinline__ u32 bits_from(int first, int count) {
    u32 bits;
    asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(bits) : "r"(first), "r"(count));
    return bits;
}

// Scores of keys that a row does not see become -inf, whatever they were. Of the first `sink_tokens` keys a lower bound hides
// none. A thread's keys of a row have a bit each, 32 of them in a word.
template <class C>
__device__ __forceinline__ void mask(
    float (&s)[C::KEYS / 2], Bounds bounds, int sink_tokens, Block block, u32 thread, int packed
) {
    static_assert(!IS_GENERAL || C::KEYS <= 128, "no word but the first knows sink tokens");
    const int first_key = block.first + 2 * (thread % 4), row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half >> packed;
        const int lowest = IS_FP8 ? max(r + bounds.lo, block.first + block.hidden) : r + bounds.lo;
        const int left = keys_below(lowest - first_key, C::KEYS);
        const int right = keys_below(min(r + bounds.hi + 1, block.end) - first_key, C::KEYS);
#pragma unroll
        for (int word = 0; word < C::KEYS / 4; word += 32) {
            const int first = max(left - word, 0);
            u32 seen = bits_from(first, max(right - word - first, 0));
            if constexpr (IS_GENERAL)
                seen |= bits_from(0, min(keys_below(sink_tokens - first_key, C::KEYS), right));
#pragma unroll
            for (int i = word; i < min(word + 32, C::KEYS / 4); ++i)
                if (!(seen >> i - word & 1)) s[i / 2 * 4 + 2 * half + i % 2] = neg_infinity();
        }
    }
}

// The largest score of a row among a thread's keys, that of the blocks before included.
template <class C, int HALF>
__device__ __forceinline__ float own_largest(const float (&s)[C::KEYS / 2], float old) {
    float top[4] = {old, old, old, old};
#pragma unroll
    for (int j = 0; j < C::KEYS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) top[j % 2 * 2 + i] = fmaxf(top[j % 2 * 2 + i], s[4 * j + 2 * HALF + i]);
    return fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
}

// The same where it is at least 0, and else some number below 0: integers are compared three at a time, as floats are not, and
// below 0 they are in the opposite order. A NaN stays the largest: the row's out is NaN too.
template <class C, int HALF>
__device__ __forceinline__ float own_largest_from_0(const float (&s)[C::KEYS / 2], float old) {
    int top[2] = {__float_as_int(old), __float_as_int(old)};
#pragma unroll
    for (int j = 0; j < C::KEYS / 8; ++j)
        top[j % 2] = __vimax3_s32(top[j % 2], __float_as_int(s[4 * j + 2 * HALF]), __float_as_int(s[4 * j + 2 * HALF + 1]));
    return __int_as_float(max(top[0], top[1]));
}

// A row's weights are 2 to the power of (score - base) · scale. Weights in bf16 take one fused operation:
// `score · scale + shift`, where `shift` is minus the *level* of the base, its product with the scale, rounded, so
// that the base's weight is 2 to the power of what rounding left out, the row's *rest*, of which later levels and the end
// take account. It is at most 64 for levels below 2^31. Above that the scale is a power of two, so that nothing is rounded:
// by rounding alone, a score that is not the largest one could be anything there, and weighs next to nothing. (Where weights
// are 2^64, values above 2^63 are past f32.) Weights in fp16 have no room for a rest: they subtract, then scale.
constexpr bool FUSED = TYPE == BF16;

struct Level {
    float base;
    float scale;
    float shift;

    __device__ __forceinline__ float exponent_of(float score) const {
        return FUSED ? fmaf(score, scale, shift) : (score - base) * scale;
    }
    __device__ __forceinline__ float rest() const { return FUSED ? exponent_of(base) : 0.0f; }
};

constexpr u32 LEVEL_EXPONENT = 30;

__device__ __forceinline__ Level level_of(float base, float scale_log2) {
    Level level;
    // A row that has seen no key yet: any number will do.
    level.base = base == neg_infinity() ? 0.0f : base;
    // 2^LEVEL_EXPONENT over the score's power of two. Without a sign, that of a tiny score is larger than any scale.
    const u32 power = (LEVEL_EXPONENT + 2 * 127 << 23) - (__float_as_uint(level.base) & 0x7f800000u);
    level.scale = FUSED ? __uint_as_float(min(__float_as_uint(scale_log2), power)) : scale_log2;
    level.shift = -level.base * level.scale;
    return level;
}

// What weights by an older base, which have its rest, are worth by this level.
__device__ __forceinline__ float factor_of(float old, float rest, const Level& level) {
    return exp2_of(level.exponent_of(old) - rest);
}

// A row's base stays while its largest score is at most SLACK over it: what the row has so far needs no factor then. In levels
// where f32 has no number that near above the base, it is the largest score as ever.
template <class C>
__device__ __forceinline__ bool is_over(float largest, float base, float scale_log2) {
    return (largest - base) * scale_log2 > C::SLACK;
}

// A row's base is raised where a block's scores are over it; `factor` is what older weights are worth by the new one.
template <class C, int HALF>
__device__ __forceinline__ void raise_base(const float (&s)[C::KEYS / 2], Rows& rows, float (&factor)[2], float scale_log2) {
    const float old = rows.base[HALF], largest = quad_max(own_largest<C, HALF>(s, rows.largest[HALF]));
    rows.largest[HALF] = largest;
    rows.base[HALF] = C::SLACK == 0 || is_over<C>(largest, old, scale_log2) ? largest : old;
    const Level level = level_of(rows.base[HALF], scale_log2);
    factor[HALF] = factor_of(old, rows.rest[HALF], level);
    rows.rest[HALF] = level.rest();
    // Never fused with the sum that follows: whole blocks, which have a branch in between, and others give the same bits.
    rows.sum[HALF] *= factor[HALF];
}

// Both rows' bases. Most blocks raise no base in a warp, which a whole one's threads can tell without each other's scores.
// Returns whether what there is must be multiplied by `factor`, which else may be anything.
template <class C>
__device__ __forceinline__ bool raise_bases(
    const float (&s)[C::KEYS / 2], Rows& rows, float (&factor)[2], float scale_log2, bool whole
) {
    if (whole) {
        const float first = own_largest_from_0<C, 0>(s, rows.largest[0]), second = own_largest_from_0<C, 1>(s, rows.largest[1]);
        const bool over = is_over<C>(first, rows.base[0], scale_log2) || is_over<C>(second, rows.base[1], scale_log2);
        const bool below_0 = (__float_as_int(first) | __float_as_int(second)) < 0;
        if (!__any_sync(FULL, over || below_0)) {
            rows.largest[0] = first, rows.largest[1] = second;
            return false;
        }
    }
    raise_base<C, 0>(s, rows, factor, scale_log2);
    raise_base<C, 1>(s, rows, factor, scale_log2);
    return __any_sync(FULL, factor[0] != 1.0f || factor[1] != 1.0f);
}

// Scores of a row become weights by its base: those of eight keys each, `from` to `to`.
template <class C, int HALF>
__device__ __forceinline__ void weigh_row(float (&s)[C::KEYS / 2], Rows& rows, float scale_log2, int from, int to) {
    if (from == to) return;
    const Level level = level_of(rows.base[HALF], scale_log2);
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = from; j < to; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float& x = s[4 * j + 2 * HALF + i];
            x = exp2_of(level.exponent_of(x));
            sum[i] += x;
        }
    rows.sum[HALF] += sum[0] + sum[1];
}

template <class C>
__device__ __forceinline__ void pack(const float (&s)[C::KEYS / 2], u32 (&p)[C::KEYS / 4]) {
#pragma unroll
    for (int i = 0; i < C::KEYS / 4; ++i) p[i] = pair_of(s[2 * i], s[2 * i + 1]);
}

// Scores of a block by its first lanes.
template <class C, int LANES = DIM>
__device__ __forceinline__ void scores(float (&s)[C::KEYS / 2], u32 q, u32 k) {
#pragma unroll
    for (int step = 0; step < LANES / STEP; ++step) {
        const int panel = step / 4, in_panel = step % 4 * 2;
        score_step<C::KEYS>(s, q + panel * (C::ROWS * 128 >> 4) + in_panel,
                                       k + panel * (C::KEYS * 128 >> 4) + in_panel, step > 0);
    }
}

template <class C>
__device__ __forceinline__ void values(float (&o)[LANES_OF_O / 2], const u32 (&p)[C::KEYS / 4], u32 v) {
#pragma unroll
    for (int step = 0; step < C::KEYS / 16; ++step)
        value_step<LANES_OF_O>(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                                      v + step * (2048 >> 4));
}

// The first of the groups' named barriers.
constexpr int OF_GROUP = 1;

// The panels of V that a group's lanes of O lie in.
constexpr int PANELS_OF_O = (LANES_OF_O + PANEL_LANES - 1) / PANEL_LANES;

// Rows of V past the end of the keys become zero in a group's lanes, from `v_at` on: their weights are, but 0 · NaN is not. Each
// group does so for itself and waits for no other, which writes the same zeros where it has the same lanes.
template <class C>
__device__ __forceinline__ void clear_tail(u32 v_at, int valid) {
    const int count = (C::KEYS - valid) * PANELS_OF_O * 8;
    for (int i = threadIdx.x % 128; i < count; i += 128) {
        const int row = valid + i / (PANELS_OF_O * 8), panel = i / 8 % PANELS_OF_O;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v_at + panel * C::KEYS * 128 + row * 128 + i % 8 * 16),
                     "r"(0)
                     : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    named_barrier(OF_GROUP + threadIdx.x / 128, 128);
}

// The largest logit of a warp's rows of each head: rows of 2^packed heads follow each other, at most 8.
__device__ __forceinline__ void raise_head(const View& largest, int head, float value, int packed) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        const float other = __shfl_xor_sync(FULL, value, step);
        if (step >= 4 << packed) value = fmaxf(value, other);
    }
    if (threadIdx.x % 4 == 0 && threadIdx.x % 32 < 4 << packed && value > neg_infinity())
        raise(largest, place_of(largest, 0, head), value);
}

// Scores become tanh of what a soft cap makes of them, of which a logit is a multiple as it is of a score.
template <class C>
__device__ __forceinline__ void cap_scores(float (&s)[C::KEYS / 2], float inner) {
#pragma unroll
    for (int i = 0; i < C::KEYS / 2; ++i) s[i] = tanh_of(s[i] * inner);
}

// What a row becomes when all its keys were seen, and with a sink that.
struct Ended {
    float lse;
    // Of P · V.
    float factor;
    // Where P · V may be anything.
    bool empty;
};

// A row of these numbers (Rows); a rest here is a logarithm to the base e.
__device__ __forceinline__ Ended end_of(
    const Args& a, float of_scores, int head, bool real, float base, float rest, float sum
) {
    float level = base * of_scores, total = sum, weight = 1.0f;
    if (a.sink_kind != 0) {
        const float sink = a.sink_kind == 1 ? 0.0f : get(a.sink, place_of(a.sink, 0, head));
        // A sink of -inf is none: in a row without keys it would be subtracted from itself.
        if (sink != neg_infinity()) {
            const float top = fmaxf(level, sink);
            weight = sum == 0.0f ? 0.0f : exact_exp(level - top - rest);
            total = sum * weight + exact_exp(sink - top);
            level = top, rest = 0.0f;
        }
    }
    const float lse = !real || total == 0.0f ? neg_infinity() : level + (exact_ln(total) - rest);
    return {lse, weight / total, !real || sum == 0.0f};
}

// `first_lane`: the group's first lane of O.
template <class C, int HALF>
__device__ __forceinline__ void store(
    const Args& a, const Tile& tile, const Factors& factors, const Rows& rows, const float (&o)[LANES_OF_O / 2], int row,
    int first_lane
) {
    const int packed = packed_log2<C>(a), r = row + 8 * HALF >> packed;
    const int head = tile.head + (row + 8 * HALF & (1 << packed) - 1);
    const bool real = r < tile.real, write = real || (a.clear && r < tile.owned);
    const float largest = rows.largest[HALF] * factors.of_scores;
    raise_head(a.max_logit, head, real ? largest : neg_infinity(), packed);
    const float base = IS_FP8 ? rows.largest[HALF] : rows.base[HALF];
    const Ended ended = end_of(a, factors.of_scores, head, real, base, rows.rest[HALF] * LN_2, quad_sum(rows.sum[HALF]));
    const float factor = ended.factor * factors.of_values;
    const i64 at = (i64)a.q_step * (tile.index + r) + tile.phase;
    if (threadIdx.x % 4 == 0 && first_lane == 0 && write) put(a.lse, place_of(a.lse, at, head), ended.lse);
    float mine[LANES_OF_O / 4];
#pragma unroll
    for (int i = 0; i < LANES_OF_O / 4; ++i) mine[i] = ended.empty ? 0.0f : o[i / 2 * 4 + 2 * HALF + i % 2] * factor;
    const i64 place = place_of(a.out, at, head) + first_lane;
    const int lanes = a.dim_v - first_lane;
    if (IS_GENERAL && a.by_threads) {
#pragma unroll
        for (int i = 0; i < LANES_OF_O / 4; ++i) {
            const int lane = i / 2 * 8 + 2 * (threadIdx.x % 4) + i % 2;
            if (write && lane < lanes) put(a.out, place + lane, mine[i]);
        }
        return;
    }
    if (a.out.format == F32) {
        if (!write) return;
#pragma unroll
        for (int j = 0; j < LANES_OF_O / 8; ++j)
            if (8 * j < lanes)
            *(float2*)((float*)a.out.base + place + 8 * j + 2 * (threadIdx.x % 4)) =
                make_float2(mine[2 * j], mine[2 * j + 1]);
        return;
    }
#pragma unroll
    for (int j = 0; j < LANES_OF_O / 8; j += 4) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = pair_of(mine[2 * (j + i)], mine[2 * (j + i) + 1]);
        transpose(words);
        if (write && 8 * (j + (int)threadIdx.x % 4) < lanes)
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

// In FP8: rows of a group against its blocks (forward_codes.cuh).
template <class C>
__device__ __forceinline__ void attend_codes(
    const Shared<C>& shared, Ring<2> tile_ring, u32 q, const Blocks& blocks, float scale_log2, Ring<C::K_STAGES>& k_ring,
    Rows& rows, float (&o)[DIM / 2]
);

template <class C>
__device__ __forceinline__ void consume(const Args& a, const Shared<C>& shared) {
    const u32 thread = kept(C::TEAMS == 1 ? threadIdx.x : threadIdx.x % C::TEAM), group = uniform(thread / 128);
    // Its part of the tile, of rows or of O's lanes.
    const u32 rows_at = SHARES_ROWS ? 0 : group, lanes_at = SHARES_ROWS ? group : 0;
    const u32 in_rows = SHARES_ROWS ? thread % 128 : thread;
    const int row = in_rows / 32 * 16 + in_rows % 32 / 4;
    Ring<2> tile_ring;
    auto q_ring = [&]() { return Ring<C::Q_STAGES>{tile_ring.turns}; };
    Ring<C::K_STAGES> k_ring;
    float o[LANES_OF_O / 2], s[C::KEYS / 2];
    u32 p[C::KEYS / 4];
    // Nothing is read: those threads wait that release, and the others for them, so that none misses a phase.
    auto pass_over = [&](int count) {
        if (count == 0) return;
        if (thread % 32 < C::CLUSTER)
#pragma unroll 1
            for (u32 turns = k_ring.turns; turns != k_ring.turns + count; ++turns) {
                const Ring<C::K_STAGES> ring = {turns};
                const Ring<C::V_STAGES> v_ring = {turns};
                barrier_wait(shared.k_full(ring.stage()), ring.parity());
                release_keys<C>(shared.k_empty(ring.stage()), thread);
                barrier_wait(shared.v_full(v_ring.stage()), v_ring.parity());
                release_keys<C>(shared.v_empty(v_ring.stage()), thread);
            }
        k_ring.turns += count;
        named_barrier(OF_GROUP + group, 128);
    };
    for (;;) {
        barrier_wait(shared.q_full(q_ring().stage()), q_ring().parity());
        if (get_brought(shared.tile(tile_ring.stage())).all < 0) return;
        auto blocks_of_group = [&]() {
            const u32 tile = shared.tile(tile_ring.stage());
            const int4 limits = get_four(tile, 1);
            const int rows_of_group = 64 >> packed_log2<C>(a), first = rows_of_group * rows_at;
            return blocks_for<C>(get_brought(tile), {limits.y + first, limits.z + first}, limits.x - first, limits.w, rows_of_group,
                                 get_factors(a, tile).hidden);
        };
        Blocks blocks = blocks_of_group();
        blocks.all = uniform(blocks.all);
        Rows rows;
#pragma unroll
        for (int i = 0; i < LANES_OF_O / 2; ++i) o[i] = 0.0f;
        if constexpr (C::GROUPS * C::CLUSTER > 1) pass_over(blocks.before);
        if (blocks.all > 0) {
            const u32 q = descriptor(shared.q(q_ring().stage()) + rows_at * 64 * 128, 0);
            if constexpr (IS_FP8) {
                const float scale_log2 = get_factors(a, shared.tile(tile_ring.stage())).of_scores * LOG2_E;
                attend_codes<C>(shared, tile_ring, q, blocks, scale_log2, k_ring, rows, o);
                release(shared.q_empty(q_ring().stage()), thread);
            } else {
                // What O and sums so far are worth by the rows' bases, where these grew in the block whose weights were made last.
                float factor[2];
                bool grew;
                // Of eight keys each: those of the second row whose weights are made with the first row's.
                constexpr int ALL = C::KEYS / 8, EARLY = ALL - C::LATE;
                // Keys of that block.
                int valid;
                auto wait_keys = [&]() { barrier_wait(shared.k_full(k_ring.stage()), k_ring.parity()); };
                // V of the block whose scores were taken last.
                auto v_ring = [&]() { return Ring<C::V_STAGES>{k_ring.turns - 1}; };
                auto lanes_of_values = [&]() { return shared.v(v_ring().stage()) + lanes_at * PANELS_OF_O * C::KEYS * 128; };
                auto values_at = [&]() { return uniform(descriptor(lanes_of_values(), C::KEYS * 128)); };
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
                    if (IS_GENERAL && a.inner != 0.0f) cap_scores<C>(s, a.inner);
                    if constexpr (ragged)
                        mask<C>(s, get_bounds(shared.tile(tile_ring.stage())), get_sink_tokens(shared.tile(tile_ring.stage())),
                                block, in_rows, packed_log2<C>(a));
                    grew = raise_bases<C>(s, rows, factor, a.scale_log2, !ragged);
                    // In the second row's two parts: a row's sum is the same wherever in a tile it lies.
                    weigh_row<C, 0>(s, rows, a.scale_log2, 0, EARLY);
                    weigh_row<C, 0>(s, rows, a.scale_log2, EARLY, ALL);
                    weigh_row<C, 1>(s, rows, a.scale_log2, 0, EARLY);
                };
                // The other weights, which are made while those so far are packed.
                auto pack_block = [&]() {
                    weigh_row<C, 1>(s, rows, a.scale_log2, EARLY, ALL);
                    pack<C>(s, p);
                    hold(p);
                };
                auto clear_values = [&]() {
                    wait_values();
                    if (valid < C::KEYS) clear_tail<C>(lanes_of_values(), valid);
                };
                // O += P · V of the block whose weights were made last.
                auto start_values = [&](u32 v) {
                    if (grew) {
#pragma unroll
                        for (int i = 0; i < LANES_OF_O / 2; ++i) o[i] *= factor[i / 2 % 2];
                    }
                    hold(o);
                    wgmma_fence();
                    values<C>(o, p, v);
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
                // Weights but the last of the second row are made while P · V of the block before is under way. Between these and the
                // wait for that product is one for what is there: the assembler moves no exponentials past its branch.
                auto turn = [&](auto ragged) {
                    wait_keys();
                    const u32 v = values_at();
                    start_scores();
                    if constexpr (ragged) clear_values();
                    wait_values();
                    start_values(v);
                    wgmma_wait<1>();
                    weigh_block(ragged);
                    barrier_wait(shared.q_full(q_ring().stage()), q_ring().parity());
                    finish_values();
                    release_values(k_ring.turns - 2);
                    pack_block();
                };
                wait_keys();
                start_scores();
                wgmma_wait<0>();
                weigh_block(Yes());
                pack_block();
                int left = blocks.all - 1;
                const int ragged = blocks.ragged - 1;
                walk(left, ragged, blocks.whole + min(ragged, 0), turn);
                release(shared.q_empty(q_ring().stage()), thread);
                clear_values();
                start_values(values_at());
                finish_values();
                release_values(k_ring.turns - 1);
                rows.largest[0] = quad_max(rows.largest[0]), rows.largest[1] = quad_max(rows.largest[1]);
            }
        } else {
            release(shared.q_empty(q_ring().stage()), thread);
        }
        // In FP8 there is no register for it.
        if constexpr (C::GROUPS * C::CLUSTER > 1) pass_over(IS_FP8 ? blocks_of_group().after : blocks.after);
        const Tile done = get_tile(shared.tile(tile_ring.stage()));
        const Factors factors = get_factors(a, shared.tile(tile_ring.stage()));
        __syncwarp();
        release(shared.tile_empty(tile_ring.stage()), thread);
        tile_ring.advance();
        store<C, 0>(a, done, factors, rows, o, row, lanes_at * LANES_OF_O);
        store<C, 1>(a, done, factors, rows, o, row, lanes_at * LANES_OF_O);
    }
}
