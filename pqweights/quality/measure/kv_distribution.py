"""The distribution of a model's keys and values before and after preconditioning (Han et al., arXiv:2502.02617).

A random rotation should make coordinates Gaussian (Section 2.2), so that the angles of the recursive polar transform
follow known densities (Lemma 2, Figure 2) and the norms of groups concentrate. This measures all three on the keys and
values that a model computes for a text, and the outlier channels of keys (kv_channels.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.codecs.polar_transform import ANGLE_BITS, GROUP, angle_density
from pqweights.common.documents import as_json
from pqweights.quality.measure.distribution import Normality, Tally
from pqweights.quality.measure.kv_channels import OUTLIER, Doubles, KeyChannels, measure_channels
from pqweights.quality.measure.kv_states import LayerStates, ModelStates

if TYPE_CHECKING:
    from torch import Tensor

LEVEL_COUNT = len(ANGLE_BITS)
# Distribution functions of angles are compared at the ends of this many equal bins, of which the most probable has a
# probability of 0.0005.
ANGLE_BINS = 1 << 13
# The bins of the total variation, which are also those of the plot: narrow enough to show peaks of single angles.
COARSE_BINS = 64
KEYS, VALUES = "keys", "values"

Counts = npt.NDArray[np.int64]
Progress = Callable[[int, int, str], None]  # called with the layers done, the layers in all, and what is being done


@dataclass(frozen=True, kw_only=True)
class AngleFit:
    """How close the angles of a level are to their density.

    ks: the Kolmogorov-Smirnov distance
    total_variation: half the sum of the differences of probability over COARSE_BINS equal bins; it sees what a KS of
        angles all around a circle does not, such as peaks at regular distances
    by_chance: about the total variation of as many independent angles with exactly this density
    """

    ks: float
    total_variation: float
    by_chance: float


@dataclass(frozen=True, kw_only=True)
class SideFigures:
    """The figures of vectors before or after preconditioning; each vector is divided by its norm / sqrt(size).

    coordinates: how close the coordinates are to N(0, 1)
    angles: how close the angles of each level are to their density
    radius_cv: the coefficient of variation of the norms of groups of 16 coordinates

    The last two are empty and None if the size is not a multiple of 16.
    """

    coordinates: Normality | None
    angles: tuple[AngleFit, ...]
    radius_cv: float | None


@dataclass(frozen=True, kw_only=True)
class StatesDistribution:
    """The figures of keys or values.

    kind: KEYS or VALUES
    layer: the number of the layer; None for all layers together
    sizes: the coordinates of a vector, ascending if layers differ
    vectors: how many were measured, those of all heads; vectors of zeros are left out
    norm_cv: the coefficient of variation of the norm over the tokens of a head, the mean over heads
    """

    kind: str
    layer: int | None
    sizes: tuple[int, ...]
    vectors: int
    norm_cv: float
    before: SideFigures
    after: SideFigures


@dataclass(frozen=True, kw_only=True, eq=False)
class KVDistribution:
    """The distribution of the keys and values of a model.

    tokens: how many tokens of the text were read
    bos: whether the first of them was BOS
    runtime: which library computed the model, in words
    layers: the figures of each layer, first of its keys, then of its values
    totals: those of all keys and of all values
    channels: the channels of the keys of each layer
    histograms: for KEYS and VALUES, before and after
    strongest_keys: the keys of the head with the largest channel, [tokens, size] f32; its layer and head come before
    """

    tokens: int
    bos: bool
    runtime: str
    layers: tuple[StatesDistribution, ...]
    totals: tuple[StatesDistribution, StatesDistribution]
    channels: tuple[KeyChannels, ...]
    histograms: dict[str, tuple[SideCounts, SideCounts]]
    strongest_keys: tuple[int, int, npt.NDArray[np.float32]]

    def to_json(self) -> dict[str, Any]:
        """Return the document of inspect --kv --json."""
        return {
            "tokens": self.tokens,
            "bos": self.bos,
            "runtime": self.runtime,
            "outlier_over_median": OUTLIER,
            "layers": as_json(self.layers),
            **{total.kind: as_json(total) for total in self.totals},
            "key_channels": [channels.to_json() for channels in self.channels],
        }


def distribution_of(states: ModelStates, *, progress: Progress = lambda done, total, what: None) -> KVDistribution:
    """Measure the distribution of the keys and values that read_states returned."""
    everything = {KEYS: _Count(), VALUES: _Count()}
    layers, channels = [], []
    for number, layer in enumerate(states.layers):
        progress(number, len(states.layers), f"layer {layer.layer}")
        for kind, vectors in ((KEYS, layer.keys), (VALUES, layer.values)):
            count = _Count.of(vectors)
            everything[kind].add(count)
            layers.append(count.figures(kind, layer.layer))
        channels.append(measure_channels(layer))
    progress(len(states.layers), len(states.layers), "")
    return KVDistribution(
        tokens=states.tokens,
        bos=states.bos,
        runtime=states.runtime,
        layers=tuple(layers),
        totals=(everything[KEYS].figures(KEYS, None), everything[VALUES].figures(VALUES, None)),
        channels=tuple(channels),
        histograms={kind: (count.before, count.after) for kind, count in everything.items()},
        strongest_keys=_strongest(states.layers, channels),
    )


def _strongest(
    layers: Iterable[LayerStates], channels: Iterable[KeyChannels]
) -> tuple[int, int, npt.NDArray[np.float32]]:
    layer, largest = max(zip(layers, channels, strict=True), key=lambda pair: pair[1].largest)
    head = int(largest.magnitudes.max(axis=1).argmax())
    return layer.layer, head, layer.keys[head].numpy()


class _Count:
    """What was counted of keys or values, and can be added to that of other layers."""

    def __init__(self) -> None:
        self.before, self.after = SideCounts(), SideCounts()
        self.norm_cvs: list[float] = []
        self.sizes: set[int] = set()
        self.vectors = 0

    @classmethod
    def of(cls, vectors: Tensor) -> _Count:
        """Count the vectors of a layer, [heads, tokens, size] f32."""
        from pqweights.inference.kv.rotated import rotation

        count, size = cls(), vectors.shape[-1]
        norms = vectors.double().norm(dim=-1)
        count.norm_cvs = [float(head.std(correction=0) / head.mean()) for head in norms if head.any()]
        scaled = (vectors[norms > 0].double() * (math.sqrt(size) / norms[norms > 0])[:, None]).float()
        count.sizes, count.vectors = {size}, len(scaled)
        count.before.count(scaled)
        count.after.count(scaled @ rotation(size, scaled.device).T)
        return count

    def add(self, other: _Count) -> None:
        """Add what was counted elsewhere."""
        self.before.add(other.before)
        self.after.add(other.after)
        self.norm_cvs += other.norm_cvs
        self.sizes |= other.sizes
        self.vectors += other.vectors

    def figures(self, kind: str, layer: int | None) -> StatesDistribution:
        """Return the figures of everything that was counted."""
        return StatesDistribution(
            kind=kind,
            layer=layer,
            sizes=tuple(sorted(self.sizes)),
            vectors=self.vectors,
            norm_cv=float(np.mean(self.norm_cvs)) if self.norm_cvs else 0.0,
            before=self.before.figures(),
            after=self.after.figures(),
        )


class SideCounts:
    """What was counted of normalised vectors before or after preconditioning.

    coordinates: how many are in each bin of HISTOGRAM_EDGES of distribution.py, [bins]
    angles: how many are in each bin, [levels, ANGLE_BINS]
    """

    def __init__(self) -> None:
        self._tally = Tally()
        self.angles: Counts = np.zeros((LEVEL_COUNT, ANGLE_BINS), dtype=np.int64)
        self._radii, self._radius_sum, self._radius_squares = 0, 0.0, 0.0

    @property
    def coordinates(self) -> Counts:
        """See above."""
        return self._tally.histogram

    def count(self, vectors: Tensor) -> None:
        """Count vectors, [n, size] f32, of mean square 1."""
        from pqweights.inference.kv.rotated import polar

        self._tally.add(vectors.numpy().flatten())
        if vectors.shape[-1] % GROUP:
            return
        angles, radii = polar(vectors)
        for level, of_level in enumerate(angles, 1):
            self.angles[level - 1] += np.histogram(of_level.numpy(), bins=angle_edges(level))[0]
        lengths = radii.double().numpy()
        self._radii += lengths.size
        self._radius_sum += float(lengths.sum())
        self._radius_squares += float((lengths * lengths).sum())

    def add(self, other: SideCounts) -> None:
        """Add what was counted elsewhere."""
        self._tally.merge(other._tally)
        self.angles = self.angles + other.angles
        self._radii += other._radii
        self._radius_sum += other._radius_sum
        self._radius_squares += other._radius_squares

    def figures(self) -> SideFigures:
        """Return the figures of everything that was counted."""
        has_angles = self._radii > 0
        angles = [_angle_fit(level, counts) for level, counts in enumerate(self.angles, 1)] if has_angles else []
        spread = self._radii * self._radius_squares / self._radius_sum**2 - 1 if has_angles else 0.0
        return SideFigures(
            coordinates=self._tally.fit(),
            angles=tuple(angles),
            radius_cv=math.sqrt(max(0.0, spread)) if has_angles else None,
        )


@functools.cache
def angle_edges(level: int) -> Doubles:
    """Return the ends of the bins of a level's angles in radians, [ANGLE_BINS + 1]."""
    # The angle of a float32 may be the float32 above 2 pi, or above pi / 2.
    last = float(np.float32(2 * math.pi if level == 1 else math.pi / 2))
    return np.linspace(0, last, ANGLE_BINS + 1)


@functools.cache
def _angle_law(level: int) -> Doubles:
    """Return the probability of angles up to each end of a bin, [ANGLE_BINS + 1], by the trapezoidal rule."""
    edges = angle_edges(level)
    density = np.maximum(angle_density(level, edges), 0)
    below = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    law: Doubles = below / below[-1]
    return law


def _angle_fit(level: int, counts: Counts) -> AngleFit:
    """Return how close counted angles, [ANGLE_BINS], are to their density."""
    count, law = int(counts.sum()), _angle_law(level)
    below = np.concatenate([[0], np.cumsum(counts)]) / count
    expected = np.diff(law[:: ANGLE_BINS // COARSE_BINS])
    shares = counts.reshape(COARSE_BINS, -1).sum(axis=1) / count
    # The mean absolute error of a frequency is sqrt(2 / pi) of its standard deviation.
    errors = np.sqrt(2 / math.pi * expected * (1 - expected) / count)
    return AngleFit(
        ks=float(np.abs(below - law).max()),
        total_variation=float(np.abs(shares - expected).sum() / 2),
        by_chance=float(errors.sum() / 2),
    )


def random_radius_cv(size: int) -> float:
    """Return the coefficient of variation of the norm of 16 coordinates of a vector in a random direction.

    size: all coordinates of the vector

    The share of 16 coordinates in the squared norm has the distribution Beta(8, size / 2 - 8).
    """
    if size == GROUP:
        return 0.0
    half, whole = GROUP / 2, size / 2
    mean = math.exp(math.lgamma(half + 0.5) + math.lgamma(whole) - math.lgamma(half) - math.lgamma(whole + 0.5))
    return math.sqrt(GROUP / size / mean**2 - 1)
