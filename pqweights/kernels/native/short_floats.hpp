// Floats of 4 and 8 bits, none of them negative, by the OCP microscaling formats specification 1.0: E2M1, E4M3 and E8M0.
#pragma once

#include "conversions.hpp"

namespace {

// The byte of the E4M3 nearest to each number, 0 to 126: ties to even, saturated.
INLINE Unsigned e4m3_from_float(Floats x) {
    Unsigned tiny = converted<Unsigned>(converted<Ints>(rint(minimum(x, splat(1.0f)) * 512.0f)));  // in steps of 2**-9
    Unsigned normal = minimum(rounded_off(bits(x), 20), splat(0x87Fu)) - ((127 - 7) << 3);
    return minimum(choose<Unsigned>(x < 0x1p-6f, tiny, normal), splat(126u));
}

INLINE Floats float_from_e4m3(Unsigned byte) {
    Floats normal = floats((byte << 20) + ((127 - 7) << 23));
    return choose<Floats>(byte < 8, converted<Floats>(byte) * 0x1p-9f, normal);
}

// The code of the E2M1 nearest to each number, 0 to 7: ties down, saturated.
INLINE Unsigned e2m1_from_float(Floats x) {
    Ints below = (x > 0.25f) + (x > 0.75f) + (x > 1.25f) + (x > 1.75f) + (x > 2.5f) + (x > 3.5f) + (x > 5.0f);
    return Unsigned(-below);
}

// 0, 0.5, 1, 1.5, 2, 3, 4, 6.
INLINE Floats float_from_e2m1(Unsigned code) {
    Floats c = converted<Floats>(code);
    return maximum(c * 0.5f, maximum(c - 2.0f, c + c - 8.0f));
}

// The byte of the least power of two that is not below each number, 0 to 254.
INLINE Unsigned e8m0_not_below(Floats x) {
    Unsigned byte = (bits(x) >> 23) + choose<Unsigned>((bits(x) & 0x7FFFFF) != 0, splat(1u), splat(0u));
    return minimum(byte, splat(254u));
}

// The byte 0 stands for 2**-127.
INLINE Floats float_from_e8m0(Unsigned byte) { return floats(choose<Unsigned>(byte > 0, byte << 23, splat(1u << 22))); }

// The floats of a type.
struct E2m1 {
    static constexpr float LARGEST = 6.0f, LEAST_POWER = 1.0f, STEPS = 2.0f;

    INLINE static Unsigned code_of(Floats t) { return e2m1_from_float(t); }
    INLINE static Floats value_of(Unsigned code) { return float_from_e2m1(code); }
    INLINE static Unsigned sign_bit(Floats w) { return bits(w) >> 28 & 8; }
};

struct E4m3 {
    static constexpr float LARGEST = 448.0f, LEAST_POWER = 0x1p-6f, STEPS = 8.0f;

    INLINE static Unsigned code_of(Floats t) { return e4m3_from_float(t); }
    INLINE static Floats value_of(Unsigned code) { return float_from_e4m3(code); }
    INLINE static Unsigned sign_bit(Floats w) { return bits(w) >> 24 & 128; }
};

}  // namespace
