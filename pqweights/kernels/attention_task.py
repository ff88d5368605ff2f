"""What the kernels for packed keys and values are asked to do: limits, and the memory that describes a call."""

from __future__ import annotations

import ctypes

# Rows of queries or weights that one call takes, and the largest head.
MOST_ROWS, MOST_SIZE = 16, 256
# Tokens in a group of polar-rope codes, whose bytes lie side by side.
GROUP = 32
# Widths of angles and radii that have a kernel.
POLAR_WIDTHS = ((4, 4), (4, 2))
# Entries of look-up tables as integers, at most: two signed bytes, of which the higher one counts 256.
MOST_ENTRY = 127 * 256 + 127
# Tiles are cut so that each thread gets at least this many, and a slow one delays the others by one tile.
TILES_PER_THREAD = 4
# Making the tables of a query costs as much as some groups, so a tile has at least this many.
LEAST_TILE = 16
# Tokens of a tile of values. It does not depend on the threads, and so neither do sums.
VALUE_TILE = 1024
# Calls with fewer look-ups are left to one thread: waking another would take longer.
LEAST_SHARED = 1 << 19

POLAR_KERNELS = tuple(f"polar_scores_{angle}{radius}" for angle, radius in POLAR_WIDTHS)
# Widths of token-wise codes that have a kernel of their own; others take that of the last.
TOKEN_WIDTHS = (2, 3, 4, 8)
VALUE_KERNELS = tuple(f"weighted_values_{bits}" for bits in TOKEN_WIDTHS)
HADAMARD_KERNELS = tuple(f"hadamard_scores_{bits}" for bits in TOKEN_WIDTHS)
RESTORING_KERNEL, NEAREST_KERNEL = "restore_levels", "nearest_levels"
ATTENTION_KERNELS = (*POLAR_KERNELS, *VALUE_KERNELS, *HADAMARD_KERNELS, RESTORING_KERNEL, NEAREST_KERNEL)
# Room for the levels of each width of transform codes.
LEVELS_OF_WIDTH = 256
# Where the thresholds begin that come into question for a bit of a code, the highest first, each in whole vectors.
STEP_STARTS = (0, 16, 32, 48, 64, 80, 112, 176)
THRESHOLDS_OF_WIDTH = 176 + 128
# The most coefficients of a vector whose levels are restored.
MOST_COEFFICIENTS = 1024


class PolarTask(ctypes.Structure):
    """What a kernel of POLAR_KERNELS reads, 8 bytes each; all threads that work on a task count its tiles together.

    Arrays are those of `attention.polar_rope_scores`, with scales in float32.
    """

    _fields_ = (
        ("next_tile", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("pairs", ctypes.c_int64),
        ("tile_groups", ctypes.c_int64),
        ("queries", ctypes.c_void_p),
        ("angles", ctypes.c_void_p),
        ("radii", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("pair_step", ctypes.c_int64),  # from the first coordinate of a pair to that of the next one
        ("pair_offset", ctypes.c_int64),  # from the first coordinate of a pair to its second one
        ("chunk_groups", ctypes.c_int64),
    )


class TokenTask(ctypes.Structure):
    """What kernels of VALUE_KERNELS and HADAMARD_KERNELS read, in the same way.

    Arrays are those of `attention.weighted_values` and `attention.hadamard_scores`; an address may be None.
    """

    _fields_ = (
        ("next_tile", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("tile_tokens", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),  # weights or queries
        ("out", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),  # or norms
        ("sums", ctypes.c_void_p),  # of values: room for f32 [heads, tiles, rows, size]
        ("finished", ctypes.c_void_p),  # of values: how many tiles of a head are done, i64 [heads], zeros
        ("lows", ctypes.c_void_p),
    )


class RestoringTask(ctypes.Structure):
    """What the kernel RESTORING_KERNEL reads, in the same way. Arrays are those of `restoring.scaled_levels`."""

    _fields_ = (
        ("next_tile", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("used", ctypes.c_int64),  # coefficients of a token
        ("stride", ctypes.c_int64),  # bytes of a token
        ("tile_tokens", ctypes.c_int64),
        ("head_bytes", ctypes.c_int64),  # from the codes of one head to those of the next
        ("head_factors", ctypes.c_int64),
        ("run_count", ctypes.c_int64),
        ("runs", ctypes.c_void_p),  # i64 [runs, 2]: coefficients and bits
        ("codes", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class NearestTask(ctypes.Structure):
    """What the kernel NEAREST_KERNEL reads, in the same way. Arrays are those of `nearest.nearest`."""

    _fields_ = (
        ("next_tile", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("tile_rows", ctypes.c_int64),
        ("run_count", ctypes.c_int64),
        ("runs", ctypes.c_void_p),  # i64 [runs, 2]: numbers and bits
        ("values", ctypes.c_void_p),
        ("thresholds", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


POLAR_TASK_SIZE, TOKEN_TASK_SIZE = len(PolarTask._fields_), len(TokenTask._fields_)
RESTORING_TASK_SIZE, NEAREST_TASK_SIZE = len(RestoringTask._fields_), len(NearestTask._fields_)


def tile_length(items: int, *, heads: int, threads: int, least: int) -> int:
    """Return into runs of how many items those of each head are cut, `least` or more."""
    tiles = -(-TILES_PER_THREAD * threads // heads)
    return max(least, -(-items // tiles))
