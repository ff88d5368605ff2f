"""A type of model that only the tests know, with names of its own, works everywhere with one row of the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import done, raises
from export_decoders import values_of
from gguf_files import CONFIG, converted, llama_tensors, metadata
from helpers import Tensor, as_float32, bf16, gaussian, run_command, write_checkpoint
from integer_exports import integer_names

from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.convert.manifest import read_manifest
from pqweights.errors import ExportError
from pqweights.models.conventions import FUSED, FusedLayer
from pqweights.models.description import ModelDescription
from pqweights.models.llama_cpp import QKV, SILU_ONLY, Architecture
from pqweights.models.table import MODELS
from pqweights.models.traits import Trait
from pqweights.planning.decisions import rate_planner
from pqweights.planning.recipe import load_recipe
from pqweights.planning.sensitivity import groups_of
from pqweights.targets.linear import FUSED_WITH_KEPT

NAME = "quokka"
# Its modules, and what Llama calls them.
MODULES = {
    "ln_in": "input_layernorm", "mix.ask": "self_attn.q_proj", "mix.offer": "self_attn.k_proj",
    "mix.tell": "self_attn.v_proj", "mix.blend": "self_attn.o_proj", "ln_mid": "post_attention_layernorm",
    "hop.open": "mlp.gate_proj", "hop.wide": "mlp.up_proj", "hop.narrow": "mlp.down_proj",
}  # fmt: skip
ROW = ModelDescription(
    llama_cpp=Architecture(name="QWEN3", modules=MODULES, biases=QKV, values=SILU_ONLY),
    roles={"sieve": "router", "board": "embedding", "ask|offer|tell|blend": "attention"},
    fused=(*FUSED, FusedLayer("ask|offer|tell", "mixed"), FusedLayer("open|wide", "hopped")),
    defaults={"num_key_value_heads": 1, "use_sliding_window": False},
    traits=frozenset({Trait.ZERO_CENTRED_NORMS, Trait.EXAMINED}),
)


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, NAME, ROW)


def tensors() -> dict[str, Tensor]:
    """Those of a tiny model."""
    result = {}
    for name, tensor in llama_tensors().items():
        own = next((own for own, llama in MODULES.items() if f".{llama}." in name), "")
        result[name.replace(MODULES[own], own) if own else name] = tensor
    return result


def written(folder: Path, **others: Tensor) -> Path:
    config = {key: value for key, value in CONFIG.items() if key not in ("num_key_value_heads", "architectures")}
    return write_checkpoint(folder, tensors() | others, config={**config, "model_type": NAME})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """One that also has routers."""
    sieve = {f"model.layers.{layer}.hop.sieve.weight": bf16(gaussian(64, 64, seed=layer)) for layer in range(2)}
    return open_local(written(tmp_path / "src", **sieve))


def test_its_roles_decide_what_is_quantized(checkpoint: Checkpoint) -> None:
    planned = {tensor.name: tensor for tensor in rate_planner(checkpoint, load_recipe("q5")).planned({})}
    assert planned["model.layers.0.hop.sieve.weight"].role == "router"
    assert planned["model.layers.0.hop.sieve.weight"].bits is None
    assert {planned[f"model.layers.0.mix.{name}.weight"].role for name in ("ask", "blend")} == {"attention"}
    assert planned["model.layers.0.hop.wide.weight"].role == "linear"


def test_its_fused_layers_share_bits(checkpoint: Checkpoint) -> None:
    groups = groups_of(checkpoint, [(tensor.name, "linear") for tensor in checkpoint.tensors])
    mixed = groups["model.layers.0.mix.mixed"]
    assert mixed == [f"model.layers.0.mix.{name}.weight" for name in ("ask", "offer", "tell")]
    assert len(groups["model.layers.1.hop.hopped"]) == 2 and len(groups["model.layers.1.hop.narrow"]) == 1


def test_its_fused_layers_stay_plain_together(tmp_path: Path) -> None:
    modules = ("mix.ask", "mix.offer", "mix.tell", "mix.blend", "hop.board")
    names = [f"model.layers.0.{name}.weight" for name in modules]
    weights = {name: bf16(gaussian(64, 128, seed=place)) for place, name in enumerate(names)}
    write_checkpoint(tmp_path / "src", weights, config={"model_type": NAME, "dtype": "bfloat16"})
    done("quantize", tmp_path / "src", tmp_path / "master", "--keep", "*.offer.weight")
    report = run_command({"export": str(tmp_path / "master"), "target": "vllm"}, tmp_path / "out")
    assert integer_names(tmp_path / "out") == [names[3]]
    reasons = {tensor.name: tensor.reason for tensor in read_manifest(tmp_path / "out").tensors}
    assert (reasons[names[0]], reasons[names[2]]) == (FUSED_WITH_KEPT, FUSED_WITH_KEPT)
    assert reasons[names[4]] == "embedding: the runtime does not quantize it"
    assert not any("nobody has examined" in line for line in report.warnings)


@pytest.mark.parametrize("target", ["bf16", "vllm"])
def test_exports_state_its_roles(target: str, tmp_path: Path) -> None:
    weights = {
        f"model.layers.0.{name}.weight": bf16(gaussian(64, 128)) for name in ("mix.ask", "hop.board", "hop.open")
    }
    write_checkpoint(tmp_path / "src", weights, config={"model_type": NAME, "dtype": "bfloat16"})
    run_command({"quantize": str(tmp_path / "src")}, tmp_path / "master")
    run_command({"export": str(tmp_path / "master"), "target": target}, tmp_path / "out")
    roles = {tensor.name: tensor.role for tensor in read_manifest(tmp_path / "out").tensors}
    assert roles == dict(zip(weights, ("attention", "embedding", "linear"), strict=True))


def test_targets_refuse_what_its_traits_rule_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, NAME, replace(ROW, traits=ROW.traits | {Trait.RENAMED}))
    weights = {"model.layers.0.mix.ask.weight": bf16(gaussian(128, 128))}
    write_checkpoint(tmp_path / "src", weights, config={"model_type": NAME, "dtype": "bfloat16"})
    run_command({"quantize": str(tmp_path / "src")}, tmp_path / "master")
    with raises(ExportError, NAME, "--target vllm or bf16"):
        run_command({"export": str(tmp_path / "master"), "target": "torchao"}, tmp_path / "out")


def test_llama_cpp_gets_its_own_names_for_its_tensors(tmp_path: Path) -> None:
    model = converted(written(tmp_path))
    assert model.architecture == "qwen3" and metadata(model)["qwen3.attention.head_count_kv"] == 1
    found = {tensor.name: tensor for tensor in model.tensors}
    of_layer = (
        "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"
    )  # fmt: skip
    expected = {f"blk.{layer}.{name}.weight" for layer in range(2) for name in of_layer}
    assert found.keys() == expected | {"token_embd.weight", "output_norm.weight", "output.weight"}
    norm = as_float32(tensors()["model.layers.1.ln_mid.weight"])
    assert np.array_equal(values_of(found["blk.1.ffn_norm.weight"]), norm + np.float32(1))
