"""The sizes of the channels of all vectors between layers, as weights or a calibration tell them.

One pass reads the weights that write them, and rows of those that read them. Sums are added in the order of the
checkpoint, so they do not depend on the number of threads.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.readers import LogicalTensor, element_count, file_uses
from pqweights.checkpoint.storage import Storage
from pqweights.common.dtypes import item_bytes
from pqweights.kernels.factors import squares
from pqweights.kernels.workers import scratch
from pqweights.planning.statistics_file import Statistics
from pqweights.rewrite.folding.folded import exact_dtype
from pqweights.rewrite.folding.links import COLUMNS, ROWS, Link, Side

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Progress = Callable[[int, int, str], None]  # called with the weights read, the weights in all, and the name of a tensor

CHUNK_WEIGHTS = 1 << 20
# Columns are measured on this many rows of a matrix, in runs of neighbours: their sizes are then known within 3 %.
SAMPLED_ROWS, SAMPLED_RUNS = 512, 16


class Sizes(NamedTuple):
    """The squares of a vector's channels, up to one factor, and of the columns that read them.

    inputs: [matrices, channels]
    weights: sums of squares over all rows of all readers, [matrices, channels]
    """

    inputs: Doubles
    weights: Doubles


class _Use(NamedTuple):
    """A side of a link that is measured.

    link: its number
    side: the side
    writes: whether it is a writer's
    input_norm: of a writer, the norm before it: its weight, and whether it is zero-centred
    """

    link: int
    side: Side
    writes: bool
    input_norm: tuple[str, bool] | None


class _Rows(NamedTuple):
    """Some rows of one matrix of a tensor. share: the share of the matrix's rows that are read at all."""

    matrix: int
    first: int
    rows: int
    share: float


@dataclass(frozen=True, kw_only=True)
class SizesPass:
    """The pass over the weights.

    storage: where they lie
    fetched: where fetched files lie
    threads: how many threads read
    gain: returns the gain of a norm, [channels], by the name of its weight and whether it is zero-centred
    progress: see Progress
    """

    storage: Storage
    fetched: Path
    threads: int
    gain: Callable[[str, bool], Doubles]
    progress: Progress

    def run(
        self, tensors: Sequence[LogicalTensor], links: dict[int, Link], *, plain: Collection[str]
    ) -> Iterator[tuple[int, Sizes]]:
        """Yield the sizes of each link, by its number, once all of its weights have been read.

        tensors: those of the checkpoint
        links: the links that are wanted
        plain: tensors that are stored plainly, whose columns do not count

        Raises SourceError if the source cannot deliver them.
        """
        uses = _uses(links, plain)
        wanted = [tensor for tensor in tensors if tensor.name in uses]
        files = file_uses(wanted)
        left = Counter(use.link for of_tensor in uses.values() for use in of_tensor)
        sizes = {number: self._empty(link) for number, link in links.items()}
        total, done = sum(element_count(tensor) for tensor in wanted), 0
        pool = ThreadPoolExecutor(self.threads, "pqweights-sizes")
        try:
            with self.storage.fetching(self.fetched, {name: use.together for name, use in files.items()}):
                for index, tensor in enumerate(wanted):
                    own = uses[tensor.name]
                    chunks = list(_chunks(tensor, own))
                    summed = pool.map(functools.partial(self._sums, tensor, own), chunks)
                    for chunk, (of_columns, of_rows) in zip(chunks, summed, strict=True):
                        for use in own:
                            _add(use, chunk, of_columns, of_rows, sizes[use.link])
                        done += chunk.rows * tensor.shape[-1]
                        self.progress(done, total, tensor.name)
                    for use in own:
                        left[use.link] -= 1
                        if not left[use.link]:
                            yield use.link, sizes.pop(use.link)
                    for name, use_of_file in files.items():
                        if use_of_file.last == index:
                            self.storage.release(name)
        finally:
            pool.shutdown(cancel_futures=True)

    def _empty(self, link: Link) -> Sizes:
        """Return the sums of a link before anything is added: those of a norm's output are its gain's."""
        shape = (link.matrices, link.channels)
        inputs = np.zeros(shape) if link.norm is None else self.gain(link.norm, link.zero_centred)[None] ** 2
        return Sizes(inputs, np.zeros(shape))

    def _sums(self, tensor: LogicalTensor, uses: Sequence[_Use], chunk: _Rows) -> tuple[Floats, Floats]:
        """Read some rows, and return the sums of squares of their columns, and of each row, weighted by a norm."""
        height, columns = tensor.shape[-2:]
        dtype = exact_dtype(tensor)
        raw = scratch("squares", chunk.rows * columns * item_bytes(dtype))
        tensor.read((chunk.matrix * height + chunk.first) * columns, chunk.rows * columns, dtype, raw)
        along_rows = [use for use in uses if use.side.axis == ROWS]
        norms = [use.input_norm for use in along_rows if use.input_norm is not None]
        weights = np.square(self.gain(*norms[0])) if norms else np.ones(columns)
        return squares(raw, dtype, rows=chunk.rows, weights=weights.astype(np.float32), along_rows=bool(along_rows))


def _add(use: _Use, chunk: _Rows, of_columns: Floats, of_rows: Floats, sizes: Sizes) -> None:
    """Add the sums of some rows to those of a link."""
    side, into = use.side, sizes.inputs if use.writes else sizes.weights
    channels = into[chunk.matrix if side.stacked else 0]
    if side.axis == COLUMNS:
        sums = of_columns[side.first : side.first + side.count].astype(np.float64) / chunk.share
        channels += sums.reshape(-1, side.repeats, side.width).sum(axis=1).reshape(-1)
        return
    low, high = max(side.first, chunk.first), min(side.first + side.count, chunk.first + chunk.rows)
    if low < high:
        channels[low - side.first : high - side.first] += of_rows[low - chunk.first : high - chunk.first]


def _uses(links: dict[int, Link], plain: Collection[str]) -> dict[str, list[_Use]]:
    """Return what is measured of each tensor, by its name."""
    uses: dict[str, list[_Use]] = {}
    for number, link in links.items():
        for side in link.writers:
            uses.setdefault(side.tensor, []).append(_Use(number, side, True, link.input_norm))
        for side in link.readers:
            if side.tensor not in plain:
                uses.setdefault(side.tensor, []).append(_Use(number, side, False, None))
    return uses


def _chunks(tensor: LogicalTensor, uses: Sequence[_Use]) -> Iterator[_Rows]:
    """Yield the rows of a tensor that are read, in runs within one matrix.

    All of them if a vector lies along them; else runs that are spread evenly over a matrix, SAMPLED_ROWS in all.
    """
    *stack, height, columns = tensor.shape
    step = max(1, CHUNK_WEIGHTS // columns)
    if height <= SAMPLED_ROWS or any(use.side.axis == ROWS for use in uses):
        runs = [(row, min(step, height - row)) for row in range(0, height, step)]
    else:
        rows = min(step, SAMPLED_ROWS // SAMPLED_RUNS)
        count = SAMPLED_ROWS // rows
        runs = [(number * height // count, rows) for number in range(count)]
    share = sum(rows for _, rows in runs) / height
    for matrix in range(stack[0] if stack else 1):
        for first, rows in runs:
            yield _Rows(matrix, first, rows, share)


def mean_squares(link: Link, moments: Statistics) -> Doubles | None:
    """Return the mean square of each channel of a link, [matrices, channels]; NaN for a matrix without inputs.

    It is the mean over all readers, weighted by their tokens; None if none of them had inputs.

    Raises SourceError for damaged moments.
    """
    totals, tokens = np.zeros((link.matrices, link.channels)), np.zeros((link.matrices, 1))
    seen: set[tuple[int, int]] = set()
    for side in link.readers:
        known = moments.weights.get(side.tensor)
        for matrix, vector in enumerate(() if known is None else known.vectors):
            into = matrix if side.stacked else 0
            if vector is None or into >= link.matrices or (into, vector) in seen:
                continue
            if moments.vectors[vector].size != side.count:
                continue
            seen.add((into, vector))
            count = moments.vectors[vector].tokens
            totals[into] += count * _by_channel(moments.mean_squares(vector).astype(np.float64), side)
            tokens[into] += count
    if not tokens.any():
        return None
    with np.errstate(invalid="ignore"):
        means: Doubles = totals / np.where(tokens, tokens, np.nan)
    return means


def _by_channel(squares: Doubles, side: Side) -> Doubles:
    """Return the means over the positions of a side that hold the same channel, [channels]."""
    result: Doubles = squares.reshape(-1, side.repeats, side.width).mean(axis=1).reshape(-1)
    return result
