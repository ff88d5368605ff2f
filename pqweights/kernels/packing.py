"""The codes of a block to the bytes of its row and back, a field of the codes at a time, as LLVM vector code for numba.

A field is 8, 4, 2 or 1 adjacent bits of a code; docs/format.md has the order of the bits in a row. Here a vector is
half a block: 64 codes of one byte each.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pqweights.kernels.emit import I8, I64, Lanes, array_pointers, constant, load, shuffled, splat, store

BLOCK = 128
HALF = BLOCK // 2
_HALF = ir.VectorType(I8, HALF)


def _make_pack(width: int) -> Any:
    @intrinsic
    def pack(typingctx: Any, codes: Any, block: Any, added: Any, lowest: Any, row: Any, at: Any) -> Any:
        """Fold one field of the 128 codes (u8) of a block, plus `added`, into 16 * width bytes of row from `at`.

        lowest: the value of the field's lowest bit in a code (u8), 1 for widths 4 and 8.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, target = array_pointers(context, builder, signature, args)
            added = splat(builder, args[2], HALF)
            halves = [load(builder, source, place, _HALF) + added for place in _half_places(builder, args[1])]
            if width == 8:
                packed = shuffled(halves[0], halves[1], range(BLOCK))
            elif width == 4:
                packed = (halves[0] & 15) | (halves[1] << 4)
            else:
                packed = _folded(halves, width, args[3])
            store(packed, target, args[5])
            return context.get_dummy_value()

        return types.void(codes, block, added, lowest, row, at), codegen

    return pack


def _make_unpack(width: int) -> Any:
    @intrinsic
    def unpack(typingctx: Any, row: Any, at: Any, lowest: Any, codes: Any, block: Any) -> Any:
        """The inverse of pack. Widths 8 and 4 set the 128 codes of a block, 2 and 1 add their bits to them."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, target = array_pointers(context, builder, signature, args)
            packed = load(builder, source, args[1], ir.VectorType(I8, 16 * width))
            places = _half_places(builder, args[4])
            if width == 8:
                halves = [shuffled(packed, packed, range(start, start + HALF)) for start in (0, HALF)]
            elif width == 4:
                halves = [packed & 15, packed >> 4]
            else:
                halves = [load(builder, target, place, _HALF) for place in places]
                halves = _with_field(halves, packed, width, args[2])
            for place, half in zip(places, halves, strict=True):
                store(half, target, place)
            return context.get_dummy_value()

        return types.void(row, at, lowest, codes, block), codegen

    return unpack


pack_8, pack_4, pack_2, pack_1 = (_make_pack(width) for width in (8, 4, 2, 1))
unpack_8, unpack_4, unpack_2, unpack_1 = (_make_unpack(width) for width in (8, 4, 2, 1))


def _folded(halves: list[Lanes], width: int, lowest: Any) -> Lanes:
    """One field of the codes of both half blocks, folded into 16 * width bytes; for the widths 1 and 2."""
    builder, parts = halves[0].builder, []
    for half, masks in zip(halves, _bit_masks(width), strict=True):
        for place, mask in enumerate(masks):
            bit = splat(builder, builder.shl(lowest, I8(place)), HALF)
            parts.append(_where_set(half, bit, constant(builder, _HALF, mask)))
    packed = functools.reduce(Lanes.__or__, parts)
    lanes = HALF
    while lanes > 16 * width:
        lanes //= 2
        packed = shuffled(packed, packed, range(lanes)) | shuffled(packed, packed, range(lanes, 2 * lanes))
    return packed


def _with_field(halves: list[Lanes], packed: Lanes, width: int, lowest: Any) -> list[Lanes]:
    """The inverse of _folded: the codes of both half blocks with the bits of the field added."""
    builder, results = packed.builder, []
    repeated = shuffled(packed, packed, [lane % (16 * width) for lane in range(HALF)])
    for half, masks in zip(halves, _bit_masks(width), strict=True):
        for place, mask in enumerate(masks):
            bit = splat(builder, builder.shl(lowest, I8(place)), HALF)
            half = half | _where_set(repeated, constant(builder, _HALF, mask), bit)
        results.append(half)
    return results


def _bit_masks(width: int) -> list[list[list[int]]]:
    """The bit of a packed byte in which a code's bit stands: [half block][bit of the field][code] -> mask."""
    return [
        [[1 << (bit + (start + lane) // (16 * width) * width) for lane in range(HALF)] for bit in range(width)]
        for start in (0, HALF)
    ]


def _where_set(tested: Lanes, mask: Lanes, value: Lanes) -> Lanes:
    """`value` in the lanes where `tested` has the bit of `mask`, 0 in the others."""
    return (tested & mask).differs(0).choose(value, 0)


def _half_places(builder: Any, block: Any) -> list[Any]:
    """The indices at which the two halves of a block begin."""
    start = builder.mul(block, I64(BLOCK))
    return [builder.add(start, I64(offset)) for offset in (0, HALF)]
