"""Enlarged blocks: products with the weights keep their size, and the errors that are stated are those of the bytes."""

from __future__ import annotations

import numpy as np
import pytest
from closeness import F32_MATRIX, F32_SOLVED, SAMPLE, SMALL_SAMPLE, approx, each_near

from pqweights.kernels.gguf_encoding import BLOCK_TYPES, decode_blocks, encode_blocks
from pqweights.kernels.gguf_gain import FACTORS, with_gain
from pqweights.kernels.groups import Groups


def decoded(name: str, blocks: Groups) -> np.ndarray:
    return decode_blocks(name, blocks.codes).astype(np.float64)


def weights(seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((64, 512)).astype(np.float32) * np.float32(0.02)


@pytest.mark.parametrize("name", FACTORS)
def test_products_with_the_weights_keep_their_size(name: str) -> None:
    values = weights()
    before = encode_blocks(name, values, None)
    after = with_gain(name, before)
    truth = values.reshape(len(before.codes), -1).astype(np.float64)
    shares = [(truth * decoded(name, found)).sum() / (truth * truth).sum() for found in (before, after)]
    lost = before.errors.sum() / before.energies.sum()
    assert abs(shares[1] - 1) < (0.05 if name == "Q1_0" else 0.002)  # it would need more than LARGEST_GAIN
    assert shares[0] == approx(1 - lost, 0, 1.5 * SMALL_SAMPLE * lost + 2 * F32_MATRIX)
    error = np.square(truth - decoded(name, after)).sum(axis=1)
    assert each_near(after.errors, error, SAMPLE)
    assert after.errors.sum() == approx(error.sum(), F32_SOLVED)
    assert after.errors.sum() <= 1.06 * before.errors.sum() / (1 - lost)


@pytest.mark.parametrize("name", FACTORS)
def test_blocks_of_least_weighed_error_are_written_as_they_are(name: str) -> None:
    importance = np.exp(np.random.default_rng(6).standard_normal(512)).astype(np.float32)
    rule, least = BLOCK_TYPES[name], encode_blocks(name, weights(), importance)
    assert np.array_equal(rule.quantize_weighted(weights().reshape(-1), importance).codes, least.codes)
    assert not np.array_equal(rule.quantize(weights().reshape(-1)).codes, encode_blocks(name, weights(), None).codes)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_without_anything_to_gain_stay_as_they_are(name: str) -> None:
    values = np.zeros((3, 512), dtype=np.float32)
    values[1, 7] = np.nan
    before = encode_blocks(name, values, None)
    after = with_gain(name, before)
    assert np.array_equal(after.codes, before.codes)
    np.testing.assert_array_equal(after.errors, before.errors)


def test_factors_do_not_overflow() -> None:
    values = weights() * np.float32(3e6)
    blocks = with_gain("Q4_0", encode_blocks("Q4_0", values, None))
    assert np.isfinite(decoded("Q4_0", blocks)).all()


def test_a_block_does_not_depend_on_the_others() -> None:
    values = weights()
    whole = with_gain("Q2_K", encode_blocks("Q2_K", values, None))
    part = with_gain("Q2_K", encode_blocks("Q2_K", np.ascontiguousarray(values[10:20]), None))
    assert np.array_equal(whole.codes[20:40], part.codes) and np.array_equal(whole.errors[20:40], part.errors)
