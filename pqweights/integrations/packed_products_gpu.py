"""Products of packed rows on a GPU; see packed_products.py."""

from __future__ import annotations

import functools
import importlib.util
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pqweights.integrations.packed_rows import NAMES, Matrix, PackedRows

if TYPE_CHECKING:
    from pqweights.kernels.gpu_products import GpuInputs, GpuProduct

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
    x, above = x.contiguous(), 0
    out = torch.empty(len(x), sum(rows.rows for rows in matrix), dtype=x.dtype, device=x.device)
    for rows in matrix:
        product = _product(rows)
        assert product is not None
        here = slice(above, above + rows.rows)
        part = None if bias is None else bias[here].contiguous()
        product.multiply(_inputs(x, product), out=out[:, here], bias=part, factor=rows.factor.value)
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


# --- inputs ---


@dataclass(frozen=True, eq=False, kw_only=True)
class _Prepared:
    """The inputs that a thread prepared last.

    x: as they were given; kept, so that no other tensor gets its memory
    version: how often torch had changed it
    stream: on which they were prepared
    """

    x: Tensor
    version: int
    stream: Any
    inputs: GpuInputs


_of_thread = threading.local()


def _inputs(x: Tensor, product: GpuProduct) -> GpuInputs:
    """Return inputs in the basis of a product; those that several weights read, one after the other, are rotated once.

    They are recognised by the tensor and the count of its changes, because a comparison would take as long as the
    rotation. torch counts the changes that its operations make, but not those through `.data`, nor those of a kernel
    that writes into a tensor behind its back: that has to use another tensor for the next inputs, or
    `torch.autograd.graph.increment_version`. Tensors of inference mode have no count, and a CUDA graph that is being
    captured needs all its steps: these are prepared every time.
    """
    from pqweights.kernels.gpu_products import prepare

    if x.is_inference() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return prepare(x, product.basis, product.awq)
    stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
    last: _Prepared | None = getattr(_of_thread, "last", None)
    if last is not None and last.inputs.basis == product.basis and _is_unchanged(x, last) and last.stream == stream:
        return last.inputs
    inputs = prepare(x, product.basis, product.awq)
    _of_thread.last = _Prepared(x=x, version=x._version, stream=stream, inputs=inputs)
    return inputs


def forget_inputs() -> None:
    """Prepare the next inputs in any case: compiled code writes into its buffers without torch counting it."""
    _of_thread.last = None


def _is_unchanged(x: Tensor, last: _Prepared) -> bool:
    """Whether x is what was prepared last, or a view of the same tensor at the same place, and torch changed neither.

    Views of one tensor count changes together.
    """
    whole, before = (tensor if tensor._base is None else tensor._base for tensor in (x, last.x))
    same = whole is before and x.data_ptr() == last.x.data_ptr() and x.shape == last.x.shape
    return same and x.dtype == last.x.dtype and x._version == last.version
