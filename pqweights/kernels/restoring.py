"""Levels of transform codes on the CPU, in the threads of torch; cpu_restoring.py has the arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from pqweights.kernels import cpu
from pqweights.kernels.attention_task import (
    MOST_COEFFICIENTS,
    RESTORING_KERNEL,
    RestoringTask,
    tile_length,
)
from pqweights.kernels.code_tables import CodeTables

# Fewer coefficients are left to one thread, and a tile has at least this many tokens.
LEAST_SHARED, LEAST_TILE = 1 << 16, 32


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
    used = sum(count for count, _ in runs)
    if any(count % 8 or count <= 0 or not 1 <= bits <= 8 for count, bits in runs) or used > MOST_COEFFICIENTS:
        raise ValueError(
            f"expected runs of multiples of 8 with 1 to 8 bits, {MOST_COEFFICIENTS} at most in all, found {runs}"
        )
    if size != sum(count * bits // 8 for count, bits in runs) or factors.shape != codes.shape[:3]:
        raise ValueError(f"expected codes of {runs} and a factor for each, found {codes.shape} and {factors.shape}")
    _check("codes", codes, torch.uint8)
    _check("factors", factors, torch.float16)
    out = torch.empty((batch, heads, tokens, used), dtype=torch.float32, device="cpu")
    if out.numel() == 0:
        return out
    codes, factors = codes.flatten(0, 1), factors.flatten(0, 1)
    if codes.stride()[1:] != (size, 1):
        codes = codes.contiguous()
    if factors.stride(1) != 1:
        factors = factors.contiguous()
    threads = torch.get_num_threads() if out.numel() >= LEAST_SHARED else 1
    tile = tile_length(tokens, heads=batch * heads, threads=threads, least=LEAST_TILE)
    numbers = (ctypes.c_int64 * (2 * len(runs)))(*(number for run in runs for number in run))
    task = RestoringTask(
        0, batch * heads, tokens, used, size, tile, codes.stride(0), factors.stride(0), len(runs),
        ctypes.addressof(numbers), codes.data_ptr(), factors.data_ptr(), tables.levels.ctypes.data, out.data_ptr(),
    )  # fmt: skip
    cpu.run_task(RESTORING_KERNEL, ctypes.addressof(task), threads)
    return out


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or not tensor.is_cpu:
        raise ValueError(f"expected {name} of {dtype} on the CPU, found {tensor.dtype} on {tensor.device.type}")
