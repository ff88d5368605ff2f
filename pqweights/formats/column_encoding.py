"""The encoder of the codec hadamard-trellis-columns: each column makes up for the errors of those before it.

With second moments H of the inputs of a matrix W and mean squared gradients g of its outputs, an error E = W - Q costs
about the sum over the rows i of g_i e_i H e_i. Damped, H = (I + A) D (I + A)' with A strictly upper triangular, which
gives the target of column k,

    t_k = w_k + sum over j < k of (w_j - q_j) A_jk,

and the cost as the sum of D_k |t_k - q_k|^2 (LDLQ: Chee et al., arXiv:2307.13304). Rows are multiplied by the root of g
and columns by that of D before all are quantized with the same step, so each error counts alike. docs/trellis.md has
the method, docs/format.md the bytes. Of many inputs, H is known in blocks on its diagonal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pqweights.formats.columns import ColumnCodes, ColumnCut
from pqweights.formats.master import Bytes, Doubles, Floats
from pqweights.formats.trellis_tables import NOISE, encode_model
from pqweights.kernels import BLOCK_SIZE, columns
from pqweights.kernels.openmp import map_in_threads
from pqweights.kernels.trellis import HEADER_BYTES

Moments = npt.NDArray[np.floating[Any]]

# What may be added to the diagonal of H, as a share of its mean, and what usually is: another one has to promise errors
# that cost less by the factor _WORTH, and a smaller one that is not below det(H)**(1/K) by more than _MOST_ABOVE.
DAMPINGS = (1e-4, 3e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
DAMPING, _WORTH, _MOST_ABOVE = 0.01, 1.15, 16.0
# Gradients are raised by this share of their mean, and no row's w H w counts as less than this share of it.
_GRADIENT_SHARE, _ENERGY_SHARE = 0.1, 1e-3
# Up to about so many inputs H is one matrix; above, errors are fed back within blocks of them alone.
MOST_INPUTS = 8192
# Up to so many columns a block of H is factorized in float64; columns that are copied or inverted together.
_MOST_IN_DOUBLES, _CHUNK_COLUMNS = 4096, 1024
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
    inputs: InputFactors,
    *,
    gradients: Doubles | None,
    step: float,
    states: int,
    threads: int = 1,
) -> tuple[ColumnCodes, ColumnMeasures]:
    """Encode a weight f32 [N, K].

    inputs: their second moments H, factorized
    gradients: [N], the mean squared gradients of the outputs; None to weigh all outputs by their relative errors
    step: of the weights, once they are scaled
    states: of the trellis: one of kernels.trellis.STATES
    threads: that groups of 2048 rows are shared out to; the groups that are left then are shared by all of them. The
        codes are the same for any number

    Raises ValueError for arrays of other shapes, for what is not finite, or a step that leaves no room for the scales.
    """
    gradients = _checked(weight, inputs, gradients)
    rows, row_exponent = stored_scales(row_scales(gradients))
    scaled_step = _Step.of(step, row_exponent + inputs.exponent)
    groups = range(0, len(weight), columns.GROUP_ROWS)
    alone = groups[: len(groups) // threads * threads]
    strips: list[list[Bytes]] = [[] for _ in range(ColumnCut.of(weight.shape).strips)]
    errors, weighed = 0.0, 0.0
    for factor in inputs.blocks:
        job, parts = _Job(weight, factor, rows, scaled_step, states), dict[int, tuple[list[list[Bytes]], Doubles]]()

        def encode_group(start: int, job: _Job = job, parts: dict[int, Any] = parts) -> None:
            parts[start] = job.encode(slice(start, start + columns.GROUP_ROWS))

        map_in_threads(encode_group, alone, threads)
        if rest := groups[len(alone) :]:
            parts[rest.start] = job.encode(slice(rest.start, None), threads)
        encoded_parts = [parts[start] for start in sorted(parts)]
        for strip, superblocks in zip(strips, (own for encoded, _ in encoded_parts for own in encoded), strict=True):
            strip += superblocks
        plain, damped = np.concatenate([squares for _, squares in encoded_parts], axis=1)
        errors += float(plain.sum())
        weighed += float(gradients @ (damped - factor.damping * plain))
    codes = ColumnCodes(
        trellis=np.concatenate([superblock for strip in strips for superblock in strip]),
        lengths=np.array([[len(superblock) for superblock in strip] for strip in strips], dtype=np.int32),
        row_scales=rows,
        column_scales=np.concatenate([factor.stored for factor in inputs.blocks]),
    )
    energy = float(np.einsum("ij,ij->", weight, weight, dtype=np.float64))  # without a copy of the weight
    return codes, ColumnMeasures(energy=energy, error=errors, weighed_error=max(0.0, weighed))


def _checked(weight: Floats, inputs: InputFactors, gradients: Doubles | None) -> Doubles:
    """Return the g of each row. Raises ValueError for what cannot be encoded."""
    if weight.ndim != 2 or not weight.size:
        raise ValueError(f"expected a weight [N, K], found one of shape {list(weight.shape)}")
    if weight.shape[1] != inputs.columns:
        raise ValueError(f"moments: expected those of {weight.shape[1]} inputs, found those of {inputs.columns}")
    if gradients is not None and gradients.shape != (len(weight),):
        raise ValueError(f"gradients: expected shape [{len(weight)}], found {list(gradients.shape)}")
    _check_finite("weight", weight)
    if gradients is None:
        energies = output_energies(weight, inputs)
        least = _ENERGY_SHARE * energies.mean()
        return 1 / np.maximum(energies, least) if least > 0 else np.ones(len(weight))
    _check_finite("gradients", gradients)
    _check_squares("gradients", gradients)
    return gradients


def _check_finite(name: str, array: npt.NDArray[np.floating[Any]]) -> None:
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: expected finite numbers, found NaN or infinity")


def _check_squares(name: str, squares: npt.NDArray[np.floating[Any]]) -> None:
    if (least := float(squares.min(initial=0))) < 0:
        raise ValueError(f"{name}: expected means of squares, found {least}")


def output_energies(weight: Floats, inputs: InputFactors) -> Doubles:
    """Return w H w of each row of a weight, [N]: the mean squares of the outputs."""
    result = np.zeros(len(weight))
    for start in range(0, len(weight), columns.GROUP_ROWS):
        for factor in inputs.blocks:
            rows = torch.from_numpy(weight[start : start + columns.GROUP_ROWS, factor.columns])
            outputs = (rows / factor.of_columns) @ torch.from_numpy(factor.feedback[: len(factor.scales)]).T
            outputs *= factor.of_columns * torch.from_numpy(factor.scales).float()
            squares = outputs.square_().sum(1, dtype=torch.float64)
            squares -= factor.damping * rows.square().sum(1, dtype=torch.float64)
            result[start : start + len(rows)] += squares.clamp(min=0).numpy()
    return result


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


# --- inputs ---


def moment_blocks(size: int) -> list[slice]:
    """Return the runs of columns, whole superblocks, of which H has a block on its diagonal: one up to the cap."""
    cut = ColumnCut.of((1, size))
    width = cut.blocks * -(-cut.superblocks // -(-size // MOST_INPUTS))
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Factor:
    """A block of H, factorized: (I + A) D (I + A)'.

    columns: which it is for
    feedback: f32 [K + 3, K] as of `feedback_room`: A transposed, with ones on the diagonal, for scaled columns
    scales: f64 [K], the root of D
    stored: u8 [K], the scales of the columns that are stored
    damping: what was added to the diagonal of H
    """

    columns: slice
    feedback: Floats
    scales: Doubles
    stored: Bytes
    damping: float

    @property
    def of_columns(self) -> torch.Tensor:
        """What stored scales stand for, f32 [K]."""
        return torch.from_numpy(factors_of(self.stored)).float()

    def spread(self) -> Doubles:
        """Return by what the variance of errors is multiplied that are fed back, [K].

        What is fed back, E A, is V - V (I + A)^-1, where V is the error of the targets.
        """
        size = len(self.scales)
        feedback = torch.from_numpy(self.feedback[:size])
        units, total = self.of_columns * torch.from_numpy(self.scales).float(), torch.zeros(size)
        for start in range(0, size, _CHUNK_COLUMNS):
            stop = min(start + _CHUNK_COLUMNS, size)
            identity = torch.eye(size - start, stop - start)
            inverse = torch.linalg.solve_triangular(feedback[start:, start:], identity, upper=False, unitriangular=True)
            total[start:] += inverse.div_(units[start:stop]).square_().sum(1)
        return (total * units.square() - 1).double().numpy()


@dataclass(frozen=True, eq=False, kw_only=True)
class InputFactors:
    """The second moments H of the inputs of a weight, factorized, in blocks on its diagonal.

    blocks: one for each of `moment_blocks`
    exponent: of the power of two by which the factors of stored scales are larger than the scales' inverses
    """

    blocks: tuple[_Factor, ...]
    exponent: int

    @staticmethod
    def of(moments: list[Moments], damping: float = DAMPING) -> InputFactors:
        """Factorize the blocks of H, [columns, columns] each, which are taken out of the list.

        damping: one of DAMPINGS; where there is no factor with it, the next one with which there is

        Raises ValueError for blocks of other sizes, what is not finite, and for moments that are not positive.
        """
        sizes = [len(block) for block in moments]
        parts = moment_blocks(max(1, sum(sizes)))
        if [block.shape for block in moments] != [(part.stop - part.start,) * 2 for part in parts]:
            raise ValueError(f"moments: expected square blocks as of {parts}, found {[b.shape for b in moments]}")
        factors = [_factorized(moments.pop(0), damping) for _ in parts]
        stored, exponent = stored_scales(np.concatenate([scales for _, scales, _ in factors]))
        blocks = []
        for part, (lower, scales, added) in zip(parts, factors, strict=True):
            # Errors are fed back in the scale of the columns.
            own, size = factors_of(stored[part]).astype(np.float32), len(scales)
            lower[:size] *= (1 / own)[:, None]
            lower[:size] *= own
            blocks.append(_Factor(columns=part, feedback=lower, scales=scales, stored=stored[part], damping=added))
        return InputFactors(blocks=tuple(blocks), exponent=exponent)

    @property
    def columns(self) -> int:
        """How many there are."""
        return sum(len(factor.scales) for factor in self.blocks)


def best_damping(moments: Sequence[Moments], others: Sequence[Floats]) -> float:
    """Return the damping with which errors are expected to cost least on inputs that H does not know.

    moments: the blocks of H
    others: such inputs for each block, [rows, columns]

    Scaled columns have equal errors, and these are fed back: so errors of the weights have a covariance proportional to
    the inverse of S, the damped H, and at an equal number of bits to det(S)**(1/K) S**-1. What they cost is the mean of
    that over other inputs x, x S**-1 x'. Too little damping fits H to its sample; too much hides correlations. If the
    damping is far below det(S)**(1/K), columns get no bits, and less of it would change nothing.
    """
    columns, usual = sum(map(len, moments)), DAMPINGS.index(DAMPING)

    @functools.cache
    def cost(number: int) -> float:
        share, logarithms, total = DAMPINGS[number], 0.0, 0.0
        for block, values in zip(moments, others, strict=True):
            dtype = torch.float64 if len(block) <= _MOST_IN_DOUBLES else torch.float32
            matrix = torch.from_numpy(block).to(dtype, copy=True)
            added = share * float(matrix.diagonal().mean())
            matrix.diagonal().add_(added)
            factor, failed = torch.linalg.cholesky_ex(matrix)
            del matrix
            own = 0.0 if failed else 2 * float(factor.diagonal().double().log().sum())
            if failed or (number < usual and own / len(block) > math.log(_MOST_ABOVE * added)):
                return math.inf
            inputs = torch.linalg.solve_triangular(factor, torch.from_numpy(values).T.to(dtype), upper=False)
            total += float(inputs.square_().sum(dtype=torch.float64))
            logarithms += own
        return logarithms / columns + math.log(total) if total else 0.0

    best = usual
    for step in (-1, 1):
        while 0 <= best + step < len(DAMPINGS) and cost(best + step) < cost(best):
            best += step
    return DAMPINGS[best] if cost(best) < cost(usual) - math.log(_WORTH) else DAMPING


def _factorized(moments: Moments, damping: float) -> tuple[Floats, Doubles, float]:
    """Return I + A transposed, as of `feedback_room`, the root of D, and what was added to the diagonal of H."""
    _check_finite("moments", moments)
    _check_squares("moments", np.diagonal(moments))
    size = len(moments)
    mean = float(np.diagonal(moments).mean(dtype=np.float64)) or 1.0
    dtype = torch.float64 if size <= _MOST_IN_DOUBLES else torch.float32
    for share in DAMPINGS[DAMPINGS.index(damping) :]:
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
    for start in range(0, size, _CHUNK_COLUMNS):
        own = torch.from_numpy(lower)[start : min(start + _CHUNK_COLUMNS, size)]
        own.copy_(factor[size - start - len(own) : size - start].flip(0, 1))
        own /= torch.from_numpy(scales[start : start + len(own)]).float()[:, None]
    return lower, scales, share * mean


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
    """What the groups of a weight share, of the columns of a block of H."""

    def __init__(self, weight: Floats, factor: _Factor, rows: Bytes, step: _Step, states: int) -> None:
        self.weight, self.step, self.states = weight[:, factor.columns], step, states
        self.blocks = ColumnCut.of(weight.shape).blocks
        row_factors, column_factors = factors_of(rows), factors_of(factor.stored)
        self.row_factors = (np.ldexp(1.0, -step.exponent) / row_factors).astype(np.float32)
        self.column_factors = (1 / column_factors).astype(np.float32)
        self.feedback = factor.feedback
        squared = column_factors**2
        self.weights = np.stack([squared, factor.scales**2 * squared], axis=1).astype(np.float32)
        # From squares of coordinates, rotated back, to those of the weights.
        self.units = np.square(row_factors * np.ldexp(1.0, step.exponent) / BLOCK_SIZE)

    def encode(self, rows: slice, threads: int = 1) -> tuple[list[list[Bytes]], Doubles]:
        """Return the superblocks of each strip of some groups, and squared errors, plain and by H: [2, rows]."""
        weight, row_factors, model = self.weight[rows], self.row_factors[rows], encode_model()
        groups = columns.load(np.ascontiguousarray(weight), row_factors, self.column_factors, threads=threads)
        squares = np.zeros((2, len(groups) * columns.GROUP_ROWS))
        strips: list[list[Bytes]] = [[] for _ in range(-(-len(weight) // BLOCK_SIZE))]
        for start in range(0, weight.shape[1], self.blocks):
            own = range(start, min(start + self.blocks, weight.shape[1]))
            chosen = columns.search(
                groups,
                own,
                self.feedback,
                weights=self.weights[own.start : own.stop],
                model=model,
                states=self.states,
                step=self.step.mantissa,
                threads=threads,
            )
            squares += np.stack([of.squares for of in chosen]).transpose(1, 0, 3, 2).reshape(2, -1)

            def pack(number: int, chosen: list[columns.ColumnNumbers] = chosen) -> None:
                of_group = strips[number * columns.STRIPS : (number + 1) * columns.STRIPS]
                packed = columns.pack(
                    chosen[number], strips=len(of_group), model=model, states=self.states, step=self.step.stored
                )
                for strip, superblock in zip(of_group, packed, strict=True):
                    strip.append(superblock)

            map_in_threads(pack, range(len(chosen)), min(threads, len(chosen)))
        return strips, squares[:, : len(weight)] * self.units[rows]


# --- the size ---


def scaled_energies(weight: Floats, inputs: InputFactors, *, gradients: Doubles | None) -> Floats:
    """Return the mean squares of scaled blocks, f32 [strips, K]. The arguments are as of `encode_columns`."""
    rows = row_scales(_checked(weight, inputs, gradients)).astype(np.float32)
    cut = ColumnCut.of(weight.shape)
    energies = np.empty((cut.strips, cut.columns), dtype=np.float32)
    for strip in range(cut.strips):
        own = slice(strip * BLOCK_SIZE, (strip + 1) * BLOCK_SIZE)
        energies[strip] = np.square(weight[own] * rows[own, None]).sum(0) / BLOCK_SIZE
    for factor in inputs.blocks:
        energies[:, factor.columns] *= np.square(factor.scales).astype(np.float32)
    return energies


def spread_of(inputs: InputFactors) -> Floats:
    """Return by what the variance of errors is multiplied that are fed back, f32 [K]."""
    return np.concatenate([factor.spread() for factor in inputs.blocks]).astype(np.float32)


def expected_bits(energies: Floats, spread: Floats, step: float, shape: tuple[int, int]) -> float:
    """Return how many bits the superblocks and their lengths of a weight [N, K] are expected to take at a step.

    energies, spread: of `scaled_energies` and `spread_of`
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
