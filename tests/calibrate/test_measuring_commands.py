"""What --awq and --calibrate for a target refuse alike, in one line, and that interrupted runs go on."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from commands import raises, refused
from helpers import folder_bytes

import pqweights.api
from pqweights.calibrate import layered
from pqweights.errors import MissingDependencyError, SourceChangedError
from pqweights.planning.recipe import parse_recipe
from pqweights.runtime import packages

ASKED = {"awq": {"awq": "TEXT"}, "sensitivity": {"calibrate": "TEXT", "target_bpw": 4}}
TOKENS = np.random.default_rng(11).integers(0, 500, 3000)
RECIPE = parse_recipe("rules: [{role: [mlp, embedding, lm_head], keep: true}]", "narrow")
Progress = Callable[..., None]


def measure(what: str, source: Path, out: Path, progress: Progress = lambda *_: None) -> None:
    """Make a master for which something is measured, on 2048 tokens."""
    text = source.with_name("text.txt")
    text.write_text(" ".join(f"w{number}" for number in TOKENS))
    asked: dict[str, Any] = {key: text if value == "TEXT" else value for key, value in ASKED[what].items()}
    pqweights.api.quantize(
        source, out, RECIPE, calibration_tokens=2048, threads=1, calibration_progress=progress, **asked
    )


def flags(what: str, text: Path) -> list[object]:
    return ["--awq", text] if what == "awq" else ["--target-bpw", 4, "--calibrate", text]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    llama = families.FAMILIES["llama"]
    short = replace(llama, settings=llama.settings | {"max_position_embeddings": 64})
    return families.build(short, tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize("what", ASKED)
def test_output_is_checked_before_the_model_is_loaded(what, source, tmp_path, monkeypatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(layered.LayeredModel, "__init__", never)
    pqweights.quantize(source, tmp_path / "other")
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in TOKENS))
    asked = (*flags(what, tmp_path / "text.txt"), "--calibration-tokens", 2048)
    assert "--overwrite" in refused("quantize", source, tmp_path / "other", *asked)
    refused("quantize", source, source, *asked)
    assert "--low-disk" in refused("quantize", source, tmp_path / "x", *asked, "--low-disk", code=2)


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_checkpoint_that_changes_while_it_is_measured_ends_the_run(file, what, source, tmp_path):
    """The model was read before or after: its file would name a checkpoint that it may not be of."""
    model = Path(shutil.copytree(source, tmp_path / "model"))

    def change(*_: object) -> None:
        data = (model / file).read_bytes()
        (model / file).write_bytes(data[:-2] + bytes(b ^ 1 for b in data[-2:]))

    with raises(SourceChangedError, file):
        measure(what, model, tmp_path / "out", change)
    assert sorted(tmp_path.iterdir()) == [model, tmp_path / "text.txt"]


@pytest.fixture(scope="module")
def wholes(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of results of runs that nothing interrupts."""
    made = {what: tmp_path_factory.mktemp("whole") / what for what in ASKED}
    for what, out in made.items():
        measure(what, source, out)
    return {what: folder_bytes(out) for what, out in made.items()}


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_interrupted_run_goes_on_and_gives_the_same_bytes(steps, what, source, wholes, tmp_path):
    def interrupt(done: int, *_: object) -> None:
        if done == steps:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with contextlib.suppress(KeyboardInterrupt):
        measure(what, source, out, interrupt)
        assert steps > 3 and what == "awq"  # has as few steps
        shutil.rmtree(out)
    measure(what, source, out)
    assert folder_bytes(out) == wholes[what]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("what", ASKED)
def test_missing_transformers_is_named_with_what_needs_it(what, source, tmp_path, monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(packages.importlib, "import_module", missing)
    with raises(MissingDependencyError, "transformers", "pip install"):
        measure(what, source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
