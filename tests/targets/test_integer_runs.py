"""The driver's guarantees for exports to integers: determinism, resuming, recognising results, manifests."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from converting import check_killed_runs_resume
from helpers import folder_bytes, killed_runs, run_command
from integer_exports import KINDS, ROUNDED, work

from pqweights.convert import jobs
from pqweights.convert.manifest import Manifest, read_manifest
from pqweights.errors import MasterError, OutputError, SourceChangedError
from pqweights.targets import target_name


@pytest.mark.parametrize(
    ("kind", "threads", "chunk_weights"),
    [("tile", 3, 4096), ("tile", 1, 1 << 20), ("nibbles", 2, 1000), ("vllm", 3, 1000), ("original", 2, 4096)],
)
def test_output_is_identical_across_thread_counts_and_chunk_sizes(
    threads: int, chunk_weights: int, kind: str, driven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CHUNK_WEIGHTS", chunk_weights)
    report = run_command(work(driven, kind), tmp_path / "out", threads=threads)
    assert {t.name for t in report.plan.tensors if t.action == "integer"} == ROUNDED
    assert len(report.plan.shards) > 1
    assert folder_bytes(tmp_path / "out") == folder_bytes(driven / kind)


def test_run_killed_at_any_call_resumes_to_the_same_folder(driven: Path, tmp_path: Path) -> None:
    """Runs are killed at renames, flushes and writes; unfinished files never have a final name."""
    command, undisturbed = work(driven, "original"), folder_bytes(driven / "original")
    (counts,) = killed_runs(command, [{"out": str(tmp_path / "counted")}])
    assert folder_bytes(tmp_path / "counted") == undisturbed
    points = [
        {"out": str(tmp_path / f"{name}-{number}-{when}"), "function": name, "number": number, "when": when}
        for name, step, moments in (
            ("replace", 12, ("before", "after")),
            ("fsync", 20, ("before",)),
            ("pwrite", counts["pwrite"] // 3, ("half", "after")),
        )
        for number in range(1, counts[name] + 1, step)
        for when in moments
    ]
    assert len({point["function"] for point in points}) == 3
    check_killed_runs_resume(command, points, undisturbed)


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("tile", {"packing": "plain"}),
    ("tile", {"qparams": "minmax"}),
    ("tile", {"original": True}),
    ("tile", {"target": "vllm"}),
    ("tile", {"max_shard_bytes": 70_000}),
    ("vllm", {"bits": 8}),
    ("original", {"original": None}),
]


@pytest.mark.parametrize(("kind", "other"), OTHERS, ids=str)
def test_result_and_interrupted_run_of_another_command_are_refused(
    kind: str, other: dict[str, Any], driven: Path, tmp_path: Path
) -> None:
    """The options differ in what decides the bytes, so neither folder may be taken for the result of this command."""
    finished = shutil.copytree(driven / kind, tmp_path / "finished")
    command = {key: value for key, value in work(driven, kind, **other).items() if value is not None}
    with pytest.raises(OutputError, match="`overwrite`"):
        run_command(command, finished)
    assert folder_bytes(finished) == folder_bytes(driven / kind)
    if other == {"original": True}:
        out = tmp_path / "out"
        killed_runs(work(driven, kind), [{"out": str(out), "function": "replace", "number": 2, "when": "after"}])
        before = folder_bytes(out)
        with pytest.raises((OutputError, SourceChangedError), match=r"`overwrite`"):
            run_command(command, out)
        assert folder_bytes(out) == before


def test_result_older_than_the_original_is_not_recognised(own: Path) -> None:
    command = work(own, "original")
    run_command(command, own / "out")
    assert run_command(command, own / "out").already_done
    path = sorted((own / "src").glob("*.safetensors"))[-1]
    path.touch()
    os.utime(path, ns=(0, (own / "out/pqweights.json").stat().st_mtime_ns + 1))
    with pytest.raises(OutputError, match="`overwrite`"):
        run_command(command, own / "out")


def test_manifest_of_an_export_reads_back(driven: Path) -> None:
    for kind in KINDS:
        manifest: Manifest = read_manifest(driven / kind)
        assert b"".join(manifest.to_pieces()) == (driven / kind / "pqweights.json").read_bytes()
        assert target_name(manifest.made_by["target"]) == KINDS[kind]["target"]


DAMAGE: list[dict[str, Any]] = [
    {"relative_mse": 10**400}, {"relative_mse": True}, {"total_mse": 10**400}, {"energy": float("inf")},
    {"master_mse": "0"}, {"codec": "\ud800"}, {"codec": 4}, {"bits": True}, {"bits": -4}, {"bits": 10**30}, {"bits": 9},
    {"metadata": {"format": 1}}, {"metadata": ["pt"]}, {"left_out": {"\ud800": "?"}},
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=str)
def test_manifest_with_invalid_figures_or_texts_is_refused(
    damage: dict[str, Any], driven: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(driven / "tile", tmp_path / "tile")
    manifest = json.loads((folder / "pqweights.json").read_bytes())
    entry = next(entry for entry in manifest["tensors"] if entry["action"] == "integer")
    (manifest if damage.keys() & {"metadata", "left_out"} else entry).update(damage)
    (folder / "pqweights.json").write_text(json.dumps(manifest))
    with pytest.raises(MasterError, match=r"pqweights\.json"):
        read_manifest(folder)
