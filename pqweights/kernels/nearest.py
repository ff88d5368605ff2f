"""The nearest levels of numbers on the CPU, in the threads of torch; cpu_nearest.py has the arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from pqweights.kernels import cpu
from pqweights.kernels.attention_task import NEAREST_KERNEL, NearestTask
from pqweights.kernels.code_tables import CodeTables

# Fewer numbers are left to one thread, and a tile has about so many.
LEAST_SHARED, TILE_NUMBERS = 1 << 16, 1 << 12


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
    fits = sum(count for count, _ in runs) == size
    if not fits or any(count % 8 or count <= 0 or not 1 <= bits <= 8 for count, bits in runs):
        raise ValueError(f"expected runs of multiples of 8 with 1 to 8 bits, {size} in all, found {runs}")
    if values.dtype != torch.float32 or not values.is_cpu:
        raise ValueError(f"expected float32 on the CPU, found {values.dtype} on {values.device.type}")
    values = values.detach().contiguous()
    codes, levels = torch.empty_like(values, dtype=torch.uint8), torch.empty_like(values)
    if values.numel() == 0:
        return codes, levels
    numbers = (ctypes.c_int64 * (2 * len(runs)))(*(number for run in runs for number in run))
    of_tables = (tables.thresholds.ctypes.data, tables.levels.ctypes.data)
    task = NearestTask(
        0, values.numel() // size, size, -(-TILE_NUMBERS // size), len(runs),
        ctypes.addressof(numbers), values.data_ptr(), *of_tables, codes.data_ptr(), levels.data_ptr(),
    )  # fmt: skip
    threads = torch.get_num_threads() if values.numel() >= LEAST_SHARED else 1
    cpu.run_task(NEAREST_KERNEL, ctypes.addressof(task), threads)
    return codes, levels
