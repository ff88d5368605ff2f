"""Weights of every kind that quantizers of groups and blocks treat differently."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from pqweights.kernels import Codebook
from pqweights.kernels.groups import GroupRule, Groups

Floats = npt.NDArray[np.float32]

LARGEST = 3.4028234663852886e38
LARGEST_BF16 = np.float32(3.3895313892515355e38)
CONSTANTS = (0.0125, -1.0, 3.0, 7e-7, 6e4, -1.5e38, 1e-40, LARGEST, -LARGEST, 2.0**-149, -(2.0**-126), 65504.0, -0.0)


@functools.cache
def families(columns: int) -> dict[str, Floats]:
    """Finite weights [21, columns] by name; 21 is not a multiple of the 16 that kernels take together."""
    shape, rng = (21, columns), np.random.default_rng(columns)
    normal, rows, place = rng.standard_normal(shape), np.arange(21), rng.integers(0, columns, 21)
    outlier, one_hot, zeros, part = normal * 0.02, np.zeros(shape), np.zeros(shape), np.zeros(shape)
    outlier[rows, place] = rng.choice([-9.0, 7.0], 21)
    one_hot[rows, place] = np.resize([-1e-3, 0.37, 3e38, -(2.0**-149), 2.0**-24], 21)
    zeros[1::3], zeros[2::3, ::2] = -0.0, -0.0
    part[:, columns // 12 : columns // 2] = normal[:, columns // 12 : columns // 2]
    of_parts = np.repeat(10.0 ** rng.uniform(-6, 1, (21, -(-columns // 16))), 16, axis=1)[:, :columns]
    found = {
        "gaussian": normal * 0.02,
        "heavy tails": rng.standard_t(1.2, shape) * 0.01,
        "constant": np.outer(np.resize(CONSTANTS, 21), np.ones(columns)),
        "zeros": zeros,
        "parts of zeros": part,
        "one outlier": outlier,
        "one-hot": one_hot,
        "positive": np.abs(normal) + 0.1,
        "negative": -np.abs(normal),
        "far from zero": normal * 1e-3 + 5,
        "subnormal": np.round(normal * 1000) * 2.0**-149,
        "1e-40": normal * 1e-40,
        "1e-38": normal * 1e-38,
        "1e37": normal * 1e37,
        "steps of the smallest F16": normal * 2.0**-22,
        "smaller than any F16": normal * 2.0**-30,
        "near the largest F16": normal * 65504,
        "near the largest": np.clip(normal * 3e38, -LARGEST, LARGEST),
        "two values": np.where(rng.random(shape) < 0.3, *rng.standard_normal((2, 21, 1))),
        "neighbours": 1 - rng.integers(0, 3, shape) * 2.0**-24,
        "whole numbers": rng.integers(-8, 8, shape),
        "mixed scales within a group": normal * 10.0 ** rng.uniform(-30, 30, shape),
        "mixed scales of parts": normal * of_parts,
        "mixed scales": normal * 10.0 ** rng.uniform(-38, 37, (21, 1)),
    }
    return {name: values.astype(np.float32) for name, values in found.items()}


def all_families(columns: int) -> Floats:
    """The same in one matrix."""
    return np.concatenate(list(families(columns).values()))


@functools.cache
def importance(columns: int, *, unused: bool = False) -> Floats:
    """Second moments that differ by factors of a few, as those of real inputs do.

    unused: some columns hardly count, and some not at all
    """
    found = np.exp(np.random.default_rng(6).standard_normal(columns) * (2 if unused else 1)).astype(np.float32)
    if unused:
        found[5:40], found[::50] = 0, 1e-20
    return found


def nearest_bf16(values: Floats) -> Floats:
    """The nearest BF16 numbers, ties to even, saturated."""
    clipped = np.clip(values, -LARGEST_BF16, LARGEST_BF16)
    bits = np.ascontiguousarray(clipped, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def one_hot_norms(book: Codebook) -> tuple[Floats, Floats]:
    """Numbers from 1.5 on, and the norm of a block in which each is alone among zeros."""
    level = book.levels[np.searchsorted(book.thresholds, 1, side="right")]  # that of all coordinates
    values = (np.arange(2**20, dtype=np.uint32) + np.float32(1.5).view(np.uint32)).view(np.float32)
    radius = np.sqrt(values * values)
    z = values * (np.float32(1) / radius)
    return values, np.asarray(radius * ((z * level) / (level * level)), np.float32)


def norm_ties(book: Codebook) -> Floats:
    """Those of the numbers whose norm is half-way between two float16, above the even one."""
    values, norms = one_hot_norms(book)
    # Normal float16 numbers lack the last 13 bits of float32; the bit before them is 0 in even ones.
    return values[norms.view(np.uint32) & 0x3FFF == 0x1000]


def counts(w: npt.NDArray[np.float64], rule: GroupRule) -> npt.NDArray[np.float64]:
    """What the squared error of each weight counts: its magnitude, and one or two root mean squares of the group."""
    affine = not (rule.symmetric or rule.zeros)
    return np.asarray(np.abs(w) + (2 if affine else 1) * np.sqrt(np.square(w).mean(1, keepdims=True)))


def errors_that_count(values: npt.NDArray[np.float32], rule: GroupRule, groups: Groups) -> npt.NDArray[np.float64]:
    """The weighted squared error of each group."""
    w = values.reshape(groups.codes.shape).astype(np.float64)
    return np.asarray((counts(w, rule) * (w - rule.decode(groups)) ** 2).sum(1))
