// Decodes superblocks of the codec hadamard-trellis to coordinates, whatever their bytes are: section 8 of
// docs/format.md.
//
// A tile is sixteen blocks in the sixteen lanes. Two superblocks are decoded side by side, because each step of one
// waits for the step before it.
#pragma once

#include "trellis_entropy.hpp"

namespace {

enum Status : int64_t { SOUND, BAD_HEADER, BAD_STREAM };

// What classes mean.
struct Tables {
    const uint32_t* entries;  // [tables, 2 parities, 4096]: 12 bits s - C, 12 bits F - 1, a bit for tails, 7 bits K
    const int32_t* of;        // [256]: of each class
    const int32_t* widths;    // [tables, 2]: the low bits of buckets of the core, and of the tails
    const double* gains;      // [256]: what a number of each class is multiplied by, besides the step
};

// What a step changes.
struct Place {
    Unsigned states = splat(LEAST), paths{};  // of the coder, and of the trellis
    const uint16_t* next;                     // word of the stream
};

// One of the two that are decoded side by side. Without tiles, and behind its last one, it takes no words.
struct Superblock {
    const uint8_t* row = nullptr;
    int64_t length = 0;                       // in bytes
    Status status = SOUND;
    int64_t tiles = 0;
    double step = 0;
    Trellis trellis{};
    uint16_t* stream;                         // [room_words(length)]: the words, and zeros
    const uint16_t* end;                      // of the words
    uint32_t classes[CLASSES];                // by the lowest byte of a state: 12 bits s - C, 12 bits F - 1, the class
    Place at;
    Unsigned table, core_bits, tail_bits;     // of each block
    Floats scale, raised;                     // what blocks are multiplied by before the rotation, and after it
    Floats rooms[2][BLOCK];
    Floats* work = rooms[0];                  // [128]: the tile

    // The tile, which the next one leaves as it is.
    const Floats* kept_tile() {
        const Floats* tile = work;
        work = rooms[work == rooms[0]];
        return tile;
    }
};
using Pair = Superblock[2];

// The room for the words of a superblock, and for zeros, of which a tile may take some before that is noticed.
INLINE int64_t room_words(int64_t length) { return length / 2 + TILE_WORDS + LANES; }

// --- the header ---

// Fill the table of classes; return whether the frequencies add up to 256.
bool read_classes(const uint8_t* row, uint32_t (&classes)[CLASSES]) {
    const int first = row[5], count = row[6];
    int start = 0;
    for (int i = 0; i < count; i++) {
        const int frequency = count > 1 ? row[HEADER_BYTES + i] : CLASSES;
        if (start + frequency > CLASSES || first + i >= CLASSES) return false;
        for (int s = 0; s < frequency; s++) classes[start + s] = s | (frequency - 1) << 12 | uint32_t(first + i) << 24;
        start += frequency;
    }
    return start == CLASSES;
}

int64_t bytes_before_states(const uint8_t* row) { return HEADER_BYTES + (row[6] > 1 ? row[6] : 0); }

// Read what comes before the words, and copy these.
Status read_header(Superblock& it, int64_t blocks) {
    const uint8_t* row = it.row;
    const float step = load<float>(row);
    const int state_bits = row[4], lanes = blocks < LANES ? int(blocks) : LANES;
    if (row[6] == 0) return step == 0 && state_bits == 0 && row[5] == 0 ? SOUND : BAD_HEADER;  // all weights are zero
    if (!(step >= 0 && step < __builtin_inff())) return BAD_HEADER;
    if (state_bits > MOST_STATE_BITS || !TRELLISES[state_bits].if_odd) return BAD_HEADER;
    const int64_t states_at = bytes_before_states(row), words_at = states_at + 4 * lanes;
    if (words_at > it.length || !read_classes(row, it.classes)) return BAD_HEADER;
    Unsigned states = splat(LEAST);
    std::memcpy(&states, row + states_at, 4 * lanes);
    if (mask_of(states < LEAST)) return BAD_HEADER;
    it.at.states = states;
    const int64_t words = (it.length - words_at) / 2;
    std::memcpy(it.stream, row + words_at, 2 * words);
    std::memset(it.stream + words, 0, 2 * (room_words(it.length) - words));
    it.end = it.stream + words;
    it.step = step;
    it.trellis = TRELLISES[state_bits];
    it.tiles = (blocks + LANES - 1) / LANES;
    return SOUND;
}

// Whether the coder ended in the state in which it began, and only zeros follow its words.
bool ends_well(const Superblock& it) {
    if (mask_of(it.at.states != LEAST)) return false;
    for (const uint16_t* word = it.at.next; word < it.end; word++)
        if (*word) return false;
    const bool half_a_word = (it.length - bytes_before_states(it.row)) & 1;
    return !half_a_word || it.row[it.length - 1] == 0;
}

// --- the steps ---

// The classes of sixteen blocks; 0 in lanes without a block.
Unsigned decode_classes(Superblock& it, Truths present) {
    const Unsigned entries = gathered<Unsigned>(it.classes, it.at.states & ((1 << CLASS_BITS) - 1));
    it.at.states = choose<Unsigned>(present, advanced(it.at.states, entries, CLASS_BITS), it.at.states);
    it.at.next = refill(it.at.states, it.at.next);
    return choose<Unsigned>(present, entries >> 24, Unsigned{});
}

// Decode number t of sixteen blocks.
INLINE void decode_number(Superblock& it, Place& at, const uint32_t* table, int t) {
    const Unsigned parity = at.paths & 1;
    const Unsigned place = at.states & ((1 << NUMBER_BITS) - 1);
    const Unsigned entries = gathered<Unsigned>(table, it.table + (parity << NUMBER_BITS) + place);
    const Unsigned states = advanced(at.states, entries, NUMBER_BITS);
    const Truths is_tail = (Ints)(entries << 7) < 0;
    const Unsigned low_bits = choose<Unsigned>(is_tail, it.tail_bits, it.core_bits);
    const Unsigned low = states & ((splat(1u) << low_bits) - 1);
    const Unsigned k = ((Unsigned)((Ints)entries >> 25) << it.core_bits) + low;
    it.work[t] = converted<Floats>((Ints)(k << 1 | parity)) * it.scale;
    at.paths = at.paths >> 1 ^ (-parity & it.trellis.if_odd) ^ (-(k & 1) & it.trellis.if_k_odd);
    at.states = states >> low_bits;
    at.next = refill(at.states, at.next);
}

template <class Beside>
[[gnu::noinline]] void decode_numbers(Pair& pair, const uint32_t* table, Beside beside) {
    Place first = pair[0].at, second = pair[1].at;  // in registers
    for (int t = 0; t < BLOCK; t++) {
        decode_number(pair[0], first, table, t);
        decode_number(pair[1], second, table, t);
        beside(t);
    }
    pair[0].at = first, pair[1].at = second;
}

// --- tiles ---

// Decode the classes of a tile, and set what they mean for its numbers.
void prepare_tile(Superblock& it, Truths present, const Tables& tables) {
    const Unsigned classes = it.tiles ? decode_classes(it, present) : Unsigned{};
    for (int lane = 0; lane < LANES; lane++) {
        const int32_t table = tables.of[classes[lane]];
        const double scale = it.step * tables.gains[classes[lane]];
        const bool large = scale >= 0x1p100;  // then sums of the rotation could be infinite
        it.scale[lane] = float(large ? scale * 0x1p-96 : scale);
        it.raised[lane] = large ? 0x1p96f : 1.0f;
        it.table[lane] = table << (NUMBER_BITS + 1);
        it.core_bits[lane] = tables.widths[2 * table];
        it.tail_bits[lane] = tables.widths[2 * table + 1];
    }
}

// Begin with two superblocks of some bytes each, at least HEADER_BYTES, and some blocks; a null pointer for none.
//
// streams: room, [2 * most_words].
INLINE void open(Pair& pair, const uint8_t* const (&rows)[2], const int64_t (&lengths)[2], const int64_t (&blocks)[2],
                 uint16_t* streams, int64_t most_words) {
    for (int k = 0; k < 2; k++) {
        Superblock& it = pair[k];
        it.row = rows[k], it.length = lengths[k];
        it.stream = streams + k * most_words;
        it.at.next = it.end = it.stream;
        if (it.row) it.status = read_header(it, blocks[k]);
    }
}

// Decode all tiles. beside(t): is called after number t of both, for what does not wait for it. finish(k, tile, left):
// does what is to be done with the work of superblock k of the two, which is a tile rotated back, but for the factors
// `raised`; from its first block on `left` blocks are left.
template <class Beside, class Finish>
INLINE void decode_tiles(Pair& pair, const int64_t (&blocks)[2], const Tables& tables, Beside beside, Finish finish) {
    const Ints lanes = lanes_of<Ints>([](int lane) ALWAYS { return lane; });
    for (int64_t tile = 0; pair[0].tiles || pair[1].tiles; tile++) {
        for (int k = 0; k < 2; k++) {
            const int64_t left = blocks[k] - tile * LANES;
            prepare_tile(pair[k], lanes < int32_t(left < LANES ? left : LANES), tables);
        }
        decode_numbers(pair, tables.entries, beside);
        for (int k = 0; k < 2; k++) {
            Superblock& it = pair[k];
            if (!it.tiles) continue;
            if (it.at.next > it.end) it.status = BAD_STREAM, it.at.next = it.stream;
            rotate_blocks(*(Floats(*)[BLOCK])it.work);
            finish(k, tile, blocks[k] - tile * LANES);
            if (tile + 1 < it.tiles) continue;
            if (!ends_well(it)) it.status = BAD_STREAM;
            it.tiles = 0, it.at.states = splat(LEAST);
        }
    }
}

}  // namespace
