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

from pqweights.errors import ClusterError, MasterError, SourceError
from pqweights.rewrite.distributed.calls import greeting, remote_call
from pqweights.rewrite.distributed.cluster import Node, first_line, nodes_of
from pqweights.rewrite.distributed.progress import AttemptState, Board
from pqweights.rewrite.distributed.worker import NodeNeeds, TaskFailure

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
    common: what is sent to each node once, pickled
    asked: what a node is asked for before its first task: it may have joined after the others were
    threads: how many cores a task needs
    memory_bytes: how much memory it needs at most
    """

    function: str
    common: bytes
    asked: NodeNeeds
    threads: int
    memory_bytes: int

    def room_on(self, node: Node) -> int:
        """Return how many of the tasks have room on a node at once."""
        return node.tasks_at_once(threads=self.threads, memory_bytes=self.memory_bytes)


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
        self._under_way: dict[Any, tuple[int, ClusterTask]] = {}  # attempts: serial number and task, by Ray's reference
        self._serial = 0
        self._crashes: Counter[int] = Counter()
        self._states: Mapping[int, AttemptState] = {}
        self._had_node = time.monotonic()
        self._done_bytes, self._done_tasks, self._total_bytes = done_before, 0, done_before

    def run(self, tasks: Sequence[ClusterTask], take: Callable[[ClusterTask, Any], None]) -> None:
        """Have all tasks done, the largest first.

        take: called with each task and what the worker returned, in any order

        Raises what a task raises, ClusterError if the cluster cannot do it.
        """
        ray = self._ray
        self._total_bytes += sum(task.byte_count for task in tasks)
        self._common = ray.put(self._kind.common)
        self._greeting = greeting(self._kind.asked)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            node_id=ray.get_runtime_context().get_node_id(), soft=True
        )
        self._remote = ray.remote(remote_call())
        self._board = ray.remote(num_cpus=0, max_restarts=-1)(Board).options(scheduling_strategy=here).remote()
        try:
            for task in sorted(tasks, key=lambda each: -each.byte_count):
                self._give(task)
            while self._under_way:
                done, _ = ray.wait(list(self._under_way), num_returns=1, timeout=POLL_SECONDS)
                for reference in done:
                    serial, task = self._under_way.pop(reference)
                    self._take(reference, serial, task, take)
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
            memory=kind.memory_bytes,
            max_retries=0,  # _lost decides
            scheduling_strategy="SPREAD",
        ).remote(self._greeting, kind.function, self._common, pickle.dumps(task.said), self._serial, self._board)
        self._under_way[reference] = self._serial, task
        self._serial += 1

    def _take(self, reference: Any, serial: int, task: ClusterTask, take: Callable[[ClusterTask, Any], None]) -> None:
        """Take what a finished task returned, or give it again if its worker was lost."""
        errors = self._ray.exceptions
        try:
            node, outcome = self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except errors.RayError as error:  # the worker, its node or its memory is gone
            self._lost(serial, task, error)
            return
        if isinstance(outcome, str):
            raise ClusterError(f"node {self._name(node)}: {outcome}")
        if isinstance(outcome, TaskFailure):
            # What is wrong with the source is so on every node.
            about_source = isinstance(outcome.error, SourceError | MasterError)
            raise outcome.error if about_source else type(outcome.error)(f"node {self._name(node)}: {outcome.error}")
        take(task, outcome)
        self._done_tasks += 1
        self._done_bytes += task.byte_count

    def _lost(self, serial: int, task: ClusterTask, error: BaseException) -> None:
        """Give a task again whose worker is lost.

        Raises ClusterError if it ends every worker.
        """
        state = self._states.get(serial)
        node = "" if state is None else state.node
        self._crashes[task.number] += not node or node in {each.id for each in nodes_of(self._ray)}
        if self._crashes[task.number] < MOST_CRASHES:
            self._give(task)
            return
        if isinstance(error, self._ray.exceptions.OutOfMemoryError):
            raise ClusterError(
                f"node {self._name(node)}: its memory was used up {MOST_CRASHES} times while it did a part of the "
                "run; pass fewer `threads`, or free memory there"
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
            oldest = min((serial for serial, _ in self._under_way.values()), default=self._serial)
            self._states = self._ray.get(self._board.states.remote(oldest), timeout=2 * POLL_SECONDS)
        running = [self._states[serial] for serial, _ in self._under_way.values() if serial in self._states]
        done = self._done_bytes + sum(state.done for state in running)
        waiting = len(self._under_way) - len(running)
        counts = f"tasks: {self._done_tasks} done, {len(running)} running, {waiting} waiting"
        self._progress(min(done, self._total_bytes), self._total_bytes, counts)
        now = time.monotonic()
        if any(self._kind.room_on(node) for node in nodes_of(self._ray)):
            self._had_node = now
        if now - self._had_node > NODELESS_SECONDS:
            raise ClusterError(
                f"no node was left for {NODELESS_SECONDS:.0f} s that can take a task of {self._kind.threads} threads "
                f"and {self._kind.memory_bytes} bytes of memory; start nodes and run the same command again, which "
                "continues"
            )

    def _cancel(self) -> None:
        """End what is still under way, and wait until the workers are gone."""
        for reference in self._under_way:
            self._ray.cancel(reference, force=True)
        if self._under_way:
            self._ray.wait(list(self._under_way), num_returns=len(self._under_way), timeout=CANCEL_SECONDS)
