"""The checks of a result's files on a cluster."""

from __future__ import annotations

import pickle
from types import ModuleType

from pqweights.checkpoint.storage import LocalStorage
from pqweights.distributed.cluster import check_nodes, nodes_of
from pqweights.distributed.parts import LEAST_PART_BYTES, PARTS_PER_SLOT, CheckOrder, grouped
from pqweights.distributed.running import ClusterTask, ClusterTasks, TaskKind
from pqweights.distributed.worker import Surroundings
from pqweights.results.shard_checks import Progress, ShardChecks, ShardFindings, joined
from pqweights.rewrite.needs import MEMORY_FLOOR_BYTES, MEMORY_PER_THREAD_BYTES


def check_on_ray(ray: ModuleType, checks: ShardChecks, threads: int, progress: Progress) -> ShardFindings:
    """Check files as tasks, and return what was found, in the order of the files.

    ray: the library, connected
    threads: how many threads a task has
    progress: called with the bytes checked, the bytes in all, and how many tasks are in which state

    Raises ClusterError if the cluster cannot do it, StorageError if the files cannot be read.
    """
    nodes, storage = nodes_of(ray), checks.storage
    files = storage.files()
    local = storage.root if isinstance(storage, LocalStorage) else None
    there = [shard.file for shard in checks.shards if shard.file in files]
    seen = [] if local is None else [(local / name, files[name].byte_count) for name in there]
    pickled = pickle.dumps(checks)
    kind = TaskKind(
        function="run_checks",
        common=pickled,
        asked=Surroundings(files=seen),
        threads=threads,
        memory_bytes=MEMORY_FLOOR_BYTES + threads * MEMORY_PER_THREAD_BYTES + storage.memory_bytes + 3 * len(pickled),
    )
    check_nodes(ray, dict.fromkeys(nodes, kind.asked))
    sizes = [shard.file_bytes for shard in checks.shards]
    slots = max(1, sum(map(kind.room_on, nodes)))
    most = max(LEAST_PART_BYTES, sum(sizes) // (PARTS_PER_SLOT * slots))
    tasks = [
        ClusterTask(
            number,
            sum(sizes[run.start : run.stop]),
            CheckOrder(tuple(checks.shards[place].file for place in run), threads),
        )
        for number, run in enumerate(grouped(sizes, most))
    ]
    found: dict[int, ShardFindings] = {}
    ClusterTasks(ray, kind, progress).run(tasks, lambda task, result: found.update({task.number: result}))
    return joined([found[number] for number in sorted(found)])
