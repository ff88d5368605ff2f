"""Products of queries with Hadamard keys, from token-wise codes, in numba, without restoring the keys.

A key is levels of codes, times a norm. Levels times the query are added up for each token in float32, in the sixteen
lanes of a vector along the coordinates; then those of sixteen tokens are added up together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pqweights.kernels.attention_task import HADAMARD_KERNELS, MOST_ROWS, MOST_SIZE, TOKEN_TASK_SIZE, TOKEN_WIDTHS
from pqweights.kernels.cpu_kernels import floats_and_bits
from pqweights.kernels.cpu_products import PRODUCT, fused, next_tile, norms_to_floats, pointer_in
from pqweights.kernels.emit import FLOATS, I64, LANES, Lanes, array_pointers, load, loop, shuffled, store
from pqweights.kernels.token_codes import FIELDS, coordinates, index_vectors, repeat_levels, unpack_tokens
from pqweights.kernels.vector import Table, fold_vectors, stack

# Bytes of the arrays on the stack.
_UNPACKED, _LEVELS, _PARTS, _LANES_OF_4 = LANES * MOST_SIZE, 256 * 4, MOST_ROWS * LANES * LANES * 4, LANES * 4


def _make_add_scores(fields: tuple[int, ...], entries: int, together: int) -> Any:
    """Return the intrinsic that multiplies some rows with up to sixteen tokens, to sixteen sums for each."""

    @intrinsic
    def add_scores(
        typingctx: Any,
        codes: Any,  # u8
        at: Any,  # the first byte of the first token
        stride: Any,  # bytes of a token
        size: Any,
        table: Any,  # f32
        queries: Any,  # f32
        query_at: Any,  # the first of the rows
        count: Any,  # of tokens
        parts: Any,  # out: f32 [rows, 16 tokens, 16]
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            codes, table, queries, parts = array_pointers(context, b, signature, args)
            at, stride, size, query_at, count = (args[i] for i in (1, 2, 3, 6, 7))
            levels = Table(b, table, 0, entries)
            starts = [b.add(query_at, b.mul(size, I64(row))) for row in range(together)]
            chains = min(2, 8 // fields[0])  # each addition waits for the one before
            zeros = (Lanes(b, ir.Constant(FLOATS, None)),) * (chains * together)

            def token(i: Any, nothing: tuple[()]) -> tuple[()]:
                def add(k: Any, totals: tuple[Lanes, ...]) -> tuple[Lanes, ...]:
                    result = list(totals)
                    found = index_vectors(b, codes, b.add(at, b.mul(i, stride)), k, size, fields)
                    vectors = [levels.look_up(code) for code in found]
                    for part, place in enumerate(coordinates(b, k, size, fields)):
                        for row, start in enumerate(starts):
                            chain = row * chains + part % chains
                            query = load(b, queries, b.add(start, place))
                            result[chain] = fused(vectors[part], query, result[chain])
                    return tuple(result)

                sums = loop(b, b.sdiv(b.mul(size, I64(fields[0])), I64(8 * LANES)), zeros, add)
                for row in range(together):
                    to = b.add(b.mul(i, I64(LANES)), I64(LANES * LANES * row))
                    store(fold_vectors(list(sums[row * chains : (row + 1) * chains])), parts, to)
                return nothing

            loop(b, count, (), token)
            return context.get_dummy_value()

        return types.void(codes, at, stride, size, table, queries, query_at, count, parts), codegen

    return add_scores


@intrinsic
def _sums_of_parts(typingctx: Any, parts: Any, at: Any, norms: Any, out: Any) -> Any:
    """Write norms[i] times the sum of the sixteen floats from parts[at + 16 i], for sixteen of them."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        parts, norms, out = array_pointers(context, b, signature, args)
        vectors, run = [load(b, parts, b.add(args[1], I64(LANES * i))) for i in range(LANES)], LANES
        while run > 1:  # a vector has LANES / run sums, each in `run` lanes
            run //= 2
            lower, upper = ([lane for lane in range(2 * LANES) if lane // run % 2 == odd] for odd in (0, 1))
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [shuffled(p, q, lower) + shuffled(p, q, upper) for p, q in pairs]
        store(vectors[0] * load(b, norms, I64(0)), out, I64(0))
        return context.get_dummy_value()

    return types.void(parts, at, norms, out), codegen


def _make_hadamard_scores(width: int) -> Any:
    """Return the kernel for a width of TOKEN_WIDTHS; threads may share a task."""
    entries, narrowest, direct = (16 if width < 5 else 256), FIELDS[width][-1], width < 5
    packed_1, packed_4 = (_make_add_scores(FIELDS[width], entries, together) for together in (1, 4))
    unpacked_1, unpacked_4 = (_make_add_scores((8,), entries, together) for together in (1, 4))

    def hadamard_scores(task_at: Any) -> None:
        task = carray(task_at, TOKEN_TASK_SIZE, np.int64)
        heads, rows, tokens, size, bits, tile_tokens = task[1], task[2], task[3], task[4], task[5], task[6]
        stride, tiles = size * bits // 8, (tokens + tile_tokens - 1) // tile_tokens
        codes = carray(pointer_in(task, 7), heads * tokens * stride, np.uint8)
        levels = carray(pointer_in(task, 8), 1 << bits, np.float32)
        queries = carray(pointer_in(task, 9), heads * rows * size, np.float32)
        out = carray(pointer_in(task, 10), heads * rows * tokens, np.float32)
        norms = carray(pointer_in(task, 11), heads * tokens, np.uint16)
        table = carray(stack(_LEVELS), 256, np.float32)
        unpacked = carray(stack(_UNPACKED), LANES * MOST_SIZE, np.uint8)
        parts = carray(stack(_PARTS), MOST_ROWS * LANES * LANES, np.float32)
        norm, norm_bits = floats_and_bits(stack(_LANES_OF_4), LANES)
        scores = carray(stack(_LANES_OF_4), LANES, np.float32)
        repeat_levels(levels, 1 << bits, table)
        packed = direct and size * narrowest % 128 == 0
        while True:
            tile = next_tile(task)
            if tile >= heads * tiles:
                break
            head, start = tile // tiles, tile % tiles * tile_tokens
            end = min(tokens, start + tile_tokens)
            for block in range(start, end, LANES):
                count, place, row = min(LANES, end - block), head * tokens + block, 0
                norms_to_floats(norms, place, count, norm_bits, norm)
                if not packed:
                    unpack_tokens(codes, place * stride, count, size, bits, unpacked)
                while row < rows:
                    some = 4 if rows - row >= 4 else 1
                    query = (head * rows + row) * size
                    if packed and some == 4:
                        packed_4(codes, place * stride, stride, size, table, queries, query, count, parts)
                    elif packed:
                        packed_1(codes, place * stride, stride, size, table, queries, query, count, parts)
                    elif some == 4:
                        unpacked_4(unpacked, 0, size, size, table, queries, query, count, parts)
                    else:
                        unpacked_1(unpacked, 0, size, size, table, queries, query, count, parts)
                    for one in range(some):
                        _sums_of_parts(parts, one * LANES * LANES, norm, scores)
                        to = (head * rows + row + one) * tokens + block
                        for i in range(count):
                            out[to + i] = scores[i]
                    row += some

    return hadamard_scores


KERNELS = {
    name: (_make_hadamard_scores(width), PRODUCT) for name, width in zip(HADAMARD_KERNELS, TOKEN_WIDTHS, strict=True)
}
