"""The CPU kernels of integer exports, in numba: rounding as the runtimes' own converters do it, rotation, packing.

Rounding with the least squared error is in lanes.py. The rules are those of mlx 0.32 (mx.quantize in all its modes), torchao
0.18 (_choose_qparams_affine_tinygemm on BF16 weights) and compressed-tensors 0.20 (calculate_qparams, symmetric, on BF16
weights); docs/exports.md has them as formulas.
"""

from __future__ import annotations

import numpy as np
from numba import carray, types

from pqweights.kernels.cpu_kernels import jit
from pqweights.kernels.lanes import FIT, fit
from pqweights.kernels.vector import rotate_block, stack

MLX, TORCHAO, COMPRESSED_TENSORS = 1, 2, 3


@jit
def _bf16(x, bits):  # type: ignore[no-untyped-def]  # f32, and a place for its bits
    """x rounded to the nearest BF16, ties to even."""
    both = bits.view(np.float32)
    both[0] = x
    u = bits[0]
    bits[0] = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return both[0]


ROUND = types.void(*[types.voidptr] * 6, *[types.int64] * 4)


def _round(  # type: ignore[no-untyped-def]
    values_at, codes_at, scales_at, offsets_at, energies_at, errors_at, groups, size, bits, rule,
):  # fmt: skip
    values = carray(values_at, groups * size, np.float32)
    codes = carray(codes_at, groups * size, np.uint8)
    scales = carray(scales_at, groups, np.float32)
    offsets = carray(offsets_at, groups, np.float32)
    energies = carray(energies_at, groups, np.float64)
    errors = carray(errors_at, groups, np.float64)
    place = carray(stack(64), 1, np.uint32)
    last = np.float32((1 << bits) - 1)
    middle = np.float32(1 << (bits - 1))
    for group in range(groups):
        w = values[group * size : (group + 1) * size]
        q = codes[group * size : (group + 1) * size]
        smallest, largest = w[0], w[0]
        for j in range(size):
            smallest, largest = min(smallest, w[j]), max(largest, w[j])
        if rule == MLX:
            below = abs(smallest) > abs(largest)
            step = max((largest - smallest) / last, np.float32(1e-7))
            step = step if below else -step
            edge = smallest if below else largest
            steps = np.rint(edge / step)
            start = np.float32(0)
            if steps != 0:
                step = edge / steps
                start = edge
            for j in range(size):
                q[j] = np.uint8(min(max(np.rint((w[j] - start) / step), np.float32(0)), last))
            scale, offset, shift = _bf16(step, place), _bf16(start, place), np.float32(0)
        elif rule == TORCHAO:
            scale = max(_bf16(_bf16(largest - smallest, place) / last, place), np.float32(2.0**-126))
            offset = _bf16(smallest + _bf16(scale * middle, place), place)
            start = _bf16(offset - _bf16(scale * middle, place), place)
            for j in range(size):
                t = _bf16(_bf16(w[j] - start, place) / scale, place)
                q[j] = np.uint8(min(max(np.rint(t), np.float32(0)), last))
            shift = middle
        else:
            most = max(abs(min(smallest, np.float32(0))), abs(max(largest, np.float32(0))))
            scale = _bf16(most / (last / np.float32(2)), place)
            scale = scale if scale != 0 else np.float32(2.0**-7)
            offset = np.float32(0)
            for j in range(size):
                t = _bf16(w[j] / scale, place)
                q[j] = np.uint8(min(max(np.rint(t), -middle), middle - np.float32(1)) + middle)
            shift = middle
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


@jit
def _to_e4m3(x, bits, codes):  # type: ignore[no-untyped-def]  # x: not negative
    """The nearest F8_E4M3, ties to even, saturated: bytes 0 to 126."""
    for j in range(len(codes)):
        small = np.int32(np.rint(min(x[j], np.float32(1)) * np.float32(512)))  # below 2**-6: steps of 2**-9
        u = bits[j]
        rounded = (u + np.uint32(0x7FFFF) + ((u >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
        normal = np.int32(min(rounded, np.uint32(0x87F))) - np.int32((127 - 7) << 3)
        codes[j] = np.uint8(min(small if x[j] < np.float32(2.0**-6) else normal, np.int32(126)))


@jit
def _from_e4m3(codes, x, bits):  # type: ignore[no-untyped-def]
    """The inverse, for bytes 0 to 126."""
    for j in range(len(codes)):
        bits[j] = (np.uint32(codes[j]) << np.uint32(20)) + np.uint32((127 - 7) << 23)
    for j in range(len(codes)):
        x[j] = np.float32(codes[j]) * np.float32(2.0**-9) if codes[j] < 8 else x[j]


@jit
def _to_e2m1(x, codes):  # type: ignore[no-untyped-def]  # x: not negative
    """The nearest F4_E2M1, ties down, saturated: codes 0 to 7."""
    for j in range(len(codes)):
        v = x[j]
        low = np.int32(v > np.float32(0.25)) + np.int32(v > np.float32(0.75)) + np.int32(v > np.float32(1.25))
        high = np.int32(v > np.float32(2.5)) + np.int32(v > np.float32(3.5)) + np.int32(v > np.float32(5))
        codes[j] = np.uint8(low + np.int32(v > np.float32(1.75)) + high)


@jit
def _from_e2m1(codes, x):  # type: ignore[no-untyped-def]
    """The inverse: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    for j in range(len(codes)):
        c = np.float32(codes[j])
        x[j] = max(c * np.float32(0.5), max(c - np.float32(2), c + c - np.float32(8)))


ROUND_FLOATS = types.void(*[types.voidptr] * 5, *[types.int64] * 3)


def _round_floats(  # type: ignore[no-untyped-def]
    values_at, codes_at, scales_at, energies_at, errors_at, groups, size, mode,
):  # fmt: skip
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
        x[0] = most / np.float32(448 if mode == MXFP8 else 6)
        if mode == NVFP4:
            _to_e4m3(x, bits, q[:1])
            byte = np.int64(q[0])
            _from_e4m3(q[:1], x, bits)
        elif most > 0:  # the power of two that is not below it
            byte = np.int64(bits[0] >> np.uint32(23)) + np.int64(bits[0] & np.uint32(0x7FFFFF) != 0)
            byte = min(byte, np.int64(254))
            bits[0] = np.uint32(byte) << np.uint32(23) if byte > 0 else np.uint32(1 << 22)
        else:
            byte = np.int64(127)
            x[0] = np.float32(1)
        scale = x[0]
        for j in range(size):
            x[j] = abs(w[j]) / scale if scale > 0 else np.float32(0)
        if mode == MXFP8:
            _to_e4m3(x, bits, q)
            _from_e4m3(q, x, bits)
        else:
            _to_e2m1(x, q)
            _from_e2m1(q, x)
        energy, error = 0.0, 0.0
        for j in range(size):
            e = np.float64(abs(w[j]) - x[j] * scale)
            energy += np.float64(w[j]) * np.float64(w[j])
            error += e * e
        for j in range(size):
            x[j] = w[j]
        if mode == MXFP8:
            for j in range(size):
                q[j] = q[j] | np.uint8((bits[j] >> np.uint32(24)) & np.uint32(128))
        else:  # mlx has no negative zero here
            for j in range(size):
                q[j] = q[j] | np.uint8(8 if w[j] < 0 and q[j] > 0 else 0)
        scales[group] = np.float32(byte)
        energies[group], errors[group] = energy, error


ROTATE = types.void(types.voidptr, types.int64, types.float32)


def _rotate(values_at, blocks, factor):  # type: ignore[no-untyped-def]
    values = carray(values_at, blocks * 128, np.float32)
    for block in range(blocks):
        rotate_block(values, block, factor)


PACK_BITS = types.void(types.voidptr, types.voidptr, types.int64, types.int64)


def _pack_bits(codes_at, packed_at, eights, bits):  # type: ignore[no-untyped-def]
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


def _pack_tiles(codes_at, order_at, packed_at, tile_rows, tile_columns):  # type: ignore[no-untyped-def]
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
    "fit": (fit, FIT),
    "round": (_round, ROUND),
    "round_floats": (_round_floats, ROUND_FLOATS),
    "rotate": (_rotate, ROTATE),
    "pack_bits": (_pack_bits, PACK_BITS),
    "pack_tiles": (_pack_tiles, PACK_TILES),
}
