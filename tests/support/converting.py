"""Runs of the driver over the small checkpoint: killed, watched, and compared with an undisturbed run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from helpers import folder_bytes, killed_runs, run_command

from pqweights.convert.report import RewriteReport
from pqweights.convert.run import Run, parse_mark
from pqweights.targets import master

SHARD_BYTES = 20_000  # four output shards of the small checkpoint
TENSORS = 10


class Killed(BaseException):
    """A stand-in for a kill, raised in the process of the test."""


def command(source: Path, **options: Any) -> dict[str, Any]:
    return {"quantize": str(source), "max_shard_bytes": SHARD_BYTES, **options}


def killed_after(monkeypatch: pytest.MonkeyPatch, shards: int, run: Callable[[], object]) -> None:
    """Kill a run when it has finished some shards."""
    left, add = iter(range(shards)), Run.add

    def add_or_die(self: Run, *given: Any) -> None:
        if next(left, None) is None:
            raise Killed
        add(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "add", add_or_die)
        with pytest.raises(Killed):
            run()


def interrupt(monkeypatch: pytest.MonkeyPatch, work: dict[str, Any], out: Path | str, shards: int = 2) -> None:
    """Leave what a run leaves that is killed when it has finished some shards."""
    killed_after(monkeypatch, shards, lambda: run_command(work, out))


def marks(out: Path) -> list[Path]:
    """The marks of finished shards."""
    return sorted((out / ".pqweights").glob("*/**/*.json"))


def finished(out: Path) -> set[str]:
    """The tensors of finished shards."""
    parsed = [parse_mark(path.read_bytes()) for path in marks(out)]
    return {record.name for mark in parsed if mark is not None for record in mark[0]}


def watched(monkeypatch: pytest.MonkeyPatch, work: dict[str, Any], out: Path) -> tuple[RewriteReport, set[str]]:
    """The report of a run, and the tensors for which it began a job."""
    begun = set()
    encode = master.encode

    def watching(planned: Any, tensor: Any, **given: Any) -> Any:
        begun.add(planned.name)
        return encode(planned, tensor, **given)

    with monkeypatch.context() as patch:
        patch.setattr(master, "encode", watching)
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


def check_killed_runs_resume(work: dict[str, Any], points: list[dict[str, Any]], undisturbed: dict[str, bytes]) -> None:
    """Kill a run at each point, and check that the same command then completes the folder of an undisturbed run."""
    killed_runs(work, points)
    for point in points:
        out = Path(point["out"])
        check_final_names(out, undisturbed)
        run_command(work, out)
        assert folder_bytes(out) == undisturbed, point
        shutil.rmtree(out)
