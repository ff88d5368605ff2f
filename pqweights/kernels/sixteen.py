"""Sixteen groups of weights in the lanes of a vector: what the steps of lanes.py share, and how the groups are loaded.

Weight j of each group is in the j-th vector of the work, multiplied by a power of two of the group's own, so that
magnitudes end in [1, 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from pqweights.kernels.emit import FLOATS, I64, LANES, Lanes, constant, load, loop, splat, store, transposed


@dataclass(frozen=True, kw_only=True, eq=False)
class Sixteen:
    """Where sixteen groups are, and the numbers that every step uses.

    builder: LLVM's.
    has_offset: fitted with an offset, else symmetric; known when the code is emitted.
    size: weights of a group (i64).
    settings: pointer to f32: for each chain the shares of the range that it keeps below and above the middle
        (symmetric: the first is a share of the plain scale), and then `relax`.
    work: pointer to f32 [size, 16], aligned to 64 bytes.
    half: 2**(bits - 1).
    last: 2**bits - 1.
    count: the size as f32.
    from_zero: whether codes count from the offset, not from the middle (truth values).
    """

    builder: Any
    has_offset: bool
    size: Any
    settings: Any
    work: Any
    half: Lanes
    last: Lanes
    count: Lanes
    from_zero: Lanes

    @property
    def zero(self) -> Lanes:
        """0 in every lane."""
        return constant(self.builder, FLOATS, [0.0] * LANES)

    def setting(self, place: int) -> Lanes:
        """One of the settings, in every lane."""
        return splat(self.builder, self.builder.load(self.builder.gep(self.settings, [I64(place)])))

    def row(self, j: Any) -> Any:
        """The index in the work at which weight j of the sixteen groups begins."""
        return self.builder.mul(j, I64(LANES))

    def weights(self, j: Any) -> Lanes:
        """Weight j of the sixteen groups, from the work."""
        return load(self.builder, self.work, self.row(j), align=64)


class Extremes(NamedTuple):
    """The smallest and the largest weight of each group."""

    smallest: Lanes
    largest: Lanes


class Extent(NamedTuple):
    """What is known of each group once it is loaded; weights are in the scale of the work.

    smallest, largest: of the weights; somewhat nearer to 0 where decoding them might overflow.
    most: the larger of the two magnitudes.
    down, up: the powers of two that lead from the weights to the work, and back.
    constant: whether all weights are equal (symmetric: all are 0).
    huge: whether decoding the largest weight might overflow.
    """

    smallest: Lanes
    largest: Lanes
    most: Lanes
    down: Lanes
    up: Lanes
    constant: Lanes
    huge: Lanes


def load_groups(groups: Sixteen, values: Any) -> Extent:
    """Fill the work from the weights, f32 [16, size], and say what is known of the groups."""
    smallest, largest = _transpose(groups, values)
    most = largest.maximum(-smallest)
    exponent = (most.bits() >> 23) - 127  # of a subnormal number: -127
    exponent = (exponent < -126).choose(exponent.of(-126), exponent)
    exponent = (exponent > 126).choose(exponent.of(126), exponent)
    down, up = ((127 - exponent) << 23).floats(), ((exponent + 127) << 23).floats()
    constant = smallest.equals(largest) if groups.has_offset else most.equals(0.0)
    # Decoding the largest float32 might overflow: such groups get the extremes of a smaller range, and no fit.
    huge, one = exponent.equals(126), groups.zero.of(1)
    keep = huge.choose(groups.zero.of(0.49 if groups.has_offset else 63 / 64), one)
    if groups.has_offset:
        keep = constant.choose(one, keep)
    smallest, largest, most = (x * down * keep for x in (smallest, largest, most))

    def scale_down(j: Any, nothing: tuple[()]) -> tuple[()]:
        store(groups.weights(j) * down, groups.work, groups.row(j), align=64)
        return nothing

    loop(groups.builder, groups.size, (), scale_down)
    return Extent(smallest, largest, most, down, up, constant, huge)


def _transpose(groups: Sixteen, values: Any) -> Extremes:
    """Fill the work with the weights, not yet scaled, and find the extremes of each group."""
    b = groups.builder

    def transpose(i: Any, extremes: Extremes) -> Extremes:
        at = b.mul(i, I64(LANES))
        rows = [load(b, values, b.add(b.mul(groups.size, I64(lane)), at)) for lane in range(LANES)]
        columns = transposed(rows)
        for k, column in enumerate(columns):
            store(column, groups.work, b.add(b.mul(at, I64(LANES)), I64(LANES * k)), align=64)
        smallest = extremes.smallest.minimum(reduce(Lanes.minimum, columns))
        return Extremes(smallest, extremes.largest.maximum(reduce(Lanes.maximum, columns)))

    infinite = groups.zero.of(float("inf"))
    return loop(b, b.sdiv(groups.size, I64(LANES)), Extremes(infinite, -infinite), transpose)
