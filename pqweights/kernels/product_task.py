"""What cpu_products.py is asked to do: limits, and the memory in which a product is described."""

from __future__ import annotations

import ctypes

from pqweights.kernels.attention_task import ATTENTION_KERNELS

# Levels and inputs as integers, at most. A lane of sums takes at most 16 products: 16 * 8191 * 16383 < 2**31.
MOST_LEVEL, MOST_INPUT = 8191, 16383
# Rows of inputs that one call multiplies.
MOST_ROWS = 16
# A thread takes a tile of rows at a time, of about TILE_WEIGHTS weights and no more than TILE_ROWS rows.
TILE_WEIGHTS, TILE_ROWS = 1 << 18, 256
# A small weight is cut into at least this many tiles per thread, so that a slow thread delays the others by one tile.
TILES_PER_THREAD = 4
# Products with fewer weights are left to one thread: waking another would take longer.
LEAST_SHARED = 1 << 17

TASK_KERNELS = (*(f"product_{bits}" for bits in range(2, 9)), "product_f32", *ATTENTION_KERNELS)


class Task(ctypes.Structure):
    """What a kernel reads, 8 bytes each; all threads that work on a task count its tiles together."""

    _fields_ = (
        ("next_tile", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("tile_rows", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("norms", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("has_bias", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("factor", ctypes.c_double),
    )


TASK_SIZE = len(Task._fields_)
