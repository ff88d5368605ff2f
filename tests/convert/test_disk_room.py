"""Room on the disk is counted once: what lies there already, and what several folders of one disk need together."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import raises
from converting import command, interrupt
from helpers import folder_bytes, run_command

from pqweights.checkpoint.writer import DiskNeed, check_room
from pqweights.errors import OutputError


def with_free(patch: pytest.MonkeyPatch, folder: Path, free: int) -> None:
    usage = shutil.disk_usage(folder)
    patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))


def test_shards_of_the_older_result_are_not_room_that_the_new_one_has(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted overwriting run continues beside files that have the names and sizes of its own."""
    out, work = tmp_path / "out", command(source, overwrite=True)
    plan = run_command(command(source), out).plan
    (out / "tokenizer.json").write_text("edited: the result is another one")
    (out / "config.json").write_text("{}")
    os.utime(out / "pqweights.json", (0, 0))  # older than its source
    interrupt(monkeypatch, work, out, shards=1)
    assert all((out / shard.file).exists() for shard in plan.shards)
    needed = plan.output_bytes + plan.companion_bytes - plan.shards[0].file_bytes
    with monkeypatch.context() as patch:
        with_free(patch, tmp_path, needed - 1)
        with raises(OutputError, "1 bytes"):
            run_command(work, out)
        with_free(patch, tmp_path, needed)
        assert run_command(work, out).resumed == 3
    assert folder_bytes(out) == undisturbed


def need(folder: Path, byte_count: int, name: str, present: int = 0) -> DiskNeed:
    what, remedy = f"{name}: needs {byte_count} bytes", f"move {name}"
    return DiskNeed(folder=folder, byte_count=byte_count, present=present, what=what, remedy=remedy)


def test_needs_on_one_disk_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = need(tmp_path / "a/b", 600, "one"), need(tmp_path / "new", 500, "other", present=100)
    with_free(monkeypatch, tmp_path, 1000)
    check_room([one, other])
    with_free(monkeypatch, tmp_path, 999)
    check_room([one])
    check_room([other])
    with raises(OutputError, 600, 500, 999, "move one, or move other"):
        check_room([one, other])
    with_free(monkeypatch, tmp_path, 599)
    with raises(OutputError, 600, 599, "free 1 bytes more, or move one"):
        check_room([one, other])


def test_needs_on_two_disks_do_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, second = os.stat, tmp_path / "second"
    second.mkdir()

    def with_a_second_disk(path: Path, **options: bool) -> SimpleNamespace:
        return SimpleNamespace(st_dev=stat(path, **options).st_dev + (path == second))

    with_free(monkeypatch, tmp_path, 600)
    monkeypatch.setattr(os, "stat", with_a_second_disk)
    check_room([need(tmp_path, 600, "one"), need(second / "new", 500, "other")])
