"""The distribution of a checkpoint's weights within their blocks, before and after the rotation, compared with N(0,1).

A codec with Lloyd-Max levels is optimal for coordinates that are normal. This measures the Kolmogorov-Smirnov distance
to N(0,1) and the kurtosis, on the weights that the recipe q5 would quantize, without quantizing them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import find_non_finite, open_local
from pqweights.common.documents import as_json
from pqweights.errors import SourceError
from pqweights.kernels import HADAMARD_SIZE
from pqweights.kernels.groups import rotate
from pqweights.planning.decisions import decide
from pqweights.planning.recipe import load_recipe

# At most this many weights of a tensor are read, in chunks of blocks that are spread evenly over it.
MAX_WEIGHTS = 1 << 22
CHUNK_BLOCKS = 1 << 11
CHUNKS = MAX_WEIGHTS // HADAMARD_SIZE // CHUNK_BLOCKS
# Distribution functions are compared at the ends of cells of equal probability, so a distance is at most 1 / CELLS low.
CELLS = 1 << 16
# The bins of the histogram; no coordinate of a block exceeds sqrt(128).
HISTOGRAM_EDGES: npt.NDArray[np.float64] = np.arange(-1140, 1141) / 100

Progress = Callable[[int, int, str], None]  # called with the source bytes done, the bytes in all, and the tensor's name


@dataclass(frozen=True)
class Normality:
    """The distance of coordinates from N(0,1).

    ks: the largest difference of the two distribution functions.
    kurtosis: the mean fourth power divided by the squared mean square, both about zero; 3 for N(0,1).
    """

    ks: float
    kurtosis: float


@dataclass(frozen=True, kw_only=True)
class TensorDistribution:
    """The distribution of one tensor.

    name, role, shape, dtype, weights: what the tensor is.
    sampled_weights: how many weights were measured: those of the blocks that were read and are not zero.
    before, after: the figures before and after the rotation; None if all blocks that were read are zero.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    weights: int
    sampled_weights: int
    before: Normality | None
    after: Normality | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Distribution:
    """The distribution of a whole checkpoint.

    recipe: the recipe that chose the tensors.
    tensors: the distribution of each one.
    before, after: the figures of all tensors together, before and after the rotation.
    histogram_before, histogram_after: how many coordinates are in each bin of HISTOGRAM_EDGES, [bins] i64.
    """

    recipe: str
    tensors: tuple[TensorDistribution, ...]
    before: Normality | None
    after: Normality | None
    histogram_before: npt.NDArray[np.int64]
    histogram_after: npt.NDArray[np.int64]

    @property
    def weights(self) -> int:
        """The weights of all tensors."""
        return sum(tensor.weights for tensor in self.tensors)

    @property
    def sampled_weights(self) -> int:
        """The measured weights of all tensors."""
        return sum(tensor.sampled_weights for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Return the document of inspect --distribution --json."""
        return {
            "recipe": self.recipe,
            "max_weights_per_tensor": MAX_WEIGHTS,
            "weights": self.weights,
            "sampled_weights": self.sampled_weights,
            **as_json({"before": self.before, "after": self.after, "tensors": self.tensors}),
        }


def measure_distribution(
    source: Path,
    *,
    threads: int = 1,
    allow_pickle: bool = False,
    progress: Progress = lambda done, total, name: None,
) -> Distribution:
    """Measure the distribution of the tensors that the recipe q5 quantizes.

    Raises SourceError for a master, and for a weight that is not finite.
    """
    checkpoint = open_local(source, allow_pickle)
    if checkpoint.is_master:
        raise SourceError(
            f"{source}: expected a checkpoint of weights, found a master, which holds codes; give the checkpoint that "
            "it was made from"
        )
    recipe = load_recipe("q5")
    decisions = decide(recipe, checkpoint.tensors)
    chosen = [(t, d.role) for t, d in zip(checkpoint.tensors, decisions, strict=True) if d.codec is not None]
    total, done = sum(_sampled_bytes(tensor) for tensor, _ in chosen), 0
    before, after = Tally(), Tally()
    measured = []
    pool = ThreadPoolExecutor(threads)
    try:
        tallies = pool.map(_count, (tensor for tensor, _ in chosen))
        for (tensor, role), (before_one, after_one) in zip(chosen, tallies, strict=True):
            before.merge(before_one)
            after.merge(after_one)
            measured.append(_tensor_distribution(tensor, role, before_one, after_one))
            done += _sampled_bytes(tensor)
            progress(done, total, tensor.name)
    finally:
        pool.shutdown(cancel_futures=True)
    return Distribution(
        recipe=recipe.name,
        tensors=tuple(measured),
        before=before.fit(),
        after=after.fit(),
        histogram_before=before.histogram,
        histogram_after=after.histogram,
    )


def _tensor_distribution(tensor: LogicalTensor, role: str, before: Tally, after: Tally) -> TensorDistribution:
    return TensorDistribution(
        name=tensor.name,
        role=role,
        shape=tensor.shape,
        dtype=tensor.dtype,
        weights=element_count(tensor),
        sampled_weights=before.count,
        before=before.fit(),
        after=after.fit(),
    )


def sampled_blocks(weights: int) -> list[range]:
    """Return which whole blocks of a tensor are read: all of them, or CHUNKS runs that are spread evenly over it."""
    blocks = weights // HADAMARD_SIZE
    if blocks <= CHUNKS * CHUNK_BLOCKS:
        return [range(first, min(first + CHUNK_BLOCKS, blocks)) for first in range(0, blocks, CHUNK_BLOCKS)]
    firsts = [i * (blocks - CHUNK_BLOCKS) // (CHUNKS - 1) for i in range(CHUNKS)]
    return [range(first, first + CHUNK_BLOCKS) for first in firsts]


def _sampled_bytes(tensor: LogicalTensor) -> int:
    """Return about how many bytes of the source are read for a tensor."""
    weights = element_count(tensor)
    stored = sum(part.byte_count for part in tensor.parts)
    return stored * min(weights, MAX_WEIGHTS) // max(weights, 1)


def _count(tensor: LogicalTensor) -> tuple[Tally, Tally]:
    """Count the coordinates of the blocks of a tensor that are read, before and after the rotation.

    Raises SourceError for a weight that is not finite.
    """
    before, after = Tally(), Tally()
    for blocks in sampled_blocks(element_count(tensor)):
        count = len(blocks) * HADAMARD_SIZE
        raw = np.empty(count * 4, dtype=np.uint8)
        tensor.read(blocks.start * HADAMARD_SIZE, count, "F32", raw)
        values = raw.view(np.float32).reshape(-1, HADAMARD_SIZE).astype(np.float64)
        norms = np.sqrt((values * values).sum(axis=1))
        if not np.isfinite(norms).all():
            at = find_non_finite(tensor, blocks.start * HADAMARD_SIZE, count)
            index = [int(i) for i in np.unravel_index(at, tensor.shape)]
            raise SourceError(
                f"{tensor.parts[0].file}: tensor {tensor.name!r}: expected finite weights, "
                f"found a NaN or an infinity at {index}"
            )
        values = values[norms > 0]
        values *= (math.sqrt(HADAMARD_SIZE) / norms[norms > 0])[:, None]
        coordinates = values.astype(np.float32).reshape(-1)
        before.add(coordinates.copy())
        rotate(coordinates)
        after.add(coordinates)
    return before, after


class Tally:
    """A count of coordinates, with their histogram over HISTOGRAM_EDGES: [bins] i64."""

    def __init__(self) -> None:
        self.count = 0
        self.histogram = np.zeros(len(HISTOGRAM_EDGES) - 1, dtype=np.int64)
        self._not_above = np.zeros(CELLS - 1, dtype=np.int64)  # how many coordinates are at most each edge
        self._squares = self._fourths = 0.0

    def add(self, z: npt.NDArray[np.float32]) -> None:
        """Count coordinates, and sort them in place."""
        self.count += len(z)
        squares = z.astype(np.float64) ** 2
        self._squares += float(squares.sum())
        self._fourths += float((squares * squares).sum())
        z.sort()
        self._not_above += np.searchsorted(z, normal_edges(), side="right")
        below = np.searchsorted(z, HISTOGRAM_EDGES.astype(np.float32), side="left")
        self.histogram += np.diff(below)

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.count += other.count
        self.histogram += other.histogram
        self._not_above += other._not_above
        self._squares += other._squares
        self._fourths += other._fourths

    def fit(self) -> Normality | None:
        """Return the distance from N(0,1), or None without coordinates."""
        if self.count == 0:
            return None
        normal = np.arange(1, CELLS) / CELLS
        distance = float(np.abs(self._not_above / self.count - normal).max())
        return Normality(distance, self._fourths * self.count / self._squares**2)


@functools.cache
def normal_edges() -> npt.NDArray[np.float32]:
    """Return the CELLS - 1 inner ends of the cells to which N(0,1) gives equal probability, ascending."""
    inverse = NormalDist().inv_cdf
    lower = [inverse(i / CELLS) for i in range(1, CELLS // 2)]
    return np.array([*lower, 0.0, *(-edge for edge in reversed(lower))], dtype=np.float32)
