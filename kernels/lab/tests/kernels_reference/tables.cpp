// Tables of segments on a CPU: every pair of a row of queries and a row of keys that a table shows, held to the mask by
// the rows' positions. Ends with 1 and a line of what is wrong.
#include "packs.h"
#include "threads.h"

#include <cstdio>

inline void after_earlier_launches() {}
constexpr int CONTIGUOUS = 0, DUAL_CHUNK = 1, STRIPED = 2;

#include "slots.cuh"

#include "source.cu"

// A pack cut over ranks: slots of a rank, and lengths of whole sequences. In stripes of one, each rank has the rows of
// `members` ranks of a finer cut, one after the other.
struct Cut : Pack {
    int cp, balance, stripe, members;

    Slots slots() const { return {offset.data(), span.data(), len.data(), (int)offset.size(), rows, 0}; }
    // The rank that has a position of a sequence, its piece, and its row in the slot.
    int rank_of(int s, int p) const {
        const int id = chunk_of(s, p);
        if (balance == STRIPED) return p / (stripe * members) % cp;
        return balance == CONTIGUOUS ? p / span[s] : id < cp ? id : 2 * cp - 1 - id;
    }
    // Stripes of several rows are one piece.
    int piece_of(int s, int p) const {
        return balance == STRIPED ? p / stripe % members : balance == DUAL_CHUNK && chunk_of(s, p) >= cp;
    }
    int row_of(int s, int p) const {
        if (balance == CONTIGUOUS) return p % span[s];
        const int turn = stripe * members * cp;
        if (balance == STRIPED) return piece_of(s, p) * (span[s] / members) + p / turn * stripe + p % stripe;
        return piece_of(s, p) * (span[s] / 2) + p % (span[s] / 2);
    }
    // The number of stripes of the longest slot.
    int most() const {
        int most = 0;
        for (int of : span) most = std::max(most, of / stripe);
        return most;
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

Cut cut(Draw& draw, int sequences, int cp, int balance, int stripe, int members) {
    Cut cut;
    cut.cp = cp, cut.balance = balance, cut.stripe = stripe, cut.members = members;
    int row = draw.below(4);
    for (int s = 0; s < sequences; ++s) {
        const int span = 2 * stripe * draw.below(5), lens[] = {0, span * cp, draw.below(span * cp + 1)};
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

// What a step between stripes of several rows shows each pair of positions, and rows that a launch has twice.
const char* wrong_stripes(const std::vector<Segment>& made, const Mask& mask, const Cut& q, const Cut& kv, int rank, int owner) {
    const int sequences = q.offset.size(), most = q.most();
    for (int s = 0; s < sequences; ++s) {
        const auto queries = q.positions(s, rank, 0), keys = kv.positions(s, owner, 0);
        const i64 shift = mask.bottom_right ? kv.len[s] - q.len[s] : 0;
        std::vector<int> shown(queries.size() * keys.size());
        for (int edge = -1; edge < 2; ++edge) {
            std::vector<int> of_q(queries.size()), of_kv(keys.size());
            for (int stripe = 0; stripe < (edge < 0 ? 1 : most); ++stripe) {
                const Segment& segment = made[(edge < 0 ? 0 : 1 + edge * most + stripe) * sequences + s];
                const i64 first = segment.q_offset - q.offset[s], key = segment.kv_offset - kv.offset[s];
                for (i64 i = first; i < first + segment.q_len; ++i)
                    if (i < 0 || i >= (i64)queries.size() || of_q[i]++) return "a query of stripes";
                for (i64 j = key; j < key + segment.kv_len; ++j)
                    if (j < 0 || j >= (i64)keys.size() || of_kv[j]++) return "a key of stripes";
                for (int i = 0; i < segment.q_len; ++i)
                    for (int j = 0; j < segment.kv_len; ++j)
                        shown[(first + i) * keys.size() + key + j] += j - i >= segment.lo && j - i <= segment.hi;
            }
        }
        for (size_t i = 0; i < queries.size(); ++i)
            for (size_t j = 0; j < keys.size(); ++j)
                if (shown[i * keys.size() + j] != sees(mask, shift, queries[i], keys[j])) return "a pair of stripes";
    }
    return nullptr;
}

const char* wrong(int seed) {
    Draw draw(seed);
    const int cp = 1 + draw.below(4), balance = draw.below(3), sequences = draw.below(2) ? draw.below(6) : 70;
    const int stripe = balance == STRIPED ? 1 + draw.below(3) : 1;
    const int members = balance == STRIPED && stripe == 1 ? 1 + draw.below(2) : 1;
    const int rank = draw.below(cp), owner = draw.below(cp), parts = balance == DUAL_CHUNK ? 2 : members;
    const Cut q = cut(draw, sequences, cp, balance, stripe, members);
    const Cut kv = cut(draw, sequences, cp, balance, stripe, members);
    const i64 sides[] = {-1, 0, draw.below(20), 0xffffffffll};
    const Mask mask = {sides[draw.below(4)], sides[draw.below(4)], draw.below(2)};
    const auto shift = [&](int s) { return mask.bottom_right ? kv.len[s] - q.len[s] : 0; };
    const auto first = [](const Cut& cut, int s, const std::vector<int>& of) {
        return cut.offset[s] + (of.empty() ? 0 : cut.row_of(s, of[0]));
    };
    if (stripe > 1 && cp > 1) {
        const int most = q.most();
        const std::vector<Segment> ring = made((1 + 2 * most) * sequences, [&](Segment* to) {
            ring_stripes(q.slots(), kv.slots(), mask, cp, stripe, most, rank, owner, to);
        });
        if (const char* what = wrong_stripes(ring, mask, q, kv, rank, owner)) return what;
    }
    const std::vector<Segment> ring = made(stripe > 1 ? 0 : parts * parts * sequences, [&](Segment* to) {
        ring_segments(q.slots(), kv.slots(), mask, cp, balance, members, rank, owner, to);
    });
    for (int b = 0; b < (stripe > 1 ? 0 : parts); ++b)
        for (int a = 0; a < parts; ++a)
            for (int s = 0; s < sequences; ++s) {
                const auto queries = q.positions(s, rank, a), keys = kv.positions(s, owner, b);
                const Segment& segment = ring[(b * parts + a) * sequences + s];
                if (!shows(segment, mask, shift(s), first(q, s, queries), queries, first(kv, s, keys), keys))
                    return "a ring's step";
            }
    if (members > 1) return nullptr;
    // Up to the last key that the last query sees, whether it sees those before or not; of a residue, every cp-th one.
    const auto prefix = [&](int s, const std::vector<int>& queries, int residue, int step) {
        std::vector<int> keys;
        for (int p = residue; p < kv.len[s] && !queries.empty(); p += step)
            if (mask.right < 0 || p <= queries.back() + shift(s) + mask.right) keys.push_back(p);
        return keys;
    };
    const int most = q.most(), pieces = balance == STRIPED ? most : parts;
    const std::vector<Segment> gathered = made(pieces * sequences, [&](Segment* to) {
        all_gather_segments(q.slots(), kv.slots(), mask, cp, balance, stripe, most, rank, to);
    });
    for (int a = 0; a < pieces; ++a)
        for (int s = 0; s < sequences; ++s) {
            auto queries = q.positions(s, rank, balance == STRIPED ? 0 : a);
            const auto elsewhere = [&](int p) { return balance == STRIPED && q.row_of(s, p) / stripe != a; };
            queries.erase(std::remove_if(queries.begin(), queries.end(), elsewhere), queries.end());
            const Segment& segment = gathered[balance == STRIPED && stripe == 1 ? s * most + a : a * sequences + s];
            const auto keys = prefix(s, queries, 0, 1);
            if (!shows(segment, mask, shift(s), first(q, s, queries), queries, kv.offset[s] * cp, keys))
                return "a gathered step";
        }
    // Those of a launch: a piece of every sequence, or all where stripes have one row.
    const int launch = balance == STRIPED && stripe == 1 ? pieces * sequences : sequences;
    for (int i = 1; i < pieces * sequences; ++i)
        if (i % launch && gathered[i].q_offset < gathered[i - 1].q_offset + gathered[i - 1].q_len)
            return "rows of a gathered step that do not follow each other";
    if (balance != STRIPED || stripe > 1 || cp == 1) return nullptr;
    const std::vector<Segment> residues = made(cp * sequences, [&](Segment* to) {
        all_gather_residues(q.slots(), kv.slots(), mask, cp, rank, to);
    });
    for (int residue = 0; residue < cp; ++residue)
        for (int s = 0; s < sequences; ++s) {
            const auto queries = q.positions(s, rank, 0), keys = prefix(s, queries, residue, cp);
            const int key = kv.offset[s] * cp + residue;
            if (!shows(residues[residue * sequences + s], mask, shift(s), first(q, s, queries), queries, key, keys))
                return "a residue of a gathered step";
        }
    return nullptr;
}

int main() {
    for (int seed = 0; seed < 1500; ++seed)
        if (const char* what = wrong(seed)) {
            printf("case %d: %s\n", seed, what);
            return 1;
        }
}
