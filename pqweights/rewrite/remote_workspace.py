"""The unfinished result of a run that writes to object storage.

Shards are made in a work folder on this machine, by the same stream as those of a local result. Each finished one is
staged in object storage (staging.py) and deleted here. OUT/.pqweights/journal.jsonl states which run is under way, and
a random token of the process that carries it out: a process that finds another token there has been replaced, and
ends. When all shards are staged they are moved to their final names, on the server.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.names import JOURNAL_FILE, MANIFEST_FILE, WORK_FOLDER, is_inside
from pqweights.checkpoint.writer import disk_errors, partial_path, write_whole
from pqweights.errors import OutputError, StorageError
from pqweights.notices import slow_step
from pqweights.remote.folder import RemoteFolder
from pqweights.rewrite.file_lock import take_lock
from pqweights.rewrite.journal import RunInputs, first_line, parse_first_line, read_records
from pqweights.rewrite.needs import MOST_LOCAL_SHARDS
from pqweights.rewrite.parts import WAIT_SECONDS, PartInputs
from pqweights.rewrite.records import FileRecord, TensorRecord
from pqweights.rewrite.staging import REMOTE_JOURNAL, ShardUploads, Staging, any_staged, remove_staged
from pqweights.rewrite.workspace import KEPT_FILES, LOCK_FILE, Workspace, empty

PROBE_FILE = f"{WORK_FOLDER}/probe"
# Where small files lie on their way.
SENT_FOLDER = "sent"


@dataclass(frozen=True, kw_only=True)
class RemoteRun:
    """The journal of a run in object storage, from the process that carries the run out.

    folder: where the result is written
    token: that of this process
    outputs, replaces: see Workspace
    """

    folder: RemoteFolder
    token: str
    outputs: Sequence[str]
    replaces: Sequence[str]

    @staticmethod
    def begin(folder: RemoteFolder, inputs: RunInputs, replaces: Sequence[str]) -> RemoteRun:
        """Write the journal, in place of the one that is there.

        Raises StorageError if files cannot be written there, or not be deleted, so that no work is in vain.
        """
        folder.write(PROBE_FILE, b"")
        folder.remove([PROBE_FILE])
        run = RemoteRun(folder=folder, token=secrets.token_hex(8), outputs=inputs.outputs, replaces=replaces)
        folder.write(REMOTE_JOURNAL, first_line(inputs, replaces, token=run.token))
        return run

    def check(self) -> None:
        """Raise OutputError if another process has taken over, or has ended the run."""
        check_token(self.folder, self.token)

    def remove_replaced(self) -> None:
        """Remove the files of an older result that this one does not have."""
        self.folder.remove(name for name in self.replaces if name not in self.outputs and is_inside(name))

    def end(self) -> None:
        """Remove the journal, without which there is nothing to continue, then what else the run left."""
        self.folder.remove([REMOTE_JOURNAL])
        remove_staged(self.folder)


def check_token(folder: RemoteFolder, token: str) -> None:
    """Raise OutputError if the run with this token has been taken over by another process, or was ended."""
    first = read_remote_journal(folder)
    if first is None or first.get("token") != token:
        raise OutputError(f"{folder.address}: another run is writing there; wait for it, or choose another folder")


def read_remote_journal(folder: RemoteFolder) -> dict[str, Any] | None:
    """Read which run is under way in a place; None if there is none, an empty dict if that cannot be read."""
    data = folder.read_whole(REMOTE_JOURNAL)
    return None if data is None else parse_first_line(data) or {}


class RemoteWorkspace:
    """The unfinished result of a run into object storage, or of some of its shards. See ResultWorkspace."""

    def __init__(
        self,
        local: Workspace,
        staging: Staging,
        shards: Mapping[str, int],
        *,
        token: str,
        run: RemoteRun | None = None,
    ) -> None:
        """Take over an opened work folder on this machine.

        shards: the shards that are to be made, with their sizes in bytes
        token: that of the run
        run: the run, in the process that carries it out; None in one that only stages shards of it
        """
        self.local, self.staging, self._token = local, staging, token
        self.folder, self.fetched = local.folder, local.fetched
        finished = staging.finished(shards)
        self.records = dict(local.records)
        for records in finished.values():
            self.records |= records
        self._finished = set(finished)
        self._remove_needless(shards)
        self._run = run
        self._uploads = ShardUploads(staging, local.folder, before_each=self._check_run)

    def record(self, record: TensorRecord) -> None:
        """Note a finished tensor for a run that continues this one on this machine."""
        self.local.record(record)

    def sync_records(self) -> None:
        """Make what was noted durable."""
        self.local.sync_records()

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of released files of the source that this machine knows."""
        return self.local.fingerprints()

    def keep_fingerprints(self, known: dict[str, str]) -> None:
        """Store fingerprints for a run that continues this one on this machine."""
        self.local.keep_fingerprints(known)

    def is_complete(self, shard: str) -> bool:
        """Whether a shard is staged or published, or lies finished on this machine."""
        return shard in self._finished or self.local.is_complete(shard)

    def complete_path(self, shard: str) -> Path | None:
        """Return where a finished shard lies on this machine; None if it is staged."""
        return self.local.complete_path(shard)

    def take_room(self, shard: str) -> bool:
        """Whether a shard may be begun: few are on this machine at a time."""
        return self._uploads.take_room(shard)

    def wait_for_room(self) -> None:
        """Return when a shard that waited is staged."""
        self._uploads.wait_for_one()

    def shard_finished(self, shard: str, records: Sequence[TensorRecord]) -> None:
        """Have a shard staged, in the background, unless it is."""
        if shard not in self._finished:
            self._uploads.add(shard, records)

    def check(self) -> None:
        """Raise what failed in the background."""
        self._uploads.check()

    def wait_until_staged(self) -> None:
        """Return when all finished shards are staged."""
        self._uploads.wait_for_all()

    def part_token(self) -> str:
        """Return a text by which processes that open parts know that the run is still this one."""
        return self._token

    def shown_to_parts(self) -> None:
        """Return None: they all reach the address."""

    def join_part(self, number: int, records: Sequence[TensorRecord]) -> None:
        """Take over the shards that another process has staged: all of the part, with their records."""

    def publish(self, shards: Mapping[str, int]) -> None:
        """Move the shards to their final names, and remove what they replace; a killed call can be repeated."""
        with slow_step("uploading the last shards"):
            self.wait_until_staged()
        run = self._own_run()
        run.check()
        with slow_step("moving the shards to their names"):
            self.staging.publish(shards)
            run.remove_replaced()

    def write(self, name: str, pieces: Iterable[bytes]) -> FileRecord:
        """Write a small file of the result, and return what the manifest states about it."""
        path = self.folder / SENT_FOLDER / name
        digest = write_whole(self.folder, path, pieces)
        size = path.stat().st_size
        self.staging.folder.upload(name, path)
        path.unlink()
        return FileRecord(size, digest)

    def complete(self, manifest: Iterable[bytes]) -> None:
        """Write the manifest, which marks the result as finished, and remove all else that the run left."""
        self._own_run().check()
        self.write(MANIFEST_FILE, manifest)
        self._own_run().end()
        self.local.discard()

    def holds_work(self) -> bool:
        """Whether a run that continues this one would find a finished tensor, on this machine or staged."""
        return self.local.holds_work() or any_staged(self.staging.folder)

    def discard(self) -> None:
        """Remove what this run has written, because its source is unusable; an older result stays."""
        self._uploads.close()
        with contextlib.suppress(StorageError, OutputError):  # why the run ends is more important
            self._own_run().check()
            self._own_run().end()
        self.local.discard()

    def close(self) -> None:
        """Give up what is under way."""
        self._uploads.close()

    def _remove_needless(self, shards: Iterable[str]) -> None:
        """Remove local files of shards that are staged, as by another machine, and of those that are far from next."""
        next_ones = [shard for shard in shards if shard not in self._finished][:MOST_LOCAL_SHARDS]
        for shard in set(shards) - set(next_ones):
            path = self.folder / shard
            for each in (path, partial_path(path)):
                each.unlink(missing_ok=True)

    def _check_run(self) -> None:
        check_token(self.staging.folder, self._token)

    def _own_run(self) -> RemoteRun:
        assert self._run is not None, "this process only stages shards"
        return self._run


@contextlib.contextmanager
def open_remote_part(staging: Staging, scratch: Path, inputs: PartInputs) -> Iterator[RemoteWorkspace]:
    """Open a folder of this machine to make some shards of a run, which another process carries out.

    staging: that of the run
    scratch: a folder for these shards alone; it goes on from what an earlier process left there

    Raises LockedError if another process of this machine makes them, OutputError if the run is no longer under way,
    StorageError.
    """
    work = scratch / WORK_FOLDER
    path = work / JOURNAL_FILE
    with contextlib.ExitStack() as opened:
        with disk_errors(scratch):
            opened.callback(os.close, take_lock(work / LOCK_FILE, staging.folder.address, wait_seconds=WAIT_SECONDS))
            journal = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        kept = [name for shard in inputs.shards for name in (shard, partial_path(work / shard).name)]
        empty(work, but=(*KEPT_FILES, *kept))  # another division of the run may have had other shards here
        local = Workspace(scratch, records={**inputs.known, **read_records(path)}, journal=journal)
        workspace = RemoteWorkspace(local, staging, inputs.shards, token=inputs.token)
        opened.callback(workspace.close)
        is_staged = False
        try:
            yield workspace
            workspace.wait_until_staged()
            is_staged = True
        finally:
            if is_staged:
                local.discard()
            else:
                os.close(journal)
