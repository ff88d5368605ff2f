"""Sums of values times weights, from token-wise codes, in numba, without restoring the values.

A value is levels of codes, times a scale of its token, plus a low end of its token. Each token's levels times its
weight and scale are added to one float32 sum for each coordinate; vectors run along the coordinates.

Tokens are cut into tiles, whose sums are added in their order by the thread that finishes last: what is computed does
not depend on the threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pqweights.kernels.attention_task import MOST_ROWS, MOST_SIZE, TOKEN_TASK_SIZE, TOKEN_WIDTHS, VALUE_KERNELS
from pqweights.kernels.cpu_kernels import floats_and_bits
from pqweights.kernels.cpu_products import PRODUCT, fused, lane_sum, next_tile, norms_to_floats, pointer_in
from pqweights.kernels.emit import FLOATS, I64, LANES, Lanes, array_pointers, load, loop, splat, store
from pqweights.kernels.jit import inlined
from pqweights.kernels.token_codes import BLOCK, FIELDS, coordinates, index_vectors, repeat_levels, unpack_tokens
from pqweights.kernels.vector import Table, fold_vectors, stack

# Bytes of the arrays on the stack.
_UNPACKED, _LEVELS, _WEIGHTS = BLOCK * MOST_SIZE, 256 * 4, MOST_ROWS * BLOCK * 4
_LANES_OF_4, _LOWS = LANES * 4, MOST_ROWS * LANES * 4


def _make_add_values(fields: tuple[int, ...], entries: int, together: int, chains: int) -> Any:
    """Return the intrinsic that adds values times weights, for some rows and the coordinates of one `index_vectors`.

    chains: tokens that are added to sums of their own, because each addition waits for the one before
    """

    @intrinsic
    def add_values(
        typingctx: Any,
        codes: Any,  # u8
        at: Any,  # the first byte of the first token
        stride: Any,  # bytes of a token
        k: Any,  # which coordinates: see index_vectors
        size: Any,
        table: Any,  # f32
        weights: Any,  # f32
        weight_at: Any,  # the weight of the first token in the first of the rows
        tokens: Any,  # weights of a row
        count: Any,  # of tokens, a multiple of chains
        sums: Any,  # in and out: f32
        sum_at: Any,  # of the first of the rows; a row has `size`
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            codes, table, weights, sums = array_pointers(context, b, signature, args)
            at, stride, k, size, weight_at, tokens, count, sum_at = (args[i] for i in (1, 2, 3, 4, 7, 8, 9, 11))
            levels = Table(b, table, 0, entries)
            starts = [b.add(weight_at, b.mul(tokens, I64(row))) for row in range(together)]
            places = [
                b.add(b.add(sum_at, b.mul(size, I64(row))), place)
                for row in range(together)
                for place in coordinates(b, k, size, fields)
            ]

            def add(i: Any, totals: tuple[tuple[Lanes, ...], ...]) -> tuple[tuple[Lanes, ...], ...]:
                result = []
                for chain, chained in enumerate(totals):
                    token = b.add(b.mul(i, I64(chains)), I64(chain))
                    found = index_vectors(b, codes, b.add(at, b.mul(token, stride)), k, size, fields)
                    vectors = [levels.look_up(code) for code in found]
                    factors = [splat(b, b.load(b.gep(weights, [b.add(start, token)]))) for start in starts]
                    pairs = [(vector, factor) for factor in factors for vector in vectors]
                    result.append(tuple(fused(*pair, total) for pair, total in zip(pairs, chained, strict=True)))
                return tuple(result)

            zeros = (Lanes(b, ir.Constant(FLOATS, None)),) * len(places)
            start = (tuple(load(b, sums, place) for place in places), *[zeros] * (chains - 1))
            made = loop(b, b.sdiv(count, I64(chains)), start, add)
            for place, parts in zip(places, zip(*made, strict=True), strict=True):
                store(fold_vectors(list(parts)), sums, place)
            return context.get_dummy_value()

        kinds = (codes, at, stride, k, size, table, weights, weight_at, tokens, count, sums, sum_at)
        return types.void(*kinds), codegen

    return add_values


@intrinsic
def _count_up(typingctx: Any, counters: Any, place: Any) -> Any:
    """Add 1 to counters[place] and return what it was; who sees a count sees all that was written before it."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        (words,) = array_pointers(context, b, signature, args)
        return b.atomic_rmw("add", b.gep(words, [args[1]]), I64(1), "acq_rel")

    return types.int64(counters, place), codegen


def _make_block_of_values(fields: tuple[int, ...], entries: int) -> Any:
    """Return the function that adds up to BLOCK tokens, for all rows and coordinates."""
    add_1, add_chains, add_4 = (_make_add_values(fields, entries, *kind) for kind in ((1, 1), (1, 4), (4, 1)))
    first = fields[0]

    @inlined
    def add_block(
        codes: Any, at: Any, stride: Any, size: Any, table: Any,
        weights: Any, weight_at: Any, tokens: Any, count: Any, rows: Any, sums: Any, sum_at: Any,
    ) -> None:  # fmt: skip
        even = count // 4 * 4
        for k in range(size * first // 128):
            row = 0
            while rows - row >= 4:
                w, s = weight_at + row * tokens, sum_at + row * size
                add_4(codes, at, stride, k, size, table, weights, w, tokens, count, sums, s)
                row += 4
            while row < rows:
                w, s = weight_at + row * tokens, sum_at + row * size
                if even:
                    add_chains(codes, at, stride, k, size, table, weights, w, tokens, even, sums, s)
                if even < count:
                    rest, w = at + even * stride, w + even
                    add_1(codes, rest, stride, k, size, table, weights, w, tokens, count - even, sums, s)
                row += 1

    return add_block


@inlined
def _add_lows(weights: Any, group: Any, few: Any, rows: Any, lows: Any, low_sums: Any) -> None:
    """Add weights of up to sixteen tokens times their lows to sixteen sums of each row."""
    for row in range(rows):
        some = weights[row * BLOCK + group : row * BLOCK + group + few]
        total = low_sums[row * LANES : row * LANES + few]
        for i in range(few):
            total[i] += some[i] * lows[i]


@inlined
def _scale(weights: Any, group: Any, few: Any, rows: Any, scales: Any) -> None:
    """Multiply weights of up to sixteen tokens by their scales."""
    for row in range(rows):
        some = weights[row * BLOCK + group : row * BLOCK + group + few]
        for i in range(few):
            some[i] *= scales[i]


def _make_weighted_values(width: int) -> Any:
    """Return the kernel for a width of TOKEN_WIDTHS; threads may share a task."""
    entries, narrowest, direct = (16 if width < 5 else 256), FIELDS[width][-1], width < 5
    add_packed = _make_block_of_values(FIELDS[width], entries)
    add_unpacked = _make_block_of_values((8,), entries)

    def weighted_values(task_at: Any) -> None:
        task = carray(task_at, TOKEN_TASK_SIZE, np.int64)
        heads, rows, tokens, size, bits, tile_tokens = task[1], task[2], task[3], task[4], task[5], task[6]
        stride, row_sums = size * bits // 8, rows * size
        tiles = (tokens + tile_tokens - 1) // tile_tokens
        codes = carray(pointer_in(task, 7), heads * tokens * stride, np.uint8)
        levels = carray(pointer_in(task, 8), 1 << bits, np.float32)
        weights = carray(pointer_in(task, 9), heads * rows * tokens, np.float32)
        out = carray(pointer_in(task, 10), heads * row_sums, np.float32)
        sums = carray(pointer_in(task, 12), heads * tiles * row_sums, np.float32)
        finished = carray(pointer_in(task, 13), heads, np.int64)
        scales = carray(pointer_in(task, 11), heads * tokens, np.uint16)
        lows = carray(pointer_in(task, 14), heads * tokens, np.uint16)
        has_scales, has_lows = task[11] != 0, task[14] != 0
        table = carray(stack(_LEVELS), 256, np.float32)
        unpacked = carray(stack(_UNPACKED), BLOCK * MOST_SIZE, np.uint8)
        scaled = carray(stack(_WEIGHTS), MOST_ROWS * BLOCK, np.float32)
        factors, factor_bits = floats_and_bits(stack(_LANES_OF_4), LANES)
        low_sums = carray(stack(_LOWS), MOST_ROWS * LANES, np.float32)
        repeat_levels(levels, 1 << bits, table)
        packed = direct and size * narrowest % 128 == 0
        while True:
            tile = next_tile(task)
            if tile >= heads * tiles:
                break
            head, start, sum_at = tile // tiles, tile % tiles * tile_tokens, tile * row_sums
            sums[sum_at : sum_at + row_sums] = np.float32(0)
            end = min(tokens, start + tile_tokens)
            low_sums[: rows * LANES] = np.float32(0)
            for block in range(start, end, BLOCK):
                count, place = min(BLOCK, end - block), head * tokens + block
                for row in range(rows):
                    begin = (head * rows + row) * tokens + block
                    some, whole = scaled[row * BLOCK : row * BLOCK + count], weights[begin : begin + count]
                    for i in range(count):
                        some[i] = whole[i]
                for group in range(0, count, LANES):
                    few = min(LANES, count - group)
                    if has_lows:
                        norms_to_floats(lows, place + group, few, factor_bits, factors)
                        _add_lows(scaled, group, few, rows, factors, low_sums)
                    if has_scales:
                        norms_to_floats(scales, place + group, few, factor_bits, factors)
                        _scale(scaled, group, few, rows, factors)
                at = place * stride
                if packed:
                    add_packed(codes, at, stride, size, table, scaled, 0, BLOCK, count, rows, sums, sum_at)
                else:
                    unpack_tokens(codes, at, count, size, bits, unpacked)
                    add_unpacked(unpacked, 0, size, size, table, scaled, 0, BLOCK, count, rows, sums, sum_at)
            if has_lows:
                for row in range(rows):
                    part = sums[sum_at + row * size : sum_at + (row + 1) * size]
                    low = lane_sum(low_sums, row * LANES)
                    for i in range(size):
                        part[i] += low
            if _count_up(finished, head) == tiles - 1:
                total = out[head * row_sums : (head + 1) * row_sums]
                total[:] = np.float32(0)
                for other in range(head * tiles, (head + 1) * tiles):
                    part = sums[other * row_sums : (other + 1) * row_sums]
                    for i in range(row_sums):
                        total[i] += part[i]

    return weighted_values


KERNELS = {
    name: (_make_weighted_values(width), PRODUCT) for name, width in zip(VALUE_KERNELS, TOKEN_WIDTHS, strict=True)
}
