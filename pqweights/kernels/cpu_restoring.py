"""Levels of transform codes, in numba: codes of different widths in one vector, times a factor of the vector.

A vector is cut into runs of coefficients whose codes have the same width, each packed by itself as token_codes.py
describes. A run may be as short as eight coefficients, so that its fields have single bytes: sixteen bytes are always
read and written, of which what lies beyond the run is overwritten by the next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from pqweights.kernels.attention_task import LEVELS_OF_WIDTH, MOST_COEFFICIENTS, RESTORING_KERNEL, RESTORING_TASK_SIZE
from pqweights.kernels.cpu_kernels import floats_and_bits
from pqweights.kernels.cpu_products import PRODUCT, next_tile, norms_to_floats, pointer_in
from pqweights.kernels.emit import (
    BYTES,
    I8,
    I64,
    INTS,
    LANES,
    Lanes,
    array_pointers,
    constant,
    load,
    loop,
    splat,
    store,
)
from pqweights.kernels.emit import shuffled as in_order
from pqweights.kernels.jit import inlined
from pqweights.kernels.vector import Table, stack

# Tokens that are unpacked together, and the bytes that each takes unpacked.
BLOCK, ROW = 16, MOST_COEFFICIENTS + LANES
# Bytes of the arrays on the stack.
_PACKED, _UNPACKED, _FACTORS = BLOCK * MOST_COEFFICIENTS + LANES, BLOCK * ROW, BLOCK * 4


def _make_copy_field(first: bool) -> Any:
    """Return the intrinsic that unpacks a part of a field of some tokens, sixteen bytes of each.

    first: whether codes have no lower bits, which are kept otherwise
    """

    @intrinsic
    def copy_field(
        typingctx: Any,
        packed: Any,  # u8
        at: Any,  # of the first token
        stride: Any,  # bytes of a token
        tokens: Any,
        count: Any,  # bytes of the field from `at` on; the others may be anything
        shift: Any,  # u8: of the codes in the bytes
        mask: Any,  # u8
        place: Any,  # u8: of the field in a code
        out: Any,  # u8
        to: Any,  # of the first token; a token has ROW
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            packed, out = array_pointers(context, b, signature, args)
            at, stride, tokens, count, to = (args[i] for i in (1, 2, 3, 4, 9))
            shift, mask, place = (splat(b, args[i]) for i in (5, 6, 7))
            lanes = constant(b, BYTES, range(LANES))
            few = b.select(b.icmp_signed("<", count, I64(LANES)), count, I64(LANES))
            inside = lanes < splat(b, b.trunc(few, I8))

            def copy(token: Any, carried: tuple[()]) -> tuple[()]:
                whole = load(b, packed, b.add(at, b.mul(token, stride)), BYTES)
                field = Lanes(b, b.shl(b.and_(b.lshr(whole.value, shift.value), mask.value), place.value))
                target = b.add(to, b.mul(token, I64(ROW)))
                if not first:
                    lower = load(b, out, target, BYTES)
                    field = lower | inside.choose(field, 0)
                store(field, out, target)
                return carried

            loop(b, tokens, (), copy)
            return context.get_dummy_value()

        return types.void(packed, at, stride, tokens, count, shift, mask, place, out, to), codegen

    return copy_field


_set_field, _add_field = _make_copy_field(True), _make_copy_field(False)


@inlined
def _unpack(packed: Any, at: Any, stride: Any, tokens: Any, count: Any, bits: Any, out: Any, to: Any) -> None:
    """Write the codes of a run of some tokens as bytes."""
    place = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            run, mask = count * width // 8, np.uint8((1 << width) - 1)
            for part in range(8 // width):
                for piece in range(0, run, LANES):
                    begin, target, shift = at + piece, to + part * run + piece, np.uint8(part * width)
                    if place:
                        _add_field(
                            packed, begin, stride, tokens, run - piece, shift, mask, np.uint8(place), out, target
                        )
                    else:
                        _set_field(packed, begin, stride, tokens, run - piece, shift, mask, np.uint8(0), out, target)
            at, place = at + run, place + width


def _make_look_up(entries: int, lanes: int) -> Any:
    """Return the intrinsic that writes levels of codes, times the factor of each token, `lanes` at a time."""

    @intrinsic
    def look_up(
        typingctx: Any,
        codes: Any,  # u8
        at: Any,  # of the first token; a token has ROW
        tokens: Any,
        pieces: Any,  # of `lanes` coefficients
        levels: Any,  # f32
        start: Any,  # of the table in the levels
        factors: Any,  # f32 [tokens]
        out: Any,  # f32
        to: Any,  # of the first token
        stride: Any,  # coefficients of a token in out
    ) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            codes, levels, factors, out = array_pointers(context, b, signature, args)
            at, tokens, pieces, start, to, stride = (args[i] for i in (1, 2, 3, 5, 8, 9))
            table = Table(b, b.gep(levels, [start]), 0, entries)

            def of_token(token: Any, carried: tuple[()]) -> tuple[()]:
                factor = splat(b, b.load(b.gep(factors, [token])))
                source, target = b.add(at, b.mul(token, I64(ROW))), b.add(to, b.mul(token, stride))

                def of_piece(piece: Any, carried: tuple[()]) -> tuple[()]:
                    begin = b.mul(piece, I64(lanes))
                    code = load(b, codes, b.add(source, begin), BYTES)
                    found = table.look_up(Lanes(b, b.zext(code.value, INTS))) * factor
                    store(in_order(found, found, range(lanes)), out, b.add(target, begin))
                    return carried

                return loop(b, pieces, carried, of_piece)

            loop(b, tokens, (), of_token)
            return context.get_dummy_value()

        return types.void(codes, at, tokens, pieces, levels, start, factors, out, to, stride), codegen

    return look_up


def _make_levels(entries: int) -> Any:
    """Return the function that writes the levels of a run of some tokens, from a table of that many entries."""
    sixteens, eight = (_make_look_up(entries, lanes) for lanes in (LANES, LANES // 2))

    @inlined
    def write_levels(
        codes: Any, at: Any, tokens: Any, count: Any, levels: Any, start: Any,
        factors: Any, out: Any, to: Any, stride: Any,
    ) -> None:  # fmt: skip
        whole = count // LANES
        if whole:
            sixteens(codes, at, tokens, whole, levels, start, factors, out, to, stride)
        if count % LANES:
            rest = whole * LANES
            eight(codes, at + rest, tokens, 1, levels, start, factors, out, to + rest, stride)

    return write_levels


_levels_4, _levels_5, _levels_6, _levels_7, _levels_8 = (_make_levels(1 << bits) for bits in range(4, 9))


def _restore(task_at: Any) -> None:
    task = carray(task_at, RESTORING_TASK_SIZE, np.int64)
    heads, tokens, used, stride, tile_tokens = task[1], task[2], task[3], task[4], task[5]
    head_bytes, head_factors, run_count = task[6], task[7], task[8]
    runs = carray(pointer_in(task, 9), 2 * run_count, np.int64)
    codes = carray(pointer_in(task, 10), (heads - 1) * head_bytes + tokens * stride, np.uint8)
    halves = carray(pointer_in(task, 11), (heads - 1) * head_factors + tokens, np.uint16)
    levels = carray(pointer_in(task, 12), 9 * LEVELS_OF_WIDTH, np.float32)
    out = carray(pointer_in(task, 13), heads * tokens * used, np.float32)
    packed = carray(stack(_PACKED), BLOCK * MOST_COEFFICIENTS + LANES, np.uint8)
    unpacked = carray(stack(_UNPACKED), BLOCK * ROW, np.uint8)
    factors, factor_bits = floats_and_bits(stack(_FACTORS), BLOCK)
    tiles = (tokens + tile_tokens - 1) // tile_tokens
    while True:
        tile = next_tile(task)
        if tile >= heads * tiles:
            break
        head, start = tile // tiles, tile % tiles * tile_tokens
        end = min(tokens, start + tile_tokens)
        for block in range(start, end, BLOCK):
            count = min(BLOCK, end - block)
            begin = head * head_bytes + block * stride
            # A copy, as sixteen bytes are read where the last token may have fewer.
            some, source = packed[: count * stride], codes[begin : begin + count * stride]
            for i in range(count * stride):
                some[i] = source[i]
            for group in range(0, count, LANES):
                few, place = min(LANES, count - group), head * head_factors + block + group
                norms_to_floats(halves, place, few, factor_bits[group : group + few], factors[group : group + few])
            at, to, row = 0, 0, (head * tokens + block) * used
            for run in range(run_count):
                size, bits = runs[2 * run], runs[2 * run + 1]
                table, place = bits * LEVELS_OF_WIDTH, row + to
                _unpack(packed, at, stride, count, size, bits, unpacked, to)
                if bits <= 4:
                    _levels_4(unpacked, to, count, size, levels, table, factors, out, place, used)
                elif bits == 5:
                    _levels_5(unpacked, to, count, size, levels, table, factors, out, place, used)
                elif bits == 6:
                    _levels_6(unpacked, to, count, size, levels, table, factors, out, place, used)
                elif bits == 7:
                    _levels_7(unpacked, to, count, size, levels, table, factors, out, place, used)
                else:
                    _levels_8(unpacked, to, count, size, levels, table, factors, out, place, used)
                at, to = at + size * bits // 8, to + size


KERNELS = {RESTORING_KERNEL: (_restore, PRODUCT)}
