// The rotation of rows by their positions, in place. The `dim` elements of a row and head are the coefficients of a
// polynomial, which is multiplied by x^p modulo x^dim + 1 at position p: elements move p places on, and come back at
// the front with the other sign. Only signs change, so that the rotation is exact in every format.
//
// A block has a tile: some rows, and some heads of each. An *item* is the elements of a row and head. First a thread for each
// item says where it lies and how far it turns; then all threads read the tile into shared memory and write it back turned.
#include "common.cuh"

constexpr u32 TILE_BYTES = 16384;
constexpr u32 IN_FLIGHT = 4;

// Rows `offset, offset + step, …` at positions `position, position + position_step, …`.
struct Turn {
    i64 offset;
    i64 step;
    i64 position;
    i64 position_step;
    // Rows of the turns before.
    i64 first;
};

struct Rotation {
    const Turn* turns;
    int count;
    int heads;
    // Rows of all turns.
    i64 rows;
    u32 dim;
    // Whether rows are turned back.
    int inverse;
    // Of a tile; their product is at most THREADS.
    u32 tile_rows;
    u32 tile_heads;
};

// Behind a row lies the same row with the other sign, and behind that the row again. `at` begins at the row and ends
// before the third copy does.
template <class Code>
__device__ __forceinline__ Code unrolled(const Code* row, u32 codes, u32 at, Code signs) {
    if (at >= 2 * codes) at -= 2 * codes;
    return at < codes ? row[at] : (Code)(row[at - codes] ^ signs);
}

__device__ __forceinline__ uint4 unrolled(const uint4* row, u32 codes, u32 at, u32 signs) {
    if (at >= 2 * codes) at -= 2 * codes;
    if (at < codes) signs = 0;
    else at -= codes;
    const uint4 four = row[at];
    return make_uint4(four.x ^ signs, four.y ^ signs, four.z ^ signs, four.w ^ signs);
}

// Elements of a row from `from` on, which counts as above: 16 bytes of them, or one.
template <u32 BYTES>
__device__ __forceinline__ uint4 turned(const uint4* row, u32 dim, u32 from) {
    constexpr u32 SIGNS = BYTES == 1 ? 0x80808080u : BYTES == 2 ? 0x80008000u : 0x80000000u;
    const u32 byte = from * BYTES, vector = byte / 16, shift = byte % 4 * 8;
    const uint4 low = unrolled(row, dim * BYTES / 16, vector, SIGNS);
    const uint4 high = unrolled(row, dim * BYTES / 16, vector + 1, SIGNS);
    // The eight words from their first one on that is asked for; of the rest anything will do.
    u32 word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (u32 i = 0; i < 6; ++i) word[i] = byte & 8 ? word[i + 2] : word[i];
#pragma unroll
    for (u32 i = 0; i < 5; ++i) word[i] = byte & 4 ? word[i + 1] : word[i];
    return make_uint4(
        __funnelshift_r(word[0], word[1], shift), __funnelshift_r(word[1], word[2], shift),
        __funnelshift_r(word[2], word[3], shift), __funnelshift_r(word[3], word[4], shift)
    );
}
template <u32 BYTES>
__device__ __forceinline__ u32 turned(const u32* row, u32 dim, u32 from) {
    return unrolled(row, dim, from, 0x80000000u);
}
template <u32 BYTES>
__device__ __forceinline__ u16 turned(const u16* row, u32 dim, u32 from) {
    return unrolled(row, dim, from, (u16)0x8000);
}
template <u32 BYTES>
__device__ __forceinline__ u8 turned(const u8* row, u32 dim, u32 from) {
    return unrolled(row, dim, from, (u8)0x80);
}

// Elements have BYTES bytes and move by units of one or more.
template <u32 BYTES, class Unit>
__device__ __forceinline__ void rotate(const Rotation& a, Unit* tensor) {
    __shared__ Unit tile[TILE_BYTES / sizeof(Unit)];
    // Of each item the first unit in the tensor, and the element of the unrolled row that becomes its first.
    __shared__ i64 units[THREADS];
    __shared__ u32 starts[THREADS];
    constexpr u32 EACH = sizeof(Unit) / BYTES;
    const u32 of_item = a.dim / EACH, turns = 2 * a.dim;
    const i64 first = (i64)blockIdx.x * a.tile_rows, left = a.rows - first;
    const u32 first_head = blockIdx.y * a.tile_heads, heads = min(a.heads - first_head, a.tile_heads);
    const u32 count = (u32)(left < a.tile_rows ? left : a.tile_rows) * heads;
    auto first_of = [&](int i) { return a.turns[i].first; };
    const int near = last_of_warp(a.count, first, first_of);
    if (threadIdx.x < count) {
        const u32 in_tile = threadIdx.x / heads, head = first_head + threadIdx.x % heads;
        const i64 index = first + in_tile;
        // Each turn has a row, so that the row's is among the next ones.
        const int near_end = min(a.count, near + 1 + (int)in_tile);
        const Turn turn = a.turns[last_at_most(near + 1, near_end, index, first_of)];
        const i64 i = index - turn.first, row = turn.offset + turn.step * i;
        const u32 by = (u32)((turn.position + turn.position_step * i) % turns);
        units[threadIdx.x] = (row * a.heads + head) * of_item;
        starts[threadIdx.x] = a.inverse || by == 0 ? by : turns - by;
    }
    __syncthreads();
    const u32 total = count * of_item;
    for (u32 base = threadIdx.x; base < total; base += THREADS * IN_FLIGHT) {
        Unit value[IN_FLIGHT];
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            const u32 unit = min(base + i * THREADS, total - 1), item = unit / of_item;
            value[i] = __ldcs(tensor + units[item] + (unit - item * of_item));
        }
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (base + i * THREADS < total) tile[base + i * THREADS] = value[i];
    }
    __syncthreads();
    for (u32 unit = threadIdx.x; unit < total; unit += THREADS) {
        const u32 item = unit / of_item, within = unit - item * of_item;
        const Unit value = turned<BYTES>(tile + item * of_item, a.dim, starts[item] + within * EACH);
        __stcs(tensor + units[item] + within, value);
    }
}

#define ROTATE(bytes, of_unit, Unit)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                                        \
        rotate_##bytes##_##of_unit(const __grid_constant__ Rotation rotation, Unit* tensor) {                       \
        after_earlier_launches();                                                                                   \
        rotate<bytes, Unit>(rotation, tensor);                                                                      \
    }
ROTATE(1, 16, uint4)
ROTATE(1, 1, u8)
ROTATE(2, 16, uint4)
ROTATE(2, 2, u16)
ROTATE(4, 16, uint4)
ROTATE(4, 4, u32)
