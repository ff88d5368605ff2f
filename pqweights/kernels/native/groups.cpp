// Groups of weights to integers with nearly the least squared error, for torchao, MLX and compressed-tensors:
// docs/exports.md. group_fitting.hpp has what this shares with GGUF's blocks; tests/references.md names what
// checks it. Below, half = 2**(bits - 1).
//
// 1. Load.    Transpose, find the extremes, and scale by a power of two so that magnitudes end in [1, 4).
// 2. Fit.     Three chains start from three cuts of the range and make four passes over the weights.
// 3. Round.   The best fits of the chains, the range itself and what the runtimes' own rules would choose become
//             candidates, rounded to BF16 as they will be stored.
// 4. Measure. Decode each candidate as stored and sum its squared error in float64; the smallest error wins.
// 5. Encode.  Write the codes of the winner.
#include "conversions.hpp"
#include "group_fitting.hpp"
#include "interface.hpp"

namespace {

constexpr int CHAINS = 3, PASSES = 4, CANDIDATES = 2 + CHAINS, MOST_WEIGHTS = 256;
constexpr float SMALLEST_NORMAL = 0x1p-126f;

// What groups become. settings: for each chain the shares of the range that it keeps below and above the middle
// (symmetric: the first is a share of the plain scale), and then `relax`. middle: codes count from the middle one, not
// from the offset.
struct Rule {
    int64_t size;
    float half, last;
    bool middle;
    const float* settings;
};

// What is known of each group once it is loaded, in the scale of the work.
struct Extent {
    Floats smallest, largest, most;  // somewhat nearer to 0 where decoding them might overflow
    Floats down, up;
    Truths constant;  // whether all weights are equal (symmetric: all are 0)
    Truths huge;      // whether decoding the largest weight might overflow
};

// A scale and an offset as they would be stored, and the same in the scale of the work.
struct Candidate {
    Floats scale, offset, inner_scale, inner_offset, inverse;
};

// --- 1. load ---

template <bool has_offset>
INLINE Extent load_groups(const float* values, int64_t groups, const Rule& rule, Floats* work) {
    const Floats infinite = splat(__builtin_inff());
    Extremes of = {infinite, -infinite};
    auto see = [&](auto& columns) ALWAYS { of = extended(of, columns); };
    transpose_groups(values, rule.size, rule.size, work, see, groups);
    Floats most = maximum(of.largest, -of.smallest);
    Scaling scaling = scaling_of(most, -126, 126);
    Truths constant = has_offset ? of.smallest == of.largest : most == 0.0f;
    // Decoding the largest float32 might overflow: such groups get the extremes of a smaller range, and no fit.
    Truths huge = scaling.exponent == 126;
    Floats keep = choose<Floats>(huge, splat(has_offset ? 0.49f : 63.0f / 64), splat(1.0f));
    if (has_offset) keep = choose<Floats>(constant, splat(1.0f), keep);
    scale_groups(work, rule.size, scaling.down);
    auto scaled = [&](Floats x) ALWAYS { return x * scaling.down * keep; };
    return {scaled(of.smallest), scaled(of.largest), scaled(most), scaling.down, scaling.up, constant, huge};
}

// --- 2. fit ---

// The scale of the whole range; without an offset, the weight of largest magnitude gets the code that has no mirror
// image, so scales have signs.
template <bool has_offset>
INLINE Floats plain_scale(const Rule& rule, const Extent& extent) {
    if (has_offset) return (extent.largest - extent.smallest) / rule.last;
    return -(choose<Floats>(-extent.smallest >= extent.largest, extent.smallest, extent.largest) / rule.half);
}

// Where a chain starts, at its shares of the range below and above the middle.
template <bool has_offset>
INLINE Chain started(const Rule& rule, const Extent& extent, Floats plain, float below, float above) {
    Chain chain = {plain * below, Floats{}};
    if (has_offset) {
        Floats center = (extent.largest + extent.smallest) * 0.5f;
        Floats begin = center + (extent.smallest - center) * below;
        chain.scale = (center + (extent.largest - center) * above - begin) / rule.last;
        chain.zero = begin + rule.half * chain.scale;
    }
    chain.scale = choose<Floats>(extent.constant, splat(1.0f), chain.scale);
    return chain;
}

// Make a pass with all chains.
template <bool has_offset>
INLINE void improve(const Rule& rule, const Floats* work, Chain (&chains)[CHAINS], Fit (&best)[CHAINS]) {
    Moments moments[CHAINS];
    Floats inverses[CHAINS];
    each<CHAINS>([&](auto c) ALWAYS { inverses[c] = 1.0f / chains[c].scale; });
    for (int64_t j = 0; j < rule.size; j++) {
        each<CHAINS>([&](auto c) ALWAYS {
            Floats t = (has_offset ? work[j] - chains[c].zero : work[j]) * inverses[c];
            moments[c].add(t, nearest_code(t, -rule.half, rule.half - 1.0f), Alike{});
        });
    }
    each<CHAINS>([&](auto c) ALWAYS {
        const Moments& m = moments[c];
        Line line = has_offset ? line_of(m, splat(float(rule.size)), splat(0.5f))
                               : line_through_origin(m.ee, m.er, maximum(m.rr, splat(0.5f)));
        Fit fit = fit_of(chains[c], line);
        best[c].replace((fit.error < best[c].error) & (magnitude(fit.scale) > magnitude(chains[c].scale) * 0.25f), fit);
        chains[c] = moved(chains[c], line, rule.settings[2 * CHAINS]);
    });
}

// --- 3. round ---

// The nearest BF16, saturated.
INLINE Floats storable(Floats x) {
    const Floats largest = splat(0x1.FEp127f);
    return maximum(minimum(nearest_bf16(x), largest), -largest);
}

// The nearest BF16 that is neither 0 nor so small that a runtime may take it for 0.
INLINE Floats storable_scale(Floats x) {
    Floats nearest = storable(x);
    Floats least = choose<Floats>(nearest < 0.0f, splat(-SMALLEST_NORMAL), splat(SMALLEST_NORMAL));
    return choose<Floats>(magnitude(nearest) < SMALLEST_NORMAL, least, nearest);
}

INLINE Candidate candidate_of(const Extent& extent, Floats scale, Floats offset) {
    Floats inner = scale * extent.down;
    return {scale, offset, inner, offset * extent.down, 1.0f / inner};
}

// A scale, and an offset that zero_at(scale of the work) says, rounded as they are stored.
template <bool has_offset, class ZeroAt>
INLINE Candidate stored(const Extent& extent, Floats scale, ZeroAt zero_at) {
    Floats kept = choose<Floats>(extent.constant, splat(1.0f), storable_scale(scale * extent.up));
    if (!has_offset) return candidate_of(extent, kept, Floats{});
    Floats zero = choose<Floats>(extent.constant, extent.smallest, zero_at(kept * extent.down));
    return candidate_of(extent, kept, storable(zero * extent.up));
}

// What the runtimes would choose: with an offset, 0 becomes a code, counted from the end of larger magnitude; without
// one, scales are positive.
template <bool has_offset, class Stored>
INLINE Candidate runtimes_choice(const Rule& rule, const Extent& extent, Floats plain, Stored stored_from) {
    if (!has_offset) return stored_from(extent.most / (rule.half - 0.5f), Floats{});
    Truths below = -extent.smallest > extent.largest;
    Floats edge = choose<Floats>(below, extent.smallest, extent.largest);
    Floats step = choose<Floats>(below, plain, -plain);
    Floats steps = rint(edge / step);
    Truths snaps = steps < 0.0f;
    Floats scale = choose<Floats>(snaps, edge / choose<Floats>(snaps, steps, splat(-1.0f)), step);
    return stored_from(scale, choose<Floats>(snaps, edge, Floats{}));
}

template <bool has_offset>
INLINE void find_candidates(const Rule& rule, const Extent& extent, const Floats* work,
                            Candidate (&found)[CANDIDATES]) {
    // The offset is the weight of the code 0 or, if codes count from the middle, of the code `half`.
    auto from_start = [&](Floats scale, Floats start) ALWAYS {
        return stored<has_offset>(extent, scale, [&](Floats inner) ALWAYS {
            return rule.middle ? start + rule.half * inner : start;
        });
    };
    auto from_zero = [&](const Fit& fit) ALWAYS {
        return stored<has_offset>(extent, fit.scale, [&](Floats inner) ALWAYS {
            return rule.middle ? fit.zero : fit.zero - rule.half * inner;
        });
    };
    Floats plain = plain_scale<has_offset>(rule, extent);
    found[0] = from_start(plain, extent.smallest);
    found[1] = runtimes_choice<has_offset>(rule, extent, plain, from_start);
    Chain chains[CHAINS];
    Fit best[CHAINS];
    each<CHAINS>([&](auto c) ALWAYS {
        chains[c] = started<has_offset>(rule, extent, plain, rule.settings[2 * c], rule.settings[2 * c + 1]);
        best[c] = {splat(__builtin_inff()), plain, Floats{}};
    });
    for (int pass = 0; pass < PASSES; pass++) improve<has_offset>(rule, work, chains, best);
    each<CHAINS>([&](auto c) ALWAYS { found[2 + c] = from_zero(best[c]); });
}

// --- 4. measure ---

// The nearest code to a weight, as the rule counts codes.
template <bool has_offset>
INLINE Floats code_of(const Rule& rule, Floats w, const Candidate& candidate) {
    Floats t = (has_offset ? w - candidate.inner_offset : w) * candidate.inverse;
    return rule.middle ? nearest_code(t, -rule.half, rule.half - 1.0f) : nearest_code(t, 0.0f, rule.last);
}

// Sums of squares, in the scale of the work.
struct Squares {
    Doubles energy{}, errors[CANDIDATES]{};
};

template <bool has_offset>
INLINE Squares measured(const Rule& rule, const Floats* work, const Candidate (&candidates)[CANDIDATES]) {
    Squares sums;
    for (int64_t j = 0; j < rule.size; j++) {
        Floats w = work[j];
        each<CANDIDATES>([&](auto c) ALWAYS {
            Floats decoded = code_of<has_offset>(rule, w, candidates[c]) * candidates[c].inner_scale;
            if (has_offset) decoded += candidates[c].inner_offset;
            Doubles e = converted<Doubles>(w - decoded);
            sums.errors[c] += e * e;
        });
        Doubles wide = converted<Doubles>(w);
        sums.energy += wide * wide;
    }
    return sums;
}

// The candidate of the smallest error, the earlier one on a tie, and its error; huge groups take the first.
INLINE Candidate winner_of(const Extent& extent, const Candidate (&candidates)[CANDIDATES], const Squares& sums,
                           Doubles& least) {
    Floats scale = candidates[0].scale, offset = candidates[0].offset;
    least = sums.errors[0];
    each<CANDIDATES - 1>([&](auto before) ALWAYS {
        const Candidate& other = candidates[before + 1];
        auto wins = (sums.errors[before + 1] < least) & ~converted<Longs>(extent.huge);
        least = choose<Doubles>(wins, sums.errors[before + 1], least);
        scale = choose<Floats>(converted<Truths>(wins), other.scale, scale);
        offset = choose<Floats>(converted<Truths>(wins), other.offset, offset);
    });
    return candidate_of(extent, scale, offset);
}

// --- 5. encode ---

// Write the codes [groups, size], counted from 0.
template <bool has_offset>
INLINE void encode(const Rule& rule, const Floats* work, const Candidate& winner, uint8_t* codes, int64_t groups) {
    const float lowest = rule.middle ? -rule.half : 0.0f;
    for (int64_t at = 0; at < rule.size; at += LANES) {
        Bytes columns[LANES];
        each<LANES>([&](auto k) ALWAYS {
            Floats code = code_of<has_offset>(rule, work[at + k], winner) - lowest;
            columns[k] = converted<Bytes>(converted<Ints>(code));
        });
        store_codes(columns, codes + at, rule.size, groups, LANES);
    }
}

// Fit sixteen groups, or fewer.
template <bool has_offset>
Result fit_sixteen(const float* values, int64_t groups, const Rule& rule, uint8_t* codes) {
    Floats work[MOST_WEIGHTS];
    Extent extent = load_groups<has_offset>(values, groups, rule, work);
    Candidate candidates[CANDIDATES];
    find_candidates<has_offset>(rule, extent, work, candidates);
    Squares sums = measured<has_offset>(rule, work, candidates);
    Doubles least, up = converted<Doubles>(extent.up);
    Candidate winner = winner_of(extent, candidates, sums, least);
    encode<has_offset>(rule, work, winner, codes, groups);
    return {winner.scale, winner.offset, sums.energy * up * up, least * up * up};
}

}  // namespace

// values: [groups, size], where 16 divides the size, which is at most MOST_WEIGHTS. settings: see Rule. codes: u8
// [groups, size], counted from 0. scales, offsets: [groups], BF16 numbers. energies, errors: [groups], the sums of
// squares of the weights and of their errors. bits: 2 to 8. symmetric: without an offset; codes then count from the
// middle.
void pqweights::fit(const float* values, const float* settings, uint8_t* codes, float* scales, float* offsets,
                    double* energies, double* errors, int64_t groups, int64_t size, int64_t bits, int64_t symmetric,
                    int64_t middle) {
    const float half = float(1 << (bits - 1));
    const Rule rule = {size, half, half * 2.0f - 1.0f, middle || symmetric, settings};
    for (int64_t first = 0; first < groups; first += LANES) {
        const int64_t left = groups - first, at = first * size;
        Result found = symmetric ? fit_sixteen<false>(values + at, left, rule, codes + at)
                                 : fit_sixteen<true>(values + at, left, rule, codes + at);
        found.write(scales, offsets, energies, errors, first, left);
    }
}
