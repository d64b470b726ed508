// Tables of 64 bits made tables of 32 on a CPU, thread by thread: the nearest number that fits. Ends with 1 and a line
// of what is wrong.
#include "threads.h"
#include "packs.h"

#include <cstdio>

inline void after_earlier_launches() {}

#include "source.cu"

int main() {
    const i64 far[] = {-1,           -0x80000000ll,  -0x80000001ll, 0x7fffffff,
                       0x80000000ll, (1ll << 32) + 5, 1ll << 62,     -(1ll << 62)};
    for (int seed = 0; seed < 40; ++seed) {
        Draw draw(seed);
        const int counts[] = {0, 1, 5, 85, 86, 255, 256, 700}, count = counts[draw.below(8)];
        std::vector<i64> tables[3];
        std::vector<int> want;
        for (auto& table : tables)
            for (int s = 0; s < count; ++s) {
                table.push_back(draw.below(3) ? draw.below(1 << 30) : far[draw.below(8)]);
                want.push_back((int)min(max(table.back(), -0x80000000ll), 0x7fffffffll));
            }
        // A place behind the last is nobody's.
        std::vector<int> got(3 * count + 1, 77);
        want.push_back(77);
        const WideSlots wide = {tables[0].data(), tables[1].data(), tables[2].data(), count};
        for (int block = 0; block < (int)((3 * count + THREADS - 1) / THREADS); ++block)
            run_block(block, 0, [&] { narrow_slots(wide, got.data()); });
        for (size_t i = 0; i < want.size(); ++i) {
            if (got[i] == want[i]) continue;
            printf("seed %d, %d slots: %zu is %d, not %d\n", seed, count, i, got[i], want[i]);
            return 1;
        }
    }
}
