"""Packed weights over the architectures of transformers: the output of the decoded model, in the size of the master."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from helpers import run_command
from shared import made_once, run_folder
from tiny_models import TINY_MODELS, output_of, save_tiny_model

import pqweights
from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import open_local

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

import torch  # noqa: E402

from pqweights.integrations.packed import PackedTensor  # noqa: E402

# The default policy keeps vision towers.
RECIPE = "{bits: 6, rules: [{role: vision, bits: 6}]}"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@functools.cache
def master(base: Path, name: str) -> Path:
    """Return a master of a tiny model, made once for all workers."""

    def make(folder: Path) -> None:
        recipe = folder / "recipe.yaml"
        save_tiny_model(name, folder / "model")
        recipe.write_text(RECIPE)
        run_command({"quantize": str(folder / "model"), "recipe": str(recipe)}, folder / "master")

    return made_once(run_folder(base) / "tiny" / name, make) / "master"


def load(folder: Path, **options: Any) -> Any:
    return pqweights.load_model(folder, experts_implementation="eager", **options)


def memory(model: Any) -> tuple[int, int]:
    """Return the bytes of packed and of ordinary parameters and buffers."""
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}.values()
    packed = sum(tensor.stored_bytes for tensor in tensors if isinstance(tensor, PackedTensor))
    plain = sum(tensor.numel() * tensor.element_size() for tensor in tensors if not isinstance(tensor, PackedTensor))
    return packed, plain


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the codes and norms of a master."""
    return sum(
        part.byte_count
        for tensor in open_local(folder).tensors
        if isinstance(tensor, EncodedTensor)
        for part in tensor.parts
    )


@pytest.mark.parametrize("name", TINY_MODELS)
def test_packed_model_matches_the_decoded_model_in_the_size_of_the_codes(name: str, base: Path) -> None:
    folder = master(base, name)
    decoded, packed = load(folder, dtype="float32"), load(folder, dtype="float32", packed=True)
    in_codes, plain = memory(packed)
    expected = output_of(decoded)
    # The matrices are the same, but torch may add up products in another order for fewer rows.
    assert (output_of(packed) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert packed.hf_quantizer.decoded_weights == ()
    assert in_codes == stored_bytes(folder)
    quantized = {name for name, tensor in packed.named_parameters() if isinstance(tensor, PackedTensor)}
    kept = {
        id(tensor): tensor.numel() * tensor.element_size()
        for name, tensor in [*decoded.named_parameters(remove_duplicate=False), *decoded.named_buffers()]
        if name not in quantized
    }
    assert plain <= sum(kept.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["gpt2", "llama4", "rwkv"])
def test_generation_matches_the_decoded_model(name: str, dtype: str, base: Path) -> None:
    decoded, packed = (load(master(base, name), dtype=dtype, packed=each) for each in (False, True))
    assert (output_of(packed) - output_of(decoded)).abs().max() <= (1e-5 if dtype == "float32" else 2.0**-6)
    ids = torch.tensor([[5, 77, 3]])
    one, other = (model.generate(ids, max_new_tokens=8, do_sample=False) for model in (packed, decoded))
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_that_rwkv_rescales_are_those_of_the_decoded_model(dtype: str, base: Path) -> None:
    """RWKV divides weights by powers of two before it computes, and multiplies them again before it is trained."""
    decoded, packed = (load(master(base, "rwkv"), dtype=dtype, packed=each) for each in (False, True))
    scaled = "rwkv.blocks.2.attention.output.weight"
    before = decoded.get_parameter(scaled).clone()
    for model in (decoded, packed):
        output_of(model)
    assert torch.equal(packed.get_parameter(scaled).decode(), decoded.get_parameter(scaled))
    assert torch.equal(decoded.get_parameter(scaled) * 4, before)
    packed.train()
    output_of(packed)
    assert torch.equal(packed.get_parameter(scaled).decode(), before)


def test_stack_whose_blocks_hold_parts_of_two_experts_is_decoded(tmp_path: Path) -> None:
    import transformers

    config = transformers.Llama4TextConfig(**{**TINY_MODELS["llama4"][1], "hidden_size": 72, "intermediate_size": 20})
    transformers.Llama4ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    run_command({"quantize": str(tmp_path / "model")}, tmp_path / "master")
    decoded, packed = load(tmp_path / "master"), load(tmp_path / "master", packed=True)
    (*_, down) = packed.hf_quantizer.decoded_weights
    assert down.endswith("experts.gate_up_proj")
    assert torch.equal(output_of(packed), output_of(decoded))
