// Groups of weights to integers with nearly the least squared error, where that of large weights counts more, for
// torchao, MLX and compressed-tensors: docs/exports.md. group_fitting.hpp has what this shares with GGUF's blocks;
// tests/references.md names what checks it. Below, half = 2**(bits - 1).
//
// 1. Load.    Transpose, find the extremes, scale by a power of two so that magnitudes end in [1, 4), and weigh.
// 2. Fit.     Three chains start from three cuts of the range and make four passes over the weights. If the zero must
//             be a code, two passes tell between which codes it would lie; from both, four passes fit the scale alone.
// 3. Round.   The best fits of the chains, the range itself and what the runtimes' own rules would choose become
//             candidates, rounded to BF16 or F16 as they will be stored.
// 4. Measure. Decode each candidate as stored and sum its weighted squared error in float64; the smallest error wins.
// 5. Encode.  Write the codes of the winner, and sum its squared error.
#include "conversions.hpp"
#include "group_fitting.hpp"
#include "interface.hpp"

namespace {

constexpr int CHAINS = 3, PASSES = 4, PASSES_TO_ZEROS = 2, CANDIDATES = 2 + CHAINS, MOST_WEIGHTS = 256;

// What groups become. shares: for each chain the shares of the range that it keeps below and above the middle
// (symmetric: the first is a share of the plain scale). evenness: what the squared error of a weight counts beside its
// magnitude, in root mean squares of the group. middle: codes count from the middle one, not from the offset. dtype: of
// scales and offsets as they are stored.
struct Rule {
    int64_t size;
    float half, last;
    bool middle;
    Dtype dtype;
    const float* shares;
    float relax, evenness;
};

// What is known of each group once it is loaded, in the scale of the work.
struct Extent {
    Floats smallest, largest, most;  // somewhat nearer to 0 where decoding them might overflow
    Floats down, up;
    Truths constant;  // whether all weights are equal (symmetric: all are 0)
    Truths huge;      // whether decoding the largest weight might overflow
};

// Groups in the scale of the work: their weights, and how much the squared error of each counts, 1 on average.
struct Work {
    Floats weights[MOST_WEIGHTS], factors[MOST_WEIGHTS];
};

// A scale and an offset as they would be stored, and the same in the scale of the work.
struct Candidate {
    Floats scale, offset, inner_scale, inner_offset, inverse;
};

// The nearest code to a weight in steps of the scale, counted from the middle or, if there is a zero, from that.
template <Kind kind>
INLINE Floats nearest(const Rule& rule, Floats t, Floats zero) {
    if constexpr (kind == Kind::ASYMMETRIC) return nearest_code(t, -zero, rule.last - zero);
    else return nearest_code(t, -rule.half, rule.half - 1.0f);
}

// --- 1. load ---

// Say how much the squared error of each weight counts: where all are 0, alike.
INLINE void weigh(const Rule& rule, Work& work) {
    Floats squares{}, sum{};
    for (int64_t j = 0; j < rule.size; j++) {
        squares += work.weights[j] * work.weights[j];
        sum += magnitude(work.weights[j]);
    }
    const Floats size = splat(float(rule.size)), least = square_root(squares / size) * rule.evenness;
    const Floats mean = sum / size + least;
    for (int64_t j = 0; j < rule.size; j++) {
        Floats factor = (magnitude(work.weights[j]) + least) / mean;
        work.factors[j] = choose<Floats>(mean == 0.0f, splat(1.0f), factor);
    }
}

template <Kind kind>
INLINE Extent load_groups(const float* values, int64_t groups, const Rule& rule, Work& work) {
    const Floats infinite = splat(__builtin_inff());
    Extremes of = {infinite, -infinite};
    auto see = [&](auto& columns) ALWAYS { of = extended(of, columns); };
    transpose_groups(values, rule.size, rule.size, work.weights, see, groups);
    Floats most = maximum(of.largest, -of.smallest);
    Scaling scaling = scaling_of(most, -126, 126);
    constexpr bool symmetric = kind == Kind::SYMMETRIC;
    Truths constant = symmetric ? most == 0.0f : of.smallest == of.largest;
    // Decoding the largest float32 might overflow: such groups get the extremes of a smaller range, and no fit.
    Truths huge = scaling.exponent == 126;
    Floats keep = choose<Floats>(huge, splat(symmetric ? 63.0f / 64 : 0.49f), splat(1.0f));
    if (!symmetric) keep = choose<Floats>(constant, splat(1.0f), keep);
    scale_groups(work.weights, rule.size, scaling.down);
    weigh(rule, work);
    auto scaled = [&](Floats x) ALWAYS { return x * scaling.down * keep; };
    return {scaled(of.smallest), scaled(of.largest), scaled(most), scaling.down, scaling.up, constant, huge};
}

// --- 2. fit ---

// The scale of the whole range; without an offset, the weight of largest magnitude gets the code that has no mirror
// image, so scales have signs.
template <Kind kind>
INLINE Floats plain_scale(const Rule& rule, const Extent& extent) {
    if (kind != Kind::SYMMETRIC) return (extent.largest - extent.smallest) / rule.last;
    return -(choose<Floats>(-extent.smallest >= extent.largest, extent.smallest, extent.largest) / rule.half);
}

// Where a chain starts, at its shares of the range below and above the middle.
template <Kind kind>
INLINE Chain started(const Rule& rule, const Extent& extent, Floats plain, float below, float above) {
    Chain chain = {plain * below, Floats{}};
    if (kind != Kind::SYMMETRIC) {
        Floats center = (extent.largest + extent.smallest) * 0.5f;
        Floats begin = center + (extent.smallest - center) * below;
        chain.scale = (center + (extent.largest - center) * above - begin) / rule.last;
        chain.zero = begin + rule.half * chain.scale;
    }
    chain.scale = choose<Floats>(extent.constant, splat(1.0f), chain.scale);
    return chain;
}

// Make a pass with all chains. With zeros that are codes, `zero` of a chain is its code, and stays.
template <Kind kind>
INLINE void improve(const Rule& rule, const Work& work, Chain (&chains)[CHAINS], Fit (&best)[CHAINS]) {
    constexpr bool has_offset = kind == Kind::AFFINE;
    Moments moments[CHAINS];
    Floats inverses[CHAINS];
    each<CHAINS>([&](auto c) ALWAYS { inverses[c] = 1.0f / chains[c].scale; });
    for (int64_t j = 0; j < rule.size; j++) {
        each<CHAINS>([&](auto c) ALWAYS {
            Floats t = (has_offset ? work.weights[j] - chains[c].zero : work.weights[j]) * inverses[c];
            moments[c].add(t, nearest<kind>(rule, t, chains[c].zero), work.factors[j]);
        });
    }
    each<CHAINS>([&](auto c) ALWAYS {
        const Moments& m = moments[c];
        Line line = has_offset ? line_of(m, splat(float(rule.size)), splat(0.5f))
                               : line_through_origin(m.ee, m.er, maximum(m.rr, splat(0.5f)));
        Fit fit = fit_of(chains[c], line);
        best[c].replace((fit.error < best[c].error) & (magnitude(fit.scale) > magnitude(chains[c].scale) * 0.25f), fit);
        chains[c] = moved(chains[c], line, rule.relax);
    });
}

// The best fits of chains that start at their shares of the range.
template <Kind kind>
INLINE void fit_chains(const Rule& rule, const Extent& extent, const Work& work, Floats plain, int passes,
                       Fit (&best)[CHAINS]) {
    Chain chains[CHAINS];
    each<CHAINS>([&](auto c) ALWAYS {
        chains[c] = started<kind>(rule, extent, plain, rule.shares[2 * c], rule.shares[2 * c + 1]);
        best[c] = {splat(__builtin_inff()), plain, Floats{}};
    });
    for (int pass = 0; pass < passes; pass++) improve<kind>(rule, work, chains, best);
}

// The best fits whose zero is a code, from those with any: chains start at the range of each fit, extended to 0, with
// one of the two codes between which 0 lies there, or of the first two at its end.
INLINE void fit_zeros(const Rule& rule, const Work& work, Fit (&best)[CHAINS]) {
    Chain ranges[CHAINS], chains[CHAINS];
    Fit own[CHAINS];
    each<CHAINS>([&](auto c) ALWAYS {
        Floats lowest = minimum(best[c].zero - rule.half * best[c].scale, Floats{});
        Floats highest = maximum(best[c].zero + (rule.half - 1.0f) * best[c].scale, Floats{});
        Floats scale = (highest - lowest) / rule.last;
        ranges[c] = {scale, floor(-lowest / scale)};
        best[c].error = splat(__builtin_inff());
    });
    for (float step : {0.0f, 1.0f}) {
        each<CHAINS>([&](auto c) ALWAYS {
            chains[c] = {ranges[c].scale, nearest_code(ranges[c].zero + step, 0.0f, rule.last)};
            own[c] = {splat(__builtin_inff()), chains[c].scale, chains[c].zero};
        });
        for (int pass = 0; pass < PASSES; pass++) improve<Kind::ASYMMETRIC>(rule, work, chains, own);
        each<CHAINS>([&](auto c) ALWAYS { best[c].replace(own[c].error < best[c].error, own[c]); });
    }
}

// --- 3. round ---

// The nearest number of the dtype, saturated.
INLINE Floats storable(Floats x, Dtype dtype) {
    const Floats largest = splat(0x1.FEp127f);
    return maximum(minimum(nearest_short(x, dtype), largest), -largest);
}

// The nearest number of the dtype that is neither 0 nor, in BF16, so small that a runtime may take it for 0.
INLINE Floats storable_scale(Floats x, Dtype dtype) {
    const Floats smallest = splat(dtype == Dtype::F16 ? 0x1p-24f : 0x1p-126f);
    Floats nearest = storable(x, dtype), least = choose<Floats>(nearest < 0.0f, -smallest, smallest);
    return choose<Floats>(magnitude(nearest) < smallest, least, nearest);
}

template <Kind kind>
INLINE Candidate candidate_of(const Extent& extent, Floats scale, Floats offset) {
    Floats inner = scale * extent.down;
    return {scale, offset, inner, kind == Kind::AFFINE ? offset * extent.down : offset, 1.0f / inner};
}

// A scale, and an offset that zero_at(scale of the work) says, rounded as they are stored.
template <Kind kind, class ZeroAt>
INLINE Candidate stored(const Rule& rule, const Extent& extent, Floats scale, ZeroAt zero_at) {
    Floats kept = storable_scale(scale * extent.up, rule.dtype);
    if (kind == Kind::ASYMMETRIC) return candidate_of<kind>(extent, kept, zero_at(kept * extent.down));
    kept = choose<Floats>(extent.constant, splat(1.0f), kept);
    if (kind == Kind::SYMMETRIC) return candidate_of<kind>(extent, kept, Floats{});
    Floats zero = choose<Floats>(extent.constant, extent.smallest, zero_at(kept * extent.down));
    return candidate_of<kind>(extent, kept, storable(zero * extent.up, rule.dtype));
}

// What the runtimes would choose: with an offset, 0 becomes a code, counted from the end of larger magnitude; without
// one, scales are positive.
template <Kind kind, class Stored>
INLINE Candidate runtimes_choice(const Rule& rule, const Extent& extent, Floats plain, Stored stored_from) {
    if (kind == Kind::SYMMETRIC) return stored_from(extent.most / (rule.half - 0.5f), Floats{});
    Truths below = -extent.smallest > extent.largest;
    Floats edge = choose<Floats>(below, extent.smallest, extent.largest);
    Floats step = choose<Floats>(below, plain, -plain);
    Floats steps = rint(edge / step);
    Truths snaps = steps < 0.0f;
    Floats scale = choose<Floats>(snaps, edge / choose<Floats>(snaps, steps, splat(-1.0f)), step);
    return stored_from(scale, choose<Floats>(snaps, edge, Floats{}));
}

template <Kind kind>
INLINE void find_candidates(const Rule& rule, const Extent& extent, const Work& work,
                            Candidate (&found)[CANDIDATES]) {
    // The offset is the weight of the code 0 or, if codes count from the middle, of the code `half`.
    auto from_start = [&](Floats scale, Floats start) ALWAYS {
        return stored<kind>(rule, extent, scale, [&](Floats inner) ALWAYS {
            return rule.middle ? start + rule.half * inner : start;
        });
    };
    auto from_zero = [&](const Fit& fit) ALWAYS {
        return stored<kind>(rule, extent, fit.scale, [&](Floats inner) ALWAYS {
            return rule.middle ? fit.zero : fit.zero - rule.half * inner;
        });
    };
    Floats plain = plain_scale<kind>(rule, extent);
    found[0] = from_start(plain, extent.smallest);
    found[1] = runtimes_choice<kind>(rule, extent, plain, from_start);
    Fit best[CHAINS];
    fit_chains<kind>(rule, extent, work, plain, PASSES, best);
    each<CHAINS>([&](auto c) ALWAYS { found[2 + c] = from_zero(best[c]); });
}

// Where the zero must be a code. Equal weights become one step from it, as exactly as the scale can be stored.
template <>
INLINE void find_candidates<Kind::ASYMMETRIC>(const Rule& rule, const Extent& extent, const Work& work,
                                              Candidate (&found)[CANDIDATES]) {
    auto with_zero = [&](Floats scale, Floats code) ALWAYS {
        return stored<Kind::ASYMMETRIC>(rule, extent, scale, [&](Floats) ALWAYS { return code; });
    };
    auto round = [&](Floats x) ALWAYS { return storable(x, rule.dtype); };
    Zero zero = zero_of_range(extent.smallest * extent.up, extent.largest * extent.up, rule.half, round);
    Floats step = choose<Floats>(extent.most == 0.0f, extent.down, extent.most);
    found[0] = with_zero(choose<Floats>(extent.constant, step, zero.scale * extent.down),
                         choose<Floats>(extent.constant, splat(rule.half), zero.code));
    Floats lowest = minimum(extent.smallest, Floats{});
    Floats whole = (maximum(extent.largest, Floats{}) - lowest) / rule.last;
    found[1] = with_zero(whole, nearest_code(-lowest / whole, 0.0f, rule.last));
    Fit best[CHAINS];
    Floats plain = plain_scale<Kind::AFFINE>(rule, extent);
    fit_chains<Kind::AFFINE>(rule, extent, work, plain, PASSES_TO_ZEROS, best);
    fit_zeros(rule, work, best);
    each<CHAINS>([&](auto c) ALWAYS { found[2 + c] = with_zero(best[c].scale, best[c].zero); });
}

// --- 4. measure ---

// The nearest code to a weight, as the rule counts codes.
template <Kind kind>
INLINE Floats code_of(const Rule& rule, Floats w, const Candidate& candidate) {
    Floats t = (kind == Kind::AFFINE ? w - candidate.inner_offset : w) * candidate.inverse;
    if (kind == Kind::AFFINE && !rule.middle) return nearest_code(t, 0.0f, rule.last);
    return nearest<kind>(rule, t, candidate.inner_offset);
}

// What is left of a weight whose code is this.
template <Kind kind>
INLINE Doubles left_of(Floats w, Floats code, const Candidate& candidate) {
    Floats decoded = code * candidate.inner_scale;
    if (kind == Kind::AFFINE) decoded += candidate.inner_offset;
    return converted<Doubles>(w - decoded);
}

// Sums of squares, in the scale of the work; those of errors are weighted.
struct Squares {
    Doubles energy{}, errors[CANDIDATES]{};
};

template <Kind kind>
INLINE Squares measured(const Rule& rule, const Work& work, const Candidate (&candidates)[CANDIDATES]) {
    Squares sums;
    for (int64_t j = 0; j < rule.size; j++) {
        Floats w = work.weights[j];
        each<CANDIDATES>([&](auto c) ALWAYS {
            Doubles e = left_of<kind>(w, code_of<kind>(rule, w, candidates[c]), candidates[c]);
            sums.errors[c] += converted<Doubles>(work.factors[j]) * (e * e);
        });
        Doubles wide = converted<Doubles>(w);
        sums.energy += wide * wide;
    }
    return sums;
}

// The candidate of the smallest error, the earlier one on a tie; huge groups take the first.
template <Kind kind>
INLINE Candidate winner_of(const Extent& extent, const Candidate (&candidates)[CANDIDATES], const Squares& sums) {
    Floats scale = candidates[0].scale, offset = candidates[0].offset;
    Doubles least = sums.errors[0];
    each<CANDIDATES - 1>([&](auto before) ALWAYS {
        const Candidate& other = candidates[before + 1];
        auto wins = (sums.errors[before + 1] < least) & ~converted<Longs>(extent.huge);
        least = choose<Doubles>(wins, sums.errors[before + 1], least);
        scale = choose<Floats>(converted<Truths>(wins), other.scale, scale);
        offset = choose<Floats>(converted<Truths>(wins), other.offset, offset);
    });
    return candidate_of<kind>(extent, scale, offset);
}

// --- 5. encode ---

// Write the codes [groups, size], counted from 0; return the sums of squared errors.
template <Kind kind>
INLINE Doubles encode(const Rule& rule, const Work& work, const Candidate& winner, uint8_t* codes, int64_t groups) {
    Doubles error{};
    Floats zero = rule.middle ? splat(rule.half) : Floats{};
    if (kind == Kind::ASYMMETRIC) zero = winner.offset;
    for (int64_t at = 0; at < rule.size; at += LANES) {
        Bytes columns[LANES];
        for (int k = 0; k < LANES; k++) {
            Floats w = work.weights[at + k], code = code_of<kind>(rule, w, winner);
            Doubles e = left_of<kind>(w, code, winner);
            error += e * e;
            columns[k] = converted<Bytes>(converted<Ints>(code + zero));
        }
        store_codes(columns, codes + at, rule.size, groups, LANES);
    }
    return error;
}

// Fit sixteen groups, or fewer.
template <Kind kind>
Result fit_sixteen(const float* values, int64_t groups, const Rule& rule, uint8_t* codes) {
    Work work;
    Extent extent = load_groups<kind>(values, groups, rule, work);
    Candidate candidates[CANDIDATES];
    find_candidates<kind>(rule, extent, work, candidates);
    Squares sums = measured<kind>(rule, work, candidates);
    Doubles up = converted<Doubles>(extent.up);
    Candidate winner = winner_of<kind>(extent, candidates, sums);
    Doubles error = encode<kind>(rule, work, winner, codes, groups);
    return {winner.scale, winner.offset, sums.energy * up * up, error * up * up};
}

}  // namespace

// values: [groups, size], where 16 divides the size, which is at most MOST_WEIGHTS. settings: see Rule. codes: u8
// [groups, size], counted from 0. scales, offsets: [groups], numbers of the dtype, BF16 or F16; the offsets of
// ASYMMETRIC are the codes that stand for 0. energies, errors: [groups], the sums of squares of the weights and of their
// errors. bits: 2 to 8. kind: of Kind; codes of SYMMETRIC count from the middle.
void pqweights::fit(const float* values, const float* settings, uint8_t* codes, float* scales, float* offsets,
                    double* energies, double* errors, int64_t groups, int64_t size, int64_t bits, int64_t kind,
                    int64_t middle, int64_t dtype) {
    constexpr auto symmetric = Kind::SYMMETRIC, asymmetric = Kind::ASYMMETRIC;
    const float half = float(1 << (bits - 1));
    const Rule rule = {size, half, half * 2.0f - 1.0f, middle || Kind(kind) == symmetric, Dtype(dtype),
                       settings, settings[2 * CHAINS], settings[2 * CHAINS + 1]};
    for (int64_t first = 0; first < groups; first += LANES) {
        const int64_t left = groups - first, at = first * size;
        Result found = Kind(kind) == symmetric    ? fit_sixteen<symmetric>(values + at, left, rule, codes + at)
                       : Kind(kind) == asymmetric ? fit_sixteen<asymmetric>(values + at, left, rule, codes + at)
                                                  : fit_sixteen<Kind::AFFINE>(values + at, left, rule, codes + at);
        found.write(scales, offsets, energies, errors, first, left);
    }
}
