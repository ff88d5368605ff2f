"""The output folder while it is being written: who may write there, what an interrupted run left, what may be replaced.

Everything unfinished lies in OUT/.pqweights: the lock, the journal, the partial and the finished shards, and what was
fetched for them. The journal's first line says which run it belongs to and what it replaces; each further line records one
finished tensor. When all tensors are done the shards move to OUT, so that an older result stands until the new one is
complete; then the folder goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.names import CARD_FILE, EVALUATION_FILE, MANIFEST_FILE, WORK_FOLDER, is_inside
from pqweights.checkpoint.storage import Origin, Storage
from pqweights.checkpoint.writer import disk_errors, partial_path, sync_folder, write_whole
from pqweights.errors import MasterError, OutputError, SourceChangedError
from pqweights.planning.plan import plan_shards
from pqweights.rewrite.identity import RunIdentity
from pqweights.rewrite.manifest import TensorRecord, read_manifest

JOURNAL_FILE = "journal.jsonl"
LOCK_FILE = "lock"
FINGERPRINTS_FILE = "fingerprints.json"
FETCHED_FOLDER = "fetched"


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run must share with the one that it continues, as far as its journal says.

    work: digest of its identity. source: size and stamp of every file that is read. outputs: every file that the run will give
    its final name. origin: the repository and commit that is read.
    """

    work: str
    source: dict[str, tuple[int, int]]
    outputs: list[str]
    origin: Origin | None

    @staticmethod
    def of(identity: RunIdentity, files: Mapping[str, tuple[Storage, Sequence[str]]], outputs: list[str]) -> RunInputs:
        """Of a run that reads these files, by the option that names their checkpoint ("" for the source)."""
        source = {}
        for option, (storage, names) in files.items():
            states = storage.files()
            for name in names:
                source[f"{option} {name}".lstrip()] = (states[name].byte_count, states[name].stamp)
        return RunInputs(work=identity.digest(), source=source, outputs=outputs, origin=identity.origin)

    def to_json(self) -> dict[str, Any]:
        """The first line of the journal."""
        source = {name: list(state) for name, state in self.source.items()}
        origin = {} if self.origin is None else {"origin": list(self.origin)}
        return {"work": self.work, **origin, "source": source, "outputs": self.outputs}


class Workspace:
    """The work folder of a running rewrite. Made by `open_workspace`."""

    def __init__(
        self, out: Path, records: dict[str, TensorRecord], journal: int, outputs: list[str], replaces: list[str]
    ) -> None:
        self.out = out
        self.folder = out / WORK_FOLDER
        self.fetched = self.folder / FETCHED_FOLDER
        self._outputs, self._replaces = outputs, replaces
        self.records = records  # of the run that is continued, by tensor name
        self._journal = journal

    def record(self, record: TensorRecord) -> None:
        """Add a finished tensor to the journal; a line that a kill cuts short is dropped when it is read."""
        line = (json.dumps(record.to_json()) + "\n").encode()
        with disk_errors(self.folder / JOURNAL_FILE):
            while line:
                line = line[os.write(self._journal, line) :]

    def sync_records(self) -> None:
        """Make durable what was recorded."""
        with disk_errors(self.folder / JOURNAL_FILE):
            os.fsync(self._journal)

    def fingerprints(self) -> dict[str, str]:
        """Those of files of the source that were released, by file; none where they cannot be read."""
        try:
            found = json.loads((self.folder / FINGERPRINTS_FILE).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) and all(isinstance(v, str) for v in found.values()) else {}

    def keep_fingerprints(self, known: dict[str, str]) -> None:
        """For the run that continues this one."""
        write_whole(self.folder, self.folder / FINGERPRINTS_FILE, [json.dumps(known).encode()])

    def finish(self) -> None:
        """Remove the work folder: the run is complete. The journal goes first; without one there is nothing to continue."""
        os.close(self._journal)
        self._journal = -1
        (self.folder / JOURNAL_FILE).unlink()
        _remove_work_folder(self.folder)
        sync_folder(self.out)

    def is_complete(self, shard: str) -> bool:
        """Whether a shard whose tensors are all in the journal is complete: staged here, or published.

        A file of that name in the output folder is the published one only when neither a partial nor a staged one is
        left; until then it belongs to the result that is to be replaced.
        """
        staged = self.folder / shard
        return not partial_path(staged).exists() and (staged.exists() or (self.out / shard).exists())

    def publish(self, shards: list[str]) -> None:
        """Give the staged shards their final names and remove what the new result replaces. A kill in between resumes."""
        with disk_errors(self.out):
            for shard in shards:
                if (self.folder / shard).exists():
                    os.replace(self.folder / shard, self.out / shard)
            _remove_files(self.out, [name for name in self._replaces if name not in self._outputs])
            sync_folder(self.out)

    def discard(self) -> None:
        """Remove what this run has written: its source turned out to be unusable. An older result stays."""
        self.finish()
        with contextlib.suppress(OSError):  # other files are there: the folder stays
            self.out.rmdir()


def is_under_way(out: Path) -> bool:
    """Whether a run into `out` began and did not reach its end."""
    return (out / WORK_FOLDER / JOURNAL_FILE).exists()


def tidy(out: Path) -> None:
    """Remove what a run that was killed in its last steps left beside its complete result."""
    work = out / WORK_FOLDER
    if work.exists() and not is_under_way(out):
        lock = _lock(work / LOCK_FILE, out)
        try:
            if not is_under_way(out):  # nor since
                _remove_work_folder(work)
        finally:
            os.close(lock)


def _remove_work_folder(work: Path) -> None:
    """Remove the work folder; its lock file goes last, while it is still held."""
    _empty(work, but=(LOCK_FILE,))
    (work / LOCK_FILE).unlink()
    with contextlib.suppress(OSError):  # another run has just looked for the lock
        work.rmdir()


def _empty(work: Path, but: Sequence[str]) -> None:
    for path in work.iterdir():
        if path.name in but:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


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
    if is_under_way(out):
        return
    names = sorted(path.name for path in out.iterdir() if path.name not in (WORK_FOLDER, CARD_FILE, EVALUATION_FILE))
    if (out / MANIFEST_FILE).is_file():
        if not overwrite:
            raise OutputError(
                f"{out}: holds a result of another source or recipe, of a source that changed or was copied since, or a damaged "
                "one (pqweights verify tells); pass --overwrite to replace it, or choose another folder"
            )
    elif names:
        raise OutputError(f"{out}: expected an empty or new folder, found {names[0]!r} in it; choose another folder")


@contextlib.contextmanager
def open_workspace(out: Path, inputs: RunInputs, overwrite: bool) -> Iterator[Workspace]:
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
            _remove_work_folder(work)
            raise
        records = _read_journal(work / JOURNAL_FILE, inputs, out, overwrite)
        if records is None:
            try:
                replaces = _files_to_replace(out, work)
            except MasterError:
                if not is_under_way(out):
                    _remove_work_folder(work)
                raise
            _refuse_foreign_names(out, inputs.outputs, replaces, work)
            _begin_journal(work, inputs, replaces)
            _empty(work, but=(LOCK_FILE, JOURNAL_FILE))  # nothing here is of this run
            records = {}
        elif not records:  # what it fetched may serve
            _empty(work, but=(LOCK_FILE, JOURNAL_FILE, FETCHED_FOLDER, FINGERPRINTS_FILE))
        first = _first_line(work / JOURNAL_FILE)
        assert first is not None
        journal = os.open(work / JOURNAL_FILE, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        yield Workspace(out, records, journal, inputs.outputs, first["replaces"])
    finally:
        os.close(lock)


def _lock(path: Path, out: Path) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # a run that ends has just removed the folder
            continue
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


def _read_journal(path: Path, inputs: RunInputs, out: Path, overwrite: bool) -> dict[str, TensorRecord] | None:
    """The finished tensors of the run that is to be continued; None where there is nothing to continue."""
    if not path.exists():
        return None
    first = _first_line(path)
    if first is None:
        if overwrite:
            return None
        raise OutputError(
            f"{out}: {WORK_FOLDER}/{JOURNAL_FILE} is damaged, so the interrupted run cannot be continued; pass --overwrite to "
            "start again"
        )
    if any(first.get(key) != value for key, value in inputs.to_json().items()):
        if overwrite:
            return None
        if inputs.origin is not None and first.get("origin") not in (None, list(inputs.origin)):
            raise _other_commit(out, first["origin"], inputs.origin)
        found = first["source"]
        for name, state in inputs.source.items():
            if found.get(name) != list(state) and (name in found or not name.startswith("--")):
                raise SourceChangedError(
                    f"{name}: the source changed since the interrupted run in {out} (size and time were {found.get(name)}, "
                    f"are {list(state)}); pass --overwrite to start again"
                )
        raise OutputError(
            f"{out}: holds an interrupted run with another recipe or other options; repeat that command to continue it, "
            "or pass --overwrite to start again"
        )
    records: dict[str, TensorRecord] = {}
    data = path.read_bytes()
    valid = data.index(b"\n") + 1
    for line in data[valid:].splitlines(keepends=True):
        record = _parse_record(line)
        if record is None:  # cut by the kill, or by a power failure: what follows is done again
            os.truncate(path, valid)
            break
        records[record.name] = record
        valid += len(line)
    return records


def _other_commit(out: Path, found: Any, origin: Origin) -> SourceChangedError:
    was = "@".join(str(part) for part in found) if isinstance(found, list) else "another source"
    again = (
        f"pass --revision {found[1]} to continue it, or " if isinstance(found, list) and found[0] == origin.id else ""
    )
    return SourceChangedError(
        f"{origin.id}: expected {was}, which the interrupted run in {out} was reading, found commit {origin.revision}: "
        f"{again}pass --overwrite to start again"
    )


def _parse_record(line: bytes) -> TensorRecord | None:
    """A journal line, or None where it is not whole. What it claims of bytes on the disk is checked against them."""
    try:
        record = TensorRecord(**json.loads(line)) if line.endswith(b"\n") else None
    except (ValueError, TypeError, RecursionError):
        return None
    return record if record is not None and isinstance(record.name, str) and isinstance(record.sha256, dict) else None


def _first_line(journal: Path) -> dict[str, Any] | None:
    """Which run a journal belongs to; None where that cannot be read."""
    with open(journal, "rb") as stream:
        line = stream.readline()
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("source"), dict):
        return None
    lists = (value.get("outputs"), value.get("replaces"))
    names = all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in lists)
    return value if names else None


def _refuse_foreign_names(out: Path, outputs: list[str], replaces: list[str], work: Path) -> None:
    """Refuse to write over a file that no run of ours put there."""
    for name in outputs:
        if (out / name).exists() and name not in replaces:
            if not is_under_way(out):
                _remove_work_folder(work)
            raise OutputError(f"{out}: {name!r} is there and not ours; move it away, or choose another folder")


def _begin_journal(work: Path, inputs: RunInputs, replaces: list[str]) -> None:
    """Write the first line. It stands before anything is removed, so that a kill in between finds the list again."""
    with disk_errors(work):
        new = work / (JOURNAL_FILE + ".new")
        new.write_text(json.dumps(inputs.to_json() | {"replaces": replaces}) + "\n", encoding="utf-8")
        os.replace(new, work / JOURNAL_FILE)


def _files_to_replace(out: Path, work: Path) -> list[str]:
    """What an abandoned run or an earlier result left: the files that its journal or manifest lists."""
    names: list[str] = []
    if (work / JOURNAL_FILE).exists():
        first = _first_line(work / JOURNAL_FILE)
        names += [*first["outputs"], *first["replaces"]] if first is not None else []
    if (out / MANIFEST_FILE).is_file():
        manifest = read_manifest(out)
        shards = plan_shards(manifest.tensors, manifest.identity.max_shard_bytes, {})
        names += [*(shard.file for shard in shards), *manifest.files, MANIFEST_FILE]
    return names


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
