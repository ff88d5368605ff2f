// Brings weights into the form in which their columns are searched: scaled, and rotated along the rows.
#include "columns.hpp"
#include "interface.hpp"

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

// values: [rows, columns], at most 2048 rows. row_factors: [rows]. column_factors: [columns]. group: [32, columns, 64].
void pqweights::load_columns(const float* values, const float* row_factors, const float* column_factors, float* group,
                             int64_t rows, int64_t columns) {
    const Weights weights{values, row_factors, column_factors, rows, columns};
    Floats work[LANES][BLOCK];
    each_sixteen(columns, [&](int64_t first, int64_t count) {
        load_scaled(weights, first, count, work);
        for (int64_t i = 0; i < count && i < LANES; i++) {
            rotate_blocks(work[i]);
            each_vector(group, columns, first + i, [&](int t, float* to) ALWAYS { store(work[i][t], to); });
        }
    });
}
