"""The codecs that benchmarks/ablation.py compares with are as they are defined."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import helpers
import numpy as np
import numpy.typing as npt
import pytest
from closeness import F32_FEW, F32_SUM, approx, each_near, rounding
from independent_reader import unpack

from pqweights.formats import lloyd_max
from pqweights.formats.weight import encode_weight

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])  # only here: names clash
    from comparison_codecs import COMPARED


def definition(name: str, blocks: npt.NDArray[np.float64], bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes and norms by definition, in float64, and where the code is not a near tie."""
    turned = blocks @ helpers.sylvester() / math.sqrt(128) if name.startswith("hadamard") else blocks
    if name.endswith("absmax"):
        steps = 2 ** (bits - 1) - 1
        norms = np.abs(turned).max(axis=1)
        levels, first = np.arange(-steps, steps + 1) / steps, 1
        distance = turned / norms[:, None]
    else:
        upper = np.array(lloyd_max.HALF_LEVELS[bits])
        norms = np.sqrt((turned**2).sum(axis=1))
        levels, first = np.concatenate([-upper[::-1], upper]), 0
        distance = turned / norms[:, None] * math.sqrt(128)
    nearest = np.abs(distance[:, :, None] - levels).argmin(axis=2)
    gap = np.abs(distance[:, :, None] - (levels[:-1] + levels[1:]) / 2).min(axis=2)
    return first + nearest, norms, gap > F32_SUM * np.abs(levels).max()


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_and_norms_match_the_definition_and_errors_are_those_of_the_decoded(name: str, bits: int) -> None:
    values = helpers.gaussian(128, 128, seed=bits, scale=0.03)
    weight, measured = encode_weight(
        helpers.raw_bytes(values, "F32"), dtype="F32", shape=values.shape, coder=COMPARED[name].coder(bits)
    )
    exact = values.astype(np.float64)
    codes, norms, clear = definition(name, exact, bits)
    assert clear.mean() > 0.98
    assert np.array_equal(unpack(weight.parts[0], bits)[clear], codes[clear])
    assert each_near(weight.parts[1].view(np.float16).reshape(-1), norms, rounding("F16", 1) + F32_FEW)
    error = (weight.decode_blocks(0, 128, "F32").view(np.float32).reshape(values.shape) - exact) ** 2
    assert measured.energy == approx((exact**2).sum(), F32_FEW)
    assert measured.error == approx(error.sum(), F32_SUM)
    ratio = measured.relative_mse / weight.coder.distortion
    assert 0.95 <= ratio <= 1.03
