"""Sixteen blocks of GGUF in the lanes of a vector: what the steps of gguf_symmetric_lanes.py share, and the first one.

Weight j of each block is in the j-th vector of the work, multiplied by a power of two of the block's own, so that
magnitudes end in [1, 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from pqweights.kernels.emit import (
    FLOATS,
    I64,
    INTS,
    LANES,
    Lanes,
    State,
    constant,
    load,
    loop,
    splat,
    store,
    transposed,
)
from pqweights.kernels.gguf_symmetric_formats import LIMITS, VALUES, SymmetricFormat
from pqweights.kernels.vector import Table

MOST_PARTS = 16
# Where in the memory for numbers of parts each array [MOST_PARTS, 16] begins.
EXTREMES, SCALES, TRIED, FACTORS = (kind * MOST_PARTS * LANES for kind in range(4))


@dataclass(frozen=True, kw_only=True, eq=False)
class Tile:
    """Sixteen blocks, one of each of sixteen rows.

    builder: LLVM's.
    format: what the blocks are to become; known when the code is emitted.
    importance: pointer to f32, one for each weight of a block.
    outer_turns: how many fours of starts that may lead to codes out of range are tried (i64).
    settings: pointer to f32, the tables of the format (see gguf_symmetric_formats.settings).
    parts: pointer to f32, numbers of the parts: four arrays [MOST_PARTS, 16].
    work: pointer to f32 [weights of a block, 16], aligned to 64 bytes.
    """

    builder: Any
    format: SymmetricFormat
    importance: Any
    outer_turns: Any
    settings: Any
    parts: Any
    work: Any

    @property
    def zero(self) -> Lanes:
        """0 in every lane."""
        return constant(self.builder, FLOATS, [0.0] * LANES)

    def weights(self, j: Any) -> Lanes:
        """Weight j of the sixteen blocks."""
        return load(self.builder, self.work, self.builder.mul(j, I64(LANES)), align=64)

    def weighted(self, j: Any) -> tuple[Lanes, Lanes]:
        """Weight j of the sixteen blocks, and its importance."""
        return self.weights(j), splat(self.builder, self.builder.load(self.builder.gep(self.importance, [j])))

    def setting(self, place: Any) -> Lanes:
        """One of the settings, in every lane."""
        return splat(self.builder, self.builder.load(self.builder.gep(self.settings, [place])))

    def of_part(self, kind: int, part: Any) -> Lanes:
        """A number of the sixteen blocks' part; kind: where its array begins."""
        return load(self.builder, self.parts, self._place(kind, part), align=64)

    def keep(self, kind: int, part: Any, numbers: Lanes) -> None:
        """The inverse of `of_part`."""
        store(numbers, self.parts, self._place(kind, part), align=64)

    def _place(self, kind: int, part: Any) -> Any:
        return self.builder.add(I64(kind), self.builder.mul(part, I64(LANES)))

    def over_part(self, part: Any, carried: State, body: Callable[[Lanes, Lanes, State], State]) -> State:
        """`carried` after body(weight, importance, carried) for each weight of a part."""
        b, first = self.builder, self.builder.mul(part, I64(self.format.part_size))
        return loop(
            b, I64(self.format.part_size), carried, lambda j, state: body(*self.weighted(b.add(first, j)), state)
        )

    def over_parts(self, carried: State, body: Callable[[Any, State], State]) -> State:
        """`carried` after body(part, carried) for each part."""
        return loop(self.builder, I64(self.format.parts), carried, body)


class Codes:
    """The nearest codes of a format: their values, and their indices."""

    def __init__(self, tile: Tile) -> None:
        self._format = tile.format
        if tile.format.values:
            self._values, self._limits = (Table(tile.builder, tile.settings, at, LANES) for at in (VALUES, LIMITS))

    def value(self, t: Lanes) -> Lanes:
        """The value of the code nearest to t, in units of codes."""
        if self._format.values:
            return self._values.look_up(self._search(t))
        return t.rint().maximum(self._format.lowest).minimum(self._format.highest)

    def index_and_value(self, t: Lanes) -> tuple[Lanes, Lanes]:
        """The index of that code, counted from the lowest (int32), and its value."""
        if self._format.values:
            index = self._search(t)
            return index, self._values.look_up(index)
        value = self.value(t)
        return (value - self._format.lowest).whole(), value

    def _search(self, t: Lanes) -> Lanes:
        """The index of the nearest of sixteen values, the lower one on a tie: a binary search."""
        zero = constant(t.builder, INTS, [0] * LANES)
        index = (t > self._format.limits[8]).choose(zero.of(8), zero)
        for bit in (4, 2, 1):
            upper = index | bit
            index = (t > self._limits.look_up(upper)).choose(upper, index)
        return index


class Scaling(NamedTuple):
    """Powers of two that lead from the weights to the work, and back; whether a block is all zeros."""

    down: Lanes
    up: Lanes
    empty: Lanes


def load_tile(tile: Tile, values: Any, places: list[Any]) -> Scaling:
    """Fill the work, scaled, and the extremes of the parts; places: where in the values each lane's block begins."""
    b = tile.builder

    def load_part(part: Any, most: Lanes) -> Lanes:
        extreme = _transpose_part(tile, values, places, part)
        tile.keep(EXTREMES, part, extreme)
        return most.maximum(extreme.magnitude())

    most = tile.over_parts(tile.zero, load_part)
    exponent = (most.bits() >> 23) - 127  # of a subnormal number: -127
    exponent = exponent.maximum(-126).minimum(126)
    down, up = ((127 - exponent) << 23).floats(), ((exponent + 127) << 23).floats()

    def scale_part(part: Any, nothing: tuple[()]) -> tuple[()]:
        tile.keep(EXTREMES, part, tile.of_part(EXTREMES, part) * down)
        return nothing

    def scale_weight(j: Any, nothing: tuple[()]) -> tuple[()]:
        store(tile.weights(j) * down, tile.work, b.mul(j, I64(LANES)), align=64)
        return nothing

    tile.over_parts((), scale_part)
    loop(b, I64(tile.format.block_size), (), scale_weight)
    return Scaling(down, up, most.equals(0.0))


def _transpose_part(tile: Tile, values: Any, places: list[Any], part: Any) -> Lanes:
    """Fill the work of a part with the weights as they are; returns those of largest magnitude."""
    b, first = tile.builder, tile.builder.mul(part, I64(tile.format.part_size))
    smallest = largest = tile.zero
    for sixteen in range(0, tile.format.part_size, LANES):
        at = b.add(first, I64(sixteen))
        columns = transposed([load(b, values, b.add(place, at)) for place in places])
        for k, column in enumerate(columns):
            store(column, tile.work, b.mul(b.add(at, I64(k)), I64(LANES)), align=64)
        smallest = smallest.minimum(reduce(Lanes.minimum, columns))
        largest = largest.maximum(reduce(Lanes.maximum, columns))
    return (-smallest >= largest).choose(smallest, largest)
