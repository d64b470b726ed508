// Operations of a schedule on tables of rows: right for every table, and what a device takes where no kernel for packed
// slots fits. Rows are given as runs `offset, offset + step, …`; a table says of each run how many rows come before it.
#include "common.cuh"
#include "codes.cuh"

// Rows and heads of a tensor, as a sequence of lanes: head after head, row after row.
struct Region {
    View view;
    i64 offset;
    i64 step;
    int first_head;
    int heads;
};

// 1: the largest.
constexpr int SUM = 0, VALUE = 2;

// Elements that are combined and written, or with VALUE one value written.
struct Transfer {
    // Elements of the transfers before.
    i64 first;
    int dim;
    // Regions: `parts` that are read from `from` on, `targets` from `to` on.
    int from;
    int parts;
    int to;
    int targets;
    int operation;
    float value;
};

__device__ __forceinline__ i64 element_of(const Region& region, i64 lane, int column) {
    const i64 row = region.offset + region.step * (lane / region.heads);
    return place_of(region.view, row, region.first_head + lane % region.heads) + column;
}

__device__ __forceinline__ u32 code_at(const View& view, i64 place) {
    if (view.format == E4M3) return ((const u8*)view.base)[place];
    return view.format == F32 ? ((const u32*)view.base)[place] : ((const u16*)view.base)[place];
}

__device__ __forceinline__ void put_code(const View& view, i64 place, u32 code) {
    if (view.format == F32) ((u32*)view.base)[place] = code;
    else if (view.format == E4M3) ((u8*)view.base)[place] = (u8)code;
    else ((u16*)view.base)[place] = (u16)code;
}

// Codes of e4m3 are copied and filled: nothing adds them up.
__device__ __forceinline__ void put_value(const View& view, i64 place, float value) {
    if (view.format == E4M3) put_code(view, place, codes_of<E4M3>(value, 0.0f, 0.0f, 0.0f) & 0xff);
    else put(view, place, value);
}

// The parts in order, each sum rounded to the first one's format.
__device__ __forceinline__ float combined(const Transfer& transfer, const Region* parts, i64 lane, int column) {
    if (transfer.operation == VALUE) return transfer.value;
    float result = get(parts[0].view, element_of(parts[0], lane, column));
    for (int i = 1; i < transfer.parts; ++i) {
        const float part = get(parts[i].view, element_of(parts[i], lane, column));
        if (transfer.operation == SUM) result = rounded_to(parts[0].view.format, result + part);
        else result = part > result ? part : result;
    }
    return result;
}

// A thread has one element of a transfer: it reads all parts before it writes any target.
extern "C" __global__ void __launch_bounds__(THREADS)
    transfer_elements(const Transfer* transfers, int count, const Region* regions, i64 elements) {
    const i64 element = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (element >= elements) return;
    const Transfer transfer =
        transfers[last_at_most(0, count, element, [&](int i) { return transfers[i].first; })];
    const i64 lane = (element - transfer.first) / transfer.dim;
    const int column = (int)(element - transfer.first - lane * transfer.dim);
    const Region *const parts = regions + transfer.from, *const targets = regions + transfer.to;
    // A copy moves bits, whatever they mean.
    if (transfer.operation != VALUE && transfer.parts == 1 && parts[0].view.format == targets[0].view.format) {
        const u32 code = code_at(parts[0].view, element_of(parts[0], lane, column));
        for (int i = 0; i < transfer.targets; ++i)
            put_code(targets[i].view, element_of(targets[i], lane, column), code);
        return;
    }
    const float value = combined(transfer, parts, lane, column);
    for (int i = 0; i < transfer.targets; ++i)
        put_value(targets[i].view, element_of(targets[i], lane, column), value);
}

struct RunPair {
    i64 from_offset;
    i64 from_step;
    i64 to_offset;
    i64 to_step;
    // Rows of the pairs before.
    i64 first;
};

__device__ __forceinline__ float larger(float a, float b) { return b > a ? b : a; }

__device__ __forceinline__ float exact_log_add(float a, float b) {
    const float largest = larger(a, b);
    if (largest == neg_infinity()) return largest;
    return largest + exact_ln(1.0f + exact_exp((a == largest ? b : a) - largest));
}

__device__ __forceinline__ float exact_share(float a, float total) {
    return a == neg_infinity() ? 0.0f : exact_exp(a - total);
}

// What lies where the weight is 0 stays out.
__device__ __forceinline__ float scaled(float value, float weight) { return weight == 0.0f ? 0.0f : value * weight; }

constexpr int RUNNING = 0, STATISTICS = 1, WEIGHTED = 2, WEIGHTED_ROUNDED = 3;

// Tables of a merge, and its tensors. ApplySink has rows alone, in `to`.
struct Merge {
    const RunPair* pairs;
    int count;
    int heads;
    i64 rows;
    int dim;
    // How; of ApplySink whether the sink is learnable.
    int style;
    View out;
    View lse;
    View step_out;
    View step_lse;
};

// A warp has one row and head.
extern "C" __global__ void __launch_bounds__(THREADS) merge_pairs(const __grid_constant__ Merge a) {
    const int lane = threadIdx.x % 32;
    const i64 item = (i64)blockIdx.x * WARPS + threadIdx.x / 32, index = item / a.heads;
    if (index >= a.rows) return;
    const int head = (int)(item % a.heads);
    const RunPair pair = a.pairs[last_at_most(0, a.count, index, [&](int i) { return a.pairs[i].first; })];
    const i64 from = pair.from_offset + pair.from_step * (index - pair.first);
    const i64 to = pair.to_offset + pair.to_step * (index - pair.first);
    const i64 statistic = place_of(a.lse, to, head);
    const float old = get(a.lse, statistic), added = get(a.step_lse, place_of(a.step_lse, from, head));
    const bool known = a.style == WEIGHTED || a.style == WEIGHTED_ROUNDED;
    const float total = known ? old : exact_log_add(old, added);
    __syncwarp();
    if (lane == 0 && !known) put(a.lse, statistic, total);
    if (a.style == STATISTICS) return;
    const float keep = a.style == RUNNING ? exact_share(old, total) : 1.0f, add = exact_share(added, total);
    const i64 out = place_of(a.out, to, head), step = place_of(a.step_out, from, head);
    for (int column = lane; column < a.dim; column += 32) {
        float term = scaled(get(a.step_out, step + column), add);
        if (a.style == WEIGHTED_ROUNDED) term = rounded_to(a.out.format, term);
        put(a.out, out + column, scaled(get(a.out, out + column), keep) + term);
    }
}

// The sink enters final statistics; `step_lse` is the sink.
extern "C" __global__ void __launch_bounds__(THREADS) apply_sink(const __grid_constant__ Merge a) {
    const int lane = threadIdx.x % 32;
    const i64 item = (i64)blockIdx.x * WARPS + threadIdx.x / 32, index = item / a.heads;
    if (index >= a.rows) return;
    const int head = (int)(item % a.heads);
    const RunPair pair = a.pairs[last_at_most(0, a.count, index, [&](int i) { return a.pairs[i].first; })];
    const i64 to = pair.to_offset + pair.to_step * (index - pair.first), statistic = place_of(a.lse, to, head);
    const float old = get(a.lse, statistic), sink = a.style ? get(a.step_lse, place_of(a.step_lse, 0, head)) : 0.0f;
    const float total = exact_log_add(old, sink), keep = exact_share(old, total);
    __syncwarp();
    if (lane == 0) put(a.lse, statistic, total);
    const i64 out = place_of(a.out, to, head);
    for (int column = lane; column < a.dim; column += 32)
        put(a.out, out + column, scaled(get(a.out, out + column), keep));
}

struct SinkGradient {
    const RunPair* pairs;
    int count;
    int heads;
    i64 rows;
    int dim;
    View sink;
    View dout;
    View out;
    View lse;
    View dsink;
    // Where dout is in codes: their format, else 0, and a descale of each pair and head.
    int codes;
    const float* descales;
};

// An element of dout, without its descale.
__device__ __forceinline__ float dout_of(const SinkGradient& a, i64 place) {
    if (a.codes == 0) return get(a.dout, place);
    const u16 code = ((const u8*)a.dout.base)[place];
    return fp16_to_f32((u16)(a.codes == E4M3 ? halves_of<E4M3>(code) : halves_of<E5M2>(code)));
}

// So many cycles pass.
extern "C" __global__ void __launch_bounds__(32) hold_up(u32 cycles) {
    const i64 start = clock64();
    while (clock64() - start < cycles) continue;
}

// Adds to a count the words in which two stretches of memory differ.
extern "C" __global__ void __launch_bounds__(THREADS) differ(const u32* a, const u32* b, u64 words, u32* count) {
    u32 apart = 0;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < words; i += (u64)gridDim.x * THREADS) apart += a[i] != b[i];
    if (apart > 0) atomicAdd(count, apart);
}

// dsink of a head: -Σ e^(sink - lse) · <dout, out>, the sum over rows serial. A warp has one head.
extern "C" __global__ void __launch_bounds__(32) sink_gradient(const __grid_constant__ SinkGradient a) {
    const int lane = threadIdx.x, head = blockIdx.x;
    const float sink = get(a.sink, place_of(a.sink, 0, head));
    float sum = 0.0f;
    for (i64 tile = 0; tile < a.rows; tile += 32) {
        const i64 index = tile + lane;
        float term = 0.0f;
        bool counts = false;
        if (index < a.rows) {
            const int number = last_at_most(0, a.count, index, [&](int i) { return a.pairs[i].first; });
            const RunPair pair = a.pairs[number];
            const i64 row = pair.to_offset + pair.to_step * (index - pair.first);
            const float lse = get(a.lse, place_of(a.lse, row, head));
            const i64 dout = place_of(a.dout, row, head), out = place_of(a.out, row, head);
            counts = lse != neg_infinity();
            float d = 0.0f;
            for (int column = 0; counts && column < a.dim; ++column)
                d += dout_of(a, dout + column) * get(a.out, out + column);
            if (counts && a.codes != 0) d *= a.descales[(i64)number * a.heads + head];
            if (counts) term = exact_exp(sink - lse) * d;
        }
        const u32 counted = __ballot_sync(ALL_LANES, counts);
        for (int i = 0; i < 32; ++i) {
            const float one = __shfl_sync(ALL_LANES, term, i);
            if (counted >> i & 1) sum -= one;
        }
    }
    if (lane == 0) put(a.dsink, place_of(a.dsink, 0, head), sum);
}
