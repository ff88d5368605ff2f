"""A conversion from the outside: how it is carried out, and the report."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pqweights.common.options import MOST_THREADS, checked_value, whole
from pqweights.common.threads import Progress, no_progress
from pqweights.convert.conversion import Conversion
from pqweights.convert.listed_files import UNCHECKED
from pqweights.convert.records import TensorRecord, TensorReport, error_totals, tensor_reports, total_relative_mse
from pqweights.planning.plan import Plan, TensorPlan, Totals


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    # macOS has no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(threads: int | None) -> int:
    """Return how many threads compute: as many as are asked for, by default one for each core. Raises OptionError."""
    return checked_value("threads", threads, check=whole, least=1, most=MOST_THREADS) or usable_cores()


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a conversion is carried out. None of it changes a byte of the result.

    threads: how many threads compute; by default one for each core
    overwrite: replace another result of pqweights in the output folder
    progress: called with the source bytes done, the source bytes in all, and the name of a tensor
    engine: the cluster on whose nodes the shards are made; None for this process
    check: called before a result is published; raises an error if what was learned for it holds no longer
    """

    threads: int = field(default_factory=usable_cores)
    overwrite: bool = False
    progress: Progress = no_progress
    engine: Any = None  # a RayEngine; modules of this layer know no Ray
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True, repr=False)
class RewriteReport:
    """What a rewrite did.

    conversion: what was planned
    records: what was measured of each tensor, in the order of the plan
    already_done: whether the output folder held the finished result before the run
    resumed: how many tensors an earlier run had finished
    source_bytes_read: bytes read from all checkpoints
    unchecked: whether a master was read whose bytes could not be checked
    pushed: the PushReport of an export that was sent to the Hub
    """

    conversion: Conversion
    records: tuple[TensorRecord, ...]
    already_done: bool
    resumed: int
    source_bytes_read: int
    unchecked: bool = False
    pushed: Any = None

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
            **self.conversion.learned,
            "totals": self.totals.to_json() | error_totals(self.plan.tensors, self.records),
            "exceeding": [tensor.name for tensor in tensors if tensor.exceeds],
            "tensors": [tensor.to_json() for tensor in tensors],
            "copied_files": list(self.plan.companions),
            "left_out_files": self.plan.left_out,
            "left_out_tensors": self.plan.left_out_tensors,
            **self.plan.quantized_before(),
            "warnings": list(self.warnings),
            **({} if self.pushed is None else {"pushed": self.pushed.to_json()}),
        }
