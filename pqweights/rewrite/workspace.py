"""The output folder while it is being written: who may write, what an interrupted run left, and what may be replaced.

Everything unfinished lies in OUT/.pqweights: the lock, the journal, the partial and the finished shards, and the files
that were fetched. When all tensors are finished the shards move to OUT, so an older result stays in place until the new
one is complete. Then the work folder is removed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from pqweights.checkpoint.names import (
    CARD_FILE,
    EVALUATION_FILE,
    FACTORS_FILE,
    JOURNAL_FILE,
    MANIFEST_FILE,
    WORK_FOLDER,
)
from pqweights.checkpoint.writer import disk_errors, partial_path, sync_folder, write_whole
from pqweights.errors import MasterError, OutputError
from pqweights.rewrite.file_lock import LockedError, take_lock
from pqweights.rewrite.journal import (
    FinishedTensor,
    RunInputs,
    add_line,
    begin_journal,
    change_companions,
    read_first_line,
    read_journal,
    record_line,
)
from pqweights.rewrite.listed_files import files_of_result
from pqweights.rewrite.manifest import read_manifest
from pqweights.rewrite.output_files import refuse_linked_folders, refuse_links_in, remove_files
from pqweights.rewrite.part_files import (
    FETCHED_FOLDER,
    FINGERPRINTS_FILE,
    PART_JOURNALS,
    TOKEN_PREFIX,
    join_parts,
    locked_parts,
    part_prefix,
    remove_part,
)
from pqweights.rewrite.records import FileRecord, TensorRecord

LOCK_FILE = "lock"
# What may still serve a run that continues one which finished no tensor.
KEPT_FILES = (LOCK_FILE, JOURNAL_FILE, FETCHED_FOLDER, FINGERPRINTS_FILE, FACTORS_FILE)


class Workspace:
    """The work folder of a running rewrite, made by `open_workspace`."""

    def __init__(
        self,
        out: Path,
        *,
        records: dict[str, FinishedTensor],
        journal: int,
        outputs: Sequence[str] = (),
        replaces: Sequence[str] = (),
        part: str = "",
    ) -> None:
        """Take over an opened work folder.

        out: the output folder
        records: the tensors that the continued run had finished, by name
        journal: the descriptor of the open journal
        outputs: every file to which the run gives its final name
        replaces: the files of the result that is replaced
        part: what the names of its own files begin with, if others write into the folder, too (parts.py)
        """
        self.out = out
        self.folder = out / WORK_FOLDER
        self.fetched = self.folder / (part + FETCHED_FOLDER)
        self.records = records
        self._fingerprints = self.folder / (part + FINGERPRINTS_FILE)
        self._outputs, self._replaces = outputs, replaces
        self._journal = journal
        self._token = secrets.token_hex(8)

    def record(self, record: TensorRecord) -> None:
        """Add a finished tensor to the journal."""
        add_line(self._journal, record_line(record), self.folder / JOURNAL_FILE)

    def sync_records(self) -> None:
        """Make the journal durable."""
        with disk_errors(self.folder / JOURNAL_FILE):
            os.fsync(self._journal)

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of released files of the source, by name; none if they cannot be read."""
        try:
            found = json.loads(self._fingerprints.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) and all(isinstance(v, str) for v in found.values()) else {}

    def keep_fingerprints(self, known: dict[str, str]) -> None:
        """Store fingerprints for the run that continues this one."""
        write_whole(self.folder, self._fingerprints, [json.dumps(known).encode()])

    def complete_path(self, shard: str) -> Path | None:
        """Return where a shard lies whose tensors are all in the journal, staged or published; None if not complete.

        A file of that name in the output folder is the published shard only if neither a partial nor a staged one is
        left; until then it belongs to the result that is being replaced.
        """
        staged, published = self.folder / shard, self.out / shard
        if partial_path(staged).exists():
            return None
        return next((path for path in (staged, published) if path.exists()), None)

    def is_complete(self, shard: str) -> bool:
        """Whether all bytes of a shard whose tensors are all in the journal are stored, so that none is made again."""
        return self.complete_path(shard) is not None

    def take_room(self, shard: str) -> bool:
        """Whether a shard may be begun now: always, since there was room for the whole result when the run began."""
        return True

    def wait_for_room(self) -> None:
        """Return when another shard may be begun, once all earlier ones are finished."""

    def shard_finished(self, shard: str, records: Sequence[TensorRecord]) -> None:
        """Do nothing: a finished shard stays where it is until all are finished."""

    def join_part(self, number: int, records: Sequence[TensorRecord]) -> None:
        """Add what another process has finished to the journal, in place of that of its part."""
        for record in records:
            if record.name not in self.records:
                self.record(record)
        self.sync_records()
        remove_part(self.folder, part_prefix(number))

    def part_token(self) -> str:
        """Return a text by which processes that open parts know that the run is still this one."""
        self.shown_to_parts()
        return self._token

    def shown_to_parts(self) -> Path:
        """Return a file that such processes see if they reach the same folder."""
        path = self.folder / (TOKEN_PREFIX + self._token)
        with disk_errors(path):
            path.touch()
        return path

    def check(self) -> None:
        """Do nothing: nothing is done in the background that might have failed."""

    def publish(self, shards: Iterable[str]) -> None:
        """Give the staged shards their final names, and remove what they replace; a killed call can be repeated."""
        with disk_errors(self.out):
            for shard in shards:
                if (self.folder / shard).exists():
                    os.replace(self.folder / shard, self.out / shard)
            remove_files(self.out, [name for name in self._replaces if name not in self._outputs])
            sync_folder(self.out)

    def write(self, name: str, pieces: Iterable[bytes]) -> FileRecord:
        """Write a small file of the result, and return what the manifest states about it."""
        refuse_linked_folders(self.out, [name])
        digest = write_whole(self.folder, self.out / name, pieces)
        return FileRecord((self.out / name).stat().st_size, digest)

    def complete(self, manifest: Iterable[bytes]) -> None:
        """Write the manifest, which marks the result as finished, and remove the work folder."""
        self.write(MANIFEST_FILE, manifest)
        sync_folder(self.out)
        self.finish()

    def finish(self) -> None:
        """Remove the work folder of a complete run, the journal first: without one there is nothing to continue."""
        os.close(self._journal)
        self._journal = -1
        (self.folder / JOURNAL_FILE).unlink()
        _remove_work_folder(self.folder)
        sync_folder(self.out)

    def holds_work(self) -> bool:
        """Whether a run that continues this one would find a finished tensor, or factors of a fold."""
        factors = self.folder / FACTORS_FILE
        if factors.exists() and factors.stat().st_size:
            return True
        with open(self.folder / JOURNAL_FILE, "rb") as journal:
            if len(list(itertools.islice(journal, 2))) > 1:
                return True
        return any(path.stat().st_size for path in self.folder.glob(PART_JOURNALS))

    def discard(self) -> None:
        """Remove what this run has written, because its source is unusable; an older result stays."""
        with contextlib.suppress(LockedError), locked_parts(self.folder, self.out):  # else the unfinished run stays
            self.finish()
        with contextlib.suppress(OSError):  # the folder stays if it holds other files
            self.out.rmdir()


@contextlib.contextmanager
def open_workspace(
    out: Path, inputs: RunInputs, overwrite: bool, *, shown: object | None = None
) -> Iterator[Workspace]:
    """Lock the output folder, and continue what the same run left there, or start.

    shown: how messages call the place that another run is writing to; by default the folder

    Raises OutputError if the folder cannot be taken, SourceChangedError if the source is not what it was.
    """
    check_output(out, overwrite)
    work = out / WORK_FOLDER
    refuse_links_in(work)
    with disk_errors(out):
        work.mkdir(parents=True, exist_ok=True)
        lock = take_lock(work / LOCK_FILE, shown or out)
    with contextlib.ExitStack() as locks:
        locks.callback(os.close, lock)
        for path in work.glob(TOKEN_PREFIX + "*"):
            path.unlink(missing_ok=True)
        parts = locks.enter_context(locked_parts(work, out))
        try:
            check_output(out, overwrite)  # again: the run that held the lock may have finished in between
        except OutputError:
            _remove_work_folder(work)
            raise
        records = read_journal(work / JOURNAL_FILE, inputs, out=out, overwrite=overwrite)
        if records is None:
            _begin(out, inputs)
            records = {}
        else:
            _refuse_foreign_files(out, inputs.outputs, _files_of_journal(work))
            change_companions(work, inputs)
            records |= join_parts(work, parts)
            if not records:
                empty(work, but=KEPT_FILES)
        first = read_first_line(work / JOURNAL_FILE)
        assert first is not None
        journal = os.open(work / JOURNAL_FILE, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        yield Workspace(out, records=records, journal=journal, outputs=inputs.outputs, replaces=first["replaces"])


def is_under_way(out: Path) -> bool:
    """Whether a run into `out` began and did not reach its end."""
    return (out / WORK_FOLDER / JOURNAL_FILE).exists()


def tidy(out: Path) -> None:
    """Remove the work folder that a run killed in its last steps left beside its complete result."""
    if not is_under_way(out):
        remove_work(out, but_not_if=is_under_way)


def remove_work(
    out: Path, *, but_not_if: Callable[[Path], bool] = lambda out: False, shown: object | None = None
) -> None:
    """Remove the work folder, if there is one.

    but_not_if: asked of `out` when no other run can begin there
    shown: see open_workspace

    Raises OutputError if a run is writing there.
    """
    work = out / WORK_FOLDER
    if not work.exists():
        return
    refuse_links_in(work)
    lock = take_lock(work / LOCK_FILE, shown or out)
    try:
        if not but_not_if(out):
            _remove_work_folder(work)
    finally:
        os.close(lock)


def check_paths(source: Path, out: Path) -> None:
    """Raise OutputError if the output folder is, holds, or lies within the source."""
    inner, outer = out.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise OutputError(
            f"{out}: the output folder and the source must not contain each other (the source is {source}); choose "
            "another folder"
        )


def check_output(out: Path, overwrite: bool, difference: Callable[[], str] = lambda: "holds a result by now") -> None:
    """Raise OutputError if the output folder holds something else. Nothing is created or changed.

    difference: says how the result in the folder differs from the one that is asked for
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise OutputError(f"{out}: expected a folder or nothing, found a file; choose another output folder")
    if is_under_way(out):
        return
    if (out / MANIFEST_FILE).is_file():
        if not overwrite:
            raise occupied(out, difference())
    else:
        refuse_other_names(out, (path.name for path in out.iterdir()))


def occupied(out: object, difference: str) -> OutputError:
    """Return the error of an output folder that holds another result."""
    return OutputError(f"{out}: {difference}; pass --overwrite to replace it, or choose another folder")


def refuse_other_names(out: object, names: Iterable[str]) -> None:
    """Raise OutputError if a folder without a result holds something.

    names: of the files and folders in it
    """
    others = sorted(set(names) - {WORK_FOLDER, CARD_FILE, EVALUATION_FILE})
    if others:
        raise OutputError(f"{out}: expected an empty or new folder, found {others[0]!r} in it; choose another folder")


def _begin(out: Path, inputs: RunInputs) -> None:
    """Start a new run in the locked work folder, in place of whatever lies there.

    Raises MasterError if the manifest of the result to be replaced is damaged, OutputError for a foreign file.
    """
    work = out / WORK_FOLDER
    try:
        replaces = _files_to_replace(out, work)
        _refuse_foreign_files(out, inputs.outputs, replaces)
    except (MasterError, OutputError):
        if not is_under_way(out):
            _remove_work_folder(work)
        raise
    begin_journal(work, inputs, replaces)
    empty(work, but=(LOCK_FILE, JOURNAL_FILE))


def _files_to_replace(out: Path, work: Path) -> list[str]:
    """The files that an abandoned run or an earlier result left, as its journal or manifest lists them."""
    names = _files_of_journal(work)
    if (out / MANIFEST_FILE).is_file():
        names += files_of_result(read_manifest(out))
    return names


def _files_of_journal(work: Path) -> list[str]:
    """The files that a run writes or replaces according to its journal."""
    first = read_first_line(work / JOURNAL_FILE) if (work / JOURNAL_FILE).exists() else None
    return [] if first is None else [*first["outputs"], *first["replaces"]]


def _refuse_foreign_files(out: Path, outputs: list[str], replaces: list[str]) -> None:
    refuse_linked_folders(out, outputs)
    refuse_foreign(out, (name for name in outputs if (out / name).exists()), replaces)


def refuse_foreign(out: object, existing: Iterable[str], ours: Collection[str]) -> None:
    """Raise OutputError if a file that no run of ours wrote has the name of an output.

    existing: the names of outputs under which there are files
    ours: the files that earlier runs wrote
    """
    for name in existing:
        if name not in ours:
            raise OutputError(
                f"{out}: {name!r} exists, and pqweights did not write it; move it away, or choose another folder"
            )


def _remove_work_folder(work: Path) -> None:
    """Remove the work folder; the lock file goes last, while the lock is still held."""
    empty(work, but=(LOCK_FILE,))
    (work / LOCK_FILE).unlink()
    with contextlib.suppress(OSError):  # another run has just opened the lock
        work.rmdir()


def empty(work: Path, but: Sequence[str]) -> None:
    """Remove everything in a folder but some names."""
    for path in work.iterdir():
        if path.name in but:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
