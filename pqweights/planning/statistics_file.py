"""The file of statistics that `calibrate` writes: safetensors, with a JSON description in its metadata.

It holds one or both of two things. *Moments*: for each distinct vector that enters linear layers and experts,
X' X / tokens as `inputs.N.moments` (F32 [K, K]) and rows that were held back as `inputs.N.held_back` (F32 [rows, K]).
*Scales*: one float16 scale for each input channel of a weight (Lin et al., arXiv:2306.00978) as `X_awq_scale`. The
description, under `pqweights_statistics`, says of which checkpoint they are and what belongs to which weight;
docs/moments.md has its keys.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor, TensorSpec, encode_header
from pqweights.checkpoint.names import awq_name
from pqweights.checkpoint.readers import SMALLEST_SCALE, scale_shape
from pqweights.checkpoint.source import Checkpoint, open_local, read_header
from pqweights.checkpoint.writer import sha256_of_file, write_whole
from pqweights.codecs.protocol import exact_rate
from pqweights.common.documents import Count, Damaged, Document, Number, as_document, read_document
from pqweights.common.dtypes import to_float32
from pqweights.errors import SourceError
from pqweights.planning.plan import QUANTIZE, TensorPlan

Floats = npt.NDArray[np.float32]
Kind = Literal["moments", "scales"]

KEY, VERSION = "pqweights_statistics", 1
MOMENTS: Kind = "moments"
SCALES: Kind = "scales"
# What writes each kind.
COMMANDS: dict[Kind, str] = {SCALES: "pqweights calibrate", MOMENTS: "pqweights calibrate --moments"}
# A safetensors file of ours holds at least one tensor: this empty one if no weight is scaled.
NO_SCALES = awq_name("no_weight_is_scaled")
# Rows of a matrix of moments that are read together.
STRIP_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class InputVector:
    """One distinct vector of inputs.

    size: K, its number of channels
    tokens: how many rows its moments are the mean of
    held_back: how many rows are held back
    windows: of how many windows of the text those are
    """

    size: int
    tokens: int
    held_back: int
    windows: int


@dataclass(frozen=True, kw_only=True)
class WeightInputs:
    """Which vectors a weight reads.

    vectors: for each of its matrices the number of the vector; None for a matrix that had no inputs
    transposed: whether input channels run along its columns, [..., K, N], not along its rows, [..., N, K]
    """

    vectors: tuple[int | None, ...]
    transposed: bool


class _Version(Document, frozen=True):
    version: int


class _Vector(Document, frozen=True):
    tokens: Count
    windows: Count


class _Weight(Document, frozen=True, kw_only=True):
    """What the description says of a weight: what it reads, in files of moments, and for which codec it is scaled."""

    inputs: tuple[Count | None, ...] | None = None
    transposed: bool = False
    scaled: bool = False
    codec: str = ""
    bits: Number = 0


class _Description(Document, frozen=True, kw_only=True):
    checkpoint: str
    holds: tuple[Kind, ...]
    inputs: tuple[_Vector, ...] = ()
    weights: dict[str, dict[str, Any]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Statistics:
    """An opened file of statistics.

    path: where it lies
    file: the file as a checkpoint, from which the tensors are read
    sha256: that of the file
    checkpoint: the fingerprint of the checkpoint that the statistics are of
    holds: what it holds
    vectors: what is known of each vector
    weights: what each weight reads, by name
    searched: for each scaled weight, the codec and the bit width that its scales were searched for
    stored: the tensors by name
    """

    path: Path
    file: Checkpoint
    sha256: str
    checkpoint: str
    holds: tuple[Kind, ...]
    vectors: tuple[InputVector, ...]
    weights: dict[str, WeightInputs]
    searched: dict[str, tuple[str, float]]
    stored: dict[str, StoredTensor] = field(repr=False)

    def damaged(self, what: str) -> SourceError:
        """Return the error for a damaged file."""
        return _damaged(self.path, self.holds)(what)

    def check(self, fingerprints: Mapping[str, str], kind: Kind = MOMENTS) -> None:
        """Raise SourceError if the statistics are of none of these checkpoints.

        fingerprints: by what messages call a checkpoint
        kind: what of the file is used
        """
        if self.checkpoint in fingerprints.values():
            return
        wanted = " or ".join(f"{name} (fingerprint {fingerprint[:12]})" for name, fingerprint in fingerprints.items())
        raise SourceError(
            f"{self.path}: expected {kind} of {wanted}, found those of another checkpoint "
            f"({self.checkpoint[:12]}); run {COMMANDS[kind]} on this one"
        )

    def strips(self, vector: int, *, columns: Floats | None = None) -> Iterator[tuple[int, Floats]]:
        """Yield the moments of a vector as runs of rows, each with the number of the first: f32 [STRIP_ROWS, K].

        columns: [K], the factors by which the columns of the weights were multiplied, and the inputs divided

        Raises SourceError if a moment is not finite, or a mean of squares is negative.
        """
        size, name = self.vectors[vector].size, f"inputs.{vector}.moments"
        for first in range(0, size, STRIP_ROWS):
            count = min(STRIP_ROWS, size - first)
            strip = self._read(name, first * size, count * size).reshape(count, size)
            self._check_squares(name, np.diagonal(strip, first))
            if columns is not None:
                strip = strip / columns / columns[first : first + count, None]
            yield first, strip

    def mean_squares(self, vector: int) -> Floats:
        """Read the mean square of each channel of a vector, [K].

        Raises SourceError if one is not a number from 0 on.
        """
        size, name = self.vectors[vector].size, f"inputs.{vector}.moments"
        result = np.array([self._read(name, row * (size + 1), 1)[0] for row in range(size)], dtype=np.float32)
        self._check_squares(name, result)
        return result

    def _check_squares(self, name: str, squares: Floats) -> None:
        if (squares < 0).any():
            raise self.damaged(f"{name}: expected means of squares, found a negative one")

    def held_back(self, vector: int, *, columns: Floats | None = None) -> Floats:
        """Read the rows of a vector that were held back, [rows, K]; see `strips`."""
        about = self.vectors[vector]
        count = about.held_back * about.size
        rows = self._read(f"inputs.{vector}.held_back", 0, count).reshape(about.held_back, about.size)
        return rows if columns is None else rows / columns

    def _read(self, name: str, start: int, count: int) -> Floats:
        raw = np.empty(count * 4, dtype=np.uint8)
        stored = self.stored[name]
        self.file.storage.read_into(stored.file, stored.offset + start * 4, raw)
        values = raw.view("<f4")
        if not np.isfinite(values).all():
            raise self.damaged(f"{name}: expected finite numbers, found a NaN or an infinity")
        return values


def open_statistics(path: Path, kind: Kind | None = None) -> Statistics:
    """Open a file of statistics. kind: what it must hold; by default anything.

    Raises SourceError if it does not exist, if `calibrate` did not write it, or if it does not hold that.
    """
    what, command = (kind, COMMANDS[kind]) if kind else ("statistics", COMMANDS[SCALES])
    if not path.is_file():
        raise SourceError(f"{path}: no such file; expected {what} that {command} wrote")
    file = open_local(path)
    (name,) = file.weight_files
    parts, metadata = read_header(file.storage, name)
    if KEY not in metadata:
        raise SourceError(f"{path}: expected {what} that {command} wrote, found another file, or an earlier version's")
    told = metadata[KEY].encode("utf-8", "surrogatepass")
    version = read_document(told, _Version, _damaged(path, ())).version
    if version != VERSION:
        raise SourceError(f"{path}: version: expected {VERSION}, found {version!r}; a newer pqweights may read it")
    about = read_document(told, _Description, _damaged(path, ()))
    if kind is not None and kind not in about.holds:
        held = " and ".join(f"{other}, which {COMMANDS[other]} writes" for other in about.holds) or "nothing"
        raise SourceError(f"{path}: expected {what} that {command} wrote, found {held}")
    damaged, stored = _damaged(path, about.holds), {part.name: part for part in parts}
    vectors = tuple(_vector(entry, number, stored, damaged) for number, entry in enumerate(about.inputs))
    weights, searched = _described_weights(about, damaged)
    scales = [awq_name(name) for name in searched]
    if stored.keys() != ({spec.name for spec in specs_of(vectors)} | set(scales) or {NO_SCALES}):
        raise damaged("its metadata does not describe its tensors")
    if any(stored[name].dtype != "F16" for name in scales):
        raise damaged("expected float16 scales")
    return Statistics(
        path=path,
        file=file,
        sha256=sha256_of_file(path),
        checkpoint=about.checkpoint,
        holds=about.holds,
        vectors=vectors,
        weights=weights,
        searched=searched,
        stored=stored,
    )


def _described_weights(
    about: _Description, damaged: Damaged
) -> tuple[dict[str, WeightInputs], dict[str, tuple[str, float]]]:
    """Return what each weight reads, and for which codec and bit width each scaled one was searched."""
    weights, searched = {}, {}
    for name, value in about.weights.items():

        def wrong(problem: str, name: str = name) -> Exception:
            return damaged(f"{name!r}: {problem}")

        entry = as_document(value, _Weight, wrong)
        for needed, key in ((entry.inputs is not None, "transposed"), (entry.scaled, "codec"), (entry.scaled, "bits")):
            if needed and key not in value:
                raise wrong(f"missing key {key}")
        if entry.inputs is not None:
            if any(number is not None and number >= len(about.inputs) for number in entry.inputs):
                raise wrong("expected numbers of its inputs")
            weights[name] = WeightInputs(vectors=entry.inputs, transposed=entry.transposed)
        if entry.scaled:
            searched[name] = (entry.codec, entry.bits)
    return weights, searched


def _damaged(path: Path, holds: Sequence[Kind]) -> Callable[[str], SourceError]:
    """Return the function that makes the error for a damaged file."""
    command = COMMANDS[holds[0] if holds else SCALES]
    return lambda what: SourceError(f"{path}: damaged: {what}; run {command} again")


def _vector(about: _Vector, number: int, stored: Mapping[str, StoredTensor], damaged: Damaged) -> InputVector:
    moments, held_back = (stored.get(f"inputs.{number}.{part}") for part in ("moments", "held_back"))
    if moments is None or held_back is None or len(moments.shape) != 2 or {moments.dtype, held_back.dtype} != {"F32"}:
        raise damaged(f"expected inputs.{number} as two float32 matrices")
    size = moments.shape[1]
    if moments.shape != (size, size) or len(held_back.shape) != 2 or held_back.shape[1] != size or not size:
        raise damaged(f"inputs.{number}: expected moments [K, K] and rows [n, K]")
    return InputVector(size=size, tokens=about.tokens, held_back=held_back.shape[0], windows=about.windows)


def specs_of(vectors: Sequence[InputVector]) -> list[TensorSpec]:
    """Return the tensors of moments, in the order in which their data follow each other."""
    result = []
    for number, vector in enumerate(vectors):
        result.append(TensorSpec(f"inputs.{number}.moments", "F32", (vector.size, vector.size)))
        result.append(TensorSpec(f"inputs.{number}.held_back", "F32", (vector.held_back, vector.size)))
    return result


def moments_bytes(size: int, rows: int) -> int:
    """Return the size of the data of a vector with K channels and `rows` rows held back."""
    return 4 * math.prod((size, size + rows))


@dataclass(frozen=True, kw_only=True)
class MomentsToWrite:
    """Moments of some vectors. data: the values of specs_of, in order"""

    vectors: Sequence[InputVector]
    weights: Mapping[str, WeightInputs]
    data: Iterable[bytes]


@dataclass(frozen=True, kw_only=True)
class ScalesToWrite:
    """Scales of some weights.

    weights: for every weight that was considered, codec, bits, whether it is scaled, and more
    scales: [..., K] by the name of the weight
    """

    weights: Mapping[str, Mapping[str, Any]]
    scales: Mapping[str, Floats]


def write_statistics(
    path: Path,
    *,
    checkpoint: str,
    about: Mapping[str, Any],
    moments: MomentsToWrite | None = None,
    scales: ScalesToWrite | None = None,
) -> None:
    """Write a file of statistics, whole or not at all.

    checkpoint: the fingerprint of the checkpoint that they are of
    about: how they were found

    Raises OutputError.
    """
    specs: list[TensorSpec] = []
    pieces: list[Iterable[bytes]] = []
    holds: list[Kind] = []
    entry: dict[str, Any] = {"version": VERSION, "holds": holds, "checkpoint": checkpoint, **about}
    weights: dict[str, dict[str, Any]] = {}
    if moments is not None:
        holds.append(MOMENTS)
        specs += specs_of(moments.vectors)
        pieces.append(moments.data)
        entry["inputs"] = [{"tokens": vector.tokens, "windows": vector.windows} for vector in moments.vectors]
        for name, reads in moments.weights.items():
            weights[name] = {"inputs": list(reads.vectors), "transposed": reads.transposed}
    if scales is not None:
        holds.append(SCALES)
        specs += [TensorSpec(awq_name(name), "F16", values.shape) for name, values in scales.scales.items()]
        pieces.append(values.astype("<f2").tobytes() for values in scales.scales.values())
        for name, search in scales.weights.items():
            weights[name] = weights.get(name, {}) | dict(search)
    specs = specs or [TensorSpec(NO_SCALES, "F16", (0,))]
    metadata = {"format": "pt", KEY: json.dumps(entry | {"weights": weights}, ensure_ascii=False)}
    header = encode_header(specs, metadata)
    write_whole(path.absolute().parent, path, itertools.chain([header], *pieces))


@dataclass(frozen=True, eq=False, kw_only=True)
class AwqScales:
    """The scales of a file, as `quantize --awq` applies them (docs/awq.md).

    file: the file
    any_codec: apply the scales even if they were searched for another codec or bit width
    """

    file: Statistics
    any_codec: bool

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of the scales."""
        return {"sha256": self.file.sha256, "weights": len(self.file.searched), "any_codec": self.any_codec}

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Read the scales [..., K] of a weight, as the bytes of float16.

        Raises SourceError if one of them is not a positive normal number.
        """
        stored = self.file.stored[awq_name(name)]
        raw = np.empty(stored.byte_count, dtype=np.uint8)
        self.file.file.storage.read_into(stored.file, stored.offset, raw)
        values = to_float32(raw, "F16")
        if not (np.isfinite(values) & (values >= SMALLEST_SCALE)).all():
            raise self.file.damaged(f"{stored.name!r}: expected finite scales from {SMALLEST_SCALE} on")
        return raw

    def check(self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan]) -> None:
        """Raise SourceError if the scales are of another checkpoint, or for other codecs or bit widths than planned."""
        self.file.check({"this checkpoint": checkpoint.fingerprint()}, SCALES)
        planned = {tensor.name: tensor for tensor in tensors}
        for name, (codec, bits) in self.file.searched.items():
            tensor = planned.get(name)
            shape = () if tensor is None else tensor.shape
            if len(shape) < 2 or not math.prod(shape) or self.file.stored[awq_name(name)].shape != scale_shape(shape):
                raise self.file.damaged(f"{name!r}: expected scales for a weight of the checkpoint")
            assert tensor is not None
            if (tensor.codec, tensor.bits) != (codec, exact_rate(bits)) and not self.any_codec:
                now = f"{tensor.codec} at {tensor.bits} bits" if tensor.action == QUANTIZE else "nothing (it is kept)"
                raise SourceError(
                    f"{self.file.path}: {name!r}: expected scales for {now}, as the recipe has it, found scales that "
                    f"were searched for {codec} at {bits:g} bits; run pqweights calibrate with the same recipe, or "
                    "pass `awq_any_codec`"
                )


def open_awq(path: Path, any_codec: bool = False) -> AwqScales:
    """Open the scales of a file. Raises SourceError if it holds none."""
    return AwqScales(file=open_statistics(path, SCALES), any_codec=any_codec)
