"""Angles and radii of pairs: which coordinates RoPE rotates together, their codes, and products from tables."""

from __future__ import annotations

import math

import pytest
import torch
from caches import decoded, gaussian, model, relative_error, store
from closeness import F32_MATRIX, F32_SUM, approx, each_near
from torch import Tensor

from pqweights.runtime.kv.cache import kv_cache
from pqweights.runtime.kv.codes import unpack
from pqweights.runtime.kv.polar_rope import PolarPairs, RopePairs, rope_pairs

# Size, how many coordinates RoPE rotates, and whether neighbours are pairs.
ROTATED = {
    "llama": RopePairs(32, 32, False),
    "qwen3": RopePairs(32, 32, False),
    "phi3": RopePairs(32, 32, False),
    "glm": RopePairs(32, 16, True),
    "cohere": RopePairs(32, 32, True),
    "gptj": RopePairs(32, 16, True),
    "gpt_neox": RopePairs(32, 8, False),
    "stablelm": RopePairs(32, 8, False),
    "gemma3": RopePairs(32, 32, False),
    "gpt_oss": RopePairs(32, 32, False),
    "qwen3_5": RopePairs(32, 8, False),
    "qwen3_vl": RopePairs(32, 32, False),
}


@pytest.mark.parametrize("name", ROTATED)
def test_pairs_are_those_of_the_configuration(name):
    config = model(name).config.get_text_config(decoder=True)
    assert rope_pairs(config, 32) == ROTATED[name]


@pytest.mark.parametrize("name", sorted(set(ROTATED) - {"gpt_oss", "qwen3_5"}))
def test_pairs_are_those_that_the_model_rotates(name):
    """One token again and again has, before RoPE, the same key everywhere, so that only angles of pairs differ."""
    net = model(name)
    cache = kv_cache(net, "none")
    with torch.no_grad():
        net(torch.full((1, 12), 7), past_key_values=cache)
    keys = cache.packed_layers[0].states[0].window
    assert keys is not None and cache.model.pairs == ROTATED[name]
    wrong = RopePairs(32, ROTATED[name].rotated, not ROTATED[name].interleaved)
    assert spread(keys, ROTATED[name]) < F32_MATRIX < 0.01 < spread(keys, wrong)
    still = keys[..., ROTATED[name].rotated :]
    assert each_near(still, still[:, :, :1], F32_SUM, F32_MATRIX * float(keys.abs().max()))


def spread(keys: Tensor, pairs: RopePairs) -> float:
    """How much the largest radius of a pair changes between tokens."""
    radii = torch.hypot(*pairs.split(keys))
    return float((radii.std(2) / radii.amax((2, 3), keepdim=True)[:, :, 0]).max())


def test_alibi_is_not_rope():
    from transformers import FalconConfig

    assert rope_pairs(model("gpt2").config, 32) is rope_pairs(FalconConfig(alibi=True), 64) is None
    assert rope_pairs(FalconConfig(alibi=False), 64) == RopePairs(64, 64, False)


# --- codes ---


def expected_error(angle_bits: int, radius_bits: int, tokens: int) -> float:
    """The error of pairs of Gaussian coordinates, whose radii follow Rayleigh's density.

    Angles are even over a cell of width w, so that a radius r at the middle is off by r^2 (1 - sinc(w / 2)^2) at best,
    here 2 r^2 (1 - sinc(w / 2)); radii are off by a twelfth of their squared step, which is the largest of all tokens
    over the largest code.
    """
    half = math.pi / 2**angle_bits
    largest = gaussian(20_000, tokens, 2, seed=9).norm(dim=-1).amax(1)
    step = float(largest.square().mean()) / (2**radius_bits - 1) ** 2
    return 2 * (1 - math.sin(half) / half) + step / 12 / 2


@pytest.mark.parametrize(("angle_bits", "radius_bits"), [(4, 4), (4, 2), (2, 4), (8, 8), (3, 3), (6, 5)])
def test_error_is_that_of_angles_and_radii(angle_bits, radius_bits):
    states = gaussian(1, 2, 256, 128)
    spec = f"polar-rope:m{angle_bits}n{radius_bits},residual=0"
    expected = expected_error(angle_bits, radius_bits, 256)
    assert 0.88 < relative_error(decoded(spec, states), states) / expected < 1.12


def test_outliers_in_single_channels_cost_nothing():
    """The point of the paper: RoPE spreads a channel and its partner over a circle with one radius."""
    pairs = RopePairs(64, 64, False)
    radii = torch.logspace(0, 3, 32)
    angles = torch.rand(1, 1, 128, 32, generator=torch.Generator().manual_seed(3)) * 2 * math.pi
    states = pairs.joined(radii * angles.cos(), radii * angles.sin())
    found = decoded("polar-rope:m4n4,residual=0", states)
    each = torch.hypot(*pairs.split(found - states)).square().mean(2) / radii.square()
    half = math.pi / 16
    assert float(each.max()) < 1.5 * 2 * (1 - math.sin(half) / half)


@pytest.mark.parametrize("interleaved", [False, True])
def test_codes_lie_as_documented(interleaved):
    """32 tokens of a pair together; the angle in cells around multiples of 2 pi / 2**m, the radius as a multiple."""
    quantizer = PolarPairs(RopePairs(16, 16, interleaved), 4, 2)
    states = gaussian(2, 3, 64, 16)
    shared = quantizer.fit(states, None, 0)
    rows = quantizer.encode(states, shared, 0)
    assert rows["angles"].shape == (2, 3, 2, 8, 16) and rows["radii"].shape == (2, 3, 2, 8, 8)
    assert shared["scale"].shape == (2, 3, 8) and shared["scale"].dtype == torch.float16
    angles, radii = unpack(rows["angles"], 4, 32), unpack(rows["radii"], 2, 32)
    for token, pair in ((0, 0), (5, 3), (40, 7)):
        places = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 8)
        x, y = (float(states[1, 2, token, place]) for place in places)
        scale = float(shared["scale"][1, 2, pair])
        assert int(radii[1, 2, token // 32, pair, token % 32]) == min(3, round(math.hypot(x, y) / scale))
        turns = (math.atan2(y, x) + math.pi) / (2 * math.pi) * 16
        assert int(angles[1, 2, token // 32, pair, token % 32]) == round(turns) % 16


def test_scales_are_kept_until_a_radius_exceeds_them():
    held = store("polar-rope:m4n4,residual=0", 32)
    large, small = (gaussian(1, 1, 32, 32, seed=seed).clamp(-size, size) for seed, size in ((1, 9.0), (2, 0.5)))
    for states, chunks in ((large, 1), (small, 1), (large * 2, 2), (large, 2), (small, 2)):
        held.append(states)
        assert len(held.chunks) == chunks
    found = held.decoded()
    assert relative_error(found[:, :, 64:96], large * 2) == approx(relative_error(found[:, :, :32], large))


def test_pairs_follow_the_layer_with_another_size():
    from transformers import LlamaConfig

    cached = kv_cache(LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1), "polar-rope").model
    assert cached.pairs == RopePairs(32, 32, False) and cached.pairs_of(64) == RopePairs(64, 64, False)
