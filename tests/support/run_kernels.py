"""The CPU kernels in a process of their own: digests of what they compute.

    python tests/support/run_kernels.py [KERNEL...] [--libraries FOLDER] [--runner COMMAND...]

--libraries: take the compiled kernels from there. --runner: let a program that kernel_runner.py made call them.
The digests that every processor must give are in tests/golden/kernels.json, which is what this script prints. They show
that nothing changes a bit; that the bits are right is shown by the tests that tests/references.md names.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import attention_cases
import hard_weights
import kernel_runner
import numpy as np
import numpy.typing as npt
import product_cases
import restoring_cases
import torch
import trellis_writer

from pqweights.common.dtypes import from_float32, to_float32
from pqweights.formats.lloyd_max import codebook
from pqweights.formats.master import Bytes
from pqweights.formats.trellis import STEP_POWERS, Trellis
from pqweights.formats.trellis_tables import decode_tables, encode_model
from pqweights.kernels import (
    BlockCoding,
    attention,
    compensation,
    gguf_encoding,
    groups,
    load_backend,
    lossless,
    low_rank,
    native,
    recovery,
)
from pqweights.kernels import columns as column_kernels
from pqweights.kernels.gguf_searches import SEARCHES
from pqweights.kernels.groups import BEST, FLOAT_MODES, RUNTIME_RULES, FloatRule, GroupRule, Groups
from pqweights.kernels.transform_codes import nearest, scaled_levels
from pqweights.kernels.trellis import Superblocks

Arrays = Iterator[npt.NDArray[Any]]

BLOCKS = 37  # two groups of 16, and some more
COUNTS = (1, 15, 16, 17, BLOCKS)
DTYPES = {"BF16": 2, "F16": 2, "F32": 4}


def _arrays(result: Groups) -> list[npt.NDArray[Any]]:
    return [result.codes, result.scales, result.offsets, result.energies, result.errors]


def _hard_rows(columns: int) -> npt.NDArray[np.float32]:
    """Some rows of each family; an emulator takes long for all of them."""
    return np.ascontiguousarray(hard_weights.all_families(columns)[::5])


# Below, a function for each kernel, which yields what it computes.


def add_in_order() -> Arrays:
    """Add one to three arrays of very different numbers, of which another order gives other sums."""
    rng = np.random.default_rng(25)
    summands = np.ldexp(rng.random((3, 1000)), rng.integers(-30, 30, (3, 1000)))
    for arrays in (1, 2, 3):
        totals = np.arange(arrays, dtype=np.float64)
        load_backend().add_in_order(totals, *summands[:arrays])
        yield totals


def add_low_rank() -> Arrays:
    """Add products of several ranks to rows that end within a vector; another order of sums gives others."""
    rng = np.random.default_rng(26)
    for rows, rank, columns in ((1, 1, 1), (3, 5, 17), (9, 4, 64), (17, 33, 47)):
        left, right = (rng.standard_normal(shape, dtype=np.float32) for shape in ((rows, rank), (rank, columns)))
        values = np.ldexp(rng.standard_normal((rows, columns), dtype=np.float32), rng.integers(-9, 9, (rows, columns)))
        low_rank.add_low_rank(values, left, right, 0.3)
        yield values


def encode() -> Arrays:
    """Encode with every bit width and dtype; some blocks need prescaling, one is zero, some norms are ties in F32."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((BLOCKS, 128)).astype(np.float32)
    values[5:9] *= np.float32(1e-25)
    values[20:23] *= np.float32(1e25)
    values[16] = 0
    values[24:31] = 0
    values[24:31, 40] = [hard_weights.norm_ties(codebook(bits))[0] * np.float32(2.0**90) for bits in range(2, 9)]
    halves = np.clip(values, -60000, 60000).astype(np.float16)
    words = {"BF16": (values.view(np.uint32) >> 16).astype(np.uint16), "F16": halves, "F32": values}
    for dtype, bits, blocks in itertools.product(DTYPES, range(2, 9), COUNTS):
        raw = np.ascontiguousarray(words[dtype][-blocks:]).reshape(-1).view(np.uint8)
        codes, norms = np.empty((blocks, 16 * bits), np.uint8), np.empty(blocks, np.uint16)
        coding = BlockCoding(codebook=codebook(bits), signed=bits % 2 == 0, norm_exponent=90)
        measures = load_backend().encode(raw, dtype, coding, (codes, norms))
        yield from (codes, norms, measures.energies, measures.errors)
        yield np.array([measures.smallest_norm, measures.largest_norm, measures.first_bad_block])


def decode() -> Arrays:
    """Decode random codes with norms of every size, with every bit width and dtype."""
    rng = np.random.default_rng(2)
    norms = (10.0 ** rng.uniform(-8, 4.5, BLOCKS)).astype(np.float16).view(np.uint16)
    norms[3] = 0
    for (dtype, item_bytes), bits, blocks in itertools.product(DTYPES.items(), range(2, 9), COUNTS):
        codes = rng.integers(0, 256, (blocks, 16 * bits)).astype(np.uint8)
        values = np.empty(blocks * 128 * item_bytes, np.uint8)
        coding = BlockCoding(codebook=codebook(bits), signed=bits % 2 == 0, norm_exponent=2)
        load_backend().decode((codes, norms[:blocks]), coding, dtype, values)
        yield values


def fit() -> Arrays:
    for number, size in enumerate([*range(16, groups.MOST_WEIGHTS + 1, 16), 32, 48, 64, 80, 96]):
        kind, bits = number % 3, 2 + number % 7  # 21 pairs
        rule = GroupRule(bits=bits, group_size=size, symmetric=kind == 2, middle=kind > 0, rule=BEST)
        yield from _arrays(rule.quantize(_hard_rows(size).reshape(-1)))
    for bits, (zeros, dtype) in itertools.product(range(2, 9), ((True, "BF16"), (True, "F16"), (False, "F16"))):
        rule = GroupRule(
            bits=bits,
            group_size=16 * bits,
            symmetric=not zeros,
            middle=not zeros,
            zeros=zeros,
            rule=BEST,
            scale_dtype=dtype,
        )
        yield from _arrays(rule.quantize(_hard_rows(rule.group_size).reshape(-1)))


def round_() -> Arrays:

    def values(size: int) -> npt.NDArray[np.float32]:
        most = hard_weights.LARGEST_BF16 / 4
        return hard_weights.nearest_bf16(np.clip(_hard_rows(size).reshape(-1), -most, most))

    for name, (bits, size) in itertools.product(RUNTIME_RULES, ((4, 128), (8, 32))):
        for dtype in ("BF16", "F16") if name.startswith("compressed-tensors") else ("BF16",):
            out = groups._empty_groups(values(size), size)
            groups.round_groups(values(size), out, bits=bits, rule=RUNTIME_RULES[name], scale_dtype=dtype)
            yield from _arrays(out)
    for dtype in ("BF16", "F16"):  # rows that are too long for fit_groups
        of_rows = GroupRule(bits=8, group_size=300, symmetric=True, middle=True, scale_dtype=dtype)
        yield from _arrays(of_rows.quantize(values(300)))
    for kind in FLOAT_MODES:
        size = 16 if kind == "nvfp4" else 32
        yield from _arrays(FloatRule(kind, 8 if "8" in kind else 4, size).quantize(values(size)))


def fit_floats() -> Arrays:
    """Fit groups of short floats of every mode, all columns alike and with unequal importance."""
    for kind, unit in (("mxfp4", 1.0), ("mxfp8", 1.0), ("nvfp4", 1.0), ("nvfp4", 1 / 300)):
        size = 16 if kind == "nvfp4" else 32
        rule, values = FloatRule(kind, 8 if kind == "mxfp8" else 4, size, BEST, unit), _hard_rows(4 * size)
        yield from _arrays(rule.quantize(values.reshape(-1)))
        yield from _arrays(rule.quantize_weighted(values.reshape(-1), hard_weights.importance(4 * size, unused=True)))


def encode_gguf(kernel: str) -> Arrays:
    """Encode blocks of GGUF of every type of a kernel, all columns alike and with unequal importance."""
    values = _hard_rows(512)
    for name in (name for name, search in SEARCHES.items() if search.kernel == kernel):
        for importance in (None, hard_weights.importance(512, unused=True)):
            out = gguf_encoding.encode_blocks(name, values, importance)
            yield from (out.codes, out.energies, out.errors)


def recover_blocks() -> Arrays:
    """Find blocks of every type in what they decode to, as it is stored in every dtype; others are none."""
    for name, dtype in itertools.product(recovery.RECOVERED_TYPES, DTYPES):
        blocks = gguf_encoding.encode_blocks(name, _hard_rows(512), None).codes
        yield from recovery.recover_blocks(name, _stored(gguf_encoding.decode_blocks(name, blocks), dtype), dtype)


def recover_groups() -> Arrays:
    """Find groups of every kind in what they decode to; groups of 8 bits are not all found in BF16."""
    kinds = ((True, True, False), (False, True, False), (False, False, False), (False, False, True))
    for (symmetric, middle, zeros), bits, (number, dtype) in itertools.product(kinds, (2, 4, 8), enumerate(DTYPES)):
        scale_dtype = ("BF16", "F16")[number % 2]
        rule = GroupRule(
            bits=bits, group_size=32, symmetric=symmetric, middle=middle, zeros=zeros, scale_dtype=scale_dtype
        )
        values = _stored(rule.decode(rule.quantize(_hard_rows(32).reshape(-1))), dtype)
        found, is_found = recovery.recover_groups(rule, values, dtype)
        yield from (*_arrays(found), is_found)


def _stored(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    """Values rounded as they are stored; blocks of which some are not finite then are not found."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat if dtype == "F32" else to_float32(from_float32(flat, dtype), dtype)


def rotate() -> Arrays:
    rotated = hard_weights.all_families(128).reshape(-1) * np.float32(2.0**-8)  # sums must not overflow
    groups.rotate(rotated)
    yield rotated


def _random_codes(bits: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(bits).integers(0, 1 << bits, (24, 384)).astype(np.uint8)


def pack_bits() -> Arrays:
    yield from (groups.pack_bits(_random_codes(bits), bits) for bits in range(1, 9))


def pack_tiles() -> Arrays:
    yield groups.pack_tiles(_random_codes(4))


@functools.cache
def _factor(size: int) -> compensation.MomentsFactor:
    """The factor of second moments of some channels, damped and symmetric."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((300, size)) @ (np.eye(size) + 0.05 * rng.standard_normal((size, size)))
    lower = np.tril((x.T @ x / 300 + 0.01 * np.eye(size)).astype(np.float16).astype(np.float32))
    moments, matrix = lower + np.tril(lower, -1).T, compensation.empty_matrix(size)
    diagonal, matrix[:, :size] = np.diag(moments).copy(), moments
    assert compensation.factorize(matrix, diagonal, 0.0) is not None
    return compensation.MomentsFactor(order=np.arange(size), matrix=matrix, diagonal=diagonal)


def factor() -> Arrays:
    yield from (_factor(size).matrix for size in (16, 48, 64, 160))


def compensate() -> Arrays:
    for size, repeats, kind in ((64, 2, 0), (160, 0, 0), (160, 2, 0), (160, 2, 4), (160, 2, 8), (160, 2, 16)):
        rng = np.random.default_rng(12)
        weights = groups.Tiles.of(rng.standard_normal((70, size)).astype(np.float32))
        scales, offsets = (np.float32(0.3) + rng.random((2, 70, size // 32))).astype(np.float32)
        numbers = (groups.Tiles.of(scales, 1.0).values, groups.Tiles.of(offsets).values)
        columns = np.arange(size) // 32
        results = compensation.round_tiles(
            weights.values, numbers, columns, _factor(size), codes=(-8, 7), kind=kind, repeats=repeats
        )
        yield from (groups.Tiles(each, 70).rows_of() for each in results)


def output_errors() -> Arrays:
    rng = np.random.default_rng(13)
    errors, inputs = (rng.standard_normal((rows, 64)).astype(np.float32) for rows in (70, 24))
    yield compensation.output_errors(groups.Tiles.of(errors), inputs)


def fit_by_importance() -> Arrays:
    """Fit scales and offsets of 70 rows of two groups, with some columns that hardly count."""
    rng = np.random.default_rng(14)
    weights, importance = rng.standard_normal((70, 64)).astype(np.float32), np.ones(64, dtype=np.float32)
    weights[:, ::9] *= np.float32(10)
    importance[::9] = np.float32(1e-3)
    for kind, dtype in (("affine", "BF16"), ("symmetric", "BF16"), ("symmetric", "F16"), ("asymmetric", "F16")):
        zeros = kind == "asymmetric"
        rule = GroupRule(
            bits=4,
            group_size=32,
            symmetric=kind == "symmetric",
            middle=not zeros,
            zeros=zeros,
            rule=BEST,
            scale_dtype=dtype,
        )
        given = (rule.quantize(weights.reshape(-1)), rule, importance, np.arange(64))
        yield from (each.rows_of() for each in groups.fit_by_importance(groups.Tiles.of(weights), *given))


def trellis_settings(number: int) -> dict[str, Any]:
    """Settings of a case: all combinations in turns."""
    return {"rotation": ("hadamard", "signed-hadamard")[number % 2], "step_power": STEP_POWERS[number // 2 % 2]}


def encode_trellis() -> Arrays:
    """Encode with every number of states: norms of every size, blocks of padding, a sparse and a constant one."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((BLOCKS, 128)).astype(np.float32)
    values[3:20] *= np.exp2(rng.uniform(-30, 30, (17, 1))).astype(np.float32)
    values[7], values[8, 1:], values[9], values[-5:] = 0, 0, 0.0125, 0
    for states in Trellis.efforts:
        plain = np.random.default_rng(states).standard_normal((BLOCKS, 128)).astype(np.float32)
        words = (plain.view(np.uint32) >> 16).astype(np.uint16)
        cases: list[tuple[str, float, npt.NDArray[Any]]] = [("F32", rate, values) for rate in (2.125, 4.38, 8.0)]
        cases += [("BF16", 1.5, words), ("F16", 3.1, plain.astype(np.float16))]
        cases += [("F32", 5.0, plain[:1] * np.float32(1e-30))]
        for number, (dtype, rate, weights) in enumerate(cases):
            raw: Bytes = np.ascontiguousarray(weights).reshape(-1).view(np.uint8)
            format = replace(Trellis.at(rate, states), **trellis_settings(number)).sized(len(raw) // DTYPES[dtype])
            rows = np.full((1, format.parts[0].bytes_per_block), 0xAB, dtype=np.uint8)
            measures = format.encode(raw, [rows], dtype=dtype)
            yield from (rows, measures.energies, measures.errors)


# Blocks, and what trellis_writer.superblock takes: each trellis, each table, classes beyond the last, enormous steps.
TRELLIS_SUPERBLOCKS: list[tuple[int, dict[str, Any]]] = [
    (5, {"step": 1e-40, "state_bits": 2, "first": 0, "frequencies": [100, 0, 156]}),
    (37, {"step": 0.013, "state_bits": 3, "first": 0, "frequencies": [22] + [6] * 39}),
    (16, {"step": 3e38, "state_bits": 4, "first": 30, "frequencies": [128, 100, 28], "unused": 3}),
    (17, {"step": 1.0, "state_bits": 5, "first": 1, "frequencies": [1, 255]}),
    (15, {"step": 1e-9, "state_bits": 6, "first": 36, "frequencies": [32] * 8}),
    (1, {"step": 1e-30, "state_bits": 7, "first": 255, "unused": 40}),
    (18, {"step": 2e-5, "state_bits": 8, "first": 20, "frequencies": [12, 244]}),
    (3, {"step": 3.4e38, "state_bits": 3, "first": 200}),
]


def decode_trellis() -> Arrays:
    """Decode superblocks of every kind to every dtype, in both rotations."""
    for number, (blocks, kind) in enumerate(TRELLIS_SUPERBLOCKS):
        row = np.frombuffer(trellis_writer.superblock(np.random.default_rng(number), blocks, **kind), np.uint8)
        format = Trellis(bits=1.0, cut=Superblocks(2, blocks, len(row)), **trellis_settings(number))
        for dtype, size in DTYPES.items():
            values = np.empty(2 * blocks * 128 * size, dtype=np.uint8)
            format.decode([np.stack([row, row])], values, dtype=dtype)
            yield values


# Columns of the cases below: two superblocks, of more than a tile each.
COLUMNS, OF_FIRST = 37, 20


def _strip_rows(count: int) -> npt.NDArray[np.float32]:
    """Rows of weights in steps: normal ones, zeros, enormous ones, single ones among zeros."""
    rng = np.random.default_rng(41)
    rows = rng.standard_normal((count, COLUMNS)).astype(np.float32) * np.float32(4)
    rows[:, 3], rows[128:256], rows[384:512, 5:9] = 0, 0, 1e-3
    rows[512:640] *= np.exp2(rng.uniform(-8, 60, COLUMNS)).astype(np.float32)
    rows[640:768], rows[640:768:50] = 0, 300
    return rows


def load_columns() -> Arrays:
    """Scale and rotate rows of whole and of partial strips."""
    rng = np.random.default_rng(40)
    for count in (1, 100, 900):
        factors = np.exp2(rng.uniform(-8, 8, COLUMNS)).astype(np.float32)
        yield column_kernels.load(
            _strip_rows(900)[:count], np.exp2(rng.uniform(-8, 8, count)).astype(np.float32), factors
        )


def _searched_columns(states: int) -> Iterator[tuple[npt.NDArray[np.float32], column_kernels.ColumnNumbers]]:
    """What is found for two superblocks of strips, and the errors after it, with columns that depend on each other."""
    feedback = column_kernels.feedback_room(COLUMNS)
    feedback[:COLUMNS] = np.tril(np.random.default_rng(states).uniform(-0.5, 0.5, (COLUMNS, COLUMNS)), -1)
    weights = np.exp2(np.arange(2 * COLUMNS).reshape(COLUMNS, 2) % 5).astype(np.float32)
    group = column_kernels.load(_strip_rows(900), np.ones(900, np.float32), np.ones(COLUMNS, np.float32))
    for own in (range(OF_FIRST), range(OF_FIRST, COLUMNS)):
        (found,) = column_kernels.search(
            group,
            own,
            feedback,
            weights=weights[own.start : own.stop],
            model=encode_model(),
            states=states,
            step=1 + states / 300,
        )
        yield group, found


def feed_back_columns() -> Arrays:
    """Feed the errors of no, few and many columns back to runs of several lengths, of two groups."""
    rng, size = np.random.default_rng(41), 70
    feedback = column_kernels.feedback_room(size)
    feedback[:size] = rng.uniform(-1, 1, (size, size))
    groups = rng.standard_normal((2, 32, size, 64), dtype=np.float32)
    for first, count in ((0, 64), (6, 64), (37, 5)):
        sums = np.empty((2, 32, 64, 64), dtype=np.float32)
        native.call(
            "feed_back_columns",
            native.counter(),
            native.array(feedback, np.float32, feedback.size),
            native.array(groups, np.float32, groups.size),
            native.array(sums, np.float32, sums.size, written=True),
            *(2, size, first, count),
        )
        yield sums


def search_columns() -> Arrays:
    """Find the numbers of columns with every number of states."""
    for states in Trellis.efforts:
        for group, found in _searched_columns(states):
            yield from (found.numbers, found.classes, found.squares, group)


def pack_columns() -> Arrays:
    """Pack what was found with every number of states."""
    for states in Trellis.efforts:
        for _, found in _searched_columns(states):
            yield from column_kernels.pack(found, strips=9, model=encode_model(), states=states, step=0.01)


def decode_columns() -> Arrays:
    """Decode strips of superblocks of every kind, one of which is of zeros, to every dtype."""
    for number, (blocks, kind) in enumerate(TRELLIS_SUPERBLOCKS):
        rng = np.random.default_rng(number)
        rows = [trellis_writer.superblock(rng, blocks, **kind) for _ in range(5)]
        superblocks = [*rows, bytes(7)] if blocks > 1 else rows[:3]
        lengths = np.array([len(row) for row in superblocks], dtype=np.int32).reshape(3, -1)
        for dtype, size in DTYPES.items():
            row_factors = np.exp2(rng.uniform(-8, 8, 300)).astype(np.float32)
            column_factors = np.exp2(rng.uniform(-8, 8, blocks * lengths.shape[1])).astype(np.float32)
            values = np.empty(300 * len(column_factors) * size, dtype=np.uint8)
            column_kernels.decode(
                np.frombuffer(b"".join(superblocks), np.uint8),
                lengths,
                values,
                dtype,
                blocks=blocks,
                row_factors=row_factors,
                column_factors=column_factors,
                tables=decode_tables(),
            )
            yield values


def _lossless_items(width: int) -> npt.NDArray[np.uint8]:
    """Items of two chunks: exponents as of weights, and noise."""
    rng = np.random.default_rng(width)
    exponents = 120 - rng.geometric(0.4, 70_000)
    noise = rng.integers(0, 256, (70_000, width))
    noise[:, -1] = exponents
    noise[65_536:67_000, -1] = 7
    return noise.astype(np.uint8).reshape(-1)


def encode_lossless() -> Arrays:
    """Code items of every width, also too few to fill the states."""
    for width, count in itertools.product(lossless.WIDTHS, (33, 5000, 70_000)):
        yield from lossless.encode(_lossless_items(width)[: count * width], width)


def decode_lossless() -> Arrays:
    """Decode what the encoder made, and the same with bytes that no encoder writes."""
    for width, count in itertools.product(lossless.WIDTHS, (5000, 70_000)):
        stream, lengths = lossless.encode(_lossless_items(width)[: count * width], width)
        stream, values = stream.copy(), np.zeros(count * width, dtype=np.uint8)
        yield np.array(lossless.decode(stream, lengths, values, width))
        yield values
        stream[1000] ^= 64
        yield np.array(lossless.decode(stream, lengths, values, width))


def prepare() -> Arrays:
    """Rotate inputs and make integers of them, with and without signs and scales."""
    for bits, rows, dtype in itertools.product((4, 5), (2, 3), ("BF16", "F16")):
        yield from product_cases.prepared_integers(product_cases.make_case(bits, dtype, rows))


def prepare_f32() -> Arrays:
    for bits, rows in itertools.product((4, 5), (2, 3)):
        yield product_cases.prepared_floats(product_cases.make_case(bits, "F32", rows))


# Transform codes of all widths.
TRANSFORM_RUNS = [(24, bits) for bits in range(8, 0, -1)]


def restore_levels() -> Arrays:
    """Levels of transform codes of 20 vectors of two heads."""
    rng = np.random.default_rng(15)
    codes = rng.integers(0, 256, (1, 2, 20, 3 * sum(range(9)))).astype(np.uint8)
    factors = rng.lognormal(size=(1, 2, 20)).astype(np.float16)
    tables = restoring_cases.code_tables_of_all()
    yield scaled_levels(torch.from_numpy(codes), torch.from_numpy(factors), TRANSFORM_RUNS, tables).numpy()


def nearest_levels() -> Arrays:
    values = np.random.default_rng(16).standard_normal((40, 8 * 24)).astype(np.float32)
    made = nearest(torch.from_numpy(values), TRANSFORM_RUNS, restoring_cases.code_tables_of_all())
    yield from (tensor.numpy() for tensor in made)


# Sums in an order of each processor's own: the errors in multiples of what they may be.


def product(dtypes: Sequence[str]) -> Iterator[float]:
    for width, dtype, rows in itertools.product(range(2, 9), dtypes, (1, 7)):
        yield product_cases.excess(product_cases.make_case(width, dtype, rows))


def polar_scores() -> Iterator[float]:
    for widths, rows in itertools.product(attention.POLAR_WIDTHS, (1, 7)):
        case = attention_cases.polar_case(widths, rows, halves=rows < 4)
        yield attention_cases.excess(attention_cases.polar_scores(case), attention_cases.polar_exact(case))


def token_wise(kernel: str) -> Iterator[float]:
    cases = [(bits, rows, size, 83) for bits, rows, size in itertools.product(range(2, 9), (1, 6), (96, 128))]
    for bits, rows, size, tokens in [*cases, (4, 1, 32, attention.VALUE_TILE + 7)]:
        case = attention_cases.token_case(bits, rows, size=size, tokens=tokens)
        if kernel == "hadamard_scores":
            yield attention_cases.excess(attention_cases.hadamard_scores(case), attention_cases.scores_exact(case))
        else:
            yield attention_cases.excess(attention_cases.value_sums(case), attention_cases.sums_exact(case))


KERNELS: dict[str, Callable[[], Arrays]] = {
    "add_in_order": add_in_order,
    "add_low_rank": add_low_rank,
    "encode": encode,
    "decode": decode,
    "fit": fit,
    "round": round_,
    "fit_floats": fit_floats,
    "encode_gguf_symmetric": lambda: encode_gguf("encode_gguf_symmetric"),
    "encode_gguf_affine": lambda: encode_gguf("encode_gguf_affine"),
    "encode_gguf_grids": lambda: encode_gguf("encode_gguf_grids"),
    "recover_blocks": recover_blocks,
    "recover_groups": recover_groups,
    "rotate": rotate,
    "pack_bits": pack_bits,
    "pack_tiles": pack_tiles,
    "factor": factor,
    "compensate": compensate,
    "output_errors": output_errors,
    "fit_by_importance": fit_by_importance,
    "encode_trellis": encode_trellis,
    "decode_trellis": decode_trellis,
    "load_columns": load_columns,
    "feed_back_columns": feed_back_columns,
    "search_columns": search_columns,
    "pack_columns": pack_columns,
    "decode_columns": decode_columns,
    "encode_lossless": encode_lossless,
    "decode_lossless": decode_lossless,
    "prepare": prepare,
    "prepare_f32": prepare_f32,
    "restore_levels": restore_levels,
    "nearest_levels": nearest_levels,
}
BOUNDED: dict[str, Callable[[], Iterator[float]]] = {
    "product": lambda: product(["BF16", "F16"]),
    "product_f32": lambda: product(["F32"]),
    "polar_scores": polar_scores,
    "weighted_values": lambda: token_wise("weighted_values"),
    "hadamard_scores": lambda: token_wise("hadamard_scores"),
}


def digest(kernel: str) -> str:
    """The digest of what a kernel computes; of sums in an order of its own, whether the bound is kept."""
    if kernel in BOUNDED:
        most = max(BOUNDED[kernel]())
        return "within the bound" if most <= 1 else f"{most} times the bound"
    return hashlib.sha256(b"".join(array.tobytes() for array in KERNELS[kernel]())).hexdigest()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--libraries", type=Path)
    parser.add_argument("--runner", nargs="+")
    arguments = parser.parse_args()
    native.LIBRARIES = arguments.libraries or native.LIBRARIES
    elsewhere = kernel_runner.running(arguments.runner) if arguments.runner else contextlib.nullcontext()
    with elsewhere:
        digests = {kernel: digest(kernel) for kernel in arguments.kernels or [*KERNELS, *BOUNDED]}
    print(json.dumps({"level": native.level(), "digests": digests}, indent=2))


if __name__ == "__main__":
    _main()
