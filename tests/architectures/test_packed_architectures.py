"""Packed weights where architectures treat them in a way of their own: generation, rescaling, towers, stacks."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from building import build, check_packed, computed, open_master
from closeness import assert_near, assert_within
from helpers import run_command
from known_architectures import ARCHITECTURES, Architecture
from shared import made_once, run_folder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

# The default policy keeps vision towers.
RECIPE = "{bits: 6, rules: [{role: vision, bits: 6}]}"
WITH_IMAGES = ("clip", "beit", "dinov2", "swin", "blip")


def changed(name: str, **settings: object) -> Architecture:
    """An architecture of the table with other settings."""
    about = ARCHITECTURES[name]
    return replace(about, settings=about.settings | settings)


SOME = {
    "gpt2": ARCHITECTURES["gpt2"],
    "llama4_text": ARCHITECTURES["llama4_text"],
    "rwkv": changed("rwkv", num_hidden_layers=3, rescale_every=1),
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@functools.cache
def master(base: Path, name: str) -> Path:
    """Return a master of one of SOME, made once for all workers."""

    def make(folder: Path) -> None:
        build(SOME[name], folder / "model")
        run_command({"quantize": str(folder / "model"), "recipe": "q6"}, folder / "master")

    return made_once(run_folder(base) / "some" / name, make) / "master"


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_quantized_vision_towers_stay_packed(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    build(ARCHITECTURES[name], tmp_path / "model")
    run_command({"quantize": str(tmp_path / "model"), "recipe": str(recipe)}, tmp_path / "master")
    decoded = open_master(tmp_path / "master", dtype="float32")
    check_packed(ARCHITECTURES[name], tmp_path / "master", decoded, computed(ARCHITECTURES[name], decoded))


@pytest.mark.parametrize("name", SOME)
def test_generation_matches_the_decoded_model(name: str, base: Path) -> None:
    decoded, packed = (open_master(master(base, name), dtype="float32", packed=packed) for packed in (False, True))
    assert_near(computed(SOME[name], packed), computed(SOME[name], decoded), "torch")
    ids = torch.tensor([[5, 77, 3]])
    one, other = (model.generate(ids, max_new_tokens=8, do_sample=False) for model in (packed, decoded))
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", SOME)
def test_bfloat16_is_as_close_to_float32_as_in_the_decoded_model(name: str, base: Path) -> None:
    """A decoded weight was rounded to BF16, a packed one was not; the activations of both are."""
    exact = computed(SOME[name], open_master(master(base, name), dtype="float32"))
    errors = []
    for packed in (False, True):
        made = computed(SOME[name], open_master(master(base, name), dtype="bfloat16", packed=packed))
        errors.append(((made - exact) ** 2).mean() ** 0.5)
        assert_within(errors[-1] / (exact**2).mean() ** 0.5, "torch, BF16")
    assert errors[1] <= 1.25 * errors[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_that_rwkv_rescales_are_those_of_the_decoded_model(dtype: str, base: Path) -> None:
    """RWKV divides weights by powers of two before it computes, and multiplies them again before it is trained."""
    decoded, packed = (open_master(master(base, "rwkv"), dtype=dtype, packed=packed) for packed in (False, True))
    scaled = "rwkv.blocks.2.attention.output.weight"
    before = decoded.get_parameter(scaled).clone()
    for model in (decoded, packed):
        computed(SOME["rwkv"], model)
    assert torch.equal(packed.get_parameter(scaled).decode(), decoded.get_parameter(scaled))
    assert torch.equal(decoded.get_parameter(scaled) * 4, before)
    packed.train()
    computed(SOME["rwkv"], packed)
    assert torch.equal(packed.get_parameter(scaled).decode(), before)


def test_stack_whose_blocks_hold_parts_of_two_experts_stays_packed(tmp_path: Path) -> None:
    about = changed("llama4_text", hidden_size=72, intermediate_size=20)
    build(about, tmp_path / "model")
    run_command({"quantize": str(tmp_path / "model")}, tmp_path / "master")
    decoded, packed = (open_master(tmp_path / "master", dtype="float32", packed=packed) for packed in (False, True))
    assert not any("experts" in name for name in packed.hf_quantizer.decoded_weights)
    assert_near(computed(about, packed), computed(about, decoded), "torch")
