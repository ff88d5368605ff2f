"""quantize --awq: scales lower the error of the master, and report and manifest say what they gain."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from commands import done, refused
from helpers import as_float32, folder_bytes, read_all

from pqweights.formats import get_codec
from pqweights.formats.weight import encode_weight
from pqweights.runtime.models import open_model
from pqweights.runtime.protocol import TextWindows, compare

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
    return "--awq", path, "--calibration-tokens", 2048, "--threads", 1


@pytest.fixture(scope="module")
def masters(source: Path, asked: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the masters plain and scaled."""
    folder = tmp_path_factory.mktemp("masters")
    done("quantize", source, folder / "plain", "--bits", 3)
    made = done("quantize", source, folder / "scaled", "--bits", 3, *asked)
    assert (
        "searched on 1536 tokens and checked on another 512" in made.stdout
    )  # 32 windows of 64, every fourth held back
    assert "Loading" not in made.stderr and sorted(path.name for path in folder.iterdir()) == ["plain", "scaled"]
    return folder


def test_inspect_shows_the_gain_of_each_layer(masters):
    text = done("inspect", masters / "scaled").stdout
    _, _, found = text.partition("gain held back")
    lines = {line.split()[0]: line for line in found.splitlines() if line.startswith(("model.", "lm_head"))}
    assert len(lines) == 2 + 7
    assert lines["model.embed_tokens.weight"].split()[1:] == ["0", "no"]
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj"):
        assert "%" in lines[f"model.layers.0.{name}.weight"]


def test_scales_halve_the_divergence_on_unseen_text(source, masters):
    unseen = np.random.default_rng(12).integers(0, 500, 600)
    reference = open_model(source)
    found = {
        name: compare(
            open_model(masters / name), reference, ids=unseen, windows=TextWindows(size=128, stride=64)
        ).divergence
        for name in ("plain", "scaled")
    }
    assert found["scaled"].mean.value < 0.5 * found["plain"].mean.value


def test_output_is_deterministic_and_matches_the_json_report(source, asked, masters, tmp_path):
    out = tmp_path / "again"
    report = reported("quantize", source, out, "--bits", 3, *asked)
    assert folder_bytes(out) == folder_bytes(masters / "scaled")
    found = report["awq"]
    assert (found["tokens"], found["held_back_tokens"]) == (1536, 512)
    stored = read_all(out)
    scaled = {name for name, weight in found["weights"].items() if weight["scaled"]}
    assert {name.removesuffix("_awq_scale") for name in stored if name.endswith("_awq_scale")} == scaled
    for matrix in (matrix for weight in found["weights"].values() for matrix in weight["matrices"]):
        assert matrix["scaled"] == (not matrix["reason"])
        assert not matrix["scaled"] or min(matrix["gain"], matrix["held_back_gain"]) >= 0.01
    # a finished result is not searched again
    again = reported("quantize", source, out, "--bits", 3, *asked)
    assert again["already_done"] and folder_bytes(out) == folder_bytes(masters / "scaled")


def test_codes_are_those_of_the_weights_times_the_scales(source, masters):
    """As encode_weight makes them, which knows nothing of the search."""
    stored, tensors = read_all(masters / "scaled"), read_all(source)
    for name in (name for name in tensors if name + "_awq_scale" in stored):
        scaled = np.ascontiguousarray(as_float32(tensors[name]) * stored[name + "_awq_scale"][1].astype(np.float32))
        format = get_codec("hadamard-lloyd-max").at(3)
        raw = scaled.view(np.uint8).reshape(-1)
        parts, _ = encode_weight(raw, dtype="F32", shape=scaled.shape, format=format)
        for suffix, part in zip(("_codes", "_norms"), parts, strict=True):
            assert stored[name + suffix][1].tobytes() == part.tobytes()


def reported(*arguments: object) -> Any:
    """The document that a command prints; slow machines also print progress."""
    return json.loads(done(*arguments, "--json").stdout)


def test_experts_with_few_tokens_are_named(asked, tmp_path):
    moe = families.build(short("qwen3_moe", num_experts=16), tmp_path / "moe")
    options = ("--keep", "*self_attn*", "--keep", "lm_head*")
    report = reported("quantize", moe, tmp_path / "out", *asked, *options)["awq"]
    experts = [m for name, w in report["weights"].items() if ".experts." in name for m in w["matrices"]]
    few = [m for m in experts if "held back from" in m["reason"]]
    assert experts and few
    assert not any(m["scaled"] for m in few)
    assert all("256 tokens" in m["reason"] for m in few)


def test_scales_are_searched_for_the_widths_of_a_target(source, asked, tmp_path):
    report = reported("quantize", source, tmp_path / "out", *asked, "--target-size", "120kB")
    planned = {tensor["name"]: tensor["bits"] for tensor in reported("inspect", tmp_path / "out")["tensors"]}
    assert len({weight["bits"] for weight in report["awq"]["weights"].values()}) > 1
    assert {name: weight["bits"] for name, weight in report["awq"]["weights"].items()}.items() <= planned.items()
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) <= 120_000


def test_few_windows_are_refused(tmp_path, tmp_path_factory, asked):
    message = refused("quantize", families.model(tmp_path_factory.getbasetemp(), "llama"), tmp_path / "s", *asked)
    assert "4096 tokens" in message and "2048" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--calibrate", "--awq"])
def test_a_source_that_is_not_there_is_called_so(option: str, tmp_path: Path) -> None:
    line = refused("quantize", tmp_path / "none", tmp_path / "out", option, "self", "-r", "t4")
    assert "no such file" in line and not list(tmp_path.iterdir())
