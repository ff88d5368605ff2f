"""What runs on the nodes of a cluster: one look around, and then parts of a run. Nothing here knows of Ray."""

from __future__ import annotations

import functools
import pickle
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights import __version__
from pqweights.checkpoint.file_uses import file_uses
from pqweights.distributed.parts import CheckOrder, PartOrder, PartResult
from pqweights.errors import PqweightsError
from pqweights.results.shard_checks import ShardChecks, ShardFindings
from pqweights.rewrite.disk_room import free_bytes
from pqweights.rewrite.identity import SAME_BYTES_SINCE
from pqweights.rewrite.stream import Stream
from pqweights.rewrite.task import RewriteTask, RunOptions
from pqweights.rewrite.transform import Preparation

# A task says how far it is at most this often.
REPORT_SECONDS = 0.5


class Throttled:
    """A function that shows progress, which reports how many bytes are done, but not too often."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._last = time.monotonic()
        report(0)  # the task has begun

    def __call__(self, done: int, total: int, name: str) -> None:
        """Report, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._last >= REPORT_SECONDS:
            self._last = now
            self._report(done)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a node is asked for.

    files: files that it must be able to read, each with its size
    shared: a file that the driver wrote into the output folder, and its content; None for a result that lies elsewhere
    scratch: the folder for shards that are then sent elsewhere; None if there are none
    """

    files: Sequence[tuple[Path, int]]
    shared: tuple[Path, bytes] | None
    scratch: Path | None


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """What a node found.

    version, same_bytes_since: of pqweights
    python: the version of Python, such as 3.11
    missing: the first file that is not there, or has another size; None if all are there
    shares: whether it reads what the driver wrote
    free_bytes: room in the scratch folder; None if there is none
    """

    version: str
    same_bytes_since: str
    python: str
    missing: str | None
    shares: bool
    free_bytes: int | None


@dataclass(frozen=True)
class Failure:
    """Why a part cannot be finished; the error is of a kind that the driver raises."""

    error: PqweightsError


def python_version() -> str:
    """Return the version of Python that must be the same on all nodes: what is pickled by one is read by the others."""
    return ".".join(platform.python_version_tuple()[:2])


def look_around(asked: Surroundings) -> NodeState:
    """Return whether this node can do parts of a run."""
    missing = next((str(path) for path, size in asked.files if not _is_there(path, size)), None)
    return NodeState(
        version=__version__,
        same_bytes_since=SAME_BYTES_SINCE,
        python=python_version(),
        missing=missing,
        shares=asked.shared is None or _content(asked.shared[0]) == asked.shared[1],
        free_bytes=None if asked.scratch is None else free_bytes(asked.scratch),
    )


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def run_part(pickled: bytes, order: PartOrder, report: Throttled) -> PartResult | Failure:
    """Write the shards of a part, continuing what another process left of it.

    pickled: the RewriteTask
    """
    try:
        return _written(_common(pickled), order, report)
    except PqweightsError as error:
        return Failure(error)


def run_checks(pickled: bytes, order: CheckOrder, report: Throttled) -> ShardFindings | Failure:
    """Check some files of a result.

    pickled: the ShardChecks
    """
    checks: ShardChecks = _common(pickled)
    try:
        return checks.part(order.files).run(order.threads, report)
    except PqweightsError as error:
        return Failure(error)


@functools.lru_cache(maxsize=1)
def _common(pickled: bytes) -> Any:
    """Return what the tasks that one process does have in common."""
    return pickle.loads(pickled)


def _written(task: RewriteTask, order: PartOrder, report: Throttled) -> PartResult:
    shards = task.plan.shards[order.part.shards.start : order.part.shards.stop]
    run = RunOptions(threads=order.threads, device=order.device, progress=report)
    read_before = task.bytes_read
    with task.out.open_part(order.inputs) as workspace:
        task.checkpoint.restore_fingerprints(workspace.fingerprints())
        task.transform.prepare(
            Preparation(folder=workspace.folder, fetched=workspace.fetched, threads=order.threads, progress=report)
        )
        try:
            records = Stream(task, workspace, run, shards).run()
        finally:
            if task.transform.fold is not None:
                task.transform.fold.close()
        places = range(shards[0].tensors.start, shards[-1].tensors.stop)
        if task.checkpoint.storage.origin is None:  # those of fetched files are known, as far as they were needed
            for file, use in file_uses(task.checkpoint.tensors).items():
                if use.last in places:
                    task.checkpoint.file_fingerprint(file)
    return PartResult(records, task.checkpoint.known_fingerprints, task.bytes_read - read_before)
