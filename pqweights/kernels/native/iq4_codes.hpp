// The codes of IQ4_NL and IQ4_XS: numbers to the nearest of sixteen.
#pragma once

#include "table.hpp"

namespace {

// The values of the codes.
constexpr float IQ4_VALUES[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Before each of IQ4_VALUES but the first, the middle between it and the one before.
struct Iq4Limits {
    float limits[LANES] = {};

    constexpr Iq4Limits() {
        for (int i = 1; i < LANES; i++) limits[i] = (IQ4_VALUES[i - 1] + IQ4_VALUES[i]) / 2;
    }
};
constexpr Iq4Limits IQ4;

struct Iq4Codes {
    Table<LANES> values{IQ4_VALUES}, limits{IQ4.limits};

    // The lower one on a tie: a binary search. Of a NaN: 0.
    INLINE Unsigned index(Floats t) const {
        Unsigned index = choose<Unsigned>(t > IQ4.limits[8], splat(8u), Unsigned{});
        for (uint32_t bit : {4, 2, 1}) index = choose<Unsigned>(t > limits[index | bit], index | bit, index);
        return index;
    }
};

}  // namespace
