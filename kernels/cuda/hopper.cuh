// Hopper's own: bulk tensor copies and their barriers, products on tensor cores (wgmma), and conversions that are made for
// speed. For sources that are compiled with DIM (64, 128, 256 or 576: the largest head dim) and TYPE (BF16, FP16 or E4M3); common.cuh
// comes before it.
//
// A *general* instance takes what the others leave out: a soft cap, and tensors that the copy engine does not bring, since their
// head dims or addresses are no multiples of 16 bytes. Threads of the producer's warp bring those.
#pragma once

#ifdef GENERAL
constexpr bool IS_GENERAL = true;
#else
constexpr bool IS_GENERAL = false;
#endif

constexpr u32 FULL = 0xffffffffu;
constexpr bool IS_FP8 = TYPE == E4M3;
// Bytes of an element. A row of a panel has 128 bytes, and one step of a product takes 32 of them.
constexpr int ELEMENT = IS_FP8 ? 1 : 2;
constexpr int PANEL_LANES = 128 / ELEMENT, STEP = 32 / ELEMENT;
// Panels of a row. In FP8 one is there for any head dim up to 128.
constexpr int PANELS = (DIM + PANEL_LANES - 1) / PANEL_LANES;

// The driver's description of a tensor.
struct alignas(64) TensorMap {
    u64 words[16];
};

// ---------------------------------------------------------------------------------------------------------------------
// Shared memory, barriers, bulk tensor copies.

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra "
        "again;\ndone:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// Arrives, and waits for all others.
__device__ __forceinline__ void barrier_meet(u32 bar) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b64 phase;\nmbarrier.arrive.shared::cta.b64 phase, [%0];\nagain:\n"
        "mbarrier.try_wait.shared::cta.b64 p, [%0], phase;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar)
        : "memory");
}
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 bar, int column, int head, int phase, int row) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(bar), "r"(column), "r"(head), "r"(phase), "r"(row)
        : "memory");
}
// Brings a box into the L2 cache.
__device__ __forceinline__ void fetch_box(const TensorMap* map, int column, int head, int phase, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(column), "r"(head),
                 "r"(phase), "r"(row)
                 : "memory");
}
// Bytes that follow each other, a multiple of 16.
__device__ __forceinline__ void load_bulk(u32 to, const void* from, u32 bar, u32 bytes) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "r"(bytes), "r"(bar)
        : "memory");
}
// f32 added to memory, one after the other as they lie.
__device__ __forceinline__ void add_bulk(float* to, u32 from, u32 bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
        : "memory");
}
__device__ __forceinline__ void store_bulk(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but LEFT groups of bulk stores and additions have read shared memory.
template <int LEFT>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
// Until all of them have been made.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What was stored to shared memory can be seen by the copy engine and the tensor cores, after the next barrier.
__device__ __forceinline__ void shared_stores_done() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A producer is one thread, or in a general instance a warp, all of whose lanes take the same way. The one that speaks for it:
__device__ __forceinline__ bool leads() { return !IS_GENERAL || threadIdx.x % 32 == 0; }
// What all lanes wrote to shared memory is there, and nothing else comes, or so many bytes by the copy engine.
__device__ __forceinline__ void arrive_together(u32 bar) {
    if constexpr (IS_GENERAL) __syncwarp();
    if (leads()) barrier_arrive(bar);
}
__device__ __forceinline__ void expect_together(u32 bar, u32 bytes) {
    if constexpr (IS_GENERAL) __syncwarp();
    if (leads()) barrier_expect(bar, bytes);
}
// The next number, which is the producer's own.
__device__ __forceinline__ u32 take_next(u32* next) {
    u32 taken = 0;
    if (leads()) taken = atomicAdd(next, 1);
    if constexpr (IS_GENERAL) taken = __shfl_sync(FULL, taken, 0);
    return taken;
}

// Four words of shared memory.
__device__ __forceinline__ int4 get_words(u32 at) {
    int4 four;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                 : "r"(at)
                 : "memory");
    return four;
}
// A word of shared memory loses the bits that are not in `kept`.
__device__ __forceinline__ void and_shared(u32 at, u32 kept) {
    asm volatile("{\n.reg .b32 word;\nld.shared.b32 word, [%0];\nand.b32 word, word, %1;\nst.shared.b32 [%0], word;\n}" ::"r"(at),
                 "r"(kept)
                 : "memory");
}
__device__ __forceinline__ void put_words(u32 at, int a, int b, int c, int d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows that threads bring.

// A register of its own, from which nothing is made that would be kept.
__device__ __forceinline__ int lane_of_warp() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// A tensor as its elements: `rows` rows from each phase on, `step` apart, of `dim` lanes.
struct Elements {
    View view;
    int rows;
    int step;
    int dim;
};

// Brings eight elements to shared memory, of which there are `lanes`; the others are zeros.
__device__ __forceinline__ void put_elements(u32 to, const u16* from, int lanes) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        u32 pair = 0;
        if (j < lanes) pair = from[j];
        if (j + 1 < lanes) pair |= (u32)from[j + 1] << 16;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + 2 * j), "r"(pair) : "memory");
    }
}

// Brings `count` rows to shared memory as the copy engine would, swizzled, in panels, with zeros past the tensor's rows and lanes:
// eight lanes a thread of the warp. Row r is row r >> packed_log2 from `index` on, of head r % 2^packed_log2 from `head` on.
// Tensor cores see it after the next barrier.
template <int LANES = DIM>
__device__ __forceinline__ void bring_elements(
    u32 to, const Elements& from, int count, int head, int phase, int index, int packed_log2 = 0
) {
#pragma unroll 1
    for (int i = lane_of_warp(); i < count * (LANES / 8); i += 32) {
        const int r = i / (LANES / 8), eighth = i % (LANES / 8), row = index + (r >> packed_log2);
        const i64 place = place_of(from.view, (i64)from.step * row + phase, head + (r & (1 << packed_log2) - 1));
        const u16* const codes = (const u16*)from.view.base + place + 8 * eighth;
        const int lanes = (u32)row < (u32)from.rows ? from.dim - 8 * eighth : 0;
        put_elements(to + eighth / 8 * count * 128 + r * 128 + (eighth % 8 ^ r % 8) * 16, codes, lanes);
    }
    shared_stores_done();
}

// ---------------------------------------------------------------------------------------------------------------------
// Clusters: blocks of threads that run side by side and write to each other's shared memory, which has the same layout in all.

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// An address of this block's shared memory, in the block of a rank.
__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// For what tensor cores and the copy engine read and write, which is over when they say so: release.cluster would wait for
// all memory of the GPU, which makes a kernel half as fast.
__device__ __forceinline__ void barrier_arrive_in(u32 bar, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(bar, rank)) : "memory");
}
// A word for a block of the cluster, which its barrier counts as 4 bytes.
__device__ __forceinline__ void store_in(u32 to, u32 bar, u32 rank, u32 value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(in_block(to, rank)),
                 "r"(value), "r"(in_block(bar, rank))
                 : "memory");
}
// A box for all blocks of the mask `ranks`, each of which has it at the same place and counts it by the same barrier.
__device__ __forceinline__ void load_box_for(
    u32 ranks, u32 to, const TensorMap* map, u32 bar, int column, int head, int phase, int row
) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(map), "r"(bar), "r"(column), "r"(head), "r"(phase), "r"(row), "h"((u16)ranks)
        : "memory");
}
// Until all threads of the cluster are here, and see each other's shared memory as it is.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// A number that all threads of a warp have alike. The assembler knows it then, and keeps it where descriptors of wgmma have
// to be: in uniform registers. From other ones each product would move its four words there.
__device__ __forceinline__ u32 uniform(u32 value) {
    u32 all;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(all) : "r"(value));
    return all;
}

// ---------------------------------------------------------------------------------------------------------------------
// wgmma.

#define EIGHT(d, i)                                                                                                    \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define BINDS_16 EIGHT(d, 0), EIGHT(d, 8)
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BINDS_32 EIGHT(d, 0), EIGHT(d, 8), EIGHT(d, 16), EIGHT(d, 24)
#define BINDS_64 BINDS_32, EIGHT(d, 32), EIGHT(d, 40), EIGHT(d, 48), EIGHT(d, 56)
#define NAMES_32                                                                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "  \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                                       \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
             "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BINDS_40 BINDS_32, EIGHT(d, 32)
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define BINDS_88 BINDS_64, EIGHT(d, 64), EIGHT(d, 72), EIGHT(d, 80)
#define NAMES_88                                                                                                       \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "  \
             "%84, %85, %86, %87"
#define BINDS_128 BINDS_88, EIGHT(d, 88), EIGHT(d, 96), EIGHT(d, 104), EIGHT(d, 112), EIGHT(d, 120)
#define NAMES_128                                                                                                      \
    NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, "  \
             "%107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "    \
             "%124, %125, %126, %127"
#if TYPE == 1
#define TYPES "k16.f32.bf16.bf16"
#define BOTH_ALONG ", 0, 0"
#define B_ACROSS ", 1"
#elif TYPE == 2
#define TYPES "k16.f32.f16.f16"
#define BOTH_ALONG ", 0, 0"
#define B_ACROSS ", 1"
#else
// Both operands lie along the sum, and there is no other way.
#define TYPES "k32.f32.e4m3.e4m3"
#define BOTH_ALONG ""
#define B_ACROSS ""
#endif
// Where an operand lies in shared memory: the lower half of a descriptor; the upper half says that groups of 8 rows are
// 1024 bytes apart and rows of 128 bytes are swizzled.
#define WGMMA(SHAPE, NAMES, BINDS, MOVE_A, A, B, ADD, FLAGS, ...)                                                      \
    asm volatile("{\n.reg .pred p;\n.reg .b64 da, db;\n" MOVE_A "mov.b64 db, {%" B ", 0x40000040};\n"                  \
                 "setp.ne.b32 p, %" ADD ", 0;\nwgmma.mma_async.sync.aligned." SHAPE " {" NAMES "}, " A                 \
                 ", db, p, " FLAGS ";\n}"                                                                              \
                 : BINDS                                                                                               \
                 : __VA_ARGS__, "r"(b), "r"(add))

// d = a · bᵀ [+ d]: 64 rows of a and N of b in shared memory, STEP lanes of each.
template <int N>
__device__ __forceinline__ void score_step(float (&d)[N / 2], u32 a, u32 b, int add) {
    static_assert(N == 32 || N == 64 || N == 80 || N == 128 || N == 176, "no such shape");
    if constexpr (N == 176)
        WGMMA("m64n176" TYPES, NAMES_88, BINDS_88, "mov.b64 da, {%88, 0x40000040};\n", "da", "89", "90", "1, 1" BOTH_ALONG,
              "r"(a));
    else if constexpr (N == 128)
        WGMMA("m64n128" TYPES, NAMES_64, BINDS_64, "mov.b64 da, {%64, 0x40000040};\n", "da", "65", "66", "1, 1" BOTH_ALONG,
              "r"(a));
    else if constexpr (N == 80)
        WGMMA("m64n80" TYPES, NAMES_40, BINDS_40, "mov.b64 da, {%40, 0x40000040};\n", "da", "41", "42", "1, 1" BOTH_ALONG,
              "r"(a));
    else if constexpr (N == 32)
        WGMMA("m64n32" TYPES, NAMES_16, BINDS_16, "mov.b64 da, {%16, 0x40000040};\n", "da", "17", "18", "1, 1" BOTH_ALONG,
              "r"(a));
    else
        WGMMA("m64n64" TYPES, NAMES_32, BINDS_32, "mov.b64 da, {%32, 0x40000040};\n", "da", "33", "34", "1, 1" BOTH_ALONG,
              "r"(a));
}

// d = a · b [+ d]: 64 rows of a in registers, N lanes and STEP rows of b in shared memory. In FP8 they are columns there.
template <int N>
__device__ __forceinline__ void value_step(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u32 b, int add = 1) {
    static_assert(N == 64 || N == 128 || N == 256, "no such shape");
    if constexpr (N == 256)
        WGMMA("m64n256" TYPES, NAMES_128, BINDS_128, "", "{%128, %129, %130, %131}", "132", "133", "1, 1" B_ACROSS, "r"(a0),
              "r"(a1), "r"(a2), "r"(a3));
    else if constexpr (N == 128)
        WGMMA("m64n128" TYPES, NAMES_64, BINDS_64, "", "{%64, %65, %66, %67}", "68", "69", "1, 1" B_ACROSS, "r"(a0), "r"(a1),
              "r"(a2), "r"(a3));
    else
        WGMMA("m64n64" TYPES, NAMES_32, BINDS_32, "", "{%32, %33, %34, %35}", "36", "37", "1, 1" B_ACROSS, "r"(a0), "r"(a1),
              "r"(a2), "r"(a3));
}

// d = aᵀ · b [+ d]: 16 rows of 64 lanes of each in shared memory.
__device__ __forceinline__ void gradient_step(float (&d)[32], u32 a, u32 b, int add) {
    WGMMA("m64n64" TYPES, NAMES_32, BINDS_32, "mov.b64 da, {%32, 0x40000040};\n", "da", "33", "34", "1, 1, 1, 1", "r"(a));
}

// The same with 32 lanes of b, in 16 of d from number FIRST on.
template <int FIRST>
__device__ __forceinline__ void turned_step(float (&d)[32], u32 a, u32 b, int add) {
#define BINDS_FROM EIGHT(d, FIRST), EIGHT(d, FIRST + 8)
    WGMMA("m64n32" TYPES, NAMES_16, BINDS_FROM, "mov.b64 da, {%16, 0x40000040};\n", "da", "17", "18", "1, 1, 1, 1", "r"(a));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Keeps ordinary code that reads or writes registers of a wgmma on its side of this line.
template <int COUNT>
__device__ __forceinline__ void hold(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void hold(u32 (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// A tile of rows of 64 lanes (a panel), 128-byte swizzle: groups of 8 rows follow each other. `panel` bytes from one panel
// to the next, which only an operand read along its rows crosses.
__device__ __forceinline__ u32 descriptor(u32 address, u32 panel) {
    return (address & 0x3ffff) >> 4 | panel >> 4 << 16;
}

// ---------------------------------------------------------------------------------------------------------------------
// Registers.

// What the compiler knows of a number ends here: it is kept, not made again.
__device__ __forceinline__ u32 kept(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// A stage of a ring of COUNT, a power of two, and the parity of its barriers' phase.
template <int COUNT>
struct Ring {
    static_assert((COUNT & (COUNT - 1)) == 0, "not a power of two");
    u32 turns = 0;
    __device__ __forceinline__ u32 stage() const { return turns % COUNT; }
    __device__ __forceinline__ u32 parity() const { return turns / COUNT % 2; }
    __device__ __forceinline__ void advance() { ++turns; }
};

__device__ __forceinline__ float exp2_of(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

__device__ __forceinline__ float reciprocal_of(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// tanh within 2^-22 of itself: x + x³ p(x²) where that is as good, else 1 - 2 / (e^2x + 1). p is the best one there, in f32.
__device__ __forceinline__ float tanh_of(float x) {
    const float square = x * x;
    float p = fmaf(0.00159302841f, square, -0.00742519664f);
    p = fmaf(p, square, 0.0213139958f);
    p = fmaf(p, square, -0.0538558493f);
    p = fmaf(p, square, 0.133322702f);
    p = fmaf(p, square, -0.333332996f);
    const float near = fmaf(x * square, p, x);
    const float far = fmaf(-2.0f, reciprocal_of(exp2_of(fabsf(x) * 2.88539008177792681472f) + 1.0f), 1.0f);
    return fabsf(x) < 0.8f ? near : copysignf(far, x);
}

// Two elements of the results' format: that of the operands, and bf16 beside FP8.
__device__ __forceinline__ u32 pair_of(float low, float high) {
    u32 pair;
    if constexpr (TYPE != FP16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Four words of a thread become those of its quad with the thread's number.
__device__ __forceinline__ void transpose(u32 (&w)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(FULL, odd ? w[i] : w[i + 1], 1);
        if (odd) w[i] = got;
        else w[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 got = __shfl_xor_sync(FULL, high ? w[i] : w[i + 2], 2);
        if (high) w[i] = got;
        else w[i + 2] = got;
    }
}
