"""The engine that has the nodes of a Ray cluster write the shards of a run: connecting, and checks of every node."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from pqweights.checkpoint.disk_room import check_room
from pqweights.checkpoint.storage import LocalStorage
from pqweights.distributed.cluster import check_nodes, connected, nodes_of, tidy_nodes
from pqweights.distributed.parts import memory_of
from pqweights.distributed.rewriting import DistributedRewrite
from pqweights.distributed.running import TaskKind
from pqweights.distributed.verifying import check_on_ray
from pqweights.distributed.worker import Surroundings
from pqweights.errors import ClusterError
from pqweights.results.shard_checks import Progress as ShardProgress
from pqweights.results.shard_checks import ShardChecks, ShardFindings
from pqweights.rewrite.places import ResultWorkspace
from pqweights.rewrite.records import TensorRecord
from pqweights.rewrite.task import RewriteTask, RunOptions, usable_cores

# More threads than this wait for each other; several tasks then share a node.
MOST_THREADS = 8


@contextmanager
def engine_of(
    address: str | None, threads: int | None, tell: Callable[[str], None] = lambda line: None
) -> Iterator[RayEngine | None]:
    """Yield the engine for an option --ray, see on_ray; None without one."""
    if address is None:
        yield None
        return
    with on_ray(address, threads=threads, tell=tell) as engine:
        yield engine


@contextmanager
def on_ray(
    address: str, *, threads: int | None = None, tell: Callable[[str], None] = lambda line: None
) -> Iterator[RayEngine]:
    """Connect to a cluster, and yield the engine that uses it.

    address: see cluster.connected
    threads: how many threads a task has; by default as many as the smallest node has cores, at most MOST_THREADS
    tell: called with a line about what a user may want to know

    Raises ClusterError if the cluster cannot be reached, or has no node that computes.
    """
    with connected(address, cores=max(usable_cores(), threads or 1)) as ray:
        nodes = nodes_of(ray)
        if not nodes:
            raise ClusterError(f"--ray {address}: the cluster has no node that computes; start one with ray start")
        least = min(node.cores for node in nodes)
        if threads is not None and threads > max(node.cores for node in nodes):
            raise ClusterError(
                f"--threads {threads}: no node of the cluster has that many cores; the largest has "
                f"{max(node.cores for node in nodes)}"
            )
        yield RayEngine(ray=ray, threads=threads or min(least, MOST_THREADS), tell=tell)


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """An Engine of tasks on a cluster.

    ray: the library, connected
    threads: how many threads a task has
    tell: called with a line about what a user may want to know
    """

    ray: ModuleType
    threads: int
    tell: Callable[[str], None]

    def check(self, task: RewriteTask, workspace: ResultWorkspace, fetched_bytes: int) -> None:
        """Find out whether all nodes can do their part, see Engine."""
        kind, nodes = self._kind(task, workspace), nodes_of(self.ray)
        small = [node for node in nodes if not kind.room_on(node)]
        needs = f"{kind.threads} cores and {kind.memory_bytes} bytes of memory"
        for node in small:
            self.tell(
                f"node {node.name}: is not used: a task needs {needs}; it has {node.cores} cores "
                f"and {node.memory_bytes} bytes; pass fewer --threads"
            )
        if len(small) == len(nodes):
            raise ClusterError(f"no node has what a task needs: {needs}; pass fewer --threads")
        used = [node for node in nodes if node not in small]
        disk_needs = task.fetch_needs
        if task.out.shared_folder is not None:
            fetched_at_once = fetched_bytes * sum(map(kind.room_on, used))
            disk_needs.append(task.out.disk_need(task.plan, task.run_inputs, fetched_at_once))
        check_room(disk_needs)
        room = (task.out.shard_room(task.plan) or 0) + fetched_bytes
        check_nodes(self.ray, {node: replace(kind.asked, room=room * kind.room_on(node)) for node in used})

    def stream(self, task: RewriteTask, workspace: ResultWorkspace, run: RunOptions) -> tuple[TensorRecord, ...]:
        """Write all tensors, see Engine."""
        kind = self._kind(task, workspace)
        records = DistributedRewrite(self.ray, task, workspace, run, kind).records()
        if task.out.scratch_folder is not None:
            tidy_nodes(self.ray, pickle.dumps(task.out))
        return records

    def _kind(self, task: RewriteTask, workspace: ResultWorkspace) -> TaskKind:
        """Return what the parts of a task have in common."""
        pickled = pickle.dumps(task)
        return TaskKind(
            function="run_part",
            common=pickled,
            asked=Surroundings(
                files=_local_files(task),
                shared=workspace.shown_to_parts(),
                scratch=task.out.scratch_folder,
            ),
            threads=self.threads,
            memory_bytes=memory_of(task, self.threads, len(pickled)),
        )

    def run_checks(self, checks: ShardChecks, threads: int, progress: ShardProgress) -> ShardFindings:
        """Check the files of a result, see RunChecks. How many threads a task has, this engine knows."""
        return check_on_ray(self.ray, checks, self.threads, progress)


def _local_files(task: RewriteTask) -> list[tuple[Path, int]]:
    """Return the local files that a task reads, each with its size."""
    found = []
    for checkpoint in task.checkpoints:
        storage = checkpoint.storage
        if isinstance(storage, LocalStorage):
            found += [(storage.root / name, storage.files()[name].byte_count) for name in checkpoint.weight_files]
    return found
