// Brings weights into the form in which their columns are searched: scaled, and rotated along the rows.
#include "columns.hpp"
#include "interface.hpp"
#include "tiles.hpp"

namespace {

// What there is of a group.
struct Weights {
    const float *values, *row_factors, *column_factors;
    int64_t rows, columns;
};

// Up to sixteen columns from `first` on, multiplied by the factors: work[i] is the i-th of them; zeros for missing rows.
void load_scaled(const Weights& weights, int64_t first, int64_t count, Floats (&work)[LANES][BLOCK]) {
    const Floats factors = load_first<Floats>(weights.column_factors + first, count);
    for (int t = 0; t < BLOCK; t++) {
        Floats x[LANES];
        each<LANES>([&](auto lane) ALWAYS {
            const int64_t row = lane * BLOCK + t;
            x[lane] = Floats{};
            if (row < weights.rows) {
                const Floats values = load_first<Floats>(weights.values + row * weights.columns + first, count);
                x[lane] = values * weights.row_factors[row] * factors;
            }
        });
        transpose(x);
        each<LANES>([&](auto i) ALWAYS { work[i][t] = x[i]; });
    }
}

}  // namespace

// values: [rows, columns]. row_factors: [rows]. column_factors: [columns]. groups: [ceil(rows / 2048), 32, columns, 64].
void pqweights::load_columns(int64_t* next_tile, const float* values, const float* row_factors,
                             const float* column_factors, float* groups, int64_t rows, int64_t columns) {
    constexpr int64_t group_rows = LANES * BLOCK;
    each_tile(next_tile, (rows + group_rows - 1) / group_rows, columns, TILE, [&](int64_t number, int64_t start, int64_t end) {
        const int64_t row = number * group_rows;
        const Weights weights{values + row * columns, row_factors + row, column_factors, rows - row, columns};
        Floats work[LANES][BLOCK];
        each_sixteen(end - start, [&](int64_t first, int64_t count) {
            load_scaled(weights, start + first, count, work);
            for (int64_t i = 0; i < count && i < LANES; i++) {
                rotate_blocks(work[i]);
                each_vector(groups + row * columns, columns, start + first + i,
                            [&](int t, float* to) ALWAYS { store(work[i][t], to); });
            }
        });
    });
}
