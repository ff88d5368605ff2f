// Weights to codes and norms of the codec hadamard-lloyd-max: section 5 of docs/format.md, whose names and order these
// functions follow.
//
// Sixteen blocks are encoded together, one in each lane. Weight 16 * g + j of each, with g < 8 and j < 16, is in vector
// [g][j]. So no butterfly and no sum crosses lanes, and a number that a block has once is a lane of one vector. The
// tree sums of the format are folded over g first, and then over j.
#include "codes.hpp"
#include "conversions.hpp"
#include "interface.hpp"
#include "table.hpp"

namespace {

constexpr double INFINITE = __builtin_huge_val();

// Sixteen blocks while they are encoded.
struct Group {
    Floats work[VECTORS][LANES], terms[VECTORS][LANES];
    float x[LANES][BLOCK];  // the weights b with their signs, unless they are read from where they are
    Floats s;               // from sum_squares
    Floats r, num, den, res;  // from quantize
    double two_to_k[LANES];   // 1, but where prescale sets it
};

// --- 1. Signs; and the squares of step 2 and the butterflies below 16 of step 3, while weights are loaded ---

INLINE void load_sixteen(Floats (&x)[LANES], int g, Group& group) {
    each<LANES>([&](auto j) ALWAYS { group.terms[g][j] = x[j] * x[j]; });
    butterflies(x);
    each<LANES>([&](auto j) ALWAYS { group.work[g][j] = x[j]; });
}

// Sixteen blocks of BF16, from where they are. Pairs of weights are transposed together.
[[gnu::noinline]] void load_bf16(const uint8_t* values, Group& group) {
    for (int g = 0; g < VECTORS; g += 2) {
        Unsigned pairs[LANES];
        load_columns(values + 2 * LANES * g, 2 * BLOCK, pairs);
        each<2>([&](auto half) ALWAYS {
            Floats x[LANES];
            each<LANES / 2>([&](auto i) ALWAYS {
                Unsigned pair = pairs[LANES / 2 * half + i];
                x[2 * i] = floats(pair << 16);
                x[2 * i + 1] = floats(pair & 0xFFFF0000);
            });
            load_sixteen(x, g + half, group);
        });
    }
}

// group.x
[[gnu::noinline]] void load_floats(Group& group) {
    for (int g = 0; g < VECTORS; g++) {
        Floats x[LANES];
        load_columns(&group.x[0][LANES * g], sizeof group.x[0], x);
        load_sixteen(x, g, group);
    }
}

// Up to sixteen blocks to group.x, and zeros in place of the others.
void convert(const uint8_t* values, Dtype dtype, int count, const float* signs, Group& group) {
    if (count < LANES) std::memset(group.x + count, 0, (LANES - count) * sizeof group.x[0]);
    for (int i = 0; i < count; i++)
        for (int j = 0; j < BLOCK; j += LANES) {
            Floats x = load_values(values + (i * BLOCK + j) * bytes_of(dtype), dtype);
            store(signs ? x * load<Floats>(signs + j) : x, &group.x[i][j]);
        }
}

// --- 2. Prescale ---

INLINE Truths safe(Floats s) { return (s >= 0x1p-60f) & (s <= 0x1p60f); }

// The sums of squares, and whether no block must be prescaled.
bool sum_squares(Group& group) {
    Floats over_g[LANES];
    each<LANES>([&](auto j) ALWAYS {
        Floats terms[VECTORS];
        each<VECTORS>([&](auto g) ALWAYS { terms[g] = group.terms[g][j]; });
        over_g[j] = folded(terms);
    });
    group.s = folded(over_g);
    return mask_of(safe(group.s)) == 0xFFFF;
}

// The exponent of a number that is positive and finite.
int exponent_of(double x) { return int(load<uint64_t>(&x) >> 52) - 1023; }

// Prescale the blocks that need it; those that are not finite become zero. Returns the first of these, or -1.
[[gnu::noinline]] int prescale(Group& group) {
    const uint32_t are_safe = mask_of(safe(group.s));
    int first_bad = -1;
    for (int i = 0; i < LANES; i++) {
        if (are_safe >> i & 1) continue;
        float(&x)[BLOCK] = group.x[i];
        float largest = 0;
        bool finite = true;
        for (float v : x) {
            finite &= __builtin_fabsf(v) < float(INFINITE);
            largest = __builtin_fabsf(v) > largest ? __builtin_fabsf(v) : largest;
        }
        if (!finite) {
            std::memset(x, 0, sizeof x);
            first_bad = first_bad < 0 ? i : first_bad;
        } else if (largest > 0) {
            const int k = exponent_of(largest), a = k / 2;  // in two steps, because 2**149 exceeds float32
            for (float& v : x) v = v * float(power_of_two(-a)) * float(power_of_two(a - k));
            group.two_to_k[i] = power_of_two(k);
        }
    }
    return first_bad;
}

// --- 3, 4 and 6. Normalise, rotate, quantize, pack ---

// Adding this to a number makes its low bits the integer next to it: above 2**23 floats are integers. The upper three
// bytes stay those of the sum. Below 6 bits integers may be negative, and 128 keeps them from borrowing.
template <int width>
constexpr float ROUNDER = width < 6 ? 0x1p23f + 0x1p22f + 128 : 0x1p23f;
template <int width>
constexpr uint32_t UPPER_BYTES = width < 6 ? 0x4B400000 : 0x4B000000;

// The nearest level to z, and z; from 6 bits on the magnitudes of both: their product and their squared difference are
// the same. The low bits of the code are the number of the level less half the number of levels, modulo 2**width; its
// upper bytes are UPPER_BYTES.
struct Nearest {
    Unsigned code;
    Floats z, level;
};

// The search for levels, which must be symmetric: a polynomial that grows, and that at the k-th threshold from 0 on is
// nearer to k than to any other integer, says where to look; one comparison with a threshold then decides. Laid out by
// kernels/cpu.py.
template <int width>
struct Search {
    static constexpr int DEGREE = width < 7 ? 2 : 4;
    // Indexed by code, or, from 6 bits on, by the number of a level or threshold that is not negative.
    static constexpr int ENTRIES = width < 5 ? 16 : width == 5 ? 32 : 1 << (width - 1);

    float last;            // the largest threshold
    Unsigned one = bits(splat(hidden(0x1p-149f)));  // 1: adding it where a condition holds remains one operation
    const float* factors;  // of the polynomial, the highest power first, and none for the power 0
    Table<ENTRIES> thresholds, levels;

    INLINE explicit Search(const float* from)
        : last(*from), factors(from + 1), thresholds(from + 1 + DEGREE), levels(from + 1 + DEGREE + ENTRIES) {}

    // The polynomial at a magnitude, with the sign of `place`, plus a number. A fused operation may give the other of
    // the two codes that are possible, which the comparison makes up for.
    INLINE Floats estimate(Floats length, Floats place, float number) const {
        Floats slope = splat(factors[0]);
        each<DEGREE - 1>([&](auto i) ALWAYS { slope = multiply_add(slope, length, splat(factors[i + 1])); });
        return multiply_add(slope, place, splat(number));
    }

    INLINE Nearest nearest(Floats z) const {
        if constexpr (width < 6) {
            Floats place = clamped(z, last);
            // One less than the code, or by chance the code.
            Unsigned below = bits(estimate(magnitude(place), place, ROUNDER<width> - 1));
            Unsigned code = choose<Unsigned>(z >= thresholds[below], below + one, below);
            return {code, z, levels[code]};
        } else {
            Truths negative = z < 0.0f;  // not -0, which belongs to the upper level as every tie does
            Floats length = magnitude(z), place = minimum(length, splat(last));
            // The number of the level from 0 on, or by chance one more.
            Unsigned above = bits(estimate(place, place, ROUNDER<width>));
            // A tie of a negative z goes to the level of smaller magnitude: compare with the float just below it.
            Ints compared = (Ints)choose<Unsigned>(negative, bits(length) - one, bits(length));
            Unsigned code = choose<Unsigned>(compared < (Ints)thresholds[above], above - one, above);
            return {choose<Unsigned>(negative, code ^ 255, code), length, levels[code]};
        }
    }
};

// Quantize the blocks of a group. Meanwhile the memory from `upcoming` on, which need not exist, is fetched for a later
// group: processors do not foresee the order in which load_columns reads.
template <int width>
[[gnu::noinline]] void quantize(Group& group, const float* search_table, uint8_t* rows, uintptr_t upcoming) {
    const Search<width> search(search_table);
    group.r = square_root(group.s);
    const Floats i = choose<Floats>(group.r > 0.0f, 1.0f / group.r, splat(0.0f));
    Floats num[LANES], den[LANES], res[LANES];
    Unsigned packed[2][LANES];
    for (int j = 0; j < LANES; j++) {
        for (int line = 0; line < 4; line++) __builtin_prefetch((const void*)(upcoming + 256 * j + 64 * line));
        Floats z[VECTORS], zc[VECTORS], cc[VECTORS], ee[VECTORS];
        Unsigned codes[VECTORS], words[2];
        each<VECTORS>([&](auto g) ALWAYS { z[g] = group.work[g][j]; });
        butterflies(z);
        each<VECTORS>([&](auto g) ALWAYS {
            const Nearest found = search.nearest(z[g] * i);
            const Floats error = found.z - found.level;
            codes[g] = found.code;
            zc[g] = found.z * found.level;
            cc[g] = found.level * found.level;
            ee[g] = error * error;
        });
        num[j] = folded(zc);
        den[j] = folded(cc);
        res[j] = folded(ee);
        pack_eight<width>(codes, UPPER_BYTES<width> | 1 << (width - 1), words);
        packed[0][j] = words[0], packed[1][j] = words[1];
    }
    group.num = folded(num);
    group.den = folded(den);
    group.res = folded(res);
    store_rows<(width < 4 ? width : 4)>(packed[0], rows, LANES * width);
    if constexpr (width > 4) store_rows<width - 4>(packed[1], rows + 4 * LANES, LANES * width);
}

constexpr decltype(&quantize<2>) QUANTIZE[] = {quantize<2>, quantize<3>, quantize<4>, quantize<5>,
                                               quantize<6>, quantize<7>, quantize<8>};

// --- 5. Norms and errors ---

// exact: q * 2**k, of which norms are what is stored
struct Measured {
    Words norms;
    Doubles exact, energies, errors;
};

// unit: 2**e. gain: a factor of the norms. All of the group is finite; a norm may be infinite where the exponent does not fit, and its error a NaN.
Measured measure(const Group& group, double unit, double gain) {
    const Doubles two_to_k = load<Doubles>(group.two_to_k);
    Doubles exact = converted<Doubles>(group.r * (group.num / group.den)) * two_to_k * gain;
    Words norms = half_from_float(converted<Floats>(exact * (1 / unit)));
    Doubles energy = converted<Doubles>(group.s) * two_to_k * two_to_k;
    Doubles length = converted<Doubles>(group.r) * two_to_k;
    Doubles divisor = choose<Doubles>(length > 0.0, length, splat<Doubles>(1));
    Doubles u = 1.0 - converted<Doubles>(float_from_half(norms)) * unit / divisor;
    Doubles num = converted<Doubles>(group.num), den = converted<Doubles>(group.den);
    Doubles error = (converted<Doubles>(group.res) + 2.0 * u * (num - den)) + u * u * den;
    return {norms, exact, energy, energy / 128.0 * maximum(Doubles{}, error)};  // a NaN stays
}

}  // namespace

// values: [blocks, 128] of a dtype. search: see Search. signs: [128], factors of the coordinates, or null.
// codes, norms, energies, errors: out. stats: out, [3], the smallest norm, the largest, and the first bad block: see
// Measures in kernels/__init__.py. unit: 2**e of section 5. gain: see there.
void pqweights::encode(const uint8_t* values, int64_t dtype_number, const float* search, const float* signs,
                       uint8_t* codes, uint16_t* norms, double* energies, double* errors, double* stats,
                       int64_t blocks, int64_t width, double unit, double gain) {
    const auto dtype = Dtype(dtype_number);
    Group group;
    uint8_t rows[LANES * BLOCK];
    Doubles smallest = splat<Doubles>(INFINITE), largest{};
    int64_t first_bad = -1;
    for (int64_t first = 0; first < blocks; first += LANES) {
        const int count = blocks - first < LANES ? int(blocks - first) : LANES;
        const uint8_t* from = values + first * BLOCK * bytes_of(dtype);
        store(splat<Doubles>(1), group.two_to_k);
        if (count == LANES && dtype == Dtype::BF16 && !signs) {
            load_bf16(from, group);
        } else {
            convert(from, dtype, count, signs, group);
            load_floats(group);
        }
        if (!sum_squares(group)) {
            convert(from, dtype, count, signs, group);
            const int bad = prescale(group);
            if (bad >= 0 && first_bad < 0) first_bad = first + bad;
            load_floats(group);
            sum_squares(group);
        }
        uint8_t* to = codes + first * LANES * width;
        // Two groups ahead, which may lie beyond the weights: it is fetched, not read.
        const uintptr_t upcoming = uintptr_t(from) + 2 * LANES * BLOCK * bytes_of(dtype);
        QUANTIZE[width - 2](group, search, count == LANES ? to : rows, upcoming);
        if (count < LANES) std::memcpy(to, rows, count * LANES * width);
        const Measured found = measure(group, unit, gain);
        std::memcpy(norms + first, &found.norms, count * sizeof *norms);
        std::memcpy(energies + first, &found.energies, count * sizeof *energies);
        std::memcpy(errors + first, &found.errors, count * sizeof *errors);
        smallest = minimum(choose<Doubles>(found.exact > 0.0, found.exact, splat<Doubles>(INFINITE)), smallest);
        largest = maximum(found.exact, largest);
    }
    stats[0] = INFINITE, stats[1] = 0, stats[2] = double(first_bad);
    for (int i = 0; i < LANES; i++) {
        stats[0] = smallest[i] < stats[0] ? smallest[i] : stats[0];
        stats[1] = largest[i] > stats[1] ? largest[i] : stats[1];
    }
}
