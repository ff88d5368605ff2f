"""The output folder while it is being written: who may write there, what an interrupted run left, what may be replaced.

Everything unfinished lies in OUT/.pqweights: the lock, the journal, the partial files. The journal's first line says
which run it belongs to; each further line records one finished tensor. The folder goes when the run is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.names import CARD_FILE, MANIFEST_FILE, WORK_FOLDER, is_inside
from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.writer import disk_errors, sync_folder
from pqweights.errors import OutputError, SourceChangedError
from pqweights.manifest import TensorRecord, read_manifest
from pqweights.plan import plan_shards

JOURNAL_FILE = "journal.jsonl"
LOCK_FILE = "lock"


@dataclass(frozen=True)
class RunIdentity:
    """What a run must share with the one that it continues.

    work: digest of the plan and of the recipe or target. source: size and stamp of every file that is read.
    outputs: every file that the run will give its final name.
    """

    work: str
    source: dict[str, tuple[int, int]]
    outputs: list[str]

    @staticmethod
    def of(plan_json: Any, storage: Storage, files: list[str], outputs: list[str]) -> RunIdentity:
        """From the plan (with recipe or target), the files it reads and those it writes."""
        digest = hashlib.sha256(json.dumps(plan_json, sort_keys=True).encode()).hexdigest()
        states = storage.files()
        return RunIdentity(digest, {name: (states[name].byte_count, states[name].stamp) for name in files}, outputs)

    def to_json(self) -> dict[str, Any]:
        """The first line of the journal."""
        source = {name: list(state) for name, state in self.source.items()}
        return {"work": self.work, "source": source, "outputs": self.outputs}


class Workspace:
    """The work folder of a running rewrite. Made by `open_workspace`."""

    def __init__(self, out: Path, records: dict[str, TensorRecord], journal: int) -> None:
        self.out = out
        self.folder = out / WORK_FOLDER
        self.records = records  # of the run that is continued, by tensor name
        self._journal = journal

    def record(self, record: TensorRecord) -> None:
        """Add a finished tensor to the journal, in one write."""
        line = json.dumps(record.to_json()) + "\n"
        with disk_errors(self.folder / JOURNAL_FILE):
            os.write(self._journal, line.encode())

    def finish(self) -> None:
        """Remove the work folder: the run is complete. The lock file goes last, while it is still held."""
        os.close(self._journal)
        self._journal = -1
        for path in self.folder.iterdir():
            if path.name != LOCK_FILE:
                path.unlink()
        (self.folder / LOCK_FILE).unlink()
        self.folder.rmdir()
        sync_folder(self.out)

    def discard(self, outputs: list[str]) -> None:
        """Remove what this run has written, finished shards included: its source turned out to be unusable."""
        _remove_files(self.out, outputs)
        self.finish()
        with contextlib.suppress(OSError):  # other files are there: the folder stays
            self.out.rmdir()


def check_paths(source: Path, out: Path) -> None:
    """Refuse an output folder that is, holds, or lies within the source."""
    inner, outer = out.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise OutputError(f"{out}: the output must lie outside the source {source}; choose another folder")


def check_output(out: Path, overwrite: bool) -> None:
    """Refuse an output folder that holds something else; nothing is created or changed here."""
    if not out.exists():
        return
    if not out.is_dir():
        raise OutputError(f"{out}: expected a folder or nothing, found a file; choose another output folder")
    if (out / WORK_FOLDER / JOURNAL_FILE).exists():
        return
    names = sorted(path.name for path in out.iterdir() if path.name not in (WORK_FOLDER, CARD_FILE))
    if (out / MANIFEST_FILE).is_file():
        if not overwrite:
            raise OutputError(
                f"{out}: holds a finished result of another source or recipe; pass --overwrite to replace it, or choose "
                "another folder"
            )
    elif names:
        raise OutputError(f"{out}: expected an empty or new folder, found {names[0]!r} in it; choose another folder")


@contextlib.contextmanager
def open_workspace(out: Path, identity: RunIdentity, overwrite: bool) -> Iterator[Workspace]:
    """Lock the output folder, continue what the same run left there, or start.

    Raises OutputError where the folder is taken, SourceChangedError where the source is not what it was.
    """
    check_output(out, overwrite)
    work = out / WORK_FOLDER
    with disk_errors(out):
        work.mkdir(parents=True, exist_ok=True)
        lock = _lock(work / LOCK_FILE, out)
    try:
        try:
            check_output(out, overwrite)  # again: the run that held the lock may have finished in between
        except OutputError:
            (work / LOCK_FILE).unlink()
            work.rmdir()
            raise
        records = _read_journal(work / JOURNAL_FILE, identity, out, overwrite)
        if records is None:
            _clear(out, work)
            records = {}
            with disk_errors(work):
                first = json.dumps(identity.to_json()) + "\n"
                (work / (JOURNAL_FILE + ".new")).write_text(first, encoding="utf-8")
                os.replace(work / (JOURNAL_FILE + ".new"), work / JOURNAL_FILE)
        journal = os.open(work / JOURNAL_FILE, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        yield Workspace(out, records, journal)
    finally:
        os.close(lock)


def _lock(path: Path, out: Path) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(f"{out}: another run is writing there; wait for it, or choose another folder") from None
        # The run that held it may have removed the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


def _read_journal(path: Path, identity: RunIdentity, out: Path, overwrite: bool) -> dict[str, TensorRecord] | None:
    """The finished tensors of the run that is to be continued; None where there is nothing to continue."""
    if not path.exists():
        return None
    lines = path.read_bytes().split(b"\n")
    first = json.loads(lines[0])
    if first != identity.to_json():
        if overwrite:
            return None
        found = first["source"]
        for name, state in identity.source.items():
            if found.get(name) != list(state):
                raise SourceChangedError(
                    f"{name}: the source changed since the interrupted run in {out} (size and time were {found.get(name)}, "
                    f"are {list(state)}); pass --overwrite to start again"
                )
        raise OutputError(
            f"{out}: holds an interrupted run with another recipe or other options; repeat that command to continue it, "
            "or pass --overwrite to start again"
        )
    records = {}
    valid = len(lines[0]) + 1
    for line in lines[1:-1]:
        record = TensorRecord(**json.loads(line))
        records[record.name] = record
        valid += len(line) + 1
    if lines[-1]:  # the last line was cut by the kill
        os.truncate(path, valid)
    return records


def _clear(out: Path, work: Path) -> None:
    """Remove what an abandoned run or the result to be replaced left: the files that its journal or manifest lists.

    The manifest goes last, so that a kill in between leaves a folder that is still known to be ours.
    """
    journal = work / JOURNAL_FILE
    if journal.exists():
        _remove_files(out, json.loads(journal.read_bytes().split(b"\n")[0])["outputs"])
    if (out / MANIFEST_FILE).is_file():
        manifest = read_manifest(out)
        shards = plan_shards(manifest.tensors, manifest.max_shard_bytes, {})
        _remove_files(out, [*(shard.file for shard in shards), *manifest.files, MANIFEST_FILE])
    for path in work.iterdir():
        if path.name != LOCK_FILE:
            path.unlink()


def _remove_files(out: Path, names: list[str]) -> None:
    """Remove files of ours, and folders that this leaves empty; a name that points elsewhere is passed over."""
    for name in names:
        if is_inside(name):
            (out / name).unlink(missing_ok=True)
            for parent in (out / name).parents:
                if parent == out:
                    break
                with contextlib.suppress(OSError):
                    parent.rmdir()
