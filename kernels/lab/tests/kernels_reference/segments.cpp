// Sequences from segment ids and positions, on a CPU: batches whose arrays have all batch rows or one of them, held to
// plain loops over rows. Ends with 1 and a line of what is wrong.
#include "threads.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

constexpr u32 SCAN_THREADS = 1024;
inline void after_earlier_launches() {}
// A block of that many threads is not run here.
inline i64 sum_before(i64, i64&) { abort(); }

#include "search.cuh"

#include "source.cu"

constexpr int BESIDE = 8, PATTERN = 0x55555555;

std::mt19937_64 source{11};
int below(int end) { return source() % end; }

// Numbers with others before and behind that nobody may touch.
struct Table {
    std::vector<int> all;
    explicit Table(int count) : all(count + 2 * BESIDE, PATTERN) {}
    int* begin() { return all.data() + BESIDE; }
    bool kept() {
        for (int i = 0; i < BESIDE; ++i)
            if (all[i] != PATTERN || all[all.size() - 1 - i] != PATTERN) return false;
        return true;
    }
};

struct Side {
    int row_length, batch_rows;
    std::vector<int> ids, positions;
    bool has_positions;

    int id(int row) const { return ids[row % ids.size()]; }
    Ids arrays() const {
        return {
            ids.data(), has_positions ? positions.data() : nullptr, row_length * batch_rows, row_length, (int)ids.size(),
            (int)positions.size(),
        };
    }
};

Side side(int batch_rows) {
    const int lengths[] = {1, 5, 64, 700, 1500};
    Side side = {lengths[below(5)], batch_rows};
    const bool wrong = below(8) == 0;
    const int of_ids = below(3) ? batch_rows : 1, of_positions = below(3) ? batch_rows : 1, longest = below(2) ? 2 : 300;
    for (int b = 0; b < of_ids; ++b) {
        std::vector<int> order(below(2) ? 5 : 400), row;
        for (size_t i = 0; i < order.size(); ++i) order[i] = i + 1;
        std::shuffle(order.begin(), order.end(), source);
        while ((int)row.size() < side.row_length) {
            int id = 0;
            if (below(4) && !order.empty()) id = order.back(), order.pop_back();
            if (wrong && below(6) == 0) id = below(3) - 1;
            row.insert(row.end(), 1 + below(longest), id);
        }
        side.ids.insert(side.ids.end(), row.begin(), row.begin() + side.row_length);
    }
    for (int row = 0; row < of_positions * side.row_length; ++row) {
        const bool on = row % side.row_length > 0 && side.id(row) == side.id(row - 1);
        side.positions.push_back(on ? side.positions.back() + 1 : 0);
    }
    if (wrong) side.positions[below(side.positions.size())] = below(3) - 1;
    side.has_positions = below(3) > 0;
    return side;
}

struct Rows {
    int offset, len;
};

// The segments of a batch row in order of rows, as the definition has it; false where it refuses them.
bool read(const Side& side, int b, std::vector<std::pair<int, Rows>>& found) {
    std::map<int, bool> met;
    for (int row = b * side.row_length; row < (b + 1) * side.row_length; ++row) {
        const int id = side.id(row);
        if (id < 0) return false;
        if (id == 0) continue;
        const bool on = !found.empty() && found.back().first == id
                     && found.back().second.offset + found.back().second.len == row;
        if (!on) {
            if (met[id]) return false;
            met[id] = true, found.push_back({id, {row, 0}});
        }
        Rows& rows = found.back().second;
        if (side.has_positions && side.positions[row % side.positions.size()] != rows.len) return false;
        ++rows.len;
    }
    return true;
}

struct Found {
    Table offset, len, id, position;
    Runs runs;
};

// The kernels' runs; a plain sum between them stands for the block that sums tiles up.
Found runs(const Side& side) {
    const Ids ids = side.arrays();
    const int tiles = (ids.rows + TILE - 1) / TILE;
    Table counts(tiles);
    for (int tile = 0; tile < tiles; ++tile) run_block(tile, 0, [&] { count_runs(ids, counts.begin()); });
    int count = 0;
    for (int tile = 0; tile < tiles; ++tile) {
        const int own = counts.begin()[tile];
        counts.begin()[tile] = count, count += own;
    }
    Found found = {Table(ids.rows), Table(ids.rows), Table(ids.rows), Table(ids.rows)};
    found.runs = {found.offset.begin(), found.len.begin(), found.id.begin(), found.position.begin(), ids.rows};
    for (int tile = 0; tile < tiles; ++tile) run_block(tile, 0, [&] { write_runs(ids, counts.begin(), found.runs); });
    for (int first = 0; first < ids.rows; first += THREADS)
        run_block(first / THREADS, 0, [&] { finish_runs(&count, ids.rows, found.runs); });
    return found;
}

void require(bool holds, int turn, const char* what, int got, int right) {
    if (holds) return;
    printf("turn %d: %s is %d, not %d\n", turn, what, got, right);
    exit(1);
}

int main() {
    for (int turn = 0; turn < 400; ++turn) {
        const int batch_rows = 1 + below(4), most = below(3) ? 12 : below(4);
        const Side q = side(batch_rows), kv = side(batch_rows);
        Found of_q = runs(q), of_kv = runs(kv);
        const int places = batch_rows * most;
        Table tables[] = {Table(places), Table(places), Table(places), Table(places), Table(batch_rows)};
        const Sequences to = {
            tables[0].begin(), tables[1].begin(), tables[2].begin(), tables[3].begin(), tables[4].begin(), most,
        };
        for (int b = 0; b < batch_rows; ++b)
            run_block(b, 0, [&] { pair_runs(of_q.runs, of_kv.runs, q.row_length, kv.row_length, to); });
        for (int b = 0; b < batch_rows; ++b) {
            std::vector<std::pair<int, Rows>> queries, keys;
            const bool said = read(q, b, queries) & read(kv, b, keys);
            const Rows no_q = {b * q.row_length, 0}, no_kv = {b * kv.row_length, 0};
            std::vector<std::pair<Rows, Rows>> right;
            const auto with = [](const auto& all, int id) {
                return std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.first == id; });
            };
            for (const auto& [id, rows] : queries) {
                const auto partner = with(keys, id);
                right.push_back({rows, partner == keys.end() ? no_kv : partner->second});
            }
            for (const auto& [id, rows] : keys)
                if (with(queries, id) == queries.end()) right.push_back({no_q, rows});
            if (!said) right.clear();
            require(to.count[b] == (said ? (int)right.size() : -1), turn, "the count", to.count[b], right.size());
            right.resize(max((int)right.size(), most), {no_q, no_kv});
            for (int s = 0; s < most; ++s) {
                const int at = b * most + s;
                require(to.q_offset[at] == right[s].first.offset, turn, "a q offset", to.q_offset[at], right[s].first.offset);
                require(to.q_len[at] == right[s].first.len, turn, "a q length", to.q_len[at], right[s].first.len);
                require(to.kv_offset[at] == right[s].second.offset, turn, "a kv offset", to.kv_offset[at], right[s].second.offset);
                require(to.kv_len[at] == right[s].second.len, turn, "a kv length", to.kv_len[at], right[s].second.len);
            }
        }
        for (Table& table : tables) require(table.kept(), turn, "a number beside a table", 0, PATTERN);
    }
}
