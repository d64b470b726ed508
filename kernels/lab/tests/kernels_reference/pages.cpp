// The simple forward through a block table on a CPU: drawn pages give the bits of the same keys as runs of rows. Ends
// with 1 and a line of what is wrong.
#include "attend.h"
#include "packs.h"

constexpr int HEADS = 2, DIM = 3;

struct Drawn {
    std::vector<QuerySegment> segments;
    std::vector<KeyRun> runs;
    std::vector<std::vector<int>> pages;
    std::vector<int> first;
    int size, q_rows = 0, kv_rows;
};

// Segments whose keys begin anywhere in a page, and pages in any order.
Drawn draw_pages(Draw& draw) {
    const int sizes[] = {1, 2, 3, 5, 16, 32, 40}, lengths[] = {0, 1, 2, 31, 33, 70};
    Drawn drawn;
    drawn.size = sizes[draw.below(7)];
    std::vector<int> keys;
    int count = 0;
    for (int s = 1 + draw.below(4); s > 0; --s) {
        keys.push_back(lengths[draw.below(6)]);
        drawn.first.push_back(draw.below(drawn.size));
        drawn.pages.emplace_back();
        for (int at = 0; at < drawn.first.back() + keys.back(); at += drawn.size) drawn.pages.back().push_back(count++);
    }
    std::vector<int> names;
    // A page of nobody.
    for (int page = 0; page <= count; ++page) names.push_back(page);
    draw.shuffle(names);
    drawn.kv_rows = (count + 1) * drawn.size;
    for (size_t s = 0; s < keys.size(); ++s) {
        for (int& page : drawn.pages[s]) page = names[page];
        const i64 first_run = drawn.runs.size();
        for (int key = 0; key < keys[s]; ++key) {
            const int at = drawn.first[s] + key;
            const i64 row = (i64)drawn.pages[s][at / drawn.size] * drawn.size + at % drawn.size;
            drawn.runs.push_back({row, 1, 1, 0, key, (i64)s});
        }
        const i64 queries = draw.below(4), lo = draw.below(3) ? -(1 << 20) : draw.below(60) - 20;
        const i64 sink_tokens = draw.below(2) ? draw.below(40) : 0;
        drawn.segments.push_back(
            {drawn.q_rows, 1, queries, drawn.q_rows, keys[s], lo, draw.below(2) ? 1 << 20 : keys[s] - queries, sink_tokens,
             first_run, keys[s]});
        drawn.q_rows += queries;
    }
    return drawn;
}

int main() {
    for (int seed = 0; seed < 150; ++seed) {
        Draw draw(seed);
        Drawn drawn = draw_pages(draw);
        auto number = [&] { return (draw.below(65) - 32) / 16.0f; };
        Tensor q(drawn.q_rows, HEADS, DIM, 0), k(drawn.kv_rows, 1, DIM, NAN), v = k;
        for (float& value : q.values) value = number();
        for (const KeyRun& run : drawn.runs)
            for (int lane = 0; lane < DIM; ++lane)
                k.values[run.offset * DIM + lane] = number(), v.values[run.offset * DIM + lane] = number();
        // Places behind a segment's pages hold 0.
        size_t width = 1;
        for (auto& pages : drawn.pages) width = max(width, pages.size());
        std::vector<int> places;
        for (auto& pages : drawn.pages)
            for (size_t at = 0; at < width; ++at) places.push_back(at < pages.size() ? pages[at] : 0);
        const BlockTable table = {places.data(), drawn.first.data(), (int)width, drawn.size};
        std::vector<float> results[2];
        for (int paged = 0; paged < 2; ++paged) {
            Tensor out(drawn.q_rows, HEADS, DIM, 7), lse(drawn.q_rows, HEADS, 1, 7), largest(1, HEADS, 1, -INFINITY);
            Forward a = {};
            a.call = {drawn.segments.data(), drawn.runs.data(), (int)drawn.segments.size(), (int)drawn.runs.size(),
                      drawn.q_rows, 0, HEADS, HEADS, DIM, DIM, 0.5f, 0.0f, F32, F32, 1};
            a.q = q.rows(), a.k = k.rows(), a.v = v.rows(), a.out = out.rows(), a.lse = lse.statistic(drawn.q_rows);
            a.max_logit = {(u64)largest.values.data(), 0, 1, F32};
            const int blocks = (drawn.q_rows * HEADS + WARPS - 1) / WARPS;
            for (int block = 0; block < blocks; ++block)
                run_block(block, 0, [&] { paged ? attend_pages(a, table) : attend(a); });
            for (Tensor* tensor : {&out, &lse, &largest})
                results[paged].insert(results[paged].end(), tensor->values.begin(), tensor->values.end());
        }
        for (size_t i = 0; i < results[0].size(); ++i) {
            const float in_runs = results[0][i], in_pages = results[1][i];
            if (bits_of<u32>(in_runs) == bits_of<u32>(in_pages) && !std::isnan(in_runs)) continue;
            printf("seed %d, pages of %d rows: %zu is %g, not %g\n", seed, drawn.size, i, in_pages, in_runs);
            return 1;
        }
    }
}
