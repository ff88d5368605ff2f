// Look-ups in a short table of floats: from registers where the processor can permute them, else by loads.
#pragma once

#include "lanes.hpp"

namespace {

// The entries of a table for codes of some bits, at least a vector of them.
template <int bits>
constexpr int ENTRIES = bits < 4 ? LANES : 1 << bits;

// The least entries of a table.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int LEAST_ENTRIES = 8;
#else
constexpr int LEAST_ENTRIES = LANES;
#endif

// A table of a power of two of floats, up to 256.
template <int entries>
class Table {
    static_assert(entries >= LEAST_ENTRIES && entries <= 256 && !(entries & (entries - 1)));

   public:
    INLINE explicit Table(const float* from) : from(from) {
        std::memcpy(kept, from, KEPT * sizeof *from);
    }

    // Entry index % entries, lane by lane.
    INLINE Floats operator[](Unsigned index) const {
        if constexpr (KEPT) return permuted(index);
        return gathered<Floats>(from, index & (entries - 1));
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
    static constexpr int EIGHTS = KEPT ? KEPT / 8 : 1;
    __m256 kept[EIGHTS];

    INLINE Floats permuted(Unsigned index) const {
        auto eight = [&](__m256i at) ALWAYS {
            auto by_bit = [&](int bit, __m256 low, __m256 high) ALWAYS {
                return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 31 - bit)));
            };
            __m256 found[EIGHTS];
            each<EIGHTS>([&](auto i) ALWAYS { found[i] = _mm256_permutevar8x32_ps(kept[i], at); });
            if constexpr (EIGHTS == 1) return found[0];
            else if constexpr (EIGHTS == 2) return by_bit(3, found[0], found[1]);
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
