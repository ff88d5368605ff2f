"""Finished folders: recognised, left alone, replaced only on request, and never with files of the user."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import raises
from converting import SHARD_BYTES, command
from helpers import bf16, folder_bytes, gaussian, killed_runs, run_command, write_checkpoint
from memory_storage import Place

from pqweights.errors import OutputError, SourceError


def test_finished_folder_is_left_alone(source: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """Also for a copy of the source that keeps the times of its files."""
    out = tmp_path / "out"
    run_command(command(source), out)
    stamps = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*")}
    for again in (source, shutil.copytree(source, tmp_path / "copy")):
        report = run_command(command(again), out)
        assert report.already_done
        assert report.source_bytes_read < 60_000  # headers and fingerprint, no weights
        assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*")} == stamps
    assert folder_bytes(out) == undisturbed


def test_failing_run_leaves_the_result_that_it_would_replace(source: Path, place: Place, tmp_path: Path) -> None:
    run_command(command(source, recipe="q4"), place.out)
    before = place.files()
    broken = shutil.copytree(source, tmp_path / "broken")
    weights = sorted(broken.glob("*.safetensors"))[-1]
    data = bytearray(weights.read_bytes())
    data[-4096:] = b"\xff" * 4096  # NaN in every floating dtype
    weights.write_bytes(data)
    with raises(SourceError, "NaN"):
        run_command(command(broken, overwrite=True), place.out)
    assert place.files() == before


def test_file_of_the_user_is_not_replaced(source: Path, place: Place, tmp_path: Path) -> None:
    """A companion of the new source has the name of a file that the user put beside the old result."""
    run_command(command(source, recipe="q4"), place.out)
    own = shutil.copytree(source, tmp_path / "own")
    (own / "NOTICE.md").write_text("the model's")
    place.change({"NOTICE.md": b"the user's"})
    before = place.files()
    with raises(OutputError, "NOTICE.md"):
        run_command(command(own, overwrite=True), place.out)
    assert place.files() == before


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json", "model-00001-of-00002.safetensors"])
def test_result_of_files_that_were_changed_is_not_recognised(file: str, own_source: Path, tmp_path: Path) -> None:
    """The fingerprint covers only the ends of a tensor; a changed middle shows in the time of the file."""
    out, data = tmp_path / "out", bytearray((own_source / file).read_bytes())
    run_command(command(own_source), out)
    if file.endswith(".json"):
        data[:] = json.dumps({"torch_dtype": "bfloat16", "changed": True}).encode()
    else:
        data[len(data) // 2] ^= 1
    (own_source / file).write_bytes(data)
    with raises(OutputError, "`overwrite`"):
        run_command(command(own_source), out)
    run_command(command(own_source, overwrite=True), out)
    assert not file.endswith(".json") or b"changed" in (out / file).read_bytes()


def test_result_that_lost_a_shard_is_not_recognised(source: Path, place: Place) -> None:
    run_command(command(source), place.out)
    place.change({"model-00002-of-00004.safetensors": None})
    with raises(OutputError, "model-00002-of-00004"):
        run_command(command(source), place.out)


def test_result_of_another_source_or_target_is_named(source: Path, own_source: Path, tmp_path: Path) -> None:
    out, exported = tmp_path / "out", tmp_path / "export"
    run_command(command(source), out)
    weights = sorted(own_source.glob("*.safetensors"))[0]
    weights.write_bytes(weights.read_bytes()[:-2] + b"\0\0")
    export: dict[str, Any] = {"export": str(out), "target": "bf16"}
    run_command(export, exported)
    for work, folder, says in (
        (command(own_source), out, "source"),
        (command(source), exported, "bf16"),
        (command(source, recipe="q4"), out, "recipe q5"),
        (command(source, max_shard_bytes=1), out, f"`max_shard_size` {SHARD_BYTES}"),
    ):
        with raises(OutputError, *says.split(), "`overwrite`"):
            run_command(work, folder)
    run_command(command(source, recipe="q4", overwrite=True), out)
    with raises(OutputError, "master"):
        run_command(export, exported)


def test_export_by_other_rules_is_named(tmp_path: Path) -> None:
    tensors = {f"model.layers.{n}.mlp.down_proj.weight": bf16(gaussian(64, 128, seed=n)) for n in range(2)}
    source = write_checkpoint(tmp_path / "model", tensors, config={"model_type": "llama"})
    export: dict[str, Any] = {"export": str(source), "target": "vllm"}
    for first, second in ((export, export | {"keep": "*.1.*"}), (export | {"keep": "*.1.*"}, export)):
        run_command(first | {"overwrite": True}, tmp_path / "out")
        with raises(OutputError, "made with other rules (`recipe`, `keep`, `set_format`); "):
            run_command(second, tmp_path / "out")


def test_finished_folder_of_another_command_is_only_replaced_on_request(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Files that are not part of it stay."""
    out = tmp_path / "out"
    run_command(command(source, recipe="q4"), out)
    foreign = {"README.md": b"our card", "code/notes.txt": b"foreign", "model-99999.safetensors": b"foreign"}
    for name, data in foreign.items():
        (out / name).write_bytes(data)
    before = folder_bytes(out)
    with raises(OutputError, "`overwrite`"):
        run_command(command(source), out)
    assert folder_bytes(out) == before
    run_command(command(source, overwrite=True), out)
    assert folder_bytes(out) == undisturbed | foreign


def test_overwriting_run_killed_at_any_call_resumes(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """A result with a foreign file beside it is replaced; kills also come while the old files are removed."""
    foreign = {"README.md": b"our card", "notes.txt": b"foreign"}
    old, work = tmp_path / "old", command(source, overwrite=True)
    run_command(command(source, recipe="q4"), old)
    for name, data in foreign.items():
        (old / name).write_bytes(data)
    counted = shutil.copytree(old, tmp_path / "counted")
    (counts,) = killed_runs(work, [{"out": str(counted)}])
    assert folder_bytes(counted) == undisturbed | foreign
    points = []
    for function in ("unlink", "rmdir", "replace"):
        moments = [(number, "before") for number in range(1, counts[function] + 1)] + [(counts[function], "after")]
        for number, when in moments:
            out = shutil.copytree(old, tmp_path / f"{function}-{number}-{when}")
            points.append({"out": str(out), "function": function, "number": number, "when": when})
    killed_runs(work, points)
    for point in points:
        run_command(work, Path(point["out"]))
        assert folder_bytes(Path(point["out"])) == undisturbed | foreign, point


def test_foreign_folder_is_refused(source: Path, place: Place) -> None:
    place.change({"notes/thesis.tex": b"years of work"})
    for overwrite in (False, True):
        with raises(OutputError, "'notes'"):
            run_command(command(source, overwrite=overwrite), place.out)
        assert place.files() == {"notes/thesis.tex": b"years of work"}
