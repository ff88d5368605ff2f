"""The tables of `pqweights inspect --kv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pqweights.common.units import counted

from . import output

if TYPE_CHECKING:
    from pqweights.quality.measure.kv_channels import KeyChannels, KeyPair
    from pqweights.quality.measure.kv_distribution import KVDistribution, StatesDistribution


def kv_lines(distribution: KVDistribution) -> list[str]:
    """Return the tables, each with what its columns mean."""
    rows = [*distribution.layers, *distribution.totals]
    parts = [_coordinates_table(rows), _coordinates_notes(distribution)]
    if any(states.before.angles for states in rows):
        parts += [_angles_table(rows), _angles_notes(rows)]
    parts += [_channels_table(distribution.channels), _channels_notes(distribution.channels)]
    first = ", the first is BOS" if distribution.bos else ""
    head = f"{distribution.tokens} tokens{first}, float32, computed by {distribution.runtime}"
    return [head, *(line for part in parts for line in ("", *part))]


def _name(states: StatesDistribution) -> str:
    return f"all {states.kind}" if states.layer is None else f"layer {states.layer} {states.kind}"


def _coordinates_table(rows: Sequence[StatesDistribution]) -> list[str]:
    columns = [""]
    columns += [f"#{what} {when}" for what in ("KS", "kurtosis") for when in ("before", "after")]
    columns += ["#CV of norm", "#CV of radius before", "#CV of radius after"]
    return output.table(columns, [_coordinates_row(states) for states in rows])


def _coordinates_row(states: StatesDistribution) -> list[str]:
    sides = (states.before, states.after)
    fits = [side.coordinates for side in sides]
    return [
        _name(states),
        *("" if fit is None else f"{fit.ks:.4f}" for fit in fits),
        *("" if fit is None else f"{fit.kurtosis:.3f}" for fit in fits),
        f"{states.norm_cv:.3f}",
        *("" if side.radius_cv is None else f"{side.radius_cv:.3f}" for side in sides),
    ]


def _coordinates_notes(distribution: KVDistribution) -> list[str]:
    from pqweights.quality.measure.kv_distribution import random_radius_cv

    notes = [
        "before, after: preconditioning, a random rotation of each vector, which is divided by its norm / sqrt(size)",
        "KS: Kolmogorov-Smirnov distance of the coordinates to N(0, 1); kurtosis: fourth moment around zero, 3 for "
        "N(0, 1)",
        "CV: standard deviation over mean; of norm: over the tokens of a head; of radius: of the norms of 16 "
        "coordinates each",
    ]
    for size in sorted({size for total in distribution.totals for size in total.sizes}):
        of_radius = f" and a CV of radius of {random_radius_cv(size):.3f}" if size % 16 == 0 else ""
        notes.append(
            f"vectors of {size} coordinates in random directions have a KS of {0.138 / size:.4f}, "
            f"a kurtosis of {3 * size / (size + 2):.3f}{of_radius}"
        )
    return notes


def _angles_table(rows: Sequence[StatesDistribution]) -> list[str]:
    levels = range(max(len(states.before.angles) for states in rows))
    columns = ["angles"]
    columns += [f"#level {level + 1} {when}" for level in levels for when in ("before", "after")]
    cells = []
    for states in rows:
        pairs = zip(states.before.angles, states.after.angles, strict=True)
        figures = [f"{fit.total_variation:.4f}" for pair in pairs for fit in pair]
        cells.append([_name(states), *(figures or [""] * (2 * len(levels)))])
    return output.table(columns, cells)


def _angles_notes(rows: Sequence[StatesDistribution]) -> list[str]:
    notes = [
        "total variation, from 0 to 1, between the angles of the recursive polar transform and the densities of "
        "Gaussian vectors, from which their codebooks are made"
    ]
    measured = [states for states in rows if states.after.angles]
    for states in (measured[0], measured[-1]):
        chance = ", ".join(f"{fit.by_chance:.4f}" for fit in states.after.angles)
        notes.append(f"as many independent Gaussian vectors as {_name(states)} have about {chance} by chance")
    return notes


def _channels_table(channels: Sequence[KeyChannels]) -> list[str]:
    columns = ["largest key channels", "#head", "channels"]
    columns += ["over median", "#CV of radius", "CV of channels", "#direction"]
    columns += ["#one of two"]
    return output.table(columns, [_channels_row(layer) for layer in channels])


def _channels_row(layer: KeyChannels) -> list[str]:
    pair = layer.strongest
    if pair is None:
        return [f"layer {layer.layer}", "", "", f"{layer.largest:.2f}", "", "", "", ""]
    return [
        f"layer {layer.layer}",
        str(pair.head),
        f"{pair.channels[0]}, {pair.channels[1]}",
        f"{pair.magnitudes[0]:.2f}, {pair.magnitudes[1]:.2f}",
        f"{pair.radius_cv:.3f}",
        f"{pair.coordinate_cvs[0]:.3f}, {pair.coordinate_cvs[1]:.3f}",
        f"{pair.direction:.3f}",
        "" if pair.alone is None else f"{pair.alone:.0%}",
    ]


def _channels_notes(channels: Sequence[KeyChannels]) -> list[str]:
    from pqweights.quality.measure.kv_channels import OUTLIER

    count, outliers = (
        sum(layer.magnitudes.size for layer in channels),
        sum(layer.outlier_channels for layer in channels),
    )
    notes = [f"{outliers} of {count} key channels are outliers: their mean |x| is at least {OUTLIER:g} times that of "
             "the median channel of their head"]  # fmt: skip
    if channels[0].strongest is None:
        return [*notes, "the model has no RoPE, so its channels form no pairs"]
    notes.append(
        "channels: the two that RoPE rotates together; CV of radius: of sqrt(x^2 + y^2) over tokens; CV of channels: "
        "of |x| and of |y|, 0.48 on a circle; direction: 0 if the tokens lie all around, 1 if on one side"
    )
    notes.append(
        f"one of two: of the tokens at which |x| or |y| is at least {OUTLIER:g} times the median channel's mean, the "
        "share at which only one of them is"
    )
    pairs = [pair for layer in channels for pair in layer.outliers]
    return [*notes, *_pair_notes(pairs)]


def _pair_notes(pairs: Sequence[KeyPair]) -> list[str]:
    if not pairs:
        return []
    single = sum(pair.outliers == 1 for pair in pairs)
    radius = sum(pair.radius_cv for pair in pairs) / len(pairs)
    coordinates = sum(sum(pair.coordinate_cvs) / 2 for pair in pairs) / len(pairs)
    shares = [pair.alone for pair in pairs if pair.alone is not None]
    return [
        f"{counted(len(pairs), 'pair')} with outliers: {single} with one, {len(pairs) - single} with two; on average "
        f"the CV of radius is {radius:.3f}, that of the channels {coordinates:.3f}, and one of two is large at "
        f"{sum(shares) / len(shares):.0%} of the tokens where any is"
    ]
