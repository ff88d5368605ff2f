"""Measured sensitivities: they are those of a dense reference, and of noise in the weights; and the command."""

from __future__ import annotations

import hashlib
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
from closeness import ONE_DRAW, SAMPLE, SMALL_SAMPLE, approx
from commands import answer, done, refused
from helpers import folder_bytes

from pqweights.checkpoint.source import open_local
from pqweights.errors import RecipeError, SourceError
from pqweights.planning.recipe import Recipe, load_recipe, parse_recipe
from pqweights.planning.sensitivity_file import Sensitivity, read_sensitivity
from pqweights.quality import sensitivity
from pqweights.quality.options import SamplingOptions
from pqweights.quality.sensitivity import measure_sensitivity

TOKENS = 2048
BLOCK = 128


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text(" ".join(f"w{number}" for number in np.random.default_rng(3).integers(0, 490, TOKENS)))
    return path


def measured(source: Path, text: Path, out: Path, recipe: Recipe | None = None) -> Sensitivity:
    options = SamplingOptions(text=text, tokens=TOKENS, threads=1)
    return measure_sensitivity(source, recipe or load_recipe("q5"), options, out=out)


def build(name: str, folder: Path, **settings: Any) -> Path:
    """A narrow model in float32; 128 does not divide the rows of its down projections."""
    narrow = {"hidden_size": 128, "intermediate_size": 190, "num_attention_heads": 2, "num_key_value_heads": 1}
    family = families.FAMILIES[name]
    return families.build(replace(family, settings={**family.settings, **narrow, **settings}), folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("narrow") / "model")


@pytest.fixture(scope="module")
def written(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("sensitivity") / "s.json"
    return out, done("sensitivity", source, out, "--text", text, "--tokens", TOKENS, "--threads", 1)


def blocks(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().double().flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def windows(text: Path) -> torch.Tensor:
    return torch.tensor([int(word[1:]) for word in text.read_text().split()]).view(-1, 256)


def dense_alphas(folder: Path, family: str, ids: torch.Tensor) -> dict[str, float]:
    """Half the sum of the mean squares of blocks times the squared gradients, of a whole model, window by window."""
    model = families.load(folder, families.FAMILIES[family]).float().requires_grad_()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim > 1}
    generator, sums = torch.Generator().manual_seed(sensitivity.SEED), dict.fromkeys(parameters, 0.0)
    for window in ids:
        model.zero_grad()
        logits = model(window[None], use_cache=False).logits[0]
        labels = torch.multinomial(torch.softmax(logits.detach(), -1), 1, generator=generator)[:, 0]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        for name, parameter in parameters.items():
            mean_squares = blocks(parameter).square().sum(1) / BLOCK
            sums[name] += 0.5 * float(blocks(parameter.grad).square().sum(1) @ mean_squares) / ids.numel()
    return sums


@pytest.mark.parametrize(
    ("family", "accuracy"), [("llama", SAMPLE), ("llama-tied", ONE_DRAW), ("gpt_oss", SMALL_SAMPLE)]
)
def test_sensitivities_are_those_of_a_dense_reference(family, accuracy, text, tmp_path, tmp_path_factory, monkeypatch):
    """States between layers are rounded to bfloat16. Of a tied embedding, look-ups and products count apart."""
    monkeypatch.setattr(sensitivity, "LayerPasses", partial(sensitivity.LayerPasses, batch_tokens=256))
    folder = families.model(tmp_path_factory.getbasetemp(), family)
    ids = windows(text)
    monkeypatch.setattr(sensitivity.SampleOf, "ids", lambda *_: ids)
    found, expected = measured(folder, text, tmp_path / "s.json"), dense_alphas(folder, family, ids)
    assert len(found.groups) > 8 and any("embed" in group.name for group in found.groups)
    for group in found.groups:
        (name,) = group.weights
        assert group.alpha == approx(expected[name], accuracy), name


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


def test_sensitivities_are_those_of_noise_in_the_weights(source, written, text):
    model = families.load(source, families.FAMILIES["llama"]).float()
    parameters = dict(model.named_parameters())
    for group in read_sensitivity(written[0]).groups:
        divergences = [
            divergence_of_noise(model, parameters[group.weights[0]], windows(text), 1e-3, seed) for seed in range(2)
        ]
        assert np.mean(divergences) / 1e-3 == approx(group.alpha, ONE_DRAW), group.name


def test_file_says_how_it_was_measured(source, written, text):
    path, _ = written
    found = read_sensitivity(path)
    assert found.checkpoint == open_local(source).fingerprint()
    assert found.method == {
        "kind": "sample",
        "sample": hashlib.sha256(text.read_bytes()).hexdigest(),
        "tokens": TOKENS,
        "window": 256,
        "seed": 0,
        "estimate": "fisher",
    }
    quantized = {tensor.name for tensor in open_local(source).tensors if len(tensor.shape) == 2}
    assert {name for group in found.groups for name in group.weights} == quantized


def test_command_prints_what_it_measured(source, written):
    path, printed = written
    lines = {
        line.split()[0]: line.split()[1:]
        for line in printed.stdout.splitlines()
        if line.startswith(("model.", "lm_head"))
    }
    assert lines == {group.name: [f"{group.alpha:.4f}"] for group in read_sensitivity(path).groups}
    assert f"pqweights quantize {source} OUT --target-size SIZE --sensitivity {path}" in printed.stdout
    assert "Loading" not in printed.stderr


def test_output_is_deterministic_and_the_source_unchanged(source, written, text, tmp_path):
    before = folder_bytes(source)
    asked = ("--text", text, "--tokens", TOKENS, "--threads", 1)
    found = answer("sensitivity", source, tmp_path / "s.json", *asked, "--json")
    assert (tmp_path / "s.json").read_bytes() == written[0].read_bytes()
    assert found == {"output": str(tmp_path / "s.json"), **json.loads(written[0].read_text())}
    assert folder_bytes(source) == before


def test_one_file_serves_all_targets_of_its_checkpoint_only(source, written, tmp_path_factory):
    fits = [answer("plan", source, "--target-bpw", b, "--sensitivity", written[0], "--json")["fit"] for b in (3.5, 5)]
    assert fits[0]["sensitivity"] == fits[1]["sensitivity"]
    assert fits[0]["predicted_rise"] > fits[1]["predicted_rise"] > 0
    assert fits[0]["unknown_groups"] == fits[1]["unknown_groups"] == []
    other = families.model(tmp_path_factory.getbasetemp(), "llama-biased")
    message = refused("plan", other, "--target-bpw", 4, "--sensitivity", written[0])
    assert "sensitivities of this checkpoint" in message and message.count("\n") == 1


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "llama4"])
def test_experts_are_measured_each(family, text, tmp_path, tmp_path_factory):
    folder = families.model(tmp_path_factory.getbasetemp(), family)
    recipe = parse_recipe(json.dumps({"rules": [{"role": ["attention", "embedding", "lm_head"], "keep": True}]}), "r")
    found = measured(folder, text, tmp_path / "s.json", recipe)
    stored = {tensor.name for tensor in open_local(folder).tensors if ".experts." in tensor.name}
    assert stored <= {name for group in found.groups for name in group.weights}
    assert all(group.alpha > 0 for group in found.groups)


def test_only_what_the_recipe_quantizes_is_measured(source, text, tmp_path):
    recipe = parse_recipe("rules: [{name: '*.mlp.*', keep: true}, {role: [embedding, lm_head], keep: true}]", "r")
    found = measured(source, text, tmp_path / "s.json", recipe)
    assert {group.name.rpartition(".")[2] for group in found.groups} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(RecipeError, match="quantizes something here"):
        measured(source, text, tmp_path / "t.json", parse_recipe("rules: [{name: '*', keep: true}]", "r"))


def test_model_that_computes_what_is_not_finite_is_refused(text, tmp_path):
    def broken(model: Any) -> None:
        model.model.layers[1].mlp.down_proj.weight.data.fill_(math.inf)

    folder = families.build(families.FAMILIES["llama"], tmp_path / "model", broken)
    says = r"layer 1 of the model computes values that are not finite.* is kept in .*/\.s\.json\.calibration"
    with pytest.raises(SourceError, match=says):
        measured(folder, text, tmp_path / "s.json")
    assert not (tmp_path / "s.json").exists()
