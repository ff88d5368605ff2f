"""A conversion from the outside: how it is carried out, what it takes, and the report."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pqweights.checkpoint.readers import file_uses, most_fetched
from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.writer import DiskNeed
from pqweights.common.parameters import Parameter, whole
from pqweights.common.threads import Progress
from pqweights.convert.conversion import Conversion
from pqweights.convert.finished_shards import ShardMark
from pqweights.convert.listed_files import UNCHECKED
from pqweights.convert.records import TensorRecord, TensorReport, error_totals, tensor_reports, total_relative_mse
from pqweights.convert.run import Run
from pqweights.planning.options import MOST_THREADS
from pqweights.planning.plan import Plan, ShardPlan, TensorPlan, Totals
from pqweights.storage.bucket import upload_bytes_held


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    # macOS has no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(asked: int | None) -> int:
    """Return how many threads compute: as many as are asked for, by default one for each core. Raises OptionError."""
    return Parameter(check=whole, least=1, most=MOST_THREADS).checked("threads", asked) or usable_cores()


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a conversion is carried out. None of it changes a byte of the result.

    threads: how many threads compute; by default one for each core
    overwrite: replace another result of pqweights in the output folder
    progress: called with the source bytes done, the source bytes in all, and the name of a tensor
    engine: where the tensors are written; by default in this process
    check: called before a result is published; raises an error if what was learned for it holds no longer
    """

    threads: int = field(default_factory=usable_cores)
    overwrite: bool = False
    progress: Progress = lambda done, total, name: None
    engine: Engine | None = None
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class ClusterWork(ABC):
    """What numbered tasks have in common. It is sent to each node of a cluster once, pickled.

    out: the result, for messages
    files: files that a node must be able to read, each with its size
    shared: a file that the driver made where tasks write; None for a result that lies elsewhere
    room: how many bytes a task takes in a folder of its node for what is then sent elsewhere; 0 if there is nothing
    folder: that of the command, in which its relative paths begin
    """

    out: str
    files: tuple[tuple[Path, int], ...]
    shared: Path | None
    room: int = 0
    folder: Path = field(default_factory=Path.cwd)

    @abstractmethod
    def make(self, number: int) -> Any:
        """Do one conversion."""


class Engine(Protocol):
    """Makes the shards of a run, or does other tasks, here or on the nodes of a cluster.

    threads: how many a task has; None for those of the command
    """

    threads: int | None

    def each(self, work: ClusterWork, numbers: Sequence[int], memory_bytes: int) -> Iterator[tuple[int, Any]]:
        """Do the tasks with these numbers; yield the number of each when it is done, and what it returned.

        memory_bytes: the most that one needs

        Raises what a task raises, ClusterError if the tasks cannot be done.
        """
        ...

    def check(self, conversion: Conversion, run: Run) -> None:
        """Find out whether it can be done. Raises ClusterError if it cannot, OutputError if there is no room."""
        ...

    def make(
        self, conversion: Conversion, run: Run, shards: Sequence[ShardPlan], options: RunOptions
    ) -> dict[str, ShardMark]:
        """Make shards of the plan, and return their marks by name."""
        ...


@dataclass(frozen=True, kw_only=True)
class PossibleExport:
    """What is known of the export of a master to one target, with the target's defaults.

    target: the name of the target
    possible: whether it can be made; None if that is not known
    reason: why not, or what is still to be found out; None if there is nothing
    """

    target: str
    possible: bool | None
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the target in the JSON of plan and quantize."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class RewriteReport:
    """What a rewrite did.

    conversion: what was planned
    records: what was measured of each tensor, in the order of the plan
    already_done: whether the output folder held the finished result before the run
    resumed: how many tensors an earlier run had finished
    source_bytes_read: bytes read from all checkpoints
    exports: of a master, what it can be exported to
    unchecked: whether a master was read whose bytes could not be checked
    """

    conversion: Conversion
    records: tuple[TensorRecord, ...]
    already_done: bool
    resumed: int
    source_bytes_read: int
    exports: tuple[PossibleExport, ...] = ()
    unchecked: bool = False

    @property
    def plan(self) -> Plan:
        """Every name, byte and file of the result."""
        return self.conversion.plan

    @property
    def pairs(self) -> tuple[tuple[TensorPlan, TensorRecord], ...]:
        """The plan of each tensor with its record."""
        return tuple(zip(self.plan.tensors, self.records, strict=True))

    @property
    def tensors(self) -> tuple[TensorReport, ...]:
        """What was done with each tensor, and its error."""
        return tensor_reports(self.pairs)

    @property
    def totals(self) -> Totals:
        """Sizes, counts and bits per weight of the whole result."""
        return self.plan.totals

    @property
    def relative_mse(self) -> float | None:
        """The squared error over the sum of squares of all weights that were quantized; None if there are none."""
        return total_relative_mse(self.records)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of the result before using it, a sentence each."""
        unchecked = (UNCHECKED,) if self.unchecked else ()
        return (*self.plan.remarks, *self.conversion.warnings(self.records), *unchecked)

    def __repr__(self) -> str:
        return f"<RewriteReport of the {self.conversion.kind}: {self.totals}>"

    def to_json(self) -> dict[str, Any]:
        """Return the document of quantize --json and export --json, without the name of the output folder."""
        tensors = self.tensors
        return {
            "already_done": self.already_done,
            "resumed_tensors": self.resumed,
            "source_bytes_read": self.source_bytes_read,
            **({} if self.conversion.fit is None else {"fit": self.conversion.fit.to_json()}),
            **self.conversion.found,
            "totals": self.totals.to_json() | error_totals(self.plan.tensors, self.records),
            "exceeding": [tensor.name for tensor in tensors if tensor.exceeds],
            "tensors": [tensor.to_json() for tensor in tensors],
            "copied_files": list(self.plan.companions),
            "left_out_files": self.plan.left_out,
            "left_out_tensors": self.plan.left_out_tensors,
            **self.plan.quantized_before(),
            "warnings": list(self.warnings),
            **({"exports": [export.to_json() for export in self.exports]} if self.exports else {}),
        }


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
    largest_header = max((shard.header.byte_count for shard in plan.shards), default=0)
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


def result_need(conversion: Conversion, run: Run, *, fetched_bytes: int | None = None) -> DiskNeed:
    """Return what a result takes on a disk of this machine, beside an older one.

    fetched_bytes: see fetched_bytes_of, by default of one process
    """
    fetched = fetched_bytes_of(conversion) if fetched_bytes is None else fetched_bytes
    fetched += conversion.disk_bytes
    present = _bytes_in(run.fetched)
    if run.store.is_elsewhere:
        needed = room_for_shards(conversion.plan) + fetched
        what = f"{run.store.work}: the shards of the result need {needed} bytes of disk space while they are made"
        remedy = "set PQWEIGHTS_SCRATCH to a folder on another disk"
    else:
        needed = conversion.plan.output_bytes + conversion.plan.companion_bytes + fetched
        present += sum(shard.file_bytes for shard in conversion.plan.shards if shard.file in run.marks)
        what = f"{run.store}: the result needs {needed} bytes of disk space"
        remedy = "choose a folder on another disk"
    return DiskNeed(folder=run.store.work, byte_count=needed, present=present, what=what, remedy=remedy)


def fetched_bytes_of(conversion: Conversion) -> int:
    """Return the most bytes of fetched files of the source that one process holds at once until they are released."""
    storage = conversion.checkpoint.storage
    if not storage.frees:
        return 0
    return most_fetched(file_uses(conversion.in_making_order), storage.files(), storage.frees)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir()) if folder.is_dir() else 0
