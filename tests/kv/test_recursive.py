"""The recursive polar transform: Definition 1 as a recursion, the densities of Lemma 2, and the codebooks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from caches import decoded, gaussian, relative_error
from helpers import Array

from pqweights.codecs.polar_transform import LEVELS, RELATIVE_MSE, angle_density
from pqweights.inference.kv.rotated import RecursivePolar, polar, rotation


def transformed(vector: list[float]) -> tuple[list[list[float]], float]:
    """Definition 1 for one group: the angles of all levels, and the radius."""
    if len(vector) == 1:
        return [], vector[0]
    pairs = list(zip(vector[0::2], vector[1::2], strict=True))
    first = len(vector) == 16
    angles = [math.atan2(y, x) % (2 * math.pi) if first else math.atan2(y, x) for x, y in pairs]
    others, radius = transformed([math.hypot(x, y) for x, y in pairs])
    return [angles, *others], radius


def inverse(angles: list[list[float]], radius: float) -> list[float]:
    values = [radius]
    for level in reversed(angles):
        values = [
            part * value
            for angle, value in zip(level, values, strict=True)
            for part in (math.cos(angle), math.sin(angle))
        ]
    return values


def test_transform_is_the_recursive_one() -> None:
    vectors = gaussian(5, 48)
    angles, radii = polar(vectors)
    assert [each.shape[-1] for each in angles] == [24, 12, 6, 3] and radii.shape == (5, 3)
    for row in range(5):
        for group in range(3):
            expected, radius = transformed(vectors[row, 16 * group : 16 * group + 16].tolist())
            assert float(radii[row, group]) == pytest.approx(radius, rel=1e-6)
            for level, each in enumerate(expected):
                count = 8 >> level
                found = angles[level][row, count * group : count * group + count]
                assert found.tolist() == pytest.approx(each, abs=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e15])
def test_extreme_vectors_have_finite_angles(scale: float) -> None:
    angles, radius = polar(gaussian(3, 16) * scale)
    assert all(each.isfinite().all() for each in angles) and radius.isfinite().all()


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_angles_of_gaussian_vectors_follow_the_densities(level: int) -> None:
    """Kolmogorov and Smirnov's distance, which for 40000 numbers exceeds 1.95 / 200 once in a thousand times."""
    angles = np.sort(polar(gaussian(40000 >> (4 - level), 16))[0][level - 1].flatten().double().numpy())
    grid = np.linspace(0, 2 * math.pi if level == 1 else math.pi / 2, 4001)
    middles: Array = (grid[1:] + grid[:-1]) / 2
    share = np.concatenate([[0], np.cumsum(angle_density(level, middles)) * (grid[1] - grid[0])])
    assert share[-1] == pytest.approx(1, abs=1e-5)
    empirical = np.arange(len(angles)) / len(angles)
    assert np.abs(np.interp(angles, grid, share) - empirical).max() < 1.95 / math.sqrt(len(angles))


def test_error_is_the_theoretical_one() -> None:
    for size in (64, 128, 80):
        states = gaussian(1, 2, 1000, size)
        assert relative_error(decoded("polar", states), states) == pytest.approx(RELATIVE_MSE, rel=0.02)


def test_codes_are_those_of_the_nearest_centroids() -> None:
    quantizer = RecursivePolar(16)
    for first in LEVELS[0]:
        angles = [[first] + [0.1] * 7, *([LEVELS[level][2]] * (8 >> level) for level in (1, 2, 3))]
        expected = [[first] + [LEVELS[0][0]] * 7, *angles[1:]]
        vector = torch.tensor(inverse(angles, 3.0))[None, None, None] @ rotation(16, torch.device("cpu"))
        found = quantizer.decode(quantizer.encode(vector, {}, 0), {}, 0) @ rotation(16, torch.device("cpu")).T
        assert found.flatten().tolist() == pytest.approx(inverse(expected, 3.0), abs=1e-5)
