"""A page on a result or a plan: HTML that needs nothing beside it and no script.

Errors and bits by layer and kind of tensor, the worst tensors, what was kept and why, sizes, and where several files
were measured their divergence against their size. Each stack of layers is a map, with a row for each kind of tensor and
a column for each layer, the first number in a tensor's name; numbers after it, as those of experts, are summed up in
one cell, so a map of 60,000 tensors has as many cells as one of a dense model. All names may come from a stranger, and
are escaped.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import NamedTuple

from pqweights.common.markdown import html_text
from pqweights.common.units import counted, first_names, size_text
from pqweights.convert.records import TensorRecord, exceeds, is_rescued, mean_error, promise
from pqweights.planning.layout import INTEGER, QUANTIZE, TensorPlan, Totals
from pqweights.results.evaluation_record import EvaluationRecord
from pqweights.results.inspect import Inspection
from pqweights.results.offers import Offer, offers_in
from pqweights.results.parts import parts
from pqweights.results.picture import kl_picture
from pqweights.results.plan_report import PlanReport

WORST_SHOWN = 20
# A list of more tensors, after experts are summed up, would make the page slow.
MOST_LISTED = 6000
NOTHING_FROM_ELSEWHERE = "default-src 'none'; style-src 'unsafe-inline'"

Section = tuple[str, str]  # its title, and its content
TENSOR_TITLES = ["tensor", "shape", "role", "stored as", "#bits", "#size", "#relative MSE", "remark"]
Pair = tuple[TensorPlan, TensorRecord]
STEPS = 8
# A stack of layers that have nothing in common would need a row for each tensor of each layer.
MOST_CELLS = 40_000
# A scale over less would show noise as if it were a difference.
SMALLEST_SPAN = 2.0
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def inspection_page(name: str, inspection: Inspection, records: Sequence[EvaluationRecord] = ()) -> str:
    """Return the page of a master or an export. name: of its folder; records: what was measured of it"""
    manifest = inspection.manifest
    by_part: dict[str, list[Pair]] = {"": manifest.pairs}
    if kinds := parts(manifest):
        by_part = {kind: [pair for pair in manifest.pairs if pair[0].name.startswith(f"{kind}/")] for kind in kinds}
    offered = offers_in(manifest, records)
    return _page(
        f"{name}: {manifest.kind}",
        _totals_text(inspection.totals),
        [
            *([("Files", _offers(offered))] if len(offered) > 1 or records else []),
            ("Map", _maps(by_part)),
            ("Worst tensors", _worst(manifest.pairs)),
            ("Not quantized", _kept(manifest.pairs)),
            ("Sizes", _sizes(by_part)),
            ("All tensors", _all(manifest.pairs)),
        ],
    )


def plan_page(name: str, report: PlanReport) -> str:
    """Return the page of a plan, which has no errors yet. name: of the source"""
    pairs = [(tensor, TensorRecord(name=tensor.name)) for tensor in report.tensors]
    return _page(
        f"{name}: plan",
        _totals_text(report.totals),
        [
            ("Map", _maps({"": pairs})),
            ("Not quantized", _kept(pairs)),
            ("Sizes", _sizes({"": pairs})),
            ("All tensors", _all(pairs)),
        ],
    )


def _page(title: str, about: str, sections: Sequence[Section]) -> str:
    style = resources.files("pqweights.results").joinpath("page.css").read_text()
    sections = [(heading, content) for heading, content in sections if content]
    links = "".join(f'<li><a href="#{_anchor(heading)}">{heading}</a></li>' for heading, _ in sections)
    body = "\n".join(
        f'<section aria-labelledby="{_anchor(heading)}"><h2 id="{_anchor(heading)}">{heading}</h2>\n{content}</section>'
        for heading, content in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{NOTHING_FROM_ELSEWHERE}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html_text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#{_anchor(sections[0][0])}">Skip to the content</a>\n'
        f"<header><h1>{html_text(title)}</h1><p>{about}</p></header>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main>\n{body}\n</main>\n'
        '<footer><p class="dim">Written by pqweights. Relative MSE: squared error over the sum of squares. Bits count '
        "everything that is stored for a weight.</p></footer>\n</body>\n</html>\n"
    )


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _table(caption: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are already HTML; titles that begin with # are of numbers."""
    kinds = [
        ' class="n"' if title.startswith("#") else ' class="name"' if title == "tensor" else "" for title in titles
    ]
    head = "".join(
        f'<th scope="col"{kind}>{title.removeprefix("#")}</th>' for title, kind in zip(titles, kinds, strict=True)
    )
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    caption = html_text(caption)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{caption}"><table><caption>{caption}'
        f"</caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _totals_text(totals: Totals) -> str:
    said = [f"{size_text(totals.output_bytes)}, from {size_text(totals.source_bytes)}"]
    said += [counted(totals.tensors, "tensor"), f"{totals.weights:,} weights, {totals.coverage:.2%} of them quantized"]
    bits, of_all = totals.bits_per_weight, totals.bits_per_parameter
    said += [] if bits is None else [f"{bits:.4f} bits per quantized weight"]
    said += [] if of_all is None else [f"{of_all:.4f} bits per parameter"]
    return html_text("; ".join(said) + ".")


def _offers(offered: Sequence[Offer]) -> str:
    """Return the files of a ladder with what was measured, and the picture."""
    rows = []
    for offer in offered:
        record, kl = offer.record, "" if offer.kl is None else f"{offer.kl:.5f}"
        top1 = None if record is None or record.top1_agreement is None else record.top1_agreement.value
        perplexity = None if record is None else record.perplexity.value
        rows.append(
            [
                html_text(offer.kind),
                size_text(offer.bytes),
                f"{offer.bits:.2f}",
                _number(offer.relative_mse),
                kl,
                "" if top1 is None else f"{top1:.2%}",
                "" if perplexity is None else f"{perplexity:.4f}",
                "" if offer.memory_gb is None else f"{offer.memory_gb} GB",
            ]
        )
    titles = ["type", "#size", "#bits per parameter", "#relative MSE", "#KL (nats)", "#top-1", "#perplexity", "#memory"]
    told = next((offer.record for offer in offered if offer.record is not None), None)
    about = "" if told is None else f"; measured on {told.text}, {told.scored_tokens} tokens scored"
    return _table(f"Files and formats{about}", titles, rows) + (kl_picture(offered) or "")


def _maps(by_part: dict[str, list[Pair]]) -> str:
    """Return a map of each stack of layers, with those of each type behind its name; and tensors of no layer."""
    said = []
    for number, (part, pairs) in enumerate(by_part.items()):
        layered, others = stacks(pairs)
        groups = [cell for rows in layered.values() for row in rows for cell in row.cells.values()]
        scale = scale_for(groups)
        maps = [legend(scale)] if scale is not None else []
        maps += [heat_map(name, rows, scale) for name, rows in layered.items()]
        shown = others[:MOST_LISTED]
        more = f": the first {len(shown)} of {len(others)}" if len(others) > len(shown) else ""
        maps += [_table(f"Tensors of no layer{more}", TENSOR_TITLES, map(_tensor_row, shown))] if others else []
        content = "\n".join(maps)
        if part:
            is_open = " open" if number == 0 else ""
            content = f"<details{is_open}><summary>{html_text(part)}</summary>{content}</details>"
        said.append(content)
    return "\n".join(said)


def _tensor_row(pair: Pair, name: str = "", count: int = 1) -> list[str]:
    tensor, record = pair
    bits, error = bits_of([pair]), error_of([pair])
    remarks = ["rescued"] if is_rescued(tensor, record) else []
    remarks += ["above its codec's limit"] if exceeds(tensor, record) else []
    remarks += [] if is_rounded(tensor) else [tensor.reason]
    return [
        html_text(name or tensor.name),
        html_text(" x ".join(map(str, tensor.shape))),
        html_text(tensor.role),
        html_text(tensor.codec or ", ".join(sorted({spec.dtype for spec in tensor.stored}))),
        "" if bits is None else f"{bits:.4g}",
        size_text(tensor.bytes * count),
        _number(error),
        html_text(", ".join(remarks)),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _worst(pairs: Sequence[Pair]) -> str:
    """Return the tensors with the largest errors; of codecs that promise one, in its units."""
    measured = [(tensor, record) for tensor, record in pairs if is_rounded(tensor) and record.relative_mse is not None]

    def share(pair: Pair) -> float:
        limit = promise(pair[0])
        return (pair[1].relative_mse or 0) / limit if limit else 0.0

    shares = any(map(share, measured))
    worst = sorted(measured, key=lambda pair: (share(pair), pair[1].relative_mse or 0), reverse=True)[:WORST_SHOWN]
    titles = [*TENSOR_TITLES[:-1], *(["#of its codec's limit"] if shares else []), "remark"]
    rows = [
        [*row[:-1], *([f"{share(pair):.0%}"] if shares else []), row[-1]]
        for pair in worst
        if (row := _tensor_row(pair))
    ]
    return _table(f"The {len(rows)} tensors with the largest errors", titles, rows) if rows else ""


def _kept(pairs: Sequence[Pair]) -> str:
    """Return the tensors that were not rounded, by reason."""
    groups: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        if not is_rounded(pair[0]):
            groups[pair[0].reason, pair[0].role].append(pair)
    rows = [
        [
            html_text(reason or "as in the source"),
            html_text(role),
            str(len(group)),
            f"{sum(tensor.weights for tensor, _ in group):,}",
            size_text(sum(tensor.bytes for tensor, _ in group)),
            html_text(first_names([tensor.name for tensor, _ in group])),
        ]
        for (reason, role), group in sorted(groups.items())
    ]
    titles = ["reason", "role", "#tensors", "#weights", "#size", "first names"]
    return _table("What was kept, and why", titles, rows) if rows else ""


def _sizes(by_part: dict[str, list[Pair]]) -> str:
    """Return what each role takes."""
    tables = []
    for part, pairs in by_part.items():
        groups: dict[str, list[Pair]] = defaultdict(list)
        for pair in pairs:
            groups[pair[0].role].append(pair)
        total = sum(tensor.bytes for tensor, _ in pairs)
        sizes = {role: sum(tensor.bytes for tensor, _ in group) for role, group in groups.items()}
        rows = [
            [
                html_text(role),
                str(len(groups[role])),
                f"{sum(tensor.weights for tensor, _ in groups[role]):,}",
                size_text(size),
                f"{size / total:.1%}" if total else "",
                "" if (bits := bits_of(groups[role])) is None else f"{bits:.3f}",
                _number(error_of([pair for pair in groups[role] if is_rounded(pair[0])])),
            ]
            for role, size in sorted(sizes.items(), key=lambda item: -item[1])
        ]
        titles = ["role", "#tensors", "#weights", "#size", "#share", "#bits per weight", "#relative MSE"]
        tables.append(_table(f"By role{f', {part}' if part else ''}", titles, rows))
    return "\n".join(tables)


def _all(pairs: Sequence[Pair]) -> str:
    """Return a list of all tensors, in which those that differ in the number of an expert alone have one row."""
    layered, others = stacks(pairs)
    rows = [_tensor_row(pair) for pair in others]
    for stack, kinds in layered.items():
        for row in kinds:
            for layer, cell in sorted(row.cells.items()):
                name = cell[0][0].name if len(cell) == 1 else f"{stack}.{layer}.{row.label} ({len(cell)} tensors)"
                *shown, _, remark = _tensor_row(cell[0], name, len(cell))
                rows.append([*shown, _number(error_of(cell)), remark])
    if len(rows) > MOST_LISTED:
        return f"<p>{len(rows):,} rows, which inspect --json lists.</p>"
    said = f"<summary>{counted(len(pairs), 'tensor')}</summary>"
    return f"<details>{said}{_table('All tensors, those of experts together', TENSOR_TITLES, rows)}</details>"


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
