"""Products of packed weights with a few rows of inputs on the CPU: y = W x + b, from the codes themselves.

native/products.cpp has the arithmetic. A `Product` keeps what belongs to a weight; `PreparedInputs` keeps rows of
inputs, which several weights may share.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.kernels import BLOCK_SIZE, SIGNS, VALUE_DTYPES, BlockCoding, native
from pqweights.kernels.workers import pageable

# Levels and inputs as integers, at most: see native/products.cpp.
MOST_LEVEL, MOST_INPUT = 8191, 16383
# Rows of inputs that one call multiplies.
MOST_ROWS = 16
# A thread takes a tile of rows at a time, of about TILE_WEIGHTS weights and no more than TILE_ROWS rows.
TILE_WEIGHTS, TILE_ROWS = 1 << 18, 256
# A small weight is cut into at least this many tiles per thread, so that a slow thread delays the others by one tile.
TILES_PER_THREAD = 4
# Products with fewer weights are left to one thread: waking another would take longer.
LEAST_SHARED = 1 << 17

_SIGNS = native.array(SIGNS, np.float32, BLOCK_SIZE)


@dataclass(frozen=True)
class InputBasis:
    """What inputs go through before they meet the codes of a weight.

    signed: whether coordinates are flipped by SIGNS before the rotation
    awq: the bytes of the f32 scales by which they are divided; empty without scales
    """

    signed: bool
    awq: bytes

    @functools.cached_property
    def factors(self) -> tuple[native.Array | None, native.Array | None]:
        """The scales and the signs, where there are such."""
        awq = np.frombuffer(self.awq, dtype=np.float32)
        scales = native.array(awq, np.float32, len(awq)) if self.awq else None
        return scales, _SIGNS if self.signed else None


class PreparedInputs:
    """Rows of inputs, ready for products, in memory that the next ones may take over.

    rows, columns: how many there are
    basis: that in which they are
    arrays: i16 [blocks, rows, 128], in an order of the processor's own, and what a one stands for, f32 [rows, blocks];
        or f32 [blocks, rows, 128] alone. There may be room for more.
    """

    def __init__(self) -> None:
        self.rows, self.columns = 0, 0
        self.basis: InputBasis | None = None
        self.arrays: tuple[native.Array, ...] = ()
        self._written: tuple[native.Array, ...] = ()  # the same arrays

    def prepare(self, inputs: Any, *, dtype: str, basis: InputBasis) -> None:
        """Bring rows of inputs into the basis of a weight's codes.

        inputs: [rows, columns] of the dtype, a tensor or an array, in which u16 stand for BF16 and F16
        dtype: BF16, F16 or F32

        Raises ValueError for columns that are not whole blocks or do not fit the basis, and for inputs of other types.
        """
        (rows, columns), whole = inputs.shape, dtype != "F32"
        if columns % BLOCK_SIZE or len(basis.awq) not in (0, 4 * columns):
            raise ValueError(
                f"expected a multiple of {BLOCK_SIZE} columns, with as many scales or none, found {columns} with "
                f"{len(basis.awq) // 4}"
            )
        given = native.array(inputs, np.uint16 if whole else np.float32, rows * columns)
        if len(self.arrays) != 1 + whole or self.arrays[0].size < rows * columns:
            self._make_room(rows * columns, whole)
        self.rows, self.columns, self.basis = rows, columns, None  # until they are there
        sizes = rows, columns // BLOCK_SIZE, *((VALUE_DTYPES[dtype],) if whole else ())
        native.call("prepare" if whole else "prepare_f32", given, *basis.factors, *self._written, *sizes)
        self.basis = basis

    def _make_room(self, count: int, whole: bool) -> None:
        # Aligned, because every load of a vector would else touch two cache lines.
        kinds = [("i2", count), ("f4", count // BLOCK_SIZE)] if whole else [("f4", count)]
        memory = [(pageable(size * int(kind[1])).view(kind), kind, size) for kind, size in kinds]
        self.arrays = tuple(native.array(*each) for each in memory)
        self._written = tuple(native.array(*each, written=True) for each in memory)


class Product:
    """A packed weight [outputs, blocks * 128] that multiplies rows of inputs.

    basis: that in which it takes its inputs
    """

    def __init__(
        self,
        codes: npt.NDArray[np.uint8],
        norms: npt.NDArray[np.uint16],
        coding: BlockCoding,
        *,
        outputs: int,
        dtype: str,
        awq: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Keep a weight.

        codes: [outputs * blocks, 16 * bits]
        norms: [outputs * blocks], float16 bit patterns
        dtype: that of inputs and outputs: BF16, F16 or F32
        awq: the scales by which the columns of the decoded weight are divided, f32 [columns]

        Raises ValueError for arrays that do not fit together.
        """
        self.basis = InputBasis(coding.signed, b"" if awq is None else awq.tobytes())
        book, blocks = coding.codebook, len(codes) // outputs
        if len(norms) != outputs * blocks:
            raise ValueError(f"expected {outputs} rows of whole blocks with a norm each, found {len(norms)} norms")
        whole, exponent = dtype != "F32", coding.norm_exponent
        levels, factor = level_integers(book.levels) if whole else (book.levels, 1.0)
        table: Any = np.tile(levels, max(1, 32 // len(levels)))  # the smallest look-up takes 32 entries
        self._factor = math.ldexp(factor, exponent - 7)
        self._weight = (
            native.array(codes, np.uint8, len(norms) * 16 * book.bits),
            native.array(norms, np.uint16, len(norms)),
            native.array(table, np.int16 if whole else np.float32, max(32, 1 << book.bits)),
        )
        self._outputs, self._blocks, self._bits = outputs, blocks, book.bits
        self._kernel = "product" if whole else "product_f32"
        self._element = "u2" if whole else "f4"
        self._dtype = (VALUE_DTYPES[dtype],) if whole else ()
        self._tile_rows = max(1, min(TILE_ROWS, TILE_WEIGHTS // (blocks * BLOCK_SIZE)))
        self._shared = outputs * blocks * BLOCK_SIZE >= LEAST_SHARED

    def multiply(
        self, inputs: PreparedInputs, *, out: Any, bias: Any, factor: float, threads: int, column: int = 0
    ) -> None:
        """Write W x + b for each row of inputs.

        inputs: at most MOST_ROWS rows, in the basis of this weight
        out: [rows, stride] of the dtype, a tensor or an array as for inputs; columns from `column` on are written
        bias: f32 [stride], of which the same columns are added, or None
        factor: by what W is multiplied
        threads: how many may work

        Raises ValueError for inputs that are not such rows of this weight's columns, and for too small an output.
        """
        rows, columns, stride = inputs.rows, self._blocks * BLOCK_SIZE, out.shape[-1]
        in_basis = inputs.basis is self.basis or inputs.basis == self.basis
        if not 0 < rows <= MOST_ROWS or inputs.columns != columns or not in_basis:
            raise ValueError(
                f"expected 1 to {MOST_ROWS} rows of {columns} inputs in the basis of the weight, found {rows} "
                f"rows of {inputs.columns}{'' if in_basis else ' in another basis'}"
            )
        if not 0 <= column <= stride - self._outputs:
            raise ValueError(f"expected room for {self._outputs} outputs from column {column} on, found {stride}")
        threads = threads if self._shared else 1
        added = None if bias is None else native.array(bias, np.float32, stride)
        written = native.array(out, self._element, rows * stride, written=True)
        tile_rows = min(self._tile_rows, -(-self._outputs // (TILES_PER_THREAD * threads)))
        arrays = native.counter(), *self._weight, *inputs.arrays, added, written
        sizes = self._outputs, tile_rows, self._blocks, rows, self._bits, column, stride
        native.call(self._kernel, *arrays, *sizes, self._factor * factor, *self._dtype, threads=threads)


def level_integers(levels: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int16], float]:
    """Return levels as i16, and the factor that turns these back into levels."""
    largest = float(np.abs(levels).max())
    return np.rint(levels.astype(np.float64) * (MOST_LEVEL / largest)).astype(np.int16), largest / MOST_LEVEL
