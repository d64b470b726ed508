// Groups of elements that share a scale, and the codes of their values.
//
// Scales are an array of row groups, head groups and lane groups. A table says which row group each row of the tensor is in,
// and −1 of a row that is not real: whatever such a row holds counts for no scale, and its codes are 0.
#pragma once

struct Grouped {
    // [rows, heads, dim], in the kernel's format.
    const void* values;
    const int* row_group;
    u32 rows;
    u32 heads;
    u32 dim;
    // The heads and the lanes of a group.
    u32 heads_each;
    u32 lanes_each;
    // The groups along each axis.
    u32 row_groups;
    u32 head_groups;
    u32 lane_groups;
};

__device__ __forceinline__ bool is_group(const Grouped& a, int row_group) { return (u32)row_group < a.row_groups; }

// The place of an element's scale behind those of its row group.
__device__ __forceinline__ u32 place_in_row_group(const Grouped& a, u32 element) {
    const u32 head = element / a.dim, lane = element - head * a.dim;
    return head / a.heads_each * a.lane_groups + lane / a.lanes_each;
}

__device__ __forceinline__ u32 place_of_group(const Grouped& a, int row_group, u32 place) {
    return (u32)row_group * a.head_groups * a.lane_groups + place;
}

// The codes of neighbouring values, four in a word: the product with the scale is rounded to f32, then to the format.
template <int CODES, int FORMAT, int N>
__device__ __forceinline__ void codes_of_values(const Packed<FORMAT, N>& values, float scale, u32 (&words)[(N + 3) / 4]) {
    const auto product = [&](int i) { return i < N ? unpacked(values, i % N) * scale : 0.0f; };
#pragma unroll
    for (int i = 0; i < N; i += 4)
        words[i / 4] = codes_of<CODES>(product(i), product(i + 1), product(i + 2), product(i + 3));
}
