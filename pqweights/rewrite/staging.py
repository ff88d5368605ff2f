"""Staged shards of a run in object storage, each complete, under names that no reader of the result looks at.

OUT/.pqweights/KEY/SHARD is a shard, and OUT/.pqweights/KEY/SHARD.jsonl what its tensors' records state; it is written
after the shard, and so marks it as complete. KEY is that of RunInputs: whoever stages a shard there, on any machine,
stages the same bytes. docs/format.md describes the names.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pqweights.checkpoint.digests import HASH_OF_PIECES
from pqweights.checkpoint.names import JOURNAL_FILE, WORK_FOLDER
from pqweights.errors import OutputError
from pqweights.remote.folder import RemoteFolder
from pqweights.rewrite.journal import FinishedTensor, parse_record, record_line
from pqweights.rewrite.needs import MOST_LOCAL_SHARDS
from pqweights.rewrite.records import TensorRecord

RECORDS_SUFFIX = ".jsonl"
REMOTE_JOURNAL = f"{WORK_FOLDER}/{JOURNAL_FILE}"
# Small requests, and moves on the server, at once.
REQUESTS_AT_ONCE = 8


@dataclass(frozen=True)
class Staging:
    """The staged shards of one run. It may be pickled.

    folder: where the result is written
    key: see RunInputs
    """

    folder: RemoteFolder
    key: str

    def name(self, shard: str) -> str:
        """Return the name of a staged shard."""
        return f"{WORK_FOLDER}/{self.key}/{shard}"

    def finished(self, shards: Mapping[str, int]) -> dict[str, dict[str, FinishedTensor]]:
        """Return the records of every shard that is complete, by the names of shard and tensor.

        shards: the sizes in bytes of the shards of the run

        A complete shard is staged, or it was moved to its final name.
        """
        staged = self.folder.files(below=f"{WORK_FOLDER}/{self.key}")
        marked = [shard for shard in shards if self.name(shard) + RECORDS_SUFFIX in staged]
        published = self.folder.files() if any(self.name(shard) not in staged for shard in marked) else {}
        complete = []
        for shard in marked:
            found = staged.get(self.name(shard)) or published.get(shard)
            if found is not None and found.byte_count == shards[shard]:
                complete.append(shard)
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, "pqweights-staging") as pool:
            records = dict(zip(complete, pool.map(self._records, complete), strict=True))
        return {shard: found for shard, found in records.items() if found is not None}

    def _records(self, shard: str) -> dict[str, FinishedTensor] | None:
        """Read the records of a shard; None if they are not whole, so that the shard is made again."""
        data = self.folder.read_whole(self.name(shard) + RECORDS_SUFFIX)
        found = {}
        for line in (data or b"\n").splitlines(keepends=True):
            finished = parse_record(line)
            if finished is None or finished.tensor_hash is not HASH_OF_PIECES:
                return None
            found[finished.record.name] = finished
        return found

    def put(self, shard: str, path: Path, records: Iterable[TensorRecord], stop: Callable[[], bool]) -> None:
        """Stage a shard, then what marks it as complete.

        path: the file of the shard
        records: of all of its tensors
        stop: asked while it is sent, see RemoteFolder.upload
        """
        self.folder.upload(self.name(shard), path, stop=stop)
        self.folder.write(self.name(shard) + RECORDS_SUFFIX, b"".join(map(record_line, records)))

    def publish(self, shards: Mapping[str, int]) -> None:
        """Move the shards that are still staged to their final names.

        shards: their sizes in bytes

        Raises OutputError if one is neither staged nor there.
        """
        staged = self.folder.files(below=f"{WORK_FOLDER}/{self.key}")
        waiting = [shard for shard in shards if self.name(shard) in staged]
        there = self.folder.files() if len(waiting) < len(shards) else {}
        for shard in shards:
            found = staged.get(self.name(shard)) or there.get(shard)
            is_marked = self.name(shard) + RECORDS_SUFFIX in staged
            if found is None or found.byte_count != shards[shard] or not is_marked:
                raise OutputError(
                    f"{self.folder.address}: shard {shard!r} is no longer there as this run wrote it; did another "
                    "program remove it? Run the same command again"
                )
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, "pqweights-staging") as pool:
            for _ in pool.map(lambda shard: self.folder.move(self.name(shard), shard), waiting):
                pass


def any_staged(folder: RemoteFolder) -> bool:
    """Whether a place has a staged shard that is marked as complete."""
    return any(name.endswith(RECORDS_SUFFIX) for name in folder.files(below=WORK_FOLDER).keys() - {REMOTE_JOURNAL})


def remove_staged(folder: RemoteFolder) -> None:
    """Remove what lies in the work folder of a place beside the journal.

    What marks shards as complete goes first: a shard without its mark is made again, but a mark without a shard means
    that the shard has its final name.
    """
    found = folder.files(below=WORK_FOLDER).keys() - {REMOTE_JOURNAL}
    marks = {name for name in found if name.endswith(RECORDS_SUFFIX)}
    folder.remove(sorted(marks))
    folder.remove(sorted(found - marks))


class ShardUploads:
    """Finished shards of this machine on their way to object storage, one at a time, in the background.

    After a failure no other shard is sent, and every method but `close` raises it.
    """

    def __init__(self, staging: Staging, folder: Path, before_each: Callable[[], None]) -> None:
        """Start the thread.

        folder: where the finished shards lie; each is deleted when it is staged
        before_each: called before a shard is sent; raises if the run should end
        """
        self._staging, self._folder, self._before_each = staging, folder, before_each
        self._thread = ThreadPoolExecutor(1, "pqweights-upload")
        self._waiting: deque[Future[None]] = deque()
        self._held: set[str] = set()  # begun or finished, and not yet staged
        self._stopped = False

    def take_room(self, shard: str) -> bool:
        """Begin a shard if few enough are on the disk, and return whether it was begun."""
        self.check()
        if len(self._held) >= MOST_LOCAL_SHARDS:
            return False
        self._held.add(shard)
        return True

    def add(self, shard: str, records: Sequence[TensorRecord]) -> None:
        """Have a finished shard staged."""
        self._held.add(shard)
        self._waiting.append(self._thread.submit(self._send, shard, records))

    def wait_for_one(self) -> None:
        """Return when the first of the shards that wait is staged."""
        if self._waiting:
            self._waiting.popleft().result()

    def wait_for_all(self) -> None:
        """Return when all shards are staged."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """End the thread; what is under way is given up."""
        self._stopped = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    def check(self) -> None:
        """Raise what failed in the background."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft().result()

    def _send(self, shard: str, records: Sequence[TensorRecord]) -> None:
        is_staged = False
        try:
            self._before_each()
            self._staging.put(shard, self._folder / shard, records, lambda: self._stopped)
            os.unlink(self._folder / shard)
            self._held.discard(shard)
            is_staged = True
        finally:
            self._stopped = self._stopped or not is_staged  # later shards wait for the run that continues this one
