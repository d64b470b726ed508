// The backward on Hopper: tiles of keys against tiles of query rows on tensor cores, for packs of sequences.
//
// Two kernels follow the plan. The first makes D = <dout, out> of each row. In the second a block of threads stays for the
// whole launch: it takes tiles of KEYS keys of a KV head and goes through all tiles of ROWS query rows that see one of its keys,
// each with all query heads of the group. One thread, the *producer*, asks the copy engine for rows. Two *consumers*
// of 128 threads have 64 keys each: with the keys as rows, the scores Sᵀ = K Qᵀ and dPᵀ = V doutᵀ are made in registers and
// are, weighed, the operands of dV += Pᵀ dout and dK += dSᵀ Q, which stay there until the tile is done; so dk and dv are sums
// in one order. dS goes through shared memory for dQ = dS K. Two more threads, the *adders*, add that to f32 sums in memory: as
// it comes, or in the order of the tiles of keys where the launch is to give the same bits each time.
//
// Of the tiles of keys that see a tile of query rows the first *opens* its sums, which it stores, so that nothing is cleared,
// and the last *closes* them: consumers add them to what they have in registers, and write dq to its rows. Those between wait
// for the first, and in a fixed order for all before; the last waits for all others. Tiles are taken in their order, so none
// waits for one that is taken later. Where one tile has all keys that they see nothing is added. Tiles of rows that see no key are
// the first kernel's.
//
// A walk up goes from the first query rows to the last, and the last keys come first: in causal masks the shortest tiles, each of
// which begins before the rows that the one before it began with, so that none waits. A walk down goes from the last rows to the
// first, and the first keys come first: the longest tiles, all of which begin with the last rows, which all of them see. Or
// chunks of heads walk up and down by turns, so that blocks which are done with the short tiles of one go on with those of the
// next. The host chooses.
//
// For short packs there is a second form, `short`, of tiles of keys that come to a tile of rows one after the other. The first
// kernel makes no D: the tile of keys that opens a tile of rows *describes* them, which is to make LSE and D, for itself and for
// those that see these rows later. And where all tiles of keys of a segment see all its rows they *go around*: they begin evenly
// apart, and go on with the first rows after the last, so that each opens rows of its own. Only these wait for tiles that are
// taken later. So the tiles of a head are neighbours in the order, a block takes nothing else until all of them are taken, and as
// many blocks as they are must be there at once, MOST_AROUND at most.
//
// With head dims over 64 and in FP8 consumers make dQ *late*, in the turn behind that of its dS: so neither waits for the other's
// dS, and one may be half a turn ahead, with exponentials beside the other's products. A walk has one more dQ then, at its end.
//
// Gradients go to their rows through shared memory, 64 lanes of a warp's 16 rows at a time: dq in dQ's place, dk and dv in dS's
// place of the turn that is next. While a tile ends the next one's first rows are loaded, and its keys as soon as the last turn has
// made dQ.
//
// The copy engine knows tensors and no sequences: boxes run on into padding and into other sequences. What lies there stays
// out: rows of K, Q and dout behind the last real one are overwritten with zeros in shared memory, weights and gradients of
// pairs that are not seen are replaced and not multiplied, and rows that are not real are written as zeros or not at all.
//
// What is done on rows is in backward_rows.cuh, the threads that move rows in backward_tiles.cuh, the warp of statistics in
// backward_statistics.cuh, those that multiply in backward_consumer.cuh, the plan in backward_plan.cuh; here is what they have in
// common.
//
// With head dims over 128 both consumers have the same keys, 64 a tile, and the same scores, and each makes half of the lanes of
// gradients.
//
// Instances: DIM (64, 128 or with GENERAL 256: the largest head dim) and TYPE (BF16, FP16, or E4M3, see backward_codes.cuh);
// GENERAL (hopper.cuh). PLAN: with the planning kernel.
#include "common.cuh"
#include "codes.cuh"
#include "hopper.cuh"

// Whether consumers share keys.
constexpr bool SHARES_KEYS = DIM > 128;
constexpr int KEYS = SHARES_KEYS ? 64 : 128, ROWS = 8192 / DIM;
// The lanes of a row of dk and dv that a consumer makes.
constexpr int GROUP_LANES = SHARES_KEYS ? DIM / 2 : DIM;
constexpr int GROUPS = 2, CONSUMERS = 128 * GROUPS, THREADS_ALL = CONSUMERS + 128;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(128 * PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= 65536 / THREADS_ALL / 8 * 8 * THREADS_ALL,
              "more registers than the launch gives");
constexpr int STAGES = 2, ADDERS = 2, TILES = 2;
constexpr int ROW_BYTES = PANELS * 128;
constexpr int KV_BYTES = KEYS * ROW_BYTES, Q_BYTES = ROWS * ROW_BYTES;
// Of dS. Consumers that share keys have each its own, in rows of twice as many bytes.
constexpr int DS_BYTES = KEYS * ROWS * ELEMENT * (SHARES_KEYS ? 4 : 1);
// In FP8: the turned copies of a tile of K, and of Q and dout together, and a place for rows of dk and dv on their way out.
constexpr int TURNED_K_BYTES = IS_FP8 ? KEYS * DIM : 0, TURNED_Q_BYTES = IS_FP8 ? 2 * ROWS * DIM : 0;
constexpr int OUTWARD_BYTES = IS_FP8 ? CONSUMERS / 32 * 2048 : 0;
// Of dQ, f32: a group's part of 64 rows and 64 lanes, and all.
constexpr int PART_BYTES = 64 * 64 * 4, SUMS = ROWS * DIM;
// The numbers of a tile of rows: LSE of each, then D of each, and in FP8 four factors (backward_codes.cuh).
constexpr int STATISTICS = 2 * ROWS + (IS_FP8 ? 4 : 0);
// The format of out and of gradients, unless they are in f32.
constexpr int RESULTS = IS_FP8 ? BF16 : TYPE;
constexpr float LOG2_E = 1.44269504088896340736f;
// In FP8 weights are multiplied by 2 to this power, from which the factor comes.
constexpr float WEIGHT_EXPONENT = 8.0f, WEIGHT_FACTOR = 256.0f;

// Which keys a row sees that no band says: row r sees key k where r + lo <= k or k < sink_tokens, and k <= r + hi or k < prefix.
// In a general instance, whose walks go by a band around them. Without sink tokens and a prefix it is that band.
struct Widened {
    int lo;
    int hi;
    int sink_tokens;
    int prefix;
};

// What the planning kernel makes of the tables. A row of the tensors is `step * index + phase`, the same step for all.
struct alignas(16) PlannedSegment {
    int index;
    int phase;
    int len;
    int span;
    int lo;
    int hi;
    int first_run;
    int runs;
    // Tiles of query rows, and of keys, in the order of the plan.
    u32 first_q_tile;
    u32 q_tiles;
    u32 first_kv_tile;
    u32 kv_tiles;
    // Its keys, and its tiles of query rows that see one; none: an empty range.
    int keys;
    u32 seeing;
    u32 seeing_end;
    // Its tiles with real keys, where they may go around; else 0.
    u32 around;
    // Its own bounds, where `lo` and `hi` are those of a band around all that is seen beside them.
    Widened own;
};

struct alignas(16) PlannedRun {
    int index;
    int phase;
    // Its first key among those of its segment.
    int first;
    int len;
    int span;
    // Tiles of the segment's runs before.
    u32 first_tile;
    int unused[2];
};

struct alignas(16) Plan {
    // The next item: a tile of keys and a KV head.
    u32 next;
    u32 q_tiles;
    u32 kv_tiles;
};

// The place of each in arrays of these tensors.
enum { Q, K, V, DOUT };

struct Args {
    TensorMap q;
    TensorMap k;
    TensorMap v;
    TensorMap dout;
    // Out, in the short form.
    TensorMap saved;
    Plan* plan;
    const PlannedSegment* segments;
    const PlannedRun* runs;
    // Of each tile its segment.
    const u32* q_tile_segment;
    const u32* kv_tile_segment;
    // Of each tile of query rows and head: ROWS · DIM sums of dQ, as consumers hold them.
    float* sums;
    // LSE and D of its rows.
    float* statistics;
    // How many tiles of keys have been added, and whether its rows are described.
    u32* added;
    u32* described;
    // As elements, where the copy engine has no part in it.
    View gradient;
    View out;
    View lse;
    View dq;
    View dk;
    View dv;
    int heads;
    // Query heads of a KV head.
    int group;
    // KV heads that are taken together, as their rows stay in the L2 cache, or as they walk in one direction; 0: as many as have all
    // their tiles taken at once. Tiles of keys may go around where it is 1.
    int head_chunk;
    int q_step;
    int kv_step;
    int dim;
    int dim_v;
    // Whether padding rows become zero, and whether gradients are added to what is there.
    int clear;
    int accumulate;
    float scale;
    // Which KV heads walk down, so that their first tile of keys adds first: those whose number has this bit. 0: none; EVERY: all; a
    // power of two: chunks of so many heads walk up and down by turns. The last tile of those that walk up adds first.
    int down;
    // Whether tiles of keys add in their order; if not, those between the first and the last as they come.
    int fixed;
    // Whether tiles of keys describe rows.
    int describes;
    // For a general instance: a soft cap and the factor of a score in its tanh, both 0 where there is none; and q, k, v and dout,
    // which the copy engine brings where `by_threads` is 0.
    float cap;
    float inner;
    int by_threads;
    Elements elements[4];
    // In FP8: descales of q, k, v and dout, of each segment and head; turned copies of each tile of query rows and head, and of
    // each tile of keys and KV head; and the tiles of query rows that the launch has room for.
    const float* descales[4];
    u8* turned_q;
    u8* turned_k;
    u32 q_capacity;
};

// Whether the copy engine brings q, k, v and dout. If so, all rows lie on 16 bytes.
__device__ __forceinline__ bool by_engine(const Args& a) { return !IS_GENERAL || !a.by_threads; }

// A bit that counts as set in every head's number: `EVERY` of the launcher.
constexpr int EVERY = 1 << 30;

// Query rows of a segment, the first and the end.
struct Range {
    int from;
    int to;
};
// Those that see one of `real` keys from `key` on: row r sees keys r + lo to r + hi. None: an empty range.
__device__ __forceinline__ Range rows_seeing(int key, int real, int lo, int hi, int rows) {
    const int from = max(key - hi, 0), to = min(key + real - lo, rows);
    const bool seen = real > 0 && from < to && lo <= hi;
    return seen ? Range{from, to} : Range{0, 0};
}
// Whether tiles of keys write dq of a segment's tile of query rows.
__device__ __forceinline__ bool sees_keys(const PlannedSegment& segment, u32 t) {
    return t >= segment.seeing && t < segment.seeing_end;
}

// Whether consumers make dQ late. In the short form they may not, as scores may wait for other blocks, which may wait for that dQ.
// With 64 lanes a walk has half the turns, and loses more by the one dQ more than it gains.
template <bool SHORT>
constexpr bool IS_LATE = IS_FP8 || (DIM > 64 && !SHORT && !IS_GENERAL);

// A tile of query rows and a head.
__device__ __forceinline__ i64 part_of(const Args& a, u32 tile, int head) { return (i64)tile * a.heads + head; }

#include "backward_rows.cuh"
#include "backward_tiles.cuh"
#include "backward_statistics.cuh"
#include "backward_consumer.cuh"
#include "backward_codes.cuh"

// DOUT is the format of dout.
template <bool SHORT, int DOUT = TYPE>
__device__ __forceinline__ void backward(const Args& a) {
    extern __shared__ u8 dynamic[];
    const Shared shared = {kept((shared_address(dynamic) + 1023) / 1024 * 1024)};
    if (threadIdx.x == 0) {
        constexpr int WARPS = CONSUMERS / 32;
        barrier_init(shared.met(), IS_LATE<SHORT> ? WARPS : CONSUMERS);
        barrier_init(shared.out_full(), 1);
        barrier_init(shared.d_full(), WARPS);
        for (int i = 0; i < TILES; ++i) {
            barrier_init(shared.kv_full(i), 1);
            barrier_init(shared.kv_empty(i), WARPS + ADDERS + SHORT);
            barrier_init(shared.tile_full(i), 1);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared.q_full(i), 1 + SHORT);
            barrier_init(shared.dout_full(i), 1);
            barrier_init(shared.q_empty(i), WARPS);
            barrier_init(shared.dout_empty(i), WARPS);
        }
        for (int i = 0; i < GROUPS * ADDERS; ++i) {
            barrier_init(shared.dq_full(i / ADDERS, i), WARPS / GROUPS);
            barrier_init(shared.dq_empty(i / ADDERS, i), 1);
            barrier_init(shared.dq_ready(i / ADDERS, i), 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (IS_GENERAL ? threadIdx.x / 32 == CONSUMERS / 32 : threadIdx.x == CONSUMERS) produce<SHORT>(a, shared);
        if (threadIdx.x == CONSUMERS + 32 || threadIdx.x == CONSUMERS + 64)
            add<SHORT>(a, shared, threadIdx.x / 32 % 2 == 0);
        if (SHORT && threadIdx.x >= CONSUMERS + 96) describe(a, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        if constexpr (IS_FP8) consume_codes<DOUT>(a, shared);
        else consume<SHORT>(a, shared);
    }
}

#if TYPE == 3
#define KERNELS(DIM, DOUT)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) backward_fp8_before_##DIM##_##DOUT(                       \
        const __grid_constant__ Args a                                                                                 \
    ) {                                                                                                                \
        __shared__ uint4 rows[1024];                                                                                   \
        prepare_codes<DOUT>(a, rows);                                                                                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS_ALL, 1) backward_fp8_tiles_##DIM##_##DOUT(                    \
        const __grid_constant__ Args a                                                                                 \
    ) {                                                                                                                \
        backward<false, DOUT>(a);                                                                                      \
    }
#define NAMED_KERNELS(DIM, DOUT) KERNELS(DIM, DOUT)
NAMED_KERNELS(DIM, 3)
NAMED_KERNELS(DIM, 4)
#else
#ifdef GENERAL
#define PASTED(KIND, DIM, TYPE) backward_##KIND##_##DIM##_##TYPE##_general
#else
#define PASTED(KIND, DIM, TYPE) backward_##KIND##_##DIM##_##TYPE
#endif
#define NAMED(KIND, DIM, TYPE) PASTED(KIND, DIM, TYPE)

extern "C" __global__ void __launch_bounds__(THREADS, IS_GENERAL ? 2 : 4) NAMED(before, DIM, TYPE)(const __grid_constant__ Args a) {
    prepare(a);
}
extern "C" __global__ void __launch_bounds__(THREADS_ALL, 1) NAMED(tiles, DIM, TYPE)(const __grid_constant__ Args a) {
    backward<false>(a);
}
#ifndef GENERAL
extern "C" __global__ void __launch_bounds__(THREADS_ALL, 1) NAMED(short, DIM, TYPE)(const __grid_constant__ Args a) {
    backward<true>(a);
}
#endif
#endif

#ifdef PLAN
#include "plan.cuh"
#include "backward_plan.cuh"
#endif
