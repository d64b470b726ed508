// Halves of statistics, four rows a thread, on a CPU: packs of every kind held to a plain loop, and tables that are wrong to
// the tensors' ends. Ends with 1 and a line of what is wrong.
#include "packs.h"
#include "threads.h"

#include <cstdio>

// `rows` of each head, with words before and behind that nobody may touch.
struct Tensor {
    static constexpr int BESIDE = 64;
    int heads, rows;
    std::vector<uint4> vectors;

    Tensor(int heads, int rows, u32 first) : heads(heads), rows(rows), vectors((heads * rows + 2 * BESIDE) / 4) {
        for (int i = -BESIDE; i < heads * rows + BESIDE; ++i) begin()[i] = first + i;
    }
    u32* begin() { return (u32*)vectors.data() + BESIDE; }
    bool holds(const void* at, int bytes) {
        const i64 offset = (const u8*)at - (const u8*)begin();
        return offset % bytes == 0 && offset >= 0 && offset + bytes <= 4ll * heads * rows;
    }
};
inline Tensor *from, *to;
inline int outside;

inline bool holds(Tensor* tensor, const void* at, int bytes) {
    const bool within = tensor->holds(at, bytes);
    outside += !within;
    return within;
}
inline void load_16(const void* at, u32* words) {
    if (holds(from, at, 16)) memcpy(words, at, 16);
}
inline u32 __ldcs(const u32* at) { return holds(from, at, 4) ? *at : 0; }
template <class T> void __stcs(T* at, T value) {
    if (holds(to, at, sizeof value)) *at = value;
}

#include "slots.cuh"

#include "source.cu"

constexpr int COUNT = 8;
constexpr u32 PATTERN = 0xff800000u;

// Gaps, a first offset, empty slots, odd ones and slack; `rows` as kernels for four rows need them.
Pack pack(Draw& draw) {
    Pack pack;
    const int kind = draw.below(5);
    int row = draw.below(2) * draw.below(40);
    const int end = row + 1 + draw.below(2000);
    while (row < end) {
        const int spans[] = {draw.below(4), 8 * (1 + draw.below(60)), draw.below(200), 500 + draw.below(1500),
                             16 * (1 + draw.below(8)) + draw.below(2)};
        pack.offset.push_back(row), pack.span.push_back(spans[kind]), pack.len.push_back(spans[kind] / 2);
        row += spans[kind] + (draw.below(4) ? 0 : draw.below(300));
    }
    pack.rows = (row + draw.below(2) * draw.below(700) + 7) / 8 * 8;
    return pack;
}

// One slot, of whose second half the tensor's last rows are the first ones that a warp's last lane has: the others would lie
// behind the tensor.
Pack run_past_the_end(Draw& draw) {
    const int rows = 1024 + 8 * draw.below(100), offset = draw.below(8), in_half = 128 * (1 + draw.below(3)) - 4 - offset / 2;
    const int chunk = rows - 1 - draw.below(3) - offset - in_half;
    return {{offset}, {2 * chunk}, {chunk}, rows};
}

// Slots that overlap, run past the tensor or begin nowhere.
void spoil(Draw& draw, Pack& pack) {
    if (draw.below(4) == 0) {
        pack = run_past_the_end(draw);
        return;
    }
    for (int count = 1 + draw.below(3); count > 0; --count) {
        const int slot = draw.below(pack.offset.size());
        const int numbers[] = {-1, 1, 0x7fffffff, pack.rows, pack.rows + 1, 2 * pack.span[slot], draw.below(5000)};
        (draw.below(2) ? pack.offset : pack.span)[slot] = numbers[draw.below(7)];
    }
}

// What the kernel is to do.
void move_plainly(const Pack& pack, int half, bool write, bool fill, Tensor& whole, Tensor& halves) {
    std::vector<int> rows(halves.rows, -1);
    for (size_t s = 0; s < pack.offset.size(); ++s)
        for (int i = 0; i < pack.span[s] / 2; ++i)
            rows[pack.offset[s] / 2 + i] = pack.offset[s] + half * (pack.span[s] / 2) + i;
    for (int h = 0; h < whole.heads; ++h)
        for (int i = 0; i < halves.rows; ++i) {
            u32& in_half = halves.begin()[h * halves.rows + i];
            u32* const in_whole = whole.begin() + h * whole.rows + rows[i];
            if (rows[i] < 0) in_half = fill ? PATTERN : in_half;
            else if (write) *in_whole = in_half;
            else in_half = *in_whole;
        }
}

bool same(Tensor& a, Tensor& b) { return memcmp(a.vectors.data(), b.vectors.data(), a.vectors.size() * 16) == 0; }

// Whether a case is right.
bool is_right(int seed, bool spoilt) {
    Draw draw(seed);
    Pack drawn = pack(draw);
    if (spoilt) spoil(draw, drawn);
    const int heads = 1 + draw.below(17), half = draw.below(2), count = drawn.offset.size();
    const bool write = draw.below(2), fill = !write && draw.below(2);
    Tensor whole(heads, drawn.rows, 1 << 20), halves(heads, drawn.rows / 2, 1 << 24);
    Tensor right_whole = whole, right_halves = halves;
    from = write ? &halves : &whole, to = write ? &whole : &halves, outside = 0;
    const float per_row = (float)count / drawn.rows;
    const Slots slots = {drawn.offset.data(), drawn.span.data(), drawn.len.data(), count, drawn.rows, per_row};
    const Part part = {slots, half, 1, halves.rows};
    for (int y = 0; y < (heads + COUNT - 1) / COUNT; ++y)
        for (int x = 0; x * (int)THREADS * 4 < halves.rows; ++x)
            run_block(x, y, [&] {
                move_half<4, COUNT>(part, whole.begin(), halves.begin(), heads, write, fill, PATTERN);
            });
    if (outside > 0 || spoilt) return outside == 0;
    move_plainly(drawn, half, write, fill, right_whole, right_halves);
    return same(whole, right_whole) && same(halves, right_halves);
}

int main() {
    for (int seed = 0; seed < 200; ++seed)
        for (bool spoilt : {false, true})
            if (!is_right(seed, spoilt)) {
                printf("case %d, tables %s: %s\n", seed, spoilt ? "wrong" : "right", outside ? "outside" : "other words");
                return 1;
            }
}
