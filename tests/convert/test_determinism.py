"""Determinism: the output depends on the source and the command alone."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest
from converting import SHARD_BYTES, command
from helpers import folder_bytes, run_command
from pqweights_cli.main import app
from typer.testing import CliRunner

from pqweights.convert import jobs, shard


@pytest.mark.parametrize("exact", [False, True])
def test_output_and_errors_are_identical_across_threads_and_chunks(
    exact: bool, source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest rounds errors to seven digits, which would mostly hide sums in another order."""
    if exact:
        monkeypatch.setattr(jobs, "rounded", lambda value: value)
    errors = set()
    for chunk_weights, threads, batch in ((128, 2, 3), (128, 5, 1), (1280, 5, 2), (1 << 20, 1, 1)):
        monkeypatch.setattr(jobs, "CHUNK_WEIGHTS", chunk_weights)
        monkeypatch.setattr(shard, "BYTES_LEFT_PER_CHUNK", 1)
        monkeypatch.setattr(shard, "BATCH_CHUNKS", batch)
        report = run_command(command(source, strict=True), tmp_path / f"{chunk_weights}-{batch}", threads=threads)
        errors.add(tuple((record.relative_mse, record.energy) for record in report.records))
        assert exact or folder_bytes(tmp_path / f"{chunk_weights}-{batch}") == undisturbed
    assert len(errors) == 1


def test_output_does_not_depend_on_places_times_and_hosts(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    moved = shutil.copytree(source, tmp_path / "elsewhere/of/another/name")
    for number, path in enumerate(sorted(moved.rglob("*"))):
        os.utime(path, (10**9 + number, 10**9 + number))
    run_command(command(moved), tmp_path / "out", threads=3)
    assert folder_bytes(tmp_path / "out") == undisturbed
    places = [str(place).encode() for place in (source, source.parent, tmp_path, f"{Path.home()}/")]
    host = socket.gethostname().encode()
    for name, data in undisturbed.items():
        if name.endswith(".json"):
            assert not any(place in data for place in places) and (len(host) < 4 or host not in data), name
            stated = ("time", "date", "created", "host", "hostname", "threads", "path")
            assert not any(f'"{key}":'.encode() in data for key in stated), name


@pytest.mark.parametrize("missing", ["posix_fadvise", "posix_fallocate", "sched_getaffinity"])
def test_run_without_linux_calls(
    missing: str, source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS does not have them."""
    monkeypatch.delattr(os, missing)
    arguments = ["quantize", str(source), str(tmp_path / "out"), "--max-shard-size", str(SHARD_BYTES)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.exception
    assert folder_bytes(tmp_path / "out") == undisturbed
