"""Codes for a master from what its weights are for: a calibration in the memory of one decoder layer.

A sample of tokens goes through the model layer by layer (layered.py), and gradients come back the same way; what a
layer got, and the gradients before it, lie on the disk between its passes:

1. Forward: the hidden states before each layer.
2. Backward, from the last layer to the first: each is computed again, now with gradients. Its weights get their g and,
   from the moments H of their inputs, the scales of their columns; of H nothing else is kept. From how large the scaled
   weights are follows what they would take at any step, and so the step of the whole model for the wanted size.
3. Encoding: each layer is computed once more for H, and its weights are encoded with that step.

docs/calibration.md has the method. Every layer's part of a pass is a file, so an interrupted calibration goes on with
the layer at which it stopped.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from torch import Tensor

from pqweights.checkpoint.writer import disk_errors
from pqweights.codecs.column_encoding import (
    InputFactors,
    encode_columns,
    expected_bits,
    moment_blocks,
    output_energies,
    scaled_energies,
    spread_of,
)
from pqweights.codecs.columns import ColumnCodes
from pqweights.errors import SourceError
from pqweights.quality.layer_passes import LayerPasses, Progress
from pqweights.quality.layer_statistics import InputMoments, LayerStatistics, moments_of_inputs
from pqweights.quality.layered import OUTSIDE, LayeredModel, MatrixPlace, ModelMatrix
from pqweights.rewrite.ready import CodeMeasures, write_ready
from pqweights.rewrite.shard import LocalEngine
from pqweights.rewrite.task import ClusterWork, Engine

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
# How far the size may be from what is wanted before everything is encoded again, and how often that is done.
_TOLERANCE, _ATTEMPTS = 0.005, 3
# Of Python, torch and transformers before they do anything.
PROCESS_BYTES = 1_000_000_000
# A stored scale of a row or a column.
SCALE_BITS = 8
Codes = dict[str, tuple[ColumnCodes, CodeMeasures]]  # of weights, by name

# An expert that reads fewer of the sample's tokens is not known well enough to be calibrated.
FEWEST_INPUTS = 64


@dataclass(frozen=True, kw_only=True)
class CalibratedWeight:
    """A weight that is to be calibrated.

    name: of the tensor in the checkpoint
    place: where the model has it
    """

    name: str
    place: MatrixPlace


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What a calibration has encoded.

    folder: of the files with the codes
    bits, wanted_bits: how many the codes take, and were to take
    is_met: whether that is close enough
    """

    folder: Path
    bits: float
    wanted_bits: float
    is_met: bool


@dataclass(frozen=True, kw_only=True)
class LayerWork(ClusterWork):
    """The encoding of the layers, of which a task does one.

    step: of the model
    codes: the file for each layer
    """

    calibration: LayerwiseCalibration
    step: float
    codes: Mapping[int, Path]

    def make(self, number: int) -> None:
        """Encode a layer."""
        torch.set_num_threads(self.calibration.threads)
        self.calibration.encode_layer(number, self.step, self.codes[number])


@dataclass(frozen=True, kw_only=True)
class LayerwiseCalibration:
    """A calibration of some weights of a model.

    model: the model
    ids: token ids of the sample, [windows, tokens]
    weights: what is to be encoded, by layer; those outside the layers under OUTSIDE
    work: a folder for what lies on the disk
    wanted_bits: how many each weight is to take, by name, if none gave of its bits to others
    at_most: whether all together may not take more than that, rather than about as many
    by_tensor: whether each weight takes as many as it is to, rather than all together
    states: of the trellis
    threads: that encode
    seed: of the labels that are drawn
    engine: what has layers encoded
    files: those of the checkpoint, which a node must see, each with its size
    """

    model: LayeredModel
    ids: Tensor
    weights: Mapping[int, Sequence[CalibratedWeight]]
    work: Path
    wanted_bits: Mapping[str, float]
    states: int
    at_most: bool = False
    by_tensor: bool = False
    threads: int = 1
    seed: int = 0
    progress: Progress = lambda done, total, what: None
    engine: Engine = field(default_factory=LocalEngine)
    files: tuple[tuple[Path, int], ...] = ()

    def encode(self) -> Encoded:
        """Run all passes, and return where the codes are.

        Raises SourceError if the model cannot be run, or computes what is not finite; OutputError.
        """
        self._passes.all_forward(lambda layer: self._done(0, layer + 1, f"layer {layer} forward"))
        self._backward()
        return self._encode()

    @property
    def reached(self) -> set[str]:
        """The names of the weights that were encoded, which the sample reached in linear layers."""
        return set(self._kept_of("energies"))

    @functools.cached_property
    def _passes(self) -> LayerPasses:
        return LayerPasses(model=self.model, ids=self.ids, work=self.work, seed=self.seed)

    def _done(self, passes: int, layer: int, what: str) -> None:
        self.progress(passes * (self.model.layers + 1) + layer, 3 * (self.model.layers + 1), what)

    # --- the passes ---

    def _backward(self) -> None:
        """Write the statistics of each layer, and the gradients at its inputs."""
        passes, last = self._passes, self.model.layers
        if not passes.file("head", last).exists():
            passes.head_backward(
                lambda: self._statistics(OUTSIDE),
                lambda seen: self._save_statistics("head", last, seen, keep_moments=True),
            )
        self._done(1, 1, "head backward")
        for layer in reversed(range(last)):
            if not passes.file("statistics", layer).exists():
                passes.backward(
                    layer,
                    functools.partial(self._statistics, layer),
                    functools.partial(self._save_statistics, "statistics", layer),
                )
            passes.file("gradients", layer + 1).unlink(missing_ok=True)
            self._done(1, last - layer + 1, f"layer {layer} backward")
        if not passes.file("statistics", last).exists():
            self._finish_outside()

    def _statistics(self, layer: int) -> LayerStatistics[InputMoments]:
        parameters, used = self.model.parameters_of(layer), self.weights.get(layer, ())
        names = {weight.place.matrix.parameter for weight in used}
        return LayerStatistics({name: parameters[name] for name in names}, moments_of_inputs)

    def _weights_at(self, layer: int, matrices: Sequence[ModelMatrix]) -> list[CalibratedWeight]:
        """Return the weights of a layer that are among some matrices."""
        return [weight for weight in self.weights.get(layer, ()) if weight.place.matrix in matrices]

    def _finish_outside(self) -> None:
        """Write what is known of the weights outside the layers, now that there are gradients at the embedding.

        An embedding that is the head as well is looked up and multiplied by. A row that is looked up has, of the V
        tokens, the gradients of its own; each row of the head has its g for all inputs.
        """
        last = self.model.layers
        known = load_file(self._passes.file("head", last))
        tied = self.model.tied
        if tied is not None and (blocks := _moments_of(tied, known)):
            gradients = self._passes.load("gradients", 0).flatten(0, 1).float()
            squares = known[f"{tied}:gradients"]
            share = float(len(squares) * squares.mean()) * len(gradients)
            for block, part in zip(blocks, moment_blocks(gradients.shape[1]), strict=True):
                block += (gradients[:, part].T @ gradients[:, part]).div_(max(share, 1e-30))
        with self.model.loaded(OUTSIDE):
            parameters = self.model.parameters_of(OUTSIDE)
            for weight in self.weights.get(OUTSIDE, ()):
                if blocks := _moments_of(weight.name, known):
                    values = weight.place.of(parameters[weight.place.matrix.parameter])
                    inputs = _factors(blocks, float(known[f"{weight.name}:damping"]))
                    known |= _described(weight.name, values, inputs, known[f"{weight.name}:gradients"])
        self._passes.save("statistics", last, known)

    def _save_statistics(
        self, kind: str, layer: int, statistics: LayerStatistics[InputMoments], *, keep_moments: bool = False
    ) -> None:
        """Write what is kept of the weights of a layer; nothing of those that the sample hardly reached."""
        number = OUTSIDE if keep_moments else layer
        parameters = self.model.parameters_of(number)
        result: dict[str, npt.NDArray[Any]] = {}
        for matrices, read in statistics.inputs():
            along_rows = [matrix for matrix in matrices if statistics.products[matrix].along_rows]
            known = {m: s for m in along_rows if (s := statistics.mean_squares(m, self.ids.numel())) is not None}
            if read.count < FEWEST_INPUTS or not known:
                continue
            damping, moments = read.damping(), read.mean()
            if not any(block.diagonal().any() for block in moments):
                continue
            self._passes.check_finite(number, *moments, *map(torch.from_numpy, known.values()))
            inputs = None if keep_moments else _factors(moments, damping)
            for weight in self._weights_at(number, list(known)):
                squares = known[weight.place.matrix][weight.place.rows]
                result[f"{weight.name}:damping"] = np.array(damping)
                if inputs is None:
                    result |= {f"{weight.name}:gradients": squares, **_stored_moments(weight.name, moments)}
                else:
                    values = weight.place.of(parameters[weight.place.matrix.parameter])
                    result |= _described(weight.name, values, inputs, squares)
        self._passes.save(kind, layer, result)

    # --- the step ---

    def _kept_of(self, what: str) -> list[str]:
        """Return the names of the weights of which something is kept."""
        keys: list[str] = []
        for path in sorted(self.work.glob("statistics-*.safetensors")):
            with safe_open(path, "numpy") as stored:
                keys += stored.keys()
        return [key.rpartition(":")[0] for key in keys if key.endswith(f":{what}")]

    def _step(self, wanted_bits: float) -> float:
        """Return the step at which all weights are expected to take so many bits."""
        return _step_for(self._expected_bits, wanted_bits)

    def _expected_bits(self, step: float, layer: int | None = None) -> float:
        """Return the bits that the weights of a layer, or of all, are expected to take. step: of the model"""
        return sum(bits_at(self._step_of(name, step)) for name, bits_at in self._weights_known(layer))

    def _step_of(self, name: str, step: float) -> float:
        """Return the step of a weight: that of the model, unless each has its own. step: of the model"""
        return step * self._own_steps[name] if self.by_tensor else step

    @functools.cached_property
    def _own_steps(self) -> dict[str, float]:
        """The step at which each weight is expected to take its own bits, by name."""
        return {name: _step_for(bits_at, self.wanted_bits[name]) for name, bits_at in self._weights_known()}

    def _weights_known(self, layer: int | None = None) -> Iterator[tuple[str, Callable[[float], float]]]:
        """Yield the weights of a layer, or all, each with the function of its step that says what it should take."""
        pattern = "*" if layer is None else f"{layer:04}"
        for path in sorted(self.work.glob(f"statistics-{pattern}.safetensors")):
            with safe_open(path, "numpy") as stored:
                for key in stored.offset_keys():
                    name, _, what = key.rpartition(":")
                    if what == "energies":
                        spread, shape = (stored.get_tensor(f"{name}:{kept}") for kept in ("spread", "shape"))
                        yield name, functools.partial(_bits_at, stored.get_tensor(key), spread, shape.tolist())

    # --- encoding ---

    def _encode(self) -> Encoded:
        """Encode all layers, again with another step if they miss the size.

        The first step is corrected by what the layer in the middle takes, which is nearly always enough.
        """
        aim = sum(self.wanted_bits[name] for name in self.reached)
        if not aim:
            raise SourceError(
                "calibration: the sample reaches no linear layer of the model with a weight as the checkpoint has it; "
                "quantize it without `calibrate`"
            )
        goal, slack = (aim * (1 - _TOLERANCE / 2), _TOLERANCE / 2) if self.at_most else (aim, _TOLERANCE)
        attempt = max(0, len(list(self.work.glob("step-*.safetensors"))) - 1)
        while True:
            step = self._settled(attempt, goal)
            folder, taken = self._attempted(attempt, step)
            is_met = abs(taken / goal - 1) <= slack
            if is_met or attempt + 1 == _ATTEMPTS:
                return Encoded(folder=folder, bits=taken, wanted_bits=aim, is_met=is_met)
            attempt += 1
            corrected = self._step(goal * self._expected_bits(step) / max(taken, 1.0))
            self._passes.save("step", attempt, {"step": np.array(corrected)})

    def _attempted(self, attempt: int, step: float) -> tuple[Path, float]:
        """Encode all layers with a step; return the folder of the codes, and the bits that they take."""
        last, folder = self.model.layers, self.work / f"codes-{attempt}"
        for old in range(attempt):
            shutil.rmtree(self.work / f"codes-{old}", ignore_errors=True)
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
        files = {layer: folder / f"codes-{layer:04}.safetensors" for layer in range(last + 1)}
        left = [layer for layer, path in files.items() if not path.exists()]
        work = self._layer_work(step, files)
        for count, (layer, _) in enumerate(self.engine.each(work, left, self._task_bytes), last + 2 - len(left)):
            self._done(2, count, f"encoding layer {layer}")
        return folder, sum(8.0 * part.nbytes for path in files.values() for part in load_file(path).values())

    def _layer_work(self, step: float, files: Mapping[int, Path]) -> LayerWork:
        """Return the work of which a task encodes a layer: on its own, since the states before it are known."""
        own = replace(self, engine=LocalEngine(), progress=_unseen)
        shared = files[0].parent
        return LayerWork(out=f"{shared}", files=self.files, shared=shared, calibration=own, step=step, codes=files)

    @property
    def _task_bytes(self) -> int:
        """The memory that encoding a layer takes at most: the layer, all moments, and factors of the largest."""
        most = 0
        for layer in (*range(self.model.layers), OUTSIDE):
            weights = self.model.parameters_of(layer).values()
            shapes = [(*weight.shape[:-2], weight.shape[-1]) for weight in weights if weight.ndim > 1]
            moments = [4 * sum((part.stop - part.start) ** 2 for part in moment_blocks(of[-1])) for of in shapes]
            kept = sum(prod(of[:-1]) * size for of, size in zip(shapes, moments, strict=True))
            most = max(most, 4 * sum(weight.numel() for weight in weights) + kept + 2 * max(moments, default=0))
        return PROCESS_BYTES + most

    def encode_layer(self, layer: int, step: float, path: Path) -> None:
        """Write the codes of a layer, or of what is outside, whose number is that after the last."""
        codes = self._outside_codes(step) if layer == self.model.layers else self._layer_codes(layer, step)
        write_ready(path, codes)

    def _settled(self, attempt: int, goal: float) -> float:
        """Return the step of an attempt; the first one is corrected by what the layer in the middle takes."""
        if not self._passes.file("step", attempt).exists():
            step, middle = self._step(goal), self.model.layers // 2
            tried = self._layer_codes(middle, step)
            if taken := sum(8.0 * part.nbytes for codes, _ in tried.values() for part in codes.parts):
                step = self._step(goal * self._expected_bits(step, middle) / taken)
            self._passes.save("step", attempt, {"step": np.array(step)})
        return float(load_file(self._passes.file("step", attempt))["step"])

    def _layer_codes(self, layer: int, step: float) -> Codes:
        known = load_file(self._passes.file("statistics", layer))
        codes = Codes()

        def encode(seen: LayerStatistics[InputMoments]) -> None:
            for matrices, read in seen.inputs():
                codes.update(self._codes(layer, self._weights_at(layer, matrices), known, read.mean(), step))

        self._passes.forward(layer, lambda: self._statistics(layer), encode)
        return codes

    def _outside_codes(self, step: float) -> Codes:
        known = load_file(self._passes.file("statistics", self.model.layers))
        codes = Codes()
        with self.model.loaded(OUTSIDE):
            for weight in self.weights.get(OUTSIDE, ()):
                if moments := _moments_of(weight.name, known):
                    codes |= self._codes(OUTSIDE, [weight], known, moments, step)
        return codes

    def _codes(
        self,
        layer: int,
        weights: Sequence[CalibratedWeight],
        known: Mapping[str, npt.NDArray[Any]],
        moments: list[Tensor],
        step: float,
    ) -> Codes:
        """Encode the weights of a layer that multiply the same inputs, of those of which something is known.

        moments: the blocks of H, which are taken out of the list
        """
        parameters, result = self.model.parameters_of(layer), Codes()
        weights = [weight for weight in weights if f"{weight.name}:energies" in known]
        if not weights:
            return result
        inputs = _factors(moments, float(known[f"{weights[0].name}:damping"]))
        for weight in weights:
            codes, measured = encode_columns(
                weight.place.of(parameters[weight.place.matrix.parameter]).numpy(),
                inputs,
                gradients=known[f"{weight.name}:gradients"],
                step=self._step_of(weight.name, step),
                states=self.states,
                threads=self.threads,
            )
            of_all = float(known[f"{weight.name}:energy"])
            result[weight.name] = (
                codes,
                CodeMeasures(
                    relative_mse=measured.error / measured.energy if measured.energy else 0.0,
                    energy=measured.energy,
                    weighed_mse=measured.weighed_error / of_all if of_all else 0.0,
                ),
            )
        return result


def _unseen(done: int, total: int, what: str) -> None:
    """Show no progress: the driver counts layers."""


def _bits_at(energies: Floats, spread: Floats, shape: list[int], step: float) -> float:
    """Return the bits that a weight is expected to take at a step, scales included; see `_described`."""
    rows, columns = shape
    return expected_bits(energies, spread, step, (rows, columns)) + SCALE_BITS * (rows + columns)


def _step_for(bits_at: Callable[[float], float], wanted: float) -> float:
    """Return the step at which something is expected to take so many bits."""
    low, high = -100.0, 100.0  # log2 of the step
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if bits_at(2.0**middle) > wanted else (low, middle)
    return float(2.0**high)


def _factors(moments: list[Tensor], damping: float) -> InputFactors:
    """Factorize the blocks of H, which are taken out of the list."""
    return InputFactors.of([moments.pop(0).numpy() for _ in range(len(moments))], damping)


def _stored_moments(name: str, blocks: Sequence[Tensor]) -> dict[str, npt.NDArray[Any]]:
    return {f"{name}:moments-{number:03}": block.numpy() for number, block in enumerate(blocks)}


def _moments_of(name: str, known: Mapping[str, npt.NDArray[Any]]) -> list[Tensor]:
    """Return the blocks of H that are kept of a weight; none if nothing is known."""
    return [torch.from_numpy(known[key]) for key in sorted(known) if key.startswith(f"{name}:moments-")]


def _described(name: str, weight: Tensor, inputs: InputFactors, gradients: Doubles) -> dict[str, npt.NDArray[Any]]:
    """Return what is kept of a weight until it is encoded.

    energies, spread: see scaled_energies and spread_of
    energy: the sum of g_i w_i H w_i over the rows
    """
    values = weight.numpy()
    return {
        f"{name}:gradients": gradients,
        f"{name}:energy": np.array(float(gradients @ output_energies(values, inputs))),
        f"{name}:energies": scaled_energies(values, inputs, gradients=gradients),
        f"{name}:spread": spread_of(inputs),
        f"{name}:shape": np.array(weight.shape),
    }
