"""A numpy reference for GGUF's blocks without offsets: the rule of native/gguf_symmetric.cpp, and the bytes.

Every line is an operation of that rule on all blocks at once, in float32 and in the same order, so the results are the
same bits. The code is independent: it shares no helper with the kernels, and is told where the search starts.
Arrays of weights are [parts, weights of a part, blocks], numbers of parts [parts, blocks], those of blocks [blocks].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.kernels.gguf_searches import SEARCHES, Search

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
F32 = np.float32

IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
# type -> parts, weights of a part, lowest and highest code (both None: IQ4), lowest and highest factor
LAYOUTS: dict[str, tuple[int, int, int | None, int | None, int, int]] = {
    "Q8_0": (1, 32, -128, 127, 1, 1),
    "Q5_0": (1, 32, -16, 15, 1, 1),
    "Q4_0": (1, 32, -8, 7, 1, 1),
    "IQ4_NL": (1, 32, None, None, 1, 1),
    "Q6_K": (16, 16, -32, 31, -128, 127),
    "Q3_K": (16, 16, -4, 3, -32, 31),
    "IQ4_XS": (8, 32, None, None, -32, 31),
}


class Encoded(NamedTuple):
    """Blocks as bytes [blocks, block bytes], with the sums of squares of weights and errors [blocks]."""

    data: Bytes
    energies: Doubles
    errors: Doubles


@dataclass(frozen=True, kw_only=True, eq=False)
class _Blocks:
    """Blocks in the scale of the work, the importance of their weights, and the codes of their type."""

    name: str
    w: Floats
    importance: Floats
    up: Floats
    down: Floats

    def value(self, t: Floats) -> Floats:
        """The value of the code nearest to t."""
        _, _, low, high, _, _ = LAYOUTS[self.name]
        if low is None or high is None:
            return IQ4[np.searchsorted((IQ4[1:] + IQ4[:-1]) / F32(2), t)]
        return np.minimum(np.maximum(np.rint(t), F32(low)), F32(high))


def encode(name: str, values: Floats, importance: Floats | None) -> Encoded:
    """Encode weights [rows, columns]; importance [columns], above 0."""
    search = SEARCHES[name]
    starts = [start for (start,) in (search.starts if importance is None else search.weighted_starts)]
    parts, size = LAYOUTS[name][:2]
    rows, columns = values.shape
    factors = np.ones(columns, dtype=np.float32) if importance is None else importance
    w = np.ascontiguousarray(values.reshape(-1, parts, size).transpose(1, 2, 0))
    f = np.tile(factors, rows).reshape(-1, parts, size).transpose(1, 2, 0)
    with np.errstate(all="ignore"):
        most = np.abs(w).max((0, 1))
        exponent = np.clip((most.view(np.uint32) >> 23).astype(np.int32) - 127, -126, 126)
        down, up = (np.ldexp(F32(1), power).astype(np.float32) for power in (-exponent, exponent))
        blocks = _Blocks(name=name, w=w * down, importance=f, up=up, down=down)
        scales = np.stack([_searched(blocks, part, starts) for part in range(parts)])
        d, whole = _super_blocks(blocks, scales, search) if parts > 1 else _single(blocks, scales[0])
        return _encoded(blocks, d, whole, most == 0)


def _sum(terms: Floats) -> Floats:
    """The sum over the first axis, one after the other."""
    total = np.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def _searched(blocks: _Blocks, part: int, starts: Sequence[float]) -> Floats:
    """Step 2: the best scale of a part."""
    w, f = blocks.w[part], blocks.importance[part]
    smallest, largest = np.minimum(w.min(0), F32(0)), np.maximum(w.max(0), F32(0))
    extreme = np.where(-smallest >= largest, smallest, largest)
    reference = np.where(extreme == 0, F32(1), extreme)
    energy = _sum(f * (w * w))
    least, best = np.full_like(extreme, np.inf), np.zeros_like(extreme)
    for k, start in enumerate(starts):
        inverse, scale = F32(start) * (F32(1) / reference), reference / F32(start)
        t = w * inverse
        r = np.rint(t) if k < inner_starts(blocks.name, starts) else blocks.value(t)
        e = t - r
        ee, er = _sum((f * e) * e), _sum((f * e) * r)
        rr = ((energy * inverse) * inverse - er) - (er + ee)
        slope = er / np.maximum(np.maximum(rr, ee * F32(2.0**-10)), F32(2.0**-100))
        error = ((ee - slope * er) * scale) * scale
        best = np.where(error < least, scale * (slope + F32(1)), best)
        least = np.where(error < least, error, least)
    return np.where(extreme == 0, F32(0), best)


def inner_starts(name: str, starts: Sequence[float]) -> int:
    """How many of the starts, from the first on, cannot lead to codes out of range; a multiple of 4."""
    highest = LAYOUTS[name][3]
    inner = [highest is not None and abs(start) <= highest + 0.25 for start in starts]
    return [*inner, False].index(False) // 4 * 4


def _inverse(scale: Floats) -> Floats:
    return np.where(scale == 0, F32(0), F32(1) / np.where(scale == 0, F32(1), scale))


def _errors(blocks: _Blocks, part: int, scale: Floats) -> Floats:
    """The weighted squared errors of a part."""
    w = blocks.w[part]
    e = w - blocks.value(w * _inverse(scale)) * scale
    return _sum(blocks.importance[part] * (e * e))


def _f16_neighbours(blocks: _Blocks, scale: Floats) -> Iterator[Floats]:
    """The nearest F16 number, and the next one on the other side; from numpy's own conversion."""
    x = np.clip(scale * blocks.up, F32(-65504), F32(65504))
    nearest = np.abs(x).astype(np.float16)
    floor = np.maximum(np.frexp(np.abs(x))[1] - 1, -14)  # the step is that of x, even where `nearest` has a larger one
    below = nearest.astype(np.float32) - np.ldexp(F32(1), floor - 10)
    above = nearest.astype(np.float32) + np.ldexp(F32(1), floor - 10)
    other = np.clip(np.where(np.abs(x) > nearest.astype(np.float32), above, below), F32(0), F32(65504))
    for magnitude in (nearest.astype(np.float32), other.astype(np.float32)):
        yield (np.where(x < 0, -magnitude, magnitude) * blocks.down).astype(np.float32)


def _refitted(blocks: _Blocks, d: Floats, whole: Floats) -> Floats:
    """The least-squares d for these factors and their codes."""
    wv, vv = np.zeros_like(d), np.zeros_like(d)
    for w, f, factor in zip(blocks.w, blocks.importance, whole, strict=True):
        inverse = _inverse(d * factor)
        for j in range(len(w)):
            v = blocks.value(w[j] * inverse) * factor
            wv, vv = wv + (f[j] * v) * w[j], vv + (f[j] * v) * v
    return wv / np.maximum(vv, F32(2.0**-100))


def _single(blocks: _Blocks, scale: Floats) -> tuple[Floats, Floats]:
    """Step 3 for blocks of one part."""
    one = np.ones((1, len(scale)), dtype=np.float32)
    least, best = np.full_like(scale, np.inf), np.zeros_like(scale)
    for _ in range(2):
        for d in _f16_neighbours(blocks, scale):
            error = _errors(blocks, 0, d)
            best, least = np.where(error < least, d, best), np.where(error < least, error, least)
        scale = _refitted(blocks, best, one)
    return best, one


def _tried(blocks: _Blocks, scales: Floats, d: Floats, width: int) -> tuple[Floats, Floats]:
    """The errors with a d, and the factors."""
    low, high = LAYOUTS[blocks.name][4:]
    total, chosen = np.zeros_like(d), []
    for part, scale in enumerate(scales):
        middle = np.rint(scale * _inverse(d) - F32(0.5)) - F32(width / 2 - 1)
        least, best = np.full_like(d, np.inf), np.zeros_like(d)
        for k in range(width):
            factor = np.clip(middle + F32(k), F32(low), F32(high))
            error = _errors(blocks, part, d * factor)
            best, least = np.where(error < least, factor, best), np.where(error < least, error, least)
        total = total + least
        chosen.append(best)
    return total, np.stack(chosen)


def _super_blocks(blocks: _Blocks, scales: Floats, search: Search) -> tuple[Floats, Floats]:
    """Step 3 for blocks of several parts."""
    largest = np.zeros_like(scales[0])
    for scale in scales:
        largest = np.where(np.abs(scale) > np.abs(largest), scale, largest)
    least, best, whole = np.full_like(largest, np.inf), np.zeros_like(largest), np.zeros_like(scales)
    width = 24 if blocks.name == "Q6_K" else 4
    candidates = [next(_f16_neighbours(blocks, largest * F32(multiplier))) for (multiplier,) in search.factors]
    for d in candidates:
        error, factors = _tried(blocks, scales, d, width)
        whole = np.where(error < least, factors, whole)
        best, least = np.where(error < least, d, best), np.where(error < least, error, least)
    scales = best * whole
    for d in list(_f16_neighbours(blocks, _refitted(blocks, best, whole))):
        error, factors = _tried(blocks, scales, d, 4)
        whole = np.where(error < least, factors, whole)
        best, least = np.where(error < least, d, best), np.where(error < least, error, least)
    return best, whole


# --- bytes ---


def _encoded(blocks: _Blocks, d: Floats, whole: Floats, empty: npt.NDArray[np.bool_]) -> Encoded:
    """Step 4."""
    scales = (d * whole)[:, None]
    values = blocks.value(blocks.w * _inverse(scales))
    decoded = (values * scales).astype(np.float64)
    wide = blocks.up.astype(np.float64)
    energy, error = np.zeros_like(wide), np.zeros_like(wide)
    for w, v in zip(blocks.w.reshape(-1, len(d)), decoded.reshape(-1, len(d)), strict=True):
        energy, error = energy + w.astype(np.float64) ** 2, error + (w - v) ** 2
    low = LAYOUTS[blocks.name][2]
    codes = np.searchsorted(IQ4, values) if low is None else values.astype(np.int64) - low
    halves = np.where(empty, F32(0), d * blocks.up).astype(np.float16)
    data = _packed(blocks.name, codes.reshape(-1, len(d)).T, whole.astype(np.int64).T, halves[:, None].view(np.uint8))
    return Encoded(data, energy * wide * wide, error * wide * wide)


def _stream(numbers: npt.NDArray[np.int64], bits: int) -> Bytes:
    """Numbers [blocks, n] of a few bits, the lowest bits first in each byte."""
    digits = (numbers[..., None] >> np.arange(bits)) & 1
    return np.packbits(digits.reshape(len(numbers), -1).astype(np.uint8), axis=1, bitorder="little")


def _packed(name: str, codes: npt.NDArray[np.int64], factors: npt.NDArray[np.int64], halves: Bytes) -> Bytes:
    """Blocks of codes [blocks, weights], counted from 0, and factors [blocks, parts]."""
    blocks = len(codes)

    def interleaved(run: int, bits: int, low: int = 0) -> Bytes:
        """Bits `low` to low + bits of the codes: those of weights `run` apart share a byte."""
        part = (codes >> low) & ((1 << bits) - 1)
        return _stream(part.reshape(blocks, -1, 8 // bits, run).swapaxes(2, 3).reshape(blocks, -1), bits)

    if name == "Q8_0":
        return np.concatenate([halves, (codes - 128).astype(np.int8).view(np.uint8)], axis=1)
    if name in ("Q4_0", "IQ4_NL"):
        return np.concatenate([halves, interleaved(16, 4)], axis=1)
    if name == "Q5_0":
        return np.concatenate([halves, _stream(codes >> 4, 1), interleaved(16, 4)], axis=1)
    if name == "Q6_K":
        sides = codes.reshape(blocks, 2, 2, 64)
        low = (sides[:, :, 0] & 15) | ((sides[:, :, 1] & 15) << 4)
        scales = factors.astype(np.int8).view(np.uint8)
        parts = [low.reshape(blocks, -1).astype(np.uint8), interleaved(32, 2, 4), scales, halves]
        return np.concatenate(parts, axis=1)
    factors = factors + 32
    if name == "Q3_K":
        low = _stream(factors.reshape(blocks, 2, 8).swapaxes(1, 2).reshape(blocks, -1) & 15, 4)
        high = _stream(factors.reshape(blocks, 4, 4).swapaxes(1, 2).reshape(blocks, -1) >> 4, 2)
        return np.concatenate([interleaved(32, 1, 2), interleaved(32, 2), low, high, halves], axis=1)
    return np.concatenate([halves, _stream(factors >> 4, 2), _stream(factors & 15, 4), interleaved(16, 4)], axis=1)
