// Groups of weights to short floats with the scale of least squared error: docs/exports.md.
//
// The scales near the one that takes the largest weight to the largest float are all tried: of E4M3 those from two bytes
// below to six above it (one and a half times the scale is what Four over Six, arXiv 2512.02010, adds), of E8M0 it and
// the half. On the weights of all-MiniLM-L6-v2 no scale further away is better. Where columns count unequally, smaller ones
// may be, and are tried. Between two scales of MXFP4, of which one is twice the other, errors count by the square of the
// weight, if no column counts more: the smaller one clips the largest weights, of which models notice more.
#include "group_fitting.hpp"
#include "interface.hpp"
#include "short_floats.hpp"

namespace {

// The importance of weights that all count alike: one that is not Alike is a vector.
struct Alike {};
INLINE Floats operator*(Alike, Floats x) { return x; }

// Of FLOAT_MODES in groups.py; the rest is NVFP4.
enum Mode : int64_t { MXFP4 = 4, MXFP8 };

constexpr int MOST_WEIGHTS = 256;

// The scales of groups of floats. unit: what a scale of 1 is worth.
struct ByteScale {
    static constexpr int BELOW = 2, ABOVE = 6, WEIGHTED_BELOW = 9;
    static constexpr int LEAST = 1, MOST = 126;

    INLINE static Unsigned near(Floats scale) { return e4m3_from_float(scale); }
    INLINE static Floats value_of(Unsigned byte) { return float_from_e4m3(byte); }
};

struct PowerScale {
    static constexpr int BELOW = 1, ABOVE = 0, WEIGHTED_BELOW = 2;
    static constexpr int LEAST = 0, MOST = 254;

    INLINE static Unsigned near(Floats scale) { return e8m0_not_below(scale); }
    INLINE static Floats value_of(Unsigned byte) { return float_from_e8m0(byte); }
};

// The nearest float of a type to t, not negative, as a number: between two powers of two floats have equal distances,
// so adding and subtracting a large number rounds.
template <class Element>
INLINE Floats nearest(Floats t) {
    Floats power = maximum(floats(bits(t) & 0x7F800000), splat(Element::LEAST_POWER));
    Floats large = power * (0x1.8p23f / Element::STEPS);
    return minimum((t + large) - large, splat(Element::LARGEST));
}

// Sixteen groups, or fewer. importance: how much each weight counts, [size], or Alike. gain: see Job.
template <class Element, class Scale, class Importance>
INLINE Result fit_sixteen(const float* values, int64_t groups, int64_t size, float unit, float gain,
                          Importance importance, uint8_t* codes) {
    constexpr bool weighted = !std::is_same_v<decltype(importance(0)), Alike>;
    constexpr bool by_size = !weighted && std::is_same_v<Element, E2m1> && std::is_same_v<Scale, PowerScale>;
    constexpr int below = weighted ? Scale::WEIGHTED_BELOW : Scale::BELOW, count = below + Scale::ABOVE + 1;
    Floats work[MOST_WEIGHTS], most{};
    auto see = [&](auto& columns) ALWAYS {
        each<LANES>([&](auto k) ALWAYS { most = maximum(magnitude(columns[k]), most); });
    };
    transpose_groups(values, size, size, work, see, groups);
    const Ints middle = Ints(Scale::near(most * gain / (Element::LARGEST * unit))) - below;
    Floats scales[count], inverses[count], errors[count]{};
    Unsigned bytes[count];
    each<count>([&](auto c) ALWAYS {
        Ints byte = minimum(maximum(middle + int(c), splat<Ints>(Scale::LEAST)), splat<Ints>(Scale::MOST));
        bytes[c] = Unsigned(byte);
        scales[c] = Scale::value_of(bytes[c]) * unit;
        inverses[c] = gain / scales[c];
    });
    // Errors in steps of each scale, so that their squares stay in range.
    for (int64_t j = 0; j < size; j++) {
        Floats w = magnitude(work[j]), steps = w * inverses[0];
        each<count>([&](auto c) ALWAYS {
            Floats t = w * inverses[c], left = t - nearest<Element>(t), squared = importance(j) * (left * left);
            if constexpr (by_size) squared *= steps * steps;
            errors[c] += squared;
        });
    }
    Unsigned byte = bytes[0];
    Floats scale = scales[0], least = errors[0];
    each<count - 1>([&](auto before) ALWAYS {
        constexpr int c = before + 1;
        // Compared in steps of the better scale so far.
        Floats ratio = scales[c] * (1.0f / scale), error = errors[c] * ratio * ratio;
        Truths better = error < least;
        byte = choose<Unsigned>(better, bytes[c], byte);
        scale = choose<Floats>(better, scales[c], scale);
        least = choose<Floats>(better, errors[c], least);
    });
    Result result = {converted<Floats>(byte), Floats{}};
    const Floats inverse = gain / scale;
    for (int64_t at = 0; at < size; at += LANES) {
        Bytes columns[LANES];
        for (int k = 0; k < LANES; k++) {
            Floats w = work[at + k];
            Unsigned code = Element::code_of(magnitude(w) * inverse);
            result.measure(w, magnitude(w) - Element::value_of(code) * scale);
            columns[k] = converted<Bytes>(choose<Unsigned>(code > 0, code | Element::sign_bit(w), code));
        }
        store_codes(columns, codes + at, size, groups, LANES);
    }
    return result;
}

// What becomes of all groups. importance: [row_groups, size], the same for each row; null: all weights count alike.
// gain: what weights are multiplied by before scales and codes are chosen; errors are those of the weights themselves.
struct Job {
    const float* values;
    const float* importance;
    int64_t groups, size, row_groups;
    float unit, gain;
    uint8_t* codes;

    // write(result of sixteen groups or fewer, number of the first, how many are left) for all of them.
    template <class Element, class Scale, class Write>
    INLINE void run(Write write) const {
        Floats weights[MOST_WEIGHTS];
        for (int64_t first = 0; first < groups; first += LANES) {
            const float* from = values + first * size;
            uint8_t* to = codes + first * size;
            const int64_t left = groups - first;
            if (importance) {
                load_importance(first, weights);
                auto of = [&](int64_t j) ALWAYS { return weights[j]; };
                write(fit_sixteen<Element, Scale>(from, left, size, unit, gain, of, to), first, left);
            } else {
                auto alike = [](int64_t) ALWAYS { return Alike{}; };
                write(fit_sixteen<Element, Scale>(from, left, size, unit, gain, alike, to), first, left);
            }
        }
    }

    INLINE void load_importance(int64_t first, Floats* weights) const {
        float rows[LANES * MOST_WEIGHTS];
        for (int64_t lane = 0; lane < LANES; lane++) {
            const float* from = importance + (first + lane) % row_groups * size;
            std::memcpy(rows + lane * size, from, size * sizeof *from);
        }
        transpose_groups(rows, size, size, weights, [](auto&) ALWAYS {});
    }
};

}  // namespace

// values: [groups, size], where 16 divides the size, which is at most MOST_WEIGHTS. importance: see Job; with no
// row_groups, it is not read. codes: u8 [groups, size], E2M1 or E4M3 with a sign. scales: [groups], bytes of E8M0 or
// E4M3, as numbers. energies, errors: [groups], the sums of squares of the weights and of their errors. mode: of
// FLOAT_MODES in groups.py. unit: by which scales are multiplied. gain: see Job.
void pqweights::fit_floats(const float* values, const float* importance, uint8_t* codes, float* scales,
                           double* energies, double* errors, int64_t groups, int64_t size, int64_t row_groups,
                           int64_t mode, double unit, double gain) {
    const Job job = {values, row_groups ? importance : nullptr, groups, size, row_groups, float(unit), float(gain),
                     codes};
    auto write = [&](const Result& result, int64_t first, int64_t left) ALWAYS {
        store_first(result.scale, scales + first, left);
        store_first(result.energy, energies + first, left);
        store_first(result.error, errors + first, left);
    };
    if (mode == MXFP4) job.run<E2m1, PowerScale>(write);
    else if (mode == MXFP8) job.run<E4m3, PowerScale>(write);
    else job.run<E2m1, ByteScale>(write);
}
