"""The CPU kernels of integer exports, in numba: fitting, rounding by the rules of runtimes, rotation, packing.

How groups are fitted is in lanes.py. The rules of the runtimes are those of mlx 0.32 (mx.quantize in all its modes),
torchao 0.18 (_choose_qparams_affine_tinygemm on BF16 weights) and compressed-tensors 0.20 (calculate_qparams,
symmetric, on BF16 weights); docs/exports.md has them as formulas.

ctypes calls the kernels, so their parameters are plain pointers and numbers: those of the functions at the end of
groups.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, types

from pqweights.kernels.conversions import bf16, from_e2m1, from_e4m3, to_e2m1, to_e4m3
from pqweights.kernels.emit import LANES
from pqweights.kernels.jit import inlined, jit
from pqweights.kernels.lanes import CHAINS, MOST_GROUP_SIZE, fit_16
from pqweights.kernels.vector import rotate_block, stack

MLX, TORCHAO, COMPRESSED_TENSORS = 1, 2, 3


class _Rule(NamedTuple):
    """How groups are fitted; the fields are the parameters of `pqweights.kernels.groups.fit_groups`."""

    size: Any
    bits: Any
    symmetric: Any
    middle: Any
    settings: Any


class _Scratch(NamedTuple):
    """Arrays on the stack: the work, and what sixteen groups return."""

    work: Any  # [MOST_GROUP_SIZE * 16] f32
    numbers: Any  # [2 * 16] f32
    sums: Any  # [2 * 16] f64


# Pointers: values, settings, codes, scales, offsets, energies, errors; then groups, size, bits, symmetric, middle.
FIT = types.void(*[types.voidptr] * 7, *[types.int64] * 5)
# Bytes of the arrays on the stack: an element of 1 or 4 bytes for each weight, two numbers for each group.
_WEIGHTS = MOST_GROUP_SIZE * LANES
_WEIGHTS_OF_4, _PAIRS_OF_4, _PAIRS_OF_8 = _WEIGHTS * 4, 2 * LANES * 4, 2 * LANES * 8


@jit
def _fit_some(values: Any, codes: Any, rule: Any, scratch: Any) -> None:
    """Fit sixteen groups."""
    size, bits, symmetric, middle, settings = rule
    work, numbers, sums = scratch
    if symmetric:
        fit_16(0, values, size, bits, middle, settings, work, codes, numbers, sums)
    else:
        fit_16(1, values, size, bits, middle, settings, work, codes, numbers, sums)


def _fit(
    values_at: Any,
    settings_at: Any,
    codes_at: Any,
    scales_at: Any,
    offsets_at: Any,
    energies_at: Any,
    errors_at: Any,
    groups: Any,
    size: Any,
    bits: Any,
    symmetric: Any,
    middle: Any,
) -> None:
    """Fit groups of a size that 16 divides, of at most MOST_GROUP_SIZE."""
    values = carray(values_at, groups * size, np.float32)
    settings = carray(settings_at, 2 * CHAINS + 1, np.float32)
    codes = carray(codes_at, groups * size, np.uint8)
    scales = carray(scales_at, groups, np.float32)
    offsets = carray(offsets_at, groups, np.float32)
    energies = carray(energies_at, groups, np.float64)
    errors = carray(errors_at, groups, np.float64)
    work = carray(stack(_WEIGHTS_OF_4), _WEIGHTS, np.float32)
    rest = carray(stack(_WEIGHTS_OF_4), _WEIGHTS, np.float32)
    rest_codes = carray(stack(_WEIGHTS), _WEIGHTS, np.uint8)
    numbers = carray(stack(_PAIRS_OF_4), 2 * LANES, np.float32)
    sums = carray(stack(_PAIRS_OF_8), 2 * LANES, np.float64)
    rule = _Rule(size, bits, symmetric, middle, settings)
    scratch = _Scratch(work, numbers, sums)
    for first in range(0, groups, LANES):
        count = min(LANES, groups - first)
        begin, end = first * size, (first + count) * size
        if count == LANES:
            _fit_some(values[begin:end], codes[begin:end], rule, scratch)
        else:
            for j in range(LANES * size):
                rest[j] = values[begin + j] if begin + j < end else np.float32(0)
            _fit_some(rest, rest_codes, rule, scratch)
            for j in range(end - begin):
                codes[begin + j] = rest_codes[j]
        for lane in range(count):
            scales[first + lane], offsets[first + lane] = numbers[lane], numbers[LANES + lane]
            energies[first + lane], errors[first + lane] = sums[lane], sums[LANES + lane]


@inlined
def _last(bits: Any) -> Any:
    """The largest code, as f32."""
    return np.float32((1 << bits) - 1)


@inlined
def _middle(bits: Any) -> Any:
    """The code that symmetric rules give to 0, as f32."""
    return np.float32(1 << (bits - 1))


@inlined
def _extremes(w: Any) -> Any:
    """The smallest and the largest weight."""
    smallest, largest = w[0], w[0]
    for j in range(len(w)):
        smallest, largest = min(smallest, w[j]), max(largest, w[j])
    return smallest, largest


@inlined
def _round_as_mlx(w: Any, q: Any, extremes: Any, bits: Any, place: Any) -> Any:
    """Write the codes of a group, and return its scale and its offset.

    The range is that of the weights, with the scale changed so that 0 is a whole number of steps from the edge that is
    farther from it.
    """
    (smallest, largest), last = extremes, _last(bits)
    below = abs(smallest) > abs(largest)
    step = max((largest - smallest) / last, np.float32(1e-7))
    step = step if below else -step
    edge = smallest if below else largest
    steps = np.rint(edge / step)
    start = np.float32(0)
    if steps != 0:
        step = edge / steps
        start = edge
    for j in range(len(w)):
        q[j] = np.uint8(min(max(np.rint((w[j] - start) / step), np.float32(0)), last))
    return bf16(step, place), bf16(start, place)


@inlined
def _round_as_torchao(w: Any, q: Any, extremes: Any, bits: Any, place: Any) -> Any:
    """Write the codes of a group, and return its scale and its offset, which is the weight of the middle code.

    The range is that of the weights, with every step rounded to BF16.
    """
    (smallest, largest), last, middle = extremes, _last(bits), _middle(bits)
    scale = max(bf16(bf16(largest - smallest, place) / last, place), np.float32(2.0**-126))
    offset = bf16(smallest + bf16(scale * middle, place), place)
    start = bf16(offset - bf16(scale * middle, place), place)
    for j in range(len(w)):
        t = bf16(bf16(w[j] - start, place) / scale, place)
        q[j] = np.uint8(min(max(np.rint(t), np.float32(0)), last))
    return scale, offset


@inlined
def _round_as_compressed_tensors(w: Any, q: Any, extremes: Any, bits: Any, place: Any) -> Any:
    """Write the codes of a group, and return its scale. The range is symmetric, up to the largest magnitude."""
    (smallest, largest), last, middle = extremes, _last(bits), _middle(bits)
    most = max(abs(min(smallest, np.float32(0))), abs(max(largest, np.float32(0))))
    scale = bf16(most / (last / np.float32(2)), place)
    scale = scale if scale != 0 else np.float32(2.0**-7)
    for j in range(len(w)):
        t = bf16(w[j] / scale, place)
        q[j] = np.uint8(min(max(np.rint(t), -middle), middle - np.float32(1)) + middle)
    return scale


# Pointers: values, codes, scales, offsets, energies, errors; then groups, size, bits, rule.
ROUND = types.void(*[types.voidptr] * 6, *[types.int64] * 4)


def _round(
    values_at: Any,
    codes_at: Any,
    scales_at: Any,
    offsets_at: Any,
    energies_at: Any,
    errors_at: Any,
    groups: Any,
    size: Any,
    bits: Any,
    rule: Any,
) -> None:
    values = carray(values_at, groups * size, np.float32)
    codes = carray(codes_at, groups * size, np.uint8)
    scales = carray(scales_at, groups, np.float32)
    offsets = carray(offsets_at, groups, np.float32)
    energies = carray(energies_at, groups, np.float64)
    errors = carray(errors_at, groups, np.float64)
    place = carray(stack(64), 1, np.uint32)
    for group in range(groups):
        w = values[group * size : (group + 1) * size]
        q = codes[group * size : (group + 1) * size]
        extremes, offset, shift = _extremes(w), np.float32(0), _middle(bits)
        if rule == MLX:
            scale, offset = _round_as_mlx(w, q, extremes, bits, place)
            shift = np.float32(0)
        elif rule == TORCHAO:
            scale, offset = _round_as_torchao(w, q, extremes, bits, place)
        else:
            scale = _round_as_compressed_tensors(w, q, extremes, bits, place)
        energy, error = 0.0, 0.0
        for j in range(size):
            e = np.float64(w[j] - ((np.float32(q[j]) - shift) * scale + offset))
            energy += np.float64(w[j]) * np.float64(w[j])
            error += e * e
        scales[group], offsets[group] = scale, offset
        energies[group], errors[group] = energy, error


MXFP4, MXFP8, NVFP4 = 0, 1, 2


# Below, loops without branches over a whole group, which LLVM vectorises. x (f32) and bits (u32) share memory.
MOST_FLOATS = 32
_FLOATS_OF_4 = MOST_FLOATS * 4


@inlined
def _float_scale(most: Any, mode: Any, q: Any, x: Any, bits: Any) -> Any:
    """Return the byte of the scale of a group whose largest magnitude is `most`, and write the scale itself to x[0]."""
    x[0] = most / np.float32(448 if mode == MXFP8 else 6)
    if mode == NVFP4:
        to_e4m3(x, bits, q[:1])
        byte = np.int64(q[0])
        from_e4m3(q[:1], x, bits)
    elif most > 0:  # the power of two that is not below it
        byte = np.int64(bits[0] >> np.uint32(23)) + np.int64(bits[0] & np.uint32(0x7FFFFF) != 0)
        byte = min(byte, np.int64(254))
        bits[0] = np.uint32(byte) << np.uint32(23) if byte > 0 else np.uint32(1 << 22)
    else:
        byte = np.int64(127)
        x[0] = np.float32(1)
    return byte


@inlined
def _add_signs(w: Any, mode: Any, q: Any, x: Any, bits: Any) -> None:
    """Set the sign bit of the codes of negative weights."""
    for j in range(len(w)):
        x[j] = w[j]
    if mode == MXFP8:
        for j in range(len(w)):
            q[j] = q[j] | np.uint8((bits[j] >> np.uint32(24)) & np.uint32(128))
    else:  # mlx has no negative zero here
        for j in range(len(w)):
            q[j] = q[j] | np.uint8(8 if w[j] < 0 and q[j] > 0 else 0)


# Pointers: values, codes, scales, energies, errors; then groups, size, mode.
ROUND_FLOATS = types.void(*[types.voidptr] * 5, *[types.int64] * 3)


def _round_floats(
    values_at: Any, codes_at: Any, scales_at: Any, energies_at: Any, errors_at: Any, groups: Any, size: Any, mode: Any
) -> None:
    values = carray(values_at, groups * size, np.float32)
    codes = carray(codes_at, groups * size, np.uint8)
    scales = carray(scales_at, groups, np.float32)  # bytes, as numbers
    energies = carray(energies_at, groups, np.float64)
    errors = carray(errors_at, groups, np.float64)
    memory = stack(_FLOATS_OF_4)
    x, bits = carray(memory, size, np.float32), carray(memory, size, np.uint32)
    for group in range(groups):
        w = values[group * size : (group + 1) * size]
        q = codes[group * size : (group + 1) * size]
        most = np.float32(0)
        for j in range(size):
            most = max(most, abs(w[j]))
        byte = _float_scale(most, mode, q, x, bits)
        scale = x[0]
        for j in range(size):
            x[j] = abs(w[j]) / scale if scale > 0 else np.float32(0)
        if mode == MXFP8:
            to_e4m3(x, bits, q)
            from_e4m3(q, x, bits)
        else:
            to_e2m1(x, q)
            from_e2m1(q, x)
        energy, error = 0.0, 0.0
        for j in range(size):
            e = np.float64(abs(w[j]) - x[j] * scale)
            energy += np.float64(w[j]) * np.float64(w[j])
            error += e * e
        _add_signs(w, mode, q, x, bits)
        scales[group] = np.float32(byte)
        energies[group], errors[group] = energy, error


ROTATE = types.void(types.voidptr, types.int64, types.float32)


def _rotate(values_at: Any, blocks: Any, factor: Any) -> None:
    values = carray(values_at, blocks * 128, np.float32)
    for block in range(blocks):
        rotate_block(values, block, factor)


PACK_BITS = types.void(types.voidptr, types.voidptr, types.int64, types.int64)


def _pack_bits(codes_at: Any, packed_at: Any, eights: Any, bits: Any) -> None:
    codes = carray(codes_at, eights * 8, np.uint8)
    packed = carray(packed_at, eights * bits, np.uint8)
    if bits == 8:
        for i in range(eights * 8):
            packed[i] = codes[i]
    elif bits == 4:
        for i in range(eights * 4):
            packed[i] = codes[2 * i] | np.uint8(codes[2 * i + 1] << np.uint8(4))
    else:
        for eight in range(eights):
            word = np.uint64(0)
            for i in range(8):
                word |= np.uint64(codes[8 * eight + i]) << np.uint64(bits * i)
            for i in range(bits):
                packed[bits * eight + i] = np.uint8((word >> np.uint64(8 * i)) & np.uint64(255))


PACK_TILES = types.void(*[types.voidptr] * 3, *[types.int64] * 2)


def _pack_tiles(codes_at: Any, order_at: Any, packed_at: Any, tile_rows: Any, tile_columns: Any) -> None:
    width = tile_columns * 128
    codes = carray(codes_at, tile_rows * 8 * width, np.uint8)
    order = carray(order_at, 1024, np.int32)
    packed = carray(packed_at, tile_rows * tile_columns * 512, np.uint8)
    for row in range(tile_rows):
        for column in range(tile_columns):
            start = row * 8 * width + column * 128
            tile = (row * tile_columns + column) * 512
            for i in range(512):
                low, high = np.int64(order[2 * i]), np.int64(order[2 * i + 1])
                a = codes[start + (low >> 7) * width + (low & 127)]
                b = codes[start + (high >> 7) * width + (high & 127)]
                packed[tile + i] = a | np.uint8(b << np.uint8(4))


KERNELS = {
    "fit": (_fit, FIT),
    "round": (_round, ROUND),
    "round_floats": (_round_floats, ROUND_FLOATS),
    "rotate": (_rotate, ROTATE),
    "pack_bits": (_pack_bits, PACK_BITS),
    "pack_tiles": (_pack_tiles, PACK_TILES),
}
