"""What `calibrate` and `sensitivity` refuse alike, in one line, and that interrupted runs go on."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import pytest
from commands import refused

from pqweights.errors import MissingDependencyError, SourceChangedError
from pqweights.inference.runtimes import packages
from pqweights.planning.recipe import parse_recipe
from pqweights.quality import layered
from pqweights.quality.calibrate import calibrate
from pqweights.quality.options import SamplingOptions
from pqweights.quality.sensitivity import measure_sensitivity

COMMANDS = {"calibrate": "s.safetensors", "sensitivity": "s.json"}
TOKENS = np.random.default_rng(11).integers(0, 500, 3000)
RECIPE = parse_recipe("rules: [{role: [mlp, embedding, lm_head], keep: true}]", "narrow")
Progress = Callable[..., None]


def measure(command: str, source: Path, out: Path, progress: Progress = lambda *_: None) -> None:
    """Run what a command runs, on 2048 tokens."""
    text = source.with_name("text.txt")
    text.write_text(" ".join(f"w{number}" for number in TOKENS))
    options = SamplingOptions(text=text, tokens=2048, threads=1)
    if command == "calibrate":
        calibrate(source, out, recipe=RECIPE, options=options, progress=progress)
    else:
        measure_sensitivity(source, RECIPE, options, out=out, progress=progress)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    llama = families.FAMILIES["llama"]
    short = replace(llama, settings=llama.settings | {"max_position_embeddings": 64})
    return families.build(short, tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, count in (("long", 3000), ("short", 100)):
        (folder / f"{name}.txt").write_text(" ".join(f"w{number}" for number in TOKENS[:count]))
    (folder / "empty.txt").write_text("")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--text {texts}/empty.txt", "found 0; give a longer text"),
        ("--text {texts}/short.txt", "found 100; give a longer text"),
        ("--text {texts}/none.txt", "none.txt: expected a text, or a folder of *.txt: No such file"),
        ("--text {texts}/wide", "wide: expected *.txt in the folder, found none"),
    ],
)
def test_bad_input_is_one_line(command, arguments, expected, source, texts, tmp_path):
    (texts / "wide").mkdir(exist_ok=True)
    message = refused(command, source, tmp_path / COMMANDS[command], *arguments.format(texts=texts).split())
    assert expected in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_output_is_checked_before_the_model_is_loaded(command, source, texts, tmp_path, monkeypatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(layered.LayeredModel, "__init__", never)
    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes((source / "model.safetensors").read_bytes())
    for out, options, expected in (
        (foreign, [], "the file exists; choose another name, or pass --overwrite"),
        (foreign, ["--overwrite"], "--overwrite replaces nothing else"),
        (tmp_path, [], "expected the name of a file, found a folder"),
        (tmp_path / "none" / "s.safetensors", [], "its folder does not exist"),
    ):
        assert expected in refused(command, source, out, "--text", texts / "long.txt", *options)


@pytest.mark.parametrize("command", COMMANDS)
def test_measuring_a_master_is_refused(command, texts, tmp_path, tmp_path_factory):
    master = families.master(tmp_path_factory.getbasetemp(), "llama")
    message = refused(command, master, tmp_path / COMMANDS[command], "--text", texts / "long.txt")
    assert "give the checkpoint that it was made from" in message


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_checkpoint_that_changes_while_it_is_measured_ends_the_run(file, command, source, tmp_path):
    """The model was read before or after: its file would name a checkpoint that it may not be of."""
    model = Path(shutil.copytree(source, tmp_path / "model"))

    def change(*_: object) -> None:
        data = (model / file).read_bytes()
        (model / file).write_bytes(data[:-2] + bytes(b ^ 1 for b in data[-2:]))

    with pytest.raises(SourceChangedError, match=f"{file}: the source changed while it was being read"):
        measure(command, model, tmp_path / "out", change)
    assert sorted(tmp_path.iterdir()) == [model, tmp_path / "text.txt"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_interrupted_run_goes_on_and_gives_the_same_bytes(steps, command, source, tmp_path):
    def interrupt(done: int, *_: object) -> None:
        if done == steps:
            raise KeyboardInterrupt

    whole, out = tmp_path / "whole", tmp_path / "out"
    measure(command, source, whole)
    with contextlib.suppress(KeyboardInterrupt):
        measure(command, source, out, interrupt)
        assert steps > 3 and command == "calibrate"  # has as few steps
        out.unlink()
    measure(command, source, out)
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(tmp_path.iterdir()) == [out, whole]


@pytest.mark.parametrize(("command", "what"), [("calibrate", "calibrating"), ("sensitivity", "calibrating")])
def test_missing_transformers_is_named_with_what_needs_it(command, what, source, tmp_path, monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(packages.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match=f"^{what} needs t"):
        measure(command, source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
