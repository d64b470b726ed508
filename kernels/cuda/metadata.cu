// The tables that a step's launch needs, made on the device from the tables of the whole batch.
//
// Here `len` of a slot counts the real positions of the whole *sequence*, on every rank; elsewhere a slot's own.
// A *piece* is a run of positions in a rank's slot: the slot itself (contiguous, striped by one), a chunk of it
// (dual-chunk has two), a stripe, or the rows that one of several ranks brought (stripes of one in a hierarchy's ring).
#include "common.cuh"

constexpr int CONTIGUOUS = 0, DUAL_CHUNK = 1, STRIPED = 2;
constexpr u32 SCAN_THREADS = 1024;

// Slots in tables of 64 bits.
struct WideSlots {
    const i64* offset;
    const i64* span;
    const i64* len;
    int count;
};

// The three tables in 32 bits, one behind the other. A row past 32 bits becomes the nearest that fits, which lies in no
// tensor either; its low bits alone would be another row.
extern "C" __global__ void __launch_bounds__(THREADS) narrow_slots(const __grid_constant__ WideSlots wide, int* to) {
    after_earlier_launches();
    const i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= 3ll * wide.count) return;
    const int table = (int)(at / wide.count), s = (int)(at - (i64)table * wide.count);
    const i64 number = (table == 0 ? wide.offset : table == 1 ? wide.span : wide.len)[s];
    to[at] = (int)min(max(number, -0x80000000ll), 0x7fffffffll);
}

// The sum over the block's threads before this one; that of all in `total`. All threads of the block together.
__device__ __forceinline__ i64 sum_before(i64 value, i64& total) {
    __shared__ i64 warps[SCAN_THREADS / 32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const i64 below = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += below;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    i64 before = 0;
    total = 0;
    for (u32 i = 0; i < SCAN_THREADS / 32; ++i) {
        if (i == warp) before = total;
        total += warps[i];
    }
    __syncthreads();
    return before + sum - value;
}

// A rank's slots from those of the whole batch, which are in order of rows: offset and span divided by cp, gaps too,
// and the real rows of the slot. One block; rows = the rank's rows.
__device__ __forceinline__ i64 real_of(i64 start, i64 step, i64 span, i64 len) {
    if (len <= start) return 0;
    const i64 real = (len - start + step - 1) / step;
    return real < span ? real : span;
}

struct Piece {
    i64 start;
    i64 step;
    i64 span;
    i64 at;
};

__device__ __forceinline__ Piece piece_of(int balance, int cp, int rank, int part, i64 span) {
    if (balance == CONTIGUOUS) return {rank * span, 1, span, 0};
    if (balance == DUAL_CHUNK) {
        const i64 chunk = span / 2, id = part ? 2 * cp - 1 - rank : rank;
        return {id * chunk, 1, chunk, part * chunk};
    }
    return {rank, cp, span, 0};
}

// Real rows of a striped slot: whole stripes before the one that the length ends in, and a part of it.
__device__ __forceinline__ i64 real_striped(i64 len, int cp, int rank, i64 stripe, i64 span) {
    const i64 round = stripe * cp, whole = len / round * stripe, rest = len % round - rank * stripe;
    const i64 real = whole + (rest < 0 ? 0 : rest < stripe ? rest : stripe);
    return real < span ? real : span;
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS) rank_slots(
    const __grid_constant__ Slots batch, int cp, int balance, int stripe, int rank, int* offset, int* span, int* len
) {
    after_earlier_launches();
    i64 rows = 0;
    for (int base = 0; base < batch.count; base += SCAN_THREADS) {
        const int s = base + threadIdx.x;
        i64 gap = 0, local = 0;
        if (s < batch.count) {
            const i64 end = s > 0 ? (i64)batch.offset[s - 1] + batch.span[s - 1] : 0;
            gap = (batch.offset[s] - end) / cp;
            local = batch.span[s] / cp;
        }
        i64 total;
        const i64 before = sum_before(gap + local, total);
        if (s < batch.count) {
            const i64 real = batch.len[s];
            offset[s] = (int)(rows + before + gap);
            span[s] = (int)local;
            if (balance <= DUAL_CHUNK) {
                i64 sum = 0;
                for (int part = 0; part <= balance; ++part) {
                    const Piece piece = piece_of(balance, cp, rank, part, local);
                    sum += real_of(piece.start, piece.step, piece.span, real);
                }
                len[s] = (int)sum;
            } else {
                len[s] = (int)real_striped(real, cp, rank, stripe, local);
            }
        }
        rows += total;
    }
}

// For each sequence the real rows in the first and the second chunk of a rank's slot, counted where asked for, summed
// up from 0: count + 1 numbers. One block.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS) cu_seqlens_on_rank(
    const __grid_constant__ Slots slots, int cp, int rank, int first, int second, int* cu_seqlens
) {
    after_earlier_launches();
    i64 sum = 0;
    if (threadIdx.x == 0) cu_seqlens[0] = 0;
    for (int base = 0; base < slots.count; base += SCAN_THREADS) {
        const int s = base + threadIdx.x;
        i64 real = 0;
        if (s < slots.count)
            for (int part = 0; part < 2; ++part) {
                const Piece piece = piece_of(DUAL_CHUNK, cp, rank, part, slots.span[s]);
                if (part ? second : first) real += real_of(piece.start, 1, piece.span, slots.len[s]);
            }
        i64 total;
        const i64 before = sum_before(real, total);
        if (s < slots.count) cu_seqlens[s + 1] = (int)(sum + before + real);
        sum += total;
    }
}

// What a launch of a step receives for one sequence, one piece of queries and one piece of keys. A band that is not
// bounded holds the smallest or the largest number.
struct alignas(16) Segment {
    int q_offset;
    int q_len;
    int kv_offset;
    int kv_len;
    i64 lo;
    i64 hi;
};

constexpr i64 UNBOUNDED_LOW = -0x7fffffffffffffffll - 1, UNBOUNDED_HIGH = 0x7fffffffffffffffll;

struct Mask {
    // Negative: unbounded.
    i64 left;
    i64 right;
    int bottom_right;
};

__device__ __forceinline__ i64 floor_div(i64 a, i64 b) { return a / b - (a % b < 0); }

__device__ __forceinline__ void band(const Mask& mask, i64 shift, const Piece& q, const Piece& kv, Segment& segment) {
    const i64 c = q.start + shift - kv.start, step = q.step;
    segment.lo = mask.left < 0 ? UNBOUNDED_LOW : -floor_div(mask.left - c, step);
    segment.hi = mask.right < 0 ? UNBOUNDED_HIGH : floor_div(c + mask.right, step);
}

__device__ __forceinline__ i64 shift_of(const Mask& mask, i64 lq, i64 lk) { return mask.bottom_right ? lk - lq : 0; }

__device__ __forceinline__ void place_queries(const Slots& slots, int s, const Piece& piece, Segment& segment) {
    segment.q_offset = (int)(slots.offset[s] + piece.at);
    segment.q_len = (int)real_of(piece.start, piece.step, piece.span, slots.len[s]);
}

// A piece of a slot in a ring. In stripes of one, a slot has the rows of `members` ranks of a finer cut, one piece each.
__device__ __forceinline__ Piece piece_in_ring(int balance, int cp, int members, int rank, int part, i64 span) {
    if (balance != STRIPED) return piece_of(balance, cp, rank, part, span);
    const i64 own = span / members;
    return {(i64)rank * members + part, (i64)cp * members, own, part * own};
}

// A step of the ring: the queries of `rank` against the keys of `owner`. segments: [key pieces, query pieces, sequences].
extern "C" __global__ void __launch_bounds__(THREADS) ring_segments(
    const __grid_constant__ Slots q, const __grid_constant__ Slots kv, const __grid_constant__ Mask mask, int cp,
    int balance, int members, int rank, int owner, Segment* segments
) {
    after_earlier_launches();
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    const int parts = balance == STRIPED ? members : balance == DUAL_CHUNK ? 2 : 1;
    if (i >= (i64)parts * parts * q.count) return;
    const int s = (int)(i % q.count), q_part = (int)(i / q.count % parts), kv_part = (int)(i / q.count / parts);
    const Piece queries = piece_in_ring(balance, cp, members, rank, q_part, q.span[s]);
    const Piece keys = piece_in_ring(balance, cp, members, owner, kv_part, kv.span[s]);
    Segment segment;
    place_queries(q, s, queries, segment);
    segment.kv_offset = (int)(kv.offset[s] + keys.at);
    segment.kv_len = (int)real_of(keys.start, keys.step, keys.span, kv.len[s]);
    band(mask, shift_of(mask, q.len[s], kv.len[s]), queries, keys, segment);
    segments[i] = segment;
}

// Pairs of stripes `distance` apart, of which a bound shows those whose rows are `first` to `last` apart.
struct Edge {
    i64 distance;
    i64 first;
    i64 last;
};

// What an upper bound of positions shows between stripes of `width` rows, `period` positions from one to the next of a
// rank, of which keys' are `apart` positions behind queries': all rows up to the one that is returned, and an edge.
// A lower bound is the same with all signs changed.
__device__ __forceinline__ i64 shown_below(i64 width, i64 period, i64 apart, i64 bound, Edge& edge) {
    const i64 distance = floor_div(bound - apart + width - 1, period);
    const i64 inside = min(bound - apart - distance * period, width - 1);
    const i64 last = distance * width + min(inside, 0ll);
    edge = inside >= 0 ? Edge{distance, last + 1, last + inside} : Edge{distance - 1, last + 1, distance * width - 1};
    return last;
}

// A step of the ring between stripes of several rows, `most` of them in the longest slot of queries. segments: a band of
// all rows for each sequence, then [upper and lower edge, stripes, sequences].
extern "C" __global__ void __launch_bounds__(THREADS) ring_stripes(
    const __grid_constant__ Slots q, const __grid_constant__ Slots kv, const __grid_constant__ Mask mask, int cp,
    int stripe, int most, int rank, int owner, Segment* segments
) {
    after_earlier_launches();
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (1 + 2 * (i64)most) * q.count) return;
    const int s = (int)(i % q.count);
    const i64 piece = i / q.count, period = (i64)cp * stripe, apart = ((i64)owner - rank) * stripe;
    const i64 shift = shift_of(mask, q.len[s], kv.len[s]), lo = shift - mask.left;
    const i64 q_len = real_striped(q.len[s], cp, rank, stripe, q.span[s]);
    const i64 kv_len = real_striped(kv.len[s], cp, owner, stripe, kv.span[s]);
    Edge upper{0, 0, -1}, lower{0, 0, -1};
    const i64 last = mask.right < 0 ? UNBOUNDED_HIGH : shown_below(stripe, period, apart, shift + mask.right, upper);
    const i64 first = mask.left < 0 ? UNBOUNDED_LOW : -shown_below(stripe, period, -apart, -lo, lower);
    if (piece == 0) {
        segments[i] = {q.offset[s], (int)q_len, kv.offset[s], (int)kv_len, first, last};
        return;
    }
    Edge edge = piece <= most ? upper : Edge{-lower.distance, -lower.last, -lower.first};
    // The upper edge keeps what the lower bound shows, and the lower one what is in the band of all rows.
    if (piece <= most && mask.left >= 0) edge.first = max(edge.first, lo - apart - edge.distance * (period - stripe));
    if (piece > most && mask.right >= 0) edge.last = min(edge.last, last);
    const i64 own = (piece - 1) % most, key = own + edge.distance;
    const bool is_there = own < q.span[s] / stripe && key >= 0 && key < kv.span[s] / stripe;
    if (!is_there || edge.first > edge.last) {
        segments[i] = {0, 0, 0, 0, 0, 0};
        return;
    }
    const i64 before = own * stripe, keys_before = key * stripe, back = edge.distance * stripe;
    segments[i] = {
        (int)(q.offset[s] + before), (int)min(max(q_len - before, 0ll), (i64)stripe),
        (int)(kv.offset[s] + keys_before), (int)min(max(kv_len - keys_before, 0ll), (i64)stripe),
        edge.first - back, edge.last - back
    };
}

// Keys of a sequence up to the last one that the last real one of these queries sees; none for padding.
__device__ __forceinline__ i64 visible_prefix(
    const Slots& q, const Slots& kv, const Mask& mask, int s, const Piece& queries, const Segment& segment
) {
    if (segment.q_len == 0) return 0;
    const i64 lk = kv.len[s], last = queries.start + (segment.q_len - 1) * queries.step;
    const i64 past = last + shift_of(mask, q.len[s], lk) + mask.right + 1;
    return mask.right < 0 || past > lk ? lk : past < 0 ? 0 : past;
}

// All-gather: the queries of `rank` against the visible prefix of each sequence in sequence order. Of stripes, the longest
// slot has `most`. segments: [query pieces, sequences], and of stripes of one row, which are one launch, [sequences, stripes]:
// queries of a launch follow each other in memory, as copies of valid rows find them by their offsets.
extern "C" __global__ void __launch_bounds__(THREADS) all_gather_segments(
    const __grid_constant__ Slots q, const __grid_constant__ Slots kv, const __grid_constant__ Mask mask, int cp,
    int balance, int stripe, int most, int rank, Segment* segments
) {
    after_earlier_launches();
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (balance == STRIPED ? most : balance + 1) * (i64)q.count) return;
    const bool together = balance == STRIPED && stripe == 1;
    const int s = (int)(together ? i / most : i % q.count);
    const i64 index = together ? i % most : i / q.count;
    if (balance == STRIPED && index >= q.span[s] / stripe) {
        segments[i] = {q.offset[s] + q.span[s], 0, 0, 0, 0, 0};
        return;
    }
    const Piece queries = balance == STRIPED ? Piece{(index * cp + rank) * stripe, 1, stripe, index * stripe}
                                             : piece_of(balance, cp, rank, (int)index, q.span[s]);
    Segment segment;
    place_queries(q, s, queries, segment);
    const i64 keys = visible_prefix(q, kv, mask, s, queries, segment);
    segment.kv_offset = kv.offset[s] * cp;
    segment.kv_len = (int)keys;
    band(mask, shift_of(mask, q.len[s], kv.len[s]), queries, {0, 1, keys, 0}, segment);
    segments[i] = segment;
}

// The bound that stands for an open side of a band in a call's tables.
constexpr i64 FAR_AWAY = 1ll << 40;

__device__ __forceinline__ i64 near(i64 bound) {
    return bound < -FAR_AWAY ? -FAR_AWAY : bound > FAR_AWAY ? FAR_AWAY : bound;
}

// What segments say, in the tables of a call with one run of keys for each. What the host knows without lengths stays:
// steps, owned rows, and which run is whose.
extern "C" __global__ void __launch_bounds__(THREADS) fill_call(
    const Segment* from, int count, QuerySegment* segments, KeyRun* runs
) {
    after_earlier_launches();
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    const Segment segment = from[i];
    segments[i].q_offset = segment.q_offset;
    segments[i].q_len = segment.q_len;
    segments[i].keys = segment.kv_len;
    segments[i].lo = near(segment.lo);
    segments[i].hi = near(segment.hi);
    runs[i].offset = segment.kv_offset;
    runs[i].len = segment.kv_len;
}

// The queries of segments, as slots without padding.
extern "C" __global__ void __launch_bounds__(THREADS) query_slots(
    const Segment* from, int count, int* offset, int* span, int* len
) {
    after_earlier_launches();
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    offset[i] = from[i].q_offset;
    span[i] = from[i].q_len;
    len[i] = from[i].q_len;
}

// All-gather, backward, of stripes of 1: positions of a rank's queries are cp apart, and have a band only against keys that
// are too. A launch for each residue: every cp-th key of the visible prefix from it on. segments: [residues, sequences].
extern "C" __global__ void __launch_bounds__(THREADS) all_gather_residues(
    const __grid_constant__ Slots q, const __grid_constant__ Slots kv, const __grid_constant__ Mask mask, int cp,
    int rank, Segment* segments
) {
    after_earlier_launches();
    const i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (i64)cp * q.count) return;
    const int s = (int)(i % q.count), residue = (int)(i / q.count);
    const Piece queries = piece_of(STRIPED, cp, rank, 0, q.span[s]);
    Segment segment;
    place_queries(q, s, queries, segment);
    const i64 keys = real_of(residue, cp, kv.len[s], visible_prefix(q, kv, mask, s, queries, segment));
    segment.kv_offset = kv.offset[s] * cp + (keys > 0 ? residue : 0);
    segment.kv_len = (int)keys;
    band(mask, shift_of(mask, q.len[s], kv.len[s]), queries, {residue, cp, keys, 0}, segment);
    segments[i] = segment;
}

// Segment ids and positions → runs. A *run* is a longest stretch of rows of one batch row with the same id, not 0, and
// positions that grow by one. An array of fewer rows is repeated; without positions a run has the position 0. Tiles
// count their runs, one block sums the counts up, tiles write; no atomics, so that the runs come in order of rows.
constexpr u32 TILE = 1024;

struct Ids {
    const int* id;
    // None where positions are left out.
    const int* position;
    int rows;
    // Rows of a batch row.
    int row_length;
    // Rows of each array.
    int id_rows;
    int position_rows;
};

__device__ __forceinline__ int id_of(const Ids& ids, int row) {
    return ids.id[row < ids.id_rows ? row : row % ids.id_rows];
}

__device__ __forceinline__ int position_of(const Ids& ids, int row) {
    return ids.position[row < ids.position_rows ? row : row % ids.position_rows];
}

__device__ __forceinline__ bool joined(const Ids& ids, int left) {
    return id_of(ids, left) == id_of(ids, left + 1)
        && (!ids.position || (u32)position_of(ids, left) + 1u == (u32)position_of(ids, left + 1));
}

__device__ __forceinline__ bool starts_run(const Ids& ids, int row) {
    return id_of(ids, row) != 0 && (row % ids.row_length == 0 || !joined(ids, row - 1));
}

__device__ __forceinline__ bool ends_run(const Ids& ids, int row) {
    return id_of(ids, row) != 0 && ((row + 1) % ids.row_length == 0 || !joined(ids, row));
}

extern "C" __global__ void __launch_bounds__(THREADS) count_runs(const __grid_constant__ Ids ids, int* tiles) {
    after_earlier_launches();
    int count = 0;
    for (u32 i = threadIdx.x; i < TILE; i += THREADS) {
        const i64 row = (i64)blockIdx.x * TILE + i;
        count += __syncthreads_count(row < ids.rows && starts_run(ids, (int)row));
    }
    if (threadIdx.x == 0) tiles[blockIdx.x] = count;
}

// Runs before each tile, in place, and of all.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS) sum_runs(int* tiles, int tile_count, int* runs) {
    after_earlier_launches();
    i64 sum = 0;
    for (int base = 0; base < tile_count; base += SCAN_THREADS) {
        const int tile = base + threadIdx.x;
        i64 total;
        const i64 before = sum_before(tile < tile_count ? tiles[tile] : 0, total);
        if (tile < tile_count) tiles[tile] = (int)(sum + before);
        sum += total;
    }
    if (threadIdx.x == 0) *runs = (int)sum;
}

struct Runs {
    int* offset;
    int* len;
    int* id;
    int* position;
    // Room; further runs are counted and not written.
    int room;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    write_runs(const __grid_constant__ Ids ids, const int* tiles, const __grid_constant__ Runs runs) {
    after_earlier_launches();
    __shared__ u32 starts[TILE / 32];
    __shared__ u32 ends[TILE / 32];
    __shared__ int before[TILE / 32];
    const i64 first = (i64)blockIdx.x * TILE;
    for (u32 i = threadIdx.x; i < TILE; i += THREADS) {
        const i64 row = first + i;
        const u32 start = __ballot_sync(ALL_LANES, row < ids.rows && starts_run(ids, (int)row));
        const u32 end = __ballot_sync(ALL_LANES, row < ids.rows && ends_run(ids, (int)row));
        if (i % 32 == 0) starts[i / 32] = start, ends[i / 32] = end;
    }
    __syncthreads();
    if (threadIdx.x < TILE / 32) {
        int sum = tiles[blockIdx.x];
        for (u32 word = 0; word < threadIdx.x; ++word) sum += __popc(starts[word]);
        before[threadIdx.x] = sum;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < TILE; i += THREADS) {
        const u32 word = i / 32, bit = 1u << (i % 32), up_to = bit | (bit - 1);
        const int run = before[word] + __popc(starts[word] & up_to) - 1, row = (int)(first + i);
        if (run < 0 || run >= runs.room) continue;
        if (starts[word] & bit) {
            runs.offset[run] = row;
            runs.id[run] = id_of(ids, row);
            runs.position[run] = ids.position ? position_of(ids, row) : 0;
        }
        // The row past the last one, until the lengths are taken.
        if (ends[word] & bit) runs.len[run] = row + 1;
    }
}

// Lengths from ends; what lies behind the last run is empty, at the end.
extern "C" __global__ void __launch_bounds__(THREADS)
    finish_runs(const int* count, int rows, const __grid_constant__ Runs runs) {
    after_earlier_launches();
    const i64 run = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (run >= runs.room) return;
    if (run < *count) {
        runs.len[run] -= runs.offset[run];
    } else {
        runs.offset[run] = rows;
        runs.len[run] = runs.id[run] = runs.position[run] = 0;
    }
}

// Runs of both sides → sequences of each batch row: the runs of queries, each with the run of keys of its id, then the
// runs of keys alone; all in order of rows. A block for each batch row. There are none where an id is below 0 or comes
// twice, or where a run does not begin at position 0.
struct Sequences {
    int* q_offset;
    int* q_len;
    int* kv_offset;
    int* kv_len;
    // Of each batch row; -1 where there are none of these.
    int* count;
    // Room of a batch row; further sequences are counted and not written.
    int most;
};

// Runs of one batch row of a side, and its first row.
struct BatchRow {
    Runs runs;
    int begin;
    int end;
    int row;
};

// All runs are here, and `rows` stands behind the last one.
__device__ __forceinline__ BatchRow batch_row(const Runs& runs, int row_length) {
    const i64 row = (i64)blockIdx.x * row_length;
    const auto offset = [&](int i) { return (i64)runs.offset[i]; };
    const int begin = last_at_most(0, runs.room, row - 1, offset) + 1;
    return {runs, begin, last_at_most(begin, runs.room, row + row_length - 1, offset) + 1, (int)row};
}

// The first run of an id, or -1.
__device__ __forceinline__ int run_of(const BatchRow& side, int id) {
    for (int i = side.begin; i < side.end; ++i)
        if (side.runs.id[i] == id) return i;
    return -1;
}

// Whether some run is no sequence's. All threads of the block together.
__device__ __forceinline__ bool says_nothing(const BatchRow& side) {
    bool wrong = false;
    for (int i = side.begin + (int)threadIdx.x; i < side.end; i += THREADS) {
        const int id = side.runs.id[i];
        wrong |= id < 0 || side.runs.position[i] != 0 || run_of(side, id) != i;
    }
    return __syncthreads_or(wrong);
}

__device__ __forceinline__ void put_rows(const BatchRow& side, int run, int* offset, int* len) {
    *offset = run < 0 ? side.row : side.runs.offset[run];
    *len = run < 0 ? 0 : side.runs.len[run];
}

// A run of -1 has no rows.
__device__ __forceinline__ void
    put_sequence(const Sequences& to, int s, const BatchRow& q, int of_q, const BatchRow& kv, int of_kv) {
    if (s >= to.most) return;
    const i64 at = (i64)blockIdx.x * to.most + s;
    put_rows(q, of_q, to.q_offset + at, to.q_len + at);
    put_rows(kv, of_kv, to.kv_offset + at, to.kv_len + at);
}

// The threads of the block before this one for which something holds; all of them in `total`. All threads together.
__device__ __forceinline__ int count_before(bool holds, int& total) {
    __shared__ int warps[THREADS / 32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, votes = __ballot_sync(ALL_LANES, holds);
    if (lane == 0) warps[warp] = __popc(votes);
    __syncthreads();
    int before = 0;
    total = 0;
    for (u32 i = 0; i < THREADS / 32; ++i) {
        if (i == warp) before = total;
        total += warps[i];
    }
    __syncthreads();
    return before + __popc(votes & ((1u << lane) - 1));
}

extern "C" __global__ void __launch_bounds__(THREADS) pair_runs(
    const __grid_constant__ Runs q_runs, const __grid_constant__ Runs kv_runs, int q_row_length, int kv_row_length,
    const __grid_constant__ Sequences to
) {
    after_earlier_launches();
    const BatchRow q = batch_row(q_runs, q_row_length), kv = batch_row(kv_runs, kv_row_length);
    const bool wrong_q = says_nothing(q), wrong = says_nothing(kv) || wrong_q;
    int count = wrong ? 0 : q.end - q.begin;
    for (int s = threadIdx.x; s < count; s += THREADS)
        put_sequence(to, s, q, q.begin + s, kv, run_of(kv, q.runs.id[q.begin + s]));
    for (int base = kv.begin; !wrong && base < kv.end; base += THREADS) {
        const int i = base + (int)threadIdx.x;
        const bool alone = i < kv.end && run_of(q, kv.runs.id[i]) < 0;
        int total;
        const int before = count_before(alone, total);
        if (alone) put_sequence(to, count + before, q, -1, kv, i);
        count += total;
    }
    for (int s = count + (int)threadIdx.x; s < to.most; s += THREADS) put_sequence(to, s, q, -1, kv, -1);
    if (threadIdx.x == 0) to.count[blockIdx.x] = wrong ? -1 : count;
}
