"""The inputs of each matrix of a model while it reads a text, for linear layers and experts alike.

transformers runs the model. Products of activations with a parameter, or with matrices of a stack of experts, are
recorded where torch computes them (see _PRODUCTS), so no architecture needs a rule of its own. Rows of the inputs are
sampled into a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

from pqweights.checkpoint.writer import disk_errors
from pqweights.errors import SourceError
from pqweights.measure.scale_search import Inputs

Floats = npt.NDArray[np.float32]
Place = tuple[str, int | None]  # a parameter of the model, and the number of a matrix if it is a stack

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

_SAMPLES = Path("temporary file beside OUT")  # the name of the file in messages


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What is kept of the activations.

    wanted: the matrices whose inputs are kept.
    rows: how many rows are kept of each matrix, to search on and held back.
    descriptor: the open file that they are written to.
    """

    wanted: Collection[Place]
    rows: tuple[int, int]
    descriptor: int


@dataclass(frozen=True)
class TextWindow:
    """A window of token ids, [tokens], and whether it is held back for checking."""

    ids: npt.NDArray[np.int64]
    held_back: bool


class _Sample:
    """A random sample of rows in a file; every row that was offered is kept with the same chance (reservoir sampling).

    descriptor: the open file.
    offset: where the sample begins in it (bytes).
    capacity: how many rows are kept.
    columns: the length of a row.
    seed: the seed of the choice.
    """

    def __init__(self, descriptor: int, *, offset: int, capacity: int, columns: int, seed: int) -> None:
        self._descriptor, self._offset, self._capacity, self._columns = descriptor, offset, capacity, columns
        self._random = np.random.default_rng(seed)
        self._windows = np.zeros(capacity, dtype=np.int64)
        self.seen = 0

    def state(self) -> dict[str, Any]:
        """Return what continues the sample besides its rows: JSON, but for the windows of the rows [capacity]."""
        return {"seen": self.seen, "random": self._random.bit_generator.state, "windows": self._windows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        self.seen, self._random.bit_generator.state = state["seen"], state["random"]
        self._windows[:] = state["windows"]

    @property
    def windows(self) -> npt.NDArray[np.int64]:
        """The number of the window that each kept row comes from, [rows]."""
        return self._windows[: self.seen]

    def add(self, rows: Floats, window: int) -> None:
        """Offer rows [n, K] of a window."""
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
        """Return the kept rows, [rows, K]."""
        result = np.empty((min(self.seen, self._capacity), self._columns), dtype=np.float32)
        view, at = result.reshape(-1).data.cast("B"), self._offset
        while view:
            count = os.preadv(self._descriptor, [view], at)
            assert count, "the file of the samples was cut"
            view, at = view[count:], at + count
        return result


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The inputs of one matrix.

    along_rows: whether the model stores the matrix as [N, K].
    squares: the sum of the squares of each channel, [K] f64.
    rows, held_back: the samples of both kinds.
    """

    along_rows: bool
    squares: npt.NDArray[np.float64]
    rows: _Sample
    held_back: _Sample


class Recorder(Protocol):
    """What `watch` hands the inputs of matrices to. windows: how many windows of the text it has."""

    windows: int

    def add(self, place: Place, values: torch.Tensor, *, along_rows: bool, window: int, held_back: bool) -> None:
        """Take the inputs [..., K] of the matrix at `place`; along_rows: whether the model stores it as [N, K]."""
        ...


class Activations:
    """The inputs of the wanted matrices that `watch` recorded. windows: of how many windows of the text."""

    def __init__(self, sampling: Sampling) -> None:
        self.windows = 0
        self._sampling = sampling
        self._records: dict[Place, _Record] = {}
        self._end = 0

    def state(self) -> list[dict[str, Any]]:
        """Return what continues the recording besides the rows in the file, one entry for each matrix."""
        return [
            {
                "place": place,
                "along_rows": record.along_rows,
                "squares": record.squares,
                "samples": [record.rows.state(), record.held_back.state()],
            }
            for place, record in self._records.items()
        ]

    def restore(self, windows: int, state: Sequence[Mapping[str, Any]]) -> None:
        """Take over a state, in the order in which its matrices were first seen, which places their rows."""
        self.windows = windows
        for entry in state:
            record = self._new_record(entry["along_rows"], len(entry["squares"]))
            record.squares[:] = entry["squares"]
            for sample, kept in zip((record.rows, record.held_back), entry["samples"], strict=True):
                sample.restore(kept)
            name, number = entry["place"]
            self._records[name, number] = record

    def add(self, place: Place, values: torch.Tensor, *, along_rows: bool, window: int, held_back: bool) -> None:
        """Record the inputs [..., K] of the matrix at `place`."""
        if place not in self._sampling.wanted:
            return
        rows = values.detach().reshape(-1, values.shape[-1]).float().cpu().numpy()
        if place not in self._records:
            self._records[place] = self._new_record(along_rows, rows.shape[1])
        record = self._records[place]
        if held_back:
            record.held_back.add(rows, window)
        else:
            record.rows.add(rows, window)
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(record.squares, np.einsum("ij,ij->j", rows, rows, dtype=np.float64), out=record.squares)

    def _new_record(self, along_rows: bool, columns: int) -> _Record:
        samples = []
        for capacity in self._sampling.rows:
            samples.append(
                _Sample(
                    self._sampling.descriptor,
                    offset=self._end,
                    capacity=capacity,
                    columns=columns,
                    seed=len(self._records),
                )
            )
            self._end += capacity * columns * 4
        squares = np.zeros(columns, dtype=np.float64)
        return _Record(along_rows=along_rows, squares=squares, rows=samples[0], held_back=samples[1])

    def inputs(self, place: Place) -> Inputs | None:
        """Return the inputs of one matrix, or None if it had none."""
        record = self._records.get(place)
        if record is None:
            return None
        return Inputs(
            along_rows=record.along_rows,
            tokens=record.rows.seen,
            rms=np.sqrt(record.squares / max(record.rows.seen, 1)).astype(np.float32),
            rows=record.rows.read(),
            held_back=record.held_back.read(),
            windows=record.held_back.windows,
        )


class _Watch(TorchFunctionMode):
    """Records the activations in every product with a parameter of the module that computes it."""

    def __init__(self, names: Mapping[int, str], activations: Recorder) -> None:
        super().__init__()
        self._names, self._activations = names, activations
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
                    place = (f"{self._names[id(module)]}.{own}".lstrip("."), number)
                    self._activations.add(
                        place, rows, along_rows=along_rows, window=self.window, held_back=self.held_back
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
    model: Any, windows: Sequence[TextWindow], activations: Recorder, *, progress: Callable[[int, int], None]
) -> None:
    """Run the model over the windows of token ids that `activations` does not have yet, and record the inputs there.

    progress: called with the windows done and the windows in all. Raises SourceError if the model does not take text.
    """
    embeddings = model.get_input_embeddings()
    if not isinstance(embeddings, torch.nn.Embedding):
        raise SourceError(
            f"{type(model).__name__}: expected a model that reads text, found one without an embedding of tokens"
        )
    mode = _Watch({id(module): name for name, module in model.named_modules()}, activations)
    before = torch.nn.modules.module.register_module_forward_pre_hook(mode.enter)
    after = torch.nn.modules.module.register_module_forward_hook(mode.leave, always_call=True)
    try:
        device = embeddings.weight.device
        for number in range(activations.windows, len(windows)):
            window = windows[number]
            mode.window, mode.held_back = number, window.held_back
            with torch.inference_mode(), mode:
                model(torch.from_numpy(window.ids)[None].to(device), **_without_cache(model))
            activations.windows = number + 1
            progress(number + 1, len(windows))
    finally:
        before.remove()
        after.remove()


def _without_cache(model: Any) -> dict[str, bool]:
    """Return the argument that switches off the key-value cache; encoders do not take it."""
    return {"use_cache": False} if hasattr(model.config, "use_cache") and model.can_generate() else {}


class WeightPlace(NamedTuple):
    """The matrix or stack of the model that holds a tensor of a checkpoint, and whether it is transposed there."""

    place: Place
    transposed: bool


def places(model: Any, names: Sequence[str]) -> dict[str, WeightPlace]:
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
            result[name] = WeightPlace((multiplied[renamed], int(expert[1]) if expert else None), transposed)
    return result
