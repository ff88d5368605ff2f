"""Tasks of runs without Ray: they are pickled and run as a worker would, one after the other, in this process."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pqweights import api
from pqweights.rewrite.distributed import engine, worker
from pqweights.rewrite.distributed.running import ClusterTask, TaskKind

NODE = {"NodeID": "a", "Alive": True, "NodeManagerHostname": "host", "NodeManagerAddress": "1.2.3.4"}
RAY: Any = SimpleNamespace(nodes=lambda: [NODE | {"Resources": {"CPU": 2, "memory": 1 << 40}}])


class TasksHere:
    """In place of ClusterTasks. ends: the numbers of tasks before which the whole run is killed."""

    ends: tuple[int, ...] = ()
    ran: list[int] = []

    def __init__(self, ray: Any, kind: TaskKind, progress: Any, *, done_before: int = 0) -> None:
        self.kind, self.progress = kind, progress

    def run(self, tasks: Sequence[ClusterTask], take: Callable[[ClusterTask, Any], None]) -> None:
        """Run the tasks in another order."""
        common = self.kind.common
        for task in random.Random(0).sample(list(tasks), len(tasks)):
            if task.number in self.ends:
                raise KeyboardInterrupt
            self.ran.append(task.number)
            said = pickle.loads(pickle.dumps(task.said))
            outcome = getattr(worker, self.kind.function)(common, said, worker.Throttled(lambda done: None))
            if isinstance(outcome, worker.TaskFailure):
                raise outcome.error
            take(task, outcome)


def use_tasks_here(patch: pytest.MonkeyPatch, ends: tuple[int, ...] = ()) -> list[int]:
    """Have `ray=...` of the functions run tasks in this process, one for each shard.

    Returns the numbers of the tasks that ran, as they run.
    """

    @contextmanager
    def engine_of(address: str | None, threads: int | None, tell: Any = None) -> Iterator[engine.RayEngine | None]:
        yield None if address is None else engine.RayEngine(ray=RAY, threads=1, tell=print)

    patch.setattr(api, "engine_of", engine_of)
    patch.setattr(engine.RayEngine, "check", lambda *given: None)
    patch.setattr(engine, "ClusterTasks", TasksHere)
    patch.setattr(TasksHere, "ends", ends)
    patch.setattr(TasksHere, "ran", [])
    return TasksHere.ran
