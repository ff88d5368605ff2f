// The trellis search for sixteen sequences at once, one in each lane: Viterbi's algorithm over the integers, as in
// trellis-coded quantization (Marcellin and Fischer, IEEE Trans. Commun. 38, 1990).
//
// The lowest bit of a state is the parity of the number n that comes next; bit 1 of n, with it, chooses the state after
// that (section 8 of docs/format.md). The metrics of a state are a vector, and what leads to it is a bit for each lane.
#pragma once

#include "trellis_entropy.hpp"

namespace {

// More than any path costs within a tile.
constexpr float UNREACHABLE = 1e9f;
// Larger than what any path costs, so that blocks of class 0 have only numbers 0 and 1.
constexpr float FORBIDDEN = 1e6f;

// Metrics of sequences that begin in these states.
template <int states>
INLINE void begin_search(Ints starts, Floats (&metrics)[states]) {
    for (int state = 0; state < states; state++)
        metrics[state] = choose<Floats>(starts == state, Floats{}, splat(UNREACHABLE));
}

}  // namespace

namespace pqweights {

// Extend the cheapest paths by a tile. Of searches with 3, 6 and 8 bits a state: unrolled over all states, it is the
// largest part of both encoders (trellis_extension.cpp).
//
// work: [128, 16]. factor, penalty: of each block: what its weights are multiplied by, and what n other than 0 and 1
// cost. decisions: [128, states]. metrics: before and after. room: as large.
template <int state_bits>
void extend(const float* work, Floats factor, Floats penalty, uint16_t* __restrict decisions,
            Floats* __restrict metrics, Floats* __restrict room);

}  // namespace pqweights

namespace {

// --- the way back ---

// The states of the sixteen sequences, bit by bit.
template <int state_bits>
using Planes = uint16_t[state_bits];

// The last states of the cheapest paths, of equals the lowest.
template <int state_bits>
Ints cheapest_states(const Floats* metrics) {
    Floats least = metrics[0];
    Ints best{};
    for (int state = 1; state < 1 << state_bits; state++) {
        const Truths less = metrics[state] < least;
        least = choose<Floats>(less, metrics[state], least);
        best = choose<Ints>(less, Ints{} + state, best);
    }
    return best;
}

template <int state_bits>
void split(Ints states, Planes<state_bits>& planes) {
    for (int i = 0; i < state_bits; i++) planes[i] = uint16_t(mask_of((states & (1 << i)) != 0));
}

// Of a word for each state: bit by bit that of each sequence's state.
template <int count>
INLINE uint16_t chosen(Vector<uint16_t, count> words, const uint16_t* planes) {
    if constexpr (count == 1) {
        return words[0];
    } else {
        const auto low = slice<0, count / 2>(words), high = slice<count / 2, count / 2>(words);
        return chosen<count / 2>(low ^ ((low ^ high) & planes[__builtin_ctz(count) - 1]), planes);
    }
}

// The parity and bit 1 of sixteen numbers.
struct Residues {
    uint16_t parity, bit;
};

// Follow the cheapest paths back through a tile. planes: the states behind it, and then those before it.
template <int state_bits>
void trace(const uint16_t* decisions, Planes<state_bits>& planes, Residues (&residues)[BLOCK]) {
    constexpr int states = 1 << state_bits;
    constexpr Trellis trellis = TRELLISES[state_bits];
    for (int t = BLOCK - 1; t >= 0; t--) {
        const uint16_t parity = planes[state_bits - 1];
        const uint16_t bit = chosen<states>(load<Vector<uint16_t, states>>(decisions + states * t), planes);
        residues[t] = {parity, bit};
        for (int i = state_bits - 1; i > 0; i--) {
            const bool parity_flips = trellis.if_odd >> (i - 1) & 1, bit_flips = trellis.if_k_odd >> (i - 1) & 1;
            planes[i] = planes[i - 1] ^ (parity_flips ? parity : 0) ^ (bit_flips ? bit : 0);
        }
        planes[0] = parity;
    }
}

// --- numbers and errors ---

// For each block the sums of weight * n and of n * n.
struct NumberSums {
    Floats products, lengths;
};

// Write the numbers n of a tile, [128, 16]: the nearest ones with the residues that were found.
INLINE NumberSums find_numbers(const float* work, Floats factor, const Residues (&residues)[BLOCK], int16_t* numbers) {
    NumberSums sums{};
    for (int t = 0; t < BLOCK; t++) {
        const Floats one = choose<Floats>(truths_of(residues[t].parity), splat(1.0f), Floats{});
        const Floats residue = one + choose<Floats>(truths_of(residues[t].bit), splat(2.0f), Floats{});
        const Floats x = load<Floats>(work + LANES * t);
        const Floats n = residue + rint((x * factor - residue) * 0.25f) * 4.0f;
        store(converted<Shorts>(converted<Ints>(n)), numbers + LANES * t);
        sums.products += x * n;
        sums.lengths += n * n;
    }
    return sums;
}

// The sum of (weight - n * scale)**2 of each block.
INLINE Floats squared_errors(const float* work, const int16_t* numbers, Floats scale) {
    Floats total{};
    for (int t = 0; t < BLOCK; t++) {
        const Floats n = converted<Floats>(converted<Ints>(load<Shorts>(numbers + LANES * t)));
        const Floats error = load<Floats>(work + LANES * t) - n * scale;
        total += error * error;
    }
    return total;
}

}  // namespace
