// Decodes strips of the codec hadamard-trellis-columns, whatever their bytes are: section 10 of docs/format.md.
//
// The sixteen blocks of a tile are sixteen columns, so its vectors are parts of rows.
#include "conversions.hpp"
#include "interface.hpp"
#include "trellis_superblocks.hpp"

namespace {

// Where the weights of a superblock go.
struct Target {
    uint8_t* values;
    const float *row_factors, *column_factors;
    int64_t rows, stride;  // stride in bytes
    Dtype dtype;
};

// Write up to sixteen columns of a strip.
[[gnu::noinline]] void write_columns(const Superblock& it, int64_t column, int64_t count, const Target& to) {
    const int64_t size = bytes_of(to.dtype);
    const Floats factors = load_first<Floats>(to.column_factors + column, count);
    for (int64_t row = 0; row < to.rows; row++) {
        const Floats x = it.work[row] * it.raised * to.row_factors[row] * factors;
        uint8_t* values = to.values + row * to.stride + column * size;
        __builtin_prefetch(values + 64, 1);  // rows are far from each other; the next tile takes a while
        if (count >= LANES) {
            store_values(x, values, to.dtype);
        } else {
            uint8_t all[LANES * sizeof(float)];
            store_values(x, all, to.dtype);
            std::memcpy(values, all, count * size);
        }
    }
}

void write_zeros(const Target& to, int64_t column, int64_t count) {
    const int64_t size = bytes_of(to.dtype);
    for (int64_t row = 0; row < to.rows; row++) std::memset(to.values + row * to.stride + column * size, 0, count * size);
}

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
    const int64_t stride = columns * bytes_of(Dtype{dtype});
    status[0] = -1, status[1] = SOUND;
    auto strip_rows = [&](int64_t strip) { return rows - strip * BLOCK < BLOCK ? rows - strip * BLOCK : BLOCK; };
    for (int64_t first = 0; first < strips; first += 2) {
        const int there = strips - first < 2 ? 1 : 2;
        Target targets[2];
        for (int k = 0; k < there; k++) {
            const int64_t row = (first + k) * BLOCK;
            targets[k] = {values + row * stride, row_factors + row, column_factors, strip_rows(first + k), stride,
                          Dtype{dtype}};
        }
        for (int64_t superblock = 0; superblock < count; superblock++) {
            const int64_t column = superblock * blocks, some = columns - column < blocks ? columns - column : blocks;
            const int64_t at[2] = {first * count + superblock, (first + there - 1) * count + superblock};
            Pair pair;
            open(pair, {trellis + starts[at[0]], there == 2 ? trellis + starts[at[1]] : nullptr},
                 {lengths[at[0]], lengths[at[1]]}, some, streams, room_words(longest));
            for (int k = 0; k < there; k++)
                if (!pair[k].tiles) write_zeros(targets[k], column, some);
            decode_tiles(pair, some, tables, [&](int k, int64_t tile, int64_t left) ALWAYS {
                write_columns(pair[k], column + tile * LANES, left, targets[k]);
            });
            for (int k = 0; k < there; k++)
                if (pair[k].status != SOUND && (status[0] < 0 || at[k] < status[0]))
                    status[0] = at[k], status[1] = pair[k].status;
        }
    }
}
