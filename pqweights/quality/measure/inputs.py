"""What a calibration collects of the inputs of matrices while a model reads a text, with some rows that are held back.

Matrices with the same inputs (q, k and v; gate and up) share one vector. They are found by what they read in the first
window, so no architecture needs a rule of its own. One pass collects everything that was asked for: the sum of x x',
the sums of squares, and random samples of rows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pqweights.checkpoint.writer import write_whole
from pqweights.planning.statistics_file import InputVector
from pqweights.quality.measure.activations import MatrixId
from pqweights.quality.measure.scale_search import Inputs

Floats = npt.NDArray[np.float32]
DIGEST_BYTES = 32


class SeenInputs:
    """What each matrix reads in a window, to find which ones read the same."""

    def __init__(self) -> None:
        self.windows = 0
        # By matrix: K, whether the model stores the matrix as [N, K], and a digest of its inputs.
        self.found: dict[MatrixId, tuple[int, bool, Any]] = {}
        self._rows: Counter[MatrixId] = Counter()

    def add(self, matrix_id: MatrixId, values: torch.Tensor, *, along_rows: bool, window: int, held_back: bool) -> None:
        """Add inputs [..., K] to the digest of a matrix."""
        rows = values.detach().reshape(-1, values.shape[-1]).float().cpu().numpy()
        if not len(rows):
            return
        self._rows[matrix_id] += len(rows)
        if matrix_id not in self.found:
            self.found[matrix_id] = rows.shape[1], along_rows, hashlib.sha256()
        self.found[matrix_id][2].update(np.ascontiguousarray(rows).tobytes())

    def key(self, matrix_id: MatrixId) -> tuple[object, ...] | None:
        """Return what is equal for matrices that read the same; None for a matrix that read nothing.

        Experts may have read the same few tokens by chance: matrices that did not read every token must also be of the
        same expert, by its number or by the module that holds it.
        """
        seen = self.found.get(matrix_id)
        if seen is None:
            return None
        name, number = matrix_id
        module = name.rpartition(".")[0].rpartition(".")[0]
        every_token = self._rows[matrix_id] == max(self._rows.values())
        expert = () if every_token and number is None else (number, None if number is not None else module)
        return seen[0], seen[2].hexdigest(), expert


class Sample:
    """A random sample of rows; every row that was offered is kept with the same chance (reservoir sampling).

    room: where the rows are kept, [capacity, K] f32
    seed: the seed of the choice
    """

    def __init__(self, room: Floats, seed: int | tuple[int, ...]) -> None:
        self._room, self.random, self.seen = room, np.random.default_rng(seed), 0
        self.windows_of_rows = np.zeros(len(room), dtype=np.int64)

    def add(self, rows: Floats, window: int) -> None:
        """Offer rows [n, K] of a window."""
        capacity = len(self._room)
        numbers = np.arange(self.seen, self.seen + len(rows))
        into = np.where(numbers < capacity, numbers, self.random.integers(0, numbers + 1))
        self.seen += len(rows)
        for row in np.flatnonzero(into < capacity):
            self._room[into[row]], self.windows_of_rows[into[row]] = rows[row], window

    @property
    def rows(self) -> Floats:
        """The rows that are kept, [rows, K]."""
        return self._room[: self.seen]

    @property
    def windows(self) -> npt.NDArray[np.int64]:
        """The number of the window that each kept row comes from, [rows]."""
        return self.windows_of_rows[: self.seen]


class VectorInputs:
    """The inputs of one vector.

    number: that of the vector, from which the samples are seeded
    rows, held_back: the room for samples of rows and of rows held back, [capacity, K] f32; no sums of squares are kept
        if there is no room for rows
    with_moments: whether the sum of x x' is kept
    """

    def __init__(self, number: int, rows: Floats, held_back: Floats, *, with_moments: bool) -> None:
        size = rows.shape[1]
        self.rows, self.held_back, self.tokens = Sample(rows, (number, 1)), Sample(held_back, number), 0
        self._squares = np.zeros(size if len(rows) else 0, dtype=np.float64)
        self._sum = torch.zeros((size, size) if with_moments else (0, 0), dtype=torch.float32)
        self._size = size

    def add(self, rows: torch.Tensor, *, window: int, held_back: bool) -> None:
        """Add rows [n, K] f32 of a window."""
        if held_back:
            self.held_back.add(rows.cpu().numpy(), window)
            return
        self.tokens += len(rows)
        if len(self._sum):
            self._sum = self._sum.to(rows.device).addmm_(rows.T, rows)
        if len(self._squares):
            values = rows.cpu().numpy()
            self.rows.add(values, window)
            with np.errstate(over="ignore", invalid="ignore"):
                self._squares += np.einsum("ij,ij->j", values, values, dtype=np.float64)

    def inputs(self) -> Inputs | None:
        """Return what scales are searched on; None if there were no inputs."""
        if not self.tokens and not self.held_back.seen:
            return None
        return Inputs(
            tokens=self.tokens,
            rms=np.sqrt(self._squares / max(self.tokens, 1)).astype(np.float32),
            rows=np.array(self.rows.rows),
            held_back=np.array(self.held_back.rows),
            windows=self.held_back.windows,
        )

    @property
    def about(self) -> InputVector:
        """What the file says of the vector."""
        windows = self.held_back.windows
        return InputVector(size=self._size, tokens=self.tokens, held_back=len(windows), windows=len(np.unique(windows)))

    def moments(self) -> tuple[Floats, Floats]:
        """Return the moments [K, K], which are zeros if there was no token, and the rows held back."""
        return (self._sum / max(self.tokens, 1)).cpu().numpy(), self.held_back.rows

    def state(self) -> dict[str, Any]:
        """Return the numbers that continue the collection, as JSON; `arrays` and the samples' rows do the rest."""
        samples = [(sample.seen, sample.random.bit_generator.state) for sample in (self.rows, self.held_back)]
        return {"tokens": self.tokens, "samples": samples}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.tokens = state["tokens"]
        for sample, (seen, random) in zip((self.rows, self.held_back), state["samples"], strict=True):
            sample.seen, sample.random.bit_generator.state = seen, random

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return the arrays that continue the collection, which may be written to."""
        self._sum = self._sum.cpu()
        return [self._squares, self._sum.numpy(), self.rows.windows_of_rows, self.held_back.windows_of_rows]


class CollectedInputs:
    """The inputs of some vectors, by number, each collected at one of the matrices that read it.

    windows: of how many windows of the text
    """

    def __init__(self, vectors: Mapping[int, VectorInputs], numbers: Mapping[MatrixId, int]) -> None:
        self.windows, self.vectors, self._numbers = 0, vectors, numbers

    def add(self, matrix_id: MatrixId, values: torch.Tensor, *, along_rows: bool, window: int, held_back: bool) -> None:
        """Collect the inputs [..., K] of a matrix."""
        number = self._numbers.get(matrix_id)
        if number is not None:
            rows = values.detach().reshape(-1, values.shape[-1]).float()
            self.vectors[number].add(rows, window=window, held_back=held_back)

    def save(self, path: Path, identity: Any) -> None:
        """Write what continues the collection: a line of JSON, arrays, and the sha256 of both. Raises OutputError."""
        write_whole(path.parent, path, self._pieces(identity))

    def _pieces(self, identity: Any) -> Iterator[bytes]:
        states = [vector.state() for vector in self.vectors.values()]
        digest = hashlib.sha256()
        about = json.dumps({"identity": identity, "windows": self.windows, "vectors": states})
        arrays = (array for vector in self.vectors.values() for array in vector.arrays())
        for piece in itertools.chain([about.encode() + b"\n"], (array.tobytes() for array in arrays)):
            digest.update(piece)
            yield piece
        yield digest.digest()

    def restore(self, path: Path, identity: Any) -> None:
        """Take over what `save` wrote; nothing if it is damaged, missing, or of another collection."""
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data[:-DIGEST_BYTES]).digest() != data[-DIGEST_BYTES:]:
            return
        at = data.index(b"\n") + 1
        about = json.loads(data[:at])
        if about["identity"] != json.loads(json.dumps(identity)):
            return
        self.windows = about["windows"]
        for vector, state in zip(self.vectors.values(), about["vectors"], strict=True):
            vector.restore(state)
            for array in vector.arrays():
                array[...] = np.frombuffer(data, array.dtype, array.size, at).reshape(array.shape)
                at += array.nbytes
