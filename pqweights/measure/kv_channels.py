"""The channels of keys: outliers, the pairs that RoPE makes of them, and their circles (Wu et al., arXiv:2502.00527).

Figure 1 of the paper shows that single channels of keys are outliers, that usually one channel of a pair that RoPE
rotates together is one, and that both together form a circle in their plane, whose radius is easy to quantize.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.measure.kv_states import LayerStates

if TYPE_CHECKING:
    from pqweights.kv.rope import RopePairs

# A channel is an outlier if its mean magnitude is at least so many times that of the median channel of its head.
OUTLIER = 4.0

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """Two channels of a head's keys that RoPE rotates together, (x, y), over all tokens.

    layer, head: where they are
    channels: their numbers
    magnitudes: the mean of |x| and that of |y|, each divided by that of the median channel of the head
    radius_cv: the coefficient of variation (standard deviation over mean) of the radius
    coordinate_cvs: those of |x| and |y|; 0.48 for a circle, 0.76 for Gaussian numbers
    direction: the length of the mean of (x, y) / radius: 1 if all tokens lie in one direction, 0 all around a circle
    """

    layer: int
    head: int
    channels: tuple[int, int]
    magnitudes: tuple[float, float]
    radius_cv: float
    coordinate_cvs: tuple[float, float]
    direction: float

    @property
    def outliers(self) -> int:
        """How many of the two channels are outliers."""
        return sum(magnitude >= OUTLIER for magnitude in self.magnitudes)

    def to_json(self) -> dict[str, Any]:
        """Return all figures by name."""
        return {**vars(self), **{key: list(getattr(self, key)) for key in PAIRED}, "outliers": self.outliers}


PAIRED = ("channels", "magnitudes", "coordinate_cvs")


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyChannels:
    """The channels of the keys of one layer.

    magnitudes: the mean magnitude of each channel over that of the median channel of its head, [heads, size]
    radius_cv: the mean coefficient of variation of the radius over all pairs; None without RoPE
    strongest: the pair with the largest channel of the layer; None without RoPE
    outliers: all pairs with a channel that is an outlier, the strongest first
    """

    layer: int
    magnitudes: Doubles
    radius_cv: float | None
    strongest: KeyPair | None
    outliers: tuple[KeyPair, ...]

    @property
    def largest(self) -> float:
        """The magnitude of the largest channel over that of the median channel of its head."""
        return float(self.magnitudes.max())

    @property
    def outlier_channels(self) -> int:
        """How many channels of all heads are outliers."""
        return int((self.magnitudes >= OUTLIER).sum())

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the layer in inspect --kv --json."""
        return {
            "layer": self.layer,
            "channels": self.magnitudes.size,
            "outlier_channels": self.outlier_channels,
            "largest_over_median": self.largest,
            "radius_cv": self.radius_cv,
            "strongest": self.strongest and self.strongest.to_json(),
            "outlier_pairs": [pair.to_json() for pair in self.outliers],
        }


def measure_channels(states: LayerStates) -> KeyChannels:
    """Measure the channels of a layer's keys."""
    keys = states.keys.double().numpy()
    mean = np.abs(keys).mean(axis=1)
    median = np.median(mean, axis=-1, keepdims=True)
    magnitudes = np.divide(mean, median, out=np.zeros_like(mean), where=median > 0)
    pairs = () if states.pairs is None else _pairs(states, keys, magnitudes, states.pairs)
    ordered = sorted(pairs, key=lambda pair: max(pair.magnitudes), reverse=True)
    return KeyChannels(
        layer=states.layer,
        magnitudes=magnitudes,
        radius_cv=float(np.mean([pair.radius_cv for pair in pairs])) if pairs else None,
        strongest=ordered[0] if ordered else None,
        outliers=tuple(pair for pair in ordered if pair.outliers),
    )


def _pairs(states: LayerStates, keys: Doubles, magnitudes: Doubles, pairs: RopePairs) -> tuple[KeyPair, ...]:
    """Measure all pairs of a layer. keys: [heads, tokens, size]"""
    import torch

    firsts, seconds = (each.tolist() for each in pairs.split(torch.arange(pairs.size)))
    x, y = keys[..., firsts], keys[..., seconds]  # [heads, tokens, pairs]
    radius = np.hypot(x, y)
    unit = np.divide(x + 1j * y, radius, out=np.zeros(radius.shape, dtype=np.complex128), where=radius > 0)
    direction = np.abs(unit.mean(axis=1))
    of_radius, of_x, of_y = (_variation(each) for each in (radius, np.abs(x), np.abs(y)))
    return tuple(
        KeyPair(
            layer=states.layer,
            head=head,
            channels=(first, second),
            magnitudes=(float(magnitudes[head, first]), float(magnitudes[head, second])),
            radius_cv=float(of_radius[head, number]),
            coordinate_cvs=(float(of_x[head, number]), float(of_y[head, number])),
            direction=float(direction[head, number]),
        )
        for head in range(len(keys))
        for number, (first, second) in enumerate(zip(firsts, seconds, strict=True))
    )


def _variation(values: Doubles) -> Doubles:
    """Return the coefficient of variation over tokens, [heads, tokens, n] -> [heads, n]; 0 where all are 0."""
    mean = values.mean(axis=1)
    variation: Doubles = np.divide(values.std(axis=1), mean, out=np.zeros_like(mean), where=mean > 0)
    return variation
