// The block formats of GGUF, and how their codes become bytes: as ggml/src/ggml-common.h of llama.cpp defines them.
//
// A block has parts of equal size. Its weights are d * scale * value(code) in the symmetric formats, and
// d * scale * code - dmin * offset in the affine ones. d and dmin are F16; the scale and the offset of a part are whole
// numbers, and 1 where a block has one part.
#pragma once

#include "conversions.hpp"

namespace {

using Half = uint16_t;  // the bits of an F16
using Codes = uint8_t;  // some bits of several codes in each byte

// What a block is packed from: codes and scales, both counted from the lowest; d and dmin.
struct Fields {
    uint8_t codes[256], scales[16], offsets[16];
    Half d, dmin;
};

// Put `bits` bits of each code, from bit `lowest` on, beside those of the codes `run`, 2 * run, ... further on.
template <int bits, int run, size_t count>
INLINE void fold(const uint8_t* codes, Codes (&bytes)[count], int lowest = 0) {
    constexpr int shared = 8 / bits;  // codes of a byte
    for (size_t first = 0; first < count; first += run) {
        for (int i = 0; i < run; i++) {
            uint8_t byte = 0;
            for (int k = 0; k < shared; k++) {
                byte |= ((codes[first * shared + k * run + i] >> lowest) & ((1 << bits) - 1)) << (k * bits);
            }
            bytes[first + i] = byte;
        }
    }
}

// The codes of a block of so many weights: the low four bits of two codes in each byte, which lie `run` codes apart.
template <int weights, int run>
struct FourBits {
    Codes low[weights / 2];

    INLINE void pack(const uint8_t* codes) { fold<4, run>(codes, low); }
};

// The same, after the highest bits, of eight codes in each byte.
template <int weights, int high_run, int run>
struct FiveBits {
    Codes high[weights / 8], low[weights / 2];

    INLINE void pack(const uint8_t* codes) {
        fold<1, high_run>(codes, high, 4);
        fold<4, run>(codes, low);
    }
};

// --- symmetric formats ---

// Codes stand for whole numbers, from LOWEST to HIGHEST, or IQ4_VALUES says for which. A part's scale is its factor
// in gguf_symmetric.cpp, which tries some at each d.
struct Symmetric {
    static constexpr int PARTS = 1, PART_SIZE = 32;
    static constexpr int LEAST_FACTOR = 1, MOST_FACTOR = 1, FACTORS_TRIED = 0;
    static constexpr bool HAS_TABLE = false;
};

template <int type, int lowest, int highest, class PackedCodes, bool has_table = false>
struct OnePart : Symmetric {
    static constexpr int TYPE = type, LOWEST = lowest, HIGHEST = highest;
    static constexpr bool HAS_TABLE = has_table;
    Half d;
    PackedCodes codes;

    INLINE void pack(const Fields& from) {
        d = from.d;
        codes.pack(from.codes);
    }
};

// Codes that are counted from the middle.
struct SignedBytes {
    int8_t codes[32];

    INLINE void pack(const uint8_t* from) {
        for (int i = 0; i < 32; i++) codes[i] = int8_t(from[i] ^ 128);
    }
};

// The values of the codes of IQ4_NL and IQ4_XS.
constexpr float IQ4_VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

using Q8_0 = OnePart<8, -128, 127, SignedBytes>;
using Q5_0 = OnePart<6, -16, 15, FiveBits<32, 1, 16>>;
using Q4_0 = OnePart<2, -8, 7, FourBits<32, 16>>;
using IQ4_NL = OnePart<20, -127, 113, FourBits<32, 16>, true>;

struct Q6_K : Symmetric {
    static constexpr int TYPE = 14, PARTS = 16, PART_SIZE = 16, LOWEST = -32, HIGHEST = 31;
    static constexpr int LEAST_FACTOR = -128, MOST_FACTOR = 127, FACTORS_TRIED = 24;
    Codes low[128], high[64];
    uint8_t scales[16];
    Half d;

    INLINE void pack(const Fields& from) {
        fold<4, 64>(from.codes, low);
        fold<2, 32>(from.codes, high, 4);
        for (int part = 0; part < 16; part++) scales[part] = from.scales[part] ^ 128;  // counted from 0
        d = from.d;
    }
};

struct Q3_K : Symmetric {
    static constexpr int TYPE = 11, PARTS = 16, PART_SIZE = 16, LOWEST = -4, HIGHEST = 3;
    static constexpr int LEAST_FACTOR = -32, MOST_FACTOR = 31, FACTORS_TRIED = 4;
    Codes high[32], low[64], low_scales[8], high_scales[4];
    Half d;

    INLINE void pack(const Fields& from) {
        fold<1, 32>(from.codes, high, 2);
        fold<2, 32>(from.codes, low);
        fold<4, 8>(from.scales, low_scales);
        fold<2, 4>(from.scales, high_scales, 4);
        d = from.d;
    }
};

struct IQ4_XS : Symmetric {
    static constexpr int TYPE = 23, PARTS = 8, LOWEST = -127, HIGHEST = 113;
    static constexpr int LEAST_FACTOR = -32, MOST_FACTOR = 31, FACTORS_TRIED = 4;
    static constexpr bool HAS_TABLE = true;
    Half d;
    Codes high_scales[2], low_scales[4];
    FourBits<256, 16> codes;

    INLINE void pack(const Fields& from) {
        d = from.d;
        fold<2, 1>(from.scales, high_scales, 4);
        fold<4, 1>(from.scales, low_scales);
        codes.pack(from.codes);
    }
};

// --- affine formats; codes count from 0 to LAST_CODE, scales and offsets from 0 to LAST_LEVEL ---

// No levels, where a block has one part.
struct NoLevels {
    static constexpr int PARTS = 1, LAST = 1;
    INLINE void pack(const Fields&) {}
};

// The levels of eight parts, 6 bits each: those of four scales and of four offsets, with the highest two bits of the
// other four above them, and the low four bits of these.
struct SixBits {
    static constexpr int PARTS = 8, LAST = 63;
    uint8_t scales[4], offsets[4], rest[4];

    INLINE void pack(const Fields& from) {
        for (int i = 0; i < 4; i++) {
            scales[i] = from.scales[i] | from.scales[i + 4] >> 4 << 6;
            offsets[i] = from.offsets[i] | from.offsets[i + 4] >> 4 << 6;
            rest[i] = (from.scales[i + 4] & 15) | (from.offsets[i + 4] & 15) << 4;
        }
    }
};

template <int type, int last_code, class Levels, class PackedCodes>
struct Affine {
    static constexpr int TYPE = type, PARTS = Levels::PARTS, PART_SIZE = 32;
    static constexpr int LAST_CODE = last_code, LAST_LEVEL = Levels::LAST, ROUNDS = 2;
    Half d, dmin;  // dmin of one part: with the other sign, and of any sign
    [[no_unique_address]] Levels levels;
    PackedCodes codes;

    INLINE void pack(const Fields& from) {
        d = from.d, dmin = from.dmin;
        levels.pack(from);
        codes.pack(from.codes);
    }
};

using Q4_1 = Affine<3, 15, NoLevels, FourBits<32, 16>>;
using Q5_1 = Affine<7, 31, NoLevels, FiveBits<32, 1, 16>>;
using Q4_K = Affine<12, 15, SixBits, FourBits<256, 32>>;
using Q5_K = Affine<13, 31, SixBits, FiveBits<256, 32, 32>>;

struct Q2_K {
    static constexpr int TYPE = 10, PARTS = 16, PART_SIZE = 16, LAST_CODE = 3, LAST_LEVEL = 15, ROUNDS = 3;
    uint8_t levels[16];
    Codes codes[64];
    Half d, dmin;

    INLINE void pack(const Fields& from) {
        for (int part = 0; part < 16; part++) levels[part] = from.scales[part] | from.offsets[part] << 4;
        fold<2, 32>(from.codes, codes);
        d = from.d, dmin = from.dmin;
    }
};

static_assert(sizeof(Q8_0) == 34 && sizeof(Q6_K) == 210 && sizeof(Q5_K) == 176 && sizeof(Q5_1) == 24);
static_assert(sizeof(Q5_0) == 22 && sizeof(Q4_1) == 20 && sizeof(Q4_K) == 144 && sizeof(Q4_0) == 18);
static_assert(sizeof(IQ4_NL) == 18 && sizeof(IQ4_XS) == 136 && sizeof(Q3_K) == 110 && sizeof(Q2_K) == 84);

// Weights of a block.
template <class Format>
constexpr int SIZE = Format::PARTS * Format::PART_SIZE;

}  // namespace
