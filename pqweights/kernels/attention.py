"""Attention on packed codes of keys and values on the CPU: products that restore neither.

cpu_polar_scores.py, cpu_hadamard_scores.py and cpu_weighted_values.py have the arithmetic. All tensors lie on the CPU
without gaps.
"""

from __future__ import annotations

import ctypes

import torch

from pqweights.kernels import cpu
from pqweights.kernels.attention_task import (
    GROUP,
    LEAST_SHARED,
    LEAST_TILE,
    MOST_ROWS,
    MOST_SIZE,
    POLAR_WIDTHS,
    TOKEN_WIDTHS,
    VALUE_TILE,
    PolarTask,
    TokenTask,
    tile_length,
)


def polar_rope_scores(
    queries: torch.Tensor,
    angles: torch.Tensor,
    radii: torch.Tensor,
    scales: torch.Tensor,
    *,
    angle_bits: int,
    radius_bits: int,
    halves: bool = True,
    chunk_groups: int | None = None,
) -> torch.Tensor:
    """Return the products of queries with polar-rope keys, by table look-up (Wu et al., arXiv:2502.00527, Section 3.3).

    Key pair j of a token is scales[j] * radius * (cos angle, sin angle), with radius = radius code and
    angle = 2 pi * angle code / 2**angle_bits - pi.

    queries: [heads, rows, size] f32, rotated by RoPE; up to 16 rows, which are the query heads of a key head times the
        tokens; a size of up to 256 and a multiple of 8
    angles: [heads, groups, size / 2, 4 * angle_bits] u8, the packed codes of 32 tokens for each pair
    radii: [heads, groups, size / 2, 4 * radius_bits] u8
    scales: [heads, size / 2] f32, f16 or bf16; with chunk_groups, [heads, chunks, size / 2]
    angle_bits, radius_bits: (4, 4) or (4, 2)
    halves: whether pair j is the coordinates j and j + size / 2, rather than 2 j and 2 j + 1
    chunk_groups: how many groups share scales, of which the last chunk may have fewer; all without

    Returns [heads, rows, groups * 32] f32. With AVX-512 VBMI and VNNI, table entries are rounded to multiples of
    1/32639 of the largest one of the query, and sums are exact. Raises ValueError for tensors that do not fit together.
    """
    if (angle_bits, radius_bits) not in POLAR_WIDTHS:
        raise ValueError(f"expected angle and radius bits {POLAR_WIDTHS}, found {(angle_bits, radius_bits)}")
    heads, rows, size = queries.shape
    groups, pairs = angles.shape[1], size // 2
    if not 0 < rows <= MOST_ROWS or size % 8 or not 0 < size <= MOST_SIZE:
        raise ValueError(
            f"expected 1 to {MOST_ROWS} rows of a multiple of 8 up to {MOST_SIZE}, found {rows} rows of {size}"
        )
    if chunk_groups is not None and chunk_groups < 1:
        raise ValueError(f"expected chunks of at least one group, found {chunk_groups}")
    chunks = () if chunk_groups is None else (-(-groups // chunk_groups),)
    scales = scales.to(torch.float32)
    addresses = (
        _address("queries", queries, torch.float32, (heads, rows, size)),
        _address("angles", angles, torch.uint8, (heads, groups, pairs, 4 * angle_bits)),
        _address("radii", radii, torch.uint8, (heads, groups, pairs, 4 * radius_bits)),
        _address("scales", scales, torch.float32, (heads, *chunks, pairs)),
    )
    out = _room(heads, rows, groups * GROUP)
    if out.numel() == 0:
        return out
    threads = _threads(out.numel() * pairs)
    tile = tile_length(groups, heads=heads, threads=threads, least=LEAST_TILE)
    step, offset = (1, pairs) if halves else (2, 1)
    task = PolarTask(
        0, heads, rows, groups, pairs, tile, *addresses, out.data_ptr(), step, offset, chunk_groups or groups
    )
    cpu.run_task(f"polar_scores_{angle_bits}{radius_bits}", ctypes.addressof(task), threads)
    return out


def weighted_values(
    weights: torch.Tensor,
    codes: torch.Tensor,
    levels: torch.Tensor,
    *,
    size: int,
    scales: torch.Tensor | None = None,
    lows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum over t of weights[t] * values[t], with values[t] = scales[t] * levels[codes[t]] + lows[t].

    weights: [heads, rows, tokens] f32; up to 16 rows, which are the query heads of a value head times their tokens
    codes: [heads, tokens, size * bits / 8] u8, packed along the coordinates
    levels: [2**bits] f32, for 2 to 8 bits; 2, 3 and 4 are fast
    size: coordinates of a head, a multiple of 32 up to 256
    scales: [heads, tokens] f16; 1 without
    lows: [heads, tokens] f16; 0 without

    Returns [heads, rows, size] f32, the same bits for any number of threads. Raises ValueError for tensors that do not
    fit together.
    """
    heads, rows, tokens = weights.shape
    bits = _token_bits(levels, rows, size)
    out = _room(heads, rows, size)
    of_tokens = ("scales", scales), ("lows", lows)
    scales_at, lows_at = (
        None if tensor is None else _address(name, tensor, torch.float16, (heads, tokens)) for name, tensor in of_tokens
    )
    addresses = (
        _address("codes", codes, torch.uint8, (heads, tokens, size * bits // 8)),
        _address("levels", levels, torch.float32, (1 << bits,)),
        _address("weights", weights, torch.float32, (heads, rows, tokens)),
        out.data_ptr(),
        scales_at,
    )
    if out.numel() == 0 or tokens == 0:
        return out.zero_()
    tiles = -(-tokens // VALUE_TILE)
    sums, finished = _room(heads, tiles, rows, size), torch.zeros(heads, dtype=torch.int64, device="cpu")
    room = sums.data_ptr(), finished.data_ptr()
    task = TokenTask(0, heads, rows, tokens, size, bits, VALUE_TILE, *addresses, *room, lows_at)
    threads = _threads(heads * rows * tokens * size)
    cpu.run_task(f"weighted_values_{bits if bits in TOKEN_WIDTHS else 8}", ctypes.addressof(task), threads)
    return out


def hadamard_scores(
    queries: torch.Tensor, codes: torch.Tensor, norms: torch.Tensor, levels: torch.Tensor
) -> torch.Tensor:
    """Return the products of queries with keys norms[t] * levels[codes[t]].

    queries: [heads, rows, size] f32, rotated as the keys were before they were encoded, with all constant factors; up
        to 16 rows, a size that is a multiple of 32 up to 256
    codes: [heads, tokens, size * bits / 8] u8, packed along the coordinates
    norms: [heads, tokens] f16
    levels: [2**bits] f32, for 2 to 8 bits; 2, 3 and 4 are fast

    Returns [heads, rows, tokens] f32. Raises ValueError for tensors that do not fit together.
    """
    (heads, rows, size), tokens = queries.shape, codes.shape[1]
    bits = _token_bits(levels, rows, size)
    out = _room(heads, rows, tokens)
    addresses = (
        _address("codes", codes, torch.uint8, (heads, tokens, size * bits // 8)),
        _address("levels", levels, torch.float32, (1 << bits,)),
        _address("queries", queries, torch.float32, (heads, rows, size)),
        out.data_ptr(),
        _address("norms", norms, torch.float16, (heads, tokens)),
    )
    if out.numel() == 0:
        return out
    threads = _threads(heads * rows * tokens * size)
    tile = tile_length(tokens, heads=heads, threads=threads, least=LEAST_TILE * GROUP)
    task = TokenTask(0, heads, rows, tokens, size, bits, tile, *addresses)
    cpu.run_task(f"hadamard_scores_{bits if bits in TOKEN_WIDTHS else 8}", ctypes.addressof(task), threads)
    return out


def _token_bits(levels: torch.Tensor, rows: int, size: int) -> int:
    """Return the bits of token-wise codes with these levels, if there is a kernel for them."""
    bits = len(levels).bit_length() - 1
    if not 2 <= bits <= 8 or len(levels) != 1 << bits:
        raise ValueError(f"expected 4 to 256 levels, a power of two, found {len(levels)}")
    if not 0 < rows <= MOST_ROWS or size % 32 or not 0 < size <= MOST_SIZE:
        raise ValueError(
            f"expected 1 to {MOST_ROWS} rows of a multiple of 32 up to {MOST_SIZE}, found {rows} rows of {size}"
        )
    return bits


def _room(*shape: int) -> torch.Tensor:
    """Return memory for float32 on the CPU, whatever device torch allocates on by default."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _threads(look_ups: int) -> int:
    """Return in how many threads to make this many look-ups."""
    return torch.get_num_threads() if look_ups >= LEAST_SHARED else 1


def _address(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return where a tensor lies, which is checked here because the kernels check nothing."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or not tensor.is_cpu:
        gaps = "" if tensor.is_contiguous() else " with gaps"
        raise ValueError(
            f"expected {name} {list(shape)} of {dtype} on the CPU without gaps, "
            f"found {list(tensor.shape)} of {tensor.dtype} on {tensor.device.type}{gaps}"
        )
    return tensor.data_ptr()
