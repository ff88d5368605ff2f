"""Codes of a few bits in bytes, and numbers of 16 bits, in torch, on any device.

Codes of b bits are split into the fields of 8, 4, 2 and 1 bits that sum to b, the first in the lowest bits of the code.
A field of w bits of n codes takes n * w / 8 bytes, of which byte i holds the codes i, i + n * w / 8 and so on, so that
unpacking needs a shift and a mask and moves nothing within a vector. The fields' bytes follow each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTHS = (8, 4, 2, 1)


def halves(values: Tensor) -> Tensor:
    """Return numbers as float16; those beyond its range become the largest that it has."""
    most = torch.finfo(torch.float16).max
    return values.clamp(-most, most).half()


def fields(bits: int) -> list[int]:
    """Return the widths of the fields of a code of 1 to 8 bits."""
    return [width for width in WIDTHS if bits & width]


def padded(count: int, bits: int) -> int:
    """Return the number of codes, at least `count`, of which every field takes whole bytes."""
    unit = 8 // fields(bits)[-1]
    return -(-count // unit) * unit


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of `count` codes."""
    return padded(count, bits) * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, [..., n] u8 -> [..., bytes] u8."""
    missing = padded(codes.shape[-1], bits) - codes.shape[-1]
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    packed, place = [], 0
    for width in fields(bits):
        field = (codes >> place) & ((1 << width) - 1)
        parts = field.unflatten(-1, (8 // width, -1))
        whole = parts[..., 0, :]
        for number in range(1, 8 // width):
            whole = whole | (parts[..., number, :] << (number * width))
        packed.append(whole)
        place += width
    return packed[0].contiguous() if len(packed) == 1 else torch.cat(packed, dim=-1)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack`, [..., bytes] u8 -> [..., count] u8."""
    codes, start, place = None, 0, 0
    for width in fields(bits):
        size = packed.shape[-1] * width // bits
        whole = packed[..., start : start + size]
        parts = [(whole >> (number * width)) & ((1 << width) - 1) for number in range(8 // width)]
        field = torch.cat(parts, dim=-1) << place
        codes = field if codes is None else codes | field
        start, place = start + size, place + width
    assert codes is not None
    return codes[..., :count]
