"""A decoder of the codec native, written from docs/format.md (section 11) alone, in plain Python.

It shares no code with the package.
"""

from __future__ import annotations

import math
import struct

CHUNK, LANES, TOTAL = 65536, 32, 4096
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}
BITS = {"BF16": 16, "F16": 16, "F32": 32, "I32": 32, "I64": 64, "F64": 64}


class Damaged(Exception):
    """What a decoder must refuse."""


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise Damaged(problem)


def decode_chunk(data: bytes, items: int, width: int) -> bytes:
    """The items of a chunk."""
    _require(len(data) > 0, "an empty chunk")
    if data[0] == 0:
        _require(len(data) == 1 + items * width, "items of another number")
        return data[1:]
    _require(data[0] == 1, "an unknown kind")
    planes_at = len(data) - items * (width - 1)
    _require(planes_at >= 3, "too short")
    first, count, at = data[1], data[2] + 1, 3
    slots: list[tuple[int, int, int]] = []  # symbol, frequency, first slot; one for each slot
    for symbol in range(first, first + count):
        _require(at < planes_at, "too short")
        frequency, at = data[at], at + 1
        if frequency >= 128:
            _require(at < planes_at, "too short")
            frequency, at = (frequency - 128) * 256 + data[at], at + 1
        slots += [(symbol, frequency, len(slots))] * frequency
        _require(len(slots) <= TOTAL, "frequencies")
    _require(first + count <= 256 and len(slots) == TOTAL, "frequencies")
    _require(planes_at - at >= 4 * LANES and (planes_at - at) % 2 == 0, "words")
    states = list(struct.unpack_from(f"<{LANES}I", data, at))
    _require(min(states) >= 65536, "states")
    words = struct.unpack(f"<{(planes_at - at - 4 * LANES) // 2}H", data[at + 4 * LANES : planes_at])
    _require(len(words) <= CHUNK, "words")
    taken, highest = 0, []
    for item in range(math.ceil(items / LANES) * LANES):
        lane, x = item % LANES, states[item % LANES]
        symbol, frequency, start = slots[x % TOTAL]
        x = frequency * (x // TOTAL) + x % TOTAL - start
        if x < 65536:
            _require(taken < len(words), "words run out")
            x, taken = x * 65536 + words[taken], taken + 1
        states[lane] = x
        highest.append(symbol)
    _require(taken == len(words) and set(states) == {65536}, "another end")
    result = bytearray()
    for item in range(items):
        value = highest[item]
        for plane in reversed(range(width - 1)):
            value = value * 256 + data[planes_at + plane * items + item]
        result += (value >> 1 | (value & 1) << (8 * width - 1)).to_bytes(width, "little")
    return bytes(result)


def decode(coded: bytes, lengths: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
    """The bytes of a stored tensor of the source."""
    width = WIDTHS.get(dtype, 1)
    items = math.prod(shape) * BITS.get(dtype, 8) // 8 // width
    sizes = struct.unpack(f"<{len(lengths) // 4}i", lengths)
    _require(len(sizes) == math.ceil(items / CHUNK), "chunks of another number")
    _require(min(sizes) >= 1 and sum(sizes) == len(coded), "lengths")
    result, at = b"", 0
    for number, size in enumerate(sizes):
        result += decode_chunk(coded[at : at + size], min(CHUNK, items - number * CHUNK), width)
        at += size
    return result
