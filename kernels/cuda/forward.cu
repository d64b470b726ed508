// The forward on Hopper: tiles of query rows against blocks of keys on tensor cores, for packs of sequences.
//
// A block of threads stays for the whole launch. One thread of it, the *producer*, takes tiles from the plan and asks the
// copy engine for their rows (Q) and, block after block from the last key to the first, for K and V; *consumers*, groups of
// 128 threads with 64 query rows each, multiply and weigh, and pass over blocks of which their rows see nothing. Rings of
// shared memory lie between them. Several such *teams* may share a block's registers, each with its own tiles and rings. A
// tile's shape follows from the segment alone, so that results do not depend on which block of threads took it, nor when.
//
// The copy engine knows tensors and no sequences: boxes run on into padding and into other sequences. What lies there stays
// out: scores of keys that a row does not see are replaced and not multiplied, V behind the last key is overwritten with
// zeros in shared memory, and rows that are not real are written as zeros or not at all. Head dims below DIM are filled with
// zeros by the copy engine.
//
// Two blocks of threads may be a *cluster*: they take tiles that follow each other, and share K and V, of which each asks for
// one half for both, so that the L2 cache is read half as often. Blocks of keys that one of the tiles sees alone are passed
// over in the other.
//
// The producer is in forward_producer.cuh, the consumers in forward_consumer.cuh and for FP8 in forward_codes.cuh, the plan in
// forward_plan.cuh; here is what they have in common, and the kernels. Few rows against many keys have kernels of their own, in
// forward_split.cuh.
//
// In FP8 (E4M3) both operands of a product lie along its sum. V comes as columns from a *turned* copy (turned.cu), whose keys
// are in groups of 16 from the tensor's first row on; blocks begin with a group, so that up to 15 keys before a run's first one
// come with it. They are hidden, and zeros in V. Weights are multiplied by 2^8 and rounded to e4m3, and P · V of a block is a
// sum of its own, which is added to O in f32: the unit keeps 13 bits. Descales are numbers of a segment and head.
//
// With head dims over 256 (latent attention: 576 of q and k, 512 of v) two groups have the same rows. Both make their scores and
// weights, and each has half of O's lanes.
//
// Instances: DIM, the largest head dim (64, 128, in FP8 or GENERAL 256, and in GENERAL 576), and TYPE (BF16, FP16 or E4M3); GENERAL (hopper.cuh). PLAN:
// with the planning kernel.
#include "common.cuh"
#include "codes.cuh"
#include "hopper.cuh"

// Whether groups have the same rows, and each its part of V's lanes; the lanes of V, and of O in a group.
constexpr bool SHARES_ROWS = DIM > 256;
constexpr int LANES_OF_V = DIM > 512 ? 512 : DIM, LANES_OF_O = SHARES_ROWS ? LANES_OF_V / 2 : LANES_OF_V;
constexpr int PANELS_OF_V = (LANES_OF_V + PANEL_LANES - 1) / PANEL_LANES;

// What the planning kernel makes of the tables. A row of the tensors is `step * index + phase`, the same step for all.
struct alignas(16) PlannedRows {
    int index;
    int phase;
    int len;
    int span;
    int keys;
    int lo;
    int hi;
    // In the order of tiles; where blocks of threads are clusters, in that of a cluster's tiles together.
    u32 first_tile;
    u32 tiles;
    int first_run;
    int runs;
    // Rows that the first tile has fewer than others.
    int skipped;
    // The first keys, of which `lo` hides none. For a general instance.
    int sink_tokens;
    int unused[3];
};

struct alignas(16) PlannedKeys {
    int index;
    int phase;
    int first;
    int len;
};

struct alignas(16) Plan {
    // The next item: a tile and a head.
    u32 next;
    u32 tiles;
    // For the split shape: the pieces of all tiles.
    u64 pieces;
};

// For the split shape: the pieces of the tiles before one, and how many of these are of tiles with several.
struct alignas(16) TilePieces {
    u64 pieces;
    u64 left;
};

struct Args {
    TensorMap q;
    TensorMap k;
    TensorMap v;
    Plan* plan;
    const PlannedRows* rows;
    const PlannedKeys* keys;
    // Of each tile its segment.
    const u32* tile_segment;
    View out;
    View lse;
    View max_logit;
    View sink;
    // Here and below, heads in packs of 2^packed_log2: those of a tile.
    int heads;
    // Query heads of a KV head.
    int group;
    // Heads whose keys stay in the L2 cache together.
    int head_chunk;
    int q_step;
    int dim_v;
    // Whether padding rows become zero.
    int clear;
    int sink_kind;
    int packed_log2;
    // Of what weights are made of: a logit is that times the scale. With a soft cap it is a tanh, and the scale is the cap.
    float scale;
    // scale · log2 e.
    float scale_log2;
    // For a general instance: the factor of a score in its tanh, 0 without a soft cap; and q, k and v, which the copy engine
    // brings where `by_threads` is 0.
    float inner;
    int by_threads;
    Elements elements[3];
    // In FP8: descales of q, k and v, each [segments, heads], with the KV heads for k and v.
    const float* descales[3];
};

// Rows of a segment and a head.
struct Tile {
    int index;
    int phase;
    int head;
    // Real rows and owned rows; owned ones may be more than the tile has, real ones less than 0.
    int owned;
    int real;
};

// Row r sees key k where r + lo <= k <= r + hi.
struct Bounds {
    int lo;
    int hi;
};

// Keys from `from` to `to`.
struct Span {
    int from;
    int to;
};

// What some of `real` rows see, of which row r sees r + lo to r + hi.
__device__ __forceinline__ Span span_seen(Bounds bounds, int real, int keys) {
    return {max(bounds.lo, 0), real > 0 ? min(real + bounds.hi, keys) : 0};
}

// Blocks of keys that are brought for a tile.
struct Brought {
    // -1: there are no more tiles.
    int all;
    // Of one run without sink tokens: the first one's end and the last one's beginning, in blocks of the run, and the run's
    // keys; of others: len is -1.
    int high;
    int low;
    int len;
};

// Keys `first` to `end` of the segment lie in a block from its beginning, of which the first `hidden` are others, in FP8.
struct Block {
    int first;
    int end;
    int hidden;
};

// GROUPS consumers of 64 rows, which are the same where groups share rows, blocks of KEYS keys, so many tiles and blocks in the rings of Q, K and V, CLUSTER blocks of
// threads together. A block has TEAMS of consumers, each with its own producer, tiles and rings.
template <int GROUPS_, int KEYS_, int Q_STAGES_, int K_STAGES_, int V_STAGES_, int CLUSTER_ = 1, int TEAMS_ = 1>
struct Config {
    static constexpr int GROUPS = GROUPS_, KEYS = KEYS_, CLUSTER = CLUSTER_, TEAMS = TEAMS_;
    static constexpr int Q_STAGES = Q_STAGES_, K_STAGES = K_STAGES_, V_STAGES = V_STAGES_;
    static constexpr int ROWS = SHARES_ROWS ? 64 : 64 * GROUPS, TEAM = 128 * GROUPS, CONSUMERS = TEAM * TEAMS;
    static constexpr int Q_BYTES = ROWS * PANELS * 128, K_BYTES = KEYS * PANELS * 128, V_BYTES = KEYS * LANES_OF_V * ELEMENT;
    static constexpr int TEAM_BYTES = 1024 + Q_STAGES * Q_BYTES + K_STAGES * K_BYTES + V_STAGES * V_BYTES;
    // Behind the consumers 128 threads, of which each team has one producer; they leave most of their registers to consumers.
    // A block has those of its launch and no more: it would wait for others for ever.
    static constexpr int THREADS_ALL = CONSUMERS + 128, REGISTERS = 65536 / THREADS_ALL / 8 * 8 * THREADS_ALL;
    // How far, in log2, a row's largest score may be over its base, with weights in 16 bits.
    static constexpr int SLACK = 4;
    // Of eight keys each: those of a thread's second row whose weights are made behind the wait for P · V of the block before.
    // All of them but where three groups share a multiprocessor, whose first weights take longer than that product.
    static constexpr int LATE = GROUPS < 3 ? KEYS / 8 : KEYS < 128 ? 2 : 3;
    // P · V takes 16 keys a step, and a block's part of a panel begins on a multiple of 1024 bytes.
    static_assert(KEYS % 16 == 0 && KEYS / CLUSTER % 8 == 0);
    // Whether a group's products in FP8 follow each other.
    static constexpr bool IN_TURN = IS_FP8 && (DIM == 256 || GROUPS * TEAMS > 2);
    // Whether a tile's rows may be of several heads.
    static constexpr bool PACKS = GROUPS == 3 && DIM == 128 || SHARES_ROWS;
    // In turn and with three groups or teams in FP8 the producer needs more than 40. 56 leave consumers 152, as 40 would.
    static constexpr int PRODUCER_REGISTERS = IS_FP8 && GROUPS * TEAMS > 2 ? 56 : DIM == 64 && !IS_FP8 ? 32 : 40;
    static constexpr int CONSUMER_REGISTERS = (REGISTERS - 128 * PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;
};

// A row of a tile is row r >> packed_log2 of the sequence, of head r % 2^packed_log2 of the pack.
template <class C>
__device__ __forceinline__ int packed_log2(const Args& a) {
    return C::PACKS ? a.packed_log2 : 0;
}

// A block's shared memory: barriers, tiles and blocks in the first kilobyte, then rings of Q, K and V. Addresses.
template <class C>
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 q_full(u32 stage) const { return base + 8 * stage; }
    __device__ __forceinline__ u32 q_empty(u32 stage) const { return base + 64 + 8 * stage; }
    __device__ __forceinline__ u32 k_full(u32 stage) const { return base + 128 + 8 * stage; }
    __device__ __forceinline__ u32 k_empty(u32 stage) const { return base + 192 + 8 * stage; }
    __device__ __forceinline__ u32 v_full(u32 stage) const { return base + 256 + 8 * stage; }
    __device__ __forceinline__ u32 v_empty(u32 stage) const { return base + 320 + 8 * stage; }
    __device__ __forceinline__ u32 block(u32 stage) const { return base + 384 + (IS_FP8 ? 16 : 8) * stage; }
    __device__ __forceinline__ u32 item_full(u32 stage) const { return base + 448 + 8 * stage; }
    __device__ __forceinline__ u32 item_empty(u32 stage) const { return base + 464 + 8 * stage; }
    __device__ __forceinline__ u32 item(u32 stage) const { return base + 480 + 4 * stage; }
    __device__ __forceinline__ u32 tile_empty(u32 stage) const { return base + 488 + 8 * stage; }
    __device__ __forceinline__ u32 tile(u32 stage) const { return base + 512 + 64 * stage; }
    __device__ __forceinline__ u32 q(u32 stage) const { return base + 1024 + stage * C::Q_BYTES; }
    __device__ __forceinline__ u32 k(u32 stage) const { return q(C::Q_STAGES) + stage * C::K_BYTES; }
    __device__ __forceinline__ u32 v(u32 stage) const { return k(C::K_STAGES) + stage * C::V_BYTES; }
};

// A tile's record: index, phase, head and owned rows; real rows, bounds and keys of the segment; what is brought; in a general
// instance sink tokens, in FP8 factors and hidden keys.
__device__ __forceinline__ void put_four(u32 tile, int place, int a, int b, int c, int d) {
    put_words(tile + 16 * place, a, b, c, d);
}
__device__ __forceinline__ int4 get_four(u32 tile, int place) {
    return get_words(tile + 16 * place);
}
__device__ __forceinline__ Tile get_tile(u32 tile) {
    const int4 four = get_four(tile, 0);
    return {four.x, four.y, four.z, four.w, get_four(tile, 1).x};
}
__device__ __forceinline__ Bounds get_bounds(u32 tile) {
    const int4 four = get_four(tile, 1);
    return {four.y, four.z};
}
__device__ __forceinline__ int get_sink_tokens(u32 tile) { return IS_GENERAL ? get_four(tile, 3).x : 0; }
// What a score and a value are multiplied with, and the hidden keys of the one run.
struct Factors {
    float of_scores;
    float of_values;
    int hidden;
};
__device__ __forceinline__ Factors get_factors(const Args& a, u32 tile) {
    if constexpr (!IS_FP8) return {a.scale, 1.0f, 0};
    const int4 four = get_four(tile, 3);
    return {__int_as_float(four.x), __int_as_float(four.y), four.z};
}
__device__ __forceinline__ Brought get_brought(u32 tile) {
    const int4 four = get_four(tile, 2);
    return {(int)uniform(four.x), four.y, four.z, four.w};
}
__device__ __forceinline__ void put_block(u32 at, Block block) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(block.first), "r"(block.end) : "memory");
    if constexpr (IS_FP8) asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 8), "r"(block.hidden) : "memory");
}
__device__ __forceinline__ Block get_block(u32 at) {
    Block block = {};
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(block.first), "=r"(block.end) : "r"(at) : "memory");
    if constexpr (IS_FP8) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(block.hidden) : "r"(at + 8) : "memory");
    return block;
}

#include "forward_producer.cuh"
#include "forward_consumer.cuh"
#include "forward_codes.cuh"

template <class C>
__device__ __forceinline__ void forward(const Args& a) {
    extern __shared__ u8 dynamic[];
    const Shared<C> all = {uniform((shared_address(dynamic) + 1023) / 1024 * 1024)};
    const int team = threadIdx.x < C::CONSUMERS ? threadIdx.x / C::TEAM : (threadIdx.x - C::CONSUMERS) / 32;
    const Shared<C> shared = C::TEAMS == 1 ? all : Shared<C>{uniform(all.base + team * C::TEAM_BYTES)};
    if (threadIdx.x < C::CONSUMERS && threadIdx.x % C::TEAM == 0) {
        for (int i = 0; i < C::Q_STAGES; ++i) {
            barrier_init(shared.q_full(i), 1);
            barrier_init(shared.q_empty(i), 4 * C::GROUPS);
        }
        for (int i = 0; i < C::K_STAGES; ++i) {
            barrier_init(shared.k_full(i), 1);
            barrier_init(shared.k_empty(i), 4 * C::GROUPS * C::CLUSTER);
        }
        for (int i = 0; i < C::V_STAGES; ++i) {
            barrier_init(shared.v_full(i), 1);
            barrier_init(shared.v_empty(i), 4 * C::GROUPS * C::CLUSTER);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared.item_full(i), 1);
            barrier_init(shared.item_empty(i), C::CLUSTER);
            barrier_init(shared.tile_empty(i), 4 * C::GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // No block writes to another one that has not begun, or has ended.
    if constexpr (C::CLUSTER > 1) cluster_barrier();
    else __syncthreads();
    if (threadIdx.x >= C::CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(C::PRODUCER_REGISTERS));
        if ((IS_GENERAL || threadIdx.x % 32 == 0) && team < C::TEAMS) produce<C>(a, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(C::CONSUMER_REGISTERS));
        consume<C>(a, shared);
    }
    if constexpr (C::CLUSTER > 1) cluster_barrier();
}

#if TYPE == 3
#define PASTED(KIND, DIM, TYPE) forward_fp8_##KIND##_##DIM
#elif defined(GENERAL)
#define PASTED(KIND, DIM, TYPE) forward_##KIND##_##DIM##_##TYPE##_general
#else
#define PASTED(KIND, DIM, TYPE) forward_##KIND##_##DIM##_##TYPE
#endif
#define NAMED(KIND, DIM, TYPE) PASTED(KIND, DIM, TYPE)

#if TYPE != 3 && DIM <= 128
#include "plan.cuh"
#include "forward_plan.cuh"
#include "forward_split.cuh"
#endif

#define KERNEL(CONFIG, KIND, ...)                                                                                      \
    extern "C" __global__ void __VA_ARGS__ __launch_bounds__(CONFIG::THREADS_ALL, 1)                                   \
        NAMED(KIND, DIM, TYPE)(const __grid_constant__ Args a) {                                                       \
        forward<CONFIG>(a);                                                                                            \
    }

#if TYPE == 3 && DIM == 256
// O has 128 registers. Two blocks of K and V are what shared memory holds, and in the short shape one of V.
using Long = Config<2, 128, 2, 2, 2>;
KERNEL(Long, long)
using Short = Config<1, 128, 1, 2, 1, 1, 2>;
KERNEL(Short, short)
#elif TYPE == 3
// Side by side, scores, O and P · V of a block take a thread's registers. In turn a third group has some: of the long shape with
// head dims up to 64, and in the short one a third team. A turned row of 128 keys is a panel's.
using Long = Config<DIM == 128 ? 2 : 3, 128, 2, 4, 4>;
KERNEL(Long, long)
using Short = Config<1, 128, 1, 2, 2, 1, 3>;
KERNEL(Short, short)
#elif DIM > 256
// Two blocks of so many keys are what shared memory holds beside Q.
using Long = Config<2, 32, 1, 2, 2>;
KERNEL(Long, long)
#elif DIM == 256
// O has 128 registers, so that there are two groups, and as many keys a block as shared memory holds twice.
using Long = Config<2, 80, 1, 2, 2>;
KERNEL(Long, long)
#else
// Three groups of 64 rows, and as many keys a block as registers hold scores, weights and O of. A general instance has the
// middle shape in its place.
#if DIM == 64
using Long = Config<3, 128, 2, 2, 2>;
KERNEL(Long, long)
#elif !defined(GENERAL)
using Long = Config<3, 80, 1, 4, 4>;
KERNEL(Long, long)
#endif

// 64 rows a team, and blocks of 64 keys: for packs of the shortest sequences, which move memory more than they multiply.
#if DIM == 64
using Short = Config<1, 64, 2, 2, 2, 1, 4>;
KERNEL(Short, short)
#else
using Short = Config<1, 64, 1, 2, 1, 1, 3>;
KERNEL(Short, short)

// 192 rows that share blocks of 64 keys: what teams would read three times from the L2 cache.
using Middle = Config<3, 64, 1, 4, 4>;
KERNEL(Middle, middle)

// 128 rows in clusters of two, with as many keys a block as a thread's registers hold scores, weights and O of: for sequences so
// long that what the L2 cache delivers, and a turn's fixed instructions, cost more than waiting for another block and keys that
// are multiplied and not seen.
#ifndef GENERAL
using Paired = Config<2, 176, 1, 2, 2, 2>;
KERNEL(Paired, paired, __cluster_dims__(Paired::CLUSTER, 1, 1))
#endif
#endif

#endif
