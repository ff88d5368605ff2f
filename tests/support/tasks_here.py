"""Tasks of runs without Ray: they are sent as to a worker, and run one after the other, in this process."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pqweights import api
from pqweights.convert.distributed.engine import RayEngine
from pqweights.convert.distributed.worker import MAKE

NODE = "abcdefghij"


class RayError(Exception):
    """A worker is lost."""


class RayHere:
    """In place of the library, on a cluster of one node, whose tasks run in another order than they are given.

    node: what it says of the node
    made: the numbers of the shards that it was asked to make
    lost: the error of Ray with which every shard ends, if there is one
    """

    util = SimpleNamespace(scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda **where: where))
    exceptions = SimpleNamespace(
        RayError=RayError,
        RayTaskError=type("RayTaskError", (RayError,), {}),
        NodeDiedError=type("NodeDiedError", (RayError,), {}),
        TaskUnschedulableError=type("TaskUnschedulableError", (RayError,), {}),
        OutOfMemoryError=type("OutOfMemoryError", (RayError,), {}),
    )

    def __init__(self) -> None:
        self.node = {"NodeID": NODE, "Alive": True, "NodeManagerHostname": "host", "NodeManagerAddress": "1.2.3.4"}
        self.resources = {"CPU": 2, "memory": 1 << 40}
        self.made: list[int] = []
        self.lost: RayError | None = None
        self._chance = random.Random(0)

    def nodes(self) -> list[dict[str, Any]]:
        return [self.node | {"Resources": self.resources}]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: NODE)

    def put(self, value: bytes) -> bytes:
        return value

    def remote(self, function: Any = None, **options: Any) -> Any:
        if function is None:
            return self.remote
        call = SimpleNamespace(remote=lambda *given: (function, given))
        call.options = lambda **more: call
        return call

    def wait(self, calls: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        done = self._chance.sample(calls, num_returns)
        return done, [call for call in calls if call not in done]

    def get(self, call: Any) -> Any:
        function, (versions, asked, common, number) = call
        if asked == MAKE:
            if self.lost is not None:
                raise self.lost
            self.made.append(number)
        return pickle.loads(pickle.dumps(function(versions, asked, common, number)))

    def cancel(self, call: Any, *, force: bool) -> None:
        """Nothing is under way."""


def use_tasks_here(patch: pytest.MonkeyPatch) -> RayHere:
    """Have `ray=...` of the functions run tasks in this process, one for each shard."""
    ray = RayHere()

    @contextmanager
    def engine_of(address: str | None, threads: int | None, tell: Any = None) -> Iterator[RayEngine | None]:
        yield None if address is None else RayEngine(ray=ray, threads=1, tell=print)  # type: ignore[arg-type]

    patch.setattr(api, "engine_of", engine_of)
    patch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    return ray
