"""The GPU backend: Triton kernels that compute what docs/format.md says, operation by operation.

So the bytes equal the reference's: multiplications and additions are not fused, square roots and divisions are
correctly rounded, and every sum is the format's own tree. tests/kernels/test_gpu.py checks the machine code for it.
Each thread has a stream of its own, so that one thread's transfers overlap another's kernels; `empty` returns
page-locked memory, which such transfers need. With TRITON_INTERPRET=1 the same kernels run, slowly, without a GPU.
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
# Blocks that one program handles. The interpreter's cost is per program, not per element.
BLOCKS_PER_PROGRAM = 256 if INTERPRETED else 16
COMPILE_OPTIONS = {} if INTERPRETED else {"enable_fp_fusion": False, "num_warps": 4}

BF16, F16, F32 = (tl.constexpr(VALUE_DTYPES[name]) for name in ("BF16", "F16", "F32"))

launching = threading.Lock()  # Triton compiles on the first launch, which two threads must not do at once


@triton.jit
def _butterfly(x: tl.tensor, H: tl.constexpr, BLOCKS: tl.constexpr) -> tl.tensor:
    """One stage of the rotation: x [BLOCKS, 128] with sums and differences of coordinates that are H apart."""
    pairs = tl.permute(tl.reshape(x, [BLOCKS, 64 // H, 2, H]), [0, 1, 3, 2])
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 1, 3, 2]), [BLOCKS, 128])


@triton.jit
def hadamard(x: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """x [BLOCKS, 128] f32 rotated, by the stages 1, 2, ..., 64."""
    for stage in tl.static_range(7):
        x = _butterfly(x, 1 << stage, BLOCKS)
    return x


@triton.jit
def _tree_sum(x: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """The sums [BLOCKS] of the rows of x [BLOCKS, 128] f32, by folding the upper half onto the lower one."""
    for stage in tl.static_range(7):
        x = tl.sum(tl.reshape(x, [BLOCKS, 2, 64 >> stage]), axis=1)  # of two terms: no order to choose
    return tl.reshape(x, [BLOCKS])


@triton.jit
def power_of_two(k: tl.tensor) -> tl.tensor:
    """2**k in f64, for k (i32) from -1022 to 1023."""
    return ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _load_values(values: tl.tensor, at: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The values at some places, as f32."""
    if DTYPE == BF16:
        x = (tl.load(values + at, mask=mask, other=0).to(tl.uint16).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == F16:
        x = tl.load(values + at, mask=mask, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = tl.load(values + at, mask=mask, other=0).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _store_values(x: tl.tensor, values: tl.tensor, at: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr) -> None:
    """The inverse of _load_values, rounded to nearest even and saturated."""
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
def _pack_field(
    q: tl.tensor, rows: tl.tensor, mask: tl.tensor, SHIFT: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr
) -> None:
    """Fold bits [SHIFT, SHIFT + WIDTH) of 128 codes (i32) into 16 * WIDTH bytes of each row. rows: their addresses."""
    field = tl.reshape((q >> SHIFT) & ((1 << WIDTH) - 1), [BLOCKS, 8 // WIDTH, 16 * WIDTH])
    place = (tl.arange(0, 8 // WIDTH) * WIDTH)[None, :, None]
    packed = tl.sum(field << place, axis=1)
    tl.store(rows + 16 * SHIFT + tl.arange(0, 16 * WIDTH)[None, :], packed.to(tl.uint8), mask=mask)


@triton.jit
def _unpack_field(
    rows: tl.tensor, mask: tl.tensor, SHIFT: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """The inverse of _pack_field: [BLOCKS, 128] i32, already shifted to its place."""
    packed = tl.load(rows + 16 * SHIFT + tl.arange(0, 16 * WIDTH)[None, :], mask=mask, other=0).to(tl.int32)
    place = (tl.arange(0, 8 // WIDTH) * WIDTH)[None, :, None]
    field = (packed[:, None, :] >> place) & ((1 << WIDTH) - 1)
    return tl.reshape(field, [BLOCKS, 128]) << SHIFT


@triton.jit
def _prescaled(x: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """x * 2**-k for x [BLOCKS, 128] f32, its sums of squares, k, and whether x is finite (each [BLOCKS])."""
    # The largest magnitude by its bits, which order like the number and put infinities and NaN on top.
    largest_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest_bits < 0x7F800000
    squares = _tree_sum(x * x, BLOCKS)
    safe = (squares >= 8.673617379884035e-19) & (squares <= 1.152921504606847e18)  # 2**-60, 2**60
    largest = largest_bits.to(tl.float32, bitcast=True).to(tl.float64)
    exponent = ((largest.to(tl.int64, bitcast=True) >> 52) - 1023).to(tl.int32)
    k = tl.where(safe | (largest_bits == 0) | (finite == 0), 0, exponent)
    half = tl.where(k < 0, -(-k // 2), k // 2)
    first = power_of_two(-half).to(tl.float32)
    second = power_of_two(half - k).to(tl.float32)
    x = x * first[:, None] * second[:, None]
    return x, _tree_sum(x * x, BLOCKS), k, finite


@triton.jit
def _nearest(z: tl.tensor, thresholds: tl.tensor, BITS: tl.constexpr, BLOCKS: tl.constexpr) -> tl.tensor:
    """The codes [BLOCKS, 128]: the number of thresholds that are not above z, by bisection."""
    q = tl.zeros([BLOCKS, 128], tl.int32)
    for step in tl.static_range(BITS):
        middle = q + (1 << (BITS - 1 - step))
        q = tl.where(z >= tl.load(thresholds + middle - 1), middle, q)
    return q


@triton.jit
def _relative_error(residual: tl.tensor, projection: tl.tensor, level_energy: tl.tensor, gain: tl.tensor) -> tl.tensor:
    """The squared error (f64) of normalised blocks, decoded with `gain` (f64) times their lengths."""
    short = 1.0 - gain
    wide_energy = level_energy.to(tl.float64)
    per_block = residual.to(tl.float64) + 2.0 * short * (projection.to(tl.float64) - wide_energy)
    per_block = per_block + short * short * wide_energy
    return tl.where(per_block < 0.0, 0.0, per_block)


# Triton passes arrays and numbers to the kernels that it launches one by one, so their parameters stay apart.
@triton.jit(do_not_specialize=["blocks", "norm_exponent"])
def _encode(
    values: tl.tensor,
    thresholds: tl.tensor,
    levels: tl.tensor,
    signs: tl.tensor,
    codes: tl.tensor,
    norms: tl.tensor,
    energies: tl.tensor,
    errors: tl.tensor,
    exact_norms: tl.tensor,
    blocks: tl.tensor,
    norm_exponent: tl.tensor,
    DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = row < blocks
    mask = inside[:, None]
    j = tl.arange(0, 128)
    x = _load_values(values, row[:, None] * 128 + j[None, :], mask, DTYPE)
    x, squares, k, finite = _prescaled(x * tl.load(signs + j)[None, :], BLOCKS)
    radius = tl.sqrt_rn(squares)
    inverse = tl.where(radius > 0, tl.div_rn(tl.full([BLOCKS], 1.0, tl.float32), radius), 0.0)
    z = hadamard(x, BLOCKS) * inverse[:, None]
    q = _nearest(z, thresholds, BITS, BLOCKS)
    c = tl.load(levels + q)
    projection = _tree_sum(z * c, BLOCKS)
    level_energy = _tree_sum(c * c, BLOCKS)
    residual = _tree_sum((z - c) * (z - c), BLOCKS)
    norm = radius * tl.div_rn(projection, level_energy)

    two_to_k = power_of_two(k)
    exact = norm.to(tl.float64) * two_to_k
    stored = (exact * power_of_two(-norm_exponent)).to(tl.float32).to(tl.float16)
    energy = squares.to(tl.float64) * two_to_k * two_to_k
    length = tl.where(radius > 0, radius.to(tl.float64) * two_to_k, 1.0)
    gain = stored.to(tl.float64) * power_of_two(norm_exponent) / length
    error = energy / 128.0 * _relative_error(residual, projection, level_energy, gain)

    tl.store(norms + row, stored.to(tl.int16, bitcast=True), mask=inside)
    tl.store(energies + row, energy, mask=inside)
    tl.store(errors + row, tl.where(radius > 0, error, 0.0), mask=inside)
    tl.store(exact_norms + row, tl.where(finite, exact, float("nan")), mask=inside)
    _pack(q, codes + row[:, None] * (16 * BITS), mask, BITS, BLOCKS)


@triton.jit
def _pack(q: tl.tensor, rows: tl.tensor, mask: tl.tensor, BITS: tl.constexpr, BLOCKS: tl.constexpr) -> None:
    """Fold 128 codes (i32) into each row of 16 * BITS bytes, one field per binary digit of the width."""
    if BITS & 8:
        _pack_field(q, rows, mask, 0, 8, BLOCKS)
    if BITS & 4:
        _pack_field(q, rows, mask, 0, 4, BLOCKS)
    if BITS & 2:
        _pack_field(q, rows, mask, BITS & 4, 2, BLOCKS)
    if BITS & 1:
        _pack_field(q, rows, mask, BITS & 6, 1, BLOCKS)


@triton.jit
def _unpack(rows: tl.tensor, mask: tl.tensor, BITS: tl.constexpr, BLOCKS: tl.constexpr) -> tl.tensor:
    """The inverse of _pack."""
    q = tl.zeros([BLOCKS, 128], tl.int32)
    if BITS & 8:
        q |= _unpack_field(rows, mask, 0, 8, BLOCKS)
    if BITS & 4:
        q |= _unpack_field(rows, mask, 0, 4, BLOCKS)
    if BITS & 2:
        q |= _unpack_field(rows, mask, BITS & 4, 2, BLOCKS)
    if BITS & 1:
        q |= _unpack_field(rows, mask, BITS & 6, 1, BLOCKS)
    return q


@triton.jit(do_not_specialize=["blocks", "norm_exponent"])
def _decode(
    codes: tl.tensor,
    norms: tl.tensor,
    levels: tl.tensor,
    signs: tl.tensor,
    values: tl.tensor,
    blocks: tl.tensor,
    norm_exponent: tl.tensor,
    ROTATE: tl.constexpr,
    DTYPE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = row < blocks
    mask = inside[:, None]
    j = tl.arange(0, 128)
    x = tl.load(levels + _unpack(codes + row[:, None] * (16 * BITS), mask, BITS, BLOCKS))
    norm = tl.load(norms + row, mask=inside, other=0).to(tl.float16, bitcast=True).to(tl.float64)
    if ROTATE:
        x = hadamard(x, BLOCKS)
        scale = (norm * power_of_two(norm_exponent - 7)).to(tl.float32)
    else:
        orthonormal = tl.full([BLOCKS], 0x3FB6A09E667F3BCD, tl.int64).to(tl.float64, bitcast=True)  # 1 / sqrt(128)
        scale = (norm * (orthonormal * power_of_two(norm_exponent))).to(tl.float32)
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
    room = torch.empty(byte_count, dtype=torch.uint8, device="cpu", pin_memory=not INTERPRETED)
    array: npt.NDArray[np.uint8] = room.numpy()
    return array


def _device() -> torch.device:
    return torch.device("cpu") if INTERPRETED else torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def _stream() -> Iterator[None]:
    """Run what is inside on the calling thread's own stream, and wait for it at the end."""
    if INTERPRETED:
        yield
        return
    stream = worker().kept("CUDA stream", _device(), torch.cuda.Stream)
    try:
        with torch.cuda.stream(stream):
            yield
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(
            f"--device cuda: the GPU's memory is full ({reason}); use fewer --threads, or --device cpu"
        ) from None
    finally:
        stream.synchronize()


def _run(kernel: Any, dtype: str, coding: BlockCoding, blocks: int, *arguments: Any) -> None:
    grid = (triton.cdiv(blocks, BLOCKS_PER_PROGRAM),)
    # The interpreter computes with numpy, which would warn of infinities and NaN, in blocks that are refused later.
    with launching, np.errstate(all="ignore"):
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
        torch.cuda.synchronize()  # other threads use it on other streams
    return tensor


def _words(values: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.int16] | npt.NDArray[np.int32]:
    """The same memory as integers of the size of the values."""
    return values.view(np.int32) if dtype == "F32" else values.view(np.int16)


def _signed(array: npt.NDArray[Any]) -> Tensor:
    """The same memory as a tensor; torch does little with uint16, so it becomes int16."""
    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)


def _to_device(array: npt.NDArray[Any]) -> Tensor:
    return _signed(array).to(_device(), non_blocking=True)


def _like_on_device(array: npt.NDArray[Any]) -> Tensor:
    return torch.empty_like(_signed(array), device=_device())


def _from_device(tensor: Tensor, array: npt.NDArray[Any]) -> None:
    _signed(array).copy_(tensor, non_blocking=True)
