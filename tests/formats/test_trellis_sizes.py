"""What hadamard-trellis promises of sizes, errors and bytes: exact budgets, hardly a byte unused, honest errors."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from closeness import F32_FEW, F32_SOLVED, F32_SUM, F64_SUM, ONE_DRAW, approx
from helpers import gaussian
from trellis_writer import KINDS, hostile

from pqweights.checkpoint.master import encoded_specs
from pqweights.formats.master import Bytes, Pass
from pqweights.formats.trellis import STEP_POWERS, Trellis
from pqweights.formats.weight import decode_weight, encode_weight

Floats = npt.NDArray[np.float32]


def encode(
    values: Floats, rate: float, states: int = 8, step_power: float = Trellis.first_step_power
) -> tuple[Bytes, Pass]:
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    format = Trellis(bits=rate, states=states, step_power=step_power)
    (rows,), last = encode_weight(raw, dtype="F32", shape=values.shape, format=format)
    return rows, last


def decoded(rows: Bytes, last: Pass, weights: int) -> npt.NDArray[np.float64]:
    return decode_weight(last.format, [rows], weights, "F32").view(np.float32).astype(np.float64)


def unused(row: npt.NDArray[np.uint8]) -> int:
    """The zeros at the end of a superblock; one more or less of them may belong to the stream."""
    used = np.nonzero(row)[0]
    return len(row) - 1 - int(used[-1]) if len(used) else len(row)


# --- sizes ---


@pytest.mark.parametrize("step_power", STEP_POWERS)
@pytest.mark.parametrize("rate", [1.5, 2.0, 3.3, 4.38, 6.0, 8.0])
@pytest.mark.parametrize("shape", [(512, 128), (600, 128), (1000, 100), (768, 384), (7, 61_001)])
def test_ordinary_weights_leave_few_bytes_unused(shape: tuple[int, int], rate: float, step_power: float) -> None:
    rows, measured = encode(gaussian(*shape, seed=3), rate, step_power=step_power)
    assert rows.size == math.prod(encoded_specs("x", shape, Trellis.at(rate))[0].shape)
    assert max(unused(row) for row in rows) <= 0.002 * rows.shape[1]
    assert measured.relative_mse <= 1.03 * Trellis.at(rate).distortion


@pytest.mark.parametrize("blocks", [1, 2, 5, 16, 40, 100, 300])
@pytest.mark.parametrize("rate", [1.5, 2.5, 4.0, 8.0])
def test_small_weights_keep_the_promise(blocks: int, rate: float) -> None:
    """On average: a few blocks of N(0,1) have more or less than their share of variance."""
    ratios = []
    for seed in range(max(1, 40 // blocks)):
        _, measured = encode(gaussian(blocks, 128, seed=seed), rate)
        ratios.append(measured.relative_mse / Trellis.at(rate).distortion)
    assert np.mean(ratios) <= 1.25


# --- steps ---


@pytest.mark.parametrize("step_power", STEP_POWERS)
@pytest.mark.parametrize("rate", [3.0, 5.0])
def test_errors_grow_with_the_power_of_the_norm(step_power: float, rate: float) -> None:
    """Four norms, 2**2 apart, mixed in every superblock: squared errors are in proportion to norm**(2 * power)."""
    norms = 4.0 ** (np.arange(2048) % 4)
    values = (gaussian(2048, 128, seed=6) * norms[:, None]).astype(np.float32)
    rows, measured = encode(values, rate, step_power=step_power)
    errors = ((decoded(rows, measured, values.size).reshape(values.shape) - values) ** 2).mean(axis=1)
    by_norm = np.log2([errors[kind::4].mean() for kind in range(4)])
    assert np.diff(by_norm) == approx([4 * step_power] * 3, 0, ONE_DRAW)
    assert measured.relative_mse <= Trellis.at(rate).distortion and not measured.format.rescued


# --- hostile weights ---


@pytest.mark.parametrize("step_power", STEP_POWERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [1, 4, 17, 130])
def test_hostile_weights_stay_within_their_bytes_and_their_errors_are_as_stated(
    kind: str, blocks: int, step_power: float
) -> None:
    for rate, states in ((1.5, 8), (2.0, 64), (4.3, 8), (8.0, 8)):
        values = hostile(kind, blocks, seed=blocks)
        rows, measured = encode(values, rate, states, step_power)
        found, exact = decoded(rows, measured, values.size), values.reshape(-1).astype(np.float64)
        assert np.isfinite(found).all()
        error, energy = ((found - exact) ** 2).sum(), (exact**2).sum()
        assert measured.energy == approx(energy, F32_SUM)
        if "largest" in kind or kind == "huge":  # decoded values are clamped, which the stated error does not count
            assert error <= measured.error * 1.01
        else:
            assert measured.error == approx(error, 2 * F32_SOLVED, F64_SUM * energy)
        assert measured.error <= energy * (1 + F32_FEW)


@pytest.mark.parametrize("magnitude", [1.0, 1e15])
def test_modelled_error_of_one_block_among_zeros_is_a_small_number(magnitude: float) -> None:
    blocks = np.zeros((1000, 128), dtype=np.float32)
    blocks[0] = magnitude
    modelled = Trellis.at(4.0).modelled_errors(blocks)
    assert 0 < modelled[0] < F32_SUM * magnitude**2 and not modelled[1:].any()
