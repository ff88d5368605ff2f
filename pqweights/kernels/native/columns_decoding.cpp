// Decodes strips of the codec hadamard-trellis-columns, whatever their bytes are: section 10 of docs/format.md.
//
// The sixteen blocks of a tile are sixteen columns, so its vectors are parts of rows, and these are far from each other.
// They are written while the next tile is decoded: stores that wait for memory hold up what comes after them.
#include "conversions.hpp"
#include "interface.hpp"
#include "trellis_superblocks.hpp"

namespace {

// Where the weights of a superblock go, and sixteen columns of them on their way.
struct Target {
    uint8_t* values;
    const float *row_factors, *column_factors;
    int64_t rows, columns, stride;  // stride in bytes
    Dtype dtype;
    const Floats* tile = nullptr;  // [128], or null
    uint8_t* to = nullptr;
    Floats raised{}, factors{};

    INLINE Floats scaled(int64_t row) const { return tile[row] * raised * row_factors[row] * factors; }

    INLINE void write_row(int row) const {
        if (!tile) return;
        store_values(scaled(row), to + row * stride, dtype);
        __builtin_prefetch(to + row * stride + 2 * LANES * bytes_of(dtype) - 1, 1);  // where the next tile goes
    }

    // Write the columns of a strip from `column` on, later if they are sixteen of 128 rows.
    void take(Superblock& it, int64_t column, int64_t count) {
        tile = it.kept_tile(), raised = it.raised;
        factors = load_first<Floats>(column_factors + column, count);
        to = values + column * bytes_of(dtype);
        if (count >= LANES && rows == BLOCK) return;
        for (int64_t row = 0; row < rows; row++) {
            uint8_t all[LANES * sizeof(float)];
            store_values(scaled(row), all, dtype);
            std::memcpy(to + row * stride, all, (count < LANES ? count : LANES) * bytes_of(dtype));
        }
        tile = nullptr;
    }

    void write_zeros() const {
        for (int64_t row = 0; row < rows; row++) std::memset(values + row * stride, 0, columns * bytes_of(dtype));
    }
};

}  // namespace

// trellis: the superblocks. starts, lengths: [strips, count], where each begins, and its bytes, at least HEADER_BYTES.
// entries, classes, widths, gains: see Tables. row_factors: [rows], which the strips have, all but the last of them 128.
// column_factors: [columns]. values: [rows, columns] of the dtype. streams: room, [2, room_words(longest)]. status: [2]:
// the first superblock, counted strip by strip, that is not sound, or -1, and what is wrong with it. count: of the
// superblocks of a strip; blocks: of each but the last.
void pqweights::decode_columns(const uint8_t* trellis, const int64_t* starts, const int32_t* lengths,
                               const uint32_t* entries, const int32_t* classes, const int32_t* widths,
                               const double* gains, const float* row_factors, const float* column_factors,
                               uint8_t* values, uint16_t* streams, int64_t* status, int64_t strips, int64_t count,
                               int64_t blocks, int64_t rows, int64_t columns, int64_t longest, int64_t dtype) {
    const Tables tables{entries, classes, widths, gains};
    const int64_t size = bytes_of(Dtype{dtype});
    auto least = [](int64_t a, int64_t b) { return a < b ? a : b; };
    auto target_of = [&](int64_t superblock) -> Target {
        const int64_t row = superblock / count * BLOCK, column = superblock % count * blocks;
        return {values + (row * columns + column) * size, row_factors + row, column_factors + column,
                least(rows - row, BLOCK), least(columns - column, blocks), columns * size, Dtype{dtype}};
    };
    status[0] = -1, status[1] = SOUND;
    for (int64_t first = 0; first < strips * count; first += 2) {
        const int there = int(least(strips * count - first, 2));
        const int64_t last = first + there - 1;
        Target targets[2] = {target_of(first), target_of(last)};
        const int64_t some[2] = {targets[0].columns, targets[1].columns};
        Pair pair;
        open(pair, {trellis + starts[first], there == 2 ? trellis + starts[last] : nullptr},
             {lengths[first], lengths[last]}, some, streams, room_words(longest));
        for (int k = 0; k < there; k++)
            if (!pair[k].tiles) targets[k].write_zeros();
        auto write_rows = [&](int row) ALWAYS { targets[0].write_row(row), targets[1].write_row(row); };
        decode_tiles(pair, some, tables, write_rows, [&](int k, int64_t tile, int64_t left) ALWAYS {
            targets[k].take(pair[k], tile * LANES, left);
        });
        for (int row = 0; row < BLOCK; row++) write_rows(row);
        for (int k = 0; k < there; k++)
            if (pair[k].status != SOUND && status[0] < 0) status[0] = first + k, status[1] = pair[k].status;
    }
}
