"""What the commands say of bit widths that were chosen for a target."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING

from pqweights.common.units import counted, first_names

from .tables import folded

if TYPE_CHECKING:
    from pqweights.planning.fit import Fit

# With fewer bits the loss rises faster than in proportion to the error, which the prediction does not know.
FEWEST_LINEAR_BITS = 3
_NUMBERS = re.compile(r"\.\d+\.")


def fit_lines(fit: Fit) -> list[str]:
    """Return the chosen bit widths, the size that they give, and how much the loss is predicted to rise."""
    target = fit.target.output_bytes
    used = f" ({fit.output_bytes / target:.2%})" if target else ""
    return [
        *_width_lines(fit),
        f"target: {fit.target}; result: {fit.output_bytes} bytes{used}; smallest possible: {fit.smallest_bytes} bytes",
        f"bits, all overhead counted: {fit.bits_per_weight:.4f} per weight that the recipe quantizes{_left(fit)}, "
        f"{fit.bits_per_parameter:.4f} per parameter",
        f"predicted rise of the loss: {fit.rise:.5f} ({_unit(fit)})",
        *_warnings(fit),
    ]


def _width_lines(fit: Fit) -> list[str]:
    """Return a line for each kind of group, with its bit widths in the order of the layers."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for group in sorted(fit.groups, key=lambda g: [int(n) for n in re.findall(r"\d+", g.name)]):
        kinds[_NUMBERS.sub(".*.", group.name)].append("kept" if group.bits is None else str(group.bits))
    width = max(len(kind) for kind in kinds)
    lines = [folded(f"  {kind:{width}}  ", widths) for kind, widths in kinds.items()]
    return ["bits of each group of weights, by layer:", *chain.from_iterable(lines)]


def _left(fit: Fit) -> str:
    """Return that the mean is also over weights that the target leaves as they are, if there are any."""
    left = sum(group.parameters for group in fit.groups if group.bits is None)
    return f" ({left} of them kept for the target)" if left else ""


def _unit(fit: Fit) -> str:
    """Return the unit of the predicted rise and what it is predicted from."""
    if fit.sensitivity is None:
        return "by the rule of thumb, which only compares sizes of one model"
    method = fit.sensitivity.method
    return f"nats per token, measured on {method.get('tokens')} tokens, {method.get('kind')}"


def _warnings(fit: Fit) -> list[str]:
    """Return why the prediction is less certain for some groups."""
    lines = []
    if fit.unknown:
        lines.append(
            "not in the sensitivity file, so fitted by the rule of thumb: "
            f"{counted(len(fit.unknown), 'group')}: {first_names(fit.unknown)}"
        )
    few = [group.name for group in fit.groups if group.bits is not None and group.bits < FEWEST_LINEAR_BITS]
    if few:
        lines.append(
            f"below {FEWEST_LINEAR_BITS} bits, where the loss rises more than predicted: "
            f"{counted(len(few), 'group')}: {first_names(few)}"
        )
    return lines
