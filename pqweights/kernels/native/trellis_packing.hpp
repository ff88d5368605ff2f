// The bytes of a superblock of the codec hadamard-trellis, from its numbers and classes: section 8 of docs/format.md.
// An encoder goes from the last number to the first, so the words are written from their end.
#pragma once

#include "trellis_step.hpp"

namespace {

// f(block) in the lane of each block of a tile.
template <class V, class F>
INLINE V by_block(int tile, F f) {
    V result;
    for (int lane = 0; lane < LANES; lane++) result[lane] = f(tile * LANES + lane);
    return result;
}

// The words so far, and the states of the coder before them.
struct Stream {
    uint16_t *begin, *end;
    Unsigned states = splat(LEAST);

    explicit Stream(uint16_t* end) : begin(end), end(end) {}
    int64_t byte_count() const { return 2 * (end - begin); }
};

// Encode the numbers of a tile, [128, 16].
inline void encode_numbers(Stream& stream, const Classes& classes, int tile, const int16_t* numbers,
                           const ClassModel& model) {
    auto zeros = [&](int parity) {  // where k = 0 is in the table
        return by_block<Ints>(tile, [&](int block) { return model.zero[2 * classes.at(block) + parity]; });
    };
    const Ints even = zeros(0), odd = zeros(1);
    Unsigned states = stream.states;
    uint16_t* begin = stream.begin;
    for (int t = BLOCK - 1; t >= 0; t--) {
        const Ints n = converted<Ints>(load<Shorts>(numbers + LANES * t));
        const Ints place = (n >> 1) + choose<Ints>((n & 1) != 0, odd, even);
        begin = encode_step(states, gathered<Unsigned>(model.entries, place), NUMBER_BITS, begin);
    }
    stream.states = states, stream.begin = begin;
}

// Encode the classes of a tile; lanes without a block stay as they are.
inline void encode_classes(Stream& stream, const Classes& classes, int tile) {
    const Unsigned entries = by_block<Unsigned>(tile, [&](int block) {
        const int c = classes.at(block);
        return block < classes.blocks ? uint32_t(classes.starts[c] | (classes.shares[c] - 1) << 12) : 255u << 12;
    });
    stream.begin = encode_step(stream.states, entries, CLASS_BITS, stream.begin);
}

// The bytes that a superblock takes.
inline int64_t packed_bytes(const Classes& classes, const Stream& stream) {
    return HEADER_BYTES + classes.stored_shares() + 4 * classes.lanes() + stream.byte_count();
}

// Write a superblock; return where it ends.
inline uint8_t* pack(uint8_t* to, const Classes& classes, const Stream& stream, float step, int state_bits) {
    std::memcpy(to, &step, 4);
    to[4] = uint8_t(state_bits), to[5] = uint8_t(classes.first), to[6] = uint8_t(classes.end - classes.first);
    to += HEADER_BYTES;
    for (int i = 0; i < classes.stored_shares(); i++) *to++ = uint8_t(classes.shares[classes.first + i]);
    std::memcpy(to, &stream.states, 4 * classes.lanes());
    to += 4 * classes.lanes();
    std::memcpy(to, stream.begin, stream.byte_count());
    return to + stream.byte_count();
}

}  // namespace
