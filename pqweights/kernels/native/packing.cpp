// Codes to the bytes of each runtime's packing: docs/exports.md.
#include "interface.hpp"
#include "lanes.hpp"

namespace {

// Eight codes at a time, as a number of 8 * bits bits, of which code i has those from i * bits on.
template <int bits>
void pack_eights(const uint8_t* codes, uint8_t* packed, int64_t eights) {
    for (int64_t eight = 0; eight < eights; eight++) {
        uint64_t word = 0;
        each<8>([&](auto i) ALWAYS { word |= uint64_t(codes[8 * eight + i]) << (bits * i); });
        each<bits>([&](auto i) ALWAYS { packed[bits * eight + i] = uint8_t(word >> (8 * i)); });
    }
}

void pack_pairs(const uint8_t* __restrict codes, uint8_t* __restrict packed, int64_t count) {
    for (int64_t i = 0; i < count; i++) packed[i] = codes[2 * i] | uint8_t(codes[2 * i + 1] << 4);
}

}  // namespace

// codes: [8 * eights], below 2**bits, to a stream of bits [bits * eights], the lowest first; bits: 1 to 8.
void pqweights::pack_bits(const uint8_t* codes, uint8_t* packed, int64_t eights, int64_t bits) {
    if (bits == 8) std::memcpy(packed, codes, eights * 8);
    if (bits == 4) pack_pairs(codes, packed, eights * 4);
    each<7>([&](auto less) ALWAYS {
        constexpr int width = less + 1;
        if (width != 4 && bits == width) pack_eights<width>(codes, packed, eights);
    });
}

// codes: [8 * tile_rows, 128 * tile_columns], below 16, to tiles of 8 x 128 as PyTorch's tinygemm kernel reads them,
// 512 bytes each: aten::_convert_weight_to_int4pack with inner_k_tiles 8 (aten/src/ATen/native/cuda/int4mm.cu).
//
// With column = 32 a + 16 b + 8 c + 2 d + e, bytes are in the order of row, d, a, e, b; c tells the nibble.
void pqweights::pack_tiles(const uint8_t* codes, uint8_t* packed, int64_t tile_rows, int64_t tile_columns) {
    const int64_t width = tile_columns * 128;
    for (int64_t tile = 0; tile < tile_rows * tile_columns; tile++) {
        const uint8_t* first = codes + tile / tile_columns * 8 * width + tile % tile_columns * 128;
        for (int row = 0; row < 8; row++) {
            each<64>([&](auto i) ALWAYS {
                constexpr int b = i & 1, e = i >> 1 & 1, a = i >> 2 & 3, d = i >> 4;
                const uint8_t* low = first + row * width + 32 * a + 16 * b + 2 * d + e;
                packed[tile * 512 + row * 64 + i] = low[0] | uint8_t(low[8] << 4);
            });
        }
    }
}
