"""What reports say of a whole plan or result: counts, sizes, bits per weight, and what it can be exported to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol


class _Counted(Protocol):
    """What is counted: the properties of a TensorPlan that matter here."""

    @property
    def role(self) -> str: ...

    @property
    def bits(self) -> float | None: ...

    @property
    def weights(self) -> int: ...

    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over tensors, with the sizes of files.

    tensors: how many there are
    quantized_tensors: how many of them are quantized
    weights: elements of all tensors, buffers not counted
    quantized_weights: elements of the quantized tensors
    quantized_bytes: bytes of the quantized tensors, with norms, scales and padding
    source_bytes, output_bytes: sizes of the weight files that are read, and of the safetensors files that are written
    """

    tensors: int
    quantized_tensors: int
    weights: int
    quantized_weights: int
    quantized_bytes: int
    source_bytes: int
    output_bytes: int

    @property
    def coverage(self) -> float:
        """The share of weights that are quantized."""
        return self.quantized_weights / self.weights if self.weights else 0.0

    @property
    def bits_per_weight(self) -> float | None:
        """The mean over the quantized weights, with norms, scales and padding; None if there are none."""
        return 8 * self.quantized_bytes / self.quantized_weights if self.quantized_weights else None

    @property
    def bits_per_parameter(self) -> float | None:
        """The mean over the whole checkpoint: all bytes of the safetensors files, headers included, over all weights,
        quantized or not; None if there are none.
        """
        return 8 * self.output_bytes / self.weights if self.weights else None

    def __str__(self) -> str:
        per_weight, per_parameter = self.bits_per_weight, self.bits_per_parameter
        sizes = f"{self.tensors} tensors, {self.source_bytes} -> {self.output_bytes} bytes"
        if per_weight is None or per_parameter is None:
            return f"{sizes}, nothing is quantized"
        return f"{sizes}, {per_weight:.4f} bits per quantized weight, {per_parameter:.4f} per parameter"

    def to_json(self) -> dict[str, Any]:
        """Return the totals as plan --json and inspect --json print them."""
        return {
            "tensors": self.tensors,
            "quantized_tensors": self.quantized_tensors,
            "weights": self.weights,
            "quantized_weights": self.quantized_weights,
            "coverage": self.coverage,
            "bits_per_weight": self.bits_per_weight,
            "bits_per_parameter": self.bits_per_parameter,
            "source_bytes": self.source_bytes,
            "output_bytes": self.output_bytes,
        }


def total(tensors: Sequence[_Counted], *, source_bytes: int, output_bytes: int) -> Totals:
    """Return counts over tensors with the sizes of files."""
    quantized = [(tensor.weights, tensor.bytes) for tensor in tensors if tensor.bits is not None]
    return Totals(
        tensors=len(tensors),
        quantized_tensors=len(quantized),
        weights=sum(tensor.weights for tensor in tensors if tensor.role != "buffer"),
        quantized_weights=sum(weights for weights, _ in quantized),
        quantized_bytes=sum(byte_count for _, byte_count in quantized),
        source_bytes=source_bytes,
        output_bytes=output_bytes,
    )


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
