"""The finished shards of a run, each with its mark, under names that no reader of the result looks at.

OUT/.pqweights/KEY/SHARD is a shard, and OUT/.pqweights/KEY/SHARD.json its mark: what was measured of its tensors. The
mark is written after the shard, and so says that it is complete; it stays when the shard gets its final name. KEY is
that of RunStatement: whoever makes a shard there, on any machine, makes the same bytes. docs/format.md describes them.
"""

from __future__ import annotations

import glob
import json
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from pqweights.checkpoint.ahead import Stop
from pqweights.checkpoint.digests import KEY
from pqweights.checkpoint.names import WORK_FOLDER
from pqweights.checkpoint.writer import PARTIAL_SUFFIX, disk_errors
from pqweights.convert.records import TensorRecord
from pqweights.errors import OutputError
from pqweights.storage import Store

MARK_SUFFIX = ".json"
# Small requests, and moves on a server, at once.
REQUESTS_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class ShardMark:
    """What is known of a finished shard.

    records: what was measured of its tensors, in the order of the plan
    fingerprints: those of files of the source that were fetched and are no longer needed, by name
    """

    records: tuple[TensorRecord, ...]
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the content of the mark."""
        records = []
        for record in self.records:
            stated = vars(record) | {KEY: record.digests}
            del stated["digests"]
            records.append(stated)
        return json.dumps({"tensors": records, "fingerprints": dict(self.fingerprints)}).encode()

    @staticmethod
    def parse(content: bytes) -> ShardMark | None:
        """Read a mark; None if it is not whole, so that the shard is made again."""
        try:
            stated = json.loads(content)
            records = [TensorRecord(digests=record.pop(KEY), **record) for record in stated["tensors"]]
            return ShardMark(records=tuple(records), fingerprints=dict(stated["fingerprints"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


@dataclass(frozen=True)
class FinishedShards:
    """The finished shards of one run. It may be pickled.

    store: where the result is written
    key: see RunStatement
    """

    store: Store
    key: str

    def name(self, shard: str) -> str:
        """Return the name that a finished shard has until all are finished."""
        return f"{WORK_FOLDER}/{self.key}/{shard}"

    def new_path(self, shard: str) -> Path:
        """Return where a process makes a shard: a path of its own, since a lost one may still be making the same.

        What that one has made is removed; it will find that it is to end.
        """
        folder = self.store.work / self.key
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            for path in folder.glob(f"{glob.escape(shard)}.*{PARTIAL_SUFFIX}"):
                path.unlink(missing_ok=True)
        return folder / f"{shard}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}"

    def add(self, shard: str, path: Path, mark: ShardMark, stop: Stop) -> None:
        """Take over the complete file of a shard, then mark it.

        stop: see Store.put
        """
        self.store.put(self.name(shard), path, stop)
        self.store.write(self.name(shard) + MARK_SUFFIX, [mark.to_json()])

    def marks(self, shards: Mapping[str, int]) -> dict[str, ShardMark]:
        """Return the mark of every shard that is complete, by name.

        shards: the sizes in bytes of the shards of the run
        """
        complete = [shard for shard, (_, is_complete) in self._states(shards).items() if is_complete]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, "pqweights-marks") as pool:
            marks = dict(zip(complete, pool.map(self._mark, complete), strict=True))
        return {shard: mark for shard, mark in marks.items() if mark is not None}

    def publish(self, shards: Mapping[str, int]) -> None:
        """Give the shards their final names; a killed call can be repeated.

        Raises OutputError if one is not there.
        """
        states = self._states(shards)
        for shard, (_, is_complete) in states.items():
            if not is_complete:
                raise OutputError(
                    f"{self.store}: shard {shard!r} is no longer there as this run wrote it; did another program "
                    "remove it? Run the same command again"
                )
        waiting = [shard for shard, (is_waiting, _) in states.items() if is_waiting]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, "pqweights-marks") as pool:
            for _ in pool.map(lambda shard: self.store.move(self.name(shard), shard), waiting):
                pass

    def _states(self, shards: Mapping[str, int]) -> dict[str, tuple[bool, bool]]:
        """Say of every shard whether it waits for its final name, and whether it is complete, under either name."""
        below = self.store.files(f"{WORK_FOLDER}/{self.key}")
        marked = {shard for shard in shards if self.name(shard) + MARK_SUFFIX in below}
        published = self.store.files() if any(self.name(shard) not in below for shard in marked) else {}
        states = {}
        for shard, size in shards.items():
            is_waiting = self.name(shard) in below
            found = below[self.name(shard)] if is_waiting else published.get(shard)
            states[shard] = is_waiting, shard in marked and found is not None and found.byte_count == size
        return states

    def _mark(self, shard: str) -> ShardMark | None:
        return ShardMark.parse(self.store.read(self.name(shard) + MARK_SUFFIX) or b"")


def records_of(shards: Iterable[str], marks: Mapping[str, ShardMark]) -> tuple[TensorRecord, ...]:
    """Return what was measured of all tensors of finished shards, in their order."""
    return tuple(record for shard in shards for record in marks[shard].records)
