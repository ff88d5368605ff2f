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

// The 32 codes of Q5_0 and Q5_1: the highest bits, that of code 0 the lowest of a little-endian word, and the others.
struct FiveBits {
    Codes high[4], low[16];

    INLINE void pack(const Fields& from) {
        uint32_t word = 0;
        for (int i = 0; i < 32; i++) word |= uint32_t(from.codes[i] >> 4) << i;
        std::memcpy(high, &word, sizeof high);
        fold<4, 16>(from.codes, low);
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

struct Q8_0 : Symmetric {
    static constexpr int TYPE = 8, LOWEST = -128, HIGHEST = 127;
    Half d;
    Codes codes[32];

    INLINE void pack(const Fields& from) {
        d = from.d;
        for (int i = 0; i < 32; i++) codes[i] = from.codes[i] ^ 128;  // counted from 0
    }
};

struct Q5_0 : Symmetric {
    static constexpr int TYPE = 6, LOWEST = -16, HIGHEST = 15;
    Half d;
    FiveBits codes;

    INLINE void pack(const Fields& from) {
        d = from.d;
        codes.pack(from);
    }
};

struct Q4_0 : Symmetric {
    static constexpr int TYPE = 2, LOWEST = -8, HIGHEST = 7;
    Half d;
    Codes codes[16];

    INLINE void pack(const Fields& from) {
        d = from.d;
        fold<4, 16>(from.codes, codes);
    }
};

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

// The values of the codes of IQ4_NL and IQ4_XS.
constexpr float IQ4_VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct IQ4_NL : Q4_0 {
    static constexpr int TYPE = 20, LOWEST = -127, HIGHEST = 113;
    static constexpr bool HAS_TABLE = true;
};

struct IQ4_XS : Symmetric {
    static constexpr int TYPE = 23, PARTS = 8, LOWEST = -127, HIGHEST = 113;
    static constexpr int LEAST_FACTOR = -32, MOST_FACTOR = 31, FACTORS_TRIED = 4;
    static constexpr bool HAS_TABLE = true;
    Half d;
    Codes high_scales[2], low_scales[4], codes[128];

    INLINE void pack(const Fields& from) {
        d = from.d;
        fold<2, 1>(from.scales, high_scales, 4);
        fold<4, 1>(from.scales, low_scales);
        fold<4, 16>(from.codes, codes);
    }
};

// --- affine formats; codes count from 0 to LAST_CODE, scales and offsets from 0 to LAST_LEVEL ---

struct Q4_1 {
    static constexpr int TYPE = 3, PARTS = 1, PART_SIZE = 32, LAST_CODE = 15, LAST_LEVEL = 1, ROUNDS = 2;
    Half d, dmin;  // dmin: with the other sign, and of any sign
    Codes codes[16];

    INLINE void pack(const Fields& from) {
        d = from.d, dmin = from.dmin;
        fold<4, 16>(from.codes, codes);
    }
};

struct Q5_1 {
    static constexpr int TYPE = 7, PARTS = 1, PART_SIZE = 32, LAST_CODE = 31, LAST_LEVEL = 1, ROUNDS = 2;
    Half d, dmin;
    FiveBits codes;

    INLINE void pack(const Fields& from) {
        d = from.d, dmin = from.dmin;
        codes.pack(from);
    }
};

// The scales and offsets of Q4_K and Q5_K, 6 bits each: those of four parts, with the highest two bits of the other
// four above them, and the low four bits of these.
struct SixBits {
    uint8_t scales[4], offsets[4], rest[4];

    INLINE void pack(const Fields& from) {
        for (int i = 0; i < 4; i++) {
            scales[i] = from.scales[i] | from.scales[i + 4] >> 4 << 6;
            offsets[i] = from.offsets[i] | from.offsets[i + 4] >> 4 << 6;
            rest[i] = (from.scales[i + 4] & 15) | (from.offsets[i + 4] & 15) << 4;
        }
    }
};

struct Q4_K {
    static constexpr int TYPE = 12, PARTS = 8, PART_SIZE = 32, LAST_CODE = 15, LAST_LEVEL = 63, ROUNDS = 2;
    Half d, dmin;
    SixBits levels;
    Codes codes[128];

    INLINE void pack(const Fields& from) {
        d = from.d, dmin = from.dmin;
        levels.pack(from);
        fold<4, 32>(from.codes, codes);
    }
};

struct Q5_K {
    static constexpr int TYPE = 13, PARTS = 8, PART_SIZE = 32, LAST_CODE = 31, LAST_LEVEL = 63, ROUNDS = 2;
    Half d, dmin;
    SixBits levels;
    Codes high[32], low[128];

    INLINE void pack(const Fields& from) {
        d = from.d, dmin = from.dmin;
        levels.pack(from);
        fold<1, 32>(from.codes, high, 4);
        fold<4, 32>(from.codes, low);
    }
};

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
