// Rows moved whole: rank order ↔ sequence order, valid rows, halves of slots, THD ↔ BSHD ↔ SBHD, a rank's heads ↔
// hidden rows, padding fill; and the mask of valid rows.
//
// One loop moves all of them. A block owns a tile of rows; first a thread for each row says where the row is read and
// written (a *map*), then all threads move the tile's vectors, four of them in flight a thread. A row is any number of
// bytes: the launcher picks the widest vector that divides rows and addresses (16 bytes for the full speed).
#include "common.cuh"

constexpr u32 TILE_ROWS_MAX = 256;
constexpr u32 IN_FLIGHT = 4;

// Where a row is read and written. No source: the fill pattern; no target: the row is left alone.
struct Move {
    i64 from;
    i64 to;
};
constexpr i64 NONE = -1;

// 2: striped.
constexpr int CONTIGUOUS = 0, DUAL_CHUNK = 1;

// How sequences are cut over `cp` ranks.
struct Cut {
    int cp;
    int balance;
    int stripe;
};

// Where the gap behind a slot ends.
__device__ __forceinline__ i64 gap_end(const Slots& slots, const Slot& slot) {
    return slot.index + 1 < slots.count ? slots.offset[slot.index + 1] : slots.rows;
}

// The row in sequence order of a row of a rank's tensor; rows that no slot owns have their share of the gathered gap.
__device__ __forceinline__ i64 sequence_row(const Slots& slots, const Cut& cut, int rank, const Slot& slot, i64 row) {
    const i64 offset = slot.offset, span = slot.span;
    const i64 x = row - offset;
    if (x >= span) {
        const i64 from = offset + span, to = gap_end(slots, slot);
        return from * cut.cp + rank * (to - from) + (row - from);
    }
    const i64 base = offset * cut.cp;
    if (cut.balance == CONTIGUOUS) return base + rank * span + x;
    if (cut.balance == DUAL_CHUNK) {
        const i64 chunk = span / 2;
        return x < chunk ? base + rank * chunk + x : base + (2 * cut.cp - 1 - rank) * chunk + (x - chunk);
    }
    return base + (x / cut.stripe * cut.cp + rank) * cut.stripe + x % cut.stripe;
}

// The row in rank order of a row in sequence order: the way back.
__device__ __forceinline__ i64 rank_order_row(const Slots& slots, const Cut& cut, const Slot& slot, i64 row) {
    const i64 offset = slot.offset, span = slot.span;
    const i64 x = row - offset * cut.cp;
    if (x >= span * cut.cp) {
        const i64 from = offset + span, to = gap_end(slots, slot);
        const i64 gap = max(to - from, (i64)1), y = row - from * cut.cp;
        return y / gap * slots.rows + from + y % gap;
    }
    if (cut.balance == CONTIGUOUS) return x / span * slots.rows + offset + x % span;
    if (cut.balance == DUAL_CHUNK) {
        const i64 chunk = max(span / 2, (i64)1), id = x / chunk, within = x - id * chunk;
        return id < cut.cp ? id * slots.rows + offset + within
                           : (2 * cut.cp - 1 - id) * slots.rows + offset + chunk + within;
    }
    const i64 stripe = x / cut.stripe, round = stripe / cut.cp;
    return (stripe - round * cut.cp) * slots.rows + offset + round * cut.stripe + x % cut.stripe;
}

// A map's `at` is called by all lanes of a warp together, with rows that do not decrease. Reordering goes over the rows
// that are written, in order.
struct Reorder {
    Slots slots;
    Cut cut;
    int to_sequence;

    __device__ Move at(i64 row) const {
        const i64 rows = (i64)slots.rows * cut.cp;
        i64 there;
        if (to_sequence) {
            // In sequence order offsets are multiples of cp.
            there = rank_order_row(slots, cut, slot_of_lane(slots, (u32)(row / cut.cp)), row);
        } else {
            // Lanes at a rank's end have rows of two ranks, which are not in order: each looks for itself.
            const i64 rank = row / max(slots.rows, 1);
            const u32 local = (u32)(row - rank * slots.rows);
            const bool one_rank = __all_sync(ALL_LANES, rank == __shfl_sync(ALL_LANES, rank, 0));
            const Slot slot = one_rank ? slot_of_lane(slots, local) : slot_of_row(slots, local);
            there = sequence_row(slots, cut, (int)rank, slot, local);
        }
        return there < 0 || there >= rows ? Move{NONE, NONE} : Move{there, row};
    }
};

struct CopyValid {
    Slots slots;
    int fill_rest;

    __device__ Move at(i64 row) const {
        if (is_real(slot_of_lane(slots, row), row)) return {row, row};
        return {NONE, fill_rest ? row : NONE};
    }
};

struct FillPadding {
    Slots slots;

    __device__ Move at(i64 row) const {
        return {NONE, is_real(slot_of_lane(slots, row), row) ? NONE : row};
    }
};

struct Half {
    Slots slots;
    int half;
    int write;
    int fill_rest;

    __device__ Move at(i64 half_row) const {
        const i64 row = half_row_of_lane(slots, half, half_row).row;
        if (row < 0) return {NONE, fill_rest ? half_row : NONE};
        return write ? Move{half_row, row} : Move{row, half_row};
    }
};

// Layouts of a batch: sequences at their slots, a block of `positions` rows for each sequence, or a block of a row of each
// sequence for each position.
constexpr int THD = 0, BSHD = 1, SBHD = 2;

// Real rows from one layout to another. Lengths are the slots' own, whatever the layout.
struct Convert {
    Slots slots;
    int positions;
    int from;
    int to;
    int fill_rest;

    __device__ Move at(i64 row) const {
        Slot slot;
        i64 position;
        if (to == THD) {
            slot = slot_of_lane(slots, (u32)row);
            position = row - slot.offset;
        } else {
            const i64 block = max(to == BSHD ? positions : slots.count, 1), which = row / block;
            position = to == BSHD ? row - which * block : which;
            slot = slot_at(slots, (int)(to == BSHD ? which : row - which * block));
        }
        const i64 source = from == THD  ? slot.offset + position
                         : from == BSHD ? (i64)slot.index * positions + position
                                        : position * slots.count + slot.index;
        const i64 rows = from == THD ? slots.rows : (i64)slots.count * positions;
        const bool real = slot.index >= 0 && position < min(slot.len, positions);
        if (real && source >= 0 && source < rows) return {source, row};
        return {NONE, fill_rest ? row : NONE};
    }
};

// A tensor-parallel linear layer whose weights are 0 and 1. A row is a rank's heads, and a *hidden* row every rank's,
// one after the other: it is as long as `parts` rows, of which the rank's is `part`. Hidden rows that are written hold
// zeros for other ranks.
struct Layer {
    int parts;
    int part;
    int to_hidden;

    __device__ Move at(i64 row) const {
        if (!to_hidden) return {row * parts + part, row};
        const i64 whole = row / parts;
        return {row - whole * parts == part ? whole : NONE, row};
    }
};

template <class Vector>
__device__ __forceinline__ Vector filled(u32 pattern);
template <>
__device__ __forceinline__ uint4 filled<uint4>(u32 pattern) {
    return make_uint4(pattern, pattern, pattern, pattern);
}
template <>
__device__ __forceinline__ uint2 filled<uint2>(u32 pattern) {
    return make_uint2(pattern, pattern);
}
template <>
__device__ __forceinline__ u32 filled<u32>(u32 pattern) {
    return pattern;
}
template <>
__device__ __forceinline__ u16 filled<u16>(u32 pattern) {
    return (u16)pattern;
}
template <>
__device__ __forceinline__ u8 filled<u8>(u32 pattern) {
    return (u8)pattern;
}

template <class Vector, class Map>
__device__ __forceinline__ void move_rows(
    const Map& map, i64 rows, const Vector* from, Vector* to, u32 row_vectors, u32 tile_rows, u32 pattern
) {
    __shared__ i64 sources[TILE_ROWS_MAX];
    __shared__ i64 targets[TILE_ROWS_MAX];
    const i64 first = (i64)blockIdx.x * tile_rows;
    const u32 count = (u32)(rows - first < tile_rows ? rows - first : tile_rows);
    if (threadIdx.x / 32 * 32 < count) {
        const Move move = map.at(first + threadIdx.x);
        sources[threadIdx.x] = move.from < 0 ? NONE : move.from * row_vectors;
        targets[threadIdx.x] = move.to < 0 ? NONE : move.to * row_vectors;
    }
    __syncthreads();
    const u32 total = count * row_vectors;
    const Vector pad = filled<Vector>(pattern);
    for (u32 base = threadIdx.x; base < total; base += THREADS * IN_FLIGHT) {
        Vector value[IN_FLIGHT];
        i64 target[IN_FLIGHT];
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i) {
            const u32 vector = base + i * THREADS;
            const u32 row = vector < total ? vector / row_vectors : 0;
            const u32 column = vector - row * row_vectors;
            const bool moved = vector < total && targets[row] >= 0;
            target[i] = moved ? targets[row] + column : NONE;
            value[i] = moved && sources[row] >= 0 ? __ldcs(from + sources[row] + column) : pad;
        }
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; ++i)
            if (target[i] >= 0) __stcs(to + target[i], value[i]);
    }
}

// The same by the bulk copy engine: a warp has a tile of rows, or a piece of a longer row, in shared memory; lane r asks
// for row r, waits, and sends it on. No thread touches the bytes, so that few warps keep much in flight. Rows and
// addresses are multiples of 16 bytes. The shared memory is twice a tile's on purpose: it keeps the blocks of a
// multiprocessor few, and with more bytes in flight the memory's own locality suffers (NOTES.md).
constexpr u32 BULK_BYTES = 24576;

template <class Map>
__device__ __forceinline__ void move_rows_in_bulk(
    const Map& map, i64 rows, const u8* from, u8* to, u32 row_bytes, u32 tile_rows, u32 pattern
) {
    __shared__ alignas(128) u8 tile[BULK_BYTES];
    __shared__ alignas(8) u64 arrived;
    const u32 lane = threadIdx.x, column = blockIdx.y * BULK_BYTES;
    const u32 bytes = min(row_bytes - column, BULK_BYTES);
    const i64 row = (i64)blockIdx.x * tile_rows + lane;
    const u32 barrier = (u32)__cvta_generic_to_shared(&arrived);
    const u32 slot = (u32)__cvta_generic_to_shared(tile) + lane * bytes;
    if (lane == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    Move move = map.at(row);
    if (lane >= tile_rows || row >= rows) move = {NONE, NONE};
    u8* const target = to + move.to * row_bytes + column;
    const bool copied = move.to >= 0 && move.from >= 0;
    const u32 copies = __popc(__ballot_sync(ALL_LANES, copied));
    if (lane == 0 && copies > 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(copies * bytes)
                     : "memory");
    __syncwarp();
    if (copied)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(slot),
            "l"(from + move.from * row_bytes + column), "r"(bytes), "r"(barrier)
            : "memory"
        );
    for (u32 left = __ballot_sync(ALL_LANES, move.to >= 0 && move.from < 0); left; left &= left - 1) {
        uint4* const row_target = (uint4*)__shfl_sync(ALL_LANES, (u64)target, __ffs(left) - 1);
        for (u32 i = lane; i < bytes / 16; i += 32) __stcs(row_target + i, filled<uint4>(pattern));
    }
    if (copies == 0) return;
    u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(barrier)
                     : "memory");
    if (copied) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(slot), "r"(bytes)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        // The tile is this block's until it has been read.
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
}

#define MOVE_IN_BULK(name, Map)                                                                                     \
    extern "C" __global__ void __launch_bounds__(32) name##_bulk(                                                   \
        const __grid_constant__ Map map, i64 rows, const u8* from, u8* to, u32 row_bytes, u32 tile_rows,            \
        u32 pattern                                                                                                 \
    ) {                                                                                                             \
        after_earlier_launches();                                                                                   \
        move_rows_in_bulk<Map>(map, rows, from, to, row_bytes, tile_rows, pattern);                                 \
    }
#define MOVE(name, Map, bytes, Vector)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) name##_##bytes(                                           \
        const __grid_constant__ Map map, i64 rows, const Vector* from, Vector* to,                                  \
        u32 row_vectors, u32 tile_rows, u32 pattern                                                                 \
    ) {                                                                                                             \
        after_earlier_launches();                                                                                   \
        move_rows<Vector, Map>(map, rows, from, to, row_vectors, tile_rows, pattern);                               \
    }
#define MOVES(name, Map)                                                                                            \
    MOVE_IN_BULK(name, Map)                                                                                         \
    MOVE(name, Map, 16, uint4)                                                                                      \
    MOVE(name, Map, 8, uint2)                                                                                       \
    MOVE(name, Map, 4, u32)                                                                                         \
    MOVE(name, Map, 2, u16)                                                                                         \
    MOVE(name, Map, 1, u8)

MOVES(reorder, Reorder)
MOVES(copy_valid, CopyValid)
MOVES(half, Half)
MOVES(convert, Convert)
MOVES(layer, Layer)
MOVE(fill_padding, FillPadding, 8, uint2)
MOVE(fill_padding, FillPadding, 4, u32)
MOVE(fill_padding, FillPadding, 2, u16)
MOVE(fill_padding, FillPadding, 1, u8)

// Padding filled 16 bytes at a time. Nothing is read, and most rows are real: a warp has 32 rows and goes over those that
// are not, so that all rows are looked at in one wave.
extern "C" __global__ void __launch_bounds__(THREADS)
    fill_padding_16(const __grid_constant__ Slots slots, u8* to, u32 row_bytes, u32 pattern) {
    after_earlier_launches();
    const u32 lane = threadIdx.x % 32;
    const i64 row = (i64)blockIdx.x * THREADS + threadIdx.x, first = row - lane;
    const bool real = is_real(slot_of_lane(slots, (u32)row), (u32)row);
    for (u32 left = __ballot_sync(ALL_LANES, row < slots.rows && !real); left; left &= left - 1) {
        uint4* const target = (uint4*)(to + (first + __ffs(left) - 1) * row_bytes);
        for (u32 i = lane; i < row_bytes / 16; i += 32) __stcs(target + i, filled<uint4>(pattern));
    }
}

// One byte for each row: 1 where it is real.
extern "C" __global__ void __launch_bounds__(THREADS) valid_mask(const __grid_constant__ Slots slots, u8* mask) {
    after_earlier_launches();
    constexpr int EACH = 16;
    const u32 first = (blockIdx.x * THREADS + threadIdx.x) * EACH;
    const u32 real = real_rows<EACH>(slots, first, guessed_window(slots, __shfl_sync(ALL_LANES, first, 0)));
    if (first >= slots.rows) return;
    if (first + EACH <= slots.rows && (u64)mask % EACH == 0) {
        // Four bits to the lowest ones of four bytes.
        const auto bytes = [&](int i) { return (real >> 4 * i & 15) * 0x00204081u & 0x01010101u; };
        *(uint4*)(mask + first) = make_uint4(bytes(0), bytes(1), bytes(2), bytes(3));
    } else {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (first + i < slots.rows) mask[first + i] = real >> i & 1;
    }
}

// For each row of a rank's tensor its row in sequence order.
extern "C" __global__ void __launch_bounds__(THREADS)
    partition_indices(const __grid_constant__ Slots slots, const Cut cut, int rank, i64* indices) {
    after_earlier_launches();
    const i64 row = (i64)blockIdx.x * THREADS + threadIdx.x;
    const Slot slot = slot_of_lane(slots, row);
    if (row < slots.rows) indices[row] = sequence_row(slots, cut, rank, slot, row);
}
