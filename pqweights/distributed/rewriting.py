"""A rewrite on a cluster: its parts as tasks, and the records of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from pqweights.checkpoint.digests import HASH_OF_PIECES
from pqweights.distributed.cluster import nodes_of
from pqweights.distributed.parts import PartOrder, PartResult, RunPart, divide
from pqweights.distributed.running import ClusterTask, ClusterTasks, TaskKind
from pqweights.rewrite.parts import PartInputs
from pqweights.rewrite.places import ResultWorkspace
from pqweights.rewrite.records import TensorRecord
from pqweights.rewrite.task import RewriteTask, RunOptions


class DistributedRewrite:
    """One rewrite. `records` is called once."""

    def __init__(
        self, ray: ModuleType, task: RewriteTask, workspace: ResultWorkspace, run: RunOptions, kind: TaskKind
    ) -> None:
        """Divide it.

        kind: what its parts have in common
        """
        self._ray, self._task, self._workspace, self._run, self._kind = ray, task, workspace, run, kind
        self._parts = divide(task, max(1, sum(map(kind.room_on, nodes_of(ray)))))
        self._found: dict[int, tuple[TensorRecord, ...]] = {}  # by part
        self._token = workspace.part_token()

    def records(self) -> tuple[TensorRecord, ...]:
        """Have all parts done, and return the records of all tensors in the order of the plan.

        Raises what a part raises, ClusterError if the cluster cannot do it.
        """
        for part in self._parts:
            if (known := self._known(part)) is not None:
                self._found[part.number] = known
                self._hand_over(part, known)
        waiting = [part for part in self._parts if part.number not in self._found]
        if waiting:
            before = sum(part.source_bytes for part in self._parts if part.number in self._found)
            tasks = [ClusterTask(part.number, part.source_bytes, self._order(part)) for part in waiting]
            ClusterTasks(self._ray, self._kind, self._run.progress, done_before=before).run(tasks, self._join)
        return tuple(record for part in self._parts for record in self._found[part.number])

    def _known(self, part: RunPart) -> tuple[TensorRecord, ...] | None:
        """Return the records of a part of which an earlier run finished all shards; None for another one."""
        plan, known = self._task.plan, self._workspace.records
        shards = [plan.shards[number] for number in part.shards]
        names = [plan.tensors[place].name for shard in shards for place in shard.tensors]
        if any(name not in known or known[name].tensor_hash is not HASH_OF_PIECES for name in names):
            return None
        if not all(self._workspace.is_complete(shard.file) for shard in shards):
            return None
        return tuple(known[name].record for name in names)

    def _hand_over(self, part: RunPart, records: Sequence[TensorRecord]) -> None:
        """Have the workspace take over the shards of a part that is known, as it does those of a plain run."""
        plan, begin = self._task.plan, self._task.plan.shards[part.shards.start].tensors.start
        for shard in (plan.shards[number] for number in part.shards):
            of_shard = records[shard.tensors.start - begin : shard.tensors.stop - begin]
            self._workspace.shard_finished(shard.file, of_shard)

    def _order(self, part: RunPart) -> PartOrder:
        plan, known, inputs = self._task.plan, self._workspace.records, self._task.run_inputs
        shards = [plan.shards[number] for number in part.shards]
        names = [plan.tensors[place].name for shard in shards for place in shard.tensors]
        return PartOrder(
            part=part,
            inputs=PartInputs(
                number=part.number,
                work=inputs.work,
                key=inputs.key,
                token=self._token,
                shards={shard.file: shard.file_bytes for shard in shards},
                known={name: known[name] for name in names if name in known},
            ),
            threads=self._kind.threads,
        )

    def _join(self, task: ClusterTask, result: PartResult) -> None:
        """Take over a part that is finished."""
        checkpoint = self._task.checkpoint
        self._workspace.join_part(task.number, result.records)
        known = dict(checkpoint.known_fingerprints)
        checkpoint.restore_fingerprints(dict(result.fingerprints))
        if checkpoint.known_fingerprints != known:
            self._workspace.keep_fingerprints(checkpoint.known_fingerprints)
        checkpoint.storage.bytes_read += result.bytes_read
        self._found[task.number] = result.records
