"""A run that is under way in a store: who may write, what an interrupted run left, and what may be replaced.

Everything unfinished lies in the work folder: the lock, the journal, the finished shards with their marks, and what was
fetched. OUT/.pqweights/KEY/SHARD is a finished shard, and OUT/.pqweights/KEY/SHARD.json its mark: what was measured of
its tensors. The mark is written after the shard, and so says that it is complete; it stays when the shard gets its
final name. Whoever makes a shard under the same KEY, on any machine, makes the same bytes. When all shards are finished
they get their final names, so an older result stays until the new one is complete; the manifest comes last, then the
work folder goes. docs/format.md describes them.
"""

from __future__ import annotations

import contextlib
import glob
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pqweights.checkpoint.ahead import Stop
from pqweights.checkpoint.digests import KEY
from pqweights.checkpoint.names import (
    CARD_FILE,
    EVALUATION_FILE,
    JOURNAL_FILE,
    MANIFEST_FILE,
    PICTURE_FILE,
    WORK_FOLDER,
)
from pqweights.checkpoint.shard_file import ShardFile
from pqweights.checkpoint.writer import PARTIAL_SUFFIX, disk_errors
from pqweights.common.threads import slow_step
from pqweights.convert.journal import JOURNAL, Journal, is_under_way, may_continue, read_journal
from pqweights.convert.listed_files import files_of_result
from pqweights.convert.manifest import parse_manifest
from pqweights.convert.plan import Plan
from pqweights.convert.records import TensorRecord
from pqweights.errors import OutputError, PqweightsError, StorageError
from pqweights.planning.layout import ShardPlan
from pqweights.storage import Store
from pqweights.storage.local import clear
from pqweights.storage.store import CheckLock

FETCHED_FOLDER = "fetched"
MARK_SUFFIX = ".json"
# Small requests, and moves on a server, at once.
REQUESTS_AT_ONCE = 8


# What is known of a finished shard: what was measured of its tensors, in the order of the plan, and the fingerprints of
# files of the source that were fetched and are no longer needed, by name.
Mark = tuple[tuple[TensorRecord, ...], Mapping[str, str]]


def mark_json(mark: Mark) -> bytes:
    """Return the content of the file of a mark."""
    records, fingerprints = mark
    stated = [vars(record) | {KEY: record.digests} for record in records]
    for entry in stated:
        del entry["digests"]
    return json.dumps({"tensors": stated, "fingerprints": dict(fingerprints)}).encode()


def parse_mark(content: bytes) -> Mark | None:
    """Read a mark; None if it is not whole, so that the shard is made again."""
    try:
        stated = json.loads(content)
        records = tuple(TensorRecord(digests=record.pop(KEY), **record) for record in stated["tensors"])
        return records, dict(stated["fingerprints"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def unlocked() -> None:
    """Check nothing: the process that started this one has the lock."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has the lock of its store, or a part of one on another machine. It may be pickled without its lock.

    store: where the result is written
    key: a short text that runs have in common if they make the same shards
    shards: the outputs that hold tensors, with their sizes in bytes
    marks: those of shards that were finished when it began
    journal: what it states of itself
    check_lock: raises OutputError if another run has the lock by now
    follows: whether it found the journal of a run that did not reach its end
    """

    store: Store
    key: str
    shards: Mapping[str, int]
    marks: Mapping[str, Mark]
    journal: Journal
    check_lock: CheckLock = unlocked
    follows: bool = False

    @property
    def folder(self) -> Path:
        """Where it keeps on this machine what only this run may use."""
        return self.store.work / self.key

    @property
    def fetched(self) -> Path:
        """Where fetched files of the source lie."""
        return self.folder / FETCHED_FOLDER

    def name(self, shard: str) -> str:
        """Return the name that a finished shard has until all are finished."""
        return f"{WORK_FOLDER}/{self.key}/{shard}"

    def new_path(self, shard: str) -> Path:
        """Return where a process makes a shard: a path of its own, since a lost one may still be making the same.

        What that one has made is removed; it will find that it is to end.
        """
        with disk_errors(self.folder):
            (self.folder / shard).parent.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(f"{glob.escape(shard)}.*{PARTIAL_SUFFIX}"):
                path.unlink(missing_ok=True)
        return self.folder / f"{shard}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}"

    def begin(self, shard: ShardPlan, waiting: Callable[[], AbstractContextManager[None]]) -> ShardFile:
        """Begin the file of a shard. waiting: see ShardFile"""
        assert shard.header is not None
        path, shown = self.new_path(shard.file), self.folder / shard.file
        return ShardFile(path, shard.header, shard.stored, shard.file_bytes, shown=shown, waiting=waiting)

    def add(self, shard: str, path: Path, mark: Mark, stop: Stop) -> None:
        """Take over the complete file of a shard, then mark it. stop: see Store.put"""
        self.check_lock()
        try:
            self.store.put(self.name(shard), path, stop)
        finally:
            path.unlink(missing_ok=True)
        self.store.write(self.name(shard) + MARK_SUFFIX, [mark_json(mark)])
        self.send([shard], stop)

    def send(self, shards: Iterable[str], stop: Stop = lambda: False) -> None:
        """Send finished shards to where the store sends them, if they still wait here, and remove them."""
        if (sending := self.store.sending) is not None:
            for shard in shards:
                if (path := self.store.path / self.name(shard)).exists():
                    sending.send(shard, path, stop)
                    path.unlink()

    def finished(self) -> dict[str, Mark]:
        """Return the mark of every shard that is complete, by name."""
        complete = [shard for shard, (_, is_complete) in self._states().items() if is_complete]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, "pqweights-marks") as pool:
            marks = dict(zip(complete, pool.map(self._mark, complete), strict=True))
        return {shard: mark for shard, mark in marks.items() if mark is not None}

    def publish(self) -> None:
        """Give all shards their final names, and remove what they replace; a killed call can be repeated.

        Raises OutputError if one is not there.
        """
        self.check_lock()
        with slow_step("moving the shards to their names"):
            states = self._states()
            for shard, (_, is_complete) in states.items():
                if not is_complete:
                    raise OutputError(
                        f"{self.store}: shard {shard!r} is missing, or is not as this run wrote it; did another "
                        "program remove it? Run the same command again"
                    )
            waiting = [shard for shard, (is_waiting, _) in states.items() if is_waiting]
            with ThreadPoolExecutor(REQUESTS_AT_ONCE, "pqweights-marks") as pool:
                for _ in pool.map(lambda shard: self.store.move(self.name(shard), shard), waiting):
                    pass
            self.store.remove(name for name in self.journal.replaces if name not in self.journal.outputs)

    def complete(self, manifest: Iterable[bytes]) -> None:
        """Write the manifest, which marks the result as finished, and remove all else that the run left."""
        self.check_lock()
        self.store.write(MANIFEST_FILE, manifest)
        self._end()

    def holds_work(self) -> bool:
        """Whether a run that continues this one would find a finished shard."""
        try:
            return bool(self.finished())
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

    def _states(self) -> dict[str, tuple[bool, bool]]:
        """Say of every shard whether it waits for its final name, and whether it is complete, under either name."""
        below = self.store.files(f"{WORK_FOLDER}/{self.key}")
        marked = {shard for shard in self.shards if self.name(shard) + MARK_SUFFIX in below}
        published = self.store.finished_files() if any(self.name(shard) not in below for shard in marked) else {}
        states = {}
        for shard, size in self.shards.items():
            is_waiting = self.name(shard) in below
            state = below[self.name(shard)] if is_waiting else published.get(shard)
            states[shard] = is_waiting, shard in marked and state is not None and state.byte_count == size
        return states

    def _mark(self, shard: str) -> Mark | None:
        return parse_mark(self.store.read(self.name(shard) + MARK_SUFFIX) or b"")


@contextlib.contextmanager
def open_run(plan: Plan, store: Store, *, overwrite: bool) -> Iterator[Run]:
    """Lock a store, and continue what a run of the same plan left there, or start.

    Raises OutputError if the store cannot be taken, SourceChangedError if the source is not what it was, MasterError if
    the manifest of the result to be replaced is damaged.
    """
    _check_output(store, overwrite)
    ours = plan.journal
    theirs: Journal | None = None
    continues = False

    def may_take() -> None:
        nonlocal ours, theirs, continues
        theirs = read_journal(store)
        try:
            _check_output(store, overwrite)  # again: the run that held the lock may have finished in between
            continues = theirs is not None and may_continue(ours, theirs, store, overwrite=overwrite)
            ours = msgspec.structs.replace(ours, replaces=tuple(_replaced_files(store, theirs)))
            _refuse_foreign(store, ours)
        except PqweightsError:
            if theirs is None:
                clear(store.work, ())
            raise

    key = ours.key
    with store.lock(may_take) as check_lock:
        check_lock()
        # First what another run left, then the journal: a kill in between leaves that run without finished shards.
        store.clear_work(keep=(JOURNAL_FILE, key) if continues else (JOURNAL_FILE,))
        check_lock()
        store.write(JOURNAL, [ours.to_json()])
        run = Run(
            store=store,
            key=key,
            shards={shard.file: shard.file_bytes for shard in plan.shards},
            marks={},
            journal=ours,
            check_lock=check_lock,
            follows=theirs is not None,
        )
        run = replace(run, marks=run.finished()) if continues else run
        with disk_errors(run.folder):
            run.folder.mkdir(exist_ok=True)
        for folder in {(run.folder / shard).parent for shard in run.shards}:
            for path in folder.glob("*" + PARTIAL_SUFFIX):  # of processes that are gone
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
    others = sorted(names - {WORK_FOLDER, CARD_FILE, EVALUATION_FILE, PICTURE_FILE})
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


def _refuse_foreign(store: Store, journal: Journal) -> None:
    """Raise OutputError if a file that no run of ours wrote has the name of an output."""
    store.check_names(journal.outputs)
    there = store.names() | store.files().keys()
    for name in journal.outputs:
        if name in there and name not in journal.replaces:
            raise OutputError(
                f"{store}: {name!r} exists, and pqweights did not write it; move it away, or choose another folder"
            )
