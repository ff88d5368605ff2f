"""What a plan decided about one tensor, with what the run measured of it: a row of every report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pqweights.planning.plan import INTEGER, QUANTIZE, TensorPlan
from pqweights.rewrite.manifest import exceeds, state_of
from pqweights.rewrite.records import TensorRecord


@dataclass(frozen=True, kw_only=True)
class TensorReport:
    """One tensor of a finished result.

    name, shape, dtype: those of the tensor in the source
    role: what it is for, such as "attention", "mlp" or "norm"
    action: "quantize", "keep", "decode" or "integer"
    codec, bits: how it is encoded; None if it is not
    bytes: its size in the result, headers not counted
    reason: why
    relative_mse: squared error over the sum of squares of the weight that was read; None if nothing was measured
    total_mse, master_mse: in an export of integers, the error against the original, and that through the master
    rounding: what error-compensated rounding did with it; None without
    folded: the vectors between layers with which it was folded, by their writers
    state: the state in which its codec encoded it, if its codec has one
    rescued: whether it was encoded in another way than the first choice of its codec
    exceeds: whether its error is above what its codec promises
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    action: str
    codec: str | None
    bits: float | None
    bytes: int
    reason: str
    relative_mse: float | None
    total_mse: float | None
    master_mse: float | None
    rounding: Mapping[str, Any] | None = None
    folded: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    rescued: bool
    exceeds: bool

    @staticmethod
    def of(tensor: TensorPlan, record: TensorRecord) -> TensorReport:
        """Join the plan of a tensor with its record."""
        return TensorReport(
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            role=tensor.role,
            action=tensor.action,
            codec=tensor.codec,
            bits=tensor.bits,
            bytes=tensor.bytes,
            reason=tensor.reason,
            relative_mse=record.relative_mse,
            total_mse=record.total_mse,
            master_mse=record.master_mse,
            rounding=record.rounding,
            folded=record.folded,
            state=record.state or {},
            rescued=is_rescued(tensor, record),
            exceeds=exceeds(tensor, record),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the tensor in the JSON of quantize, export and inspect."""
        planned = {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "role": self.role,
            "action": self.action,
            "codec": self.codec,
            "bits": self.bits,
            "bytes": self.bytes,
            "reason": self.reason,
        }
        errors: dict[str, Any] = {}
        if self.action == INTEGER:
            errors = {"total_mse": self.total_mse, "master_mse": self.master_mse}
        errors |= {} if self.rounding is None else {"rounding": self.rounding}
        errors |= {"folded": list(self.folded)} if self.folded else {}
        return planned | errors | dict(self.state) | {"relative_mse": self.relative_mse, "exceeds": self.exceeds}


def is_rescued(tensor: TensorPlan, record: TensorRecord) -> bool:
    """Whether a weight was encoded in another way than the first choice of its codec."""
    return tensor.action == QUANTIZE and state_of(tensor, record).rescued


def tensor_reports(pairs: Iterable[tuple[TensorPlan, TensorRecord]]) -> tuple[TensorReport, ...]:
    """Join the plans of many tensors with their records."""
    return tuple(TensorReport.of(tensor, record) for tensor, record in pairs)
