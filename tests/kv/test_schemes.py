"""Every method on states whose distribution is known: errors as theory has them, and values in even steps in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from caches import decoded, gaussian, relative_error, store
from closeness import F32_FEW, F32_SOLVED, F32_SUM, F64_SUM, SAMPLE, SMALL_SAMPLE, approx, near
from helpers import Array
from torch import Tensor

from pqweights.formats.lloyd_max import codebook
from pqweights.runtime.kv.schemes import SCHEMES

# The mean squared errors of Lloyd and Max's levels for Gaussian numbers (Max, 1960, Table I, up to 5 bits).
LLOYD_MAX = {2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("size", [64, 128, 80])
def test_hadamard_has_the_error_of_lloyd_and_max(bits, size):
    """The factor of each vector lowers it a little, by up to 1 / size of the energy of the noise's complement."""
    states = gaussian(1, 2, 500, size) * torch.logspace(-1, 1, 500)[:, None]
    found = relative_error(decoded(f"hadamard:{bits},centred=0", states), states)
    levels, thresholds = (np.asarray(each, np.float64) for each in (codebook(bits).levels, codebook(bits).thresholds))
    sample = gaussian(200_000, seed=4).double().numpy()
    expected = LLOYD_MAX.get(bits, float(np.square(sample - levels[np.searchsorted(thresholds, sample)]).mean()))
    rounding = 2.0**-24 / 3  # of the factor
    assert 0.93 * expected < found < 1.03 * expected + rounding


def test_centring_takes_the_mean_of_keys_off():
    states = gaussian(1, 2, 500, 64) + 20 * gaussian(1, 2, 1, 64, seed=2)
    bare = relative_error(decoded("hadamard:4,centred=0", states), states)
    centred = relative_error(decoded("hadamard:4", states), states)
    assert centred * float(states.square().mean()) == approx(LLOYD_MAX[4], SMALL_SAMPLE)
    assert bare > 50 * centred
    assert relative_error(decoded("hadamard:4", states, "values"), states) == approx(bare, SAMPLE)


def test_keys_and_values_may_have_bits_of_their_own():
    states = gaussian(1, 2, 500, 64)
    for kind, bits in (("keys", 5), ("values", 2)):
        found = relative_error(decoded("hadamard:4,keys=5,values=2,centred=0", states, kind), states)
        assert found == approx(LLOYD_MAX[bits], SMALL_SAMPLE)


@pytest.mark.parametrize("spec", sorted(set(SCHEMES) - {"none"}))
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_zeros_stay_zeros(spec, kind):
    states = torch.zeros(2, 2, 200, 32)
    assert torch.equal(decoded(f"{spec}:residual=0", states, kind), states)


@pytest.mark.parametrize("spec", sorted(set(SCHEMES) - {"none"}))
@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("size", [32, 48, 128])
def test_decoded_states_are_near_the_given_ones(spec, kind, size):
    states = gaussian(2, 2, 200, size)
    found = decoded(f"{spec}:residual=0", states, kind)
    assert found.shape == states.shape and found.dtype == states.dtype
    assert relative_error(found, states) < 0.05


# --- even steps, in numpy ---


def half(values: Array) -> Array:
    return np.asarray(values, np.float32).astype(np.float16).astype(np.float32)


def affine(values: Array, bits: int) -> Array:
    """Even steps along the last axis, with scale and lowest value in 16 bits."""
    low = half(values.min(-1, keepdims=True))
    scale = half((values.max(-1, keepdims=True) - low) / np.float32(2**bits - 1))
    codes = np.clip(np.rint((values - low) / np.where(scale > 0, scale, 1)), 0, 2**bits - 1)
    return np.asarray(codes * scale + low, np.float32)


def same(found: Tensor, expected: Array) -> None:
    """Equal but for the last bit of a float32 and for numbers half-way between two codes."""
    differs = ~near(found.numpy(), expected, F32_SUM, F32_FEW)
    assert differs.mean() < F32_SOLVED


@pytest.mark.parametrize("bits", [2, 4])
def test_values_of_polar_rope_have_one_scale_for_each_token(bits):
    states = gaussian(2, 3, 40, 48) + 1
    same(decoded(f"polar-rope:values={bits},residual=0", states, "values"), affine(states.numpy(), bits))


# --- bits ---


@pytest.mark.parametrize(
    ("spec", "keys", "values"),
    [
        ("polar", lambda size: 3.875, lambda size: 3.875),
        ("hadamard:3", lambda size: 3 + 16 / size + 16 / 256, lambda size: 3 + 16 / size),
        ("hadamard:3,centred=0", lambda size: 3 + 16 / size, lambda size: 3 + 16 / size),
        # a scale of 16 bits for each pair of channels, here for 256 tokens
        ("polar-rope:m4n4,residual=0", lambda size: 4 + 8 / 256, lambda size: 4 + 32 / size),
        ("polar-rope:m4n2,values=2,residual=0", lambda size: 3 + 8 / 256, lambda size: 2 + 32 / size),
    ],
)
@pytest.mark.parametrize("size", [64, 128])
def test_bits_are_those_of_a_count_by_hand(spec, keys, values, size):
    for kind, expected in (("keys", keys(size)), ("values", values(size))):
        held = store(spec, size, kind)
        held.append(gaussian(1, 2, 256, size))
        assert held.packed_tokens == 256
        assert held.packed_bytes() * 8 / (2 * 256 * size) == approx(expected, 0, F64_SUM)


def test_klt_takes_its_bits_and_a_factor_and_its_tables():
    size, tokens, heads = 64, 512, 2
    for bits in (2, 2.5, 3.75):
        held = store(f"klt:{bits}", size)
        held.append(gaussian(1, heads, tokens, size))
        # mean and spread in 16 bits, the order in 8; the width of each eight coefficients, for all heads
        tables = size * (2 + 2 + 1) * heads + size // 8
        assert held.packed_bytes() == heads * tokens * (bits * size // 8 + 2) + tables
