// Error-compensated rounding of rows of weights: compensation.py has the method.
//
// All kernels are made of one loop: four rows of a panel times a long run of rows of 64 numbers (row_products.hpp).
#include "group_fitting.hpp"
#include "interface.hpp"
#include "iq4_codes.hpp"
#include "row_products.hpp"
#include "short_floats.hpp"

namespace {

constexpr int PANEL = 64;  // columns of which a panel is gathered at once
constexpr int STRIP = 32;  // rows of a factor that are computed together

// --- factor ---

// Write 64 columns of four rows of the factor from `chunk` on, of which the sums are the products with the rows above;
// return the first row without a positive pivot, or -1.
int64_t finish_quad(float* a, Quad& sums, int64_t size, int64_t stride, int64_t first_row, int64_t chunk,
                    bool has_pivots) {
    for (int q = 0; q < QUAD; q++) {
        const int64_t row = first_row + q;
        float* to = a + row * stride + chunk;
        Row own;
        each<TILE_VECTORS>([&](auto v) ALWAYS { own[v] = load<Floats>(to + v * LANES) - sums[q][v]; });
        for (int p = 0; p < q; p++) {
            const float factor = a[(first_row + p) * stride + row];
            each<TILE_VECTORS>([&](auto v) ALWAYS { own[v] = own[v] - factor * sums[p][v]; });
        }
        if (has_pivots) {
            const float pivot = ((const float*)own)[row - chunk];
            if (!(pivot > 0 && pivot < __builtin_inff())) return row;
            a[row * stride + row] = __builtin_sqrtf(pivot);
        }
        const float diagonal = a[row * stride + row];
        each<TILE_VECTORS>([&](auto v) ALWAYS { sums[q][v] = own[v] / diagonal; });
        const int64_t first = row + 1 > chunk ? row + 1 - chunk : 0, last = size - chunk < TILE ? size - chunk : TILE;
        if (first < last) std::memcpy(to + first, (const float*)sums[q] + first, (last - first) * sizeof(float));
    }
    return -1;
}

}  // namespace

// matrix: [size, stride], a symmetric A; QUAD divides the size, and stride is at least size + TILE. Writes R above and
// on the diagonal, where A = R' R. panel: [STRIP, stride], for work. failed: [1], the first row without a positive
// pivot, or -1.
void pqweights::factor(float* matrix, float* panel, int64_t* failed, int64_t size, int64_t stride) {
    Quad sums[STRIP / QUAD];
    failed[0] = -1;
    for (int64_t start = 0; start < size; start += STRIP) {
        const int64_t end = start + STRIP < size ? start + STRIP : size;
        for (int64_t i = 0; i < start; i++) {
            for (int64_t row = start; row < end; row++) panel[(row - start) * stride + i] = matrix[i * stride + row];
        }
        for (int64_t chunk = start; chunk < size; chunk += TILE) {
            std::memset(sums, 0, sizeof sums);
            multiply_quads(panel, stride, matrix + chunk, stride, start, (end - start) / QUAD, sums);
            for (int64_t row = start; row < end; row += QUAD) {
                Quad& own = sums[(row - start) / QUAD];
                float* rows_of_panel = panel + (row - start) * stride;
                for (int64_t i = start; chunk == start && i < row; i++) {
                    each<QUAD>([&](auto q) ALWAYS { rows_of_panel[q * stride + i] = matrix[i * stride + row + q]; });
                }
                multiply_quad(rows_of_panel + start, stride, matrix + start * stride + chunk, stride, row - start, own);
                failed[0] = finish_quad(matrix, own, size, stride, row, chunk, chunk == start);
                if (failed[0] >= 0) return;
            }
        }
    }
}

namespace {

// --- round ---

// Write how the error of each column changes the targets of the columns start to end: [PANEL, stride].
void gather_panel(const float* __restrict a, const float* __restrict diagonal, float* __restrict panel, int64_t size,
                  int64_t stride, int64_t start, int64_t end, bool again) {
    for (int64_t k = start; k < end; k++) {
        float* to = panel + (k - start) * stride;
        const float* row = a + k * stride;
        const float divisor = again ? diagonal[k] : row[k];
        for (int64_t i = start; i < k; i++) to[i] = 0;
        const int64_t first = again ? 0 : k + 1, last = again ? k : size;
        for (int64_t i = first; i < last; i++) to[i] = row[i] / divisor;
        to[k] = 0;
    }
    for (int64_t i = start + 1; again && i < size; i++) {
        float* column = panel + i - start * stride;
        for (int64_t k = start; k < end && k < i; k++) column[k * stride] = a[i * stride + k] / diagonal[k];
    }
}

// Where the rows of one tile are.
struct Rows {
    const float *weights, *scales, *offsets;
    const int64_t* group_of;
    float* errors;
    uint8_t* codes;
};

// The numbers that codes stand for, nearest to t: each returns one, and writes its code.
struct Integers {
    float lowest, highest;

    INLINE Floats nearest(Floats t, Bytes& code) const {
        Floats number = nearest_code_or_nan(t, lowest, highest);
        code = converted<Bytes>(converted<Ints>(maximum(number - lowest, Floats{})));  // of a NaN: 0
        return number;
    }
};

template <class Element>
struct ShortFloats {
    INLINE Floats nearest(Floats t, Bytes& code) const {
        Unsigned found = Element::code_of(magnitude(t));
        // Which sign a NaN has is the compiler's choice, so one never counts as negative.
        Unsigned sign = choose<Unsigned>((found > 0) & (t < 0.0f), Element::sign_bit(t), Unsigned{});
        code = converted<Bytes>(found | sign);
        return choose<Floats>(sign > 0, -Element::value_of(found), Element::value_of(found));
    }
};

struct Iq4 : Iq4Codes {
    INLINE Floats nearest(Floats t, Bytes& code) const {
        Unsigned found = index(t);
        code = converted<Bytes>(found);
        return values[found];
    }
};

// Round a column for 64 rows; returns by how much their errors change. sum: what is added to the weights.
template <class Numbers>
INLINE void round_column(const Rows& rows, const Numbers& numbers, int64_t column, const Row& sum, Row& change) {
    each<TILE_VECTORS>([&](auto v) ALWAYS {
        const int64_t at = column * TILE + v * LANES, group = rows.group_of[column] * TILE + v * LANES;
        Floats scale = load<Floats>(rows.scales + group), offset = load<Floats>(rows.offsets + group);
        Floats weight = load<Floats>(rows.weights + at), target = weight + sum[v];
        Bytes code;
        Floats error = weight - (numbers.nearest((target - offset) / scale, code) * scale + offset);
        change[v] = error - load<Floats>(rows.errors + at);
        store(error, rows.errors + at);
        store(code, rows.codes + at);
    });
}

// Round the columns of a panel, the last one first, and pass the error of each on to the others.
template <class Numbers>
void round_panel(const float* panel, int64_t stride, const Rows& rows, const Numbers& numbers, int64_t start,
                 int64_t end, Row* sums) {
    for (int64_t q = end - start - 1; q >= 0; q--) {
        Row change;
        round_column(rows, numbers, start + q, sums[q], change);
        for (int64_t p = 0; p < q; p++) {
            const float factor = panel[p * stride + start + q];
            each<TILE_VECTORS>([&](auto v) ALWAYS { sums[p][v] += factor * change[v]; });
        }
    }
}

}  // namespace

// matrix: [size, stride], R above and on the diagonal, A below it; QUAD divides the size. diagonal: [size], that of A.
// weights: [tiles, size, TILE]. scales, offsets: [tiles, groups, TILE]. group_of: [size], the group of each column.
// errors: [tiles, size, TILE], zeros unless `again`. codes: u8 [tiles, size, TILE], counted from the lowest. panel:
// [PANEL, stride], for work. again: whether each column looks at the errors of all others, not only of those before it.
// kind: what codes are: 0, integers from lowest to highest; 4 or 8, E2M1 or E4M3 with a sign; 16, those of IQ4_NL.
void pqweights::compensate(const float* matrix, const float* diagonal, const float* weights, const float* scales,
                           const float* offsets, const int64_t* group_of, float* errors, uint8_t* codes, float* panel,
                           int64_t size, int64_t stride, int64_t tiles, int64_t groups, int64_t again, int64_t lowest,
                           int64_t highest, int64_t kind) {
    Row sums[PANEL];
    const auto round = [&](const Rows& rows, int64_t start, int64_t end) {
        const auto run = [&](const auto& numbers) { round_panel(panel, stride, rows, numbers, start, end, sums); };
        if (kind == 0) run(Integers{float(lowest), float(highest)});
        else if (kind == 16) run(Iq4{});
        else if (kind == 4) run(ShortFloats<E2m1>{});
        else run(ShortFloats<E4m3>{});
    };
    for (int64_t end = size; end > 0; end -= PANEL) {
        const int64_t start = end > PANEL ? end - PANEL : 0, since = again ? 0 : start;
        gather_panel(matrix, diagonal, panel, size, stride, start, end, again);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t at = tile * size * TILE, group = tile * groups * TILE;
            const Rows rows = {weights + at, scales + group, offsets + group, group_of, errors + at, codes + at};
            std::memset(sums, 0, sizeof sums);
            multiply_quads(panel + since, stride, rows.errors + since * TILE, TILE, size - since, (end - start) / QUAD,
                           (Quad*)sums);
            round(rows, start, end);
        }
    }
}

// errors: [tiles, size, TILE]. inputs: [count, size], where QUAD divides the count. totals: [tiles, TILE], the sum over
// the inputs x of (e x)^2 for each row e of the errors.
void pqweights::output_errors(const float* errors, const float* inputs, double* totals, int64_t size, int64_t tiles,
                              int64_t count) {
    for (int64_t tile = 0; tile < tiles; tile++) {
        Doubles sums[TILE_VECTORS]{};
        for (int64_t row = 0; row < count; row += QUAD) {
            Quad outputs{};
            multiply_quad(inputs + row * size, size, errors + tile * size * TILE, TILE, size, outputs);
            each<QUAD>([&](auto q) ALWAYS {
                each<TILE_VECTORS>([&](auto v) ALWAYS {
                    Doubles output = converted<Doubles>(outputs[q][v]);
                    sums[v] += output * output;
                });
            });
        }
        each<TILE_VECTORS>([&](auto v) ALWAYS { store(sums[v], totals + tile * TILE + v * LANES); });
    }
}
