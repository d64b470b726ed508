// What every source shares: the tables of packed sequences, number formats, and e^x and ln x.
//
// Rows are numbered in 32 bits (a launcher refuses more), elements and bytes in 64. A *slot* is the run of rows that a
// sequence owns: `span` rows from `offset`, its padding included. Slots are in order of rows and do not overlap; gaps,
// a first offset, slack behind the last slot and empty slots are ordinary. No table, however wrong, makes a kernel
// touch memory outside of its tensors: rows are compared with the tensor's before they are used.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Threads of a block, everywhere.
constexpr u32 THREADS = 256;

struct Slots {
    const int* offset;
    const int* span;
    const int* len;
    int count;
    // Rows of the tensor that the slots lie in.
    int rows;
};

// The last index below `count` with `value(index) <= row`, or -1; values do not decrease, and `low - 1` is such an index
// or -1.
template <class Value>
__device__ __forceinline__ int last_at_most(int low, int count, i64 row, Value value) {
    int high = count;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (value(middle) <= row) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

// The same for the rows of a warp's lanes, which do not decrease, all lanes together: 32 guesses at a time for the first
// lane's row, so that a thousand sequences take two rounds, and a step from there for the others.
template <class Value>
__device__ __forceinline__ int last_at_most_of_lanes(int count, i64 row, Value value) {
    const int lane = threadIdx.x % 32;
    const i64 first = __shfl_sync(0xffffffffu, row, 0);
    int low = 0, high = count;
    while (low < high) {
        const int step = (high - low + 31) / 32, guess = low + lane * step;
        const int below = __popc(__ballot_sync(0xffffffffu, guess < high && value(guess) <= first));
        if (below == 0) break;
        low += (below - 1) * step + 1;
        high = min(high, low + step - 1);
    }
    return low < count && value(low) <= row ? last_at_most(low + 1, count, row, value) : low - 1;
}

// The last slot that begins at a lane's row or before, or -1; all lanes of the warp together, their rows in order.
__device__ __forceinline__ int slot_of_lane(const Slots& slots, i64 row) {
    return last_at_most_of_lanes(slots.count, row, [&](int s) { return (i64)__ldg(slots.offset + s); });
}

__device__ __forceinline__ bool is_real(const Slots& slots, int s, i64 row) {
    return s >= 0 && row - __ldg(slots.offset + s) < __ldg(slots.len + s);
}

// A row of a half of its slot: the slot's row, the slot, and how many rows into the half it is. `half_row` counts in the
// layout of halves, in which every offset and span is divided by two. The row is -1 where no slot owns the half row. All
// lanes of the warp together.
struct HalfRow {
    int row;
    int slot;
    int in_half;
};

__device__ __forceinline__ HalfRow half_row_of_lane(const Slots& slots, int half, i64 half_row) {
    const int s =
        last_at_most_of_lanes(slots.count, half_row, [&](int i) { return (i64)(__ldg(slots.offset + i) >> 1); });
    if (s < 0) return {-1, -1, 0};
    const int offset = __ldg(slots.offset + s), chunk = __ldg(slots.span + s) >> 1;
    const i64 in_half = half_row - (offset >> 1), row = (i64)offset + (i64)half * chunk + in_half;
    if (in_half >= chunk || row < 0 || row >= slots.rows) return {-1, -1, 0};
    return {(int)row, s, (int)in_half};
}

// Formats: the launcher's Number has the same order.
constexpr int F32 = 0, BF16 = 1, FP16 = 2;

__device__ __forceinline__ float bf16_to_f32(u16 code) { return __uint_as_float((u32)code << 16); }

__device__ __forceinline__ u16 f32_to_bf16(float value) {
    u16 code;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(code) : "f"(value));
    return code;
}

__device__ __forceinline__ float fp16_to_f32(u16 code) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(code));
    return value;
}

__device__ __forceinline__ u16 f32_to_fp16(float value) {
    u16 code;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(value));
    return code;
}

template <int FORMAT>
__device__ __forceinline__ float decode(u16 code) {
    return FORMAT == BF16 ? bf16_to_f32(code) : fp16_to_f32(code);
}

template <int FORMAT>
__device__ __forceinline__ u16 encode(float value) {
    return FORMAT == BF16 ? f32_to_bf16(value) : f32_to_fp16(value);
}

template <int FORMAT>
__device__ __forceinline__ float rounded(float value) {
    return FORMAT == F32 ? value : decode<FORMAT>(encode<FORMAT>(value));
}

// N consecutive elements as they lie in memory: 16 bytes at a time where N is 8, one element where it is 1.
template <int FORMAT, int N>
struct Packed {
    u32 word[FORMAT == F32 || N == 1 ? N : N / 2];
};

template <int FORMAT, int N>
__device__ __forceinline__ void load(const void* base, i64 element, Packed<FORMAT, N>& packed) {
    if constexpr (N == 1) {
        packed.word[0] = FORMAT == F32 ? __ldcs((const u32*)base + element) : __ldcs((const u16*)base + element);
    } else {
        const uint4* from = (const uint4*)((const u8*)base + element * (FORMAT == F32 ? 4 : 2));
#pragma unroll
        for (int i = 0; i < (FORMAT == F32 ? N / 4 : N / 8); ++i) {
            const uint4 four = __ldcs(from + i);
            packed.word[4 * i] = four.x, packed.word[4 * i + 1] = four.y;
            packed.word[4 * i + 2] = four.z, packed.word[4 * i + 3] = four.w;
        }
    }
}

template <int FORMAT, int N>
__device__ __forceinline__ float unpacked(const Packed<FORMAT, N>& packed, int i) {
    return FORMAT == F32 ? __uint_as_float(packed.word[i]) : decode<FORMAT>((u16)(packed.word[i / 2] >> (16 * (i % 2))));
}

template <int FORMAT, int N>
__device__ __forceinline__ void store(void* base, i64 element, const float (&value)[N]) {
    if constexpr (FORMAT == F32) {
        float* to = (float*)base + element;
        if constexpr (N == 1) __stcs(to, value[0]);
        else
            for (int i = 0; i < N; i += 4)
                __stcs((float4*)(to + i), make_float4(value[i], value[i + 1], value[i + 2], value[i + 3]));
    } else {
        u16* to = (u16*)base + element;
        if constexpr (N == 1) __stcs(to, encode<FORMAT>(value[0]));
        else {
            u32 pairs[4];
            for (int i = 0; i < 4; ++i)
                pairs[i] = (u32)encode<FORMAT>(value[2 * i]) | (u32)encode<FORMAT>(value[2 * i + 1]) << 16;
            __stcs((uint4*)to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
        }
    }
}

constexpr u32 NEG_INFINITY_BITS = 0xff800000u;

__device__ __forceinline__ float neg_infinity() { return __uint_as_float(NEG_INFINITY_BITS); }

// e^x and ln x in f32 by the steps of FreeBSD's msun (e_expf.c, e_logf.c), which the libm crate of the CPU device takes
// too: with --fmad=false both devices give the same bits. Arguments here are never NaN.
// Copyright (C) 1993 by Sun Microsystems, Inc. Permission to use, copy, modify, and distribute this software is freely
// granted, provided that this notice is preserved.
__device__ __forceinline__ float two_to(int k) { return __int_as_float((k + 127) << 23); }

__device__ __forceinline__ float exact_exp(float x) {
    const u32 magnitude = __float_as_uint(x) & 0x7fffffffu;
    const int sign = __float_as_uint(x) >> 31;
    if (magnitude >= 0x42aeac50u) {
        if (!sign && magnitude >= 0x42b17218u) return x * two_to(127);
        if (sign && magnitude >= 0x42cff1b5u) return 0.0f;
    }
    int k = 0;
    float high = x, low = 0.0f;
    if (magnitude > 0x3eb17218u) {
        k = magnitude > 0x3f851592u ? (int)(1.4426950216e+00f * x + (sign ? -0.5f : 0.5f)) : 1 - sign - sign;
        high = x - (float)k * 6.9314575195e-01f;
        low = (float)k * 1.4286067653e-06f;
        x = high - low;
    } else if (magnitude <= 0x39000000u) {
        return 1.0f + x;
    }
    const float square = x * x;
    const float c = x - square * (1.6666625440e-1f + square * -2.7667332906e-3f);
    const float y = 1.0f + (x * c / (2.0f - c) - low + high);
    if (k == 0) return y;
    if (k > 127) return y * two_to(127) * two_to(k - 127);
    if (k < -126) return y * two_to(-102) * two_to(k + 102);
    return y * two_to(k);
}

// For x of at least 1: the sums that it is asked for hold e^0.
__device__ __forceinline__ float exact_ln(float x) {
    u32 bits = __float_as_uint(x);
    if (bits >= 0x7f800000u) return x;
    if (bits == 0x3f800000u) return 0.0f;
    bits += 0x3f800000u - 0x3f3504f3u;
    const int k = (int)(bits >> 23) - 0x7f;
    bits = (bits & 0x007fffffu) + 0x3f3504f3u;
    const float f = __uint_as_float(bits) - 1.0f;
    const float s = f / (2.0f + f);
    const float z = s * s, w = z * z;
    const float t1 = w * (0.40000972152f + w * 0.24279078841f);
    const float t2 = z * (0.66666662693f + w * 0.28498786688f);
    const float r = t2 + t1, half_square = 0.5f * f * f, dk = (float)k;
    return s * (half_square + r) + dk * 9.0580006145e-06f - half_square + f + dk * 6.9313812256e-01f;
}

// A tensor addressed by row and head, however it lies: [rows, heads, dim], [heads, rows] or [heads]. Strides count
// elements; the lanes of a row and head are neighbours.
struct View {
    u64 base;
    i64 row;
    i64 head;
    int format;
};

__device__ __forceinline__ i64 place_of(const View& view, i64 row, i64 head) {
    return row * view.row + head * view.head;
}

__device__ __forceinline__ float get(const View& view, i64 place) {
    if (view.format == F32) return ((const float*)view.base)[place];
    const u16 code = ((const u16*)view.base)[place];
    return view.format == BF16 ? bf16_to_f32(code) : fp16_to_f32(code);
}

__device__ __forceinline__ void put(const View& view, i64 place, float value) {
    if (view.format == F32) ((float*)view.base)[place] = value;
    else ((u16*)view.base)[place] = view.format == BF16 ? f32_to_bf16(value) : f32_to_fp16(value);
}

__device__ __forceinline__ float rounded_to(int format, float value) {
    if (format == F32) return value;
    return format == BF16 ? rounded<BF16>(value) : rounded<FP16>(value);
}
