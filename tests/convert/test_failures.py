"""Failures of data and of the disk, and what a run does while the disk is slow."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import raises
from converting import TENSORS, check_final_names, command
from helpers import bf16, folder_bytes, gaussian, read_all, run_command, write_checkpoint

from pqweights.checkpoint import shard_file
from pqweights.errors import OutputError, SourceError


def test_non_finite_weight_leaves_nothing(tmp_path: Path) -> None:
    values = gaussian(64, 128, seed=1)
    values[63, 127] = np.inf
    tensors = {f"layers.{n}.mlp.up_proj.weight": bf16(gaussian(64, 128, seed=n)) for n in range(6)}
    source = write_checkpoint(tmp_path / "model", tensors, {"layers.9.mlp.up_proj.weight": bf16(values)})
    with raises(SourceError, "layers.9.mlp.up_proj.weight", "[63, 127]"):
        run_command(command(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_run_resumes_after_a_write_that_failed(
    number: int, source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    pwrite, calls = os.pwrite, iter(range(5))

    def full(*arguments: Any) -> int:
        if next(calls, None) is None:
            raise OSError(number, os.strerror(number))
        return pwrite(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with raises(OutputError, "model-0000", os.strerror(number)):
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


def test_progress_is_monotonic_and_reaches_the_total(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    run_command(command(source, progress=lambda done, total, name: seen.append((done, total))), tmp_path / "out")
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]
    assert {total for _, total in seen} == {sum(v.nbytes for _, v in read_all(source).values())}


def test_few_files_are_open_on_a_slow_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, sync, before = list[int](), os.fsync, len(os.listdir("/proc/self/fd"))

    def slow(descriptor: int) -> None:
        time.sleep(0.01)
        opened.append(len(os.listdir("/proc/self/fd")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    run_command({"quantize": source, "max_shard_bytes": 1}, tmp_path / "out")
    assert len(opened) > 2 * TENSORS
    assert max(opened) < before + 20


@pytest.mark.parametrize(
    ("file", "number"),
    [
        ("model-00001-of-00004.safetensors.", errno.EIO),
        ("model-00001-of-00004.safetensors.", errno.ENOSPC),
        ("model-00004-of-00004.safetensors.", errno.EIO),
        ("model-00002-of-00004.safetensors.json", errno.EIO),
        ("tokenizer.json", errno.EIO),
        ("pqweights.json", errno.EIO),
        ("/out", errno.EIO),
    ],
)
@pytest.mark.parametrize("replacing", [False, True])
def test_file_that_could_not_be_flushed_is_made_again(
    replacing: bool,
    file: str,
    number: int,
    source: Path,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a failed fsync the content of the disk is unknown, whatever the page cache shows.

    Nothing waits behind the last shard, and an older result's shard of that name is not taken for it.
    """
    out, sync = tmp_path / "out", os.fsync

    def late(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if file in path.rpartition("/")[2] or (file[0] == "/" and path.endswith(file)):
            time.sleep(0.3 if "00004." in file else 0.0)  # when everything else has been handed to the disk
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    if replacing:
        run_command({**command(source), "recipe": "q4"}, out)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", late)
        patch.setattr(shard_file, "FLUSH_BYTES", 1 if "00001." in file else shard_file.FLUSH_BYTES)
        with raises(OutputError, "is full" if number == errno.ENOSPC else os.strerror(number)):
            run_command(command(source, overwrite=replacing), out)
    run_command(command(source, overwrite=True), out)
    assert folder_bytes(out) == undisturbed
