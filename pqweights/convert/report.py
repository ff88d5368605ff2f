"""What a run did: the report that quantize, export and rebuild return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pqweights.convert.listed_files import UNCHECKED
from pqweights.convert.plan import EXPORT, Plan
from pqweights.convert.records import (
    TensorRecord,
    TensorReport,
    error_totals,
    master_part,
    mean_error,
    tensor_reports,
)
from pqweights.planning.layout import TensorPlan, Totals

# Above this relative error, hardly anything of a tensor is left.
MOST_LOST = 0.9
# Above this share of the error, the master decides how good an export is, and no longer its format.
MOST_BY_MASTER = 0.5


@dataclass(frozen=True, kw_only=True, repr=False)
class RewriteReport:
    """What a rewrite did.

    plan: the plan that it fulfilled
    records: what was measured of each tensor, in the order of the plan
    already_done: whether the output folder held the finished result before the run
    resumed: how many tensors an earlier run had finished
    source_bytes_read: bytes read from all checkpoints
    unchecked: whether a master was read whose bytes could not be checked
    pushed: the PushReport of an export that was sent to the Hub
    """

    plan: Plan
    records: tuple[TensorRecord, ...]
    already_done: bool
    resumed: int
    source_bytes_read: int
    unchecked: bool = False
    pushed: Any = None

    @property
    def pairs(self) -> tuple[tuple[TensorPlan, TensorRecord], ...]:
        """The plan of each tensor with its record."""
        return tuple(zip(self.plan.tensors, self.records, strict=True))

    @property
    def tensors(self) -> tuple[TensorReport, ...]:
        """What was done with each tensor, and its error."""
        return tensor_reports(self.pairs)

    @property
    def exact(self) -> frozenset[str]:
        """The names of the tensors whose values an export has, all of them; of one that was not made, all names."""
        if not any(record.digests for record in self.records):
            return frozenset(record.name for record in self.records)
        return frozenset(record.name for record in self.records if record.rounding and "carried" in record.rounding)

    @property
    def totals(self) -> Totals:
        """Sizes, counts and bits per weight of the whole result."""
        return self.plan.totals

    @property
    def relative_mse(self) -> float | None:
        """The squared error over the sum of squares of all weights that were quantized; None if there are none."""
        return mean_error(self.records, "relative_mse")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of the result before using it, a sentence each."""
        unchecked = (UNCHECKED,) if self.unchecked else ()
        lost = _of_lost(self.pairs) if self.plan.kind == EXPORT else ()
        return (*self.plan.remarks, *self.plan.warnings, *lost, *_of_master(self.records), *unchecked)

    def __repr__(self) -> str:
        return f"<RewriteReport of the {self.plan.kind}: {self.totals}>"

    def to_json(self) -> dict[str, Any]:
        """Return the document of quantize --json and export --json, without the name of the output folder."""
        tensors = self.tensors
        return {
            "already_done": self.already_done,
            "resumed_tensors": self.resumed,
            "source_bytes_read": self.source_bytes_read,
            **({} if self.plan.fit is None else {"fit": self.plan.fit.to_json()}),
            **self.plan.learned,
            "totals": self.totals.to_json() | error_totals(self.plan.tensors, self.records),
            "exceeding": [tensor.name for tensor in tensors if tensor.exceeds],
            "tensors": [tensor.to_json() for tensor in tensors],
            "copied_files": list(self.plan.companions),
            "left_out_files": self.plan.left_out,
            "left_out_tensors": self.plan.left_out_tensors,
            **self.plan.quantized_before(self.exact),
            "warnings": list(self.warnings),
            **({} if self.pushed is None else {"pushed": self.pushed.to_json()}),
        }


def _of_lost(pairs: Sequence[tuple[TensorPlan, TensorRecord]]) -> tuple[str, ...]:
    """Return a warning for each tensor of which rounding has left hardly anything."""
    return tuple(
        f"{tensor.name}: hardly anything is left of it: its relative MSE is {record.relative_mse:.4f} in "
        f"{tensor.codec}, whose scales may not be small enough for its weights; keep it (`keep`), or give it another "
        "format (`set_format`)"
        for tensor, record in pairs
        if record.relative_mse is not None and record.relative_mse > MOST_LOST
    )


def _of_master(records: Sequence[TensorRecord]) -> tuple[str, ...]:
    """Return a warning that the error of an export is for the most part its master's."""
    total, by_master = mean_error(records, "total_mse"), master_part(records)
    if total is None or by_master is None or by_master <= MOST_BY_MASTER * total:
        return ()
    return (
        f"the error of the master is {by_master / total:.0%} of the error against the original "
        f"({by_master:.6f} of {total:.6f}), and no format makes that smaller: an export from the source itself "
        "is without it, and a master of more bits has less of it",
    )
