"""The command `pqweights inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqweights.common.units import size_text

from . import options, output, report
from .report import action_text, integer_form_lines, is_summarized, quality_lines, summary_table, type_lines
from .tables import table

if TYPE_CHECKING:
    from pqweights.checkpoint.gguf.contents import MetadataValue
    from pqweights.checkpoint.storage import Storage
    from pqweights.convert.manifest import Manifest
    from pqweights.convert.records import TensorRecord
    from pqweights.planning.layout import TensorPlan
    from pqweights.results.inspect import GgufInspection, Inspection, TypeTotal

# A list of more items in the metadata of a GGUF file, and a text of more characters, is cut.
ITEMS_SHOWN, CHARACTERS_SHOWN = 8, 60


def command(
    folder: options.Folder,
    summary: options.Summary = None,
    html: options.Html = None,
    revision: options.Revision = None,
    token: options.Token = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show what a finished folder holds: tensors, bits, relative errors, sizes and totals.

    For a GGUF file, whoever wrote it, shows the tensors, their types and sizes, and the metadata.
    """
    with output.errors(quiet=quiet):
        from pqweights.checkpoint.names import EVALUATION_FILE, MANIFEST_FILE
        from pqweights.errors import OptionError
        from pqweights.results.inspect import inspect_gguf
        from pqweights.storage.sources import find_result

        hub = options.hub(revision, token)
        with output.progress("fetching") as progress:
            result = find_result(folder, hub, only=[MANIFEST_FILE, EVALUATION_FILE], progress=progress)
        if isinstance(result.where, Path) and _is_foreign_gguf(result.where):
            if html is not None:
                raise OptionError(
                    f"`html`: expected the folder of a result, which has its manifest, found the GGUF file {folder}"
                )
            inspection = inspect_gguf(result.where)
            if json:
                output.print_json(inspection.to_json())
            else:
                output.show(*_gguf_lines(inspection, summary))
            return
        shown = _show_folder(result.where, summary=summary, json=json)
        if html is not None:
            _write_page(html, folder, result.where, shown)
        if result.origin is None:
            report.warn_of_broken_files(result.where, shown.manifest)


def _show_folder(folder: Path | Storage, *, summary: bool | None, json: bool) -> Inspection:
    from pqweights.results.inspect import inspect

    inspection = inspect(folder)
    if json:
        output.print_json(inspection.to_json())
    else:
        tensors = _tensor_lines(inspection.manifest, summary)
        learned = _learned_lines(inspection.manifest.made_by)
        output.show(*tensors, "", *_totals_lines(inspection), *_error_lines(inspection.manifest), *learned)
        output.show(*(f"{output.WARNING}{remark}" for remark in inspection.manifest.remarks))
        for line in report.exceeding_lines(inspection.manifest.pairs):
            output.warn(line)
    return inspection


def _write_page(html: Path, name: str, result: Path | Storage, inspection: Inspection) -> None:
    from pqweights.checkpoint.names import MANIFEST_FILE
    from pqweights.checkpoint.writer import sha256_of_file
    from pqweights.results.evaluation_record import read_records
    from pqweights.results.page import inspection_page

    records = read_records(result, sha256_of_file(result / MANIFEST_FILE)) if isinstance(result, Path) else ()
    output.write_page(html, inspection_page(Path(name).name or name, inspection, records))


def _learned_lines(made_by: Mapping[str, Any]) -> list[str]:
    """Return what was learned of the model for a result: how much each weight matters, and scales of channels."""
    awq, measured = made_by.get("awq"), made_by.get("sensitivity") or (made_by.get("fit") or {}).get("sensitivity")
    scales = ["", *report.scale_lines(awq)] if isinstance(awq, dict) else []
    alphas = measured.get("alphas") if isinstance(measured, dict) else None
    return [*scales, *(["", *report.alpha_lines(alphas)] if alphas else []), *report.divergence_lines(made_by)]


def _is_foreign_gguf(path: Path) -> bool:
    """Whether a path is GGUF without the manifest of an export: a file, or a folder that somebody else filled."""
    from pqweights.checkpoint.gguf.file import is_gguf
    from pqweights.checkpoint.names import MANIFEST_FILE
    from pqweights.checkpoint.unfinished import is_interrupted

    return is_gguf(path) and not (path / MANIFEST_FILE).is_file() and not is_interrupted(path)


def _tensor_lines(manifest: Manifest, summary: bool | None) -> list[str]:
    if not is_summarized(summary, len(manifest.tensors)):
        return _tensor_table(manifest)
    note = [] if summary else [f"--no-summary lists all {len(manifest.tensors)} tensors"]
    return [*summary_table(manifest.tensors, manifest.records), *note]


def _tensor_table(manifest: Manifest) -> list[str]:
    """Return a table with a line for each tensor; a column that only mixed codecs need is not shown for one codec."""
    titles = ["tensor", "shape", "dtype", "action", "codec", "#bits", "#bytes", "#relative MSE", "coded"]
    if len({tensor.codec for tensor in manifest.tensors if tensor.codec}) <= 1:
        titles.remove("codec")
    rows = [_row(tensor, record) for tensor, record in manifest.pairs]
    return table(titles, [[row[title.removeprefix("#")] for title in titles] for row in rows], drop=["action", "dtype"])


def _row(tensor: TensorPlan, record: TensorRecord) -> dict[str, str]:
    """Return the cells of a tensor by column.

    coded: the state in which its codec encoded it, without zeros, and whether its input channels were scaled
    """
    stated = ((key, value) for key, value in (record.state or {}).items() if value)
    state = [key if value is True else value if isinstance(value, str) else f"{key} {value}" for key, value in stated]
    return {
        "tensor": tensor.name,
        "shape": "x".join(map(str, tensor.shape)),
        "dtype": tensor.dtype,
        "action": action_text(tensor),
        "codec": tensor.codec or "",
        "bits": str(tensor.bits or ""),
        "bytes": str(tensor.bytes),
        "relative MSE": "" if record.relative_mse is None else f"{record.relative_mse:.6f}",
        "coded": ", ".join([*state, *(["scaled"] if tensor.is_scaled else [])]),
    }


def _totals_lines(inspection: Inspection) -> list[str]:
    totals = inspection.totals
    return [
        f"{inspection.manifest.kind}: {size_text(totals.output_bytes)} in {_files(inspection.manifest)} files, "
        f"{totals.weights} weights, {totals.coverage:.4%} of them quantized",
        f"bits, all overhead counted: {report.bits_text(totals)}",
    ]


def _files(manifest: Manifest) -> str:
    """Return the format of the files that hold the weights."""
    return "GGUF" if manifest.container else "safetensors"


def _error_lines(manifest: Manifest) -> list[str]:
    if any(tensor.action == "integer" for tensor in manifest.tensors):
        from pqweights.convert.manifest import shards_of

        return type_lines(manifest.made_by, manifest.pairs, shards_of(manifest)) or integer_form_lines(manifest.pairs)
    return quality_lines(manifest.pairs)


def _gguf_lines(inspection: GgufInspection, summary: bool | None) -> list[str]:
    """Return what a GGUF file holds. summary: whether to leave out the tensors; by default where there are many"""
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
    return [*lines, _gguf_line(inspection), *_fact_lines(inspection)]


def _total_cells(total: TypeTotal) -> list[str]:
    bits = "" if total.bits_per_weight is None else f"{total.bits_per_weight:.3f}"
    return [total.type, str(total.tensors), str(total.weights), str(total.bytes), bits]


def _gguf_line(inspection: GgufInspection) -> str:
    contents = inspection.contents
    files = "" if len(contents.files) == 1 else f" in {len(contents.files)} files"
    kind = "" if inspection.file_type is None else f", type {inspection.file_type}"
    name = "" if not inspection.name else f" ({_value_text(inspection.name)})"
    architecture = contents.architecture or "no architecture"
    return f"GGUF {contents.version}: {architecture}{name}{kind}: {size_text(contents.file_bytes)}{files}"


def _fact_lines(inspection: GgufInspection) -> list[str]:
    parameters = ", ".join(f"{key} {_value_text(value)}" for key, value in inspection.hyper_parameters.items())
    return [*([f"hyper-parameters: {parameters}"] if parameters else []), f"tokenizer: {_tokenizer(inspection)}"]


def _tokenizer(inspection: GgufInspection) -> str:
    facts = inspection.tokenizer
    if facts["model"] is None:
        return "none"
    parts = [
        _value_text(facts["model"]) + ("" if facts["splitter"] is None else f" ({_value_text(facts['splitter'])})")
    ]
    parts += [] if facts["tokens"] is None else [f"{facts['tokens']} tokens"]
    parts += [f"{what} {facts[what]}" for what in ("begin", "end") if facts[what] is not None]
    return ", ".join([*parts, "chat template" if facts["has_chat_template"] else "no chat template"])


def _value_text(value: MetadataValue) -> str:
    """Return a value, cut if it is long."""
    if isinstance(value, tuple):
        items = [_value_text(item) for item in value.first[:ITEMS_SHOWN]]
        return f"[{', '.join(items)}{', ...' if value.length > ITEMS_SHOWN else ''}]"
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text[:CHARACTERS_SHOWN] + ("..." if len(text) > CHARACTERS_SHOWN else "")
