"""Encoding columns of a weight: what the codes decode to, what they cost, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import trellis_decoder
from blocks import examples
from closeness import F32_FEW, F32_MATRIX, F32_SOLVED, each_near, near
from helpers import gaussian
from hypothesis import given
from hypothesis import strategies as st
from random_inputs import inputs

from pqweights.formats import column_encoding
from pqweights.formats.column_encoding import (
    ColumnMeasures,
    InputFactors,
    encode_columns,
    expected_bits,
    moment_blocks,
    output_energies,
    scaled_energies,
    spread_of,
)
from pqweights.formats.columns import ColumnCodes, ColumnCut
from pqweights.formats.master import Floats
from pqweights.formats.trellis import Trellis
from pqweights.formats.trellis_tables import decode_tables
from pqweights.kernels import columns
from pqweights.kernels.trellis import STATES

Doubles = npt.NDArray[np.float64]


class Problem(NamedTuple):
    """A weight, and what it is for."""

    weight: Floats
    moments: Doubles
    gradients: Doubles

    def cost(self, decoded: Floats) -> float:
        """The sum of g e H e over the rows."""
        errors = self.weight.astype(np.float64) - decoded
        return float(self.gradients @ ((errors @ self.moments) * errors).sum(1))

    def encode(self, step: float = 0.02, **options: Any) -> tuple[ColumnCodes, ColumnMeasures]:
        """Encode the weight."""
        given: dict[str, Any] = {"gradients": self.gradients, "states": 8} | options
        return encode_columns(self.weight, factorized(self.moments), step=step, **given)


def factorized(moments: Doubles) -> InputFactors:
    """The factors of H, or of its blocks."""
    return InputFactors.of([moments[part, part] for part in moment_blocks(len(moments))])


def problem(rows: int, size: int, seed: int = 1) -> Problem:
    """A weight with rows of different size, inputs that are correlated, and outputs of different importance."""
    weight = gaussian(rows, size, seed=seed, scale=0.05) * np.exp(gaussian(rows, 1, seed=seed + 1, scale=0.5))
    x = inputs(size, seed=seed + 2, rows=2 * size + 4).astype(np.float64)
    gradients = np.exp(gaussian(rows, seed=seed + 3, scale=1)).astype(np.float64)
    return Problem(weight.astype(np.float32), x.T @ x / len(x), gradients)


def factors(scales: npt.NDArray[np.uint8]) -> Floats:
    return np.exp2((scales.astype(np.float64) - 128) / 16).astype(np.float32)


def decoded(codes: ColumnCodes, trellis: npt.NDArray[np.uint8] | None = None) -> tuple[Floats, int]:
    """The weight that the kernel decodes, and the first superblock that it finds damaged."""
    rows, own = factors(codes.row_scales), factors(codes.column_scales)
    values = np.empty(4 * len(rows) * len(own), dtype=np.uint8)
    damaged, _ = columns.decode(
        codes.trellis if trellis is None else trellis,
        codes.lengths,
        values,
        "F32",
        blocks=codes.cut.blocks,
        row_factors=rows,
        column_factors=own,
        tables=decode_tables(),
    )
    return values.view(np.float32).reshape(len(rows), len(own)), damaged


def read(codes: ColumnCodes) -> Floats:
    """The weight as the format page says, superblock by superblock."""
    cut, at = codes.cut, 0
    values = np.empty((128 * cut.strips, cut.columns), dtype=np.float32)
    for strip in range(cut.strips):
        for number in range(cut.superblocks):
            own, length = cut.columns_of(number), int(codes.lengths[strip, number])
            row = codes.trellis[at : at + length].tobytes()
            blocks = trellis_decoder.decode_superblock(row, len(own), signed=False)
            values[128 * strip : 128 * (strip + 1), own.start : own.stop] = blocks.T
            at += length
    assert at == len(codes.trellis)
    return values[: cut.rows] * factors(codes.row_scales)[:, None] * factors(codes.column_scales)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (100, 50), (130, 17), (300, 33)])
def test_page_reads_weights_of_the_errors_that_are_measured(rows: int, size: int, states: int) -> None:
    given = problem(rows, size)
    codes, measures = given.encode(states=states)
    weight, damaged = decoded(codes)
    assert damaged < 0 and np.array_equal(weight, read(codes))
    errors = given.weight.astype(np.float64) - weight
    assert near(measures.error, np.square(errors).sum(), F32_MATRIX)
    assert near(measures.energy, np.square(given.weight, dtype=np.float64).sum(), F32_FEW)
    assert near(measures.weighed_error, given.cost(weight), F32_SOLVED)


def test_strips_have_as_many_superblocks_as_their_columns_need() -> None:
    codes, _ = problem(20, 1000).encode(0.1)
    assert codes.lengths.shape == (1, 2) and codes.cut.blocks == 500
    assert np.array_equal(decoded(codes)[0], read(codes))


def test_threads_do_not_change_the_codes() -> None:
    given = problem(4500, 80)
    one, several = given.encode(threads=1), [given.encode(threads=threads) for threads in (2, 5)]
    for codes, measures in several:
        assert measures == one[1]
        for name in ("trellis", "lengths", "row_scales", "column_scales"):
            assert np.array_equal(getattr(codes, name), getattr(one[0], name))


def test_outputs_have_a_fraction_of_the_error_of_the_plain_trellis_of_as_many_bytes() -> None:
    given = problem(256, 256)
    codes, _ = given.encode(0.05)
    stored = sum(part.nbytes for part in (codes.trellis, codes.lengths, codes.row_scales, codes.column_scales))
    format = Trellis.at(8 * stored / given.weight.size, 8).sized(given.weight.size)
    rows = np.empty((-(-given.weight.size // format.block_size), format.parts[0].bytes_per_block), dtype=np.uint8)
    plain = np.empty(given.weight.nbytes, dtype=np.uint8)
    format.encode(given.weight.reshape(-1).view(np.uint8), [rows], dtype="F32")
    format.decode([rows], plain, dtype="F32")
    assert given.cost(plain.view(np.float32).reshape(given.weight.shape)) > 2 * given.cost(decoded(codes)[0])


def test_all_weights_of_a_row_count_alike_where_inputs_are_independent() -> None:
    """Then columns are searched as if each were alone, as long as lanes do not go on with what came before."""
    given = problem(200, 16)._replace(moments=np.eye(16))
    codes, _ = given.encode()
    whole = decoded(codes)[0]
    for column in range(16):
        alone = Problem(given.weight[:, column : column + 1].copy(), np.eye(1), given.gradients)
        assert np.array_equal(decoded(alone.encode()[0])[0][:, 0], whole[:, column])


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize(("rows", "size"), [(256, 384), (640, 100)])
def test_bits_are_as_expected(rows: int, size: int, bits: int) -> None:
    given = problem(rows, size)
    inputs = factorized(given.moments)
    energies, spread = scaled_energies(given.weight, inputs, gradients=given.gradients), spread_of(inputs)
    low, high = -20.0, 10.0  # log2 of the step
    for _ in range(40):
        middle = (low + high) / 2
        too_many = expected_bits(energies, spread, 2.0**middle, (rows, size)) > bits * given.weight.size
        low, high = (middle, high) if too_many else (low, middle)
    codes, _ = given.encode(2.0**high)
    found = 8 * (len(codes.trellis) + codes.lengths.nbytes)
    assert abs(found / (bits * given.weight.size) - 1) < 0.01


def test_energies_of_outputs_are_those_of_the_moments() -> None:
    given = problem(300, 70)
    expected = ((given.weight.astype(np.float64) @ given.moments) * given.weight).sum(1)
    assert each_near(output_energies(given.weight, factorized(given.moments)), expected, F32_MATRIX)


def test_many_inputs_have_moments_in_blocks_of_whole_superblocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(part.start, part.stop) for part in moment_blocks(8192)] == [(0, 8192)]
    for size in (8193, 14336, 28672, 53248):
        parts, width = moment_blocks(size), ColumnCut.of((1, size)).blocks
        assert parts[0].start == 0 and parts[-1].stop == size and len(parts) == -(-size // 8192)
        for part, after in itertools.pairwise(parts):
            assert part.stop == after.start and part.stop % width == 0 and part.stop - part.start < 8192 + 768
    monkeypatch.setattr(column_encoding, "MOST_INPUTS", 800)
    given = problem(20, 1600)
    parts = moment_blocks(1600)
    assert len(parts) == 2
    codes, measures = given.encode(0.1)
    whole = decoded(codes)[0]
    blocks = np.zeros_like(given.moments)
    for part in parts:
        blocks[part, part] = given.moments[part, part]
    assert near(measures.weighed_error, given._replace(moments=blocks).cost(whole), F32_SOLVED)
    monkeypatch.undo()
    together = decoded(given.encode(0.1)[0])[0]
    # The first block is as it would be; the second does not know of the errors of the first.
    assert given.cost(together) < given.cost(whole)


# --- special weights ---


def special(kind: str) -> dict[str, Any]:
    """A problem in which something is zero or enormous."""
    weight, moments, gradients = problem(140, 40)
    if kind == "zero weight":
        weight = np.zeros_like(weight)
    elif kind == "zero rows":
        weight[3:60] = 0
    elif kind == "zero inputs":
        moments[5:20], moments[:, 5:20] = 0, 0
    elif kind == "no inputs":
        moments[:] = 0
    elif kind == "one input":
        moments[:] = 1
    elif kind == "zero gradients":
        gradients[:70] = 0
    elif kind == "no gradients":
        gradients[:] = 0
    elif kind == "one large gradient":
        gradients[9] = 1e12
    elif kind == "one large input":
        moments[7, 7] = 1e12
    elif kind == "one large weight":
        weight[5, 5] = 1e6
    return {"weight": weight, "moments": moments, "gradients": gradients}


def encoded(
    *, moments: Doubles, step: float = 0.05, states: int = 8, **given: Any
) -> tuple[ColumnCodes, ColumnMeasures]:
    return encode_columns(inputs=InputFactors.of([moments]), step=step, states=states, **given)


KINDS = (
    *("zero weight", "zero rows", "zero inputs", "no inputs", "one input", "zero gradients", "no gradients"),
    *("one large gradient", "one large input", "one large weight"),
)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_special_weights_are_encoded(kind: str, known: bool) -> None:
    given = special(kind)
    if not known:
        given["gradients"] = None
    codes, measures = encoded(**given)
    weight, damaged = decoded(codes)
    assert damaged < 0 and np.array_equal(weight, read(codes))
    assert np.isfinite([*measures]).all()
    errors = given["weight"].astype(np.float64) - weight
    assert near(measures.error, np.square(errors).sum(), F32_SOLVED)
    if kind == "zero weight":
        assert not weight.any() and (codes.lengths == 7).all()


# --- damage ---


@examples(60)
@given(at=st.integers(0, 10_000), to=st.integers(1, 255), kind=st.sampled_from(["zero rows", "zero weight"]))
def test_damage_is_found_where_the_page_finds_it(at: int, to: int, kind: str) -> None:
    given = special(kind)
    codes, _ = encoded(**given, step=0.1)
    trellis = codes.trellis.copy()
    trellis[at % len(trellis)] ^= to
    weight, damaged = decoded(codes, trellis)
    assert np.isfinite(weight).all()
    ends = np.cumsum(codes.lengths)
    refused = []
    for number, row in enumerate(np.split(trellis, ends[:-1])):
        try:
            trellis_decoder.decode_superblock(row.tobytes(), codes.cut.columns, signed=False)
        except trellis_decoder.Damaged:
            refused.append(number)
    assert damaged == (refused[0] if refused else -1)
