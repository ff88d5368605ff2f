"""Determinism: the output depends on the source and the command alone."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import folder_bytes, run_command
from pqweights_cli.main import app
from rewriting import SHARD_BYTES, command
from typer.testing import CliRunner

from pqweights.rewrite import jobs


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_output_is_identical_across_thread_counts(
    threads: int, source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    run_command(command(source), tmp_path / "out", threads=threads)
    assert folder_bytes(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("chunk_weights", [128, 1280, 1 << 20])
def test_output_is_identical_across_chunk_sizes(
    chunk_weights: int, source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CHUNK_WEIGHTS", chunk_weights)
    run_command(command(source, strict=True), tmp_path / "out")  # which accepts weights that were rescued
    assert folder_bytes(tmp_path / "out") == undisturbed


def test_errors_are_identical_to_the_last_digit_across_threads_and_chunks(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest rounds to seven digits, which would mostly hide sums in another order."""
    monkeypatch.setattr(jobs, "rounded", lambda value: value)
    found = set()
    for chunk_weights, threads in ((128, 2), (1280, 5), (1 << 20, 1)):
        monkeypatch.setattr(jobs, "CHUNK_WEIGHTS", chunk_weights)
        records = run_command(command(source), tmp_path / f"{chunk_weights}", threads=threads).records
        found.add(tuple((record.relative_mse, record.energy) for record in records))
    assert len(found) == 1


def test_output_does_not_depend_on_places_times_and_hosts(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    moved = shutil.copytree(source, tmp_path / "elsewhere/of/another/name")
    for number, path in enumerate(sorted(moved.rglob("*"))):
        os.utime(path, (10**9 + number, 10**9 + number))
    run_command(command(moved), tmp_path / "out", threads=3)
    assert folder_bytes(tmp_path / "out") == undisturbed
    host = socket.gethostname().encode()
    for name, data in undisturbed.items():
        if name.endswith(".json"):
            for place in (source, source.parent, tmp_path, f"{Path.home()}/"):
                assert str(place).encode() not in data, name
            assert len(host) < 4 or host not in data, name
            keys = {key for key, _ in walk(json.loads(data))}
            assert not keys & {"time", "date", "created", "host", "hostname", "threads", "path"}, name


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
