"""The fixed rotation, orthogonal at any size and the same everywhere; and polar: its error, and Definition 1 undone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from caches import decoded, gaussian, relative_error
from closeness import F32_FEW, F32_SUM, ROUNDED_ONCE_MORE, approx, each_near
from test_polar_codebook import RELATIVE_MSE

from pqweights.runtime.kv.polar_transform import LEVELS
from pqweights.runtime.kv.rotated import RecursivePolar
from pqweights.runtime.kv.rotated import rotation as matrix

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [8, 16, 64, 128, 256, 48, 80, 96])
def test_rotation_is_orthogonal(size):
    found = matrix(size, CPU).double()
    assert each_near(found @ found.T, torch.eye(size, dtype=torch.float64), F32_SUM, F32_FEW)
    if size & (size - 1) == 0:
        assert each_near(found.abs(), torch.full_like(found, size**-0.5), F32_SUM)
        signs = found[0] * size**0.5  # the first row of H is all ones
        assert 0 < (signs > 0).sum() < size


def test_powers_of_two_take_the_matrix_of_sylvester():
    h = np.ones((1, 1))
    while len(h) < 64:
        h = np.block([[h, h], [h, -h]])
    found = matrix(64, CPU).numpy() * 8
    assert np.array_equal(found, h * found[0])


def test_rotation_never_changes():
    signs = "+---+++------++-+-+-++-+-++++---+----+-+-+++-++-+-++++-++++++-++"
    assert "".join("+" if value > 0 else "-" for value in matrix(64, CPU)[0].tolist()) == signs
    first, last = matrix(80, CPU)[0, :4].tolist(), matrix(80, CPU)[79, 76:].tolist()
    assert first == approx([-0.02838494, -0.08485341, -0.10820321, 0.11176397], 0, F32_FEW)
    assert last == approx([0.04125832, 0.04548851, -0.04817041, 0.10144671], 0, F32_FEW)


# --- polar ---


def inverse(angles: list[list[float]], radius: float) -> list[float]:
    values = [radius]
    for level in reversed(angles):
        values = [
            part * value
            for angle, value in zip(level, values, strict=True)
            for part in (math.cos(angle), math.sin(angle))
        ]
    return values


def test_error_is_the_theoretical_one():
    for size in (64, 128, 80):
        states = gaussian(1, 2, 1000, size)
        assert relative_error(decoded("polar", states), states) == approx(RELATIVE_MSE, ROUNDED_ONCE_MORE)


def test_codes_are_those_of_the_nearest_centroids():
    quantizer = RecursivePolar(16)
    for first in LEVELS[0]:
        angles = [[first] + [0.1] * 7, *([LEVELS[level][2]] * (8 >> level) for level in (1, 2, 3))]
        expected = [[first] + [LEVELS[0][0]] * 7, *angles[1:]]
        vector = torch.tensor(inverse(angles, 3.0))[None, None, None] @ matrix(16, CPU)
        found = quantizer.decode(quantizer.encode(vector, {}, 0), {}, 0) @ matrix(16, CPU).T
        assert found.flatten().tolist() == approx(inverse(expected, 3.0), 0, F32_SUM)
