"""The transform behind every integer target: weights to codes, scales and offsets per group, measured and written.

What is rounded, how, and where each number goes is the target's decision (integers.py). docs/exports.md has the rules,
and what the errors mean.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.config import model_dtype
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.codecs.protocol import Basis
from pqweights.codecs.weight import add_in_order
from pqweights.dtypes import from_float32, to_float32
from pqweights.errors import SourceError
from pqweights.exports.bf16 import plain_plan
from pqweights.exports.integers import IntegerTarget, Outline, Rounding, RoundingRule, StoredPiece
from pqweights.kernels import HADAMARD_SIZE
from pqweights.kernels.groups import BEST, Groups, rotate
from pqweights.kernels.workers import scratch
from pqweights.planning.plan import INTEGER, TensorPlan, stored_bytes
from pqweights.planning.roles import classify
from pqweights.rewrite import jobs
from pqweights.rewrite.jobs import CopyJob, Job, Sink
from pqweights.rewrite.records import TensorRecord
from pqweights.rewrite.transform import Transform
from pqweights.strict_json import rounded

# Columns are put together to rows in strips of this size.
STRIP_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class IntegerExport(Transform):
    """The transform of an integer target, made by original.integer_export.

    target: the format with its options
    outline: what the target makes of the model
    original: the checkpoint whose values are rounded in place of the master's, if it is given
    master: with an original, the master's tensors by name, to measure what going through the master would have cost
    master_errors: without an original, relative errors of the master's weights by name, where they are known and add up
        with those of rounding
    """

    target: IntegerTarget
    outline: Outline
    original: Checkpoint | None = None
    master: Mapping[str, LogicalTensor] = field(default_factory=dict)
    master_errors: Mapping[str, float] = field(default_factory=dict)

    kind = "export"

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of this transform: the target, the original, and a digest of the errors."""
        return self._described

    @functools.cached_property
    def _described(self) -> dict[str, Any]:
        """Computed once, because a fingerprint reads a part of every tensor."""
        fingerprint = {"original_fingerprint": self.original.fingerprint()} if self.original else {}
        return self.target.describe() | fingerprint | {"master_errors": _digest(self.master_errors)}

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """Plan each tensor by the outline's decision."""
        model = model_dtype(checkpoint.config, checkpoint.tensors)
        return [self._planned(tensor, model) for tensor in checkpoint.tensors]

    def _planned(self, tensor: LogicalTensor, model: str) -> TensorPlan:
        decision = self.outline.decisions.get(tensor.name)
        if not isinstance(decision, Rounding):
            reason = None if decision is None else decision.reason
            return plain_plan(tensor, model=model, dtype=self.outline.plain_dtype, reason=reason)
        specs = decision.layout.specs(tensor.name, tensor.shape, decision.rule)
        return TensorPlan(
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            role=classify(tensor.name, tensor.dtype, tensor.shape).name,
            action=INTEGER,
            codec=decision.codec,
            bits=decision.rule.bits,
            reason=f"{decision.rule.name} rule",
            bytes=stored_bytes(specs),
            stored=specs,
        )

    @property
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` that the runtime asks for."""
        return self.outline.metadata

    @property
    def left_out(self) -> dict[str, str]:
        """The tensors that the runtime does not hold, each with the reason."""
        return self.outline.left_out

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the target has to say about the result."""
        return self.outline.warnings

    @property
    def also_reads(self) -> dict[str, Checkpoint]:
        """The original, if it is read."""
        return {} if self.original is None else {"--source": self.original}

    def job(self, planned: TensorPlan, tensor: LogicalTensor) -> Job:
        """Return the job that rounds a weight or copies another tensor."""
        decision = self.outline.decisions.get(tensor.name)
        if not isinstance(decision, Rounding):
            return CopyJob(planned, tensor)
        return IntegerJob(
            planned,
            tensor,
            decision,
            master=self.master.get(tensor.name),
            master_error=self.master_errors.get(tensor.name),
        )

    def config(
        self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]
    ) -> dict[str, Any]:
        """Return the config.json that the runtime reads."""
        return self.outline.config


class IntegerJob:
    """The job that turns one weight into integers."""

    def __init__(
        self,
        planned: TensorPlan,
        tensor: LogicalTensor,
        rounding: Rounding,
        *,
        master: LogicalTensor | None,
        master_error: float | None,
    ) -> None:
        """Prepare the job of one weight.

        master: with an original, what the master has for the weight
        master_error: without an original, the master's relative error of the weight, if it is known
        """
        self._planned, self._tensor, self._rounding = planned, tensor, rounding
        self._master, self._master_error = master, master_error
        self._columns = tensor.shape[-1]
        self._rows = math.prod(tensor.shape[:-1])
        multiple = rounding.layout.row_multiple
        self._rows_per_chunk = max(1, jobs.CHUNK_WEIGHTS // self._columns // multiple) * multiple
        self._by_columns: dict[str, list[npt.NDArray[np.uint8]]] = {}  # of stored tensors that come by columns
        self._energy = self._error = self._error_by_master = 0.0

    @property
    def chunks(self) -> int:
        """The number of chunks of whole rows."""
        return -(-self._rows // self._rows_per_chunk)

    def run(self, chunk: int, sink: Sink) -> _RoundedChunk:
        """Round one chunk of rows, and write its pieces.

        Raises SourceError if a weight or a scale is not finite.
        """
        first = chunk * self._rows_per_chunk
        count = min(self._rows_per_chunk, self._rows - first)
        values = self._values(self._tensor, first, count, purpose="values")
        groups = self._quantized(values)
        numbers = (groups.energies, groups.errors, groups.scales, groups.offsets)
        if not all(np.isfinite(found).all() for found in numbers):
            raise SourceError(
                f"tensor {self._tensor.name!r}: expected finite weights, and finite scales for them, found a NaN or an "
                f"infinity in rows {first} to {first + count - 1}; `pqweights verify` tells whether the folder is "
                "damaged"
            )
        pieces = self._rounding.layout.pieces(
            self._planned.name, self._planned.shape, self._rounding.rule, first_row=first, groups=groups
        )
        for piece in pieces:
            if piece.offset is not None:
                sink.write(piece.stored_name, piece.offset, piece.data.reshape(-1))
        by_master = np.empty(0)
        if self._master is not None:
            of_master = self._quantized(self._values(self._master, first, count, purpose="master"))
            by_master = _errors(values, of_master, self._rounding.rule)
        return _RoundedChunk(
            columns=[piece for piece in pieces if piece.offset is None],
            energies=groups.energies,
            errors=groups.errors,
            errors_by_master=by_master,
        )

    def _values(self, tensor: LogicalTensor, row: int, rows: int, *, purpose: str) -> npt.NDArray[np.float32]:
        """Read whole rows as float32, rotated if the rounding is. purpose: of the thread's scratch memory."""
        start, count = row * self._columns, rows * self._columns
        raw = scratch(purpose, count * 4)
        values = raw.view(np.float32)
        if self._rounding.rotated and isinstance(tensor, EncodedTensor) and is_rotated(tensor):
            tensor.read_in(Basis.HADAMARD, start, count, raw)
        else:
            tensor.read(start, count, "F32", raw)
            if self._rounding.rotated:
                rotate(values)
        return values

    def _quantized(self, values: npt.NDArray[np.float32]) -> Groups:
        """Round rows to codes, and measure their errors; a rule of the runtime's own gets BF16, as in the runtime."""
        rule = self._rounding.rule
        if rule.name == BEST:
            return rule.quantize(values)
        groups = rule.quantize(to_float32(from_float32(values, "BF16"), "BF16"))
        energies = _sums_of_squares(values.reshape(groups.codes.shape))
        return replace(groups, energies=energies, errors=_errors(values, groups, rule))

    def collect(self, result: _RoundedChunk) -> None:
        """Keep the columns of a chunk, and add up its errors."""
        for piece in result.columns:
            self._by_columns.setdefault(piece.stored_name, []).append(piece.data)
        self._energy = add_in_order(self._energy, result.energies)
        self._error = add_in_order(self._error, result.errors)
        self._error_by_master = add_in_order(self._error_by_master, result.errors_by_master)

    def finish(self, sink: Sink) -> TensorRecord:
        """Write what came by columns, and return the record with the errors as far as they are known."""
        while self._by_columns:
            stored_name, columns = self._by_columns.popitem()
            row_bytes = sum(part.shape[1] for part in columns)
            step = max(1, STRIP_BYTES // row_bytes)
            for row in range(0, len(columns[0]), step):
                strip = np.concatenate([part[row : row + step] for part in columns], axis=1)
                sink.write(stored_name, row * row_bytes, strip.reshape(-1))
        own = self._error / self._energy if self._energy else 0.0
        total: float | None = None
        by_master: float | None = None
        if self._master is not None:
            total, by_master = own, self._error_by_master / self._energy if self._energy else 0.0
        elif self._master_error is not None:
            # The master's error is orthogonal to its weights and, as far as rounding is independent of it, to the error
            # of rounding: the squares add up.
            total = by_master = self._master_error + own * (1 - self._master_error)
        return TensorRecord(
            name=self._planned.name,
            relative_mse=rounded(own),
            energy=rounded(self._energy),
            total_mse=None if total is None else rounded(total),
            master_mse=None if by_master is None else rounded(by_master),
        )


def _digest(errors: Mapping[str, float]) -> str | None:
    """Return a digest of the errors from which total errors are computed; None if there are none."""
    return hashlib.sha256(json.dumps(errors, sort_keys=True).encode()).hexdigest() if errors else None


@dataclass(frozen=True, eq=False, kw_only=True)
class _RoundedChunk:
    """What is still to be written of a chunk, and what was measured: sums of squares by group."""

    columns: list[StoredPiece]
    energies: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]
    errors_by_master: npt.NDArray[np.float64]


def is_rotated(tensor: EncodedTensor) -> bool:
    """Whether a weight of a master is coded in the rotated basis, and its rows are whole runs of that rotation."""
    return Basis.HADAMARD in tensor.bases and tensor.shape[-1] % HADAMARD_SIZE == 0


def _errors(values: npt.NDArray[np.float32], groups: Groups, rule: RoundingRule) -> npt.NDArray[np.float64]:
    """Return the squared errors of codes against other values than they were made from, summed by group."""
    return _sums_of_squares(values.reshape(groups.codes.shape) - rule.decode(groups))


def _sums_of_squares(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the sum of squares of each row, added in order: the sums of numpy depend on the machine."""
    wide = rows.astype(np.float64)
    sums: npt.NDArray[np.float64] = np.add.accumulate(wide * wide, axis=1)[:, -1]
    return sums
