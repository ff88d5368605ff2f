"""What runs on the nodes of a cluster: one look around, and then parts of a run. Nothing here knows of Ray."""

from __future__ import annotations

import contextlib
import functools
import pickle
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.writer import free_bytes
from pqweights.errors import ClusterError, PqweightsError
from pqweights.rewrite.finished_shards import FinishedShards, ShardMark
from pqweights.rewrite.results.verify import ShardFindings
from pqweights.rewrite.shard import SourceFiles, Workers, make_shard
from pqweights.rewrite.task import RewriteTask
from pqweights.rewrite.transform import Preparation
from pqweights.storage import Store

# A task says how far it is at most this often.
REPORT_SECONDS = 0.5
# How late a file server may show what another machine has written.
APPEAR_SECONDS = 5.0


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
class NodeNeeds:
    """What a node is asked for.

    files: files that it must be able to read, each with its size
    shared: a file that the driver made in the output folder; None for a result that lies elsewhere
    scratch: the folder for shards that are then sent elsewhere; None if there are none
    room: how many bytes must be free there
    """

    files: Sequence[tuple[Path, int]]
    shared: Path | None = None
    scratch: Path | None = None
    room: int = 0


@dataclass(frozen=True, kw_only=True)
class ShardWork:
    """What the tasks that make shards of a run have in common.

    shards: the finished shards of the run, to which a task adds one
    threads: how many threads compute
    """

    task: RewriteTask
    shards: FinishedShards
    threads: int


@dataclass(frozen=True)
class ShardResult:
    """A shard that a task has made. bytes_read: from all checkpoints, meanwhile."""

    mark: ShardMark
    bytes_read: int


@dataclass(frozen=True)
class TaskFailure:
    """Why a part cannot be finished; the error is of a kind that the driver raises."""

    error: PqweightsError


def python_version() -> str:
    """Return the version of Python that must be the same on all nodes: what is pickled by one is read by the others."""
    return ".".join(platform.python_version_tuple()[:2])


@functools.lru_cache(maxsize=1)
def problem_here(pickled: bytes) -> str | None:
    """Say what keeps this node from doing parts of a run, and what to do; None if nothing does.

    pickled: the NodeNeeds
    """
    asked: NodeNeeds = pickle.loads(pickled)
    if asked.shared is not None and not _appears(asked.shared):
        return (
            f"does not see what the driver writes into {asked.shared.parent.parent}; choose a folder that all nodes "
            "share, or an address such as s3://BUCKET/NAME"
        )
    missing = next((path for path, size in asked.files if not _is_there(path, size)), None)
    if missing is not None:
        return (
            f"does not see {missing} as the driver does; give a source that all nodes reach by the same path, or an "
            "address such as s3://BUCKET/NAME"
        )
    free = None if asked.scratch is None else free_bytes(asked.scratch)
    if free is not None and free < asked.room:
        return (
            f"has {free} bytes free in {asked.scratch}, but its parts may need {asked.room}; free some space, set "
            "PQWEIGHTS_SCRATCH to a folder on another disk, or pass a smaller `max_shard_size`"
        )
    return None


def _appears(path: Path) -> bool:
    """Whether a file is there, or comes soon: file servers show new files late."""
    until = time.monotonic() + APPEAR_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def run_shard(pickled: bytes, number: int, report: Throttled) -> ShardResult | TaskFailure:
    """Make a shard of a plan.

    pickled: the ShardWork
    """
    with _failures() as failures:
        return _made(_common(pickled), number, report)
    return failures[0]


def run_checks(pickled: bytes, file: str, report: Throttled) -> ShardFindings | TaskFailure:
    """Check a file of a result.

    pickled: the ShardChecks, and the number of threads
    """
    with _failures() as failures:
        checks, threads = _common(pickled)
        findings: ShardFindings = checks.part([file]).run(threads, report)
        return findings
    return failures[0]


def tidy_scratch(pickled: bytes, said: None, report: Throttled) -> None:
    """Remove what processes that are gone left in the scratch folder of this node.

    pickled: the store of the result
    """
    store: Store = pickle.loads(pickled)
    store.tidy(lambda: True)


@contextlib.contextmanager
def _failures() -> Iterator[list[TaskFailure]]:
    """Yield a list to which a failure is added that ends the context."""
    failures: list[TaskFailure] = []
    try:
        yield failures
    except PqweightsError as error:
        failures.append(TaskFailure(error))
    except ModuleNotFoundError as error:
        lacking = f"lacks a Python module that the run needs ({error}); install it there"
        failures.append(TaskFailure(ClusterError(lacking)))
    except OSError as error:
        failures.append(TaskFailure(ClusterError(f"{error.filename or 'a file'}: {error.strerror or error}")))


@functools.lru_cache(maxsize=1)
def _common(pickled: bytes) -> Any:
    """Return what the tasks that one process does have in common."""
    return pickle.loads(pickled)


def _made(work: ShardWork, number: int, report: Throttled) -> ShardResult:
    task, shard = work.task, work.task.plan.shards[number]
    read_before, folder = task.bytes_read, task.out.work / work.shards.key
    if task.out.is_elsewhere:
        folder.mkdir(parents=True, exist_ok=True)
    path = work.shards.new_path(shard.file)
    workers = Workers(work.threads)
    # A folder of its own: other tasks on this node may fetch the same files.
    with tempfile.TemporaryDirectory(prefix="fetched-", dir=folder, ignore_cleanup_errors=True) as fetched:
        try:
            task.transform.prepare(
                Preparation(folder=folder, fetched=Path(fetched), threads=work.threads, progress=report)
            )
            files = SourceFiles(task, list(shard.tensors))
            with task.checkpoint.storage.fetching(Path(fetched), files.needed):
                mark = make_shard(task, shard, path, workers, files, report)
            task.finish_checks()
            work.shards.add(shard.file, path, mark, lambda: False)
        finally:
            path.unlink(missing_ok=True)
            workers.close()
    return ShardResult(mark, task.bytes_read - read_before)
