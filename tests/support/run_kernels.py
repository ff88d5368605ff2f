"""The CPU kernels in a process of their own: digests of what they compute.

    python tests/support/run_kernels.py KERNEL... [--libraries FOLDER] [--runner COMMAND...]

--libraries: take the compiled kernels from there. --runner: let a program that kernel_runner.py made call them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attention_cases
import compensation_reference
import gguf_affine_reference
import gguf_symmetric_reference
import groups_reference
import independent_reader
import kernel_runner
import numpy as np
import numpy.typing as npt
import product_cases
import restoring_cases
import scalar
import trellis_decoder
import trellis_writer

from pqweights.codecs.hadamard_trellis import HadamardTrellis, TrellisCoder
from pqweights.codecs.lloyd_max import codebook
from pqweights.codecs.protocol import Bytes
from pqweights.codecs.scalar import RotatedState
from pqweights.kernels import (
    BlockCoding,
    EncodedArrays,
    compensation,
    factors,
    gguf_encoding,
    groups,
    load_backend,
    native,
)
from pqweights.kernels.attention import POLAR_WIDTHS
from pqweights.kernels.gguf_searches import SEARCHES
from pqweights.kernels.groups import BEST, FLOAT_MODES, RUNTIME_RULES, FloatRule, GroupRule, Groups
from pqweights.kernels.trellis import Superblocks

BLOCKS = 37  # two groups of 16, and some more
DTYPES = {"BF16": 2, "F16": 2, "F32": 4}


def _digest(*arrays: npt.NDArray[Any]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def _arrays(result: Groups | groups_reference.Fitted) -> list[npt.NDArray[Any]]:
    return [result.codes, result.scales, result.offsets, result.energies, result.errors]


# Below, a function for each kernel: the digest of what it computes, or of what the reference does.


def encode_digest(backend: str) -> str:
    """Encode with every bit width and dtype; some blocks need prescaling, one is zero, some norms are ties in F32."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((BLOCKS, 128)).astype(np.float32)
    values[5:9] *= np.float32(1e-25)
    values[20:23] *= np.float32(1e25)
    values[16] = 0
    values[24:31] = 0
    values[24:31, 40] = [scalar.norm_ties(codebook(bits))[0] * np.float32(2.0**90) for bits in range(2, 9)]
    halves = np.clip(values, -60000, 60000).astype(np.float16)
    words = {"BF16": (values.view(np.uint32) >> 16).astype(np.uint16), "F16": halves, "F32": values}
    found: list[npt.NDArray[Any]] = []
    for dtype in DTYPES:
        raw = np.ascontiguousarray(words[dtype]).reshape(-1).view(np.uint8)
        for bits in range(2, 9):
            codes, norms = np.empty((BLOCKS, 16 * bits), np.uint8), np.empty(BLOCKS, np.uint16)
            out = EncodedArrays(codes, norms, np.empty(BLOCKS), np.empty(BLOCKS))
            coding = BlockCoding(codebook=codebook(bits), signed=bits % 2 == 0, norm_exponent=90)
            stats = load_backend(backend).encode(raw, dtype, coding, out)
            found += [*out, np.array([stats.smallest_norm, stats.largest_norm, stats.first_bad_block])]
    return _digest(*found)


def decode_digest(backend: str) -> str:
    """Decode random codes with norms of every size, with every bit width and dtype."""
    rng = np.random.default_rng(2)
    norms = (10.0 ** rng.uniform(-8, 4.5, BLOCKS)).astype(np.float16).view(np.uint16)
    norms[3] = 0
    found = []
    for dtype, item_bytes in DTYPES.items():
        for bits in range(2, 9):
            codes = rng.integers(0, 256, (BLOCKS, 16 * bits)).astype(np.uint8)
            values = np.empty(BLOCKS * 128 * item_bytes, np.uint8)
            coding = BlockCoding(codebook=codebook(bits), signed=bits % 2 == 0, norm_exponent=2)
            load_backend(backend).decode((codes, norms), coding, dtype, values)
            found.append(values)
    return _digest(*found)


def some_groups(size: int) -> npt.NDArray[np.float32]:
    """37 groups, which are not a multiple of 16: of every scale, of zeros, and constant ones."""
    rng = np.random.default_rng(size)
    values = rng.standard_normal((37, size)).astype(np.float32)
    values[3:30] *= (10.0 ** rng.uniform(-38, 37, (27, 1))).astype(np.float32)
    values[5] = np.float32(2.0**-149) * np.arange(size, dtype=np.float32)
    values[7], values[20], values[36] = 0, -0.0125, np.float32(3.4028234663852886e38)
    return values.reshape(-1)


def fit_digest(backend: str) -> str:
    """Fit groups with every bit width, kind of rule and group size."""
    found: list[npt.NDArray[Any]] = []
    for bits in range(2, 9):
        for kind, size in enumerate(((16, 48, 256)[bits % 3], 128, 32)):
            symmetric, middle, values = kind == 2, kind > 0, some_groups(size)
            if backend == "reference":
                settings = groups._settings(symmetric, bits, size)
                truth = groups_reference.fit(values, settings, groups_reference.Rule(size, bits, symmetric, middle))
                found += _arrays(truth)
            else:
                rule = GroupRule(bits=bits, group_size=size, symmetric=symmetric, middle=middle, rule=BEST)
                found += _arrays(rule.quantize(values))
    return _digest(*found)


def round_digest(backend: str) -> str:
    """Fit groups by every rule and floating mode; there is no reference, test_groups.py compares with the runtimes."""
    found: list[npt.NDArray[Any]] = []
    most = groups_reference.LARGEST_BF16 / 4
    for name in RUNTIME_RULES:
        for bits, size in ((4, 128), (8, 32)):
            symmetric, middle = name == "compressed-tensors", name != "mlx"
            rule = GroupRule(bits=bits, group_size=size, symmetric=symmetric, middle=middle, rule=name)
            found += _arrays(rule.quantize(groups_reference.bf16(np.clip(some_groups(size), -most, most))))
    for kind in FLOAT_MODES:
        size = 16 if kind == "nvfp4" else 32
        floating = FloatRule(kind, 8 if kind == "mxfp8" else 4, size)
        found += _arrays(floating.quantize(groups_reference.bf16(some_groups(size))))
    return _digest(*found)


def encode_gguf_symmetric_digest(backend: str) -> str:
    """Encode blocks of GGUF without offsets of every type, all columns alike and with unequal importance."""
    found: list[npt.NDArray[Any]] = []
    values = some_groups(512).reshape(37, 512)
    for name in gguf_symmetric_reference.LAYOUTS:
        for importance in (None, np.exp(np.random.default_rng(4).standard_normal(512)).astype(np.float32)):
            if backend == "reference":
                factors = None if importance is None else gguf_encoding.normalized_importance(importance, 512)
                found += gguf_symmetric_reference.encode(name, values, factors)
            else:
                out = gguf_encoding.encode_blocks(name, values, importance)
                found += [out.data, out.energies, out.errors]
    return _digest(*found)


def rotate_digest(backend: str) -> str:
    """Rotate blocks of 128 weights."""
    values = some_groups(128)[: 30 * 128] * np.float32(2.0**-20)
    if backend != "reference":
        groups.rotate(values)
        return _digest(values)
    h = 1
    while h < 128:
        pairs = values.reshape(-1, 2, h)
        values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        h *= 2
    return _digest(values * np.float32(0.08838834764831845))


def _random_codes(bits: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(bits).integers(0, 1 << bits, (24, 384)).astype(np.uint8)


def pack_bits_digest(backend: str) -> str:
    """Pack codes of every bit width."""
    pack = groups_reference.pack_bits if backend == "reference" else groups.pack_bits
    return _digest(*(pack(_random_codes(bits), bits) for bits in range(1, 9)))


def pack_tiles_digest(backend: str) -> str:
    """Pack three by three tiles."""
    pack = groups_reference.pack_tiles if backend == "reference" else groups.pack_tiles
    return _digest(pack(_random_codes(4)))


@functools.cache
def _moments() -> npt.NDArray[np.float32]:
    """Second moments of 64 channels, damped and symmetric."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((300, 64)) @ (np.eye(64) + 0.05 * rng.standard_normal((64, 64)))
    lower = np.tril((x.T @ x / 300 + 0.01 * np.eye(64)).astype(np.float16).astype(np.float32))
    return lower + np.tril(lower, -1).T


def _factor(backend: str) -> compensation.MomentsFactor:
    diagonal = np.diag(_moments()).copy()
    matrix = compensation.empty_matrix(64)
    if backend == "reference":
        matrix[:, :64] = compensation_reference.factor(_moments())
    else:
        matrix[:, :64] = _moments()
        assert compensation.factorize(matrix, diagonal, 0.0) is not None
    return compensation.MomentsFactor(order=np.arange(64), matrix=matrix, diagonal=diagonal)


def factor_digest(backend: str) -> str:
    """Factorize second moments."""
    return _digest(_factor(backend).matrix)


def compensate_digest(backend: str) -> str:
    """Round 70 rows of 64 columns, in groups of 32."""
    rng = np.random.default_rng(12)
    weights = rng.standard_normal((70, 64)).astype(np.float32)
    scales, offsets = (np.float32(0.3) + rng.random((2, 70, 2))).astype(np.float32)
    factor, group_of = _factor("reference"), np.arange(64) // 32
    if backend == "reference":
        found = compensation_reference.compensated(
            factor.matrix[:, :64], factor.diagonal, weights.T, scales.T, offsets.T, group_of, (-8, 7), 2
        )
        return _digest(*(np.ascontiguousarray(each.T) for each in found))
    numbers = (compensation.Tiles.of(scales, 1.0).values, compensation.Tiles.of(offsets).values)
    tiles = compensation.Tiles.of(weights).values
    results = compensation.round_tiles(tiles, numbers, group_of, factor, codes=(-8, 7))
    return _digest(*(compensation.Tiles(each, 70).rows_of() for each in results))


def output_errors_digest(backend: str) -> str:
    """Multiply errors by inputs, and add up the squares."""
    rng = np.random.default_rng(13)
    errors, inputs = (rng.standard_normal((rows, 64)).astype(np.float32) for rows in (70, 24))
    if backend == "reference":
        return _digest(compensation_reference.output_errors(errors, inputs))
    return _digest(compensation.output_errors(compensation.Tiles.of(errors), inputs))


def fit_by_importance_digest(backend: str) -> str:
    """Fit scales and offsets of 70 rows of two groups, with some columns that hardly count."""
    rng = np.random.default_rng(14)
    weights, importance = rng.standard_normal((70, 64)).astype(np.float32), np.ones(64, dtype=np.float32)
    weights[:, ::9] *= np.float32(10)
    importance[::9] = np.float32(1e-3)
    factor = compensation.MomentsFactor(order=np.arange(64), matrix=compensation.empty_matrix(64), diagonal=importance)
    found = []
    for symmetric in (False, True):
        rule = GroupRule(bits=4, group_size=32, symmetric=symmetric, middle=True, rule=BEST)
        start = rule.quantize(weights.reshape(-1))
        scales, offsets = start.scales.reshape(70, 2), start.offsets.reshape(70, 2)
        if backend == "reference":
            found += compensation_reference.fitted(weights, importance, scales, offsets, (-8, 7), symmetric)
            continue
        tiles = (compensation.Tiles.of(scales, 1.0), compensation.Tiles.of(offsets))
        compensation.fit_by_importance(compensation.Tiles.of(weights), tiles, rule, factor, (-8, 7))
        found += [each.rows_of() for each in tiles]
    return _digest(*found)


def _factor_cases() -> list[tuple[str, npt.NDArray[np.uint8], npt.NDArray[np.float32]]]:
    """Dtype, raw values and values [rows, columns] of matrices, some with a few columns alone."""
    cases = []
    for number, (rows, columns) in enumerate(((3, 1), (5, 33), (17, 256))):
        plain = np.random.default_rng(number).standard_normal((rows, columns)).astype(np.float32)
        words = (plain.view(np.uint32) >> 16).astype(np.uint16)
        rounded = (words.astype(np.uint32) << 16).view(np.float32)
        cases.append(("BF16", words.reshape(-1).view(np.uint8), rounded))
        cases.append(("F32", plain.reshape(-1).view(np.uint8), plain))
    return cases


def multiply_digest(backend: str) -> str:
    """Matrices times factors of columns, then of rows."""
    found = []
    for dtype, raw, values in _factor_cases():
        rng = np.random.default_rng(values.size)
        rows, columns = (rng.lognormal(size=count).astype(np.float32) for count in values.shape)
        out = np.empty(values.size, dtype=np.float32)
        if backend == "reference":
            out = (values * columns * rows[:, None]).reshape(-1)
        else:
            factors.multiply(raw, dtype, columns=columns, rows=rows, out=out)
        found.append(out)
    return _digest(*found)


def squares_digest(backend: str) -> str:
    """Sums of squares: of columns row by row, of rows by adding the upper half to the lower one."""
    found = []
    for dtype, raw, values in _factor_cases():
        weights = np.random.default_rng(values.size).lognormal(size=values.shape[1]).astype(np.float32)
        if backend == "reference":
            of_columns, halves = np.zeros(values.shape[1], dtype=np.float32), np.square(values) * weights
            for row in np.square(values):
                of_columns += row
            while (left := halves.shape[1]) > 1:
                lower, upper = halves[:, : left - left // 2].copy(), halves[:, left - left // 2 :]
                lower[:, : left // 2] += upper
                halves = lower
            found += [of_columns, halves[:, 0]]
        else:
            found += factors.squares(raw, dtype, rows=len(values), weights=weights, along_rows=True)
    return _digest(*found)


# The sha256 of what the encoders of the trellis codec write: every machine has to write these bytes.
TRELLIS_BYTES = {
    8: "5fec7a634345163fc3c8fdca220568bd808d6566adebe55c294135b25cffe217",
    64: "2b38125f8efad4a824a5037acd05a893f0bd5796bef37da1da1266d12e3a7543",
    256: "3a218f9dec300cc35d9a45454fa1862cd2135606a2982fc22fef15df668f11c2",
}


def trellis_weights() -> npt.NDArray[np.float32]:
    """37 blocks, the last five of them padding: norms of every size, a sparse block and a constant one."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((BLOCKS, 128)).astype(np.float32)
    values[3:20] *= np.exp2(rng.uniform(-30, 30, (17, 1))).astype(np.float32)
    values[7], values[8, 1:], values[9], values[-5:] = 0, 0, 0.0125, 0
    return values


def trellis_cases(states: int) -> list[tuple[str, float, RotatedState, Bytes]]:
    """Dtype, rate, rotation and weights to encode with some states."""
    plain = np.random.default_rng(states).standard_normal((BLOCKS, 128)).astype(np.float32)
    words = (plain.view(np.uint32) >> 16).astype(np.uint16)
    cases = [("F32", rate, trellis_weights()) for rate in (2.125, 4.38, 8.0)]
    cases += [("BF16", 1.5, words), ("F16", 3.1, plain.astype(np.float16)), ("F32", 5.0, plain[:1] * np.float32(1e-30))]
    rotations = (RotatedState("hadamard"), RotatedState("signed-hadamard"))
    return [
        (dtype, rate, rotations[place % 2], np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        for place, (dtype, rate, values) in enumerate(cases)
    ]


def _encode_trellis(states: int) -> list[npt.NDArray[Any]]:
    found: list[npt.NDArray[Any]] = []
    for dtype, rate, state, values in trellis_cases(states):
        coder = HadamardTrellis().coder(rate, states).sized(len(values) // DTYPES[dtype])
        rows = np.full((1, coder.parts[0].bytes_per_block), 0xAB, dtype=np.uint8)
        measures = coder.encode(values, [rows], dtype=dtype, state=state)
        found += [rows, measures.energies, measures.errors]
    return found


def encode_trellis_digest(backend: str) -> str:
    """Encode with every number of states; the reference is what was written before."""
    if backend == "reference":
        return " ".join(TRELLIS_BYTES.values())
    return " ".join(_digest(*_encode_trellis(states)) for states in TRELLIS_BYTES)


def prepare_digest(backend: str) -> str:
    """Rotate inputs and make integers of them, with and without signs and scales."""
    made = product_cases.expected_integers if backend == "reference" else product_cases.prepared_integers
    found: list[npt.NDArray[Any]] = []
    for bits in (4, 5):
        for rows in (2, 3):
            for dtype in ("BF16", "F16"):
                found += made(product_cases.make_case(bits, dtype, rows))
    return _digest(*found)


def prepare_f32_digest(backend: str) -> str:
    """The same for F32, whose inputs stay floats."""
    made = product_cases.rotated_inputs if backend == "reference" else product_cases.prepared_floats
    return _digest(*(made(product_cases.make_case(bits, "F32", rows)) for bits in (4, 5) for rows in (2, 3)))


def _product_digest(dtypes: Sequence[str]) -> Callable[[str], str]:
    """Multiply; sums are in an order of each processor's own, so what is compared is whether the bound is kept."""

    def digest(backend: str) -> str:
        within = "within the bound"
        if backend == "reference":
            return within
        cases = [(width, dtype, rows) for width in range(2, 9) for dtype in dtypes for rows in (1, 7)]
        errors = [product_cases.excess(product_cases.make_case(*case)) for case in cases]
        return within if max(errors) <= 1 else f"{max(errors)} times the bound"

    return digest


def _attention_digest(kernel: str) -> Callable[[str], str]:
    """Multiply with packed keys or values of every width; as with products, what is compared is the bound."""

    def digest(backend: str) -> str:
        within = "within the bound"
        if backend == "reference":
            return within
        errors = [attention_cases.excess(*pair) for pair in _attention_results(kernel)]
        return within if max(errors) <= 1 else f"{max(errors)} times the bound"

    return digest


def _attention_results(kernel: str) -> Iterator[tuple[Any, Any]]:
    """What a kernel computes, and the exact results with what they may be off by."""
    if kernel == "polar_scores":
        for widths in POLAR_WIDTHS:
            for rows in (1, 7):
                polar = attention_cases.polar_case(widths, rows, halves=rows < 4)
                yield attention_cases.polar_computed(polar), attention_cases.polar_exact(polar)
        return
    for bits, rows, size in itertools.product(range(2, 9), (1, 6), (96, 128)):
        case = attention_cases.token_case(bits, rows, size=size)
        if kernel == "hadamard_scores":
            yield attention_cases.scores_computed(case), attention_cases.scores_exact(case)
        else:
            yield attention_cases.sums_computed(case), attention_cases.sums_exact(case)


# Runs of all widths.
TRANSFORM_RUNS = [(24, bits) for bits in range(8, 0, -1)]


def restore_levels_digest(backend: str) -> str:
    """Levels of transform codes of 20 vectors of two heads."""
    rng = np.random.default_rng(15)
    codes = rng.integers(0, 256, (2, 20, 3 * sum(range(9)))).astype(np.uint8)
    factors = rng.lognormal(size=(2, 20)).astype(np.float16)
    made = restoring_cases.expected_levels if backend == "reference" else restoring_cases.computed_levels
    return _digest(made(codes, factors, TRANSFORM_RUNS))


def nearest_levels_digest(backend: str) -> str:
    """The nearest levels of normal numbers."""
    values = np.random.default_rng(16).standard_normal((40, 8 * 24)).astype(np.float32)
    made = restoring_cases.expected_codes if backend == "reference" else restoring_cases.computed_codes
    return _digest(*made(values, TRANSFORM_RUNS))


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


def decode_trellis_digest(backend: str) -> str:
    """Decode superblocks of every kind to every dtype, in both rotations."""
    found = []
    for number, (blocks, kind) in enumerate(TRELLIS_SUPERBLOCKS):
        row = np.frombuffer(trellis_writer.superblock(np.random.default_rng(number), blocks, **kind), np.uint8)
        state = RotatedState(("hadamard", "signed-hadamard")[number % 2])
        coder = TrellisCoder(rate=1.0, states=8, cut=Superblocks(2, blocks, len(row)))
        rows = np.stack([row, row])
        for dtype, size in DTYPES.items():
            values = np.empty(2 * blocks * 128 * size, dtype=np.uint8)
            if backend == "reference":
                decoded = trellis_decoder.decode(rows, blocks, signed=state.rescued)
                values = np.frombuffer(independent_reader.to_bytes(decoded, dtype), np.uint8)
            else:
                coder.decode([rows], values, dtype=dtype, state=state)
            found.append(values)
    return _digest(*found)


def encode_gguf_affine_digest(backend: str) -> str:
    """Encode GGUF blocks of scales and offsets of every type, with and without importance."""
    values, found = gguf_affine_reference.hard_blocks(), []
    for kind in gguf_affine_reference.FORMATS:
        for importance in (None, gguf_affine_reference.some_importance(256)):
            if backend == "reference":
                factors = None
                if importance is not None:
                    factors = np.tile(gguf_encoding.normalized_importance(importance, 256), (len(values), 1))
                found += gguf_affine_reference.encode(kind, values, SEARCHES[kind], factors)
            else:
                blocks = gguf_encoding.encode_blocks(kind, values, importance)
                found += [blocks.data, blocks.energies, blocks.errors]
    return _digest(*found)


DIGESTS: dict[str, Callable[[str], str]] = {
    "multiply": multiply_digest,
    "squares": squares_digest,
    "encode": encode_digest,
    "decode": decode_digest,
    "fit": fit_digest,
    "round": round_digest,
    "encode_gguf_symmetric": encode_gguf_symmetric_digest,
    "rotate": rotate_digest,
    "pack_bits": pack_bits_digest,
    "pack_tiles": pack_tiles_digest,
    "factor": factor_digest,
    "compensate": compensate_digest,
    "output_errors": output_errors_digest,
    "fit_by_importance": fit_by_importance_digest,
    "encode_trellis": encode_trellis_digest,
    "encode_gguf_affine": encode_gguf_affine_digest,
    "decode_trellis": decode_trellis_digest,
    "prepare": prepare_digest,
    "prepare_f32": prepare_f32_digest,
    "product": _product_digest(["BF16", "F16"]),
    "product_f32": _product_digest(["F32"]),
    **{kernel: _attention_digest(kernel) for kernel in ("polar_scores", "weighted_values", "hadamard_scores")},
    "restore_levels": restore_levels_digest,
    "nearest_levels": nearest_levels_digest,
}

# --- the process ---


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels", nargs="+", choices=DIGESTS)
    parser.add_argument("--libraries", type=Path)
    parser.add_argument("--runner", nargs="+")
    arguments = parser.parse_args()
    native.LIBRARIES = arguments.libraries or native.LIBRARIES
    elsewhere = kernel_runner.running(arguments.runner) if arguments.runner else contextlib.nullcontext()
    with elsewhere:
        digests = {kernel: DIGESTS[kernel]("cpu") for kernel in arguments.kernels}
    print(json.dumps({"level": native.level(), "digests": digests}))


if __name__ == "__main__":
    _main()
