"""What runs on the nodes of a cluster: a look around, then tasks. Nothing but `remote_call` knows of Ray."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pqweights import __version__
from pqweights.checkpoint.writer import free_bytes
from pqweights.common.threads import no_progress
from pqweights.convert.manifest import SAME_BYTES_SINCE
from pqweights.convert.plan import Plan
from pqweights.convert.run import Mark, Run
from pqweights.convert.shard import make_shards
from pqweights.errors import ClusterError, PqweightsError
from pqweights.planning.layout import ShardPlan

# How late a file server may show what another machine has written.
APPEAR_SECONDS = 5.0
# What must be the same on all nodes. (Ray compares the versions of Python and of itself when a node joins.)
VERSIONS = (__version__, SAME_BYTES_SINCE)


@dataclass(frozen=True, kw_only=True)
class ClusterWork(ABC):
    """What numbered tasks have in common. It is sent to each node of a cluster once, pickled.

    out: the result, for messages
    files: files that a node must be able to read, each with its size
    shared: a file that the driver made where tasks write; None for a result that lies elsewhere
    room: how many bytes a task takes in a folder of its node for what is then sent elsewhere; 0 if there is nothing
    folder: that of the command, in which its relative paths begin
    """

    out: str
    files: tuple[tuple[Path, int], ...]
    shared: Path | None
    room: int = 0
    folder: Path = field(default_factory=Path.cwd)

    @abstractmethod
    def make(self, number: int) -> Any:
        """Do the task with a number."""


@dataclass(frozen=True, kw_only=True)
class ShardWork(ClusterWork):
    """The shards of a run, of which a task makes a group.

    run: to whose finished shards a task adds some
    groups: those that are missing, in the groups in which they are made
    threads: how many threads compute
    """

    plan: Plan
    run: Run
    groups: Sequence[Sequence[ShardPlan]]
    threads: int

    def make(self, number: int) -> tuple[Mapping[str, Mark], int]:
        """Make the group with a number; return the marks by name, and how many bytes were read from all checkpoints."""
        read_before = self.plan.bytes_read
        if self.run.store.is_elsewhere:
            self.run.folder.mkdir(parents=True, exist_ok=True)
        # A folder of its own: other tasks on this node may fetch the same files.
        with tempfile.TemporaryDirectory(prefix="fetched-", dir=self.run.folder, ignore_cleanup_errors=True) as fetched:
            self.plan.learn(no_progress)
            marks = make_shards(
                self.plan,
                self.run,
                self.groups[number],
                threads=self.threads,
                progress=no_progress,
                fetched=Path(fetched),
            )
        self.plan.finish_checks()
        return marks, self.plan.bytes_read - read_before


@dataclass(frozen=True)
class Done:
    """What a task has returned."""

    result: Any


# What a node is asked: to say what keeps it from so many tasks at once; to do the task with a number; or to remove
# what processes that are gone left in its scratch folder. An answer in words says why not.
LOOK, MAKE, TIDY = "look", "make", "tidy"
Answer = str | PqweightsError | Done | None


def remote_call() -> Callable[..., tuple[str, Answer]]:
    """Return a function that is sent as it is, because another pqweights may be on a node, or none.

    It is called with the VERSIONS of the driver and the parameters of `answer`, and returns its node with the answer.
    """

    def call(versions: tuple[str, str], question: str, pickled: bytes, number: int) -> tuple[str, Any]:
        import ray

        node = ray.get_runtime_context().get_node_id()
        remedy = f"run pip install 'pqweights=={versions[0]}' there"
        try:
            import pqweights
            from pqweights.convert.manifest import SAME_BYTES_SINCE
        except ImportError as error:
            return node, f"has no pqweights ({error}); {remedy}"
        if (pqweights.__version__, SAME_BYTES_SINCE) != versions:
            return node, f"has pqweights {pqweights.__version__}, the driver has {versions[0]}; {remedy}"
        from pqweights.convert.distributed import worker

        return node, worker.answer(question, pickled, number)

    return call


def answer(question: str, pickled: bytes, number: int) -> Answer:
    """Do what is asked of a node; what is wrong is returned, as an error that the driver raises.

    pickled: the ClusterWork
    number: see LOOK
    """
    try:
        return ANSWERS[question](pickled, number)
    except PqweightsError as error:
        return error
    except ModuleNotFoundError as error:
        return ClusterError(f"lacks a Python module that the run needs ({error}); install it there")
    except OSError as error:
        return ClusterError(f"{error.filename or 'a file'}: {error.strerror or error}")


@functools.lru_cache(maxsize=1)
def _opened(pickled: bytes) -> tuple[ClusterWork, str | None]:
    """Return what the tasks that one process does have in common, and what keeps the node from doing them."""
    work: ClusterWork = pickle.loads(pickled)
    with contextlib.suppress(OSError):  # a node without this folder may see all that it needs
        os.chdir(work.folder)
    return work, _problem(work)


def _problem(work: ClusterWork) -> str | None:
    """Say what a node does not see that it must, and what to do; None if it sees everything."""
    if work.shared is not None and not _appears(work.shared):
        elsewhere = ", or an address such as s3://BUCKET/NAME" if isinstance(work, ShardWork) else ""
        return f"does not see what the driver writes into {work.out}; choose a folder that all nodes share{elsewhere}"
    for path, size in work.files:
        if not path.is_file() or path.stat().st_size != size:
            return (
                f"does not see {path} as the driver does; give a source that all nodes reach by the same path, or an "
                "address such as s3://BUCKET/NAME"
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


def _look(pickled: bytes, tasks_at_once: int) -> str | None:
    work, problem = _opened(pickled)
    if problem is not None or not work.room:
        return problem
    assert isinstance(work, ShardWork)
    scratch, needed = work.run.store.work.parent, work.room * tasks_at_once
    if (free := free_bytes(scratch)) >= needed:
        return None
    return (
        f"has {free} bytes free in {scratch}, but its tasks may need {needed}; free some space, set "
        "PQWEIGHTS_SCRATCH to a folder on another disk, or pass a smaller `max_shard_size`"
    )


def _make(pickled: bytes, number: int) -> str | Done:
    work, problem = _opened(pickled)  # of a node that has joined after the others were asked
    return Done(work.make(number)) if problem is None else problem


def _tidy(pickled: bytes, number: int) -> None:
    work = _opened(pickled)[0]
    assert isinstance(work, ShardWork)
    work.run.store.tidy(lambda: True)


ANSWERS: Mapping[str, Callable[[bytes, int], Answer]] = {LOOK: _look, MAKE: _make, TIDY: _tidy}
