// `reference.cu` on a CPU, held to plain loops. Ends with 1 and a line of what is wrong.
#include "threads.h"

#include "view.cuh"

#include "source.cu"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

struct Shape {
    const char* name;
    int queries, keys, heads, group, dim, dim_v;
    // Keys are copies of so many, but for a whole number of binades.
    int distinct;
    double softcap;
};

void require(bool holds, const Shape& shape, const char* what, double got, double right) {
    if (holds) return;
    printf("%s: %s is %.17g, not %.17g\n", shape.name, what, got, right);
    exit(1);
}

// Inputs of a shape and what the kernels make of them.
struct Problem {
    const Shape& shape;
    std::mt19937_64 random{7};
    std::vector<float> q, k, v;
    std::vector<Row> rows;
    std::vector<Tile> tiles;
    std::vector<int> key_rows;
    std::vector<double> out;
    std::vector<float> magnitudes, squares;
    std::vector<Statistics> statistics;
    std::vector<Dither> dither;
    std::vector<u32> bits;

    double draw() { return std::normal_distribution<double>()(random); }
    explicit Problem(const Shape& s);
    Reference reference();
    void check(const Reference& r, int index, const Tile& tile);
};

Problem::Problem(const Shape& s) : shape(s) {
    q.resize(s.queries * s.heads * s.dim), k.resize(s.keys * s.heads / s.group * s.dim);
    v.resize(s.keys * s.heads / s.group * s.dim_v);
    for (float& x : q) x = (float)draw();
    for (float& x : v) x = (float)draw();
    // With a scale of ln 2, queries of 1 in the last lane turn a whole number there into binades.
    for (int i = 0; i < s.queries * s.heads; ++i) q[i * s.dim + s.dim - 1] = 1.0f;
    for (size_t i = 0; i < k.size(); ++i) {
        const int key = i / (s.heads / s.group * s.dim), lane = i % s.dim;
        const int same = key % s.distinct * (s.heads / s.group * s.dim) + i % (s.heads / s.group * s.dim);
        const bool whole = lane == s.dim - 1;
        k[i] = whole ? (float)(random() % 12) : key < s.distinct ? (float)(draw() * 3 / sqrt(s.dim)) : k[same];
    }
    // Keys lie in the reverse order.
    for (int key = 0; key < s.keys; ++key) key_rows.push_back(s.keys - 1 - key);
    for (int head = 0; head < s.heads; ++head)
        for (int first = 0; first < s.queries; first += ROWS) {
            const int count = min(ROWS, s.queries - first);
            tiles.push_back({head, (int)rows.size(), count, 0, s.keys, 0});
            for (int i = first; i < first + count; ++i) {
                const int end = i % 5 == 4 ? i % s.keys : s.keys;
                rows.push_back({i, i % 3 == 2 ? min(i, end) : 0, end});
            }
        }
    const size_t count = rows.size();
    out.resize(count * s.dim_v), magnitudes.resize(count * s.dim_v), squares.resize(count * s.dim_v);
    statistics.resize(count), dither.resize(count), bits.resize(count * s.keys * SLOTS / 32 * 2);
}

Reference Problem::reference() {
    const Shape& s = shape;
    const i64 kv = s.heads / s.group;
    const auto view = [](std::vector<float>& x, i64 heads, i64 dim) {
        return View{(u64)x.data(), heads * dim, dim, F32};
    };
    Reference r = {};
    r.q = view(q, s.heads, s.dim), r.k = view(k, kv, s.dim), r.v = view(v, kv, s.dim_v);
    r.rows = rows.data(), r.tiles = tiles.data(), r.key_rows = key_rows.data();
    r.out = out.data(), r.magnitudes = magnitudes.data(), r.statistics = statistics.data();
    r.squares = squares.data(), r.dither = dither.data(), r.bits = bits.data();
    r.scale = M_LN2, r.softcap = s.softcap, r.group = s.group, r.dim = s.dim, r.dim_v = s.dim_v;
    r.words = s.keys * SLOTS / 32 * 2;
    return r;
}

// One row by plain loops. Bounds may lose what f32 sums lose, 2^-10, and are 2^-6 too large at most.
void Problem::check(const Reference& r, int index, const Tile& tile) {
    const Shape& s = shape;
    const Row& row = rows[index];
    const int kv_heads = s.heads / s.group, kv = tile.head / s.group;
    std::vector<double> logits;
    double largest = -INFINITY;
    for (int key = row.first; key < row.end; ++key) {
        double dot = 0.0;
        for (int lane = 0; lane < s.dim; ++lane)
            dot += (double)q[(row.row * s.heads + tile.head) * s.dim + lane]
                 * k[(key_rows[key] * kv_heads + kv) * s.dim + lane];
        const double scaled = r.scale * dot;
        logits.push_back(r.softcap == 0.0 ? scaled : r.softcap * tanh(scaled / r.softcap));
        largest = larger(largest, logits.back());
    }
    Dither right = {};
    double sum = 0.0;
    std::vector<double> weights;
    std::map<u64, int> in_slot;
    const auto slot = [&](double weight) {
        return (__double_as_longlong(weight) >> 20 & 0xffffffff) * ((u64)SLOTS * logits.size()) >> 32;
    };
    for (double logit : logits) {
        const double x = logit - largest, weight = exp(x);
        right.sum += x, right.sum_squares += x * x, sum += weight;
        weights.push_back(weight);
        if (weight != 0.0) ++in_slot[slot(weight)];
    }
    for (double weight : weights) {
        if (weight == 0.0) continue;
        const double alike = in_slot[slot(weight)] > 1 ? 1.0 : 0.0;
        right.weights += 1.0, right.energy += weight * weight;
        right.alike += alike, right.alike_energy += alike * weight * weight;
    }
    const auto near = [&](const char* what, double got, double right) {
        require(fabs(got - right) <= 1e-9 * (1.0 + fabs(right)) || got == right, s, what, got, right);
    };
    const auto above = [&](const char* what, double got, double right) {
        require(got >= right * (1.0 - 1.0 / 1024) && got <= right * (1.0 + 1.0 / 64) + FLT_MIN, s, what, got, right);
    };
    const Dither& got = dither[index];
    near("the largest logit", statistics[index].largest, largest), near("the sum", statistics[index].sum, sum);
    near("the sum of x", got.sum, right.sum), near("that of squares", got.sum_squares, right.sum_squares);
    near("weights", got.weights, right.weights), near("energy", got.energy, right.energy);
    near("alike weights", got.alike, right.alike), near("their energy", got.alike_energy, right.alike_energy);
    for (int lane = 0; lane < s.dim_v; ++lane) {
        double exact = 0.0, magnitude = 0.0, squared = 0.0;
        for (size_t i = 0; i < weights.size(); ++i) {
            const double value = v[(key_rows[row.first + i] * kv_heads + kv) * s.dim_v + lane];
            exact += weights[i] * value, magnitude += weights[i] * fabs(value);
            squared += weights[i] * weights[i] * value * value;
        }
        const int at = index * s.dim_v + lane;
        near("a sum of values", out[at], exact), above("a magnitude", magnitudes[at], magnitude);
        above("a sum of squares", squares[at], squared);
    }
}

int main() {
    const Shape shapes[] = {
        {"all keys differ", 70, 130, 2, 1, 16, 16, 130, 0.0},
        {"a tenth is alike", 66, 200, 2, 2, 8, 24, 180, 0.0},
        {"pairs", 20, 96, 1, 1, 24, 8, 48, 0.0},
        {"one key", 5, 1, 1, 1, 8, 8, 1, 0.0},
        {"two blocks of lanes, odd dims", 9, 70, 1, 1, 11, 140, 60, 0.0},
        {"a soft cap", 9, 70, 1, 1, 16, 16, 60, 2.0},
    };
    for (const Shape& shape : shapes) {
        Problem problem(shape);
        const Reference r = problem.reference();
        const int blocks = (shape.dim_v + LANES - 1) / LANES;
        for (auto kernel : {reference, reference_dither})
            for (size_t tile = 0; tile < problem.tiles.size(); ++tile)
                for (int y = 0; y < blocks; ++y) run_block(tile, y, [&] { kernel(r); });
        for (const Tile& tile : problem.tiles)
            for (int row = 0; row < tile.count; ++row) problem.check(r, tile.first_row + row, tile);
    }
}
