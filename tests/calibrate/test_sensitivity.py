"""Measured sensitivities: they are those of a dense reference, and of noise in the weights; and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from calls import measure_sensitivity, quantize
from closeness import ONE_DRAW, SAMPLE, approx
from commands import answer, done, raises, refused
from helpers import folder_bytes

from pqweights.calibrate import sensitivity
from pqweights.calibrate.drawing import drawn
from pqweights.checkpoint.source import open_local
from pqweights.common.options import Options
from pqweights.errors import RecipeError
from pqweights.planning.choice import choose_recipe
from pqweights.planning.recipe import Recipe, load_recipe, parse_recipe
from pqweights.planning.sensitivity import Sensitivity
from pqweights.targets.master import Learned

TOKENS = 2048
BLOCK = 128


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text(" ".join(f"w{number}" for number in np.random.default_rng(3).integers(0, 490, TOKENS)))
    return path


def measured(source: Path, text: Path, recipe: Recipe | None = None) -> Sensitivity:
    return measure_sensitivity(source, recipe or load_recipe("q5"), text, tokens=TOKENS)


def build(name: str, folder: Path, **settings: Any) -> Path:
    """A narrow model in float32; 128 does not divide the rows of its down projections."""
    narrow = {"hidden_size": 128, "intermediate_size": 190, "num_attention_heads": 2, "num_key_value_heads": 1}
    family = families.FAMILIES[name]
    return families.build(replace(family, settings={**family.settings, **narrow, **settings}), folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("narrow") / "model")


@pytest.fixture(scope="module")
def found(source: Path, text: Path) -> Sensitivity:
    return measured(source, text)


def blocks(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().double().flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def windows(text: Path) -> torch.Tensor:
    return torch.tensor([int(word[1:]) for word in text.read_text().split()]).view(-1, 256)


def dense_alphas(folder: Path, family: str, ids: torch.Tensor) -> dict[str, float]:
    """Half the sum of the mean squares of blocks times the squared gradients, of a whole model, window by window.

    The labels are the same, but for some where rounded states have other predictions.
    """
    model = families.load(folder, families.FAMILIES[family]).float().requires_grad_()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim > 1}
    generator, sums = torch.Generator().manual_seed(sensitivity.SEED), dict.fromkeys(parameters, 0.0)
    for window in ids:
        model.zero_grad()
        logits = model(window[None], use_cache=False).logits[0]
        labels = drawn(torch.softmax(logits.detach(), -1), generator)
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        for name, parameter in parameters.items():
            mean_squares = blocks(parameter).square().sum(1) / BLOCK
            sums[name] += 0.5 * float(blocks(parameter.grad).square().sum(1) @ mean_squares) / ids.numel()
    return sums


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt_oss"])
def test_sensitivities_are_those_of_a_dense_reference(family, text, tmp_path_factory, monkeypatch):
    """States between layers are rounded to bfloat16. Of a tied embedding, look-ups and products count apart."""
    monkeypatch.setattr(sensitivity, "LayerPasses", partial(sensitivity.LayerPasses, batch_tokens=256))
    folder = families.model(tmp_path_factory.getbasetemp(), family)
    ids = windows(text)
    monkeypatch.setattr(sensitivity.SampleOf, "ids", lambda *_: ids)
    found, expected = measured(folder, text), dense_alphas(folder, family, ids)
    assert len(found.alphas) > 8 and any("embed" in name for name in found.alphas)
    for name, alpha in found.alphas.items():
        assert alpha == approx(expected[name], SAMPLE), name


def divergence_of_noise(model: Any, parameter: torch.Tensor, ids: torch.Tensor, t2: float, seed: int) -> float:
    """The mean divergence per token for noise in one parameter, in proportion to the size of its blocks."""
    clean_values, noise = parameter.data, torch.randn(blocks(parameter).shape, generator=torch.manual_seed(seed))
    sizes = (blocks(parameter).square().sum(1, keepdim=True) / BLOCK).sqrt()
    noise = (noise.double() * sizes).flatten()[: parameter.numel()].view_as(parameter) * math.sqrt(t2)
    with torch.inference_mode():
        clean = torch.log_softmax(model(ids).logits.double(), -1)
        parameter.data = (clean_values + noise).float()
        noisy = torch.log_softmax(model(ids).logits.double(), -1)
        parameter.data = clean_values
    return float((clean.exp() * (clean - noisy)).sum(-1).mean())


def test_sensitivities_are_those_of_noise_in_the_weights(source, found, text):
    model = families.load(source, families.FAMILIES["llama"]).float()
    parameters = dict(model.named_parameters())
    for name, alpha in found.alphas.items():
        if ".layers.1." in name:  # which are like those of the first
            continue
        divergences = [divergence_of_noise(model, parameters[name], windows(text), 1e-3, seed) for seed in range(2)]
        assert np.mean(divergences) / 1e-3 == approx(alpha, ONE_DRAW), name


def test_it_says_how_it_was_measured(source, found):
    assert {key: value for key, value in found.method.items() if key != "identity"} == {
        "kind": "sample",
        "sample": "text",
        "tokens": TOKENS,
        "window": 256,
        "seed": 0,
        "estimate": "fisher",
    }
    assert found.alphas.keys() == {tensor.name for tensor in open_local(source).tensors if len(tensor.shape) == 2}


def test_one_run_measures_and_chooses_widths(source, found, text, tmp_path):
    """In plan and quantize alike; a finished result is not measured again, and shows what was measured."""
    before, out = folder_bytes(source), tmp_path / "out"
    asked = ("--target-bpw", 4, "--calibrate", text, "--calibration-tokens", TOKENS, "--threads", 1)
    planned = answer("plan", source, *asked)["fit"]
    made = answer("quantize", source, out, *asked)
    assert made["fit"] == planned and planned["sensitivity"]["alphas"] == found.alphas
    written = folder_bytes(out)
    again = answer("quantize", source, out, *asked)
    assert again["already_done"] and again["fit"] == planned and folder_bytes(out) == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"] and folder_bytes(source) == before
    shown = done("inspect", out).stdout
    for alpha in found.alphas.values():
        assert f"{alpha:.4f}" in shown
    other = refused("quantize", source, out, *asked[:-4], "--calibration-tokens", 4096)
    assert "calibration" in other and "--overwrite" in other


def test_widths_are_those_of_the_sensitivities(source, found, text, tmp_path):
    asked = ("--target-bpw", 4, "--calibrate", text, "--calibration-tokens", TOKENS, "--threads", 1)
    done("quantize", source, tmp_path / "measured", *asked)
    recipe = choose_recipe("q5", Options(target_bpw=4))
    quantize(source, tmp_path / "given", recipe, learned=Learned(sensitivity=found))
    made, given = (folder_bytes(tmp_path / name) for name in ("measured", "given"))
    assert made.keys() == given.keys()
    assert all(made[name] == given[name] for name in made if name != "pqweights.json")
    done("quantize", source, tmp_path / "rule", "--target-bpw", 4)
    assert folder_bytes(tmp_path / "rule") != made


def test_an_export_of_a_size_measures_what_it_is_made_of(source, text, tmp_path):
    """The formats are those of the sensitivities of its weights, which the manifest states."""
    done("quantize", source, tmp_path / "master", "--bits", 8)
    longer = tmp_path / "longer.txt"
    longer.write_text(f"{text.read_text()} {text.read_text()}")
    asked = ("--target", "mlx", "--target-size", "300kB", "--calibrate", longer, "--calibration-tokens", 4096)
    for _ in range(2):
        report = answer("export", tmp_path / "master", tmp_path / "out", *asked, "--threads", 1)
    assert report["already_done"]
    stated = json.loads((tmp_path / "out/pqweights.json").read_text())["sensitivity"]
    assert stated["kind"] == "sample" and len(stated["alphas"]) > 8 and min(stated["alphas"].values()) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["longer.txt", "master", "out"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "llama4"])
def test_experts_are_measured_each(family, text, tmp_path_factory):
    folder = families.model(tmp_path_factory.getbasetemp(), family)
    recipe = parse_recipe(json.dumps({"rules": [{"role": ["attention", "embedding", "lm_head"], "keep": True}]}), "r")
    found = measured(folder, text, recipe)
    assert {t.name for t in open_local(folder).tensors if ".experts." in t.name} <= found.alphas.keys()
    assert min(found.alphas.values()) > 0


def test_only_what_the_recipe_quantizes_is_measured(source, text):
    recipe = parse_recipe("rules: [{name: '*.mlp.*', keep: true}, {role: [embedding, lm_head], keep: true}]", "r")
    found = measured(source, text, recipe)
    assert {name.split(".")[-2] for name in found.alphas} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with raises(RecipeError, "quantizes"):
        measured(source, text, parse_recipe("rules: [{name: '*', keep: true}]", "r"))


def test_model_that_computes_what_is_not_finite_is_refused(text, tmp_path):
    def broken(model: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight.data.fill_(math.inf)

    folder = families.build(families.FAMILIES["llama"], tmp_path / "model", broken)
    asked = ("--target-bpw", 4, "--calibrate", text, "--calibration-tokens", TOKENS, "--threads", 1)
    says = refused("quantize", folder, tmp_path / "out", *asked)
    assert "layer 1 " in says and "/.out.calibration" in says
    assert not (tmp_path / "out").exists()
