"""Integers for runtimes: groups of weights to codes, scales and offsets, and codes to the bytes of each packing.

A group is some consecutive weights of a row that share a scale and an offset. docs/exports.md has the rules and their
arithmetic. The only implementation is for the CPU, where integers are made even of weights that a GPU has decoded.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.common.dtypes import FLOAT4_VALUES, float8_table, from_float32, to_float32
from pqweights.kernels import BLOCK_SIZE, VALUE_DTYPES, native

# How scale and offset are chosen: to minimise an error (fit_groups), or as a runtime's own converter does
# (native/group_rules.cpp).
BEST = "best"
RUNTIME_RULES = {"mlx": 1, "torchao": 2, "compressed-tensors": 3, "compressed-tensors-asymmetric": 8}
LEAST_ERROR = 10  # of some scales, in groups of which fit_groups takes no such size
FLOAT_MODES = {"mxfp4": 4, "mxfp8": 5, "nvfp4": 6, "fp8": 7, "fp8-tensor": 9}
# What offsets are, as kernels call it: any, none, or such that a code stands for 0.
KINDS = {"affine": 0, "symmetric": 1, "asymmetric": 2}
# The most weights of a group in fit_groups, whose kernel has no more room.
MOST_WEIGHTS = 256
# What weights are multiplied by before they are rounded to floats: 1 and the relative squared error that Gaussian
# weights have then. Codes of least squared error are orthogonal to their error, hence too small by the relative error.
FLOAT_GAINS = {"nvfp4": 1.0066}
# Of the largest weight of a row of FP8, the shares that are tried as its largest number; others differ from these by
# about a power of two, which changes no error but of weights that saturate.
FP8_SHARES = tuple(np.float32(16 - step) / 16 for step in range(8))
# Codes of so few bits, chosen by importances, lose so much of the size of the weights that models notice.
MOST_BITS_ENLARGED = 3
# Nothing is enlarged more.
LARGEST_GAIN = 1.5
# What the codes of each kind of floats are, by the names that weights of sources have as dtypes. E5M2 and codes with
# a table of numbers of their own are only read.
FLOAT_CODES = {
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "mxfp8": "F8_E4M3",
    "fp8": "F8_E4M3",
    "fp8-tensor": "F8_E4M3",
    "fp8-e5m2": "F8_E5M2",
    "table": "table",
}
LARGEST_BF16 = 3.3895313892515355e38
# Columns that hardly count are taken to count this much, of the one that counts most.
LEAST_IMPORTANCE = 2.0**-30
# Rows of weights that kernels take together; the same as in native/weight_tiles.hpp.
TILE = 64

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False, kw_only=True)
class Groups:
    """Some groups as integers.

    codes: u8 [groups, group size].
    scales, offsets: f32 [groups], numbers of 16 bits; of asymmetric rules, the offsets are the codes that stand for 0.
    energies, errors: f64 [groups], the sums of squares of the weights and of their errors.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.float32]
    energies: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class GroupRule:
    """How a group becomes integers.

    bits: the width of a code; codes count from 0.
    group_size: weights of a group.
    symmetric: the offset is 0; only with `middle`.
    middle: a weight is read back as (code - 2**(bits - 1)) * scale + offset, else as code * scale + offset.
    rule: BEST, or a key of RUNTIME_RULES.
    zeros: a weight is read back as (code - zero) * scale, where the zero is itself a code; without `symmetric` and
        `middle`.
    scale_dtype: of scales and of offsets that are not zeros, BF16 or F16; those of mlx and torchao are BF16.
    rows: how many rows share a scale; more than one only in sources.
    """

    bits: int
    group_size: int
    symmetric: bool
    middle: bool
    rule: str = BEST
    zeros: bool = False
    scale_dtype: str = "BF16"
    rows: int = 1

    @property
    def name(self) -> str:
        """The name of the rule."""
        return self.rule

    @property
    def kind(self) -> str:
        """A key of KINDS."""
        return "asymmetric" if self.zeros else "symmetric" if self.symmetric else "affine"

    @property
    def codes(self) -> str:
        """What codes are."""
        return f"INT{self.bits}"

    @property
    def limits(self) -> tuple[int, int]:
        """The lowest and the highest number that a code stands for."""
        lowest = -(2 ** (self.bits - 1)) if self.middle else 0
        return lowest, lowest + 2**self.bits - 1

    def numbers(self, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """The numbers that codes stand for, but for zeros, scales and offsets."""
        numbers = codes.astype(np.float32)
        if self.middle:
            numbers -= np.float32(2 ** (self.bits - 1))
        return numbers

    def quantize(self, values: npt.NDArray[np.float32]) -> Groups:
        """Finite weights [groups * group size] as integers."""
        result = _empty_groups(values, self.group_size)
        is_row = self.symmetric and (self.group_size > MOST_WEIGHTS or self.group_size % 16)
        if self.rule == BEST and not is_row:
            fit_groups(values, result, self)
        else:
            rule = LEAST_ERROR if self.rule == BEST else RUNTIME_RULES[self.rule]
            round_groups(values, result, bits=self.bits, rule=rule, scale_dtype=self.scale_dtype)
        return result

    def quantize_weighted(self, values: Floats, importance: Floats) -> Groups:
        """Finite weights [rows * K] as integers, by how much each column counts: [K], not negative.

        Codes of few bits get the size of the weights back, in that measure: codes of least squared error are orthogonal
        to their error, hence too small by the relative error.
        """
        start, factors = self.quantize(values), normalized_importance(importance, len(importance))
        if factors is None or not np.isfinite(start.errors).all():
            return start
        rows = values.reshape(-1, len(factors))
        numbers = fit_by_importance(Tiles.of(rows), start, self, factors, np.arange(len(factors)))
        scales, shifts = (each.rows_of().reshape(-1, 1) for each in numbers)
        with np.errstate(over="ignore"):
            steps = np.rint((values.reshape(start.codes.shape) - shifts) / scales)
        codes = (np.clip(steps, *self.limits) - self.limits[0]).astype(np.uint8)
        found = self.measured(rows, codes, numbers, start.energies)
        if self.bits > MOST_BITS_ENLARGED:
            return found
        roots = np.sqrt(factors)
        decoded = self.decode(found).reshape(rows.shape)
        energies, errors = (sums_of_squares((each * roots).reshape(codes.shape)) for each in (rows, rows - decoded))
        left, gains = energies - errors, np.ones(len(energies))
        np.divide(energies, left, out=gains, where=np.isfinite(energies) & (left > 0))
        np.clip(gains, 1.0, LARGEST_GAIN, out=gains)
        offsets = found.offsets if self.zeros else _enlarged(found.offsets, gains)
        larger = replace(found, scales=_enlarged(found.scales, gains), offsets=offsets)
        return replace(larger, errors=sums_of_squares(values.reshape(codes.shape) - self.decode(larger)))

    def measured(
        self,
        rows: Floats,
        codes: npt.NDArray[np.uint8],
        numbers: tuple[Tiles, Tiles],
        energies: npt.NDArray[np.float64],
    ) -> Groups:
        """The groups of rows of weights [rows, K] with these codes, with their errors.

        numbers: as `fit_by_importance` returns them
        """
        codes, (scales, shifts) = codes.reshape(-1, self.group_size), (each.rows_of().reshape(-1) for each in numbers)
        offsets = np.rint(np.abs(shifts) / scales) if self.zeros else shifts
        found = Groups(
            codes=codes,
            scales=scales,
            offsets=offsets,
            energies=energies,
            errors=np.empty(len(codes), dtype=np.float64),
        )
        return replace(found, errors=sums_of_squares(rows.reshape(codes.shape) - self.decode(found)))

    def decode(self, groups: Groups) -> npt.NDArray[np.float32]:
        """The weights [groups, group size] that a runtime computes with, in float32."""
        numbers = self.numbers(groups.codes)
        if self.zeros:
            return (numbers - groups.offsets[:, None]) * groups.scales[:, None]
        return numbers * groups.scales[:, None] + groups.offsets[:, None]


def _enlarged(numbers: npt.NDArray[np.float32], gains: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """BF16 numbers after multiplication; those that are infinite stay so."""
    most = np.where(np.isfinite(numbers), LARGEST_BF16, np.inf)
    products = np.clip(numbers * gains, -most, most).astype(np.float32)
    return to_float32(from_float32(products, "BF16"), "BF16")


@dataclass(frozen=True)
class FloatRule:
    """Short floats: E2M1 or E4M3 codes, and per group a scale in E8M0 or E4M3, multiplied by a unit; of fp8 in BF16.

    `Groups.scales` are the bytes of the scales, as numbers; of fp8 they are the scales, and of fp8-tensor, whose unit
    is the scale of the whole tensor, they are 1. Formats: OCP microscaling
    formats specification 1.0, and NVFP4, whose unit is the scale of the whole tensor; mlx and MXFP4 have a unit of 1.

    kind: a key of FLOAT_CODES.
    name: the rule: BEST, which fp8 has not, or that of a runtime.
    rows: how many rows share a scale: of tiles of fp8, [rows, group size], `Groups.codes` are [rows, row length], and
        `Groups.scales` [tiles down, tiles across]. Other kinds have tiles in sources alone.
    row_length: of tiles, the columns of the weight; tiles at its edges may be smaller.
    """

    kind: str
    bits: int
    group_size: int
    name: str = "mlx"
    unit: float = 1.0
    rows: int = 1
    row_length: int = 0

    @property
    def codes(self) -> str:
        """What codes are."""
        return FLOAT_CODES[self.kind]

    def numbers(self, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """The floats that codes stand for."""
        table = FLOAT4_VALUES if self.bits == 4 else float8_table(self.codes)
        return table[codes]

    def quantize(self, values: npt.NDArray[np.float32]) -> Groups:
        """Finite weights [groups * group size], of tiles whole rows, as short floats."""
        if self.rows > 1:
            return self._tiles(values)
        result = _empty_groups(values, self.group_size)
        if self.name == BEST and self.kind != "fp8-tensor":
            fit_floats(values, None, result, kind=self.kind, unit=self.unit)
            return result
        round_groups(values / np.float32(self.unit), result, bits=self.bits, rule=FLOAT_MODES[self.kind])
        squared = float(np.float32(self.unit)) ** 2
        return replace(result, energies=result.energies * squared, errors=result.errors * squared)

    def _tiles(self, values: npt.NDArray[np.float32]) -> Groups:
        """Whole rows, each tile as one group, which takes its largest weight to the largest float."""
        rows = len(values) // self.row_length
        down, across = -(-rows // self.rows), -(-self.row_length // self.group_size)
        padded = np.zeros((down, self.rows, across, self.group_size), dtype=np.float32)
        padded.reshape(down * self.rows, -1)[:rows, : self.row_length] = values.reshape(rows, -1)
        one_by_one = np.ascontiguousarray(padded.swapaxes(1, 2)).reshape(-1)
        groups = replace(self, group_size=self.rows * self.group_size, rows=1).quantize(one_by_one)
        codes = groups.codes.reshape(down, across, self.rows, self.group_size).swapaxes(1, 2)
        codes = codes.reshape(down * self.rows, -1)[:rows, : self.row_length]
        return replace(groups, codes=np.ascontiguousarray(codes), scales=groups.scales.reshape(down, across))

    def quantize_weighted(self, values: npt.NDArray[np.float32], importance: npt.NDArray[np.float32]) -> Groups:
        """Finite weights [rows * K] as short floats, by how much each column counts: [K], not negative; no tiles."""
        if self.kind == "fp8":
            return self._saturated(values, importance)
        result = _empty_groups(values, self.group_size)
        fit_floats(values, importance, result, kind=self.kind, unit=self.unit)
        return result

    def _saturated(self, values: Floats, factors: Floats) -> Groups:
        """Rows of FP8, each a group, with the scale of the least weighed error: large weights may saturate."""
        rows, roots = values.reshape(-1, len(factors)), np.sqrt(factors)
        most = np.abs(rows).max(axis=1, keepdims=True)
        best = self.quantize(values)
        least = np.full(len(rows), np.inf)
        for share in FP8_SHARES:
            found = self.quantize(np.clip(rows, -share * most, share * most).reshape(-1))
            left = rows - self.decode(found)
            errors = sums_of_squares(left * roots)
            found = replace(found, energies=best.energies, errors=sums_of_squares(left))
            best, least = merged(best, found, errors < least), np.fmin(errors, least)
        return best

    def measured(self, rows: Floats, codes: npt.NDArray[np.uint8], groups: Groups) -> Groups:
        """The groups of rows of weights [rows, K] with other codes, with their errors."""
        found = replace(groups, codes=codes.reshape(groups.codes.shape))
        return replace(found, errors=sums_of_squares(rows.reshape(found.codes.shape) - self.decode(found)))

    def factors(self, groups: Groups) -> Floats:
        """What the floats of codes are multiplied by, in the shape of the scales."""
        scales = groups.scales
        if not self.kind.startswith("fp8"):
            scales = float8_table("F8_E4M3" if self.kind == "nvfp4" else "F8_E8M0")[scales.astype(np.uint8)]
        return scales if self.rows > 1 else scales * np.float32(self.unit)

    def decode(self, groups: Groups) -> npt.NDArray[np.float32]:
        """The weights that runtimes compute with, in float32, in the shape of the codes."""
        numbers, factors = self.numbers(groups.codes), self.factors(groups)
        if self.rows > 1:
            factors = factors.repeat(self.rows, axis=0)[: len(numbers)].repeat(self.group_size, axis=1)
            return numbers * factors[:, : self.row_length]
        return numbers * factors[:, None]


def sums_of_squares(rows: Floats) -> npt.NDArray[np.float64]:
    """Return the sum of squares of each row, added in order: the sums of numpy depend on the machine."""
    wide = rows.astype(np.float64)
    sums: npt.NDArray[np.float64] = np.add.accumulate(wide * wide, axis=1)[:, -1].copy()
    return sums


@dataclass(frozen=True, eq=False)
class Tiles:
    """Rows of weights in tiles of 64 rows, by columns: what the kernels compute with.

    values: [tiles, K, 64], with zeros (for scales: ones) in place of rows that are missing
    rows: how many rows there are
    """

    values: npt.NDArray[Any]
    rows: int

    @staticmethod
    def of(rows: Floats, filled: float = 0.0) -> Tiles:
        """Cut rows [rows, K] into tiles."""
        count, columns = rows.shape
        tiles = -(-count // TILE)
        values = np.full((tiles, columns, TILE), filled, dtype=np.float32)
        for tile in range(tiles):
            part = rows[tile * TILE : (tile + 1) * TILE]
            values[tile, :, : len(part)] = part.T
        return Tiles(values, count)

    def rows_of(self) -> npt.NDArray[Any]:
        """Return the rows [rows, K]."""
        return np.ascontiguousarray(self.values.transpose(0, 2, 1).reshape(-1, self.values.shape[1])[: self.rows])


def merged(first: Groups, second: Groups, take_second: npt.NDArray[np.bool_]) -> Groups:
    """Return the groups of one or the other, with the energies of the second. take_second: [groups]"""
    return Groups(
        codes=np.where(take_second[:, None], second.codes, first.codes),
        scales=np.where(take_second, second.scales, first.scales),
        offsets=np.where(take_second, second.offsets, first.offsets),
        energies=second.energies,
        errors=np.where(take_second, second.errors, first.errors),
    )


def _empty_groups(values: npt.NDArray[np.float32], size: int) -> Groups:
    """Room for the groups of these weights."""
    groups = len(values) // size
    return Groups(
        codes=np.empty((groups, size), dtype=np.uint8),
        scales=np.empty(groups, dtype=np.float32),
        offsets=np.empty(groups, dtype=np.float32),
        energies=np.empty(groups, dtype=np.float64),
        errors=np.empty(groups, dtype=np.float64),
    )


@functools.lru_cache
def _settings(kind: str, bits: int, group_size: int) -> npt.NDArray[np.float32]:
    """Where the chains of native/groups.cpp start, how far they step, and how evenly weights count: f32 [8].

    Affine and asymmetric: the range is shrunk to a share, of which each chain cuts 1.2 steps: at the lower end, at the
    upper end, or half at each. Symmetric: the largest weight times three shares. The numbers are the best that a search
    found on the three kinds of weights of benchmarks/peers.py together; the optimum is flat. The last number is what a
    weight counts beside its magnitude, in root mean squares of its group (docs/exports.md).
    """
    if kind == "symmetric":
        share, cut = {
            2: (0.9, 0.4),
            3: (0.95, 0.3),
            4: (1.02, 0.2),
            5: (1.05, 0.12),
            6: (1.05, 0.06),
            7: (1.04, 0.05),
            8: (1.02, 0.02),
        }[bits]
        pairs = [share] * 2 + [share * (1 - cut / 2)] * 2 + [share * (1 - cut)] * 2
        return np.array([*pairs, 6 if bits == 8 else 3, 1], dtype=np.float32)
    small, large = {2: (0.9, 0.9), 3: (1.0, 0.9), 4: (1.0, 0.95), 5: (1.03, 1.0)}.get(bits, (1.01, 1.01))
    share = small if group_size <= 64 else large
    if bits == 4 and group_size <= 32:
        share = 1.03
    cut = share * (1 - 1.2 / (2**bits - 1))
    pairs = [share, cut, cut, share, (share + cut) / 2, (share + cut) / 2]
    relax = {2: 2, 7: 4, 8: 5}.get(bits, 3)
    if kind == "asymmetric":
        relax = (3, 6, 6, 9, 12, 16, 20)[bits - 2]
    return np.array([*pairs, relax, 1 if kind == "asymmetric" else 2], dtype=np.float32)


def normalized_importance(importance: Floats, columns: int) -> Floats | None:
    """Importance at a scale at which the largest is in [0.5, 1), and none is 0; None if all are 0."""
    if importance.shape != (columns,):
        raise ValueError(f"expected the importance of {columns} columns, found an array of shape {importance.shape}")
    most, least = importance.max(initial=0), importance.min(initial=0)
    if not (np.isfinite(most) and least >= 0):
        raise ValueError(f"importance has to be finite and not negative; found {least} to {most}")
    if most == 0:
        return None
    scaled = np.ldexp(importance, -np.frexp(most)[1])  # by a power of two: exact
    return np.asarray(np.maximum(scaled, LEAST_IMPORTANCE), dtype=np.float32)


# --- the kernels; they raise ValueError for arrays that do not fit, or their room ---


def fit_groups(values: npt.NDArray[np.float32], out: Groups, rule: GroupRule) -> None:
    """Fill `out` from the weights [groups * size] with nearly the least squared error, where large weights count more.

    That of a weight counts by its magnitude plus one or two root mean squares of its group.
    """
    (groups, size), bits = out.codes.shape, rule.bits
    if size % 16 or not 16 <= size <= MOST_WEIGHTS or not 2 <= bits <= 8:
        raise ValueError(
            f"expected groups of a multiple of 16 up to {MOST_WEIGHTS} weights and 2 to 8 bits, found {size} weights "
            f"and {bits} bits"
        )
    settings = _settings(rule.kind, bits, size)
    given = (native.array(values, np.float32, groups * size), native.array(settings, np.float32, 8))
    numbers = (groups, size, bits, KINDS[rule.kind], rule.middle, VALUE_DTYPES[rule.scale_dtype])
    native.call("fit", *given, *_written(out), *numbers)


def fit_by_importance(
    weights: Tiles, start: Groups, rule: GroupRule, importance: Floats, order: npt.NDArray[np.int64]
) -> tuple[Tiles, Tiles]:
    """Return scales of the groups of rows, and what their code of number 0 stands for, that err less than others.

    weights: the rows, with their columns in an order
    start: their groups, where the search begins
    importance: how much squared errors of each column count, f32 [K], positive, in the same order
    order: which column of a row stands where, [K]

    Raises ValueError for arrays that do not fit together.
    """
    tiles, size, _ = weights.values.shape
    row_groups = size // rule.group_size
    shifts = -start.offsets * start.scales if rule.zeros else start.offsets  # these products are exact
    scales, offsets = (
        Tiles.of(numbers.reshape(weights.rows, row_groups), filled)
        for numbers, filled in ((start.scales, 1.0), (shifts, 0.0))
    )
    position = np.zeros(size, dtype=np.int64)
    position[order] = np.arange(size)
    native.call(
        "fit_by_importance",
        native.array(weights.values, np.float32, tiles * size * TILE),
        native.array(importance, np.float32, size),
        native.array(position, np.int64, size),
        *(native.array(each.values, np.float32, each.values.size, written=True) for each in (scales, offsets)),
        size,
        tiles,
        rule.group_size,
        *rule.limits,
        KINDS[rule.kind],
        VALUE_DTYPES[rule.scale_dtype],
    )
    return scales, offsets


def fit_floats(
    values: npt.NDArray[np.float32], importance: npt.NDArray[np.float32] | None, out: Groups, *, kind: str, unit: float
) -> None:
    """Fill `out` from the weights [groups * size] with the scales of least squared error, by a key of FLOAT_MODES.

    Weights are enlarged before by FLOAT_GAINS; errors are those of the weights themselves. In mxfp4, errors that all
    columns count alike count by the square of the weight.

    importance: how much errors count by column, [K], of which groups are parts; None: all the same.
    """
    groups, size = out.codes.shape
    if kind == "fp8" or size % 16 or not 16 <= size <= MOST_WEIGHTS:
        raise ValueError(f"expected groups of a multiple of 16 up to {MOST_WEIGHTS} weights, found {size} of {kind}")
    factors = np.empty(0, np.float32) if importance is None else importance
    row_groups, rest = divmod(len(factors), size)
    if rest or (row_groups and groups % row_groups):
        raise ValueError(f"expected rows of whole groups of {size}, found the importance of {len(factors)} columns")
    weighs = native.array(factors, np.float32, row_groups * size)
    codes, scales, _, energies, errors = _written(out)
    out.offsets[:] = 0
    arrays = (native.array(values, np.float32, groups * size), weighs, codes, scales, energies, errors)
    native.call("fit_floats", *arrays, groups, size, row_groups, FLOAT_MODES[kind], unit, FLOAT_GAINS.get(kind, 1.0))


def round_groups(
    values: npt.NDArray[np.float32], out: Groups, *, bits: int, rule: int, scale_dtype: str = "BF16"
) -> None:
    """Fill `out` from the weights [groups * size], by LEAST_ERROR or a value of RUNTIME_RULES or FLOAT_MODES."""
    groups, size = out.codes.shape
    if size < 1 or not 2 <= bits <= 8:
        raise ValueError(f"expected groups of at least one weight and 2 to 8 bits, found {size} and {bits} bits")
    given, dtype = native.array(values, np.float32, groups * size), VALUE_DTYPES[scale_dtype]
    native.call("round", given, *_written(out), groups, size, bits, rule, dtype)


def _written(out: Groups) -> list[native.Array]:
    """The codes, the scales, the offsets, the energies and the errors, for kernels to write."""
    groups = len(out.codes)
    numbers = (
        (out.scales, np.float32),
        (out.offsets, np.float32),
        (out.energies, np.float64),
        (out.errors, np.float64),
    )
    codes = native.array(out.codes, np.uint8, out.codes.size, written=True)
    return [codes, *(native.array(array, dtype, groups, written=True) for array, dtype in numbers)]


def rotate(values: npt.NDArray[np.float32]) -> None:
    """Multiply each run of 128 values by H / sqrt(128), in place; its own inverse."""
    blocks = len(values) // BLOCK_SIZE
    native.call("rotate", native.array(values, np.float32, blocks * BLOCK_SIZE, written=True), blocks)


def pack_bits(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Codes below 2**bits as one stream of bits, the lowest first; their number is a multiple of 8."""
    eights = codes.size // 8
    packed = np.empty(eights * bits, dtype=np.uint8)
    to = native.array(packed, np.uint8, eights * bits, written=True)
    native.call("pack_bits", native.array(codes, np.uint8, eights * 8), to, eights, bits)
    return packed


def unpack_bits(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Unpack bytes [..., bytes] to their codes, in the order of pack_bits."""
    count = packed.shape[-1] * 8 // bits
    if 8 % bits == 0:  # which is faster
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = packed[..., None] >> shifts & np.uint8((1 << bits) - 1)
        return codes.reshape(*packed.shape[:-1], -1)[..., :count]
    digits = np.unpackbits(packed, axis=-1, count=count * bits, bitorder="little")
    return np.packbits(digits.reshape(*packed.shape[:-1], count, bits), axis=-1, bitorder="little")[..., 0]


def pack_tiles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """4-bit codes [8 * m, 128 * n] in tiles of 8 x 128, as PyTorch's tinygemm kernel reads them.

    Returns the bytes of i32 [m, n, 32, 4].
    """
    rows, columns = codes.shape
    packed = np.empty(rows * columns // 2, dtype=np.uint8)
    tiles = (rows // 8, columns // 128)
    given = native.array(codes, np.uint8, tiles[0] * tiles[1] * 1024)
    native.call("pack_tiles", given, native.array(packed, np.uint8, given.size // 2, written=True), *tiles)
    return packed
