"""Which tasks are given again, with a cluster that is not there."""

from __future__ import annotations

import contextlib
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from pqweights.errors import ClusterError
from pqweights.rewrite.distributed import running
from pqweights.rewrite.distributed.cluster import Node
from pqweights.rewrite.distributed.progress import AttemptState, Board
from pqweights.rewrite.distributed.running import ClusterTask, ClusterTasks, TaskKind
from pqweights.rewrite.distributed.worker import NodeNeeds

KIND = TaskKind(function="run_shard", common=b"", asked=NodeNeeds(files=()), threads=2, memory_bytes=1000)
TASK = ClusterTask(3, 100, None)


class RayError(Exception):
    pass


class Ray:
    """What ClusterTasks asks of the library; `outcome` is what every task returns, or raises."""

    exceptions = SimpleNamespace(
        RayError=RayError, RayTaskError=type("RayTaskError", (RayError,), {}), OutOfMemoryError=MemoryError
    )

    def __init__(self, outcome: Any, memory_bytes: int = 1000) -> None:
        self.outcome, self.memory_bytes = outcome, memory_bytes

    def nodes(self) -> list[dict[str, Any]]:
        resources = {"CPU": 2, "memory": self.memory_bytes}
        return [
            {
                "NodeID": "abcdefghij",
                "Alive": True,
                "NodeManagerHostname": "host",
                "NodeManagerAddress": "1.2.3.4",
                "Resources": resources,
            }
        ]

    def get(self, reference: Any, timeout: float | None = None) -> Any:
        if reference == "states":
            return {}
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return "abcdefghij", self.outcome


def given_again(outcome: Any, monkeypatch: pytest.MonkeyPatch, given: list[ClusterTask]) -> None:
    """Take an outcome until it is given no more."""
    tasks = ClusterTasks(Ray(outcome), KIND, lambda *state: None)
    monkeypatch.setattr(tasks, "_give", given.append)
    for _ in range(100):
        tasks._take("task", 0, TASK, lambda task, result: None)


def test_a_task_that_ends_its_process_is_given_again_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[ClusterTask] = []
    with pytest.raises(ClusterError, match="ended 5 times"):
        given_again(RayError("worker died"), monkeypatch, given)
    assert len(given) == running.MOST_CRASHES - 1


def test_problems_of_a_node_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[ClusterTask] = []
    with pytest.raises(ClusterError, match=r"^node host \(1.2.3.4, abcdefgh\): has pqweights 0.1"):
        given_again("has pqweights 0.1", monkeypatch, given)
    assert not given


def test_nodes_without_cores_or_memory_take_no_task() -> None:
    node = Node(id="a", name="a", cores=5, memory_bytes=3000)
    assert KIND.room_on(node) == 2
    assert node.tasks_at_once(threads=2, memory_bytes=2000) == 1
    assert node.tasks_at_once(threads=6, memory_bytes=2000) == 0
    assert node.tasks_at_once(threads=1, memory_bytes=4000) == 0
    board: Any = SimpleNamespace(states=SimpleNamespace(remote=lambda first: "states"))
    for memory_bytes, fits in ((1000, True), (999, False)):
        tasks = ClusterTasks(Ray(None, memory_bytes), KIND, lambda *state: None)
        tasks._board, tasks._had_node = board, float("-inf")
        with contextlib.nullcontext() if fits else pytest.raises(ClusterError, match="no node was left"):
            tasks._look()


def test_lost_attempts_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    board, shown = Board(), []
    board.report(0, 60, "a")
    board.report(1, 30, "b")
    tasks = ClusterTasks(Ray(None), KIND, lambda *state: shown.append(state))
    tasks._board = SimpleNamespace(states=SimpleNamespace(remote=board.states))
    monkeypatch.setattr(tasks, "_ray", Ray(None))
    monkeypatch.setattr(tasks._ray, "get", lambda states, timeout: states)
    tasks._total_bytes = 200
    tasks._under_way = {"x": (0, TASK), "y": (1, TASK)}
    tasks._look()
    tasks._under_way = {"x": (2, TASK), "y": (1, TASK)}
    tasks._look()
    assert shown == [(90, 200, "tasks: 0 done, 2 running, 0 waiting"), (30, 200, "tasks: 0 done, 1 running, 1 waiting")]
    assert board.states(1) == {1: AttemptState(30, "b")}
    assert pickle.loads(pickle.dumps(board.states(1))) == board.states(1)
