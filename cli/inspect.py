"""The command `pqweights inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pqweights.common.units import size_text
from pqweights.quality.options import MeasureArguments

from . import options, output, report
from .flags import taking
from .report import action_text, is_summarized, summary_table
from .report_errors import integer_form_lines, quality_lines
from .report_gguf import gguf_lines
from .report_kv import kv_lines
from .tables import table

if TYPE_CHECKING:
    from pqweights.checkpoint.storage import Storage
    from pqweights.planning.plan import TensorPlan
    from pqweights.quality.measure.distribution import Distribution, Normality
    from pqweights.rewrite.manifest import Manifest
    from pqweights.rewrite.records import TensorRecord
    from pqweights.rewrite.results.inspect import Inspection


@taking(MeasureArguments)
def command(
    asked: MeasureArguments,
    *,
    summary: options.SummaryOption = None,
    plot: options.PlotOption = None,
    json: options.JsonOption = False,
) -> None:
    """Show what a finished folder holds: tensors, bits, relative errors, sizes and totals.

    Of a GGUF file, whoever wrote it, show the tensors, their types and sizes, and the metadata.
    """
    from pqweights.checkpoint.names import MANIFEST_FILE
    from pqweights.errors import OptionError
    from pqweights.storage.hub.sources import find_result

    if asked.kv and summary is not None:
        raise OptionError("--summary: means nothing with `kv`; leave it out")
    options.check_plot(plot)
    folder = str(asked.folder)
    if asked.kv:
        _show_kv(options.fetched(folder, asked.access).path, asked, plot, json=json)
    elif asked.distribution:
        _show_distribution(options.fetched(folder, asked.access).path, asked, plot, json=json)
    else:
        with output.progress("fetching") as progress:
            result = find_result(folder, asked.access, only=[MANIFEST_FILE], progress=progress)
        if isinstance(result.where, Path) and _is_foreign_gguf(result.where):
            _show_gguf(result.where, plot, summary=summary, json=json)
            return
        shown = _show_folder(result.where, plot, summary=summary, json=json)
        if result.origin is None:
            report.warn_of_broken_files(result.where, shown.manifest)


def _show_kv(model: Path, asked: MeasureArguments, plot: Path | None, *, json: bool) -> None:
    from pqweights.inference.runtimes.texts import read_text
    from pqweights.quality.measure.kv_distribution import distribution_of
    from pqweights.quality.measure.kv_states import read_states

    assert asked.text is not None
    words = read_text(asked.text)
    with output.progress("measuring", unit="layers") as progress:
        measured = distribution_of(read_states(model, words, asked), progress=progress)
    if plot is not None:
        from pqweights.quality.plots.kv import plot_kv

        plot_kv(measured, plot)
    if json:
        output.print_json(measured.to_json())
    else:
        output.show(*kv_lines(measured))


def _show_folder(folder: Path | Storage, plot: Path | None, *, summary: bool | None, json: bool) -> Inspection:
    from pqweights.rewrite.results.inspect import inspect

    inspection = inspect(folder)
    if plot is not None:
        from pqweights.quality.plots.layers import plot_inspection

        plot_inspection(inspection, plot)
    if json:
        output.print_json(inspection.to_json())
    else:
        tensors = _tensor_lines(inspection.manifest, summary)
        output.show(*tensors, "", *_totals_lines(inspection), *_error_lines(inspection.manifest))
    return inspection


def _is_foreign_gguf(path: Path) -> bool:
    """Whether a path is GGUF without the manifest of an export: a file, or a folder that somebody else filled."""
    from pqweights.checkpoint.names import MANIFEST_FILE
    from pqweights.checkpoint.storage import is_interrupted
    from pqweights.gguf.file import is_gguf

    return is_gguf(path) and not (path / MANIFEST_FILE).is_file() and not is_interrupted(path)


def _show_gguf(path: Path, plot: Path | None, *, summary: bool | None, json: bool) -> None:
    from pqweights.errors import OptionError
    from pqweights.rewrite.results.inspect import inspect_gguf

    if plot is not None:
        raise OptionError("--plot: a GGUF file does not say how large the errors of its weights are; leave it out")
    inspection = inspect_gguf(path)
    if json:
        output.print_json(inspection.to_json())
    else:
        output.show(*gguf_lines(inspection, summary))


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
    state = [
        value if isinstance(value, str) else f"{key} {value}" for key, value in (record.state or {}).items() if value
    ]
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
    return "GGUF" if manifest.identity.container else "safetensors"


def _error_lines(manifest: Manifest) -> list[str]:
    if any(tensor.action == "integer" for tensor in manifest.tensors):
        return integer_form_lines(manifest.pairs, measured="original_fingerprint" in manifest.made_by)
    return quality_lines(manifest.pairs)


def _show_distribution(source: Path, asked: MeasureArguments, plot: Path | None, *, json: bool) -> None:
    from pqweights.quality.measure.distribution import measure_distribution

    threads = options.thread_count(asked.threads)
    with output.progress("measuring") as progress:
        measured = measure_distribution(source, threads=threads, allow_pickle=asked.allow_pickle, progress=progress)
    if plot is not None:
        from pqweights.quality.plots.distribution import plot_distribution

        plot_distribution(measured, plot)
    if json:
        output.print_json(measured.to_json())
    else:
        output.show(*_distribution_lines(measured))


def _distribution_lines(distribution: Distribution) -> list[str]:
    from pqweights.quality.measure.distribution import MAX_WEIGHTS

    columns = ["tensor", "role", "#weights", "#measured"]
    columns += [f"#{what} {when}" for what in ("KS", "kurtosis") for when in ("before", "after")]
    rows = [
        [t.name, t.role, str(t.weights), str(t.sampled_weights), *_cells(t.before, t.after)]
        for t in distribution.tensors
    ]
    rows.append(
        [
            "all together",
            "",
            str(distribution.weights),
            str(distribution.sampled_weights),
            *_cells(distribution.before, distribution.after),
        ]
    )
    return [
        *output.table(columns, rows),
        "",
        "measured: coordinates of whole blocks of 128 weights, before and after the rotation, divided by the norm of "
        "the block / sqrt(128)",
        "KS: Kolmogorov-Smirnov distance to N(0, 1), to within 0.00002; kurtosis: fourth moment around zero, 3 for "
        "N(0, 1)",
        "Gaussian weights have a KS of 0.00108 and a kurtosis of 2.954, because each block is divided by its own norm",
        f"the tensors are those that the recipe {distribution.recipe} quantizes; at most {MAX_WEIGHTS} weights of each "
        "are measured, evenly spread",
    ]


def _cells(before: Normality | None, after: Normality | None) -> list[str]:
    fits = (before, after)
    return ["" if f is None else f"{f.ks:.5f}" for f in fits] + ["" if f is None else f"{f.kurtosis:.3f}" for f in fits]
