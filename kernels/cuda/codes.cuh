// Codes of FP8.
#pragma once

// Two codes, the first in the lower byte, as halves, which have every number of either format.
template <int FORMAT>
__device__ __forceinline__ u32 halves_of(u16 pair) {
    u32 halves;
    if constexpr (FORMAT == E4M3) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    else asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}

// Four codes, the first in the lowest byte: to nearest, ties to even. What is past the range becomes the largest number.
template <int FORMAT>
__device__ __forceinline__ u32 codes_of(float a, float b, float c, float d) {
    u32 codes;
    if constexpr (FORMAT == E4M3)
        asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
            "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
            : "=r"(codes)
            : "f"(a), "f"(b), "f"(c), "f"(d));
    else
        asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
            "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
            : "=r"(codes)
            : "f"(a), "f"(b), "f"(c), "f"(d));
    return codes;
}

// Turned copies have each lane's rows one after the other, in groups of 16. The row of a group at a position: four positions are
// the rows that a thread has beside each other in registers, two of eight and two of the next eight.
__device__ __forceinline__ u32 row_at(u32 position) { return position / 2 % 2 * 8 + position / 4 * 2 + position % 2; }

// Byte `lane` of each of four words.
__device__ __forceinline__ u32 bytes_of(const u32 (&word)[4], u32 lane) {
    const u32 pairs = lane | lane + 4 << 4;
    return __byte_perm(__byte_perm(word[0], word[1], pairs), __byte_perm(word[2], word[3], pairs), 0x5410);
}

// Four lanes of a group, each turned; `word_at` says which codes of these lanes are at a position.
template <class WordAt>
__device__ __forceinline__ void turn_lanes(uint4 (&turned)[4], WordAt word_at) {
    u32 columns[4][4];
#pragma unroll
    for (u32 four = 0; four < 4; ++four) {
        u32 rows[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) rows[i] = word_at(4 * four + i);
#pragma unroll
        for (u32 lane = 0; lane < 4; ++lane) columns[lane][four] = bytes_of(rows, lane);
    }
#pragma unroll
    for (u32 lane = 0; lane < 4; ++lane)
        turned[lane] = make_uint4(columns[lane][0], columns[lane][1], columns[lane][2], columns[lane][3]);
}
