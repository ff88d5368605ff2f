"""A run that is under way in a store: who may write, what an interrupted run left, and what may be replaced.

Everything unfinished lies in the work folder: the lock, the journal, the finished shards with their marks, and what was
fetched. When all shards are finished they get their final names, so an older result stays until the new one is
complete; the manifest comes last, then the work folder goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from pqweights.checkpoint.names import (
    CARD_FILE,
    EVALUATION_FILE,
    JOURNAL_FILE,
    MANIFEST_FILE,
    WORK_FOLDER,
)
from pqweights.checkpoint.writer import PARTIAL_SUFFIX, disk_errors
from pqweights.common.threads import slow_step
from pqweights.convert.finished_shards import FinishedShards, ShardMark
from pqweights.convert.identity import JOURNAL, Journal, RunStatement, is_under_way, read_journal
from pqweights.convert.listed_files import files_of_result
from pqweights.convert.manifest import parse_manifest
from pqweights.errors import OutputError, PqweightsError, StorageError
from pqweights.storage import Store
from pqweights.storage.local import clear
from pqweights.storage.store import CheckLock, FileRecord

FETCHED_FOLDER = "fetched"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has the lock of its store.

    statement: what it is about to do
    shards: its finished shards in the store
    marks: those that were finished when it began
    replaces: the files of earlier runs that it removes or replaces
    follows: whether it found the journal of a run that did not reach its end
    """

    statement: RunStatement
    shards: FinishedShards
    marks: dict[str, ShardMark]
    replaces: Sequence[str]
    check_lock: CheckLock
    follows: bool

    @property
    def store(self) -> Store:
        """Where the result is written."""
        return self.shards.store

    @property
    def folder(self) -> Path:
        """Where it keeps on this machine what only this run may use."""
        return self.store.work / self.statement.key

    @property
    def fetched(self) -> Path:
        """Where fetched files of the source lie."""
        return self.folder / FETCHED_FOLDER

    def publish(self) -> None:
        """Give all shards their final names, and remove what they replace; a killed call can be repeated."""
        self.check_lock()
        with slow_step("moving the shards to their names"):
            self.shards.publish(self.statement.shards)
            self.store.remove(name for name in self.replaces if name not in self.statement.journal.outputs)

    def complete(self, manifest: Iterable[bytes]) -> FileRecord:
        """Write the manifest, which marks the result as finished, and remove all else that the run left."""
        self.check_lock()
        record = self.store.write(MANIFEST_FILE, manifest)
        self._end()
        return record

    def holds_work(self) -> bool:
        """Whether a run that continues this one would find a finished shard."""
        try:
            return bool(self.shards.marks(self.statement.shards))
        except StorageError:  # what ended the run is more important
            return True

    def discard(self) -> None:
        """Remove what this run has written, because its source is unusable; an older result stays.

        The journal stays if there was one before: it lists files that an unfinished run has left under final names.
        """
        with contextlib.suppress(StorageError, OutputError, OSError):  # why the run ends is more important
            self.check_lock()
            if self.follows:
                self.store.clear_work(keep=(JOURNAL_FILE,))
            else:
                self._end()

    def _end(self) -> None:
        """Remove the journal, without which there is nothing to continue, then what else the run left."""
        self.store.remove([JOURNAL])
        self.store.clear_work()


@contextlib.contextmanager
def open_run(store: Store, statement: RunStatement, *, overwrite: bool) -> Iterator[Run]:
    """Lock a store, and continue what the same run left there, or start.

    Raises OutputError if the store cannot be taken, SourceChangedError if the source is not what it was, MasterError if
    the manifest of the result to be replaced is damaged.
    """
    _check_output(store, overwrite)
    journal: Journal | None = None
    replaces: list[str] = []
    continues = False

    def may_take() -> None:
        nonlocal journal, replaces, continues
        journal = read_journal(store)
        try:
            _check_output(store, overwrite)  # again: the run that held the lock may have finished in between
            continues = statement.continues(journal, store, overwrite=overwrite)
            replaces = _replaced_files(store, journal)
            _refuse_foreign(store, statement.journal.outputs, replaces)
        except PqweightsError:
            if journal is None:
                clear(store.work, ())
            raise

    with store.lock(may_take) as check_lock:
        check_lock()
        # First what another run left, then the journal: a kill in between leaves that run without finished shards.
        store.clear_work(keep=(JOURNAL_FILE, statement.key) if continues else (JOURNAL_FILE,))
        check_lock()
        store.write(JOURNAL, [replace(statement.journal, replaces=tuple(replaces)).to_json()])
        shards = FinishedShards(store, statement.key)
        run = Run(
            statement=statement,
            shards=shards,
            marks=shards.marks(statement.shards) if continues else {},
            replaces=replaces,
            check_lock=check_lock,
            follows=journal is not None,
        )
        with disk_errors(run.folder):
            run.folder.mkdir(exist_ok=True)
        for path in run.folder.glob("*" + PARTIAL_SUFFIX):  # of processes that are gone
            path.unlink(missing_ok=True)
        yield run


def _check_output(store: Store, overwrite: bool) -> None:
    """Raise OutputError if a store holds something else. Nothing is created or changed."""
    names = store.names()
    if not names or is_under_way(store):
        return
    if MANIFEST_FILE in names:
        if not overwrite:
            raise OutputError(f"{store}: holds a result by now; run the same command again")
        return
    others = sorted(names - {WORK_FOLDER, CARD_FILE, EVALUATION_FILE})
    if others:
        raise OutputError(f"{store}: expected an empty or new folder, found {others[0]!r} in it; choose another folder")


def _replaced_files(store: Store, journal: Journal | None) -> list[str]:
    """Return the files that an unfinished run and an earlier result left, as journal and manifest list them.

    Raises MasterError if the manifest is damaged.
    """
    names = [] if journal is None else [*journal.outputs, *journal.replaces]
    manifest = store.read(MANIFEST_FILE)
    if manifest is not None:
        names += files_of_result(parse_manifest(manifest))
    return list(dict.fromkeys(names))


def _refuse_foreign(store: Store, outputs: Collection[str], ours: Collection[str]) -> None:
    """Raise OutputError if a file that no run of ours wrote has the name of an output."""
    store.check_names(outputs)
    there = store.names() | store.files().keys()
    for name in outputs:
        if name in there and name not in ours:
            raise OutputError(
                f"{store}: {name!r} exists, and pqweights did not write it; move it away, or choose another folder"
            )
