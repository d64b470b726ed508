// Drawn packs.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

// The slots of sequences in `rows` rows.
struct Pack {
    std::vector<int> offset, span, len;
    int rows;
};

// Numbers that follow from a seed, by SplitMix64: <random> would take a compiler longer than most checks.
struct Draw {
    std::uint64_t state;

    explicit Draw(std::uint64_t seed) : state(seed) {}
    std::uint64_t next() {
        std::uint64_t x = state += 0x9e3779b97f4a7c15;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
        x = (x ^ x >> 27) * 0x94d049bb133111eb;
        return x ^ x >> 31;
    }
    int below(int end) { return next() % end; }
    template <class T> void shuffle(std::vector<T>& all) {
        for (size_t i = all.size(); i > 1; --i) std::swap(all[i - 1], all[below(i)]);
    }
};
