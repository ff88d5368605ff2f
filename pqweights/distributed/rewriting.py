"""A rewrite on a cluster: its parts as tasks, and the records of all of them."""

from __future__ import annotations

from types import ModuleType

from pqweights.checkpoint.digests import HASH_OF_PIECES
from pqweights.distributed.cluster import nodes_of
from pqweights.distributed.parts import Part, PartOrder, PartResult, divide, memory_of
from pqweights.distributed.running import ClusterTask, ClusterTasks, TaskKind
from pqweights.rewrite.parts import PartInputs
from pqweights.rewrite.places import ResultWorkspace
from pqweights.rewrite.records import TensorRecord
from pqweights.rewrite.task import RewriteTask, RunOptions


class DistributedRewrite:
    """One rewrite. `records` is called once."""

    def __init__(
        self, ray: ModuleType, task: RewriteTask, workspace: ResultWorkspace, run: RunOptions, *, threads: int
    ) -> None:
        """Divide it.

        threads: how many threads a task has
        """
        self._ray, self._task, self._workspace, self._run, self._threads = ray, task, workspace, run, threads
        slots = sum(node.cores // threads for node in nodes_of(ray))
        self._parts = divide(task, max(1, slots))
        self._found: dict[int, tuple[TensorRecord, ...]] = {}  # by part

    def records(self) -> tuple[TensorRecord, ...]:
        """Have all parts done, and return the records of all tensors in the order of the plan.

        Raises what a part raises, ClusterError if the cluster cannot do it.
        """
        for part in self._parts:
            if (known := self._known(part)) is not None:
                self._found[part.number] = known
        waiting = [part for part in self._parts if part.number not in self._found]
        if waiting:
            kind = TaskKind(
                function="run_part",
                common=self._task,
                threads=self._threads,
                memory_bytes=memory_of(self._task, self._threads),
                device=self._run.device,
            )
            before = sum(part.source_bytes for part in self._parts if part.number in self._found)
            tasks = [ClusterTask(part.number, part.source_bytes, self._order(part)) for part in waiting]
            ClusterTasks(self._ray, kind, self._run.progress, done_before=before).run(tasks, self._join)
        records = tuple(record for part in self._parts for record in self._found[part.number])
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
        if not all(self._workspace.is_complete(shard.file) for shard in shards):
            return None
        return tuple(known[name].record for name in names)

    def _order(self, part: Part) -> PartOrder:
        plan, known, inputs = self._task.plan, self._workspace.records, self._task.run_inputs
        shards = [plan.shards[number] for number in part.shards]
        names = [plan.tensors[place].name for shard in shards for place in shard.tensors]
        return PartOrder(
            part=part,
            inputs=PartInputs(
                number=part.number,
                work=inputs.work,
                key=inputs.key,
                shards={shard.file: shard.file_bytes for shard in shards},
                known={name: known[name] for name in names if name in known},
            ),
            threads=self._threads,
            device=self._run.device,
        )

    def _join(self, task: ClusterTask, result: PartResult) -> None:
        """Take over a part that is finished."""
        checkpoint = self._task.checkpoint
        self._workspace.join_part(task.number, result.records)
        checkpoint.restore_fingerprints(dict(result.fingerprints))
        self._workspace.keep_fingerprints(checkpoint.known_fingerprints)
        checkpoint.storage.bytes_read += result.bytes_read
        self._found[task.number] = result.records
