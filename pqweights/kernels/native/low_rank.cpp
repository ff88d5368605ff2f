// Low-rank matrices that are added to weights, as adapters have them. Sums go over the rank in its order, a
// multiplication and an addition at a time.
#include "interface.hpp"
#include "lanes.hpp"

namespace {

constexpr int TOGETHER = 8;  // rows for which a vector of `right` is loaded once

template <int rows>
INLINE void add_rows(const float* left, const float* right, float* values, int64_t rank, int64_t columns, float scale) {
    each_sixteen(columns, [&](int64_t first, int64_t count) ALWAYS {
        Floats sums[rows]{};
        for (int64_t k = 0; k < rank; k++) {
            const Floats factors = load_first<Floats>(right + k * columns + first, count);
            each<rows>([&](auto row) ALWAYS { sums[row] += left[row * rank + k] * factors; });
        }
        each<rows>([&](auto row) ALWAYS {
            float* at = values + row * columns + first;
            store_first(load_first<Floats>(at, count) + sums[row] * scale, at, count);
        });
    });
}

}  // namespace

// left: [rows, rank]; right: [rank, columns]; values: [rows, columns], to which scale * (left right) is added.
void pqweights::add_low_rank(const float* left, const float* right, float* values, int64_t rows, int64_t rank,
                             int64_t columns, double scale) {
    int64_t row = 0;
    for (; row + TOGETHER <= rows; row += TOGETHER) {
        add_rows<TOGETHER>(left + row * rank, right, values + row * columns, rank, columns, float(scale));
    }
    for (; row < rows; row++) add_rows<1>(left + row * rank, right, values + row * columns, rank, columns, float(scale));
}
