// Packs superblocks of sixteen strips, one in each lane of the search: section 8 of docs/format.md.
#include "columns.hpp"
#include "interface.hpp"
#include "trellis_packing.hpp"

namespace {

// The numbers of up to sixteen columns [columns, 128, 16 strips], as [16 strips, 128, 16 columns]; zeros for others.
void transpose_tile(const int16_t* numbers, int64_t columns, int16_t* tile) {
    for (int t = 0; t < BLOCK; t++) {
        Shorts rows[LANES];
        each<LANES>([&](auto i) ALWAYS {
            rows[i] = i < columns ? load<Shorts>(numbers + (i * BLOCK + t) * LANES) : Shorts{};
        });
        transpose(rows);
        each<LANES>([&](auto i) ALWAYS { store(rows[i], tile + (i * BLOCK + t) * LANES); });
    }
}

// A strip on the way to its bytes.
struct Strip {
    Classes classes;
    Stream stream{nullptr};
};

// Read the classes of a strip, one of each sixteen, and give them their frequencies.
void read_classes(Classes& classes, const uint8_t* of_strip, int64_t blocks) {
    classes.blocks = int(blocks);
    std::memset(classes.counts, 0, sizeof classes.counts);
    for (int i = 0; i < classes.blocks; i++) {
        classes.of[i] = of_strip[i * LANES];
        classes.counts[classes.of[i]]++;
    }
    share_classes(classes);
}

}  // namespace

// numbers: [blocks, 128, 16]. strip_classes: [blocks, 16]. zero, entries: see ClassModel. rows: [16, stride], where
// stride is at least that of MOST_BYTES in kernels/columns.py. lengths: [16], the bytes of each row that are used. tile:
// room, [16, 128, 16]. words: room, [16, tiles * TILE_WORDS + LANES]. states: of the trellis. step: that is stored.
void pqweights::pack_columns(const int16_t* numbers, const uint8_t* strip_classes, const int32_t* zero,
                             const uint32_t* entries, uint8_t* rows, int32_t* lengths, int16_t* tile, uint16_t* words,
                             int64_t blocks, int64_t stride, int64_t states, double step) {
    const ClassModel model{.zero = zero, .entries = entries};
    const int tiles = int((blocks + LANES - 1) / LANES);
    const int64_t room = tiles * TILE_WORDS + LANES;
    Strip all[LANES];
    for (int i = 0; i < LANES; i++) {
        read_classes(all[i].classes, strip_classes + i, blocks);
        all[i].stream = Stream(words + (i + 1) * room);
    }
    for (int number = tiles - 1; number >= 0; number--) {
        const int64_t first = number * LANES;
        transpose_tile(numbers + first * BLOCK * LANES, blocks - first, tile);
        for (int i = 0; i < LANES; i++) {
            encode_numbers(all[i].stream, all[i].classes, number, tile + i * BLOCK * LANES, model);
            encode_classes(all[i].stream, all[i].classes, number);
        }
    }
    const int state_bits = __builtin_ctzll(states);
    for (int i = 0; i < LANES; i++) {
        uint8_t* row = rows + i * stride;
        std::memset(row, 0, HEADER_BYTES);  // what a strip of zeros takes
        const bool is_zero = all[i].classes.counts[0] == blocks;
        const uint8_t* end = is_zero ? row + HEADER_BYTES : pack(row, all[i].classes, all[i].stream, float(step), state_bits);
        lengths[i] = int32_t(end - row);
    }
}
