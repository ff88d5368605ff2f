"""How Gaussian the keys and values of a model are before and after preconditioning, and the outlier channels of keys.

    python benchmarks/kv_distribution.py MODEL_DIR --text FILE [--tokens 2048]

The model reads the text in float32, in one pass. A random rotation should make coordinates Gaussian (Han et al.,
arXiv:2502.02617, Section 2.2), so that the angles of the recursive polar transform follow known densities (Lemma 2,
Figure 2). The first table has, of vectors that are divided by their norm / sqrt(size): the Kolmogorov-Smirnov
distance of coordinates to N(0, 1); the kurtosis; and the total variation, from 0 to 1, between the angles of each
level and their density, with what as many independent Gaussian vectors have by chance.

The second table has the pair of channels with the largest channel of each layer (Wu et al., arXiv:2502.00527, Figure
1): the channels that RoPE rotates together, their mean magnitudes over that of the median channel of the head, the
coefficients of variation of their radius and of both magnitudes (0.48 for a circle, 0.76 for Gaussian numbers), and
the share of the tokens with an outlier at which only one of the two is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from distribution import Tally
from harness import Cell, Document, argument_parser, machine, now, publish, silence_torchao, table
from kv_baselines import angles_of
from recall import read_states
from transformers import AutoModelForCausalLM

from pqweights.runtime.kv.polar_rope import RopePairs, rope_pairs
from pqweights.runtime.kv.polar_transform import ANGLE_BITS, GROUP, transform
from pqweights.runtime.kv.rotated import rotation
from pqweights.runtime.texts import read_text, tokenize

Doubles = npt.NDArray[np.float64]

LEVELS = range(1, len(ANGLE_BITS) + 1)
ANGLE_BINS = 64
# A channel is an outlier if its mean magnitude is at least so many times that of the median channel of its head.
OUTLIER = 4.0
SIDES = ("before", "after")


def angle_density(level: int, angles: Doubles) -> Doubles:
    """The density of angles of a level for normal vectors (Lemma 2), per radian."""
    if level == 1:
        return np.full(np.shape(angles), 1 / (2 * math.pi))
    size = 2 ** (level - 1)  # coordinates in each of the two radii
    factor = math.gamma(size) / (2.0 ** (size - 2) * math.gamma(size / 2) ** 2)
    density: Doubles = factor * np.sin(2 * angles) ** (size - 1)
    return density


@dataclass
class Side:
    """What was counted of vectors before or after preconditioning. angles: in each bin of each level"""

    tally: Tally = field(default_factory=Tally)
    angles: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((len(LEVELS), ANGLE_BINS), dtype=np.int64))

    def count(self, vectors: torch.Tensor) -> None:
        """Count vectors, [n, size] f32, of mean square 1."""
        self.tally.add(vectors.numpy().flatten())
        if vectors.shape[-1] % GROUP == 0:
            angles, _ = transform(vectors, angles_of)
            for level, of_level in zip(LEVELS, angles, strict=True):
                self.angles[level - 1] += np.histogram(of_level.numpy(), bins=edges(level, ANGLE_BINS))[0]

    def merge(self, other: Side) -> None:
        """Add what was counted elsewhere."""
        self.tally.merge(other.tally)
        self.angles = self.angles + other.angles

    def figures(self) -> dict[str, Any]:
        """The figures of everything that was counted."""
        fit = self.tally.fit()
        return {
            "ks": None if fit is None else fit.ks,
            "kurtosis": None if fit is None else fit.kurtosis,
            "angles": [variation_and_chance(level, self.angles[level - 1]) for level in LEVELS if self.angles.any()],
        }


def edges(level: int, bins: int) -> Doubles:
    """The ends of equal bins of a level's angles; the float32 of an angle may be above 2 pi, or above pi / 2."""
    return np.linspace(0, float(np.float32(2 * math.pi if level == 1 else math.pi / 2)), bins + 1)


def variation_and_chance(level: int, counts: npt.NDArray[np.int64]) -> tuple[float, float]:
    """The total variation between counted angles and their density, and about that of as many random angles."""
    fine = edges(level, 1 << 13)
    density = np.maximum(angle_density(level, fine), 0)
    below = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    expected = np.diff((below / below[-1])[:: (1 << 13) // ANGLE_BINS])
    # The mean absolute error of a frequency is sqrt(2 / pi) of its standard deviation.
    chance = np.sqrt(2 / math.pi * expected * (1 - expected) / counts.sum())
    return float(np.abs(counts / counts.sum() - expected).sum() / 2), float(chance.sum() / 2)


def count_sides(vectors: torch.Tensor) -> dict[str, Side]:
    """Count the vectors of a layer before and after the rotation, [heads, tokens, size]; zeros are left out."""
    size, norms = vectors.shape[-1], vectors.double().norm(dim=-1)
    scaled = (vectors[norms > 0].double() * (math.sqrt(size) / norms[norms > 0])[:, None]).float()
    sides = {side: Side() for side in SIDES}
    sides["before"].count(scaled)
    sides["after"].count(scaled @ rotation(size, scaled.device).T)
    return sides


def largest_pair(layer: int, keys: Doubles, pairs: RopePairs) -> dict[str, Any]:
    """The pair with the largest channel of a layer. keys: over the median of their head, [heads, tokens, size]"""
    firsts, seconds = (part.tolist() for part in pairs.split(torch.arange(pairs.size)))
    x, y = np.abs(keys[..., firsts]), np.abs(keys[..., seconds])  # [heads, tokens, pairs]
    larger = np.maximum(x.mean(axis=1), y.mean(axis=1))
    head, pair = np.unravel_index(int(larger.argmax()), larger.shape)
    x, y = x[head, :, pair], y[head, :, pair]
    one, any_ = (((x >= OUTLIER) != (y >= OUTLIER)).sum(), ((x >= OUTLIER) | (y >= OUTLIER)).sum())
    return {
        "layer": layer,
        "head": int(head),
        "channels": [firsts[pair], seconds[pair]],
        "magnitudes": [float(x.mean()), float(y.mean())],
        "radius_cv": variation(np.hypot(x, y)),
        "channel_cvs": [variation(x), variation(y)],
        "only_one": float(one / any_) if any_ else None,
    }


def outlier_pairs(magnitudes: Doubles, pairs: RopePairs) -> list[int]:
    """How many outliers each pair has that has any. magnitudes: the means of |x| over the median, [heads, size]"""
    first, second = (part.numpy() for part in pairs.split(torch.from_numpy(magnitudes >= OUTLIER)))
    return [int(count) for count in (first.astype(int) + second).flatten() if count]


def variation(values: Doubles) -> float:
    """The coefficient of variation, standard deviation over mean."""
    return float(values.std() / values.mean()) if values.any() else 0.0


def over_median(keys: torch.Tensor) -> Doubles:
    """Keys divided by the mean magnitude of the median channel of their head, [heads, tokens, size]."""
    values: Doubles = keys.double().numpy()
    median = np.median(np.abs(values).mean(axis=1), axis=-1)[:, None, None]
    return np.divide(values, median, out=np.zeros_like(values), where=median > 0)


def measure(folder: Path, text: Path, tokens: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[int]]:
    """The rows of both tables, and the number of outlier channels of each pair that has some."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(tokenize(folder, read_text(text), tokens))[None]
    with torch.inference_mode():
        states = [(keys[0], values[0]) for keys, values in read_states(net, ids)]
    rows, channels, outliers = [], [], []
    totals = {which: {side: Side() for side in SIDES} for which in ("keys", "values")}
    for layer, both in enumerate(states):
        for (which, total), vectors in zip(totals.items(), both, strict=True):
            sides = count_sides(vectors)
            rows.append({"vectors": f"layer {layer} {which}"} | {side: sides[side].figures() for side in SIDES})
            for side in SIDES:
                total[side].merge(sides[side])
        keys = over_median(both[0])
        pairs = rope_pairs(net.config.get_text_config(decoder=True), keys.shape[-1])
        if pairs is not None:
            channels.append(largest_pair(layer, keys, pairs))
            outliers += outlier_pairs(np.abs(keys).mean(axis=1), pairs)
    for which, total in totals.items():
        rows.append({"vectors": f"all {which}"} | {side: total[side].figures() for side in SIDES})
    return rows, channels, outliers


def shown(values: Iterable[float | None], form: str) -> list[Cell]:
    """Numbers in one form."""
    return [None if value is None else format(value, form) for value in values]


def tables(
    rows: Sequence[dict[str, Any]], channels: Sequence[dict[str, Any]], outliers: Sequence[int]
) -> dict[str, str]:
    """Both tables."""
    levels = LEVELS if rows and rows[0]["before"]["angles"] else range(0)
    header = ["", *(f"{what} {side}" for what in ("KS", "kurtosis") for side in SIDES)]
    header += [f"level {level} {side}" for level in levels for side in (*SIDES, "by chance")]
    cells: list[list[Cell]] = []
    for row in rows:
        of_levels = [(*row["before"]["angles"][level - 1][:1], *row["after"]["angles"][level - 1]) for level in levels]
        figures = [row[side][what] for what in ("ks", "kurtosis") for side in SIDES]
        cells.append([row["vectors"], *shown([*figures, *(value for level in of_levels for value in level)], ".4f")])
    of_channels = ("layer", "head", "channels", "over median", "CV of radius", "CV of channels", "only one")
    pairs: list[list[Cell]] = [
        [
            pair["layer"],
            pair["head"],
            ", ".join(map(str, pair["channels"])),
            ", ".join(f"{value:.2f}" for value in pair["magnitudes"]),
            f"{pair['radius_cv']:.3f}",
            ", ".join(f"{value:.3f}" for value in pair["channel_cvs"]),
            None if pair["only_one"] is None else f"{pair['only_one']:.0%}",
        ]
        for pair in channels
    ]
    told = f"{len(outliers)} pairs with outliers, channels of {OUTLIER:g} times the median or more: "
    told += f"{outliers.count(1)} with one, {outliers.count(2)} with two"
    return {"distribution": table(header, cells), "channels": f"{told}\n\n{table(of_channels, pairs)}"}


def main() -> None:
    """Measure, print, write."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="what the model reads")
    parser.add_argument("--tokens", type=int, default=2048, help="how many tokens of it at most")
    silence_torchao()
    options, start = parser.parse_args(), now()
    rows, channels, outliers = measure(options.model, options.text, options.tokens)
    settings = {"model": options.model.name, "tokens": options.tokens}
    document: Document = {"machine": machine(start), "settings": settings, "rows": rows, "channels": channels}
    publish("kv_distribution", document, tables(rows, channels, outliers), options, ())


if __name__ == "__main__":
    main()
