"""Transform coding of keys and values, in a basis that follows from the model's weights.

A head's keys and values lie mostly in a part of its coordinates that the weights decide: if the inputs of the
projection W are uncorrelated, keys have the covariance W W^T. And not all errors count alike: an error e of a key
changes scores by <q, e>, so that what counts is its product with the covariance of queries; an error of a value counts
by what the output projection makes of it. The Karhunen-Loeve transform of the covariance in that measure gives
coefficients of very different variance, most of which need few bits or none (reverse water-filling: Cover and Thomas,
Elements of Information Theory, Theorem 10.3.3). No data is needed for it, and nothing has to be stored with a cache.

Keys are rotated back by the angles of RoPE first, since before RoPE they are alike at all positions. Mean and variance
of the coefficients are those of the first tokens. Each vector has a factor of its own, and Lloyd-Max levels.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pqweights.runtime.kv.codes import MOST_BITS, Runs, coded, halves, levels_of
from pqweights.runtime.kv.polar_rope import RopePairs
from pqweights.runtime.kv.states import Parts, StateQuantizer

# Coefficients with the same number of bits, in the order of their variances.
TOGETHER = 8
# The relative errors of Lloyd-Max levels with 0, 1, ... 8 bits for Gaussian numbers.
ERRORS = (1.0, 0.3634, 0.1175, 0.03454, 0.009497, 0.002499, 0.0006417, 0.0001633, 0.00004128)
# How many tokens what the weights say of variances, and a mean of zero, count for beside the first tokens.
PRIOR_VARIANCE, PRIOR_MEAN = 16, 4
FIRST_TOKENS = 64
# Angles are computed for so many positions at least, and then for twice as many.
LEAST_POSITIONS = 4096


@dataclass(frozen=True, eq=False)
class StateBasis:
    """The transform of the keys or values of a layer.

    analysis: [heads, size, size] f32, by which rows of states are multiplied
    synthesis: its inverse
    variances: of the coefficients, as the weights say, [heads, size] f32; only their proportions matter
    """

    analysis: Tensor
    synthesis: Tensor
    variances: Tensor

    def __deepcopy__(self, known: dict[int, object]) -> StateBasis:
        """Return the basis itself: it never changes, and copies of a cache share it."""
        return self


@functools.lru_cache(maxsize=8)
def _angles(frequencies: tuple[float, ...], device: torch.device, positions: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of the first positions, twice [positions, frequencies] f32."""
    with torch.inference_mode(False):  # others may use them in another mode
        steps = torch.arange(positions, device=device, dtype=torch.float64)
        angles = steps[:, None] * torch.tensor(frequencies, device=device, dtype=torch.float64)
        return angles.cos().float(), angles.sin().float()


@dataclass(frozen=True, eq=False)
class LayerRope:
    """The angles by which RoPE rotates pairs of coordinates. frequencies: per token, [rotated / 2] f32"""

    pairs: RopePairs
    frequencies: Tensor

    @functools.cached_property
    def _known_frequencies(self) -> tuple[float, ...]:
        return tuple(self.frequencies.tolist())

    @torch.no_grad()
    def applied(self, states: Tensor, start: int, sign: int) -> Tensor:
        """Rotate states [..., tokens, size] of the tokens from `start` on by their angles, forward (1) or back (-1)."""
        end = start + states.shape[-2]
        positions = max(LEAST_POSITIONS, 1 << (end - 1).bit_length())
        cos, sin = (table[start:end] for table in _angles(self._known_frequencies, states.device, positions))
        rotated = self.pairs.rotated
        shape = (rotated // 2, 2) if self.pairs.interleaved else (2, rotated // 2)
        # Views, so that each half is written where it belongs.
        result = torch.empty_like(states, memory_format=torch.contiguous_format)
        ends = -1 if self.pairs.interleaved else -2
        (x, y), (to_x, to_y) = (whole[..., :rotated].unflatten(-1, shape).unbind(ends) for whole in (states, result))
        torch.mul(x, cos, out=to_x).addcmul_(y, sin, value=-sign)
        torch.mul(y, cos, out=to_y).addcmul_(x, sin, value=sign)
        result[..., rotated:] = states[..., rotated:]
        return result


@dataclass(frozen=True)
class LayerBases:
    """The bases of a layer. rope: the angles of RoPE; None without it"""

    keys: StateBasis
    values: StateBasis
    rope: LayerRope | None


class KarhunenLoeve(StateQuantizer):
    """The quantizer.

    basis: of the layer's keys or values
    bits: of a coefficient on average, a multiple of 1/4
    rope: the angles of RoPE for keys; None for values, and for models without RoPE
    """

    first = FIRST_TOKENS

    def __init__(self, basis: StateBasis, bits: float, rope: LayerRope | None) -> None:
        self._basis, self.bits, self._rope = basis, bits, rope

    @torch.no_grad()
    def fit(self, states: Tensor, shared: Parts | None, start: int) -> Parts:
        """Return the shared parts with which states are encoded: those of earlier states if they serve."""
        if shared is not None:
            return shared
        coefficients = self._coefficients(states, start)
        count = coefficients.shape[2]
        mean = halves(coefficients.sum(2) / (count + PRIOR_MEAN))
        squares = coefficients.sub_(mean.float()[:, :, None]).square_().sum(2)
        prior = self._basis.variances.to(coefficients.device)
        prior = prior * (squares.mean(-1, keepdim=True) / count / prior.mean(-1, keepdim=True))
        variance = (squares + PRIOR_VARIANCE * prior) / (count + PRIOR_VARIANCE)
        spread, order = variance.sqrt().sort(dim=-1, descending=True)
        spread = halves(spread).clamp(min=torch.finfo(torch.float16).tiny)
        widths = allocated(spread.float().log().mean((0, 1)).exp().square(), self.bits)
        repeated = torch.tensor(widths, dtype=torch.uint8, device=coefficients.device).expand(len(coefficients), 1, -1)
        order = order.to(torch.uint8 if order.shape[-1] <= 256 else torch.int16)
        return {"mean": mean, "spread": spread, "order": order, "widths": repeated.contiguous()}

    @torch.no_grad()
    def encode(self, states: Tensor, shared: Parts, start: int) -> Parts:
        """Encode states, [batch, heads, rows * step, size] f32, into parts [batch, heads, rows, ...]."""
        runs = _runs(shared["widths"])
        used = sum(count for count, _ in runs)
        # The columns of the analysis that go with the coefficients in their order, so that each has the variance 1.
        analysis = self._basis.analysis.to(states.device)
        order, spread = shared["order"].long()[..., :used], shared["spread"].float()[..., :used]
        columns = order[:, :, None].expand(-1, -1, analysis.shape[-1], -1)
        chosen = analysis.expand(len(order), -1, -1, -1).gather(3, columns) / spread[:, :, None]
        mean = shared["mean"].float().gather(-1, order) / spread
        before_rope = states if self._rope is None else self._rope.applied(states, start, -1)
        scaled = torch.baddbmm(mean.flatten(0, 1)[:, None], before_rope.flatten(0, 1), chosen.flatten(0, 1), beta=-1)
        scaled = scaled.unflatten(0, states.shape[:2])
        rms = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True) / math.sqrt(used)
        codes, reached = coded(scaled / torch.where(rms > 0, rms, 1), runs)
        weighted = reached * spread.square()[:, :, None]
        factor = scaled.mul_(weighted).sum(-1) / reached.mul_(weighted).sum(-1)
        return {"codes": codes, "factor": halves(factor)}

    def decode(self, rows: Parts, shared: Parts, start: int) -> Tensor:
        """Decode whole rows, into [batch, heads, rows * step, size] f32."""
        scaled = levels_of(rows, _runs(shared["widths"]))
        # The rows of the synthesis that go with the coefficients in their order, for each sequence and head.
        synthesis = self._basis.synthesis.to(scaled.device)
        order = shared["order"].long()[..., : scaled.shape[-1], None].expand(-1, -1, -1, synthesis.shape[-1])
        chosen = synthesis.expand(len(order), -1, -1, -1).gather(2, order)
        chosen *= shared["spread"].float()[..., : scaled.shape[-1], None]
        mean = shared["mean"].float()[:, :, None] @ synthesis
        states = torch.baddbmm(mean.flatten(0, 1), scaled.flatten(0, 1), chosen.flatten(0, 1))
        states = states.unflatten(0, scaled.shape[:2])
        return states if self._rope is None else self._rope.applied(states, start, 1)

    def _coefficients(self, states: Tensor, start: int) -> Tensor:
        before_rope = states if self._rope is None else self._rope.applied(states, start, -1)
        return before_rope @ self._basis.analysis.to(states.device)


def allocated(variances: Tensor, bits: float) -> list[int]:
    """Return the bits of each eight coefficients, whose mean is at most `bits`, so that the error is least.

    variances: in descending order, [size]
    """
    eights = variances.double().unflatten(0, (-1, TOGETHER)).mean(-1).tolist()
    widths = [0] * len(eights)
    for _ in range(max(1, int(bits * len(eights)))):
        gains = [
            variance * (ERRORS[width] - ERRORS[width + 1]) if width < MOST_BITS else -1.0
            for variance, width in zip(eights, widths, strict=True)
        ]
        widths[gains.index(max(gains))] += 1
    return widths


def _runs(widths: Tensor) -> Runs:
    """Return how many coefficients have the same number of bits, in their order, and the bits; none without bits.

    Widths only decrease, so that the coefficients without bits are the last ones.
    """
    runs: list[tuple[int, int]] = []
    for bits, eights in itertools.groupby(widths[0, 0].tolist()):
        if bits:
            runs.append((TOGETHER * len(list(eights)), bits))
    return runs
