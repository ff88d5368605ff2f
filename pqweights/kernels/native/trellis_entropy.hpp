// The entropy coder of hadamard-trellis: sixteen interleaved states of range ANS (Duda, arXiv:1311.2540), one for each
// lane. Section 8 of docs/format.md has the decoder's steps; an encoder takes them back, from the last to the first.
#pragma once

#include "hadamard.hpp"

namespace {

constexpr int HEADER_BYTES = 7;                  // of a superblock, before the frequencies
constexpr int CLASSES = 256;
constexpr int TILE_WORDS = (BLOCK + 1) * LANES;  // that sixteen blocks take at most
constexpr int CLASS_BITS = 8, NUMBER_BITS = 12;  // of a state, those that choose a class or a bucket
constexpr uint32_t LEAST = 1 << 16;              // of a state between steps; with it an encoder begins, a decoder ends

using Shorts = Vector<int16_t, LANES>;  // sixteen numbers

// What flips in the next state of the trellis if n is odd, and if k is: Ungerboeck's parity-check polynomials of rate
// 1/2 (IEEE Trans. Inf. Theory IT-28, 1982) without their lowest bits.
struct Trellis {
    uint32_t if_odd, if_k_odd;
};

// By the bits of a state; 0 where there is no such trellis.
constexpr int MOST_STATE_BITS = 8;
constexpr Trellis TRELLISES[MOST_STATE_BITS + 1] = {
    {},                   {},                    {05 >> 1, 02 >> 1},     {013 >> 1, 04 >> 1},   {023 >> 1, 04 >> 1},
    {045 >> 1, 010 >> 1}, {0103 >> 1, 024 >> 1}, {0235 >> 1, 0126 >> 1}, {0515 >> 1, 0362 >> 1}};

// --- decoding ---

#if !defined(__AVX512F__)
// By a mask of eight lanes, as places of bytes: how many bits of it are set below each lane.
struct Ranks {
    uint8_t bytes[256][LANES];
};
constexpr Ranks RANKS = [] {
    Ranks ranks{};
    for (int mask = 0; mask < 256; mask++)
        for (int byte = 0; byte < LANES; byte++)
            ranks.bytes[mask][byte] = 2 * __builtin_popcount(mask & ((1 << byte / 2) - 1)) + byte % 2;
    return ranks;
}();

// Eight words, from which each lane of the mask takes one in turn; what the others get means nothing.
INLINE Vector<uint16_t, 8> eight_dealt(const uint16_t* words, uint32_t mask) {
    return (Vector<uint16_t, 8>)looked_up(load<Bytes>(words), load<Bytes>(RANKS.bytes[mask]));
}
#endif

// The words from an address on, of which each lane of a mask takes one in turn; what the others get means nothing.
// Reads sixteen words.
INLINE Unsigned dealt(const uint16_t* words, uint32_t mask) {
#if defined(__AVX512F__)
    return (Unsigned)_mm512_maskz_expand_epi32(mask, (__m512i)converted<Unsigned>(load<Words>(words)));
#else
    const uint16_t* behind = words + __builtin_popcount(mask & 255);
    return converted<Unsigned>(joined(eight_dealt(words, mask & 255), eight_dealt(behind, mask >> 8)));
#endif
}

// Give each state that became small the next word; return what follows these. Reads sixteen words.
INLINE const uint16_t* refill(Unsigned& states, const uint16_t* next) {
    const Truths small = states < LEAST;
    const uint32_t mask = mask_of(small);
    states = choose<Unsigned>(small, states << 16 | dealt(next, mask), states);
    return next + __builtin_popcount(mask);
}

// The states after a step. entries: from the lowest bit on: 12 bits, the place s - C within what the state chose; 12
// bits, its frequency less 1.
INLINE Unsigned advanced(Unsigned states, Unsigned entries, int bits) {
    return ((entries >> 12 & 4095) + 1) * (states >> bits) + (entries & 4095);
}

// --- encoding ---

// Write the low words of the lanes of a mask, in the order of the lanes, before an address; return where they begin.
INLINE uint16_t* put_before(uint16_t* end, Unsigned states, uint32_t mask) {
#if defined(__AVX512F__)
    const int count = __builtin_popcount(mask);
    const __m512i packed = _mm512_maskz_compress_epi32(mask, (__m512i)states);
    _mm256_mask_storeu_epi16(end - count, (1u << count) - 1, _mm512_cvtepi32_epi16(packed));
    return end - count;
#else
    each<LANES>([&](int i) ALWAYS {  // a word that does not count is overwritten by the next
        const int lane = LANES - 1 - i;
        end[-1] = uint16_t(states[lane]);
        end -= mask >> lane & 1;
    });
    return end;
#endif
}

// One step of all lanes. entries: those of EncodeTable in formats/trellis_tables.py, for tables of 2**bits. Writes words
// before an address, and one more that does not count; returns where they begin.
INLINE uint16_t* encode_step(Unsigned& states, Unsigned entries, int bits, uint16_t* end) {
    const Unsigned start = entries & 4095, frequency = (entries >> 12 & 4095) + 1;
    const Unsigned low_bits = entries >> 24 & 7, low = entries >> 27;
    const Truths full = states >> (32 - bits - low_bits) >= frequency;
    end = put_before(end, states, mask_of(full));
    const Unsigned x = choose<Unsigned>(full, states >> 16, states) << low_bits | low;
    // A float64 has more bits than x, so rounding does not carry a quotient over the next integer. It is below
    // 2**(32 - bits), as x is below frequency * 2**(32 - bits).
    const Unsigned quotient = (Unsigned)converted<Ints>(converted<Doubles>(x) / converted<Doubles>((Ints)frequency));
    states = (quotient << bits) + (x - quotient * frequency) + start;
    return end;
}

}  // namespace
