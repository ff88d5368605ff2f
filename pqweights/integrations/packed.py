"""A weight that stays packed in memory: a torch tensor of the model's shape and dtype whose values are decoded when used.

F.linear decodes some rows at a time into a buffer that stays in the cache and multiplies them there, F.embedding decodes the
rows asked for, and an index selects one expert of a stack. Every other operation gets an ordinary, decoded tensor. Inference only.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pqweights.buffers import scratch
from pqweights.checkpoint import scales
from pqweights.checkpoint.readers import EncodedTensor
from pqweights.codecs import get_codec
from pqweights.codecs.protocol import SIGNED_HADAMARD, UNROTATED
from pqweights.codecs.weight import block_count
from pqweights.errors import PqweightsError
from pqweights.kernels import BLOCK_SIZE
from pqweights.kernels.codebook import Codebook
from pqweights.kernels.reference import TORCH_DTYPES, decode_blocks

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# Weights that a thread decodes before it multiplies them: few enough to stay in its core's cache.
CHUNK_WEIGHTS = 1 << 20
DEVICE_CHUNK_WEIGHTS = 1 << 24  # on other devices, where a call costs more and memory is faster


@dataclass(frozen=True, eq=False)
class Piece:
    """Encoded rows of one matrix, all encoded alike.

    codes: [blocks, code bytes] u8, over the flattened rows. norms: [blocks] f16. awq: the scales of the columns, f32, or None.
    """

    rows: int
    columns: int
    codec: str
    codebook: Codebook
    rotation: str
    norm_exponent: int
    codes: Tensor
    norms: Tensor
    awq: Tensor | None

    @torch.inference_mode()  # a setting of the thread: threads of ours may write what the caller made in that mode
    def decode(self, start: int, stop: int, out: Tensor) -> None:
        """Rows [start, stop) into a contiguous tensor [stop - start, columns] on the same device."""
        first, last = start * self.columns // BLOCK_SIZE, block_count(stop * self.columns)
        skip, count = start * self.columns - first * BLOCK_SIZE, (stop - start) * self.columns
        decode = self._decode_numpy if self.codes.device.type == "cpu" else self._decode_torch
        decode(start, first, last, skip, count, out.view(-1))

    def _decode_numpy(self, start: int, first: int, last: int, skip: int, count: int, out: Tensor) -> None:
        whole = (last - first) * BLOCK_SIZE
        direct = self.awq is None and out.dtype in NAMES
        name = NAMES[out.dtype] if direct else "F32"
        if direct and whole == count:
            values = out.view(torch.uint8).numpy()
        else:
            values = scratch("packed", whole * (4 if name == "F32" else 2))
        get_codec(self.codec).decode(
            self.codes[first:last].numpy(), self.norms[first:last].numpy().view(np.uint16), name, self.codebook,
            self.rotation, self.norm_exponent, values,
        )  # fmt: skip
        if direct and whole == count:
            return
        decoded = torch.from_numpy(values).view(TORCH_DTYPES[name])[skip : skip + count]
        if self.awq is not None:
            scales.divide(decoded.numpy(), start * self.columns, (self.rows, self.columns), self.awq.numpy())
        out.copy_(_saturated(decoded, out.dtype))

    def _decode_torch(self, start: int, first: int, last: int, skip: int, count: int, out: Tensor) -> None:
        signed, rotate = self.rotation == SIGNED_HADAMARD, self.rotation != UNROTATED
        decoded = decode_blocks(
            self.codes[first:last], self.norms[first:last], self.codebook, signed, self.norm_exponent, rotate
        ).view(-1)[skip : skip + count]
        if self.awq is not None:
            decoded = (decoded.view(-1, self.columns) / self.awq).view(-1)
        out.copy_(_saturated(decoded, out.dtype))

    def selected(self, rows: Tensor) -> Piece | None:
        """The rows of these numbers as a piece of their own; None where blocks do not end with rows."""
        if self.columns % BLOCK_SIZE:
            return None
        per_row = self.columns // BLOCK_SIZE
        codes = self.codes.view(self.rows, -1).index_select(0, rows).view(-1, self.codes.shape[1])
        norms = self.norms.view(self.rows, per_row).index_select(0, rows).view(-1)
        return replace(self, rows=len(rows), codes=codes, norms=norms)

    def to(self, device: torch.device) -> Piece:
        """The same on that device."""
        awq = None if self.awq is None else self.awq.to(device)
        return replace(self, codes=self.codes.to(device), norms=self.norms.to(device), awq=awq)

    @property
    def byte_count(self) -> int:
        """Bytes of codes, norms and scales."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.norms, self.awq) if t is not None)


def _saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 within the range of a narrower dtype."""
    limit = torch.finfo(dtype).max
    return values if dtype.itemsize >= 4 else values.clamp(-limit, limit)


# The pieces of a matrix, from the top.
Matrix = tuple[Piece, ...]


def pack(tensor: EncodedTensor, dtype: torch.dtype) -> PackedTensor | None:
    """A weight [rows, columns], or a stack of them, read into memory as it is stored.

    None where it has another shape, or where a matrix of the stack does not begin with a block.
    """
    if len(tensor.shape) not in (2, 3) or not math.prod(tensor.shape):
        return None
    *stack, rows, columns = tensor.shape
    count = math.prod(stack)
    if count > 1 and rows * columns % BLOCK_SIZE:
        return None
    code_bytes = get_codec(tensor.codec).code_bytes_per_block(tensor.bits)
    codes = torch.empty(tensor.codes.byte_count, dtype=torch.uint8)
    tensor.storage.read_into(tensor.codes.file, tensor.codes.offset, codes.numpy())
    norms = torch.empty(tensor.norms.byte_count, dtype=torch.uint8)
    tensor.storage.read_into(tensor.norms.file, tensor.norms.offset, norms.numpy())
    awq = None if tensor.awq is None else torch.from_numpy(tensor.awq_scales()).view(count, -1)
    by_matrix = codes.view(count, -1, code_bytes), norms.view(torch.float16).view(count, -1)
    matrices = tuple(
        (
            Piece(
                rows, columns, tensor.codec, tensor.codebook, tensor.rotation, tensor.norm_exponent,
                by_matrix[0][i], by_matrix[1][i], None if awq is None else awq[i],
            ),
        )
        for i in range(count)
    )  # fmt: skip
    return PackedTensor(matrices, bool(stack), dtype)


def bytes_per_weight(tensor: EncodedTensor) -> float:
    """What a packed weight takes in memory, for each of its elements."""
    return sum(part.byte_count for part in tensor.parts) / max(1, math.prod(tensor.shape))


class PackedTensor(torch.Tensor):
    """See the module. matrices: one for each expert of a stack, or the only one."""

    matrices: tuple[Matrix, ...]
    stacked: bool

    @staticmethod
    def __new__(cls, matrices: tuple[Matrix, ...], stacked: bool, dtype: torch.dtype) -> PackedTensor:  # noqa: D102
        first = matrices[0]
        shape = (sum(piece.rows for piece in first), first[0].columns)
        result: PackedTensor = torch.Tensor._make_wrapper_subclass(
            cls, (len(matrices), *shape) if stacked else shape, dtype=dtype, device=first[0].codes.device
        )
        result.matrices, result.stacked = matrices, stacked
        return result

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"PackedTensor({list(self.shape)}, dtype={self.dtype}, device={self.device}, {self.stored_bytes} bytes)"

    @property
    def stored_bytes(self) -> int:
        """Bytes in memory."""
        return sum(piece.byte_count for matrix in self.matrices for piece in matrix)

    def element_size(self) -> float:  # type: ignore[override]
        """Bytes per element as they lie in memory, a fraction: what transformers and accelerate add up as footprint."""
        return self.stored_bytes / self.numel()

    def decode(self) -> Tensor:
        """The ordinary tensor."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for matrix, part in zip(self.matrices, out if self.stacked else [out], strict=True):
            _share(functools.partial(_decode_into, matrix, part), len(part), part.shape[1], self.device)
        return out

    def like(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> PackedTensor:
        """The same values under another dtype, or on another device."""
        matrices = self.matrices
        if device is not None and device != self.device:
            matrices = tuple(tuple(piece.to(device) for piece in matrix) for matrix in matrices)
        return PackedTensor(matrices, self.stacked, dtype or self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        replaced = _FUNCTIONS.get(func)
        result = NotImplemented if replaced is None else replaced(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        with torch._C.DisableTorchFunctionSubclass():  # what torch.Tensor does, but for wrapping results in this class
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


def _linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:  # torch's names: it is called by them, too
    x = input
    if not isinstance(weight, PackedTensor) or weight.stacked or isinstance(x, PackedTensor):
        return NotImplemented
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.like(dtype)
        bias = None if bias is None else bias.to(dtype)
    if x.dtype != weight.dtype or x.ndim == 0 or x.shape[-1] != weight.shape[-1]:
        return NotImplemented  # torch says what is wrong
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
        with torch.inference_mode():  # a setting of the thread
            chunk = _buffer(weight.dtype, weight.device, (stop - start) * columns).view(-1, columns)
            _decode_rows(matrix, start, stop, chunk)
            bias_of_rows = None if bias is None else bias[start:stop]
            with torch.autocast(x.device.type, enabled=False):
                flat_out[:, start:stop] = torch.nn.functional.linear(flat, chunk, bias_of_rows)

    _share(multiply, rows, columns, weight.device)
    return out


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, *_: Any, **__: Any
) -> Any:
    if not isinstance(weight, PackedTensor) or weight.stacked or max_norm is not None:
        return NotImplemented
    ids, (matrix,) = input, weight.matrices
    out = torch.empty(ids.numel(), weight.shape[1], dtype=weight.dtype, device=weight.device)
    selected = matrix[0].selected(ids.reshape(-1)) if len(matrix) == 1 else None
    if selected is not None:
        _decode_rows((selected,), 0, len(out), out)
    else:
        for row, into in zip(ids.reshape(-1).tolist(), out, strict=True):
            if not 0 <= row < weight.shape[0]:
                raise IndexError(f"index {row} is out of range for {weight.shape[0]} rows")
            _decode_rows(matrix, row, row + 1, into[None])
    return out.view(*ids.shape, weight.shape[1])


def _getitem(weight: Tensor, index: Any) -> Any:
    """One expert of a stack, still packed."""
    single = isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0 and not index.is_floating_point())
    if not isinstance(weight, PackedTensor) or not weight.stacked or not single:
        return NotImplemented
    return PackedTensor((weight.matrices[int(index)],), False, weight.dtype)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Matrices as a stack."""
    packed = [t for t in tensors if isinstance(t, PackedTensor) and not t.stacked]
    if len(packed) < len(tensors) or dim or len({(t.shape, t.dtype, t.device) for t in packed}) > 1:
        return NotImplemented
    return PackedTensor(tuple(t.matrices[0] for t in packed), True, packed[0].dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Rows below rows, in each matrix of a stack."""
    packed = [t for t in tensors if isinstance(t, PackedTensor)]
    alike = {(t.stacked, len(t.matrices), t.shape[-1], t.dtype, t.device) for t in packed}
    if len(packed) < len(tensors) or len(alike) > 1 or dim % packed[0].ndim != packed[0].ndim - 2:
        return NotImplemented
    matrices = tuple(sum(pieces, ()) for pieces in zip(*(t.matrices for t in packed), strict=True))
    return PackedTensor(matrices, packed[0].stacked, packed[0].dtype)


def _set_data(tensor: Tensor, value: Tensor) -> Any:
    """`tensor.data = value`, as a module does that is moved: torch copies all but what is ours."""
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


def _decode_rows(matrix: Matrix, start: int, stop: int, out: Tensor) -> None:
    """Rows [start, stop) of a matrix into [stop - start, columns]."""
    above = 0
    for piece in matrix:
        first, last = max(start - above, 0), min(stop - above, piece.rows)
        if first < last:
            piece.decode(first, last, out[first + above - start : last + above - start])
        above += piece.rows


def _decode_into(matrix: Matrix, whole: Tensor, start: int, stop: int) -> None:
    _decode_rows(matrix, start, stop, whole[start:stop])


def _share(work: Callable[[int, int], None], rows: int, columns: int, device: torch.device) -> None:
    """Call work(start, stop) for runs of all rows: on the CPU by several threads, small runs that stay in a core's cache."""
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
    """As many threads as torch uses; in each of them, torch computes without any more of them."""
    count = torch.get_num_threads()
    started = threading.Barrier(count + 1)

    def begin() -> None:
        torch.set_num_threads(1)  # counts for this thread, and for threads that have not computed yet
        started.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="pqweights", initializer=begin)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(count)
    return pool


_of_thread = threading.local()


def _buffer(dtype: torch.dtype, device: torch.device, count: int) -> Tensor:
    """Memory of the calling thread, contents undefined, valid until it asks again."""
    buffers: dict[Any, Tensor] = _of_thread.__dict__.setdefault("buffers", {})
    found = buffers.get((dtype, device))
    if found is None or len(found) < count:
        with torch.inference_mode(False):  # it may be used again in another mode
            found = buffers[dtype, device] = torch.empty(count, dtype=dtype, device=device)
    return found[:count]
