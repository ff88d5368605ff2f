"""The engine that has the nodes of a Ray cluster make or check the shards of a result, one task for each."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.writer import check_room, disk_errors
from pqweights.errors import ClusterError
from pqweights.planning.plan import ShardPlan
from pqweights.rewrite.distributed.cluster import Node, check_nodes, connected, nodes_of, tidy_nodes
from pqweights.rewrite.distributed.running import ClusterTask, ClusterTasks, TaskKind
from pqweights.rewrite.distributed.worker import NodeNeeds, ShardResult, ShardWork
from pqweights.rewrite.finished_shards import ShardMark
from pqweights.rewrite.needs import (
    MEMORY_FLOOR_BYTES,
    MEMORY_PER_THREAD_BYTES,
    fetched_bytes_of,
    resource_needs,
    result_need,
    room_for_shards,
)
from pqweights.rewrite.results.verify import Progress as ShardProgress
from pqweights.rewrite.results.verify import ShardChecks, ShardFindings, joined
from pqweights.rewrite.run import Run
from pqweights.rewrite.task import Engine, RewriteTask, RunOptions, usable_cores

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
            raise ClusterError(f"`ray` {address}: the cluster has no node that computes; start one with ray start")
        least = min(node.cores for node in nodes)
        if threads is not None and threads > max(node.cores for node in nodes):
            raise ClusterError(
                f"`threads` {threads}: no node of the cluster has that many cores; the largest has "
                f"{max(node.cores for node in nodes)}"
            )
        yield RayEngine(ray=ray, threads=threads or min(least, MOST_THREADS), tell=tell)


@dataclass(frozen=True, kw_only=True)
class RayEngine(Engine):
    """An Engine of tasks on a cluster.

    ray: the library, connected
    threads: how many threads a task has
    tell: called with a line about what a user may want to know
    """

    ray: ModuleType
    threads: int
    tell: Callable[[str], None]

    def check(self, task: RewriteTask, run: Run) -> None:
        """Find out whether all nodes can do their part, see Engine."""
        kind, nodes = self._kind(task, run), nodes_of(self.ray)
        small = [node for node in nodes if not kind.room_on(node)]
        needs = f"{kind.threads} cores and {kind.memory_bytes} bytes of memory"
        for node in small:
            self.tell(
                f"node {node.name}: is not used: a task needs {needs}; it has {node.cores} cores "
                f"and {node.memory_bytes} bytes; pass fewer `threads`"
            )
        if len(small) == len(nodes):
            raise ClusterError(f"no node has what a task needs: {needs}; pass fewer `threads`")
        used = [node for node in nodes if node not in small]
        fetched = fetched_bytes_of(task)
        disk_needs = task.fetch_needs
        if not task.out.is_elsewhere:
            tasks_at_once = sum(map(kind.room_on, used))
            disk_needs.append(result_need(task, run, fetched_bytes=fetched * tasks_at_once))
        check_room(disk_needs)
        check_nodes(self.ray, {node: self._asked_of(node, task, kind, fetched) for node in used})

    def _asked_of(self, node: Node, task: RewriteTask, kind: TaskKind, fetched_bytes: int) -> NodeNeeds:
        room = fetched_bytes + (room_for_shards(task.plan) if task.out.is_elsewhere else 0)
        return replace(kind.asked, room=room * kind.room_on(node))

    def make(
        self, task: RewriteTask, run: Run, shards: Sequence[ShardPlan], options: RunOptions
    ) -> dict[str, ShardMark]:
        """Make shards, see Engine."""
        marks: dict[str, ShardMark] = {}
        checkpoint = task.checkpoint

        def take(given: ClusterTask, result: ShardResult) -> None:
            run.check_lock()
            marks[task.plan.shards[given.number].file] = result.mark
            checkpoint.restore_fingerprints(dict(result.mark.fingerprints))
            checkpoint.storage.bytes_read += result.bytes_read

        sizes = {shard.file: sum(task.source_bytes(place) for place in shard.tensors) for shard in task.plan.shards}
        left = {shard.file for shard in shards}
        tasks = [
            ClusterTask(number, sizes[shard.file], number)
            for number, shard in enumerate(task.plan.shards)
            if shard.file in left
        ]
        before = sum(size for file, size in sizes.items() if file not in left)
        if tasks:
            ClusterTasks(self.ray, self._kind(task, run), options.progress, done_before=before).run(tasks, take)
        if task.out.is_elsewhere:
            tidy_nodes(self.ray, pickle.dumps(task.out))
        return marks

    def _kind(self, task: RewriteTask, run: Run) -> TaskKind:
        """Return what the tasks that make shards have in common."""
        pickled = pickle.dumps(ShardWork(task=task, shards=run.shards, threads=self.threads))
        storages = [checkpoint.storage for checkpoint in task.checkpoints]
        needs = resource_needs(
            task.plan,
            self.threads,
            fold=task.transform.inputs.fold,
            storages=storages,
            is_elsewhere=task.out.is_elsewhere,
        )
        read = [(checkpoint.storage, checkpoint.weight_files) for checkpoint in task.checkpoints]
        return TaskKind(
            function="run_shard",
            common=pickled,
            asked=NodeNeeds(
                files=[file for storage, names in read for file in _local_files(storage, names)],
                shared=None if task.out.is_elsewhere else _witness(run),
                scratch=task.out.work.parent if task.out.is_elsewhere else None,
            ),
            threads=self.threads,
            # A worker has the pickled task twice, and the task itself.
            memory_bytes=needs.peak_memory_bytes + task.transform.inputs.memory_bytes + 3 * len(pickled),
        )

    def run_checks(self, checks: ShardChecks, threads: int, progress: ShardProgress) -> ShardFindings:
        """Check the files of a result, see RunChecks. How many threads a task has, this engine knows.

        Raises ClusterError if the cluster cannot do it, StorageError if the files cannot be read.
        """
        storage, pickled = checks.storage, pickle.dumps((checks, self.threads))
        there = [shard.file for shard in checks.shards if shard.file in storage.files()]
        per_task = MEMORY_FLOOR_BYTES + self.threads * MEMORY_PER_THREAD_BYTES + storage.memory_bytes
        kind = TaskKind(
            function="run_checks",
            common=pickled,
            asked=NodeNeeds(files=_local_files(storage, there)),
            threads=self.threads,
            memory_bytes=per_task + 3 * len(pickled),
        )
        check_nodes(self.ray, dict.fromkeys(nodes_of(self.ray), kind.asked))
        findings: dict[int, ShardFindings] = {}
        tasks = [ClusterTask(n, shard.file_bytes, shard.file) for n, shard in enumerate(checks.shards)]
        ClusterTasks(self.ray, kind, progress).run(tasks, lambda task, result: findings.update({task.number: result}))
        return joined([findings[number] for number in sorted(findings)])


def _witness(run: Run) -> Path:
    """Make a file in the work folder of a run, which nodes that share the folder see."""
    path = run.store.work / f"seen-{secrets.token_hex(4)}"
    with disk_errors(path):
        path.touch()
    return path


def _local_files(storage: Storage, names: Sequence[str]) -> list[tuple[Path, int]]:
    """Return those of the files that lie on this machine, each with its size."""
    folder = storage.local_folder()
    if folder is None:
        return []
    return [(folder / name, storage.files()[name].byte_count) for name in names]
