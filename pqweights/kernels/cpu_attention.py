"""Products with token-wise codes of keys and values, in numba, without restoring either.

The codes of a token are those of its coordinates, packed as docs/format.md packs a block, and a coordinate is a level.
Sums of values: each token's levels times its weight are added to one sum for each coordinate. Scores: levels times the
query are added up for each token. Vectors run along the coordinates, everything is float32.

Tokens are cut into tiles, whose sums are added in their order by the thread that finishes last: what is computed does
not depend on the threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from pqweights.kernels.attention_task import (
    HADAMARD_KERNELS,
    MOST_ROWS,
    MOST_SIZE,
    TOKEN_TASK_SIZE,
    TOKEN_WIDTHS,
    VALUE_KERNELS,
)
from pqweights.kernels.cpu_kernels import floats_and_bits
from pqweights.kernels.cpu_products import PRODUCT, fused, next_tile, norms_to_floats, pointer_in
from pqweights.kernels.emit import (
    BYTES,
    FLOATS,
    I64,
    INTS,
    LANES,
    Lanes,
    array_pointers,
    load,
    loop,
    shuffled,
    splat,
    store,
)
from pqweights.kernels.jit import inlined, jit
from pqweights.kernels.vector import Table, fold_vectors, stack

# Tokens whose codes stay in the nearest cache while all coordinates are computed.
BLOCK = 64
# Bytes of the arrays on the stack.
_UNPACKED, _LEVELS, _PART = BLOCK * MOST_SIZE, 256 * 4, MOST_ROWS * LANES * LANES * 4
_LANES_OF_4 = LANES * 4
# Bits of a code -> widths of its fields.
_FIELDS = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


# --- codes ---


def _codes(b: Any, codes: Any, at: Any, k: Any, size: Any, fields: tuple[int, ...]) -> list[Lanes]:
    """Return codes of a token, junk above them: those of coordinates 16 k + p * run for each p, in `_coordinates`.

    at: the first byte of the token. The bytes of each field must be a multiple of 16.
    """
    first, *others = fields
    run, place = b.sdiv(b.mul(size, I64(first)), I64(8)), b.mul(k, I64(LANES))
    whole = Lanes(b, b.zext(load(b, codes, b.add(at, place), BYTES).value, INTS))
    found = [whole >> first * part if part else whole for part in range(8 // first)]
    if others:
        # A field of half the width has half the bytes, in which every run of the first field is two runs.
        assert tuple(others) == (first // 2,)
        half, narrow = b.sdiv(run, I64(2)), others[0]
        number, place = b.sdiv(place, half), b.srem(place, half)
        packed = load(b, codes, b.add(at, b.add(run, place)), BYTES)
        shift = splat(b, b.trunc(b.mul(number, I64(narrow)), INTS.element))
        field = Lanes(b, b.lshr((Lanes(b, b.zext(packed.value, INTS)) << first).value, shift.value))
        lower = 2**first - 1
        found = [(code & lower) | ((field >> 2 * narrow * p) & ~lower) for p, code in enumerate(found)]
    return found


def _coordinates(b: Any, k: Any, size: Any, fields: tuple[int, ...]) -> list[Any]:
    """Return the first coordinate of each vector that `_codes` returns."""
    run, start = b.sdiv(b.mul(size, I64(fields[0])), I64(8)), b.mul(k, I64(LANES))
    return [b.add(start, b.mul(run, I64(part))) for part in range(8 // fields[0])]


@jit
def _unpack(codes: Any, begin: Any, tokens: Any, size: Any, bits: Any, out: Any) -> None:
    """Write the codes of some tokens as bytes, [tokens, size]; any width and size."""
    for token in range(tokens):
        at, place = begin + token * (size * bits // 8), 0
        for width in (8, 4, 2, 1):
            if bits & width:
                run, mask = size * width // 8, np.uint8((1 << width) - 1)
                field = codes[at : at + run]
                for part in range(8 // width):
                    # Slices, as LLVM then sees that no index counts from the end.
                    to, shift = token * size + part * run, np.uint8(part * width)
                    target = out[to : to + run]
                    for i in range(run):
                        code = np.uint8(((field[i] >> shift) & mask) << np.uint8(place))
                        target[i] = code if place == 0 else target[i] | code
                at, place = at + run, place + width


@inlined
def _repeated(levels: Any, count: Any, table: Any) -> None:
    """Fill a table of 256 with levels, so that bits above a code do not matter."""
    for i in range(256):
        table[i] = levels[i % count]


# --- sums of values ---


def _make_add_values(fields: tuple[int, ...], entries: int, together: int, chains: int) -> Any:
    """Return the intrinsic that adds values times weights, for some rows and the coordinates of one `_codes`.

    chains: tokens that are added to sums of their own, because each addition waits for the one before
    """

    @intrinsic
    def add_values(
        typingctx: Any,
        codes: Any,  # u8
        at: Any,  # the first byte of the first token
        stride: Any,  # bytes of a token
        k: Any,  # which coordinates: see _codes
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
                for place in _coordinates(b, k, size, fields)
            ]

            def add(i: Any, totals: tuple[tuple[Lanes, ...], ...]) -> tuple[tuple[Lanes, ...], ...]:
                result = []
                for chain, chained in enumerate(totals):
                    token = b.add(b.mul(i, I64(chains)), I64(chain))
                    found = _codes(b, codes, b.add(at, b.mul(token, stride)), k, size, fields)
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


def _make_weighted_values(width: int) -> Any:
    """Return the kernel for a width of TOKEN_WIDTHS; threads may share a task."""
    entries, narrowest, direct = (16 if width < 5 else 256), _FIELDS[width][-1], width < 5
    add_packed = _make_block_of_values(_FIELDS[width], entries)
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
        table = carray(stack(_LEVELS), 256, np.float32)
        unpacked = carray(stack(_UNPACKED), BLOCK * MOST_SIZE, np.uint8)
        _repeated(levels, 1 << bits, table)
        packed = direct and size * narrowest % 128 == 0
        while True:
            tile = next_tile(task)
            if tile >= heads * tiles:
                break
            head, start, sum_at = tile // tiles, tile % tiles * tile_tokens, tile * row_sums
            sums[sum_at : sum_at + row_sums] = np.float32(0)
            end = min(tokens, start + tile_tokens)
            for block in range(start, end, BLOCK):
                count, at = min(BLOCK, end - block), (head * tokens + block) * stride
                w = head * rows * tokens + block
                if packed:
                    add_packed(codes, at, stride, size, table, weights, w, tokens, count, rows, sums, sum_at)
                else:
                    _unpack(codes, at, count, size, bits, unpacked)
                    add_unpacked(unpacked, 0, size, size, table, weights, w, tokens, count, rows, sums, sum_at)
            if _count_up(finished, head) == tiles - 1:
                total = out[head * row_sums : (head + 1) * row_sums]
                total[:] = np.float32(0)
                for other in range(head * tiles, (head + 1) * tiles):
                    part = sums[other * row_sums : (other + 1) * row_sums]
                    for i in range(row_sums):
                        total[i] += part[i]

    return weighted_values


# --- scores ---


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
                    found = _codes(b, codes, b.add(at, b.mul(i, stride)), k, size, fields)
                    vectors = [levels.look_up(code) for code in found]
                    for part, place in enumerate(_coordinates(b, k, size, fields)):
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
    entries, narrowest, direct = (16 if width < 5 else 256), _FIELDS[width][-1], width < 5
    packed_1, packed_4 = (_make_add_scores(_FIELDS[width], entries, together) for together in (1, 4))
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
        unpacked = carray(stack(_UNPACKED), BLOCK * MOST_SIZE, np.uint8)
        parts = carray(stack(_PART), MOST_ROWS * LANES * LANES, np.float32)
        norm, norm_bits = floats_and_bits(stack(_LANES_OF_4), LANES)
        scores = carray(stack(_LANES_OF_4), LANES, np.float32)
        _repeated(levels, 1 << bits, table)
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
                    _unpack(codes, place * stride, count, size, bits, unpacked)
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
    **{name: (_make_weighted_values(width), PRODUCT) for name, width in zip(VALUE_KERNELS, TOKEN_WIDTHS, strict=True)},
    **{
        name: (_make_hadamard_scores(width), PRODUCT)
        for name, width in zip(HADAMARD_KERNELS, TOKEN_WIDTHS, strict=True)
    },
}
