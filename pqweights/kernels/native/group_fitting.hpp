// Scales and offsets of groups of weights by least squares, sixteen groups at a time: what the integers of torchao,
// MLX and compressed-tensors (groups.cpp, importance.cpp) have in common with the blocks of GGUF (gguf_*.cpp).
//
// Weight j of each group lies in the j-th vector of the work, multiplied by a power of two of the group's own. So
// nothing is summed across lanes, and the result of a group depends on no other group.
//
// A chain of fits is at some scale and zero. With t = (w - zero) / scale, r the nearest code and e = t - r, the line
// e = slope * r + shift by least squares leads to the best scale and zero for the codes r, scale * (slope + 1)
// and zero + scale * shift, and to the error that they leave. The best fit is kept, and the chain moves on by `relax`
// times that step. Going several times too far leaves the local minimum in which plain alternation (as in Lloyd's
// algorithm) stops at once; that is worth more than many starts.
#pragma once

#include "lanes.hpp"

namespace {

// --- loading; functions of their own, because they would be the largest part of most kernels ---

// The first `count` weights, at most sixteen, of `groups` groups: in vector k weight k of each. Those that are missing
// are zeros. One group begins `stride` weights after the other.
[[gnu::noinline]] inline void load_weights(const float* values, int64_t stride, int64_t groups, int64_t count,
                                           Floats (&columns)[LANES]) {
    if (groups >= LANES && count >= LANES) return load_columns(values, stride * int64_t(sizeof(float)), columns);
    float some[LANES][LANES]{};
    for (int64_t lane = 0; lane < groups && lane < LANES; lane++) {
        std::memcpy(some[lane], values + lane * stride, (count < LANES ? count : LANES) * sizeof(float));
    }
    load_columns(some, sizeof some[0], columns);
}

// The inverse, for codes; the columns become rows.
[[gnu::noinline]] inline void store_codes(Bytes (&columns)[LANES], uint8_t* codes, int64_t stride, int64_t groups,
                                          int64_t count) {
    transpose(columns);
    for (int64_t lane = 0; lane < groups && lane < LANES; lane++) {
        store_first(columns[lane], codes + lane * stride, count);
    }
}

// Write sixteen groups, or fewer, of a size that 16 divides to the work [size], and call see(columns) with each sixteen
// vectors of it.
template <class See>
INLINE void transpose_groups(const float* values, int64_t stride, int64_t size, Floats* work, See see,
                             int64_t groups = LANES) {
    for (int64_t at = 0; at < size; at += LANES) {
        Floats columns[LANES];
        load_weights(values + at, stride, groups, LANES, columns);
        each<LANES>([&](auto k) ALWAYS { work[at + k] = columns[k]; });
        see(columns);
    }
}

struct Extremes {
    Floats smallest, largest;
};

INLINE Extremes extended(Extremes so_far, const Floats (&columns)[LANES]) {
    Extremes own = {columns[0], columns[0]};
    each<LANES - 1>([&](auto k) ALWAYS {
        own = {minimum(own.smallest, columns[k + 1]), maximum(own.largest, columns[k + 1])};
    });
    return {minimum(so_far.smallest, own.smallest), maximum(so_far.largest, own.largest)};
}

// Powers of two that lead from the weights of each group to the work, where magnitudes end in [1, 4), and back.
struct Scaling {
    Ints exponent;
    Floats down, up;
};

// most: the largest magnitude of each group; from beyond 2**lowest and 2**highest, groups are not scaled any further.
INLINE Scaling scaling_of(Floats most, int lowest, int highest) {
    Ints exponent = Ints(bits(most) >> 23) - 127;  // of a subnormal number: -127
    exponent = minimum(maximum(exponent, splat<Ints>(lowest)), splat<Ints>(highest));
    return {exponent, floats(Unsigned(127 - exponent) << 23), floats(Unsigned(127 + exponent) << 23)};
}

INLINE void scale_groups(Floats* work, int64_t size, Floats down) {
    for (int64_t j = 0; j < size; j++) work[j] *= down;
}

// --- what becomes of groups ---

// Of KINDS in groups.py: whether groups have any offset, none, or one that is the negative of a code times the scale.
// The offset of the last kind is stored as that code, the zero.
enum class Kind : int64_t { AFFINE, SYMMETRIC, ASYMMETRIC };

// Of sixteen: scales and offsets as they are stored, and the sums of squares of weights and of errors.
struct Result {
    Floats scale, offset;
    Doubles energy{}, error{};

    INLINE void measure(Floats weights, Floats errors) {
        Doubles w = converted<Doubles>(weights), e = converted<Doubles>(errors);
        energy += w * w;
        error += e * e;
    }

    // Write those of the first `count` groups, at most sixteen.
    INLINE void write(float* scales, float* offsets, double* energies, double* errors, int64_t first,
                      int64_t count) const {
        store_first(scale, scales + first, count);
        store_first(offset, offsets + first, count);
        store_first(energy, energies + first, count);
        store_first(error, errors + first, count);
    }
};

// --- codes ---

// The nearest code to t = (w - zero) / scale, as a number.
INLINE Floats nearest_code(Floats t, Floats lowest, Floats highest) {
    return minimum(maximum(rint(t), lowest), highest);
}
INLINE Floats nearest_code(Floats t, float lowest, float highest) {
    return nearest_code(t, splat(lowest), splat(highest));
}

// The same, but a NaN stays one.
INLINE Floats nearest_code_or_nan(Floats t, float lowest, float highest) {
    return minimum(splat(highest), maximum(splat(lowest), rint(t)));
}

// A scale, and the code that stands for 0.
struct Zero {
    Floats scale, code;
};

// That of a range of weights and 0, by the rule of compressed-tensors (calculate_qparams, asymmetric): every operation
// is rounded, and the codes are shifted by `half`. The scale is 0 where the range is.
template <class Round>
INLINE Zero zero_of_range(Floats smallest, Floats largest, float half, Round round) {
    Floats below = minimum(smallest, Floats{}), above = maximum(largest, Floats{});
    Floats scale = round(round(above - below) / (half * 2.0f - 1.0f));
    Floats code = nearest_code(round(-half - round(below / scale)), -half, half - 1.0f);
    return {scale, choose<Floats>((below == 0.0f) & (scale == 0.0f), Floats{}, code) + half};
}

// --- chains of fits ---

// zero: the weight that the number 0 among the codes stands for; of lines through the origin, anything, which stays.
struct Chain {
    Floats scale, zero;
};

struct Fit {
    Floats error, scale, zero;

    INLINE void replace(Truths where, Fit other) {
        error = choose<Floats>(where, other.error, error);
        scale = choose<Floats>(where, other.scale, scale);
        zero = choose<Floats>(where, other.zero, zero);
    }
};

// Sums over the weights of a group, of importance times products of codes r and what is left, e. Those that nobody
// reads cost nothing.
struct Moments {
    Floats ee{}, er{}, rr{}, e{}, r{};

    // factor: the importance.
    INLINE void add(Floats t, Floats code, Floats factor) {
        Floats left = t - code, weighted = factor * left, weighted_code = factor * code;
        ee += weighted * left;
        er += weighted * code;
        rr += weighted_code * code;
        e += weighted;
        r += weighted_code;
    }
};

// e = slope * r + shift, and the squared error that is left.
struct Line {
    Floats slope, shift, error;
};

// The line with a shift. total: of the importance; codes that spread less than `least_spread` have no slope.
INLINE Line line_of(const Moments& m, Floats total, Floats least_spread) {
    Floats spread = m.rr - m.r * (m.r / total);
    Truths spreads = spread > least_spread;
    Floats slope = (m.er - m.e * (m.r / total)) / choose<Floats>(spreads, spread, splat(1.0f));
    slope = choose<Floats>(spreads, slope, Floats{});
    Floats shift = (m.e - slope * m.r) / total;
    return {slope, shift, (m.ee - shift * m.e) - slope * m.er};
}

// The line through the origin.
INLINE Line line_through_origin(Floats ee, Floats er, Floats rr) {
    Floats slope = er / rr;
    return {slope, Floats{}, ee - slope * er};
}

// Where a line leads from a chain.
INLINE Fit fit_of(Chain chain, Line line) {
    return {(line.error * chain.scale) * chain.scale, chain.scale * (line.slope + 1.0f),
            chain.zero + chain.scale * line.shift};
}

// The chain `relax` times as far on the way that a line leads; the scale is at most halved or doubled.
INLINE Chain moved(Chain chain, Line line, float relax) {
    Floats step = minimum(maximum(relax * line.slope, splat(-0.5f)), splat(1.0f));
    return {chain.scale * (step + 1.0f), chain.zero + chain.scale * (relax * line.shift)};
}

// --- sums over codes ---

// Sums over the weights w of a group and their codes c, of importance times products.
struct CodeSums {
    Floats w{}, c{}, cc{}, cw{};
};

// w = slope * c + a constant, by least squares.
struct CodeLine {
    Floats spread, slope;
};

// mean: of the codes; 0 if the constant is to be 0. If the spread is none to speak of, neither is the slope.
INLINE CodeLine code_line(const CodeSums& sums, Floats mean) {
    Floats spread = sums.cc - mean * sums.c;
    return {spread, (sums.cw - mean * sums.w) / spread};
}

}  // namespace
