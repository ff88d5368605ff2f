"""Codes for a master from what its weights are for: a calibration in the memory of one decoder layer.

A sample of tokens goes through the model layer by layer (layered.py), and gradients come back the same way; what a
layer got, and the gradients before it, lie on the disk between its passes:

1. Forward: the hidden states before each layer.
2. Backward, from the last layer to the first: each is computed again, now with gradients. Its weights get their g and,
   from the moments H of their inputs, the scales of their columns; H is kept where there is room. From how large the
   scaled weights are follows what they would take at any step, and so the step of the whole model for the wanted size.
3. Encoding: each layer is computed once more for H, unless that was kept, and its weights are encoded with that step.

Each expert of a stack is a matrix of its own. docs/calibration.md has the method. Every layer's part of a pass is a
file, so an interrupted calibration goes on with the layer at which it stopped.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from torch import Tensor

from pqweights.calibrate.calibrated_weights import (
    CalibratedWeight,
    EncodedMatrix,
    bits_at,
    described,
    factors_of,
    moments_of,
    stored_moments,
    together,
)
from pqweights.calibrate.divergence import ATTEMPTS, MOST_BELOW
from pqweights.calibrate.layer_passes import LayerPasses
from pqweights.calibrate.layer_statistics import InputMoments, LayerStatistics, moments_of_inputs
from pqweights.calibrate.layered import OUTSIDE, LayeredModel
from pqweights.checkpoint.writer import disk_errors, free_bytes
from pqweights.common.threads import Progress, no_progress
from pqweights.convert.distributed.engine import RayEngine
from pqweights.convert.distributed.worker import ClusterWork
from pqweights.convert.ready import CodeMeasures, write_ready
from pqweights.errors import SourceChangedError, SourceError
from pqweights.formats.column_encoding import (
    InputFactors,
    encode_columns,
    moment_blocks,
)
from pqweights.formats.columns import ColumnCodes

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
# How far the size may be from what is wanted before everything is encoded again, and how often that is done.
_TOLERANCE, _ATTEMPTS = 0.005, 3
# Of Python, torch and transformers before they do anything.
PROCESS_BYTES = 1_000_000_000
# Moments of all layers that the backward pass keeps on the disk, while they take at most this share of what is free
# there. The others are computed again, from the same numbers.
MOST_KEPT_BYTES, SHARE_OF_FREE = 4_000_000_000, 0.25
Codes = dict[str, tuple[ColumnCodes, CodeMeasures]]  # of weights, by name
OfWeights = tuple[list[CalibratedWeight], list[Tensor]]  # weights that multiply the same inputs, and the blocks of H
_MOMENTS, _INPUTS = "moments", "inputs"  # of files on the disk, and of what lies in them

# An expert that reads fewer of the sample's tokens is not known well enough: one with a tensor of its own is not
# calibrated, and one of a stack gets the inputs of the whole stack, as if so many tokens had reached it.
FEWEST_INPUTS = 64


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What a calibration has encoded.

    folder: of the files with the codes
    bits, wanted_bits: how many the codes take, and were to take
    divergence: what was measured, if it is bounded
    is_met: whether the size is close enough, or the divergence
    """

    folder: Path
    bits: float
    wanted_bits: float
    divergence: float | None
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
        """Encode a layer, in a file of its own first: a task whose node was only believed lost may do the same."""
        torch.set_num_threads(self.calibration.threads)
        path = self.codes[number]
        own = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        self.calibration.encode_layer(number, self.step, own)
        with disk_errors(path):
            own.replace(path)


@dataclass(frozen=True, kw_only=True)
class LayerwiseCalibration:
    """A calibration of some weights of a model.

    model: the model
    ids: token ids of the sample, [windows, tokens]
    weights: what is to be encoded, by layer, all matrices of a stack; those outside the layers under OUTSIDE
    work: a folder for what lies on the disk
    wanted_bits: how many each tensor is to take, by name, if none gave of its bits to others
    at_most: whether all together may not take more than that, rather than about as many
    most_divergence: in nats per token; what the weights are to take is then only tried first
    diverged: returns the divergence of the result that has the codes in a folder
    by_tensor: whether each tensor takes as many as it is to, rather than all together
    states: of the trellis
    threads: that encode
    seed: of the labels that are drawn
    engine: the cluster on whose nodes layers are encoded; None for this process
    files: those of the checkpoint, which a node must see, each with its size
    check: see LayerPasses
    """

    model: LayeredModel
    ids: Tensor
    weights: Mapping[int, Sequence[CalibratedWeight]]
    work: Path
    wanted_bits: Mapping[str, float]
    states: int
    at_most: bool = False
    most_divergence: float | None = None
    diverged: Callable[[Path], float] | None = None
    by_tensor: bool = False
    threads: int = 1
    seed: int = 0
    progress: Progress = no_progress
    engine: RayEngine | None = None
    files: tuple[tuple[Path, int], ...] = ()
    check: Callable[[], None] = lambda: None

    def encode(self) -> Encoded:
        """Run all passes, and return where the codes are.

        Raises SourceError if the model cannot be run, or computes what is not finite; OutputError.
        """
        self._passes.all_forward(lambda layer: self._done(0, layer + 1, f"layer {layer} forward"))
        self._backward()
        return self._encode()

    @property
    def reached(self) -> set[str]:
        """The names of the tensors that were encoded, which the sample reached in linear layers."""
        return {self._names[label] for label in self._kept_of("energies")}

    @property
    def hardly_reached(self) -> Counter[str]:
        """How many experts of stacks were encoded with the inputs of the whole stack, by tensor."""
        return Counter(self._names[label] for label in self._kept_of("pooled"))

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        return {weight.label: weight.name for weights in self.weights.values() for weight in weights}

    @functools.cached_property
    def _passes(self) -> LayerPasses:
        return LayerPasses(model=self.model, ids=self.ids, work=self.work, seed=self.seed, check=self.check)

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
        return LayerStatistics({name: parameters[name] for name in names}, moments_of_inputs, self.model.head)

    def _inputs(
        self, layer: int, seen: LayerStatistics[InputMoments], known: AbstractSet[str], pooled: AbstractSet[str]
    ) -> Iterator[tuple[list[CalibratedWeight], InputMoments]]:
        """Yield the weights of a layer that multiply the same inputs, and these.

        known: the labels of those of which enough is known
        pooled: of those of stacks that come at the end, with the inputs of all matrices of their stack
        """
        own = self.weights.get(layer, ())
        of_stack: dict[str, InputMoments] = {}
        stacks = {weight.place.matrix.parameter for weight in own if weight.label in pooled}
        for matrices, read in seen.inputs():
            for parameter in {matrix.parameter for matrix in matrices} & stacks:
                of_stack.setdefault(parameter, InputMoments(read.parts)).include(read)
            if weights := [weight for weight in own if weight.place.matrix in matrices and weight.label in known]:
                yield weights, read
        for parameter in sorted(of_stack):
            rest = [weight for weight in own if weight.place.matrix.parameter == parameter and weight.label in pooled]
            yield rest, of_stack.pop(parameter)

    def _finish_outside(self) -> None:
        """Write what is known of the weights outside the layers, now that there are gradients at the embedding.

        An embedding that is the head as well is looked up and multiplied by. A row that is looked up has, of the V
        tokens, the gradients of its own; each row of the head has its g for all inputs.
        """
        last = self.model.layers
        known = load_file(self._passes.file("head", last))
        tied = self.model.tied
        if tied is not None and (blocks := moments_of(tied, known)):
            gradients = self._passes.load("gradients", 0).flatten(0, 1).float()
            squares = known[f"{tied}:gradients"]
            share = float(len(squares) * squares.mean()) * len(gradients)
            for block, part in zip(blocks, moment_blocks(gradients.shape[1]), strict=True):
                block += (gradients[:, part].T @ gradients[:, part]).div_(max(share, 1e-30))
        with self.model.loaded(OUTSIDE):
            parameters = self.model.parameters_of(OUTSIDE)
            for weight in self.weights.get(OUTSIDE, ()):
                if blocks := moments_of(weight.label, known):
                    inputs = factors_of(blocks, float(known[f"{weight.label}:damping"]))
                    squares = known[f"{weight.label}:gradients"]
                    known |= described(weight.label, weight.values(parameters), inputs, squares)
        self._passes.save("statistics", last, known)

    def _save_statistics(
        self, kind: str, layer: int, statistics: LayerStatistics[InputMoments], *, keep_moments: bool = False
    ) -> None:
        """Write what is kept of the weights of a layer; nothing of those that the sample hardly reached."""
        number = OUTSIDE if keep_moments else layer
        parameters, own = self.model.parameters_of(number), self.weights.get(number, ())
        gradients_of = {weight.label: self._gradients(number, weight, statistics) for weight in own}
        known = {label: gradients for label, gradients in gradients_of.items() if gradients is not None}
        stacks = {weight.name for weight in own if weight.label in known and weight.number is not None}
        pooled = {weight.label for weight in own if weight.name in stacks and weight.label not in known}
        is_kept = not keep_moments and not pooled and self._has_room(statistics)
        result: dict[str, npt.NDArray[Any]] = {}
        for vector, (weights, read) in enumerate(self._inputs(number, statistics, set(known), pooled)):
            damping, moments, count = read.damping(), read.mean(), read.count
            if weights[0].label in pooled:
                of_stack = self._gradients_of_stack(number, weights[0].name, statistics, count)
                known |= {weight.label: of_stack for weight in weights}
                result |= {f"{weight.label}:pooled": np.array(count) for weight in weights}
            squares = [known[weight.label] for weight in weights]
            self._passes.check_finite(number, *moments, *map(torch.from_numpy, squares))
            if is_kept:
                self._passes.save(_of_layer(layer), vector, stored_moments(_INPUTS, moments))
                result |= {f"{weight.label}:vector": np.array(vector) for weight in weights}
            inputs = None if keep_moments else factors_of(moments, damping)
            for weight, gradients in zip(weights, squares, strict=True):
                result[f"{weight.label}:damping"] = np.array(damping)
                if inputs is None:
                    result |= {f"{weight.label}:gradients": gradients, **stored_moments(weight.label, moments)}
                else:
                    along_rows = statistics.along_rows(weight.place.matrix.parameter)
                    values = weight.values(parameters, along_rows=along_rows)
                    result |= described(weight.label, values, inputs, gradients, along_rows=along_rows)
        self._passes.save(kind, layer, result)

    def _has_room(self, statistics: LayerStatistics[InputMoments]) -> bool:
        """Whether the moments of a layer may be kept."""
        sizes = [part.stop - part.start for read in statistics.collected.values() for part in read.parts]
        kept = sum(path.stat().st_size for path in self.work.glob(f"{_MOMENTS}-*.safetensors"))
        more: int = sum(4 * size * size for size in sizes)
        return kept + more <= MOST_KEPT_BYTES and more <= SHARE_OF_FREE * free_bytes(self.work)

    def _gradients(self, layer: int, weight: CalibratedWeight, seen: LayerStatistics[InputMoments]) -> Doubles | None:
        """Return the g of a weight, [N]; None if too little is known of it."""
        matrix = weight.place.matrix
        read, squares = seen.collected_of(matrix), seen.mean_squares(matrix, self.ids.numel())
        if read is None or read.count < FEWEST_INPUTS or squares is None:
            return None
        return None if layer == OUTSIDE and not seen.along_rows(matrix.parameter) else squares[weight.place.rows]

    def _gradients_of_stack(self, layer: int, name: str, seen: LayerStatistics[InputMoments], count: int) -> Doubles:
        """Return the mean g of the matrices of a stack, [N], as if few inputs had reached each of them.

        count: of the inputs of all
        """
        matrices = [weight.place.matrix for weight in self.weights[layer] if weight.name == name]
        mean_squares = [seen.mean_squares(matrix, self.ids.numel()) for matrix in matrices]
        total = sum((squares for squares in mean_squares if squares is not None), start=np.zeros(1))
        return total * min(1 / len(matrices), FEWEST_INPUTS / count)

    # --- the step ---

    def _kept_of(self, what: str) -> list[str]:
        """Return the labels of the weights of which something is kept."""
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
        return sum(bits(self._step_of(name, step)) for name, bits in self._weights_known(layer))

    def _step_of(self, name: str, step: float) -> float:
        """Return the step of a tensor: that of the model, unless each has its own. step: of the model"""
        return step * self._own_steps[name] if self.by_tensor else step

    @functools.cached_property
    def _own_steps(self) -> dict[str, float]:
        """The step at which each tensor is expected to take its own bits, by name."""
        parts: dict[str, list[Callable[[float], float]]] = {}
        for name, bits in self._weights_known():
            parts.setdefault(name, []).append(bits)

        def taken(of: Sequence[Callable[[float], float]], step: float) -> float:
            return sum(bits(step) for bits in of)

        return {name: _step_for(functools.partial(taken, of), self.wanted_bits[name]) for name, of in parts.items()}

    def _weights_known(self, layer: int | None = None) -> Iterator[tuple[str, Callable[[float], float]]]:
        """Yield the tensor of each weight of a layer, or all, and the function of the step that says what it takes."""
        pattern = "*" if layer is None else f"{layer:04}"
        for path in sorted(self.work.glob(f"statistics-{pattern}.safetensors")):
            with safe_open(path, "numpy") as stored:
                for key in stored.offset_keys():
                    label, _, what = key.rpartition(":")
                    if what == "energies":
                        energies, spread, shape = (stored.get_tensor(f"{label}:{w}") for w in (what, "spread", "shape"))
                        yield self._names[label], functools.partial(bits_at, energies, spread, shape.tolist())

    # --- encoding ---

    def _encode(self) -> Encoded:
        """Encode all layers, again with another step if they miss the size.

        The first step is corrected by what the layer in the middle takes, which is nearly always enough.
        """
        aim = sum(self.wanted_bits[name] for name in self.reached)
        if not aim:
            raise SourceError(
                "calibration: no linear layer that the sample reaches has a weight as the checkpoint stores it; "
                "quantize the model without `calibrate`"
            )
        goal, slack = (aim * (1 - _TOLERANCE / 2), _TOLERANCE / 2) if self.at_most else (aim, _TOLERANCE)
        attempt = max(0, len(list(self.work.glob("step-*.safetensors"))) - 1)
        while True:
            step = self._settled(attempt, goal)
            folder, taken = self._attempted(attempt, step)
            encoded = functools.partial(Encoded, folder=folder, bits=taken, wanted_bits=aim)
            if self.most_divergence is not None:
                divergence = self._diverged(attempt, folder)
                is_met, corrected = self._next_for_divergence(attempt)
                if is_met or corrected is None:
                    return encoded(divergence=divergence, is_met=is_met)
            else:
                is_met = abs(taken / goal - 1) <= slack
                if is_met or attempt + 1 == _ATTEMPTS:
                    return encoded(divergence=None, is_met=is_met)
                corrected = self._step(goal * self._expected_bits(step) / max(taken, 1.0))
            attempt += 1
            self._passes.save("step", attempt, {"step": np.array(corrected)})

    def _next_for_divergence(self, last: int) -> tuple[bool, float | None]:
        """Return whether the last of some attempts has the divergence that is wanted, and the next step, if any.

        A divergence is about proportional to the square of the step, while errors are small. After the last attempt
        the best of those whose divergence is small enough is encoded once more.
        """
        assert self.most_divergence is not None
        kinds = ("step", "divergence")
        known = np.array([[float(self._passes.read(k, n)[k]) for k in kinds] for n in range(last + 1)])
        known[:, 1] = np.maximum(known[:, 1], 1e-12)  # as logarithms are taken
        steps, divergences = known.T
        is_small = divergences <= self.most_divergence
        if is_small[-1] and (divergences[-1] >= (1 - MOST_BELOW) * self.most_divergence or last >= ATTEMPTS):
            return True, None
        if last >= ATTEMPTS:
            return False, None
        if last + 1 == ATTEMPTS:
            return False, float(steps[is_small].max()) if is_small.any() else float(steps.min() / 2)
        logarithms, wanted = np.log2(known), np.log2(self.most_divergence * (1 - MOST_BELOW / 2))
        nearest = np.argsort(np.abs(logarithms[:, 1] - wanted), kind="stable")[:2]
        step, divergence = logarithms[nearest[0]]
        slope = 2.0
        if len(nearest) > 1 and (moved := logarithms[nearest[1], 0] - step):
            slope = min(max((logarithms[nearest[1], 1] - divergence) / moved, 1.0), 4.0)
        return False, float(2.0 ** (step + (wanted - divergence) / slope))

    def _diverged(self, attempt: int, folder: Path) -> float:
        """Return the divergence of the result with the codes of an attempt."""
        assert self.diverged is not None
        if not self._passes.file("divergence", attempt).exists():
            self._passes.save("divergence", attempt, {"divergence": np.array(self.diverged(folder))})
        return float(self._passes.read("divergence", attempt)["divergence"])

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
        try:
            for count, layer in enumerate(self._encoded_layers(work, left), last + 2 - len(left)):
                self.check()
                self._done(2, count, f"encoding layer {layer}")
        except SourceChangedError:
            for layer in left:
                files[layer].unlink(missing_ok=True)
            raise
        return folder, sum(8.0 * part.nbytes for path in files.values() for part in load_file(path).values())

    def _encoded_layers(self, work: LayerWork, layers: Sequence[int]) -> Iterator[int]:
        """Encode layers, here or on a cluster, and yield the number of each that is done."""
        if self.engine is not None:
            yield from (layer for layer, _ in self.engine.each(work, layers, self._task_bytes))
            return
        for layer in layers:
            work.make(layer)
            yield layer

    def _layer_work(self, step: float, files: Mapping[int, Path]) -> LayerWork:
        """Return the work of which a task encodes a layer: on its own, since the states before it are known."""
        threads = self.threads if self.engine is None else self.engine.threads
        own = replace(self, engine=None, progress=no_progress, check=_nothing, diverged=None, threads=threads)
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
        if any(key.endswith(":vector") for key in known):
            with self.model.loaded(layer):
                return self._codes(layer, known, self._kept_inputs(layer, known), step)
        labels, pooled = (
            {key.rpartition(":")[0] for key in known if key.endswith(end)} for end in (":energies", ":pooled")
        )
        codes = Codes()

        def encode(seen: LayerStatistics[InputMoments]) -> None:
            read = self._inputs(layer, seen, labels - pooled, pooled)
            codes.update(self._codes(layer, known, ((weights, inputs.mean()) for weights, inputs in read), step))

        self._passes.forward(layer, lambda: self._statistics(layer), encode)
        return codes

    def _outside_codes(self, step: float) -> Codes:
        known = load_file(self._passes.file("statistics", self.model.layers))
        of_each = (([weight], moments_of(weight.label, known)) for weight in self.weights.get(OUTSIDE, ()))
        with self.model.loaded(OUTSIDE):
            return self._codes(OUTSIDE, known, ((weights, moments) for weights, moments in of_each if moments), step)

    def _kept_inputs(self, layer: int, known: Mapping[str, npt.NDArray[Any]]) -> Iterator[OfWeights]:
        """Yield the weights of a layer that multiply the same inputs, and the moments of these that were kept."""
        own = [weight for weight in self.weights[layer] if f"{weight.label}:vector" in known]
        vectors = {weight.label: int(known[f"{weight.label}:vector"]) for weight in own}
        for vector in sorted(set(vectors.values())):
            kept = load_file(self._passes.file(_of_layer(layer), vector))
            yield [weight for weight in own if vectors[weight.label] == vector], moments_of(_INPUTS, kept)

    def _codes(
        self, layer: int, known: Mapping[str, npt.NDArray[Any]], inputs: Iterable[OfWeights], step: float
    ) -> Codes:
        """Encode the weights of a layer, which is loaded. known: of them. step: of the model"""
        parameters, encoded, codes = self.model.parameters_of(layer), dict[str, EncodedMatrix](), Codes()
        along_rows = {key.rpartition(":")[0]: bool(known[key]) for key in known if key.endswith(":along_rows")}
        for weights, moments in inputs:
            factors = factors_of(moments, float(known[f"{weights[0].label}:damping"]))
            for weight in weights:
                values = weight.values(parameters, along_rows=along_rows[weight.label])
                encoded[weight.label] = self._encoded(weight, values, factors, known, step)
        for name, group in itertools.groupby(self.weights.get(layer, ()), lambda weight: weight.name):
            weights = list(group)
            if all(weight.label in encoded for weight in weights):
                transposed = along_rows[weights[0].label] == weights[0].transposed
                parts = [encoded.pop(weight.label) for weight in weights]
                codes[name] = together(parts, is_stack=weights[0].number is not None, transposed=transposed)
        return codes

    def _encoded(
        self,
        weight: CalibratedWeight,
        values: Floats,
        inputs: InputFactors,
        known: Mapping[str, npt.NDArray[Any]],
        step: float,
    ) -> EncodedMatrix:
        """Encode a weight [N, K]. known: of its layer. step: of the model"""
        codes, measured = encode_columns(
            values,
            inputs,
            gradients=known[f"{weight.label}:gradients"],
            step=self._step_of(weight.name, step),
            states=self.states,
            threads=self.threads,
        )
        return codes, measured, float(known[f"{weight.label}:energy"])


def _nothing() -> None:
    """Check nothing: the driver does."""


def _of_layer(layer: int) -> str:
    """Return what the files with the moments of a layer are called, of which each vector of inputs has one."""
    return f"{_MOMENTS}-{layer:04}"


def _step_for(bits: Callable[[float], float], wanted: float) -> float:
    """Return the step at which something is expected to take so many bits."""
    low, high = -100.0, 100.0  # log2 of the step
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if bits(2.0**middle) > wanted else (low, middle)
    return float(2.0**high)
