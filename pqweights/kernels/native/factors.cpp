// Factors on the rows and columns of a weight, and sums of squares along them: docs/folding.md says what for. Sums are
// added in the order stated here, so every processor finds the same.
#include "conversions.hpp"
#include "interface.hpp"

namespace {

// Call body(load, value_bytes), where load(from, count) gives up to sixteen values.
template <class Body>
INLINE void with_loader(bool bf16, Body body) {
    if (bf16) {
        body([](const uint8_t* from, int64_t count) ALWAYS { return float_from_bf16(load_first<Words>(from, count)); }, 2);
    } else {
        body([](const uint8_t* from, int64_t count) ALWAYS { return load_first<Floats>(from, count); }, 4);
    }
}

// The sum of a row, of which the upper half is added to the lower one until one number is left; the row is overwritten.
float sum_of_halves(float* row, int64_t count) {
    for (int64_t half; count > 1; count -= half) {
        half = count / 2;
        float* __restrict lower = row;
        const float* __restrict upper = row + count - half;
        for (int64_t j = 0; j < half; j++) lower[j] += upper[j];
    }
    return row[0];
}

}  // namespace

// values: [row_count, column_count] in BF16 or F32; out: f32, value * column factor * row factor, which may be where
// the values are if they are F32.
void pqweights::multiply(const uint8_t* values, const float* columns, const float* rows, float* out, int64_t row_count,
                         int64_t column_count, int64_t bf16) {
    with_loader(bf16, [&](auto load_some, int64_t value_bytes) ALWAYS {
        for (int64_t i = 0; i < row_count; i++) {
            each_sixteen(column_count, [&](int64_t j, int64_t left) ALWAYS {
                const int64_t at = i * column_count + j;
                Floats x = load_some(values + at * value_bytes, left);
                store_first(x * load_first<Floats>(columns + j, left) * rows[i], out + at, left);
            });
        }
    });
}

// values: [row_count, column_count] in BF16 or F32. weights: [column_count], by which squares are multiplied before
// they are added up along rows. of_columns: [column_count], to which squares are added row by row. of_rows:
// [row_count], written if `along_rows`; row: [column_count], for work.
void pqweights::squares(const uint8_t* values, const float* weights, float* of_columns, float* of_rows, float* row,
                        int64_t row_count, int64_t column_count, int64_t bf16, int64_t along_rows) {
    with_loader(bf16, [&](auto load_some, int64_t value_bytes) ALWAYS {
        for (int64_t i = 0; i < row_count; i++) {
            each_sixteen(column_count, [&](int64_t j, int64_t left) ALWAYS {
                Floats x = load_some(values + (i * column_count + j) * value_bytes, left), square = x * x;
                store_first(load_first<Floats>(of_columns + j, left) + square, of_columns + j, left);
                if (along_rows) store_first(square * load_first<Floats>(weights + j, left), row + j, left);
            });
            if (along_rows) of_rows[i] = sum_of_halves(row, column_count);
        }
    });
}
