"""How a run is divided: several small shards together, one large shard alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pqweights.rewrite.needs import resource_needs
from pqweights.rewrite.parts import PartInputs
from pqweights.rewrite.records import TensorRecord
from pqweights.rewrite.task import RewriteTask

# Parts for each task that runs at a time: enough that the last ones end at about the same time.
PARTS_PER_SLOT = 4
# A smaller part would take less time than a process needs to begin with it.
LEAST_PART_BYTES = 1 << 26


@dataclass(frozen=True)
class RunPart:
    """Shards that one task writes.

    number: which part, from 0
    shards: which shards of the plan
    source_bytes: how many bytes of the source they are made of
    """

    number: int
    shards: range
    source_bytes: int


@dataclass(frozen=True, kw_only=True)
class PartOrder:
    """What a worker is told of its part, besides the task.

    part: the part
    inputs: what its workspace needs to know
    threads: see RunOptions
    """

    part: RunPart
    inputs: PartInputs
    threads: int


@dataclass(frozen=True)
class CheckOrder:
    """What a worker is told of the files that it checks.

    files: their names
    threads: how many threads compute hashes
    """

    files: tuple[str, ...]
    threads: int


@dataclass(frozen=True)
class PartResult:
    """A part that is finished.

    records: what was measured of its tensors
    fingerprints: those of files of the source, as far as they are known
    bytes_read: bytes read from all checkpoints
    """

    records: tuple[TensorRecord, ...]
    fingerprints: Mapping[str, str]
    bytes_read: int


def memory_of(task: RewriteTask, threads: int, pickled_bytes: int) -> int:
    """Return an upper bound on the memory in bytes that a part takes.

    threads: how many threads it has
    pickled_bytes: what the task takes when it is pickled; a worker has it twice, and the task itself
    """
    needs = resource_needs(
        task.plan,
        threads,
        fold=task.transform.fold,
        storages=[each.storage for each in task.checkpoints],
        shard_room=task.out.shard_room(task.plan),
    )
    return needs.peak_memory_bytes + task.transform.memory_bytes + 3 * pickled_bytes


def divide(task: RewriteTask, slots: int) -> list[RunPart]:
    """Divide the shards of a plan into parts, in their order.

    slots: how many parts can be under way at once
    """
    sizes = [
        sum(part.byte_count for place in shard.tensors for part in task.checkpoint.tensors[place].parts)
        for shard in task.plan.shards
    ]
    most = max(LEAST_PART_BYTES, sum(sizes) // (PARTS_PER_SLOT * slots))
    runs = enumerate(grouped(sizes, most))
    return [RunPart(number, run, sum(sizes[run.start : run.stop])) for number, run in runs]


def grouped(sizes: Sequence[int], most: int) -> list[range]:
    """Divide files into runs of at most `most` bytes, or of one larger file.

    sizes: those of the files, in their order
    """
    runs, first, total = [], 0, 0
    for place, size in enumerate(sizes):
        if place > first and total + size > most:
            runs.append(range(first, place))
            first, total = place, 0
        total += size
    return [*runs, range(first, len(sizes))]
