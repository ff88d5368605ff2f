"""Groups of weights to integers a second time, in numpy: the rule of pqweights/kernels/lanes.py, and the packings.

Every line is an operation of that rule on all groups at once, in float32 and in its order, so the results are the same
bits. It is independent code: it shares no table and no helper with the kernels, and where the fit starts it is told.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

CHAINS, PASSES = 3, 4
LARGEST_BF16 = np.float32(3.3895313892515355e38)
SMALLEST_NORMAL = np.float32(2.0**-126)


class Fitted(NamedTuple):
    """codes: [groups, size]; the rest: [groups], scales and offsets BF16 numbers."""

    codes: Bytes
    scales: Floats
    offsets: Floats
    energies: Doubles
    errors: Doubles


class _Candidate(NamedTuple):
    """Scale and offset as they are stored, then the same in the scale of the work; of min and max or of a chain. [groups]."""

    scale: Floats
    offset: Floats
    inner_scale: Floats
    inner_offset: Floats


def fit(values: Floats, size: int, settings: Floats, bits: int, symmetric: bool, middle: bool) -> Fitted:
    """[groups * size] weights; the arguments are those of pqweights.kernels.cpu.fit_groups."""
    with np.errstate(all="ignore"):
        return _fit(values, size, settings, bits, symmetric, middle)


def minimum_and_maximum(values: Floats, size: int, bits: int, symmetric: bool, middle: bool) -> Doubles:
    """[groups] squared errors of scale and offset from the smallest and the largest weight, rounded to BF16."""
    with np.errstate(all="ignore"):
        w, work = _scaled(values, size, symmetric)
        half = np.float32(2 ** (bits - 1))
        smallest_error = _measured(w, _extremes(work, half, symmetric, middle), half, symmetric, middle)
        wide = work.up.astype(np.float64)
        return smallest_error * wide * wide


class _Work(NamedTuple):
    """Of each group, [groups]. down, up: to magnitudes in [1, 4) and back; smallest, largest: weights, times `down`."""

    down: Floats
    up: Floats
    smallest: Floats
    largest: Floats
    constant: npt.NDArray[np.bool_]
    huge: npt.NDArray[np.bool_]


def _scaled(values: Floats, size: int, symmetric: bool) -> tuple[Floats, _Work]:
    """1. Load: weight j of every group in row j, and what is known of the groups."""
    x = np.ascontiguousarray(values.reshape(-1, size).T)
    # Chunks of 16, then those together: it tells which of two zeros is the smallest weight.
    smallest, largest = (np.full(x.shape[1], bound, dtype=np.float32) for bound in (np.inf, -np.inf))
    for first in range(0, size, 16):
        least, most = x[first], x[first]
        for row in x[first + 1 : first + 16]:
            least, most = _minimum(least, row), _maximum(most, row)
        smallest, largest = _minimum(smallest, least), _maximum(largest, most)
    magnitude = _maximum(largest, -smallest)
    exponent = np.clip((magnitude.view(np.uint32) >> 23).astype(np.int32) - 127, -126, 126)
    down, up = (np.ldexp(np.float32(1), power).astype(np.float32) for power in (-exponent, exponent))
    constant = magnitude == 0 if symmetric else smallest == largest
    huge = exponent == 126
    keep = np.where(huge, np.float32(63 / 64 if symmetric else 0.49), np.float32(1))
    if not symmetric:
        keep = np.where(constant, np.float32(1), keep)
    return x * down, _Work(down, up, smallest * down * keep, largest * down * keep, constant, huge)


def _plain_scale(work: _Work, half: np.float32, symmetric: bool) -> Floats:
    """Of the whole range; symmetric: with the largest magnitude at code -half."""
    if not symmetric:
        return (work.largest - work.smallest) / (half * np.float32(2) - np.float32(1))
    return -(np.where(-work.smallest >= work.largest, work.smallest, work.largest) / half)


def _extremes(work: _Work, half: np.float32, symmetric: bool, middle: bool) -> _Candidate:
    """Min and max."""
    return _stored(_plain_scale(work, half, symmetric), None, work.smallest, work, half, symmetric, middle)


def _snapped(work: _Work, half: np.float32, symmetric: bool, middle: bool) -> _Candidate:
    """As runtimes do it: 0 is a code (mlx's rule), or positive scales (that of compressed-tensors)."""
    if symmetric:
        scale = _maximum(work.largest, -work.smallest) / (half - np.float32(0.5))
        return _stored(scale, None, work.smallest, work, half, symmetric, middle)
    plain = _plain_scale(work, half, symmetric)
    below = -work.smallest > work.largest
    edge, step = np.where(below, work.smallest, work.largest), np.where(below, plain, -plain)
    steps = np.rint(edge / step)
    scale = np.where(steps < 0, edge / np.where(steps < 0, steps, np.float32(-1)), step)
    return _stored(scale, None, np.where(steps < 0, edge, np.float32(0)), work, half, symmetric, middle)


def _stored(
    scale: Floats,
    zero: Floats | None,
    start: Floats,
    work: _Work,
    half: np.float32,
    symmetric: bool,
    middle: bool,
) -> _Candidate:
    """3. Round. zero: the weight of code h; start: of code 0, used where zero is None."""
    stored = np.where(work.constant, np.float32(1), _stored_scale(scale * work.up))
    inner, zeros = stored * work.down, np.zeros_like(stored)
    if symmetric:
        return _Candidate(stored, zeros, inner, zeros)
    code_zero = start if zero is None else zero - half * inner
    code_half = start + half * inner if zero is None else zero
    offset = code_half if middle else code_zero
    offset = bf16(np.where(work.constant, work.smallest, offset) * work.up)
    return _Candidate(stored, offset, inner, offset * work.down)


def _codes(w: Floats, candidate: _Candidate, half: np.float32, symmetric: bool, middle: bool) -> Floats:
    """[size, groups] before the lowest is subtracted."""
    low, high = _range(half, symmetric, middle)
    from_offset = w if symmetric else w - candidate.inner_offset
    return _clipped(from_offset * (np.float32(1) / candidate.inner_scale), low, high)


def _range(half: np.float32, symmetric: bool, middle: bool) -> tuple[np.float32, np.float32]:
    from_zero = not symmetric and not middle
    return (np.float32(0), half * np.float32(2) - np.float32(1)) if from_zero else (-half, half - np.float32(1))


def _measured(w: Floats, candidate: _Candidate, half: np.float32, symmetric: bool, middle: bool) -> Doubles:
    """4. Measure: [groups] squared errors in the scale of the work."""
    decoded = _codes(w, candidate, half, symmetric, middle) * candidate.inner_scale
    e = (w - (decoded if symmetric else decoded + candidate.inner_offset)).astype(np.float64)
    return _in_order(e * e)


def _fit(values: Floats, size: int, settings: Floats, bits: int, symmetric: bool, middle: bool) -> Fitted:
    half, count, relax = np.float32(2 ** (bits - 1)), np.float32(size), settings[2 * CHAINS]
    last = half * np.float32(2) - np.float32(1)
    w, work = _scaled(values, size, symmetric)
    plain = _plain_scale(work, half, symmetric)

    # 2. Fit: [chains, groups].
    scales = plain * settings[0 : 2 * CHAINS : 2, None]
    zeros = np.zeros_like(scales)
    if not symmetric:
        center = (work.largest + work.smallest) * np.float32(0.5)
        begin = center + (work.smallest - center) * settings[0 : 2 * CHAINS : 2, None]
        scales = (center + (work.largest - center) * settings[1 : 2 * CHAINS : 2, None] - begin) / last
        zeros = begin + half * scales
    scales = np.where(work.constant, np.float32(1), scales)
    least = np.full_like(scales, np.inf)
    best_scales, best_zeros = np.broadcast_to(plain, scales.shape), np.zeros_like(scales)
    for _ in range(PASSES):
        from_zero = w if symmetric else w - zeros[:, None]
        t = from_zero * (np.float32(1) / scales)[:, None]
        r = _clipped(t, -half, half - np.float32(1))
        e = t - r
        ee, er, rr, se, sr = (_in_order(terms) for terms in (e * e, e * r, r * r, e, r))
        if symmetric:
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
        least, best_scales = np.where(better, error, least), np.where(better, fitted, best_scales)
        best_zeros = np.where(better, zeros + scales * shift, best_zeros)
        zeros = zeros + scales * (relax * shift)
        step = _minimum(_maximum(relax * slope, np.float32(-0.5)), np.float32(1))
        scales = scales * (step + np.float32(1))

    # 3. and 4.
    winner = _extremes(work, half, symmetric, middle)
    error = _measured(w, winner, half, symmetric, middle)
    chains = [
        _stored(*chain, work.smallest, work, half, symmetric, middle)
        for chain in zip(best_scales, best_zeros, strict=True)
    ]
    for candidate in [_snapped(work, half, symmetric, middle), *chains]:
        its_error = _measured(w, candidate, half, symmetric, middle)
        wins = (its_error < error) & ~work.huge
        winner = _Candidate(*(np.where(wins, a, b) for a, b in zip(candidate, winner, strict=True)))
        error = np.where(wins, its_error, error)

    # 5. Encode.
    codes = _codes(w, winner, half, symmetric, middle) - _range(half, symmetric, middle)[0]
    wide, squares = work.up.astype(np.float64), w.astype(np.float64) ** 2
    return Fitted(
        np.ascontiguousarray(codes.T.astype(np.uint8)),
        winner.scale,
        winner.offset,
        _in_order(squares) * wide * wide,
        error * wide * wide,
    )


def bf16(x: Floats) -> Floats:
    """The nearest BF16, ties to even, saturated."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return _maximum(_minimum(nearest.view(np.float32), LARGEST_BF16), -LARGEST_BF16)


def _stored_scale(x: Floats) -> Floats:
    nearest = bf16(x)
    least = np.where(nearest < 0, -SMALLEST_NORMAL, SMALLEST_NORMAL)
    return np.where(np.abs(nearest) < SMALLEST_NORMAL, least, nearest)


def _minimum(a: Any, b: Any) -> Any:
    """Unlike numpy's: of two zeros, or with a NaN, the second."""
    return np.where(a < b, a, b)


def _maximum(a: Any, b: Any) -> Any:
    return np.where(a > b, a, b)


def _clipped(t: Floats, low: np.float32, high: np.float32) -> Floats:
    result: Floats = _minimum(_maximum(np.rint(t), low), high)
    return result


def _in_order(terms: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[..., size, groups] to sums [..., groups], one term after the other, from 0 on."""
    start = np.zeros_like(terms[..., :1, :])
    return np.add.accumulate(np.concatenate([start, terms], axis=-2), axis=-2)[..., -1, :]


# --- packings ---


def pack_bits(codes: Bytes, bits: int) -> Bytes:
    """One stream of bits, the lowest bit of the first code first."""
    places = np.arange(bits, dtype=np.uint8)
    return np.packbits((codes.reshape(-1, 1) >> places) & 1, bitorder="little")


def pack_tiles(codes: Bytes) -> Bytes:
    """[N, K] 4-bit codes as the bytes of [N / 8, K / 128, 32, 4] i32, as PyTorch's kernel _weight_int4pack_mm reads them.

    A thread t of 32 holds row t / 4 of a tile; its word i has columns 32 * i + 2 * (t % 4) + (0, 1, 8, 9, 16, 17, 24, 25),
    at nibbles 0, 4, 1, 5, 2, 6, 3, 7 (aten/src/ATen/native/cuda/int4mm.cu, matrix_to_m16n8k16_Bint4_layout).
    """
    rows, columns = codes.shape
    tiles = codes.reshape(rows // 8, 8, columns // 128, 4, 2, 2, 4, 2).transpose(0, 2, 1, 6, 3, 7, 4, 5)
    nibbles = tiles.reshape(rows // 8, columns // 128, 32, 4, 8).astype(np.uint32)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)
    return words.view(np.uint8).reshape(-1)


# --- what test_machine_code.py compares, in the manner of run_kernels.py ---


def some_groups(size: int) -> Floats:
    """37 groups, two sixteens and some more: of every scale, of zeros, constant ones."""
    rng = np.random.default_rng(size)
    values = rng.standard_normal((37, size)).astype(np.float32)
    values[3:30] *= (10.0 ** rng.uniform(-38, 37, (27, 1))).astype(np.float32)
    values[5] = np.float32(2.0**-149) * np.arange(size, dtype=np.float32)
    values[7], values[20], values[36] = 0, -0.0125, np.float32(3.4028234663852886e38)
    return values.reshape(-1)


def _digest(*arrays: npt.NDArray[Any]) -> bytes:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()


def fit_digest(backend: str) -> str:
    """Every width, kind and size of group."""
    from pqweights.kernels.groups import BEST, GroupRule, _settings

    digest = hashlib.sha256()
    for bits in range(2, 9):
        for kind, size in enumerate(((16, 48, 256)[bits % 3], 128, 32)):
            symmetric, middle, values = kind == 2, kind > 0, some_groups(size)
            if backend == "reference":
                found = fit(values, size, _settings(symmetric, bits, size), bits, symmetric, middle)
                digest.update(_digest(*found))
            else:
                groups = GroupRule(bits=bits, group_size=size, symmetric=symmetric, middle=middle, rule=BEST).quantize(
                    values
                )
                digest.update(_digest(groups.codes, groups.scales, groups.offsets, groups.energies, groups.errors))
    return digest.hexdigest()


def round_digest(backend: str) -> str:
    """By the rules of the runtimes, which test_groups.py compares with the runtimes: here there is no reference."""
    from pqweights.kernels.groups import RUNTIME_RULES, GroupRule

    digest = hashlib.sha256()
    for rule in RUNTIME_RULES:
        for bits, size in ((4, 128), (8, 32)):
            values = np.clip(some_groups(size), -LARGEST_BF16 / 4, LARGEST_BF16 / 4)
            symmetric = rule == "compressed-tensors"
            groups = GroupRule(
                bits=bits, group_size=size, symmetric=symmetric, middle=rule != "mlx", rule=rule
            ).quantize(bf16(values))
            digest.update(_digest(groups.codes, groups.scales, groups.offsets, groups.energies, groups.errors))
    return digest.hexdigest()


def round_floats_digest(backend: str) -> str:
    """In the floating modes of mlx; no reference here, either."""
    from pqweights.kernels.groups import FLOAT_MODES, FloatRule

    digest = hashlib.sha256()
    for kind in FLOAT_MODES:
        size = 16 if kind == "nvfp4" else 32
        groups = FloatRule(kind, 8 if kind == "mxfp8" else 4, size).quantize(bf16(some_groups(size)))
        digest.update(_digest(groups.codes, groups.scales, groups.energies, groups.errors))
    return digest.hexdigest()


def rotate_digest(backend: str) -> str:
    """Of blocks of 128."""
    from pqweights.kernels.groups import rotate

    values = some_groups(128)[: 30 * 128] * np.float32(2.0**-20)
    if backend == "reference":
        h = 1
        while h < 128:
            pairs = values.reshape(-1, 2, h)
            values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
            h *= 2
        values = values * np.float32(0.08838834764831845)
    else:
        rotate(values)
    return _digest(values).hex()


def _random_codes(bits: int) -> Bytes:
    return np.random.default_rng(bits).integers(0, 1 << bits, (24, 384)).astype(np.uint8)


def pack_bits_digest(backend: str) -> str:
    """Every width."""
    from pqweights.kernels import groups

    pack = pack_bits if backend == "reference" else groups.pack_bits
    return _digest(*(pack(_random_codes(bits), bits) for bits in range(1, 9))).hex()


def pack_tiles_digest(backend: str) -> str:
    """Three by three tiles."""
    from pqweights.kernels import groups

    pack = pack_tiles if backend == "reference" else groups.pack_tiles
    return _digest(pack(_random_codes(4))).hex()


DIGESTS = {
    "fit": fit_digest,
    "round": round_digest,
    "round_floats": round_floats_digest,
    "rotate": rotate_digest,
    "pack_bits": pack_bits_digest,
    "pack_tiles": pack_tiles_digest,
}
