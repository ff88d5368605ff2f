"""Runs into object storage that end at any of its operations, and who continues them."""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from commands import raises
from converting import TENSORS, Killed, command, watched
from helpers import folder_bytes
from memory_storage import Kill, Operation, each_operation, objects, put, run_into, staged_tensors, visible

from pqweights.convert.run import Run
from pqweights.errors import OutputError
from pqweights.storage.bucket import RemoteFolder
from pqweights.storage.store import Store

OUT = "memory://resumed/model"
SECOND_SHARD = "model-00002-of-00004.safetensors"


@pytest.fixture(autouse=True)
def _empty_storage() -> None:
    put(OUT, {})


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


def killed(work: dict[str, Any], scratch: Path, monkeypatch: pytest.MonkeyPatch, kill: Kill) -> None:
    """A run that is killed."""
    with each_operation(kill), pytest.raises(Killed):
        run_into(work, OUT, scratch, monkeypatch)


def continued(work: dict[str, Any], scratch: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, set[str]]:
    """How many tensors a run continues from, and for which it begins a job."""
    with monkeypatch.context() as patch:
        patch.setenv("PQWEIGHTS_SCRATCH", str(scratch))
        report, begun = watched(monkeypatch, work, OUT)
        return report.resumed, begun


@pytest.mark.parametrize("overwrites", [False, True])
def test_run_killed_at_any_change_of_the_storage_resumes(
    overwrites: bool, source: Path, final: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing there before, and in place of an older result; continued by the same machine or another."""
    before: dict[str, bytes] = {}
    if overwrites:
        run_into(command(source, max_shard_bytes=8000), OUT, tmp_path / "old", monkeypatch)
        before = objects(OUT)
    work, counted = command(source, overwrite=overwrites), Kill()
    with each_operation(counted):
        run_into(work, OUT, tmp_path / "counted", monkeypatch)
    assert len(counted.seen) >= 30
    if not overwrites:
        check_covered(counted.seen)
    # What is there after a change is there before the next one.
    for number, after in [(1, False), *((number + 1, True) for number in range(len(counted.seen)))]:
        put(OUT, before)
        first, where = tmp_path / str(number), f"change {number}"
        killed(work, first, monkeypatch, Kill(number, after=after))
        assert overwrites or visible(OUT).items() <= final.items(), where
        staged, left = staged_tensors(OUT), objects(OUT)
        then = first if number % 2 == overwrites else tmp_path / "another" / first.name
        untouched = overwrites and ".pqweights/journal.jsonl" not in left and left.items() >= before.items()
        resumed, begun = continued(command(source, overwrite=untouched), then, monkeypatch)
        assert objects(OUT) == final, where
        assert not begun & staged and resumed + len(begun) == TENSORS, where
        assert folder_bytes(then) == {}, where
        shutil.rmtree(first)


def check_covered(seen: list[Operation]) -> None:
    """Check that a run has each kind of change, in the right order."""
    done = [(what, path.removeprefix("/resumed/model/")) for what, path in seen]
    key = next(path.split("/")[1] for _, path in done if path.endswith("safetensors.json"))
    shard, mark = f".pqweights/{key}/{SECOND_SHARD}", f".pqweights/{key}/{SECOND_SHARD}.json"
    journal, wanted = ".pqweights/journal.jsonl", [("pipe_file", ".pqweights/lock")]
    wanted += [("put_file", name) for name in (journal, shard, mark)] + [("cp_file", SECOND_SHARD)]
    wanted += [("put_file", "pqweights.json"), ("rm_file", journal), ("rm_file", mark)]
    assert [done.index(change) for change in wanted] == sorted(done.index(change) for change in wanted)


@pytest.mark.parametrize("number", [3, 13, 21])
def test_run_that_replaces_another_is_killed_and_resumes(
    number: int, source: Path, final: dict[str, bytes], tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two commands then comes first."""
    killed(command(source, recipe="q4"), scratch, monkeypatch, Kill(25))
    killed(command(source, overwrite=True), scratch, monkeypatch, Kill(number))
    run_into(command(source, overwrite=True), OUT, tmp_path / "another", monkeypatch)
    assert objects(OUT) == final


@pytest.mark.parametrize("number", range(1, 5))
def test_shard_of_an_older_result_is_not_taken_for_a_published_one(
    number: int, source: Path, own_source: Path, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third run that would start anew is killed while it removes what the second one staged."""
    for path in own_source.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-4096] ^= 1  # the same shapes and sizes as those of the older result
        path.write_bytes(data)
    put("memory://resumed/wanted", {})
    run_into(command(own_source), "memory://resumed/wanted", scratch, monkeypatch)
    run_into(command(source), OUT, scratch, monkeypatch)
    second = command(own_source, overwrite=True)
    killed(second, scratch, monkeypatch, Kill(9))
    assert staged_tensors(OUT)
    killed(command(source, recipe="q4", overwrite=True), tmp_path / "third", monkeypatch, Kill(number, after=True))
    continued(second, tmp_path / "another", monkeypatch)
    assert objects(OUT) == objects("memory://resumed/wanted")


@pytest.mark.parametrize(("owner", "method"), [(Run, "add"), (RemoteFolder, "move"), (Store, "remove")])
@pytest.mark.parametrize("machine", ["same", "other"])
def test_run_that_another_one_replaces_ends_unless_it_runs_on_this_machine(
    machine: str, owner: type, method: str, source: Path, final: dict[str, bytes], tmp_path: Path, scratch: Path
) -> None:
    """The second one starts when the first one has just staged or moved a shard, or written a small file."""
    resumed, original, new_path = list[int](), getattr(owner, method), Run.new_path
    # Both machines are this process: the first one makes no file while the environment is the other's.
    is_elsewhere = threading.RLock()
    there = scratch if machine == "same" else tmp_path / "second"
    refused = raises(OutputError, OUT)
    with pytest.MonkeyPatch.context() as patch:

        def then_begin_another(*given: Any, **options: Any) -> Any:
            patch.setattr(owner, method, original)
            result = original(*given, **options)
            with is_elsewhere, refused if machine == "same" else contextlib.nullcontext():
                resumed.append(run_into(command(source), OUT, there, patch).resumed)
            return result

        def wait_then_make(run: Run, shard: str) -> Path:
            with is_elsewhere:
                return new_path(run, shard)

        patch.setattr(owner, method, then_begin_another)
        patch.setattr(Run, "new_path", wait_then_make)
        with refused if machine == "other" else contextlib.nullcontext():
            run_into(command(source), OUT, scratch, patch)
        assert bool(resumed) == (machine == "other") and all(resumed)
        assert objects(OUT) == final
        assert run_into(command(source), OUT, scratch, patch).already_done
    assert folder_bytes(scratch) == {}


def test_mark_without_its_shard_is_not_left_by_a_killed_removal(
    source: Path, final: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a shard of an older result, of the same size, would be taken for one that has its final name."""
    killed(command(source), tmp_path / "first", monkeypatch, Kill(10))
    other = command(source, recipe="q4", overwrite=True)
    for number in range(1, 12):
        before = objects(OUT)
        killed(other, tmp_path / "other", monkeypatch, Kill(number, after=True))
        names = {name for name in objects(OUT) if name.endswith(".safetensors.json")}
        assert {name.removesuffix(".json") for name in names} <= objects(OUT).keys()
        put(OUT, before)
