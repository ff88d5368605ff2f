"""Folded tensors: the same tensors with factors on their rows and columns, applied in float32 while they are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint import scales
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.dtypes import FINITE_RANGES, convert, item_bytes
from pqweights.folding import turning
from pqweights.folding.turning import Turn, TurnedFiles, write_at
from pqweights.kernels.workers import scratch

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorFactors:
    """What a tensor is multiplied by.

    rows: one factor for each row of each matrix, [rows of all matrices]; None for none
    columns: one factor for each column, [matrices or 1, columns]; None for none
    values: in place of factors, the values of a whole vector
    turn: by what the products are turned
    files: where large turned tensors are kept
    """

    rows: Floats | None = None
    columns: Floats | None = None
    values: Floats | None = None
    turn: Turn | None = None
    files: TurnedFiles | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether the tensor stays as it is."""
        return self.rows is None and self.columns is None and self.values is None and self.turn is None


@dataclass(frozen=True, eq=False, kw_only=True)
class FoldedTensor:
    """A tensor of a folded model. Everything but the values is the original's.

    original: the tensor as it was
    factors: returns what it is multiplied by, once that is known
    """

    original: LogicalTensor
    factors: Callable[[str], TensorFactors]

    @property
    def name(self) -> str:
        """The name of the original."""
        return self.original.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the original."""
        return self.original.shape

    @property
    def dtype(self) -> str:
        """The dtype of the original."""
        return self.original.dtype

    @property
    def plain_dtype(self) -> str:
        """The dtype in which the original is stored plainly."""
        return self.original.plain_dtype

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The stored tensors of the original."""
        return self.original.parts

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
        elif factors.turn is not None:
            self._read_turned(values, factors, factors.turn, start)
        else:
            self.original.read(start, count, "F32", raw)
            self._multiply(values, factors, start)
        if dtype != "F32":
            np.clip(values, *FINITE_RANGES.get(dtype, FINITE_RANGES["F32"]), out=values)
            out[: count * item_bytes(dtype)] = convert(raw, "F32", dtype)

    def _read_turned(self, values: Floats, factors: TensorFactors, turn: Turn, start: int) -> None:
        """Read elements that are turned: with the blocks of rows and columns that they are in."""
        columns = self.shape[-1]
        if turn.height * columns > turning.MOST_WEIGHTS:
            assert factors.files is not None
            factors.files.read(self.name, lambda file: self._write_turned(file, factors, turn), start, values)
            return
        first = start // columns // turn.height * turn.height
        rows = math.prod(self.shape[:-1])
        last = min(rows, -(-(start + len(values)) // columns // turn.height) * turn.height)
        block = np.empty((last - first) * columns, dtype=np.float32)
        self.original.read(first * columns, len(block), "F32", block.view(np.uint8))
        self._multiply(block, factors, first * columns)
        turn.apply(block.reshape(-1, columns), first)
        skip = start - first * columns
        values[:] = block[skip : skip + len(values)]

    def _write_turned(self, file: int, factors: TensorFactors, turn: Turn) -> None:
        """Write the whole turned tensor to a file, a strip of columns of a block of rows at a time."""
        columns, rows = self.shape[-1], math.prod(self.shape[:-1])
        step = turn.columns or 1
        width = min(columns, max(step, turning.STRIP_WEIGHTS // turn.height // step * step))
        for first in range(0, rows, turn.height):
            height = min(turn.height, rows - first)
            for column in range(0, columns, width):
                count = min(width, columns - column)
                strip = np.empty((height, count), dtype=np.float32)
                for row in range(height):
                    start = (first + row) * columns + column
                    self.original.read(start, count, "F32", strip[row].view(np.uint8))
                    self._multiply(strip[row], factors, start)
                turn.apply(strip, first)
                for row in range(height):
                    write_at(file, strip[row], ((first + row) * columns + column) * 4)

    def _multiply(self, values: Floats, factors: TensorFactors, start: int) -> None:
        """Multiply elements from `start` on by their factors, in place; what reads them reports infinities."""
        with np.errstate(over="ignore"):
            self._multiply_all(values, factors, start)

    def _multiply_all(self, values: Floats, factors: TensorFactors, start: int) -> None:
        if factors.columns is not None:
            shape = self.shape if len(self.shape) > 1 else (1, *self.shape)
            columns = factors.columns
            if len(shape) == 3 and len(columns) == 1:
                shape = (shape[0] * shape[1], shape[2])  # all matrices have the same factors
            scales.multiply(values, columns, start=start, shape=shape)
        if factors.rows is not None:
            _multiply_rows(values, factors.rows, start=start, columns=self.shape[-1])


def unfolded(tensor: LogicalTensor) -> LogicalTensor:
    """Return the original of a folded tensor, and any other tensor as it is."""
    return tensor.original if isinstance(tensor, FoldedTensor) else tensor


def _multiply_rows(values: Floats, rows: Floats, *, start: int, columns: int) -> None:
    """Multiply elements of a row-major weight by the factors of their rows, in place."""
    row, skip = divmod(start, columns)
    done = 0
    if skip:
        done = min(columns - skip, len(values))
        values[:done] *= rows[row]
        row += 1
    whole = (len(values) - done) // columns
    if whole:
        values[done : done + whole * columns].reshape(whole, columns)[:] *= rows[row : row + whole, None]
        done, row = done + whole * columns, row + whole
    if done < len(values):
        values[done:] *= rows[row]
