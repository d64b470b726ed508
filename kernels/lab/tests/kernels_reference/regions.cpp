// The operations of sequence-parallel regions on a CPU: layers that copy heads, and rotations, held to plain loops.
// Ends with 1 and a line of what is wrong.
#include "packs.h"
#include "threads.h"

#include <cstdio>

// Memory between bytes that nobody may touch.
struct Bytes {
    static constexpr size_t BESIDE = 64;
    size_t count;
    std::vector<u8> all;

    Bytes(Draw& draw, size_t count) : count(count), all(count + 2 * BESIDE) {
        for (u8& byte : all) byte = draw.below(256);
    }
    u8* begin() { return all.data() + BESIDE; }
    bool holds(const void* at, size_t size) {
        return (const u8*)at >= begin() && (const u8*)at + size <= begin() + count;
    }
};
inline Bytes *from, *to;
inline int outside;

template <class T> T __ldcs(const T* at) {
    if (from->holds(at, sizeof *at)) return *at;
    ++outside;
    return T();
}
template <class T> void __stcs(T* at, T value) {
    if (to->holds(at, sizeof *at)) *at = value;
    else ++outside;
}
inline u32 __funnelshift_r(u32 low, u32 high, u32 by) { return (u32)(((u64)high << 32 | low) >> by); }

#include "slots.cuh"

#include "source.cu"

bool layer_is_right(Draw& draw) {
    const int parts = 1 + draw.below(5), part = draw.below(parts), to_hidden = draw.below(2);
    const int rows = draw.below(300), words = 1 + draw.below(40);
    Bytes source(draw, 4 * words * rows * (to_hidden ? 1 : parts)), target(draw, 4 * words * rows * (to_hidden ? parts : 1));
    Bytes right = target;
    from = &source, to = &target;
    const int targets = to_hidden ? rows * parts : rows, tile_rows = 256 - draw.below(2) * draw.below(200);
    const Layer map = {parts, part, to_hidden};
    for (int x = 0; x * tile_rows < targets; ++x)
        run_block(x, 0, [&] {
            move_rows<u32, Layer>(map, targets, (u32*)source.begin(), (u32*)target.begin(), words, tile_rows, 0);
        });
    if (to_hidden) std::fill_n(right.begin(), right.count, 0);
    for (int row = 0; row < rows; ++row) {
        const int hidden = row * parts + part, there = to_hidden ? hidden : row, here = to_hidden ? row : hidden;
        std::copy_n(source.begin() + 4 * words * here, 4 * words, right.begin() + 4 * words * there);
    }
    return right.all == target.all;
}

// x times a row, modulo x^dim + 1: the last element comes to the front with the other sign.
void turn_once(u8* row, int dim, int bytes) {
    std::rotate(row, row + (dim - 1) * bytes, row + dim * bytes);
    row[bytes - 1] ^= 0x80;
}

template <u32 BYTES, class Unit> bool rotation_is_right(Draw& draw, int dim) {
    const int heads = 1 + draw.below(3), inverse = draw.below(2), of_row = heads * dim * BYTES;
    std::vector<Turn> turns;
    i64 rows = 0, all = 0;
    if (draw.below(4)) {
        for (int count = 1 + draw.below(9), row = draw.below(4); turns.size() < count; row = all + draw.below(3)) {
            const int len = 1 + draw.below(30);
            turns.push_back({row, 1, draw.below(400), 1 + draw.below(3), rows}), rows += len, all = row + len;
        }
    } else {
        const int beside = 1 + draw.below(5), len = 1 + draw.below(20);
        for (int first = 0; first < beside; ++first)
            turns.push_back({first, beside, draw.below(400), 1, rows}), rows += len;
        all = rows;
    }
    Bytes tensor(draw, all * of_row), right = tensor;
    from = to = &tensor;
    for (size_t t = 0; t < turns.size(); ++t) {
        const i64 end = t + 1 < turns.size() ? turns[t + 1].first : rows;
        for (i64 i = 0; i < end - turns[t].first; ++i)
            for (int head = 0; head < heads; ++head) {
                u8* const row = right.begin() + (turns[t].offset + turns[t].step * i) * of_row + head * dim * BYTES;
                const i64 position = turns[t].position + turns[t].position_step * i;
                // A row turned by twice its length is itself.
                const i64 times = inverse ? 2 * dim - position % (2 * dim) : position;
                for (i64 time = 0; time < times; ++time) turn_once(row, dim, BYTES);
            }
    }
    const u32 items = std::min<u32>(THREADS, 16384 / (dim * BYTES)), tile_heads = 1 + draw.below(std::min<u32>(heads, items));
    const u32 tile_rows = 1 + draw.below(items / tile_heads);
    const Rotation rotation = {turns.data(), (int)turns.size(), heads, rows, (u32)dim, inverse, tile_rows, tile_heads};
    for (int y = 0; y * tile_heads < heads; ++y)
        for (i64 x = 0; x * tile_rows < rows; ++x)
            run_block(x, y, [&] { rotate<BYTES, Unit>(rotation, (Unit*)tensor.begin()); });
    return right.all == tensor.all;
}

const char* wrong(int seed) {
    Draw draw(seed);
    outside = 0;
    const char* found = nullptr;
    if (!layer_is_right(draw)) found = "layer";
    else if (!rotation_is_right<1, uint4>(draw, 16 * (1 + draw.below(9)))) found = "rotation of 8 bits by vectors";
    else if (!rotation_is_right<1, u8>(draw, 1 + draw.below(20))) found = "rotation of 8 bits";
    else if (!rotation_is_right<2, uint4>(draw, 8 * (1 + draw.below(9)))) found = "rotation of 16 bits by vectors";
    else if (!rotation_is_right<2, u16>(draw, 1 + draw.below(20))) found = "rotation of 16 bits";
    else if (!rotation_is_right<4, uint4>(draw, 4 * (1 + draw.below(9)))) found = "rotation of 32 bits by vectors";
    else if (!rotation_is_right<4, u32>(draw, 1 + draw.below(20))) found = "rotation of 32 bits";
    return outside ? "outside" : found;
}

int main() {
    for (int seed = 0; seed < 150; ++seed)
        if (const char* what = wrong(seed)) {
            printf("case %d: %s\n", seed, what);
            return 1;
        }
}
