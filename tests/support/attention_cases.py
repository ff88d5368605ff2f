"""Packed keys and values to attend to, what they stand for in float64, and the bounds that kernels must keep to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from closeness import rounding

from pqweights.kernels import attention

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

# Entries of look-up tables as integers, at most.
MOST_ENTRY = 32639


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
    scales = case.scales.astype(np.float64)
    lengths = radii * scales[:, None, :, None]  # [heads, groups, pairs, 32]
    keys = np.stack([lengths * np.cos(angles), lengths * np.sin(angles)])  # [2, heads, groups, pairs, 32]
    heads, rows, size = case.queries.shape
    order = np.arange(size).reshape(2, -1) if case.halves else np.arange(size).reshape(-1, 2).T
    queries = case.queries.astype(np.float64)[..., order]  # [heads, rows, 2, pairs]
    scores = np.einsum("hrcp,chgpt->hrgt", queries, keys).reshape(heads, rows, -1)
    sizes = np.einsum("hrcp,chgpt->hrgt", np.abs(queries), np.abs(keys)).reshape(heads, rows, -1)
    sizes_of_pairs = np.hypot(queries[:, :, 0], queries[:, :, 1])
    steps = (sizes_of_pairs * scales[:, None]).max(-1) / MOST_ENTRY / np.sqrt(12)  # [heads, rows]
    spread = np.sqrt(np.square(radii).sum(2))[:, None]  # over pairs
    bound = 6 * (steps[..., None, None] * spread).reshape(heads, rows, -1)
    return scores, bound + rounding("F32", 8) * sizes + 1e-30


def polar_scores(case: PolarCase) -> Floats:
    """The scores of the public function."""
    scores: Floats = attention.polar_rope_scores(
        *map(torch.from_numpy, case.arrays),
        angle_bits=case.angle_bits,
        radius_bits=case.radius_bits,
        halves=case.halves,
    ).numpy()
    return scores


@dataclass(frozen=True, kw_only=True)
class TokenCase:
    """Token-wise codes, and what they are multiplied with.

    codes: [heads, tokens, size * bits / 8]; levels: [2**bits]
    weights: [heads, rows, tokens]; queries: [heads, rows, size]; norms: [heads, tokens]
    lows: [heads, tokens]; values then have norms, too
    """

    codes: Bytes
    levels: Floats
    weights: Floats
    queries: Floats
    norms: npt.NDArray[np.float16]
    lows: npt.NDArray[np.float16] | None

    @property
    def bits(self) -> int:
        return len(self.levels).bit_length() - 1

    @property
    def size(self) -> int:
        return self.queries.shape[-1]

    @property
    def values(self) -> Doubles:
        """What the codes stand for, [heads, tokens, size]."""
        return self.levels.astype(np.float64)[unpacked(self.codes, self.bits, self.size)]


def token_case(bits: int, rows: int, *, size: int = 64, heads: int = 2, tokens: int = 83) -> TokenCase:
    """Return random codes, among them tokens of the lowest and the highest, and weights and norms of every size.

    An odd number of rows has lows.
    """
    rng = np.random.default_rng([bits, rows, size, tokens])
    codes = rng.integers(0, 256, (heads, tokens, size * bits // 8)).astype(np.uint8)
    codes[:, 1::7], codes[:, 2::7] = 0, 255
    norms = (10.0 ** rng.uniform(-7, 1, (heads, tokens))).astype(np.float16)
    norms[:, ::9] = 0
    return TokenCase(
        codes=codes,
        levels=rng.standard_normal(1 << bits).astype(np.float32),
        weights=np.exp(rng.uniform(-20, 0, (heads, rows, tokens))).astype(np.float32),
        queries=rng.standard_normal((heads, rows, size)).astype(np.float32),
        norms=norms,
        lows=rng.standard_normal((heads, tokens)).astype(np.float16) if rows % 2 else None,
    )


def sums_exact(case: TokenCase) -> tuple[Doubles, Doubles]:
    """Return the sums of weighted values, [heads, rows, size], and how far a kernel may be off.

    Tokens are added one after the other in a tile, of which a chain has a fourth.
    """
    values, weights, sizes = case.values, case.weights.astype(np.float64), np.abs(case.values)
    if case.lows is not None:
        scales, lows = (array.astype(np.float64)[..., None] for array in (case.norms, case.lows))
        values, sizes = values * scales + lows, sizes * scales + np.abs(lows)
    made = np.einsum("hrt,htd->hrd", weights, values)
    return made, rounding("F32", 64) * np.einsum("hrt,htd->hrd", weights, sizes) + 1e-30


def scores_exact(case: TokenCase) -> tuple[Doubles, Doubles]:
    """Return the scores, [heads, rows, tokens], and how far a kernel may be off."""
    keys, queries = case.values * case.norms.astype(np.float64)[..., None], case.queries.astype(np.float64)
    made = np.einsum("hrd,htd->hrt", queries, keys)
    return made, rounding("F32", 16) * np.einsum("hrd,htd->hrt", np.abs(queries), np.abs(keys)) + 1e-30


def value_sums(case: TokenCase) -> Floats:
    """The sums of the public function."""
    arrays = (case.weights, case.codes, case.levels)
    of_tokens = {} if case.lows is None else {"scales": case.norms, "lows": case.lows}
    more = {name: torch.from_numpy(array) for name, array in of_tokens.items()}
    sums: Floats = attention.weighted_values(*map(torch.from_numpy, arrays), size=case.size, **more).numpy()
    return sums


def hadamard_scores(case: TokenCase) -> Floats:
    """The scores of the public function."""
    arrays = (case.queries, case.codes, case.norms, case.levels)
    scores: Floats = attention.hadamard_scores(*map(torch.from_numpy, arrays)).numpy()
    return scores


def excess(made: Floats, exact: tuple[Doubles, Doubles]) -> float:
    """Return the largest error, in multiples of what it may be."""
    expected, bound = exact
    assert made.shape == expected.shape
    return float((np.abs(made - expected) / bound).max(initial=0))
