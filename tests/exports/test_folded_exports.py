"""Exports of folded models: outlier channels do little harm, and each way to the folded original stores the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from folding_models import rewritten
from helpers import Array, Tensor, as_float32, bf16, read_all, run_command

from pqweights.inference.runtimes.models import open_model
from pqweights.rewrite.results.verify import verify

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")
IDS = np.random.default_rng(0).integers(3, 128, 48)
TARGETS = ("torchao", "vllm", "mlx")


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
    return {name: bf16(value) for name, value in values.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with outlier channels, its master, and its folded master."""
    import torch

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


@pytest.fixture(scope="module")
def export(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make an export once. master: master or folded; source: whether with the original"""
    done: dict[str, Path] = {}

    def export(target: str, master: str, *, source: bool = False, **options: Any) -> Path:
        key = f"{target} {master} {source} {options}"
        if key not in done:
            done[key] = tmp_path_factory.mktemp("exports") / target
            work = {"export": str(folder / master), "target": target, "group_size": 64, **options}
            run_command(work | ({"original": str(folder / "src")} if source else {}), done[key])
        return done[key]

    return export


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("target", "master", "source"),
    [
        ("vllm", "folded", False),
        ("torchao", "master", False),
        ("mlx", "master", False),
        ("vllm", "master", True),
        ("mlx", "folded", True),
        ("torchao", "folded", True),
    ],
)
def test_outlier_channels_do_little_harm(
    target: str, master: str, source: bool, folder: Path, export: Callable[..., Path]
) -> None:
    fold = {"fold": "equalize"} if master == "master" else {}
    out = export(target, master, source=source, **fold)
    assert verify(out, threads=1).ok

    def logits(path: Path) -> Array:
        return open_model(path).logits(IDS, len(IDS))

    expected = logits(folder / "src")
    folded, plain = (np.linalg.norm(logits(path) - expected) for path in (out, export(target, "master", source=source)))
    assert folded < plain / 3


@pytest.mark.parametrize("target", TARGETS)
def test_both_ways_to_the_folded_original_store_the_same(target: str, export: Callable[..., Path]) -> None:
    """A folded master folds its original as `export --fold --source` does, if both keep the same tensors plain."""
    found = read_all(export(target, "folded", source=True))
    expected = read_all(export(target, "master", source=True, fold="equalize"))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name][1], expected[name][1]) for name in found)
