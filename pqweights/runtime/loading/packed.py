"""Weights that stay packed in memory: torch tensors of the model's shape and dtype that are decoded when they are used.

F.linear is that of packed_products.py. F.embedding decodes the rows that it looks up. An index selects one expert of a
stack. Every other operation gets an ordinary, decoded tensor. For inference only.

Modules with packed weights get classes of their own, by which `print` shows them: PackedLinear goes straight to the
packed weight, which saves the search of torch for an implementation. For torch.compile, which cannot look into packed
weights, linear layers and embeddings are custom operators, which know a module by its number.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from pqweights.checkpoint.readers import BlockTensor, ColumnTensor, EncodedTensor
from pqweights.errors import MasterError, PqweightsError
from pqweights.formats.master import Bytes, DamagedBlock
from pqweights.formats.weight import block_count, damaged_error
from pqweights.runtime.loading.packed_products import linear
from pqweights.runtime.loading.packed_rows import (
    Factor,
    Matrix,
    PackedColumns,
    PackedRows,
    decode_rows,
    look_up,
    share,
)
from pqweights.runtime.loading.packed_states import matrices_of, state_of


def pack(tensor: EncodedTensor, dtype: torch.dtype) -> PackedTensor | None:
    """Map a weight [rows, columns], or a stack of them, into memory as it is stored; None otherwise.

    Raises MasterError for what shows without decoding that the weight is damaged.
    """
    if isinstance(tensor, ColumnTensor):
        return PackedTensor(tuple((rows,) for rows in PackedColumns.of(tensor)), bool(tensor.cut.stack), dtype)
    if not isinstance(tensor, BlockTensor) or len(tensor.shape) not in (2, 3) or not math.prod(tensor.shape):
        return None
    *stack, rows, columns = tensor.shape
    count, block_size = math.prod(stack), tensor.format.block_size
    parts = [torch.from_numpy(part) for part in _checked_parts(tensor)]
    awq = None if tensor.awq is None else torch.from_numpy(tensor.awq_scales()).view(count, -1)
    matrices = []
    for number in range(count):
        # Matrices share the block in which one ends and the next begins.
        first, offset = divmod(number * rows * columns, block_size)
        last = block_count((number + 1) * rows * columns, block_size)
        packed = PackedRows(
            place=tensor.place,
            weights=math.prod(tensor.shape),
            rows=rows,
            columns=columns,
            format=tensor.format,
            parts=tuple(part[first:last] for part in parts),
            offset=offset,
            first_block=first,
            awq=None if awq is None else awq[number],
            factor=Factor(),
        )
        matrices.append((packed,))
    return PackedTensor(tuple(matrices), bool(stack), dtype)


def _checked_parts(tensor: BlockTensor) -> list[Bytes]:
    """Return the parts of a weight as they lie in its file, because products with codes check nothing later."""
    mapped = zip(tensor.mapped_parts(), tensor.format.parts, strict=True)
    parts = [raw.reshape(-1, part.bytes_per_block) for raw, part in mapped]
    try:
        tensor.format.check(parts)
    except DamagedBlock as damage:
        raise damaged_error(tensor.place, damage, first=0) from None
    return parts


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
    own_dtype: torch.dtype  # the same as dtype, for which torch would look for an implementation

    @staticmethod
    def __new__(cls, matrices: tuple[Matrix, ...], stacked: bool, dtype: torch.dtype) -> PackedTensor:  # noqa: D102
        first = matrices[0]
        shape = (sum(rows.rows for rows in first), first[0].columns)
        result: PackedTensor = torch.Tensor._make_wrapper_subclass(
            cls, (len(matrices), *shape) if stacked else shape, dtype=dtype, device=first[0].device
        )
        result.matrices, result.stacked, result.own_dtype = matrices, stacked, dtype
        return result

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"PackedTensor({list(self.shape)}, dtype={self.dtype}, device={self.device}, {self.stored_bytes} bytes)"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = state_of(self.matrices)
        return rebuild, (state, self.stacked, self.dtype, isinstance(self, nn.Parameter), self.requires_grad)

    @property
    def stored_bytes(self) -> int:
        """The size in memory, in bytes."""
        return sum(rows.byte_count for matrix in self.matrices for rows in matrix)

    def element_size(self) -> float:  # type: ignore[override]
        """Return the bytes per element in memory, a fraction, from which transformers computes the footprint."""
        return self.stored_bytes / self.numel()

    def takes(self, x: Tensor) -> bool:
        """Whether rows of inputs can be multiplied with this weight as they are."""
        fits = x.dtype == self.own_dtype and x.ndim > 0 and x.shape[-1] == self.matrices[0][0].columns
        return fits and not self.stacked and not torch.is_autocast_enabled(x.device.type)

    def decode(self) -> Tensor:
        """Return the weight as an ordinary tensor."""
        with torch.inference_mode(False):  # torch refuses to make views of a parameter out of inference tensors
            out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for matrix, part in zip(self.matrices, out if self.stacked else [out], strict=True):

            def decode(start: int, stop: int, matrix: Matrix = matrix, part: Tensor = part) -> None:
                decode_rows(matrix, start, stop, out=part[start:stop])

            share(decode, matrix, device=self.device)
        return out

    def like(self, dtype: torch.dtype | None = None) -> PackedTensor:
        """Return a view of the same weight, which may have another dtype."""
        return PackedTensor(self.matrices, self.stacked, dtype or self.dtype)

    def copied(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> PackedTensor:
        """Return a weight of its own: a change in place of one of the two does not change the other."""
        matrices = tuple(tuple(rows.copied(device or self.device) for rows in matrix) for matrix in self.matrices)
        return PackedTensor(matrices, self.stacked, dtype or self.dtype)

    def become(self, other: PackedTensor) -> PackedTensor:
        """Become a copy of a weight of the same shape, but for the dtype."""
        if self.shape != other.shape:
            raise PqweightsError(f"expected a packed weight of shape {list(self.shape)}, found {list(other.shape)}")
        self.matrices = other.copied(device=self.device).matrices
        return self

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
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].like()
        if func is torch.ops.aten.clone.default:
            return args[0].copied()
        if func is torch.ops.aten._to_copy.default and (kwargs.get("dtype") or args[0].dtype).is_floating_point:
            device = kwargs.get("device")
            device = None if device is None else torch.empty(0, device=device).device
            return args[0].copied(kwargs.get("dtype"), device)
        if torch.is_inference_mode_enabled():  # in this mode, torch asks for `to` as it is, and not for what it calls
            done = func.decompose(*args, **kwargs)
            if done is not NotImplemented:
                return done
        if func is torch.ops.aten.copy_.default and all(isinstance(value, PackedTensor) for value in args[:2]):
            return args[0].become(args[1])
        if any(isinstance(value, PackedTensor) for value in _written(func, args, kwargs)):
            raise PqweightsError(f"{func}: packed weights cannot be changed; load the model without packed=True")
        args, kwargs = tree_map_only(PackedTensor, lambda packed: packed.decode(), (tuple(args), kwargs))
        return func(*args, **kwargs)


def rebuild(state: Any, stacked: Any, dtype: Any, is_parameter: Any, requires_grad: Any) -> Tensor:
    """Return a pickled weight. torch.load calls this by default, so it takes nothing for granted.

    Raises MasterError for what was not pickled from a packed weight.
    """
    matrices = matrices_of(state)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or not (stacked or len(matrices) == 1):
        raise MasterError(
            f"a saved packed weight: expected a matrix or a stack, found {len(matrices)} of {dtype!r:.80}"
        )
    packed = PackedTensor(matrices, bool(stacked), dtype)
    return nn.Parameter(packed, requires_grad=bool(requires_grad)) if is_parameter else packed


torch.serialization.add_safe_globals([rebuild])


def _written(func: Any, args: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    """Return what an operator writes to."""
    changed = [argument for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | options
    return [given.get(argument.name) for argument in changed]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Implement F.linear, with its parameter names."""
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
    return linear(weight.matrices[0], x, bias)


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
        decode_rows((selected,), 0, len(out), out=out)
    else:
        outside = ids[(ids < 0) | (ids >= weight.shape[0])]
        if len(outside):
            raise IndexError(f"index {outside[0]} is out of range for {weight.shape[0]} rows")
        look_up(matrix, ids.reshape(-1), out=out)
    return out.view(*ids.shape, weight.shape[1])


def _getitem(weight: Tensor, index: Any) -> Any:
    """Implement indexing with one number: an expert of a stack, still packed."""
    single = isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0 and not index.is_floating_point())
    if not isinstance(weight, PackedTensor) or not weight.stacked or not single:
        return NotImplemented
    return PackedTensor((weight.matrices[int(index)],), False, weight.dtype)


def _bmm(input: Tensor, mat2: Tensor) -> Any:
    """Implement torch.bmm with a stack of experts: decode and multiply one matrix at a time."""
    if not isinstance(mat2, PackedTensor) or not mat2.stacked or isinstance(input, PackedTensor) or input.ndim != 3:
        return NotImplemented
    if len(input) != len(mat2) or torch.is_autocast_enabled(input.device.type):
        return NotImplemented
    if torch.is_grad_enabled() and input.requires_grad:
        return NotImplemented
    experts = (PackedTensor((matrix,), False, mat2.dtype) for matrix in mat2.matrices)
    return torch.stack([x @ expert.decode() for x, expert in zip(input, experts, strict=True)])


def _multiply_in_place(tensor: Tensor, other: Any) -> Any:
    """Implement `tensor.mul_(other)` for a power of two, which changes no digit: RWKV scales some weights so."""
    if not isinstance(tensor, PackedTensor) or not _is_power_of_two(other):
        return NotImplemented
    for matrix in tensor.matrices:
        for rows in matrix:
            rows.factor.value *= other
    return tensor


def _divide_in_place(tensor: Tensor, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Implement `tensor.div_(other)` for a power of two."""
    return NotImplemented if rounding_mode or not _is_power_of_two(other) else _multiply_in_place(tensor, 1 / other)


def _is_power_of_two(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0 and math.frexp(value)[0] == 0.5


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Implement torch.stack for matrices."""
    packed = [t for t in tensors if isinstance(t, PackedTensor) and not t.stacked]
    if len(packed) < len(tensors) or dim or len({(t.shape, t.dtype, t.device) for t in packed}) > 1:
        return NotImplemented
    return PackedTensor(tuple(t.copied().matrices[0] for t in packed), True, packed[0].dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Implement torch.cat along the rows, in each matrix of a stack."""
    packed = [t for t in tensors if isinstance(t, PackedTensor)]
    alike = {(t.stacked, len(t.matrices), t.shape[-1], t.dtype, t.device) for t in packed}
    if len(packed) < len(tensors) or len(alike) > 1 or dim % packed[0].ndim != packed[0].ndim - 2:
        return NotImplemented
    matrices = tuple(sum(pieces, ()) for pieces in zip(*(t.copied().matrices for t in packed), strict=True))
    return PackedTensor(matrices, packed[0].stacked, packed[0].dtype)


def _set_data(tensor: Tensor, value: Tensor) -> Any:
    """Implement `tensor.data = value`, which moving a module does: torch does not copy the attributes of this class."""
    if isinstance(tensor, PackedTensor):
        if not isinstance(value, PackedTensor):  # as resize_token_embeddings does
            raise PqweightsError("packed weights cannot be changed or resized; load the model without packed=True")
        tensor.matrices, tensor.stacked, tensor.own_dtype = value.matrices, value.stacked, value.own_dtype
    return NotImplemented


def _no_storage(*_: Any, **__: Any) -> Any:
    raise PqweightsError("packed weights have no storage of their own; load the model without packed=True")


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.share_memory_: _no_storage,
    torch.Tensor.untyped_storage: _no_storage,
    torch.Tensor.storage: _no_storage,
    torch.Tensor.data_ptr: _no_storage,
    nn.functional.linear: _linear,
    nn.functional.embedding: _embedding,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.bmm: _bmm,
    torch.Tensor.mul_: _multiply_in_place,
    torch.Tensor.div_: _divide_in_place,
    torch.stack: _stack,
    torch.cat: _cat,
}


# --- modules ---


def name_packed_modules(model: Any) -> None:
    """Give each module that holds a packed weight a class of its own."""
    for module in model.modules():
        is_packed = any(isinstance(value, PackedTensor) for value in module._parameters.values())
        if is_packed and not isinstance(module, PreTrainedModel):  # the class of a model is its architecture
            module.__class__ = _packed_class(module.__class__)
            _number(module)


@functools.cache
def _packed_class(module_class: Any) -> Any:
    def reduced(module: Any, protocol: int) -> tuple[Any, ...]:
        return (_new, (module_class,), *module_class.__reduce_ex__(module, protocol)[2:])

    def set_state(module: Any, state: Any) -> None:
        module_class.__setstate__(module, state)
        _number(module)

    # Nothing finds this class by its name, so modules are pickled as what makes them.
    members: dict[str, Any] = {"__reduce_ex__": reduced, "__setstate__": set_state}
    members["forward"] = _FORWARDS.get(module_class.forward) or _uncompiled(module_class.forward)
    return type(f"Packed{module_class.__name__}", (module_class,), members)


def _new(module_class: Any) -> Any:
    """Return a module without its state, for pickle."""
    packed = _packed_class(module_class)
    return packed.__new__(packed)


_numbers = itertools.count(1)
_numbered: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _number(module: Any) -> None:
    """Give a module a number, by which custom operators find it; a copy gets its own."""
    module.packed_number = next(_numbers)
    _numbered[module.packed_number] = module


def _linear_forward(self: Any, input: Tensor) -> Tensor:
    """Implement nn.Linear.forward."""
    if torch.compiler.is_compiling():
        made: Tensor = torch.ops.pqweights.linear(input, self.packed_number, self.bias)
        return made
    parameters = self._parameters
    if "weight" not in parameters:  # a parametrization computes it
        return nn.functional.linear(input, self.weight, self.bias)
    weight, bias = parameters["weight"], parameters["bias"]
    if isinstance(weight, PackedTensor) and weight.takes(input) and not torch.is_grad_enabled():
        return linear(weight.matrices[0], input, bias)
    return nn.functional.linear(input, weight, bias)


def _embedding_forward(self: Any, input: Tensor) -> Tensor:
    """Implement nn.Embedding.forward."""
    if torch.compiler.is_compiling() and self.max_norm is None:
        made: Tensor = torch.ops.pqweights.embedding(input, self.packed_number)
        return made
    return nn.Embedding.forward(self, input)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that torch.compile leaves out: experts and others that use packed weights in their own ways."""
    left_out = torch._disable_dynamo(function)  # type: ignore[attr-defined]  # imports dynamo only when it is called

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return (left_out if torch.compiler.is_compiling() else function)(self, *args, **options)

    return functools.wraps(function)(forward)


_FORWARDS = {nn.Linear.forward: _linear_forward, nn.Embedding.forward: _embedding_forward}


@torch.library.custom_op("pqweights::linear", mutates_args=())
def _linear_operator(input: Tensor, number: int, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(input, _numbered[number].weight, bias)


@_linear_operator.register_fake
def _linear_shape(input: Tensor, number: int, bias: Tensor | None) -> Tensor:
    return input.new_empty(*input.shape[:-1], _numbered[number].out_features)


@torch.library.custom_op("pqweights::embedding", mutates_args=())
def _embedding_operator(input: Tensor, number: int) -> Tensor:
    return nn.functional.embedding(input, _numbered[number].weight)


@_embedding_operator.register_fake
def _embedding_shape(input: Tensor, number: int) -> Tensor:
    module = _numbered[number]
    return input.new_empty(*input.shape, module.embedding_dim, dtype=module.weight.dtype)
