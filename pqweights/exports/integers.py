"""The transform behind every integer export: weights to codes, scales and offsets per group, in the layout of a target.

A target (torchao_int4.py, mlx_q4.py, vllm_int4.py) says which weights become integers, how, and where each number goes;
here they are read, rounded, measured and written. docs/exports.md has the rules and what the errors mean.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pqweights.buffers import BufferPool
from pqweights.checkpoint.config import model_dtype
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.codecs.protocol import Basis
from pqweights.codecs.weight import add_in_order
from pqweights.dtypes import from_float32, to_float32
from pqweights.errors import SourceError
from pqweights.exports.bf16 import plain_plan
from pqweights.kernels import HADAMARD_SIZE
from pqweights.kernels.groups import BEST, Groups, rotate
from pqweights.kernels.workers import scratch
from pqweights.planning.plan import INTEGER, TensorPlan
from pqweights.planning.roles import classify
from pqweights.rewrite import jobs
from pqweights.rewrite.jobs import CopyJob, Job, Sink
from pqweights.rewrite.manifest import TensorRecord
from pqweights.strict_json import rounded


class StoredPiece(NamedTuple):
    """Bytes of a stored tensor: rows of data, the first at `offset`, each `step` bytes after the one before."""

    stored_name: str
    offset: int
    step: int
    data: npt.NDArray[np.uint8]  # [rows, bytes]


class RoundingRule(Protocol):
    """How groups of consecutive weights become codes, and what they are read back as."""

    @property
    def bits(self) -> int:
        """Of a code."""
        ...

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""
        ...

    @property
    def name(self) -> str:
        """best, or the name of the runtime's own rule."""
        ...

    @property
    def kind(self) -> str:
        """affine, symmetric, or the name of a floating mode."""
        ...

    def quantize(self, values: npt.NDArray[np.float32]) -> Groups:
        """Whole groups of weights."""
        ...

    def decode(self, groups: Groups) -> npt.NDArray[np.float32]:
        """What the runtime computes with: [groups, group size]."""
        ...


class Layout(Protocol):
    """How a target stores a weight of integers."""

    @property
    def row_multiple(self) -> int:
        """Rows are written in multiples of so many, but for the last."""
        ...

    def specs(self, name: str, shape: tuple[int, ...], rule: RoundingRule) -> tuple[TensorSpec, ...]:
        """What a weight [..., K] becomes."""
        ...

    def pieces(
        self, name: str, shape: tuple[int, ...], rule: RoundingRule, first_row: int, groups: Groups
    ) -> list[StoredPiece]:
        """Where the bytes of some consecutive rows go. Those without a step come in order."""
        ...


@dataclass(frozen=True)
class Rounding:
    """What becomes of one weight. rotated: the integers are of W H / sqrt(128), blockwise along the rows."""

    rule: RoundingRule
    layout: Layout
    rotated: bool = False

    @property
    def codec(self) -> str:
        """As the plan calls it: symmetric-g128-rotated, say."""
        return f"{self.rule.kind}-g{self.rule.group_size}" + ("-rotated" if self.rotated else "")


@dataclass(frozen=True)
class Stays:
    """A weight or another tensor is stored plainly. reason: why, for a weight that could have been rounded."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What a target makes of a model, decided from headers and configuration.

    tensors: as the runtime holds them. decisions: by name; tensors that it does not name are stored plainly, in the dtype
    that plain_plan gives them for plain_dtype. left_out: tensors of the master that the runtime does not hold, with the
    reason. metadata: of the safetensors files. config: config.json.
    """

    tensors: tuple[LogicalTensor, ...]
    decisions: Mapping[str, Rounding | Stays]
    left_out: dict[str, str]
    metadata: dict[str, str]
    config: dict[str, Any]
    plain_dtype: str | None = "BF16"


class IntegerTarget(Protocol):
    """What an integer export is for."""

    def describe(self) -> dict[str, Any]:
        """The manifest's account of it."""
        ...

    def outline(self, checkpoint: Checkpoint) -> Outline:
        """For a master, or for one whose weights were replaced by the original's.

        Raises ExportError where the target has no form for the model, MissingDependencyError where it needs a package.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class IntegerExport:
    """The transform, made by original.integer_export.

    original: where the weights are read from it instead. master: then, by name, what the master has for them. master_errors:
    relative errors of the master's weights, by the names of the export, where they are known and those of rounding add up to them.
    """

    target: IntegerTarget
    outline: Outline
    original: Checkpoint | None
    master: Mapping[str, LogicalTensor]
    master_errors: Mapping[str, float]
    kind: str = "export"

    def describe(self) -> dict[str, Any]:
        """See transform.Transform."""
        return self._described

    @functools.cached_property
    def _described(self) -> dict[str, Any]:
        """Made once: a fingerprint reads some of every tensor."""
        fingerprint = {"original_fingerprint": self.original.fingerprint()} if self.original else {}
        return self.target.describe() | fingerprint | {"master_errors": _digest(self.master_errors)}

    @property
    def also_reads(self) -> dict[str, Checkpoint]:
        """See Transform."""
        return {} if self.original is None else {"--source": self.original}

    @property
    def left_out(self) -> dict[str, str]:
        """See Transform."""
        return self.outline.left_out

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """See Transform."""
        model = model_dtype(checkpoint.config, checkpoint.tensors)
        return [self._planned(tensor, model) for tensor in checkpoint.tensors]

    def _planned(self, tensor: LogicalTensor, model: str) -> TensorPlan:
        decision = self.outline.decisions.get(tensor.name)
        if not isinstance(decision, Rounding):
            return plain_plan(tensor, model, self.outline.plain_dtype, None if decision is None else decision.reason)
        return TensorPlan(
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            role=classify(tensor.name, tensor.dtype, tensor.shape).name,
            action=INTEGER,
            codec=decision.codec,
            bits=decision.rule.bits,
            reason=f"{decision.rule.name} rule",
            stored=decision.layout.specs(tensor.name, tensor.shape, decision.rule),
        )

    @property
    def metadata(self) -> dict[str, str]:
        """See Transform."""
        return self.outline.metadata

    def job(self, planned: TensorPlan, tensor: LogicalTensor, buffers: BufferPool) -> Job:
        """See Transform."""
        decision = self.outline.decisions.get(tensor.name)
        if not isinstance(decision, Rounding):
            return CopyJob(planned, tensor, buffers)
        return IntegerJob(
            planned,
            tensor,
            decision,
            master=self.master.get(tensor.name),
            master_error=self.master_errors.get(tensor.name),
        )

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """See Transform; nothing is refused."""

    def config(
        self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]
    ) -> dict[str, Any]:
        """See Transform."""
        return self.outline.config


class IntegerJob:
    """One weight to integers. See jobs.Job. master, master_error: as in IntegerExport, of this weight; one of them at most."""

    def __init__(
        self,
        planned: TensorPlan,
        tensor: LogicalTensor,
        rounding: Rounding,
        *,
        master: LogicalTensor | None,
        master_error: float | None,
    ) -> None:
        self._planned, self._tensor, self._rounding = planned, tensor, rounding
        self._master, self._master_error = master, master_error
        self._columns = tensor.shape[-1]
        self._rows = math.prod(tensor.shape[:-1])
        multiple = rounding.layout.row_multiple
        self._rows_per_chunk = max(1, jobs.CHUNK_WEIGHTS // self._columns // multiple) * multiple
        self._digests = {spec.name: hashlib.sha256() for spec in planned.stored}
        self._scattered: dict[str, Sink] = {}  # stored tensors whose bytes do not come in order
        self._energy = self._error = self._error_by_master = 0.0

    @property
    def chunks(self) -> int:
        """See Job."""
        return -(-self._rows // self._rows_per_chunk)

    def run(self, chunk: int, sink: Sink) -> _Done:
        """See Job."""
        first = chunk * self._rows_per_chunk
        count = min(self._rows_per_chunk, self._rows - first)
        values = self._values(self._tensor, first, count, "values")
        groups = self._quantized(values)
        numbers = (groups.energies, groups.errors, groups.scales, groups.offsets)
        if not all(np.isfinite(found).all() for found in numbers):
            raise SourceError(
                f"tensor {self._tensor.name!r}: expected finite weights, and finite scales for them, found a NaN or an "
                f"infinity in rows {first} to {first + count - 1}; `pqweights verify` tells whether the folder is damaged"
            )
        pieces = self._rounding.layout.pieces(
            self._planned.name, self._planned.shape, self._rounding.rule, first, groups
        )
        for piece in pieces:
            for row, data in enumerate(piece.data):
                sink.write(piece.stored_name, piece.offset + row * piece.step, data)
        by_master = np.empty(0)
        if self._master is not None:
            of_master = self._quantized(self._values(self._master, first, count, "master"))
            by_master = _errors(values, of_master, self._rounding.rule)
        return _Done(pieces, groups.energies, groups.errors, by_master, sink)

    def _values(self, tensor: LogicalTensor, row: int, rows: int, purpose: str) -> npt.NDArray[np.float32]:
        """Whole rows as float32."""
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
        """Codes with their errors; a runtime's own rule gets the BF16 weights that the runtime would have."""
        rule = self._rounding.rule
        if rule.name == BEST:
            return rule.quantize(values)
        groups = rule.quantize(to_float32(from_float32(values, "BF16"), "BF16"))
        energies = _sums_of_squares(values.reshape(groups.codes.shape))
        return replace(groups, energies=energies, errors=_errors(values, groups, rule))

    def collect(self, result: _Done) -> None:
        """See Job."""
        for piece in result.pieces:
            if piece.step:
                self._scattered[piece.stored_name] = result.sink
            else:
                self._digests[piece.stored_name].update(np.ascontiguousarray(piece.data).data)
        self._energy = add_in_order(self._energy, result.energies)
        self._error = add_in_order(self._error, result.errors)
        self._error_by_master = add_in_order(self._error_by_master, result.errors_by_master)

    def finish(self) -> TensorRecord:
        """See Job."""
        digests = {name: digest.hexdigest() for name, digest in self._digests.items()}
        digests |= {name: sink.sha256(name) for name, sink in self._scattered.items()}
        own = self._error / self._energy if self._energy else 0.0
        total: float | None = None
        by_master: float | None = None
        if self._master is not None:
            total, by_master = own, self._error_by_master / self._energy if self._energy else 0.0
        elif self._master_error is not None:
            # The master's error is orthogonal to its weights and, as far as rounding them goes its own way, to what rounding
            # adds: squares add up.
            total = by_master = self._master_error + own * (1 - self._master_error)
        return TensorRecord(
            name=self._planned.name,
            sha256=digests,
            relative_mse=rounded(own),
            energy=rounded(self._energy),
            total_mse=None if total is None else rounded(total),
            master_mse=None if by_master is None else rounded(by_master),
        )


def _digest(errors: Mapping[str, float]) -> str | None:
    """Tells the errors that totals were computed from; None without any."""
    return hashlib.sha256(json.dumps(errors, sort_keys=True).encode()).hexdigest() if errors else None


class _Done(NamedTuple):
    """A chunk that was written."""

    pieces: list[StoredPiece]
    energies: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]
    errors_by_master: npt.NDArray[np.float64]
    sink: Sink


def is_rotated(tensor: EncodedTensor) -> bool:
    """Whether a weight of a master can be read in the rotated basis as it is coded, in rows of whole runs."""
    return Basis.HADAMARD in tensor.bases and tensor.shape[-1] % HADAMARD_SIZE == 0


def _errors(values: npt.NDArray[np.float32], groups: Groups, rule: RoundingRule) -> npt.NDArray[np.float64]:
    """Squared errors, summed by group, of codes that were made from other values."""
    return _sums_of_squares(values.reshape(groups.codes.shape) - rule.decode(groups))


def _sums_of_squares(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Of each row, one addition after the other: other sums of numpy depend on the machine."""
    wide = rows.astype(np.float64)
    sums: npt.NDArray[np.float64] = np.add.accumulate(wide * wide, axis=1)[:, -1]
    return sums
