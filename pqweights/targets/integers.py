"""What an integer target says of each weight, and the job that does it: read rows, round, measure, write.

exporting.py carries out what the targets say; how numbers are stored is in formats.py. docs/exports.md has the
rules, and what the errors mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf.views import reading_of
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.shard_file import ShardFile
from pqweights.checkpoint.source import find_non_finite
from pqweights.common.dtypes import from_float32, to_float32
from pqweights.common.strict_json import rounded
from pqweights.convert import jobs
from pqweights.convert.jobs import Job
from pqweights.convert.plan import SmallFiles
from pqweights.convert.records import TensorRecord
from pqweights.errors import SourceError
from pqweights.formats.packing import PackedFormat, RoundingRule
from pqweights.kernels import Doubles, load_backend
from pqweights.kernels.groups import BEST, GroupRule, Groups, merged, sums_of_squares
from pqweights.kernels.workers import scratch
from pqweights.planning.layout import DEFAULT_METADATA, Container, ShardPlan, TensorPlan
from pqweights.targets.carried import SourceGrid, recovered_groups, stored_dtype

# The most rows that a format stores together: with chunks of a multiple of it, all formats read the same chunks.
ROW_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which format a target gives each tensor of a model, in which files, decided from headers and configuration.

    tensors: the tensors that the runtime holds
    decisions: how weights are stored as codes, or why they stay plain, by name; a tensor without a decision is stored
        plainly
    dtypes: in which tensors are stored plainly, by name, if not as `plain_dtype` says
    left_out: tensors of the master that the runtime does not hold, each with the reason
    metadata: the `__metadata__` of the safetensors files
    config: config.json; None if there is none
    plain_dtype: the `dtype` of plain_plan for tensors that are stored plainly
    warnings: what the user should know of the result before using it, a sentence each
    container: returns the format of the files, from the planned tensors and the size of files; None for safetensors
    small_files: returns files that are written beside the weights, by name, given the shards; None if there are none
    companions: the files that are copied; None for all that the master has
    parts: of several formats, the assignment of each by its folder (several.py); tensors and decisions are those of all
    stated: what the manifest states beside the options, such as the name that files get
    """

    tensors: tuple[LogicalTensor, ...]
    decisions: Mapping[str, PackedFormat | str]
    config: dict[str, Any] | None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=lambda: DEFAULT_METADATA)
    plain_dtype: str | None = "BF16"
    warnings: tuple[str, ...] = ()
    container: Callable[[Sequence[TensorPlan], int], Container] | None = None
    small_files: Callable[[Sequence[ShardPlan]], SmallFiles] | None = None
    companions: tuple[str, ...] | None = None
    parts: Mapping[str, Assignment] = field(default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rounded(self) -> Iterator[tuple[LogicalTensor, PackedFormat]]:
        """The tensors that become integers, and how."""
        for tensor in self.tensors:
            decision = self.decisions.get(tensor.name)
            if isinstance(decision, PackedFormat):
                yield tensor, decision

    @property
    def formats(self) -> dict[str, PackedFormat]:
        """How weights are stored as codes, by name."""
        return {name: how for name, how in self.decisions.items() if isinstance(how, PackedFormat)}


class IntegerJob:
    """The job that turns one weight into integers; a chunk is some whole rows of one matrix."""

    row_multiple = 1  # chunks have a multiple of this number of rows, except for the last of a matrix
    carries_groups = True  # whether some groups of rows may have codes of the source and others be rounded

    def __init__(
        self,
        planned: TensorPlan,
        tensor: LogicalTensor,
        rounding: PackedFormat,
        *,
        master_error: float | None = None,
        is_original: bool,
    ) -> None:
        """Prepare the job of one weight.

        is_original: whether the weight is that of the source, and not decoded from a master
        master_error: of a weight of a master, its relative error, if it is known
        """
        self._planned, self._tensor, self._rounding = planned, tensor, rounding
        self._master_error, self._is_original = master_error, is_original
        self._columns = tensor.shape[-1]
        self._matrices, self._rows = math.prod(tensor.shape[:-2]), tensor.shape[-2]
        most_rows = jobs.CHUNK_WEIGHTS // self._columns
        multiple = max(self.row_multiple, rounding.row_multiple, ROW_MULTIPLE if most_rows > ROW_MULTIPLE else 1)
        self._rows_per_chunk = max(1, most_rows // multiple) * multiple
        self._per_matrix = -(-self._rows // self._rows_per_chunk)
        self.chunks = self._per_matrix * self._matrices
        # The tensor of which it reads so many rows at a time.
        self.reads: object = reading_of(tensor), min(self._rows_per_chunk, self._rows)
        self._sums = np.zeros(2)
        self._carried_chunks = 0
        self._grid = SourceGrid.of(tensor)
        self._dtype = stored_dtype(tensor)

    def read(self, chunk: int, file: ShardFile) -> npt.NDArray[np.float32]:
        """Read one chunk of whole rows as float32."""
        first, rows = self._rows_of(chunk)
        count = rows * self._columns
        raw = scratch("values", count * 4)
        self._tensor.read(first * self._columns, count, "F32", raw)
        return raw.view(np.float32)

    def _rows_of(self, chunk: int) -> tuple[int, int]:
        """Return the first row of a chunk, counted through all matrices, and how many there are."""
        matrix, part = divmod(chunk, self._per_matrix)
        count = min(self._rows_per_chunk, self._rows - part * self._rows_per_chunk)
        return matrix * self._rows + part * self._rows_per_chunk, count

    def write(self, chunk: int, values: npt.NDArray[np.float32], file: ShardFile) -> tuple[Doubles, Doubles, bool, Any]:
        """Round the values of one chunk, and write its pieces.

        Returns the sums of squares by group, of the values and of their errors, whether codes are those of the source,
        which decode to the same bits, and what else `_round` found out.

        Raises SourceError if a weight or a scale is not finite.
        """
        matrix, (first, count) = chunk // self._per_matrix, self._rows_of(chunk)
        with np.errstate(over="ignore", invalid="ignore"):  # of what is refused below
            groups, is_carried, about = self._carried_or_rounded(matrix, first, values)
        numbers = (groups.energies, groups.errors, groups.scales, groups.offsets)
        if not all(np.isfinite(array).all() for array in numbers):
            self._refuse_non_finite(first, count)
        name, shape = self._planned.name, self._planned.shape
        for stored_name, offset, data in self._rounding.pieces(name, shape, first_row=first, groups=groups):
            (file.write if data.ndim == 1 else file.write_columns)(stored_name, offset, data)
        return groups.energies, groups.errors, is_carried, about

    def _refuse_non_finite(self, first: int, count: int) -> None:
        """Raise SourceError for rows with a weight that is not finite, or with a scale."""
        advice = "repair the checkpoint, or keep the tensor with a rule"
        if not self._is_original:
            advice = "`pqweights verify` tells whether the folder is damaged"
        at = find_non_finite(self._tensor, first * self._columns, count * self._columns)
        what, where = "finite scales for its weights", f"in rows {first} to {first + count - 1}"
        if at >= 0:
            what, where = "finite weights", f"at {[int(i) for i in np.unravel_index(at, self._tensor.shape)]}"
        raise SourceError(
            f"tensor {self._tensor.name!r}: expected {what}, found a NaN or an infinity {where}; {advice}"
        )

    def _carried_or_rounded(self, matrix: int, first: int, values: npt.NDArray[np.float32]) -> tuple[Groups, bool, Any]:
        """Return the groups of some rows, whether any have codes of the source, and what else `_round` found out."""
        carried = None if self._grid is None else self._grid.groups(self._rounding, first, values)
        if carried is not None:
            return carried, True, None
        recovered = recovered_groups(self._rounding.rule, values, self._dtype)
        if recovered is not None and recovered[1].all():
            return recovered[0], True, None
        groups, about = self._round(matrix, values)
        if recovered is None or not self.carries_groups:
            return groups, False, about
        return merged(groups, *recovered), True, about

    def _round(self, matrix: int, values: npt.NDArray[np.float32]) -> tuple[Groups, Any]:
        """Round some rows of a matrix; also return what `collect` is to know besides the errors of weights."""
        return self._quantized(values), None

    def _quantized(self, values: npt.NDArray[np.float32]) -> Groups:
        """Round rows to codes, and measure their errors; a rule of the runtime's gets 16 bits, as in the runtime."""
        rule = self._rounding.rule
        if rule.name == BEST:
            return rule.quantize(values)
        dtype = rule.scale_dtype if isinstance(rule, GroupRule) else "BF16"
        groups = rule.quantize(to_float32(from_float32(values, dtype), dtype))
        energies = sums_of_squares(values.reshape(groups.codes.shape))
        return replace(groups, energies=energies, errors=_errors(values, groups, rule))

    def collect(self, result: tuple[Doubles, Doubles, bool, Any]) -> None:
        """Add up the errors of a chunk."""
        energies, errors, is_carried, _ = result
        load_backend().add_in_order(self._sums, energies, errors)
        self._carried_chunks += is_carried

    def finish(self) -> TensorRecord | Job:
        """Return the record with the errors as far as they are known."""
        energy, error = self._sums.tolist()
        own = error / energy if energy else 0.0
        total, by_master = own if self._is_original else None, None
        if not self._is_original and self._master_error is not None:
            # The master's error is orthogonal to its weights and, as far as rounding is independent of it, to the error
            # of rounding: the squares add up.
            total = by_master = self._master_error + own * (1 - self._master_error)
        return TensorRecord(
            name=self._planned.name,
            relative_mse=rounded(own),
            energy=rounded(energy),
            total_mse=None if total is None else rounded(total),
            master_mse=None if by_master is None else rounded(by_master),
            rounding={"carried": True} if self._carried_chunks and not error else None,
        )


def _errors(values: npt.NDArray[np.float32], groups: Groups, rule: RoundingRule) -> Doubles:
    """Return the squared errors of codes against other values than they were made from, summed by group."""
    decoded = rule.decode(groups)
    return sums_of_squares(values.reshape(decoded.shape) - decoded)
