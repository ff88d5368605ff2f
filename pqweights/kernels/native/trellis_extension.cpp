// The longest part of the trellis search, extending paths by a tile: trellis_search.hpp.
#include "trellis_search.hpp"

namespace {

// The squared distances of x from the nearest integers that leave 0, 1, 2 and 3 when divided by 4; `penalty` is added
// to the last two.
struct Distances {
    Floats of[4];
};
INLINE Distances distances_from(Floats x, Floats penalty) {
    const Floats offset = x - rint(x * 0.25f) * 4.0f;  // from the nearest multiple of 4, so within [-2, 2]
    Floats above = magnitude(offset - 1.0f), below = magnitude(offset + 1.0f);
    above = minimum(above, 4.0f - above), below = minimum(below, 4.0f - below);
    const Floats far = 2.0f - magnitude(offset);
    return {{offset * offset, above * above, far * far + penalty, below * below + penalty}};
}

// mask_of(truths), written to an address; volatile, as Clang else collects hundreds of masks before it writes them.
INLINE void store_mask(Truths truths, uint16_t* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    struct { __m256 low, high; } half;  // written apart, which takes less than joining the masks
    std::memcpy(&half, &truths, sizeof half);
    ((volatile uint8_t*)to)[0] = uint8_t(_mm256_movemask_ps(half.low));
    ((volatile uint8_t*)to)[1] = uint8_t(_mm256_movemask_ps(half.high));
#else
    *(volatile uint16_t*)to = uint16_t(mask_of(truths));
#endif
}

// Extend the cheapest path to each state by a number n. decisions: bit 1 of the n that leads to each state.
template <int state_bits>
INLINE void extend_by_one(const Floats* before, Floats* after, const Distances& distances, uint16_t* decisions) {
    constexpr Trellis trellis = TRELLISES[state_bits];
    each<1 << state_bits>([&](auto state) ALWAYS {
        constexpr int parity = state >> (state_bits - 1), sibling = state ^ trellis.if_k_odd;
        if constexpr (state < sibling) {  // the same two states lead to both
            constexpr int even = (state ^ (parity ? trellis.if_odd : 0)) << 1 | parity;
            constexpr int odd = even ^ trellis.if_k_odd << 1;
            auto extend_to = [&](int to, Floats near, Floats far) ALWAYS {
                near += distances.of[parity], far += distances.of[parity + 2];
                store_mask(far < near, decisions + to);
                after[to] = minimum(far, near);
            };
            const Floats from_even = before[even], from_odd = before[odd];
            extend_to(state, from_even, from_odd);
            extend_to(sibling, from_odd, from_even);
        }
    });
}

}  // namespace

template <int state_bits>
void pqweights::extend(const float* work, Floats factor, Floats penalty, uint16_t* __restrict decisions,
                       Floats* __restrict metrics, Floats* __restrict room) {
    constexpr int states = 1 << state_bits;
    auto extend_along = [&](Floats* even, Floats* odd) ALWAYS {
        auto step = [&](int t, const Floats* before, Floats* after) ALWAYS {
            const Distances distances = distances_from(load<Floats>(work + LANES * t) * factor, penalty);
            extend_by_one<state_bits>(before, after, distances, decisions + states * t);
        };
        for (int t = 0; t < BLOCK; t += 2) step(t, even, odd), step(t + 1, odd, even);
        const Floats least = even[0];  // subtracted, so that metrics stay small
        for (int state = 0; state < states; state++) metrics[state] = even[state] - least;
    };
    if constexpr (states <= 8) {  // all in registers
        Floats even[states], odd[states];
        each<states>([&](auto state) ALWAYS { even[state] = metrics[state]; });
        extend_along(even, odd);
    } else {
        extend_along(metrics, room);
    }
}

template void pqweights::extend<3>(const float*, Floats, Floats, uint16_t*, Floats*, Floats*);
template void pqweights::extend<6>(const float*, Floats, Floats, uint16_t*, Floats*, Floats*);
template void pqweights::extend<8>(const float*, Floats, Floats, uint16_t*, Floats*, Floats*);
