"""Exports of folded models: each runtime computes with the decoded weights, and outlier channels do little harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_decoders import export_weight
from folding_models import rewritten
from helpers import Array, Tensor, as_float32, bf16, f32, read_all, run_command, write_checkpoint
from integer_exports import integer_names

from pqweights.inference.runtimes.models import open_model
from pqweights.rewrite.manifest import read_manifest
from pqweights.rewrite.results.verify import verify

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")
IDS = np.random.default_rng(0).integers(3, 128, 48)
TARGETS: dict[str, dict[str, Any]] = {
    "torchao-int4": {"group_size": 64},
    "vllm": {"group_size": 64},
    "mlx": {"group_size": 64},
}
# What is exported with which options: master or folded master, --fold, --source.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "folded master": ("folded", {}),
    "master, --fold": ("master", {"fold": "equalize"}),
    "master, --fold --source": ("master", {"fold": "equalize", "original": True}),
    "folded master, --source": ("folded", {"original": True}),
}
LAYERS = 2
NORMS = {"input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
NORMS |= {"post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")}


def with_outliers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same function with a few channels of the norms' outputs, of values and of the MLP 64 times as large."""
    values = {name: as_float32(tensor).copy() for name, tensor in tensors.items()}
    random = np.random.default_rng(7)

    def some(count: int) -> Array:
        return np.where(random.random(count) < 0.05, np.float32(64), np.float32(1))

    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm, readers in NORMS.items():
            factors = some(128)
            values[f"{prefix}.{norm}.weight"] /= factors
            for reader in readers:
                values[f"{prefix}.{reader}.weight"] *= factors
        factors = some(256)
        values[f"{prefix}.mlp.up_proj.weight"] /= factors[:, None]
        values[f"{prefix}.mlp.down_proj.weight"] *= factors
        factors = some(64)
        values[f"{prefix}.self_attn.v_proj.weight"] /= factors[:, None]
        values[f"{prefix}.self_attn.o_proj.weight"] *= np.tile(factors.reshape(2, 1, 32), (1, 2, 1)).reshape(-1)
    return {name: bf16(each) for name, each in values.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with outlier channels, its master, and its folded master."""
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("folded")
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128}
    config = transformers.LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, initializer_range=0.05)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "plain")
    rewritten(folder / "plain", folder / "src", with_outliers(read_all(folder / "plain")))
    run_command({"quantize": str(folder / "src"), "recipe": "q8"}, folder / "master")
    run_command({"quantize": str(folder / "src"), "recipe": "q8", "fold": "equalize"}, folder / "folded")
    return folder


def logits(path: Path) -> Array:
    return open_model(path).logits(IDS, len(IDS))


def distance(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def decoded(exported: Path) -> Path:
    """Write a plain float32 checkpoint of what an export holds."""
    config = json.loads((exported / "config.json").read_bytes())
    config = {key: value for key, value in config.items() if not key.startswith("quantization")} | {"dtype": "float32"}
    integers, stored = integer_names(exported), read_all(exported)
    planned = {tensor.name for tensor in read_manifest(exported).tensors}
    decode = export_weight(exported)
    tensors = {name: f32(decode(name)) for name in integers}
    tensors |= {name: f32(as_float32(stored[name])) for name in planned - set(integers)}
    return write_checkpoint(exported.with_name(f"{exported.name}-decoded"), tensors, config=config)


@pytest.fixture(scope="module")
def export(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    done: dict[str, Path] = {}

    def export(target: str, master: str, **options: Any) -> Path:
        key = f"{target} {master} {sorted(options)}"
        if key not in done:
            done[key] = tmp_path_factory.mktemp("exports") / target
            if options.get("original"):
                options["original"] = str(folder / "src")
            work = {"export": str(folder / master), "target": target, **TARGETS[target], **options}
            run_command(work, done[key])
        return done[key]

    return export


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("target", "way"),
    [
        ("vllm", "folded master"),
        ("torchao-int4", "master, --fold"),
        ("mlx", "master, --fold"),
        ("vllm", "master, --fold --source"),
        ("mlx", "folded master, --source"),
        ("torchao-int4", "folded master, --source"),
    ],
)
def test_runtime_computes_with_the_decoded_weights_and_outliers_do_little_harm(
    target: str, way: str, folder: Path, export: Callable[..., Path]
) -> None:
    if target == "mlx":
        pytest.importorskip("mlx_lm")
    master, options = WAYS[way]
    out = export(target, master, **options)
    assert verify(out, threads=1).ok
    found, original = logits(out), logits(folder / "src")
    assert distance(found, logits(decoded(out))) < 1e-5
    unfolded = export(target, "master", **({"original": True} if options.get("original") else {}))
    assert distance(found, original) < distance(logits(unfolded), original) / 3


def test_folded_master_computes_the_same(folder: Path) -> None:
    found, original = logits(folder / "folded"), logits(folder / "src")
    assert distance(found, original) < 0.05
    assert verify(folder / "folded", threads=1).ok


@pytest.mark.parametrize("target", TARGETS)
def test_both_ways_to_the_folded_original_store_the_same(target: str, export: Callable[..., Path]) -> None:
    """A folded master folds its original as `export --fold --source` does, if both keep the same tensors plain."""
    found = read_all(export(target, "folded", original=True))
    expected = read_all(export(target, "master", fold="equalize", original=True))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name][1], expected[name][1]) for name in found)
