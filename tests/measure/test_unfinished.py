"""Interrupted runs of `calibrate` and `sensitivity`: the same command continues them to the same bytes."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from commands import done, invoke
from helpers import gaussian

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from pqweights.errors import EvaluationError, MissingDependencyError, OutputError, SourceChangedError, SourceError
from pqweights.inference.runtimes import packages
from pqweights.planning.recipe import parse_recipe
from pqweights.quality.measure import calibrate as calibration
from pqweights.quality.measure import collecting, preparation, sensitivity
from pqweights.quality.measure.calibrate import calibrate
from pqweights.quality.measure.sensitivity import measure_sensitivity
from pqweights.quality.options import CalibrationOptions, SensitivityOptions

TEXT = " ".join(f"w{number}" for number in np.random.default_rng(11).integers(0, 500, 1100))
RECIPE = parse_recipe("bits: 3", "three")
WINDOWS, WEIGHTS = 17, 9  # of 64 tokens; of the checkpoint

Progress = Callable[[int, int, str], None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    narrow = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {**families.TEXT, **families.ROPE, **narrow, "num_key_value_heads": 1}
    family = families.Family("LlamaForCausalLM", "LlamaConfig", settings, ())

    def with_outliers(model: Any) -> None:
        sizes = torch.exp(1.3 * torch.from_numpy(gaussian(128, seed=5)))
        for each in (model.model.layers[0].mlp.gate_proj, model.model.layers[0].mlp.up_proj):
            each.weight.data.div_(sizes)
        model.model.layers[0].post_attention_layernorm.weight.data.mul_(sizes)

    return families.build(family, tmp_path_factory.mktemp("small") / "model", with_outliers)


def run_calibrate(source: Path, out: Path, progress: Progress = lambda *_: None, **options: Any) -> None:
    asked = CalibrationOptions(**{"window": 64, "max_tokens": WINDOWS * 64, **options})
    calibrate(source, out, TEXT, recipe=RECIPE, options=asked, progress=progress)


def run_sensitivity(source: Path, out: Path, progress: Progress = lambda *_: None, **options: Any) -> None:
    text = options.pop("text", None)
    asked = SensitivityOptions(**{"tokens": 32, "window": 16, **options})
    measure_sensitivity(source, RECIPE, asked, text=text, out=out, progress=progress)


def run_moments(source: Path, out: Path, progress: Progress = lambda *_: None, **options: Any) -> None:
    """Moments and scales together, in two parts: those of three vectors take too much room."""
    asked = CalibrationOptions(window=64, max_tokens=WINDOWS * 64, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "MOMENTS_BYTES", 2 * 4 * 128 * (128 + 512))
        calibrate(source, out, TEXT, recipe=RECIPE, moments=True, options=asked, progress=progress)


RUNS = {"calibrate": run_calibrate, "moments": run_moments, "sensitivity": run_sensitivity}
FILES = {"calibrate": "out.safetensors", "moments": "m.safetensors", "sensitivity": "out.json"}


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The results of runs that were not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    for name, run in RUNS.items():
        run(source, folder / FILES[name])
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES.values())
    return {name: (folder / FILES[name]).read_bytes() for name in RUNS}


def interrupted_at(call: int) -> Progress:
    """Return a callback that raises KeyboardInterrupt when it is called for the nth time."""
    calls = 0

    def progress(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyboardInterrupt

    return progress


def interrupt(command: str, source: Path, out: Path, *, call: int, **options: Any) -> Path:
    """Interrupt a run; return the folder that it leaves."""
    with pytest.raises(KeyboardInterrupt):
        RUNS[command](source, out, interrupted_at(call), **options)
    assert not out.exists()
    return out.with_name(out.name + ".unfinished")


def save_after_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr(collecting, "SAVING_SHARE", float("inf"))


# Calls of the callback: calibrate makes one for each window, then one for each weight; sensitivity one for each group.
CALLS = [("calibrate", call) for call in (1, WINDOWS, WINDOWS + 3)]
CALLS += [("sensitivity", call) for call in (1, 4)]
CALLS += [("moments", call) for call in (4, WINDOWS, WINDOWS + 3)]


@pytest.mark.parametrize(("command", "call"), CALLS)
def test_continued_run_writes_the_same_bytes(
    command: str, call: int, source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_after_each_window(monkeypatch)
    out = tmp_path / FILES[command]
    interrupt(command, source, out, call=call)
    RUNS[command](source, out)
    assert out.read_bytes() == whole[command]
    assert list(tmp_path.iterdir()) == [out]


def test_run_that_is_interrupted_again_and_again_ends_with_the_same_bytes(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of all matrices do not fit, so the model runs for one part of the weights after the other."""
    save_after_each_window(monkeypatch)
    monkeypatch.setattr(collecting, "SAMPLE_BYTES", 4 * 128 * sum(collecting.FEWEST_ROWS) * 3)
    out = tmp_path / "out.safetensors"
    run_calibrate(source, out)
    expected = out.read_bytes()
    out.unlink()
    calls = 0
    while not out.exists():
        calls += 1
        with contextlib.suppress(KeyboardInterrupt):
            run_calibrate(source, out, interrupted_at(2))
    assert calls > WINDOWS
    assert out.read_bytes() == expected


def test_nothing_that_was_kept_is_computed_again(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []
    search = calibration.search_layer

    def counted(planned: Any, *args: Any, **keywords: Any) -> tuple[Any, Any]:
        searched.append(planned.name)
        return search(planned, *args, **keywords)

    monkeypatch.setattr(calibration, "search_layer", counted)
    out = tmp_path / "out.safetensors"
    interrupt("calibrate", source, out, call=WINDOWS + 3)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded again")

    monkeypatch.setattr(preparation.LoadedModel, "get", never)
    run_calibrate(source, out)
    assert len(searched) == len(set(searched)) == WEIGHTS
    assert out.read_bytes() == whole["calibrate"]


def test_windows_that_were_read_are_not_read_again(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_after_each_window(monkeypatch)
    out, seen = tmp_path / "out.safetensors", []
    interrupt("calibrate", source, out, call=5)
    run_calibrate(source, out, lambda done, total, what: seen.append(done) if what == "running the model" else None)
    assert seen == list(range(6, WINDOWS + 1))
    assert out.read_bytes() == whole["calibrate"]


def test_groups_that_were_measured_are_not_measured_again(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, measured = tmp_path / "out.json", []
    interrupt("sensitivity", source, out, call=3)
    divergences = sensitivity._Runner.divergences

    def counted(self: Any, group: str, noise: Any) -> Any:
        measured.append(group)
        return divergences(self, group, noise)

    monkeypatch.setattr(sensitivity._Runner, "divergences", counted)
    shown: list[int] = []
    run_sensitivity(source, out, lambda done, total, name: shown.append(done))
    groups = [group["name"] for group in json.loads(whole["sensitivity"])["groups"]]
    assert measured == groups[2:]
    assert shown == list(range(2, len(groups) + 1))
    assert out.read_bytes() == whole["sensitivity"]


def run_until_killed(command: str, source: Path, out: Path, call: int) -> None:
    """Run a command that kills its process when progress is told for the time that `call` says."""
    calls = itertools.count(1)

    def progress(*_: object) -> None:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        save_after_each_window(patch)
        RUNS[command](source, out, progress)


@pytest.mark.parametrize(("command", "call"), [("calibrate", 6), ("calibrate", WINDOWS + 4), ("sensitivity", 3)])
def test_killed_run_continues_to_the_same_bytes(
    command: str, call: int, source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_after_each_window(monkeypatch)
    out = tmp_path / FILES[command]
    # Not forked: what torch's threads leave in this process does not go with it.
    child = multiprocessing.get_context("spawn").Process(target=run_until_killed, args=(command, source, out, call))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [out.name + ".unfinished"]
    RUNS[command](source, out)
    assert out.read_bytes() == whole[command]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        ("calibrate", {"window": 32}, "another window (`window`)"),
        ("calibrate", {"max_tokens": 16 * 64}, "other tokens (`tokens`, `max_tokens`, `tokenizer`)"),
        ("calibrate", {"dtype": "float32"}, "another `dtype`"),
        ("sensitivity", {"tokens": 48}, "other tokens"),
        ("sensitivity", {"text": TEXT}, "another text (`text`)"),
        ("sensitivity", {"dtype": "bfloat16"}, "another `dtype`"),
    ],
)
def test_run_with_other_options_is_not_mixed_with_an_interrupted_one(
    command: str, options: dict[str, Any], expected: str, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / FILES[command]
    folder = interrupt(command, source, out, call=WINDOWS + 3 if command == "calibrate" else 3)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(OutputError) as refused:
        RUNS[command](source, out, **options)
    assert expected in str(refused.value)
    assert "repeat that command to continue it, or pass `overwrite` to start again" in str(refused.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    RUNS[command](source, out, **options, overwrite=True)
    fresh = tmp_path / "fresh" / FILES[command]
    fresh.parent.mkdir()
    RUNS[command](source, fresh, **options)
    assert out.read_bytes() == fresh.read_bytes() != whole[command]
    assert not folder.exists()


def test_run_that_was_killed_before_it_kept_anything_is_in_nobodys_way(source: Path, tmp_path: Path) -> None:
    out = tmp_path / FILES["sensitivity"]
    folder = interrupt("sensitivity", source, out, call=3)
    journal = folder / "journal"
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    RUNS["sensitivity"](source, out, tokens=48)
    assert list(tmp_path.iterdir()) == [out]


def test_overwrite_continues_its_own_run(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run_sensitivity(source, out, tokens=48)
    with pytest.raises(KeyboardInterrupt):
        run_sensitivity(source, out, interrupted_at(3), overwrite=True)
    journal = out.with_name("out.json.unfinished") / "journal"
    assert len(journal.read_text().splitlines()) == 1 + 2
    run_sensitivity(source, out, overwrite=True)
    assert out.read_bytes() == whole["sensitivity"]


def test_changed_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(source, tmp_path / "model"))
    out, config = tmp_path / "out.json", (model / "config.json").read_text()
    interrupt("sensitivity", model, out, call=3)
    (model / "config.json").write_text(json.dumps(json.loads(config) | {"rms_norm_eps": 0.1}))
    with pytest.raises(SourceChangedError, match=r"not the one that the interrupted run in out\.json\.unfinished was"):
        run_sensitivity(model, out)
    (model / "config.json").write_text(config)
    os.utime(model / "model.safetensors", (1, 1))
    with pytest.raises(SourceChangedError, match="the checkpoint is not the one"):
        run_sensitivity(model, out)


@pytest.mark.parametrize("command", ["calibrate", "sensitivity"])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_checkpoint_that_changes_while_it_is_measured_ends_the_run(
    file: str, command: str, source: Path, tmp_path: Path
) -> None:
    """The model was read before or after: its file would name a checkpoint that it may not be of."""
    model, out = Path(shutil.copytree(source, tmp_path / "model")), tmp_path / FILES[command]

    def change(*_: object) -> None:
        data = (model / file).read_bytes()
        (model / file).write_bytes(data[:-2] + bytes(b ^ 1 for b in data[-2:]))

    with pytest.raises(SourceChangedError, match=f"{file}: the source changed while it was being read"):
        RUNS[command](model, out, change)
    assert not out.exists()


@pytest.mark.parametrize("command", ["calibrate", "sensitivity"])
def test_damaged_journal_is_refused_and_a_cut_one_continued(
    command: str, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / FILES[command]
    journal = interrupt(command, source, out, call=WINDOWS + 4 if command == "calibrate" else 4) / "journal"
    content = journal.read_bytes()
    assert content.count(b"\n") >= 4
    for damaged in (
        b"",
        b"{}\n",
        b"nothing\n",
        content[:40],
        content.replace(b"unfinished_version", b"unfinished_Version"),
    ):
        journal.write_bytes(damaged)
        with pytest.raises(OutputError, match=r"journal is damaged, .* pass `overwrite`"):
            RUNS[command](source, out)
    *others, last = content.splitlines(keepends=True)
    for last_line in (last[:-7], last[:80] + b"1" + last[81:], b"{}\n", b""):
        journal.write_bytes(b"".join([*others, last_line]))
        with pytest.raises(KeyboardInterrupt):
            RUNS[command](source, out, interrupted_at(1))
        assert journal.read_bytes().startswith(b"".join(others))
    RUNS[command](source, out)
    assert out.read_bytes() == whole[command]


def test_damaged_activations_are_recorded_again(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    for number, name in enumerate(("activations", "samples")):
        out = tmp_path / f"{number}.safetensors"
        file = interrupt("calibrate", source, out, call=WINDOWS + 3) / name
        content = file.read_bytes()
        arrays = content.index(b"\n") + 1
        flipped = content[:arrays] + bytes(byte ^ 0x10 for byte in content[arrays:])
        file.write_bytes(flipped if name == "activations" else content[:1000])
        run_calibrate(source, out)
        assert out.read_bytes() == whole["calibrate"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_second_run_waits_for_the_first(overwrite: bool, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    if overwrite:
        interrupt("sensitivity", source, out, call=3, tokens=48)

    def meanwhile(*_: object) -> None:
        with pytest.raises(OutputError, match="another run is writing there"):
            run_sensitivity(source, out)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sensitivity(source, out, meanwhile, overwrite=overwrite)


def test_folder_of_somebody_else_is_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    foreign = tmp_path / "out.json.unfinished" / "notes.txt"
    foreign.parent.mkdir()
    foreign.write_text("mine")
    with pytest.raises(OutputError, match="expected a folder of an interrupted run"):
        run_sensitivity(source, out)
    assert foreign.read_text() == "mine"


def test_input_that_cannot_be_measured_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    divergence = sensitivity._divergence
    calls = 0

    def nan_later(*args: Any, **keywords: Any) -> float:
        nonlocal calls
        calls += 1
        return float("nan") if calls > 8 else divergence(*args, **keywords)

    monkeypatch.setattr(sensitivity, "_divergence", nan_later)
    with pytest.raises(EvaluationError, match="NaN"):
        run_sensitivity(source, out)
    assert list(tmp_path.iterdir()) == []


def test_commands_say_that_they_continue(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = {
        "calibrate": ["--text", text, "--window", 64, "--max-tokens", WINDOWS * 64, "--bits", 3],
        "sensitivity": ["--tokens", 32, "--window", 16],
    }
    for command, options in arguments.items():
        out = tmp_path / FILES[command]
        with monkeypatch.context() as patched:
            patched.setattr(calibration, "search_layer", stopped)
            patched.setattr(sensitivity, "_divergence", stopped)
            interrupted = invoke(command, source, out, *options)
        assert interrupted.exit_code != 0
        kept = out.with_name(out.name + ".unfinished").exists()
        continues = "run the same command again to continue where it stopped" if kept else "no results were kept"
        assert interrupted.stderr == f"interrupted; {continues}\n"
        assert kept == (command == "calibrate")
        done(command, source, out, *options)
        assert out.exists() and not out.with_name(out.name + ".unfinished").exists()


@pytest.mark.parametrize(
    ("command", "what"), [("calibrate", "calibrating"), ("sensitivity", "measuring sensitivities")]
)
def test_missing_transformers_is_named_with_what_needs_it(
    command: str, what: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(packages.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError) as raised:
        RUNS[command](source, tmp_path / FILES[command])
    assert str(raised.value).startswith(f"{what} needs t")
    assert list(tmp_path.iterdir()) == []


def test_passing_error_of_a_library_keeps_what_was_found(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as too little memory while something else runs."""
    out = tmp_path / FILES["sensitivity"]
    folder = interrupt("sensitivity", source, out, call=3)
    kept = (folder / "journal").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", fail)
        with pytest.raises(SourceError, match="no memory left"):
            RUNS["sensitivity"](source, out)
    assert (folder / "journal").read_bytes() == kept
    RUNS["sensitivity"](source, out)
    assert out.read_bytes() == whole["sensitivity"]


def fail(*_: Any) -> None:
    raise RuntimeError("no memory left")


@pytest.mark.parametrize("left", ["journal.partial", "samples", "activations.partial"])
def test_run_that_died_before_its_journal_is_started_again(
    left: str, source: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / FILES["sensitivity"]
    (tmp_path / f"{out.name}.unfinished").mkdir()
    (tmp_path / f"{out.name}.unfinished" / left).write_bytes(b"half")
    RUNS["sensitivity"](source, out)
    assert out.read_bytes() == whole["sensitivity"]
    assert list(tmp_path.iterdir()) == [out]
