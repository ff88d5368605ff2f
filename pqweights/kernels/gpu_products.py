"""Products of packed weights with a few rows of inputs on a GPU, in Triton: y = W x + b without decoding W.

native/products.cpp has the same formula for CPUs, native/hadamard.hpp the rotation, and native/codes.hpp the bits of
codes. As there, each block of 128 inputs is rotated once for all rows of W, because <H c, x> is <c, H x>, and a row of
W is then a look-up, a multiplication and an addition for each code. Sums are float32.

Up to four rows of inputs are multiplied in float32, as a look-up and a fused multiply-add for each code. More rows go
through the tensor cores, 16 at a time: rotated inputs and levels become float16, inputs with a scale for each block (in
F32 models both stay float32). Look-ups in memory, even in the nearest cache, take several times longer than the reading
of the codes. So up to four bits (five on the tensor cores) the levels are picked from registers, four codes at once:
`_picking`.

Codes are read once, as words of 32 bits that lie together
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

# Up to how many rows of inputs meet the levels one by one, all in one program.
FEW_ROWS = 4
TILE = 16  # rows of inputs, as the tensor cores take them
# Of a program: rows of W, their blocks that it reads at a time, and warps. These were the fastest on an H200; without
# pipelining, because the look-ups need what was just loaded, and many programs share a processor.
FEW_PICKED = {"OUTPUTS": 2, "BLOCKS": 8, "num_warps": 1, "num_stages": 1}
FEW = {"OUTPUTS": 4, "BLOCKS": 4, "num_warps": 4, "num_stages": 1}
SOME = {"OUTPUTS": 16, "BLOCKS": 2, "num_warps": 2, "num_stages": 1}
# Up to how many bits levels are picked from registers: by the tensor cores' kernel, and by the other one.
PICKED_BITS, FEW_PICKED_BITS = 5, 4
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

    values: [blocks, 8, rows, 16] f32, or f16 if there are more than FEW_ROWS rows of BF16 or F16
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
    blocks, half = columns // BLOCK_SIZE, rows > FEW_ROWS and x.dtype != torch.float32
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


@functools.cache
def _picking(bits: int) -> str:
    """PTX that picks the levels of the four codes in the bytes of a word ($4) from registers ($5 and on), as f32 words.

    Levels are odd: code 2**bits - 1 - c has the negative level of code c. So a code becomes a sign and the place of a
    magnitude. `prmt` picks four bytes from eight by four such places of 3 bits; with 5 bits, from the second eight too.
    This is done for each of the four bytes of a float, of which the registers have those of all magnitudes.
    """
    last = (1 << (bits - 1)) - 1  # place of the largest magnitude
    pick, number = [], 5
    for byte in range(4):
        pick.append(f"prmt.b32 p{byte}, ${number}, ${number + 1}, s;")
        number += 2
        if bits == 5:
            pick += [f"prmt.b32 t, ${number}, ${number + 1}, s;", f"lop3.b32 p{byte}, u, t, p{byte}, 0xCA;"]
            number += 2
    upper = "shr.b32 u, s, 3; and.b32 u, u, 0x01010101; mul.lo.u32 u, u, 255; and.b32 s, s, 0x07070707;"
    return f"""{{
        .reg .b32 n, s, t, u, p0, p1, p2, p3, a, b, c, d;
        shr.b32 n, $4, {bits - 1}; and.b32 n, n, 0x01010101; xor.b32 n, n, 0x01010101;
        mul.lo.u32 t, n, {last}; xor.b32 s, $4, t; and.b32 s, s, {last * 0x01010101};
        {upper if bits == 5 else ""}
        shr.b32 t, s, 4; or.b32 s, s, t; prmt.b32 s, s, 0, 0x4420;
        {" ".join(pick)}
        shl.b32 n, n, 7; xor.b32 p3, p3, n;
        prmt.b32 a, p2, p3, 0x5140; prmt.b32 b, p2, p3, 0x7362;
        prmt.b32 c, p0, p1, 0x5140; prmt.b32 d, p0, p1, 0x7362;
        prmt.b32 $0, c, a, 0x5410; prmt.b32 $1, c, a, 0x7632;
        prmt.b32 $2, d, b, 0x5410; prmt.b32 $3, d, b, 0x7632;
    }}"""


@triton.jit
def _four_levels(codes: tl.tensor, levels: tl.tensor, BITS: tl.constexpr, PICKING: tl.constexpr) -> tl.tensor:
    """The levels (f32) of the codes in the four bytes of each word.

    levels: f32 [2**BITS], or the words of _picked_from
    PICKING: see _picking; empty to look them up in memory
    """
    if PICKING == "":
        first = tl.load(levels + (codes & 255))
        second = tl.load(levels + ((codes >> 8) & 255))
        third = tl.load(levels + ((codes >> 16) & 255))
        fourth = tl.load(levels + ((codes >> 24) & 255))
    else:
        words = levels.to(tl.pointer_type(tl.int32))
        low = (
            tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3),
            tl.load(words + 4), tl.load(words + 5), tl.load(words + 6), tl.load(words + 7),
        )  # fmt: skip
        if BITS == 5:
            high = (
                tl.load(words + 8), tl.load(words + 9), tl.load(words + 10), tl.load(words + 11),
                tl.load(words + 12), tl.load(words + 13), tl.load(words + 14), tl.load(words + 15),
            )  # fmt: skip
        else:
            high = ()  # type: ignore[assignment]
        first, second, third, fourth = tl.inline_asm_elementwise(
            PICKING,
            "=r,=r,=r,=r,r" + ",r" * (16 if BITS == 5 else 8),
            (codes,) + low + high,  # noqa: RUF005 (Triton has no *)
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        first = first.to(tl.float32, bitcast=True)
        second = second.to(tl.float32, bitcast=True)
        third = third.to(tl.float32, bitcast=True)
        fourth = fourth.to(tl.float32, bitcast=True)
    return first, second, third, fourth


@triton.jit
def _inner(low: tl.tensor, high: tl.tensor, x_at: tl.tensor, step: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """The sum over eight levels times their inputs. low, high: four levels each; x_at: of the first input."""
    part = low[0] * tl.load(x_at, mask=mask, other=0)[None, :]
    part += low[1] * tl.load(x_at + step, mask=mask, other=0)[None, :]
    part += low[2] * tl.load(x_at + 2 * step, mask=mask, other=0)[None, :]
    part += low[3] * tl.load(x_at + 3 * step, mask=mask, other=0)[None, :]
    part += high[0] * tl.load(x_at + 4 * step, mask=mask, other=0)[None, :]
    part += high[1] * tl.load(x_at + 5 * step, mask=mask, other=0)[None, :]
    part += high[2] * tl.load(x_at + 6 * step, mask=mask, other=0)[None, :]
    part += high[3] * tl.load(x_at + 7 * step, mask=mask, other=0)[None, :]
    return part


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
def _multiply_few(
    words: tl.tensor,  # i32 [outputs * blocks, 4 * BITS]
    norms: tl.tensor,  # f16 [outputs * blocks]
    levels: tl.tensor,  # see _four_levels
    inputs: tl.tensor,  # f32 [blocks, 8, rows, 16]
    scales: tl.tensor,  # not read
    bias: tl.tensor,  # [outputs]
    out: tl.tensor,  # [rows, outputs]
    outputs: tl.tensor,
    blocks: tl.tensor,
    stride: tl.tensor,  # elements between the rows of out
    exponent: tl.tensor,
    rows: tl.tensor,
    BITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PICKING: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,  # rows or more: 1, 2 or 4
) -> None:
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = row < outputs
    place = tl.arange(0, BLOCKS * 16)
    w = place % 16
    total_0 = tl.zeros([OUTPUTS, BLOCKS * 16], tl.float32)
    total_1, total_2, total_3 = total_0, total_0, total_0
    for first in range(0, blocks, BLOCKS):
        block = first + place // 16
        here = block < blocks
        mask = inside[:, None] & here[None, :]
        at = row.to(tl.int64)[:, None] * blocks + block[None, :]
        low, high = _code_bytes(words, at * (4 * BITS), w[None, :], mask, BITS)
        norm = tl.load(norms + at, mask=mask, other=0).to(tl.float32)
        low = _four_levels(low, levels, BITS, PICKING)
        high = _four_levels(high, levels, BITS, PICKING)
        step = 16 * rows
        x_at = inputs + block * (8 * 16 * rows) + w
        total_0 += norm * _inner(low, high, x_at, step, here)
        if ROWS > 1:
            total_1 += norm * _inner(low, high, x_at + 16, step, here)
        if ROWS > 2:
            total_2 += norm * _inner(low, high, x_at + 32, step, here)
            total_3 += norm * _inner(low, high, x_at + 48, step, here & (rows > 3))
    _store(tl.sum(total_0, axis=1), out, bias, row, row, inside, exponent, HAS_BIAS)
    at = row + stride.to(tl.int64)
    if ROWS > 1:
        _store(tl.sum(total_1, axis=1), out, bias, row, at, inside, exponent, HAS_BIAS)
    if ROWS > 2:
        _store(tl.sum(total_2, axis=1), out, bias, row, at + stride, inside, exponent, HAS_BIAS)
        last = inside & (rows > 3)
        _store(tl.sum(total_3, axis=1), out, bias, row, at + 2 * stride, last, exponent, HAS_BIAS)


@triton.jit(do_not_specialize=["outputs", "blocks", "stride", "exponent", "rows"])
def _multiply_some(
    words: tl.tensor,  # i32 [outputs * blocks, 4 * BITS]
    norms: tl.tensor,  # f16 [outputs * blocks]
    levels: tl.tensor,  # see _four_levels
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
    PICKING: tl.constexpr,
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
        low, high = _four_levels(low, levels, BITS, PICKING), _four_levels(high, levels, BITS, PICKING)
        # A batch of products, one for each block, because each block has a norm of its own.
        for k in tl.static_range(4):
            x = tl.load(x_at + k * (16 * rows), mask=mask_of_inputs[:, None, :], other=0)
            part = tl.dot(low[k].to(x.dtype), x, part, input_precision="tf32x3")
            x = tl.load(x_at + (4 + k) * (16 * rows), mask=mask_of_inputs[:, None, :], other=0)
            part = tl.dot(high[k].to(x.dtype), x, part, input_precision="tf32x3")
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
    def _levels(self) -> tuple[Tensor, Tensor | None, int]:
        """The levels f32, the same to be picked from, and the power of two by which sums are to be multiplied.

        The largest magnitude of levels is brought into [1, 2), because float16 has no larger exponents than 15.
        """
        book, device = self.coding.codebook, self.words.device
        levels = book.levels.astype(np.float64)
        shift = math.frexp(float(np.abs(levels).max()))[1] - 1
        levels = np.ldexp(levels, -shift).astype(np.float32)
        # Triton's interpreter has no PTX.
        odd = book.bits <= PICKED_BITS and device.type == "cuda" and bool((levels == -levels[::-1]).all())
        picked = _uploaded(_picked_from(levels).tobytes(), device) if odd else None
        return _uploaded(levels.tobytes(), device), picked, self.coding.norm_exponent - 7 + shift

    def multiply(self, inputs: GpuInputs, *, out: Tensor, bias: Tensor | None, factor: float) -> None:
        """Write W x + b for each row of inputs.

        inputs: in the basis of this weight
        out: [rows, outputs] BF16, F16 or F32; rows may lie apart
        bias: [outputs], if there is one
        factor: by what W is multiplied, a power of two
        """
        rows, bits = inputs.rows, self.coding.codebook.bits
        few = rows <= FEW_ROWS
        levels, picked, exponent = self._levels
        if picked is None or (few and bits > FEW_PICKED_BITS):
            picking, sizes = "", FEW if few else SOME
        else:
            levels, picking, sizes = picked, _picking(bits), FEW_PICKED if few else SOME
        constants = {"BITS": bits, "HAS_BIAS": bias is not None, "PICKING": picking, **sizes}
        if few:
            constants["ROWS"] = triton.next_power_of_2(max(1, rows))
        numbers = self.outputs, len(inputs.scales), out.stride(0), exponent + math.frexp(factor)[1] - 1, rows
        arrays = self.words, self.norms, levels, inputs.values, inputs.scales
        grid = triton.cdiv(self.outputs, sizes["OUTPUTS"]), min(1, rows) if few else triton.cdiv(rows, TILE)
        arguments = (*arrays, inputs.scales if bias is None else bias, out, *numbers)
        _run(_multiply_few if few else _multiply_some, grid, arguments, constants)


def _picked_from(levels: np.ndarray) -> np.ndarray:
    """The words of the magnitudes of odd levels, as `_picking` wants them: those of their lowest bytes first."""
    magnitudes = np.zeros(16 if len(levels) == 32 else 8, dtype=np.float32)
    magnitudes[: len(levels) // 2] = levels[len(levels) // 2 :]
    return np.ascontiguousarray(magnitudes.view(np.uint8).reshape(-1, 4).T).view(np.float32)


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
