// Groups of weights to integers and to short floats as runtimes' own converters do it: docs/exports.md has the rules as
// formulas. They are those of mlx 0.32 (mx.quantize in all its modes), torchao 0.18 (_choose_qparams_affine_tinygemm on
// BF16 weights) and compressed-tensors 0.20 (calculate_qparams on BF16 or F16 weights, of which scales have the dtype).
// One more has the least error of some scales: groups.cpp searches better ones, but has no room for rows.
#include "conversions.hpp"
#include "group_fitting.hpp"
#include "interface.hpp"
#include "short_floats.hpp"

namespace {

// Of RUNTIME_RULES and FLOAT_MODES in groups.py.
enum Rule : int64_t {
    MLX = 1, TORCHAO, COMPRESSED_TENSORS, MXFP4, MXFP8, NVFP4, FP8, COMPRESSED_TENSORS_ASYMMETRIC, FP8_TENSOR,
    LEAST_ERROR
};

// Up to sixteen groups in the lanes, as in group_fitting.hpp, but of any size.
struct Sixteen {
    const float* values;
    uint8_t* codes;
    int64_t groups, size;

    // body(weight j of each group) for each j, in order.
    template <class Body>
    INLINE void over(Body body) const {
        for (int64_t at = 0; at < size; at += LANES) {
            Floats columns[LANES];
            load_weights(values + at, size, groups, size - at, columns);
            for (int64_t k = 0; k < LANES && at + k < size; k++) body(columns[k]);
        }
    }

    // Write the codes that code_of(weights) gives, as Bytes.
    template <class CodeOf>
    INLINE void encode(CodeOf code_of) const {
        for (int64_t at = 0; at < size; at += LANES) {
            Floats columns[LANES];
            Bytes found[LANES]{};
            load_weights(values + at, size, groups, size - at, columns);
            for (int64_t k = 0; k < LANES && at + k < size; k++) found[k] = code_of(columns[k]);
            store_codes(found, codes + at, size, groups, size - at);
        }
    }
};

// The smallest and the largest weight; a NaN counts only if it comes first.
INLINE Extremes extremes_of(const Sixteen& groups) {
    Floats first[LANES];
    load_weights(groups.values, groups.size, groups.groups, 1, first);
    Extremes of = {first[0], first[0]};
    groups.over([&](Floats w) ALWAYS { of = {minimum(w, of.smallest), maximum(w, of.largest)}; });
    return of;
}

// Write codes, step_of(weight) limited to those from 0 to `last`, and measure them. zero: the code that stands for the
// offset.
template <class StepOf>
INLINE Result encode(const Sixteen& groups, float last, Floats zero, Floats scale, Floats offset, StepOf step_of) {
    Result result = {scale, offset};
    groups.encode([&](Floats w) ALWAYS {
        Floats code = minimum(maximum(step_of(w), Floats{}), splat(last));
        result.measure(w, w - ((code - zero) * scale + offset));
        return converted<Bytes>(converted<Ints>(code));
    });
    return result;
}

// The range is that of the weights, with the scale changed so that 0 is a whole number of steps from the edge that is
// farther from it.
INLINE Result round_as_mlx(const Sixteen& groups, float last) {
    Extremes of = extremes_of(groups);
    Truths below = magnitude(of.smallest) > magnitude(of.largest);
    Floats step = maximum(splat(1e-7f), (of.largest - of.smallest) / last);
    step = choose<Floats>(below, step, -step);
    Floats edge = choose<Floats>(below, of.smallest, of.largest), steps = rint(edge / step);
    Truths snaps = steps != 0.0f;
    step = choose<Floats>(snaps, edge / steps, step);
    Floats start = choose<Floats>(snaps, edge, Floats{});
    return encode(groups, last, Floats{}, nearest_bf16(step), nearest_bf16(start),
                  [&](Floats w) ALWAYS { return rint((w - start) / step); });
}

// The range is that of the weights, with every step rounded to BF16; the offset is the weight of the middle code.
INLINE Result round_as_torchao(const Sixteen& groups, float last, float middle) {
    Extremes of = extremes_of(groups);
    Floats scale = nearest_bf16(nearest_bf16(of.largest - of.smallest) / last);
    scale = maximum(splat(0x1p-126f), scale);
    Floats below = nearest_bf16(scale * middle), offset = nearest_bf16(of.smallest + below);
    Floats start = nearest_bf16(offset - below);
    return encode(groups, last, splat(middle), scale, offset,
                  [&](Floats w) ALWAYS { return rint(nearest_bf16(nearest_bf16(w - start) / scale)); });
}

// A scale that is 0 becomes the epsilon of its dtype.
INLINE Floats never_zero(Floats scale, Dtype dtype) {
    return choose<Floats>(scale == 0.0f, splat(dtype == Dtype::F16 ? 0x1p-10f : 0x1p-7f), scale);
}

// The range is symmetric, up to the largest magnitude.
INLINE Result round_symmetric(const Sixteen& groups, float last, float middle, Dtype dtype) {
    Extremes of = extremes_of(groups);
    Floats below = magnitude(minimum(Floats{}, of.smallest)), above = magnitude(maximum(Floats{}, of.largest));
    Floats scale = never_zero(nearest_short(maximum(above, below) / (last / 2), dtype), dtype);
    return encode(groups, last, splat(middle), scale, Floats{},
                  [&](Floats w) ALWAYS { return rint(nearest_short(w / scale, dtype)) + middle; });
}

// The range is symmetric, up to the largest magnitude or a little less, the best of eight by the squared error: of the
// rounded scales some fit better than others, and a few weights may saturate.
INLINE Result round_by_least_error(const Sixteen& groups, float last, float middle, Dtype dtype) {
    constexpr int COUNT = 8;
    Floats most{}, scales[COUNT], errors[COUNT]{};
    groups.over([&](Floats w) ALWAYS { most = maximum(magnitude(w), most); });
    each<COUNT>([&](auto c) ALWAYS {
        scales[c] = never_zero(nearest_short(most / (last / 2 * (1.0f + float(c) / 64.0f)), dtype), dtype);
    });
    // Errors in steps of each scale, so that their squares stay in range.
    groups.over([&](Floats w) ALWAYS {
        each<COUNT>([&](auto c) ALWAYS {
            Floats t = w / scales[c], left = t - minimum(maximum(rint(t), splat(-middle)), splat(last - middle));
            errors[c] += left * left;
        });
    });
    Floats scale = scales[0], least = errors[0];
    each<COUNT - 1>([&](auto before) ALWAYS {
        constexpr int c = before + 1;
        Floats ratio = scales[c] / scale, error = errors[c] * ratio * ratio;
        Truths better = error < least;
        scale = choose<Floats>(better, scales[c], scale);
        least = choose<Floats>(better, errors[c], least);
    });
    return encode(groups, last, splat(middle), scale, Floats{},
                  [&](Floats w) ALWAYS { return rint(w / scale) + middle; });
}

// The range is that of the weights and 0, which becomes a code; steps are rounded before and after it is added.
INLINE Result round_asymmetric(const Sixteen& groups, float last, float middle, Dtype dtype) {
    Extremes of = extremes_of(groups);
    auto round = [&](Floats x) ALWAYS { return nearest_short(x, dtype); };
    Zero zero = zero_of_range(of.smallest, of.largest, middle, round);
    Floats scale = never_zero(zero.scale, dtype), shift = zero.code - middle;
    Result result = encode(groups, last, zero.code, scale, Floats{},
                           [&](Floats w) ALWAYS { return rint(round(round(w / scale) + shift)) + middle; });
    result.offset = zero.code;
    return result;
}

// --- short floats ---

// Scales as they are stored: their bytes, as numbers, or in FP8 themselves.
struct FloatScale {
    Floats stored, value;
};

INLINE bool has_e4m3(Rule mode) { return mode == MXFP8 || mode == FP8 || mode == FP8_TENSOR; }

// The scale of groups from their largest magnitudes.
INLINE FloatScale float_scale(Floats most, Rule mode) {
    if (mode == FP8_TENSOR) return {splat(1.0f), splat(1.0f)};
    Floats scale = most / (has_e4m3(mode) ? 448.0f : 6.0f);
    if (mode == FP8) {
        scale = nearest_bf16(scale);
        scale = choose<Floats>(scale < 0x1p-126f, splat(0x1p-126f), scale);
        return {scale, scale};
    }
    if (mode == NVFP4) {
        Unsigned byte = e4m3_from_float(scale);
        return {converted<Floats>(byte), float_from_e4m3(byte)};
    }
    Unsigned byte = choose<Unsigned>(most > 0.0f, e8m0_not_below(scale), splat(127u));
    return {converted<Floats>(byte), float_from_e8m0(byte)};
}

INLINE Result round_to_floats(const Sixteen& groups, Rule mode) {
    Floats most{};
    groups.over([&](Floats w) ALWAYS { most = maximum(magnitude(w), most); });
    FloatScale scale = float_scale(most, mode);
    Truths usable = scale.value > 0.0f;
    Result result = {scale.stored, Floats{}};
    groups.encode([&](Floats w) ALWAYS {
        Floats steps = choose<Floats>(usable, magnitude(w) / scale.value, Floats{});
        Unsigned code = has_e4m3(mode) ? e4m3_from_float(steps) : e2m1_from_float(steps);
        Floats decoded = has_e4m3(mode) ? float_from_e4m3(code) : float_from_e2m1(code);
        result.measure(w, magnitude(w) - decoded * scale.value);
        // mlx has no negative zero in E2M1.
        Unsigned sign = has_e4m3(mode) ? bits(w) >> 24 & 128 : Unsigned((w < 0.0f) & (code > 0)) & 8;
        return converted<Bytes>(code | sign);
    });
    return result;
}

INLINE Result round_by(Rule rule, const Sixteen& groups, float last, float middle, Dtype dtype) {
    switch (rule) {
        case MLX: return round_as_mlx(groups, last);
        case TORCHAO: return round_as_torchao(groups, last, middle);
        case COMPRESSED_TENSORS: return round_symmetric(groups, last, middle, dtype);
        case LEAST_ERROR: return round_by_least_error(groups, last, middle, dtype);
        case COMPRESSED_TENSORS_ASYMMETRIC: return round_asymmetric(groups, last, middle, dtype);
        default: return round_to_floats(groups, rule);
    }
}

}  // namespace

// values: [groups, size], of any size. codes: u8 [groups, size], counted from 0, or E4M3 or E2M1. scales: [groups], or
// the bytes of E8M0 or E4M3, as numbers. offsets: [groups], of the asymmetric rule zeros. energies, errors:
// [groups]. bits: of integers, 2 to 8. dtype: of the scales of compressed-tensors, BF16 or F16.
void pqweights::round(const float* values, uint8_t* codes, float* scales, float* offsets, double* energies,
                      double* errors, int64_t groups, int64_t size, int64_t bits, int64_t rule, int64_t dtype) {
    const float last = float((1 << bits) - 1), middle = float(1 << (bits - 1));
    for (int64_t first = 0; first < groups; first += LANES) {
        const int64_t left = groups - first;
        const Sixteen some = {values + first * size, codes + first * size, left, size};
        Result result = round_by(Rule(rule), some, last, middle, Dtype(dtype));
        result.write(scales, offsets, energies, errors, first, left);
    }
}
