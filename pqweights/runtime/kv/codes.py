"""Codes of a few bits in bytes, and Lloyd-Max codes of numbers of variance 1, with several widths in a vector.

Codes of b bits are split into the fields of 8, 4, 2 and 1 bits that sum to b, the first in the lowest bits of the code.
A field of w bits of n codes takes n * w / 8 bytes, of which byte i holds the codes i, i + n * w / 8 and so on, so that
unpacking needs a shift and a mask and moves nothing within a vector. The fields' bytes follow each other.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pqweights.formats.lloyd_max import codebook
from pqweights.kernels.transform_codes import CodeTables, code_tables, nearest, scaled_levels
from pqweights.runtime.kv.states import Parts

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
    packed, shift = [], 0
    for width in fields(bits):
        field = (codes >> shift) & ((1 << width) - 1)
        parts = field.unflatten(-1, (8 // width, -1))
        whole = parts[..., 0, :]
        for number in range(1, 8 // width):
            whole = whole | (parts[..., number, :] << (number * width))
        packed.append(whole)
        shift += width
    return packed[0].contiguous() if len(packed) == 1 else torch.cat(packed, dim=-1)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack`, [..., bytes] u8 -> [..., count] u8."""
    codes, start, shift = None, 0, 0
    for width in fields(bits):
        size = packed.shape[-1] * width // bits
        whole = packed[..., start : start + size]
        parts = [(whole >> (number * width)) & ((1 << width) - 1) for number in range(8 // width)]
        field = torch.cat(parts, dim=-1) << shift
        codes = field if codes is None else codes | field
        start, shift = start + size, shift + width
    assert codes is not None
    return codes[..., :count]


MOST_BITS = 8
# The mean of half a normal distribution: the levels of one bit are this and its opposite.
ONE_BIT = math.sqrt(2 / math.pi)

# How many numbers follow each other, a multiple of 8, whose codes have the same width, and their bits.
Runs = list[tuple[int, int]]


def coded(normed: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Return the packed codes of numbers of variance 1, [..., size] f32 -> [..., bytes] u8, and their levels in f32."""
    counts = [count for count, _ in runs]
    if normed.is_cpu:
        codes, reached = nearest(normed, runs, _code_tables())
        parts = list(codes.split(counts, dim=-1))
    else:
        tables = [width_tables(bits, normed.device) for _, bits in runs]
        pieces = [part.contiguous() for part in normed.split(counts, dim=-1)]
        parts = [
            torch.bucketize(piece, thresholds, right=True).to(torch.uint8)
            for piece, (_, thresholds) in zip(pieces, tables, strict=True)
        ]
        levels = [table[part.int()] for part, (table, _) in zip(parts, tables, strict=True)]
        reached = torch.cat(levels, dim=-1)
    packed = [pack(part, bits) for part, (_, bits) in zip(parts, runs, strict=True)]
    return torch.cat(packed, dim=-1), reached


def levels_of(rows: Parts, runs: Runs) -> Tensor:
    """Return the levels of all codes, times the factors of their vectors, [batch, heads, tokens, used] f32."""
    packed, factors = rows["codes"], rows["factor"]
    if packed.is_cpu:
        return scaled_levels(packed, factors, runs, _code_tables())
    levels, at = [], 0
    for count, bits in runs:
        size = packed_bytes(count, bits)
        table, _ = width_tables(bits, packed.device)
        levels.append(table[unpack(packed[..., at : at + size], bits, count).int()])
        at += size
    return torch.cat(levels, dim=-1) * factors.float()[..., None]


@functools.cache
def _code_tables() -> CodeTables:
    """Return the levels and thresholds of all widths, for kernels."""
    tables = {bits: width_tables(bits, torch.device("cpu")) for bits in range(1, MOST_BITS + 1)}
    return code_tables({bits: (levels.numpy(), thresholds.numpy()) for bits, (levels, thresholds) in tables.items()})


@functools.cache
def width_tables(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the levels of a width and the thresholds between them."""
    with torch.inference_mode(False):  # later calls may need gradients
        if bits == 1:
            return torch.tensor([-ONE_BIT, ONE_BIT], device=device), torch.zeros(1, device=device)
        book = codebook(bits)
        return torch.from_numpy(book.levels).to(device), torch.from_numpy(book.thresholds).to(device)
