"""calibrate --moments: the moments are those of the inputs; matrices that read the same share them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from commands import answer, done
from helpers import run_command

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from pqweights.planning.statistics_file import MOMENTS, Statistics, open_awq, open_statistics

from pqweights.errors import SourceError
from pqweights.planning.recipe import parse_recipe
from pqweights.quality import collecting
from pqweights.quality.calibrate import calibrate
from pqweights.quality.options import CalibrationOptions

WINDOW, WINDOWS = 64, 16
TEXT = " ".join(f"w{number}" for number in np.random.default_rng(11).integers(0, 500, 1100))
Inputs = dict[str, np.ndarray[Any, Any]]


NARROW = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
SMALL = {
    name: replace(
        families.FAMILIES[name],
        settings={**families.FAMILIES[name].settings, **NARROW, "num_key_value_heads": 1, **experts},
    )
    for name, experts in (("llama", {}), ("mixtral", EXPERTS), ("gpt_oss", EXPERTS))
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: families.build(each, tmp_path_factory.mktemp(name) / "model") for name, each in SMALL.items()}


def run(source: Path, out: Path, **options: Any) -> Statistics:
    asked = CalibrationOptions(**{"window": WINDOW, "max_tokens": WINDOW * WINDOWS, "dtype": "float32", **options})
    calibrate(source, out, TEXT, moments=True, options=asked)
    return open_statistics(out, MOMENTS)


def matrix(found: Statistics, vector: int) -> Any:
    return np.concatenate([strip for _, strip in found.strips(vector)])


def hooked(model: Any, layers: list[str]) -> Inputs:
    """The inputs of linear layers in every window, [windows, rows, K], recorded by hooks."""
    rows: dict[str, list[Any]] = {name: [] for name in layers}
    modules = dict(model.named_modules())
    hooks = [
        modules[name].register_forward_pre_hook(
            lambda module, args, name=name: rows[name].append(args[0].reshape(-1, args[0].shape[-1]).numpy().copy())
        )
        for name in layers
    ]
    ids = np.array([int(word[1:]) for word in TEXT.split()][: WINDOW * WINDOWS])
    with torch.inference_mode():
        for window in ids.reshape(WINDOWS, WINDOW):
            model(torch.from_numpy(window)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: np.stack(found) for name, found in rows.items()}


def test_moments_are_those_of_the_inputs_that_hooks_record(models, tmp_path):
    found = run(models["llama"], tmp_path / "m.safetensors")
    stem = "model.layers.0."
    layers = [stem + name for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")]
    truth = hooked(families.load(models["llama"], SMALL["llama"]), [*layers, "lm_head"])
    for name, rows in truth.items():
        (vector,) = found.weights[f"{name}.weight"].vectors
        kept, held_back = np.delete(rows, np.s_[3::4], axis=0), rows[3::4]
        kept = kept.reshape(-1, rows.shape[-1]).astype(np.float64)
        wanted = kept.T @ kept / len(kept)
        assert np.abs(matrix(found, vector) - wanted).max() < 1e-4 * np.abs(wanted).max()
        assert found.vectors[vector].tokens == len(kept) == WINDOW * WINDOWS * 3 // 4
        assert found.vectors[vector].windows == WINDOWS // 4
        distances = np.abs(found.held_back(vector)[:, None] - held_back.reshape(1, -1, rows.shape[-1])).max(axis=2)
        assert distances.min(axis=1).max() < 1e-4


def test_matrices_that_read_the_same_share_a_vector(models, tmp_path):
    found = run(models["llama"], tmp_path / "m.safetensors")
    by_vector: dict[Any, set[str]] = {}
    for name, weight in found.weights.items():
        assert not weight.transposed
        by_vector.setdefault(weight.vectors, set()).add(name.split(".")[-2])
    shared = {frozenset(names) for names in by_vector.values()}
    assert {frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"})} <= shared
    assert len(found.vectors) == len(by_vector) == 5


def test_experts_have_the_moments_of_their_own_tokens(models, tmp_path):
    found = run(models["mixtral"], tmp_path / "m.safetensors")
    names = [f"model.layers.0.block_sparse_moe.experts.{n}.{{}}.weight" for n in range(3)]
    firsts = [found.weights[name.format("w1")].vectors for name in names]
    assert firsts == [found.weights[name.format("w3")].vectors for name in names]
    assert len(set(firsts)) == 3
    tokens = [found.vectors[vectors[0]].tokens for vectors in firsts if vectors[0] is not None]
    assert sum(tokens) == 2 * WINDOW * WINDOWS * 3 // 4 and len(set(tokens)) > 1


def test_stacked_transposed_experts_say_where_their_inputs_run(models, tmp_path):
    found = run(models["gpt_oss"], tmp_path / "m.safetensors")
    for part in ("gate_up_proj", "down_proj"):
        weight = found.weights[f"model.layers.0.mlp.experts.{part}"]
        assert weight.transposed and len(weight.vectors) == 3 and len(set(weight.vectors)) == 3


def test_moments_of_a_master_are_its_own(models, tmp_path):
    run_command({"quantize": str(models["llama"]), "recipe": "q3"}, tmp_path / "master")
    of_master = run(tmp_path / "master", tmp_path / "m.safetensors")
    of_original = run(models["llama"], tmp_path / "o.safetensors")
    assert of_master.checkpoint != of_original.checkpoint
    assert of_master.weights.keys() == of_original.weights.keys()
    run_command(
        {
            "export": str(tmp_path / "master"),
            "target": "vllm",
            "rounding": "gptq",
            "calibration": tmp_path / "m.safetensors",
        },
        tmp_path / "out",
    )


def test_several_runs_of_the_model_give_the_bytes_of_one(models, tmp_path, monkeypatch):
    run(models["llama"], tmp_path / "one.safetensors")
    monkeypatch.setattr(collecting, "MOMENTS_BYTES", 300_000)
    run(models["llama"], tmp_path / "many.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "many.safetensors").read_bytes()


def test_one_pass_writes_scales_and_moments_into_one_file(models, tmp_path):
    asked = CalibrationOptions(window=WINDOW, max_tokens=WINDOW * WINDOWS, dtype="float32")
    recipe, alone, both = (
        parse_recipe("bits: 3\nrules: [{role: [mlp, embedding, lm_head], keep: true}]", "three"),
        tmp_path / "alone.safetensors",
        tmp_path / "both.safetensors",
    )
    calibrate(models["llama"], alone, TEXT, recipe=recipe, options=asked)
    calibrate(models["llama"], both, TEXT, recipe=recipe, moments=True, options=asked)
    moments, found = run(models["llama"], tmp_path / "m.safetensors"), open_statistics(both)
    assert found.holds == ("moments", "scales")
    assert (found.vectors, found.weights) == (moments.vectors, moments.weights)
    for vector in range(len(moments.vectors)):
        assert np.array_equal(matrix(found, vector), matrix(moments, vector))
        assert np.array_equal(found.held_back(vector), moments.held_back(vector))
    assert open_awq(both).file.searched.keys() == open_awq(alone).file.searched.keys()
    with pytest.raises(SourceError, match=r"expected moments .* found scales, which pqweights calibrate writes"):
        open_statistics(alone, MOMENTS)


def test_commands_calibrate_and_export(models, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    options = ("--text", tmp_path / "text.txt", "--window", WINDOW)
    out = tmp_path / "m.safetensors"
    found = answer("calibrate", models["mixtral"], out, *options, "--moments", "--json")
    assert found["tokens"] > 0 and json.dumps(found["inputs"])
    done("quantize", models["mixtral"], tmp_path / "master")
    asked = ("-t", "vllm", "--rounding", "gptq", "--calibration", out)
    line = done("export", tmp_path / "master", tmp_path / "out", *asked, "--source", models["mixtral"]).output
    assert "compensated rounding: " in line
    assert "relative MSE against the original: 0.0" in line
    loaded = families.load(tmp_path / "out", SMALL["mixtral"])
    assert np.isfinite(np.asarray(families.logits(loaded))).all()
