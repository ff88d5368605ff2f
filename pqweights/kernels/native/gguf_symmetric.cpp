// GGUF's blocks without offsets (Q8_0, Q5_0, Q4_0, IQ4_NL, Q6_K, Q3_K, IQ4_XS, TQ2_0, TQ1_0, Q2_0, Q1_0) with nearly the
// least error (gguf_blocks.hpp).
//
// A block has parts with a scale each: either one part, and its scale is the F16 number d, or 8 or 16, and their scales
// are d times whole numbers.
//
// 1. Load.    Find the weight of largest magnitude of each part, and scale the block by a power of two so that
//             magnitudes end in [1, 4).
// 2. Search.  For each part, that weight is put at many places (`starts`, in units of codes, of both signs: the lowest
//             code has no mirror image). With t = w / scale, r the value of the nearest code and e = t - r, the sums of
//             e^2 and e r, weighted by importance, give the least-squares scale for those codes and the error that is
//             left. The least error wins.
// 3. Factors. For some candidates of d, each part tries the whole numbers around its scale divided by d. Then d moves
//             to the least-squares fit of all codes and factors, and both of its neighbours in F16 are tried with the
//             factors nearby. Errors are those of the weights as decoded in float32. One part: no factors.
// 4. Encode.  Write the codes of the winner, and sum the squares of its errors in float64.
//
// tests/references.md names what checks it.
#include "gguf_blocks.hpp"
#include "interface.hpp"
#include "iq4_codes.hpp"

namespace {

constexpr int AT_ONCE = 4;  // candidates that one pass over the weights evaluates

// The least error so far, and the number that gave it.
struct Best {
    Floats error = splat(INFINITE), number{};

    INLINE Truths take(Floats other, Floats its_number) {
        Truths better = other < error;
        error = choose<Floats>(better, other, error);
        number = choose<Floats>(better, its_number, number);
        return better;
    }
};

// The code nearest to a number t in units of codes, counted from the lowest, and its value.
struct WholeCodes {
    float lowest, highest;

    explicit WholeCodes(const SymmetricLimits& limits) : lowest(limits.lowest), highest(limits.highest) {}

    INLINE Floats value(Floats t) const { return nearest_code(t, lowest, highest); }
    INLINE std::pair<Ints, Floats> index_and_value(Floats t) const {
        return {converted<Ints>(value(t) - lowest), value(t)};
    }
};

struct TableCodes : Iq4Codes {
    explicit TableCodes(const SymmetricLimits&) {}

    INLINE Floats value(Floats t) const { return values[index(t)]; }
    INLINE std::pair<Ints, Floats> index_and_value(Floats t) const {
        Unsigned found = index(t);
        return {Ints(found), values[found]};
    }
};

// Of two codes, -1 and 1.
struct SignCodes {
    explicit SignCodes(const SymmetricLimits&) {}

    INLINE Floats value(Floats t) const { return choose<Floats>(t < 0.0f, splat(-1.0f), splat(1.0f)); }
    INLINE std::pair<Ints, Floats> index_and_value(Floats t) const { return {(t < 0.0f) + 1, value(t)}; }
};

template <class S>
struct SymmetricBlocks : Blocks<S> {
    using Base = Blocks<S>;
    using Base::PARTS, Base::PART_SIZE, Base::weights, Base::scaling, Base::over_part;

    // A part: its weight of largest magnitude, the scale around which factors are tried, the best factor so far.
    struct Part {
        Floats extreme, scale, factor;
    };
    Part parts[PARTS];
    const SymmetricLimits limits;
    const std::conditional_t<S::KIND == TABLE, TableCodes, std::conditional_t<S::KIND == WHOLE, WholeCodes, SignCodes>>
        codes;

    explicit SymmetricBlocks(const SymmetricLimits& limits) : limits(limits), codes(limits) {}

    void encode(const float* values, const Job& job) {
        Truths empty = load(values);
        for (int part = 0; part < PARTS; part++) parts[part].scale = searched(part, job);
        write(PARTS > 1 ? fit_super_blocks(job) : fit_blocks(), empty);
    }

    // Returns which blocks are all zeros.
    Truths load(const float* values) {
        load_blocks(values, SIZE<S>, weights);
        for (int part = 0; part < PARTS; part++) {
            Extremes extremes{};
            over_part(part, [&](Floats w, auto) ALWAYS {
                extremes = {minimum(extremes.smallest, w), maximum(extremes.largest, w)};
            });
            auto [smallest, largest] = extremes;
            parts[part].extreme = choose<Floats>(-smallest >= largest, smallest, largest);
        }
        Floats most{};
        for (const Part& part : parts) most = maximum(most, magnitude(part.extreme));
        scaling = scaling_of(most, -126, 126);
        for (Part& part : parts) part.extreme *= scaling.down;
        scale_groups(weights, SIZE<S>, scaling.down);
        return most == 0.0f;
    }

    // --- search ---

    // The best scale of a part, not rounded.
    Floats searched(int part, const Job& job) const {
        const Floats extreme = parts[part].extreme;
        const Floats reference = choose<Floats>(extreme == 0.0f, splat(1.0f), extreme);
        Floats energy{};
        over_part(part, [&](Floats w, auto factor) ALWAYS { energy += factor * (w * w); });
        Best best;
        int64_t i = 0;
        // Where the first starts cannot lead to codes out of range, trying them costs less.
        for (; i < job.start_count && cannot_clip(job.starts + i); i += AT_ONCE) {
            try_starts<false>(part, job.starts + i, reference, energy, best);
        }
        for (; i < job.start_count; i += AT_ONCE) try_starts<true>(part, job.starts + i, reference, energy, best);
        return choose<Floats>(extreme == 0.0f, Floats{}, best.number);
    }

    bool cannot_clip(const float* starts) const {
        bool inner = S::KIND == WHOLE;
        const float nearer = limits.highest < -limits.lowest ? limits.highest : -limits.lowest;
        for (int i = 0; i < AT_ONCE; i++) inner &= __builtin_fabsf(starts[i]) <= nearer + 0.25f;
        return inner;
    }

    template <bool clips>
    INLINE void try_starts(int part, const float* starts, Floats reference, Floats energy, Best& best) const {
        Floats inverses[AT_ONCE], inverse_reference = 1.0f / reference;
        Moments sums[AT_ONCE];
        each<AT_ONCE>([&](auto i) ALWAYS { inverses[i] = starts[i] * inverse_reference; });
        over_part(part, [&](Floats w, auto factor) ALWAYS {
            each<AT_ONCE>([&](auto i) ALWAYS {
                Floats t = w * inverses[i];
                sums[i].add(t, clips ? codes.value(t) : rint(t), factor);
            });
        });
        each<AT_ONCE>([&](auto i) ALWAYS {
            auto [ee, er, rr, e, r] = sums[i];
            Floats scale = reference / starts[i];
            // From t = e + r: the sum of r^2, which is not negative. A smaller slope than the best one overestimates
            // the error.
            rr = (energy * inverses[i] * inverses[i] - er) - (er + ee);
            rr = maximum(maximum(rr, ee * 0x1p-10f), splat(TINY));
            Fit fit = fit_of({scale, {}}, line_through_origin(ee, er, rr));
            best.take(fit.error, fit.scale);
        });
    }

    // --- factors ---

    // The errors of a part for each of some scales.
    template <int count>
    INLINE void measure(int part, const Floats (&scales)[count], Floats (&errors)[count]) const {
        Floats inverses[count];
        each<count>([&](auto i) ALWAYS { inverses[i] = inverse_of(scales[i]), errors[i] = Floats{}; });
        over_part(part, [&](Floats w, auto factor) ALWAYS {
            each<count>([&](auto i) ALWAYS {
                Floats e = w - codes.value(w * inverses[i]) * scales[i];
                errors[i] += factor * (e * e);
            });
        });
    }

    // The least-squares d for the present factors and the codes that they give with the present d.
    Floats refitted(Floats d) const {
        Floats wv{}, vv{};
        for (int part = 0; part < PARTS; part++) {
            const Floats scale = parts[part].factor, inverse = inverse_of(d * scale);
            over_part(part, [&](Floats w, auto factor) ALWAYS {
                Floats v = codes.value(w * inverse) * scale, weighted_value = factor * v;
                wv += weighted_value * w, vv += weighted_value * v;
            });
        }
        return wv / maximum(vv, splat(TINY));
    }

    // Try a d, with the best of `width` factors around each part's scale, and keep them if they are better.
    void try_factors(Floats d, int width, Best& best) {
        Floats inverse = inverse_of(d), total{}, found[PARTS];
        for (int part = 0; part < PARTS; part++) {
            Floats middle = rint(parts[part].scale * inverse - 0.5f) - (width / 2 - 1.0f);
            Best factor;
            for (int i = 0; i < width; i += AT_ONCE) {
                Floats factors[AT_ONCE], scales[AT_ONCE], errors[AT_ONCE];
                each<AT_ONCE>([&](auto k) ALWAYS {
                    factors[k] = (middle + float(i)) + float(k);
                    factors[k] = maximum(factors[k], splat(limits.least_factor));
                    factors[k] = minimum(factors[k], splat(limits.most_factor));
                    scales[k] = d * factors[k];
                });
                measure(part, scales, errors);
                each<AT_ONCE>([&](auto k) ALWAYS { factor.take(errors[k], factors[k]); });
            }
            total += factor.error, found[part] = factor.number;
        }
        Truths better = best.take(total, d);
        for (int part = 0; part < PARTS; part++) {
            parts[part].factor = choose<Floats>(better, found[part], parts[part].factor);
        }
    }

    // d of blocks of several parts.
    Floats fit_super_blocks(const Job& job) {
        Floats largest{};
        for (Part& part : parts) {
            largest = choose<Floats>(magnitude(part.scale) > magnitude(largest), part.scale, largest);
            part.factor = {};
        }
        Best best;
        for (int64_t i = 0; i < job.factor_count; i++) {
            try_factors(half_neighbours(largest * job.factors[i], scaling).nearest, limits.factors_tried, best);
        }
        auto [nearest, other] = half_neighbours(refitted(best.number), scaling);
        for (Part& part : parts) part.scale = best.number * part.factor;
        for (Floats d : {nearest, other}) try_factors(d, AT_ONCE, best);
        return best.number;
    }

    // d of blocks of one part.
    Floats fit_blocks() {
        parts[0].factor = splat(1.0f);
        Best best;
        for (int round = 0; round < 2; round++) {
            auto [nearest, other] = half_neighbours(round ? refitted(best.number) : parts[0].scale, scaling);
            Floats scales[] = {nearest, other}, errors[2];
            measure(0, scales, errors);
            for (int i = 0; i < 2; i++) best.take(errors[i], scales[i]);
        }
        return best.number;
    }

    // --- encode ---

    void write(Floats d, Truths empty) {
        for (int part = 0; part < PARTS; part++) {
            Floats scale = d * parts[part].factor, inverse = inverse_of(scale);
            this->write_codes(part, [&](Floats w) ALWAYS {
                auto [index, value] = codes.index_and_value(w * inverse);
                return std::pair(index, converted<Doubles>(w) - converted<Doubles>(value * scale));
            });
            this->write_level(parts[part].factor - limits.least_factor, part, &Fields::scales);
        }
        this->write_half(choose<Floats>(empty, Floats{}, d * scaling.up), &Fields::d);
    }
};

}  // namespace

// See gguf_encoding.py.
void pqweights::encode_gguf_symmetric(int64_t type, const float* values, const float* importance, const float* starts,
                                      int64_t start_count, const float* factors, int64_t factor_count, uint8_t* data,
                                      double* energies, double* errors, int64_t blocks, int64_t row_blocks) {
    encode_type<SymmetricBlocks, Q8_0, Q5_0, Q4_0, IQ4_NL, Q6_K, Q3_K, IQ4_XS, TQ2_0, TQ1_0, Q2_0, Q1_0>(
        type,
        {values, importance, starts, start_count, factors, factor_count, data, energies, errors, blocks, row_blocks});
}
