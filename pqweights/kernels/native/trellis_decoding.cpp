// Decodes superblocks of the codec hadamard-trellis to weights: section 8 of docs/format.md.
#include "conversions.hpp"
#include "interface.hpp"
#include "trellis_superblocks.hpp"

namespace {

// How weights are written.
struct Format {
    const float* signs;  // [128], or null
    int64_t blocks;      // of a superblock
    Dtype dtype;

    int64_t block_bytes() const { return BLOCK * bytes_of(dtype); }
};

// Write the first `blocks` blocks of a tile.
[[gnu::noinline]] void finish_tile(const Superblock& it, uint8_t* values, int64_t blocks, const Format& format) {
    for (int j = 0; j < BLOCK; j += LANES) {
        Floats x[LANES];
        each<LANES>([&](auto i) ALWAYS { x[i] = it.work[j + i] * it.raised; });
        transpose(x);
        const Floats signs = format.signs ? load<Floats>(format.signs + j) : splat(1.0f);
        uint8_t* to = values + j * bytes_of(format.dtype);
        for (int i = 0; i < LANES && i < blocks; i++)
            store_values(x[i] * signs, to + i * format.block_bytes(), format.dtype);
    }
}

}  // namespace

// rows: [superblocks, stride]. entries, tables, widths, gains: see Tables. signs: null without. values: [superblocks,
// blocks, 128] of the dtype. streams: room, [2, room_words(stride)]. status: [2]: the first superblock that is not
// sound, or -1, and what is wrong with it.
void pqweights::decode_trellis(const uint8_t* rows, const uint32_t* entries, const int32_t* tables,
                               const int32_t* widths, const double* gains, const float* signs, uint8_t* values,
                               uint16_t* streams, int64_t* status, int64_t superblocks, int64_t blocks, int64_t stride,
                               int64_t dtype) {
    const Tables classes{entries, tables, widths, gains};
    const Format format{signs, blocks, Dtype{dtype}};
    const int64_t value_bytes = blocks * format.block_bytes();
    status[0] = -1, status[1] = SOUND;
    for (int64_t first = 0; first < superblocks; first += 2) {
        const uint8_t* row = rows + first * stride;
        uint8_t* to = values + first * value_bytes;
        Pair pair;
        open(pair, {row, first + 1 < superblocks ? row + stride : nullptr}, {stride, stride}, {blocks, blocks},
             streams, room_words(stride));
        for (int k = 0; k < 2; k++)
            if (pair[k].row && !pair[k].tiles) std::memset(to + k * value_bytes, 0, value_bytes);
        decode_tiles(pair, {blocks, blocks}, classes, [](int) ALWAYS {}, [&](int k, int64_t tile, int64_t left) ALWAYS {
            finish_tile(pair[k], to + k * value_bytes + tile * LANES * format.block_bytes(), left, format);
        });
        for (int k = 0; k < 2; k++)
            if (pair[k].status != SOUND && status[0] < 0) status[0] = first + k, status[1] = pair[k].status;
    }
}
