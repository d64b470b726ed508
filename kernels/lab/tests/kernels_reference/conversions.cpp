// Conversions between THD, BSHD and SBHD on a CPU: packs of every kind held to plain loops, and tables that are wrong to the
// tensors' ends. Ends with 1 and a line of what is wrong.
#include "packs.h"
#include "threads.h"

#include <cstdio>

// Rows of some words, with words before and behind that nobody may touch.
struct Tensor {
    static constexpr int BESIDE = 16;
    int words;
    std::vector<u32> all;

    Tensor(int words, u32 first) : words(words), all(words + 2 * BESIDE) {
        for (size_t i = 0; i < all.size(); ++i) all[i] = first + i;
    }
    u32* begin() { return all.data() + BESIDE; }
    bool holds(const u32* at) { return at >= begin() && at < begin() + words; }
};
inline Tensor *from, *to;
inline int outside;

inline u32 __ldcs(const u32* at) {
    outside += !from->holds(at);
    return from->holds(at) ? *at : 0;
}
inline void __stcs(u32* at, u32 value) {
    outside += !to->holds(at);
    if (to->holds(at)) *at = value;
}

#include "slots.cuh"

#include "source.cu"

constexpr u32 PATTERN = 0x5a5a5a5au;

// Gaps, a first offset, empty slots, whole padding and slack.
Pack pack(Draw& draw) {
    Pack pack;
    const int counts[] = {0, 1, 3, 40, 300}, count = counts[draw.below(5)];
    int row = draw.below(2) * draw.below(20);
    for (int s = 0; s < count; ++s) {
        const int span = draw.below(4) ? draw.below(9) : draw.below(70);
        const int lens[] = {0, span, draw.below(span + 1)};
        pack.offset.push_back(row), pack.span.push_back(span), pack.len.push_back(lens[draw.below(3)]);
        row += span + (draw.below(4) ? 0 : draw.below(9));
    }
    pack.rows = row + draw.below(2) * draw.below(40);
    return pack;
}

// Slots that overlap, run past the tensor or begin nowhere.
void spoil(Draw& draw, Pack& pack) {
    for (int count = 1 + draw.below(3); count > 0 && !pack.offset.empty(); --count) {
        const int slot = draw.below(pack.offset.size());
        const int numbers[] = {-1, 1, 0x7fffffff, -0x7fffffff, pack.rows, pack.rows + 1, draw.below(500)};
        std::vector<int>* const tables[] = {&pack.offset, &pack.span, &pack.len};
        (*tables[draw.below(3)])[slot] = numbers[draw.below(7)];
    }
}

// The row of a position of a sequence.
int row_of(const Pack& pack, int layout, int positions, int sequence, int position) {
    const int batch = pack.offset.size();
    return layout == 0   ? pack.offset[sequence] + position
           : layout == 1 ? sequence * positions + position
                         : position * batch + sequence;
}

// Whether a case is right.
bool is_right(int seed, bool spoilt) {
    Draw draw(seed);
    Pack drawn = pack(draw);
    const int count = drawn.offset.size();
    int longest = 0;
    for (int len : drawn.len) longest = max(longest, len);
    const int rooms[] = {longest, longest + 3, longest / 2}, positions = rooms[draw.below(3)];
    if (spoilt) spoil(draw, drawn);
    const int from_layout = draw.below(3), to_layout = draw.below(3), fill = draw.below(2), words = 1 + draw.below(5);
    const auto rows_of = [&](int layout) { return layout == 0 ? drawn.rows : count * positions; };
    Tensor source(rows_of(from_layout) * words, 1 << 20), target(rows_of(to_layout) * words, 1 << 24), right = target;
    from = &source, to = &target, outside = 0;
    const float per_row = (float)count / max(drawn.rows, 1);
    const Slots slots = {drawn.offset.data(), drawn.span.data(), drawn.len.data(), count, drawn.rows, per_row};
    const Convert map = {slots, positions, from_layout, to_layout, fill};
    const int tile_rows = 256 - draw.below(2) * draw.below(200), rows = rows_of(to_layout);
    for (int x = 0; x * tile_rows < rows; ++x)
        run_block(x, 0, [&] {
            move_rows<u32, Convert>(map, rows, source.begin(), target.begin(), words, tile_rows, PATTERN);
        });
    if (outside > 0 || spoilt) return outside == 0;
    if (fill) std::fill_n(right.begin(), right.words, PATTERN);
    for (int s = 0; s < count; ++s)
        for (int p = 0; p < min(drawn.len[s], positions); ++p)
            std::copy_n(
                source.begin() + row_of(drawn, from_layout, positions, s, p) * words, words,
                right.begin() + row_of(drawn, to_layout, positions, s, p) * words
            );
    return right.all == target.all;
}

int main() {
    for (int seed = 0; seed < 400; ++seed)
        for (bool spoilt : {false, true})
            if (!is_right(seed, spoilt)) {
                printf("case %d, tables %s: %s\n", seed, spoilt ? "wrong" : "right", outside ? "outside" : "other words");
                return 1;
            }
}
