"""The nearest levels of numbers on the CPU, in the threads of torch; cpu_nearest.py has the arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from pqweights.kernels import cpu
from pqweights.kernels.attention_task import (
    LEVELS_OF_WIDTH,
    NEAREST_KERNEL,
    STEP_STARTS,
    THRESHOLDS_OF_WIDTH,
    NearestTask,
)

# Fewer numbers are left to one thread, and a tile has about so many.
LEAST_SHARED, TILE_NUMBERS = 1 << 16, 1 << 12


class Codebooks:
    """Levels and thresholds of some widths, as the kernel reads them.

    books: bits, 1 to 8 -> ascending levels, [2**bits] f32, and the thresholds between them, [2**bits - 1] f32
    """

    def __init__(self, books: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.levels = torch.zeros(9, LEVELS_OF_WIDTH)
        self.thresholds = torch.zeros(9, THRESHOLDS_OF_WIDTH)
        for bits, (levels, thresholds) in books.items():
            self.levels[bits, : 1 << bits] = levels
            for step in range(bits):
                gap = 1 << (bits - step)  # from one threshold of this step to the next
                start = STEP_STARTS[step]
                self.thresholds[bits, start : start + (1 << step)] = thresholds[gap // 2 - 1 :: gap]


def nearest(
    values: torch.Tensor, runs: Sequence[tuple[int, int]], books: Codebooks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of numbers, the count of thresholds that are not above them, and the levels of the codes.

    values: [..., size] f32 on the CPU
    runs: how many of the `size` numbers a run has, a multiple of 8, and the bits of their codes; `size` in all
    books: of the widths in `runs`

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
    tensors = (values, books.thresholds, books.levels, codes, levels)
    task = NearestTask(
        0, values.numel() // size, size, -(-TILE_NUMBERS // size), len(runs),
        ctypes.addressof(numbers), *(tensor.data_ptr() for tensor in tensors),
    )  # fmt: skip
    threads = torch.get_num_threads() if values.numel() >= LEAST_SHARED else 1
    cpu.run_task(NEAREST_KERNEL, ctypes.addressof(task), threads)
    return codes, levels
