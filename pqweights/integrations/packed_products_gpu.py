"""Products of packed rows on a GPU; see packed_products.py."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pqweights.integrations.packed_rows import NAMES, Matrix, PackedRows

if TYPE_CHECKING:
    from pqweights.kernels.gpu_products import GpuProduct

# The kernel takes 16 rows of inputs at a time, and torch's operations, which decode on a GPU, pass over a weight in
# float32 more than ten times.
MOST_ROWS = 64


def multiplies(matrix: Matrix, x: Tensor) -> bool:
    """Whether the product of a matrix with rows of inputs is computed from its codes; without triton it is not."""
    few = len(x) <= MOST_ROWS and x.dtype in NAMES and _runs_triton(x.device)
    return few and all(rows.parts[0].device == x.device and _product(rows) is not None for rows in matrix)


def multiply(matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias.

    matrix: W, of which `multiplies` is true
    x: [rows, columns] BF16, F16 or F32
    bias: [outputs], if there is one
    """
    from pqweights.kernels.gpu_products import prepare

    x, above = x.contiguous(), 0
    out = torch.empty(len(x), sum(rows.rows for rows in matrix), dtype=x.dtype, device=x.device)
    for rows in matrix:
        product = _product(rows)
        assert product is not None
        here = slice(above, above + rows.rows)
        part = None if bias is None else bias[here].contiguous()
        inputs = prepare(x, product.basis, product.awq)
        product.multiply(inputs, out=out[:, here], bias=part, factor=rows.factor.value)
        above += rows.rows
    return out


@functools.cache
def _runs_triton(device: torch.device) -> bool:
    """Whether the kernels run on a device: on GPUs of NVIDIA from Ampere on, whose tensor cores they use."""
    if importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


# Rows that are copied or moved get products of their own.
_products: WeakKeyDictionary[PackedRows, GpuProduct | None] = WeakKeyDictionary()


def _product(rows: PackedRows) -> GpuProduct | None:
    """Return what multiplies these rows, made on first use; None if they have to be decoded."""
    if rows not in _products:
        _products[rows] = _make_product(rows)
    return _products[rows]


def _make_product(rows: PackedRows) -> GpuProduct | None:
    """Return the product of rows that a scalar codec encoded in whole blocks."""
    from pqweights.kernels.gpu_products import GpuProduct

    if rows.coding is None:
        return None
    codes, norms = rows.parts
    return GpuProduct(
        words=codes.view(torch.int32),
        norms=norms.reshape(-1).view(torch.float16),
        coding=rows.coding,
        outputs=rows.rows,
        awq=rows.awq,
    )
