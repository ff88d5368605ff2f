"""Calibrated runs whose source changes, whose machine fails, or whose work folder is not theirs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from calls import measure_sensitivity
from commands import raises
from helpers import folder_bytes

import pqweights
from pqweights.calibrate import calibrated, work_folder
from pqweights.calibrate.layer_passes import LayerPasses
from pqweights.checkpoint import writer
from pqweights.errors import (
    EvaluationError,
    MemoryShortageError,
    OutputError,
    PqweightsError,
    SourceChangedError,
    SourceError,
    SourceReadError,
)
from pqweights.planning.recipe import load_recipe
from pqweights.storage import open_store
from pqweights.storage.local import make_private

Act = Callable[[], object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a text, and the master that an undisturbed run makes."""
    folder = tmp_path_factory.mktemp("base")
    small = families.causal("Llama", hidden_size=128, intermediate_size=128, head_dim=64, num_hidden_layers=2)
    families.build(small, folder / "source")
    words = np.random.default_rng(3).integers(0, 490, 2300)
    (folder / "text.txt").write_text(" ".join(f"w{number}" for number in words))
    quantize(folder, folder / "source", folder / "master")
    return folder


@pytest.fixture
def source(base: Path, tmp_path: Path) -> Path:
    """A copy of the model that may be changed."""
    return Path(shutil.copytree(base / "source", tmp_path / "source"))


def quantize(base: Path, source: Path | str, out: Path | str, **options: Any) -> Any:
    asked = {"calibrate": base / "text.txt", "calibration_tokens": 2048, "threads": 1, **options}
    return pqweights.quantize(source, out, "t3", **asked)


def at(step: str, act: Act) -> Callable[[int, int, str], None]:
    """A function that shows progress, and acts once at a step."""
    left = [act]

    def show(done: int, total: int, what: str) -> None:
        if what == step and left:
            left.pop()()

    return show


def raising(error: BaseException) -> Act:
    def act() -> None:
        raise error

    return act


STEPS = ["layer 0 forward", "layer 0 backward", "encoding layer 0", "encoding layer 2"]


# No time or size tells of this one.
HIDDEN = "in place, time kept"


def changed(path: Path, how: str = HIDDEN) -> None:
    """Change a file's content, which keeps its size unless it is JSON, in one of the ways of programs."""
    data, status = path.read_bytes(), path.stat()
    new = data.replace(b'"', b' "', 1) if path.suffix == ".json" else data[:-3000] + bytes([1, 2, 3]) + data[-2997:]
    if how.startswith("in place"):
        with open(path, "r+b") as stream:
            stream.write(new)
    else:
        path.with_name("new").write_bytes(new)
        path.with_name("new").rename(path)
    if how.endswith("time kept"):
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("file", "how", "step"),
    [
        ("model.safetensors", "in place", STEPS[0]),
        ("model.safetensors", HIDDEN, STEPS[1]),
        ("model.safetensors", "renamed", STEPS[2]),
        ("model.safetensors", "renamed, time kept", STEPS[3]),
        ("config.json", HIDDEN, STEPS[2]),
        ("tokenizer.json", HIDDEN, STEPS[0]),
    ],
)
def test_a_source_that_changes_while_it_is_calibrated_ends_the_run(
    file: str, how: str, step: str, base: Path, source: Path, tmp_path: Path
) -> None:
    """What was learned of it goes, since nobody knows of which model it is; the former one gives the former bytes."""
    former = shutil.copytree(source, tmp_path / "former")
    show = at(step, lambda: changed(source / file, how))
    with raises(SourceChangedError, file):
        quantize(base, source, tmp_path / "out", calibration_progress=show)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["former", "source"]
    if step == STEPS[1]:
        for path in former.iterdir():
            shutil.copy2(path, source)
        quantize(base, source, tmp_path / "out")
        assert folder_bytes(tmp_path / "out") == folder_bytes(base / "master")


def test_a_source_that_changes_while_its_codes_are_stored_ends_the_run(
    base: Path, source: Path, tmp_path: Path
) -> None:
    calls = iter([lambda: changed(source / "model.safetensors")])

    def show(*_: Any) -> None:
        next(calls, lambda: None)()

    with raises(SourceChangedError, "model.safetensors"):
        quantize(base, source, tmp_path / "out", progress=show)
    assert not (tmp_path / "out/pqweights.json").exists()


def test_a_source_that_changed_since_a_kill_is_calibrated_anew(base: Path, source: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize(base, source, tmp_path / "out", calibration_progress=at(STEPS[1], raising(KeyboardInterrupt())))
    changed(source / "model.safetensors")
    for out in ("out", "fresh"):
        quantize(base, source, tmp_path / out)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "fresh") != folder_bytes(base / "master")


def test_a_source_that_was_only_touched_is_the_same(
    base: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises(SourceChangedError, ".out.calibration"):
        quantize(base, source, tmp_path / "out", calibration_progress=at(STEPS[2], (source / "config.json").touch))
    for path in source.iterdir():
        path.touch()
    monkeypatch.delattr(LayerPasses, "backward")  # nothing is learned again
    quantize(base, source, tmp_path / "out")
    assert folder_bytes(tmp_path / "out") == folder_bytes(base / "master")  # no time is stated


def test_an_export_is_of_the_model_whose_inputs_it_learned(base: Path, source: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"calibrate": base / "text.txt", "calibration_tokens": 4096, "rounding": "gptq"}
    acted: list[int] = []

    def show(done: int, total: int, what: str) -> None:
        if not acted and what != "reading the sample":
            acted.append(done)
            changed(source / "model.safetensors")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pqweights.calibrate.sample.WINDOW", 64)
        with raises(SourceChangedError, "model.safetensors"):
            pqweights.export(source, tmp_path / "out", "vllm", group_size=32, threads=1, progress=show, **asked)
    assert acted and not (tmp_path / "out/pqweights.json").exists()


def test_a_moved_branch_does_not_mix_two_commits(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hub_cases import Client, files_of
    from huggingface_hub.utils import close_session
    from loopback_hub import LoopbackHub

    other = Path(shutil.copytree(base / "source", tmp_path / "other"))
    changed(other / "model.safetensors", "in place")
    with LoopbackHub() as hub:
        Client(url=hub.url, home=tmp_path / "home", token=hub.token, patch=monkeypatch).set_up()
        commit = hub.commit("me/model", files_of(base / "source"))

        def move() -> None:
            hub.commit("me/model", files_of(other))

        quantize(base, "me/model", tmp_path / "out", calibration_progress=at(STEPS[2], move))
        quantize(base, "me/model", tmp_path / "again", revision=commit)
        close_session()
    made, right = folder_bytes(tmp_path / "out"), folder_bytes(base / "master")
    assert json.loads(made["pqweights.json"])["source"]["revision"] == commit
    assert made == folder_bytes(tmp_path / "again")
    assert {k: v for k, v in made.items() if "pqweights" not in k} == {
        k: v for k, v in right.items() if "pqweights" not in k
    }


def test_sensitivities_are_not_of_a_mixture(base: Path, source: Path, tmp_path: Path) -> None:
    show = at("layer 0 backward", lambda: changed(source / "model.safetensors"))
    with raises(SourceChangedError, "model.safetensors"):
        measure_sensitivity(source, load_recipe("q4"), base / "text.txt", tmp_path, progress=show)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# --- Failures that pass -----------------------------------------------------------------------------------------------

NO_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: 1 bytes.")


def failing_read(patch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    patch.setattr(os, "preadv", read)


def full_disk(patch: pytest.MonkeyPatch) -> None:
    def sync(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(writer.os, "fsync", sync)


def failing_layer(error: Exception) -> Callable[[pytest.MonkeyPatch], None]:
    """An error of torch in a layer, among the calls of transformers, and of Python where gradients come back."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise error

        patch.setattr(torch.nn.functional, "linear", fail)
        patch.setattr(torch.Tensor, "backward", fail)

    return apply


def failing_work_file(patch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "hidden-0000.safetensors")

    patch.setattr(LayerPasses, "load", load)


FAILURES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], type[PqweightsError]]] = {
    "a read that fails": (failing_read, SourceReadError),
    "a full disk": (full_disk, OutputError),
    "a file of the work that cannot be read": (failing_work_file, OutputError),
    "no memory for torch": (failing_layer(NO_MEMORY), MemoryShortageError),
    "no memory for Python": (failing_layer(MemoryError()), MemoryShortageError),
    "a refusal": (failing_layer(RuntimeError("something else")), SourceError),
}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("a read that fails", step) for step in (STEPS[0], STEPS[2])),
        *(("a full disk", step) for step in STEPS[:2]),
        *(("a file of the work that cannot be read", step) for step in STEPS[1:3]),
        *(("no memory for torch", step) for step in STEPS[:3]),
        ("no memory for Python", STEPS[1]),
        ("a refusal", STEPS[0]),
    ],
)
def test_a_failure_that_passes_leaves_what_was_calibrated(
    name: str, step: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, error = FAILURES[name]
    monkeypatch.setattr(calibrated, "MOST_KEPT_BYTES", 0)  # so that layers are computed for encoding, too
    with pytest.MonkeyPatch.context() as patch, raises(error, ".out.calibration") as caught:
        quantize(base, base / "source", tmp_path / "out", calibration_progress=at(step, lambda: apply(patch)))
    assert type(caught.value) is error
    kept = {path.name for path in (tmp_path / ".out.calibration").iterdir()}
    assert {"sample.safetensors", "hidden-0001.safetensors"} <= kept
    if name == "no memory for torch":
        quantize(base, base / "source", tmp_path / "out")
        assert folder_bytes(tmp_path / "out") == folder_bytes(base / "master")
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_bug_keeps_its_traceback_and_the_work(base: Path, tmp_path: Path) -> None:
    show = at(STEPS[1], raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match=r"^a bug$"):
        quantize(base, base / "source", tmp_path / "out", calibration_progress=show)
    assert (tmp_path / ".out.calibration/sample.safetensors").exists()


def test_an_error_before_anything_is_calibrated_leaves_nothing(base: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("w1 w2")
    with pytest.raises(EvaluationError) as caught:
        quantize(base, base / "source", tmp_path / "out", calibrate=tmp_path / "short.txt")
    assert ".out.calibration" not in str(caught.value) and [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_a_kill_leaves_what_was_calibrated(base: Path, tmp_path: Path) -> None:
    child = os.fork()  # which has what quantize imports
    if child == 0:
        killed = at(STEPS[2], lambda: os.kill(os.getpid(), signal.SIGKILL))
        quantize(base, base / "source", tmp_path / "out", calibration_progress=killed)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert (tmp_path / ".out.calibration/hidden-0001.safetensors").exists()
    quantize(base, base / "source", tmp_path / "out")
    assert folder_bytes(tmp_path / "out") == folder_bytes(base / "master")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_command_says_where_the_work_is(base: Path, tmp_path: Path) -> None:
    command = ["quantize", base / "source", tmp_path / "out", "-r", "t3", "--calibrate", base / "text.txt"]
    command += ["--calibration-tokens", 2048, "--threads", 1]
    process = subprocess.Popen(
        [sys.executable, "-m", "pqweights_cli", *map(str, command)],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell ignores it for its background jobs
    )
    try:
        end = time.monotonic() + 400
        while not (tmp_path / ".out.calibration/hidden-0001.safetensors").exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(400) == 130
        said = (process.stderr.read() if process.stderr else b"").decode().splitlines()
    finally:
        process.kill()
        process.communicate()
    assert str(tmp_path / ".out.calibration") in said[-1]


# --- The work folder --------------------------------------------------------------------------------------------------


def interrupted(base: Path, out: Path | str) -> None:
    """Leave what an interrupted calibration leaves."""
    with pytest.raises(KeyboardInterrupt):
        quantize(base, base / "source", out, calibration_progress=at(STEPS[0], raising(KeyboardInterrupt())))


def test_a_work_folder_is_private(base: Path, tmp_path: Path) -> None:
    interrupted(base, tmp_path / "out")
    assert (tmp_path / ".out.calibration").stat().st_mode & 0o777 == 0o700


def test_the_work_for_a_remote_result_is_the_users_own(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    monkeypatch.setenv("PQWEIGHTS_SCRATCH", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    address = "memory://calibrated/out"
    interrupted(base, address)
    (folder,) = scratch.iterdir()
    assert folder == work_folder.folder_beside(open_store(address)) and folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "sample.safetensors").exists() and not (tmp_path / "tmp").exists()
    quantize(base, base / "source", address)
    assert not list(scratch.iterdir())


def of_another_user(folder: Path, patch: pytest.MonkeyPatch) -> None:
    lstat = Path.lstat

    def foreign(path: Path) -> os.stat_result:
        status = lstat(path)
        return os.stat_result((*status[:4], status.st_uid + 1, *status[5:10])) if path == folder else status

    patch.setattr(Path, "lstat", foreign)


UNTRUSTED: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "one of another user": of_another_user,
    "one to which others may write": lambda folder, patch: folder.chmod(0o777),
    "of a group": lambda folder, patch: folder.chmod(0o770),
    "a link": lambda folder, patch: (folder.rename(folder.with_name("x")), folder.symlink_to("x")),
}


@pytest.mark.parametrize(
    ("is_remote", "name"), [*((False, name) for name in UNTRUSTED), (True, "one to which others may write")]
)
def test_the_work_folder_of_somebody_else_is_refused(
    is_remote: bool, name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forged sample in it would decide what a master is good for."""
    tmp_path.chmod(0o700)
    (tmp_path / "scratch").mkdir(mode=0o700)
    monkeypatch.setenv("PQWEIGHTS_SCRATCH", str(tmp_path / "scratch"))
    out: Any = "memory://foreign/out" if is_remote else tmp_path / "out"
    interrupted(base, out)
    folder = work_folder.folder_beside(open_store(out))
    UNTRUSTED[name](folder, monkeypatch)
    before = folder_bytes(folder)
    with raises(OutputError, folder):
        quantize(base, base / "source", out)
    assert folder_bytes(folder) == before and not (tmp_path / "out").exists()


def test_the_scratch_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch").chmod(0o777)
    with raises(OutputError, "scratch"):
        make_private(tmp_path / "scratch")
    make_private(tmp_path / "scratch/own")  # who may write around it could replace it anyhow
    (tmp_path / "scratch").chmod(0o1777)
    (tmp_path / "scratch/own").chmod(0o777)
    with raises(OutputError, "scratch"):
        make_private(tmp_path / "scratch/own")


def test_a_folder_that_no_calibration_made_is_left_alone(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / ".out.calibration"
    folder.mkdir()
    (folder / "notes.safetensors").write_text("mine")
    (folder / "identity").write_text("id_ed25519")
    with raises(OutputError, ".out.calibration", "'notes.safetensors'"):
        quantize(base, base / "source", tmp_path / "out")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "notes.safetensors": "mine",
        "identity": "id_ed25519",
    }


def test_what_somebody_put_into_a_work_folder_stays(base: Path, tmp_path: Path) -> None:
    interrupted(base, tmp_path / "out")
    (tmp_path / ".out.calibration/notes.txt").write_text("mine")
    quantize(base, base / "source", tmp_path / "out")
    assert (tmp_path / ".out.calibration/notes.txt").read_text() == "mine"
    assert not list((tmp_path / ".out.calibration").glob("*.safetensors"))
