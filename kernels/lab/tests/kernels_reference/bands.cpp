// The simple kernels on a CPU, forward and backward, by the tables of calls whose segments have prefixes and sink tokens:
// results are those of plain loops over the pairs that the segments show. Ends with 1 and a line of what is wrong.
#include "attend.h"
#include "packs.h"

constexpr int HEADS = 2, DIM = 3;
constexpr float SCALE = 0.5f, BEFORE = 7;
// What a row of a tensor holds.
enum { NOBODY, REAL, PADDING };

struct Pair {
    int q, k;
};

struct Case {
    // Of queries, of keys behind them, and runs that are owned.
    int segments, bands_of_keys, runs;
    int q_owned, kv_owned;
    // The tables, in words.
    std::vector<i64> words;
    std::vector<int> q_rows, kv_rows;
    // Rows of queries, and of keys that they see, in order.
    std::vector<Pair> pairs;
};

#include "cases.h"

struct Results {
    std::vector<double> out, lse, dq, dk, dv;
};

// By the definition, in f64. Gradients are those of the lse and out that the kernel saved.
Results plain(const Case& c, Tensor& q, Tensor& k, Tensor& v, Tensor& dout) {
    const int rows = c.q_rows.size(), keys = c.kv_rows.size();
    Results r;
    r.out.assign(rows * HEADS * DIM, 0), r.lse.assign(HEADS * rows, -INFINITY), r.dq = r.out;
    r.dk.assign(keys * DIM, 0), r.dv = r.dk;
    auto dot = [](const float* a, const float* b) {
        double sum = 0;
        for (int lane = 0; lane < DIM; ++lane) sum += (double)a[lane] * b[lane];
        return sum;
    };
    for (int head = 0; head < HEADS; ++head) {
        auto of_query = [&](Tensor& t, int row) { return &t.values[(row * HEADS + head) * DIM]; };
        auto of_key = [&](Tensor& t, int row) { return &t.values[row * DIM]; };
        auto score = [&](const Pair& pair) { return SCALE * dot(of_query(q, pair.q), of_key(k, pair.k)); };
        std::vector<double> sum(rows, 0);
        for (const Pair& pair : c.pairs) sum[pair.q] += exp(score(pair));
        for (int row = 0; row < rows; ++row)
            if (sum[row] > 0) r.lse[head * rows + row] = log(sum[row]);
        for (const Pair& pair : c.pairs)
            for (int lane = 0; lane < DIM; ++lane)
                r.out[(pair.q * HEADS + head) * DIM + lane] += exp(score(pair)) / sum[pair.q] * of_key(v, pair.k)[lane];
        for (const Pair& pair : c.pairs) {
            const double p = exp(score(pair)) / sum[pair.q];
            double d = 0;
            for (int lane = 0; lane < DIM; ++lane)
                d += of_query(dout, pair.q)[lane] * r.out[(pair.q * HEADS + head) * DIM + lane];
            const double ds = p * (dot(of_query(dout, pair.q), of_key(v, pair.k)) - d);
            for (int lane = 0; lane < DIM; ++lane) {
                r.dq[(pair.q * HEADS + head) * DIM + lane] += SCALE * ds * of_key(k, pair.k)[lane];
                r.dk[pair.k * DIM + lane] += SCALE * ds * of_query(q, pair.q)[lane];
                r.dv[pair.k * DIM + lane] += p * of_query(dout, pair.q)[lane];
            }
        }
    }
    return r;
}

// The first element that is wrong: real rows as the definition has them, padding cleared, and all others as before.
int wrong(const Tensor& got, const std::vector<double>& want, const std::vector<int>& rows, bool is_lse) {
    for (size_t i = 0; i < want.size(); ++i) {
        const int row = rows[is_lse ? i % rows.size() : i / (got.heads * DIM)];
        const double empty = is_lse ? -INFINITY : 0;
        const double must = row == REAL ? want[i] : row == PADDING ? empty : BEFORE;
        const bool near = fabs(got.values[i] - must) <= (row == REAL ? 1e-4 : 0);
        if (!near && got.values[i] != must) return (int)i;
    }
    return -1;
}

int main() {
    for (size_t at = 0; at < CASES.size(); ++at) {
        Case c = CASES[at];
        Draw draw(at);
        const int rows = c.q_rows.size(), keys = c.kv_rows.size();
        Tensor q(rows, HEADS, DIM, NAN), dout = q, k(keys, 1, DIM, NAN), v = k;
        auto number = [&] { return (draw.below(65) - 32) / 16.0f; };
        auto fill = [&](Tensor& t, const std::vector<int>& kinds) {
            for (size_t i = 0; i < t.values.size(); ++i)
                if (kinds[i / (t.heads * DIM)] == REAL) t.values[i] = number();
        };
        fill(q, c.q_rows), fill(dout, c.q_rows), fill(k, c.kv_rows), fill(v, c.kv_rows);
        Tensor out(rows, HEADS, DIM, BEFORE), lse(rows, HEADS, 1, BEFORE), largest(1, HEADS, 1, -INFINITY);
        Tensor dq = out, dk(keys, 1, DIM, BEFORE), dv = dk;
        std::vector<float> row_dots(HEADS * c.q_owned, NAN);

        Call call = {(const QuerySegment*)c.words.data(),
                     (const KeyRun*)((const QuerySegment*)c.words.data() + c.segments + c.bands_of_keys),
                     c.segments, c.runs, c.q_owned, c.kv_owned, HEADS, HEADS, DIM, DIM, SCALE, 0.0f, F32, F32, 1};
        Forward f = {};
        f.call = call, f.q = q.rows(), f.k = k.rows(), f.v = v.rows(), f.out = out.rows(), f.lse = lse.statistic(rows);
        f.max_logit = {(u64)largest.values.data(), 0, 1, F32};
        Backward b = {};
        b.call = call, b.q = f.q, b.k = f.k, b.v = f.v, b.dout = dout.rows(), b.out = f.out, b.lse = f.lse;
        b.dq = dq.rows(), b.dk = dk.rows(), b.dv = dv.rows(), b.row_dots = row_dots.data();
        auto launch = [](i64 items, auto kernel) {
            for (int block = 0; block < (items + WARPS - 1) / WARPS; ++block) run_block(block, 0, kernel);
        };
        launch(call.q_rows * HEADS, [&] { attend(f); });
        launch(call.q_rows * HEADS, [&] { attend_queries(b); });
        launch(call.kv_rows, [&] { attend_keys(b); });

        const Results want = plain(c, q, k, v, dout);
        const std::pair<const char*, int> found[] = {
            {"out", wrong(out, want.out, c.q_rows, false)}, {"lse", wrong(lse, want.lse, c.q_rows, true)},
            {"dq", wrong(dq, want.dq, c.q_rows, false)},    {"dk", wrong(dk, want.dk, c.kv_rows, false)},
            {"dv", wrong(dv, want.dv, c.kv_rows, false)},
        };
        for (auto [name, place] : found)
            if (place >= 0) {
                printf("case %zu: %s at %d\n", at, name, place);
                return 1;
            }
    }
}
