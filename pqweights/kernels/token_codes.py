"""Token-wise codes to indices of levels, sixteen coordinates in a vector, as LLVM code; what both kernels share.

The codes of a token are those of its coordinates, packed as docs/format.md packs a block: a field of all codes after
the other, each folded into runs of coordinates. A field of whole vectors is read as it is packed. For other sizes and
widths, codes are unpacked to bytes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pqweights.kernels.emit import BYTES, I64, INTS, LANES, Lanes, load, splat
from pqweights.kernels.jit import inlined, jit

# Tokens whose codes stay in the nearest cache while all coordinates are computed.
BLOCK = 64
# Bits of a code -> widths of its fields, for the widths that are read as they are packed, and for unpacked bytes.
FIELDS = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}


def index_vectors(b: Any, codes: Any, at: Any, k: Any, size: Any, fields: tuple[int, ...]) -> list[Lanes]:
    """Return codes of a token, junk above them: those of coordinates 16 k + p * run for each p, in `coordinates`.

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


def coordinates(b: Any, k: Any, size: Any, fields: tuple[int, ...]) -> list[Any]:
    """Return the first coordinate of each vector that `index_vectors` returns."""
    run, start = b.sdiv(b.mul(size, I64(fields[0])), I64(8)), b.mul(k, I64(LANES))
    return [b.add(start, b.mul(run, I64(part))) for part in range(8 // fields[0])]


@jit
def unpack_tokens(codes: Any, begin: Any, tokens: Any, size: Any, bits: Any, out: Any) -> None:
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
def repeat_levels(levels: Any, count: Any, table: Any) -> None:
    """Fill a table of 256 with levels, so that bits above a code do not matter."""
    for i in range(256):
        table[i] = levels[i % count]
