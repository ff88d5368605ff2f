"""The methods that the benchmarks compare with, in numpy, and the unbiased products of QJL."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from caches import decoded, gaussian, relative_error
from closeness import ORTHOGONAL, approx
from test_schemes import affine, half, same

from pqweights.runtime.kv.schemes import SCHEMES

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])  # only here: names clash
    import kv_baselines


@pytest.fixture(autouse=True)
def baselines() -> Iterator[None]:
    before = dict(SCHEMES)
    kv_baselines.add()
    yield
    SCHEMES.clear()
    SCHEMES.update(before)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_kivi_is_that_of_its_paper(bits):
    states = gaussian(2, 3, 96, 64) * torch.linspace(0.1, 3, 64) + 1
    plain = states.numpy()
    channels = plain.reshape(2, 3, 3, 32, 64).swapaxes(-1, -2)
    keys = affine(channels, bits).swapaxes(-1, -2).reshape(plain.shape)
    same(decoded(f"kivi:{bits},residual=0", states), keys)
    values = affine(plain.reshape(2, 3, 96, 2, 32), bits).reshape(plain.shape)
    same(decoded(f"kivi:{bits},residual=0", states, "values"), values)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_absmax_is_symmetric(bits):
    states = gaussian(2, 3, 40, 64)
    plain, most = states.numpy(), 2 ** (bits - 1) - 1
    scale = half(np.abs(plain).max(-1, keepdims=True) / np.float32(most))
    expected = np.clip(np.rint(plain / scale), -most, most) * scale
    for kind in ("keys", "values"):
        same(decoded(f"absmax:{bits}", states, kind), expected)


def test_codebooks_of_the_prompt_are_as_good_on_gaussian_states_and_better_on_others():
    """Without the rotation, angles of states with large and small channels come in clusters."""
    states = gaussian(2, 2, 1000, 64)
    errors = [relative_error(decoded(spec, states), states) for spec in ("polar:online", "polar", "polar:rotation=0")]
    assert errors == approx([errors[1]] * 3, ORTHOGONAL)
    states *= torch.tensor([1, 0.2]).repeat(32)
    specs = ("polar:online,rotation=0", "polar:rotation=0")
    online, offline = (relative_error(decoded(spec, states), states) for spec in specs)
    assert online < 0.8 * offline
    apart = torch.cat([decoded(specs[0], states[number : number + 1]) for number in range(2)])
    assert torch.equal(decoded(specs[0], states), apart)


def test_products_are_unbiased_with_qjl():
    keys = torch.nn.functional.normalize(gaussian(1, 1, 20_000, 64), dim=-1)
    queries = torch.nn.functional.normalize(keys + 0.1 * gaussian(1, 1, 20_000, 64, seed=2), dim=-1)
    errors = ((decoded("hadamard:3,qjl", keys) - keys) * queries).sum(-1)
    assert abs(float(errors.mean())) < 4 * float(errors.std()) / math.sqrt(errors.numel())
