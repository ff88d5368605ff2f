"""pqweights calibrate: its scales lower the error of the master, and the report says what they gain."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from closeness import approx
from commands import done, refused
from helpers import read_all
from safetensors.numpy import load_file
from typer.testing import Result

from pqweights.inference.runtimes.models import open_model
from pqweights.quality.protocol import Windows, compare

TOKENS = np.random.default_rng(11).integers(0, 500, 3000)


def text(tokens: int) -> str:
    return " ".join(f"w{number}" for number in TOKENS[:tokens])


def outlier_model(folder: Path) -> Path:
    """A narrow Llama with channels of outliers: scales are moved from weights to the norms before them."""

    def with_outliers(model: Any) -> None:
        import torch

        torch.manual_seed(3)
        (layer,) = model.model.layers
        for norm, linear in (
            (layer.input_layernorm, [getattr(layer.self_attn, f"{name}_proj") for name in "qkv"]),
            (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
        ):
            sizes = torch.exp(1.3 * torch.randn(norm.weight.shape[0]))
            norm.weight.data.mul_(sizes.to(norm.weight.dtype))
            for reader in linear:
                reader.weight.data.div_(sizes.to(reader.weight.dtype))

    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
    return families.build(short("llama", **sizes), folder, with_outliers)


def short(family: str, **sizes: int) -> families.Family:
    """A family that takes windows of 64 tokens."""
    known = families.FAMILIES[family]
    return replace(known, settings={**known.settings, "max_position_embeddings": 64, **sizes})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outlier_model(tmp_path_factory.mktemp("outliers") / "model")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """A text, and how much of it is read."""
    path = tmp_path_factory.mktemp("texts") / "long.txt"
    path.write_text(text(3000))
    return "--text", path, "--tokens", 2048, "--threads", 1


@pytest.fixture(scope="module")
def calibrated(
    source: Path, asked: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("scales") / "scales.safetensors"
    return out, done("calibrate", source, out, *asked, "--bits", 3)


def test_command_prints_the_gain_of_each_layer(calibrated):
    _, result = calibrated
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.startswith(("model.", "lm_head"))}
    assert len(lines) == 2 + 7
    assert "no product of activations" in lines["model.embed_tokens.weight"]
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj"):
        assert "%" in lines[f"model.layers.0.{name}.weight"]
    # 32 windows of 64, every fourth held back
    assert "searched on 1536 tokens and checked on another 512" in result.stdout
    assert "Loading" not in result.stderr


@pytest.fixture(scope="module")
def masters(source: Path, calibrated: tuple[Path, Result], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the masters plain and scaled."""
    folder = tmp_path_factory.mktemp("masters")
    done("quantize", source, folder / "plain", "--bits", 3)
    done("quantize", source, folder / "scaled", "--bits", 3, "--awq", calibrated[0])
    return folder


def test_scales_halve_the_divergence_on_unseen_text(source, masters):
    unseen = np.random.default_rng(12).integers(0, 500, 600)
    reference = open_model(source)
    found = {
        name: compare(
            open_model(masters / name), reference, ids=unseen, windows=Windows(size=128, stride=64)
        ).divergence
        for name in ("plain", "scaled")
    }
    assert found["scaled"].mean.value < 0.5 * found["plain"].mean.value


def test_output_is_deterministic_and_matches_the_json_report(source, asked, calibrated, tmp_path):
    out = tmp_path / "again.safetensors"
    report = reported("calibrate", source, out, *asked, "--bits", 3)
    assert out.read_bytes() == calibrated[0].read_bytes()
    assert (report["tokens"], report["held_back_tokens"]) == (1536, 512)
    stored = load_file(out)
    scaled = {name for name, weight in report["weights"].items() if weight["scaled"]}
    assert {name.removesuffix("_awq_scale") for name in stored} == scaled
    weights = sum(values[1].size for name, values in read_all(source).items() if name in report["weights"])
    assert report["bits_per_weight"] == approx(16 * sum(values.size for values in stored.values()) / weights)
    for matrix in (matrix for weight in report["weights"].values() for matrix in weight["matrices"]):
        assert matrix["scaled"] == (not matrix["reason"])
        assert not matrix["scaled"] or min(matrix["gain"], matrix["held_back_gain"]) >= 0.01


def reported(*arguments: object) -> Any:
    """The document that a command prints; slow machines also print progress."""
    return json.loads(done(*arguments, "--json").stdout)


def test_experts_with_few_tokens_are_named(asked, tmp_path):
    moe = families.build(short("qwen3_moe", num_experts=16), tmp_path / "moe")
    options = ("--keep", "*self_attn*", "--keep", "lm_head*")
    report = reported("calibrate", moe, tmp_path / "s.safetensors", *asked, *options)
    experts = [m for name, w in report["weights"].items() if ".experts." in name for m in w["matrices"]]
    few = [m for m in experts if "held back from" in m["reason"]]
    assert experts and few
    assert not any(m["scaled"] for m in few)
    assert all("256 tokens" in m["reason"] for m in few)


def test_recipe_with_a_target_is_refused(source, asked, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("target_bpw: 4")
    message = refused("calibrate", source, tmp_path / "s.safetensors", *asked, "--recipe", recipe)
    assert "expected given widths, because scales are searched for them; found a target" in message


def test_few_windows_are_refused(tmp_path, tmp_path_factory, asked):
    message = refused("calibrate", families.model(tmp_path_factory.getbasetemp(), "llama"), tmp_path / "s", *asked)
    assert "the sample: expected at least 4096 tokens, 16 windows of 256, found 2048; take more tokens" in message
    assert list(tmp_path.iterdir()) == []
