"""The sizes of the channels of all vectors between layers, as weights or a calibration tell them.

One pass reads the weights that write them, and rows of those that read them. Sums are added in the order of the
checkpoint, so they do not depend on the number of threads.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
    input_norm: the norm before a writer: its weight, and whether it is zero-centred
    """

    link: int
    side: Side
    writes: bool
    input_norm: tuple[str, bool] | None


class _Sums(NamedTuple):
    """Sums of squares of some channels of one vector of a link, from `first` on."""

    use: _Use
    matrix: int
    first: int
    sums: Doubles


class _RowRange(NamedTuple):
    """Some rows of one matrix of a tensor.

    tensor: its index
    matrix, row, rows: which rows
    share: the share of the matrix's rows that are read at all
    """

    tensor: int
    matrix: int
    row: int
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
        left = Counter(use.link for of_tensor in uses.values() for use in of_tensor)
        last_uses = {name: use.last for name, use in file_uses(wanted).items()}
        sums: dict[int, Sizes] = {}
        for index, parts in self._measured(wanted, uses):
            for part in parts:
                sizes = sums.setdefault(part.use.link, self._empty(links[part.use.link]))
                into = sizes.inputs if part.use.writes else sizes.weights
                into[part.matrix, part.first : part.first + len(part.sums)] += part.sums
            if index is None:
                continue
            for number in [use.link for use in uses[wanted[index].name]]:
                left[number] -= 1
                if not left[number]:
                    yield number, sums.pop(number)
            for name in [name for name, last in last_uses.items() if last == index]:
                self.storage.release(name)

    def _empty(self, link: Link) -> Sizes:
        """Return the sums of a link before anything is added: those of a norm's output are its gain's."""
        shape = (link.matrices, link.channels)
        inputs = np.zeros(shape) if link.norm is None else self.gain(link.norm, link.zero_centred)[None] ** 2
        return Sizes(inputs, np.zeros(shape))

    def _measured(
        self, wanted: Sequence[LogicalTensor], uses: dict[str, list[_Use]]
    ) -> Iterator[tuple[int | None, list[_Sums]]]:
        """Yield the sums of each chunk, in order, with the index of its tensor if it is the last chunk of it."""
        total, done = sum(element_count(tensor) for tensor in wanted), 0
        files = {name: use.together for name, use in file_uses(wanted).items()}
        under_way: deque[tuple[_RowRange, bool, Future[list[_Sums]]]] = deque()
        pool = ThreadPoolExecutor(self.threads, "pqweights-sizes")
        try:
            with self.storage.fetching(self.fetched, files):
                for chunk, is_last in [*_chunks(wanted, uses), (None, True)]:
                    if chunk is not None:
                        tensor = wanted[chunk.tensor]
                        result = pool.submit(self._sums, tensor, uses[tensor.name], chunk)
                        under_way.append((chunk, is_last, result))
                    while len(under_way) > (2 * self.threads if chunk is not None else 0):
                        first, ends, result = under_way.popleft()
                        parts = result.result()
                        done += first.rows * wanted[first.tensor].shape[-1]
                        self.progress(done, total, wanted[first.tensor].name)
                        yield (first.tensor if ends else None), parts
        finally:
            pool.shutdown(cancel_futures=True)

    def _sums(self, tensor: LogicalTensor, uses: Sequence[_Use], chunk: _RowRange) -> list[_Sums]:
        """Read some rows, and return their sums of squares for each use."""
        height, columns = tensor.shape[-2:]
        dtype = exact_dtype(tensor)
        raw = scratch("squares", chunk.rows * columns * item_bytes(dtype))
        tensor.read((chunk.matrix * height + chunk.row) * columns, chunk.rows * columns, dtype, raw)
        along_rows = [use for use in uses if use.side.axis == ROWS]
        weights = next((gain for use in along_rows if (gain := self._squared_gain(use)) is not None), None)
        of_columns, of_rows = squares(
            raw,
            dtype,
            rows=chunk.rows,
            weights=np.ones(columns, dtype=np.float32) if weights is None else weights,
            along_rows=bool(along_rows),
        )
        parts = [_part(use, chunk, of_columns, of_rows) for use in uses]
        return [part for part in parts if len(part.sums)]

    def _squared_gain(self, use: _Use) -> Floats | None:
        """Return the squares of what the columns of a writer read, if a norm tells."""
        if not use.writes or use.input_norm is None:
            return None
        return np.square(self.gain(*use.input_norm)).astype(np.float32)


def _part(use: _Use, chunk: _RowRange, of_columns: Floats, of_rows: Floats) -> _Sums:
    """Return the sums of one use."""
    side, matrix = use.side, chunk.matrix if use.side.stacked else 0
    if side.axis == COLUMNS:
        sums = of_columns[side.first : side.first + side.count].astype(np.float64) / chunk.share
        return _Sums(use, matrix, 0, sums.reshape(-1, side.repeats, side.width).sum(axis=1).reshape(-1))
    low, high = max(side.first, chunk.row), min(side.first + side.count, chunk.row + chunk.rows)
    sums = of_rows[low - chunk.row : max(low, high) - chunk.row].astype(np.float64)
    return _Sums(use, matrix, low - side.first, sums)


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


def _chunks(wanted: Sequence[LogicalTensor], uses: dict[str, list[_Use]]) -> Iterator[tuple[_RowRange, bool]]:
    """Yield the chunks of all tensors, each within one matrix, and whether it is the last of its tensor."""
    for index, tensor in enumerate(wanted):
        *stack, height, columns = tensor.shape
        matrices = stack[0] if stack else 1
        everything = any(use.side.axis == ROWS for use in uses[tensor.name])
        runs = list(_runs(height, max(1, CHUNK_WEIGHTS // columns)) if everything else _sampled_runs(height, columns))
        share = sum(rows for _, rows in runs) / height
        for matrix in range(matrices):
            for number, (row, rows) in enumerate(runs):
                yield _RowRange(index, matrix, row, rows, share), matrix == matrices - 1 and number == len(runs) - 1


def _runs(height: int, step: int) -> Iterator[tuple[int, int]]:
    return ((row, min(step, height - row)) for row in range(0, height, step))


def _sampled_runs(height: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield runs of rows that are spread evenly over a matrix, SAMPLED_ROWS in all, or all of its rows."""
    step = max(1, CHUNK_WEIGHTS // columns)
    if height <= SAMPLED_ROWS:
        yield from _runs(height, step)
        return
    rows = min(step, SAMPLED_ROWS // SAMPLED_RUNS)
    count = SAMPLED_ROWS // rows
    for number in range(count):
        yield number * height // count, rows


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
