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
