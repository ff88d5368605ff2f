// Codes chunks of items without loss: section 11 of docs/format.md.
#include "interface.hpp"
#include "lossless.hpp"

namespace {

// How often each symbol comes, and the share of TOTAL that it gets.
struct Frequencies {
    int64_t counts[SYMBOLS]{};
    int64_t shares[SYMBOLS]{};
    int first = 0, end = 0;  // of the symbols that come

    int64_t count() const { return end - first; }
};

void count_symbols(Frequencies& of, const uint8_t* symbols, int64_t count) {
    int32_t counts[4][SYMBOLS]{};  // so that equal symbols in a row do not wait for each other
    for (int64_t i = 0; i < count; i++) counts[i % 4][symbols[i]]++;
    for (int s = 0; s < SYMBOLS; s++) of.counts[s] = int64_t(counts[0][s]) + counts[1][s] + counts[2][s] + counts[3][s];
    while (!of.counts[of.first]) of.first++;
    for (of.end = SYMBOLS; !of.counts[of.end - 1]; of.end--) {}
}

// Share TOTAL out by the counts, at least 1 each, such that the fewest bits are lost.
void share_out(Frequencies& of, int64_t count) {
    int64_t left = TOTAL;
    for (int s = of.first; s < of.end; s++) {
        if (!of.counts[s]) continue;
        const int64_t share = (2 * TOTAL * of.counts[s] + count) / (2 * count);
        of.shares[s] = share ? share : 1;
        left -= of.shares[s];
    }
    for (; left; left += left < 0 ? 1 : -1) {
        const int sign = left < 0 ? -1 : 1;
        int best = -1;
        for (int s = of.first; s < of.end; s++) {
            if (!of.counts[s] || (sign < 0 && of.shares[s] == 1)) continue;
            const int64_t difference = best < 0 ? 1 : of.counts[s] * (2 * of.shares[best] + sign) -
                                                          of.counts[best] * (2 * of.shares[s] + sign);
            if (difference * (best < 0 ? 1 : sign) > 0) best = s;
        }
        of.shares[best] += sign;
    }
}

// Write the frequencies; return where they end.
uint8_t* put_frequencies(const Frequencies& of, uint8_t* to) {
    *to++ = uint8_t(of.first), *to++ = uint8_t(of.count() - 1);
    for (int s = of.first; s < of.end; s++) {
        if (of.shares[s] >= 128) *to++ = uint8_t(128 + (of.shares[s] >> 8));
        *to++ = uint8_t(of.shares[s]);
    }
    return to;
}

// Split items into their highest bytes, rotated, and the planes of the others, which have `count` bytes each.
template <int width>
void split(const uint8_t* values, int64_t count, uint8_t* highest, uint8_t* planes) {
    each_sixteen(count, [&](int64_t first, int64_t left) ALWAYS {
        using Items = Vector<Item<width>, LANES>;
        const Unsigned x = converted<Unsigned>(load_first<Items>(values + first * width, left));
        const Unsigned turned = rotated<width>(x);
        store_first(converted<Bytes>(turned >> (8 * (width - 1)) & 255), highest + first, left);
        each<width - 1>([&](int plane) ALWAYS {
            store_first(converted<Bytes>(turned >> (8 * plane) & 255), planes + plane * count + first, left);
        });
    });
}

// Code symbols, the last of which fill up the states; return where the words begin that end at `end`.
uint16_t* code_symbols(const Frequencies& of, const uint8_t* symbols, int64_t steps, Unsigned (&states)[TOGETHER],
                       uint16_t* end) {
    uint32_t entries[SYMBOLS]{};
    uint32_t start = 0;
    for (int s = of.first; s < of.end; start += uint32_t(of.shares[s++]))
        if (of.shares[s]) entries[s] = start | uint32_t(of.shares[s] - 1) << 12;
    for (Unsigned& x : states) x = splat(LEAST);
    for (int64_t step = steps - 1; step >= 0; step--) {
        each<TOGETHER>([&](auto i) ALWAYS {
            constexpr int v = TOGETHER - 1 - i;
            const Bytes own = load<Bytes>(symbols + step * STATES + v * LANES);
            end = encode_step(states[v], gathered<Unsigned>(entries, converted<Unsigned>(own)), NUMBER_BITS, end);
        });
    }
    return end;
}

// Code a chunk; return where it ends. symbols: room, [CHUNK + STATES]. words: room, [MOST_WORDS + SPARE_WORDS].
template <int width>
uint8_t* code_chunk(const uint8_t* values, int64_t count, uint8_t* to, uint8_t* symbols, uint16_t* words) {
    uint8_t* planes = to + 1;  // moved behind the words as soon as these are known
    split<width>(values, count, symbols, planes);
    Frequencies of;
    count_symbols(of, symbols, count);
    share_out(of, count);
    int often = of.first;
    for (int s = of.first; s < of.end; s++)
        if (of.counts[s] > of.counts[often]) often = s;
    const int64_t steps = (count + STATES - 1) / STATES;
    std::memset(symbols + count, often, steps * STATES - count);
    Unsigned states[TOGETHER];
    uint16_t* const end = words + MOST_WORDS + SPARE_WORDS;
    const uint16_t* begin = code_symbols(of, symbols, steps, states, end);
    uint8_t frequencies[2 + 2 * SYMBOLS];
    const int64_t first = put_frequencies(of, frequencies) - frequencies, word_bytes = 2 * (end - begin);
    const int64_t behind = first + int64_t(sizeof states) + word_bytes;
    if (behind >= count) {
        to[0] = STORED;
        std::memcpy(to + 1, values, count * width);
        return to + 1 + count * width;
    }
    std::memmove(planes + behind, planes, count * (width - 1));
    to[0] = CODED;
    std::memcpy(to + 1, frequencies, first);
    std::memcpy(to + 1 + first, states, sizeof states);
    std::memcpy(to + 1 + first + sizeof states, begin, word_bytes);
    return to + 1 + behind + count * (width - 1);
}

}  // namespace

// values: [count * width]. stream: out: the chunks, one after the other, [chunks + count * width]. lengths: out: [chunks],
// their bytes. symbols, words: room, [CHUNK + STATES] and [MOST_WORDS + SPARE_WORDS].
void pqweights::encode_lossless(const uint8_t* values, uint8_t* stream, int32_t* lengths, uint8_t* symbols,
                                uint16_t* words, int64_t count, int64_t width) {
    for (int64_t number = 0, first = 0; first < count; number++, first += CHUNK) {
        const int64_t items = count - first < CHUNK ? count - first : CHUNK;
        uint8_t* end = stream;
        with_width(width, [&](auto bytes) ALWAYS {
            end = code_chunk<bytes>(values + first * width, items, stream, symbols, words);
        });
        lengths[number] = int32_t(end - stream);
        stream = end;
    }
}
