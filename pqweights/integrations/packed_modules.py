"""What `print(model)` shows of modules with packed weights: PackedLinear(..., codec=..., bits=..., bytes=...)."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pqweights.integrations.packed import PackedTensor


def name_packed_modules(model: Any) -> None:
    """Give each module that holds a packed weight a class of its own, which only prints in another way."""
    for module in model.modules():
        if _packed(module) and not isinstance(module, PreTrainedModel):  # the class of a model is its architecture
            module.__class__ = _packed_class(module.__class__)


@functools.cache
def _packed_class(kind: Any) -> Any:
    def extra_repr(module: Any) -> str:
        own = kind.extra_repr(module)
        if kind.__repr__ is not nn.Module.__repr__ and not own:  # Conv1D prints its sizes without extra_repr
            own = kind.__repr__(module).partition("(")[2].removesuffix(")")
        return _describe(own, _packed(module))

    def reduced(module: Any, protocol: int) -> tuple[Any, ...]:
        return (_new, (kind,), *kind.__reduce_ex__(module, protocol)[2:])

    # A class that prints itself in its own way, as Conv1D does, would leave extra_repr out. Nothing finds this class by
    # its name, so modules are pickled as what makes them.
    members: dict[str, Any] = {"extra_repr": extra_repr, "__repr__": nn.Module.__repr__, "__reduce_ex__": reduced}
    return type(f"Packed{kind.__name__}", (kind,), members)


def _new(kind: Any) -> Any:
    """Return a module without its state, for pickle."""
    packed = _packed_class(kind)
    return packed.__new__(packed)


def _describe(own: str, packed: dict[str, PackedTensor]) -> str:
    """Return the extra_repr of a module: its own, and what is stored of its packed weights."""
    if packed.keys() == {"weight"}:
        return ", ".join(filter(None, [own, _stored(packed["weight"])]))
    lines = [f"({name}): shape={tuple(weight.shape)}, {_stored(weight)}" for name, weight in packed.items()]
    return "\n".join(filter(None, [own, *lines]))


def _stored(weight: PackedTensor) -> str:
    """Return the codec, the bit width and the bytes of a packed weight; merged experts may have several of each."""
    rows = [each for matrix in weight.matrices for each in matrix]
    codecs, widths = sorted({each.coder.codec for each in rows}), sorted({each.coder.bits for each in rows})
    bits = "/".join(f"{width:g}" for width in widths)
    return f"codec={'/'.join(codecs)}, bits={bits}, bytes={weight.stored_bytes}"


def _packed(module: Any) -> dict[str, PackedTensor]:
    return {name: value for name, value in module._parameters.items() if isinstance(value, PackedTensor)}
