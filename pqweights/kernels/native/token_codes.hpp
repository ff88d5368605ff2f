// The codes of tokens: those of a token's coordinates are packed as section 5 of docs/format.md packs a block, with
// their number in place of 128. A field of whole vectors is read as it is packed; other codes become bytes first.
#pragma once

#include "codes.hpp"
#include "conversions.hpp"
#include "table.hpp"
#include "tiles.hpp"

namespace {

constexpr int MOST_ROWS = 16, MOST_SIZE = 256;  // as in kernels/attention.py
// Bytes from one token to the next where codes are unpacked: unpack_tokens writes beyond the last coordinate.
constexpr int UNPACKED_ROW = MOST_SIZE + LANES;

// Of a width that is read as it is packed, or 8: the bits of the first field, and how many of them a byte has.
template <int width>
constexpr int FIRST_FIELD = width == 3 ? 2 : width;
template <int width>
constexpr int PARTS = 8 / FIRST_FIELD<width>;

// Whether codes of a width are read as they are packed: every field begins and ends with a vector.
INLINE bool is_read_packed(int64_t size, int64_t bits) {
    return (bits <= 4 || bits == 8) && size * (bits == 3 ? 1 : bits) % (8 * LANES) == 0;
}

// How often load_codes is called for a token.
template <int width>
INLINE int64_t loads_of_token(int64_t size) { return size / (LANES * PARTS<width>); }

// The first coordinate of part `part` of load_codes.
template <int width>
INLINE int64_t coordinate(int64_t size, int64_t k, int part) { return LANES * k + size / PARTS<width> * part; }

// The codes of sixteen coordinates for each part, junk above them, from the packed codes of a token.
template <int width>
INLINE void load_codes(const uint8_t* token, int64_t size, int64_t k, Unsigned (&codes)[PARTS<width>]) {
    Unsigned packed = converted<Unsigned>(load<Bytes>(token + LANES * k));
    each<PARTS<width>>([&](auto part) ALWAYS { codes[part] = packed >> (FIRST_FIELD<width> * part); });
    if constexpr (width == 3) {
        // The field of one bit has half the bytes of that of two, so in its bytes are two halves of each part.
        int64_t half = size / 8, second = LANES * k >= half;
        const uint8_t* at = token + 2 * half + LANES * k - second * half;
        Unsigned bit = converted<Unsigned>(load<Bytes>(at)) << 2 >> int(second);
        each<4>([&](auto part) ALWAYS { codes[part] = (codes[part] & 3) | ((bit >> (2 * part)) & 4); });
    }
}

// Write a part of a field of a run, sixteen codes at a time, for all tokens; where `place` is not 0, to codes that have
// the fields below.
INLINE void unpack_part(const uint8_t* packed, int64_t stride, int64_t tokens, int64_t bytes, int field, int part,
                        int place, uint8_t* out, int64_t out_stride) {
    using Pairs = Vector<uint16_t, LANES / 2>;  // as there are no shifts of bytes
    const Bytes lane = lanes_of<Bytes>([](int lane) ALWAYS { return lane; });
    for (int64_t piece = 0; piece < bytes; piece += LANES) {
        const Bytes inside = (Bytes)(lane < splat<Bytes>(bytes - piece < LANES ? bytes - piece : LANES));
        const Bytes mask = splat<Bytes>((1 << field) - 1) & inside;
        const uint8_t* from = packed + piece;
        uint8_t* to = out + piece;
        auto code = [&](int64_t token) ALWAYS {
            return (Bytes)(load<Pairs>(from + token * stride) >> (field * part)) & mask;
        };
        if (place) {
            for (int64_t token = 0; token < tokens; token++) {
                Bytes moved = (Bytes)((Pairs)code(token) << place);
                store(load<Bytes>(to + token * out_stride) | moved, to + token * out_stride);
            }
        } else {
            for (int64_t token = 0; token < tokens; token++) store(code(token), to + token * out_stride);
        }
    }
}

// Write the codes of a run of some tokens as bytes; `count` codes of `bits` bits are packed together.
//
// Sixteen bytes are always read and written, of which those beyond the run are junk: so behind the last ones of both
// there must be 15 more.
INLINE void unpack_tokens(const uint8_t* packed, int64_t stride, int64_t tokens, int64_t count, int64_t bits,
                          uint8_t* out, int64_t out_stride) {
    for (int field = 8, place = 0; field; field /= 2) {
        if (!(bits & field)) continue;
        int64_t bytes = count * field / 8;
        for (int part = 0; part < 8 / field; part++) {
            unpack_part(packed, stride, tokens, bytes, field, part, place, out + part * bytes, out_stride);
        }
        packed += bytes;
        place += field;
    }
}

// The codes of up to `most` tokens of one width, to be read by load_codes<width>: as they are packed, or as bytes.
template <int bits, bool packed, int most>
struct TokenCodes {
    static constexpr int width = packed ? bits : 8;
    const int64_t size, packed_stride = size * bits / 8, stride = packed ? packed_stride : UNPACKED_ROW;
    uint8_t copied[packed ? 1 : most * MOST_SIZE + LANES], unpacked[packed ? 1 : most * UNPACKED_ROW];

    INLINE explicit TokenCodes(int64_t size) : size(size) {}

    // Those of `count` tokens from `token` on.
    INLINE const uint8_t* of(const uint8_t* codes, int64_t token, int64_t count) {
        codes += token * packed_stride;
        if constexpr (packed) return codes;
        std::memcpy(copied, codes, count * packed_stride);  // as what is behind the last token may be read
        unpack_tokens(copied, packed_stride, count, size, bits, unpacked, UNPACKED_ROW);
        return unpacked;
    }
};

// Call body(bits, packed), both constants, for a width from 2 to 8.
template <class Body>
INLINE void with_token_codes(int64_t bits, int64_t size, Body body) {
    each<7>([&](auto i) ALWAYS {
        constexpr std::integral_constant<int, i + 2> width;
        if (bits != width) return;
        if constexpr (width == 8) return body(width, std::true_type{});
        if constexpr (width <= 4) {
            if (is_read_packed(size, bits)) return body(width, std::true_type{});
        }
        body(width, std::false_type{});
    });
}

// The table of levels for codes with junk above them; in `room`, again and again, if they do not fill a vector.
template <int bits>
INLINE Table<ENTRIES<bits>> level_table(const float* levels, float (&room)[LANES]) {
    if constexpr (bits < 4) {
        for (int i = 0; i < LANES; i++) room[i] = levels[i % (1 << bits)];
        levels = room;
    }
    return Table<ENTRIES<bits>>(levels);
}

}  // namespace
