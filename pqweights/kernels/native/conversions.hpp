// Between float32 and the 16-bit floats, sixteen at a time, rounded to nearest even: sections 4 and 5 of
// docs/format.md. Decoded values, norms, products and the scales of GGUF are all rounded here.
#pragma once

#include "lanes.hpp"

namespace {

// The values of VALUE_DTYPES in kernels/__init__.py.
enum class Dtype : int64_t { BF16, F16, F32 };

INLINE int64_t bytes_of(Dtype dtype) { return dtype == Dtype::F32 ? 4 : 2; }

// Without the lowest `count` bits, rounded to nearest even.
INLINE Unsigned rounded_off(Unsigned u, int count) {
    return (u + ((1u << (count - 1)) - 1) + ((u >> count) & 1)) >> count;
}

// Of numbers from 0 up to 65520, exclusive: the float16 next to each, ties to even.
INLINE Unsigned finite_half(Floats x) {
    const float least_normal = 0x1p-14f;
    // Below it halves are steps of 2**-24. From 2**23 on floats are whole numbers, so adding that rounds, and the lower
    // 23 bits are the number of steps: 1024 is the least normal half. Other lanes are bounded, and not used.
    Unsigned steps = bits(minimum(x, splat(least_normal)) * 0x1p24f + 0x1p23f) & 0x7FFFFF;
    return choose<Unsigned>(x < least_normal, steps, rounded_off(bits(x), 13) - ((127 - 15) << 10));
}

// The float16 next to each number that is not negative, ties to even; what is too large becomes infinite.
INLINE Words half_from_float(Floats x) {
    return converted<Words>(choose<Unsigned>(x >= 65520.0f, splat(0x7C00u), finite_half(x)));
}

INLINE Floats float_from_half(Words half) {
    Unsigned h = converted<Unsigned>(half), magnitude = (h & 0x7FFF) << 13, exponent = h & 0x7C00;
    Unsigned rebias = choose<Unsigned>(exponent == 0x7C00, splat(224u << 23), splat(112u << 23));  // keeps inf, NaN
    Unsigned tiny = bits(converted<Floats>(h & 0x3FF) * 0x1p-24f);
    return floats(choose<Unsigned>(exponent == 0, tiny, magnitude + rebias) | ((h & 0x8000) << 16));
}

INLINE Floats float_from_bf16(Words bf16) { return floats(converted<Unsigned>(bf16) << 16); }

// The BF16 next to each number, as a float32; a NaN may become infinite.
INLINE Floats nearest_bf16(Floats x) { return floats(rounded_off(bits(x), 16) << 16); }

// The float16 next to each number, as a float32, saturated.
INLINE Floats nearest_half(Floats x) {
    Floats magnitudes = float_from_half(half_from_float(minimum(magnitude(x), splat(65504.0f))));
    return floats(bits(magnitudes) | (bits(x) & 0x80000000));
}

// The number of a dtype of 16 bits that is next to each number.
INLINE Floats nearest_short(Floats x, Dtype dtype) { return dtype == Dtype::F16 ? nearest_half(x) : nearest_bf16(x); }

// x where its magnitude is at most `limit`, which is positive, and `limit` with the sign of x elsewhere; a NaN stays.
INLINE Floats clamped(Floats x, float limit) {
    x = choose<Floats>(-limit > x, splat(-limit), x);
    return choose<Floats>(limit < x, splat(limit), x);
}

// The BF16 next to each number, saturated.
INLINE Words bf16_from_float(Floats x) {
    return converted<Words>(rounded_off(bits(clamped(x, 0x1.FEp127f)), 16));
}

// The sixteen values at an address.
INLINE Floats load_values(const uint8_t* from, Dtype dtype) {
    if (dtype == Dtype::BF16) return float_from_bf16(load<Words>(from));
    if (dtype == Dtype::F16) return float_from_half(load<Words>(from));
    return load<Floats>(from);
}

// The inverse of load_values, saturated.
INLINE void store_values(Floats x, uint8_t* to, Dtype dtype) {
    if (dtype == Dtype::BF16) {
        store(bf16_from_float(x), to);
    } else if (dtype == Dtype::F16) {
        x = clamped(x, 65504.0f);
        store(converted<Words>(finite_half(magnitude(x)) | ((bits(x) >> 16) & 0x8000)), to);
    } else {
        store(clamped(x, 0x1.FFFFFEp127f), to);
    }
}

}  // namespace
