"""How far the parts of a run are: workers tell a board, and the driver looks at it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PartState(NamedTuple):
    """What a worker last told of its part.

    done: source bytes done
    node: what Ray calls its node
    """

    done: int
    node: str


class Board:
    """The states of the parts that were begun, kept by a process of its own."""

    def __init__(self) -> None:
        self._states: dict[int, PartState] = {}

    def report(self, number: int, done: int, node: str) -> None:
        """Note how far a part is."""
        self._states[number] = PartState(done, node)

    def states(self) -> Mapping[int, PartState]:
        """Return the state of each part, by number."""
        return self._states
