// Look-ups in a short table of floats: from registers where the processor can permute them, else by loads.
#pragma once

#include "lanes.hpp"

namespace {

// The entries of a table for codes of some bits, at least a vector of them.
template <int bits>
constexpr int ENTRIES = bits < 4 ? LANES : 1 << bits;

// A table of a power of two of floats, from 16 to 256.
template <int entries>
class Table {
    static_assert(entries >= LANES && entries <= 256 && !(entries & (entries - 1)));

   public:
    INLINE explicit Table(const float* from) : from(from) {
        each<KEPT / LANES>([&](auto i) ALWAYS { kept[i] = load<Floats>(from + LANES * i); });
    }

    // Entry index % entries, lane by lane.
    INLINE Floats operator[](Unsigned index) const {
        if constexpr (KEPT) return permuted(index);
        // As bytes, eight indices at a time go to a register in which integers are taken apart.
        const auto eights = (Vector<uint64_t, 2>)converted<Bytes>(index & (entries - 1));
        return lanes_of<Floats>([&](int lane) ALWAYS { return from[eights[lane / 8] >> lane % 8 * 8 & 255]; });
    }

   private:
    const float* from;
#if defined(__AVX512F__)
    static constexpr int KEPT = entries;
    Floats kept[entries / LANES];

    INLINE Floats permuted(Unsigned index) const {
        if constexpr (entries == LANES) {
            return (Floats)_mm512_permutexvar_ps((__m512i)index, (__m512)kept[0]);
        } else {
            // Look into each two vectors, and then let each further bit of the index halve what was found.
            Floats found[entries / LANES / 2];
            each<entries / LANES / 2>([&](auto i) ALWAYS {
                found[i] = (Floats)_mm512_permutex2var_ps((__m512)kept[2 * i], (__m512i)index, (__m512)kept[2 * i + 1]);
            });
            each<__builtin_ctz(entries / LANES / 2)>([&](auto level) ALWAYS {
                TruthsOf<Unsigned> upper = (index & (2 * LANES << level)) != 0;
                each<(entries / LANES / 4 >> int(level))>([&](auto i) ALWAYS {
                    found[i] = choose<Floats>(upper, found[2 * i + 1], found[2 * i]);
                });
            });
            return found[0];
        }
    }
#elif defined(__AVX2__)
    static constexpr int KEPT = entries <= 32 ? entries : 0;  // with more, loads cost less
    Floats kept[KEPT ? KEPT / LANES : 1];

    INLINE Floats permuted(Unsigned index) const {
        constexpr int eights = KEPT / 8;
        __m256 table[eights ? eights : 1];
        std::memcpy(table, kept, 4 * KEPT);
        auto eight = [&](__m256i at) ALWAYS {
            auto by_bit = [&](int bit, __m256 low, __m256 high) ALWAYS {
                return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 31 - bit)));
            };
            __m256 found[eights ? eights : 1];
            each<eights>([&](auto i) ALWAYS { found[i] = _mm256_permutevar8x32_ps(table[i], at); });
            if constexpr (eights == 2) return by_bit(3, found[0], found[1]);
            else return by_bit(4, by_bit(3, found[0], found[1]), by_bit(3, found[2], found[3]));
        };
        struct { __m256i low, high; } at;
        std::memcpy(&at, &index, sizeof at);
        struct { __m256 low, high; } result{eight(at.low), eight(at.high)};
        return load<Floats>(&result);
    }
#else
    static constexpr int KEPT = 0;
    Floats kept[1];

    INLINE Floats permuted(Unsigned) const { return kept[0]; }
#endif
};

}  // namespace
