"""The GPU backend: Triton kernels that follow docs/format.md operation by operation, so the bytes equal the reference's.

Fusing multiplications with additions is switched off, square roots and divisions are the rounded ones, and every sum is
the format's own tree; tests/test_gpu.py reads the machine code for it. A thread that calls gets a stream of its own, so
one thread's transfers overlap another's kernels; `empty` gives page-locked memory, which transfers need for that.
With TRITON_INTERPRET=1 the same kernels run, slowly, without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from pqweights.errors import DeviceError
from pqweights.kernels import SIGNS, VALUE_DTYPES, BlockCoding, EncodedArrays, EncodeStats
from pqweights.kernels.workers import worker

INTERPRETED = bool(triton.knobs.runtime.interpret)
# Blocks of 128 that one program handles; the interpreter's cost is per program, not per element.
BLOCKS_PER_PROGRAM = 256 if INTERPRETED else 16
COMPILE_OPTIONS = {} if INTERPRETED else {"enable_fp_fusion": False, "num_warps": 4}

BF16, F16, F32 = (tl.constexpr(VALUE_DTYPES[name]) for name in ("BF16", "F16", "F32"))

_launch = threading.Lock()  # Triton compiles on the first launch; two threads must not do so at once


@triton.jit
def _butterfly(x, H: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # one stage
    pairs = tl.permute(tl.reshape(x, [BLOCKS, 64 // H, 2, H]), [0, 1, 3, 2])
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 1, 3, 2]), [BLOCKS, 128])


@triton.jit
def _hadamard(x, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # [BLOCKS, 128] f32, stages 1 to 64
    for stage in tl.static_range(7):
        x = _butterfly(x, 1 << stage, BLOCKS)
    return x


@triton.jit
def _tree_sum(x, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # [BLOCKS, 128] f32 -> [BLOCKS]
    for stage in tl.static_range(7):
        x = tl.sum(tl.reshape(x, [BLOCKS, 2, 64 >> stage]), axis=1)  # two terms: there is but one order
    return tl.reshape(x, [BLOCKS])


@triton.jit
def _power_of_two(k):  # type: ignore[no-untyped-def]  # i32, -1022 to 1023 -> f64
    return ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _load_values(values, at, mask, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # -> f32
    if DTYPE == BF16:
        x = (tl.load(values + at, mask=mask, other=0).to(tl.uint16).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == F16:
        x = tl.load(values + at, mask=mask, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = tl.load(values + at, mask=mask, other=0).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _store_values(x, values, at, mask, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]  # f32, saturated
    if DTYPE == BF16:
        limit = 3.3895313892515355e38
        x = tl.minimum(tl.maximum(x, -limit), limit)
        u = x.to(tl.uint32, bitcast=True)
        rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        tl.store(values + at, rounded.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    elif DTYPE == F16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        tl.store(values + at, x.to(tl.float16).to(tl.int16, bitcast=True), mask=mask)
    else:
        limit = 3.4028234663852886e38
        x = tl.minimum(tl.maximum(x, -limit), limit)
        tl.store(values + at, x.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _pack_field(  # type: ignore[no-untyped-def]
    q, codes, row, mask, SHIFT: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Fold bits [SHIFT, SHIFT + WIDTH) of 128 codes (i32) into 16 * WIDTH bytes of each row."""
    field = tl.reshape((q >> SHIFT) & ((1 << WIDTH) - 1), [BLOCKS, 8 // WIDTH, 16 * WIDTH])
    place = (tl.arange(0, 8 // WIDTH) * WIDTH)[None, :, None]
    packed = tl.sum(field << place, axis=1)
    at = row[:, None] * (16 * BITS) + 16 * SHIFT + tl.arange(0, 16 * WIDTH)[None, :]
    tl.store(codes + at, packed.to(tl.uint8), mask=mask)


@triton.jit
def _unpack_field(  # type: ignore[no-untyped-def]
    codes, row, mask, SHIFT: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr
):
    """The inverse of _pack_field: [BLOCKS, 128] i32, already shifted to its place."""
    at = row[:, None] * (16 * BITS) + 16 * SHIFT + tl.arange(0, 16 * WIDTH)[None, :]
    packed = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
    place = (tl.arange(0, 8 // WIDTH) * WIDTH)[None, :, None]
    field = (packed[:, None, :] >> place) & ((1 << WIDTH) - 1)
    return tl.reshape(field, [BLOCKS, 128]) << SHIFT


@triton.jit(do_not_specialize=["blocks", "norm_exponent"])
def _encode(  # type: ignore[no-untyped-def]
    values, thresholds, levels, signs, codes, norms, energies, errors, exact_norms, blocks, norm_exponent,
    DTYPE: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = row < blocks
    mask = inside[:, None]
    j = tl.arange(0, 128)
    x = _load_values(values, row[:, None] * 128 + j[None, :], mask, DTYPE)
    x = x * tl.load(signs + j)[None, :]

    # The largest magnitude by its bits, which order like the number and put infinities and NaN on top.
    largest_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest_bits < 0x7F800000
    squares = _tree_sum(x * x, BLOCKS)
    safe = (squares >= 8.673617379884035e-19) & (squares <= 1.152921504606847e18)  # 2**-60, 2**60
    largest = largest_bits.to(tl.float32, bitcast=True).to(tl.float64)
    exponent = ((largest.to(tl.int64, bitcast=True) >> 52) - 1023).to(tl.int32)
    k = tl.where(safe | (largest_bits == 0) | (finite == 0), 0, exponent)
    half = tl.where(k < 0, -(-k // 2), k // 2)
    first = _power_of_two(-half).to(tl.float32)
    second = _power_of_two(half - k).to(tl.float32)
    x = x * first[:, None] * second[:, None]
    squares = _tree_sum(x * x, BLOCKS)

    radius = tl.sqrt_rn(squares)
    inverse = tl.where(radius > 0, tl.div_rn(tl.full([BLOCKS], 1.0, tl.float32), radius), 0.0)
    z = _hadamard(x, BLOCKS) * inverse[:, None]
    q = tl.zeros([BLOCKS, 128], tl.int32)  # counts the thresholds that are not above z, by bisection
    for step in tl.static_range(BITS):
        middle = q + (1 << (BITS - 1 - step))
        q = tl.where(z >= tl.load(thresholds + middle - 1), middle, q)
    c = tl.load(levels + q)
    projection = _tree_sum(z * c, BLOCKS)
    level_energy = _tree_sum(c * c, BLOCKS)
    residual = _tree_sum((z - c) * (z - c), BLOCKS)
    norm = radius * tl.div_rn(projection, level_energy)

    two_to_k = _power_of_two(k)
    exact = norm.to(tl.float64) * two_to_k
    stored = (exact * _power_of_two(-norm_exponent)).to(tl.float32).to(tl.float16)
    energy = squares.to(tl.float64) * two_to_k * two_to_k
    positive = radius > 0
    length = tl.where(positive, radius.to(tl.float64) * two_to_k, 1.0)
    gain = stored.to(tl.float64) * _power_of_two(norm_exponent) / length
    short = 1.0 - gain
    wide_energy = level_energy.to(tl.float64)
    per_block = residual.to(tl.float64) + 2.0 * short * (projection.to(tl.float64) - wide_energy)
    per_block = per_block + short * short * wide_energy
    error = energy / 128.0 * tl.where(per_block < 0.0, 0.0, per_block)

    tl.store(norms + row, stored.to(tl.int16, bitcast=True), mask=inside)
    tl.store(energies + row, energy, mask=inside)
    tl.store(errors + row, tl.where(positive, error, 0.0), mask=inside)
    tl.store(exact_norms + row, tl.where(finite, exact, float("nan")), mask=inside)
    if BITS & 8:
        _pack_field(q, codes, row, mask, 0, 8, BITS, BLOCKS)
    if BITS & 4:
        _pack_field(q, codes, row, mask, 0, 4, BITS, BLOCKS)
    if BITS & 2:
        _pack_field(q, codes, row, mask, BITS & 4, 2, BITS, BLOCKS)
    if BITS & 1:
        _pack_field(q, codes, row, mask, BITS & 6, 1, BITS, BLOCKS)


@triton.jit(do_not_specialize=["blocks", "norm_exponent"])
def _decode(  # type: ignore[no-untyped-def]
    codes, norms, levels, signs, values, blocks, norm_exponent,
    ROTATE: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = row < blocks
    mask = inside[:, None]
    j = tl.arange(0, 128)
    q = tl.zeros([BLOCKS, 128], tl.int32)
    if BITS & 8:
        q |= _unpack_field(codes, row, mask, 0, 8, BITS, BLOCKS)
    if BITS & 4:
        q |= _unpack_field(codes, row, mask, 0, 4, BITS, BLOCKS)
    if BITS & 2:
        q |= _unpack_field(codes, row, mask, BITS & 4, 2, BITS, BLOCKS)
    if BITS & 1:
        q |= _unpack_field(codes, row, mask, BITS & 6, 1, BITS, BLOCKS)
    x = tl.load(levels + q)
    norm = tl.load(norms + row, mask=inside, other=0).to(tl.float16, bitcast=True).to(tl.float64)
    if ROTATE:
        x = _hadamard(x, BLOCKS)
        scale = (norm * _power_of_two(norm_exponent - 7)).to(tl.float32)
    else:
        orthonormal = tl.full([BLOCKS], 0x3FB6A09E667F3BCD, tl.int64).to(tl.float64, bitcast=True)  # 1 / sqrt(128)
        scale = (norm * (orthonormal * _power_of_two(norm_exponent))).to(tl.float32)
    x = x * scale[:, None] * tl.load(signs + j)[None, :]
    _store_values(x, values, row[:, None] * 128 + j[None, :], mask, DTYPE)


def encode(values: npt.NDArray[np.uint8], dtype: str, coding: BlockCoding, out: EncodedArrays) -> EncodeStats:
    """See `pqweights.kernels.Backend.encode`."""
    blocks = len(out.codes)
    exact = np.empty(blocks, dtype=np.float64)
    arrays: list[npt.NDArray[Any]] = [*out, exact]
    with _stream():
        thresholds, levels, signs = _tables(coding)
        outputs = [_like_on_device(array) for array in arrays]
        inputs = (_to_device(_words(values, dtype)), thresholds, levels, signs)
        _run(_encode, dtype, coding, blocks, *inputs, *outputs, blocks, coding.norm_exponent)
        for array, output in zip(arrays, outputs, strict=True):
            _from_device(output, array)
    bad = np.flatnonzero(np.isnan(exact))
    nonzero = exact[exact > 0]
    return EncodeStats(
        float(nonzero.min()) if len(nonzero) else float("inf"),
        float(nonzero.max()) if len(nonzero) else 0.0,
        int(bad[0]) if len(bad) else -1,
    )


def decode(
    encoded: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]],
    coding: BlockCoding,
    dtype: str,
    values: npt.NDArray[np.uint8],
) -> None:
    """See `pqweights.kernels.Backend.decode`."""
    codes, norms = encoded
    blocks = len(codes)
    with _stream():
        _, levels, signs = _tables(coding)
        output = _like_on_device(_words(values, dtype))
        inputs = (_to_device(codes), _to_device(norms), levels, signs)
        _run(_decode, dtype, coding, blocks, *inputs, output, blocks, coding.norm_exponent, coding.rotate)
        _from_device(output, _words(values, dtype))


def empty(byte_count: int) -> npt.NDArray[np.uint8]:
    """See `pqweights.kernels.Backend.empty`: page-locked memory."""
    array: npt.NDArray[np.uint8] = torch.empty(byte_count, dtype=torch.uint8, pin_memory=not INTERPRETED).numpy()
    return array


def _device() -> torch.device:
    return torch.device("cpu") if INTERPRETED else torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def _stream() -> Iterator[None]:
    """Everything inside goes to the calling thread's own stream, and is done when the block ends."""
    if INTERPRETED:
        yield
        return
    stream = worker().kept("CUDA stream", _device(), torch.cuda.Stream)
    try:
        with torch.cuda.stream(stream):
            yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"--device cuda: the GPU's memory is full ({str(error).splitlines()[0]}); use fewer --threads, or --device cpu"
        ) from None
    finally:
        stream.synchronize()


def _run(kernel: Any, dtype: str, coding: BlockCoding, blocks: int, *arguments: Any) -> None:
    grid = (triton.cdiv(blocks, BLOCKS_PER_PROGRAM),)
    # Interpreted, numpy computes and would warn of what a GPU does silently: infinities and NaN in blocks that are refused.
    with _launch, np.errstate(all="ignore"):
        constants = {"DTYPE": VALUE_DTYPES[dtype], "BITS": coding.codebook.bits, "BLOCKS": BLOCKS_PER_PROGRAM}
        kernel[grid](*arguments, **constants, **COMPILE_OPTIONS)


def _tables(coding: BlockCoding) -> tuple[Tensor, Tensor, Tensor]:
    """Thresholds, levels and the factor of each coordinate, on the device."""
    factors = SIGNS if coding.signed else np.ones_like(SIGNS)
    thresholds, levels, signs = (
        _uploaded(array.tobytes(), _device()) for array in (coding.codebook.thresholds, coding.codebook.levels, factors)
    )
    return thresholds, levels, signs


@functools.lru_cache(maxsize=64)
def _uploaded(floats: bytes, device: torch.device) -> Tensor:
    tensor = torch.tensor(np.frombuffer(floats, dtype=np.float32), device=device)
    if not INTERPRETED:
        torch.cuda.synchronize()  # other threads will use it on other streams
    return tensor


def _words(values: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.int16] | npt.NDArray[np.int32]:
    """Raw values as the integers of their size."""
    return values.view(np.int32) if dtype == "F32" else values.view(np.int16)


def _signed(array: npt.NDArray[Any]) -> Tensor:
    """The same memory as a tensor; of 16-bit patterns as signed ones, which torch knows better."""
    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)


def _to_device(array: npt.NDArray[Any]) -> Tensor:
    return _signed(array).to(_device(), non_blocking=True)


def _like_on_device(array: npt.NDArray[Any]) -> Tensor:
    return torch.empty_like(_signed(array), device=_device())


def _from_device(tensor: Tensor, array: npt.NDArray[Any]) -> None:
    _signed(array).copy_(tensor, non_blocking=True)
