"""How close the weights of a checkpoint are to Gaussian in their blocks, before and after the rotation.

    python benchmarks/distribution.py CHECKPOINT

A codec with Lloyd-Max levels is optimal for coordinates that are normal. The tables have the Kolmogorov-Smirnov
distance to N(0, 1), to within 0.00002, and the kurtosis (the fourth moment around zero, 3 for N(0, 1)) of the weights
that the recipe q5 quantizes: the coordinates of whole blocks of 128, divided by the norm of the block / sqrt(128).
Gaussian weights have a distance of 0.00108 and a kurtosis of 2.954, because each block is divided by its own norm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from harness import Cell, Document, argument_parser, machine, now, publish, table

from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import open_local
from pqweights.kernels import BLOCK_SIZE
from pqweights.kernels.groups import rotate
from pqweights.planning.decisions import decide
from pqweights.planning.recipe import load_recipe

Floats = npt.NDArray[np.float32]

# At most this many weights of a tensor are read, in chunks of blocks that are spread evenly over it.
MAX_WEIGHTS = 1 << 22
CHUNK_BLOCKS = 1 << 11
CHUNKS = MAX_WEIGHTS // BLOCK_SIZE // CHUNK_BLOCKS
# Distribution functions are compared at the ends of cells of equal probability, so a distance is at most 1 / CELLS low.
CELLS = 1 << 16


class Normality(NamedTuple):
    """The distance of coordinates from N(0, 1): the largest difference of the distribution functions, and kurtosis."""

    ks: float
    kurtosis: float


class Tally:
    """A count of coordinates, from which their distance from N(0, 1) follows."""

    def __init__(self) -> None:
        self.count = 0
        self._not_above = np.zeros(CELLS - 1, dtype=np.int64)  # how many coordinates are at most each edge
        self._squares = self._fourths = 0.0

    def add(self, coordinates: Floats) -> None:
        """Count coordinates, and sort them in place."""
        squares = coordinates.astype(np.float64) ** 2
        self._squares += float(squares.sum())
        self._fourths += float((squares * squares).sum())
        coordinates.sort()
        self._not_above += np.searchsorted(coordinates, normal_edges(), side="right")
        self.count += len(coordinates)

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.count += other.count
        self._not_above += other._not_above
        self._squares += other._squares
        self._fourths += other._fourths

    def fit(self) -> Normality | None:
        """The distance from N(0, 1); None without coordinates."""
        if not self.count:
            return None
        normal = np.arange(1, CELLS) / CELLS
        distance = float(np.abs(self._not_above / self.count - normal).max())
        return Normality(distance, self._fourths * self.count / self._squares**2)


@functools.cache
def normal_edges() -> Floats:
    """The inner ends of the cells to which N(0, 1) gives equal probability, ascending, [CELLS - 1]."""
    lower = [NormalDist().inv_cdf(number / CELLS) for number in range(1, CELLS // 2)]
    return np.array([*lower, 0.0, *(-edge for edge in reversed(lower))], dtype=np.float32)


def sampled_blocks(weights: int) -> Iterator[range]:
    """The whole blocks of a tensor that are read: all of them, or CHUNKS runs that are spread evenly over it."""
    blocks = weights // BLOCK_SIZE
    if blocks <= CHUNKS * CHUNK_BLOCKS:
        firsts = list(range(0, blocks, CHUNK_BLOCKS))
    else:
        firsts = [number * (blocks - CHUNK_BLOCKS) // (CHUNKS - 1) for number in range(CHUNKS)]
    for first in firsts:
        yield range(first, min(first + CHUNK_BLOCKS, blocks))


def count(tensor: LogicalTensor) -> tuple[Tally, Tally]:
    """Count the coordinates of a tensor's blocks before and after the rotation; blocks of zeros are left out."""
    before, after = Tally(), Tally()
    for blocks in sampled_blocks(element_count(tensor)):
        raw = np.empty(len(blocks) * BLOCK_SIZE * 4, dtype=np.uint8)
        tensor.read(blocks.start * BLOCK_SIZE, len(blocks) * BLOCK_SIZE, "F32", raw)
        values = raw.view(np.float32).reshape(-1, BLOCK_SIZE).astype(np.float64)
        norms = np.sqrt((values * values).sum(axis=1))
        if not np.isfinite(norms).all():
            raise SystemExit(f"error: tensor {tensor.name!r}: expected finite weights, found a NaN or an infinity")
        unit = values[norms > 0] * (math.sqrt(BLOCK_SIZE) / norms[norms > 0])[:, None]
        coordinates = unit.astype(np.float32).reshape(-1)
        before.add(coordinates.copy())
        rotate(coordinates)
        after.add(coordinates)
    return before, after


def row(name: str, role: str, weights: int, before: Tally, after: Tally) -> dict[str, Any]:
    """The row of a tensor, or of all together."""
    figures = {"before": before.fit(), "after": after.fit()}
    return {"tensor": name, "role": role, "weights": weights, "measured": before.count} | {
        f"{field} {when}": None if fit is None else getattr(fit, field)
        for field in Normality._fields
        for when, fit in figures.items()
    }


def measure(source: Path) -> list[dict[str, Any]]:
    """The rows of the tensors that q5 quantizes, and of all of them together."""
    checkpoint = open_local(source)
    if checkpoint.is_master:
        raise SystemExit(f"error: {source}: expected a checkpoint of weights, found a master, which holds codes")
    rows, all_before, all_after = [], Tally(), Tally()
    for tensor, decision in zip(checkpoint.tensors, decide(load_recipe("q5"), checkpoint.tensors), strict=True):
        if decision.codec is None:
            continue
        before, after = count(tensor)
        all_before.merge(before)
        all_after.merge(after)
        rows.append(row(tensor.name, decision.role, element_count(tensor), before, after))
    total = sum(entry["weights"] for entry in rows)
    return [*rows, row("all together", "", total, all_before, all_after)]


HEADER = ("tensor", "role", "weights", "measured", "KS before", "KS after", "kurtosis before", "kurtosis after")


def cells(entry: dict[str, Any]) -> list[Cell]:
    """A row of the table."""
    named: list[Cell] = [entry[field] for field in ("tensor", "role", "weights", "measured")]
    ks = [entry[f"ks {when}"] for when in ("before", "after")]
    kurtosis = [entry[f"kurtosis {when}"] for when in ("before", "after")]
    return [
        *named,
        *(None if value is None else f"{value:.5f}" for value in ks),
        *(None if value is None else f"{value:.3f}" for value in kurtosis),
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("checkpoint", type=Path, help="folder or file of safetensors")
    options, start = parser.parse_args(), now()
    rows = measure(options.checkpoint)
    document: Document = {"machine": machine(start), "settings": {"checkpoint": options.checkpoint.name}, "rows": rows}
    publish("distribution", document, {"distribution": table(HEADER, [cells(entry) for entry in rows])}, options, ())


if __name__ == "__main__":
    main()
