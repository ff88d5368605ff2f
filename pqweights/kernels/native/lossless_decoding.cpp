// Decodes chunks of items that were coded without loss, whatever their bytes are: section 11 of docs/format.md.
#include "interface.hpp"
#include "lossless.hpp"

namespace {

// A chunk whose header was read.
struct Chunk {
    const uint8_t* planes;  // the lower bytes
    const uint8_t* words;   // 16 bits each
    int64_t word_count;
    Unsigned states[TOGETHER];
    uint32_t table[TOTAL];  // entries as of `advanced`, the symbol in the highest byte
};

// Read the frequencies of the symbols from `at` on into the table; return where they end, or null.
const uint8_t* read_frequencies(Chunk& chunk, const uint8_t* at, const uint8_t* end) {
    if (end - at < 2) return nullptr;
    const int first = *at++, count = *at++ + 1;
    if (first + count > SYMBOLS) return nullptr;
    int filled = 0;
    for (int i = 0; i < count; i++) {
        if (at == end) return nullptr;
        int frequency = *at++;
        if (frequency >= 128) {
            if (at == end) return nullptr;
            frequency = (frequency - 128) << 8 | *at++;
        }
        if (frequency > TOTAL - filled) return nullptr;
        for (int place = 0; place < frequency; place++)
            chunk.table[filled + place] = uint32_t(first + i) << 24 | (frequency - 1) << 12 | place;
        filled += frequency;
    }
    return filled == TOTAL ? at : nullptr;
}

ChunkStatus read_header(Chunk& chunk, const uint8_t* bytes, int64_t length, int64_t count, int64_t width) {
    const uint8_t *end = bytes + length, *planes = end - count * (width - 1);
    if (planes - bytes < 1) return BAD_LENGTH;
    const uint8_t* at = read_frequencies(chunk, bytes + 1, planes);
    if (!at) return BAD_FREQUENCIES;
    const int64_t word_bytes = planes - at - int64_t(sizeof chunk.states);
    if (word_bytes < 0 || word_bytes % 2 || word_bytes / 2 > MOST_WORDS) return BAD_LENGTH;
    std::memcpy(chunk.states, at, sizeof chunk.states);
    for (const Unsigned& states : chunk.states)
        if (mask_of(states < LEAST)) return BAD_WORDS;
    chunk.planes = planes, chunk.words = at + sizeof chunk.states, chunk.word_count = word_bytes / 2;
    return WHOLE;
}

// Sixteen items from their highest bytes and the planes of the others.
template <int width>
INLINE void put_items(Unsigned highest, const uint8_t* planes, int64_t stride, uint8_t* to) {
    Unsigned x = highest << (8 * (width - 1));
    each<width - 1>([&](int plane) ALWAYS { x |= converted<Unsigned>(load<Bytes>(planes + plane * stride)) << 8 * plane; });
    store(converted<Vector<Item<width>, LANES>>(rotated_back<width>(x)), to);
}

// Decode `steps` steps of all states, from item `first` on; return the words that follow.
template <int width>
INLINE const uint16_t* decode_steps(const Chunk& chunk, Unsigned (&states)[TOGETHER], const uint16_t* next, int64_t first,
                                    int64_t steps, int64_t stride, const uint8_t* planes, uint8_t* to) {
    Unsigned x[TOGETHER];
    each<TOGETHER>([&](auto v) ALWAYS { x[v] = states[v]; });
    for (int64_t step = 0; step < steps; step++) {
        each<TOGETHER>([&](auto v) ALWAYS {
            const Unsigned entries = gathered<Unsigned>(chunk.table, x[v] & (TOTAL - 1));
            const int64_t item = first + step * STATES + v * LANES;
            put_items<width>(entries >> 24, planes + item, stride, to + item * width);
            x[v] = advanced(x[v], entries, NUMBER_BITS);
            next = refill(x[v], next);
        });
    }
    each<TOGETHER>([&](auto v) ALWAYS { states[v] = x[v]; });
    return next;
}

// Decode the items of a chunk. words: room, [MOST_WORDS + SPARE_WORDS].
template <int width>
ChunkStatus decode_chunk(Chunk& chunk, int64_t count, uint8_t* to, uint16_t* words) {
    std::memcpy(words, chunk.words, 2 * chunk.word_count);
    const uint16_t *next = words, *end = words + chunk.word_count;
    const int64_t whole = count / STATES;
    for (int64_t step = 0; step < whole; step += STEPS_UNCHECKED) {
        const int64_t steps = whole - step < STEPS_UNCHECKED ? whole - step : STEPS_UNCHECKED;
        next = decode_steps<width>(chunk, chunk.states, next, step * STATES, steps, count, chunk.planes, to);
        if (next > end) return BAD_WORDS;
    }
    if (const int64_t left = count - whole * STATES) {  // in memory that has room for all states
        uint8_t planes[width * STATES]{}, items[width * STATES];
        for (int plane = 0; plane < width - 1; plane++)
            std::memcpy(planes + plane * STATES, chunk.planes + plane * count + whole * STATES, left);
        next = decode_steps<width>(chunk, chunk.states, next, 0, 1, STATES, planes, items);
        std::memcpy(to + whole * STATES * width, items, left * width);
    }
    for (const Unsigned& states : chunk.states)
        if (mask_of(states != LEAST)) return BAD_WORDS;
    return next == end ? WHOLE : BAD_WORDS;
}

}  // namespace

// stream: the chunks, one after the other. lengths: [chunks], their bytes, at least 1. values: out: [count * width], of
// which each chunk but the last has CHUNK items. words: room, [MOST_WORDS + SPARE_WORDS]. status: [2]: the first chunk
// that is not sound, or -1, and what is wrong with it.
void pqweights::decode_lossless(const uint8_t* stream, const int32_t* lengths, uint8_t* values, uint16_t* words,
                                int64_t* status, int64_t count, int64_t width) {
    status[0] = -1, status[1] = WHOLE;
    Chunk chunk;
    for (int64_t number = 0, first = 0; first < count; number++, first += CHUNK) {
        const int64_t items = count - first < CHUNK ? count - first : CHUNK, length = lengths[number];
        uint8_t* to = values + first * width;
        ChunkStatus found = WHOLE;
        if (stream[0] == STORED) {
            if (length == 1 + items * width) std::memcpy(to, stream + 1, length - 1);
            else found = BAD_LENGTH;
        } else if (stream[0] == CODED) {
            found = read_header(chunk, stream, length, items, width);
            if (found == WHOLE)
                with_width(width, [&](auto bytes) ALWAYS { found = decode_chunk<bytes>(chunk, items, to, words); });
        } else {
            found = BAD_FREQUENCIES;
        }
        if (found != WHOLE && status[0] < 0) status[0] = number, status[1] = found;
        stream += length;
    }
}
