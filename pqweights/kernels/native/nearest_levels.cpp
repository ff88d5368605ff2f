// The nearest levels of numbers (docs/kv-cache.md): codes and what they stand for, of runs with levels of their own.
//
// A code is the number of thresholds that are not above a number. Its bits are found one after the other, the highest
// first: with k bits known, 2**k thresholds come into question, which fit into a few registers.
#include "interface.hpp"
#include "table.hpp"
#include "tiles.hpp"

namespace {

// As in kernels/transform_codes.py.
constexpr int LEVELS_OF_WIDTH = 256, THRESHOLDS_OF_WIDTH = 304;
// Where the thresholds begin that come into question for a bit of a code, the highest bit first.
constexpr int STEP_STARTS[] = {0, 16, 32, 48, 64, 80, 112, 176};

// The highest `bits` bits of codes.
template <int bits>
struct Search {
    Search<bits - 1> higher;
    // Those that come into question; there is room for sixteen.
    Table<(1 << (bits - 1) < LEAST_ENTRIES ? LEAST_ENTRIES : 1 << (bits - 1))> thresholds;

    INLINE explicit Search(const float* from) : higher(from), thresholds(from + STEP_STARTS[bits - 1]) {}

    INLINE Unsigned code(Floats x) const {
        Unsigned code = higher.code(x);
        // Not >=, which is false for a NaN: that gets the last code, as torch has it.
        return (code << 1) | (Unsigned)((x < thresholds[code]) + 1);
    }
};

template <>
struct Search<0> {
    INLINE explicit Search(const float*) {}
    INLINE Unsigned code(Floats) const { return Unsigned{}; }
};

// Write the codes and levels of a run of some rows, of which each has `stride` numbers.
template <int bits>
void search(const float* values, int64_t rows, int64_t stride, int64_t count, const float* thresholds,
            const float* levels, uint8_t* codes, float* out) {
    using Half = Vector<float, LANES / 2>;
    const Search<bits> steps(thresholds + bits * THRESHOLDS_OF_WIDTH);
    const Table<ENTRIES<bits>> table(levels + bits * LEVELS_OF_WIDTH);
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row * stride;
        const int64_t end = at + count;
        for (; at + LANES <= end; at += LANES) {
            Unsigned code = steps.code(load<Floats>(values + at));
            store(converted<Bytes>(code), codes + at);
            store(table[code], out + at);
        }
        if (at < end) {
            Half x = load<Half>(values + at);
            Unsigned code = steps.code(joined(x, x));
            store(slice<0, LANES / 2>(converted<Bytes>(code)), codes + at);
            store(slice<0, LANES / 2>(table[code]), out + at);
        }
    }
}

using SearchRun = void (*)(const float*, int64_t, int64_t, int64_t, const float*, const float*, uint8_t*, float*);
constexpr SearchRun SEARCH[] = {nullptr,   search<1>, search<2>, search<3>, search<4>,
                                search<5>, search<6>, search<7>, search<8>};

}  // namespace

// values: [rows, size]; runs: [run_count, 2], how many numbers of a row each run has, a multiple of 8, and the bits
// of their codes, 1 to 8; thresholds: [9, 304], by bits; levels: [9, 256]; codes, out: [rows, size]; next_tile: 0,
// which all threads count up together.
void pqweights::nearest_levels(int64_t* next_tile, const float* values, const int64_t* runs, const float* thresholds,
                               const float* levels, uint8_t* codes, float* out, int64_t rows, int64_t size,
                               int64_t run_count, int64_t tile_rows) {
    each_tile(next_tile, 1, rows, tile_rows, [&](int64_t, int64_t start, int64_t end) {
        int64_t at = start * size;
        for (int64_t run = 0; run < run_count; run++) {
            const int64_t count = runs[2 * run], bits = runs[2 * run + 1];
            SEARCH[bits](values + at, end - start, size, count, thresholds, levels, codes + at, out + at);
            at += count;
        }
    });
}
