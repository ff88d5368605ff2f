"""Codes that are found again in decoded weights: by the decoder of the gguf package, and products in numpy.

Blocks and groups are made of random codes and scales, or by the encoders, decoded, and rounded as checkpoints store
them. What is found must decode to the same numbers.
"""

from __future__ import annotations

import functools
import itertools

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from pqweights.kernels.gguf_encoding import BLOCK_TYPES, encode_blocks
from pqweights.kernels.groups import GroupRule, Groups
from pqweights.kernels.recovery import RECOVERED_TYPES, recover_blocks, recover_groups

Floats = npt.NDArray[np.float32]

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# Of blocks of one part, and of those without offsets: where their scales of F16 are, the offset last.
HALVES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q3_K": (108,), "Q6_K": (208,)}
RULES = [
    GroupRule(bits=bits, group_size=32, symmetric=symmetric, middle=middle, zeros=zeros, scale_dtype=dtype)
    for bits, (symmetric, middle, zeros), dtype in itertools.product(
        (3, 4, 5), ((True, True, False), (False, True, False), (False, False, False), (False, False, True)), DTYPES
    )
    if dtype != "F32"
] + [GroupRule(bits=8, group_size=128, symmetric=True, middle=True)]


def stored(values: Floats, dtype: str) -> Floats:
    """Rounded as a checkpoint stores them, by PyTorch."""
    rounded: Floats = torch.from_numpy(values.copy()).to(DTYPES[dtype]).float().numpy()
    return rounded


def decoded(kind: str, blocks: npt.NDArray[np.uint8]) -> Floats:
    values: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return np.ascontiguousarray(values.reshape(-1))


@functools.cache
def encoded(kind: str) -> npt.NDArray[np.uint8]:
    """Blocks of weights with heavy tails, small and large; some are of one sign, some have parts of zeros."""
    rng = np.random.default_rng(3)
    values = (rng.standard_t(4, (24, 1024)) * 10.0 ** rng.uniform(-3, 0, (24, 1))).astype(np.float32)
    values[:4] = np.abs(values[:4])
    values[4:8, ::3], values[4:8, 40:72] = 0, 0
    return encode_blocks(kind, values, None).codes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", RECOVERED_TYPES)
def test_all_blocks_are_found_again(kind: str, dtype: str) -> None:
    values = stored(decoded(kind, encoded(kind)), dtype)
    blocks, found = recover_blocks(kind, values, dtype)
    assert found.all()
    assert stored(decoded(kind, blocks), dtype).tobytes() == values.tobytes()  # the signs of zeros, too


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HALVES)
def test_any_codes_with_scales_or_offsets_of_both_signs_are_found_again(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (500, BLOCK_TYPES[kind].block_bytes)).astype(np.uint8)
    scales = 10.0 ** rng.uniform(-3, -1, 500) * (1 if len(HALVES[kind]) > 1 else rng.choice([-1, 1], 500))
    for place in HALVES[kind]:
        blocks[:, place : place + 2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
        scales *= rng.uniform(-32, 32, 500)
    values = stored(decoded(kind, blocks), dtype)
    again, found = recover_blocks(kind, values, dtype)
    assert found.all()
    assert stored(decoded(kind, again), dtype).tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.bits}-{rule.kind}-{rule.middle}-{rule.scale_dtype}")
def test_integers_of_groups_are_found_again(rule: GroupRule, dtype: str) -> None:
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 1 << rule.bits, (300, rule.group_size)).astype(np.uint8)
    scales = stored((10.0 ** rng.uniform(-3, -1, 300)).astype(np.float32), rule.scale_dtype)
    offsets = np.zeros(300, dtype=np.float32)
    if rule.zeros:
        offsets = rng.integers(0, 1 << rule.bits, 300).astype(np.float32)
    elif not rule.symmetric:
        scales *= rng.choice([-1, 1], 300).astype(np.float32)
        offsets = stored(scales * rng.uniform(-(1 << rule.bits), 0, 300).astype(np.float32), rule.scale_dtype)
    made = Groups(codes=codes, scales=scales, offsets=offsets, energies=np.zeros(300), errors=np.zeros(300))
    values = stored(rule.decode(made).reshape(-1), dtype)
    again, found = recover_groups(rule, values, dtype)
    assert found.all()
    assert np.array_equal(stored(rule.decode(again), dtype).reshape(-1), values)
    assert np.array_equal(again.scales, stored(again.scales, rule.scale_dtype))
    if rule.zeros:
        assert again.offsets.min() >= 0 and again.offsets.max() < 1 << rule.bits


@pytest.mark.parametrize("kind", RECOVERED_TYPES)
def test_blocks_that_are_not_on_the_grid_are_not_found(kind: str) -> None:
    """Blocks in which weights were changed, or are NaN, infinite or no number of the dtype, and a block of zeros."""
    size = BLOCK_TYPES[kind].group_size
    values = stored(decoded(kind, encoded(kind)[-5:]), "BF16").reshape(5, size)
    values[0, 3] = np.abs(values[0]).max() * np.float32(1.0625)
    values[0, 4] = -values[0, 3] * np.float32(1.5)
    values[1, 7], values[2, 9], values[3, 0] = np.nan, np.inf, np.float32(1 / 3)
    values[4] = 0
    assert not recover_blocks(kind, values.reshape(-1), "BF16")[1].any()


@pytest.mark.parametrize("kind", RECOVERED_TYPES)
def test_equal_weights_are_on_a_grid(kind: str) -> None:
    """Of each sign, where the codes of a type have both."""
    values = np.repeat(np.array([0.0625, -1.5], dtype=np.float32), BLOCK_TYPES[kind].group_size)
    blocks, found = recover_blocks(kind, values, "BF16")
    assert found.all() and np.array_equal(stored(decoded(kind, blocks), "BF16"), values)


@pytest.mark.parametrize("kind", RECOVERED_TYPES)
def test_weights_of_a_normal_distribution_are_not_on_a_grid(kind: str) -> None:
    values = np.random.default_rng(6).standard_normal(100 * 256, dtype=np.float32)
    assert not recover_blocks(kind, stored(values, "BF16"), "BF16")[1].any()
