"""Products of packed weights with a few rows of inputs on the CPU: y = W x + b, from the codes themselves.

cpu_products.py has the arithmetic. Here a `Product` keeps what belongs to a weight, and `Inputs` what belongs to rows of
inputs, which several weights may share.
The backend is imported where it is used: commands that only read manifests do without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pqweights.kernels import BLOCK_SIZE, ORTHONORMAL, SIGNS, VALUE_DTYPES, BlockCoding

# Levels and inputs as integers, at most. A lane of sums takes at most 16 products: 16 * 8191 * 16383 < 2**31.
MOST_LEVEL, MOST_INPUT = 8191, 16383
# Rows of inputs that one call multiplies.
MOST_ROWS = 16
# Rows of a weight that a thread takes at a time: about this many weights, and at most so many rows.
TILE_WEIGHTS, TILE_ROWS = 1 << 16, 256
# Products with fewer weights are left to one thread: waking another would take longer.
LEAST_SHARED = 1 << 17

# What a kernel reads, 8 bytes each. The first is the number of the next tile, which all threads share.
TASK = np.dtype(
    [
        ("next_tile", np.int64),
        ("outputs", np.int64),
        ("tile_rows", np.int64),
        ("blocks", np.int64),
        ("rows", np.int64),
        ("codes", np.int64),
        ("norms", np.int64),
        ("levels", np.int64),
        ("inputs", np.int64),
        ("scales", np.int64),
        ("bias", np.int64),
        ("out", np.int64),
        ("dtype", np.int64),
        ("stride", np.int64),
        ("has_bias", np.int64),
        ("factor", np.float64),
    ]
)
TASK_SIZE = len(TASK)
TASK_KERNELS = tuple(f"product_{bits}{kind}" for bits in range(2, 9) for kind in ("", "_f32"))
_NO_AWQ = np.ones(1, dtype=np.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class Inputs:
    """Rows of inputs, ready for products.

    rows, blocks: how many rows there are, and blocks of 128 in each
    dtype: that of the inputs and of the products
    values: [blocks, rows, 128], rotated: i16, or f32 if that is the dtype
    scales: what an integer stands for, f32 [blocks, rows]
    """

    rows: int
    blocks: int
    dtype: str
    values: npt.NDArray[np.int16] | npt.NDArray[np.float32]
    scales: npt.NDArray[np.float32]


def prepare(address: int, *, rows: int, columns: int, dtype: str, coding: BlockCoding, awq: npt.NDArray[np.float32] | None) -> Inputs:
    """Rotate rows of inputs as the blocks of a weight were rotated.

    address: of the inputs, [rows, columns] of the dtype, without gaps; columns are a multiple of 128
    dtype: BF16, F16 or F32
    coding: that of the weight
    awq: the scales by which the columns of the weight are divided, f32 [columns], if there are any
    """
    from pqweights.kernels import cpu

    blocks, whole = columns // BLOCK_SIZE, dtype != "F32"
    values = np.empty(rows * columns, dtype=np.int16 if whole else np.float32)
    scales = np.empty(rows * blocks, dtype=np.float32)
    rotation = int(coding.rotate) + int(coding.rotate and coding.signed)
    cpu.run(
        "prepare",
        address,
        SIGNS.ctypes.data,
        (_NO_AWQ if awq is None else awq).ctypes.data,
        values.ctypes.data,
        scales.ctypes.data,
        rows,
        blocks,
        VALUE_DTYPES[dtype],
        rotation,
        awq is not None,
        whole,
    )
    return Inputs(rows=rows, blocks=blocks, dtype=dtype, values=values, scales=scales)


class Product:
    """A packed weight [outputs, blocks * 128] that multiplies rows of inputs."""

    def __init__(self, codes: npt.NDArray[np.uint8], norms: npt.NDArray[np.uint16], coding: BlockCoding, *, outputs: int, dtype: str) -> None:
        """Keep a weight.

        codes: [outputs * blocks, 16 * bits]
        norms: [outputs * blocks], float16 bit patterns
        dtype: that of inputs and outputs: BF16, F16 or F32
        """
        book, whole = coding.codebook, dtype != "F32"
        levels, factor = level_integers(book.levels) if whole else (padded(book.levels), 1.0)
        exponent = coding.norm_exponent
        self._kept = codes, norms, levels
        self._kernel = f"product_{book.bits}" + ("" if whole else "_f32")
        blocks = len(codes) // outputs
        task = np.zeros((), dtype=TASK)
        task["outputs"], task["blocks"], task["dtype"] = outputs, blocks, VALUE_DTYPES[dtype]
        task["tile_rows"] = max(1, min(TILE_ROWS, TILE_WEIGHTS // (blocks * BLOCK_SIZE)))
        task["codes"], task["norms"], task["levels"] = codes.ctypes.data, norms.ctypes.data, levels.ctypes.data
        task["factor"] = factor * (math.ldexp(1, exponent - 7) if coding.rotate else math.ldexp(ORTHONORMAL, exponent))
        self._task = task
        self._shared = outputs * blocks * BLOCK_SIZE >= LEAST_SHARED

    def multiply(self, inputs: Inputs, *, out: int, stride: int, bias: int | None, threads: int) -> None:
        """Write W x + b for each row of inputs.

        inputs: at most MOST_ROWS rows
        out: the address of the first output; [rows, outputs] of the dtype
        stride: elements between the rows of the output
        bias: the address of the bias, f32 [outputs], if there is one
        threads: how many may work
        """
        from pqweights.kernels import cpu

        task = self._task.copy()
        task["rows"], task["inputs"], task["scales"] = inputs.rows, inputs.values.ctypes.data, inputs.scales.ctypes.data
        task["out"], task["stride"], task["has_bias"] = out, stride, bias is not None
        task["bias"] = bias or inputs.scales.ctypes.data
        cpu.run_task(self._kernel, task.ctypes.data, threads if self._shared else 1)


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
