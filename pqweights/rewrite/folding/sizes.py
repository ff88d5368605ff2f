"""The sizes of the channels of all vectors between layers, as weights or a calibration tell them, and their factors.

One pass reads the weights that write the vectors, and rows of those that read them. Sums are added in the order of the
checkpoint, so they do not depend on the number of threads.

A reader of the vector x has the columns w_k, and a rounding error that is spread evenly over the columns of a group.
The output error is then proportional to the mean of x_k^2 times the mean of w_k^2. Columns that are multiplied by c_k,
while x_k is divided by it, have the least error at c_k = sqrt(x_k / w_k), by the inequality of Cauchy and Schwarz. That
is the choice of AWQ (Lin et al., arXiv:2306.00978), but for all readers together. Without data, x_k is taken from the
writer: it is the gain of a norm, or the length of a row of the weight behind a norm. Moving scales between neighbouring
layers is from Nagel et al. (arXiv:1906.04721).
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
from pqweights.common.dtypes import FINITE_RANGES, convert, from_float32, item_bytes, to_float32
from pqweights.kernels.factors import squares
from pqweights.kernels.workers import scratch
from pqweights.planning.inputs import KnownInputs
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


class _RowRange(NamedTuple):
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

    def _sums(self, tensor: LogicalTensor, uses: Sequence[_Use], chunk: _RowRange) -> tuple[Floats, Floats]:
        """Read some rows, and return the sums of squares of their columns, and of each row, weighted by a norm."""
        height, columns = tensor.shape[-2:]
        dtype = exact_dtype(tensor)
        raw = scratch("squares", chunk.rows * columns * item_bytes(dtype))
        tensor.read((chunk.matrix * height + chunk.first) * columns, chunk.rows * columns, dtype, raw)
        along_rows = [use for use in uses if use.side.axis == ROWS]
        norms = [use.input_norm for use in along_rows if use.input_norm is not None]
        weights = np.square(self.gain(*norms[0])) if norms else np.ones(columns)
        return squares(raw, dtype, rows=chunk.rows, weights=weights.astype(np.float32), along_rows=bool(along_rows))


def _add(use: _Use, chunk: _RowRange, of_columns: Floats, of_rows: Floats, sizes: Sizes) -> None:
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


def _chunks(tensor: LogicalTensor, uses: Sequence[_Use]) -> Iterator[_RowRange]:
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
            yield _RowRange(matrix, first, rows, share)


def mean_squares(link: Link, inputs: KnownInputs) -> Doubles | None:
    """Return the mean square of each channel of a link, [matrices, channels]; NaN for a matrix without inputs.

    It is the mean over all readers, weighted by their tokens; None if none of them had inputs.
    """
    totals, tokens = np.zeros((link.matrices, link.channels)), np.zeros((link.matrices, 1))
    seen: set[tuple[int, int]] = set()
    for side in link.readers:
        known = inputs.weights.get(side.tensor)
        for matrix, vector in enumerate(() if known is None else known.vectors):
            into = matrix if side.stacked else 0
            if vector is None or into >= link.matrices or (into, vector) in seen:
                continue
            if inputs.vectors[vector].size != side.count:
                continue
            seen.add((into, vector))
            count = inputs.vectors[vector].tokens
            totals[into] += count * _by_channel(inputs.mean_squares(vector).astype(np.float64), side)
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


# A vector is folded if that is expected to take away at least this share of its readers' error. Where channels differ
# little, folding only loses what training found, with data or without.
SMALLEST_GAIN = 0.25
# Channels smaller than this share of the mean are taken as that large, and no factor is further from 1.
SMALLEST_SHARE = 1e-4
LARGEST_FACTOR = 4096.0


def factors_of(inputs: Doubles, weights: Doubles, *, powers_of_two: bool) -> tuple[Floats, float]:
    """Return the factors c = sqrt(x / w) of a vector, around 1, and the share of its readers' error that should go.

    inputs: the size of each channel x, [matrices, channels]
    weights: the root mean square of the columns that read it, [matrices, channels]
    powers_of_two: round to powers of two, which multiply numbers of any floating dtype exactly

    Factors are [matrices, channels] f32 with 8 significant bits. Sizes that are not finite, as of a weight with a NaN,
    have none to gain by: what encodes that weight names it.
    """
    if not (np.isfinite(inputs).all() and np.isfinite(weights).all()):
        return np.ones(inputs.shape, dtype=np.float32), 0.0
    x, w = _at_least_small(inputs), _at_least_small(weights)
    gain = 1 - float(((x * w).mean(axis=1) ** 2).sum() / ((x**2).mean(axis=1) * (w**2).mean(axis=1)).sum())
    logarithms = (np.log2(x) - np.log2(w)) / 2
    logarithms -= logarithms.mean(axis=1, keepdims=True)
    if powers_of_two:
        logarithms = np.rint(logarithms)
    columns = np.exp2(np.clip(logarithms, -np.log2(LARGEST_FACTOR), np.log2(LARGEST_FACTOR)))
    return rounded_to_8_bits(columns.astype(np.float32)), gain


def rounded_to_8_bits(values: Floats) -> Floats:
    """Round to 8 significant bits.

    So the last bits of sums and logarithms, which depend on the processor, do not show, but for ties; and the result
    is exact in every dtype.
    """
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    return to_float32(from_float32(flat, "BF16"), "BF16").reshape(values.shape)


def _at_least_small(sizes: Doubles) -> Doubles:
    floor = np.maximum(SMALLEST_SHARE * sizes.mean(axis=1, keepdims=True), 1e-30)
    result: Doubles = np.maximum(sizes, floor)
    return result


def keeping_bits(columns: Floats, vectors: Sequence[tuple[Floats, str]]) -> Floats:
    """Return powers of two with 1 in place of those that would cost a plain vector bits.

    columns: the powers of two, [channels]
    vectors: what is divided by them and stored plainly, [channels], each with its dtype

    A power of two is exact as long as no number becomes subnormal or infinite, which in float16 is soon.
    """
    kept = np.ones(columns.shape, dtype=bool)
    for values, dtype in vectors:
        divided = values / columns
        kept &= _is_in_range(divided, dtype) & (_stored(divided, dtype) * columns == values)
    return np.where(kept, columns, np.float32(1))


def _is_in_range(values: Floats, dtype: str) -> npt.NDArray[np.bool_]:
    low, high = FINITE_RANGES.get(dtype, FINITE_RANGES["F32"])
    return (values >= low) & (values <= high)


def _stored(values: Floats, dtype: str) -> Floats:
    """Return values as they are in a dtype: the largest for those beyond its range."""
    limited = np.clip(values, *FINITE_RANGES.get(dtype, FINITE_RANGES["F32"])).astype(np.float32)
    return to_float32(convert(limited.view(np.uint8), "F32", dtype), dtype)


@dataclass(frozen=True, eq=False)
class FoldedGain:
    """A norm's gain with the factors of its readers.

    stored: the weight that is stored, f32 with 8 significant bits, or the original where its gain is 0
    columns: by what the columns of readers are multiplied, so that the product stays the same, f32
    """

    stored: Floats
    columns: Floats


def folded_gain(weight: Floats, columns: Floats, *, zero_centred: bool, exact: bool, dtype: str) -> FoldedGain:
    """Divide a gain by the factors of its readers.

    weight: the norm's weight, [channels]
    columns: the factors that are wanted, [channels]
    zero_centred: the gain is 1 + weight
    exact: the factors are powers of two, and the gain is divided without rounding
    dtype: the dtype that the weight is stored in
    """
    gain = weight.astype(np.float64) + zero_centred
    if exact:
        return FoldedGain((gain / columns).astype(np.float32), columns)
    wanted = rounded_to_8_bits((gain / columns).astype(np.float32))
    rounded = rounded_to_8_bits(wanted - np.float32(1)) if zero_centred else wanted
    stored = _stored(rounded, dtype)
    computed = stored.astype(np.float64) + zero_centred
    usable = (computed != 0) & _is_in_range(rounded, dtype) & (np.sign(computed) == np.sign(gain))
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(usable, gain / computed, 1.0).astype(np.float32)
    return FoldedGain(np.where(usable, stored, weight).astype(np.float32), factors)
