"""Products of packed weights with a few rows of inputs on a GPU, in Triton: y = W x + b without decoding W.

native/products.cpp has the same formula for CPUs, native/hadamard.hpp the rotation, and native/codes.hpp the bits of
codes. As there, each block of 128 inputs is rotated once for all rows of W, because <H c, x> is <c, H x>, and a row of
W is then a look-up, a multiplication and an addition for each code. Sums are float32.

One row of inputs is multiplied in float32. Several rows go through the tensor cores, 16 at a time: rotated inputs and
levels become float16, inputs with a scale for each block (in F32 models both stay float32).

Reading the codes takes longest on a GPU that is well used. So they are read once, as words of 32 bits that lie together
for the threads of a warp, and a program has several kilobytes of them in flight. Where a thread's four or eight codes
stand in such a word does not depend on the thread, because the order of the inputs is adapted to that of the codes:
`_code_bytes`. With TRITON_INTERPRET=1 the same kernels run, slowly, without a GPU.
"""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pqweights.kernels import BLOCK_SIZE, SIGNS, BlockCoding
from pqweights.kernels.products import InputBasis

# Blocks of a row of W that one program reads at a time: with 16 rows, 4 kB of codes of 4 bits.
BLOCKS = 4
# Rows of W that one program multiplies. More of them read the inputs less often; fewer leave no processor idle, if
# there are this many programs. The tensor cores take 16.
MOST_OUTPUTS, LEAST_OUTPUTS, ENOUGH_PROGRAMS = 16, 4, 512
TILE = 16
# No pipelining: the look-ups need what was just loaded, and many programs share a processor.
MULTIPLY_OPTIONS = {"num_warps": 4, "num_stages": 1}
PREPARE_OPTIONS = {"num_warps": 1}

_launching = threading.Lock()  # Triton compiles on the first launch, which two threads must not do at once


# --- inputs ---


@triton.jit
def _butterfly(x: tl.tensor, H: tl.constexpr) -> tl.tensor:
    """One stage of the rotation: x [128] with sums and differences of coordinates that are H apart."""
    low, high = tl.split(tl.permute(tl.reshape(x, [64 // H, 2, H]), [0, 2, 1]))
    return tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 2, 1]), [128])


@triton.jit
def _prepare(
    values: tl.tensor,  # [rows, blocks * 128]
    signs: tl.tensor,  # f32 [128]
    awq: tl.tensor,  # f32 [blocks * 128]
    out: tl.tensor,  # [blocks, 8, rows, 16] f32 or f16, in the order of _code_bytes
    scales: tl.tensor,  # out: f32 [blocks, rows], what a one stands for; not written for f32
    SCALED: tl.constexpr,  # whether inputs are divided by awq
    SIGNED: tl.constexpr,  # see InputBasis
    HALF: tl.constexpr,  # whether inputs become f16
) -> None:
    row, rows = tl.program_id(0), tl.num_programs(0)
    block, blocks = tl.program_id(1), tl.num_programs(1)
    j = tl.arange(0, 128)
    column = block * 128 + j
    x = tl.load(values + row.to(tl.int64) * blocks * 128 + column).to(tl.float32)
    if SCALED:
        x = x / tl.load(awq + column)
    if SIGNED:
        x = x * tl.load(signs + j)
    for stage in tl.static_range(7):
        x = _butterfly(x, 1 << stage)
    if HALF:
        # The largest magnitude by its bits, which order like the number and put infinities and NaN on top.
        bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
        largest = bits.to(tl.float32, bitcast=True)
        usable = (bits < 0x7F800000) & (largest >= 7.888609052210118e-31)  # 2**-100
        scale = tl.where(usable, largest * 3.0517578125e-05, tl.where(bits < 0x7F800000, 0.0, float("nan")))  # 2**-15
        x = tl.where(usable, x * (32768.0 / tl.where(usable, largest, 1.0)), 0.0)
        tl.store(scales + block * rows + row, scale)
    place = (block * 8 + j // 64 * 4 + j % 4) * (rows * 16) + row * 16 + j % 64 // 4
    tl.store(out + place, x.to(out.dtype.element_ty))


@dataclass(frozen=True, eq=False, kw_only=True)
class GpuInputs:
    """Rows of inputs, ready for products.

    values: [blocks, 8, rows, 16] f32, or f16 if there are several rows of BF16 or F16
    scales: what a one stands for in f16, f32 [blocks, rows]
    basis: that in which they are
    """

    values: Tensor
    scales: Tensor
    basis: InputBasis

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.values.shape[2]


def prepare(x: Tensor, basis: InputBasis, awq: Tensor | None) -> GpuInputs:
    """Bring rows of inputs into the basis of a weight's codes.

    x: [rows, columns] BF16, F16 or F32 without gaps; columns are a multiple of 128
    awq: the scales of the basis on the device of x, f32 [columns]; None if it has none
    """
    rows, columns = x.shape
    blocks, half = columns // BLOCK_SIZE, rows > 1 and x.dtype != torch.float32
    values = torch.empty(blocks, 8, rows, 16, dtype=torch.float16 if half else torch.float32, device=x.device)
    scales = torch.empty(blocks, rows, dtype=torch.float32, device=x.device)
    signs = _uploaded(SIGNS.tobytes(), x.device)
    constants = {"SCALED": awq is not None, "SIGNED": basis.signed, "HALF": half}
    arguments = (x, signs, signs if awq is None else awq, values, scales)
    _run(_prepare, (rows, blocks), arguments, constants | PREPARE_OPTIONS)
    return GpuInputs(values=values, scales=scales, basis=basis)


# --- products ---


@triton.jit
def _code_bytes(words: tl.tensor, at: tl.tensor, w: tl.tensor, mask: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Eight codes in the bytes of two words (i32), the codes 4 w + k and 64 + 4 w + k in the bytes k.

    words: i32
    at: where blocks begin in them
    w: from 0 to 15
    """
    if BITS == 8:
        low = tl.load(words + at + w, mask=mask, other=0)
        high = tl.load(words + at + 16 + w, mask=mask, other=0)
    else:
        # The fields of docs/format.md, low bits first. Their widths divide 4, so that shifting a word by 4 brings the
        # codes of the upper half of a block to where those of the lower one were.
        if BITS & 4:
            field = tl.load(words + at + w, mask=mask, other=0)
            low, high = field & 0x0F0F0F0F, (field >> 4) & 0x0F0F0F0F
        else:
            low, high = 0, 0
        if BITS & 2:
            field = tl.load(words + at + 4 * (BITS & 4) + w % 8, mask=mask, other=0) >> (w // 8 * 2)
            low = low | ((field & 0x03030303) << (BITS & 4))
            high = high | (((field >> 4) & 0x03030303) << (BITS & 4))
        if BITS & 1:
            field = tl.load(words + at + 4 * (BITS & 6) + w % 4, mask=mask, other=0) >> (w // 4)
            low = low | ((field & 0x01010101) << (BITS & 6))
            high = high | (((field >> 4) & 0x01010101) << (BITS & 6))
    return low, high


@triton.jit
def _store(
    y: tl.tensor, out: tl.tensor, bias: tl.tensor, row: tl.tensor, at: tl.tensor, mask: tl.tensor, exponent: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> None:  # fmt: skip
    """Store y * 2**exponent + bias. y: f32; row: of W; at: places in out."""
    power_of_two = ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    y = (y.to(tl.float64) * power_of_two).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + row, mask=mask, other=0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


# Triton passes arrays and numbers to the kernels that it launches one by one, so their parameters stay apart.
@triton.jit(do_not_specialize=["outputs", "blocks", "stride", "exponent", "rows"])
def _multiply_one(
    words: tl.tensor,  # i32 [outputs * blocks, 4 * BITS]
    norms: tl.tensor,  # f16 [outputs * blocks]
    levels: tl.tensor,  # f32
    inputs: tl.tensor,  # f32 [blocks, 8, 16]
    scales: tl.tensor,  # not read
    bias: tl.tensor,  # [outputs]
    out: tl.tensor,  # [outputs]
    outputs: tl.tensor,
    blocks: tl.tensor,
    stride: tl.tensor,  # not read
    exponent: tl.tensor,
    rows: tl.tensor,  # 1
    BITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = row < outputs
    place = tl.arange(0, BLOCKS * 16)
    w = place % 16
    total = tl.zeros([OUTPUTS, BLOCKS * 16], tl.float32)
    for first in range(0, blocks, BLOCKS):
        block = first + place // 16
        here = block < blocks
        mask = inside[:, None] & here[None, :]
        at = row.to(tl.int64)[:, None] * blocks + block[None, :]
        low, high = _code_bytes(words, at * (4 * BITS), w[None, :], mask, BITS)
        part = tl.zeros([OUTPUTS, BLOCKS * 16], tl.float32)
        for k in tl.static_range(4):
            x = tl.load(inputs + block * 128 + 16 * k + w, mask=here, other=0)
            part += tl.load(levels + ((low >> (8 * k)) & 255)) * x[None, :]
            x = tl.load(inputs + block * 128 + 64 + 16 * k + w, mask=here, other=0)
            part += tl.load(levels + ((high >> (8 * k)) & 255)) * x[None, :]
        total += part * tl.load(norms + at, mask=mask, other=0).to(tl.float32)
    _store(tl.sum(total, axis=1), out, bias, row, row, inside, exponent, HAS_BIAS)


@triton.jit(do_not_specialize=["outputs", "blocks", "stride", "exponent", "rows"])
def _multiply_some(
    words: tl.tensor,  # i32 [outputs * blocks, 4 * BITS]
    norms: tl.tensor,  # f16 [outputs * blocks]
    levels: tl.tensor,  # of the dtype of inputs
    inputs: tl.tensor,  # f16 or f32 [blocks, 8, rows, 16]
    scales: tl.tensor,  # f32 [blocks, rows], if inputs are f16
    bias: tl.tensor,  # [outputs]
    out: tl.tensor,  # [rows, outputs]
    outputs: tl.tensor,
    blocks: tl.tensor,
    stride: tl.tensor,  # elements between the rows of out
    exponent: tl.tensor,
    rows: tl.tensor,
    BITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = row < outputs
    r = tl.program_id(1) * 16 + tl.arange(0, 16)
    w = tl.arange(0, 16)
    total = tl.zeros([BLOCKS, OUTPUTS, 16], tl.float32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        here = block < blocks
        mask = here[:, None] & inside[None, :]
        mask_of_inputs = here[:, None] & (r < rows)[None, :]
        at = row.to(tl.int64)[None, :] * blocks + block[:, None]
        low, high = _code_bytes(words, (at * (4 * BITS))[:, :, None], w[None, None, :], mask[:, :, None], BITS)
        # [blocks, w, r]
        x_at = inputs + (block[:, None, None] * (8 * rows) + r[None, None, :]) * 16 + w[None, :, None]
        part = tl.zeros([BLOCKS, OUTPUTS, 16], tl.float32)
        for k in tl.static_range(4):
            # A batch of products, one for each block, because each block has a norm of its own.
            x = tl.load(x_at + k * (16 * rows), mask=mask_of_inputs[:, None, :], other=0)
            part = tl.dot(tl.load(levels + ((low >> (8 * k)) & 255)), x, part, input_precision="tf32x3")
            x = tl.load(x_at + (4 + k) * (16 * rows), mask=mask_of_inputs[:, None, :], other=0)
            part = tl.dot(tl.load(levels + ((high >> (8 * k)) & 255)), x, part, input_precision="tf32x3")
        part = part * tl.load(norms + at, mask=mask, other=0).to(tl.float32)[:, :, None]
        if inputs.dtype.element_ty == tl.float16:
            scale = tl.load(scales + block[:, None] * rows + r[None, :], mask=mask_of_inputs, other=0)
            part = part * scale[:, None, :]
        total += part
    y = tl.sum(total, axis=0)
    mask = inside[:, None] & (r < rows)[None, :]
    at = r.to(tl.int64)[None, :] * stride + row[:, None]
    _store(y, out, bias, row[:, None], at, mask, exponent, HAS_BIAS)


@dataclass(frozen=True, eq=False, kw_only=True)
class GpuProduct:
    """A packed weight [outputs, blocks * 128] that multiplies rows of inputs.

    words: the packed codes, i32 [outputs * blocks, 4 * bits]
    norms: f16 [outputs * blocks]
    coding: what they mean
    outputs: how many there are
    awq: the scales by which the columns of the decoded weight are divided, f32 [columns], if there are any
    """

    words: Tensor
    norms: Tensor
    coding: BlockCoding
    outputs: int
    awq: Tensor | None

    @functools.cached_property
    def basis(self) -> InputBasis:
        """That in which it takes its inputs."""
        return InputBasis(self.coding.signed, b"" if self.awq is None else self.awq.cpu().numpy().tobytes())

    @functools.cached_property
    def _levels(self) -> tuple[dict[torch.dtype, Tensor], int]:
        """The levels for each dtype of prepared inputs, and the power of two by which sums are to be multiplied.

        The largest magnitude of levels is brought into [1, 2), because float16 has no larger exponents than 15.
        """
        levels = self.coding.codebook.levels.astype(np.float64)
        shift = math.frexp(float(np.abs(levels).max()))[1] - 1
        levels = np.ldexp(levels, -shift).astype(np.float32)
        exact = _uploaded(levels.tobytes(), self.words.device)
        return {torch.float32: exact, torch.float16: exact.half()}, self.coding.norm_exponent - 7 + shift

    def multiply(self, inputs: GpuInputs, *, out: Tensor, bias: Tensor | None, factor: float) -> None:
        """Write W x + b for each row of inputs.

        inputs: in the basis of this weight
        out: [rows, outputs] BF16, F16 or F32; rows may lie apart
        bias: [outputs], if there is one
        factor: by what W is multiplied, a power of two
        """
        one, rows = inputs.rows == 1, inputs.rows
        per_program = TILE
        if one:
            per_program = MOST_OUTPUTS
            while per_program > LEAST_OUTPUTS and triton.cdiv(self.outputs, per_program) < ENOUGH_PROGRAMS:
                per_program //= 2
        levels, exponent = self._levels
        numbers = self.outputs, len(inputs.scales), out.stride(0), exponent + math.frexp(factor)[1] - 1, rows
        arrays = self.words, self.norms, levels[inputs.values.dtype], inputs.values, inputs.scales
        constants = {"BITS": self.coding.codebook.bits, "HAS_BIAS": bias is not None}
        constants |= {"OUTPUTS": per_program, "BLOCKS": BLOCKS}
        grid = triton.cdiv(self.outputs, per_program), triton.cdiv(rows, TILE)
        arguments = (*arrays, inputs.scales if bias is None else bias, out, *numbers)
        _run(_multiply_one if one else _multiply_some, grid, arguments, constants | MULTIPLY_OPTIONS)


def _run(kernel: Any, grid: tuple[int, int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launch a kernel on the device and the stream on which the caller computes."""
    # The interpreter computes with numpy, which would warn of infinities and NaN, and of products that overflow.
    with _launching, torch.cuda.device_of(arguments[0]), np.errstate(all="ignore"):
        kernel[grid](*arguments, **constants)


@functools.lru_cache(maxsize=256)
def _uploaded(floats: bytes, device: torch.device) -> Tensor:
    """A table of f32 on a device, for all streams."""
    tensor = torch.tensor(np.frombuffer(floats, dtype=np.float32), device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other threads use it on other streams
    return tensor
