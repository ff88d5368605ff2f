"""Measuring sensitivities on tiny models, and the command."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from calls import measure_sensitivity
from commands import invoke, refused
from helpers import folder_bytes, gaussian
from typer.testing import Result

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from pqweights import load_model
from pqweights.checkpoint.models.names import TIED_EMBEDDINGS
from pqweights.checkpoint.source import open_local
from pqweights.errors import EvaluationError, RecipeError
from pqweights.planning.recipe import load_recipe, parse_recipe
from pqweights.planning.sensitivity_file import Sensitivity, fitted_alpha, read_sensitivity
from pqweights.quality import sensitivity as perturb
from pqweights.quality.options import SensitivityOptions
from pqweights.quality.sensitivity import LEVELS

TOKENS = 64
# A recipe with few groups, for tests that do not depend on the figures.
NARROW = parse_recipe("rules: [{role: [mlp, embedding], keep: true}]", "narrow")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers; 128 does not divide the rows of its down projections."""
    narrow = {"hidden_size": 128, "intermediate_size": 190, "num_attention_heads": 2, "num_key_value_heads": 1}
    family = families.Family("LlamaForCausalLM", "LlamaConfig", {**families.TEXT, **families.ROPE, **narrow}, ())
    return families.build(family, tmp_path_factory.mktemp("narrow") / "model")


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("sensitivity") / "s.json"
    return out, invoke("sensitivity", source, out, "--tokens", TOKENS, "--window", 32)


def measured(source: Path, recipe: str = "q5", **options: Any) -> Sensitivity:
    return measure_sensitivity(source, load_recipe(recipe), **{"tokens": 32, "window": 16, **options})


def test_divergence_grows_with_the_noise(source, written):
    path, done = written
    assert done.exit_code == 0, done.stderr
    found = read_sensitivity(path)
    assert found.checkpoint == open_local(source).fingerprint()
    assert found.method == {
        "kind": "random tokens",
        "text_sha256": None,
        "tokens": TOKENS,
        "window": 32,
        "dtype": "float32",
        "seed": 0,
        "levels": list(LEVELS),
    }
    assert len(found.groups) == 2 + 2 * 4
    for group in found.groups:
        assert [t2 for t2, _ in group.points] == list(LEVELS)
        divergences = [kl for _, kl in group.points]
        assert divergences == sorted(divergences)
        assert divergences[0] > 0
        assert group.alpha == pytest.approx(fitted_alpha(group.points), rel=1e-4)
        assert group.alpha > 0
        # The divergence is roughly linear: slopes agree to a factor of two.
        slopes = [kl / t2 for t2, kl in group.points]
        assert max(slopes) < 2 * min(slopes)


def test_command_prints_the_measured_divergences(source, written):
    path, done = written
    lines = {
        line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.startswith(("model.", "lm_head"))
    }
    for group in read_sensitivity(path).groups:
        assert lines[group.name] == [
            str(len(group.weights)),
            f"{group.alpha:.4f}",
            *(f"{kl:.6f}" for _, kl in group.points),
        ]
    assert f"on {TOKENS} tokens (random tokens)" in done.stdout
    assert f"pqweights quantize {source} OUT --target-size SIZE --sensitivity {path}" in done.stdout
    assert "Loading" not in done.stderr


def test_output_is_deterministic_and_the_source_unchanged(source, written, tmp_path):
    before = folder_bytes(source)
    done = invoke("sensitivity", source, tmp_path / "s.json", "--tokens", TOKENS, "--window", 32, "--json")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "s.json").read_bytes() == written[0].read_bytes()
    assert json.loads(done.stdout) == {"output": str(tmp_path / "s.json"), **json.loads(written[0].read_text())}
    assert folder_bytes(source) == before


def test_one_file_serves_all_targets_of_its_checkpoint_only(base, source, written, tmp_path):
    plans = [
        json.loads(invoke("plan", source, "--target-bpw", bits, "--sensitivity", written[0], "--json").stdout)["fit"]
        for bits in (3.5, 5)
    ]
    assert plans[0]["sensitivity"] == plans[1]["sensitivity"]
    assert plans[0]["predicted_rise"] > plans[1]["predicted_rise"] > 0
    assert plans[0]["unknown_groups"] == plans[1]["unknown_groups"] == []
    other = invoke("plan", families.model(base, "llama-biased"), "--target-bpw", 4, "--sensitivity", written[0])
    assert other.exit_code == 1
    assert "sensitivities of this checkpoint" in other.stderr
    assert other.stderr.count("\n") == 1


def test_measured_divergence_matches_torch(source, tmp_path):
    """The divergence of one group at one level is computed again by torch, with the same noise."""
    found = measured(source, tokens=32, window=16)
    model = load_model(source, dtype="float32").eval()
    windows = perturb._windows(source, SensitivityOptions(tokens=32, window=16)).ids
    group, (t2, kl) = found.groups[0], found.groups[0].points[2]
    assert group.weights == ("lm_head.weight",) or len(group.weights) >= 1
    parameters = dict(model.named_parameters())
    ids = torch.tensor(np.stack(windows))
    with torch.inference_mode():
        clean = torch.log_softmax(model(ids).logits.double(), -1)
        generator = torch.Generator().manual_seed(perturb._seed(group.name, 2))
        for name in group.weights:
            values = parameters[name].data
            parameters[name].data = perturb._noisy(
                torch, values, math.sqrt(t2), how=perturb._Noise(False, 128), generator=generator
            )
        now = torch.log_softmax(model(ids).logits.double(), -1)
    expected = (clean.exp() * (clean - now)).sum(-1).mean()
    assert kl == pytest.approx(float(expected), rel=1e-3)


def test_each_group_is_perturbed_alone_and_restored(source, monkeypatch):
    """While a group is measured, only its weights differ from the checkpoint; at the end none do."""
    seen: list[set[str]] = []
    models: list[Any] = []
    original = dict(load_model(source, dtype="float32").named_parameters())
    real = perturb._divergence

    def changed(model: Any) -> set[str]:
        return {name for name, p in model.named_parameters() if not torch.equal(p, original[name])}

    def divergence(torch: Any, model: Any, windows: Any, *, clean: Any) -> float:
        models.append(model)
        seen.append(changed(model))
        return real(torch, model, windows, clean=clean)

    monkeypatch.setattr(perturb, "_divergence", divergence)
    found = measured(source)
    assert seen == [set(group.weights) for group in found.groups for _ in LEVELS]
    assert changed(models[0]) == set()


def noisy(values: Any, t: float, seed: int, *, transposed: bool = False) -> Any:
    how = perturb._Noise(transposed, 128)
    return perturb._noisy(torch, values, t, how=how, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("t2", [0.0025, 0.0345])
def test_noise_of_each_block_is_proportional_to_its_norm(transposed, t2):
    """Blocks differ in scale by up to ten thousand; the last of the 130 * 190 weights are a block of 124."""
    rows = torch.tensor(gaussian(130, 190, seed=1)) * torch.exp(3 * torch.randn(130, 1, generator=torch.manual_seed(0)))
    given = rows.T.contiguous() if transposed else rows
    before = given.clone()
    total = torch.zeros(193)
    for seed in range(40):
        found = noisy(given, math.sqrt(t2), seed, transposed=transposed)
        assert found.shape == given.shape
        error = ((found.T if transposed else found) - rows).reshape(-1)
        blocks, errors = (torch.nn.functional.pad(v, (0, 4)).view(-1, 128) for v in (rows.reshape(-1), error))
        total += (errors.square().sum(1) / blocks.square().sum(1)) / 40
    assert torch.equal(given, before)
    assert total[:-1].mean() == pytest.approx(t2, rel=0.01)
    assert ((total[:-1] / t2 - 1).abs() < 0.12).all()
    assert total[-1] == pytest.approx(t2 * 124 / 128, rel=0.12)


def test_noise_keeps_dtype_and_zeros():
    values = torch.zeros(3, 128, dtype=torch.bfloat16)
    values[1] = 1
    found = noisy(values, 0.1, 0)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[::2], values[::2]) and not torch.equal(found[1], values[1])


def words(tokens: int) -> str:
    return " ".join(f"w{number}" for number in np.random.default_rng(3).integers(0, 500, tokens))


def test_sensitivities_are_measured_on_a_text(source, written, tmp_path):
    (tmp_path / "t.txt").write_text(words(200))
    options = ("--text", tmp_path / "t.txt", "--tokens", 70, "--window", 32)
    done = invoke("sensitivity", source, tmp_path / "s.json", *options)
    assert done.exit_code == 0, done.stderr
    of_text, random = read_sensitivity(tmp_path / "s.json"), read_sensitivity(written[0])
    assert (of_text.method["kind"], of_text.method["tokens"]) == ("text", 64)
    assert of_text.method["text_sha256"] == hashlib.sha256(words(200).encode()).hexdigest()
    assert "on 64 tokens (text)" in done.stdout
    for one, other in zip(of_text.groups, random.groups, strict=True):
        assert one.name == other.name
        assert one.alpha != other.alpha and 0.2 < one.alpha / other.alpha < 5


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama-tied", {TIED_EMBEDDINGS: 1}),
        ("mixtral", {"model.layers.0.block_sparse_moe.experts": 12, "model.layers.1.block_sparse_moe.experts": 12}),
        ("qwen3_moe", {"model.layers.0.mlp.experts": 12, "model.layers.1.mlp.experts": 12}),
        ("gpt_oss", {"model.layers.0.mlp.experts": 2, "model.layers.1.mlp.experts": 2}),
    ],
)
def test_groups_of_tied_and_expert_models_are_measured(base, family, expected):
    folder = families.model(base, family)
    keep = ["attention", "mlp"] if family == "llama-tied" else ["attention", "embedding", "lm_head"]
    recipe = parse_recipe(json.dumps({"rules": [{"role": keep, "keep": True}]}), "r")
    found = measure_sensitivity(folder, recipe, tokens=32, window=32)
    sizes = {group.name: len(group.weights) for group in found.groups}
    assert sizes == expected
    stored = {tensor.name for tensor in open_local(folder).tensors}
    assert {name for group in found.groups for name in group.weights} <= stored
    assert all(group.alpha > 0 for group in found.groups)
    # The divergence need not rise at every step: when the router chooses another expert, it jumps.
    assert all(group.points[0][1] < group.points[-1][1] for group in found.groups)


def test_only_what_the_recipe_quantizes_is_measured(source):
    recipe = parse_recipe("rules: [{name: '*.mlp.*', keep: true}, {role: [embedding, lm_head], keep: true}]", "r")
    found = measure_sensitivity(source, recipe, tokens=16, window=16)
    assert {group.name.split(".", 3)[-1] for group in found.groups} == {"self_attn.qkv", "self_attn.o_proj"}
    with pytest.raises(RecipeError, match="quantizes something here"):
        measure_sensitivity(source, parse_recipe("rules: [{name: '*', keep: true}]", "r"), tokens=16, window=16)


def test_windows_are_at_most_as_long_as_the_context(base, source):
    def windows(folder: Path, **options: Any) -> list[Any]:
        return perturb._windows(folder, SensitivityOptions(**options)).ids

    assert [len(ids) for ids in windows(source, tokens=2048)] == [256] * 8
    assert [len(ids) for ids in windows(source, tokens=100, window=32)] == [32] * 3
    assert [len(ids) for ids in windows(families.model(base, "gpt2"), tokens=300)] == [128] * 2
    ids = np.concatenate(windows(source, tokens=2048))
    assert ids.min() >= 0 and 500 < ids.max() < families.VOCABULARY
    assert len(set(ids.tolist())) > 400


def test_model_without_a_language_model_head_is_refused(base, tmp_path):
    """GPT2Model predicts no tokens, so there is nothing to compare."""
    message = refused("sensitivity", families.model(base, "gpt2"), tmp_path / "s", "--tokens", 16, "--window", 16)
    assert "GPT2Model: it is not a causal language model" in message
    assert list(tmp_path.iterdir()) == []


def test_nan_or_infinite_logits_are_refused(source, monkeypatch):
    monkeypatch.setattr(perturb, "_divergence", lambda *_, **__: math.nan)
    with pytest.raises(EvaluationError, match="with noise, logits are NaN or infinite; pass `dtype` float32"):
        measured(source)
    monkeypatch.undo()
    monkeypatch.setattr(perturb, "_log_probabilities", lambda *_: torch.tensor([math.inf]))
    with pytest.raises(EvaluationError, match="model: logits are NaN or infinite"):
        measured(source)
