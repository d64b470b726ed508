// Turned copies of codes on a CPU, of codes and of drawn values, held to the definition in plain loops. Ends with 1 and a line
// of what is wrong.
#include "codes.h"

// The kernels for values of a format.
constexpr void (*ENCODE[])(Turned, Grouped, const float*, u8*, int) = {
    encode_turned_f32, encode_turned_bf16, encode_turned_fp16,
};

// Key 8 j + 2 i + l of 16 lies at 4 i + 2 j + l. Behind the last row there are zeros.
std::vector<u8> turned(const std::vector<u8>& codes, u32 rows, u32 lanes, u32 positions) {
    std::vector<u8> turned(lanes * positions);
    for (u32 row = 0; row < rows; ++row)
        for (u32 lane = 0; lane < lanes; ++lane) {
            const u32 j = row % 16 / 8, i = row % 8 / 2, l = row % 2;
            turned[lane * positions + row / 16 * 16 + 4 * i + 2 * j + l] = codes[row * lanes + lane];
        }
    return turned;
}

// Lanes in whole vectors, of which groups have whole ones.
Grouped shape(Draw& draw) {
    const u32 heads = 1 + draw.below(3), dim = 16 * (1 + draw.below(12)), rows = 1 + draw.below(150);
    const u32 lanes_each = draw.below(2) ? dim + draw.below(9) : 16 * (1 + draw.below(dim / 16));
    return grouped(rows, heads, dim, 1 + draw.below(heads), lanes_each, 1 + draw.below(9));
}

const char* wrong(Draw& draw, int format) {
    const Grouped drawn = shape(draw);
    const Tensor tensor(draw, format, drawn, runs_of_rows(draw, drawn.rows, drawn.row_groups));
    const Grouped& a = tensor.a;
    const int to = E4M3 + draw.below(2);
    std::vector<float> factors(count_of(a));
    for (float& factor : factors) factor = ldexpf(9 + draw.below(7), draw.below(24) - 12);
    const std::vector<u8> right = tensor.codes(to, factors), untouched(right.size(), PATTERN);

    const u32 lanes = a.heads * a.dim, positions = parts(a.rows, 16) * 16, blocks = parts(lanes, LANES) * parts(positions, ROWS);
    Room<float> scale(draw, factors);
    Room<u8> copy(draw, lanes * positions), codes(draw, right.size());
    const bool makes_codes = draw.below(2);
    u8* const in_rows = makes_codes ? codes.begin() : nullptr;
    const float* const from = scale.read_only();
    launch(blocks, 1, [&] { ENCODE[format]({copy.begin(), a.rows, lanes, positions}, a, from, in_rows, to == E5M2); });
    if (!copy.holds(turned(right, a.rows, lanes, positions))) return "a turned copy of values";
    if (!codes.holds(makes_codes ? right : untouched)) return "codes beside a turned copy";

    Room<u8> of_codes(draw, right), copy_of_codes(draw, lanes * positions);
    const u8* const from_codes = of_codes.read_only();
    launch(blocks, 1, [&] { turn_codes({copy_of_codes.begin(), a.rows, lanes, positions}, from_codes); });
    return copy_of_codes.holds(turned(right, a.rows, lanes, positions)) ? nullptr : "a turned copy of codes";
}

int main() {
    watch_rooms();
    for (int seed = 0; seed < 60; ++seed) {
        Draw draw(seed);
        const char* const what = wrong(draw, seed % 3);
        if (!what) continue;
        printf("case %d: %s\n", seed, what);
        return 1;
    }
}
