// The quantiser on a CPU: magnitudes, factors and codes of drawn tensors, one pass after the other, and of single rows at once,
// held to the definition (`seamproof_oracle::quantise`) in plain loops. Ends with 1 and a line of what is wrong.
#include "codes.h"

// The kernels for values of a format. Of two the first has single elements, the second vectors.
struct Kernels {
    void (*largest[2])(Grouped, u32*, u32);
    void (*encode[2])(Grouped, const float*, u8*, u32, int);
    void (*encode_rows)(Grouped, Recipe, Factors, u8*, u32, u32, int);
};
constexpr Kernels KERNELS[] = {
    {{largest_f32_elements, largest_f32_vectors}, {encode_f32_elements, encode_f32_vectors}, encode_rows_f32},
    {{largest_bf16_elements, largest_bf16_vectors}, {encode_bf16_elements, encode_bf16_vectors}, encode_rows_bf16},
    {{largest_fp16_elements, largest_fp16_vectors}, {encode_fp16_elements, encode_fp16_vectors}, encode_rows_fp16},
};

// What is asked for. A delayed recipe has a history, and `previous` is the scale of the step before.
struct Asked {
    int codes, rule, margin;
    bool newest;
    float previous;
    std::vector<float> history;

    double largest() const { return ldexp(codes == E4M3 ? 448 : 57344, -margin); }
    int exponent() const { return (codes == E4M3 ? 8 : 15) - margin; }
    Recipe recipe(const float* from, float* next) const {
        const int entries = history.size();
        if (entries == 0) from = next = nullptr;
        return {(float)largest(), exponent(), rule, previous, from, next, entries, newest};
    }
};

// Finite magnitudes: zeros, ones below the normal range, and any.
float magnitude(Draw& draw) {
    const int end[] = {1, 1 << 23, 0x7f800000};
    return bits_of<float>(draw.below(end[draw.below(3)]));
}
std::vector<float> magnitudes(Draw& draw, size_t count) {
    std::vector<float> drawn(count);
    if (draw.below(3))
        for (float& one : drawn) one = magnitude(draw);
    return drawn;
}

Asked asked(Draw& draw, bool delayed) {
    Asked asked = {E4M3 + draw.below(2), draw.below(delayed ? 2 : 4), draw.below(2) * (draw.below(33) - 16), false, 1.0f};
    if (!delayed) return asked;
    asked.history = magnitudes(draw, 1 + draw.below(6)), asked.newest = draw.below(2);
    asked.previous = ldexpf(9 + draw.below(7), draw.below(40) - 20);
    return asked;
}

float2 of_scale(float scale) { return {scale, 1.0f / scale}; }
float2 of_exponent(int exponent) {
    exponent = min(max(exponent, -127), 127);
    return {ldexpf(1.0f, -exponent), ldexpf(1.0f, exponent)};
}
// The factors of a magnitude.
float2 factors(const Asked& asked, double amax) {
    const double largest = asked.largest();
    if (amax == 0) return asked.rule < E8M0_UP ? of_scale(asked.previous) : of_exponent(-127);
    if (asked.rule == BY_F32) return of_scale(min((float)largest / (float)amax, FLT_MAX));
    if (asked.rule == E8M0_DOWN) return of_exponent(ilogb(amax) - asked.exponent());
    const int exponent = ilogb(amax) - ilogb(largest);
    return of_exponent(exponent + (amax > ldexp(largest, exponent)));
}

// The magnitude that a recipe takes.
float taken(const Asked& asked, float amax) {
    const auto& history = asked.history;
    if (history.empty()) return amax;
    return asked.newest ? history[0] : *std::max_element(history.begin(), history.end());
}

// A launch over columns of so many elements, whose threads ask so often for rows.
struct Tiles {
    u32 x, y, rows;

    Tiles(const Grouped& a, u32 each, u32 asks) {
        const u32 across = a.heads * a.dim / each;
        rows = THREADS / min(across, THREADS) * IN_FLIGHT * asks;
        x = parts(a.rows, rows), y = parts(across, THREADS);
    }
};

// Groups of whole columns; all of a tensor may be one.
Grouped shape(Draw& draw, u32 each, bool is_one) {
    const bool wide = draw.below(4) == 0;
    const u32 heads = 1 + draw.below(wide ? 3 : 6), dim = each * (wide ? 90 + draw.below(200) : 1 + draw.below(12));
    const u32 rows = 1 + draw.below(wide ? 12 : 160), all_lanes = dim + draw.below(9);
    if (is_one) return grouped(rows, heads, dim, heads, all_lanes, 1);
    const u32 lanes_each = draw.below(2) ? all_lanes : each * (1 + draw.below(dim / each));
    return grouped(rows, heads, dim, 1 + draw.below(heads), lanes_each, 1 + draw.below(9));
}

// Magnitudes rise to a tensor's.
void raise(std::vector<float>& amax, const Tensor& tensor) {
    for (size_t i = 0; i < tensor.count(); ++i) {
        const int group = tensor.group_of(i);
        if (group >= 0) amax[group] = max(amax[group], fabsf(tensor.values[i]));
    }
}

// Magnitudes of a tensor, and of another rank, become those of both. Some are there before: a tensor may share them.
const char* wrong_magnitudes(Draw& draw, const Tensor& tensor, u32 each, Room<float>& amax, std::vector<float>& most) {
    amax.put(most);
    const Tiles asking(tensor.a, each, 4);
    launch(asking.x, asking.y, [&] {
        KERNELS[tensor.format].largest[each > 1](tensor.a, (u32*)amax.begin(), asking.rows);
    });
    raise(most, tensor);
    if (!amax.holds(most)) return "magnitudes";

    const std::vector<float> others = magnitudes(draw, most.size());
    Room<float> of_other(draw, others);
    const u32* const other = (const u32*)of_other.read_only();
    const u32 count = most.size();
    launch(parts(count, THREADS), 1, [&] { larger_magnitudes((u32*)amax.begin(), other, count); });
    for (u32 i = 0; i < count; ++i) most[i] = max(most[i], others[i]);
    return amax.holds(most) ? nullptr : "magnitudes of two ranks";
}

// Magnitudes become factors, and a history the next one.
const char* wrong_factors(
    Draw& draw, const Asked& asked, const std::vector<float>& most, Room<float>& scale, std::vector<float>& scales
) {
    const u32 count = most.size();
    Room<float> amax(draw, most), history(draw, asked.history), next(draw, asked.history), descale(draw, count);
    const Recipe recipe = asked.recipe(history.read_only(), next.begin());
    const float* const from = amax.read_only();
    launch(parts(count, THREADS), 1, [&] { factors_of_magnitudes(recipe, from, scale.begin(), descale.begin(), count); });
    std::vector<float> descales, after = asked.history;
    for (float own : most) {
        const float2 both = factors(asked, taken(asked, own));
        scales.push_back(both.x), descales.push_back(both.y);
    }
    if (!after.empty()) after.insert(after.begin(), most[0]), after.pop_back();
    if (!next.holds(after)) return "a history";
    if (!scale.holds(scales)) return "scales";
    return descale.holds(descales) ? nullptr : "descales";
}

const char* wrong_recipe(Draw& draw, const Asked& asked, size_t count) {
    std::vector<float> most(count), scales;
    for (float& one : most) one = magnitude(draw);
    Room<float> scale(draw, count);
    return wrong_factors(draw, asked, most, scale, scales);
}

// Every rule with margins up to both ends, and drawn histories.
const char* wrong_recipes(Draw& draw) {
    const char* found = nullptr;
    for (int codes : {E4M3, E5M2})
        for (int rule = 0; rule < 4; ++rule)
            for (int margin : {-16, -1, 0, 9, 16})
                if (!found) found = wrong_recipe(draw, {codes, rule, margin, false, 1.0f}, 600);
    for (int i = 0; i < 100; ++i)
        if (!found) found = wrong_recipe(draw, asked(draw, true), 1);
    return found;
}

const char* wrong_passes(Draw& draw, int format, bool vectors) {
    const bool delayed = draw.below(4) == 0;
    const u32 each = !vectors ? 1 : format == F32 ? 4 : 8;
    const Asked asked = ::asked(draw, delayed);
    const Grouped drawn = shape(draw, each, delayed);
    const Tensor tensor(draw, format, drawn, runs_of_rows(draw, drawn.rows, drawn.row_groups));
    std::vector<float> most = magnitudes(draw, count_of(drawn)), scales;
    Room<float> amax(draw, most.size()), scale(draw, most.size());
    if (const char* wrong = wrong_magnitudes(draw, tensor, each, amax, most)) return wrong;
    if (const char* wrong = wrong_factors(draw, asked, most, scale, scales)) return wrong;

    Room<u8> codes(draw, tensor.count());
    const float* const from = scale.read_only();
    const Tiles once(tensor.a, each, 1);
    const int e5m2 = asked.codes == E5M2;
    launch(once.x, once.y, [&] {
        KERNELS[format].encode[vectors](tensor.a, from, codes.begin(), once.rows, e5m2);
    });
    return codes.holds(tensor.codes(asked.codes, scales)) ? nullptr : "codes";
}

// A group for each row in any order, some for none, and rows that are not real.
std::vector<int> single_rows(Draw& draw, u32 rows, u32 row_groups) {
    std::vector<int> groups(row_groups);
    for (u32 i = 0; i < row_groups; ++i) groups[i] = i;
    draw.shuffle(groups);
    groups.resize(rows);
    for (int& group : groups)
        if (draw.below(4) == 0) group = -1;
    return groups;
}

// Groups of whole vectors in single rows, which so many threads have together.
Grouped shape_of_rows(Draw& draw, u32 lanes) {
    const bool wide = draw.below(4) == 0;
    const u32 heads = 1 + draw.below(wide ? 24 : 5), rows = 1 + draw.below(wide ? 9 : 40), lane_groups = 1 + draw.below(3);
    const u32 lanes_each = lanes + (lane_groups == 1 ? draw.below(9) : 0);
    return grouped(rows, heads, lanes * lane_groups, 1, lanes_each, rows + draw.below(5));
}

// Factors of groups that have no row stay as they are.
const char* wrong_rows(Draw& draw, int format) {
    const u32 together = 4 << draw.below(4), each = format == F32 ? 4 : 8;
    const Asked asked = ::asked(draw, false);
    const Grouped drawn = shape_of_rows(draw, together * each);
    const Tensor tensor(draw, format, drawn, single_rows(draw, drawn.rows, drawn.row_groups));
    std::vector<float> most(count_of(drawn)), right[3];
    for (auto& numbers : right) numbers = magnitudes(draw, most.size());
    Room<float> amax(draw, right[0]), scale(draw, right[1]), descale(draw, right[2]);
    Room<u8> codes(draw, tensor.count());
    u8* const to = draw.below(4) ? codes.begin() : nullptr;
    const Tiles once(drawn, each, 1);
    launch(once.x, once.y, [&] {
        KERNELS[format].encode_rows(
            tensor.a, asked.recipe(nullptr, nullptr), {amax.begin(), scale.begin(), descale.begin()}, to, once.rows, together,
            asked.codes == E5M2
        );
    });
    raise(most, tensor);
    for (size_t i = 0; i < tensor.count(); i += together * each) {
        const int group = tensor.group_of(i);
        if (group < 0) continue;
        const float2 both = factors(asked, most[group]);
        right[0][group] = most[group], right[1][group] = both.x, right[2][group] = both.y;
    }
    if (!amax.holds(right[0])) return "magnitudes of rows";
    if (!scale.holds(right[1])) return "scales of rows";
    if (!descale.holds(right[2])) return "descales of rows";
    const std::vector<u8> untouched(tensor.count(), PATTERN);
    return codes.holds(to ? tensor.codes(asked.codes, right[1]) : untouched) ? nullptr : "codes of rows";
}

const char* wrong(int seed) {
    Draw draw(seed);
    const int format = seed % 3;
    const char* found = wrong_rows(draw, format);
    if (!found) found = wrong_passes(draw, format, seed % 2);
    if (!found && seed == 0) found = wrong_recipes(draw);
    return found;
}

int main() {
    watch_rooms();
    for (int seed = 0; seed < 100; ++seed)
        if (const char* what = wrong(seed)) {
            printf("case %d: %s\n", seed, what);
            return 1;
        }
}
