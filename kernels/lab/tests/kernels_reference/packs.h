// Drawn packs.
#pragma once
#include <random>
#include <vector>

// The slots of sequences in `rows` rows.
struct Pack {
    std::vector<int> offset, span, len;
    int rows;
};

struct Draw {
    std::mt19937_64 random;
    int below(int end) { return random() % end; }
};
