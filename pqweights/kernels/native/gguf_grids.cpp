// GGUF's blocks of grid points (IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS, IQ2_XXS, IQ1_M, IQ1_S) with nearly the least error
// (gguf_blocks.hpp).
//
// Four or eight weights together are a point of a grid, whose coordinates are magnitudes with signs beside them, or
// have signs and are all shifted by the same amount. A part's scale is d times an odd number, its factor.
//
// 1. Load.    Take the signs away. Where a format has room for an even number of minus signs only, the weight for which
//             a wrong sign costs least gets one.
// 2. Search.  For each part, try some scales (`starts`, in units of the root of its mean square), with the nearest
//             points. Points that give the sums of squares vv and of products wv with the weights have the error
//             energy - 2 s wv + s^2 vv at any scale s: a parabola, which is kept.
// 3. Factors. For some candidates of d, each part takes the factor at which one of its parabolas is lowest. Then d moves
//             to the least-squares fit of what was taken, in F16. The nearest points at the scales that this gives are
//             another parabola of each part, with which d and the factors are found once more.
// 4. Encode.  Write the nearest points at the scales of the winner, and sum their squared errors in float64.
//
// The nearest point is found among all. The squared errors of the first half of coordinates at each value that this
// half may have are a table, and so are those of the second half. Points are sorted by their first halves: for each of
// these, the least of the second halves that go with it is looked for, and added.
//
// tests/references.md names what checks it.
#include "gguf_blocks.hpp"
#include "interface.hpp"
#include "table.hpp"

namespace {

constexpr int MOST_STARTS = 16;

// The grid of a format: gguf_grids.py.
struct Grid {
    // Points that have the same digits in their first half. end: of the digits of their second halves
    struct Run {
        int first;
        const uint8_t* end;
    };

    const float* levels;      // [LANES], what a digit of a point stands for, again and again
    const uint16_t* numbers;  // by all digits, the second half's in the lower bits
    uint8_t seconds[2048];
    Run runs[82];  // the last has no digits

    // points: [count, 2], the digits of their first and second halves, in the order of these
    Grid(const float* levels, const uint8_t* points, const uint16_t* numbers, int64_t count)
        : levels(levels), numbers(numbers) {
        Run* run = runs - 1;
        for (int64_t i = 0; i < count; i++) {
            if (i == 0 || points[2 * i] != points[2 * i - 2]) *++run = {points[2 * i], seconds};
            seconds[i] = points[2 * i + 1];
            run->end = seconds + i + 1;
        }
        *++run = {-1, seconds};
    }
};

// Sums over weights w and the values v of points, of importance times products.
struct PointSums {
    Floats vv{}, wv{};

    INLINE void choose_from(Truths where, const PointSums& other) {
        vv = choose<Floats>(where, other.vv, vv);
        wv = choose<Floats>(where, other.wv, wv);
    }

    // How the error at a scale differs from the energy.
    INLINE Floats excess(Floats scale) const { return scale * (scale * vv - (wv + wv)); }
};

// The search for points in blocks, which is the same for all formats with points of a kind.
template <int kind>
struct Search {
    static constexpr bool HAS_SHIFT = kind == SHIFTED;
    static constexpr int POINT = kind == OF_FOUR ? 4 : 8, POINTS = 256 / POINT, HALF = POINT / 2;
    static constexpr int DIGIT = POINT == 8 ? 2 : 3, DIGITS = POINT == 8 ? 3 : 8, HALF_BITS = HALF * DIGIT;
    static constexpr int HALVES = 1 << HALF_BITS;

    const Weights<256>& of;
    const Grid& grid;
    const Table<LANES> levels;
    const int run;  // points that share a shift, or are looked for together
    // What is found: the digits of points, and the signs of eight weights, or whether the shift of a point has one.
    Unsigned codes[POINTS], signs[256 / 8];

    Search(const GridLimits& limits, const Grid& grid, const Weights<256>& of)
        : of(of), grid(grid), levels(grid.levels), run(HAS_SHIFT ? limits.shift_run / POINT : 2) {}

    // Which point is looked for, and by how much its coordinates are raised.
    struct Wanted {
        int point;
        float shift;
    };

    // Its digits, and its error in units of the scale.
    struct Found {
        Unsigned code{};
        Floats error = splat(INFINITE);
    };

    // The points nearest to the coordinates t = w / scale - shift; several, so that their look-ups overlap.
    template <int count>
    INLINE void find(const Wanted (&wanted)[count], Floats inverse, Found (&found)[count]) const {
        Floats first[HALVES][count], second[HALVES][count], best_second[count]{};
        for (int k = 0; k < count; k++) {
            auto [point, shift] = wanted[k];
            tabulate(point * POINT, inverse, shift, [&](int code, Floats error) ALWAYS { first[code][k] = error; });
            // The lowest bits of an error say which half it is of, so that a minimum finds both.
            tabulate(point * POINT + HALF, inverse, shift, [&](int code, Floats error) ALWAYS {
                second[code][k] = floats((bits(error) & ~uint32_t(HALVES - 1)) | uint32_t(code));
            });
        }
        const uint8_t* at = grid.seconds;
        for (const Grid::Run* run = grid.runs; run->first >= 0; run++) {
            Floats least[count];
            each<count>([&](auto k) ALWAYS { least[k] = second[*at][k]; });
            for (at++; at < run->end; at++) {
                each<count>([&](auto k) ALWAYS { least[k] = minimum(second[*at][k], least[k]); });
            }
            each<count>([&](auto k) ALWAYS {
                Floats error = first[run->first][k] + least[k];
                Truths better = error < found[k].error;
                found[k].error = choose<Floats>(better, error, found[k].error);
                found[k].code = choose<Unsigned>(better, splat(uint32_t(run->first) << HALF_BITS), found[k].code);
                best_second[k] = choose<Floats>(better, least[k], best_second[k]);
            });
        }
        each<count>([&](auto k) ALWAYS { found[k].code |= bits(best_second[k]) & (HALVES - 1); });
    }

    // take(digits, their error) for all that half of a point, from the weight `at` on, may have.
    template <class Take>
    INLINE void tabulate(int at, Floats inverse, float shift, Take take) const {
        Floats own[HALF][DIGITS];
        each<HALF>([&](auto i) ALWAYS {
            Floats t = of.weights[at + i] * inverse - shift;
            each<DIGITS>([&](auto digit) ALWAYS {
                Floats left = t - grid.levels[digit];
                own[i][digit] = of.importance[at + i] * (left * left);
            });
        });
        Floats pairs[HALF / 2][DIGITS * DIGITS];
        each<HALF / 2>([&](auto pair) ALWAYS {
            each<DIGITS * DIGITS>([&](auto k) ALWAYS {
                pairs[pair][k] = own[2 * pair][k % DIGITS] + own[2 * pair + 1][k / DIGITS];
            });
        });
        each<DIGITS * DIGITS>([&](auto low) ALWAYS {
            if constexpr (HALF == 2) take(packed(low), pairs[0][low]);
            else each<DIGITS * DIGITS>([&](auto high) ALWAYS {
                take(packed(low) | packed(high) << 2 * DIGIT, pairs[0][low] + pairs[1][high]);
            });
        });
    }

    // The digits of a pair that is counted.
    static constexpr int packed(int pair) { return pair % DIGITS | pair / DIGITS << DIGIT; }

    // The number of a point in its block, of one lane.
    uint16_t number(int point, int lane) const { return grid.numbers[codes[point][lane] & (HALVES * HALVES - 1)]; }

    // body(number of a weight, the value of its digit) for all coordinates of a point.
    template <class Body>
    INLINE void over_point(int point, Unsigned code, float shift, Body body) const {
        each<POINT>([&](auto i) ALWAYS {
            // The digits of the first half are the upper ones; those of a half begin in its lowest bits.
            constexpr int from = (i < HALF ? HALF_BITS : 0) + i % HALF * DIGIT;
            body(point * POINT + i, levels[code >> from & ((1 << DIGIT) - 1)] + shift);
        });
    }

    // Add the products with a point.
    INLINE void add(PointSums& sums, int point, Unsigned code, float shift) const {
        over_point(point, code, shift, [&](int j, Floats v) ALWAYS {
            Floats weighted_value = of.importance[j] * v;
            sums.vv += weighted_value * v, sums.wv += weighted_value * of.weights[j];
        });
    }

    // The points nearest to the weights at a scale of which the inverse is given, from one point on up to another, and
    // their sums.
    [[gnu::noinline]] PointSums nearest_points(int begin, int end, Floats inverse) {
        PointSums total;
        for (int point = begin; point < end; point += run) {
            if constexpr (HAS_SHIFT) {
                PointSums sums = nearest_run(point, inverse);
                total.vv += sums.vv, total.wv += sums.wv;
            } else {
                Found found[2];
                find({{point, 0}, {point + 1, 0}}, inverse, found);
                for (int i = 0; i < 2; i++) {
                    codes[point + i] = found[i].code;
                    add(total, point + i, found[i].code, 0);
                }
            }
        }
        return total;
    }

    // The same for points that share a shift.
    INLINE PointSums nearest_run(int first, Floats inverse) {
        constexpr float shifts[] = {SHIFT, -SHIFT};
        Unsigned own[2][4];  // a part has no more
        Floats error[2]{};
        PointSums sums[2];
        for (int i = 0; i < run; i++) {
            Found found[2];
            find({{first + i, shifts[0]}, {first + i, shifts[1]}}, inverse, found);
            for (int side = 0; side < 2; side++) {
                own[side][i] = found[side].code, error[side] += found[side].error;
                add(sums[side], first + i, found[side].code, shifts[side]);
            }
        }
        Truths lower = error[1] < error[0];
        for (int i = 0; i < run; i++) {
            codes[first + i] = choose<Unsigned>(lower, own[1][i], own[0][i]);
            signs[first + i] = Unsigned(lower) & 1;
        }
        sums[0].choose_from(lower, sums[1]);
        return sums[0];
    }
};

template <class S>
struct GridBlocks : Blocks<S> {
    using Base = Blocks<S>;
    using Base::PARTS, Base::PART_SIZE, Base::weights, Base::scaling, Base::over_part, Base::importance;
    using Finder = Search<S::KIND>;
    static constexpr int PART_POINTS = PART_SIZE / Finder::POINT;

    const GridLimits limits;
    Finder search;
    PointSums sums[PARTS][MOST_STARTS + 1];
    Floats mean[PARTS], factors[PARTS];

    GridBlocks(const GridLimits& limits, const Grid& grid) : limits(limits), search(limits, grid, *this) {}

    void encode(const float* values, const Job& job) {
        Truths empty = load(values);
        const int starts = int(job.start_count);
        for (int part = 0; part < PARTS; part++) {
            for (int i = 0; i < starts; i++) sums[part][i] = nearest_points(part, mean[part] * job.starts[i]);
        }
        Floats d = fitted(job);
        for (int part = 0; part < PARTS; part++) sums[part][starts] = nearest_points(part, d * factors[part]);
        write(refitted(d, starts + 1), empty);
    }

    // See Search. Only where d is saturated, scales are smaller; the errors of points would then hardly differ.
    PointSums nearest_points(int part, Floats scale) {
        const Floats inverse = minimum(inverse_of(scale), 64.0f / mean[part]);
        return search.nearest_points(part * PART_POINTS, (part + 1) * PART_POINTS, inverse);
    }

    // Returns which blocks are all zeros.
    Truths load(const float* values) {
        load_blocks(values, SIZE<S>, weights);
        Floats most{};
        for (Floats w : weights) most = maximum(magnitude(w), most);
        scaling = scaling_of(most, -126, 126);
        scale_groups(weights, SIZE<S>, scaling.down);
        for (int part = 0; part < PARTS; part++) {
            Floats energy{}, total{};
            over_part(part, [&](Floats w, auto factor) ALWAYS {
                energy += factor * (w * w), total += factor;
            });
            mean[part] = square_root(energy / total);
        }
        if constexpr (!Finder::HAS_SHIFT) {
            for (int eight = 0; eight < SIZE<S> / 8; eight++) search.signs[eight] = take_signs(eight * 8);
        }
        return most == 0.0f;
    }

    // Make magnitudes of eight weights. Returns a bit for each minus sign.
    [[gnu::noinline]] Unsigned take_signs(int first) {
        Unsigned negative{}, cheapest{};
        Truths odd{};
        Floats least = splat(INFINITE);
        each<8>([&](auto i) ALWAYS {
            Floats w = weights[first + i], size = magnitude(w), cost = importance[first + i] * size;
            Truths minus = w < 0.0f, cheaper = cost < least;
            negative |= Unsigned(minus) & (1u << i);
            odd ^= minus;
            cheapest = choose<Unsigned>(cheaper, splat(1u << i), cheapest);
            least = minimum(cost, least);
            weights[first + i] = size;
        });
        if (limits.even_signs) {
            cheapest &= Unsigned(odd);
            negative ^= cheapest;
            each<8>([&](auto i) ALWAYS {
                Floats& w = weights[first + i];
                w = choose<Floats>((cheapest & (1u << i)) != 0, -w, w);
            });
        }
        return negative;
    }

    // --- factors ---

    struct Fit {
        Floats error = splat(INFINITE), d{};
        PointSums taken;  // of all parts, in units of d
        Floats factors[PARTS]{};
    };

    // Try a d with the best factors for it, by the first `count` parabolas of each part.
    [[gnu::noinline]] void try_factors(Floats d, int count, Fit& best) const {
        const Floats half_inverse = inverse_of(d) * 0.5f;
        Fit own;
        own.error = {};
        for (int part = 0; part < PARTS; part++) {
            Floats least = splat(INFINITE);
            PointSums taken;
            for (int i = 0; i < count; i++) {
                const PointSums& s = sums[part][i];
                // The odd number next to scale / d.
                Floats odd = rint(s.wv / maximum(s.vv, splat(TINY)) * half_inverse - 0.5f) * 2.0f + 1.0f;
                odd = minimum(maximum(odd, splat(1.0f)), splat(float(2 * limits.factors - 1)));
                Floats excess = s.excess(d * odd);
                Truths better = excess < least;
                least = choose<Floats>(better, excess, least);
                own.factors[part] = choose<Floats>(better, odd, own.factors[part]);
                taken.choose_from(better, s);
            }
            own.error += least;
            const Floats odd = own.factors[part];
            own.taken.vv += odd * odd * taken.vv, own.taken.wv += odd * taken.wv;
        }
        Truths better = own.error < best.error;
        best.error = choose<Floats>(better, own.error, best.error);
        best.d = choose<Floats>(better, d, best.d);
        best.taken.choose_from(better, own.taken);
        for (int part = 0; part < PARTS; part++) {
            best.factors[part] = choose<Floats>(better, own.factors[part], best.factors[part]);
        }
    }

    // d and the factors, by the parabolas of the search.
    Floats fitted(const Job& job) {
        const int count = int(job.start_count);
        Floats largest{};
        for (int part = 0; part < PARTS; part++) {
            Floats least = splat(INFINITE), scale{};
            for (int i = 0; i < count; i++) {
                const PointSums& s = sums[part][i];
                Floats own = s.wv / maximum(s.vv, splat(TINY)), excess = s.excess(own);
                scale = choose<Floats>(excess < least, own, scale);
                least = minimum(excess, least);
            }
            largest = maximum(scale, largest);
        }
        Fit best;
        for (int64_t i = 0; i < job.factor_count; i++) try_factors(largest * job.factors[i], count, best);
        return settled(best, count);
    }

    // The same, from a d on.
    Floats refitted(Floats d, int count) {
        Fit best;
        try_factors(d, count, best);
        return settled(best, count);
    }

    // Both F16 numbers around the least-squares d.
    Floats settled(const Fit& fit, int count) {
        auto [nearest, other] = half_neighbours(fit.taken.wv / maximum(fit.taken.vv, splat(TINY)), scaling);
        Fit best;
        for (Floats d : {nearest, other}) try_factors(d, count, best);
        for (int part = 0; part < PARTS; part++) factors[part] = best.factors[part];
        return best.d;
    }

    // --- encode ---

    void write(Floats d, Truths empty) {
        for (int part = 0; part < PARTS; part++) {
            const Floats scale = d * factors[part];
            nearest_points(part, scale);
            for (int point = part * PART_POINTS; point < (part + 1) * PART_POINTS; point++) {
                search.over_point(point, search.codes[point], 0, [&](int j, Floats v) ALWAYS {
                    if constexpr (Finder::HAS_SHIFT) v += choose<Floats>(search.signs[point] != 0, splat(-SHIFT), splat(SHIFT));
                    Doubles wide = converted<Doubles>(weights[j]), left = wide - converted<Doubles>(v * scale);
                    this->energy += wide * wide;
                    this->error += left * left;
                });
                for (int lane = 0; lane < LANES; lane++) {
                    this->fields[lane].points[point] = search.number(point, lane);
                }
            }
            this->write_level((factors[part] - 1.0f) * 0.5f, part, &Fields::scales);
        }
        for (int eight = 0; eight < SIZE<S> / 8; eight++) {
            for (int lane = 0; lane < LANES; lane++) this->fields[lane].signs[eight] = uint8_t(search.signs[eight][lane]);
        }
        this->write_half(choose<Floats>(empty, Floats{}, d * scaling.up), &Fields::d);
    }
};

}  // namespace

// See gguf_grids.py. levels, points and numbers: see Grid.
void pqweights::encode_gguf_grids(int64_t type, const float* values, const float* importance, const float* starts,
                                  int64_t start_count, const float* factors, int64_t factor_count, uint8_t* data,
                                  double* energies, double* errors, int64_t blocks, int64_t row_blocks,
                                  const float* levels, const uint8_t* points, const uint16_t* numbers,
                                  int64_t count) {
    const Grid grid(levels, points, numbers, count);
    encode_type<GridBlocks, IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS, IQ2_XXS, IQ1_M, IQ1_S>(
        type,
        {values, importance, starts, start_count, factors, factor_count, data, energies, errors, blocks, row_blocks},
        grid);
}
