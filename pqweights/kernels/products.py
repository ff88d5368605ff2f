"""Products of packed weights with a few rows of inputs on the CPU: y = W x + b, from the codes themselves.

cpu_products.py has the arithmetic. A `Product` keeps what belongs to a weight; `PreparedInputs` keeps rows of inputs,
which several weights may share.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.buffers import pageable
from pqweights.kernels import BLOCK_SIZE, ORTHONORMAL, SIGNS, VALUE_DTYPES, BlockCoding, cpu
from pqweights.kernels.product_task import (
    LEAST_SHARED,
    MOST_LEVEL,
    MOST_ROWS,
    TILE_ROWS,
    TILE_WEIGHTS,
    TILES_PER_THREAD,
    Task,
)

_NO_AWQ = np.ones(1, dtype=np.float32)
_SIGNS_ADDRESS, _NO_AWQ_ADDRESS = SIGNS.ctypes.data, _NO_AWQ.ctypes.data


@dataclass(frozen=True)
class InputBasis:
    """What inputs go through before they meet the codes of a weight.

    rotation: 0 for none, 1 for Hadamard, 2 for Hadamard with signs
    awq: the bytes of the f32 scales by which they are divided; empty without scales
    """

    rotation: int
    awq: bytes

    @functools.cached_property
    def awq_address(self) -> int:
        """Where the scales lie."""
        return np.frombuffer(self.awq, dtype=np.float32).ctypes.data if self.awq else _NO_AWQ_ADDRESS


class PreparedInputs:
    """Rows of inputs, ready for products, in memory that the next ones may take over.

    rows, columns: how many there are
    basis: that in which they are
    values: the address of [blocks, rows, 128], i16 or f32
    scales: the address of what an integer stands for, f32 [blocks, rows]
    """

    def __init__(self) -> None:
        self.rows, self.columns, self.values, self.scales = 0, 0, 0, 0
        self.basis: InputBasis | None = None
        self.memory: tuple[npt.NDArray[Any], ...] = ()
        self._room = 0

    def prepare(self, address: int, *, rows: int, columns: int, dtype: str, basis: InputBasis) -> None:
        """Bring rows of inputs into the basis of a weight's codes.

        address: of the inputs, [rows, columns] of the dtype, without gaps; columns are a multiple of 128
        dtype: BF16, F16 or F32

        Raises ValueError for columns that do not fit the basis.
        """
        if columns % BLOCK_SIZE or len(basis.awq) not in (0, 4 * columns):
            raise ValueError(
                f"expected a multiple of {BLOCK_SIZE} columns, with as many scales or none, found {columns} with "
                f"{len(basis.awq) // 4}"
            )
        if rows * columns > self._room:
            # Aligned, because every load of a vector would else touch two cache lines.
            self.memory = values, scales = pageable(rows * columns * 4), pageable(rows * columns // BLOCK_SIZE * 4)
            self.values, self.scales, self._room = values.ctypes.data, scales.ctypes.data, rows * columns
        self.rows, self.columns, self.basis = rows, columns, None  # until they are there
        cpu.run(
            "prepare",
            address,
            _SIGNS_ADDRESS,
            basis.awq_address,
            self.values,
            self.scales,
            rows,
            columns // BLOCK_SIZE,
            VALUE_DTYPES[dtype],
            basis.rotation,
            bool(basis.awq),
            dtype != "F32",
        )
        self.basis = basis


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
        rotation = int(coding.rotate) + int(coding.rotate and coding.signed)
        self.basis = InputBasis(rotation, b"" if awq is None else awq.tobytes())
        book, whole, blocks = coding.codebook, dtype != "F32", len(codes) // outputs
        if len(norms) != outputs * blocks:
            raise ValueError(f"expected {outputs} rows of whole blocks with a norm each, found {len(norms)} norms")
        levels, factor = level_integers(book.levels) if whole else (padded(book.levels), 1.0)
        exponent = coding.norm_exponent
        self._kept = codes, norms, levels
        self._kernel = f"product_{book.bits}" if whole else "product_f32"
        self._task = Task(
            outputs=outputs,
            tile_rows=max(1, min(TILE_ROWS, TILE_WEIGHTS // (blocks * BLOCK_SIZE))),
            blocks=blocks,
            codes=cpu.address(codes, np.uint8, len(norms) * 16 * book.bits),
            norms=cpu.address(norms, np.uint16, len(norms)),
            levels=levels.ctypes.data,
            dtype=VALUE_DTYPES[dtype],
            bits=book.bits,
            factor=factor * (math.ldexp(1, exponent - 7) if coding.rotate else math.ldexp(ORTHONORMAL, exponent)),
        )
        self._shared = outputs * blocks * BLOCK_SIZE >= LEAST_SHARED

    def multiply(
        self, inputs: PreparedInputs, *, out: int, stride: int, bias: int | None, factor: float, threads: int
    ) -> None:
        """Write W x + b for each row of inputs.

        inputs: at most MOST_ROWS rows, in the basis of this weight
        out: the address of the first output; [rows, outputs] of the dtype
        stride: elements between the rows of the output
        bias: the address of the bias, f32 [outputs], if there is one
        factor: by what W is multiplied
        threads: how many may work

        Raises ValueError for inputs that are not such rows of this weight's columns.
        """
        columns = self._task.blocks * BLOCK_SIZE
        if not 0 < inputs.rows <= MOST_ROWS or inputs.columns != columns or inputs.basis != self.basis:
            raise ValueError(
                f"expected 1 to {MOST_ROWS} rows of {columns} inputs in the basis of the weight, found {inputs.rows} "
                f"rows of {inputs.columns}{'' if inputs.basis == self.basis else ' in another basis'}"
            )
        threads = threads if self._shared else 1
        task = Task.from_buffer_copy(self._task)
        task.tile_rows = min(task.tile_rows, -(-task.outputs // (TILES_PER_THREAD * threads)))
        task.rows, task.inputs, task.scales = inputs.rows, inputs.values, inputs.scales
        task.out, task.stride = out, stride
        task.has_bias, task.bias = bias is not None, bias or inputs.scales
        task.factor *= factor
        cpu.run_task(self._kernel, ctypes.addressof(task), threads)


def level_integers(levels: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int16], float]:
    """Return levels as i16, repeated up to 32 entries, and the factor that turns these back into levels."""
    largest = float(np.abs(levels).max())
    whole = np.rint(levels.astype(np.float64) * (MOST_LEVEL / largest)).astype(np.int16)
    return np.tile(whole, max(1, 32 // len(whole))), largest / MOST_LEVEL


def padded(levels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the levels, followed by zeros up to the 32 entries that the smallest look-up takes."""
    result = np.zeros(max(32, len(levels)), dtype=np.float32)
    result[: len(levels)] = levels
    return result
