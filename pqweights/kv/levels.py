"""Lloyd-Max codes of numbers of variance 1, with several widths in a vector: kernels on the CPU, torch elsewhere."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pqweights.codecs.lloyd_max import codebook
from pqweights.kernels.transform_codes import CodeTables, code_tables, nearest, scaled_levels
from pqweights.kv.bits import pack, packed_bytes, unpack
from pqweights.kv.quantizer import Parts

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
    found = {bits: width_tables(bits, torch.device("cpu")) for bits in range(1, MOST_BITS + 1)}
    return code_tables({bits: (levels.numpy(), thresholds.numpy()) for bits, (levels, thresholds) in found.items()})


@functools.cache
def width_tables(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the levels of a width and the thresholds between them."""
    with torch.inference_mode(False):  # later calls may need gradients
        if bits == 1:
            return torch.tensor([-ONE_BIT, ONE_BIT], device=device), torch.zeros(1, device=device)
        found = codebook(bits)
        return torch.from_numpy(found.levels).to(device), torch.from_numpy(found.thresholds).to(device)
