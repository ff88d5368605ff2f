// The packed codes of a block to levels that are integers of 16 bits, and the products of these with inputs.
//
// Codes lie in a row as section 5 of docs/format.md says. What a processor is good at decides how they are looked up.
// With AVX-512, the bytes of a row are taken for words of 16 bits, in which a shift brings every second code to the
// lower end, and a permutation of words looks it up. Elsewhere codes become bytes; the lower and the higher bytes of
// the levels are looked up apart, by shuffles of bytes, and then interleaved. So the order of the 128 levels differs:
// code_at.
#pragma once

#include "lanes.hpp"

namespace {

using Integers = Vector<int16_t, 32>;
// The levels, or the inputs, of a block, in the order of code_at.
constexpr int QUARTERS = 4;

#if defined(__AVX512BW__)

using Index = Vector<uint16_t, 32>;

// Which code of a block stands in a lane of its four vectors: even ones of both halves, then odd ones.
constexpr int code_at(int quarter, int lane) { return quarter % 2 * 64 + 2 * lane + quarter / 2; }

// Words that have a field of the codes 2i, 64 + 2i, 2i + 1 and 65 + 2i in lane i, at the bits 0, 4, 8 and 12.
template <int field>
INLINE Index field_words(const uint8_t* bytes) {
    if constexpr (field == 4) return load<Index>(bytes);
    constexpr int words = 8 * field;
    Index repeated = cycled<Index>(load<Vector<uint16_t, words>>(bytes));
    return repeated >> lanes_of<Index>([](int lane) { return field * (lane / words); });
}

// Put a field at the bits from `place` on; what is above them does not matter.
template <int field>
INLINE void add_field_words(const uint8_t* bytes, int place, Index (&index)[QUARTERS]) {
    const Index words = field_words<field>(bytes);
    const uint16_t lower = (1 << place) - 1;
    each<QUARTERS>([&](auto q) ALWAYS {
        const int shift = place - 4 * q;
        Index moved = shift > 0 ? words << shift : words >> -shift;
        index[q] = (index[q] & lower) | (moved & uint16_t(~lower));
    });
}

// Words of which the lowest `width` bits are the codes of a block; what is above them does not matter.
template <int width>
INLINE void unpack_words(const uint8_t* row, Index (&index)[QUARTERS]) {
    if constexpr (width == 8) {
        each<2>([&](auto half) ALWAYS {
            index[half] = load<Index>(row + 64 * half);
            index[2 + half] = index[half] >> 8;
        });
    }
    if constexpr (width & 4) add_field_words<4>(row, 0, index);
    if constexpr (width & 2) add_field_words<2>(row + 16 * (width & 4), width & 4, index);
    if constexpr (width & 1) add_field_words<1>(row + 16 * (width & 6), width & 6, index);
}

// The levels for codes of `width` bits: 2**width, and at least 32, in which case they repeat.
template <int width>
class LevelTable {
   public:
    INLINE explicit LevelTable(const int16_t* levels) {
        each<KEPT>([&](auto i) ALWAYS { kept[i] = load<Integers>(levels + 32 * i); });
    }

    INLINE void look_up(const uint8_t* row, Integers (&levels)[QUARTERS]) const {
        Index index[QUARTERS]{};
        unpack_words<width>(row, index);
        each<QUARTERS>([&](auto q) ALWAYS { levels[q] = permuted(index[q]); });
    }

   private:
    static constexpr int KEPT = width > 5 ? 1 << (width - 5) : 1;
    Integers kept[KEPT];

    INLINE Integers permuted(Index index) const {
        if constexpr (KEPT == 1) return (Integers)_mm512_permutexvar_epi16((__m512i)index, (__m512i)kept[0]);
        // Each two vectors together, of which the higher bits of the index select one.
        Integers found[KEPT > 1 ? KEPT / 2 : 1];
        each<KEPT / 2>([&](auto i) ALWAYS {
            const __m512i low = (__m512i)kept[2 * i], high = (__m512i)kept[2 * i + 1];
            found[i] = (Integers)_mm512_permutex2var_epi16(low, (__m512i)index, high);
        });
        return selected(found, [&](int bit) ALWAYS { return (index & uint16_t(64 << bit)) != 0; });
    }
};

#else

// 64 codes, which are half a block.
using Index = Vector<uint8_t, 64>;

// Which code of a block stands in a lane of its four vectors. Interleaving works on 16 bytes at a time: the first eight
// of each 16 make a vector, and the last eight the next one.
constexpr int code_at(int quarter, int lane) { return quarter / 2 * 64 + lane / 8 * 16 + quarter % 2 * 8 + lane % 8; }

// Add a field of 1 or 2 bits to codes, from the bit `place` on.
template <int field>
INLINE void add_field_bytes(const uint8_t* bytes, int place, Index (&index)[2]) {
    const Index repeated = cycled<Index>(load<Vector<uint8_t, 16 * field>>(bytes));
    each<2>([&](auto half) ALWAYS {
        each<field>([&](auto bit) ALWAYS {
            const auto tested = [&](int lane) { return 1 << (bit + (64 * half + lane) / (16 * field) * field); };
            const Index mask = lanes_of<Index>(tested);
            index[half] |= (Index)((repeated & mask) != 0) & uint8_t(1 << (place + bit));
        });
    });
}

// The codes of a block, a byte each.
template <int width>
INLINE void unpack_bytes(const uint8_t* row, Index (&index)[2]) {
    if constexpr (width == 8) each<2>([&](auto half) ALWAYS { index[half] = load<Index>(row + 64 * half); });
    if constexpr (width & 4) index[0] = load<Index>(row) & 15, index[1] = load<Index>(row) >> 4;
    if constexpr (width & 2) add_field_bytes<2>(row + 16 * (width & 4), width & 4, index);
    if constexpr (width & 1) add_field_bytes<1>(row + 16 * (width & 6), width & 6, index);
}

// Entries of a table of sixteen bytes, by the lowest four bits of indices that are less than 128.
template <class V>
INLINE V entries(Bytes table, V index) {
    [[maybe_unused]] constexpr int half = COUNT_OF<V> / 2;
#if defined(__AVX2__)
    if constexpr (half == 16) return (V)_mm256_shuffle_epi8((__m256i)cycled<V>(table), (__m256i)index);
    else return joined(entries(table, slice<0, half>(index)), entries(table, slice<half, half>(index)));
#elif defined(__SSSE3__)
    if constexpr (half == 8) return (V)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
    else return joined(entries(table, slice<0, half>(index)), entries(table, slice<half, half>(index)));
#else
    return gathered<V>((const uint8_t*)&table, index & uint8_t(15));
#endif
}

// Entries of a table of bytes, sixteen in a vector.
template <int count>
INLINE Index looked_up(const Bytes (&table)[count], Index index) {
#if defined(__ARM_NEON)
    Index found;
    each<4>([&](auto part) ALWAYS {
        const uint8x16_t at = load<uint8x16_t>((const uint8_t*)&index + 16 * part);
        uint8x16_t bytes{};
        // Sixty-four entries at once; an index beyond them changes nothing.
        if constexpr (count == 1) bytes = vqtbl1q_u8(load<uint8x16_t>(table), at);
        else if constexpr (count == 2) bytes = vqtbl2q_u8(load<uint8x16x2_t>(table), at);
        else each<count / 4>([&](auto i) ALWAYS {
            bytes = vqtbx4q_u8(bytes, load<uint8x16x4_t>(table + 4 * i), vsubq_u8(at, vdupq_n_u8(64 * i)));
        });
        std::memcpy((uint8_t*)&found + 16 * part, &bytes, 16);
    });
    return found;
#else
    const Index modulo = count > 8 ? index & uint8_t(127) : index;
    Index found[count];
    each<count>([&](auto i) ALWAYS { found[i] = entries(table[i], modulo); });
    return selected(found, [&](int bit) ALWAYS { return (index & uint8_t(16 << bit)) != 0; });
#endif
}

// The levels for codes of `width` bits: 2**width, and at least 32, in which case they repeat.
template <int width>
class LevelTable {
   public:
    INLINE explicit LevelTable(const int16_t* levels) {
        each<KEPT>([&](auto i) ALWAYS {
            const auto words = load<Vector<uint16_t, 16>>(levels + 16 * i);
            low[i] = converted<Bytes>(words & 255);
            high[i] = converted<Bytes>(words >> 8);
        });
    }

    INLINE void look_up(const uint8_t* row, Integers (&levels)[QUARTERS]) const {
        Index index[2]{};
        unpack_bytes<width>(row, index);
        each<2>([&](auto half) ALWAYS {
            const Index lower = looked_up(low, index[half]), higher = looked_up(high, index[half]);
            each<2>([&](auto last) ALWAYS {
                constexpr int start = 8 * last;
                const auto order = [](int k) { return k % 2 * 64 + k / 16 * 16 + start + k % 16 / 2; };
                levels[2 * half + last] = (Integers)shuffled(lower, higher, order);
            });
        });
    }

   private:
    static constexpr int KEPT = width > 4 ? 1 << (width - 4) : 1;
    Bytes low[KEPT], high[KEPT];
};

#endif

// Products of the lanes of a and b, added up in pairs; which lanes make a pair depends on the processor.
template <class V>
INLINE Vector<int32_t, COUNT_OF<V> / 2> pair_sums(V a, V b) {
    constexpr int half = COUNT_OF<V> / 2;
    using Sums = Vector<int32_t, half>;
    [[maybe_unused]] const auto a0 = slice<0, half>(a), a1 = slice<half, half>(a);
    [[maybe_unused]] const auto b0 = slice<0, half>(b), b1 = slice<half, half>(b);
#if defined(__AVX512BW__)
    return (Sums)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    if constexpr (half == 8) return (Sums)_mm256_madd_epi16((__m256i)a, (__m256i)b);
    else return joined(pair_sums(a0, b0), pair_sums(a1, b1));
#elif defined(__SSE2__)
    if constexpr (half == 4) return (Sums)_mm_madd_epi16((__m128i)a, (__m128i)b);
    else return joined(pair_sums(a0, b0), pair_sums(a1, b1));
#else
    return converted<Sums>(a0) * converted<Sums>(b0) + converted<Sums>(a1) * converted<Sums>(b1);
#endif
}

}  // namespace
