// The turned copy of codes of one byte: of each lane of a row all rows, one after the other, as tensor cores take V in FP8.
// The codes are there, or are made of values on the way, with or without their copy in rows.
//
// Rows are in groups of 16. Key 8 j + 2 i + l of a group, with l < 2, lies at 4 i + 2 j + l: a thread of the forward has the keys
// 2 i, 2 i + 1, 8 + 2 i and 8 + 2 i + 1 of a group in its registers, and multiplies four that follow each other. Behind the last
// row there are zeros up to a whole group.
//
// A block has a tile: 64 rows of 128 lanes, of whatever heads, in shared memory, as vectors of 16 lanes whose places change from
// group to group, so that threads which read neighbouring groups meet no other at their bank. Blocks that run together have
// the same rows.
#include "common.cuh"
#include "codes.cuh"
#include "quantise.cuh"

constexpr u32 ROWS = 64, LANES = 128, VECTORS = LANES / 16, GROUPS = ROWS / 16;

struct Turned {
    u8* to;
    u32 rows;
    // Lanes of all heads: a multiple of 16.
    u32 lanes;
    // Rows with those that are filled up.
    u32 positions;
};

// Codes of 16 lanes of a row.
struct Codes {
    const u8* from;
    u32 lanes;

    __device__ uint4 of(u32 row, u32 lane) const { return __ldcs((const uint4*)(from + (i64)row * lanes + lane)); }
};

// The same, of values. A head has a multiple of 16 lanes, and so has a group of lanes.
template <int CODES, int FORMAT>
struct Values {
    static constexpr int N = FORMAT == F32 ? 4 : 8;
    const Grouped& a;
    const float* scale;
    u8* codes;

    __device__ uint4 of(u32 row, u32 lane) const {
        const i64 element = (i64)row * a.heads * a.dim + lane;
        Packed<FORMAT, N> values[16 / N];
#pragma unroll
        for (int i = 0; i < 16 / N; ++i) load<FORMAT, N>(a.values, element + i * N, values[i]);
        const int group = a.row_group[row];
        u32 words[4] = {};
        if (is_group(a, group)) {
            const float factor = scale[place_of_group(a, group, place_in_row_group(a, lane))];
#pragma unroll
            for (int i = 0; i < 16 / N; ++i) {
                u32 some[N / 4];
                codes_of_values<CODES>(values[i], factor, some);
#pragma unroll
                for (int word = 0; word < N / 4; ++word) words[i * N / 4 + word] = some[word];
            }
        }
        const uint4 made = make_uint4(words[0], words[1], words[2], words[3]);
        if (codes != nullptr) __stcs((uint4*)(codes + element), made);
        return made;
    }
};

__device__ __forceinline__ u32 place_of_vector(u32 row, u32 vector) { return row * VECTORS + (vector ^ row / 16 % VECTORS); }

template <class Source>
__device__ __forceinline__ void turn(const Turned& a, const Source& source, uint4* tile) {
    const u32 across = (a.lanes + LANES - 1) / LANES;
    // The last rows first, as `encode_tile` has them.
    const u32 block = gridDim.x - 1 - blockIdx.x;
    const u32 first_lane = block % across * LANES, first_row = block / across * ROWS;
#pragma unroll
    for (u32 i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
        const u32 row = i / VECTORS, lane = first_lane + i % VECTORS * 16;
        uint4 lanes = make_uint4(0, 0, 0, 0);
        if (first_row + row < a.rows && lane < a.lanes) lanes = source.of(first_row + row, lane);
        tile[place_of_vector(row, i % VECTORS)] = lanes;
    }
    __syncthreads();
    // A thread has four lanes of a group.
#pragma unroll
    for (u32 item = threadIdx.x; item < GROUPS * LANES / 4; item += THREADS) {
        const u32 group = item % GROUPS, four = item / GROUPS;
        const u32 lane = first_lane + 4 * four, position = first_row + 16 * group;
        if (lane >= a.lanes || position >= a.positions) continue;
        uint4 turned[4];
        turn_lanes(turned, [&](u32 at) {
            return ((const u32*)&tile[place_of_vector(16 * group + row_at(at), four / 4)])[four % 4];
        });
#pragma unroll
        for (u32 of = 0; of < 4; ++of) __stcs((uint4*)(a.to + (i64)(lane + of) * a.positions + position), turned[of]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 6) turn_codes(const __grid_constant__ Turned a, const u8* from) {
    after_earlier_launches();
    __shared__ uint4 tile[ROWS * VECTORS];
    turn(a, Codes{from, a.lanes}, tile);
}

#define ENCODE_TURNED(format, FORMAT)                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 6) encode_turned_##format(                                   \
        const __grid_constant__ Turned to, const __grid_constant__ Grouped a, const float* scale, u8* codes, int e5m2  \
    ) {                                                                                                                \
        after_earlier_launches();                                                                                      \
        __shared__ uint4 tile[ROWS * VECTORS];                                                                         \
        if (e5m2) turn(to, Values<E5M2, FORMAT>{a, scale, codes}, tile);                                               \
        else turn(to, Values<E4M3, FORMAT>{a, scale, codes}, tile);                                                    \
    }
ENCODE_TURNED(f32, F32)
ENCODE_TURNED(bf16, BF16)
ENCODE_TURNED(fp16, FP16)
