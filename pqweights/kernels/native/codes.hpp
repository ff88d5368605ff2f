// The bits of codes in a row: section 5 of docs/format.md. A code is cut into fields of 8, 4, 2 and 1 bits, low bits
// first, one for each binary digit of its width. A field of n codes takes n * bits / 8 bytes; byte i has the fields of
// codes i, i + n * bits / 8, i + 2 * n * bits / 8, ..., lowest bits first.
#pragma once

#include "hadamard.hpp"

namespace {

// Add a field to the 128 codes of a block, of which code 16 * g + lane is in codes[g].
template <int field>
INLINE void add_field(const uint8_t* bytes, int shift, Unsigned (&codes)[VECTORS]) {
    each<VECTORS>([&](auto g) ALWAYS {
        Unsigned packed = converted<Unsigned>(load<Bytes>(bytes + LANES * (g % field)));
        codes[g] |= ((packed >> (g / field * field)) & ((1u << field) - 1)) << shift;
    });
}

// The 128 codes of a block, from the 16 * width bytes of its row.
template <int width>
INLINE void unpack_block(const uint8_t* row, Unsigned (&codes)[VECTORS]) {
    each<VECTORS>([&](auto g) ALWAYS { codes[g] = Unsigned{}; });
    if constexpr (width & 8) add_field<8>(row, 0, codes);
    if constexpr (width & 4) add_field<4>(row, 0, codes);
    if constexpr (width & 2) add_field<2>(row + LANES * (width & 4), width & 4, codes);
    if constexpr (width & 1) add_field<1>(row + LANES * (width & 6), width & 6, codes);
}

// --- the inverse, for sixteen blocks in the sixteen lanes ---

// Of eight codes, four of which are the bytes of `low` and four those of `high`, the field at `shift`: in each byte
// that of a code in `low`, and 4 bits above it that of the code in `high`.
template <int field>
INLINE Unsigned both_fields(Unsigned low, Unsigned high, int shift) {
    constexpr uint32_t mask = ((1u << field) - 1) * 0x01010101;
    return ((low >> shift) & mask) | ((shift <= 4 ? high << (4 - shift) : high >> (shift - 4)) & (mask << 4));
}

// The bytes j, 16 + j, ... of a row, of which there are `width`, from the codes j, 16 + j, ... of its block. The first
// four are in words[0], lowest first, the others in words[1]. Each code counts with the bits of `flip` changed; then it
// must be less than 2**width.
template <int width>
INLINE void pack_eight(const Unsigned (&codes)[VECTORS], uint32_t flip, Unsigned (&words)[2]) {
    const uint32_t flips = flip ^ flip << 8 ^ flip << 16 ^ flip << 24;
    auto four = [&](int g) ALWAYS {
        return codes[g] ^ (codes[g + 1] << 8) ^ (codes[g + 2] << 16) ^ (codes[g + 3] << 24) ^ flips;
    };
    Unsigned low = four(0), high = four(4);
    if constexpr (width == 8) {
        words[0] = low, words[1] = high;
    } else {
        // A pair of bits takes two bytes and a single bit takes one; each shift brings the next codes in above.
        Unsigned pair = both_fields<2>(low, high, width & 4), single = both_fields<1>(low, high, width & 6);
        pair |= pair >> 14;
        single |= (single >> 7) | (single >> 14) | (single >> 21);
        Unsigned rest = (width & 3) == 3 ? (pair & 0xFFFF) | ((single & 0xFF) << 16) : width & 2 ? pair : single;
        words[0] = width & 4 ? both_fields<4>(low, high, 0) : rest;
        words[1] = rest;
    }
}

// Write the lowest `count` bytes of the words of sixteen blocks: byte k of words[j] of a block to byte 16 * k + j from
// where its row begins. stride: from row to row, in bytes.
template <int count>
INLINE void store_rows(const Unsigned (&words)[LANES], uint8_t* rows, int stride) {
    using Parts = Vector<uint8_t, 4 * LANES>;
    Unsigned blocks[LANES];
    each<LANES>([&](auto j) ALWAYS { blocks[j] = words[j]; });
    transpose(blocks);
    each<LANES>([&](auto block) ALWAYS {
        Parts part = shuffled((Parts)blocks[block], Parts{}, [](int k) { return 4 * (k % LANES) + k / LANES; });
        std::memcpy(rows + block * stride, &part, LANES * count);
    });
}

}  // namespace
