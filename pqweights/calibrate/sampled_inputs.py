"""The inputs of the weights of a model, from a sample that goes through it layer by layer.

The passes, forward and back, keep the mean squares of all inputs, which are small, and how much each input counts.
Moments are as large as the weights, so they are kept of one layer at a time: what a layer read lies on the disk, and it
is computed again when its moments are wanted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save

from pqweights.calibrate.collecting import VectorInputs, check_windows
from pqweights.calibrate.divergence import LayerwiseDivergence, scaled_for
from pqweights.calibrate.layer_passes import LayerPasses
from pqweights.calibrate.layer_statistics import LayerStatistics, weight_inputs
from pqweights.calibrate.layered import OUTSIDE, LayeredModel, ModelMatrix
from pqweights.calibrate.sample import SampleOf
from pqweights.calibrate.sensitivity import block_sizes, measure
from pqweights.calibrate.work_folder import check_space, finished_manifest, folder_beside, worked_on_in
from pqweights.checkpoint.gguf.file import is_gguf
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.writer import write_whole
from pqweights.common.documents import as_json
from pqweights.common.options import Options
from pqweights.common.threads import Progress, slow_step, told_steps
from pqweights.errors import SourceError
from pqweights.planning.calibration import states_bytes
from pqweights.planning.choice import DEFAULT_RECIPE
from pqweights.planning.inputs import InputVector, WeightInputs
from pqweights.planning.recipe import load_recipe
from pqweights.planning.sensitivity import Sensitivity
from pqweights.storage import Store, open_store

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# The rows that are held back of each vector.
HELD_BACK_ROWS = 512
KEY = "inputs"
# What is looked up before the layers has the number after that of the head, which has the number after the last layer.
LOOK_UPS = 1
READING, MEASURING = "reading the sample", "measuring the divergence of a result"  # as users are told


@contextmanager
def inputs_of(
    source: Path,
    checkpoint: Checkpoint,
    out: Store,
    options: Options,
    threads: int,
    divergence: float | None = None,
) -> Iterator[SampledInputs]:
    """Yield the inputs of the weights of a checkpoint, on a sample that is taken when they are first needed.

    source: its local folder
    out: the result for which they are wanted, beside which what was found is kept until it is there
    divergence: that results are to have; None if it is not measured

    Raises SourceError, EvaluationError, OutputError.
    """
    if not source.is_dir() and not is_gguf(source):
        raise SourceError(f"{source}: expected the folder of a model for `calibrate`, found a file")
    sample = SampleOf.of(source, checkpoint, str(options.calibrate), options, is_checked=divergence is not None)
    check_windows(*sample.shape)
    key = hashlib.sha256(json.dumps(sample.stated).encode()).hexdigest()
    with worked_on_in(folder_beside(out), out, key, threads, sample.contents.is_same) as work:
        if sample.save is not None:
            sample.ids(work, threads)
        yield SampledInputs(sample=sample, work=work, identity=key, threads=threads, divergence=divergence)


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledInputs:
    """What a sample says of the inputs of weights, which exports ask for as KnownInputs.

    sample: of which model, and which
    work: a folder for what lies on the disk
    identity: a digest of all that
    threads: how many compute
    divergence: that results are to have, in nats per token; None for a size
    """

    sample: SampleOf
    work: Path
    identity: str
    threads: int
    divergence: float | None = None
    vectors: list[InputVector] = field(default_factory=list)
    weights: dict[str, WeightInputs] = field(default_factory=dict)
    # Of matrices of weights, [K + 1]: the sums of the squares of inputs, as much as these count, and of the latter.
    _squares: dict[tuple[str, int], Doubles] = field(default_factory=dict)
    _layers: list[list[int]] = field(default_factory=list)  # in which each vector is read
    _at_hand: dict[int, VectorInputs] = field(default_factory=dict)  # the vectors of one layer

    @cached_property
    def _passes(self) -> LayerPasses:
        model = LayeredModel(self.sample.checkpoint, self.sample.source, remedy="export it without `calibrate`")
        ids = self.sample.ids(self.work, self.threads)
        check_windows(*ids.shape)
        check_space(self.work, states_bytes(self.sample.checkpoint.config, ids.numel(), more=2), {})
        check = self.check_source
        return LayerPasses(model=model, ids=ids, work=self.work, batch_tokens=ids.shape[1], check=check)

    @property
    def about(self) -> dict[str, Any]:
        """What manifests state: the sample, and the digest of everything on which the inputs depend."""
        return {"sample": self.sample.kind, "tokens": self.sample.token_count, "identity": self.identity}

    def check_source(self) -> None:
        """Raise SourceChangedError if the model is no longer what it was."""
        self.sample.check_source()

    def prepare(self, progress: Progress) -> None:
        """Have the model read the sample, unless it has."""
        if self.vectors:
            return
        passes, last = self._passes, self._passes.model.layers
        with slow_step(READING):  # `progress` counts the bytes of the result
            steps = iter(told_steps(range(2 * last + 2), READING, "layers, forward and back"))

            def done(layer: int) -> None:
                next(steps)

            passes.all_forward(done)
            for layer, _ in zip((*range(last, -1, -1), last + LOOK_UPS), steps, strict=True):
                if not passes.file(KEY, layer).exists():
                    back = {last: passes.head_backward, last + LOOK_UPS: passes.embedding_backward}
                    backward = back.get(layer, partial(passes.backward, layer))
                    backward(partial(self._watch, layer), partial(self._write, layer))
                passes.file("gradients", layer + 1).unlink(missing_ok=True)
        for layer in range(last + LOOK_UPS + 1):
            self._read(layer)

    def sensitivity(
        self, out: Store, export: Callable[[Sensitivity, Store], Checkpoint], *, overwrite: bool
    ) -> Sensitivity:
        """Measure how much the loss rises with errors of each weight, or read what a finished result says of it.

        export: exports by sensitivities into a folder, and returns the result: where its divergence is bounded, what is
            measured is multiplied until that is met
        """
        manifest = finished_manifest(out, overwrite=overwrite)
        stated = None if manifest is None else manifest.made_by.get("sensitivity")
        if isinstance(stated, dict) and (stated.get("identity"), stated.get("max_kl")) == (
            self.identity,
            self.divergence,
        ):
            return Sensitivity.read(stated)
        sample, sizes = self.sample, block_sizes(self.sample.checkpoint, load_recipe(DEFAULT_RECIPE))
        with slow_step(READING):
            sensitivity = measure(sample, self.work, sizes, threads=self.threads, progress=lambda *_: None)
        if self.divergence is not None:
            tried = open_store(self.work / "tried")

            def make(sensitivity: Sensitivity) -> LayeredModel:
                return LayeredModel(export(sensitivity, tried), sample.described, remedy="leave out `max_kl`")

            with slow_step(MEASURING):
                measured = LayerwiseDivergence(self._passes.model, sample.unseen(self.work, self._passes.ids))
                sensitivity = scaled_for(self.divergence, sensitivity, measured, make, self.work)
                sensitivity = replace(sensitivity, method=sensitivity.method | sample.checked)
        return replace(sensitivity, method=sensitivity.method | {"identity": self.identity})

    def mean_squares(self, name: str, matrix: int) -> Floats:
        """Return the mean square of each channel that a matrix of a weight reads, [K]; zeros if nothing counted."""
        vector = self.weights[name].vectors[matrix]
        assert vector is not None
        known = self._squares.get((name, matrix))
        if known is None:
            return np.zeros(self.vectors[vector].size, dtype=np.float32)
        squares: Doubles = known[:-1] / known[-1]
        return squares.astype(np.float32)

    def moments(self, vector: int) -> tuple[Floats, Floats]:
        """Return the means of x x' over the inputs x of a vector, [K, K], and the rows that were held back, [n, K]."""
        if vector not in self._at_hand:
            self._at_hand.clear()
            passes, last = self._passes, self._passes.model.layers
            special = {last: passes.head, last + LOOK_UPS: passes.embedding_backward}
            for layer in self._layers[vector]:
                compute = special.get(layer, partial(passes.forward, layer))
                compute(partial(self._watch, layer, with_moments=True), partial(self._keep, layer))
            for other in [of for of in self._at_hand if not {*self._layers[of]} <= {*self._layers[vector]}]:
                del self._at_hand[other]  # it is read elsewhere, too
        inputs = self._at_hand[vector]
        return inputs.moments(), inputs.held_back.rows

    def _watch(self, layer: int, *, with_moments: bool = False) -> LayerStatistics[VectorInputs]:
        """Return what looks at the inputs of a layer, or of what comes after the last, or at what is looked up.

        with_moments: once it is known how much they count
        """
        passes, model = self._passes, self._passes.model
        named = model.parameters_of(self._part(layer))
        matrices = {name: parameter for name, parameter in named.items() if parameter.ndim in (2, 3)}
        collect = partial(VectorInputs, held_back=HELD_BACK_ROWS, with_moments=with_moments)
        if layer == model.layers + LOOK_UPS:
            return LayerStatistics(matrices, collect, looks_up=True)
        return LayerStatistics(matrices, collect, known_counts=passes.counts(layer) if with_moments else None)

    def _part(self, layer: int) -> int:
        return layer if layer < self._passes.model.layers else OUTSIDE

    def _keep(self, layer: int, seen: LayerStatistics[VectorInputs]) -> None:
        """Have the moments of a layer at hand, by the vectors that its matrices read in the pass before."""
        model = self._passes.model
        vector_of: dict[ModelMatrix, int | None] = {}
        for tensor in model.tensors_of(self._part(layer)):
            if tensor.name in self.weights:
                stored = model.matrices_of(tensor.name).matrices
                vector_of |= zip(stored, self.weights[tensor.name].vectors, strict=True)
        for matrices, inputs in seen.inputs():
            for vector in {vector_of.get(matrix) for matrix in matrices}:
                if vector in self._at_hand:
                    self._at_hand[vector].include(inputs)
                elif vector is not None:
                    self._at_hand[vector] = inputs

    def _write(self, layer: int, seen: LayerStatistics[VectorInputs]) -> None:
        """Write what is known of the vectors of a layer, numbered from 0 on, and what its weights read."""
        model, passes = self._passes.model, self._passes
        vectors, squares = [], {}
        number_of: dict[ModelMatrix, int] = {}
        for number, (matrices, inputs) in enumerate(seen.inputs()):
            number_of |= dict.fromkeys(matrices, number)
            vectors.append(as_json(inputs.about))
        weights = {}
        for tensor in model.tensors_of(self._part(layer)):
            stored = model.matrices_of(tensor.name)
            reads = weight_inputs(stored, number_of, seen.products)
            if reads is None:
                continue
            weights[tensor.name] = as_json(reads)
            for number, matrix in enumerate(stored.matrices):
                read = seen.products[matrix] if matrix in number_of else None
                if read is not None and read.input_squares is not None and read.counted:
                    squares[f"{number}:{tensor.name}"] = np.append(read.input_squares, read.counted)
                    if not (read.input_squares / read.counted <= np.finfo(np.float32).max).all():
                        raise SourceError(f"the inputs of {tensor.name} are not finite, or too large")
        described = json.dumps({"vectors": vectors, "weights": weights})
        path = passes.file(KEY, layer)
        passes.save_counts(layer, seen.counts)
        self.check_source()
        write_whole(path.parent, path, [save(squares, {KEY: described})])

    def _read(self, layer: int) -> None:
        """Take up what was written of a layer."""
        first = len(self.vectors)
        with safe_open(self._passes.file(KEY, layer), "numpy") as stored:
            described = json.loads(stored.metadata()[KEY])
            for key in stored.offset_keys():
                number, _, name = key.partition(":")
                self._squares[name, int(number)] = self._squares.get((name, int(number)), 0.0) + stored.get_tensor(key)
        self.vectors.extend(InputVector(**vector) for vector in described["vectors"])
        self._layers.extend([layer] for _ in described["vectors"])
        for name, reads in described["weights"].items():
            if name in self.weights:  # an embedding that is the head, too, has the inputs of both
                for vector in (vector for vector in self.weights[name].vectors if vector is not None):
                    self._layers[vector].append(layer)
            else:
                read = tuple(None if number is None else first + number for number in reads["vectors"])
                self.weights[name] = WeightInputs(vectors=read, transposed=reads["transposed"])
