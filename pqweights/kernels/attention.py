"""Attention on packed codes of keys and values on the CPU: products that restore neither.

native/polar_scores.cpp, native/hadamard_scores.cpp and native/weighted_values.cpp have the arithmetic. All tensors lie
on the CPU without gaps.
"""

from __future__ import annotations

import numpy as np
import torch

from pqweights.kernels import native

# Rows of queries or weights that one call takes, and the largest head.
MOST_ROWS, MOST_SIZE = 16, 256
# Tokens in a group of polar-rope codes, whose bytes lie side by side.
GROUP = 32
# Widths of angles and radii that have a kernel.
POLAR_WIDTHS = ((4, 4), (4, 2))
# Making the tables of a query costs as much as some groups, so a tile has at least this many.
LEAST_TILE = 16
# Tokens of a tile of values. It does not depend on the threads, and so neither do sums.
VALUE_TILE = 1024
# Calls with fewer look-ups are left to one thread: waking another would take longer.
LEAST_SHARED = 1 << 19

# `native.Array.kind` of the tensors that kernels read.
_KINDS = {torch.float32: "r f4", torch.float16: "r u2", torch.uint8: "r u1"}
_CPU = torch.device("cpu")  # which is found in less time than its name


def polar_rope_scores(
    queries: torch.Tensor,
    angles: torch.Tensor,
    radii: torch.Tensor,
    scales: torch.Tensor,
    *,
    angle_bits: int,
    radius_bits: int,
    halves: bool = True,
) -> torch.Tensor:
    """Return the products of queries with polar-rope keys, by table look-up (Wu et al., arXiv:2502.00527, Section 3.3).

    Key pair j of a token is scales[j] * radius * (cos angle, sin angle), with radius = radius code and
    angle = 2 pi * angle code / 2**angle_bits - pi.

    queries: [heads, rows, size] f32, rotated by RoPE; up to 16 rows, which are the query heads of a key head times the
        tokens; a size of up to 256 and a multiple of 8
    angles: [heads, groups, size / 2, 4 * angle_bits] u8, the packed codes of 32 tokens for each pair
    radii: [heads, groups, size / 2, 4 * radius_bits] u8
    scales: [heads, size / 2] f32, f16 or bf16
    angle_bits, radius_bits: (4, 4) or (4, 2)
    halves: whether pair j is the coordinates j and j + size / 2, rather than 2 j and 2 j + 1

    Returns [heads, rows, groups * 32] f32, the same bits on every processor: table entries are rounded to multiples of
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
    scales = scales.float()
    out, written = _room(heads, rows, groups * GROUP)
    arrays = (
        _array("queries", queries, torch.float32, (heads, rows, size)),
        _array("angles", angles, torch.uint8, (heads, groups, pairs, 4 * angle_bits)),
        _array("radii", radii, torch.uint8, (heads, groups, pairs, 4 * radius_bits)),
        _array("scales", scales, torch.float32, (heads, pairs)),
        written,
    )
    if written.size == 0:
        return out
    threads = _threads(written.size * pairs)
    tile = native.tile_length(groups, heads=heads, threads=threads, least=LEAST_TILE)
    numbers = (heads, rows, groups, pairs, radius_bits, halves, tile)
    native.call("polar_scores", native.counter(), *arrays, *numbers, threads=threads)
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
    levels: [2**bits] f32, for 2 to 8 bits; fewer are faster
    size: coordinates of a head, a multiple of 32 up to 256
    scales: [heads, tokens] f16; 1 without
    lows: [heads, tokens] f16; 0 without

    Returns [heads, rows, size] f32, the same bits for any number of threads. Raises ValueError for tensors that do not
    fit together.
    """
    heads, rows, tokens = weights.shape
    bits, of_tokens = _token_bits(levels, rows, size), (heads, tokens)
    out, written = _room(heads, rows, size)
    tiles = -(-tokens // VALUE_TILE)
    arrays = (
        _array("weights", weights, torch.float32, (heads, rows, tokens)),
        _array("codes", codes, torch.uint8, (heads, tokens, size * bits // 8)),
        _array("levels", levels, torch.float32, (1 << bits,)),
        None if scales is None else _array("scales", scales, torch.float16, of_tokens),
        None if lows is None else _array("lows", lows, torch.float16, of_tokens),
        _room(heads, tiles, rows, size)[1] if tiles > 1 else written,  # sums
        native.array(np.zeros(heads, np.int64), "i8", heads, written=True),  # how many tiles are finished
        written,
    )
    if written.size == 0 or tokens == 0:
        return out.zero_()
    threads = _threads(heads * rows * tokens * size)
    numbers = (heads, rows, tokens, size, bits, VALUE_TILE)
    native.call("weighted_values", native.counter(), *arrays, *numbers, threads=threads)
    return out


def hadamard_scores(
    queries: torch.Tensor, codes: torch.Tensor, norms: torch.Tensor, levels: torch.Tensor
) -> torch.Tensor:
    """Return the products of queries with keys norms[t] * levels[codes[t]].

    queries: [heads, rows, size] f32, rotated as the keys were before they were encoded, with all constant factors; up
        to 16 rows, a size that is a multiple of 32 up to 256
    codes: [heads, tokens, size * bits / 8] u8, packed along the coordinates
    norms: [heads, tokens] f16
    levels: [2**bits] f32, for 2 to 8 bits; fewer are faster

    Returns [heads, rows, tokens] f32. Raises ValueError for tensors that do not fit together.
    """
    (heads, rows, size), tokens = queries.shape, codes.shape[1]
    bits = _token_bits(levels, rows, size)
    out, written = _room(heads, rows, tokens)
    arrays = (
        _array("queries", queries, torch.float32, (heads, rows, size)),
        _array("codes", codes, torch.uint8, (heads, tokens, size * bits // 8)),
        _array("norms", norms, torch.float16, (heads, tokens)),
        _array("levels", levels, torch.float32, (1 << bits,)),
        written,
    )
    if written.size == 0:
        return out
    threads = _threads(heads * rows * tokens * size)
    tile = native.tile_length(tokens, heads=heads, threads=threads, least=LEAST_TILE * GROUP)
    native.call("hadamard_scores", native.counter(), *arrays, heads, rows, tokens, size, bits, tile, threads=threads)
    return out


def _token_bits(levels: torch.Tensor, rows: int, size: int) -> int:
    """Return the bits of token-wise codes with these levels, if there is a kernel for them."""
    count = levels.numel()
    bits = count.bit_length() - 1
    if not 2 <= bits <= 8 or count != 1 << bits:
        raise ValueError(f"expected 4 to 256 levels, a power of two, found {count}")
    if not 0 < rows <= MOST_ROWS or size % 32 or not 0 < size <= MOST_SIZE:
        raise ValueError(
            f"expected 1 to {MOST_ROWS} rows of a multiple of 32 up to {MOST_SIZE}, found {rows} rows of {size}"
        )
    return bits


def _room(*shape: int) -> tuple[torch.Tensor, native.Array]:
    """Return memory for float32 on the CPU, whatever device torch allocates on by default, and as kernels write it."""
    room = torch.empty(*shape, dtype=torch.float32, device=_CPU)
    return room, native.Array(room.data_ptr(), "w f4", room.numel(), room)


def _threads(look_ups: int) -> int:
    """Return in how many threads to make this many look-ups."""
    return torch.get_num_threads() if look_ups >= LEAST_SHARED else 1


def _array(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> native.Array:
    """Return a tensor as kernels read it, in less time than native.array, as a call has five and takes microseconds.

    Raises ValueError unless it has this dtype and shape, lies on the CPU, and has no gaps.
    """
    if tensor.dtype == dtype and tensor.shape == shape and tensor.is_contiguous() and tensor.is_cpu:
        return native.Array(tensor.data_ptr(), _KINDS[dtype], tensor.numel(), tensor)
    gaps = "" if tensor.is_contiguous() else " with gaps"
    raise ValueError(
        f"expected {name} {list(shape)} of {dtype} on the CPU without gaps, "
        f"found {list(tensor.shape)} of {tensor.dtype} on {tensor.device.type}{gaps}"
    )
