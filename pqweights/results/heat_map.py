"""The tensors of a model as a map: a row for each kind of tensor, a column for each layer.

The first number in a tensor's name is its layer; numbers after it, as those of experts, are summed up in one cell, so a
map of 60,000 tensors has as many cells as one of a dense model. Colours stand for errors, or without them for bits, in
steps of a logarithmic scale; the text of a cell has the bits, and its other figures are in its title.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pqweights.common.markdown import html_text
from pqweights.convert.records import TensorRecord, mean_error
from pqweights.planning.plan import INTEGER, QUANTIZE, TensorPlan

Pair = tuple[TensorPlan, TensorRecord]

STEPS = 8
# A stack of layers that have nothing in common would need a row for each tensor of each layer.
MOST_CELLS = 40_000
# A scale over less would show noise as if it were a difference.
SMALLEST_SPAN = 2.0
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Row(NamedTuple):
    """A row of a map. label: of its tensors; role: theirs; cells: the tensors of each layer"""

    label: str
    role: str
    cells: dict[int, list[Pair]]


class Scale(NamedTuple):
    """Which step stands for which value, on a logarithmic scale. of: what the values are"""

    of: str
    least: float
    most: float

    def step(self, value: float) -> int:
        """Return the step of a value, from 0."""
        share = math.log(max(value, self.least) / self.least) / math.log(self.most / self.least)
        return min(STEPS - 1, int(share * STEPS))

    def bound(self, step: int) -> float:
        """Return the value at which a step begins."""
        return math.exp(math.log(self.least) + step / STEPS * math.log(self.most / self.least))


def is_rounded(tensor: TensorPlan) -> bool:
    """Whether a weight is stored as codes with fewer bits than before."""
    return tensor.action in (QUANTIZE, INTEGER)


def error_of(pairs: Sequence[Pair]) -> float | None:
    """Return the error of tensors against the original, or where that is not known against what was read."""
    records = [record for _, record in pairs]
    total = mean_error(records, "total_mse") if any(record.total_mse is not None for record in records) else None
    return mean_error(records, "relative_mse") if total is None else total


def bits_of(pairs: Sequence[Pair]) -> float | None:
    """Return the bits that each weight takes, everything counted; None without weights."""
    weights = sum(tensor.weights for tensor, _ in pairs)
    return 8 * sum(tensor.bytes for tensor, _ in pairs) / weights if weights else None


def stacks(pairs: Iterable[Pair]) -> tuple[dict[str, list[Row]], list[Pair]]:
    """Return the rows of each stack of layers, by what stands before the layer's number, and tensors of no layer."""
    rows: dict[str, dict[str, Row]] = defaultdict(dict)
    others = []
    for tensor, record in pairs:
        numbers = list(_NUMBER.finditer(tensor.name))
        if not numbers:
            others.append((tensor, record))
            continue
        before, after = tensor.name[: numbers[0].start()], tensor.name[numbers[0].end() :]
        label = _NUMBER.sub("*", after).removeprefix(".") or before
        row = rows[before.rstrip(".")].setdefault(label, Row(label, tensor.role, {}))
        row.cells.setdefault(int(numbers[0][0]), []).append((tensor, record))
    return {name: list(of.values()) for name, of in rows.items()}, others


def scale_for(groups: Iterable[Sequence[Pair]]) -> Scale | None:
    """Return the scale of the errors of groups of tensors, or of their bits where there are none; None for nothing."""
    rounded = [[pair for pair in group if is_rounded(pair[0])] for group in groups]
    rounded = [group for group in rounded if group]
    errors = [error for group in rounded if (error := error_of(group))]
    values = errors or [bits for group in rounded if (bits := bits_of(group))]
    if not values:
        return None
    least, most = min(values), max(values)
    widen = max(1.0, SMALLEST_SPAN / (most / least)) ** 0.5
    return Scale("relative MSE" if errors else "bits per weight", least / widen, most * widen)


def legend(scale: Scale) -> str:
    """Return what the colours of a map mean."""
    steps = "".join(f'<li><span class="s s{step}"></span>from {scale.bound(step):.2g}</li>' for step in range(STEPS))
    kept = '<li><span class="s k"></span>not rounded</li>'
    return f'<p class="dim">Colour: {scale.of}</p><ul class="legend">{steps}{kept}</ul>'


def heat_map(name: str, rows: Sequence[Row], scale: Scale | None) -> str:
    """Return the table of one stack of layers. name: what stands before the numbers of its layers"""
    layers = sorted({layer for row in rows for layer in row.cells})
    if len(rows) * len(layers) > MOST_CELLS:
        return f"<p>{html_text(name)}: {len(rows)} kinds of tensors in {len(layers)} layers are too many for a map.</p>"
    head = "".join(f'<th scope="col">{layer}</th>' for layer in layers)
    caption = f"{html_text(name)}: {len(rows)} kinds of tensors in {len(layers)} layers; in each cell bits per weight"
    body = []
    for row in rows:
        cells = "".join(_cell(layer, row.cells.get(layer, []), scale) for layer in layers)
        role = f"<small>{html_text(row.role)}</small>"
        body.append(f'<tr><th scope="row">{html_text(row.label)} {role}</th>{cells}</tr>')
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="Map of {html_text(name)}">'
        f'<table class="map"><caption>{caption}</caption>'
        f'<thead><tr><th scope="col">layer</th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def _cell(layer: int, pairs: Sequence[Pair], scale: Scale | None) -> str:
    """Return a cell: bits as its text, the colour of its error, and everything in its title."""
    bits, error = bits_of(pairs), error_of([pair for pair in pairs if is_rounded(pair[0])])
    if bits is None:
        return "<td></td>"
    told = [f"layer {layer}"]
    told += [f"{len(pairs)} tensors"] if len(pairs) > 1 else []
    told += [f"{bits:.4g} bits"]
    told += [] if error is None else [f"relative MSE {error:.3g}"]
    if len(pairs) > 1 and error is not None:
        worst, record = max(pairs, key=lambda pair: pair[1].relative_mse or 0)
        told.append(f"worst {worst.name}: {record.relative_mse:.3g}")
    value = error if scale is not None and scale.of == "relative MSE" else bits
    rounded = scale is not None and value is not None and any(is_rounded(tensor) for tensor, _ in pairs)
    step = f"s{scale.step(value)}" if rounded and scale is not None and value is not None else "k"
    return f'<td class="{step}" title="{html_text(", ".join(told))}">{bits:.2g}</td>'
