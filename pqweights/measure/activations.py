"""What enters each matrix of a model while it reads text: for weights of linear layers and of experts alike.

A model is run by transformers; products of activations with a parameter, or with matrices of a stack of experts, are seen where
torch computes them (see _PRODUCTS), so that no architecture needs a rule of its own. Rows of inputs are sampled into a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

from pqweights.checkpoint.writer import disk_errors
from pqweights.errors import SourceError
from pqweights.measure.scale_search import Inputs

Floats = npt.NDArray[np.float32]
Place = tuple[str, int | None]  # a parameter of the model, and which matrix of a stack

# Functions that multiply: the names of their arguments up to the two that are multiplied, and which axis of the second is
# summed over.
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


_SAMPLES = Path("temporary file beside OUT")  # as errors call it


class _Sample:
    """Rows of one kind, each row that was seen with the same chance (reservoir sampling), in a file.

    windows: of each row that is kept, the number of its window.
    """

    def __init__(self, descriptor: int, offset: int, capacity: int, columns: int, seed: int) -> None:
        self._descriptor, self._offset, self._capacity, self._columns = descriptor, offset, capacity, columns
        self._random = np.random.default_rng(seed)
        self._windows = np.zeros(capacity, dtype=np.int64)
        self.seen = 0

    @property
    def windows(self) -> npt.NDArray[np.int64]:
        """By row."""
        return self._windows[: self.seen]

    def add(self, rows: Floats, window: int) -> None:
        """Offer rows [n, K]."""
        numbers = np.arange(self.seen, self.seen + len(rows))
        places = np.where(numbers < self._capacity, numbers, self._random.integers(0, numbers + 1))
        self.seen += len(rows)
        for row in np.flatnonzero(places < self._capacity):
            place = int(places[row])
            self._windows[place] = window
            view = np.ascontiguousarray(rows[row]).data.cast("B")
            at = self._offset + place * self._columns * 4
            with disk_errors(_SAMPLES):
                while view:
                    count = os.pwrite(self._descriptor, view, at)
                    view, at = view[count:], at + count

    def read(self) -> Floats:
        """The sample: [rows, K]."""
        result = np.empty((min(self.seen, self._capacity), self._columns), dtype=np.float32)
        view, at = result.reshape(-1).data.cast("B"), self._offset
        while view:
            count = os.preadv(self._descriptor, [view], at)
            assert count, "the file of the samples was cut"
            view, at = view[count:], at + count
        return result


class _Record:
    """Of one matrix."""

    def __init__(
        self, along_rows: bool, descriptor: int, offset: int, rows: tuple[int, int], columns: int, seed: int
    ) -> None:
        self.along_rows = along_rows
        self.squares = np.zeros(columns, dtype=np.float64)
        self.rows = _Sample(descriptor, offset, rows[0], columns, seed)
        self.held_back = _Sample(descriptor, offset + rows[0] * columns * 4, rows[1], columns, seed)


class Activations:
    """What entered the wanted places, as `watch` saw it. descriptor: of the file where samples lie. rows: as in `watch`."""

    def __init__(self, descriptor: int, rows: tuple[int, int], wanted: Collection[Place]) -> None:
        self._descriptor, self._rows, self._wanted = descriptor, rows, wanted
        self._records: dict[Place, _Record] = {}
        self._end = 0

    def add(self, place: Place, values: torch.Tensor, along_rows: bool, window: int, held_back: bool) -> None:
        """Rows [..., K] that entered the matrix at `place`."""
        if place not in self._wanted:
            return
        rows = values.detach().reshape(-1, values.shape[-1]).float().cpu().numpy()
        if place not in self._records:
            columns = rows.shape[1]
            seed = len(self._records)
            self._records[place] = _Record(along_rows, self._descriptor, self._end, self._rows, columns, seed)
            self._end += sum(self._rows) * columns * 4
        record = self._records[place]
        if held_back:
            record.held_back.add(rows, window)
        else:
            record.rows.add(rows, window)
            with np.errstate(over="ignore", invalid="ignore"):
                record.squares += np.einsum("ij,ij->j", rows, rows, dtype=np.float64)

    def inputs(self, place: Place) -> Inputs | None:
        """Of one matrix; None where nothing entered it."""
        record = self._records.get(place)
        if record is None:
            return None
        rms = np.sqrt(record.squares / max(record.rows.seen, 1)).astype(np.float32)
        return Inputs(
            record.along_rows,
            record.rows.seen,
            rms,
            record.rows.read(),
            record.held_back.read(),
            record.held_back.windows,
        )


class _Watch(TorchFunctionMode):
    """Notes the activations of every product with a parameter of the module that computes it."""

    def __init__(self, names: Mapping[int, str], activations: Activations) -> None:
        super().__init__()
        self._names, self._activations = names, activations
        self._modules: list[torch.nn.Module] = []
        self.window, self.held_back = 0, False

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """A module begins to compute."""
        self._modules.append(module)

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """It is done."""
        self._modules.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of torch passes here."""
        kwargs = kwargs or {}
        of_product = _PRODUCTS.get(func)
        if of_product is not None:
            names, axis = of_product
            given = dict(zip(names, args, strict=False)) | kwargs
            values, weight = (given.get(name) for name in names[-2:])
            if isinstance(values, torch.Tensor) and isinstance(weight, torch.Tensor) and weight.dim() in (2, 3):
                self._note(values, weight, axis)
        return func(*args, **kwargs)

    def _note(self, values: torch.Tensor, weight: torch.Tensor, axis: int) -> None:
        """values times a matrix, or values [E, ...] times a stack of them, whose `axis` is summed over."""
        for module in reversed(self._modules[-2:]):
            for own, parameter in module._parameters.items():
                if parameter is None or parameter.dim() not in (2, 3) or parameter.device != weight.device:
                    continue
                matrix = parameter.shape[-1] * parameter.shape[-2]
                stack = parameter.numel() // matrix if matrix else 0
                number, rest = divmod(
                    weight.data_ptr() - parameter.data_ptr(), max(1, matrix * parameter.element_size())
                )
                name = f"{self._names[id(module)]}.{own}".lstrip(".")
                # Transposed views of a parameter have its address, too.
                along_rows = (axis == -1) == (weight.stride(-1) == 1)
                if rest or not 0 <= number < stack:
                    continue
                if weight.numel() == matrix and weight.dim() == 2:
                    place = (name, int(number) if parameter.dim() == 3 else None)
                    self._activations.add(place, values, along_rows, self.window, self.held_back)
                    return
                if (
                    weight.numel() == parameter.numel()
                    and weight.dim() == 3
                    and values.dim() == 3
                    and len(values) == stack
                ):
                    for expert in range(stack):
                        self._activations.add((name, expert), values[expert], along_rows, self.window, self.held_back)
                    return


def watch(
    model: Any, windows: Sequence[npt.NDArray[np.int64]], held_back: Sequence[bool], rows: tuple[int, int],
    wanted: Collection[Place], descriptor: int, progress: Callable[[int, int], None],
) -> Activations:  # fmt: skip
    """Run the model over windows of token ids, and keep samples of what enters the wanted matrices.

    held_back: which windows are for checking. rows: how many rows are kept of either kind. descriptor: of the file where they
    are written. progress: windows done, windows in all. Raises SourceError for a model that takes no text.
    """
    embeddings = model.get_input_embeddings()
    if not isinstance(embeddings, torch.nn.Embedding):
        raise SourceError(f"{type(model).__name__}: expected a model of text, found one that looks up no tokens")
    activations = Activations(descriptor, rows, wanted)
    mode = _Watch({id(module): name for name, module in model.named_modules()}, activations)
    before = torch.nn.modules.module.register_module_forward_pre_hook(mode.enter)
    after = torch.nn.modules.module.register_module_forward_hook(mode.leave, always_call=True)
    try:
        device = embeddings.weight.device
        for number, (window, is_held_back) in enumerate(zip(windows, held_back, strict=True)):
            mode.window, mode.held_back = number, is_held_back
            with torch.inference_mode(), mode:
                model(torch.from_numpy(window)[None].to(device), **_without_cache(model))
            progress(number + 1, len(windows))
    finally:
        before.remove()
        after.remove()
    return activations


def _without_cache(model: Any) -> dict[str, bool]:
    """Encoders know no cache."""
    return {"use_cache": False} if hasattr(model.config, "use_cache") and model.can_generate() else {}


class WeightPlace(NamedTuple):
    """Where a tensor of a checkpoint is in the model. place: of its one matrix, or of the stack. transposed: there."""

    place: Place
    transposed: bool


def places(model: Any, names: Sequence[str]) -> dict[str, WeightPlace]:
    """Where the tensors of a checkpoint are, by transformers' own rules, which rename them and stack experts."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # A tied parameter is found under the name of the module that multiplies with it, too.
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
            result[name] = WeightPlace((multiplied[renamed], int(expert[1]) if expert else None), transposed)
    return result
