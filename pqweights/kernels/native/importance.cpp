// Scales and offsets of groups whose columns count unequally, for rounding with compensation (compensation.cpp).
//
// Rows of weights are in the lanes. The search begins with shares of the given range, which move to the weighted mean
// as they get smaller: weights that are large but hardly count must not stretch it. From each, a few steps alternate
// between codes and the weighted least-squares fit to them; the best after rounding to BF16 or F16 is kept. If 0 must
// be a code, further steps fit the scale alone with either of the two codes between which it then lies.
#include "conversions.hpp"
#include "group_fitting.hpp"
#include "weight_tiles.hpp"
#include "interface.hpp"

namespace {

// Where the search begins, in 16ths of the given scale, and how many steps it takes from there.
constexpr int SHARES[] = {17, 16, 15, 14, 13, 12, 11, 10, 8, 6, 5, 4, 3, 2};
constexpr int STEPS = 4;

// A group of the weights of sixteen rows, and what its codes are.
struct Group {
    const float* weights;  // of the first column; those of the next one are TILE further on
    const float* importance;
    const int64_t* columns;
    int64_t size;
    float lowest, highest;
    Kind kind;
    Dtype dtype;

    // body(weights, importance) for each column.
    template <class Body>
    INLINE void over(Body body) const {
        for (int64_t j = 0; j < size; j++) body(load<Floats>(weights + columns[j] * TILE), importance[columns[j]]);
    }

    INLINE Floats code(Floats w, const Chain& at) const {
        return nearest_code_or_nan((w - at.zero) / at.scale, lowest, highest);
    }
};

INLINE float total_importance(const Group& group) {
    float total = 0;
    for (int64_t j = 0; j < group.size; j++) total += group.importance[group.columns[j]];
    return total;
}

// The weighted squared error that a scale and an offset leave.
INLINE Floats error_of(const Group& group, const Chain& at) {
    Floats error{};
    group.over([&](Floats w, float factor) ALWAYS {
        Floats e = w - (group.code(w, at) * at.scale + at.zero);
        error += factor * (e * e);
    });
    return error;
}

INLINE Floats weighted_mean(const Group& group, float total) {
    Floats sum{};
    group.over([&](Floats w, float factor) ALWAYS { sum += factor * w; });
    return sum / total;
}

// The sums over the codes that a scale and an offset give, counted from the code `start`.
INLINE CodeSums sums_of(const Group& group, const Chain& at, Floats start) {
    CodeSums sums;
    group.over([&](Floats w, float factor) ALWAYS {
        Floats code = group.code(w, at) - start, weighted = factor * code;
        sums.c += weighted;
        sums.w += factor * w;
        sums.cc += weighted * code;
        sums.cw += weighted * w;
    });
    return sums;
}

// A line, where the codes determine it.
INLINE Chain usable_or(const Chain& at, const CodeLine& line, Floats zero, float total) {
    Truths usable = (line.spread > 1e-6f * total) & (line.slope != 0.0f) & (magnitude(line.slope) < 1e30f);
    return {choose<Floats>(usable, line.slope, at.scale), choose<Floats>(usable, zero, at.zero)};
}

// The weighted least-squares scale and offset for the codes that these give.
INLINE Chain stepped(const Group& group, const Chain& at, float total) {
    CodeSums sums = sums_of(group, at, Floats{});
    Floats mean = sums.c / total;
    CodeLine line = code_line(sums, mean);
    return usable_or(at, line, sums.w / total - line.slope * mean, total);
}

// The same with a code that stands for 0.
INLINE Chain stepped_from_zero(const Group& group, const Chain& at, Floats code, float total) {
    CodeLine line = code_line(sums_of(group, at, code), Floats{});
    return usable_or(at, line, Floats{} - code * line.slope, total);
}

// Where the search begins with a share of the given range.
INLINE Chain started(const Group& group, const Chain& given, Floats mean, float share) {
    const float middle = (group.lowest + group.highest) / 2;
    Floats scale = given.scale * share, center = given.zero + middle * given.scale;
    center = mean + (center - mean) * (share < 1 ? share : 1.0f);
    return {scale, group.kind == Kind::SYMMETRIC ? given.zero : center - middle * scale};
}

// Keep a scale and an offset that were rounded, if they err less than the best so far.
INLINE void keep_better(const Group& group, const Chain& chain, Fit& best) {
    Floats error = error_of(group, chain);
    best.replace((error < best.error) & (chain.scale != 0.0f), {error, chain.scale, chain.zero});
}

// Try the two codes for 0 that are next to where a chain has it; its range is extended to 0 first.
INLINE void try_zeros(const Group& group, const Chain& chain, float total, Fit& best) {
    Floats lowest = minimum(chain.zero, Floats{});
    Floats highest = maximum(chain.zero + group.highest * chain.scale, Floats{});
    Floats scale = (highest - lowest) / group.highest, below = floor(-lowest / scale);
    for (float step : {0.0f, 1.0f}) {
        Floats code = nearest_code(below + step, group.lowest, group.highest);
        Chain own = {scale, -code * scale};
        for (int step = 0; step < STEPS; step++) own = stepped_from_zero(group, own, code, total);
        Floats kept = nearest_short(own.scale, group.dtype);
        keep_better(group, {kept, -code * kept}, best);
    }
}

// The best of what the search finds and what is given.
Chain searched(const Group& group, Chain given) {
    const float total = total_importance(group);
    Floats mean = weighted_mean(group, total);
    Fit best = {error_of(group, given), given.scale, given.zero};
    for (int share : SHARES) {
        Chain chain = started(group, given, mean, float(share) / 16);
        for (int step = 0; step < STEPS; step++) {
            chain = group.kind == Kind::SYMMETRIC ? stepped_from_zero(group, chain, Floats{}, total)
                                                  : stepped(group, chain, total);
        }
        if (group.kind == Kind::ASYMMETRIC) {
            try_zeros(group, chain, total, best);
        } else {
            keep_better(group, {nearest_short(chain.scale, group.dtype), nearest_short(chain.zero, group.dtype)}, best);
        }
    }
    return {best.scale, best.zero};
}

}  // namespace

// weights: [tiles, size, TILE]. importance: [size], positive, in the order of the weights. position: [size], where in
// that order each column is. scales, offsets: [tiles, size / group_size, TILE], replaced by those of smaller weighted
// error where the search finds some. lowest, highest: the range of the codes. kind: of Kind; offsets of SYMMETRIC are
// 0, those of ASYMMETRIC the negatives of codes times the scales, and codes count from 0. dtype: of the scales, and of
// the offsets of AFFINE.
void pqweights::fit_by_importance(const float* weights, const float* importance, const int64_t* position,
                                  float* scales, float* offsets, int64_t size, int64_t tiles, int64_t group_size,
                                  int64_t lowest, int64_t highest, int64_t kind, int64_t dtype) {
    const int64_t groups = size / group_size;
    for (int64_t part = 0; part < tiles * groups * TILE_VECTORS; part++) {
        const int64_t lane = part % TILE_VECTORS * LANES, group = part / TILE_VECTORS % groups;
        const int64_t tile = part / TILE_VECTORS / groups, at = part * LANES;
        const Group of = {weights + tile * size * TILE + lane, importance, position + group * group_size, group_size,
                          float(lowest), float(highest), Kind(kind), Dtype(dtype)};
        Chain found = searched(of, {load<Floats>(scales + at), load<Floats>(offsets + at)});
        store(found.scale, scales + at);
        store(found.zero, offsets + at);
    }
}
