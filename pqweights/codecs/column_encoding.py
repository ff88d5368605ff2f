"""The encoder of the codec hadamard-trellis-columns: each column makes up for the errors of those before it.

With second moments H of the inputs of a matrix W and mean squared gradients g of its outputs, an error E = W - Q costs
about the sum over the rows i of g_i e_i H e_i. Damped, H = (I + A) D (I + A)' with A strictly upper triangular, which
gives the target of column k,

    t_k = w_k + sum over j < k of (w_j - q_j) A_jk,

and the cost as the sum of D_k |t_k - q_k|^2 (LDLQ: Chee et al., arXiv:2307.13304). Rows are multiplied by the root of g
and columns by that of D before all are quantized with the same step, so each error counts alike. docs/trellis.md has
the method, docs/format.md the bytes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pqweights.codecs.columns import ColumnCodes, ColumnCut
from pqweights.codecs.protocol import Bytes, Doubles, Floats
from pqweights.codecs.trellis_tables import NOISE, encode_model
from pqweights.kernels import BLOCK_SIZE, columns
from pqweights.kernels.openmp import map_in_threads
from pqweights.kernels.trellis import HEADER_BYTES

Moments = npt.NDArray[np.floating[Any]]

# What is added to the diagonal of H, as a share of its mean: the first with which there is a factor.
_DAMPINGS = (0.01, 0.1, 1.0)
# Gradients are raised by this share of their mean, and no row's w H w counts as less than this share of it.
_GRADIENT_SHARE, _ENERGY_SHARE = 0.1, 1e-3
# Up to so many columns H is factorized in float64.
_MOST_IN_DOUBLES = 4096
# Stored scales: steps of an octave, and what stands for 1.
_STEPS, _ONE = 16, 128
# Stored steps are between 2**-this and 2**this.
_MOST_EXPONENT = 100
# What the state of a lane takes less what it holds, on average, in bits.
_STATE_BITS = 23.625
_LENGTH_BITS = 32


class ColumnMeasures(NamedTuple):
    """Sums over a weight.

    energy: of the squares of the weights
    error: of the squared errors
    weighed_error: of g_i e_i H e_i over the rows i, H as it came; without gradients g_i is 1 / w_i H w_i
    """

    energy: float
    error: float
    weighed_error: float


def encode_columns(
    weight: Floats,
    *,
    moments: Moments,
    gradients: Doubles | None,
    step: float,
    states: int,
    threads: int = 1,
) -> tuple[ColumnCodes, ColumnMeasures]:
    """Encode a weight f32 [N, K].

    moments: [K, K], the second moments H of the inputs
    gradients: [N], the mean squared gradients of the outputs; None to weigh all outputs by their relative errors
    step: of the weights, once they are scaled
    states: of the trellis: one of kernels.trellis.STATES
    threads: that groups of 2048 rows are shared out to; the codes are the same for any number

    Raises ValueError for arrays of other shapes, for what is not finite, moments that are not positive, or a step that
    leaves no room for the scales.
    """
    _check(weight, moments, gradients)
    if gradients is None:
        gradients = _relative(weight, moments)
    factor = _factorized(moments)
    rows, row_exponent = stored_scales(row_scales(gradients))
    scales, column_exponent = stored_scales(factor.scales)
    job = _Job(weight, factor, rows, scales, _Step.of(step, row_exponent + column_exponent), states)
    groups = range(0, len(weight), columns.GROUP_ROWS)
    found: dict[int, tuple[list[list[Bytes]], Doubles]] = {}

    def encode_group(start: int) -> None:
        found[start] = job.encode(slice(start, start + columns.GROUP_ROWS))

    map_in_threads(encode_group, groups, min(threads, len(groups)))
    strips = [strip for start in groups for strip in found[start][0]]
    codes = ColumnCodes(
        trellis=np.concatenate([superblock for strip in strips for superblock in strip]),
        lengths=np.array([[len(superblock) for superblock in strip] for strip in strips], dtype=np.int32),
        row_scales=rows,
        column_scales=scales,
    )
    errors, damped = np.concatenate([found[start][1] for start in groups], axis=1)
    measures = ColumnMeasures(
        energy=float(np.square(weight, dtype=np.float64).sum()),
        error=float(errors.sum()),
        weighed_error=max(0.0, float(gradients @ (damped - factor.damping * errors))),
    )
    return codes, measures


def _check(weight: Floats, moments: Moments, gradients: Doubles | None) -> None:
    """Raise ValueError for what cannot be encoded."""
    if weight.ndim != 2 or not weight.size:
        raise ValueError(f"expected a weight [N, K], found one of shape {list(weight.shape)}")
    rows, size = weight.shape
    known = np.ones(rows) if gradients is None else gradients
    for name, array, shape in (
        ("weight", weight, (rows, size)),
        ("moments", moments, (size, size)),
        ("gradients", known, (rows,)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, found {list(array.shape)}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name}: expected finite numbers, found NaN or infinity")
    for name, least in (("moments", float(np.diagonal(moments).min())), ("gradients", float(known.min()))):
        if least < 0:
            raise ValueError(f"{name}: expected means of squares, found {least}")


def _relative(weight: Floats, moments: Moments) -> Doubles:
    """Return the g of each row with which its error counts relative to what it is: 1 / w H w."""
    inputs = torch.from_numpy(moments).float()
    energies = np.empty(len(weight))
    for start in range(0, len(weight), columns.GROUP_ROWS):
        rows = torch.from_numpy(weight[start : start + columns.GROUP_ROWS])
        energies[start : start + len(rows)] = ((rows @ inputs) * rows).sum(1, dtype=torch.float64).clamp(min=0).numpy()
    least = _ENERGY_SHARE * energies.mean()
    return 1 / np.maximum(energies, least) if least > 0 else np.ones(len(weight))


# --- scales ---


def row_scales(gradients: Doubles) -> Doubles:
    """Return what rows are multiplied by: the root of g and a tenth of its mean, [N]; ones if all are zero."""
    raised = gradients + _GRADIENT_SHARE * gradients.mean()
    return np.sqrt(raised) if raised.any() else np.ones_like(raised)


def stored_scales(scales: Doubles) -> tuple[Bytes, int]:
    """Return what is stored for scales, u8: factors that are about their inverses times 2**n; and n.

    n is the largest one with which all fit; the factors of scales that are too large then are larger.
    """
    logarithms = -_STEPS * np.log2(scales)
    exponent = math.floor((255 - _ONE - logarithms.max()) / _STEPS)
    stored = np.clip(np.rint(logarithms + _STEPS * exponent) + _ONE, 0, 255)
    return stored.astype(np.uint8), exponent


def factors_of(stored: Bytes) -> Doubles:
    """Return the factors that stored scales stand for."""
    return np.exp2((stored.astype(np.float64) - _ONE) / _STEPS)


class _Factor(NamedTuple):
    """H, factorized.

    lower: f32 [K + 3, K] as of `feedback_room`: A transposed, with ones on the diagonal
    scales: f64 [K], the root of D
    damping: what was added to the diagonal of H
    """

    lower: Floats
    scales: Doubles
    damping: float


def _factorized(moments: Moments) -> _Factor:
    """Factorize H, damped. Raises ValueError if it is not positive."""
    size = len(moments)
    mean = float(np.diagonal(moments).mean(dtype=np.float64)) or 1.0
    dtype = torch.float64 if size <= _MOST_IN_DOUBLES else torch.float32
    for share in _DAMPINGS:
        # H in the opposite order is R' R, so H is U U' with the upper triangular U = J R' J, J being that order.
        matrix = torch.from_numpy(moments).flip(0, 1).to(dtype)
        matrix.diagonal().add_(share * mean)
        factor, failed = torch.linalg.cholesky_ex(matrix, upper=True)
        del matrix
        if not failed:
            break
    else:
        raise ValueError("moments: expected a matrix of second moments, found one that is not positive semidefinite")
    lower = columns.feedback_room(size)
    scales = factor.diagonal().flip(0).double().numpy().copy()
    own = torch.from_numpy(lower)[:size]
    own.copy_(factor.flip(0, 1))
    own /= torch.from_numpy(scales).float()[:, None]
    return _Factor(lower, scales, share * mean)


# --- groups ---


class _Step(NamedTuple):
    """The step that is stored, as a number from 1 to 2 and a power of two."""

    mantissa: float
    exponent: int

    @staticmethod
    def of(step: float, exponent: int) -> _Step:
        """Return a step divided by a power of two. Raises ValueError if that is beyond what can be stored."""
        fraction, own = math.frexp(step)
        own -= 1 + exponent
        if not 0 < step < math.inf or abs(own) > _MOST_EXPONENT:
            raise ValueError(f"step: expected a positive number that suits moments and gradients, found {step}")
        return _Step(float(np.float32(2 * fraction)), own)

    @property
    def stored(self) -> float:
        """The step that is stored."""
        return math.ldexp(self.mantissa, self.exponent)


class _Job:
    """What the groups of a weight share."""

    def __init__(self, weight: Floats, factor: _Factor, rows: Bytes, scales: Bytes, step: _Step, states: int) -> None:
        self.weight, self.step, self.states = weight, step, states
        row_factors, column_factors = factors_of(rows), factors_of(scales)
        self.row_factors = (np.ldexp(1.0, -step.exponent) / row_factors).astype(np.float32)
        self.column_factors = (1 / column_factors).astype(np.float32)
        # Errors are fed back in the scale of the columns.
        self.feedback = factor.lower
        self.feedback[: len(scales)] *= self.column_factors[:, None]
        self.feedback[: len(scales)] *= column_factors.astype(np.float32)
        squared = column_factors**2
        self.weights = np.stack([squared, factor.scales**2 * squared], axis=1).astype(np.float32)
        # From squares of coordinates, rotated back, to those of the weights.
        self.units = np.square(row_factors * np.ldexp(1.0, step.exponent) / BLOCK_SIZE)

    def encode(self, rows: slice) -> tuple[list[list[Bytes]], Doubles]:
        """Return the superblocks of each strip of up to 2048 rows, and squared errors, plain and by H: [2, rows]."""
        weight, row_factors, model = self.weight[rows], self.row_factors[rows], encode_model()
        cut = ColumnCut.of(weight.shape)
        group = columns.load(np.ascontiguousarray(weight), row_factors, self.column_factors)
        squares = np.zeros((2, columns.GROUP_ROWS))
        strips: list[list[Bytes]] = [[] for _ in range(cut.strips)]
        for number in range(cut.superblocks):
            own = cut.columns_of(number)
            found = columns.search(
                group,
                own,
                self.feedback,
                weights=self.weights[own.start : own.stop],
                model=model,
                states=self.states,
                step=self.step.mantissa,
            )
            squares += found.squares.transpose(0, 2, 1).reshape(2, -1)
            packed = columns.pack(found, strips=cut.strips, model=model, states=self.states, step=self.step.stored)
            for strip, superblock in zip(strips, packed, strict=True):
                strip.append(superblock)
        return strips, squares[:, : len(weight)] * self.units[rows]


# --- the size ---


def scaled_energies(weight: Floats, *, moments: Moments, gradients: Doubles | None) -> tuple[Floats, Floats]:
    """Return the mean squares of scaled blocks, and by what the variance of errors is multiplied that are fed back.

    They are f32 [strips, K] and [K]. The arguments are as of `encode_columns`, and so are the errors.
    """
    _check(weight, moments, gradients)
    rows = row_scales(_relative(weight, moments) if gradients is None else gradients).astype(np.float32)
    factor, size = _factorized(moments), len(moments)
    cut = ColumnCut.of(weight.shape)
    energies = np.empty((cut.strips, size), dtype=np.float32)
    for strip in range(cut.strips):
        own = slice(strip * BLOCK_SIZE, (strip + 1) * BLOCK_SIZE)
        energies[strip] = np.square(weight[own] * rows[own, None]).sum(0) / BLOCK_SIZE
    energies *= np.square(factor.scales).astype(np.float32)
    # What is fed back, E A, is V - V (I + A)^-1, where V is the error of the targets.
    inverse = torch.linalg.solve_triangular(
        torch.from_numpy(factor.lower[:size]), torch.eye(size), upper=False, unitriangular=True
    )
    inverse *= torch.from_numpy(1 / factor.scales).float()
    spread = inverse.square_().sum(1).numpy() * np.square(factor.scales) - 1
    return energies, spread.astype(np.float32)


def expected_bits(energies: Floats, spread: Floats, step: float, shape: tuple[int, int]) -> float:
    """Return how many bits the superblocks and their lengths of a weight [N, K] are expected to take at a step.

    energies, spread: what `scaled_energies` returns
    """
    model, cut = encode_model(), ColumnCut.of(shape)
    variances = energies.mean(0, dtype=np.float64) / step**2
    squares = energies / step**2 + spread * variances * NOISE / (variances + NOISE)
    classes = np.searchsorted(model.limits[1:-1], squares, side="right")
    lengths = (model.bits[classes] + model.slopes[classes] * squares)[classes > 0]
    total = BLOCK_SIZE * float(lengths.sum()) + cut.strips * cut.superblocks * (8 * HEADER_BYTES + _LENGTH_BITS)
    for number in range(cut.superblocks):
        own = classes[:, cut.columns_of(number).start : cut.columns_of(number).stop]
        total += sum(_class_bits(np.bincount(strip, minlength=2)) for strip in own)
    return total


def _class_bits(counts: npt.NDArray[np.int64]) -> float:
    """Return how many bits the classes of a superblock, their frequencies and the states of the coder take."""
    blocks, there = int(counts.sum()), counts[counts > 0]
    if counts[0] == blocks:
        return 0.0
    shares = len(counts) - int(np.flatnonzero(counts)[0])
    coded = blocks * math.log2(blocks) - float((there * np.log2(there)).sum())
    return coded + 8 * (shares if shares > 1 else 0) + _STATE_BITS * min(columns.STRIPS, blocks)
