"""The driver: resuming after kills, atomic results, refusals, locking, determinism, rescue and strictness."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import safetensors
from helpers import (
    KILL_FUNCTIONS,
    as_float32,
    bf16,
    f16,
    f32,
    folder_bytes,
    gaussian,
    killed_runs,
    read_all,
    run_command,
    small_checkpoint,
    write_checkpoint,
)
from pqweights_cli.main import app
from typer.testing import CliRunner

from pqweights.checkpoint import writer
from pqweights.codecs.lloyd_max import DISTORTION
from pqweights.errors import OutputError, PqweightsError, SourceChangedError, SourceError
from pqweights.kernels import SIGNS
from pqweights.quantize import Quantize
from pqweights.rewrite import encode_job, jobs, stream
from pqweights.rewrite.task import RewriteReport
from pqweights.rewrite.workspace import Workspace

SHARD_BYTES = 20_000  # four output shards of the small checkpoint
TENSORS = 10


class Killed(BaseException):
    """Stands for a kill inside the process of the test."""


def command(source: Path, **options: Any) -> dict[str, Any]:
    return {"quantize": str(source), "max_shard_bytes": SHARD_BYTES, **options}


@pytest.fixture(scope="module", autouse=True)
def _several_chunks() -> Iterator[None]:
    """Give tiny tensors several chunks, as in the killed runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "CHUNK_WEIGHTS", 4096)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    run_command(command(source), out)
    return folder_bytes(out)


@pytest.fixture
def own_source(tmp_path: Path) -> Path:
    """A source that the test may change."""
    return small_checkpoint(tmp_path / "model")


def interrupt(monkeypatch: pytest.MonkeyPatch, work: dict[str, Any], out: Path, tensors: int = 4) -> None:
    """Leave what a run leaves that is killed when `tensors` tensors are in the journal."""
    done = iter(range(tensors))
    record = Workspace.record

    def record_or_die(self: Workspace, finished: Any) -> None:
        if next(done, None) is None:
            raise Killed
        record(self, finished)

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "record", record_or_die)
        with pytest.raises(Killed):
            run_command(work, out)


def journaled(out: Path) -> set[str]:
    """The tensors that the journal calls finished."""
    path = out / ".pqweights/journal.jsonl"
    lines = path.read_bytes().split(b"\n")[1:-1] if path.exists() else []
    return {json.loads(line)["name"] for line in lines}


def watched(monkeypatch: pytest.MonkeyPatch, work: dict[str, Any], out: Path) -> tuple[RewriteReport, set[str]]:
    """The report of a run, and the tensors for which it began a job."""
    begun = set()
    job = Quantize.job

    def watching(self: Quantize, planned: Any, tensor: Any, buffers: Any) -> Any:
        begun.add(planned.name)
        return job(self, planned, tensor, buffers)

    with monkeypatch.context() as patch:
        patch.setattr(Quantize, "job", watching)
        return run_command(work, out), begun


def check_final_names(out: Path, undisturbed: dict[str, bytes]) -> None:
    """Check that every file under a final name loads, and is what an undisturbed run writes."""
    for path in out.rglob("*"):
        name = path.relative_to(out).as_posix()
        if path.is_dir() or name.startswith(".pqweights/"):
            continue
        if name.endswith(".safetensors"):
            with safetensors.safe_open(path, framework="numpy") as opened:
                assert len(list(opened.keys())) > 0
        elif name.endswith(".json"):
            json.loads(path.read_bytes())
        assert path.read_bytes() == undisturbed[name], name


# --- kills ---


@pytest.fixture(scope="module")
def kill_points(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """For each function of os, all points at which a run was killed, each with the folder that it left."""
    folder = tmp_path_factory.mktemp("kills")
    (counts,) = killed_runs(command(source), [{"out": str(folder / "counted")}])
    points: dict[str, list[dict[str, Any]]] = {name: [] for name in KILL_FUNCTIONS}
    for name in KILL_FUNCTIONS:
        step = 4 if name == "pwrite" else 1
        moments = ("before", "half", "after") if name in ("write", "pwrite") else ("before", "after")
        for number in range(1, counts[name] + 1, step):
            for when in moments:
                out = folder / f"{name}-{number}-{when}"
                points[name].append({"out": str(out), "function": name, "number": number, "when": when})
    killed_runs(command(source), [point for group in points.values() for point in group])
    return points


@pytest.mark.parametrize("function", KILL_FUNCTIONS)
def test_run_killed_at_any_call_resumes_to_the_same_folder(
    function: str,
    source: Path,
    undisturbed: dict[str, bytes],
    kill_points: dict[str, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kill_points[function], f"os.{function} is never called: this test no longer kills anything"
    failures = []
    for point in kill_points[function]:
        out = Path(point["out"])
        where = f"{point['when']} call {point['number']}"
        check_final_names(out, undisturbed)
        finished = journaled(out)
        try:
            report, begun = watched(monkeypatch, command(source), out)
        except PqweightsError as error:
            failures.append(f"{where}: refused: {error}")
            continue
        assert folder_bytes(out) == undisturbed, where
        assert report.resumed == (TENSORS if report.already_done else len(finished)), where
        assert not begun & finished, where
    assert not failures, "\n".join(failures)


def test_kills_cover_every_state(undisturbed: dict[str, bytes], kill_points: dict[str, list[dict[str, Any]]]) -> None:
    """The sweep above reaches each state that matters; it would test nothing if the driver changed its calls."""
    states = [Path(point["out"]) for group in kill_points.values() for point in group]
    assert len(states) > 100
    assert len(kill_points["write"]) == 3 * TENSORS
    shards = sum(name.endswith(".safetensors") for name in undisturbed)  # renamed twice: complete, then published
    renames = sum(not name.endswith("/") for name in undisturbed) + shards + 1  # and the journal's
    assert len(kill_points["replace"]) == 2 * renames


def test_run_killed_repeatedly_resumes(source: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """Each run is killed at its third journal entry."""
    out = tmp_path / "out"
    for round_ in range(3):
        killed_runs(command(source), [{"out": str(out), "function": "write", "number": 3, "when": "after"}])
        assert len(journaled(out)) == 3 * (round_ + 1)
        check_final_names(out, undisturbed)
    report = run_command(command(source), out)
    assert report.resumed == 9
    assert folder_bytes(out) == undisturbed


def test_resumed_run_reads_only_unfinished_tensors(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_command(command(source), tmp_path / "whole").source_bytes_read
    out = tmp_path / "out"
    interrupt(monkeypatch, command(source), out, tensors=8)
    finished = journaled(out)
    report, begun = watched(monkeypatch, command(source), out)
    assert begun == {tensor.name for tensor in report.plan.tensors} - finished
    read = {
        tensor.name: tensor.weights * {"BF16": 2, "F32": 4, "I64": 8}[tensor.dtype] for tensor in report.plan.tensors
    }
    # The constant tensor and the tiny one are read in two passes; both were finished.
    passes = {"model.layers.0.mlp.up_proj.weight": 2, "model.layers.0.mlp.down_proj.weight": 2}
    assert passes.keys() <= finished
    assert whole - report.source_bytes_read == sum(read[name] * passes.get(name, 1) for name in finished)


def test_cut_journal_line_is_dropped(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, command(source), tmp_path / "cut", tensors=5)
    whole = (tmp_path / "cut/.pqweights/journal.jsonl").read_bytes()
    last_line = whole.rindex(b"\n", 0, -1) + 1
    for end in (last_line + 1, (last_line + len(whole)) // 2, len(whole) - 2, len(whole) - 1):
        out = tmp_path / f"cut-{end}"
        shutil.copytree(tmp_path / "cut", out)
        os.truncate(out / ".pqweights/journal.jsonl", end)
        report = run_command(command(source), out)
        assert report.resumed == 4
        assert folder_bytes(out) == undisturbed


def test_journal_line_after_a_cut_one_is_whole(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is appended after a cut line was dropped must not be joined to its rest."""
    out = tmp_path / "out"
    interrupt(monkeypatch, command(source), out, tensors=4)
    journal = out / ".pqweights/journal.jsonl"
    os.truncate(journal, journal.stat().st_size - 5)
    interrupt(monkeypatch, command(source), out, tensors=2)
    assert len(journaled(out)) == 3 + 2
    assert run_command(command(source), out).resumed == 5
    assert folder_bytes(out) == undisturbed


@pytest.mark.parametrize("damage", ["flip", "zeros", "short", "missing"])
def test_journaled_tensor_that_the_disk_lost_is_redone(
    damage: str, source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss may keep the journal and lose pages of the partial shard."""
    out = tmp_path / "out"
    interrupt(monkeypatch, command(source), out, tensors=8)
    finished = journaled(out)
    in_partial = {"model.layers.0.mlp.down_proj.weight", "model.layers.0.mamba.A_log", "model.layers.0.position_ids"}
    assert in_partial <= finished
    partial = out / ".pqweights/model-00003-of-00004.safetensors.partial"
    data = bytearray(partial.read_bytes())
    if damage == "flip":
        data[-1] ^= 1  # in the codes, which come last
    elif damage == "zeros":
        data = bytearray(len(data))
    elif damage == "short":
        data = data[: len(data) // 2]
    partial.write_bytes(data)
    if damage == "missing":
        partial.unlink()
    _, begun = watched(monkeypatch, command(source), out)
    assert folder_bytes(out) == undisturbed
    # Nothing is redone of complete shards, and of this one only what was damaged.
    assert begun & finished == ({"model.layers.0.mlp.down_proj.weight"} if damage == "flip" else in_partial)


def test_finished_shard_that_the_disk_lost_is_redone(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupt(monkeypatch, command(source), out, tensors=9)
    (out / ".pqweights/model-00002-of-00004.safetensors").unlink()
    run_command(command(source), out)
    assert folder_bytes(out) == undisturbed


def test_run_resumes_with_another_thread_count(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupt(monkeypatch, command(source), out)
    report = run_command(command(source), out, threads=5)
    assert report.resumed == 4
    assert folder_bytes(out) == undisturbed


def test_run_killed_after_publishing_its_shards_resumes_on_a_full_disk(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are already on the disk need no more room, staged or published."""
    out = tmp_path / "out"

    def killed(*arguments: Any) -> str:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("pqweights.rewrite.driver.write_whole", killed)
        with pytest.raises(Killed):
            run_command(command(source), out)
    assert len(list(out.glob("*.safetensors"))) == 4
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    run_command(command(source), out)
    assert folder_bytes(out) == undisturbed


# --- runs that cannot be resumed ---


def change_size(path: Path) -> None:
    with open(path, "ab") as stream:
        stream.write(b" ")


def change_time(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("model-00002-of-00002.safetensors", change_time),
        ("config.json", change_time),
        ("config.json", change_size),
        ("tokenizer.json", change_time),
        ("tokenizer.json", change_size),
        ("code/modeling.py", change_size),
    ],
)
def test_changed_source_is_refused(
    file: str, change: Any, own_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupt(monkeypatch, command(own_source), out)
    change(own_source / file)
    before = folder_bytes(out)
    with pytest.raises(SourceChangedError, match=file.replace(".", r"\.")):
        run_command(command(own_source), out)
    assert folder_bytes(out) == before
    report = run_command(command(own_source, overwrite=True), out)
    assert report.resumed == 0
    run_command(command(own_source), tmp_path / "fresh")
    assert folder_bytes(out) == folder_bytes(tmp_path / "fresh")


def test_weight_file_of_another_size_is_refused(
    own_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors and so the plan are the same, but the header of the file is longer."""
    out = tmp_path / "out"
    interrupt(monkeypatch, command(own_source), out)
    file = own_source / "model-00001-of-00002.safetensors"
    data, time = file.read_bytes(), file.stat().st_mtime_ns
    length = int.from_bytes(data[:8], "little")
    file.write_bytes((length + 8).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 8 + data[8 + length :])
    os.utime(file, ns=(time, time))
    with pytest.raises(SourceChangedError, match=file.name):
        run_command(command(own_source), out)


def test_new_companion_is_refused(own_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    interrupt(monkeypatch, command(own_source), out)
    (own_source / "vocab.txt").write_text("a")
    with pytest.raises(SourceChangedError, match=r"vocab\.txt"):
        run_command(command(own_source), out)


@pytest.mark.parametrize("other", [{"recipe": "q4"}, {"max_shard_bytes": 2 * SHARD_BYTES}])
def test_interrupted_run_of_another_command_is_refused(
    other: dict[str, Any], source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupt(monkeypatch, command(source, **other), out)
    before = folder_bytes(out)
    with pytest.raises(OutputError, match="interrupted run"):
        run_command(command(source), out)
    assert folder_bytes(out) == before
    assert run_command(command(source, overwrite=True), out).resumed == 0
    assert folder_bytes(out) == undisturbed


def test_overwrite_resumes_its_own_interrupted_run(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupt(monkeypatch, command(source, overwrite=True), out)
    assert run_command(command(source, overwrite=True), out).resumed == 4
    assert folder_bytes(out) == undisturbed


# --- finished folders ---


def test_finished_folder_is_left_alone(source: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_command(command(source), out)
    stamps = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*")}
    report = run_command(command(source), out)
    assert report.already_done
    assert report.source_bytes_read < 60_000  # headers and fingerprint, no weights
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*")} == stamps
    assert folder_bytes(out) == undisturbed


def test_finished_folder_is_recognised_for_a_copied_source(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """A copy that keeps the times of its files is the same source."""
    run_command(command(source), tmp_path / "out")
    copied = shutil.copytree(source, tmp_path / "copy")
    assert run_command(command(copied), tmp_path / "out").already_done
    assert folder_bytes(tmp_path / "out") == undisturbed


def test_result_older_than_its_source_is_not_recognised(own_source: Path, tmp_path: Path) -> None:
    """The fingerprint covers only the ends of a tensor; a changed middle shows in the time of the file."""
    out = tmp_path / "out"
    run_command(command(own_source), out)
    weights = next(own_source.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(OutputError, match="overwrite"):
        run_command(command(own_source), out)


def test_failing_run_leaves_the_result_that_it_would_replace(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_command(command(source, recipe="q4"), out)
    before = folder_bytes(out)
    broken = shutil.copytree(source, tmp_path / "broken")
    weights = sorted(broken.glob("*.safetensors"))[-1]
    data = bytearray(weights.read_bytes())
    data[-4096:] = b"\xff" * 4096  # NaN in every floating dtype
    weights.write_bytes(data)
    with pytest.raises(SourceError, match="NaN"):
        run_command(command(broken, overwrite=True), out)
    assert folder_bytes(out) == before


def test_file_of_the_user_is_not_replaced(source: Path, tmp_path: Path) -> None:
    """A companion of the new source has the name of a file that the user put beside the old result."""
    out = tmp_path / "out"
    run_command(command(source, recipe="q4"), out)
    own = shutil.copytree(source, tmp_path / "own")
    (own / "NOTES.md").write_text("the model's")
    (out / "NOTES.md").write_text("the user's")
    before = folder_bytes(out)
    with pytest.raises(OutputError, match=r"NOTES\.md"):
        run_command(command(own, overwrite=True), out)
    assert folder_bytes(out) == before


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json"])
def test_result_with_other_small_files_is_not_recognised(file: str, own_source: Path, tmp_path: Path) -> None:
    """The weights are the same, but the result of the command is not."""
    out = tmp_path / "out"
    run_command(command(own_source), out)
    (own_source / file).write_text(json.dumps({"torch_dtype": "bfloat16", "changed": True}))
    with pytest.raises(OutputError, match="overwrite"):
        run_command(command(own_source), out)
    run_command(command(own_source, overwrite=True), out)
    assert b"changed" in (out / file).read_bytes()


def test_result_that_lost_a_shard_is_not_recognised(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_command(command(source), out)
    (out / "model-00002-of-00004.safetensors").unlink()
    try:
        report = run_command(command(source), out)
    except PqweightsError:
        return  # refused: fine
    assert not report.already_done or (out / "model-00002-of-00004.safetensors").exists()


@pytest.mark.parametrize("other", [{"recipe": "q4"}, {"max_shard_bytes": 2 * SHARD_BYTES}])
def test_finished_folder_of_another_command_is_only_replaced_on_request(
    other: dict[str, Any], source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run_command(command(source, **other), out)
    (out / "README.md").write_text("our card")
    (out / "code/notes.txt").write_text("foreign")
    (out / "model-99999.safetensors").write_bytes(b"foreign")
    before = folder_bytes(out)
    with pytest.raises(OutputError, match="--overwrite"):
        run_command(command(source), out)
    assert folder_bytes(out) == before
    run_command(command(source, overwrite=True), out)
    foreign = {"README.md": b"our card", "code/notes.txt": b"foreign", "model-99999.safetensors": b"foreign"}
    assert folder_bytes(out) == undisturbed | foreign


@pytest.mark.parametrize("function", ["unlink", "rmdir", "replace", "mkdir"])
def test_overwriting_run_killed_at_any_call_resumes(
    function: str, source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """A result with a foreign file beside it is replaced; kills also come while the old files are removed."""
    foreign = {"README.md": b"our card", "notes.txt": b"foreign"}
    old = tmp_path / "old"
    run_command(command(source, recipe="q4"), old)
    for name, data in foreign.items():
        (old / name).write_bytes(data)
    work = command(source, overwrite=True)
    counted = shutil.copytree(old, tmp_path / "counted")
    (counts,) = killed_runs(work, [{"out": str(counted)}])
    assert folder_bytes(counted) == undisturbed | foreign
    points = []
    for number in range(1, counts[function] + 1):
        for when in ("before", "after"):
            out = shutil.copytree(old, tmp_path / f"{number}-{when}")
            points.append({"out": str(out), "function": function, "number": number, "when": when})
    killed_runs(work, points)
    failures = []
    for point in points:
        out = Path(point["out"])
        try:
            run_command(work, out)
        except PqweightsError as error:
            failures.append(f"{point['when']} call {point['number']}: refused: {error}")
            continue
        assert folder_bytes(out) == undisturbed | foreign, point
    assert points
    assert not failures, "\n".join(failures)


def test_foreign_folder_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"thesis\.tex"):
            run_command(command(source, overwrite=overwrite), out)
        assert folder_bytes(out) == {"thesis.tex": b"years of work"}


def test_manifest_cannot_make_overwrite_remove_files_elsewhere(source: Path, tmp_path: Path) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim.txt"
    victim.write_text("keep me")
    run_command(command(source, recipe="q4"), out)
    manifest = json.loads((out / "pqweights.json").read_bytes())
    for name in ("../victim.txt", str(victim), "code/../../victim.txt"):
        manifest["files"][name] = {"bytes": 7, "sha256": "0" * 64}
    (out / "pqweights.json").write_text(json.dumps(manifest))
    run_command(command(source, overwrite=True), out)
    assert victim.read_text() == "keep me"


def test_output_must_lie_outside_the_source(own_source: Path) -> None:
    before = folder_bytes(own_source)
    for out in (own_source, own_source / "out", own_source / ".." / own_source.name, own_source.parent):
        with pytest.raises(OutputError, match="outside the source"):
            run_command(command(own_source), out)
    assert folder_bytes(own_source) == before


# --- two at once ---


@pytest.fixture
def holder(source: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in another process that has finished two tensors into tmp_path/out and waits."""
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from helpers import run_command, small_chunks
        from pathlib import Path
        from pqweights.rewrite.workspace import Workspace
        small_chunks()
        record, seen = Workspace.record, []
        def stand_still(self, finished):
            if len(seen) == 2:
                print("holding", flush=True)
                sys.stdin.read()
            seen.append(finished)
            record(self, finished)
        Workspace.record = stand_still
        run_command({"quantize": sys.argv[2], "max_shard_bytes": int(sys.argv[3])}, Path(sys.argv[4]))
    """
    arguments = [str(Path(helpers.__file__).parent), str(source), str(SHARD_BYTES), str(tmp_path / "out")]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        yield process
        process.kill()


def settled(folder: Path) -> dict[str, bytes]:
    """The files of a waiting run, once its threads have finished the chunks that they were given."""
    before: dict[str, bytes] = {}
    while (now := folder_bytes(folder)) != before:
        before = now
        time.sleep(0.2)
    return before


@pytest.mark.parametrize("overwrite", [False, True])
def test_second_run_is_refused_while_the_first_works(
    overwrite: bool, holder: subprocess.Popen[str], source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    before = settled(tmp_path / "out")
    for work in (command(source, overwrite=overwrite), command(source, overwrite=overwrite, recipe="q4")):
        with pytest.raises(OutputError, match="another run"):
            run_command(work, tmp_path / "out")
        assert folder_bytes(tmp_path / "out") == before
    holder.communicate()  # closes its stdin, so that it continues
    assert holder.returncode == 0
    assert folder_bytes(tmp_path / "out") == undisturbed


def test_lock_of_a_killed_run_does_not_block(
    holder: subprocess.Popen[str], source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / "out/.pqweights/lock").exists()
    assert run_command(command(source), tmp_path / "out").resumed == 2
    assert folder_bytes(tmp_path / "out") == undisturbed


# --- determinism ---


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_output_is_identical_across_thread_counts(
    threads: int, source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    run_command(command(source), tmp_path / "out", threads=threads)
    assert folder_bytes(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("chunk_weights", [128, 1280, 1 << 20])
def test_output_is_identical_across_chunk_sizes(
    chunk_weights: int,
    source: Path,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "CHUNK_WEIGHTS", chunk_weights)
    run_command(command(source), tmp_path / "out")
    assert folder_bytes(tmp_path / "out") == undisturbed


def test_errors_are_identical_to_the_last_digit_across_threads_and_chunks(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest rounds to seven digits, which would mostly hide sums in another order."""
    monkeypatch.setattr(encode_job, "rounded", lambda value: value)
    found = set()
    for chunk_weights, threads in ((128, 2), (1280, 5), (1 << 20, 1)):
        monkeypatch.setattr(jobs, "CHUNK_WEIGHTS", chunk_weights)
        records = run_command(command(source), tmp_path / f"{chunk_weights}", threads=threads).records
        found.add(tuple((record.relative_mse, record.energy) for record in records))
    assert len(found) == 1


def test_output_does_not_depend_on_place_and_time_of_the_source(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    moved = shutil.copytree(source, tmp_path / "elsewhere/of/another/name")
    for number, path in enumerate(sorted(moved.rglob("*"))):
        os.utime(path, (10**9 + number, 10**9 + number))
    run_command(command(moved), tmp_path / "out", threads=3)
    assert folder_bytes(tmp_path / "out") == undisturbed


def test_no_file_holds_a_path_host_or_time(source: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    host = socket.gethostname().encode()
    for name, data in undisturbed.items():
        if name.endswith(".json"):
            assert str(source).encode() not in data and str(source.parent).encode() not in data, name
            assert str(Path.home()).encode() + b"/" not in data, name
            assert len(host) < 4 or host not in data, name
            keys = {key for key, _ in walk(json.loads(data))}
            assert not keys & {"time", "date", "created", "host", "hostname", "threads", "path"}, name
    run_command(command(source), tmp_path / "out")
    assert str(tmp_path).encode() not in b"".join(folder_bytes(tmp_path / "out").values())


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values of nested JSON objects."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


@pytest.mark.parametrize("missing", ["posix_fallocate", "sched_getaffinity"])
def test_run_without_linux_calls(
    missing: str, source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS does not have them."""
    monkeypatch.delattr(os, missing)
    arguments = ["quantize", str(source), str(tmp_path / "out"), "--max-shard-size", str(SHARD_BYTES)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.exception
    assert folder_bytes(tmp_path / "out") == undisturbed


# --- failures ---


def test_non_finite_weight_leaves_nothing(tmp_path: Path) -> None:
    values = gaussian(64, 128, seed=1)
    values[63, 127] = np.inf
    tensors = {f"layers.{n}.mlp.up_proj.weight": bf16(gaussian(64, 128, seed=n)) for n in range(6)}
    source = write_checkpoint(tmp_path / "model", tensors, {"layers.9.mlp.up_proj.weight": bf16(values)})
    with pytest.raises(SourceError, match=r"layers\.9\.mlp\.up_proj\.weight.*\[63, 127\]"):
        run_command(command(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_run_resumes_after_a_full_disk(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    pwrite, calls = os.pwrite, iter(range(40))

    def full(*arguments: Any) -> int:
        if next(calls, None) is None:
            raise OSError(28, "No space left on device")
        return pwrite(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OutputError, match="disk is full"):
            run_command(command(source), out)
    check_final_names(out, undisturbed)
    assert run_command(command(source), out).resumed > 0
    assert folder_bytes(out) == undisturbed


def test_short_writes_are_completed(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operating system may write less than it was asked to."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda to, data, at: pwrite(to, data[: max(1, len(data) // 3)], at))
    monkeypatch.setattr(os, "preadv", lambda of, views, at: preadv(of, [views[0][: max(1, len(views[0]) // 3)]], at))
    run_command(command(source), tmp_path / "out")
    assert folder_bytes(tmp_path / "out") == undisturbed


def test_journal_line_that_was_written_in_part_is_dropped(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up cuts a journal entry; entries that are added later must still be read."""
    out = tmp_path / "out"
    write, calls = os.write, iter(range(1, 100))

    def short_once(to: int, data: bytes) -> int:
        number = next(calls)
        if number == 6:
            raise Killed
        return write(to, data[:20] if number == 3 else data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short_once)
        with pytest.raises((Killed, OutputError)):
            run_command(command(source), out)
    run_command(command(source), out)
    assert folder_bytes(out) == undisturbed


# --- rescue, strictness, norms ---


def walsh_rows(rows: int, seed: int, signed: bool) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows of the Walsh-Hadamard matrix, or times the signs of the rescue: the worst blocks of that rotation."""
    matrix = np.array([[1.0]])
    while len(matrix) < 128:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    chosen = matrix[np.random.default_rng(seed).integers(128, size=rows)].astype(np.float32)
    return 0.01 * chosen * (SIGNS if signed else 1)


def hostile_checkpoint(folder: Path) -> Path:
    """A weight for which both rotations are bad, between two ordinary ones."""
    hostile = np.concatenate([walsh_rows(32, 1, False), walsh_rows(32, 2, True)])
    return write_checkpoint(
        folder,
        {
            "layers.0.mlp.up_proj.weight": bf16(gaussian(64, 128, seed=1)),
            "layers.1.mlp.up_proj.weight": bf16(hostile),
            "layers.2.mlp.up_proj.weight": bf16(gaussian(64, 128, seed=2)),
        },
        config={"torch_dtype": "bfloat16"},
    )


@pytest.mark.parametrize("bits", [2, 5])
def test_weight_that_exceeds_its_promise_is_named(bits: int, tmp_path: Path) -> None:
    source, out = hostile_checkpoint(tmp_path / "model"), tmp_path / "out"
    result = CliRunner().invoke(app, ["quantize", str(source), str(out), "--bits", str(bits), "--json"])
    assert result.exit_code == 0, result.output
    name = "layers.1.mlp.up_proj.weight"
    assert json.loads(result.stdout)["exceeding"] == [name]
    manifest = json.loads((out / "pqweights.json").read_bytes())
    assert manifest["exceeding"] == [name]
    entry = next(tensor for tensor in manifest["tensors"] if tensor["name"] == name)
    assert entry["relative_mse"] > 1.25 * DISTORTION[bits]
    summary = CliRunner().invoke(app, ["quantize", str(source), str(tmp_path / "text"), "--bits", str(bits)])
    assert [line for line in summary.stdout.splitlines() if "WARNING" in line and name in line]


def test_better_rotation_is_kept_if_neither_is_good(tmp_path: Path) -> None:
    """Three quarters of the blocks are worst for one rotation, so the other is taken."""
    for signed, best in ((False, "signed-hadamard"), (True, "hadamard")):
        hostile = np.concatenate([walsh_rows(48, 1, signed), walsh_rows(16, 2, not signed)])
        source = write_checkpoint(tmp_path / f"model-{signed}", {"layers.1.mlp.up_proj.weight": f32(hostile)})
        (record,) = run_command(command(source), tmp_path / f"out-{signed}").records
        assert record.state == {"rotation": best, "norm_exponent": 0}
        assert record.relative_mse is not None and record.relative_mse > 1.25 * DISTORTION[5]
        run_command(
            {"export": str(tmp_path / f"out-{signed}"), "target": "bf16", "dtype": "source"}, tmp_path / f"x-{signed}"
        )
        decoded = as_float32(read_all(tmp_path / f"x-{signed}")["layers.1.mlp.up_proj.weight"]).astype(np.float64)
        error = ((decoded - hostile) ** 2).sum() / (hostile.astype(np.float64) ** 2).sum()
        assert record.relative_mse == pytest.approx(error, rel=1e-4)


def test_strict_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    source, out = hostile_checkpoint(tmp_path / "model"), tmp_path / "out"
    arguments = ["quantize", str(source), str(out), "--strict", "--max-shard-size", "6000"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "layers.1.mlp.up_proj.weight" in result.stderr and len(result.stderr.splitlines()) == 1
    assert not out.exists()


def test_strict_refuses_finished_and_interrupted_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hostile_checkpoint(tmp_path / "model")
    run_command(command(source), tmp_path / "finished")
    with pytest.raises(SourceError, match="strict"):
        run_command(command(source, strict=True), tmp_path / "finished")
    interrupt(monkeypatch, command(source), tmp_path / "interrupted", tensors=2)
    with pytest.raises(SourceError, match="strict"):
        run_command(command(source, strict=True), tmp_path / "interrupted")


def test_strict_accepts_rescued_weights(source: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    run_command(command(source, strict=True), tmp_path / "out")
    assert folder_bytes(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_constant_weight_is_rescued_at_the_same_size(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint(tmp_path / "model", {"mlp.up_proj.weight": bf16(np.full((64, 256), 0.0125))})
    work = command(source, recipe={2: "q2", 5: "q5", 8: "q8"}[bits])
    rescued = run_command(work, tmp_path / "rescued")
    assert rescued.records[0].state == {"rotation": "signed-hadamard", "norm_exponent": 0}
    with monkeypatch.context() as patch:
        patch.setattr("pqweights.codecs.protocol.RESCUE_FACTOR", float("inf"))
        plain = run_command(work, tmp_path / "plain")
    assert plain.records[0].state == {"rotation": "hadamard", "norm_exponent": 0}
    assert rescued.plan.output_bytes == plain.plan.output_bytes
    assert rescued.records[0].relative_mse is not None and plain.records[0].relative_mse is not None
    assert rescued.records[0].relative_mse < 1.5 * DISTORTION[bits]  # all blocks are the same
    assert plain.records[0].relative_mse > 5 * rescued.records[0].relative_mse


WIDE = gaussian(64, 128, seed=3) * np.exp2(np.linspace(-60, 60, 64))[:, None].astype(np.float32)


@pytest.mark.parametrize(
    ("values", "make"),
    [
        (gaussian(64, 128, seed=1, scale=1e-9), bf16),
        (gaussian(64, 128, seed=1, scale=1e-9), f32),
        (gaussian(64, 128, seed=2, scale=1e30), bf16),
        (gaussian(64, 128, seed=2, scale=1e30), f32),
        (gaussian(64, 128, seed=2, scale=1e37), f32),
        (gaussian(64, 128, seed=2, scale=2e-40), f32),  # subnormal float32
        (np.clip(gaussian(64, 128, seed=2, scale=15000), -65000, 65000), f16),
        (WIDE, f32),
        (WIDE, bf16),
    ],
)
def test_norms_outside_float16_get_an_exponent(values: Any, make: Any, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", {"mlp.up_proj.weight": make(values)})
    (record,) = run_command(command(source), tmp_path / "out").records
    assert record.state is not None and record.state["norm_exponent"] != 0
    norms = read_all(tmp_path / "out")["mlp.up_proj.weight_norms"][1]
    assert np.isfinite(norms).all() and norms.max() >= 2.0**14
    run_command({"export": str(tmp_path / "out"), "target": "bf16", "dtype": "source"}, tmp_path / "decoded")
    exact = as_float32(make(values)).astype(np.float64)
    decoded = as_float32(read_all(tmp_path / "decoded")["mlp.up_proj.weight"]).astype(np.float64)
    assert np.isfinite(decoded).all()
    error = ((decoded - exact) ** 2).sum() / (exact**2).sum()
    assert error < 1.25 * DISTORTION[5]
    assert record.relative_mse == pytest.approx(error, rel=0.02)


def test_small_norms_beside_large_ones_stay_positive(tmp_path: Path) -> None:
    """Subnormal norms lose digits, but no norm becomes 0 unless it is negligible beside the largest."""
    source = write_checkpoint(tmp_path / "model", {"mlp.up_proj.weight": f32(WIDE)})
    run_command(command(source), tmp_path / "out")
    norms = read_all(tmp_path / "out")["mlp.up_proj.weight_norms"][1].reshape(-1).astype(np.float64)
    true = np.sqrt((WIDE.astype(np.float64) ** 2).sum(axis=1))
    assert (norms[true > true.max() * 2.0**-36] > 0).all()
    assert (norms[true > true.max() * 2.0**-24] >= 2.0**-10).all()


def test_zeros_are_decoded_exactly(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "model", {"mlp.up_proj.weight": bf16(np.zeros((64, 128)))})
    (record,) = run_command(command(source), tmp_path / "out").records
    assert record.relative_mse == 0.0
    assert record.state == {"rotation": "hadamard", "norm_exponent": 0}
    run_command({"export": str(tmp_path / "out"), "target": "bf16"}, tmp_path / "decoded")
    assert not as_float32(read_all(tmp_path / "decoded")["mlp.up_proj.weight"]).any()


def test_progress_is_monotonic_and_reaches_the_total(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    run_command(command(source, progress=lambda done, total, name: seen.append((done, total))), tmp_path / "out")
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]
    assert {total for _, total in seen} == {sum(v.nbytes for _, v in read_all(source).values())}


def test_run_with_random_kills_resumes(source: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """Kills of different kinds, with a fixed seed."""
    chance = random.Random(5)
    out = tmp_path / "out"
    for _ in range(6):
        function, when = chance.choice(["write", "pwrite", "fsync"]), chance.choice(["before", "after"])
        point = {"out": str(out), "function": function, "number": chance.randint(1, 2), "when": when, "may_end": True}
        killed_runs(command(source), [point])
        check_final_names(out, undisturbed)
    run_command(command(source), out)
    assert folder_bytes(out) == undisturbed


def test_few_files_are_open_on_a_slow_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    sync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.01)
        opened.append(len(os.listdir("/proc/self/fd")))
        sync(descriptor)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fsync", slow)
    run_command({"quantize": source, "max_shard_bytes": 1}, tmp_path / "out")
    assert len(opened) > 2 * stream.MOST_UNFINISHED
    assert max(opened) < before + stream.MOST_UNFINISHED + 16


@pytest.mark.parametrize(
    ("number", "message"), [(errno.EIO, "cannot be flushed to the disk"), (errno.ENOSPC, "the disk is full")]
)
def test_file_that_could_not_be_flushed_is_not_resumed(
    number: int, message: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed fsync the content of the disk is unknown, whatever the page cache shows."""

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_sync_data", fail)
        patch.setattr(stream, "FLUSH_BYTES", 1)
        with pytest.raises(OutputError, match=message):
            run_command({"quantize": source}, tmp_path / "out")
    assert not list((tmp_path / "out" / ".pqweights").glob("*.partial"))
    for name in ("out", "undisturbed"):
        run_command({"quantize": source}, tmp_path / name)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "undisturbed")
