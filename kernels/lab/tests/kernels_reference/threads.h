// A block of a CUDA kernel on a CPU, thread by thread: as much of CUDA as its checks use. Threads are coroutines, which give
// way where they wait for one another: at a block's barrier, and where a warp's lanes exchange values or multiply.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <csetjmp>
#include <cstring>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 THREADS = 256, LANES_OF_A_WARP = 32;
enum { F32, BF16, FP16, E4M3, E5M2 };

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static

struct Index {
    int x, y;
};
inline Index threadIdx, blockIdx, gridDim;
struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
// Dynamic shared memory.
alignas(16) inline u8 memory[256 * 1024];

using std::max, std::min;

struct Threads {
    // A thread begins with a context of its own. From then on it comes and goes by jumps, which ask nothing of the
    // system.
    ucontext_t begin[THREADS];
    bool has_begun[THREADS];
    jmp_buf main, of[THREADS];
    std::unique_ptr<u8[]> stacks[THREADS];
    // How many times a thread came to a barrier of its block, of its warp, and of the four that exchange values.
    u64 at_block[THREADS], at_warp[THREADS], at_quad[THREADS];
    bool ended[THREADS];
    int running;
    std::function<void()> body;
};
inline Threads threads;

inline void give_way() {
    if (_setjmp(threads.of[threads.running]) == 0) _longjmp(threads.main, 1);
}

// Returns when the thread gives way.
inline void go_on(int thread) {
    if (_setjmp(threads.main) != 0) return;
    if (threads.has_begun[thread]) _longjmp(threads.of[thread], 1);
    threads.has_begun[thread] = true;
    setcontext(&threads.begin[thread]);
}

inline void wait_for(u64 (&arrived)[THREADS], int first, int count) {
    const u64 own = ++arrived[threadIdx.x];
    while (std::any_of(arrived + first, arrived + first + count, [&](u64 other) { return other < own; })) give_way();
}
inline int warp() { return threadIdx.x / LANES_OF_A_WARP * LANES_OF_A_WARP; }
inline void sync_warp() { wait_for(threads.at_warp, warp(), LANES_OF_A_WARP); }
inline void __syncwarp() { sync_warp(); }
inline void __syncthreads() { wait_for(threads.at_block, 0, THREADS); }
// A thread that is late lets all others go on, round for round.
inline void __nanosleep(u32 nanoseconds) {
    for (u32 rounds = nanoseconds / 100; rounds > 0; --rounds) give_way();
}

inline void run_thread() {
    threads.body();
    threads.ended[threads.running] = true;
    give_way();
}

// Runs a block to its end.
inline void run_block(int x, int y, std::function<void()> body) {
    constexpr size_t STACK = 64 * 1024;
    blockIdx = {x, y}, threads.body = body;
    for (u32 t = 0; t < THREADS; ++t) {
        threads.at_block[t] = threads.at_warp[t] = threads.at_quad[t] = 0;
        threads.ended[t] = threads.has_begun[t] = false;
        if (!threads.stacks[t]) threads.stacks[t].reset(new u8[STACK]);
        getcontext(&threads.begin[t]);
        threads.begin[t].uc_stack.ss_sp = threads.stacks[t].get(), threads.begin[t].uc_stack.ss_size = STACK;
        makecontext(&threads.begin[t], run_thread, 0);
    }
    // Of a warp the last lane first: nothing may depend on an order.
    for (bool any = true; any;) {
        any = false;
        for (int t = THREADS - 1; t >= 0; --t) {
            if (threads.ended[t]) continue;
            any = true, threads.running = threadIdx.x = t;
            go_on(t);
        }
    }
}

template <class To, class From> To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline double __longlong_as_double(u64 x) { return bits_of<double>(x); }
inline u64 __double_as_longlong(double x) { return bits_of<u64>(x); }
inline u32 __float_as_uint(float x) { return bits_of<u32>(x); }
inline int __float_as_int(float x) { return bits_of<int>(x); }
inline float __uint_as_float(u32 x) { return bits_of<float>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline float __double2float_ru(double x) {
    const float near = (float)x;
    return (double)near < x ? nextafterf(near, INFINITY) : near;
}
inline float __fmul_ru(float x, float y) { return __double2float_ru((double)x * y); }
inline float bf16_to_f32(u16 code) { return bits_of<float>((u32)code << 16); }
inline float fp16_to_f32(u16 code) {
    const int exponent = code >> 10 & 31, mantissa = code & 1023;
    const float size = exponent == 31 ? (mantissa == 0 ? INFINITY : NAN)
                     : exponent > 0   ? ldexpf(1024 + mantissa, exponent - 25)
                                      : ldexpf(mantissa, -24);
    return code >> 15 ? -size : size;
}

inline u32 atomicOr(u32* at, u32 bits) {
    const u32 before = *at;
    *at |= bits;
    // Whoever comes next may be any thread.
    give_way();
    return before;
}
inline u32 __ldcg(const u32* at) { return *at; }

// What each lane has for the others of its warp. All of them come here, or the program would not end.
inline u32 lanes[THREADS];
template <class T> T __shfl_sync(u32, T value, int lane, int width = LANES_OF_A_WARP) {
    lanes[threadIdx.x] = bits_of<u32>(value);
    sync_warp();
    const T other = bits_of<T>(lanes[threadIdx.x / width * width + lane % width]);
    sync_warp();
    return other;
}
template <class T> T __shfl_xor_sync(u32 all, T value, int by) {
    return __shfl_sync(all, value, (threadIdx.x % LANES_OF_A_WARP) ^ by);
}
inline u32 __ballot_sync(u32, bool vote) {
    lanes[threadIdx.x] = vote;
    sync_warp();
    u32 votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= lanes[warp() + lane] << lane;
    sync_warp();
    return votes;
}
inline int __syncthreads_count(bool vote) {
    lanes[threadIdx.x] = vote;
    __syncthreads();
    const int count = std::count(lanes, lanes + THREADS, 1u);
    __syncthreads();
    return count;
}
inline bool __syncthreads_or(bool vote) { return __syncthreads_count(vote) > 0; }
inline bool __any_sync(u32 all, bool vote) { return __ballot_sync(all, vote) != 0; }
inline int __popc(u32 word) { return __builtin_popcount(word); }
inline int __ffs(u32 word) { return __builtin_ffs(word); }

// What each lane has for the others of its four: of numbers of 64 bits a mask names no more.
inline double shown[THREADS];
inline double __shfl_xor_sync(u32, double x, int by) {
    const int quad = threadIdx.x / 4 * 4;
    shown[threadIdx.x] = x;
    wait_for(threads.at_quad, quad, 4);
    const double other = shown[quad + ((threadIdx.x - quad) ^ by)];
    wait_for(threads.at_quad, quad, 4);
    return other;
}

// mma.m16n8k8 by the fragments that the PTX ISA gives; f32 results are cut off, as a matrix unit does.
struct Fragments {
    double a[4], b[2];
};
inline Fragments fragments[THREADS];
inline double value(double x) { return x; }
inline double value(u32 tf32) { return bits_of<float>(tf32); }
inline double cut(double, double x) { return x; }
inline float cut(float, double x) {
    const float near = (float)x;
    return fabs((double)near) > fabs(x) ? nextafterf(near, 0.0f) : near;
}

template <class Sum, class Factor> void multiply_warp(Sum (&c)[4], const Factor (&a)[4], const Factor (&b)[2]) {
    Fragments& own = fragments[threadIdx.x];
    for (int i = 0; i < 4; ++i) own.a[i] = value(a[i]);
    for (int i = 0; i < 2; ++i) own.b[i] = value(b[i]);
    sync_warp();
    const int lane = threadIdx.x - warp(), g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
        double sum = c[i];
        for (int k = 0; k < 8; ++k) {
            const Fragments& of_row = fragments[warp() + g * 4 + k % 4];
            const Fragments& of_column = fragments[warp() + (2 * t + i % 2) * 4 + k % 4];
            sum += of_row.a[i / 2 + k / 4 * 2] * of_column.b[k / 4];
        }
        c[i] = cut(c[i], sum);
    }
    sync_warp();
}
// The two instructions of the source are the same but for their types.
#define asm(...) multiply_warp(c, a, b)
