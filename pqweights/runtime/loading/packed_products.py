"""Products of packed rows: few rows of inputs meet the codes, many meet rows that were decoded for them."""

from __future__ import annotations

import ctypes
import threading
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from pqweights.kernels.products import MOST_ROWS, InputBasis, PreparedInputs, Product
from pqweights.runtime.loading.packed_rows import NAMES, Matrix, PackedRows, Rows, buffer, decode_rows, share

# How many weights are decoded before they are multiplied. Products are fastest if they are large and shared by all
# threads; and this much memory (32 MB in BF16) is no burden.
DECODED_WEIGHTS = 1 << 24


def linear(matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias.

    matrix: W [outputs, columns]
    x: [..., columns], of the dtype and on the device of the result
    bias: [outputs], if there is one
    """
    columns, outputs = matrix[0].columns, sum(rows.rows for rows in matrix)
    flat = x.reshape(-1, columns)
    if not len(flat):
        return x.new_empty(*x.shape[:-1], outputs)
    if bias is not None and (bias.shape != (outputs,) or bias.device != x.device):
        bias = bias.to(x.device).expand(outputs)
    product = multiply if multiplies(matrix, flat) else _multiply_decoded
    return product(matrix, flat, bias).view(*x.shape[:-1], outputs)


def _multiply_decoded(matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias, for x [rows, columns]: decode some rows of W at a time, which torch then multiplies."""
    columns, outputs = x.shape[1], sum(rows.rows for rows in matrix)
    step, products = max(1, DECODED_WEIGHTS // columns), []
    decoded = buffer(x.dtype, x.device, min(step, outputs) * columns).view(-1, columns)
    for first in range(0, outputs, step):
        some = decoded[: outputs - first]

        def decode(start: int, stop: int, first: int = first, some: Tensor = some) -> None:
            decode_rows(matrix, first + start, first + stop, out=some[start:stop])

        share(decode, matrix, rows=len(some), device=x.device)
        part = None if bias is None else bias[first : first + len(some)]
        with torch.autocast(x.device.type, enabled=False):
            products.append(torch.nn.functional.linear(x, some, part))
    return products[0] if len(products) == 1 else torch.cat(products, dim=1)


def multiplies(matrix: Matrix, x: Tensor) -> bool:
    """Whether the product of a matrix with rows of inputs is computed from its codes.

    With more rows than a kernel takes, decoding and torch's own product are faster; so they are on a GPU.
    """
    few = len(x) <= MOST_ROWS and x.device.type == "cpu"
    return few and all(_product(rows, x.dtype) is not None for rows in matrix)


def multiply(matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias.

    matrix: W, of which `multiplies` is true
    x: [rows, columns] BF16, F16 or F32
    bias: [outputs], if there is one
    """
    x, outputs = x.contiguous(), sum(rows.rows for rows in matrix)
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    floats = None if bias is None else bias.to(torch.float32).contiguous()
    threads, above = torch.get_num_threads(), 0
    for rows in matrix:
        product = _product(rows, x.dtype)
        assert product is not None
        product.multiply(
            _inputs(x, product.basis), out=out, column=above, bias=floats, factor=rows.factor.value, threads=threads
        )
        above += rows.rows
    return out


# Rows that are copied or pickled get products of their own, of the memory that is then theirs.
_products: WeakKeyDictionary[Rows, dict[torch.dtype, Product | None]] = WeakKeyDictionary()


def _product(rows: Rows, dtype: torch.dtype) -> Product | None:
    """Return what multiplies these rows, made on first use; None if they have to be decoded."""
    kept = _products.get(rows)
    if kept is None:
        kept = _products[rows] = {}
    if dtype not in kept:
        kept[dtype] = _make_product(rows, dtype)
    return kept[dtype]


def _make_product(rows: Rows, dtype: torch.dtype) -> Product | None:
    """Return the product of rows that a scalar codec encoded in whole blocks and that lie in the CPU's memory."""
    coding = rows.coding if isinstance(rows, PackedRows) else None
    if not isinstance(rows, PackedRows) or coding is None or rows.device.type != "cpu" or dtype not in NAMES:
        return None
    codes, norms = (part.numpy() for part in rows.parts)
    return Product(
        codes,
        norms.reshape(-1).view(np.uint16),
        coding,
        outputs=rows.rows,
        dtype=NAMES[dtype],
        awq=None if rows.awq is None else rows.awq.numpy(),
    )


# The inputs that each thread prepared last, and a copy of them as they were given, [rows, columns].
_last = threading.local()
_compare: Any = ctypes.CDLL(None).memcmp
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _inputs(x: Tensor, basis: InputBasis) -> PreparedInputs:
    """Return inputs in a basis; those that several weights read, one after the other, are rotated once.

    They are recognised by their contents: a tensor may have been changed in place since.
    """
    if not hasattr(_last, "inputs"):
        _last.inputs, _last.copied = PreparedInputs(), torch.empty(0, device="cpu")
    inputs: PreparedInputs = _last.inputs
    copied = _last.copied
    alike = copied.shape == x.shape and copied.dtype == x.dtype and inputs.basis == basis
    if alike and not _compare(copied.data_ptr(), x.data_ptr(), x.nbytes):
        return inputs
    inputs.prepare(x, dtype=NAMES[x.dtype], basis=basis)
    _last.copied = x.detach().clone()
    return inputs
