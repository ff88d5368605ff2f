// Items of 1, 2 or 4 bytes without loss, in chunks that are coded apart: section 11 of docs/format.md.
//
// An item is rotated by a bit to the left, which puts the exponent of a float into its highest byte. That byte is coded
// by range ANS, as in trellis_entropy.hpp, with 32 interleaved states; the bytes below it are stored as they are, in
// planes: the lowest bytes of all items, then the next ones.
#pragma once

#include "trellis_entropy.hpp"

namespace {

constexpr int64_t CHUNK = 1 << 16;  // items
constexpr int SYMBOLS = 256, TOTAL = 1 << NUMBER_BITS;
constexpr int TOGETHER = 2, STATES = TOGETHER * LANES;
constexpr uint8_t STORED = 0, CODED = 1;  // the first byte of a chunk: whether it has the items themselves
enum ChunkStatus { WHOLE, BAD_LENGTH, BAD_FREQUENCIES, BAD_WORDS };

// Words that a chunk takes at most; and what a decoder may take before it looks for the end, and read beyond it.
constexpr int64_t MOST_WORDS = CHUNK, STEPS_UNCHECKED = 32;
constexpr int64_t SPARE_WORDS = STATES * (STEPS_UNCHECKED + 1);

template <int width>
using Item = std::conditional_t<width == 1, uint8_t, std::conditional_t<width == 2, uint16_t, uint32_t>>;

// An item of so many bytes, rotated by a bit to the left, and the inverse.
template <int width, class V>
INLINE V rotated(V x) { return x << 1 | x >> (8 * width - 1); }
template <int width, class V>
INLINE V rotated_back(V x) { return x >> 1 | x << (8 * width - 1); }

// body(width), a constant.
template <class Body>
INLINE void with_width(int64_t width, Body body) {
    if (width == 1) body(std::integral_constant<int, 1>{});
    else if (width == 2) body(std::integral_constant<int, 2>{});
    else body(std::integral_constant<int, 4>{});
}

}  // namespace
