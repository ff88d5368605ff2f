// Products of queries with polar-rope keys (docs/kv-cache.md) by table look-up, without restoring the keys.
//
// A pair of key coordinates is scale * radius * (cos angle, sin angle), and there are only 16 angles. So for a query
// and a pair, 16 numbers scale * (x cos angle + y sin angle) are all that the product needs of the query (Wu et al.,
// arXiv:2502.00527, Section 3.3): each key looks one up and multiplies it by its radius.
//
// These numbers become integers of 16 bits, in steps of which the largest of the query takes 32639. A shuffle of bytes
// looks up sixteen at once, higher and lower bytes apart; sums are exact, so that they are the same everywhere. A group
// has 32 tokens, and the codes of a pair lie together, token t beside t + 16 in a byte. With VBMI and VNNI the codes of
// four pairs are put beside each other for each token, and one instruction adds their products; else sixteen tokens of
// four pairs are the four quarters of a vector.
#include "conversions.hpp"
#include "interface.hpp"
#include "tiles.hpp"

namespace {

constexpr int GROUP = 32, ANGLES = 16, TOGETHER = 4;  // tokens, entries of a table, pairs of a vector
constexpr int MOST_ROWS = 16, MOST_PAIRS = 128;       // as in kernels/attention.py
constexpr float MOST_ENTRY = 127 * 256 + 127;         // two signed bytes, of which the higher one counts 256

using Quarters = Vector<uint8_t, TOGETHER * LANES>;

// Of a query, for four pairs: higher and lower bytes of the entries.
using Tables = uint8_t[MOST_PAIRS / TOGETHER][2][TOGETHER][ANGLES];

// --- tables ---

// The cosine and the sine of angle code k, which stands for 2 pi k / 16 - pi.
constexpr float sine(int k) {
    constexpr float quarter[] = {0, 0.38268343236508977f, 0.70710678118654752f, 0.92387953251128674f, 1};
    return k >= 8 ? quarter[k < 12 ? k - 8 : 16 - k] : -quarter[k < 4 ? k : 8 - k];
}
constexpr float cosine(int k) { return sine((k + 4) % ANGLES); }

// Make the tables of a query of `pairs` pairs, of which pair j has the coordinates j * step and j * step + offset.
// Returns what a one in them stands for: NaN if the query has a NaN or an infinity.
INLINE float make_tables(const float* query, const float* scales, int64_t pairs, int64_t step, int64_t offset,
                         Tables& tables) {
    const Floats cosines = lanes_of<Floats>([](int k) ALWAYS { return cosine(k); });
    const Floats sines = lanes_of<Floats>([](int k) ALWAYS { return sine(k); });
    Floats entries[MOST_PAIRS];
    Ints most{};
    for (int64_t j = 0; j < pairs; j++) {
        float x = query[j * step] * scales[j], y = query[j * step + offset] * scales[j];
        entries[j] = splat(x) * cosines + splat(y) * sines;
        most = maximum((Ints)bits(magnitude(entries[j])), most);
    }
    const int32_t largest = lane_maximum(most);
    const float unit = largest < 0x7F800000 ? __builtin_bit_cast(float, largest) / MOST_ENTRY : __builtin_nanf("");
    if (!(unit > 0x1p-100f)) {
        std::memset(tables, 0, sizeof tables);
        return unit >= 0 ? 0 : unit;
    }
    for (int64_t j = 0; j < pairs; j += TOGETHER) {
        each<TOGETHER>([&](auto pair) ALWAYS {
            const Ints whole = converted<Ints>(rint(entries[j + pair] * (1 / unit)));
            const Ints higher = (whole + 128) >> 8;
            store(converted<Bytes>(higher), tables[j / TOGETHER][0][pair]);
            store(converted<Bytes>(whole), tables[j / TOGETHER][1][pair]);  // whole - 256 * higher
        });
    }
    return unit;
}

// --- scores of a group ---

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)

// The codes of sixteen tokens of four pairs, junk above them: byte 4 * t + k has that of token t for pair k.
template <int bits, int half>
INLINE Quarters codes_by_token(const uint8_t* codes) {
    constexpr int bytes = GROUP * bits / 8;  // of which each has tokens t, t + bytes, ...
    Quarters packed{};
    std::memcpy(&packed, codes, TOGETHER * bytes);
    packed = shuffled(packed, packed, [](int k) { return k % 4 * bytes + k / 4 % bytes; });
    const Unsigned shifts = lanes_of<Unsigned>([](int t) ALWAYS { return (LANES * half + t) / bytes * bits; });
    return (Quarters)((Unsigned)packed >> shifts);
}

// Write the scores of some rows with a group: a lane for each of sixteen tokens.
template <int bits, int rows>
INLINE void score_rows(const uint8_t* angles, const uint8_t* radii, int64_t pairs, const Tables* tables,
                       const float* units, float* out, int64_t stride) {
    const Quarters table_of = lanes_of<Quarters>([](int k) ALWAYS { return k % TOGETHER * ANGLES; });
    Ints sums[rows][2][2]{};  // of both halves of the tokens: of higher and of lower bytes
    for (int64_t j = 0; j < pairs; j += TOGETHER) {
        each<2>([&](auto half) ALWAYS {
            const Quarters angle = (codes_by_token<4, half>(angles + j * (GROUP / 2)) & 15) | table_of;
            const Quarters radius = codes_by_token<bits, half>(radii + j * (GROUP * bits / 8)) & ((1 << bits) - 1);
            each<rows>([&](auto row) ALWAYS {
                each<2>([&](auto plane) ALWAYS {
                    const __m512i table = load<__m512i>(tables[row][j / TOGETHER][plane]);
                    const __m512i entries = _mm512_permutexvar_epi8((__m512i)angle, table);
                    Ints& sum = sums[row][half][plane];
                    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)radius, entries);
                });
            });
        });
    }
    each<rows>([&](auto row) ALWAYS {
        each<2>([&](auto half) ALWAYS {
            const Ints total = (sums[row][half][0] << 8) + sums[row][half][1];
            store(converted<Floats>(total) * units[row], out + row * stride + LANES * half);
        });
    });
}

#else

using Shorts = Vector<int16_t, 2 * LANES>;
using Halves = Vector<uint16_t, 2 * LANES>;

#if defined(__AVX2__)
// f of the lower and of the upper halves of a and b.
template <class F>
INLINE Quarters in_halves(Quarters a, Quarters b, F f) {
    Quarters result;
    each<2>([&](auto half) ALWAYS {
        constexpr int at = half * sizeof(__m256i);
        store(f(load<__m256i>((char*)&a + at), load<__m256i>((char*)&b + at)), (char*)&result + at);
    });
    return result;
}
#endif

// In each quarter, the bytes of `table` whose numbers, 0 to 15, are in `index`.
INLINE Quarters looked_up(Quarters table, Quarters index) {
#if defined(__AVX512BW__)
    return (Quarters)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined(__AVX2__)
    return in_halves(table, index, [](__m256i t, __m256i i) ALWAYS { return _mm256_shuffle_epi8(t, i); });
#else
    Quarters result;
    each<TOGETHER>([&](auto i) ALWAYS {
        Bytes found = looked_up(slice<LANES * i, LANES>(table), slice<LANES * i, LANES>(index));
        store(found, (char*)&result + LANES * i);
    });
    return result;
#endif
}

// The sums of adjacent products, of bytes from 0 to 15 with signed ones.
INLINE Shorts products(Quarters radii, Quarters entries) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_maddubs_epi16((__m512i)radii, (__m512i)entries);
#elif defined(__AVX2__)
    return (Shorts)in_halves(radii, entries, [](__m256i r, __m256i e) ALWAYS { return _mm256_maddubs_epi16(r, e); });
#else
    Shorts r = (Shorts)radii, e = (Shorts)entries;
    return (r & 0xFF) * (e << 8 >> 8) + (r >> 8) * (e >> 8);
#endif
}

// The radius codes of sixteen tokens of four pairs.
template <int bits, int half>
INLINE Quarters radii_of(const uint8_t* radii) {
    if constexpr (bits == 4) {
        return (Quarters)(load<Halves>(radii) >> (4 * half)) & 15;
    } else {  // a byte has tokens t, t + 8, t + 16 and t + 24
        using Eights = Vector<uint64_t, 2 * TOGETHER>;
        uint64_t packed[TOGETHER];
        std::memcpy(packed, radii, sizeof packed);
        const Eights shifts = lanes_of<Eights>([](int i) ALWAYS { return uint64_t(4 * half + i % 2 * 2); });
        return (Quarters)(lanes_of<Eights>([&](int i) ALWAYS { return packed[i / 2]; }) >> shifts) & 3;
    }
}

// The sums of the quarters of 16-bit sums.
INLINE Vector<int32_t, 8> quarter_sums(Shorts x) {
    using Sums = Vector<int32_t, 8>;
    Sums sums[TOGETHER];
    each<TOGETHER>([&](auto i) ALWAYS { sums[i] = converted<Sums>(slice<8 * i, 8>(x)); });
    return folded(sums);
}

// Write the scores of some rows with half of the tokens of a group.
template <int bits, int half, int rows>
INLINE void score_half(const uint8_t* angles, const uint8_t* radii, int64_t pairs, const Tables* tables,
                       const float* units, float* out, int64_t stride) {
    // A sum of 16 bits takes at most 17 products: 17 * 15 * 128 < 2**15.
    constexpr int64_t MOST_SUMMED = 16 * TOGETHER;
    Ints totals[rows]{};
    for (int64_t start = 0; start < pairs; start += MOST_SUMMED) {
        const int64_t end = start + MOST_SUMMED < pairs ? start + MOST_SUMMED : pairs;
        Shorts sums[rows][2][2]{};  // of higher and of lower bytes, with even and with odd tokens
        for (int64_t j = start; j < end; j += TOGETHER) {
            const Quarters angle = (Quarters)(load<Halves>(angles + j * (GROUP / 2)) >> (4 * half)) & 15;
            const Quarters radius = radii_of<bits, half>(radii + j * (GROUP * bits / 8));
            const Quarters even = (Quarters)((Halves)radius & 0xFF), odd = (Quarters)((Halves)radius & 0xFF00);
            each<rows>([&](auto row) ALWAYS {
                each<2>([&](auto plane) ALWAYS {
                    Quarters entries = looked_up(load<Quarters>(tables[row][j / TOGETHER][plane]), angle);
                    sums[row][plane][0] += products(even, entries);
                    sums[row][plane][1] += products(odd, entries);
                });
            });
        }
        each<rows>([&](auto row) ALWAYS {
            Vector<int32_t, 8> of[2];
            each<2>([&](auto odd) ALWAYS {
                of[odd] = (quarter_sums(sums[row][0][odd]) << 8) + quarter_sums(sums[row][1][odd]);
            });
            Ints both = joined(of[0], of[1]);
            totals[row] += shuffled(both, both, [](int token) { return token / 2 + token % 2 * 8; });
        });
    }
    each<rows>([&](auto row) ALWAYS {
        store(converted<Floats>(totals[row]) * units[row], out + row * stride + 16 * half);
    });
}

// The same with both halves.
template <int bits, int rows>
INLINE void score_rows(const uint8_t* angles, const uint8_t* radii, int64_t pairs, const Tables* tables,
                       const float* units, float* out, int64_t stride) {
    each<2>([&](auto half) ALWAYS {
        score_half<bits, half, rows>(angles, radii, pairs, tables, units, out, stride);
    });
}

#endif

// Write the scores of all rows with a group.
template <int bits>
void score_group(const uint8_t* angles, const uint8_t* radii, int64_t pairs, int64_t rows, const Tables* tables,
                 const float* units, float* out, int64_t stride) {
    each<3>([&](auto power) ALWAYS {
        constexpr int together = 4 >> power;
        for (; rows >= together; rows -= together) {
            score_rows<bits, together>(angles, radii, pairs, tables, units, out, stride);
            tables += together;
            units += together;
            out += together * stride;
        }
    });
}

}  // namespace

// queries: [heads, rows, 2 * pairs], of at most 16 rows and a multiple of 4 pairs up to 128; angles: [heads, groups,
// pairs, 16]; radii: [heads, groups, pairs, 4 * radius_bits], of 2 or 4 bits; scales: [heads, pairs]; out: [heads, rows,
// groups * 32]; halves: whether pair j is the coordinates j and j + pairs, rather than 2 j and 2 j + 1; next_tile: 0,
// which all threads count up together.
void pqweights::polar_scores(int64_t* next_tile, const float* queries, const uint8_t* angles, const uint8_t* radii,
                             const float* scales, float* out, int64_t heads, int64_t rows, int64_t groups,
                             int64_t pairs, int64_t radius_bits, int64_t halves, int64_t tile_groups) {
    Tables tables[MOST_ROWS];
    float units[MOST_ROWS];
    const int64_t angle_bytes = pairs * GROUP / 2, radius_bytes = pairs * 4 * radius_bits, stride = groups * GROUP;
    each_tile(next_tile, heads, groups, tile_groups, [&](int64_t head, int64_t start, int64_t end) ALWAYS {
        for (int64_t row = 0; row < rows; row++) {
            const float* query = queries + (head * rows + row) * 2 * pairs;
            units[row] = make_tables(query, scales + head * pairs, pairs, halves ? 1 : 2, halves ? pairs : 1, tables[row]);
        }
        for (int64_t group = start; group < end; group++) {
            const int64_t at = head * groups + group;
            (radius_bits == 4 ? score_group<4> : score_group<2>)(
                angles + at * angle_bytes, radii + at * radius_bytes, pairs, rows, tables, units,
                out + head * rows * stride + group * GROUP, stride);
        }
    });
}
