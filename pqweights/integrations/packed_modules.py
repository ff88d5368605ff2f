"""The classes of modules with packed weights, by which `print` shows them, and how linear layers and embeddings run.

PackedLinear goes straight to the packed weight, which saves the search of torch for an implementation. For
torch.compile, which cannot look into packed weights, both are custom operators; these know a module by its number.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pqweights.integrations.packed import PackedTensor
from pqweights.integrations.packed_products import linear


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
