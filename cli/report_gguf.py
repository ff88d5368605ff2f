"""The lines of `inspect` for a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pqweights.common.units import size_text

from .report import is_summarized
from .tables import table

if TYPE_CHECKING:
    from pqweights.gguf.contents import MetadataValue
    from pqweights.rewrite.results.inspect import GgufInspection, TypeTotal

# A list of more items, and a text of more characters, is cut.
ITEMS_SHOWN, CHARACTERS_SHOWN = 8, 60


def gguf_lines(inspection: GgufInspection, summary: bool | None) -> list[str]:
    """Return what a file holds. summary: whether to leave out the tensors; by default where there are many"""
    lines = []
    if is_summarized(summary, len(inspection.contents.tensors)):
        lines += [] if summary else [f"--no-summary lists all {len(inspection.contents.tensors)} tensors", ""]
    elif inspection.contents.tensors:
        columns = ["tensor", "shape", "type", "#bytes"]
        rows = [[t.name, "x".join(map(str, t.shape)), t.type, str(t.byte_count)] for t in inspection.contents.tensors]
        lines += [*table(columns, rows), ""]
    titles = ["type", "#tensors", "#weights", "#bytes", "#bits/weight"]
    if inspection.types:
        totals = [inspection.totals] if len(inspection.types) > 1 else []
        lines += [*table(titles, [_total_cells(total) for total in (*inspection.types, *totals)]), ""]
    return [*lines, _first_line(inspection), *_fact_lines(inspection)]


def _total_cells(total: TypeTotal) -> list[str]:
    bits = "" if total.bits_per_weight is None else f"{total.bits_per_weight:.3f}"
    return [total.type, str(total.tensors), str(total.weights), str(total.bytes), bits]


def _first_line(inspection: GgufInspection) -> str:
    contents = inspection.contents
    files = "" if len(contents.files) == 1 else f" in {len(contents.files)} files"
    kind = "" if inspection.file_type is None else f", type {inspection.file_type}"
    name = "" if not inspection.name else f" ({_shown(inspection.name)})"
    architecture = contents.architecture or "no architecture"
    return f"GGUF {contents.version}: {architecture}{name}{kind}: {size_text(contents.file_bytes)}{files}"


def _fact_lines(inspection: GgufInspection) -> list[str]:
    parameters = ", ".join(f"{key} {_shown(value)}" for key, value in inspection.hyper_parameters.items())
    return [*([f"hyper-parameters: {parameters}"] if parameters else []), f"tokenizer: {_tokenizer(inspection)}"]


def _tokenizer(inspection: GgufInspection) -> str:
    facts = inspection.tokenizer
    if facts.model is None:
        return "none"
    parts = [_shown(facts.model) + ("" if facts.splitter is None else f" ({_shown(facts.splitter)})")]
    parts += [] if facts.tokens is None else [f"{facts.tokens} tokens"]
    parts += [f"{what} {token}" for what, token in (("begin", facts.begin), ("end", facts.end)) if token is not None]
    return ", ".join([*parts, "chat template" if facts.has_chat_template else "no chat template"])


def _shown(value: MetadataValue) -> str:
    """Return a value, cut if it is long."""
    if isinstance(value, tuple):
        items = [_shown(item) for item in value.first[:ITEMS_SHOWN]]
        return f"[{', '.join(items)}{', ...' if value.length > ITEMS_SHOWN else ''}]"
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text[:CHARACTERS_SHOWN] + ("..." if len(text) > CHARACTERS_SHOWN else "")
