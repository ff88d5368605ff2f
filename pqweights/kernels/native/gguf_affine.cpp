// GGUF's blocks of scales and offsets (Q4_K, Q5_K, Q2_K, Q4_1, Q5_1) with nearly the least error
// (gguf_blocks.hpp).
//
// A part's scale is d times a whole number, its level, and its offset is dmin times another; d and dmin, in F16, are
// the block's, and a weight is scale * code - offset.
//
// 1. Fit.     Each part gets its scale and offset by least squares (group_fitting.hpp), and the sums over its codes.
// 2. Guess.   The sums give the error of any scale and offset for the same codes. Pairs of d and dmin around those of
//             which the largest scale and offset are the largest multiples are rounded to F16; each part takes the best
//             of two levels for its scale, the best one for its offset; and the least-squares d and dmin for these are
//             the next pair to try.
// 3. Round.   From the best pair on: make codes anew from what is stored, for the levels of each part and for their
//             neighbours, and measure; sum up for the best ones, and move to the least-squares d and dmin.
// 4. Encode.  Make the codes of the best, and sum their squared errors in float64.
//
// A block of one part stores its scale and offset themselves: round_alone takes the place of 2 and 3.
// tests/references.md names what checks it.
#include "gguf_blocks.hpp"
#include "interface.hpp"

namespace {

constexpr int CHAINS = 3, PASSES = 4, STEPS = 2;
// Chains that one pass over the weights evaluates: with shorter vectors there are no registers for more.
#if defined(__AVX512F__)
constexpr int TOGETHER = CHAINS;
#else
constexpr int TOGETHER = 1;
#endif
constexpr float RELAX = 3;

// A scale and an offset, their levels, or d and dmin in the scale of the work.
struct Pair {
    Floats scale, offset;

    INLINE void replace(Truths where, Pair other) {
        scale = choose<Floats>(where, other.scale, scale);
        offset = choose<Floats>(where, other.offset, offset);
    }
};
INLINE Pair operator*(Pair a, Pair b) { return {a.scale * b.scale, a.offset * b.offset}; }

// The normal equations of d and dmin: sums of products of the levels of scales (a) and offsets (b) with a part's sums.
struct Normal {
    Floats aa{}, ab{}, bb{}, a{}, b{};

    INLINE void add(Pair levels, const CodeSums& sums, Floats total) {
        auto [scale, offset] = levels;
        aa += scale * scale * sums.cc;
        ab += scale * offset * sums.c;
        bb += offset * offset * total;
        a += scale * sums.cw;
        b -= offset * sums.w;
    }
};

// The pair that solves the equations. Where that is none that can be stored, as without offsets, each number is the
// best for the other as it is.
INLINE Pair solved(const Normal& n, Pair pair) {
    Floats determinant = n.aa * n.bb - n.ab * n.ab;
    Floats divisor = choose<Floats>(determinant > n.aa * n.bb * 1e-5f, determinant, splat(INFINITE));
    Pair both = {(n.a * n.bb + n.ab * n.b) / divisor, (n.aa * n.b + n.ab * n.a) / divisor};
    Pair alone = {(n.a + n.ab * pair.offset) / maximum(n.aa, splat(TINY)),
                  (n.b + n.ab * pair.scale) / maximum(n.bb, splat(TINY))};
    pair = {choose<Floats>(alone.scale > 0.0f, alone.scale, pair.scale),
            choose<Floats>(alone.offset > 0.0f, alone.offset, pair.offset)};
    pair.replace((both.scale > 0.0f) & (both.offset > 0.0f), both);
    return pair;
}

// The nearest F16 to a number that is not negative, saturated. It is not 0 unless no level can make up for that.
INLINE Floats stored(Floats x, const Scaling& scaling) {
    x *= scaling.up;
    Floats nearest = float_from_half(half_from_float(minimum(x, splat(LARGEST_HALF))));
    return choose<Floats>(x > LEAST_HALF / 128, maximum(nearest, splat(LEAST_HALF)), nearest) * scaling.down;
}
INLINE Pair stored(Pair p, const Scaling& scaling) { return {stored(p.scale, scaling), stored(p.offset, scaling)}; }

template <class S>
struct AffineBlocks : Blocks<S> {
    using Base = Blocks<S>;
    using Base::PARTS, Base::weights, Base::scaling, Base::over_part;
    static constexpr bool ALONE = PARTS == 1;

    // A part: the scale that is best for its codes, with the sums over these; the total of the importance.
    struct Part {
        Floats total, scale, offset;
        CodeSums sums;
        Pair levels, best_levels;
    };
    Part parts[PARTS];
    const AffineLimits limits;

    explicit AffineBlocks(const AffineLimits& limits) : limits(limits) {}

    void encode(const float* values, const Job& job) {
        load(values);
        Pair pair;
        if constexpr (ALONE) {
            parts[0].best_levels = {splat(1.0f), splat(1.0f)};
            pair = round_alone(fit(0, job));
        } else {
            for (int part = 0; part < PARTS; part++) {
                Pair own = fit(part, job);
                parts[part].offset = own.offset;
                sum_up(part, {shortest(part, own), own.offset});
            }
            pair = rounded(guessed(job));
        }
        write(pair);
    }

    void load(const float* values) {
        load_blocks(values, SIZE<S>, weights);
        Floats most{};
        for (Floats w : weights) most = maximum(magnitude(w), most);
        scaling = scaling_of(most, -40, 126);  // below, F16 has nothing but 0 for their scales
        scale_groups(weights, SIZE<S>, scaling.down);
    }

    // --- fit ---

    // The nearest offset that a part can have, given negated.
    INLINE static Floats allowed(Floats zero) { return ALONE ? zero : minimum(zero, Floats{}); }

    // The best scale and offset of a part, by least squares.
    Pair fit(int part, const Job& job) {
        Floats smallest = splat(INFINITE), largest = -smallest, total{};
        over_part(part, [&](Floats w, auto factor) ALWAYS {
            smallest = minimum(w, smallest), largest = maximum(w, largest);
            total += factor;
        });
        parts[part].total = total;
        smallest = allowed(smallest);
        Floats center = (largest + smallest) * 0.5f;
        Fit best = {splat(INFINITE), maximum((largest - smallest) / limits.last_code, splat(TINY)), smallest};
        const float* share = job.starts;  // of the range, below and above the middle
        for (int64_t start = 0; start < job.start_count; start += CHAINS) {
            Chain chains[CHAINS];
            for (Chain& chain : chains) {
                Floats begin = center + (smallest - center) * *share++;
                Floats scale = (center + (largest - center) * *share++ - begin) / limits.last_code;
                chain = {maximum(scale, splat(TINY)), allowed(begin)};
            }
            for (int pass = 0; pass < PASSES; pass++) {
                for (int first = 0; first < CHAINS; first += TOGETHER) {
                    Moments sums[TOGETHER];
                    evaluate(part, chains + first, sums);
                    each<TOGETHER>([&](auto i) ALWAYS { improve(chains[first + i], sums[i], total, best); });
                }
            }
        }
        return {best.scale, -best.zero};
    }

    // The moments of some chains, by one pass over the weights.
    INLINE void evaluate(int part, const Chain* chains, Moments (&sums)[TOGETHER]) const {
        Floats zeros[TOGETHER], inverses[TOGETHER];
        each<TOGETHER>([&](auto i) ALWAYS { zeros[i] = chains[i].zero, inverses[i] = 1.0f / chains[i].scale; });
        over_part(part, [&](Floats w, auto factor) ALWAYS {
            each<TOGETHER>([&](auto i) ALWAYS {
                Floats t = (w - zeros[i]) * inverses[i];
                sums[i].add(t, nearest_code(t, 0, limits.last_code), factor);
            });
        });
    }

    // Move a chain by its step, and keep the fit if it is better.
    INLINE static void improve(Chain& chain, const Moments& sums, Floats total, Fit& best) {
        Line line = line_of(sums, total, sums.rr * 1e-5f);
        Truths pinned{};
        if constexpr (!ALONE) {
            // A larger shift would make an offset negative that must not be: it becomes 0 instead.
            Floats limit = -chain.zero * (1.0f / chain.scale), left = sums.er - limit * sums.r;
            Floats slope = left / maximum(sums.rr, splat(TINY));
            Floats error = ((sums.ee - limit * 2.0f * sums.e) + limit * limit * total) - slope * left;
            pinned = line.shift > limit;
            line = {choose<Floats>(pinned, slope, line.slope), choose<Floats>(pinned, limit, line.shift),
                    choose<Floats>(pinned, error, line.error)};
        }
        Fit fit = fit_of(chain, line);
        fit.zero = choose<Floats>(pinned, Floats{}, fit.zero);
        best.replace((fit.error < best.error) & (fit.scale > chain.scale * 0.25f), fit);
        chain = moved(chain, line, RELAX);
        chain = {maximum(chain.scale, splat(TINY)), allowed(chain.zero)};
    }

    // --- sums and errors ---

    INLINE Floats code_of(Floats w, Floats inverse, Floats offset) const {
        return nearest_code((w + offset) * inverse, 0, limits.last_code);
    }

    // The errors of a part, as it is decoded, for each of some scales and offsets.
    template <int count>
    INLINE void measure(int part, const Pair (&pairs)[count], Floats (&errors)[count]) const {
        Floats inverses[count];
        each<count>([&](auto i) ALWAYS { inverses[i] = inverse_of(pairs[i].scale), errors[i] = Floats{}; });
        over_part(part, [&](Floats w, auto factor) ALWAYS {
            each<count>([&](auto i) ALWAYS {
                auto [scale, offset] = pairs[i];
                Floats e = w - (code_of(w, inverses[i], offset) * scale - offset);
                errors[i] += factor * e * e;
            });
        });
    }

    // The smallest scale that gives the same weights by multiples of the codes; 0 if all codes are 0.
    //
    // A part with one large weight may have codes 0 and 1 alone. As large a scale would leave few levels to the others.
    INLINE Floats shortest(int part, Pair pair) const {
        Floats most{}, inverse = inverse_of(pair.scale);
        over_part(part, [&](Floats w, auto) ALWAYS { most = maximum(code_of(w, inverse, pair.offset), most); });
        Floats times = rint(limits.last_code / maximum(most, splat(1.0f)) - 0.499f);  // rounded down
        return choose<Floats>(most > 0.0f, pair.scale / times, Floats{});
    }

    // Keep the sums over a part, and the scale that is best for its codes.
    INLINE void sum_up(int part, Pair pair) {
        CodeSums sums;
        Floats inverse = inverse_of(pair.scale);
        over_part(part, [&](Floats w, auto factor) ALWAYS {
            Floats code = code_of(w, inverse, pair.offset), fc = factor * code, fw = factor * w;
            sums.w += fw, sums.c += fc, sums.cc += fc * code, sums.cw += fw * code;
        });
        parts[part].sums = sums;
        auto [spread, slope] = code_line(sums, sums.c / parts[part].total);
        parts[part].scale = choose<Floats>((spread > sums.cc * 1e-5f) & (slope > 0.0f), slope, pair.scale);
    }

    // --- guess ---

    INLINE Floats level(Floats x) const { return nearest_code(x, 0, limits.last_level); }

    // Give each part the levels that its sums say are best. Returns the error that they say.
    INLINE Floats choose_levels(Pair pair, Normal& normal) {
        Floats scale_inverse = inverse_of(pair.scale), offset_inverse = inverse_of(pair.offset), total_error{};
        for (Part& part : parts) {
            const CodeSums& sums = part.sums;
            Floats below = level(part.scale * scale_inverse - 0.5f), errors[2];
            Pair levels[2];
            each<2>([&](auto i) ALWAYS {
                Floats own = i ? minimum(below + 1.0f, splat(limits.last_level)) : below, scale = own * pair.scale;
                levels[i] = {own, level((scale * sums.c - sums.w) / part.total * offset_inverse)};
                Floats offset = levels[i].offset * pair.offset;
                errors[i] = offset * ((sums.w + sums.w) + part.total * offset - (scale + scale) * sums.c) +
                            scale * (scale * sums.cc - (sums.cw + sums.cw));
            });
            Truths upper = errors[1] < errors[0];
            part.levels = levels[0];
            part.levels.replace(upper, levels[1]);
            normal.add(part.levels, sums, part.total);
            total_error += choose<Floats>(upper, errors[1], errors[0]);
        }
        return total_error;
    }

    // The pair, as stored, of which the sums say that its error is the smallest.
    Pair guessed(const Job& job) {
        Pair most = {};
        for (const Part& part : parts) most = {maximum(part.scale, most.scale), maximum(part.offset, most.offset)};
        const Pair plain = {most.scale / limits.last_level, most.offset / limits.last_level};
        Pair best = stored(plain, scaling);
        Floats least = splat(INFINITE);
        for (int64_t i = 0; i < job.factor_count; i++) {
            Pair pair = {plain.scale * job.factors[2 * i], plain.offset * job.factors[2 * i + 1]};
            for (int step = 0; step < STEPS; step++) {
                pair = stored(pair, scaling);
                Normal normal;
                Floats error = choose_levels(pair, normal);
                Truths better = error < least;
                least = choose<Floats>(better, error, least);
                best.replace(better, pair);
                pair = solved(normal, pair);
            }
        }
        return best;
    }

    // --- round ---

    // The best pair; the levels of its parts are kept as the best.
    Pair rounded(Pair pair) {
        Pair best = pair;
        Floats least = splat(INFINITE);
        for (Part& part : parts) part.best_levels = {};
        for (int round = 0; round < limits.rounds; round++) {
            pair = stored(pair, scaling);
            Normal unused, normal;
            choose_levels(pair, unused);
            // By how much the level of the offset has to grow with that of the scale for the middle code to stay.
            Floats slant = pair.scale * (limits.last_code / 2) * inverse_of(pair.offset), error{};
            for (int part = 0; part < PARTS; part++) {
                error += search_levels(part, pair, slant);
                sum_up(part, parts[part].levels * pair);
                normal.add(parts[part].levels, parts[part].sums, parts[part].total);
            }
            Truths better = error < least;
            least = choose<Floats>(better, error, least);
            best.replace(better, pair);
            for (Part& part : parts) part.best_levels.replace(better, part.levels);
            pair = solved(normal, pair);
        }
        return best;
    }

    // Move a part to the best of its levels and their neighbours. Returns the error.
    INLINE Floats search_levels(int part, Pair pair, Floats slant) {
        auto [a, b] = parts[part].levels;
        Floats up = minimum(a + 1.0f, splat(limits.last_level)), down = maximum(a - 1.0f, Floats{});
        const Pair levels[5] = {{a, b},
                                {a, minimum(b + 1.0f, splat(limits.last_level))},
                                {a, maximum(b - 1.0f, Floats{})},
                                {up, level(b + (up - a) * slant)},
                                {down, level(b + (down - a) * slant)}};
        Pair pairs[5];
        each<5>([&](auto i) ALWAYS { pairs[i] = levels[i] * pair; });
        Floats errors[5];
        measure(part, pairs, errors);
        Floats least = errors[0];
        for (int i = 1; i < 5; i++) {
            Truths better = errors[i] < least;
            least = choose<Floats>(better, errors[i], least);
            parts[part].levels.replace(better, levels[i]);
        }
        return least;
    }

    // The best pair of a block of one part, which is `pair` before rounding. In each round: the codes of the pair so
    // far, the least-squares offset for them, and the two F16 numbers around it; for each of these the least-squares
    // scale, and the two F16 numbers around that. The one whose decoded weights have the least error begins the next.
    Pair round_alone(Pair pair) {
        Pair best = {};
        Floats least = splat(INFINITE);
        for (int round = 0; round < limits.rounds; round++) {
            Pair candidates[4];
            Floats errors[4];
            find_candidates(pair, candidates);
            measure(0, candidates, errors);
            for (int i = 0; i < 4; i++) {
                Truths better = errors[i] < least;
                least = choose<Floats>(better, errors[i], least);
                best.replace(better, candidates[i]);
            }
            pair = best;
        }
        return best;
    }

    INLINE void find_candidates(Pair pair, Pair (&candidates)[4]) const {
        auto [scale, offset] = pair;
        Floats inverse = inverse_of(scale), total = parts[0].total;
        Moments sums;
        over_part(0, [&](Floats w, auto factor) ALWAYS {
            sums.add((w + offset) * inverse, code_of(w, inverse, offset), factor);
        });
        Line line = line_of(sums, total, sums.rr * 1e-5f);
        auto [nearest, other] = half_neighbours(offset - scale * line.shift, scaling);
        for (int i = 0; i < 2; i++) {
            Floats own = i ? other : nearest, step = own - offset;
            // Where all codes are 0, the weights are alike: the largest code reaches them from an offset below them.
            Floats fitted = choose<Floats>(sums.rr > 0.0f, scale + (scale * sums.er + step * sums.r) / sums.rr,
                                           step / limits.last_code);
            auto [near, far] = half_neighbours(maximum(fitted, Floats{}), scaling);
            candidates[2 * i] = {near, own}, candidates[2 * i + 1] = {far, own};
        }
    }

    // --- encode ---

    void write(Pair pair) {
        for (int part = 0; part < PARTS; part++) {
            auto [scale, offset] = parts[part].best_levels * pair;
            Floats inverse = inverse_of(scale);
            this->write_codes(part, [&](Floats w) ALWAYS {
                Floats code = code_of(w, inverse, offset);
                return std::pair(converted<Ints>(code), converted<Doubles>(w - (code * scale - offset)));
            });
            this->write_level(parts[part].best_levels.scale, part, &Fields::scales);
            this->write_level(parts[part].best_levels.offset, part, &Fields::offsets);
        }
        Floats offset = pair.offset * scaling.up;
        this->write_half(pair.scale * scaling.up, &Fields::d);
        this->write_half(ALONE ? 0.0f - offset : offset, &Fields::dmin);  // not -0 for 0
    }
};

}  // namespace

// See gguf_encoding.py.
void pqweights::encode_gguf_affine(int64_t type, const float* values, const float* importance, const float* starts,
                                   int64_t start_count, const float* factors, int64_t factor_count, uint8_t* data,
                                   double* energies, double* errors, int64_t blocks, int64_t row_blocks) {
    encode_type<AffineBlocks, Q4_1, Q5_1, Q2_K, Q4_K, Q5_K>(
        type,
        {values, importance, starts, start_count, factors, factor_count, data, energies, errors, blocks, row_blocks});
}
