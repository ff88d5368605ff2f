"""The fixed rotation: orthogonal at any size, the same everywhere, and as good as a dense random one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pqweights.inference.kv.rotated import rotation as matrix

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [8, 16, 64, 128, 256, 48, 80, 96])
def test_rotation_is_orthogonal(size: int) -> None:
    found = matrix(size, CPU).double()
    assert torch.allclose(found @ found.T, torch.eye(size, dtype=torch.float64), atol=2e-6)
    if size & (size - 1) == 0:
        assert torch.allclose(found.abs(), torch.full_like(found, size**-0.5))
        signs = found[0] * size**0.5  # the first row of H is all ones
        assert 0 < (signs > 0).sum() < size


def test_powers_of_two_take_the_matrix_of_sylvester() -> None:
    h = np.ones((1, 1))
    while len(h) < 64:
        h = np.block([[h, h], [h, -h]])
    found = matrix(64, CPU).numpy() * 8
    assert np.array_equal(found, h * found[0])


def test_rotation_never_changes() -> None:
    signs = "+---+++------++-+-+-++-+-++++---+----+-+-+++-++-+-++++-++++++-++"
    assert "".join("+" if value > 0 else "-" for value in matrix(64, CPU)[0].tolist()) == signs
    first, last = matrix(80, CPU)[0, :4].tolist(), matrix(80, CPU)[79, 76:].tolist()
    assert first == pytest.approx([-0.02838494, -0.08485341, -0.10820321, 0.11176397], abs=1e-6)
    assert last == pytest.approx([0.04125832, 0.04548851, -0.04817041, 0.10144671], abs=1e-6)
