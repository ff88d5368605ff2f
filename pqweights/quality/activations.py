"""The inputs of each matrix of a model while it reads a text, for linear layers and experts alike.

transformers runs the model. Products of activations with a parameter, or with matrices of a stack of experts, are
recorded where torch computes them (see _PRODUCTS), so no architecture needs a rule of its own. What is kept of them is
up to the recorder (collecting.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

from pqweights.errors import SourceError
from pqweights.inference.runtimes.packages import Refused

MatrixId = tuple[str, int | None]  # a parameter of the model, and the number of a matrix if it is a stack

# Functions that multiply: the names of their arguments up to the two that are multiplied, and the axis of the second
# one that is summed over.
_PRODUCTS: dict[Any, tuple[tuple[str, ...], int]] = {
    torch.nn.functional.linear: (("input", "weight"), -1),
    torch.matmul: (("input", "other"), -2),
    torch.Tensor.matmul: (("self", "other"), -2),
    torch.Tensor.__matmul__: (("self", "other"), -2),
    torch.mm: (("input", "mat2"), -2),
    torch.Tensor.mm: (("self", "mat2"), -2),
    torch.bmm: (("input", "mat2"), -2),
    torch.Tensor.bmm: (("self", "mat2"), -2),
    torch.addmm: (("input", "mat1", "mat2"), -2),
}


@dataclass(frozen=True)
class TextWindow:
    """A window of token ids, [tokens], and whether it is held back for checking."""

    ids: npt.NDArray[np.int64]
    held_back: bool


class Recorder(Protocol):
    """What `watch` hands the inputs of matrices to."""

    def add(self, matrix_id: MatrixId, values: torch.Tensor, *, along_rows: bool, window: int, held_back: bool) -> None:
        """Take the inputs [..., K] of a matrix; along_rows: whether the model stores it as [N, K]."""
        ...


class _Watch(TorchFunctionMode):
    """Records the activations in every product with a parameter of the module that computes it."""

    def __init__(self, names: Mapping[int, str], recorder: Recorder) -> None:
        super().__init__()
        self._names, self._recorder = names, recorder
        self._modules: list[torch.nn.Module] = []
        self.window, self.held_back = 0, False

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """Note that a module begins to compute."""
        self._modules.append(module)

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Note that a module is done."""
        self._modules.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at a call of any function of torch, and pass it on."""
        kwargs = kwargs or {}
        product = _PRODUCTS.get(func)
        if product is not None:
            names, axis = product
            given = dict(zip(names, args, strict=False)) | kwargs
            values, weight = (given.get(name) for name in names[-2:])
            if isinstance(values, torch.Tensor) and isinstance(weight, torch.Tensor) and weight.dim() in (2, 3):
                self._record(values, weight, axis)
        return func(*args, **kwargs)

    def _record(self, values: torch.Tensor, weight: torch.Tensor, axis: int) -> None:
        """Record the product of values and weight, `axis` of which is summed over, if the weight is a parameter's."""
        # The strides tell, because transposed views have the address of their parameter.
        along_rows = (axis == -1) == (weight.stride(-1) == 1)
        for module in reversed(self._modules[-2:]):
            for own, parameter in module._parameters.items():
                inputs = [] if parameter is None else _inputs_of_matrices(values, weight, parameter)
                for number, rows in inputs:
                    matrix_id = (f"{self._names[id(module)]}.{own}".lstrip("."), number)
                    self._recorder.add(
                        matrix_id, rows, along_rows=along_rows, window=self.window, held_back=self.held_back
                    )
                if inputs:
                    return


def _inputs_of_matrices(
    values: torch.Tensor, weight: torch.Tensor, parameter: torch.Tensor
) -> list[tuple[int | None, torch.Tensor]]:
    """Return which matrices of a parameter a weight is, by number, each with its part of the values.

    The weight may be the whole parameter or one matrix of a stack; the number is None for a parameter that is no stack,
    and the list is empty for a weight that is not in the parameter.
    """
    if parameter.dim() not in (2, 3) or parameter.device != weight.device:
        return []
    matrix = parameter.shape[-1] * parameter.shape[-2]
    stack = parameter.numel() // matrix if matrix else 0
    offset = weight.data_ptr() - parameter.data_ptr()
    number, rest = divmod(offset, max(1, matrix * parameter.element_size()))
    if rest or not 0 <= number < stack:
        return []
    if weight.numel() == matrix and weight.dim() == 2:
        return [(int(number) if parameter.dim() == 3 else None, values)]
    is_whole_stack = weight.numel() == parameter.numel() and weight.dim() == 3
    if is_whole_stack and values.dim() == 3 and len(values) == stack:
        return [(expert, values[expert]) for expert in range(stack)]
    return []


def watch(
    model: Any,
    windows: Sequence[TextWindow],
    recorder: Recorder,
    *,
    source: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run the model over the windows of token ids, and record the inputs.

    source: the folder of the model, for messages
    progress: called with the windows done and the windows in all

    Raises SourceError if the model does not take text, or if transformers cannot run it.
    """
    embeddings = model.get_input_embeddings()
    if not isinstance(embeddings, torch.nn.Embedding):
        raise SourceError(
            f"{type(model).__name__}: expected a model that reads text, found one without an embedding of tokens"
        )
    mode = _Watch({id(module): name for name, module in model.named_modules()}, recorder)
    before = torch.nn.modules.module.register_module_forward_pre_hook(mode.enter)
    after = torch.nn.modules.module.register_module_forward_hook(mode.leave, always_call=True)
    try:
        device = embeddings.weight.device
        has_cache = hasattr(model.config, "use_cache") and model.can_generate()  # encoders have none
        without_cache = {"use_cache": False} if has_cache else {}
        for number, window in enumerate(windows):
            mode.window, mode.held_back = number, window.held_back
            with Refused(f"{source}: transformers cannot run this model"), torch.inference_mode(), mode:
                model(torch.from_numpy(window.ids)[None].to(device), **without_cache)
            progress(number + 1, len(windows))
    finally:
        before.remove()
        after.remove()


class WeightLocation(NamedTuple):
    """The matrix or stack of the model that holds a tensor of a checkpoint, and whether it is transposed there."""

    matrix_id: MatrixId
    transposed: bool


def locate(model: Any, names: Sequence[str]) -> dict[str, WeightLocation]:
    """Return where tensors of a checkpoint are in the model, by transformers' own rules for renaming and stacking."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # A tied parameter is recorded under the name of the module that multiplies by it.
    own = {id(parameter): name for name, parameter in parameters.items()}
    multiplied = {name: own[id(parameter)] for name, parameter in parameters.items()}
    result = {}
    for name in names:
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        if renamed not in parameters and name in parameters:
            renamed, pattern = name, None
        if renamed in parameters:
            expert = re.search(r"\.experts\.(\d+)\.", name) if pattern and "*" in pattern else None
            converter = next((c for c in converters if pattern in c.source_patterns), None)
            transposed = any(isinstance(op, Transpose) for op in converter.operations) if converter else False
            result[name] = WeightLocation((multiplied[renamed], int(expert[1]) if expert else None), transposed)
    return result


def matrix_ids(shape: tuple[int, ...], where: WeightLocation) -> list[MatrixId]:
    """Return the matrices of a weight of this shape, in order.

    A stack in the file is a stack in the model; an expert that is a tensor of its own is a part of a stack there.
    """
    name, expert = where.matrix_id
    if len(shape) == 3:
        return [(name, number) for number in range(shape[0])]
    return [(name, expert)]
