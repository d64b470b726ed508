// Quantising: the largest magnitude of each group, its factors, and the codes. The definition is `seamproof_oracle::quantise`.
//
// Under context parallelism each rank finds the magnitudes of its own rows, all ranks take the largest, and each makes its
// factors and codes of those. Magnitudes are compared as integers: those of numbers that are not negative have their order.
//
// A thread has one column of the tensor, 16 bytes of a row or one element, and goes down the rows of its block's tile. So its
// head and lanes stay, and the group changes with the rows alone.
//
// A group that has one row over all ranks is known when that row has been read. Where 4 to 32 neighbouring threads have all of
// it, a power of two, they make its magnitude, its factors and its codes from what they hold: such values are read once.
#include "common.cuh"
#include "codes.cuh"
#include "quantise.cuh"

constexpr u32 IN_FLIGHT = 4;

// A thread's place: its element in each row, its first row in the tile, and the rows from one to the next. Threads that are
// left over have no column, and read the first.
struct Column {
    u32 elements_of_row;
    u32 element;
    u32 row;
    u32 down;
    bool has;

    __device__ i64 at(u32 row) const { return (u64)row * elements_of_row + element; }
};

template <int N>
__device__ __forceinline__ Column column_of(const Grouped& a) {
    const u32 elements = a.heads * a.dim, across = elements / N;
    const u32 first = blockIdx.y * THREADS, width = min(across - first, THREADS);
    const u32 down = THREADS / width, row = threadIdx.x / width;
    const bool has = row < down;
    return {elements, has ? (first + threadIdx.x % width) * N : 0, has ? row : 0, down, has};
}

template <int FORMAT, int N>
__device__ __forceinline__ void load_rows(
    const Grouped& a, const Column& column, u32 row, u32 end, Packed<FORMAT, N> (&values)[IN_FLIGHT], int (&group)[IN_FLIGHT]
) {
#pragma unroll
    for (u32 i = 0; i < IN_FLIGHT; ++i) {
        const u32 at = row + i * column.down, there = min(at, a.rows - 1);
        group[i] = a.row_group[there];
        load<FORMAT, N>(a.values, column.at(there), values[i]);
        if (!column.has || at >= end) group[i] = -1;
    }
}

// The bits of magnitudes: of f32 in whole words, of 16 bits in both halves of a word.
template <int FORMAT>
__device__ __forceinline__ u32 larger_of(u32 one, u32 other) {
    return FORMAT == F32 ? max(one, other) : __vmaxu2(one, other);
}

template <int FORMAT, int N>
__device__ __forceinline__ u32 larger(u32 most, const Packed<FORMAT, N>& values) {
    constexpr u32 SIGNS = FORMAT == F32 ? 0x80000000u : 0x80008000u;
#pragma unroll
    for (u32 i = 0; i < sizeof values / 4; ++i) most = larger_of<FORMAT>(most, values.word[i] & ~SIGNS);
    return most;
}

template <int FORMAT>
__device__ __forceinline__ u32 f32_bits(u32 most) {
    if (FORMAT == F32) return most;
    return __float_as_uint(decode<FORMAT>((u16)max(most & 0xffff, most >> 16)));
}

// Every lane of a warp has a place, or −1, and a magnitude for it. Lanes with one place send one.
template <bool LOOKS>
__device__ __forceinline__ void send(u32* amax, int place, u32 bits) {
    const u32 alike = __match_any_sync(ALL_LANES, place);
    const u32 most = __reduce_max_sync(alike, bits);
    if (place < 0 || (alike & ((1u << threadIdx.x % 32) - 1)) != 0) return;
    // Few blocks have something new for a group that all of them share: to look is cheaper than to queue.
    if (!LOOKS || most > *(volatile u32*)(amax + place)) atomicMax(amax + place, most);
}

template <int FORMAT, int N>
__device__ __forceinline__ void largest(const Grouped& a, u32* amax, u32 tile_rows) {
    const Column column = column_of<N>(a);
    const u32 begin = blockIdx.x * tile_rows, end = min(begin + tile_rows, a.rows);
    const u32 place = place_in_row_group(a, column.element);
    int group = -1;
    u32 most = 0;
    for (u32 base = begin; base < end; base += IN_FLIGHT * column.down) {
        Packed<FORMAT, N> values[IN_FLIGHT];
        int of_row[IN_FLIGHT];
        load_rows<FORMAT, N>(a, column, base + column.row, end, values, of_row);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            const bool real = is_group(a, of_row[i]), turns = real && of_row[i] != group;
            if (__any_sync(ALL_LANES, turns && group >= 0)) {
                send<false>(amax, group < 0 ? -1 : (int)place_of_group(a, group, place), f32_bits<FORMAT>(most));
                most = 0;
            }
            if (turns) group = of_row[i];
            if (real) most = larger(most, values[i]);
        }
    }
    send<true>(amax, group < 0 ? -1 : (int)place_of_group(a, group, place), f32_bits<FORMAT>(most));
}

template <int N>
__device__ __forceinline__ void store_codes(u8* to, const u32 (&words)[(N + 3) / 4]) {
    if constexpr (N == 8) __stcs((uint2*)to, make_uint2(words[0], words[1]));
    else if constexpr (N == 4) __stcs((u32*)to, words[0]);
    else *to = (u8)words[0];
}

// Codes of a row, zeros where it is not real.
template <int CODES, int FORMAT, int N>
__device__ __forceinline__ void encode_row(
    const Grouped& a, int group, const Packed<FORMAT, N>& values, float scale, u8* codes
) {
    u32 words[(N + 3) / 4] = {};
    if (is_group(a, group)) codes_of_values<CODES>(values, scale, words);
    store_codes<N>(codes, words);
}

// Blocks begin with the last rows: those that magnitudes were just looked for in are in the cache.
template <int CODES, int FORMAT, int N>
__device__ __forceinline__ void encode_tile(const Grouped& a, const float* scale, u8* codes, u32 tile_rows) {
    const Column column = column_of<N>(a);
    const u32 begin = (gridDim.x - 1 - blockIdx.x) * tile_rows, end = min(begin + tile_rows, a.rows);
    const u32 place = place_in_row_group(a, column.element);
    for (u32 base = begin; base < end; base += IN_FLIGHT * column.down) {
        Packed<FORMAT, N> values[IN_FLIGHT];
        int group[IN_FLIGHT];
        float factor[IN_FLIGHT];
        load_rows<FORMAT, N>(a, column, base + column.row, end, values, group);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            factor[i] = is_group(a, group[i]) ? scale[place_of_group(a, group[i], place)] : 0.0f;
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            const u32 row = base + column.row + i * column.down;
            if (column.has && row < end) encode_row<CODES>(a, group[i], values[i], factor[i], codes + column.at(row));
        }
    }
}

#define QUANTISE(format, FORMAT, name, N)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        largest_##format##name(const __grid_constant__ Grouped a, u32* amax, u32 tile_rows) {                          \
        after_earlier_launches();                                                                                      \
        largest<FORMAT, N>(a, amax, tile_rows);                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        encode_##format##name(const __grid_constant__ Grouped a, const float* scale, u8* codes, u32 tile_rows, int e5m2) { \
        after_earlier_launches();                                                                                      \
        if (e5m2) encode_tile<E5M2, FORMAT, N>(a, scale, codes, tile_rows);                                            \
        else encode_tile<E4M3, FORMAT, N>(a, scale, codes, tile_rows);                                                 \
    }
QUANTISE(f32, F32, _vectors, 4)
QUANTISE(f32, F32, _elements, 1)
QUANTISE(bf16, BF16, _vectors, 8)
QUANTISE(bf16, BF16, _elements, 1)
QUANTISE(fp16, FP16, _vectors, 8)
QUANTISE(fp16, FP16, _elements, 1)

// Magnitudes become the larger of theirs and another rank's.
extern "C" __global__ void __launch_bounds__(THREADS) larger_magnitudes(u32* amax, const u32* other, u32 count) {
    after_earlier_launches();
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < count) amax[i] = max(amax[i], other[i]);
}

// A rule from a magnitude to factors, and the history of a delayed one.
struct Recipe {
    // The format's largest number times 2^−margin, and the exponent that e8m0-down takes off.
    float largest;
    int exponent;
    int rule;
    // The scale where the magnitude is 0, by the rules that ask for one.
    float otherwise;
    // Magnitudes of earlier steps, the newest first, and room for the next step's; without one they are absent.
    const float* history;
    float* next;
    int entries;
    int newest;
};
// 1: power-of-two, which is e8m0-up but for a magnitude of 0.
constexpr int BY_F32 = 0, E8M0_UP = 2, E8M0_DOWN = 3;

__device__ __forceinline__ float power(int exponent) {
    return __int_as_float(exponent > -127 ? exponent + 127 << 23 : 1 << 22);
}

// The power of two at the bottom of a number's binade; 2^−127 below the normal range.
__device__ __forceinline__ float power_below(float number) {
    return number >= power(-126) ? __int_as_float(__float_as_int(number) & 0x7f800000) : power(-127);
}

__device__ __forceinline__ int exponent_of(float number) {
    const int bits = __float_as_int(number);
    return bits >> 23 ? (bits >> 23) - 127 : 31 - __clz(bits) - 149;
}

__device__ __forceinline__ float2 factors_of(const Recipe& recipe, float amax) {
    const float quotient = fminf(recipe.largest / amax, 3.402823466e38f);
    if (recipe.rule == E8M0_DOWN) {
        const int exponent = amax == 0.0f ? -127 : min(max(exponent_of(amax) - recipe.exponent, -127), 127);
        return make_float2(power(-exponent), power(exponent));
    }
    float scale = recipe.rule == BY_F32 ? quotient : power_below(quotient);
    if (amax == 0.0f && recipe.rule != E8M0_UP) scale = recipe.otherwise;
    return make_float2(scale, 1.0f / scale);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    factors_of_magnitudes(const __grid_constant__ Recipe recipe, const float* amax, float* scale, float* descale, u32 count) {
    after_earlier_launches();
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    float taken = amax[i];
    if (recipe.history != nullptr) {
        taken = recipe.history[0];
        for (int entry = 1; entry < recipe.entries && !recipe.newest; ++entry) taken = fmaxf(taken, recipe.history[entry]);
        for (int entry = 0; entry < recipe.entries && i == 0; ++entry)
            recipe.next[entry] = entry == 0 ? amax[0] : recipe.history[entry - 1];
    }
    const float2 factors = factors_of(recipe, taken);
    scale[i] = factors.x;
    descale[i] = factors.y;
}

struct Factors {
    float* amax;
    float* scale;
    float* descale;
};

// Of two magnitudes, one for each of two lanes, a lane takes its own and what the other has for it.
template <int FORMAT>
__device__ __forceinline__ u32 larger_of_lanes(u32 one, u32 other, u32 apart) {
    const bool second = threadIdx.x & apart;
    return larger_of<FORMAT>(second ? other : one, __shfl_xor_sync(ALL_LANES, second ? one : other, apart));
}

// Neighbouring lanes, a power of two and four at least, each with a magnitude of four rows. A lane is left with the largest
// of all of them in one row: the lane's number modulo four.
template <int FORMAT>
__device__ __forceinline__ u32 largest_of_own_row(const u32 (&most)[4], u32 together) {
    u32 row = larger_of_lanes<FORMAT>(
        larger_of_lanes<FORMAT>(most[0], most[1], 1), larger_of_lanes<FORMAT>(most[2], most[3], 1), 2
    );
    for (u32 apart = 4; apart < together; apart *= 2) row = larger_of_lanes<FORMAT>(row, row, apart);
    return row;
}

// `together` threads have a group. Their places in a warp begin at a multiple of it, as columns and their width do. Each of
// the first four makes the factors of a row. Codes are absent where a turned copy is all that is made of them.
template <int CODES, int FORMAT, int N>
__device__ __forceinline__ void encode_rows_once(
    const Grouped& a, const Recipe& recipe, const Factors& to, u8* codes, u32 tile_rows, u32 together
) {
    static_assert(IN_FLIGHT == 4, "a lane of four has a row");
    const Column column = column_of<N>(a);
    const u32 begin = blockIdx.x * tile_rows, end = min(begin + tile_rows, a.rows);
    // Heads are no groups together, and lanes are whole ones.
    const u32 place = column.element / N >> __ffs(together) - 1, own = threadIdx.x % 4;
    for (u32 base = begin; base < end; base += IN_FLIGHT * column.down) {
        Packed<FORMAT, N> values[IN_FLIGHT];
        int group[IN_FLIGHT];
        u32 most[IN_FLIGHT];
        load_rows<FORMAT, N>(a, column, base + column.row, end, values, group);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i) most[i] = larger<FORMAT, N>(0, values[i]);
        const float amax = __uint_as_float(f32_bits<FORMAT>(largest_of_own_row<FORMAT>(most, together)));
        const float2 factors = factors_of(recipe, amax);
        const int of_own = own < 2 ? own == 0 ? group[0] : group[1] : own == 2 ? group[2] : group[3];
        if (threadIdx.x % together < 4 && is_group(a, of_own)) {
            const u32 at = place_of_group(a, of_own, place);
            to.amax[at] = amax, to.scale[at] = factors.x, to.descale[at] = factors.y;
        }
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            const u32 row = base + column.row + i * column.down;
            const float scale = __shfl_sync(ALL_LANES, factors.x, i, 4);
            if (codes != nullptr && column.has && row < end)
                encode_row<CODES>(a, group[i], values[i], scale, codes + column.at(row));
        }
    }
}

#define QUANTISE_ROWS(format, FORMAT, N)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) encode_rows_##format(                                        \
        const __grid_constant__ Grouped a, const __grid_constant__ Recipe recipe, const __grid_constant__ Factors to,  \
        u8* codes, u32 tile_rows, u32 together, int e5m2                                                               \
    ) {                                                                                                                \
        after_earlier_launches();                                                                                      \
        if (e5m2) encode_rows_once<E5M2, FORMAT, N>(a, recipe, to, codes, tile_rows, together);                        \
        else encode_rows_once<E4M3, FORMAT, N>(a, recipe, to, codes, tile_rows, together);                             \
    }
QUANTISE_ROWS(f32, F32, 4)
QUANTISE_ROWS(bf16, BF16, 8)
QUANTISE_ROWS(fp16, FP16, 8)
