// The exact forward of chosen query rows, in f64, and the sums that an envelope is formed from: what production kernels are
// judged by where a CPU is too slow. A second kernel, which wants the first's largest logits, gives what the envelope of
// dithered rows needs besides.
//
// It shares nothing with them: no segments, no masks, no run tables. The host names every query row, the keys that it sees,
// and the row of every key. A block has up to 64 query rows of one head and goes through the keys that any of them sees,
// 64 at a time. Products are f64 matrix instructions; sums that only form bounds are tf32 ones, of magnitudes rounded up.
//
// Fragments of a warp (PTX ISA, mma.m16n8k8): thread 4g + t has a(g, t), a(g + 8, t), a(g, t + 4), a(g + 8, t + 4);
// b(t, g), b(t + 4, g); c(g, 2t), c(g, 2t + 1), c(g + 8, 2t), c(g + 8, 2t + 1). Those of f64 and of tf32 are the same.
#include "common.cuh"

// Query rows of a block and keys of a step, lanes of the output that a block makes, and lanes of a matrix instruction.
constexpr int ROWS = 64, KEYS = 64, LANES = 128, STEP = 8;
// Slots of a binade for each key that a row sees: `SLOTS` of the envelope.
constexpr int SLOTS = 64;
// Strides in shared memory, such that a warp's fragment lies in different banks.
constexpr int P_STRIDE = KEYS + 4, V_STRIDE = LANES + 8;

// A query row and the keys that it sees, numbered within its list of keys.
struct Row {
    int row;
    int first;
    int end;
};

// Neighbouring entries of the table of rows, of one head and one list of keys.
struct Tile {
    int head;
    int first_row;
    int count;
    // The keys that any row sees, and where the list of keys begins.
    int first_key;
    int end_key;
    int keys;
};

// Of one row, over visible keys: logits s, weights e^(s - largest), and a, the sum of magnitudes of a logit's products.
struct Statistics {
    double largest;
    double smallest;
    double sum;
    double sum_a;
    double largest_a;
};

// Of one row, over visible keys: x = s - largest; how many weights are not 0, and the sum of their squares; the same of those
// that have company in their slot.
struct Dither {
    double sum;
    double sum_squares;
    double weights;
    double energy;
    double alike;
    double alike_energy;
};

struct Reference {
    View q;
    View k;
    View v;
    const Row* rows;
    const Tile* tiles;
    const int* key_rows;
    // [rows, dim_v]: sums of weights times values, and of weights times magnitudes.
    double* out;
    float* magnitudes;
    Statistics* statistics;
    // [rows, dim_v]: sums of squares of weights times values. For each row two bits a slot, zero at first: of 32 slots whether
    // they are taken, and in the next word whether they are shared.
    float* squares;
    Dither* dither;
    u32* bits;
    double scale;
    // 0: none.
    double softcap;
    // Query heads of a KV head.
    int group;
    int dim;
    int dim_v;
    // What a magnitude other than 0 counts as at least.
    float floor;
    // Words of a row's bits: enough for SLOTS of each key that it sees, an even number.
    int words;
};

__device__ __forceinline__ void multiply(double (&c)[4], const double (&a)[4], const double (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A number's magnitude as tf32, rounded up.
__device__ __forceinline__ u32 tf32_up(float x) { return ((__float_as_uint(x) & 0x7fffffffu) + 0x1fffu) & 0xffffe000u; }

// The same where what is not 0 counts as `floor` at least.
__device__ __forceinline__ u32 tf32_up(float x, float floor) {
    return x == 0.0f ? 0u : tf32_up(fmaxf(fabsf(x), floor));
}

// `lanes` lanes from `lane` of a tensor's rows, as f32, which holds every format; zeros where there is no row (-1) and up to
// `width`, a multiple of STEP.
__device__ void load_rows(
    float* to, int stride, const View& view, const int* rows, int head, int lane, int lanes, int width
) {
    const bool wide = view.format != F32 && view.base % 16 == 0 && view.row % 8 == 0 && view.head % 8 == 0;
    const int pieces = width / STEP;
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * pieces; i += THREADS) {
        const int local = i / pieces, at = i % pieces * STEP, row = rows[local];
        const i64 place = place_of(view, row, head) + lane + at;
        float* const place_to = to + local * stride + at;
        if (row >= 0 && wide && at + STEP <= lanes) {
            const uint4 four = *(const uint4*)((const u16*)view.base + place);
            const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < STEP; ++j) {
                const u16 code = (u16)(words[j / 2] >> (16 * (j % 2)));
                place_to[j] = view.format == BF16 ? bf16_to_f32(code) : fp16_to_f32(code);
            }
        } else {
            for (int j = 0; j < STEP; ++j)
                place_to[j] = row >= 0 && at + j < lanes ? get(view, place + j) : 0.0f;
        }
    }
}

// A warp's 16 rows and 32 keys: logits, -infinity where a key is hidden, and magnitudes if they are wanted.
template <bool MAGNITUDES>
__device__ __forceinline__ void logits(
    const Reference& r, const float* q, const float* k, int stride, int width, const Row* rows, int first_key,
    double* p, float* a
) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row = warp % 4 * 16 + g, key = warp / 4 * 32;
    double s[4][4] = {};
    float magnitude[4][4] = {};
    for (int lane = t; lane < width; lane += STEP) {
        const float* const from = q + row * stride + lane;
        const float raw[4] = {from[0], from[8 * stride], from[4], from[8 * stride + 4]};
        double exact[4];
        u32 up[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) exact[i] = raw[i], up[i] = tf32_up(raw[i], r.floor);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float* const other = k + (key + n * 8 + g) * stride + lane;
            const float raw_b[2] = {other[0], other[4]};
            const double exact_b[2] = {raw_b[0], raw_b[1]};
            const u32 up_b[2] = {tf32_up(raw_b[0], r.floor), tf32_up(raw_b[1], r.floor)};
            multiply(s[n], exact, exact_b);
            if constexpr (MAGNITUDES) multiply(magnitude[n], up, up_b);
        }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at_row = row + i / 2 * 8, at_key = key + n * 8 + 2 * t + i % 2;
            const int number = first_key + at_key;
            const bool seen = number >= rows[at_row].first && number < rows[at_row].end;
            const double scaled = r.scale * s[n][i];
            const double capped = r.softcap == 0.0 ? scaled : r.softcap * tanh(scaled / r.softcap);
            p[at_row * P_STRIDE + at_key] = seen ? capped : -__longlong_as_double(0x7ff0000000000000LL);
            if constexpr (MAGNITUDES) a[at_row * P_STRIDE + at_key] = magnitude[n][i];
        }
    }
}

// Four neighbouring threads have a row.
__device__ __forceinline__ double of_quad(double x, double (*combine)(double, double)) {
    const u32 quad = 0xfu << (threadIdx.x % 32 / 4 * 4);
    x = combine(x, __shfl_xor_sync(quad, x, 1));
    return combine(x, __shfl_xor_sync(quad, x, 2));
}

__device__ __forceinline__ double larger(double x, double y) { return x > y ? x : y; }
__device__ __forceinline__ double smaller(double x, double y) { return x < y ? x : y; }
__device__ __forceinline__ double total(double x, double y) { return x + y; }

// A quarter of a row: its logits become weights. Returns what earlier weights of the row are to be multiplied by.
__device__ __forceinline__ double weigh(double* p, const float* a, Statistics& own) {
    const double infinity = __longlong_as_double(0x7ff0000000000000LL);
    double largest = own.largest;
#pragma unroll
    for (int i = 0; i < KEYS; i += 4) largest = larger(largest, p[i]);
    largest = of_quad(largest, larger);
    const double factor = largest == own.largest ? 1.0 : exp(own.largest - largest);
    own.largest = largest, own.sum *= factor, own.sum_a *= factor;
    for (int i = 0; i < KEYS; i += 4) {
        const double logit = p[i];
        const bool seen = logit != -infinity;
        const double weight = seen ? exp(logit - largest) : 0.0;
        p[i] = weight;
        own.sum += weight, own.sum_a += weight * a[i];
        if (seen) own.smallest = smaller(own.smallest, logit), own.largest_a = larger(own.largest_a, a[i]);
    }
    return factor;
}

// A row's slots: a binade has `count` of them.
struct SlotBits {
    u32* bits;
    u64 count;
};

// Where a weight's slot is: the word that says whether it is taken, before the one that says whether it is shared, and its bit.
__device__ __forceinline__ u32* slot_of(const SlotBits& slots, double weight, u32& bit) {
    // The first 32 bits after the point.
    const u64 significand = (u64)__double_as_longlong(weight) >> 20 & 0xffffffff;
    const u64 slot = significand * slots.count >> 32;
    bit = 1u << (slot % 32);
    return slots.bits + slot / 32 * 2;
}

// A quarter of a row: its logits become weights relative to the row's largest logit, which is known.
__device__ __forceinline__ void weigh_by(double* p, double largest, Dither& own) {
    for (int i = 0; i < KEYS; i += 4) {
        const bool seen = p[i] != -__longlong_as_double(0x7ff0000000000000LL);
        const double x = seen ? p[i] - largest : 0.0;
        p[i] = seen ? exp(x) : 0.0;
        own.sum += x, own.sum_squares += x * x;
    }
}

// A quarter of a row: its weights take their slots, or share them with whatever weight was there first.
__device__ __forceinline__ void take(const double* p, const SlotBits& slots) {
    for (int i = 0; i < KEYS; i += 4) {
        if (p[i] == 0.0) continue;
        u32 bit;
        u32* const word = slot_of(slots, p[i], bit);
        if (atomicOr(word, bit) & bit) atomicOr(word + 1, bit);
    }
}

// A quarter of a row, every key of which took its slot before: counts its weights, and those that have company.
__device__ __forceinline__ void count_alike(const double* p, const SlotBits& slots, Dither& own) {
    for (int i = 0; i < KEYS; i += 4) {
        if (p[i] == 0.0) continue;
        u32 bit;
        const u32* const word = slot_of(slots, p[i], bit);
        const double energy = p[i] * p[i], alike = __ldcg(word + 1) & bit ? 1.0 : 0.0;
        own.weights += 1.0, own.energy += energy, own.alike += alike, own.alike_energy += energy * alike;
    }
}

// A warp's 16 rows and 64 lanes: squares of weights times squares of values.
__device__ __forceinline__ void gather_squares(float (&squares)[8][4], const double* p, const float* v, int lanes) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row = warp % 4 * 16 + g, lane = warp / 4 * 64;
    for (int key = t; key < KEYS; key += STEP) {
        const double* const from = p + row * P_STRIDE + key;
        const double weights[4] = {from[0], from[8 * P_STRIDE], from[4], from[8 * P_STRIDE + 4]};
        u32 up[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) up[i] = tf32_up(__double2float_ru(weights[i] * weights[i]));
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            if (lane + n * 8 < lanes) {
                const float* const other = v + key * V_STRIDE + lane + n * 8 + g;
                const float raw[2] = {other[0], other[4 * V_STRIDE]};
                const u32 up_b[2] = {tf32_up(__fmul_ru(raw[0], raw[0])), tf32_up(__fmul_ru(raw[1], raw[1]))};
                multiply(squares[n], up, up_b);
            }
        }
    }
}

// A warp's 16 rows and 64 lanes of the output.
__device__ __forceinline__ void gather(
    double (&out)[8][4], float (&magnitude)[8][4], const double* p, const float* v, const double* factors, int lanes
) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row = warp % 4 * 16 + g, lane = warp / 4 * 64;
    const double factor[2] = {factors[row], factors[row + 8]};
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[n][i] *= factor[i / 2];
            magnitude[n][i] = __fmul_ru(magnitude[n][i], __double2float_ru(factor[i / 2]));
        }
    for (int key = t; key < KEYS; key += STEP) {
        const double* const from = p + row * P_STRIDE + key;
        const double weights[4] = {from[0], from[8 * P_STRIDE], from[4], from[8 * P_STRIDE + 4]};
        u32 up[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) up[i] = tf32_up(__double2float_ru(weights[i]));
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            if (lane + n * 8 < lanes) {
                const float* const other = v + key * V_STRIDE + lane + n * 8 + g;
                const float raw[2] = {other[0], other[4 * V_STRIDE]};
                const double exact[2] = {raw[0], raw[1]};
                const u32 up_b[2] = {tf32_up(raw[0]), tf32_up(raw[1])};
                multiply(out[n], weights, exact);
                multiply(magnitude[n], up, up_b);
            }
        }
    }
}

// Puts a warp's 16 rows and 64 lanes where they belong.
template <class Value>
__device__ __forceinline__ void store(
    const Reference& r, const Tile& tile, const Value (&values)[8][4], int first_lane, Value* to
) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = warp % 4 * 16 + g + i / 2 * 8, lane = first_lane + warp / 4 * 64 + n * 8 + 2 * t + i % 2;
            if (row < tile.count && lane < r.dim_v)
                to[(i64)(tile.first_row + row) * r.dim_v + lane] = values[n][i];
        }
}

// What a block holds of its rows and of the keys of a step.
struct Block {
    Row rows[ROWS];
    int query_rows[ROWS];
    int key_rows[KEYS];
    // What a row's earlier weights are to be multiplied by.
    double factors[ROWS];
};

// Dynamic shared memory: weights, magnitudes of logits, values, queries, keys.
struct Operands {
    double* p;
    float* a;
    float* v;
    float* q;
    float* k;
    int width;
    int stride;
};

__device__ __forceinline__ Operands operands(u8* memory, int dim) {
    Operands o;
    o.width = (dim + STEP - 1) / STEP * STEP, o.stride = o.width + 4;
    o.p = (double*)memory;
    o.a = (float*)(o.p + ROWS * P_STRIDE);
    o.v = o.a + ROWS * P_STRIDE;
    o.q = o.v + KEYS * V_STRIDE;
    o.k = o.q + ROWS * o.stride;
    return o;
}

__device__ __forceinline__ void load_queries(const Reference& r, const Tile& tile, const Operands& o, Block& block) {
    if (threadIdx.x < ROWS) {
        const bool there = threadIdx.x < tile.count;
        block.rows[threadIdx.x] = there ? r.rows[tile.first_row + threadIdx.x] : Row{-1, 0, 0};
        block.query_rows[threadIdx.x] = block.rows[threadIdx.x].row;
    }
    __syncthreads();
    load_rows(o.q, o.stride, r.q, block.query_rows, tile.head, 0, r.dim, o.width);
}

// The keys of a step, and `lanes` lanes of their values.
__device__ __forceinline__ void load_keys(
    const Reference& r, const Tile& tile, const Operands& o, Block& block, int first_key, int first_lane, int lanes
) {
    const int kv_head = tile.head / r.group;
    __syncthreads();
    if (threadIdx.x < KEYS) {
        const int key = first_key + threadIdx.x;
        block.key_rows[threadIdx.x] = key < tile.end_key ? r.key_rows[tile.keys + key] : -1;
    }
    __syncthreads();
    load_rows(o.k, o.stride, r.k, block.key_rows, kv_head, 0, r.dim, o.width);
    load_rows(o.v, V_STRIDE, r.v, block.key_rows, kv_head, first_lane, lanes, (lanes + STEP - 1) / STEP * STEP);
    __syncthreads();
}

// A quarter of a row that is not there has no weights.
__device__ __forceinline__ void clear(double* p) {
    for (int i = 0; i < KEYS; i += 4) p[i] = 0.0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) reference(const __grid_constant__ Reference r) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ Block block;
    const Operands o = operands(memory, r.dim);
    const Tile tile = r.tiles[blockIdx.x];
    const int first_lane = blockIdx.y * LANES, lanes = min(r.dim_v - first_lane, LANES);
    load_queries(r, tile, o, block);

    const double infinity = __longlong_as_double(0x7ff0000000000000LL);
    const int own_row = threadIdx.x / 4, place = own_row * P_STRIDE + threadIdx.x % 4;
    // A warp without a row of its own has nothing to multiply.
    const bool works = threadIdx.x / 32 % 4 * 16 < tile.count;
    Statistics own = {-infinity, infinity, 0.0, 0.0, 0.0};
    double out[8][4] = {};
    float magnitude[8][4] = {};
    for (int first_key = tile.first_key; first_key < tile.end_key; first_key += KEYS) {
        load_keys(r, tile, o, block, first_key, first_lane, lanes);
        if (works) logits<true>(r, o.q, o.k, o.stride, o.width, block.rows, first_key, o.p, o.a);
        __syncthreads();
        double factor = 1.0;
        if (own_row < tile.count) factor = weigh(o.p + place, o.a + place, own);
        else clear(o.p + place);
        if (threadIdx.x % 4 == 0) block.factors[own_row] = factor;
        __syncthreads();
        if (works) gather(out, magnitude, o.p, o.v, block.factors, lanes);
    }
    store(r, tile, out, first_lane, r.out);
    store(r, tile, magnitude, first_lane, r.magnitudes);
    const double smallest = of_quad(own.smallest, smaller), sum = of_quad(own.sum, total);
    const double sum_a = of_quad(own.sum_a, total), largest_a = of_quad(own.largest_a, larger);
    if (threadIdx.x % 4 == 0 && own_row < tile.count && blockIdx.y == 0)
        r.statistics[tile.first_row + own_row] = {own.largest, smallest, sum, sum_a, largest_a};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) reference_dither(const __grid_constant__ Reference r) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ Block block;
    const Operands o = operands(memory, r.dim);
    const Tile tile = r.tiles[blockIdx.x];
    const int first_lane = blockIdx.y * LANES, lanes = min(r.dim_v - first_lane, LANES);
    load_queries(r, tile, o, block);

    const int own_row = threadIdx.x / 4, place = own_row * P_STRIDE + threadIdx.x % 4;
    const bool works = threadIdx.x / 32 % 4 * 16 < tile.count, there = own_row < tile.count;
    const i64 row = tile.first_row + own_row;
    const double largest = there ? r.statistics[row].largest : 0.0;
    // One block of a row's is enough for what all lanes have in common.
    const bool counts = there && blockIdx.y == 0;
    SlotBits slots = {};
    if (counts) slots = {r.bits + row * r.words, (u64)SLOTS * (block.rows[own_row].end - block.rows[own_row].first)};
    Dither own;
    float squares[8][4] = {};
    // First every weight takes its slot, then each one knows whether it is alone there. One text makes the weights of both.
#pragma unroll 1
    for (int pass = blockIdx.y == 0 ? 0 : 1; pass < 2; ++pass) {
        own = {};
        for (int first_key = tile.first_key; first_key < tile.end_key; first_key += KEYS) {
            load_keys(r, tile, o, block, first_key, first_lane, pass == 0 ? 0 : lanes);
            if (works) logits<false>(r, o.q, o.k, o.stride, o.width, block.rows, first_key, o.p, o.a);
            __syncthreads();
            if (there) weigh_by(o.p + place, largest, own);
            else clear(o.p + place);
            if (counts && pass == 0) take(o.p + place, slots);
            if (counts && pass == 1) count_alike(o.p + place, slots, own);
            __syncthreads();
            if (works && pass == 1) gather_squares(squares, o.p, o.v, lanes);
        }
    }
    store(r, tile, squares, first_lane, r.squares);
    const double sum = of_quad(own.sum, total), sum_squares = of_quad(own.sum_squares, total);
    const double weights = of_quad(own.weights, total), energy = of_quad(own.energy, total);
    const double alike = of_quad(own.alike, total), alike_energy = of_quad(own.alike_energy, total);
    if (threadIdx.x % 4 == 0 && counts) r.dither[row] = {sum, sum_squares, weights, energy, alike, alike_energy};
}
