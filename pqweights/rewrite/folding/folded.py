"""Folded tensors: the same tensors with factors on their rows and columns, applied in float32 while they are read."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor, OriginalTensor, PlainTensor
from pqweights.common.dtypes import FINITE_RANGES, convert, item_bytes
from pqweights.kernels.factors import multiply
from pqweights.kernels.workers import scratch

Floats = npt.NDArray[np.float32]


@functools.lru_cache(maxsize=64)
def _ones(count: int) -> Floats:
    return np.ones(count, dtype=np.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorFactors:
    """What a tensor is multiplied by.

    rows: one factor for each row of each matrix, [rows of all matrices]; None for none
    columns: one factor for each column, [matrices or 1, columns]; None for none
    values: in place of factors, the values of a whole vector
    """

    rows: Floats | None = None
    columns: Floats | None = None
    values: Floats | None = None

    def of_columns(self, part: _Run, width: int) -> Floats:
        """Return the factors of the columns of a part of a tensor with rows of `width` elements."""
        if self.columns is None:
            return _ones(width)[: part.columns]
        matrix = part.matrix if len(self.columns) > 1 else 0
        return self.columns[matrix, part.column : part.column + part.columns]

    def of_rows(self, part: _Run) -> Floats:
        """Return the factors of the rows of a part of a tensor."""
        return _ones(part.rows) if self.rows is None else self.rows[part.row : part.row + part.rows]

    @property
    def is_nothing(self) -> bool:
        """Whether the tensor stays as it is."""
        return self.rows is None and self.columns is None and self.values is None


class FoldedTensor:
    """A tensor of a folded model. Everything but the values is the original's."""

    def __init__(self, original: LogicalTensor, factors: Callable[[str], TensorFactors]) -> None:
        """Fold a tensor. factors: returns what the tensor of a name is multiplied by, once that is known."""
        self.name, self.shape, self.dtype = original.name, original.shape, original.dtype
        self.plain_dtype, self.parts = original.plain_dtype, original.parts
        self.original, self.factors = original, factors

    @property
    def is_changed(self) -> bool:
        """Whether its values differ from the original's."""
        return not self.factors(self.name).is_nothing

    def read(self, start: int, count: int, dtype: str, out: npt.NDArray[np.uint8]) -> None:
        """Read elements of the original times their factors: float32 products, converted at the end."""
        factors = self.factors(self.name)
        if factors.is_nothing:
            self.original.read(start, count, dtype, out)
            return
        raw = out[: count * 4] if dtype == "F32" else scratch("folded", count * 4)
        values = raw.view(np.float32)
        if factors.values is not None:
            values[:] = factors.values[start : start + count]
        else:
            self._read_multiplied(values, factors, start)
        if dtype != "F32":
            np.clip(values, *FINITE_RANGES.get(dtype, FINITE_RANGES["F32"]), out=values)
            out[: count * item_bytes(dtype)] = convert(raw, "F32", dtype)

    def _read_multiplied(self, values: Floats, factors: TensorFactors, start: int) -> None:
        """Read elements from `start` on, times their factors; what reads them reports infinities."""
        dtype = exact_dtype(self.original)
        raw = values.view(np.uint8) if dtype == "F32" else scratch("unfolded", len(values) * 2)
        self.original.read(start, len(values), dtype, raw)
        size, width = item_bytes(dtype), self.shape[-1]
        height = self.shape[-2] if len(self.shape) > 1 else 1
        for part in _parts(start, len(values), height=height, width=width):
            done, count = part.offset, part.rows * part.columns
            multiply(
                raw[done * size : (done + count) * size],
                dtype,
                columns=factors.of_columns(part, width),
                rows=factors.of_rows(part),
                out=values[done : done + count],
            )


def exact_dtype(tensor: LogicalTensor) -> str:
    """Return the smaller of BF16 and F32 in which a tensor can be read without rounding: decoded ones are float32."""
    stored = tensor.original if isinstance(tensor, OriginalTensor) else tensor
    return "BF16" if isinstance(stored, PlainTensor) and stored.dtype == "BF16" else "F32"


class _Run(NamedTuple):
    """A run of elements: a part of a row, or whole rows of one matrix.

    offset: where it begins among the elements that are read
    matrix, row, column: its first element; rows are numbered through all matrices
    rows, columns: its size
    """

    offset: int
    matrix: int
    row: int
    column: int
    rows: int
    columns: int


def _parts(start: int, count: int, *, height: int, width: int) -> Iterator[_Run]:
    """Yield the runs of elements [start, start + count) of a stack of matrices [height, width]."""
    done = 0
    while done < count:
        row, column = divmod(start + done, width)
        left = count - done
        if column or left < width:
            part = _Run(done, row // height, row, column, 1, min(width - column, left))
        else:
            part = _Run(done, row // height, row, 0, min(height - row % height, left // width), width)
        yield part
        done += part.rows * part.columns


def unfolded(tensor: LogicalTensor) -> LogicalTensor:
    """Return the original of a folded tensor, and any other tensor as it is."""
    return tensor.original if isinstance(tensor, FoldedTensor) else tensor


def digest_of(tensors: Iterable[tuple[str, TensorFactors]]) -> str:
    """Return the sha256 over the names of tensors and what each is multiplied by, sorted by names.

    For each of `rows`, `columns` and `values` that is not all ones, it is over the line `[name, part, shape]`, in JSON,
    and the numbers, float32 and little-endian. docs/format.md, section "pqweights.json", states it.
    """
    digest = hashlib.sha256()
    for name, factors in sorted(tensors, key=lambda pair: pair[0]):
        for part, numbers in (("rows", factors.rows), ("columns", factors.columns), ("values", factors.values)):
            if numbers is None or (part != "values" and (numbers == 1).all()):
                continue
            digest.update(json.dumps([name, part, list(numbers.shape)]).encode() + b"\n")
            digest.update(np.ascontiguousarray(numbers, dtype="<f4").data)
    return digest.hexdigest()
