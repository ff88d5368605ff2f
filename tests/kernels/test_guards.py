"""What kernels have no room for is refused before they run, also by a Python that leaves out assertions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pqweights.formats.lloyd_max import codebook
from pqweights.formats.trellis_tables import decode_tables, encode_model
from pqweights.kernels import BlockCoding, codebook_from_levels, columns, load_backend, trellis
from pqweights.kernels.groups import FloatRule, GroupRule, Groups, fit_groups, round_groups
from pqweights.kernels.products import InputBasis, PreparedInputs, Product


def empty_groups(groups: int, size: int) -> Groups:
    numbers = [np.empty(groups, dtype=dtype) for dtype in (np.float32, np.float32, np.float64, np.float64)]
    codes = np.empty((groups, size), dtype=np.uint8)
    return Groups(codes=codes, scales=numbers[0], offsets=numbers[1], energies=numbers[2], errors=numbers[3])


def fit(size: int, bits: int) -> None:
    fit_groups(np.ones(2 * size, dtype=np.float32), empty_groups(2, size), replace(BEST, bits=bits))


def round_as(bits: int, size: int) -> None:
    round_groups(np.ones(2 * size, dtype=np.float32), empty_groups(2, size), bits=bits, rule=1)


def product(
    *, rows: int = 2, inputs: int = 256, norms: int = 6, scales: int = 0, room: int = 3, column: int = 0
) -> None:
    """Multiply a weight of 3 rows and 256 columns."""
    coding = BlockCoding(codebook=codebook(4))
    codes, found = np.zeros((6, 64), dtype=np.uint8), np.zeros(norms, dtype=np.uint16)
    made = Product(codes[:norms], found, coding, outputs=3, dtype="F32")
    prepared, x = PreparedInputs(), np.zeros((rows, inputs), dtype=np.float32)
    basis = InputBasis(made.basis.signed, bytes(4 * scales))
    prepared.prepare(x, dtype="F32", basis=basis)
    out = np.zeros((rows, room), dtype=np.float32)
    made.multiply(prepared, out=out, column=column, bias=None, factor=1.0, threads=1)


def product_in_another_basis() -> None:
    codes, norms = np.zeros((6, 64), dtype=np.uint8), np.zeros(6, dtype=np.uint16)
    made = Product(codes, norms, BlockCoding(codebook=codebook(4)), outputs=3, dtype="F32")
    prepared, x = PreparedInputs(), np.zeros((1, 256), dtype=np.float32)
    prepared.prepare(x, dtype="F32", basis=InputBasis(True, b""))
    made.multiply(prepared, out=x, bias=None, factor=1.0, threads=1)


def encode_superblocks(blocks: int, stride: int = 9000) -> None:
    values, rows = np.zeros(blocks * 128 * 4, dtype=np.uint8), np.zeros((1, stride), dtype=np.uint8)
    cut = trellis.Superblocks(1, blocks, stride)
    trellis.encode(values, "F32", cut=cut, states=8, signed=False, gained=False, model=encode_model(0.5), rows=rows)


def decode_superblocks(blocks: int, stride: int) -> None:
    values, rows = np.zeros(blocks * 128 * 4, dtype=np.uint8), np.zeros((1, stride), dtype=np.uint8)
    cut = trellis.Superblocks(1, blocks, stride)
    trellis.decode(rows, values, "F32", cut=cut, signed=False, tables=decode_tables(0.5))


def load_columns(rows: int) -> None:
    columns.load(np.zeros((rows, 2), np.float32), np.ones(rows, np.float32), np.ones(2, np.float32))


def search_columns(
    *, size: int = 2, own: range = range(2), weights: int = 2, states: int = 8, step: float = 1.0
) -> None:
    group, feedback = np.zeros((1, 32, size, 64), dtype=np.float32), columns.feedback_room(2)
    factors = np.ones((weights, 2), dtype=np.float32)
    columns.search(group, own, feedback, weights=factors, model=encode_model(), states=states, step=step)


def pack_columns(blocks: int, strips: int = 16) -> None:
    numbers, classes = np.zeros((blocks, 128, 16), dtype=np.int16), np.zeros((blocks, 16), dtype=np.uint8)
    found = columns.ColumnNumbers(numbers=numbers, classes=classes, squares=np.zeros((2, 128, 16), np.float32))
    columns.pack(found, strips=strips, model=encode_model(), states=8, step=1.0)


def decode_columns(*, lengths: list[list[int]], blocks: int = 2, rows: int = 1, room: int = 8) -> None:
    """Decode superblocks of zeros, four columns."""
    columns.decode(
        np.zeros(14, np.uint8),
        np.array(lengths, np.int32),
        np.zeros(room, np.uint8),
        "BF16",
        blocks=blocks,
        row_factors=np.ones(rows, np.float32),
        column_factors=np.ones(4, np.float32),
        tables=decode_tables(),
    )


def encode_with_levels(levels: list[float]) -> None:
    coding = BlockCoding(codebook=codebook_from_levels(2, np.array(levels, dtype=np.float32)))
    encoded = np.zeros((1, 32), dtype=np.uint8), np.zeros(1, dtype=np.uint16)
    load_backend().encode(np.ones(128, dtype=np.float32).view(np.uint8), "F32", coding, encoded)


def quantized(rule: GroupRule | FloatRule, weights: int) -> None:
    rule.quantize(np.ones(weights, dtype=np.float32))


BEST = GroupRule(bits=4, group_size=32, symmetric=False, middle=False, rule="best")
REFUSED: dict[str, Callable[[], Any]] = {
    "groups larger than the kernel's room": lambda: fit(272, 4),
    "groups that 16 does not divide": lambda: fit(24, 4),
    "groups of nothing": lambda: fit(0, 4),
    "codes of 9 bits": lambda: fit(32, 9),
    "codes of 1 bit": lambda: fit(32, 1),
    "runtime's codes of 9 bits": lambda: round_as(9, 32),
    "runtime's groups of nothing": lambda: round_as(4, 0),
    "weights that end within a group": lambda: quantized(BEST, 33),
    "weights that end within a floating group": lambda: quantized(FloatRule("mxfp8", 8, 32), 63),
    "more rows of inputs than a product takes": lambda: product(rows=17),
    "no row of inputs": lambda: product(rows=0),
    "inputs of fewer columns than the weight": lambda: product(inputs=128),
    "inputs of no whole blocks": lambda: product(inputs=200),
    "fewer scales than columns": lambda: product(scales=128),
    "rows of no whole blocks": lambda: product(norms=5),
    "inputs in another basis": product_in_another_basis,
    "fewer outputs than rows of the weight": lambda: product(room=2),
    "outputs beyond the last column": lambda: product(room=4, column=2),
    "outputs before the first column": lambda: product(room=4, column=-1),
    "superblocks larger than the encoder's room": lambda: encode_superblocks(1025, 20_000),
    "superblocks of nothing": lambda: encode_superblocks(0),
    "superblocks shorter than a header": lambda: encode_superblocks(4, 6),
    "no rows": lambda: load_columns(0),
    "columns beyond the last": lambda: search_columns(own=range(1, 3)),
    "no columns": lambda: search_columns(own=range(1, 1)),
    "feedback of fewer columns": lambda: search_columns(size=3),
    "weights of fewer columns": lambda: search_columns(weights=1),
    "states for which there is no search": lambda: search_columns(states=16),
    "a step beyond 2": lambda: search_columns(step=2.5),
    "more columns than a superblock has": lambda: pack_columns(1025),
    "no columns to pack": lambda: pack_columns(0),
    "more strips than a group has": lambda: pack_columns(2, 17),
    "lengths that do not add up": lambda: decode_columns(lengths=[[7, 8]]),
    "a superblock shorter than its header": lambda: decode_columns(lengths=[[8, 6]]),
    "superblocks of too few columns": lambda: decode_columns(lengths=[[14]]),
    "strips without rows": lambda: decode_columns(lengths=[[7], [7]], blocks=4),
    "values without room": lambda: decode_columns(lengths=[[7, 7]], room=6),
    "levels that are not symmetric": lambda: encode_with_levels([-1.0, 0.0, 1.0, 2.0]),
}
ALLOWED: dict[str, Callable[[], Any]] = {
    "groups": lambda: fit(256, 8),
    "runtime's groups": lambda: round_as(4, 64),
    "whole groups": lambda: quantized(BEST, 64),
    "rows of inputs": lambda: product(rows=16),
    "outputs among others": lambda: product(room=5, column=2),
    "superblocks": lambda: encode_superblocks(1024, 20_000),
    "superblocks to decode": lambda: decode_superblocks(4, 100),
    "rows of more than one group": lambda: load_columns(2049),
    "columns": search_columns,
    "columns to pack": lambda: pack_columns(1024),
    "columns to decode": lambda: decode_columns(lengths=[[7, 7]]),
    "levels": lambda: encode_with_levels([-1.5, -0.5, 0.5, 1.5]),
}


def outcomes() -> str:
    """Return what each call raises, a line each."""
    lines = []
    for name, call in [*REFUSED.items(), *ALLOWED.items()]:
        try:
            call()
        except Exception as error:
            lines.append(f"{name}: {type(error).__name__}")
        else:
            lines.append(f"{name}: passed")
    return "\n".join(lines)


EXPECTED = "\n".join([*(f"{name}: ValueError" for name in REFUSED), *(f"{name}: passed" for name in ALLOWED)])


def test_what_kernels_have_no_room_for_is_a_value_error() -> None:
    """In a process of its own, which the kernels could end, without assertions."""
    run = [sys.executable, "-OO", "-c", "import test_guards; print(test_guards.outcomes())"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, EXPECTED), done.stderr
