// Codes of FP8 on a CPU: as much of CUDA and of common.cuh as their kernels use, tensors of drawn values, and the code of a
// number by the definition (`seamproof_oracle::quantise`).
#pragma once
#include "packs.h"
#include "rooms.h"
#include "threads.h"

#include <cstdio>

// Each fault is compiled anew and runs for a moment: what is optimised costs more than it saves.
#pragma GCC optimize("O0")

inline void after_earlier_launches() {}

// The numbers of a format of FP8 that are not negative. Their places are their codes.
inline std::vector<double> numbers_of(int format) {
    const bool e4m3 = format == E4M3;
    const int mantissas = e4m3 ? 8 : 4, least = e4m3 ? -9 : -16, last = e4m3 ? 0x7e : 0x7b;
    std::vector<double> numbers;
    for (int code = 0; code <= last; ++code) {
        const int exponent = code / mantissas, mantissa = code % mantissas;
        numbers.push_back(exponent == 0 ? ldexp(mantissa, least) : ldexp(mantissas + mantissa, least + exponent - 1));
    }
    return numbers;
}

// The code of the nearest number, and of two the even one. What is past the range becomes the largest number.
inline u32 code_of(int format, float x) {
    static const std::vector<double> all[] = {numbers_of(E4M3), numbers_of(E5M2)};
    const std::vector<double>& numbers = all[format == E5M2];
    const double size = fabs(x);
    if (std::isnan(x)) return 0x7f;
    u32 code = std::upper_bound(numbers.begin(), numbers.end(), size) - numbers.begin() - 1;
    if (code + 1 < numbers.size()) {
        const double below = size - numbers[code], above = numbers[code + 1] - size;
        code += above < below || (above == below && code % 2 == 1);
    }
    return code | (u32)std::signbit(x) << 7;
}

template <int FORMAT> u32 four_codes(float a, float b, float c, float d) {
    return code_of(FORMAT, a) | code_of(FORMAT, b) << 8 | code_of(FORMAT, c) << 16 | code_of(FORMAT, d) << 24;
}
// The instructions of `codes_of` are the same but for their formats.
#undef asm
#define asm(...) codes = four_codes<FORMAT>(a, b, c, d)

// Whoever reads or writes several numbers at once does so at a multiple of their size.
inline void require_whole(const void* at, size_t size) {
    if ((u64)at % size != 0) end_with("several bytes at no multiple of them\n");
}
inline void load_16(const void* from, u32* words) {
    require_whole(from, 16);
    memcpy(words, from, 16);
}
template <class T> T __ldcs(const T* at) {
    require_whole(at, sizeof *at);
    return *at;
}
template <class T> void __stcs(T* at, T value) {
    require_whole(at, sizeof value);
    *at = value;
}
inline u32 __byte_perm(u32 low, u32 high, u32 which) {
    const u64 both = (u64)high << 32 | low;
    u32 bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= (u32)(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return bytes;
}
inline u32 __vmaxu2(u32 a, u32 b) { return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16; }
inline int __clz(u32 word) { return word == 0 ? 32 : __builtin_clz(word); }
struct float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline void atomicMax(u32* at, u32 value) {
    *at = max(*at, value);
    give_way();
}
// Lanes with one value have the same of those below: all lanes of the warp come to both.
inline u32 __match_any_sync(u32, int value) {
    lanes[threadIdx.x] = value;
    sync_warp();
    u32 alike = 0;
    for (int lane = 0; lane < 32; ++lane) alike |= (u32)(lanes[warp() + lane] == (u32)value) << lane;
    sync_warp();
    return alike;
}
inline u32 __reduce_max_sync(u32 members, u32 value) {
    lanes[threadIdx.x] = value;
    sync_warp();
    u32 most = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (members >> lane & 1) most = max(most, lanes[warp() + lane]);
    sync_warp();
    return most;
}

#include "source.cu"

inline void launch(u32 x, u32 y, const std::function<void()>& body) {
    gridDim = {(int)x, (int)y};
    for (u32 j = 0; j < y; ++j)
        for (u32 i = 0; i < x; ++i) run_block(i, j, body);
}

inline u32 parts(u32 all, u32 each) { return (all + each - 1) / each; }

// The groups of a tensor, whose memory comes later.
inline Grouped grouped(u32 rows, u32 heads, u32 dim, u32 heads_each, u32 lanes_each, u32 row_groups) {
    const u32 head_groups = parts(heads, heads_each), lane_groups = parts(dim, lanes_each);
    return {nullptr, nullptr, rows, heads, dim, heads_each, lanes_each, row_groups, head_groups, lane_groups};
}
inline size_t count_of(const Grouped& a) { return (size_t)a.row_groups * a.head_groups * a.lane_groups; }

// Row groups by runs of rows, some of which are not real. A group may come again, and may have no row.
inline std::vector<int> runs_of_rows(Draw& draw, u32 rows, u32 row_groups) {
    const int longest = 1 + draw.below(2) * draw.below(40);
    std::vector<int> groups;
    while (groups.size() < rows) {
        const int group = draw.below(4) ? draw.below(row_groups) : -1;
        groups.insert(groups.end(), 1 + draw.below(longest), group);
    }
    groups.resize(rows);
    return groups;
}

// A number's bits in a format: of real rows any finite number, in others none that is finite.
struct Bits {
    int exponents, mantissas;
    // What exponents there are.
    int least, count;

    Bits(Draw& draw, int format) : exponents(format == FP16 ? 5 : 8) {
        mantissas = format == F32 ? 23 : format == BF16 ? 7 : 10;
        const int all = (1 << exponents) - 1, leasts[] = {0, 0, all / 2 - 4, 0}, counts[] = {1, 2, 8, all};
        const int kind = draw.below(4);
        least = leasts[kind], count = counts[kind];
    }
    u32 drawn(Draw& draw, bool real) const {
        const u32 all = (1 << exponents) - 1, exponent = real ? least + draw.below(count) : all;
        const u32 mantissa = draw.below(8) ? draw.below(1 << mantissas) : 0;
        return (u32)draw.below(2) << (exponents + mantissas) | exponent << mantissas | mantissa;
    }
};

// The value of a format's bits.
inline float value_of(int format, u32 bits) {
    return format == F32 ? bits_of<float>(bits) : format == BF16 ? bf16_to_f32(bits) : fp16_to_f32(bits);
}

// Drawn values with their groups. Values of some rows may be zeros alone.
struct Tensor {
    int format;
    Grouped a;
    std::vector<float> values;
    Room<u8> memory;
    Room<int> row_group;

    Tensor(Draw& draw, int format, const Grouped& shape, const std::vector<int>& groups)
        : format(format), a(shape), memory(draw, (size_t)a.rows * a.heads * a.dim * bytes()), row_group(draw, groups) {
        const Bits bits(draw, format);
        for (u32 row = 0; row < a.rows; ++row) {
            const bool zeros = groups[row] >= 0 && draw.below(8) == 0;
            for (u32 i = 0; i < a.heads * a.dim; ++i) put(zeros ? 0 : bits.drawn(draw, groups[row] >= 0));
        }
        a.values = memory.read_only(), a.row_group = row_group.read_only();
    }
    u32 bytes() const { return format == F32 ? 4 : 2; }
    // Puts the next value.
    void put(u32 bits) {
        memcpy(memory.begin() + values.size() * bytes(), &bits, bytes());
        values.push_back(value_of(format, bits));
    }
    size_t count() const { return values.size(); }
    // The place of an element's group; −1 where its row is not real.
    int group_of(size_t element) const {
        const int lane = element % a.dim, head = element / a.dim % a.heads, group = a.row_group[element / a.dim / a.heads];
        const int head_group = head / a.heads_each, lane_group = lane / a.lanes_each;
        return group < 0 ? -1 : ((int)(group * a.head_groups) + head_group) * a.lane_groups + lane_group;
    }
    // The codes by these scales.
    std::vector<u8> codes(int to, const std::vector<float>& scale) const {
        std::vector<u8> codes(count());
        for (size_t i = 0; i < count(); ++i) {
            const int group = group_of(i);
            codes[i] = group < 0 ? 0 : code_of(to, values[i] * scale[group]);
        }
        return codes;
    }
};
