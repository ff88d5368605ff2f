"""Resuming: runs killed anywhere, damage to what they left, and runs that cannot be resumed."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import raises
from converting import SHARD_BYTES, TENSORS, check_final_names, command, finished, interrupt, marks, watched
from helpers import folder_bytes, killed_runs, run_command
from memory_storage import Place

from pqweights.errors import OutputError, SourceChangedError

# Those of KILL_FUNCTIONS that change what is there, and at which of their calls runs die: most of mkdir change nothing.
STEPS = {"replace": 1, "pwrite": 3, "unlink": 1, "rmdir": 1, "mkdir": 4, "posix_fallocate": 1, "open": 1}


@pytest.fixture(scope="module")
def kill_points(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """For each function of os, the points at which a run was killed, each with the folder that it left.

    What is there after a call is there before the next one, of whatever function: only the last is killed after, too.
    """
    folder = tmp_path_factory.mktemp("kills")
    (counts,) = killed_runs(command(source), [{"out": str(folder / "counted")}])
    points: dict[str, list[dict[str, Any]]] = {}
    for name, step in STEPS.items():
        numbers = range(1, counts[name] + 1, step)
        moments = [(number, "before") for number in numbers] + [(counts[name], "after")]
        moments += [(number, "half") for number in numbers if name == "pwrite"]
        points[name] = [
            {"out": str(folder / f"{name}-{number}-{when}"), "function": name, "number": number, "when": when}
            for number, when in moments
        ]
    every = [point for group in points.values() for point in group]
    killed_runs(command(source), every)
    for point in every:
        point["finished_shards"] = len(marks(Path(point["out"])))
    return points


@pytest.mark.parametrize("function", STEPS)
def test_run_killed_at_any_call_resumes_to_the_same_folder(
    function: str, source: Path, undisturbed: dict[str, bytes], kill_points: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kill_points[function], f"os.{function} is never called: this test no longer kills anything"
    for point in kill_points[function]:
        out, where = Path(point["out"]), f"{point['when']} call {point['number']}"
        check_final_names(out, undisturbed)
        known = finished(out)
        report, begun = watched(monkeypatch, command(source), out)
        assert folder_bytes(out) == undisturbed, where
        assert report.resumed == (TENSORS if report.already_done else len(known)), where
        assert not begun & known, where


def test_kills_cover_every_state(undisturbed: dict[str, bytes], kill_points: dict[str, list[dict[str, Any]]]) -> None:
    """The sweep above reaches each state that matters; it would test nothing if the driver changed its calls."""
    states = [point["finished_shards"] for group in kill_points.values() for point in group]
    assert len(states) > 65
    assert set(states) == {0, 1, 2, 3, 4}
    shards = sum(name.endswith(".safetensors") for name in undisturbed)  # renamed twice, beside a mark
    renames = sum(not name.endswith("/") for name in undisturbed) + 2 * shards + 1  # and the journal
    assert len(kill_points["replace"]) == renames + 1


def test_run_killed_at_random_moments_leaves_only_listed_files_and_resumes(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Each folder is that of one kill more, each of a run that continues those before it; the seed is fixed."""
    chance, counts = random.Random(1), range(1, 9)
    functions = [chance.choice(["replace", "pwrite", "posix_fallocate", "unlink"]) for _ in counts]
    kills = [
        {"function": f, "number": chance.randint(1, 4), "when": chance.choice(["before", "after"])} for f in functions
    ]
    points = [kill | {"out": str(tmp_path / str(n)), "may_end": True} for n in counts for kill in kills[:n]]
    killed_runs(command(source), points)
    outs = [tmp_path / str(n) for n in counts]
    assert len({len(marks(out)) for out in outs}) > 1
    names = {Path(name).name for name in undisturbed}
    names |= {"lock", "journal.jsonl"} | {f"{name}.json" for name in names}
    for out in outs:
        check_final_names(out, undisturbed)
        left = {path.name for path in (out / ".pqweights").rglob("*") if path.is_file()}
        assert {re.sub(r"(\.[0-9a-f]{8})?\.partial$", "", name) for name in left} <= names
        run_command(command(source), out)
        assert folder_bytes(out) == undisturbed, out.name


def test_resumed_run_reads_only_unfinished_shards_and_shows_what_is_done(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_command(command(source), tmp_path / "whole").source_bytes_read
    out, shown = tmp_path / "out", list[tuple[int, int, str]]()
    interrupt(monkeypatch, command(source), out, shards=3)
    known = finished(out)
    report, begun = watched(monkeypatch, command(source, progress=lambda *call: shown.append(call)), out)
    assert begun == {tensor.name for tensor in report.plan.tensors} - known
    assert not known & {name for _, _, name in shown}
    assert shown[0][0] > 0 and shown[-1][0] == shown[-1][1]
    bytes_per_weight = {"BF16": 2, "F32": 4, "I64": 8}
    read = {tensor.name: tensor.weights * bytes_per_weight[tensor.dtype] for tensor in report.plan.tensors}
    # The constant tensor and the tiny one are read in two passes; both were finished.
    passes = {"model.layers.0.mlp.up_proj.weight": 2, "model.layers.0.mlp.down_proj.weight": 2}
    assert passes.keys() <= known
    assert whole - report.source_bytes_read == sum(read[name] * passes.get(name, 1) for name in known)


@pytest.mark.parametrize(
    ("what", "damage"),
    [
        ("mark", lambda data: data[:-9]),
        ("mark", lambda data: b""),
        ("mark", lambda data: b'{"tensors": [[]]}'),
        ("mark", lambda data: None),
        ("shard", lambda data: data[:1000]),
        ("shard", lambda data: None),
    ],
)
def test_shard_that_was_damaged_is_made_again(
    what: str, damage: Any, source: Path, undisturbed: dict[str, bytes], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, command(source), place.out, shards=3)
    files = place.files()
    mark = sorted(name for name in files if name.endswith(".safetensors.json"))[1]
    name = mark if what == "mark" else mark.removesuffix(".json")
    place.change({name: damage(files[name])})
    assert run_command(command(source), place.out).resumed == 7
    assert place.files() == {name: data for name, data in undisturbed.items() if not name.endswith("/")}


def test_run_killed_after_publishing_its_shards_resumes_on_a_full_disk(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are already on the disk need no more room, staged or published."""
    out = tmp_path / "out"
    # Thirteen for the journal and the shards, of which several are published at once; then come other files.
    killed_runs(command(source), [{"out": str(out), "function": "replace", "number": 14, "when": "before"}])
    assert len(list(out.glob("*.safetensors"))) == 4
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    run_command(command(source), out)
    assert folder_bytes(out) == undisturbed


def change_time(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def change_size(path: Path) -> None:
    """The tensors and so the plan are the same, but a file is longer."""
    time, data = path.stat().st_mtime_ns, path.read_bytes()
    length = int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else 0
    longer = (length + 8).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 8 + data[8 + length :]
    path.write_bytes(longer if length else data + b" ")
    os.utime(path, ns=(time, time))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("model-00002-of-00002.safetensors", change_time),
        ("model-00001-of-00002.safetensors", change_size),
        ("config.json", change_time),
        ("code/modeling.py", change_size),
    ],
)
def test_changed_source_is_refused(
    file: str, change: Any, own_source: Path, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, command(own_source), place.out)
    change(own_source / file)
    before = place.files()
    with raises(SourceChangedError, file):
        run_command(command(own_source), place.out)
    assert place.files() == before
    assert run_command(command(own_source, overwrite=True), place.out).resumed == 0
    run_command(command(own_source), tmp_path / "fresh")
    assert place.files() == Place(tmp_path / "fresh").files()


@pytest.mark.parametrize("other", [{"recipe": "q4"}, {"max_shard_bytes": 2 * SHARD_BYTES}])
def test_interrupted_run_of_another_command_is_refused(
    other: dict[str, Any], source: Path, undisturbed: dict[str, bytes], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, command(source, **other), place.out, shards=1)
    before = place.files()
    with raises(OutputError, "`overwrite`"):
        run_command(command(source), place.out)
    assert place.files() == before
    assert run_command(command(source, overwrite=True), place.out).resumed == 0
    assert place.files() == {name: data for name, data in undisturbed.items() if not name.endswith("/")}


def test_overwrite_resumes_its_own_interrupted_run_with_any_number_of_threads(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupt(monkeypatch, command(source, overwrite=True), out)
    assert run_command(command(source, overwrite=True), out, threads=5).resumed == 5
    assert folder_bytes(out) == undisturbed
