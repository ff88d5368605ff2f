"""A sample of tokens on its way through a model, layer by layer, and gradients on their way back.

What a layer got, and the gradients after it, lie on the disk between the passes, so one layer is in memory at a time,
and what was interrupted goes on with the layer at which it stopped.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import torch
from safetensors.numpy import load_file, save
from torch import Tensor

from pqweights.calibrate.drawing import drawn
from pqweights.calibrate.layered import OUTSIDE, LayerCall, LayeredModel
from pqweights.checkpoint.writer import write_whole
from pqweights.errors import SourceError

# Of hidden states and gradients on the disk.
STATES_DTYPE = torch.bfloat16
# Tokens that a layer computes together: the memory that this takes is a small part of that of a large layer.
BATCH_TOKENS = 1024
COUNTS = "counts"  # files


class Watch(Protocol):
    """A context that looks at a layer while it computes."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *raised: Any) -> Any: ...

    def next_batch(self) -> None:
        """Note that a batch has ended."""
        ...


Watching = TypeVar("Watching", bound=Watch)


class Unwatched(contextlib.nullcontext[Any]):
    """Sees nothing."""

    def __enter__(self) -> Unwatched:
        return self

    def next_batch(self) -> None:
        """Note that a batch has ended."""


@dataclass(frozen=True, kw_only=True)
class LayerPasses:
    """The passes of one sample.

    model: the model
    ids: token ids of the sample, [windows, tokens]
    work: a folder for what lies on the disk
    batch_tokens: how many are computed together, in whole windows
    seed: of the labels that are drawn
    check: called before anything is written; raises an error if the model is not what it was
    """

    model: LayeredModel
    ids: Tensor
    work: Path
    batch_tokens: int = BATCH_TOKENS
    seed: int = 0
    check: Callable[[], None] = lambda: None

    def file(self, kind: str, layer: int) -> Path:
        """Return the file of something that is known of a layer."""
        return self.work / f"{kind}-{layer:04}.safetensors"

    def save(self, kind: str, layer: int, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write what is known of a layer. Raises OutputError, and what `check` raises."""
        self.check()
        save_whole(self.file(kind, layer), tensors)

    def read(self, kind: str, layer: int) -> dict[str, npt.NDArray[Any]]:
        """Return what was written of a layer."""
        return load_file(self.file(kind, layer))

    def save_counts(self, layer: int, counts: Mapping[str, Tensor]) -> None:
        """Write how much the inputs of a layer count, as `LayerStatistics` found it."""
        self.save(COUNTS, layer, {key: values.numpy() for key, values in counts.items()})

    def counts(self, layer: int) -> dict[str, Tensor]:
        """Return how much the inputs of a layer count."""
        return {key: torch.from_numpy(values) for key, values in self.read(COUNTS, layer).items()}

    def check_finite(self, layer: int, *tensors: Tensor) -> None:
        """Raise SourceError for values or gradients that cannot be used."""
        if not all(torch.stack(values.aminmax()).isfinite().all() for values in tensors if values.numel()):
            name = "the head" if layer == OUTSIDE else f"layer {layer}"
            raise SourceError(f"{name} of the model computes values that are not finite, or too large")

    @property
    def _batches(self) -> list[slice]:
        windows = max(1, self.batch_tokens // self.ids.shape[1])
        return [slice(at, at + windows) for at in range(0, len(self.ids), windows)]

    @functools.cached_property
    def _calls(self) -> list[list[LayerCall]]:
        """How layers are called, by batch; the states before the first layer are written, unless they are there."""
        calls: list[list[LayerCall]] = []
        with torch.no_grad(), self.model.loaded(OUTSIDE):
            begun = [self.model.begin(self.ids[batch]) for batch in self._batches]
        for _, of_batch in begun:
            calls.append(next((known for known in calls if _same(known, of_batch)), of_batch))
        if not self.file("hidden", 0).exists():
            self._save_states("hidden", 0, torch.cat([hidden.to(STATES_DTYPE) for hidden, _ in begun]))
        return calls

    def load(self, kind: str, layer: int) -> Tensor:
        """Return the states before a layer, [windows, tokens, width]. kind: hidden, or gradients"""
        return torch.from_numpy(load_file(self.file(kind, layer))["x"]).view(STATES_DTYPE)

    def _save_states(self, kind: str, layer: int, states: Tensor) -> None:
        self.save(kind, layer, {"x": states.view(torch.int16).numpy()})

    def forward(self, layer: int, open_watch: Callable[[], Watching], keep: Callable[[Watching], None]) -> None:
        """Compute a layer, and write the states after it, unless they are there.

        open_watch: returns what looks on, when the weights of the layer are in memory
        keep: takes what was seen, while they are

        Raises SourceError if the model cannot be run, or computes what is not finite; OutputError.
        """
        calls = self._calls
        hidden = self.load("hidden", layer)
        after = torch.empty_like(hidden)
        with torch.no_grad(), self.model.loaded(layer):
            with open_watch() as watch:
                for batch, call in zip(self._batches, calls, strict=True):
                    after[batch] = self.model.run(layer, hidden[batch].float(), call[layer])
                    watch.next_batch()
            if not self.file("hidden", layer + 1).exists():
                self.check_finite(layer, after)
                self._save_states("hidden", layer + 1, after)
            del hidden, after
            keep(watch)

    def all_forward(self, done: Callable[[int], None]) -> None:
        """Write the states before each layer and after the last. done: called with the number of each layer"""
        for layer in range(self.model.layers):
            if not self.file("hidden", layer + 1).exists():
                self.forward(layer, Unwatched, lambda watch: None)
            done(layer)

    def head(self, open_watch: Callable[[], Watching], keep: Callable[[Watching], None]) -> None:
        """Compute what comes after the layers; see `forward`."""
        hidden = self.load("hidden", self.model.layers)
        with torch.no_grad(), self.model.loaded(OUTSIDE):
            with open_watch() as watch:
                for window in range(len(self.ids)):
                    self.model.end(self.ids[window : window + 1], hidden[window : window + 1].float())
                    watch.next_batch()
            keep(watch)

    def head_backward(self, open_watch: Callable[[], Watching], keep: Callable[[Watching], None]) -> None:
        """Draw labels, and write the gradients before the head; see `backward`."""
        model, last = self.model, self.model.layers
        hidden, random = self.load("hidden", last), torch.Generator().manual_seed(self.seed)
        gradients = torch.empty_like(hidden)
        with model.loaded(OUTSIDE), open_watch() as watch:
            for window in range(len(self.ids)):
                inputs = hidden[window : window + 1].float().requires_grad_()
                logits = model.end(self.ids[window : window + 1], inputs)[0]
                self.check_finite(OUTSIDE, logits.detach())
                # The gradient of the cross entropy at the logits is their softmax, and 1 less for the label.
                gradient = torch.softmax(logits.detach(), -1)
                labels = drawn(gradient, random)
                gradient[torch.arange(len(labels)), labels] -= 1
                logits.backward(gradient)
                gradients[window : window + 1] = _gradient(inputs)
                del logits, gradient  # before the next ones: they are larger than all else
                watch.next_batch()
            self.check_finite(OUTSIDE, gradients)
            self._save_states("gradients", last, gradients)
            keep(watch)

    def backward(self, layer: int, open_watch: Callable[[], Watching], keep: Callable[[Watching], None]) -> None:
        """Compute a layer again, and write the gradients before it from those after it; see `forward`."""
        calls, model = self._calls, self.model
        hidden, gradients = self.load("hidden", layer), self.load("gradients", layer + 1)
        before = torch.empty_like(hidden)
        with model.loaded(layer), open_watch() as watch:
            for batch, call in zip(self._batches, calls, strict=True):
                inputs = hidden[batch].float().requires_grad_()
                model.run(layer, inputs, call[layer]).backward(gradients[batch].float())
                before[batch] = _gradient(inputs)
                watch.next_batch()
            self.check_finite(layer, before)
            self._save_states("gradients", layer, before)
            keep(watch)

    def embedding_backward(self, open_watch: Callable[[], Watching], keep: Callable[[Watching], None]) -> None:
        """Compute what comes before the layers again, with the gradients after it; see `forward`."""
        gradients = self.load("gradients", 0)
        with self.model.loaded(OUTSIDE), open_watch() as watch:
            for batch in self._batches:
                hidden, _ = self.model.begin(self.ids[batch])
                if hidden.requires_grad:
                    hidden.backward(gradients[batch].float())
                watch.next_batch()
            keep(watch)


def save_whole(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a file of tensors that is there only when it is whole. Raises OutputError."""
    write_whole(path.parent, path, [save(dict(tensors))])


def _gradient(inputs: Tensor) -> Tensor:
    assert inputs.grad is not None
    return inputs.grad


def _same(first: Sequence[LayerCall], second: Sequence[LayerCall]) -> bool:
    return all(one.equals(other) for one, other in zip(first, second, strict=True))
