"""How far the tasks of a run are: workers tell a board, and the driver looks at it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class AttemptState(NamedTuple):
    """What a worker last told of the task that it is at.

    done: bytes done
    node: what Ray calls its node
    """

    done: int
    node: str


class Board:
    """The states of the attempts at tasks that were begun, kept by a process of its own."""

    def __init__(self) -> None:
        self._states: dict[int, AttemptState] = {}

    def report(self, serial: int, done: int, node: str) -> None:
        """Note how far an attempt is."""
        self._states[serial] = AttemptState(done, node)

    def states(self, first: int) -> Mapping[int, AttemptState]:
        """Return the state of each attempt, by serial number; those before `first` are forgotten."""
        for serial in [each for each in self._states if each < first]:
            del self._states[serial]
        return self._states
