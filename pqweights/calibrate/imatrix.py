"""Importance matrices of llama.cpp as files: the mean squares of the inputs of weights, from a text that a model read.

Both forms are read (tools/imatrix/imatrix.cpp): GGUF files, with `NAME.in_sum2` and `NAME.counts` for each weight, and
the older one, a list of names with sums. Written are GGUF files, which llama.cpp's quantizer takes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.file import MAGIC, open_gguf
from pqweights.checkpoint.gguf.model import (
    ALIGNMENT,
    encode_header,
    model_tensors,
    tensor_info,
)
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import View
from pqweights.checkpoint.writer import write_whole
from pqweights.common.options import IMATRIX
from pqweights.common.threads import Progress
from pqweights.errors import OptionError, SourceError
from pqweights.planning.inputs import InputVector, KnownInputs, WeightInputs, importance_of, read_by

Floats = npt.NDArray[np.float32]

SUMS, COUNTS = ".in_sum2", ".counts"
# Tensors that llama.cpp reads twice, or that a model may share with another: a file may have them, or not.
SHARED = ("output.weight", "token_embd.weight")
MOST_BYTES = 1 << 31


# What a file says of one weight: the mean square of each input, [matrices, K], and the tokens of each matrix.
Importances = tuple[Floats, npt.NDArray[np.float64]]


def read_imatrix(path: Path) -> dict[str, Importances]:
    """Read a file of either form, by the names that llama.cpp gives the weights.

    Raises SourceError for a file that is neither, or whose numbers are not finite.
    """
    if not path.is_file():
        raise SourceError(f"{path}: no such file; give an importance matrix (imatrix.gguf or imatrix.dat)")
    if path.stat().st_size > MOST_BYTES:
        raise SourceError(f"{path}: expected an importance matrix of at most {MOST_BYTES} bytes")
    with open(path, "rb") as stream:
        is_gguf = stream.read(len(MAGIC)) == MAGIC
    importances = _of_gguf(path) if is_gguf else _of_list(path)
    if not importances:
        raise SourceError(f"{path}: expected importances of weights, found none")
    for name, (squares, counts) in importances.items():
        if not np.isfinite(squares).all() or (squares < 0).any() or not np.isfinite(counts).all():
            raise SourceError(f"{path}: {name!r}: expected mean squares, found other numbers")
    return importances


def _of_gguf(path: Path) -> dict[str, Importances]:
    contents, raw = open_gguf(path), path.read_bytes()
    tensors = {tensor.name: tensor for tensor in contents.tensors}
    result = {}
    for name in [name.removesuffix(SUMS) for name in tensors if name.endswith(SUMS)]:
        stored = [tensors[name + SUMS], tensors.get(name + COUNTS)]
        if any(tensor is None or tensor.type != "F32" for tensor in stored):
            raise SourceError(f"{path}: {name!r}: expected sums and counts in F32")
        sums, counts = (
            np.frombuffer(raw, "<f4", tensor.weights, tensor.offset).astype(np.float64) for tensor in stored if tensor
        )
        if not len(counts) or len(sums) % len(counts):
            raise SourceError(f"{path}: {name!r}: expected as many sums for each of {len(counts)} matrices")
        result[name] = _importances(sums.reshape(len(counts), -1), counts)
    return result


def _of_list(path: Path) -> dict[str, Importances]:
    """Read the older form: a number of entries, and for each the length of its name, name, calls, values."""
    raw, offset = path.read_bytes(), 0

    def taken(count: int) -> bytes:
        nonlocal offset
        if not 0 < count <= len(raw) - offset:
            raise SourceError(
                f"{path}: expected an importance matrix of llama.cpp, found another kind of file, or a truncated one"
            )
        offset += count
        return raw[offset - count : offset]

    def integer() -> int:
        return int.from_bytes(taken(4), "little", signed=True)

    result = {}
    for _ in range(min(integer(), len(raw))):
        name = taken(integer()).decode(errors="replace")
        calls, count = integer(), integer()
        values = np.frombuffer(taken(4 * count), "<f4").astype(np.float64)
        result[name] = _importances(values[None], np.array([max(calls, 0)], dtype=np.float64))
    return result


def _importances(sums: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> Importances:
    with np.errstate(invalid="ignore", over="ignore"):
        return (sums / np.where(counts > 0, counts, 1)[:, None]).astype(np.float32), counts


@dataclass(frozen=True, eq=False, kw_only=True)
class FileInputs:
    """What a file says of the inputs of the weights of a checkpoint. It has no moments of two inputs together."""

    about: dict[str, Any]
    vectors: Sequence[InputVector]
    weights: Mapping[str, WeightInputs]
    squares: Sequence[Floats]

    @staticmethod
    def of(path: Path, checkpoint: Checkpoint) -> FileInputs:
        """Return what a file says of a checkpoint.

        Raises SourceError for a file of another model, ExportError for a model that llama.cpp does not have.
        """
        importances = read_imatrix(path)
        tensors = {tensor.name: tensor for tensor in model_tensors(checkpoint)}
        for name in importances:
            if name not in tensors and name not in SHARED:
                raise SourceError(f"{path}: it belongs to another model: this one has no {name!r}")
        vectors, squares = list[InputVector](), list[Floats]()
        reads: dict[str, dict[int, int]] = {}
        is_transposed: dict[str, bool] = {}
        for name, tensor in tensors.items():
            if name not in importances:
                continue
            known, tokens = importances[name]
            matrices, width = math.prod(tensor.shape[:-2]), tensor.shape[-1]
            if known.size != matrices * width:
                raise SourceError(
                    f"{path}: {name!r}: it belongs to another model: expected {matrices} times {width} inputs, found "
                    f"{known.size}"
                )
            counts = np.broadcast_to(tokens, (matrices,))
            for number, values in enumerate(known.reshape(matrices, width)):
                if counts[number] <= 0:
                    continue
                transposed = isinstance(tensor, View) and tensor.transposed
                for source, matrix in read_by(tensor, number) or ():
                    if is_transposed.setdefault(source, transposed) == transposed:  # MLA's are read both ways
                        reads.setdefault(source, {}).setdefault(matrix, len(vectors))
                vectors.append(InputVector(size=width, tokens=int(counts[number]), held_back=0, windows=0))
                squares.append(np.ascontiguousarray(values))
        weights = {
            source: WeightInputs(vectors=tuple(map(of.get, range(max(of) + 1))), transposed=is_transposed[source])
            for source, of in reads.items()
        }
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return FileInputs(
            about={"sample": IMATRIX, "identity": digest}, vectors=vectors, weights=weights, squares=squares
        )

    def prepare(self, progress: Progress) -> None:
        """Do nothing: the file was read."""

    def mean_squares(self, name: str, matrix: int) -> Floats:
        """Return the mean square of each channel that a matrix of a weight reads, [K]."""
        vector = self.weights[name].vectors[matrix]
        assert vector is not None
        return self.squares[vector]

    def moments(self, vector: int) -> tuple[Floats, Floats]:
        """Raise OptionError: a file of importances has none."""
        raise OptionError("`imatrix`: expected `calibrate`: a file of importances has no moments of pairs of inputs")


def write_imatrix(path: Path, inputs: KnownInputs, checkpoint: Checkpoint, sample: str) -> None:
    """Write what is known of the inputs of weights as llama.cpp's quantizer takes it.

    sample: what the text is called

    Raises ExportError for a model that llama.cpp does not have, OutputError if the file cannot be written.
    """
    stored: dict[str, npt.NDArray[np.float32]] = {}
    for tensor in model_tensors(checkpoint):
        matrices = range(math.prod(tensor.shape[:-2])) if len(tensor.shape) > 1 else ()
        numbers = [_vector_of(tensor, number, inputs) for number in matrices]
        if all(number is None for number in numbers):
            continue
        counts = np.array([[0 if n is None else inputs.vectors[n].tokens] for n in numbers], dtype=np.float32)
        squares: list[Floats] = [
            np.zeros(tensor.shape[-1], dtype=np.float32) if vector is None else importance_of(tensor, number, inputs)
            for number, vector in enumerate(numbers)
        ]
        stored[tensor.name + SUMS] = (np.stack(squares) * counts).astype(np.float32)
        stored[tensor.name + COUNTS] = counts
    windows = max((vector.windows for vector in inputs.vectors), default=0) or 1
    tokens = max((vector.tokens for vector in inputs.vectors), default=0)
    writer = gguf_package().GGUFWriter(None, "")
    writer.kv_data[0].clear()
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", [sample])
    writer.add_uint32("imatrix.chunk_count", windows)
    writer.add_uint32("imatrix.chunk_size", tokens // windows)
    listed = {name: tensor_info(values.shape, "F32", values.nbytes) for name, values in stored.items()}
    header = encode_header(writer.kv_data[0], listed)
    padded = (values.tobytes() + bytes(-values.nbytes % ALIGNMENT) for values in stored.values())
    write_whole(path.parent, path, [header, *padded])


def _vector_of(tensor: LogicalTensor, number: int, inputs: KnownInputs) -> int | None:
    vectors = set()
    for source, matrix in read_by(tensor, number) or ():
        known = inputs.weights.get(source)
        vectors.add(None if known is None or matrix >= len(known.vectors) else known.vectors[matrix])
    return vectors.pop() if len(vectors) == 1 else None
