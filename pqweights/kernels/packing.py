"""The bytes of a row to the codes of its block, a field of the codes at a time, as LLVM vector code for numba.

A field is 8, 4, 2 or 1 adjacent bits of a code; docs/format.md has the order of the bits in a row. Here a vector is
half a block: 64 codes of one byte each.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pqweights.kernels.emit import I8, I64, Lanes, array_pointers, constant, load, shuffled, splat, store

BLOCK = 128
HALF = BLOCK // 2
_HALF = ir.VectorType(I8, HALF)


def _make_unpack(width: int) -> Any:
    @intrinsic
    def unpack(typingctx: Any, row: Any, at: Any, lowest: Any, codes: Any, block: Any) -> Any:
        """Unfold one field of the 128 codes (u8) of a block from 16 * width bytes of row from `at`.

        Widths 8 and 4 set the codes, 2 and 1 add their bits to them. lowest: the value of the field's lowest bit in a
        code (u8), 1 for widths 4 and 8.
        """

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
                halves = with_field(halves, packed, width, args[2])
            for place, half in zip(places, halves, strict=True):
                store(half, target, place)
            return context.get_dummy_value()

        return types.void(row, at, lowest, codes, block), codegen

    return unpack


unpack_8, unpack_4, unpack_2, unpack_1 = (_make_unpack(width) for width in (8, 4, 2, 1))


def with_field(halves: list[Lanes], packed: Lanes, width: int, lowest: Any) -> list[Lanes]:
    """The codes of both half blocks with the bits of the field added; for the widths 1 and 2."""
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
