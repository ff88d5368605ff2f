"""Weights that stay packed in memory: torch tensors of the model's shape and dtype that are decoded when they are used.

F.linear decodes some rows at a time into a buffer that stays in the cache, and multiplies them there. F.embedding
decodes the rows that it looks up. An index selects one expert of a stack. Every other operation gets an ordinary,
decoded tensor. For inference only.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pqweights.checkpoint import scales
from pqweights.checkpoint.readers import EncodedTensor
from pqweights.codecs.protocol import Coder, State
from pqweights.codecs.weight import block_count
from pqweights.errors import PqweightsError
from pqweights.kernels.reference import TORCH_DTYPES
from pqweights.kernels.workers import scratch

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# How many weights a thread decodes before it multiplies them: few enough for the cache of its core.
CHUNK_WEIGHTS = 1 << 20
# The same on other devices, where a call costs more and memory is faster.
DEVICE_CHUNK_WEIGHTS = 1 << 24


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedRows:
    """Rows of one matrix that were encoded in the same way.

    rows, columns: how many there are
    coder, state: what decodes them
    parts: the parts of the coder over the flattened rows, [blocks, bytes per block] u8 each
    awq: the scales of the columns, [columns] f32; None if they are not scaled
    """

    rows: int
    columns: int
    coder: Coder
    state: State
    parts: tuple[Tensor, ...]
    awq: Tensor | None

    @torch.inference_mode()  # set for each thread: ours may write to tensors that the caller made in this mode
    def decode(self, start: int, stop: int, out: Tensor) -> None:
        """Decode rows [start, stop) into a contiguous tensor [stop - start, columns] on the same device."""
        block_size = self.coder.block_size
        first, last = start * self.columns // block_size, block_count(stop * self.columns, block_size)
        skip, count = start * self.columns - first * block_size, (stop - start) * self.columns
        here = slice(skip, skip + count)
        if out.device.type == "cpu":
            self._decode_numpy(start, range(first, last), here=here, out=out.view(-1))
        else:
            self._decode_torch(range(first, last), here=here, out=out.view(-1))

    def _decode_numpy(self, row: int, blocks: range, *, here: slice, out: Tensor) -> None:
        """Decode blocks on the CPU, straight into `out` if they fill it and coders have its dtype.

        row: the row in which the first block begins
        here: the part of the blocks that belongs in `out`
        """
        whole = len(blocks) * self.coder.block_size
        direct = self.awq is None and out.dtype in NAMES
        name = NAMES[out.dtype] if direct else "F32"
        in_place = direct and whole == len(out)
        values = out.view(torch.uint8).numpy() if in_place else scratch("packed", whole * TORCH_DTYPES[name].itemsize)
        parts = [part[blocks.start : blocks.stop].numpy() for part in self.parts]
        self.coder.decode(parts, values, dtype=name, state=self.state)
        if in_place:
            return
        decoded = torch.from_numpy(values).view(TORCH_DTYPES[name])[here]
        if self.awq is not None:
            shape = (self.rows, self.columns)
            scales.divide(decoded.numpy(), self.awq.numpy(), start=row * self.columns, shape=shape)
        out.copy_(_saturated(decoded, out.dtype))

    def _decode_torch(self, blocks: range, *, here: slice, out: Tensor) -> None:
        """Decode blocks on another device; `here` is the part of them that belongs in `out`."""
        parts = [part[blocks.start : blocks.stop] for part in self.parts]
        decoded = self.coder.decode_torch(parts, self.state).reshape(-1)[here]
        if self.awq is not None:
            decoded = (decoded.view(-1, self.columns) / self.awq).view(-1)
        out.copy_(_saturated(decoded, out.dtype))

    def selected(self, rows: Tensor) -> PackedRows | None:
        """Return the rows with these numbers; None if a block may hold parts of two rows."""
        if self.columns % self.coder.block_size:
            return None
        parts = tuple(part.view(self.rows, -1).index_select(0, rows).view(-1, part.shape[1]) for part in self.parts)
        return replace(self, rows=len(rows), parts=parts)

    def to(self, device: torch.device) -> PackedRows:
        """Return the rows on another device."""
        awq = None if self.awq is None else self.awq.to(device)
        return replace(self, parts=tuple(part.to(device) for part in self.parts), awq=awq)

    @property
    def byte_count(self) -> int:
        """The size of parts and scales, in bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.parts, self.awq) if t is not None)


def _saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp float32 to the range of a narrower dtype."""
    limit = torch.finfo(dtype).max
    return values if dtype.itemsize >= 4 else values.clamp(-limit, limit)


Matrix = tuple[PackedRows, ...]  # the rows of a matrix, from the top


def pack(tensor: EncodedTensor, dtype: torch.dtype) -> PackedTensor | None:
    """Read a weight [rows, columns], or a stack of them, into memory as it is stored.

    Returns None for another shape, and for a stack in which a block holds parts of two matrices.
    """
    if len(tensor.shape) not in (2, 3) or not math.prod(tensor.shape):
        return None
    *stack, rows, columns = tensor.shape
    count, block_size = math.prod(stack), tensor.coder.block_size
    if count > 1 and rows * columns % block_size:
        return None
    blocks = block_count(math.prod(tensor.shape), block_size)
    parts = [torch.empty(blocks, part.bytes_per_block, dtype=torch.uint8) for part in tensor.coder.parts]
    tensor.read_parts(0, blocks, [part.numpy() for part in parts])
    awq = None if tensor.awq is None else torch.from_numpy(tensor.awq_scales()).view(count, -1)
    by_matrix = [part.view(count, -1, part.shape[1]) for part in parts]
    matrices = tuple(
        (
            PackedRows(
                rows=rows,
                columns=columns,
                coder=tensor.coder,
                state=tensor.state,
                parts=tuple(part[number] for part in by_matrix),
                awq=None if awq is None else awq[number],
            ),
        )
        for number in range(count)
    )
    return PackedTensor(matrices, bool(stack), dtype)


def bytes_per_weight(tensor: EncodedTensor) -> float:
    """Return the memory that a packed weight takes, in bytes per element."""
    return sum(part.byte_count for part in tensor.parts) / max(1, math.prod(tensor.shape))


class PackedTensor(torch.Tensor):
    """A packed weight as a torch tensor.

    matrices: one for each expert of a stack, or the only matrix
    stacked: whether the weight is a stack
    """

    matrices: tuple[Matrix, ...]
    stacked: bool

    @staticmethod
    def __new__(cls, matrices: tuple[Matrix, ...], stacked: bool, dtype: torch.dtype) -> PackedTensor:  # noqa: D102
        first = matrices[0]
        shape = (sum(each.rows for each in first), first[0].columns)
        result: PackedTensor = torch.Tensor._make_wrapper_subclass(
            cls, (len(matrices), *shape) if stacked else shape, dtype=dtype, device=first[0].parts[0].device
        )
        result.matrices, result.stacked = matrices, stacked
        return result

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"PackedTensor({list(self.shape)}, dtype={self.dtype}, device={self.device}, {self.stored_bytes} bytes)"

    @property
    def stored_bytes(self) -> int:
        """The size in memory, in bytes."""
        return sum(each.byte_count for matrix in self.matrices for each in matrix)

    def element_size(self) -> float:  # type: ignore[override]
        """Return the bytes per element in memory, a fraction, from which transformers computes the footprint."""
        return self.stored_bytes / self.numel()

    def decode(self) -> Tensor:
        """Return the weight as an ordinary tensor."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for matrix, part in zip(self.matrices, out if self.stacked else [out], strict=True):
            _share(functools.partial(_decode_into, matrix, part), len(part), part.shape[1], device=self.device)
        return out

    def like(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> PackedTensor:
        """Return the same weight with another dtype, or on another device."""
        matrices = self.matrices
        if device is not None and device != self.device:
            matrices = tuple(tuple(each.to(device) for each in matrix) for matrix in matrices)
        return PackedTensor(matrices, self.stacked, dtype or self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        replaced = _FUNCTIONS.get(func)
        result = NotImplemented if replaced is None else replaced(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        with torch._C.DisableTorchFunctionSubclass():  # as torch.Tensor does, without wrapping results in this class
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return args[0].like()
        if func is torch.ops.aten._to_copy.default and (kwargs.get("dtype") or args[0].dtype).is_floating_point:
            device = kwargs.get("device")
            return args[0].like(kwargs.get("dtype"), None if device is None else torch.empty(0, device=device).device)
        if func._schema.is_mutable:
            raise PqweightsError(f"{func}: packed weights cannot be changed; load the model without packed=True")
        args, kwargs = tree_map_only(PackedTensor, lambda packed: packed.decode(), (tuple(args), kwargs))
        return func(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Implement F.linear, with its parameter names: multiply decoded rows of the weight, chunk by chunk."""
    x = input
    if not isinstance(weight, PackedTensor) or weight.stacked or isinstance(x, PackedTensor):
        return NotImplemented
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.like(dtype)
        bias = None if bias is None else bias.to(dtype)
    if x.dtype != weight.dtype or x.ndim == 0 or x.shape[-1] != weight.shape[-1]:
        return NotImplemented  # torch then raises the error
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        raise PqweightsError(
            "packed weights have no gradients; use torch.no_grad(), or load the model without packed=True"
        )
    (matrix,) = weight.matrices
    rows, columns = weight.shape
    flat, out = x.reshape(-1, columns), x.new_empty(*x.shape[:-1], rows)
    flat_out = out.view(-1, rows)

    def multiply(start: int, stop: int) -> None:
        with torch.inference_mode():  # set for each thread
            chunk = _buffer(weight.dtype, weight.device, (stop - start) * columns).view(-1, columns)
            _decode_rows(matrix, start, stop, out=chunk)
            bias_of_rows = None if bias is None else bias[start:stop]
            with torch.autocast(x.device.type, enabled=False):
                flat_out[:, start:stop] = torch.nn.functional.linear(flat, chunk, bias_of_rows)

    _share(multiply, rows, columns, device=weight.device)
    return out


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, *_: Any, **__: Any
) -> Any:
    """Implement F.embedding: decode the rows that are looked up."""
    if not isinstance(weight, PackedTensor) or weight.stacked or max_norm is not None:
        return NotImplemented
    ids, (matrix,) = input, weight.matrices
    out = torch.empty(ids.numel(), weight.shape[1], dtype=weight.dtype, device=weight.device)
    selected = matrix[0].selected(ids.reshape(-1)) if len(matrix) == 1 else None
    if selected is not None:
        _decode_rows((selected,), 0, len(out), out=out)
    else:
        for row, into in zip(ids.reshape(-1).tolist(), out, strict=True):
            if not 0 <= row < weight.shape[0]:
                raise IndexError(f"index {row} is out of range for {weight.shape[0]} rows")
            _decode_rows(matrix, row, row + 1, out=into[None])
    return out.view(*ids.shape, weight.shape[1])


def _getitem(weight: Tensor, index: Any) -> Any:
    """Implement indexing with one number: an expert of a stack, still packed."""
    single = isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0 and not index.is_floating_point())
    if not isinstance(weight, PackedTensor) or not weight.stacked or not single:
        return NotImplemented
    return PackedTensor((weight.matrices[int(index)],), False, weight.dtype)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Implement torch.stack for matrices."""
    packed = [t for t in tensors if isinstance(t, PackedTensor) and not t.stacked]
    if len(packed) < len(tensors) or dim or len({(t.shape, t.dtype, t.device) for t in packed}) > 1:
        return NotImplemented
    return PackedTensor(tuple(t.matrices[0] for t in packed), True, packed[0].dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Implement torch.cat along the rows, in each matrix of a stack."""
    packed = [t for t in tensors if isinstance(t, PackedTensor)]
    alike = {(t.stacked, len(t.matrices), t.shape[-1], t.dtype, t.device) for t in packed}
    if len(packed) < len(tensors) or len(alike) > 1 or dim % packed[0].ndim != packed[0].ndim - 2:
        return NotImplemented
    matrices = tuple(sum(pieces, ()) for pieces in zip(*(t.matrices for t in packed), strict=True))
    return PackedTensor(matrices, packed[0].stacked, packed[0].dtype)


def _set_data(tensor: Tensor, value: Tensor) -> Any:
    """Implement `tensor.data = value`, which moving a module does: torch does not copy the attributes of this class."""
    if isinstance(tensor, PackedTensor) and isinstance(value, PackedTensor):
        tensor.matrices, tensor.stacked = value.matrices, value.stacked
    return NotImplemented


def _no_storage(*_: Any, **__: Any) -> Any:
    raise PqweightsError("packed weights have no storage of their own; load the model without packed=True")


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.share_memory_: _no_storage,
    torch.Tensor.untyped_storage: _no_storage,
    torch.nn.functional.linear: _linear,
    torch.nn.functional.embedding: _embedding,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.stack: _stack,
    torch.cat: _cat,
}


def _decode_rows(matrix: Matrix, start: int, stop: int, *, out: Tensor) -> None:
    """Decode rows [start, stop) of a matrix into [stop - start, columns]."""
    above = 0
    for each in matrix:
        first, last = max(start - above, 0), min(stop - above, each.rows)
        if first < last:
            each.decode(first, last, out[first + above - start : last + above - start])
        above += each.rows


def _decode_into(matrix: Matrix, whole: Tensor, start: int, stop: int) -> None:
    """Decode rows [start, stop) of a matrix into their places in the whole matrix."""
    _decode_rows(matrix, start, stop, out=whole[start:stop])


def _share(work: Callable[[int, int], None], rows: int, columns: int, *, device: torch.device) -> None:
    """Call work(start, stop) for runs that cover all rows: on the CPU in several threads, in runs that fit a cache."""
    step = max(1, (CHUNK_WEIGHTS if device.type == "cpu" else DEVICE_CHUNK_WEIGHTS) // columns)
    starts = range(0, rows, step)
    if device.type != "cpu" or len(starts) == 1:
        for start in starts:
            work(start, min(rows, start + step))
    else:
        for _ in _threads().map(lambda start: work(start, min(rows, start + step)), starts):
            pass


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return a pool of as many threads as torch uses; in each of them, torch itself computes with one thread."""
    count = torch.get_num_threads()
    started = threading.Barrier(count + 1)

    def begin() -> None:
        torch.set_num_threads(1)  # for this thread, and for threads that have not computed yet
        started.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="pqweights", initializer=begin)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(count)
    return pool


def _buffer(dtype: torch.dtype, device: torch.device, count: int) -> Tensor:
    """Return memory of the calling thread, contents undefined, valid until it asks again."""
    if device.type != "cpu":  # torch itself reuses the memory of other devices
        return torch.empty(count, dtype=dtype, device=device)
    return torch.from_numpy(scratch("packed rows", count * dtype.itemsize)).view(dtype)
