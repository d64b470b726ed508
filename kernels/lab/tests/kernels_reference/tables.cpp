// Tables of segments on a CPU: every pair of a row of queries and a row of keys that a table shows, held to the mask by
// the rows' positions. Ends with 1 and a line of what is wrong.
#include "packs.h"
#include "threads.h"

#include <cstdio>

inline void after_earlier_launches() {}
constexpr int CONTIGUOUS = 0, DUAL_CHUNK = 1, STRIPED = 2;

#include "slots.cuh"

#include "source.cu"

// A pack cut over ranks: slots of a rank, and lengths of whole sequences.
struct Cut : Pack {
    int cp, balance;

    Slots slots() const { return {offset.data(), span.data(), len.data(), (int)offset.size(), rows, 0}; }
    // The rank that has a position of a sequence, its piece, and its row in the slot.
    int rank_of(int s, int p) const {
        const int id = chunk_of(s, p);
        return balance == CONTIGUOUS ? p / span[s] : balance == STRIPED ? p % cp : id < cp ? id : 2 * cp - 1 - id;
    }
    int piece_of(int s, int p) const { return balance == DUAL_CHUNK && chunk_of(s, p) >= cp; }
    int row_of(int s, int p) const {
        if (balance == CONTIGUOUS) return p % span[s];
        if (balance == STRIPED) return p / cp;
        return piece_of(s, p) * (span[s] / 2) + p % (span[s] / 2);
    }
    int chunk_of(int s, int p) const { return balance == DUAL_CHUNK ? p / (span[s] / 2) : 0; }

    // The positions of a rank's piece of a sequence that are real, in order of rows.
    std::vector<int> positions(int s, int rank, int piece) const {
        std::vector<int> found;
        for (int p = 0; p < len[s]; ++p)
            if (rank_of(s, p) == rank && piece_of(s, p) == piece) found.push_back(p);
        return found;
    }
};

Cut cut(Draw& draw, int sequences, int cp, int balance) {
    Cut cut;
    cut.cp = cp, cut.balance = balance;
    int row = draw.below(4);
    for (int s = 0; s < sequences; ++s) {
        const int span = 2 * draw.below(5), lens[] = {0, span * cp, draw.below(span * cp + 1)};
        cut.offset.push_back(row), cut.span.push_back(span), cut.len.push_back(lens[draw.below(3)]);
        row += span + draw.below(2) * draw.below(4);
    }
    cut.rows = row + draw.below(3);
    return cut;
}

bool sees(const Mask& mask, i64 shift, i64 q, i64 k) {
    return (mask.left < 0 || k >= q + shift - mask.left) && (mask.right < 0 || k <= q + shift + mask.right);
}

// Whether a segment has these rows of queries and keys, and shows the pairs of the mask.
bool shows(
    const Segment& segment, const Mask& mask, i64 shift, int q_first, const std::vector<int>& queries, int kv_first,
    const std::vector<int>& keys
) {
    if (segment.q_len != (int)queries.size() || segment.kv_len != (int)keys.size()) return false;
    if (!queries.empty() && segment.q_offset != q_first) return false;
    if (!keys.empty() && segment.kv_offset != kv_first) return false;
    for (int i = 0; i < segment.q_len; ++i)
        for (int j = 0; j < segment.kv_len; ++j)
            if ((j - i >= segment.lo && j - i <= segment.hi) != sees(mask, shift, queries[i], keys[j])) return false;
    return true;
}

std::vector<Segment> made(int count, std::function<void(Segment*)> kernel) {
    std::vector<Segment> segments(count + 8);
    for (int x = 0; x * (int)THREADS < count; ++x) run_block(x, 0, [&] { kernel(segments.data()); });
    return segments;
}

const char* wrong(int seed) {
    Draw draw = {std::mt19937_64(seed)};
    const int cp = 1 + draw.below(4), balance = draw.below(3), sequences = draw.below(2) ? draw.below(6) : 70;
    const int rank = draw.below(cp), owner = draw.below(cp), parts = balance == DUAL_CHUNK ? 2 : 1;
    const Cut q = cut(draw, sequences, cp, balance), kv = cut(draw, sequences, cp, balance);
    const i64 sides[] = {-1, 0, draw.below(20), 0xffffffffll};
    const Mask mask = {sides[draw.below(4)], sides[draw.below(4)], draw.below(2)};
    const auto shift = [&](int s) { return mask.bottom_right ? kv.len[s] - q.len[s] : 0; };
    const auto first = [](const Cut& cut, int s, const std::vector<int>& of) {
        return cut.offset[s] + (of.empty() ? 0 : cut.row_of(s, of[0]));
    };
    const std::vector<Segment> ring = made(parts * parts * sequences, [&](Segment* to) {
        ring_segments(q.slots(), kv.slots(), mask, cp, balance, rank, owner, to);
    });
    for (int b = 0; b < parts; ++b)
        for (int a = 0; a < parts; ++a)
            for (int s = 0; s < sequences; ++s) {
                const auto queries = q.positions(s, rank, a), keys = kv.positions(s, owner, b);
                const Segment& segment = ring[(b * parts + a) * sequences + s];
                if (!shows(segment, mask, shift(s), first(q, s, queries), queries, first(kv, s, keys), keys))
                    return "a ring's step";
            }
    if (balance == STRIPED) return nullptr;
    const std::vector<Segment> gathered = made(parts * sequences, [&](Segment* to) {
        all_gather_segments(q.slots(), kv.slots(), mask, cp, balance, 1, rank, to);
    });
    for (int a = 0; a < parts; ++a)
        for (int s = 0; s < sequences; ++s) {
            const auto queries = q.positions(s, rank, a);
            std::vector<int> keys;
            // Up to the last key that the last query sees, whether it sees those before or not.
            for (int p = 0; p < kv.len[s] && !queries.empty(); ++p)
                if (mask.right < 0 || p <= queries.back() + shift(s) + mask.right) keys.push_back(p);
            const Segment& segment = gathered[a * sequences + s];
            if (!shows(segment, mask, shift(s), first(q, s, queries), queries, kv.offset[s] * cp, keys))
                return "a gathered step";
        }
    return nullptr;
}

int main() {
    for (int seed = 0; seed < 300; ++seed)
        if (const char* what = wrong(seed)) {
            printf("case %d: %s\n", seed, what);
            return 1;
        }
}
