"""Weights of the codec hadamard-trellis-columns, without a calibration: each superblock by the encoder of section 8."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import column_decoder
import numpy as np
import numpy.typing as npt
from export_decoders import values_of

from pqweights.checkpoint.source import open_local
from pqweights.convert.ready import CodeMeasures, write_ready
from pqweights.formats.columns import ColumnCodes, ColumnCut
from pqweights.formats.trellis_tables import decode_tables, encode_model
from pqweights.kernels import trellis

Floats = npt.NDArray[np.float32]
STRIP = 128


def encoded(weight: Floats, rate: float = 3.0, *, seed: int | None = None, transposed: bool = False) -> ColumnCodes:
    """The codes of a weight [N, K], or of a stack.

    rate: about how many bits a weight takes
    seed: of the scales; without, all factors are 1
    transposed: whether the weight is [..., K, N]
    """
    if weight.ndim == 3:
        seeds = (None if seed is None else seed + number for number in range(len(weight)))
        return ColumnCodes.stacked([
            encoded(own, rate, seed=of, transposed=transposed) for own, of in zip(weight, seeds, strict=False)
        ])  # fmt: skip
    if transposed:
        return encoded(weight.T, rate, seed=seed).T
    rows, columns = weight.shape
    cut = ColumnCut.of((rows, columns))
    scales = [np.full(count, 128, dtype=np.uint8) for count in (rows, columns)]
    if seed is not None:
        scales = [(116 + (7 * np.arange(count) ** 2 + seed) % 24).astype(np.uint8) for count in (rows, columns)]
    by_row, by_column = (column_decoder.factors(of) for of in scales)
    padded = np.zeros((cut.strips * STRIP, columns), dtype=np.float32)
    padded[:rows] = weight / by_row[:, None] / by_column
    pieces, lengths = [], np.zeros((cut.strips, cut.superblocks), dtype=np.int32)
    for strip in range(cut.strips):
        for number in range(cut.superblocks):
            of_columns = cut.columns_of(number)
            blocks = padded[strip * STRIP : (strip + 1) * STRIP, of_columns.start : of_columns.stop].T
            pieces.append(superblock(np.ascontiguousarray(blocks), rate))
            lengths[strip, number] = len(pieces[-1])
    return ColumnCodes(np.concatenate(pieces), lengths, *scales)


def superblock(blocks: Floats, rate: float) -> npt.NDArray[np.uint8]:
    """The bytes of a superblock [blocks, 128], as many as it uses."""
    count = len(blocks)
    row = np.empty((1, int(rate * count * 16) + 96), dtype=np.uint8)
    cut = trellis.Superblocks(1, count, row.shape[1])
    trellis.encode(
        blocks.view(np.uint8).reshape(-1),
        "F32",
        cut=cut,
        states=8,
        signed=False,
        gained=False,
        model=encode_model(),
        rows=row,
    )
    (used,) = np.nonzero(row[0])
    length = max(7, int(used[-1]) + 1 if len(used) else 0)
    values = np.empty(count * 512, dtype=np.uint8)
    while True:
        cut = trellis.Superblocks(1, count, length)
        damaged, _ = trellis.decode(row[0, :length], values, "F32", cut=cut, signed=False, tables=decode_tables())
        if damaged < 0:
            return row[0, :length]
        length += 1


def values_of_codes(codes: ColumnCodes) -> Floats:
    """What codes decode to, by the independent decoder."""
    return column_decoder.decode(
        codes.trellis.tobytes(), codes.lengths, codes.row_scales, codes.column_scales, transposed=codes.transposed
    )


def write_codes(
    source: Path, folder: Path, names: Sequence[str], rate: float = 3.0, transposed: Sequence[str] = ()
) -> dict[str, Floats]:
    """Write a file of ready codes for each of some weights of a checkpoint, and return what they decode to."""
    tensors, decoded = {tensor.name: tensor for tensor in open_local(source).tensors}, {}
    for seed, name in enumerate(names):
        exact = values_of(tensors[name])
        codes = encoded(exact, rate, seed=seed, transposed=name in transposed)
        decoded[name] = values_of_codes(codes)
        energy = float((exact.astype(np.float64) ** 2).sum())
        error = float(((decoded[name] - exact).astype(np.float64) ** 2).sum()) / energy
        measured = CodeMeasures(relative_mse=error, energy=energy, weighed_mse=error / 2)
        write_ready(folder / f"{seed}.safetensors", {name: (codes, measured)})
    return decoded


# Of codes that nobody looks at.
NOTHING = CodeMeasures(relative_mse=0.0, energy=0.0)
