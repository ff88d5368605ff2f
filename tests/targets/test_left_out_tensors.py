"""Tensors that no model has a place for: left out where a runtime would refuse them, and by name where asked."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import done, refused
from gguf_files import CONFIG, llama_tensors
from helpers import bf16, gaussian, read_all, write_checkpoint
from language_models import VOCABULARY, with_tokenizer

SIZES = CONFIG | {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"vocab_size": VOCABULARY}
ATTENTION = "model.layers.0.self_attn"
LEFTOVERS: dict[str, Any] = {
    f"{ATTENTION}.k_scale": bf16(np.ones(1)),
    f"{ATTENTION}.v_scale": ("F32", np.ones((), np.float32)),
    f"{ATTENTION}.q_proj.weight_quantizer._amax": ("F32", np.ones((256, 1), np.float32)),
    f"{ATTENTION}.rotary_emb.inv_freq": ("F32", np.ones(32, np.float32)),
    f"{ATTENTION}.masked_bias": ("F32", np.ones((), np.float32)),
    f"{ATTENTION}.bias": ("BOOL", np.ones((1, 1, 8, 8), np.uint8)),
    "model.position_ids": ("I64", np.arange(8)[None]),
}
TARGETS = {"gguf": ("--type", "q8_0"), "mlx": ("--format", "q8"), "vllm": ("--format", "w8a16"), "bf16": ()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with leftovers, and with a tensor that nobody knows."""
    tensors = llama_tensors(VOCABULARY, SIZES) | LEFTOVERS | {"optimizer.state.0.exp_avg": bf16(gaussian(64, 64))}
    return with_tokenizer(write_checkpoint(tmp_path_factory.mktemp("leftovers") / "source", tensors, config=SIZES))


def targets() -> list[str]:
    return [name for name in TARGETS if name != "mlx" or importlib.util.find_spec("mlx_lm")]


def left_out(folder: Path) -> set[str]:
    return set(json.loads((folder / "pqweights.json").read_text()).get("left_out", {}))


def test_known_leftovers_do_not_stop_an_export_and_are_named(source: Path, tmp_path: Path) -> None:
    done("quantize", source, tmp_path / "master", "--leave-out", "optimizer.*")
    assert left_out(tmp_path / "master") == {"optimizer.state.0.exp_avg"}
    for target in targets():
        text = done("export", tmp_path / "master", tmp_path / target, "--target", target, *TARGETS[target]).stdout
        if target in ("gguf", "mlx"):
            assert left_out(tmp_path / target) >= LEFTOVERS.keys()
            assert "left out" in text


@pytest.mark.parametrize("target", TARGETS)
def test_an_export_leaves_out_what_it_is_asked_to(target: str, source: Path, tmp_path: Path) -> None:
    if target not in targets():
        return
    done("quantize", source, tmp_path / "master")
    options = ("--target", target, *TARGETS[target], "--leave-out", "optimizer.*", "--leave-out", "*.k_scale")
    done("export", tmp_path / "master", tmp_path / "out", *options)
    assert left_out(tmp_path / "out") >= {"optimizer.state.0.exp_avg", f"{ATTENTION}.k_scale"}
    assert done("verify", tmp_path / "out").exit_code == 0
    if target != "gguf":
        assert not read_all(tmp_path / "out").keys() & {"optimizer.state.0.exp_avg", f"{ATTENTION}.k_scale"}


@pytest.mark.parametrize(
    ("target", "pattern", "missed"),
    [
        ("gguf", "*.q_proj.weight", "no layer has self_attn.q_proj"),
        ("bf16", "*.down_proj.weight", "no layer has mlp.down_proj"),
        ("bf16", "model.norm.weight", "the norm behind the last layer is not stored"),
        ("vllm", "model.layers.1.*", "config.json states 2 layers, but layer 1 is not stored"),
    ],
)
def test_a_tensor_that_the_model_needs_is_missed(
    target: str, pattern: str, missed: str, source: Path, tmp_path: Path
) -> None:
    """Results without it do not load, or compute with random values."""
    options = ("--target", target, *TARGETS[target], "--leave-out", "optimizer.*")
    assert missed in done("export", source, tmp_path / "out", *options, "--leave-out", pattern).stderr
    assert "WARNING" not in done("export", source, tmp_path / "whole", *options).stderr


@pytest.mark.parametrize("lossless", [(), ("--lossless",)])
def test_a_plan_says_what_is_left_out(lossless: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    planned = json.loads(done("plan", source, "--leave-out", "*.k_scale", *lossless, "--json").stdout)
    assert f"{ATTENTION}.k_scale" in planned["left_out_tensors"]
    done("quantize", source, tmp_path / "master", "--leave-out", "*.k_scale", *lossless)
    assert f"{ATTENTION}.k_scale" not in read_all(tmp_path / "master")
    assert done("verify", tmp_path / "master").exit_code == 0


@pytest.mark.parametrize("command", ["plan", "quantize", "export"])
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name(
    command: str, source: Path, tmp_path: Path
) -> None:
    if command == "export":
        done("quantize", source, tmp_path / "master")
        line = refused("export", tmp_path / "master", tmp_path / "out", "-t", "bf16", "--leave-out", "*.k_scael")
    else:
        line = refused(command, source, *([tmp_path / "out"] * (command == "quantize")), "--leave-out", "*.k_scael")
    assert "--leave-out" in line
    assert f"{ATTENTION}.k_scale" in line
    assert not (tmp_path / "out").exists()


def test_a_model_without_any_tensor_is_refused(source: Path) -> None:
    assert "--leave-out" in refused("plan", source, "--leave-out", "*")
