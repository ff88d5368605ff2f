// The block formats of GGUF, and how their codes become bytes: as ggml/src/ggml-common.h of llama.cpp defines them.
//
// A block has parts of equal size. Its weights are d * scale * value(code) in the symmetric formats, and
// d * scale * code - dmin * offset in the affine ones. d and dmin are F16; the scale and the offset of a part are whole
// numbers, and 1 where a block has one part.
#pragma once

#include "conversions.hpp"

namespace {

// What encoders are compiled for: how many parts a block has, of how many weights, and what else makes a difference to
// them. The other numbers of a format are its LIMITS, which they get as they run.
template <int parts, int part_size, int kind = 0>
struct Shape {
    static constexpr int PARTS = parts, PART_SIZE = part_size, KIND = kind;
    using Of = Shape;
};

using Half = uint16_t;  // the bits of an F16
using Codes = uint8_t;  // some bits of several codes in each byte

// What a block is packed from: codes and scales, both counted from the lowest; d and dmin. Of grids: the numbers of points,
// and for each eight weights which have a minus sign, or whether their shift has one.
struct Fields {
    uint8_t codes[256], scales[16], offsets[16];
    Half d, dmin;
    uint16_t points[64];
    uint8_t signs[32];
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

// The numbers of points: their low bytes, and some bits more of each.
template <int bits, size_t count>
INLINE void split(const uint16_t* points, uint8_t (&low)[count], Codes (&high)[count * bits / 8]) {
    uint8_t upper[count];
    for (size_t i = 0; i < count; i++) low[i] = uint8_t(points[i]), upper[i] = uint8_t(points[i] >> 8);
    fold<bits, 1>(upper, high);
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

// Codes stand for the whole numbers from `lowest` to `highest`, for IQ4_VALUES, or for -1 and 1. A part's scale is its
// factor in gguf_symmetric.cpp, which tries some at each d.
enum Values { WHOLE, TABLE, SIGNS };
struct SymmetricLimits {
    float lowest, highest, least_factor = 1, most_factor = 1;
    int factors_tried = 0;
};

template <int type, int lowest, int highest, class PackedCodes, Values values = WHOLE>
struct OnePart : Shape<1, 32, values> {
    static constexpr int TYPE = type;
    static constexpr SymmetricLimits LIMITS = {lowest, highest};
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

using Q8_0 = OnePart<8, -128, 127, SignedBytes>;
using Q5_0 = OnePart<6, -16, 15, FiveBits<32, 1, 16>>;
using Q4_0 = OnePart<2, -8, 7, FourBits<32, 16>>;
using IQ4_NL = OnePart<20, -127, 113, FourBits<32, 16>, TABLE>;

// -1 and 1.
struct Q1_0 : Shape<1, 128, SIGNS> {
    static constexpr int TYPE = 41;
    static constexpr SymmetricLimits LIMITS = {-1, 1};
    Half d;
    Codes codes[16];

    INLINE void pack(const Fields& from) {
        d = from.d;
        fold<1, 1>(from.codes, codes);
    }
};

// -1, 0, 1 and 2.
struct Q2_0 : Shape<1, 64, WHOLE> {
    static constexpr int TYPE = 42;
    static constexpr SymmetricLimits LIMITS = {-1, 2};
    Half d;
    Codes codes[16];

    INLINE void pack(const Fields& from) {
        d = from.d;
        fold<2, 1>(from.codes, codes);
    }
};

// -1, 0 and 1.
struct Ternary : Shape<1, 256, WHOLE> {
    static constexpr SymmetricLimits LIMITS = {-1, 1};
};

struct TQ2_0 : Ternary {
    static constexpr int TYPE = 35;
    Codes codes[64];
    Half d;

    INLINE void pack(const Fields& from) {
        fold<2, 32>(from.codes, codes);
        d = from.d;
    }
};

// Bytes of five digits, which are multiplied by three again and again: a digit is what then exceeds the byte. In each run
// of bytes, the first digits come first, then the second ones. The last bytes lack the fifth digit.
struct TQ1_0 : Ternary {
    static constexpr int TYPE = 34;
    Codes codes[52];
    Half d;

    INLINE void pack(const Fields& from) {
        digits<32, 5>(from.codes, codes);
        digits<16, 5>(from.codes + 160, codes + 32);
        digits<4, 4>(from.codes + 240, codes + 48);
        d = from.d;
    }

    template <int run, int held>
    INLINE static void digits(const uint8_t* from, Codes* to) {
        for (int i = 0; i < run; i++) {
            int number = 0;
            for (int digit = 0; digit < 5; digit++) number = number * 3 + (digit < held ? from[digit * run + i] : 0);
            to[i] = Codes((number * 256 + 242) / 243);
        }
    }
};

struct Q6_K : Shape<16, 16, WHOLE> {
    static constexpr int TYPE = 14;
    static constexpr SymmetricLimits LIMITS = {-32, 31, -128, 127, 24};
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

struct Q3_K : Shape<16, 16, WHOLE> {
    static constexpr int TYPE = 11;
    static constexpr SymmetricLimits LIMITS = {-4, 3, -32, 31, 4};
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

struct IQ4_XS : Shape<8, 32, TABLE> {
    static constexpr int TYPE = 23;
    static constexpr SymmetricLimits LIMITS = {-127, 113, -32, 31, 4};
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

// --- affine formats ---

// Codes count from 0 to `last_code`, scales and offsets from 0 to `last_level`; for these, there are some rounds.
struct AffineLimits {
    float last_code, last_level;
    int rounds;
};

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
struct Affine : Shape<Levels::PARTS, 32> {
    static constexpr int TYPE = type;
    static constexpr AffineLimits LIMITS = {last_code, Levels::LAST, 2};
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

struct Q2_K : Shape<16, 16> {
    static constexpr int TYPE = 10;
    static constexpr AffineLimits LIMITS = {3, 15, 3};
    uint8_t levels[16];
    Codes codes[64];
    Half d, dmin;

    INLINE void pack(const Fields& from) {
        for (int part = 0; part < 16; part++) levels[part] = from.scales[part] | from.offsets[part] << 4;
        fold<2, 32>(from.codes, codes);
        d = from.d, dmin = from.dmin;
    }
};

// --- formats of grids: gguf_grids.cpp ---

// A scale is d times an odd number, the level of a part times two and one more; of these there are `factors`. Points
// have four or eight weights, and signs of their own, of which the last of eight may follow from the others. Or all
// coordinates of `shift_run` weights are raised by SHIFT, or lowered.
enum Points { OF_FOUR, OF_EIGHT, SHIFTED };
struct GridLimits {
    int factors = 16;
    bool even_signs = false;
    int shift_run = 0;
};
constexpr float SHIFT = 0.125f;

template <int type, int parts, Points points>
struct OfGrid : Shape<parts, 256 / parts, points> {
    static constexpr int TYPE = type;
};

// Of 32 weights, four times seven signs, of which the eighth follows, and a level.
INLINE uint32_t signs_and_level(const Fields& from, int part) {
    uint32_t word = uint32_t(from.scales[part]) << 28;
    for (int i = 0; i < 4; i++) word |= (from.signs[4 * part + i] & 127u) << 7 * i;
    return word;
}

struct IQ2_XXS : OfGrid<16, 8, OF_EIGHT> {
    static constexpr GridLimits LIMITS = {16, true};
    Half d;
    uint16_t parts[8][4];

    INLINE void pack(const Fields& from) {
        d = from.d;
        for (int part = 0; part < 8; part++) {
            for (int i = 0; i < 2; i++) {
                parts[part][i] = uint16_t(from.points[4 * part + 2 * i] | from.points[4 * part + 2 * i + 1] << 8);
                parts[part][2 + i] = uint16_t(signs_and_level(from, part) >> 16 * i);
            }
        }
    }
};

struct IQ2_XS : OfGrid<17, 16, OF_EIGHT> {
    static constexpr GridLimits LIMITS = {16, true};
    Half d;
    uint16_t points[32];
    Codes levels[8];

    INLINE void pack(const Fields& from) {
        d = from.d;
        for (int i = 0; i < 32; i++) points[i] = uint16_t(from.points[i] | (from.signs[i] & 127) << 9);
        fold<4, 1>(from.scales, levels);
    }
};

struct IQ2_S : OfGrid<22, 16, OF_EIGHT> {
    static constexpr GridLimits LIMITS = {};
    Half d;
    uint8_t low[32], signs[32];
    Codes high[8], levels[8];

    INLINE void pack(const Fields& from) {
        d = from.d;
        split<2>(from.points, low, high);
        std::memcpy(signs, from.signs, sizeof signs);
        fold<4, 1>(from.scales, levels);
    }
};

struct IQ3_XXS : OfGrid<18, 8, OF_FOUR> {
    static constexpr GridLimits LIMITS = {16, true};
    Half d;
    uint8_t points[64];
    uint16_t signs[8][2];

    INLINE void pack(const Fields& from) {
        d = from.d;
        for (int i = 0; i < 64; i++) points[i] = uint8_t(from.points[i]);
        for (int part = 0; part < 8; part++) {
            for (int i = 0; i < 2; i++) signs[part][i] = uint16_t(signs_and_level(from, part) >> 16 * i);
        }
    }
};

struct IQ3_S : OfGrid<21, 8, OF_FOUR> {
    static constexpr GridLimits LIMITS = {};
    Half d;
    uint8_t low[64];
    Codes high[8];
    uint8_t signs[32];
    Codes levels[4];

    INLINE void pack(const Fields& from) {
        d = from.d;
        split<1>(from.points, low, high);
        std::memcpy(signs, from.signs, sizeof signs);
        fold<4, 1>(from.scales, levels);
    }
};

struct IQ1_S : OfGrid<19, 8, SHIFTED> {
    static constexpr GridLimits LIMITS = {8, false, 32};
    Half d;
    uint8_t low[32];
    uint16_t rest[8];

    INLINE void pack(const Fields& from) {
        d = from.d;
        for (int part = 0; part < 8; part++) {
            int word = from.scales[part] << 12 | from.signs[4 * part] << 15;
            for (int i = 0; i < 4; i++) word |= from.points[4 * part + i] >> 8 << 3 * i;
            rest[part] = uint16_t(word);
        }
        for (int i = 0; i < 32; i++) low[i] = uint8_t(from.points[i]);
    }
};

// Its d has four bits above the levels of each four parts.
struct IQ1_M : OfGrid<29, 16, SHIFTED> {
    static constexpr GridLimits LIMITS = {8, false, 8};
    uint8_t low[32], high[16];
    uint16_t levels[4];

    INLINE void pack(const Fields& from) {
        for (int i = 0; i < 32; i++) low[i] = uint8_t(from.points[i]);
        for (int i = 0; i < 16; i++) {
            high[i] = 0;
            for (int k = 0; k < 2; k++) {
                high[i] |= uint8_t((from.points[2 * i + k] >> 8 | from.signs[2 * i + k] << 3) << 4 * k);
            }
        }
        for (int i = 0; i < 4; i++) {
            levels[i] = uint16_t((from.d >> 4 * i & 15) << 12);
            for (int k = 0; k < 4; k++) levels[i] |= uint16_t(from.scales[4 * i + k] << 3 * k);
        }
    }
};

static_assert(sizeof(Q8_0) == 34 && sizeof(Q6_K) == 210 && sizeof(Q5_K) == 176 && sizeof(Q5_1) == 24);
static_assert(sizeof(Q5_0) == 22 && sizeof(Q4_1) == 20 && sizeof(Q4_K) == 144 && sizeof(Q4_0) == 18);
static_assert(sizeof(Q1_0) == 18 && sizeof(Q2_0) == 18 && sizeof(TQ2_0) == 66 && sizeof(TQ1_0) == 54);
static_assert(sizeof(IQ4_NL) == 18 && sizeof(IQ4_XS) == 136 && sizeof(Q3_K) == 110 && sizeof(Q2_K) == 84);

static_assert(sizeof(IQ2_XXS) == 66 && sizeof(IQ2_XS) == 74 && sizeof(IQ2_S) == 82 && sizeof(IQ3_XXS) == 98);
static_assert(sizeof(IQ3_S) == 110 && sizeof(IQ1_S) == 50 && sizeof(IQ1_M) == 56);

// Weights of a block.
template <class Shape>
constexpr int SIZE = Shape::PARTS * Shape::PART_SIZE;

}  // namespace
