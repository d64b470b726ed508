// The turned copy of codes of one byte: of each lane of a row all rows, one after the other, as tensor cores take V in FP8.
//
// Rows are in groups of 16. Key 8 j + 2 i + l of a group, with l < 2, lies at 4 i + 2 j + l: a thread of the forward has the keys
// 2 i, 2 i + 1, 8 + 2 i and 8 + 2 i + 1 of a group in its registers, and multiplies four that follow each other. Behind the last
// row there are zeros up to a whole group.
//
// A block has a tile: 256 rows of 128 lanes, of whatever heads, in shared memory, as vectors of 16 lanes whose places change from
// group to group, so that threads which read neighbouring groups meet no other at their bank. Blocks that run together have
// the same rows.
#include "common.cuh"

constexpr u32 ROWS = 256, LANES = 128, VECTORS = LANES / 16, GROUPS = ROWS / 16;

struct Turned {
    const u8* from;
    u8* to;
    u32 rows;
    // Lanes of all heads: a multiple of 16.
    u32 lanes;
    // Rows with those that are filled up.
    u32 positions;
};

__device__ __forceinline__ u32 place_of_vector(u32 row, u32 vector) { return row * VECTORS + (vector ^ row / 16 % VECTORS); }

// Byte `lane` of each of four words.
__device__ __forceinline__ u32 bytes_of(const u32 (&word)[4], u32 lane) {
    const u32 pairs = lane | lane + 4 << 4;
    return __byte_perm(__byte_perm(word[0], word[1], pairs), __byte_perm(word[2], word[3], pairs), 0x5410);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) turn_codes(const __grid_constant__ Turned a) {
    __shared__ uint4 tile[ROWS * VECTORS];
    const u32 first_lane = blockIdx.x * LANES, first_row = blockIdx.y * ROWS;
#pragma unroll
    for (u32 i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
        const u32 row = i / VECTORS, lane = first_lane + i % VECTORS * 16;
        uint4 lanes = make_uint4(0, 0, 0, 0);
        if (first_row + row < a.rows && lane < a.lanes)
            lanes = __ldcs((const uint4*)(a.from + (i64)(first_row + row) * a.lanes + lane));
        tile[place_of_vector(row, i % VECTORS)] = lanes;
    }
    __syncthreads();
    // A thread has four lanes of a group.
#pragma unroll
    for (u32 item = threadIdx.x; item < GROUPS * LANES / 4; item += THREADS) {
        const u32 group = item % GROUPS, four = item / GROUPS;
        const u32 lane = first_lane + 4 * four, position = first_row + 16 * group;
        if (lane >= a.lanes || position >= a.positions) continue;
        u32 columns[4][4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            u32 keys[4];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 row = 16 * group + j / 2 * 8 + 2 * i + j % 2;
                keys[j] = ((const u32*)&tile[place_of_vector(row, four / 4)])[four % 4];
            }
#pragma unroll
            for (u32 of = 0; of < 4; ++of) columns[of][i] = bytes_of(keys, of);
        }
#pragma unroll
        for (u32 of = 0; of < 4; ++of)
            *(uint4*)(a.to + (i64)(lane + of) * a.positions + position) =
                make_uint4(columns[of][0], columns[of][1], columns[of][2], columns[of][3]);
    }
}
