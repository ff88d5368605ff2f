"""What nodes are called with: a function that is sent as it is, because another pqweights may be there, or none."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from pqweights import __version__
from pqweights.rewrite.distributed.worker import NodeNeeds, python_version
from pqweights.rewrite.identity import SAME_BYTES_SINCE


def greeting(asked: NodeNeeds) -> tuple[str, str, str, bytes]:
    """Return what `remote_call` compares before anything else; plain data, which any node can read."""
    return python_version(), __version__, SAME_BYTES_SINCE, pickle.dumps(asked)


def remote_call() -> Callable[..., Any]:
    """Return a function that returns its node, and what keeps it from doing its part or what it did.

    It is called with a greeting, the name of a function of worker.py or None, and the arguments of that function: the
    pickled task, what is pickled of the part, the serial number of the attempt, and the board that is told of progress,
    or None.
    """

    def call(greeting: Any, function: str | None, common: bytes, said: bytes, serial: int, board: Any) -> Any:
        import pickle
        import platform

        import ray

        python, version, same_bytes_since, asked = greeting
        node = ray.get_runtime_context().get_node_id()
        here = ".".join(platform.python_version_tuple()[:2])
        if here != python:
            return node, f"has Python {here}, the driver has {python}; use the same on all nodes"
        remedy = f"run pip install 'pqweights=={version}' there"
        try:
            import pqweights
            from pqweights.rewrite.identity import SAME_BYTES_SINCE
        except ImportError as error:
            return node, f"has no pqweights ({error}); {remedy}"
        if (pqweights.__version__, SAME_BYTES_SINCE) != (version, same_bytes_since):
            return node, f"has pqweights {pqweights.__version__}, the driver has {version}; {remedy}"

        from pqweights.rewrite.distributed import worker

        problem = worker.problem_here(asked)
        if problem is not None or function is None:
            return node, problem
        report = worker.Throttled(lambda done: board and board.report.remote(serial, done, node))
        return node, getattr(worker, function)(common, pickle.loads(said), report)

    return call
