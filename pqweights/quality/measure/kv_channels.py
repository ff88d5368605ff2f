"""The channels of keys: outliers, the pairs that RoPE makes of them, and their circles (Wu et al., arXiv:2502.00527).

Figure 1 of the paper shows that some channels of keys are outliers, at most tokens one of the two that RoPE rotates
together, and that both together form a circle in their plane, whose radius is easy to quantize.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.common.documents import as_json
from pqweights.quality.measure.kv_states import LayerStates

if TYPE_CHECKING:
    from pqweights.inference.kv.polar_rope import RopePairs

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
    alone: of the tokens at which x or y is OUTLIER times the median or more, the share at which the other one is not;
        None if there are no such tokens
    """

    layer: int
    head: int
    channels: tuple[int, int]
    magnitudes: tuple[float, float]
    radius_cv: float
    coordinate_cvs: tuple[float, float]
    direction: float
    alone: float | None

    @property
    def outliers(self) -> int:
        """How many of the two channels are outliers."""
        return sum(magnitude >= OUTLIER for magnitude in self.magnitudes)

    def to_json(self) -> dict[str, Any]:
        """Return all figures by name."""
        return {**as_json(self), "outliers": self.outliers}


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
    median = np.median(np.abs(keys).mean(axis=1), axis=-1)[:, None, None]
    scaled = np.divide(keys, median, out=np.zeros_like(keys), where=median > 0)
    magnitudes = np.abs(scaled).mean(axis=1)
    pairs = () if states.pairs is None else _pairs(states.layer, scaled, states.pairs)
    ordered = sorted(pairs, key=lambda pair: max(pair.magnitudes), reverse=True)
    return KeyChannels(
        layer=states.layer,
        magnitudes=magnitudes,
        radius_cv=float(np.mean([pair.radius_cv for pair in pairs])) if pairs else None,
        strongest=ordered[0] if ordered else None,
        outliers=tuple(pair for pair in ordered if pair.outliers),
    )


def _pairs(layer: int, keys: Doubles, pairs: RopePairs) -> tuple[KeyPair, ...]:
    """Measure all pairs of a layer. keys: over the median of their head, [heads, tokens, size]"""
    import torch

    firsts, seconds = (part.tolist() for part in pairs.split(torch.arange(pairs.size)))
    x, y = keys[..., firsts], keys[..., seconds]  # [heads, tokens, pairs]
    radius = np.hypot(x, y)
    unit = np.divide(x + 1j * y, radius, out=np.zeros(radius.shape, dtype=np.complex128), where=radius > 0)
    direction = np.abs(unit.mean(axis=1))
    of_radius, of_x, of_y = (_variation(part) for part in (radius, np.abs(x), np.abs(y)))
    large_x, large_y = np.abs(x) >= OUTLIER, np.abs(y) >= OUTLIER
    one, any_ = (large_x ^ large_y).sum(axis=1), (large_x | large_y).sum(axis=1)  # [heads, pairs]
    return tuple(
        KeyPair(
            layer=layer,
            head=head,
            channels=(first, second),
            magnitudes=(float(np.abs(x[head, :, at]).mean()), float(np.abs(y[head, :, at]).mean())),
            radius_cv=float(of_radius[head, at]),
            coordinate_cvs=(float(of_x[head, at]), float(of_y[head, at])),
            direction=float(direction[head, at]),
            alone=float(one[head, at] / any_[head, at]) if any_[head, at] else None,
        )
        for head in range(len(keys))
        for at, (first, second) in enumerate(zip(firsts, seconds, strict=True))
    )


def _variation(values: Doubles) -> Doubles:
    """Return the coefficient of variation over tokens, [heads, tokens, n] -> [heads, n]; 0 where all are 0."""
    mean = values.mean(axis=1)
    variation: Doubles = np.divide(values.std(axis=1), mean, out=np.zeros_like(mean), where=mean > 0)
    return variation
