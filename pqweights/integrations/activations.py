"""What enters each matrix of a model while it reads text: for weights of linear layers and of experts alike.

A model is run by transformers; every product of activations with a parameter (or with one matrix of a stack of experts) is
seen where torch computes it, so that no architecture needs a rule of its own. Rows of inputs are sampled into a file.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

Floats = npt.NDArray[np.float32]
Place = tuple[str, int | None]  # a parameter of the model, and which matrix of a stack

_LINEAR = (torch.nn.functional.linear,)
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.mm, torch.Tensor.mm)
_WITH_BIAS = (torch.addmm,)


@dataclass(frozen=True, eq=False)
class Inputs:
    """What entered one matrix of K input channels.

    tokens: how many rows there were in all, held-back ones not counted. rms: [K] f32, root mean square of each channel
    over them. rows, held_back: samples [rows, K] f32 of each kind. along_rows: whether channels run along the rows of the
    matrix as the model stores it, [N, K]; some store [K, N].
    """

    along_rows: bool
    tokens: int
    rms: Floats
    rows: Floats
    held_back: Floats


class _Sample:
    """Rows of one kind, each row that was seen with the same chance (reservoir sampling), in a file."""

    def __init__(self, descriptor: int, offset: int, capacity: int, columns: int, seed: int) -> None:
        self._descriptor, self._offset, self._capacity, self._columns = descriptor, offset, capacity, columns
        self._random = np.random.default_rng(seed)
        self.seen = 0

    def add(self, rows: Floats) -> None:
        """Offer rows [n, K]."""
        numbers = np.arange(self.seen, self.seen + len(rows))
        places = np.where(numbers < self._capacity, numbers, self._random.integers(0, numbers + 1))
        self.seen += len(rows)
        for row in np.flatnonzero(places < self._capacity):
            at = self._offset + int(places[row]) * self._columns * 4
            os.pwrite(self._descriptor, np.ascontiguousarray(rows[row]).data, at)

    def read(self) -> Floats:
        """The sample: [rows, K]."""
        count = min(self.seen, self._capacity)
        data = os.pread(self._descriptor, count * self._columns * 4, self._offset)
        return np.frombuffer(data, dtype=np.float32).reshape(count, self._columns)


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
    """What was seen, by place. Made by `watch`."""

    def __init__(self, descriptor: int, rows: tuple[int, int]) -> None:
        self._descriptor, self._rows = descriptor, rows
        self._records: dict[Place, _Record] = {}
        self._end = 0

    def add(self, place: Place, values: torch.Tensor, along_rows: bool, held_back: bool) -> None:
        """Rows [..., K] that entered the matrix at `place`."""
        rows = values.detach().reshape(-1, values.shape[-1]).float().cpu().numpy()
        if place not in self._records:
            columns = rows.shape[1]
            seed = len(self._records)
            self._records[place] = _Record(along_rows, self._descriptor, self._end, self._rows, columns, seed)
            self._end += sum(self._rows) * columns * 4
        record = self._records[place]
        if held_back:
            record.held_back.add(rows)
        else:
            record.rows.add(rows)
            record.squares += np.einsum("ij,ij->j", rows, rows, dtype=np.float64)

    def inputs(self, place: Place) -> Inputs | None:
        """Of one matrix; None where nothing entered it."""
        record = self._records.get(place)
        if record is None:
            return None
        rms = np.sqrt(record.squares / max(record.rows.seen, 1)).astype(np.float32)
        return Inputs(record.along_rows, record.rows.seen, rms, record.rows.read(), record.held_back.read())


class _Watch(TorchFunctionMode):
    """Notes the activations of every product with a parameter of the module that computes it."""

    def __init__(self, names: Mapping[int, str], activations: Activations) -> None:
        super().__init__()
        self._names, self._activations = names, activations
        self._modules: list[torch.nn.Module] = []
        self.held_back = False

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """A module begins to compute."""
        self._modules.append(module)

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """It is done."""
        self._modules.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of torch passes here."""
        kwargs = kwargs or {}
        if func in _LINEAR:
            self._note(args[0], args[1] if len(args) > 1 else kwargs["weight"], -1)
        elif func in _PRODUCTS:
            self._note(args[0], args[1] if len(args) > 1 else next(iter(kwargs.values())), -2)
        elif func in _WITH_BIAS and len(args) == 3:
            self._note(args[1], args[2], -2)
        return func(*args, **kwargs)

    def _note(self, values: Any, weight: Any, axis: int) -> None:
        """values times a matrix, whose `axis` is summed over."""
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            return
        for module in reversed(self._modules[-2:]):
            for own, parameter in module._parameters.items():
                if parameter is None or parameter.dim() not in (2, 3) or parameter.device != weight.device:
                    continue
                matrix = parameter.shape[-1] * parameter.shape[-2]
                offset = weight.data_ptr() - parameter.data_ptr()
                number, rest = divmod(offset, matrix * parameter.element_size())
                if rest == 0 and 0 <= number < max(1, parameter.numel() // matrix) and weight.numel() == matrix:
                    name = f"{self._names[id(module)]}.{own}".lstrip(".")
                    place = (name, int(number) if parameter.dim() == 3 else None)
                    # Transposed views of a parameter have its address, too.
                    along_rows = (axis == -1) == (weight.stride(-1) == 1)
                    self._activations.add(place, values, along_rows, self.held_back)
                    return


@contextmanager
def watch(
    model: Any, windows: Sequence[npt.NDArray[np.int64]], held_back: Sequence[bool], rows: tuple[int, int], folder: Path,
    progress: Callable[[int, int], None],
) -> Iterator[Activations]:  # fmt: skip
    """Run the model over windows of token ids, and keep samples of what enters each matrix while the context lasts.

    held_back: which windows are for checking. rows: how many rows are kept of either kind. folder: where the file of the
    samples lies. progress: windows done, windows in all.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        activations = Activations(file.fileno(), rows)
        mode = _Watch({id(module): name for name, module in model.named_modules()}, activations)
        before = torch.nn.modules.module.register_module_forward_pre_hook(mode.enter)
        after = torch.nn.modules.module.register_module_forward_hook(mode.leave, always_call=True)
        try:
            device = model.get_input_embeddings().weight.device
            for number, (window, is_held_back) in enumerate(zip(windows, held_back, strict=True)):
                mode.held_back = is_held_back
                with torch.inference_mode(), mode:
                    model(torch.from_numpy(window)[None].to(device), **_without_cache(model))
                progress(number + 1, len(windows))
        finally:
            before.remove()
            after.remove()
        del model  # a large one need not stay while the samples are used
        yield activations


def _without_cache(model: Any) -> dict[str, bool]:
    """Encoders know no cache."""
    return {"use_cache": False} if hasattr(model.config, "use_cache") and model.can_generate() else {}


class Found(NamedTuple):
    """Where a tensor of a checkpoint is in the model. place: of its one matrix, or of the stack. transposed: there."""

    place: Place
    transposed: bool


def places(model: Any, names: Sequence[str]) -> dict[str, Found]:
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
            result[name] = Found((multiplied[renamed], int(expert[1]) if expert else None), transposed)
    return result
