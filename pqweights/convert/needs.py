"""What fulfilling a plan takes: upper bounds on memory and on disk space, and whether there is room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pqweights.checkpoint.readers import file_uses, most_fetched
from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.writer import DiskNeed
from pqweights.convert.plan import Plan
from pqweights.convert.run import Run
from pqweights.storage.bucket import upload_bytes_held

# The interpreter and the libraries: 70 to 77 MB were measured with one thread, its chunk included.
MEMORY_FLOOR_BYTES = 120_000_000
# A thread's input chunk in float32 with its temporaries, the workspace of its codec, and its share of the results that
# wait to be collected.
MEMORY_PER_THREAD_BYTES = 32_000_000
# Of a result in object storage: the shard that is made, and the one that is sent.
MOST_LOCAL_SHARDS = 2


@dataclass(frozen=True, kw_only=True)
class ResourceNeeds:
    """Upper bounds on what fulfilling a plan takes.

    peak_disk_bytes: room where the result is written
    scratch_bytes: room on the disk of this machine, for a result in object storage; None for a local result
    peak_memory_bytes: memory of the process: the floor, what compiling the kernels of the plan's codecs takes beyond
        it, what is under way in each thread, what is read ahead of a source in object storage and held of uploads,
        the parsed headers, and the largest output header
    """

    peak_disk_bytes: int
    peak_memory_bytes: int
    scratch_bytes: int | None = None

    def to_json(self) -> dict[str, int]:
        """Return the bounds under the names that they have in the totals of plan --json."""
        scratch = {} if self.scratch_bytes is None else {"scratch_bytes": self.scratch_bytes}
        return {"peak_disk_bytes": self.peak_disk_bytes, **scratch, "peak_memory_bytes": self.peak_memory_bytes}


def resource_needs(
    plan: Plan,
    threads: int,
    *,
    storages: Sequence[Storage] = (),
    is_elsewhere: bool = False,
    calibration_bytes: int = 0,
) -> ResourceNeeds:
    """Return what fulfilling a plan takes.

    threads: how many threads compute
    storages: where the files that are read lie
    is_elsewhere: see Store
    calibration_bytes: what a calibration keeps on the disk of this machine
    """
    largest_header = max((shard.header_bytes for shard in plan.shards), default=0)
    held = sum(storage.memory_bytes for storage in storages)
    held += upload_bytes_held() if is_elsewhere else 0
    held += threads * MEMORY_PER_THREAD_BYTES + len(plan.tensors) * 12_000 + 2 * largest_header
    json_files = 1024 * len(plan.tensors) + 65536
    result = plan.output_bytes + plan.companion_bytes + json_files
    return ResourceNeeds(
        peak_disk_bytes=result if is_elsewhere else result + calibration_bytes,
        scratch_bytes=room_for_shards(plan) + calibration_bytes if is_elsewhere else None,
        peak_memory_bytes=MEMORY_FLOOR_BYTES + held,
    )


def room_for_shards(plan: Plan) -> int:
    """Return how much local disk space a result in object storage takes while it is made: its largest shards."""
    return sum(sorted((shard.file_bytes for shard in plan.shards), reverse=True)[:MOST_LOCAL_SHARDS])


def result_need(plan: Plan, run: Run, *, fetched_bytes: int | None = None) -> DiskNeed:
    """Return what a result takes on a disk of this machine, beside an older one.

    fetched_bytes: see fetched_bytes_of, by default of one process
    """
    fetched = fetched_bytes_of(plan) if fetched_bytes is None else fetched_bytes
    fetched += plan.disk_bytes
    present = _bytes_in(run.fetched)
    if run.store.is_elsewhere:
        needed = room_for_shards(plan) + fetched
        what = f"{run.store.work}: the shards of the result need {needed} bytes of disk space while they are made"
        remedy = "set PQWEIGHTS_SCRATCH to a folder on another disk"
    elif run.store.sending is not None:
        largest = max(shard.file_bytes for shard in plan.shards)
        needed = largest + plan.companion_bytes + fetched
        what = f"{run.store}: the largest file needs {needed} bytes of disk space until it is sent"
        remedy = "choose a folder on another disk"
    else:
        needed = plan.output_bytes + plan.companion_bytes + fetched
        present += sum(shard.file_bytes for shard in plan.shards if shard.file in run.marks)
        what = f"{run.store}: the result needs {needed} bytes of disk space"
        remedy = "choose a folder on another disk"
    return DiskNeed(folder=run.store.work, byte_count=needed, present=present, what=what, remedy=remedy)


def fetched_bytes_of(plan: Plan) -> int:
    """Return the most bytes of fetched files of the source that one process holds at once until they are released."""
    storage = plan.checkpoint.storage
    if not storage.frees:
        return 0
    return most_fetched(file_uses(plan.in_making_order), storage.files(), storage.frees)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir()) if folder.is_dir() else 0
