"""The tables of `pqweights inspect --kv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import output

if TYPE_CHECKING:
    from pqweights.quality.measure.kv_channels import KeyChannels, KeyPair
    from pqweights.quality.measure.kv_distribution import KVDistribution, StatesDistribution


def kv_lines(found: KVDistribution) -> list[str]:
    """Return the tables, each with what its columns mean."""
    rows = [*found.layers, *found.totals]
    parts = [_coordinates_table(rows), _coordinates_notes(found)]
    if any(each.before.angles for each in rows):
        parts += [_angles_table(rows), _angles_notes(rows)]
    parts += [_channels_table(found.channels), _channels_notes(found.channels)]
    first = ", the first is BOS" if found.bos else ""
    head = f"{found.tokens} tokens{first}, float32, computed by {found.runtime}"
    return [head, *(line for part in parts for line in ("", *part))]


def _name(each: StatesDistribution) -> str:
    return f"all {each.kind}" if each.layer is None else f"layer {each.layer} {each.kind}"


def _coordinates_table(rows: Sequence[StatesDistribution]) -> list[str]:
    columns = [("", False)]
    columns += [(f"{what} {when}", True) for what in ("KS", "kurtosis") for when in ("before", "after")]
    columns += [("CV of norm", True), ("CV of radius before", True), ("CV of radius after", True)]
    return output.table(columns, [_coordinates_row(each) for each in rows])


def _coordinates_row(each: StatesDistribution) -> list[str]:
    sides = (each.before, each.after)
    fits = [side.coordinates for side in sides]
    return [
        _name(each),
        *("" if fit is None else f"{fit.ks:.4f}" for fit in fits),
        *("" if fit is None else f"{fit.kurtosis:.3f}" for fit in fits),
        f"{each.norm_cv:.3f}",
        *("" if side.radius_cv is None else f"{side.radius_cv:.3f}" for side in sides),
    ]


def _coordinates_notes(found: KVDistribution) -> list[str]:
    from pqweights.quality.measure.kv_distribution import random_radius_cv

    notes = [
        "before, after: preconditioning, a random rotation of each vector, which is divided by its norm / sqrt(size)",
        "KS: Kolmogorov-Smirnov distance of the coordinates to N(0, 1); kurtosis: fourth moment around zero, 3 for "
        "N(0, 1)",
        "CV: standard deviation over mean; of norm: over the tokens of a head; of radius: of the norms of 16 "
        "coordinates each",
    ]
    for size in sorted({size for total in found.totals for size in total.sizes}):
        of_radius = f" and a CV of radius of {random_radius_cv(size):.3f}" if size % 16 == 0 else ""
        notes.append(
            f"vectors of {size} coordinates in random directions have a KS of {0.138 / size:.4f}, "
            f"a kurtosis of {3 * size / (size + 2):.3f}{of_radius}"
        )
    return notes


def _angles_table(rows: Sequence[StatesDistribution]) -> list[str]:
    levels = range(max(len(each.before.angles) for each in rows))
    columns = [("angles", False)]
    columns += [(f"level {level + 1} {when}", True) for level in levels for when in ("before", "after")]
    cells = []
    for each in rows:
        pairs = zip(each.before.angles, each.after.angles, strict=True)
        figures = [f"{fit.total_variation:.4f}" for pair in pairs for fit in pair]
        cells.append([_name(each), *(figures or [""] * (2 * len(levels)))])
    return output.table(columns, cells)


def _angles_notes(rows: Sequence[StatesDistribution]) -> list[str]:
    notes = [
        "total variation, from 0 to 1, between the angles of the recursive polar transform and the densities of "
        "Gaussian vectors, from which their codebooks are made"
    ]
    measured = [each for each in rows if each.after.angles]
    for each in (measured[0], measured[-1]):
        chance = ", ".join(f"{fit.by_chance:.4f}" for fit in each.after.angles)
        notes.append(f"as many independent Gaussian vectors as {_name(each)} have about {chance} by chance")
    return notes


def _channels_table(channels: Sequence[KeyChannels]) -> list[str]:
    columns = [("largest key channels", False), ("head", True), ("channels", False)]
    columns += [("over median", False), ("CV of radius", True), ("CV of channels", False), ("direction", True)]
    columns += [("one of two", True)]
    return output.table(columns, [_channels_row(each) for each in channels])


def _channels_row(each: KeyChannels) -> list[str]:
    pair = each.strongest
    if pair is None:
        return [f"layer {each.layer}", "", "", f"{each.largest:.2f}", "", "", "", ""]
    return [
        f"layer {each.layer}",
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

    count, outliers = sum(each.magnitudes.size for each in channels), sum(each.outlier_channels for each in channels)
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
    pairs = [pair for each in channels for pair in each.outliers]
    return [*notes, *_pair_notes(pairs)]


def _pair_notes(pairs: Sequence[KeyPair]) -> list[str]:
    from pqweights.common.units import counted

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
