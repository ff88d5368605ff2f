"""Where a result is written: a folder on this machine, or one in object storage (remote_place.py).

The driver asks a place what lies there, whether there is room, and for the workspace in which the result is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pqweights.checkpoint.disk_room import DiskNeed
from pqweights.checkpoint.names import JOURNAL_FILE, MANIFEST_FILE, WORK_FOLDER
from pqweights.errors import OptionError
from pqweights.planning.plan import Plan
from pqweights.remote.addresses import BUCKETS, Address, is_address, local_path, parse_address
from pqweights.remote.folder import RemoteFolder
from pqweights.rewrite.disk_room import bytes_of_shard, fetched_bytes_in
from pqweights.rewrite.journal import FinishedTensor, RunInputs, finished_names
from pqweights.rewrite.parts import PartInputs, open_part
from pqweights.rewrite.records import FileRecord, TensorRecord
from pqweights.rewrite.remote_place import RemotePlace
from pqweights.rewrite.workspace import (
    check_output,
    check_paths,
    is_under_way,
    open_workspace,
    tidy,
)


class ResultWorkspace(Protocol):
    """The unfinished result of a run, which becomes the result when `complete` returns.

    folder: where shards are made, on this machine
    fetched: where fetched files of the source lie
    records: the tensors that the continued run had finished, by name
    """

    folder: Path
    fetched: Path
    records: dict[str, FinishedTensor]

    def record(self, record: TensorRecord) -> None:
        """Note a finished tensor for a run that continues this one."""
        ...

    def sync_records(self) -> None:
        """Make what was noted durable."""
        ...

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of released files of the source, by name; none if they cannot be read."""
        ...

    def keep_fingerprints(self, known: dict[str, str]) -> None:
        """Store fingerprints for the run that continues this one."""
        ...

    def is_complete(self, shard: str) -> bool:
        """Whether all bytes of a shard whose tensors are all in `records` are stored, so that none is made again."""
        ...

    def complete_path(self, shard: str) -> Path | None:
        """Return where such a shard lies on this machine, None if it does not."""
        ...

    def take_room(self, shard: str) -> bool:
        """Take the room for a shard that is about to be begun; False if others must leave first."""
        ...

    def wait_for_room(self) -> None:
        """Return when `take_room` may be asked again. Every shard that was begun must be finished."""
        ...

    def shard_finished(self, shard: str, records: Sequence[TensorRecord]) -> None:
        """Take over a shard that lies complete in `folder`, or that was complete before the run.

        records: of all of its tensors
        """
        ...

    def part_token(self) -> str:
        """Return a text by which processes that open parts know that the run is still this one."""
        ...

    def shown_to_parts(self) -> Path | None:
        """Return a file that such processes see if they reach the same folder; None if they need not."""
        ...

    def join_part(self, number: int, records: Sequence[TensorRecord]) -> None:
        """Take over a part that another process has finished (ResultPlace.open_part).

        records: of all of its tensors
        """
        ...

    def check(self) -> None:
        """Raise what failed in the background."""
        ...

    def publish(self, shards: Mapping[str, int]) -> None:
        """Give all shards their final names, and remove what they replace; a killed call can be repeated.

        shards: their sizes in bytes
        """
        ...

    def write(self, name: str, pieces: Iterable[bytes]) -> FileRecord:
        """Write a small file of the result, and return what the manifest states about it."""
        ...

    def complete(self, manifest: Iterable[bytes]) -> None:
        """Write the manifest, which marks the result as finished, and remove all else that the run left."""
        ...

    def holds_work(self) -> bool:
        """Whether a run that continues this one would find a finished tensor, or factors of a fold."""
        ...

    def discard(self) -> None:
        """Remove what this run has written, because its source is unusable; an older result stays."""
        ...


class ResultPlace(Protocol):
    """Where a result is written. Its text names it in messages and in reports."""

    def check_apart(self, source: Path | Address) -> None:
        """Raise OutputError if the place is, holds, or lies within the source."""
        ...

    def check_output(self, overwrite: bool, difference: Callable[[], str]) -> None:
        """Raise OutputError if the place holds something else. Nothing is created or changed.

        difference: says how the result in the place differs from the one that is asked for
        """
        ...

    def is_under_way(self) -> bool:
        """Whether a run into the place began and did not reach its end."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, None if there is no such file."""
        ...

    def sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """Return the sizes in bytes of those of the files that exist, by name."""
        ...

    def manifest_time(self) -> int:
        """Return when the manifest was written, in nanoseconds since 1970."""
        ...

    def shard_room(self, plan: Plan) -> int | None:
        """Return how many bytes shards take on this machine that is not their place; None if it is."""
        ...

    def disk_need(self, plan: Plan, inputs: RunInputs, fetched_bytes: int) -> DiskNeed:
        """Return what fulfilling a plan takes on a disk of this machine, beside an older result.

        inputs: those of the run
        fetched_bytes: the most bytes of files of the source that are fetched and held at once
        """
        ...

    def open_workspace(self, inputs: RunInputs, overwrite: bool) -> contextlib.AbstractContextManager[ResultWorkspace]:
        """Take the place, and continue what the same run left there, or start.

        Raises OutputError if it cannot be taken, SourceChangedError if the source is not what it was.
        """
        ...

    def open_part(self, inputs: PartInputs) -> contextlib.AbstractContextManager[ResultWorkspace]:
        """Open a part of the run that has the place, in another process.

        Raises OutputError if the part is made by yet another one.
        """
        ...

    @property
    def shared_folder(self) -> Path | None:
        """The folder that all processes of a run must reach by this path; None if they need not share any."""
        ...

    @property
    def scratch_folder(self) -> Path | None:
        """Where each process keeps shards that it then sends elsewhere; None if it sends none."""
        ...

    def tidy(self) -> None:
        """Remove what a run that was killed in its last steps left beside its complete result."""
        ...

    def tidy_scratch(self) -> None:
        """Remove what processes that opened parts, and are gone, left on this machine."""
        ...


@dataclass(frozen=True)
class LocalPlace:
    """A folder on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def check_apart(self, source: Path | Address) -> None:
        """See ResultPlace."""
        if isinstance(source, Path):
            check_paths(source, self.path)

    def check_output(self, overwrite: bool, difference: Callable[[], str]) -> None:
        """See ResultPlace."""
        check_output(self.path, overwrite, difference)

    def is_under_way(self) -> bool:
        """See ResultPlace."""
        return is_under_way(self.path)

    def read(self, name: str) -> bytes | None:
        """See ResultPlace."""
        path = self.path / name
        return path.read_bytes() if path.is_file() else None

    def sizes(self, names: Iterable[str]) -> Mapping[str, int]:
        """See ResultPlace."""
        return {name: (self.path / name).stat().st_size for name in names if (self.path / name).is_file()}

    def manifest_time(self) -> int:
        """See ResultPlace."""
        return (self.path / MANIFEST_FILE).stat().st_mtime_ns

    def shard_room(self, plan: Plan) -> None:
        """See ResultPlace."""

    def disk_need(self, plan: Plan, inputs: RunInputs, fetched_bytes: int) -> DiskNeed:
        """See ResultPlace. Fetched files of the source are held on the same disk."""
        needed = plan.output_bytes + plan.companion_bytes + fetched_bytes
        return DiskNeed(
            folder=self.path,
            byte_count=needed,
            present=self._bytes_present(plan, inputs),
            what=f"{self}: the result needs {needed} bytes of disk space",
            remedy="choose a folder on another disk",
        )

    def _bytes_present(self, plan: Plan, inputs: RunInputs) -> int:
        """Bytes on the disk that an interrupted run of the task has already taken: fetched files and shards.

        A shard under its final name belongs to the run if its journal has all of its tensors; until then it is one of
        the result that is being replaced.
        """
        work = self.path / WORK_FOLDER
        present, finished = fetched_bytes_in(work), finished_names(work / JOURNAL_FILE, inputs)
        for shard in plan.shards:
            is_finished = all(plan.tensors[place].name in finished for place in shard.tensors)
            present += bytes_of_shard(work, shard.file, *([self.path / shard.file] if is_finished else []))
        return present

    def open_workspace(self, inputs: RunInputs, overwrite: bool) -> contextlib.AbstractContextManager[ResultWorkspace]:
        """See ResultPlace."""
        return open_workspace(self.path, inputs, overwrite)

    def open_part(self, inputs: PartInputs) -> contextlib.AbstractContextManager[ResultWorkspace]:
        """See ResultPlace."""
        return open_part(self.path, inputs)

    @property
    def shared_folder(self) -> Path:
        """The folder itself."""
        return self.path

    @property
    def scratch_folder(self) -> None:
        """There is none: shards are made where they stay."""
        return

    def tidy(self) -> None:
        """See ResultPlace."""
        tidy(self.path)

    def tidy_scratch(self) -> None:
        """See ResultPlace. There is nothing."""


def result_place(where: str | Path | ResultPlace) -> ResultPlace:
    """Return the place that a path or an address names; a place is returned as it is.

    Raises OptionError for an address to which no result can be written.
    """
    if isinstance(where, Path) and where.parts and where.parts[0][:-1] in BUCKETS:
        raise OptionError(f"{where}: expected a folder, found an address as a Path: give it as a str, with two slashes")
    if isinstance(where, str) and where.lower().startswith("hf://"):
        raise OptionError(
            f"{where}: expected a folder, or an address in object storage: write the result to a folder, then send it "
            "to the Hub with pqweights push"
        )
    if isinstance(where, str) and is_address(where):
        return RemotePlace(RemoteFolder(parse_address(where)))
    if isinstance(where, str | Path):
        return LocalPlace(Path(local_path(where)))
    return where
