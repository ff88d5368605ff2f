"""By how much the weights of a class take fewer bits than the encoder's model expects: the constants of its correction.

    python benchmarks/trellis_model.py [--weights 1048576]

The model (pqweights/formats/trellis_tables.py) takes both parities of a number to be equally likely. In classes of
small variance the search prefers to stay where it can code zeros. Here a plain Viterbi search in numpy, with 8 states,
codes N(0,1) in blocks of equal length, and the bits of the class's own tables are counted. Prints one line for each
class: its exponent, the bits that were taken, those that the model would expect without a correction, and the
difference beside the constant in use.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import numpy.typing as npt

from pqweights.formats.trellis_tables import EXPONENTS, SAVED, TABLE_BITS, buckets, expected_length, frequencies

STATES, BY_PARITY, BY_BIT = 8, 0o13 >> 1, 0o04 >> 1
SEQUENCE = 4096
BLOCK = 128


def search(u: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The nearest numbers that the trellis allows: [sequences, length] -> the same."""
    costs = np.full((len(u), STATES), np.inf)
    costs[:, 0] = 0.0
    choices = np.empty((u.shape[1], len(u), STATES), dtype=np.int64)
    residues = np.arange(4)
    for t in range(u.shape[1]):
        nearest = residues + 4 * np.rint((u[:, t, None] - residues) / 4)
        distance = (u[:, t, None] - nearest) ** 2
        following = np.full_like(costs, np.inf)
        for state in range(STATES):
            for bit in range(2):
                parity = state & 1
                to = (state >> 1) ^ (BY_PARITY * parity) ^ (BY_BIT * bit)
                cost = costs[:, state] + distance[:, parity + 2 * bit]
                better = cost < following[:, to]
                following[better, to] = cost[better]
                choices[t, better, to] = state << 1 | bit
        costs = following
    state = costs.argmin(axis=1)
    numbers = np.empty(u.shape, dtype=np.int64)
    for t in reversed(range(u.shape[1])):
        chosen = choices[t, np.arange(len(u)), state]
        state = chosen >> 1
        residue = (state & 1) + 2 * (chosen & 1)
        numbers[:, t] = residue + 4 * np.rint((u[:, t] - residue) / 4)
    return numbers


def lengths(exponent: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The bits of numbers in a class; NaN for one that its tables do not have."""
    result = np.full(numbers.shape, np.nan)
    for parity in range(2):
        groups = buckets(exponent, parity)
        edges = np.array(groups.edges) << groups.core_bits
        bits = [TABLE_BITS - math.log2(f) + groups.bits_of(i) for i, f in enumerate(frequencies(exponent, parity))]
        mine = numbers & 1 == parity
        k = numbers[mine] >> 1
        place = np.searchsorted(edges, k, side="right") - 1
        inside = (place >= 0) & (place < len(bits))
        result[mine] = np.where(inside, np.array(bits)[np.clip(place, 0, len(bits) - 1)], np.nan)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=int, default=1 << 20)
    options = parser.parse_args()
    blocks = np.random.default_rng(1).standard_normal((options.weights // BLOCK, BLOCK))
    blocks /= np.sqrt(np.square(blocks).mean(axis=1, keepdims=True))
    weights = blocks.reshape(-1, SEQUENCE)
    for exponent, constant in zip(EXPONENTS, SAVED, strict=False):
        deviation = 2.0 ** (exponent / 4)
        taken = float(np.nanmean(lengths(exponent, search(weights * deviation))))
        expected = expected_length(exponent, deviation)
        saved = expected - taken
        print(f"{exponent:3d}: {taken:.4f} taken, {expected:.4f} expected: {saved:.4f} saved, {constant:.4f} in use")


if __name__ == "__main__":
    main()
