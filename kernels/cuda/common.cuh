// What every source shares: the tables of packed sequences, number formats, and e^x and ln x.
//
// Rows are numbered in 32 bits (a launcher refuses more), elements and bytes in 64. A *slot* is the run of rows that a
// sequence owns: `span` rows from `offset`, its padding included. Slots are in order of rows and do not overlap; gaps,
// a first offset, slack behind the last slot and empty slots are ordinary. No table of slots, however wrong, makes a kernel
// touch memory outside of its tensors: rows are compared with the tensor's before they are used. A table of an attention call
// is not: its launcher has checked it, and whoever rewrites one for a recorded graph answers for it.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Threads and warps of a block, everywhere.
constexpr u32 THREADS = 256, WARPS = THREADS / 32;

// Kernels in a row overlap: one may be started while the one before still runs (programmatic dependent launch), so that the
// cost of a start is hidden. The first statement of each (but see `plan_before_waiting`): it waits until all that was launched
// before has ended and what that wrote can be seen, and lets the next one be started.
__device__ __forceinline__ void after_earlier_launches() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

struct Slots {
    const int* offset;
    const int* span;
    const int* len;
    int count;
    // Rows of the tensor that the slots lie in.
    int rows;
    // Slots of a row, on average.
    float per_row;
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

constexpr u32 ALL_LANES = 0xffffffffu;

// A slot; index -1 and no rows where there is none.
struct Slot {
    int index;
    int offset;
    int span;
    int len;
};
// Where slots behind the last one begin.
constexpr int NOWHERE = 0x7fffffff;

__device__ __forceinline__ Slot slot_at(const Slots& slots, int s) {
    if (s >= slots.count) return {s, NOWHERE, 0, 0};
    return {s, slots.offset[s], slots.span[s], slots.len[s]};
}

// The last slot that begins at the row or before: no warp is needed.
__device__ __forceinline__ Slot slot_of_row(const Slots& slots, u32 row) {
    const int s = last_at_most(0, slots.count, row, [&](int i) { return (i64)slots.offset[i]; });
    return s < 0 ? Slot{-1, 0, 0, 0} : slot_at(slots, s);
}

// The last index below `count` with `value(index) <= row`, or -1; values do not decrease. All lanes of a warp together, 32
// guesses at a time: a thousand values take two rounds.
template <class Row, class Value>
__device__ __forceinline__ int last_of_warp(int count, Row row, Value value) {
    int low = 0, high = count;
    while (low < high) {
        const int step = (high - low + 31) / 32, guess = low + (threadIdx.x % 32) * step;
        const int below = __popc(__ballot_sync(ALL_LANES, guess < high && value(guess) <= row));
        if (below == 0) break;
        low += (below - 1) * step + 1;
        high = min(high, low + step - 1);
    }
    return low - 1;
}

// The index of the last slot that begins at the row or before, or -1: no other lane's row may differ.
__device__ __forceinline__ int slot_of_warp(const Slots& slots, u32 row) {
    return last_of_warp(slots.count, row, [&](int i) { return (u32)slots.offset[i]; });
}

// How slots are found fast. The 32 lanes of a warp have a *window* of 32 slots one after the other, one each: what is
// asked of it takes votes and shuffles, and no further access. Where the window lies is guessed, as if all slots were of
// one length, so that its tables can be asked for before anything is known; where the guess misses it is looked for.
// `row` is the first lane's. All lanes together.
__device__ __forceinline__ Slot guessed_window(const Slots& slots, u32 row) {
    const int guess = min((int)((float)row * slots.per_row) - 12, slots.count - 32);
    return slot_at(slots, max(guess, 0) + threadIdx.x % 32);
}

// The same window, or a better one: it holds the last slot that begins at the row or before, if there is one.
__device__ __forceinline__ Slot window_of(const Slots& slots, u32 row, const Slot& guess) {
    if (slots.count <= 32) return guess;
    const int base = guess.index - threadIdx.x % 32;
    const u32 before = __ballot_sync(ALL_LANES, guess.offset <= row);
    if ((before != 0 || base == 0) && (before != ALL_LANES || base + 32 >= slots.count)) return guess;
    return slot_at(slots, max(slot_of_warp(slots, row), 0) + threadIdx.x % 32);
}

// So many slots that begin among a warp's rows are compared one by one: their shuffles do not wait for each other.
constexpr int FEW = 4;

// The last slot that begins at a lane's row or before; the lanes' rows do not decrease.
__device__ __forceinline__ Slot slot_of_lane(const Slots& slots, u32 row, const Slot& guess) {
    const u32 first = __shfl_sync(ALL_LANES, row, 0), last = __shfl_sync(ALL_LANES, row, 31);
    Slot window = window_of(slots, first, guess), found = {-1, 0, 0, 0};
    while (true) {
        const int base = window.index - threadIdx.x % 32;
        const u32 before_first = __ballot_sync(ALL_LANES, window.offset <= first);
        const u32 before_last = __ballot_sync(ALL_LANES, window.offset <= last);
        int count = __popc(before_first);
        const int since = count, begin = __popc(before_last) - since;
        if (begin <= FEW) {
            if (begin > 0) {
#pragma unroll
                for (int i = 0; i < FEW; ++i) {
                    const u32 offset = __shfl_sync(ALL_LANES, window.offset, since + i);
                    if (i < begin && offset <= row) ++count;
                }
            }
        } else {
            count = 0;
            for (int step = 16; step > 0; step /= 2)
                if (__shfl_sync(ALL_LANES, window.offset, count + step - 1) <= row) count += step;
            if (__shfl_sync(ALL_LANES, window.offset, count) <= row) ++count;
        }
        const int lane = max(count - 1, 0), offset = __shfl_sync(ALL_LANES, window.offset, lane);
        const int span = __shfl_sync(ALL_LANES, window.span, lane), len = __shfl_sync(ALL_LANES, window.len, lane);
        if (count > 0) found = {base + lane, offset, span, len};
        if (before_last != ALL_LANES || base + 32 >= slots.count) return found;
        window = slot_at(slots, window.index + 32);
    }
}

__device__ __forceinline__ Slot slot_of_lane(const Slots& slots, u32 row) {
    return slot_of_lane(slots, row, guessed_window(slots, __shfl_sync(ALL_LANES, row, 0)));
}

__device__ __forceinline__ bool is_real(const Slot& slot, u32 row) { return (i64)row - slot.offset < slot.len; }

// `count` ones from bit `start`, those of the word.
__device__ __forceinline__ u32 ones(int start, int count) {
    u32 word;
    asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(word) : "r"(start), "r"(count));
    return word;
}

// Which of EACH neighbouring rows are real, the first in the lowest bit; all lanes of the warp together, in order.
template <int EACH>
__device__ __forceinline__ u32 real_rows(const Slots& slots, u32 row, const Slot& guess) {
    Slot slot = slot_of_lane(slots, row, guess);
    if (row >= slots.rows) return 0;
    if (EACH == 1) return is_real(slot, row);
    u32 real = 0;
    while (true) {
        const int begin = slot.offset - (int)row, start = max(begin, 0);
        real |= ones(start, max(begin + slot.len - start, 0));
        if (begin + slot.span >= EACH || slot.index + 1 >= slots.count) break;
        slot = slot_at(slots, slot.index + 1);
        if (slot.offset - (int)row >= EACH) break;
    }
    return real & ones(0, min(slots.rows - (int)row, EACH));
}

// A row of a half of its slot: the slot's row, the slot, and how many rows into the half it is. `half_row` counts in the
// layout of halves, in which every offset and span is divided by two. The row is -1 where no slot owns the half row. All
// lanes of the warp together.
struct HalfRow {
    int row;
    u32 in_half;
    Slot slot;
};

__device__ __forceinline__ HalfRow half_row_of_slot(const Slots& slots, int half, u32 half_row, const Slot& slot) {
    const u32 offset = slot.offset, chunk = slot.span >> 1;
    const u32 in_half = half_row - (offset >> 1), row = offset + half * chunk + in_half;
    if (slot.index < 0 || in_half >= chunk || row >= slots.rows) return {-1, 0, slot};
    return {(int)row, in_half, slot};
}

__device__ __forceinline__ HalfRow half_row_of_lane(const Slots& slots, int half, u32 half_row) {
    // The last slot whose offset, divided by two, is the half row's at most.
    return half_row_of_slot(slots, half, half_row, slot_of_lane(slots, 2 * half_row + 1));
}

// Formats: the launcher's Number has the same order.
constexpr int F32 = 0, BF16 = 1, FP16 = 2, E4M3 = 3, E5M2 = 4;

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

// 16 bytes, asked for at this place in the program. Loads are made by all lanes, those that have nothing to read from the
// tensor's first elements: behind a condition, the assembler has one load wait for another.
__device__ __forceinline__ void load_16(const void* from, u32* words) {
    asm volatile("ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
}

template <int FORMAT, int N>
__device__ __forceinline__ void load(const void* base, i64 element, Packed<FORMAT, N>& packed) {
    if constexpr (N == 1) {
        packed.word[0] = FORMAT == F32 ? __ldcs((const u32*)base + element) : __ldcs((const u16*)base + element);
    } else {
        const u8* const from = (const u8*)base + element * (FORMAT == F32 ? 4 : 2);
#pragma unroll
        for (int i = 0; i < (FORMAT == F32 ? N / 4 : N / 8); ++i) load_16(from + 16 * i, packed.word + 4 * i);
    }
}

// EACH words, 16 bytes at a time where they are four.
template <int EACH>
__device__ __forceinline__ void load_words(const u32* from, u32 (&words)[EACH]) {
    if constexpr (EACH == 4) load_16(from, words);
    else asm volatile("ld.global.cs.b32 %0, [%1];" : "=r"(words[0]) : "l"(from));
}

// The same back, those whose bit is set.
template <int EACH>
__device__ __forceinline__ void store_words(u32* to, const u32 (&words)[EACH], u32 which) {
    if (EACH == 4 && which == 15) {
        __stcs((uint4*)to, make_uint4(words[0], words[1 % EACH], words[2 % EACH], words[3 % EACH]));
    } else {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (which >> i & 1) to[i] = words[i];
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
            // An ordinary store: merges of 16 bits take a hundredth longer with a streaming one.
            *(uint4*)to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}

constexpr u32 NEG_INFINITY_BITS = 0xff800000u;

__device__ __forceinline__ float neg_infinity() { return __uint_as_float(NEG_INFINITY_BITS); }

// e^x and ln(e^a + e^b) in f32, the steps of the twin (`helpers::exponential`): a product that is added to something is
// rounded with it, once, and nothing is divided, so that both give the same bits and a merge waits for memory alone.
//
// e^x = 2^k · e^r with r within ln 2 / 2, for x of at most 88; 0 below -87. Both ends are short of f32's normal numbers'.
__device__ __forceinline__ float bounded_exponential(float x) {
    // Adding 1.5 · 2^23 rounds to an integer, which is then in the lowest bits.
    const float shifted = __fmaf_rn(x, 1.442695f, 12582912.0f);
    const float k = shifted - 12582912.0f;
    const float r = __fmaf_rn(k, -1.4286068e-06f, __fmaf_rn(k, -0.69314575f, x));
    float series = __fmaf_rn(0.001381454f, r, 0.008368745f);
    series = __fmaf_rn(series, r, 0.04166839f);
    series = __fmaf_rn(series, r, 0.16666521f);
    series = __fmaf_rn(series, r, 0.49999994f);
    const float power = 1.0f + __fmaf_rn(series, r * r, r);
    const float two_to_k = __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
    return x < -87.0f ? 0.0f : power * two_to_k;
}

__device__ __forceinline__ float exponential(float x) {
    return x > 88.0f ? __uint_as_float(0x7f800000u) : bounded_exponential(x);
}

// ln(1 + e) for e from 0 to 1.
__device__ __forceinline__ float log_of_one_and(float e) {
    float series = __fmaf_rn(-0.0033184746f, e, 0.020204594f);
    series = __fmaf_rn(series, e, -0.05766446f);
    series = __fmaf_rn(series, e, 0.10680557f);
    series = __fmaf_rn(series, e, -0.15355398f);
    series = __fmaf_rn(series, e, 0.19695401f);
    series = __fmaf_rn(series, e, -0.24958588f);
    series = __fmaf_rn(series, e, 0.33330512f);
    series = __fmaf_rn(series, e, -0.4999993f);
    return __fmaf_rn(series, e * e, e);
}

// -inf is the identity, of -inf too, whose difference is nothing; NaN stays.
__device__ __forceinline__ float log_add(float a, float b) {
    const float difference = a == b ? 0.0f : a - b;
    return fmaxf(a, b) + log_of_one_and(bounded_exponential(-fabsf(difference)));
}

// e^x and ln x in f32 by the steps of FreeBSD's msun (e_expf.c, e_logf.c), which the libm crate of the CPU device takes too:
// with --fmad=false both devices give the same bits, which attention and merges on tables are held to. Arguments are never NaN.
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

// For normal x: the sums that it is asked for hold e^0, or 2 to the power of a rest of the forward.
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

// The tables of an attention call.
//
// Rows of queries, of which `q_len` are real, and the band of local keys that local query i sees: i + lo to i + hi. From the
// first `sink_tokens` keys `lo` hides none, and from the first `prefix` ones `hi`. Of bands the prefix is 0.
struct QuerySegment {
    i64 q_offset;
    i64 q_step;
    i64 q_len;
    // Owned rows of the segments before.
    i64 first_row;
    // Real keys, in `runs` runs from `first_run`.
    i64 keys;
    i64 lo;
    i64 hi;
    i64 sink_tokens;
    i64 first_run;
    i64 runs;
    i64 prefix;
};

// Rows of keys.
struct KeyRun {
    i64 offset;
    i64 step;
    i64 len;
    // Owned rows of the runs before, of all segments.
    i64 first_row;
    // Its first key among those of its segment.
    i64 first_key;
    i64 segment;
};

// A number that only grows, by whoever comes.
__device__ __forceinline__ void raise(const View& largest, i64 place, float value) {
    const int bits = __float_as_int(value);
    if (bits >= 0) atomicMax((int*)largest.base + place, bits);
    else atomicMin((u32*)largest.base + place, (u32)bits);
}
