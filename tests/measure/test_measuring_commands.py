"""What `calibrate` and `sensitivity` refuse alike, in one line, and that nothing is left of a run that has ended."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import families
import numpy as np
import pytest
from commands import refused

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pqweights.errors import MissingDependencyError, SourceChangedError
from pqweights.inference.loading import transformers as integration
from pqweights.inference.runtimes import packages
from pqweights.planning.recipe import parse_recipe
from pqweights.quality.calibrate import calibrate
from pqweights.quality.options import CalibrationOptions, SensitivityOptions
from pqweights.quality.sensitivity import measure_sensitivity

COMMANDS = {"calibrate": "s.safetensors", "sensitivity": "s.json"}
TOKENS = np.random.default_rng(11).integers(0, 500, 3000)
RECIPE = parse_recipe("rules: [{role: [mlp, embedding, lm_head], keep: true}]", "narrow")
Progress = Callable[..., None]


def measure(command: str, source: Path, out: Path, progress: Progress = lambda *_: None) -> None:
    """Run what a command runs: calibrate for both scales and moments."""
    if command == "calibrate":
        text, asked = " ".join(f"w{number}" for number in TOKENS), CalibrationOptions(window=64, max_tokens=1024)
        calibrate(source, out, text, recipe=RECIPE, moments=True, options=asked, progress=progress)
    else:
        measure_sensitivity(source, RECIPE, SensitivityOptions(tokens=16, window=16), out=out, progress=progress)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.model(tmp_path_factory.getbasetemp(), "llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and a tokenizer with a larger vocabulary than that of the model."""
    import tokenizers
    import transformers

    folder = tmp_path_factory.mktemp("texts")
    for name, count in (("long", 3000), ("short", 100)):
        (folder / f"{name}.txt").write_text(" ".join(f"w{number}" for number in TOKENS[:count]))
    (folder / "empty.txt").write_text("")
    wide = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": 1999 - i for i in range(500)}, unk_token="w0"))
    wide.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=wide, unk_token="w0").save_pretrained(folder / "wide")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--text {texts}/empty.txt", "an empty file"),
        ("--text {texts}/short.txt", "found 100; give a longer text"),
        ("--text {texts}/long.txt --window 600", "the 512 tokens that the model takes"),
        ("--text {texts}/long.txt --tokenizer {texts}", "expected a tokenizer"),
        (
            "--text {texts}/long.txt --tokenizer {texts}/wide --window 64",
            "the text contains token 1999, but the model has only 512 tokens",
        ),
        ("--text {texts}/long.txt --window 64 --device-map bogus", "transformers cannot run this model"),
    ],
)
def test_bad_input_is_one_line(command, arguments, expected, source, texts, tmp_path):
    message = refused(command, source, tmp_path / COMMANDS[command], *arguments.format(texts=texts).split())
    assert expected in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_output_is_checked_before_the_model_is_loaded(command, source, texts, tmp_path, monkeypatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(integration, "load", never)
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
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_left_of_an_interrupted_run(command, source, tmp_path):
    """What is collected has no name on the disk, so a run that is killed leaves nothing either."""

    def interrupt(done: int, *_: object) -> None:
        assert list(tmp_path.iterdir()) == []
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(command, source, tmp_path / "out", interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "what"), [("calibrate", "calibrating"), ("sensitivity", "measuring sensitivities")]
)
def test_missing_transformers_is_named_with_what_needs_it(command, what, source, tmp_path, monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(packages.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match=f"^{what} needs t"):
        measure(command, source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
