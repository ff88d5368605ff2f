"""Products of packed weights, and the same in float64 numpy from docs/format.md: what the kernels must keep to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import independent_reader
import numpy as np
import numpy.typing as npt
from closeness import ROUNDED_BY, rounding

from pqweights.common.dtypes import from_float32, to_float32
from pqweights.formats.lloyd_max import codebook
from pqweights.kernels import BlockCoding, products
from pqweights.kernels.products import MOST_INPUT, MOST_LEVEL

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
SMALLEST = {"BF16": 2.0**-133, "F16": 2.0**-24, "F32": 2.0**-149}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A weight and inputs.

    codes: [outputs * blocks, 16 * bits]; norms: [outputs * blocks] f16
    x: [rows, blocks * 128] f32, which are numbers of the dtype
    awq: [blocks * 128], if there are scales; bias: [outputs], if there is one
    """

    codes: npt.NDArray[np.uint8]
    norms: npt.NDArray[np.float16]
    coding: BlockCoding
    x: Floats
    dtype: str
    awq: Floats | None
    bias: Floats | None

    @property
    def outputs(self) -> int:
        return len(self.norms) * 128 // self.x.shape[1]


def make_case(bits: int, dtype: str, rows: int, *, outputs: int = 37, blocks: int = 18) -> Case:
    """Return a case; odd widths have signs, and an odd number of rows has scales and a bias."""
    rng = np.random.default_rng([0, bits, rows])
    x = rng.standard_normal((rows, blocks * 128)).astype(np.float32)
    x[:, :128] *= np.float32(50)  # blocks differ in size, as inputs do
    x[-1, 128:256] = 0
    norms = (10.0 ** rng.uniform(-7, 1, outputs * blocks)).astype(np.float16)
    norms[::7] = 0
    return Case(
        codes=rng.integers(0, 256, (outputs * blocks, 16 * bits)).astype(np.uint8),
        norms=norms,
        coding=BlockCoding(codebook=codebook(bits), signed=bool(bits % 2), norm_exponent=bits - 5),
        x=to_float32(from_float32(x.reshape(-1), dtype), dtype).reshape(x.shape),
        dtype=dtype,
        awq=rng.uniform(0.5, 2, blocks * 128).astype(np.float32) if rows % 2 else None,
        bias=rng.standard_normal(outputs).astype(np.float32) if rows % 2 else None,
    )


def rotated(x: Doubles) -> Doubles:
    """Return blocks of 128, [blocks, 128], times the Hadamard matrix, whose entries are 1 and -1."""
    index = np.arange(128)
    ones = np.array([[bin(i & j).count("1") % 2 for j in index] for i in index])
    result: Doubles = x @ (1.0 - 2.0 * ones)
    return result


def exact(case: Case) -> tuple[Doubles, Doubles]:
    """Return the products, [rows, outputs], and how far a kernel may be off before it rounds to the dtype.

    Rounding inputs and levels to integers makes errors that are as good as random: six standard deviations.
    """
    levels = case.coding.codebook.levels.astype(np.float64)
    codes = independent_reader.unpack(case.codes, case.coding.codebook.bits)
    norms = case.norms.astype(np.float64)[:, None] * 2.0**case.coding.norm_exponent
    norms /= 128
    coded = (levels[codes] * norms).reshape(case.outputs, -1, 128)
    x = case.x.astype(np.float64) / (1 if case.awq is None else case.awq)
    blocks = x.reshape(-1, 128) * np.where(independent_reader.SIGNS & case.coding.signed, -1, 1)
    inputs = rotated(blocks).reshape(len(x), -1, 128)
    made = np.einsum("obk,rbk->ro", coded, inputs) + (0 if case.bias is None else case.bias)
    sizes = np.einsum("obk,rbk->ro", np.abs(coded), np.abs(inputs)) * rounding("F32", 4)
    if case.dtype == "F32":
        return made, sizes
    steps = np.abs(inputs).max(-1) / MOST_INPUT
    of_inputs = np.einsum("ob,rb->ro", np.square(coded).sum(-1), np.square(steps) / 12)
    level_steps = np.square(norms[:, 0] * np.abs(levels).max() / MOST_LEVEL).reshape(case.outputs, -1) / 12
    of_levels = np.einsum("ob,rb->ro", level_steps, np.square(inputs).sum(-1))
    return made, 6 * np.sqrt(of_inputs + of_levels) + sizes


def elements(x: Floats, dtype: str) -> npt.NDArray[Any]:
    """Return numbers of a dtype as the kernels take them."""
    return from_float32(x.reshape(-1), dtype).view(np.float32 if dtype == "F32" else np.uint16).reshape(x.shape)


def computed(case: Case, *, threads: int = 1, factor: float = 1.0) -> Doubles:
    """Return the products of the kernel, [rows, outputs]."""
    rows = len(case.x)
    weight = products.Product(
        case.codes, case.norms.view(np.uint16), case.coding, outputs=case.outputs, dtype=case.dtype, awq=case.awq
    )
    inputs = products.PreparedInputs()
    inputs.prepare(elements(case.x, case.dtype), dtype=case.dtype, basis=weight.basis)
    before, after = 2, 3
    out = elements(np.full((rows, before + case.outputs + after), 77, dtype=np.float32), case.dtype)
    bias = None if case.bias is None else np.pad(case.bias, (before, after), constant_values=55)
    weight.multiply(inputs, out=out, column=before, bias=bias, factor=factor, threads=threads)
    made = to_float32(out.view(np.uint8).reshape(-1), case.dtype).reshape(out.shape)
    assert (np.delete(made, range(before, before + case.outputs), 1) == 77).all()
    return made[:, before : before + case.outputs].astype(np.float64)


def excess(case: Case, **options: Any) -> float:
    """Return the largest error of a kernel, in multiples of what it may be."""
    made, bound = exact(case)
    rounded = ROUNDED_BY[case.dtype] * (np.abs(made) + bound) + SMALLEST[case.dtype]
    return float((np.abs(computed(case, **options) - made) / (bound + rounded)).max())


def prepared_integers(case: Case) -> tuple[npt.NDArray[np.int16], Floats]:
    """Return what the kernel makes of inputs: [blocks, rows, 128] in ascending order, and scales [rows, blocks].

    The order in which a kernel has them depends on the processor; products show whether it is right.
    """
    rows = len(case.x)
    basis = products.InputBasis(case.coding.signed, b"" if case.awq is None else case.awq.tobytes())
    inputs = products.PreparedInputs()
    inputs.prepare(elements(case.x, case.dtype), dtype=case.dtype, basis=basis)
    values, scales = (array.owner for array in inputs.arrays)
    return np.sort(values.reshape(-1, rows, 128)), scales.reshape(rows, -1)


def prepared_floats(case: Case) -> Floats:
    """Return what the kernel makes of inputs of F32, [blocks, rows, 128]."""
    basis = products.InputBasis(case.coding.signed, b"" if case.awq is None else case.awq.tobytes())
    inputs = products.PreparedInputs()
    inputs.prepare(case.x, dtype="F32", basis=basis)
    values: Floats = inputs.arrays[0].owner.reshape(-1, len(case.x), 128)
    return values
