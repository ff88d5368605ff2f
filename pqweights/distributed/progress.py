"""How far the tasks of a run are: workers tell a board, and the driver looks at it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class TaskState(NamedTuple):
    """What a worker last told of its task.

    done: bytes done
    node: what Ray calls its node
    """

    done: int
    node: str


class Board:
    """The states of the tasks that were begun, kept by a process of its own."""

    def __init__(self) -> None:
        self._states: dict[int, TaskState] = {}

    def report(self, number: int, done: int, node: str) -> None:
        """Note how far a task is."""
        self._states[number] = TaskState(done, node)

    def states(self) -> Mapping[int, TaskState]:
        """Return the state of each task, by number."""
        return self._states
