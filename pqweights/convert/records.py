"""What a run measured of each tensor, alone and beside what the plan decided, and the errors of a whole result."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pqweights.common.documents import Number
from pqweights.common.strict_json import rounded
from pqweights.formats.master import largest_error
from pqweights.planning.layout import INTEGER, QUANTIZE, ShardPlan, TensorPlan, format_of


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """What a run measured of one tensor. A measure that means nothing for the tensor is None.

    name: the tensor
    digests: hashes of its stored tensors, by stored name
    state: the settings of a weight's format (MasterFormat.stated)
    relative_mse: squared error over `energy`
    energy: sum of squares of the weight that was read
    total_mse: in an export of integers, the relative error against the original weight; of a master computed from what
        its manifest states
    master_mse: in an export of integers from a master, the same
    weighed_mse: of a calibrated weight, the relative error in its outputs, weighed by how much the loss depends on each
    rounding: what error-compensated rounding did with the weight (docs/format.md)
    """

    name: str
    digests: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] | None = None
    relative_mse: Number | None = None
    energy: Number | None = None
    total_mse: Number | None = None
    master_mse: Number | None = None
    weighed_mse: Number | None = None
    rounding: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class TensorReport(TensorRecord):
    """One tensor of a finished result, a row of every report: its record, and what the plan decided.

    shape, dtype, role, action, codec, bits, bytes, reason: see TensorPlan
    rescued: whether it was encoded in another way than the first choice of its codec
    exceeds: whether its error is above what its codec promises
    """

    shape: tuple[int, ...]
    dtype: str
    role: str
    action: str
    codec: str | None
    bits: float | None
    bytes: int
    reason: str
    rescued: bool
    exceeds: bool

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the tensor in the JSON of quantize, export and inspect."""
        planned = ("name", "shape", "dtype", "role", "action", "codec", "bits", "bytes", "reason")
        entry = {key: getattr(self, key) for key in planned} | {"shape": list(self.shape)}
        if self.action == INTEGER:
            entry |= {"total_mse": self.total_mse, "master_mse": self.master_mse}
        entry |= {} if self.rounding is None else {"rounding": self.rounding}
        entry |= {} if self.weighed_mse is None else {"weighed_mse": self.weighed_mse}
        return entry | (self.state or {}) | {"relative_mse": self.relative_mse, "exceeds": self.exceeds}


def tensor_reports(pairs: Iterable[tuple[TensorPlan, TensorRecord]]) -> tuple[TensorReport, ...]:
    """Join the plans of tensors with their records."""
    return tuple(
        TensorReport(
            **vars(record),
            **{key: value for key, value in tensor._asdict().items() if key not in ("name", "stored")},
            rescued=is_rescued(tensor, record),
            exceeds=exceeds(tensor, record),
        )
        for tensor, record in pairs
    )


def is_rescued(tensor: TensorPlan, record: TensorRecord) -> bool:
    """Whether a weight was encoded in another way than the first choice of its codec."""
    return tensor.action == QUANTIZE and format_of(tensor, record.state or {}).rescued


def promise(tensor: TensorPlan) -> float | None:
    """Return the largest relative error that needs no rescue; None for a tensor of which nothing is promised."""
    largest = largest_error(format_of(tensor).distortion) if tensor.action == QUANTIZE else math.inf
    return None if math.isinf(largest) else largest


def exceeds(tensor: TensorPlan, record: TensorRecord) -> bool:
    """Whether a weight's error is above 1.25 times what its codec promises, although the codec tried everything."""
    if tensor.action != QUANTIZE or record.relative_mse is None:
        return False
    return record.relative_mse > largest_error(format_of(tensor).distortion)


def error_totals(tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]) -> dict[str, float | None]:
    """Return the errors of a whole result by name; an export of integers also has errors against the original."""
    names = ["relative_mse"]
    if any(tensor.action == INTEGER for tensor in tensors):
        names += ["total_mse", "master_mse"]
    return {name: mean_error(records, name) for name in names}


def master_part(records: Sequence[TensorRecord]) -> float | None:
    """Return how much of the mean total_mse of an export is the error of the master; None if that is not known.

    A weight's total_mse is m + r (1 - m), where m is the master's error, and r, its relative_mse, that of rounding. The
    part is 0 where the original was rounded.
    """
    total = added = 0.0
    for record in records:
        if record.energy is None or record.relative_mse is None:
            continue
        if record.total_mse is None or max(record.total_mse, record.relative_mse) >= 1:
            return None
        energy = record.energy * (1 - record.relative_mse) / (1 - record.total_mse)  # of the original
        total += energy
        added += record.energy * record.relative_mse
    mean = mean_error(records, "total_mse")
    return None if mean is None or not total else max(0.0, mean - added / total)


def mean_error(records: Sequence[TensorRecord], of: str) -> float | None:
    """Return the mean of one measure of TensorRecord over all tensors with an energy; None if one of them lacks it.

    The mean is weighted by the sum of squares of the weights that the errors refer to. For errors against the original
    that is energy / (1 - m), where m is the master's error. (total_mse is only known if the master's error is
    orthogonal to its weights, so that this holds, or if the original itself was read, so that m = 0.)
    """
    errors = []
    for record in records:
        if record.energy is not None and record.relative_mse is not None:
            against_original = of != "relative_mse" and record.total_mse is not None and record.total_mse < 1
            share = (1 - record.relative_mse) / (1 - (record.total_mse or 0)) if against_original else 1.0
            errors.append((getattr(record, of), record.energy * share))
    pairs = [(error, energy) for error, energy in errors if error is not None]
    if len(pairs) < len(errors):
        return None
    energy = math.fsum(energy for _, energy in pairs)  # exactly rounded: sum() differs between versions of Python
    return rounded(math.fsum(error * energy for error, energy in pairs) / energy if energy else 0.0) if pairs else None


class TypeFigures(NamedTuple):
    """What one type of several in a result takes, and how well it holds the weights.

    bytes: of its files
    bits: per parameter, of all that is in them
    relative_mse: over all of its rounded weights, against the original where that is known; None if there are none
    """

    type: str
    bytes: int
    bits: float
    relative_mse: float | None


def figures_by_type(
    made_by: Mapping[str, Any], pairs: Sequence[tuple[TensorPlan, TensorRecord]], shards: Iterable[ShardPlan]
) -> list[TypeFigures]:
    """Return the figures of each type or format of a result that has files of several; nothing for another one.

    made_by: how it was made; types and formats stand before the names of tensors
    shards: its files
    """
    if "," not in str(made_by.get("type")) and "results" not in made_by:
        return []
    by_type: dict[str, list[tuple[TensorPlan, TensorRecord]]] = defaultdict(list)
    sizes = Counter[str]()
    for shard in shards:
        held = [pairs[number] for number in shard.tensors]
        kind, _, name = held[0][0].name.partition("/") if held else ("", "", "")
        if name:
            by_type[kind] += held
            sizes[kind] += shard.file_bytes
    result = []
    for kind, held in by_type.items():
        size, weights = sizes[kind], sum(tensor.weights for tensor, _ in held)
        error = mean_error([record for _, record in held], "total_mse")
        result.append(TypeFigures(kind, size, 8 * size / max(1, weights), error))
    return result
