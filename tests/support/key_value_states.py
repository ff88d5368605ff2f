"""Keys and values as a model could make them: Gaussian, of channels of different sizes, with a pair that RoPE turns."""

from __future__ import annotations

import math
from typing import Any

from pqweights.inference.kv.polar_rope import RopePairs
from pqweights.quality.measure.kv_states import LayerStates, ModelStates

HEADS, TOKENS, SIZE = 2, 512, 64
HALVES = RopePairs(SIZE, SIZE, interleaved=False)


def gaussian(seed: int, size: int = SIZE) -> Any:
    """Independent normal numbers, [heads, tokens, size] f32."""
    import torch

    return torch.randn(HEADS, TOKENS, size, generator=torch.Generator().manual_seed(seed))


def structured(seed: int) -> Any:
    """Normal numbers whose channels have very different sizes, [heads, tokens, size] f32."""
    import torch

    random = torch.Generator().manual_seed(seed + 1)
    return gaussian(seed) * torch.exp(0.7 * torch.randn(SIZE, generator=random))


def turned(radius: float, angle: float) -> Any:
    """A pair that RoPE turns by an angle from token to token, with a radius that varies by 2%, [tokens, 2]."""
    import torch

    radii = radius * (1 + 0.02 * torch.randn(TOKENS, generator=torch.Generator().manual_seed(9)))
    angles = angle * torch.arange(TOKENS)
    return radii[:, None] * torch.stack([angles.cos(), angles.sin()], dim=-1)


def with_circle(pairs: RopePairs = HALVES, *, head: int = 1, number: int = 5) -> Any:
    """Normal keys with one pair of outliers that lies all around a circle, [heads, tokens, size] f32."""
    keys = gaussian(3, pairs.size)
    first, second = pairs.split(keys)
    circle = turned(12.0, math.pi * (3 - math.sqrt(5)))  # the golden angle, which comes near no angle again
    first, second = first.clone(), second.clone()
    first[head, :, number], second[head, :, number] = circle[:, 0], circle[:, 1]
    return pairs.joined(first, second)


def layer_of(keys: Any, values: Any, *, layer: int = 0, pairs: RopePairs | None = HALVES) -> LayerStates:
    return LayerStates(layer=layer, keys=keys, values=values, pairs=pairs)


def model_of(*layers: LayerStates) -> ModelStates:
    return ModelStates(tokens=TOKENS, bos=False, runtime="nothing", layers=layers)
