"""The file of second moments that `calibrate --moments` writes and `export --rounding gptq` reads.

For each distinct vector that enters linear layers and experts it holds, in safetensors, X' X / tokens as
`inputs.N.moments` (F32 [K, K]) and rows that were held back as `inputs.N.held_back` (F32 [rows, K]). The JSON under
`pqweights_moments` in its metadata says for which checkpoint they are, and which weight reads which vector.
docs/moments.md has the format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor, TensorSpec, encode_header
from pqweights.checkpoint.source import Checkpoint, open_local, read_header
from pqweights.checkpoint.writer import sha256_of_file, write_whole
from pqweights.errors import SourceError
from pqweights.planning.calibration_json import MOMENTS
from pqweights.strict_json import Fields

Floats = npt.NDArray[np.float32]

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


@dataclass(frozen=True, eq=False, kw_only=True)
class Moments:
    """An opened file of second moments.

    path: where it lies
    file: the file as a checkpoint, from which the moments are read
    sha256: that of the file
    checkpoint: the fingerprint of the checkpoint that the moments are of
    vectors: what is known of each vector
    weights: what each weight reads, by name
    """

    path: Path
    file: Checkpoint
    sha256: str
    checkpoint: str
    vectors: tuple[InputVector, ...]
    weights: dict[str, WeightInputs]
    stored: dict[str, StoredTensor] = field(repr=False)

    def check(self, fingerprints: Mapping[str, str]) -> None:
        """Raise SourceError if the moments are of none of these checkpoints. fingerprints: by what messages call it."""
        if self.checkpoint in fingerprints.values():
            return
        wanted = " or ".join(f"{name} (fingerprint {found[:12]})" for name, found in fingerprints.items())
        raise SourceError(
            f"{self.path}: expected moments of {wanted}, found those of another checkpoint ({self.checkpoint[:12]}); "
            "run pqweights calibrate --moments on this one"
        )

    def strips(self, vector: int, *, columns: Floats | None = None) -> Iterator[tuple[int, Floats]]:
        """Yield the matrix of a vector as runs of rows, each with the number of the first: f32 [STRIP_ROWS, K].

        columns: [K], the factors by which the columns of the weights were multiplied, and the inputs divided

        Raises SourceError if a moment is not finite, or a mean of squares is negative.
        """
        size = self.vectors[vector].size
        for first in range(0, size, STRIP_ROWS):
            count = min(STRIP_ROWS, size - first)
            strip = self._read(f"inputs.{vector}.moments", first * size, count * size).reshape(count, size)
            if (np.diagonal(strip, first) < 0).any():
                raise MOMENTS.damaged(
                    self.path, f"inputs.{vector}.moments: expected means of squares, found a negative one"
                )
            if columns is not None:
                strip = strip / columns / columns[first : first + count, None]
            yield first, strip

    def mean_squares(self, vector: int) -> Floats:
        """Read the mean square of each channel of a vector, [K].

        Raises SourceError if one is not a number from 0 on.
        """
        size = self.vectors[vector].size
        name = f"inputs.{vector}.moments"
        result = np.array([self._read(name, place * (size + 1), 1)[0] for place in range(size)], dtype=np.float32)
        if (result < 0).any():
            raise MOMENTS.damaged(self.path, f"{name}: expected means of squares, found a negative one")
        return result

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
            raise MOMENTS.damaged(self.path, f"{name}: expected finite numbers, found a NaN or an infinity")
        return values


def open_moments(path: Path) -> Moments:
    """Open a file of second moments.

    Raises SourceError if it does not exist, or if `calibrate --moments` did not write it.
    """
    if not path.is_file():
        raise SourceError(f"{path}: no such file; expected moments that pqweights calibrate --moments wrote")
    file = open_local(path)
    (name,) = file.weight_files
    stored, metadata = read_header(file.storage, name)
    about = MOMENTS.fields(path, metadata)
    by_name = {part.name: part for part in stored}
    vectors = tuple(_vector(path, entry, number, by_name) for number, entry in enumerate(about.objects("inputs")))
    if len(by_name) != 2 * len(vectors):
        raise MOMENTS.damaged(path, "its metadata does not describe its tensors")
    return Moments(
        path=path,
        file=file,
        sha256=sha256_of_file(path),
        checkpoint=about.text("checkpoint"),
        vectors=vectors,
        weights=_weights(path, about, len(vectors)),
        stored=by_name,
    )


def _vector(path: Path, entry: Fields, number: int, stored: Mapping[str, StoredTensor]) -> InputVector:
    moments, held_back = (stored.get(f"inputs.{number}.{part}") for part in ("moments", "held_back"))
    if moments is None or held_back is None or len(moments.shape) != 2 or {moments.dtype, held_back.dtype} != {"F32"}:
        raise MOMENTS.damaged(path, f"expected inputs.{number} as two float32 matrices")
    size = moments.shape[1]
    if moments.shape != (size, size) or len(held_back.shape) != 2 or held_back.shape[1] != size or not size:
        raise MOMENTS.damaged(path, f"inputs.{number}: expected moments [K, K] and rows [n, K]")
    return InputVector(
        size=size, tokens=entry.count("tokens"), held_back=held_back.shape[0], windows=entry.count("windows")
    )


def _weights(path: Path, about: Fields, vectors: int) -> dict[str, WeightInputs]:
    weights, result = about.fields("weights"), {}
    for name in about.mapping("weights"):
        entry = weights.fields(name)
        found = entry.raw("inputs")
        if not isinstance(found, list) or not all(
            number is None or (type(number) is int and 0 <= number < vectors) for number in found
        ):
            raise MOMENTS.damaged(path, f"{name!r}: expected numbers of its inputs")
        result[name] = WeightInputs(vectors=tuple(found), transposed=entry.flag("transposed"))
    return result


def header_of(vectors: Sequence[InputVector], about: Mapping[str, Any], weights: Mapping[str, WeightInputs]) -> bytes:
    """Return the header of a file of moments. about: how they were found, with the fingerprint as `checkpoint`."""
    entry = {
        "version": MOMENTS.version,
        **about,
        "inputs": [{"tokens": each.tokens, "windows": each.windows} for each in vectors],
        "weights": {
            name: {"inputs": list(each.vectors), "transposed": each.transposed} for name, each in weights.items()
        },
    }
    return encode_header(specs_of(vectors), {"format": "pt", MOMENTS.key: json.dumps(entry, ensure_ascii=False)})


def specs_of(vectors: Sequence[InputVector]) -> list[TensorSpec]:
    """Return the tensors of a file of moments, in the order in which their data follow each other."""
    result = []
    for number, each in enumerate(vectors):
        result.append(TensorSpec(f"inputs.{number}.moments", "F32", (each.size, each.size)))
        result.append(TensorSpec(f"inputs.{number}.held_back", "F32", (each.held_back, each.size)))
    return result


def vector_bytes(size: int, rows: int) -> int:
    """Return the size of the data of a vector with K channels and `rows` rows held back."""
    return 4 * math.prod((size, size + rows))


def write_moments(path: Path, header: bytes, data: Iterable[bytes]) -> None:
    """Write a file of moments, whole or not at all. data: the values of specs_of, in order. Raises OutputError."""
    write_whole(path.absolute().parent, path, _chained(header, data))


def _chained(header: bytes, data: Iterable[bytes]) -> Iterator[bytes]:
    yield header
    yield from data
