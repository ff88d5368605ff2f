"""--max-kl: the smallest result whose measured divergence from the original is at most what was asked for."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import language_models
import numpy as np
import pytest
import torch
from closeness import ALIKE, approx
from commands import raises, refused
from helpers import folder_bytes, narrow_layers_packed

import pqweights
from pqweights.calibrate import divergence, sample
from pqweights.calibrate.divergence import LayerwiseDivergence
from pqweights.calibrate.layered import LayeredModel
from pqweights.checkpoint.source import open_local
from pqweights.errors import EvaluationError, OptionError, RecipeError
from pqweights.runtime.texts import encode, with_bos

SHORT: dict[str, Any] = {"calibration_tokens": 2048, "threads": 1}
GOAL = 0.02
KINDS: dict[str, dict[str, Any]] = {
    "master": {},
    "trellis": {"codec": "hadamard-trellis"},
    "gguf": {"target": "gguf"},
    "mlx": {"target": "mlx"},
}


@pytest.fixture(scope="module", autouse=True)
def short_windows() -> Iterator[None]:
    """Draw short windows, which takes a quarter of the steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "WINDOW", 64)
        yield


def sharpened(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(12)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a text beside it, which is read in less time than a sample of the model's own is drawn."""
    small = families.causal("Llama", hidden_size=256, intermediate_size=256, head_dim=64)
    model = language_models.with_tokenizer(families.build(small, tmp_path_factory.mktemp("sharp") / "model", sharpened))
    text_of(model).write_bytes(np.random.default_rng(3).integers(33, 126, 4000, dtype=np.uint8).tobytes())
    return model


def text_of(source: Path) -> Path:
    return source.with_name("text.txt")


def make(kind: str, source: Path, out: Path, goal: float = GOAL, **options: Any) -> Any:
    options = KINDS[kind] | SHORT | {"max_kl": goal, "calibrate": text_of(source), **options}
    return (pqweights.export if "target" in options else pqweights.quantize)(source, out, **options)


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Results of each kind, and the reports of their making."""

    @functools.cache
    def of(kind: str) -> tuple[Path, Any]:
        out = tmp_path_factory.mktemp("made") / kind
        return out, make(kind, source, out)

    return of


def stated(folder: Path) -> dict[str, Any]:
    """What the manifest says of what was measured."""
    manifest = json.loads((folder / "pqweights.json").read_text())
    found: dict[str, Any] = manifest.get("calibrated") or manifest.get("fit", manifest).get("sensitivity")
    return found


def logs(model: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(pqweights.load_model(model, dtype="float32").eval()(ids).logits.double(), -1)


def test_the_divergence_is_that_of_whole_models(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    pqweights.quantize(source, other, "q3")
    ids = torch.from_numpy(np.random.default_rng(9).integers(0, 490, (6, 32)))
    model = LayeredModel(open_local(source), source, remedy="")
    pqweights.export(other, tmp_path / "plain", "bf16")
    measured = LayerwiseDivergence(model, ids).of(LayeredModel(open_local(tmp_path / "plain"), source, remedy=""))
    before, after = logs(source, ids), logs(tmp_path / "plain", ids)
    assert measured == approx(float((before.exp() * (before - after)).sum(-1).mean()), ALIKE)


@pytest.mark.parametrize("kind", KINDS)
def test_results_have_the_divergence(kind: str, made: Any) -> None:
    out, _ = made(kind)
    assert GOAL / 3 < stated(out)["divergence"] <= GOAL and "eval_sha256" not in stated(out)
    assert pqweights.verify(out).ok
    assert not list(out.parent.glob(".*"))


@pytest.mark.parametrize("kind", ["trellis", "gguf"])
def test_less_divergence_takes_more_room(kind: str, source: Path, made: Any, tmp_path: Path) -> None:
    report = make(kind, source, tmp_path / "out", GOAL / 5)
    assert GOAL / 15 < stated(tmp_path / "out")["divergence"] <= GOAL / 5
    assert made(kind)[1].totals.output_bytes < 0.95 * report.totals.output_bytes


def test_tiles_that_cannot_be_read_are_measured_untiled(source: Path, tmp_path: Path) -> None:
    with narrow_layers_packed():
        pqweights.export(source, tmp_path / "out", "torchao", max_kl=GOAL, calibrate="self", **SHORT)
    assert stated(tmp_path / "out")["divergence"] <= GOAL


@pytest.mark.parametrize("kind", ["trellis", "gguf"])
def test_an_interrupted_search_goes_on_and_a_finished_one_measures_nothing(
    kind: str, source: Path, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    measure, calls = LayerwiseDivergence.of, []

    def once(self: LayerwiseDivergence, *given: Any) -> float:
        if calls:
            raise KeyboardInterrupt
        calls.append(given)
        return measure(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(divergence, "MOST_BELOW", 0.02)
        patch.setattr(LayerwiseDivergence, "of", once)
        with contextlib.suppress(KeyboardInterrupt):
            make(kind, source, out)
    make(kind, source, out)
    assert folder_bytes(out) == folder_bytes(made(kind)[0])
    monkeypatch.setattr(LayerwiseDivergence, "of", None)
    make(kind, source, out)


def test_a_result_is_made_again_from_its_manifest(source: Path, made: Any) -> None:
    assert pqweights.verify(made("gguf")[0], source=source, calibrate=text_of(source), threads=1).ok


@pytest.mark.parametrize("kind", ["master", "trellis"])
def test_the_divergence_is_that_on_the_text_that_is_given(kind: str, source: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(" ".join(f"def name{i % 37}(x{i}): return {i * i % 101}" for i in range(2000)), encoding="utf-8")
    make(kind, source, out, eval=text)
    about = stated(out)
    assert about["eval_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert GOAL / 3 < about["divergence"] <= GOAL
    encoded = encode(source, text.read_text(), 16 * 64, bos=True)
    ids = torch.from_numpy(np.stack([with_bos(ids, encoded.bos) for ids in encoded.ids.reshape(16, 64)]))
    before, after = logs(source, ids), logs(out, ids)
    assert about["divergence"] == approx(float((before.exp() * (before - after)).sum(-1).mean()), ALIKE)
    again: dict[str, Any] = {"source": source, "calibrate": text_of(source), "threads": 1}
    with raises(OptionError, "eval"):
        pqweights.verify(out, **again)
    assert pqweights.verify(out, eval=text, **again).ok


def test_a_plan_does_not_pretend_to_know_the_size(source: Path) -> None:
    planned = pqweights.plan(source, codec="hadamard-trellis", max_kl=GOAL, calibrate="self").calibration
    assert planned is not None and planned.weight_bytes == 0


def test_what_cannot_be_is_refused(source: Path, tmp_path: Path) -> None:
    with raises(OptionError, "calibrate"):
        pqweights.quantize(source, tmp_path / "x", max_kl=0.1)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_kl: 0.1\n")
    with raises(OptionError, "calibrate"):
        pqweights.quantize(source, tmp_path / "x", recipe)
    with raises(OptionError, "max_kl"):
        pqweights.quantize(source, tmp_path / "x", max_kl=0.1, target_bpw=4, calibrate="self")
    assert "--max-kl" in refused("quantize", source, tmp_path / "x", "--max-kl", 0, "--calibrate", "self", code=2)
    with raises(OptionError, "max_kl"):
        make("mlx", source, tmp_path / "x", format="q4,q8")
    with raises(RecipeError, "least possible"):
        make("gguf", source, tmp_path / "x", 1e-12)
    (tmp_path / "short.txt").write_text("too short")
    with raises(EvaluationError, "256 tokens"):
        make("gguf", source, tmp_path / "x", eval=tmp_path / "short.txt")
    assert "--max-kl" in refused(
        "quantize", source, tmp_path / "x", "--eval", tmp_path / "short.txt", "--calibrate", "self", code=2
    )
    assert not (tmp_path / "x").exists() or not list((tmp_path / "x").glob("*.gguf"))
