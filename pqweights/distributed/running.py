"""A run on a cluster: its parts are given to workers, given again if a worker is lost, and joined."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from pqweights import __version__
from pqweights.checkpoint.digests import HASH_OF_PIECES
from pqweights.distributed.cluster import first_line, nodes_of
from pqweights.distributed.parts import Part, PartOrder, PartResult, divide, memory_of
from pqweights.distributed.progress import Board, PartState
from pqweights.distributed.worker import Failure
from pqweights.errors import ClusterError, MasterError, SourceError
from pqweights.rewrite.parts import PartInputs
from pqweights.rewrite.places import ResultWorkspace
from pqweights.rewrite.records import TensorRecord
from pqweights.rewrite.task import RewriteTask, RunOptions

# A part that ends its process this often, on nodes that live on, is not tried again.
MOST_CRASHES = 5
POLL_SECONDS = 0.25
# How long the cluster may have no node that can take a part.
NODELESS_SECONDS = 60.0
# How long workers may take to end when the run is given up.
CANCEL_SECONDS = 10.0


class RayRun:
    """One run. `result` is called once."""

    def __init__(
        self, ray: ModuleType, task: RewriteTask, workspace: ResultWorkspace, run: RunOptions, *, threads: int
    ) -> None:
        """Divide what is left to do.

        threads: how many threads a task has
        """
        self._ray, self._task, self._workspace, self._run, self._threads = ray, task, workspace, run, threads
        self._names = {node.id: node.name for node in nodes_of(ray)}
        self._parts = divide(task, max(1, sum(node.cores // threads for node in nodes_of(ray))))
        self._records: dict[int, tuple[TensorRecord, ...]] = {}  # by part
        self._under_way: dict[Any, Part] = {}  # by the reference of the task
        self._crashes: Counter[int] = Counter()
        self._states: Mapping[int, PartState] = {}
        self._had_node = time.monotonic()

    def result(self) -> tuple[TensorRecord, ...]:
        """Have all parts done, and return the records of all tensors in the order of the plan.

        Raises what a part raises, ClusterError if the cluster cannot do it.
        """
        for part in self._parts:
            if (known := self._known(part)) is not None:
                self._records[part.number] = known
        waiting = [part for part in self._parts if part.number not in self._records]
        if waiting:
            self._do(sorted(waiting, key=lambda part: -part.source_bytes))
        records = tuple(record for part in self._parts for record in self._records[part.number])
        for planned, record in zip(self._task.plan.tensors, records, strict=True):
            self._task.transform.accept(planned, record)
        return records

    def _known(self, part: Part) -> tuple[TensorRecord, ...] | None:
        """Return the records of a part of which an earlier run finished all shards; None for another one."""
        plan, known = self._task.plan, self._workspace.records
        shards = [plan.shards[number] for number in part.shards]
        names = [plan.tensors[place].name for shard in shards for place in shard.tensors]
        if any(name not in known or known[name].tensor_hash is not HASH_OF_PIECES for name in names):
            return None
        return (
            tuple(known[name].record for name in names)
            if all(self._workspace.is_complete(shard.file) for shard in shards)
            else None
        )

    def _do(self, parts: list[Part]) -> None:
        ray = self._ray
        self._pickled = ray.put(pickle.dumps(self._task))
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            node_id=ray.get_runtime_context().get_node_id(), soft=True
        )
        self._board = ray.remote(num_cpus=0, max_restarts=-1)(Board).options(scheduling_strategy=here).remote()
        self._remote = ray.remote(_remote_part())
        try:
            for part in parts:
                self._give(part)
            while self._under_way:
                done, _ = ray.wait(list(self._under_way), num_returns=1, timeout=POLL_SECONDS)
                for reference in done:
                    self._take(reference, self._under_way.pop(reference))
                self._look()
        finally:
            self._cancel()
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._board)

    def _give(self, part: Part) -> None:
        """Give a part to the cluster, which runs it when a node has room."""
        plan, known = self._task.plan, self._workspace.records
        shards = [plan.shards[number] for number in part.shards]
        names = [plan.tensors[place].name for shard in shards for place in shard.tensors]
        inputs = PartInputs(
            number=part.number,
            work=self._task.run_inputs.work,
            key=self._task.run_inputs.key,
            shards={shard.file: shard.file_bytes for shard in shards},
            known={name: known[name] for name in names if name in known},
        )
        order = PartOrder(
            part=part,
            inputs=inputs,
            threads=self._threads,
            device=self._run.device,
        )
        reference = self._remote.options(
            num_cpus=self._threads,
            num_gpus=1 if self._run.device == "cuda" else 0,
            memory=memory_of(self._task, self._threads),
            max_retries=0,  # _lost decides
            scheduling_strategy="SPREAD",
        ).remote(self._pickled, pickle.dumps(order), self._board, __version__)
        self._under_way[reference] = part

    def _take(self, reference: Any, part: Part) -> None:
        """Join a part that is finished, or give it again if its worker was lost."""
        errors = self._ray.exceptions
        try:
            node, outcome = self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except errors.RayError as error:  # the worker, its node or its memory is gone
            self._lost(part, error)
            return
        if isinstance(outcome, str):
            raise ClusterError(f"node {self._name(node)}: {outcome}")
        if isinstance(outcome, Failure):
            # What is wrong with the source is so on every node.
            about_source = isinstance(outcome.error, SourceError | MasterError)
            raise outcome.error if about_source else type(outcome.error)(f"node {self._name(node)}: {outcome.error}")
        assert isinstance(outcome, PartResult)
        self._workspace.join_part(part.number, outcome.records)
        self._task.checkpoint.restore_fingerprints(dict(outcome.fingerprints))
        self._workspace.keep_fingerprints(self._task.checkpoint.known_fingerprints)
        self._task.checkpoint.storage.bytes_read += outcome.bytes_read
        self._records[part.number] = outcome.records

    def _lost(self, part: Part, error: BaseException) -> None:
        """Give a part again whose worker is lost.

        Raises ClusterError if it ends every worker.
        """
        state = self._states.get(part.number)
        node = "" if state is None else state.node
        alive = {each.id for each in nodes_of(self._ray)}
        self._crashes[part.number] += node in alive or not node
        if self._crashes[part.number] >= MOST_CRASHES:
            if isinstance(error, self._ray.exceptions.OutOfMemoryError):
                raise ClusterError(
                    f"node {self._name(node)}: its memory was used up {MOST_CRASHES} times while it did a part of the "
                    "run; pass fewer --threads, or free memory there"
                )
            raise ClusterError(
                f"node {self._name(node)}: the process that did a part of the run ended {MOST_CRASHES} times "
                f"({first_line(error)}); look into the logs of Ray there, and run the same command again"
            )
        self._give(part)

    def _name(self, node: str) -> str:
        """Return what a node is called in messages."""
        if node not in self._names:
            self._names |= {each.id: each.name for each in nodes_of(self._ray)}
        return self._names.get(node, node[:8] or "unknown")

    def _look(self) -> None:
        """Show progress, and see whether there are nodes."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # the board comes back if its process was killed
            self._states = self._ray.get(self._board.states.remote(), timeout=2 * POLL_SECONDS)
        waiting = {part.number for part in self._under_way.values()}
        running = {number: self._states[number] for number in waiting & self._states.keys()}
        total = sum(part.source_bytes for part in self._parts)
        done = sum(part.source_bytes for part in self._parts if part.number in self._records)
        done += sum(state.done for state in running.values())
        counts = f"{len(self._records)} tasks done, {len(running)} running, {len(waiting) - len(running)} waiting"
        self._run.progress(min(done, total), total, counts)
        now = time.monotonic()
        if running or any(node.cores >= self._threads for node in nodes_of(self._ray)):
            self._had_node = now
        if now - self._had_node > NODELESS_SECONDS:
            raise ClusterError(
                f"no node was left for {NODELESS_SECONDS:.0f} s that can take a task of {self._threads} threads; start "
                "nodes and run the same command again, which continues"
            )

    def _cancel(self) -> None:
        """End what is still under way, and wait until the workers are gone."""
        for reference in self._under_way:
            self._ray.cancel(reference, force=True)
        if self._under_way:
            self._ray.wait(list(self._under_way), num_returns=len(self._under_way), timeout=CANCEL_SECONDS)


def _remote_part() -> Callable[..., Any]:
    """Return a function that is sent to nodes as it is, because another pqweights may be there."""

    def part(pickled: bytes, order: bytes, board: Any, version: str) -> Any:
        import pickle

        import ray

        import pqweights

        node = ray.get_runtime_context().get_node_id()
        if pqweights.__version__ != version:
            asked = f"run pip install 'pqweights[ray]=={version}' there"
            return node, f"has pqweights {pqweights.__version__}, the driver has {version}; {asked}"

        from pqweights.distributed.worker import run_part

        return node, run_part(
            pickled, pickle.loads(order), lambda number, done: board.report.remote(number, done, node)
        )

    return part
