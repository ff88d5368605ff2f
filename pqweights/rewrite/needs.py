"""What fulfilling a plan takes: disk space and memory, known before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pqweights.checkpoint.storage import Storage
from pqweights.codecs import get_codec
from pqweights.folding.fold import Fold
from pqweights.planning.plan import Plan

# Measured: the interpreter and the libraries while the scalar codecs' kernels are compiled. Without compilation it is
# half as much.
MEMORY_FLOOR_BYTES = 260_000_000
# A thread's input chunk in float32 with its temporaries, the workspace of its codec, and its share of the results that
# wait to be collected.
MEMORY_PER_THREAD_BYTES = 32_000_000


@dataclass(frozen=True, kw_only=True)
class ResourceNeeds:
    """Upper bounds on what fulfilling a plan takes.

    peak_disk_bytes: room in the output folder
    peak_memory_bytes: memory of the process: the floor, what compiling the kernels of the plan's codecs takes beyond
        it, what is under way in each thread, what is read ahead of a source in object storage, the parsed headers, and
        the largest output header
    """

    peak_disk_bytes: int
    peak_memory_bytes: int

    def to_json(self) -> dict[str, int]:
        """Return the bounds under the names that they have in the totals of plan --json."""
        return {"peak_disk_bytes": self.peak_disk_bytes, "peak_memory_bytes": self.peak_memory_bytes}


def resource_needs(
    plan: Plan, threads: int, *, fold: Fold | None = None, storages: Sequence[Storage] = ()
) -> ResourceNeeds:
    """Return what fulfilling a plan takes.

    threads: how many threads compute
    fold: the fold of the tensors that are read
    storages: where the files that are read lie
    """
    largest_header = max((shard.header.byte_count for shard in plan.shards), default=0)
    codecs = {tensor.codec for tensor in plan.tensors if tensor.codec is not None}
    floor = MEMORY_FLOOR_BYTES + max((get_codec(codec).compiling_bytes for codec in codecs), default=0)
    held = 0 if fold is None else fold.memory_bytes + threads * fold.thread_bytes
    held += sum(storage.memory_bytes for storage in storages)
    memory = floor + held + threads * MEMORY_PER_THREAD_BYTES + len(plan.tensors) * 12_000 + 2 * largest_header
    beside = 0 if fold is None else fold.disk_bytes
    json_files = 1024 * len(plan.tensors) + 65536
    return ResourceNeeds(
        peak_disk_bytes=plan.output_bytes + plan.companion_bytes + json_files + beside, peak_memory_bytes=memory
    )
