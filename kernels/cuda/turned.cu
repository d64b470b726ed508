// The turned copy of codes of one byte: of each head and lane all rows, one after the other, as tensor cores take V in FP8.
//
// Rows are in groups of 16. Key 8 j + 2 i + l of a group, with l < 2, lies at 4 i + 2 j + l: a thread of the forward has the keys
// 2 i, 2 i + 1, 8 + 2 i and 8 + 2 i + 1 of a group in its registers, and multiplies four that follow each other. Behind the last
// row there are zeros up to a whole group.
//
// A block has a tile: 128 rows of a head in shared memory, as vectors of 16 lanes whose places change from group to group, so
// that threads which read neighbouring groups meet no other at their bank.
#include "common.cuh"

constexpr int ROWS = 128, VECTORS = 8;

struct Turned {
    const u8* from;
    u8* to;
    // Bytes from a row to the next one, and from a head to the next one.
    i64 row;
    i64 head;
    int rows;
    // Lanes of a head: a multiple of 16, 128 at most.
    int dim;
    // Rows with those that are filled up.
    int positions;
};

__device__ __forceinline__ int place_of_vector(int row, int vector) { return row * VECTORS + (vector ^ row / 16 % VECTORS); }

// Byte `lane` of each of four words.
__device__ __forceinline__ u32 bytes_of(const u32 (&word)[4], int lane) {
    const u32 pairs = lane | lane + 4 << 4;
    return __byte_perm(__byte_perm(word[0], word[1], pairs), __byte_perm(word[2], word[3], pairs), 0x5410);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) turn_codes(const __grid_constant__ Turned a) {
    static_assert(THREADS == ROWS / 16 * VECTORS * 4, "a thread for each group and four lanes");
    __shared__ uint4 tile[ROWS * VECTORS];
    const int first = blockIdx.x * ROWS, head = blockIdx.y;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
        const int row = i / VECTORS, vector = i % VECTORS;
        uint4 lanes = make_uint4(0, 0, 0, 0);
        if (first + row < a.rows && 16 * vector < a.dim)
            lanes = __ldcs((const uint4*)(a.from + (first + row) * a.row + head * a.head) + vector);
        tile[place_of_vector(row, vector)] = lanes;
    }
    __syncthreads();
    const int group = threadIdx.x % (ROWS / 16), four = threadIdx.x / (ROWS / 16);
    if (4 * four >= a.dim || first + 16 * group >= a.positions) return;
    u32 columns[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 keys[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = 16 * group + j / 2 * 8 + 2 * i + j % 2;
            keys[j] = ((const u32*)&tile[place_of_vector(row, four / 4)])[four % 4];
        }
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) columns[lane][i] = bytes_of(keys, lane);
    }
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
        u8* const to = a.to + ((i64)head * a.dim + 4 * four + lane) * a.positions + first + 16 * group;
        *(uint4*)to = make_uint4(columns[lane][0], columns[lane][1], columns[lane][2], columns[lane][3]);
    }
}
