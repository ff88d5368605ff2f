"""Tasks on a cluster: they are given to workers, and given again if a worker is lost."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pqweights import __version__
from pqweights.distributed.cluster import first_line, nodes_of
from pqweights.distributed.progress import Board, TaskState
from pqweights.distributed.worker import Failure
from pqweights.errors import ClusterError, MasterError, SourceError

# A task that ends its process this often, on nodes that live on, is not tried again.
MOST_CRASHES = 5
POLL_SECONDS = 0.25
# How long the cluster may have no node that can take a task.
NODELESS_SECONDS = 60.0
# How long workers may take to end when the run is given up.
CANCEL_SECONDS = 10.0

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class TaskKind:
    """What all tasks of a run have in common.

    function: the name of a function of worker.py, which is called with `common`, what is said of the task, and a
        function that reports its progress
    common: what is sent to each node once
    threads: how many cores a task needs
    memory_bytes: how much memory it needs at most
    device: "cpu", or "cuda" for tasks that each need a GPU
    """

    function: str
    common: object
    threads: int
    memory_bytes: int
    device: str = "cpu"


@dataclass(frozen=True)
class ClusterTask:
    """One task.

    number: which one
    byte_count: how many bytes it reads, for the progress
    said: what the worker is told
    """

    number: int
    byte_count: int
    said: object


class ClusterTasks:
    """Tasks of one kind. `run` is called once."""

    def __init__(self, ray: ModuleType, kind: TaskKind, progress: Progress, *, done_before: int = 0) -> None:
        """Prepare to run them.

        progress: called with the bytes done, the bytes in all, and how many tasks are in which state
        done_before: how many bytes of the whole were done before
        """
        self._ray, self._kind, self._progress = ray, kind, progress
        self._names = {node.id: node.name for node in nodes_of(ray)}
        self._under_way: dict[Any, ClusterTask] = {}  # by what Ray calls the task
        self._crashes: Counter[int] = Counter()
        self._states: Mapping[int, TaskState] = {}
        self._had_node = time.monotonic()
        self._done_bytes, self._done_tasks, self._total_bytes = done_before, 0, done_before

    def run(self, tasks: Sequence[ClusterTask], take: Callable[[ClusterTask, Any], None]) -> None:
        """Have all tasks done, the largest first.

        take: called with each task and what the worker returned, in any order

        Raises what a task raises, ClusterError if the cluster cannot do it.
        """
        ray = self._ray
        self._total_bytes += sum(task.byte_count for task in tasks)
        self._common = ray.put(pickle.dumps(self._kind.common))
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            node_id=ray.get_runtime_context().get_node_id(), soft=True
        )
        self._board = ray.remote(num_cpus=0, max_restarts=-1)(Board).options(scheduling_strategy=here).remote()
        self._remote = ray.remote(_remote_task())
        try:
            for task in sorted(tasks, key=lambda each: -each.byte_count):
                self._give(task)
            while self._under_way:
                done, _ = ray.wait(list(self._under_way), num_returns=1, timeout=POLL_SECONDS)
                for reference in done:
                    self._take(reference, self._under_way.pop(reference), take)
                self._look()
        finally:
            self._cancel()
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._board)

    def _give(self, task: ClusterTask) -> None:
        """Give a task to the cluster, which runs it when a node has room."""
        kind = self._kind
        reference = self._remote.options(
            num_cpus=kind.threads,
            num_gpus=1 if kind.device == "cuda" else 0,
            memory=kind.memory_bytes,
            max_retries=0,  # _lost decides
            scheduling_strategy="SPREAD",
        ).remote(kind.function, self._common, pickle.dumps(task.said), task.number, self._board, __version__)
        self._under_way[reference] = task

    def _take(self, reference: Any, task: ClusterTask, take: Callable[[ClusterTask, Any], None]) -> None:
        """Take what a finished task returned, or give it again if its worker was lost."""
        errors = self._ray.exceptions
        try:
            node, outcome = self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except errors.RayError as error:  # the worker, its node or its memory is gone
            self._lost(task, error)
            return
        if isinstance(outcome, str):
            raise ClusterError(f"node {self._name(node)}: {outcome}")
        if isinstance(outcome, Failure):
            # What is wrong with the source is so on every node.
            about_source = isinstance(outcome.error, SourceError | MasterError)
            raise outcome.error if about_source else type(outcome.error)(f"node {self._name(node)}: {outcome.error}")
        take(task, outcome)
        self._done_tasks += 1
        self._done_bytes += task.byte_count

    def _lost(self, task: ClusterTask, error: BaseException) -> None:
        """Give a task again whose worker is lost.

        Raises ClusterError if it ends every worker.
        """
        state = self._states.get(task.number)
        node = "" if state is None else state.node
        self._crashes[task.number] += not node or node in {each.id for each in nodes_of(self._ray)}
        if self._crashes[task.number] < MOST_CRASHES:
            self._give(task)
            return
        if isinstance(error, self._ray.exceptions.OutOfMemoryError):
            raise ClusterError(
                f"node {self._name(node)}: its memory was used up {MOST_CRASHES} times while it did a part of the "
                "run; pass fewer --threads, or free memory there"
            )
        raise ClusterError(
            f"node {self._name(node)}: the process that did a part of the run ended {MOST_CRASHES} times "
            f"({first_line(error)}); look into the logs of Ray there, and run the same command again"
        )

    def _name(self, node: str) -> str:
        """Return what a node is called in messages."""
        if node not in self._names:
            self._names |= {each.id: each.name for each in nodes_of(self._ray)}
        return self._names.get(node, node[:8] or "unknown")

    def _look(self) -> None:
        """Show progress, and see whether there are nodes."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # the board comes back if its process was killed
            self._states = self._ray.get(self._board.states.remote(), timeout=2 * POLL_SECONDS)
        waiting = {task.number for task in self._under_way.values()}
        running = {number: self._states[number] for number in waiting & self._states.keys()}
        done = self._done_bytes + sum(state.done for state in running.values())
        counts = f"tasks: {self._done_tasks} done, {len(running)} running, {len(waiting) - len(running)} waiting"
        self._progress(min(done, self._total_bytes), self._total_bytes, counts)
        now = time.monotonic()
        if running or any(node.cores >= self._kind.threads for node in nodes_of(self._ray)):
            self._had_node = now
        if now - self._had_node > NODELESS_SECONDS:
            raise ClusterError(
                f"no node was left for {NODELESS_SECONDS:.0f} s that can take a task of {self._kind.threads} threads; "
                "start nodes and run the same command again, which continues"
            )

    def _cancel(self) -> None:
        """End what is still under way, and wait until the workers are gone."""
        for reference in self._under_way:
            self._ray.cancel(reference, force=True)
        if self._under_way:
            self._ray.wait(list(self._under_way), num_returns=len(self._under_way), timeout=CANCEL_SECONDS)


def _remote_task() -> Callable[..., Any]:
    """Return a function that is sent to nodes as it is, because another pqweights may be there."""

    def task(function: str, common: bytes, said: bytes, number: int, board: Any, version: str) -> Any:
        import pickle

        import ray

        import pqweights

        node = ray.get_runtime_context().get_node_id()
        if pqweights.__version__ != version:
            asked = f"run pip install 'pqweights=={version}' there"
            return node, f"has pqweights {pqweights.__version__}, the driver has {version}; {asked}"

        from pqweights.distributed import worker

        report = worker.Throttled(lambda done: board.report.remote(number, done, node))
        return node, getattr(worker, function)(common, pickle.loads(said), report)

    return task
