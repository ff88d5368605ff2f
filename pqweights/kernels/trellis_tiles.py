"""Blocks to tiles of rotated weights, and back, as LLVM vector code for numba.

A tile is sixteen blocks of 128 weights in the sixteen lanes of vectors: vector t has weight t of each block. So no
butterfly and no sum crosses lanes.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from pqweights.kernels.emit import FLOATS, I64, LANES, Lanes, array_pointers, load, loop, splat, store, transposed
from pqweights.kernels.encoding import load_columns, rotated
from pqweights.kernels.vector import BLOCK, VECTORS


@intrinsic
def rotate_tile(typingctx: Any, x: Any, table: Any, work: Any, tile: Any, squares: Any, largest: Any) -> Any:
    """Rotate sixteen blocks into a tile of the work.

    x: f32 [16, 128], the blocks
    table: f32, of which the first is -1; see encoding.difference
    work: out: f32 [tiles, 128, 16]
    squares, largest: out: f32 [tiles, 16], the sum of squares and the largest magnitude of each rotated block
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, table, work, squares, largest = array_pointers(context, builder, signature, args)
        minus_one = splat(builder, builder.load(table))
        start = builder.mul(args[3], I64(BLOCK * LANES))

        def below_sixteen(g: Any, nothing: tuple[()]) -> tuple[()]:
            at = builder.mul(g, I64(LANES))
            columns = load_columns(builder, source, [builder.add(at, I64(BLOCK * row)) for row in range(LANES)], FLOATS)
            place = builder.add(start, builder.mul(at, I64(LANES)))
            for j, v in enumerate(rotated(columns, minus_one)):
                store(v, work, builder.add(place, I64(j * LANES)), align=64)
            return nothing

        def from_sixteen(j: Any, sums: tuple[Lanes, Lanes]) -> tuple[Lanes, Lanes]:
            at = builder.add(start, builder.mul(j, I64(LANES)))
            places = [builder.add(at, I64(g * LANES * LANES)) for g in range(VECTORS)]
            total, most = sums
            for place, v in zip(
                places, rotated([load(builder, work, p, align=64) for p in places], minus_one), strict=True
            ):
                store(v, work, place, align=64)
                total, most = total + v * v, most.maximum(v.magnitude())
            return total, most

        loop(builder, I64(VECTORS), (), below_sixteen)
        zero = minus_one.of(0)
        total, most = loop(builder, I64(LANES), (zero, zero), from_sixteen)
        block = builder.mul(args[3], I64(LANES))
        store(total, squares, block, align=64)
        store(most, largest, block, align=64)
        return context.get_dummy_value()

    return types.void(x, table, work, tile, squares, largest), codegen


@intrinsic
def unrotate_tile(typingctx: Any, work: Any, table: Any, x: Any) -> Any:
    """Rotate a tile of coordinates, f32 [128, 16], which is overwritten, into sixteen blocks x, f32 [16, 128]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        work, table, target = array_pointers(context, builder, signature, args)
        minus_one = splat(builder, builder.load(table))

        def below_sixteen(g: Any, nothing: tuple[()]) -> tuple[()]:
            _rotate_in_place(work, builder.mul(g, I64(LANES * LANES)), LANES, LANES, minus_one)
            return nothing

        def from_sixteen(j: Any, nothing: tuple[()]) -> tuple[()]:
            _rotate_in_place(work, builder.mul(j, I64(LANES)), VECTORS, LANES * LANES, minus_one)
            return nothing

        loop(builder, I64(VECTORS), (), below_sixteen)
        loop(builder, I64(LANES), (), from_sixteen)
        _transpose_tile(builder, work, target)
        return context.get_dummy_value()

    return types.void(work, table, x), codegen


@intrinsic
def transpose_tile(typingctx: Any, work: Any, x: Any) -> Any:
    """Copy a tile of coordinates, f32 [128, 16], into sixteen blocks x, f32 [16, 128]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        work, target = array_pointers(context, builder, signature, args)
        _transpose_tile(builder, work, target)
        return context.get_dummy_value()

    return types.void(work, x), codegen


def _transpose_tile(builder: Any, work: Any, target: Any) -> None:
    def sixteen(g: Any, nothing: tuple[()]) -> tuple[()]:
        at = builder.mul(g, I64(LANES * LANES))
        columns = [load(builder, work, builder.add(at, I64(j * LANES)), align=64) for j in range(LANES)]
        for row, v in enumerate(transposed(columns)):
            store(v, target, builder.add(builder.mul(g, I64(LANES)), I64(row * BLOCK)))
        return nothing

    loop(builder, I64(VECTORS), (), sixteen)


def _rotate_in_place(work: Any, start: Any, count: int, stride: int, minus_one: Lanes) -> None:
    """Apply the butterflies between `count` vectors that lie `stride` floats apart."""
    builder = minus_one.builder
    places = [builder.add(start, I64(i * stride)) for i in range(count)]
    values = [load(builder, work, place, align=64) for place in places]
    for place, v in zip(places, rotated(values, minus_one), strict=True):
        store(v, work, place, align=64)
