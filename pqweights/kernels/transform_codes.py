"""Transform codes on the CPU, in the threads of torch: the levels of codes, and the codes of numbers.

native/restore_levels.cpp and native/nearest_levels.cpp have the arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pqweights.kernels import native

Floats = npt.NDArray[np.float32]

# Room for the levels of each width.
LEVELS_OF_WIDTH = 256
# Where the thresholds begin that come into question for a bit of a code, the highest first, each in whole vectors.
STEP_STARTS = (0, 16, 32, 48, 64, 80, 112, 176)
THRESHOLDS_OF_WIDTH = 176 + 128
# The most coefficients of a vector whose levels are restored.
MOST_COEFFICIENTS = 1024
# Fewer numbers are left to one thread.
LEAST_SHARED = 1 << 16
# A tile of codes has at least this many tokens, and one of numbers has about so many.
LEAST_TILE, TILE_NUMBERS = 32, 1 << 12


# Levels, [9, 256] f32, and thresholds of codes, [9, 304] f32, by their bits: for each bit of a code the thresholds that
# come into question once the higher bits are known.
CodeTables = tuple[native.Array, native.Array]


def code_tables(books: Mapping[int, tuple[Floats, Floats]]) -> CodeTables:
    """Return the tables of some widths.

    books: bits, 1 to 8 -> ascending levels, [2**bits], and the thresholds between them, [2**bits - 1]
    """
    of_levels, of_thresholds = (
        np.zeros((9, LEVELS_OF_WIDTH), np.float32),
        np.zeros((9, THRESHOLDS_OF_WIDTH), np.float32),
    )
    for bits, (levels, thresholds) in books.items():
        of_levels[bits, : 1 << bits] = levels
        for step, start in enumerate(STEP_STARTS[:bits]):
            apart = 1 << (bits - step)
            of_thresholds[bits, start : start + (1 << step)] = thresholds[apart // 2 - 1 :: apart]
    return native.array(of_levels, "f4", of_levels.size), native.array(of_thresholds, "f4", of_thresholds.size)


def scaled_levels(
    codes: torch.Tensor, factors: torch.Tensor, runs: Sequence[tuple[int, int]], tables: CodeTables
) -> torch.Tensor:
    """Return level * factor for the codes of vectors whose coefficients have different widths.

    codes: [batch, heads, tokens, bytes] u8, the packed codes of one run after the other; there may be gaps between the
        tokens of one head and of the next
    factors: [batch, heads, tokens] f16
    runs: how many coefficients each run has, a multiple of 8, and their bits, 1 to 8; up to 1024 coefficients in all
    tables: of the widths in `runs`

    Returns [batch, heads, tokens, coefficients] f32, the same bits for any number of threads. Raises ValueError for
    tensors that do not fit together.
    """
    batch, heads, tokens, size = codes.shape
    used = _coefficients(runs)
    if used > MOST_COEFFICIENTS:
        raise ValueError(f"expected {MOST_COEFFICIENTS} coefficients at most, found {runs}")
    if size != sum(count * bits // 8 for count, bits in runs) or factors.shape != codes.shape[:3]:
        raise ValueError(f"expected codes of {runs} and a factor for each, found {codes.shape} and {factors.shape}")
    if factors.dtype != torch.float16:
        raise ValueError(f"expected factors of torch.float16, found {factors.dtype}")
    out = torch.empty((batch, heads, tokens, used), dtype=torch.float32, device="cpu")
    codes_from, head_bytes = _heads(codes.flatten(0, 1), (size, 1))
    factors_from, head_factors = _heads(factors.flatten(0, 1), (1,))
    arrays = (
        native.array(codes_from, "u1", codes_from.numel()),
        native.array(factors_from, "u2", factors_from.numel()),
        _runs(tuple(runs)),
        tables[0],
        native.array(out, "f4", out.numel(), written=True),
    )
    if out.numel() == 0:
        return out
    threads = _threads(out.numel())
    tile = native.tile_length(tokens, heads=batch * heads, threads=threads, least=LEAST_TILE)
    numbers = (batch * heads, tokens, head_bytes, head_factors, len(runs), tile)
    native.call("restore_levels", native.counter(), *arrays, *numbers, threads=threads)
    return out


def nearest(
    values: torch.Tensor, runs: Sequence[tuple[int, int]], tables: CodeTables
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of numbers, the count of thresholds that are not above them, and the levels of the codes.

    values: [..., size] f32 on the CPU
    runs: how many of the `size` numbers a run has, a multiple of 8, and the bits of their codes; `size` in all
    tables: of the widths in `runs`

    Returns u8 and f32, both of the shape of `values`. Raises ValueError for arguments that do not fit together.
    """
    size = values.shape[-1]
    if _coefficients(runs) != size:
        raise ValueError(f"expected runs of {size} numbers in all, found {runs}")
    values = values.detach().contiguous()
    codes, levels = torch.empty_like(values, dtype=torch.uint8), torch.empty_like(values)
    of_levels, of_thresholds = tables
    arrays = (
        native.array(values, "f4", values.numel()),
        _runs(tuple(runs)),
        of_thresholds,
        of_levels,
        native.array(codes, "u1", values.numel(), written=True),
        native.array(levels, "f4", values.numel(), written=True),
    )
    if values.numel() == 0:
        return codes, levels
    numbers = (values.numel() // size, size, len(runs), -(-TILE_NUMBERS // size))
    native.call("nearest_levels", native.counter(), *arrays, *numbers, threads=_threads(values.numel()))
    return codes, levels


def _coefficients(runs: Sequence[tuple[int, int]]) -> int:
    """Return how many coefficients runs have in all, if there is a kernel for them."""
    if any(count % 8 or count <= 0 or not 1 <= bits <= 8 for count, bits in runs):
        raise ValueError(f"expected runs of multiples of 8 with 1 to 8 bits, found {runs}")
    return sum(count for count, _ in runs)


@functools.lru_cache
def _runs(runs: tuple[tuple[int, int], ...]) -> native.Array:
    return native.array(np.array(runs, dtype=np.int64), "i8", 2 * len(runs))


def _heads(tensor: torch.Tensor, strides: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """Return all memory from the first head of [heads, tokens, ...] to the last one, and from one head to the next.

    strides: those within a head, without gaps; a copy is made of a tensor with others
    """
    if tensor.stride()[1:] != strides:
        tensor = tensor.contiguous()
    heads, apart = len(tensor), tensor.stride(0)
    count = (heads - 1) * apart + tensor[0].numel() if tensor.numel() else 0
    return tensor.as_strided((count,), (1,)), apart


def _threads(numbers: int) -> int:
    return torch.get_num_threads() if numbers >= LEAST_SHARED else 1
