"""A numpy reference for groups of integers: the rule of kernels/native/groups.cpp, and the packings.

Every line is an operation of that rule on all groups at once, in float32 and in the same order, so the results are the
same bits. The code is independent: it shares no table and no helper with the kernels, and is told where the fit starts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

CHAINS, PASSES = 3, 4
LARGEST_BF16 = np.float32(3.3895313892515355e38)
SMALLEST_NORMAL = np.float32(2.0**-126)


class Rule(NamedTuple):
    """The settings of a fit; see pqweights.kernels.groups.GroupRule."""

    size: int
    bits: int
    symmetric: bool
    middle: bool

    @property
    def half(self) -> np.float32:
        """The number that groups.cpp calls half."""
        return np.float32(2 ** (self.bits - 1))

    @property
    def range(self) -> tuple[np.float32, np.float32]:
        """The lowest and the highest code, before the lowest is subtracted."""
        if not self.symmetric and not self.middle:
            return np.float32(0), self.half * np.float32(2) - np.float32(1)
        return -self.half, self.half - np.float32(1)


class Fitted(NamedTuple):
    """Fitted groups: codes [groups, size]; all else [groups], with BF16 numbers as scales and offsets."""

    codes: Bytes
    scales: Floats
    offsets: Floats
    energies: Doubles
    errors: Doubles


class _Work(NamedTuple):
    """The fixed properties of each group, [groups].

    down, up: the powers of two to magnitudes in [1, 4) and back.
    smallest, largest: the extreme weights, times `down`.
    """

    down: Floats
    up: Floats
    smallest: Floats
    largest: Floats
    constant: npt.NDArray[np.bool_]
    huge: npt.NDArray[np.bool_]


class _Chains(NamedTuple):
    """The present and the best candidate of each chain, [chains, groups]."""

    scales: Floats
    zeros: Floats
    least: Floats
    best_scales: Floats
    best_zeros: Floats


class _Candidate(NamedTuple):
    """Scale and offset as they are stored, then the same in the scale of the work, [groups]."""

    scale: Floats
    offset: Floats
    inner_scale: Floats
    inner_offset: Floats


def fit(values: Floats, settings: Floats, rule: Rule) -> Fitted:
    """Fit weights [groups * size]; the settings are those of pqweights.kernels.groups.fit_groups."""
    with np.errstate(all="ignore"):
        w, work = _scaled(values, rule)
        chains = _started(work, settings, rule)
        for _ in range(PASSES):
            chains = _moved(chains, w, settings[2 * CHAINS], rule)
        return _best(w, work, chains, rule)


def minimum_and_maximum(values: Floats, rule: Rule) -> Doubles:
    """The squared errors [groups] with scale and offset from the smallest and largest weight, rounded to BF16."""
    with np.errstate(all="ignore"):
        w, work = _scaled(values, rule)
        wide = work.up.astype(np.float64)
        return _measured(w, _extremes(work, rule), rule) * wide * wide


def _scaled(values: Floats, rule: Rule) -> tuple[Floats, _Work]:
    """Step 1, load: weight j of every group in row j, and the properties of the groups."""
    x = np.ascontiguousarray(values.reshape(-1, rule.size).T)
    # Chunks of 16, then those together: it tells which of two zeros is the smallest weight.
    smallest, largest = (np.full(x.shape[1], bound, dtype=np.float32) for bound in (np.inf, -np.inf))
    for first in range(0, rule.size, 16):
        least, most = x[first], x[first]
        for row in x[first + 1 : first + 16]:
            least, most = _minimum(least, row), _maximum(most, row)
        smallest, largest = _minimum(smallest, least), _maximum(largest, most)
    magnitude = _maximum(largest, -smallest)
    exponent = np.clip((magnitude.view(np.uint32) >> 23).astype(np.int32) - 127, -126, 126)
    down, up = (np.ldexp(np.float32(1), power).astype(np.float32) for power in (-exponent, exponent))
    constant = magnitude == 0 if rule.symmetric else smallest == largest
    huge = exponent == 126
    keep = np.where(huge, np.float32(63 / 64 if rule.symmetric else 0.49), np.float32(1))
    if not rule.symmetric:
        keep = np.where(constant, np.float32(1), keep)
    return x * down, _Work(down, up, smallest * down * keep, largest * down * keep, constant, huge)


def _plain_scale(work: _Work, rule: Rule) -> Floats:
    """The scale of the whole range; symmetric: with the largest magnitude at code -half."""
    if not rule.symmetric:
        return (work.largest - work.smallest) / (rule.half * np.float32(2) - np.float32(1))
    return -(np.where(-work.smallest >= work.largest, work.smallest, work.largest) / rule.half)


def _started(work: _Work, settings: Floats, rule: Rule) -> _Chains:
    """The beginning of step 2, fit."""
    plain = _plain_scale(work, rule)
    scales = plain * settings[0 : 2 * CHAINS : 2, None]
    zeros = np.zeros_like(scales)
    if not rule.symmetric:
        last = rule.half * np.float32(2) - np.float32(1)
        center = (work.largest + work.smallest) * np.float32(0.5)
        begin = center + (work.smallest - center) * settings[0 : 2 * CHAINS : 2, None]
        scales = (center + (work.largest - center) * settings[1 : 2 * CHAINS : 2, None] - begin) / last
        zeros = begin + rule.half * scales
    scales = np.where(work.constant, np.float32(1), scales)
    return _Chains(
        scales, zeros, np.full_like(scales, np.inf), np.broadcast_to(plain, scales.shape), np.zeros_like(scales)
    )


def _moved(chains: _Chains, w: Floats, relax: np.float32, rule: Rule) -> _Chains:
    """One pass of step 2, fit."""
    scales, zeros, least, best_scales, best_zeros = chains
    count = np.float32(rule.size)
    from_zero = w if rule.symmetric else w - zeros[:, None]
    t = from_zero * (np.float32(1) / scales)[:, None]
    r = _clipped(t, -rule.half, rule.half - np.float32(1))
    e = t - r
    ee, er, rr, se, sr = (_in_order(terms) for terms in (e * e, e * r, r * r, e, r))
    if rule.symmetric:
        slope, shift = er / _maximum(rr, np.float32(0.5)), np.zeros_like(er)
        error = ee - slope * er
    else:
        spread = rr - sr * (sr / count)
        slope = (er - se * (sr / count)) / _maximum(spread, np.float32(0.5))
        slope = np.where(spread > np.float32(0.5), slope, np.float32(0))
        shift = (se - slope * sr) / count
        error = (ee - shift * se) - slope * er
    error, fitted = (error * scales) * scales, scales * (slope + np.float32(1))
    better = (error < least) & (np.abs(fitted) > np.abs(scales) * np.float32(0.25))
    step = _minimum(_maximum(relax * slope, np.float32(-0.5)), np.float32(1))
    return _Chains(
        scales * (step + np.float32(1)),
        zeros + scales * (relax * shift),
        np.where(better, error, least),
        np.where(better, fitted, best_scales),
        np.where(better, zeros + scales * shift, best_zeros),
    )


def _best(w: Floats, work: _Work, chains: _Chains, rule: Rule) -> Fitted:
    """Steps 3 to 5: round, measure and encode."""
    winner = _extremes(work, rule)
    error = _measured(w, winner, rule)
    fits = zip(chains.best_scales, chains.best_zeros, strict=True)
    for candidate in [_snapped(work, rule), *(_stored(scale, work, rule, zero=zero) for scale, zero in fits)]:
        its_error = _measured(w, candidate, rule)
        wins = (its_error < error) & ~work.huge
        winner = _Candidate(*(np.where(wins, a, b) for a, b in zip(candidate, winner, strict=True)))
        error = np.where(wins, its_error, error)
    codes = _codes(w, winner, rule) - rule.range[0]
    wide, squares = work.up.astype(np.float64), w.astype(np.float64) ** 2
    return Fitted(
        np.ascontiguousarray(codes.T.astype(np.uint8)),
        winner.scale,
        winner.offset,
        _in_order(squares) * wide * wide,
        error * wide * wide,
    )


def _extremes(work: _Work, rule: Rule) -> _Candidate:
    """The smallest and the largest weight as the ends of the range."""
    return _stored(_plain_scale(work, rule), work, rule, start=work.smallest)


def _snapped(work: _Work, rule: Rule) -> _Candidate:
    """The choice of runtimes: 0 becomes a code (mlx's rule), or scales are positive (that of compressed-tensors)."""
    if rule.symmetric:
        scale = _maximum(work.largest, -work.smallest) / (rule.half - np.float32(0.5))
        return _stored(scale, work, rule, start=work.smallest)
    plain = _plain_scale(work, rule)
    below = -work.smallest > work.largest
    edge, step = np.where(below, work.smallest, work.largest), np.where(below, plain, -plain)
    steps = np.rint(edge / step)
    scale = np.where(steps < 0, edge / np.where(steps < 0, steps, np.float32(-1)), step)
    return _stored(scale, work, rule, start=np.where(steps < 0, edge, np.float32(0)))


def _stored(
    scale: Floats, work: _Work, rule: Rule, *, zero: Floats | None = None, start: Floats | None = None
) -> _Candidate:
    """A candidate, given by the weight of code h (`zero`) or by that of code 0 (`start`)."""
    stored = np.where(work.constant, np.float32(1), _stored_scale(scale * work.up))
    inner, zeros = stored * work.down, np.zeros_like(stored)
    if rule.symmetric:
        return _Candidate(stored, zeros, inner, zeros)
    if zero is not None:
        offset = zero if rule.middle else zero - rule.half * inner
    else:
        assert start is not None
        offset = start + rule.half * inner if rule.middle else start
    offset = bf16(np.where(work.constant, work.smallest, offset) * work.up)
    return _Candidate(stored, offset, inner, offset * work.down)


def _codes(w: Floats, candidate: _Candidate, rule: Rule) -> Floats:
    """The codes [size, groups] before the lowest is subtracted."""
    from_offset = w if rule.symmetric else w - candidate.inner_offset
    return _clipped(from_offset * (np.float32(1) / candidate.inner_scale), *rule.range)


def _measured(w: Floats, candidate: _Candidate, rule: Rule) -> Doubles:
    """The squared errors [groups] in the scale of the work."""
    decoded = _codes(w, candidate, rule) * candidate.inner_scale
    e = (w - (decoded if rule.symmetric else decoded + candidate.inner_offset)).astype(np.float64)
    return _in_order(e * e)


def bf16(x: Floats) -> Floats:
    """Round to the nearest BF16, ties to even, and saturate."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return _maximum(_minimum(nearest.view(np.float32), LARGEST_BF16), -LARGEST_BF16)


def _stored_scale(x: Floats) -> Floats:
    nearest = bf16(x)
    least = np.where(nearest < 0, -SMALLEST_NORMAL, SMALLEST_NORMAL)
    return np.where(np.abs(nearest) < SMALLEST_NORMAL, least, nearest)


def _minimum(a: Any, b: Any) -> Any:
    """The minimum as processors compute it: of two zeros, or with a NaN, the second."""
    return np.where(a < b, a, b)


def _maximum(a: Any, b: Any) -> Any:
    return np.where(a > b, a, b)


def _clipped(t: Floats, low: np.float32, high: np.float32) -> Floats:
    result: Floats = _minimum(_maximum(np.rint(t), low), high)
    return result


def _in_order(terms: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Add up [..., size, groups] to [..., groups], one term after the other, beginning with 0."""
    start = np.zeros_like(terms[..., :1, :])
    return np.add.accumulate(np.concatenate([start, terms], axis=-2), axis=-2)[..., -1, :]


# --- packings ---


def pack_bits(codes: Bytes, bits: int) -> Bytes:
    """Pack codes to one stream of bits, the lowest bit of the first code first."""
    places = np.arange(bits, dtype=np.uint8)
    return np.packbits((codes.reshape(-1, 1) >> places) & 1, bitorder="little")


def pack_tiles(codes: Bytes) -> Bytes:
    """Pack 4-bit codes [N, K] to the bytes of [N / 8, K / 128, 32, 4] i32 that PyTorch's _weight_int4pack_mm reads.

    A thread t of 32 holds row t / 4 of a tile; its word i has columns 32 * i + 2 * (t % 4) + (0, 1, 8, 9, 16, 17, 24,
    25), at nibbles 0, 4, 1, 5, 2, 6, 3, 7 (aten/src/ATen/native/cuda/int4mm.cu, matrix_to_m16n8k16_Bint4_layout).
    """
    rows, columns = codes.shape
    tiles = codes.reshape(rows // 8, 8, columns // 128, 4, 2, 2, 4, 2).transpose(0, 2, 1, 6, 3, 7, 4, 5)
    nibbles = tiles.reshape(rows // 8, columns // 128, 32, 4, 8).astype(np.uint32)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)
    return words.view(np.uint8).reshape(-1)
