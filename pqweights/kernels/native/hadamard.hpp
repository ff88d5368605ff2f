// The Walsh-Hadamard transform, not normalized: section 4 of docs/format.md.
#pragma once

#include "lanes.hpp"

namespace {

constexpr int BLOCK = 128, VECTORS = BLOCK / LANES;
// 1 / sqrt(128), the factor with which the transform keeps lengths.
constexpr double ORTHONORMAL = 0.08838834764831845;

// Of a power of two of vectors, lane by lane.
template <int count>
INLINE void butterflies(Floats (&x)[count]) {
    // Some processors can multiply and add beside another addition; the compiler would rather subtract.
    const Floats minus_one = splat(hidden(-1.0f));
    each<__builtin_ctz(count)>([&](auto power) ALWAYS {
        constexpr int h = 1 << power;
        each<count>([&](auto i) ALWAYS {
            if constexpr (!(i & h)) {
                Floats low = x[i], high = x[i + h];
                x[i] = low + high;
                x[i + h] = multiply_add(high, minus_one, low);
            }
        });
    });
}

// Of a block of 128 numbers that lie in eight vectors, one after the other.
INLINE void rotate_block(Floats (&x)[VECTORS]) {
    each<4>([&](auto power) ALWAYS {
        constexpr int h = 1 << power;
        const Floats signs = lanes_of<Floats>([](int lane) ALWAYS { return lane & h ? -1.0f : 1.0f; });
        each<VECTORS>([&](auto i) ALWAYS {
            // A product with 1 or -1 is exact, so fusing changes nothing.
            x[i] = multiply_add(x[i], signs, shuffled(x[i], x[i], [](int lane) { return lane ^ h; }));
        });
    });
    butterflies(x);
}

// Of sixteen blocks in the sixteen lanes: coordinate i of each is in work[i].
INLINE void rotate_blocks(Floats (&work)[BLOCK]) {
    for (int g = 0; g < BLOCK; g += LANES) butterflies(*(Floats(*)[LANES])(work + g));
    for (int j = 0; j < LANES; j++) {
        Floats x[VECTORS];
        each<VECTORS>([&](auto g) ALWAYS { x[g] = work[LANES * g + j]; });
        butterflies(x);
        each<VECTORS>([&](auto g) ALWAYS { work[LANES * g + j] = x[g]; });
    }
}

}  // namespace
