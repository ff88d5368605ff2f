"""Packed keys and values to attend to, what they stand for in float64, and the bounds that kernels must keep to."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.kernels import cpu
from pqweights.kernels.attention_task import MOST_ENTRY, PolarTask

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]


def unpacked(packed: Bytes, bits: int, count: int) -> npt.NDArray[np.int64]:
    """Return the codes, [.., count], of packed ones: fields of 8, 4, 2 or 1 bits, the lowest bits of a code first."""
    codes, begin, place = np.zeros((*packed.shape[:-1], count), dtype=np.int64), 0, 0
    for width in (8, 4, 2, 1):
        if bits & width:
            end = begin + count * width // 8
            for item in range(count):
                run, byte = divmod(item, end - begin)
                field = packed[..., begin + byte].astype(np.int64) >> (run * width)
                codes[..., item] |= (field & (2**width - 1)) << place
            begin, place = end, place + width
    assert begin == packed.shape[-1]
    return codes


@dataclass(frozen=True, kw_only=True)
class PolarCase:
    """Queries and polar-rope keys: the arguments of `attention.polar_rope_scores`."""

    queries: Floats
    angles: Bytes
    radii: Bytes
    scales: npt.NDArray[np.float16]
    angle_bits: int
    radius_bits: int
    halves: bool

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.queries, self.angles, self.radii, self.scales


def polar_case(
    widths: tuple[int, int], rows: int, *, size: int = 64, heads: int = 2, groups: int = 5, halves: bool = True
) -> PolarCase:
    """Return random codes, among them groups of the lowest and the highest; some pairs are much larger than others."""
    rng = np.random.default_rng([*widths, rows, size, groups])
    angles, radii = (rng.integers(0, 256, (heads, groups, size // 2, 4 * width)).astype(np.uint8) for width in widths)
    for codes, extremes in ((angles, (0, 255, 255)), (radii, (255, 255, 0))):
        for group, value in zip(range(1, groups), extremes, strict=False):
            codes[:, group] = value
    scales = rng.uniform(0.1, 1, (heads, size // 2)).astype(np.float16)
    scales[:, ::7] *= np.float16(20)
    return PolarCase(
        queries=rng.standard_normal((heads, rows, size)).astype(np.float32),
        angles=angles,
        radii=radii,
        scales=scales,
        angle_bits=widths[0],
        radius_bits=widths[1],
        halves=halves,
    )


def polar_exact(case: PolarCase) -> tuple[Doubles, Doubles]:
    """Return the scores, [heads, rows, tokens], and how far a kernel may be off.

    Rounding the entries of tables makes errors that are as good as random: six standard deviations.
    """
    radii = unpacked(case.radii, case.radius_bits, 32).astype(np.float64)
    angle_codes = unpacked(case.angles, case.angle_bits, 32)
    angles = 2 * np.pi * angle_codes / 2**case.angle_bits - np.pi
    lengths = radii * case.scales.astype(np.float64)[:, None, :, None]
    keys = np.stack([lengths * np.cos(angles), lengths * np.sin(angles)])  # [2, heads, groups, pairs, 32]
    heads, rows, size = case.queries.shape
    order = np.arange(size).reshape(2, -1) if case.halves else np.arange(size).reshape(-1, 2).T
    queries = case.queries.astype(np.float64)[..., order]  # [heads, rows, 2, pairs]
    scores = np.einsum("hrcp,chgpt->hrgt", queries, keys).reshape(heads, rows, -1)
    sizes = np.einsum("hrcp,chgpt->hrgt", np.abs(queries), np.abs(keys)).reshape(heads, rows, -1)
    most = (np.hypot(queries[:, :, 0], queries[:, :, 1]) * case.scales.astype(np.float64)[:, None]).max(-1)
    steps = most / MOST_ENTRY / np.sqrt(12)
    spread = np.sqrt(np.square(radii).sum(2)).reshape(heads, 1, -1)  # over pairs
    return scores, 6 * steps[..., None] * spread + 2.0**-21 * sizes + 1e-30


def polar_computed(case: PolarCase, threads: int = 1, tile_groups: int = 2) -> Floats:
    """Return the scores of the kernel, called without torch."""
    heads, rows, size = case.queries.shape
    groups, scales = case.angles.shape[1], case.scales.astype(np.float32)
    out = np.full((heads, rows, groups * 32), np.nan, dtype=np.float32)
    addresses = [array.ctypes.data for array in (case.queries, case.angles, case.radii, scales, out)]
    step, offset = (1, size // 2) if case.halves else (2, 1)
    task = PolarTask(0, heads, rows, groups, size // 2, tile_groups, *addresses, step, offset)
    cpu.run_task(f"polar_scores_{case.angle_bits}{case.radius_bits}", ctypes.addressof(task), threads)
    return out


def excess(made: Floats, exact: tuple[Doubles, Doubles]) -> float:
    """Return the largest error, in multiples of what it may be."""
    expected, bound = exact
    assert made.shape == expected.shape
    return float((np.abs(made - expected) / bound).max(initial=0))
