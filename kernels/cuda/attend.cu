// Attention for everything that a call can say, simple and right: the kernels that are there where no faster one is, and
// the first that a faster one is held to.
//
// A warp has one row and head. Tiles of 32 keys (or queries) go to its lanes for the products, one lane after the other
// for the sums: every sum is serial, in the order of the CPU device with tiles of 32 keys, whose bits these kernels give.
// No sum depends on which warp comes first. Only real rows are read, and only visible pairs enter a sum, so that whatever
// lies in padding stays out. Keys of one backward launch are named once.
//
// Keys and values of a forward may lie in pages, which a block table names.
#include "common.cuh"

constexpr u32 FULL = 0xffffffffu;
constexpr int DIM_MAX = 576;
// Lanes of a row that a thread holds.
constexpr int EACH = DIM_MAX / 32;

struct Call {
    const QuerySegment* segments;
    const KeyRun* runs;
    int segment_count;
    int run_count;
    // Owned rows.
    i64 q_rows;
    i64 kv_rows;
    int heads;
    // Query heads of a KV head.
    int group;
    int dim;
    int dim_v;
    float scale;
    // 0: none.
    float softcap;
    int p_format;
    int ds_format;
    // Whether padding rows become zero.
    int clear;
};

constexpr int NO_SINK = 0, OFF_BY_ONE = 1;

struct Forward {
    Call call;
    View q;
    View k;
    View v;
    View sink;
    View out;
    View lse;
    View max_logit;
    // NO_SINK, OFF_BY_ONE, or learnable.
    int sink_kind;
};

// The pages of keys and values: where the key at a position of a segment's sequence lies.
struct BlockTable {
    // Pages of each segment in order of positions, `width` places each.
    const int* pages;
    // Position of each segment's first key.
    const int* first;
    int width;
    // Rows of a page.
    int size;
};

struct Backward {
    Call call;
    View q;
    View k;
    View v;
    View dout;
    View out;
    View lse;
    View dq;
    View dk;
    View dv;
    // <dout, out>, [heads, q_rows].
    float* row_dots;
};

// expm1 and tanh in f32 by the steps of FreeBSD's msun (s_expm1f.c) and musl (tanhf.c), as exact_exp in common.cuh; for
// arguments of at most 20 in size.
// Copyright (C) 1993 by Sun Microsystems, Inc. Permission to use, copy, modify, and distribute this software is freely
// granted, provided that this notice is preserved.
__device__ __forceinline__ float exact_expm1(float x) {
    const u32 magnitude = __float_as_uint(x) & 0x7fffffffu;
    const bool sign = __float_as_uint(x) >> 31;
    if (magnitude >= 0x4195b844u && sign) return -1.0f;
    int k = 0;
    float c = 0.0f;
    if (magnitude > 0x3eb17218u) {
        float high, low;
        if (magnitude < 0x3f851592u) {
            k = sign ? -1 : 1;
            high = sign ? x + 6.9313812256e-01f : x - 6.9313812256e-01f;
            low = sign ? -9.0580006145e-06f : 9.0580006145e-06f;
        } else {
            k = (int)(1.4426950216e+00f * x + (sign ? -0.5f : 0.5f));
            high = x - (float)k * 6.9313812256e-01f;
            low = (float)k * 9.0580006145e-06f;
        }
        x = high - low;
        c = (high - x) - low;
    } else if (magnitude < 0x33000000u) {
        return x;
    }
    const float half = 0.5f * x, square = x * half;
    const float r = 1.0f + square * (-3.3333212137e-2f + square * 1.5807170421e-3f);
    const float t = 3.0f - r * half;
    float e = square * ((r - t) / (6.0f - x * t));
    if (k == 0) return x - (x * e - square);
    e = x * (e - c) - c;
    e -= square;
    if (k == -1) return 0.5f * (x - e) - 0.5f;
    if (k == 1) return x < -0.25f ? -2.0f * (e - (x + 0.5f)) : 1.0f + 2.0f * (x - e);
    if (k < 0 || k > 56) return (x - e + 1.0f) * two_to(k) - 1.0f;
    return k < 23 ? (x - e + (1.0f - two_to(-k))) * two_to(k) : (x - (e + two_to(-k)) + 1.0f) * two_to(k);
}

__device__ __forceinline__ float exact_tanh(float x) {
    const u32 magnitude = __float_as_uint(x) & 0x7fffffffu;
    const float size = __uint_as_float(magnitude);
    float result;
    if (magnitude > 0x41200000u) result = 1.0f + 0.0f / size;
    else if (magnitude > 0x3f0c9f54u) result = 1.0f - 2.0f / (exact_expm1(2.0f * size) + 2.0f);
    else if (magnitude > 0x3e82c578u) {
        const float t = exact_expm1(2.0f * size);
        result = t / (t + 2.0f);
    } else if (magnitude >= 0x00800000u) {
        const float t = exact_expm1(-2.0f * size);
        result = -t / (t + 2.0f);
    } else result = size;
    return __float_as_uint(x) >> 31 ? -result : result;
}

__device__ __forceinline__ float logit_of(const Call& call, float product) {
    const float scaled = call.scale * product;
    return call.softcap == 0.0f ? scaled : call.softcap * exact_tanh(scaled / call.softcap);
}

// dS without the scale.
__device__ __forceinline__ float logit_gradient(const Call& call, float weight, float dp, float d, float logit) {
    const float plain = weight * (dp - d);
    if (call.softcap == 0.0f) return plain;
    const float ratio = logit / call.softcap;
    return plain * (1.0f - ratio * ratio);
}

// The row of a segment's local key.
__device__ __forceinline__ i64 key_row(const Call& call, const QuerySegment& segment, i64 key) {
    const KeyRun* const runs = call.runs + segment.first_run;
    const int run = last_at_most(0, (int)segment.runs, key, [&](int i) { return runs[i].first_key; });
    return runs[run].offset + runs[run].step * (key - runs[run].first_key);
}

// The same row through the block table.
__device__ __forceinline__ i64 paged_row(const BlockTable& table, int segment, i64 key) {
    const i64 position = table.first[segment] + key;
    const i64 page = table.pages[(i64)segment * table.width + position / table.size];
    return page * table.size + position % table.size;
}

__device__ __forceinline__ float product(const float* a, const View& view, i64 place, int dim) {
    float sum = 0.0f;
    for (int lane = 0; lane < dim; ++lane) sum += a[lane] * get(view, place + lane);
    return sum;
}

// The elements of a row and head, for all lanes of the warp.
__device__ __forceinline__ void fetch(float* to, const View& view, i64 place, int dim) {
    for (int lane = threadIdx.x % 32; lane < dim; lane += 32) to[lane] = get(view, place + lane);
}

__device__ __forceinline__ void put_zeros(const View& view, i64 place, int dim) {
    for (int lane = threadIdx.x % 32; lane < dim; lane += 32) put(view, place + lane, 0.0f);
}

// sum += factor * row, each thread its lanes.
__device__ __forceinline__ void add_row(float (&sum)[EACH], float factor, const View& view, i64 place, int dim) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (32 * i >= dim) break;
        const int lane = threadIdx.x % 32 + 32 * i;
        if (lane < dim) sum[i] += factor * get(view, place + lane);
    }
}

__device__ __forceinline__ void put_row(
    const float (&sum)[EACH], float factor, const View& view, i64 place, int dim
) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (32 * i >= dim) break;
        const int lane = threadIdx.x % 32 + 32 * i;
        if (lane < dim) put(view, place + lane, factor * sum[i]);
    }
}

// An owned row of the queries.
struct Query {
    QuerySegment segment;
    // The segment's number.
    int number;
    i64 index;
    i64 row;
    bool real;
    // The local keys that it sees: the first `sink_tokens`, and those from `first` to `end`, none of which is among them.
    i64 sink_tokens;
    i64 first;
    i64 end;
};

__device__ __forceinline__ Query query_at(const Call& call, i64 owned) {
    const int s = last_at_most(0, call.segment_count, owned, [&](int i) { return call.segments[i].first_row; });
    const QuerySegment segment = call.segments[s];
    const i64 index = owned - segment.first_row, row = segment.q_offset + segment.q_step * index;
    const i64 first = max(index + segment.lo, (i64)0), end = min(index + segment.hi + 1, segment.keys);
    const i64 sink_tokens = max(min(segment.sink_tokens, end), (i64)0);
    // A window that reaches back to the sink tokens has them in it.
    const bool apart = sink_tokens < first;
    return {segment, s, index, row, index < segment.q_len, apart ? sink_tokens : 0, apart ? first : 0, end};
}

// The first tile of 32 keys from `tile` on in which a query may see one.
__device__ __forceinline__ i64 tile_from(const Query& query, i64 tile) {
    return tile < query.sink_tokens ? tile : max(tile, query.first / 32 * 32);
}

// `row_of` gives the row of a query's local key.
template <class RowOf>
__device__ __forceinline__ void forward(const Forward& a, RowOf row_of) {
    __shared__ float queries[WARPS][DIM_MAX];
    const Call& call = a.call;
    const int lane = threadIdx.x % 32;
    const i64 item = (i64)blockIdx.x * WARPS + threadIdx.x / 32, owned = item / call.heads;
    if (owned >= call.q_rows) return;
    const int head = (int)(item % call.heads), kv_head = head / call.group;
    const Query query = query_at(call, owned);
    const i64 out = place_of(a.out, query.row, head), lse = place_of(a.lse, query.row, head);
    if (!query.real) {
        if (!call.clear) return;
        put_zeros(a.out, out, call.dim_v);
        if (lane == 0) put(a.lse, lse, neg_infinity());
        return;
    }
    float* const q = queries[threadIdx.x / 32];
    fetch(q, a.q, place_of(a.q, query.row, head), call.dim);
    __syncwarp();

    float largest = neg_infinity(), sum = 0.0f, acc[EACH] = {};
    for (i64 tile = tile_from(query, 0); tile < query.end; tile = tile_from(query, tile + 32)) {
        const i64 key = tile + lane;
        const bool seen = key < query.sink_tokens || (key >= query.first && key < query.end);
        const i64 row = seen ? row_of(query, key) : 0;
        const float score =
            seen ? logit_of(call, product(q, a.k, place_of(a.k, row, kv_head), call.dim)) : neg_infinity();
        float tile_max = score;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) tile_max = fmaxf(tile_max, __shfl_xor_sync(FULL, tile_max, step));
        if (tile_max > largest) {
            const float factor = exact_exp(largest - tile_max);
            sum *= factor;
#pragma unroll
            for (int i = 0; i < EACH; ++i) acc[i] *= factor;
            largest = tile_max;
        }
        const float weight = seen ? exact_exp(score - largest) : 0.0f;
        const float in_product = rounded_to(call.p_format, weight);
        for (u32 left = __ballot_sync(FULL, seen); left != 0; left &= left - 1) {
            const int j = __ffs(left) - 1;
            sum += __shfl_sync(FULL, weight, j);
            const i64 v_row = __shfl_sync(FULL, row, j);
            add_row(acc, __shfl_sync(FULL, in_product, j), a.v, place_of(a.v, v_row, kv_head), call.dim_v);
        }
    }
    if (lane == 0 && largest > neg_infinity()) raise(a.max_logit, place_of(a.max_logit, 0, head), largest);

    if (a.sink_kind != NO_SINK) {
        const float sink = a.sink_kind == OFF_BY_ONE ? 0.0f : get(a.sink, place_of(a.sink, 0, head));
        if (sink > largest) {
            const float factor = exact_exp(largest - sink);
            sum *= factor;
#pragma unroll
            for (int i = 0; i < EACH; ++i) acc[i] *= factor;
            largest = sink;
        }
        // A sink of -inf is none: in a row without keys it would be subtracted from itself.
        if (sink != neg_infinity()) sum += exact_exp(sink - largest);
    }
    put_row(acc, sum == 0.0f ? 0.0f : 1.0f / sum, a.out, out, call.dim_v);
    if (lane == 0) put(a.lse, lse, sum == 0.0f ? neg_infinity() : largest + exact_ln(sum));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attend(const __grid_constant__ Forward a) {
    forward(a, [&](const Query& query, i64 key) { return key_row(a.call, query.segment, key); });
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attend_pages(
    const __grid_constant__ Forward a, const __grid_constant__ BlockTable table
) {
    forward(a, [&](const Query& query, i64 key) { return paged_row(table, query.number, key); });
}

// <dout, out> of a row, the sum serial.
__device__ __forceinline__ float row_dot(const float* dout, const View& out, i64 place, int dim) {
    float sum = 0.0f;
    for (int base = 0; base < dim; base += 32) {
        const int lane = base + threadIdx.x % 32, count = min(dim - base, 32);
        const float term = lane < dim ? dout[lane] * get(out, place + lane) : 0.0f;
        for (int i = 0; i < count; ++i) sum += __shfl_sync(FULL, term, i);
    }
    return sum;
}

// dq, and <dout, out> for the keys' kernel.
extern "C" __global__ void __launch_bounds__(THREADS, 2) attend_queries(const __grid_constant__ Backward a) {
    __shared__ float queries[WARPS][DIM_MAX];
    __shared__ float gradients[WARPS][DIM_MAX];
    const Call& call = a.call;
    const int lane = threadIdx.x % 32;
    const i64 item = (i64)blockIdx.x * WARPS + threadIdx.x / 32, owned = item / call.heads;
    if (owned >= call.q_rows) return;
    const int head = (int)(item % call.heads), kv_head = head / call.group;
    const Query query = query_at(call, owned);
    const i64 dq = place_of(a.dq, query.row, head);
    if (!query.real) {
        if (call.clear) put_zeros(a.dq, dq, call.dim);
        return;
    }
    float *const q = queries[threadIdx.x / 32], *const dout = gradients[threadIdx.x / 32];
    fetch(q, a.q, place_of(a.q, query.row, head), call.dim);
    fetch(dout, a.dout, place_of(a.dout, query.row, head), call.dim_v);
    __syncwarp();
    const float d = row_dot(dout, a.out, place_of(a.out, query.row, head), call.dim_v);
    if (lane == 0) a.row_dots[head * call.q_rows + owned] = d;
    const float lse = get(a.lse, place_of(a.lse, query.row, head));

    float acc[EACH] = {};
    // Sink tokens and the window, one behind the other.
    const i64 keys = query.sink_tokens + max(query.end - query.first, (i64)0);
    for (i64 tile = 0; tile < keys; tile += 32) {
        const i64 at = tile + lane, key = at < query.sink_tokens ? at : at - query.sink_tokens + query.first;
        const i64 row = at < keys ? key_row(call, query.segment, key) : 0;
        float ds = 0.0f;
        if (at < keys) {
            const float logit = logit_of(call, product(q, a.k, place_of(a.k, row, kv_head), call.dim));
            const float dp = product(dout, a.v, place_of(a.v, row, kv_head), call.dim_v);
            ds = rounded_to(call.ds_format, logit_gradient(call, exact_exp(logit - lse), dp, d, logit));
        }
        const int count = (int)min(keys - tile, (i64)32);
        for (int j = 0; j < count; ++j) {
            const i64 k_row = __shfl_sync(FULL, row, j);
            add_row(acc, __shfl_sync(FULL, ds, j), a.k, place_of(a.k, k_row, kv_head), call.dim);
        }
    }
    put_row(acc, call.scale, a.dq, dq, call.dim);
}

// dk and dv of a key: the sums go over the query heads of its head, and over the queries that see it, in order.
extern "C" __global__ void __launch_bounds__(THREADS, 2) attend_keys(const __grid_constant__ Backward a) {
    __shared__ float keys[WARPS][DIM_MAX];
    __shared__ float values[WARPS][DIM_MAX];
    const Call& call = a.call;
    const int lane = threadIdx.x % 32, kv_heads = call.heads / call.group;
    const i64 item = (i64)blockIdx.x * WARPS + threadIdx.x / 32, owned = item / kv_heads;
    if (owned >= call.kv_rows) return;
    const int kv_head = (int)(item % kv_heads);
    const KeyRun run =
        call.runs[last_at_most(0, call.run_count, owned, [&](int i) { return call.runs[i].first_row; })];
    const i64 in_run = owned - run.first_row, row = run.offset + run.step * in_run;
    const i64 dk = place_of(a.dk, row, kv_head), dv = place_of(a.dv, row, kv_head);
    if (in_run >= run.len) {
        if (!call.clear) return;
        put_zeros(a.dk, dk, call.dim);
        put_zeros(a.dv, dv, call.dim_v);
        return;
    }
    float *const k = keys[threadIdx.x / 32], *const v = values[threadIdx.x / 32];
    fetch(k, a.k, place_of(a.k, row, kv_head), call.dim);
    fetch(v, a.v, place_of(a.v, row, kv_head), call.dim_v);
    __syncwarp();

    const QuerySegment& segment = call.segments[run.segment];
    const i64 key = run.first_key + in_run;
    const i64 first = max(key - segment.hi, (i64)0);
    const i64 end = key < segment.sink_tokens ? segment.q_len : min(key - segment.lo + 1, segment.q_len);
    float dk_sum[EACH] = {}, dv_sum[EACH] = {};
    for (int head = kv_head * call.group; head < (kv_head + 1) * call.group; ++head) {
        for (i64 tile = first; tile < end; tile += 32) {
            const i64 index = tile + lane, q_row = segment.q_offset + segment.q_step * index;
            float weight = 0.0f, ds = 0.0f;
            if (index < end) {
                const float logit = logit_of(call, product(k, a.q, place_of(a.q, q_row, head), call.dim));
                const float dp = product(v, a.dout, place_of(a.dout, q_row, head), call.dim_v);
                const float d = a.row_dots[head * call.q_rows + segment.first_row + index];
                const float exact = exact_exp(logit - get(a.lse, place_of(a.lse, q_row, head)));
                ds = rounded_to(call.ds_format, logit_gradient(call, exact, dp, d, logit));
                weight = rounded_to(call.p_format, exact);
            }
            const int count = (int)min(end - tile, (i64)32);
            for (int i = 0; i < count; ++i) {
                const i64 from = segment.q_offset + segment.q_step * (tile + i);
                add_row(dk_sum, __shfl_sync(FULL, ds, i), a.q, place_of(a.q, from, head), call.dim);
                add_row(dv_sum, __shfl_sync(FULL, weight, i), a.dout, place_of(a.dout, from, head), call.dim_v);
            }
        }
    }
    put_row(dk_sum, call.scale, a.dk, dk, call.dim);
    put_row(dv_sum, 1.0f, a.dv, dv, call.dim_v);
}
