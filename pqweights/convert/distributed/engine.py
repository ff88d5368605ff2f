"""The engine that has the nodes of a Ray cluster make the shards of a result, one task for each.

Ray gives a task again whose worker or node is lost. The driver waits, takes what is made, and says what goes wrong.
"""

from __future__ import annotations

import contextlib
import pickle
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.writer import check_room, disk_errors
from pqweights.common.threads import Progress, usable_cores
from pqweights.convert.distributed.cluster import (
    MOST_RETRIES,
    Node,
    call_nodes,
    check_nodes,
    connected,
    last_line,
    nodes_of,
)
from pqweights.convert.distributed.worker import MAKE, TIDY, VERSIONS, ClusterWork, Done, ShardWork, remote_call
from pqweights.convert.needs import fetched_bytes_of, resource_needs, result_need, room_for_shards
from pqweights.convert.plan import Plan
from pqweights.convert.run import Mark, Run, unlocked
from pqweights.errors import ClusterError, MasterError, PqweightsError, SourceError
from pqweights.planning.layout import ShardPlan, in_groups

# More threads than this wait for each other; several tasks then share a node.
MOST_THREADS = 8
POLL_SECONDS = 1.0
# How long the cluster may have no node that can take a task.
NODELESS_SECONDS = 60.0
# How long workers may take to end when the run is given up, or to tidy up behind one.
END_SECONDS = 10.0


@contextmanager
def engine_of(
    address: str | None, threads: int | None = None, tell: Callable[[str], None] = lambda line: None
) -> Iterator[RayEngine | None]:
    """Connect to a cluster, and yield the engine that uses it; None without an address.

    address: see cluster.connected
    threads: how many threads a task has; by default as many as the smallest node has cores, at most MOST_THREADS
    tell: called with a line about what a user may want to know

    Raises ClusterError if the cluster cannot be reached, or has no node that computes.
    """
    if address is None:
        yield None
        return
    with connected(address, cores=max(usable_cores(), threads or 1)) as ray:
        cores = [node.cores for node in nodes_of(ray)]
        if not cores:
            raise ClusterError(f"`ray` {address}: the cluster has no node that computes; start one with ray start")
        if threads is not None and threads > max(cores):
            raise ClusterError(
                f"`threads` {threads}: no node of the cluster has that many cores; the largest has {max(cores)}"
            )
        yield RayEngine(ray=ray, threads=threads or min(*cores, MOST_THREADS), tell=tell)


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """Has tasks done on a cluster.

    ray: the library, connected
    threads: how many threads a task has
    tell: called with a line about what a user may want to know
    """

    ray: ModuleType
    threads: int
    tell: Callable[[str], None]

    def check(self, plan: Plan, run: Run) -> None:
        """Find out whether all nodes can do their part. Raises ClusterError if not, OutputError without room."""
        pickled, memory_bytes = self._work(plan, run, ())
        used = self._rooms(memory_bytes)
        disk_needs = plan.fetch_needs
        if not run.store.is_elsewhere:
            fetched = fetched_bytes_of(plan) * sum(used.values())
            disk_needs.append(result_need(plan, run, fetched_bytes=fetched))
        check_room(disk_needs)
        check_nodes(self.ray, pickled, used)

    def _rooms(self, memory_bytes: int) -> dict[Node, int]:
        """Return how many tasks have room on each node, of those that can have one. Raises ClusterError if none can."""
        rooms = {node: self._room_on(node, memory_bytes) for node in nodes_of(self.ray)}
        needs = f"{self.threads} cores and {memory_bytes} bytes of memory"
        for node in (node for node, room in rooms.items() if not room):
            self.tell(
                f"node {node.name}: is not used: a task needs {needs}; it has {node.cores} cores "
                f"and {node.memory_bytes} bytes; pass fewer `threads`"
            )
        used = {node: room for node, room in rooms.items() if room}
        if not used:
            raise ClusterError(f"no node has what a task needs: {needs}; pass fewer `threads`")
        return used

    def make_shards(self, plan: Plan, run: Run, shards: Sequence[ShardPlan], progress: Progress) -> dict[str, Mark]:
        """Make shards, a group in each task, the largest first; see convert.shard.make_shards."""
        if not shards:
            return {}
        groups = in_groups(shards)
        groups.sort(key=lambda group: -_source_bytes(plan, group))
        pickled, memory_bytes = self._work(plan, run, groups)
        total, left = _source_bytes(plan, plan.shards), _source_bytes(plan, shards)
        marks = dict[str, Mark]()
        progress(total - left, total, f"0 of {len(shards)} files")
        with contextlib.closing(self._each(pickled, range(len(groups)), memory_bytes)) as made:
            for number, (of_group, bytes_read) in made:
                run.check_lock()
                marks |= of_group
                for _, fingerprints in of_group.values():
                    plan.checkpoint.restore_fingerprints(fingerprints)
                plan.checkpoint.storage.bytes_read += bytes_read
                left -= _source_bytes(plan, groups[number])
                progress(total - left, total, f"{len(marks)} of {len(shards)} files")
        if run.store.is_elsewhere:
            called = call_nodes(self.ray, TIDY, pickled, dict.fromkeys(nodes_of(self.ray), 0))
            self.ray.wait(list(called), num_returns=len(called), timeout=END_SECONDS)
        return marks

    def each(self, work: ClusterWork, numbers: Sequence[int], memory_bytes: int) -> Iterator[tuple[int, Any]]:
        """Look at the nodes, do the tasks with these numbers, and yield each number with what the task returned.

        memory_bytes: the most that one needs

        Raises what a task raises, ClusterError if the tasks cannot be done.
        """
        pickled = pickle.dumps(work)
        check_nodes(self.ray, pickled, self._rooms(memory_bytes))
        return self._each(pickled, numbers, memory_bytes)

    def _each(self, pickled: bytes, numbers: Sequence[int], memory_bytes: int) -> Generator[tuple[int, Any]]:
        """Give out tasks in this order, and yield what they return as they end. pickled: the ClusterWork"""
        common = self.ray.put(pickled)
        make = self.ray.remote(remote_call()).options(
            num_cpus=self.threads, memory=memory_bytes, max_retries=MOST_RETRIES, scheduling_strategy="SPREAD"
        )
        under_way = {make.remote(VERSIONS, MAKE, common, number): number for number in numbers}
        try:
            for reference in self._finished(list(under_way), memory_bytes):
                number = under_way.pop(reference)
                yield number, self._result(reference)
        finally:
            # Not those that have ended: Ray (2.60) may end this process when one is cancelled as it ends.
            for reference in under_way:
                self.ray.cancel(reference, force=True)
            if under_way:
                self.ray.wait(list(under_way), num_returns=len(under_way), timeout=END_SECONDS)

    def _work(self, plan: Plan, run: Run, groups: Sequence[Sequence[ShardPlan]]) -> tuple[bytes, int]:
        """Return what all tasks have in common, pickled, and the most memory that one of them needs, in bytes."""
        storages = [checkpoint.storage for checkpoint in plan.checkpoints]
        read = [(checkpoint.storage, checkpoint.weight_files) for checkpoint in plan.checkpoints]
        pickled = pickle.dumps(
            ShardWork(
                out=str(run.store),
                plan=plan,
                run=replace(run, marks={}, check_lock=unlocked),
                groups=groups,
                threads=self.threads,
                files=tuple(file for storage, names in read for file in local_files(storage, names)),
                shared=None if run.store.is_elsewhere else witness_in(run.store.work),
                room=fetched_bytes_of(plan) + room_for_shards(plan) if run.store.is_elsewhere else 0,
            )
        )
        needs = resource_needs(
            plan,
            self.threads,
            storages=storages,
            is_elsewhere=run.store.is_elsewhere,
        )
        # A worker has the pickled task twice, and the task itself.
        return pickled, needs.peak_memory_bytes + plan.memory_bytes + 3 * len(pickled)

    def _room_on(self, node: Node, memory_bytes: int) -> int:
        """Return how many tasks have room on a node at once."""
        return max(0, min(node.cores // self.threads, node.memory_bytes // memory_bytes))

    def _finished(self, under_way: list[Any], memory_bytes: int) -> Iterator[Any]:
        """Yield the references of tasks as they end. Raises ClusterError if no node is left that can take one."""
        had_node = time.monotonic()
        while under_way:
            ended, under_way = self.ray.wait(under_way, num_returns=1, timeout=POLL_SECONDS)
            yield from ended
            if any(self._room_on(node, memory_bytes) for node in nodes_of(self.ray)):
                had_node = time.monotonic()
            elif time.monotonic() - had_node > NODELESS_SECONDS:
                raise ClusterError(
                    f"no node was left for {NODELESS_SECONDS:.0f} s that can take a task of {self.threads} threads "
                    f"and {memory_bytes} bytes of memory; start nodes and run the same command again, which continues"
                )

    def _result(self, reference: Any) -> Any:
        """Return what a task has returned. Raises what it could not do, ClusterError if it ended all of its workers."""
        errors = self.ray.exceptions
        try:
            node, outcome = self.ray.get(reference)
        except errors.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except errors.OutOfMemoryError:
            raise ClusterError(
                f"the memory of a node was used up {1 + MOST_RETRIES} times by the same task; pass "
                "fewer `threads`, or free memory there"
            ) from None
        except errors.RayError as error:
            raise ClusterError(
                f"the processes that did the same task ended {1 + MOST_RETRIES} times ({last_line(error)}); "
                "look into the logs of Ray, and run the same command again"
            ) from None
        if isinstance(outcome, Done):
            return outcome.result
        if isinstance(outcome, SourceError | MasterError):  # so it is on every node
            raise outcome
        name = next((known.name for known in nodes_of(self.ray) if known.id == node), node[:8])
        raise (type(outcome) if isinstance(outcome, PqweightsError) else ClusterError)(f"node {name}: {outcome}")


def _source_bytes(plan: Plan, shards: Iterable[ShardPlan]) -> int:
    return sum(plan.source_bytes_of(index) for shard in shards for index in shard.tensors)


def witness_in(work: Path) -> Path:
    """Make a file in a work folder, which nodes that share the folder see."""
    path = work / f"seen-{secrets.token_hex(4)}"
    with disk_errors(path):
        path.touch()
    return path


def local_files(storage: Storage, names: Sequence[str]) -> list[tuple[Path, int]]:
    """Return those of the files that lie on this machine, each with its size."""
    folder = storage.local_folder()
    if folder is None:
        return []
    return [(folder / name, storage.files()[name].byte_count) for name in names]
