"""The lines of `inspect` for a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .amounts import size
from .report_summary import is_summarized
from .tables import table

if TYPE_CHECKING:
    from pqweights.gguf.contents import MetadataValue
    from pqweights.rewrite.results.inspect import GgufInspection, TypeTotal

# A list of more items, and a text of more characters, is cut.
ITEMS_SHOWN, CHARACTERS_SHOWN = 8, 60


def gguf_lines(found: GgufInspection, summary: bool | None) -> list[str]:
    """Return what a file holds. summary: whether to leave out the tensors; by default where there are many"""
    lines = []
    if is_summarized(summary, len(found.contents.tensors)):
        lines += [] if summary else [f"--no-summary lists all {len(found.contents.tensors)} tensors", ""]
    elif found.contents.tensors:
        columns = [("tensor", False), ("shape", False), ("type", False), ("bytes", True)]
        rows = [[t.name, "x".join(map(str, t.shape)), t.type, str(t.byte_count)] for t in found.contents.tensors]
        lines += [*table(columns, rows), ""]
    titles = [("type", False), ("tensors", True), ("weights", True), ("bytes", True), ("bits/weight", True)]
    if found.types:
        totals = [found.totals] if len(found.types) > 1 else []
        lines += [*table(titles, [_total_cells(each) for each in (*found.types, *totals)]), ""]
    return [*lines, _first_line(found), *_fact_lines(found)]


def _total_cells(each: TypeTotal) -> list[str]:
    bits = "" if each.bits_per_weight is None else f"{each.bits_per_weight:.3f}"
    return [each.type, str(each.tensors), str(each.weights), str(each.bytes), bits]


def _first_line(found: GgufInspection) -> str:
    contents = found.contents
    files = "" if len(contents.files) == 1 else f" in {len(contents.files)} files"
    kind = "" if found.file_type is None else f", type {found.file_type}"
    name = "" if not found.name else f" ({_shown(found.name)})"
    architecture = contents.architecture or "no architecture"
    return f"GGUF {contents.version}: {architecture}{name}{kind}: {size(contents.file_bytes)}{files}"


def _fact_lines(found: GgufInspection) -> list[str]:
    parameters = ", ".join(f"{key} {_shown(value)}" for key, value in found.hyper_parameters.items())
    return [*([f"hyper-parameters: {parameters}"] if parameters else []), f"tokenizer: {_tokenizer(found)}"]


def _tokenizer(found: GgufInspection) -> str:
    facts = found.tokenizer
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
