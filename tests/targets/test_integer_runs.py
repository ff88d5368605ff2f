"""The driver's guarantees for exports to integers: determinism, resuming, recognising results, manifests."""

from __future__ import annotations

from pathlib import Path

import pytest
from converting import check_killed_runs_resume
from helpers import folder_bytes, killed_runs, run_command
from integer_exports import ROUNDED, work

from pqweights.convert import jobs


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
