"""What has its final name is on the disk: files are flushed before they are renamed, their folder after it.

Elsewhere in the tests os.fsync flushes nothing (shared.py). Here it does, and what is renamed is compared with what was
flushed: a file that was written to in between has another time of modification or another size.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from converting import command
from helpers import run_command
from shared import FLUSH

from pqweights.checkpoint.names import JOURNAL_FILE

RENAME, REMOVE = os.replace, os.unlink


class Disk:
    """What was done to the disk.

    events: what was done in this order: "flush" with a file or a folder, "rename" with the new path, "remove"
    unflushed: the final paths of files that were renamed in another state than was flushed
    """

    def __init__(self) -> None:
        self.events, self.unflushed = list[tuple[str, Path]](), list[Path]()
        self._flushed: set[tuple[int, int, int]] = set()
        self._lock = threading.Lock()

    def fsync(self, descriptor: int) -> None:
        path, status = Path(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor)
        FLUSH(descriptor)
        with self._lock:
            self._flushed.add(state(status))
            self.events.append(("flush", path))

    def replace(self, old: Any, new: Any) -> None:
        before = state(os.stat(old))
        RENAME(old, new)
        with self._lock:
            self.unflushed += [] if before in self._flushed else [Path(new)]
            self.events.append(("rename", Path(new)))

    def unlink(self, path: Any, **options: Any) -> None:
        REMOVE(path, **options)
        with self._lock:
            self.events.append(("remove", Path(path)))


def state(status: os.stat_result) -> tuple[int, int, int]:
    """Inode, size and time of modification."""
    return status.st_ino, status.st_size, status.st_mtime_ns


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    watched = Disk()
    for name in ("fsync", "replace", "unlink"):
        monkeypatch.setattr(os, name, getattr(watched, name))
    return watched


def check(disk: Disk, out: Path) -> None:
    """Check that files were flushed, then renamed, then their folder flushed; and what must wait for what."""
    events = disk.events
    renamed = [path for kind, path in events if kind == "rename" and path.parent == out]
    assert {path.name for path in renamed} == {path.name for path in out.iterdir() if path.is_file()}
    assert not [path for path in disk.unflushed if path.parent == out]
    shards = [at for at, (kind, path) in enumerate(events) if kind == "rename" and path.suffix == ".safetensors"]
    manifest, journal = events.index(("rename", out / "pqweights.json")), events.index(("remove", Path(JOURNAL_FILE)))
    for at in shards:
        folder = events[at][1].parent
        assert ("flush", folder) in events[at:manifest], f"the manifest does not wait for {events[at][1]}"
    assert ("flush", out) in events[manifest:journal], "the journal is removed before the manifest is durable"
    assert events[-1] == ("flush", out), "the last change is not durable"


def test_files_are_flushed_before_they_are_renamed_and_folders_after(source: Path, tmp_path: Path, disk: Disk) -> None:
    """In new results, and in one that replaces another."""
    master, exported = tmp_path / "master", tmp_path / "exported"
    works = [
        (command(source, recipe="q4"), master),
        (command(source, overwrite=True), master),
        ({"export": str(master), "target": "bf16"}, exported),
    ]
    for work, out in works:
        run_command(work, out)
        check(disk, out)
        disk.events.clear()
