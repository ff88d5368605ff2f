"""pqweights inspect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output, report

if TYPE_CHECKING:
    from pqweights.measure.distribution import Distribution, Normality
    from pqweights.planning.plan import TensorPlan
    from pqweights.results.inspect import Inspection
    from pqweights.rewrite.manifest import TensorRecord

FolderOrSource = Annotated[
    str,
    typer.Argument(
        metavar="DIR", help="Folder that pqweights wrote, or ORG/NAME on the Hub; any checkpoint with --distribution."
    ),
]
DistributionOption = Annotated[
    bool,
    typer.Option(
        "--distribution", help="Measure how Gaussian a checkpoint's weights are, before and after the rotation."
    ),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw it, too, into a .png or .svg file.")
]


def command(
    folder: FolderOrSource,
    distribution: DistributionOption = False,
    plot: PlotOption = None,
    threads: options.ThreadsOption = None,
    allow_pickle: options.PickleOption = False,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
) -> None:
    """Show a finished folder: tensors, bits, relative errors, sizes, and totals."""
    with output.errors():
        from pqweights.checkpoint.names import MANIFEST_FILE

        if distribution:
            found = options.fetched(folder, options.access(revision, token))
            asked = _Asked(threads=options.thread_count(threads), allow_pickle=allow_pickle, plot=plot, json=json)
            _show_distribution(found.path, asked)
        else:
            found = options.fetched(folder, options.access(revision, token), only=[MANIFEST_FILE])
            _show_folder(found.path, plot, json)


def _show_folder(folder: Path, plot: Path | None, json: bool) -> None:
    from pqweights.results.inspect import inspect

    found = inspect(folder)
    if plot is not None:
        from pqweights.plots.layers import plot_inspection

        plot_inspection(found, plot)
    if json:
        output.print_json(found.to_json())
    else:
        typer.echo("\n".join(_folder_lines(found)))


def _row(tensor: TensorPlan, record: TensorRecord) -> list[str]:
    """How a tensor is stored; `coded` is what its codec says of it, but for zeros, and whether its channels were scaled."""
    state = [
        value if isinstance(value, str) else f"{key} {value}" for key, value in (record.state or {}).items() if value
    ]
    return [
        tensor.name,
        "x".join(map(str, tensor.shape)),
        tensor.dtype,
        tensor.action,
        str(tensor.bits or ""),
        str(tensor.bytes),
        "" if record.relative_mse is None else f"{record.relative_mse:.6f}",
        ", ".join([*state, *(["scaled"] if tensor.is_scaled else [])]),
    ]


def _folder_lines(found: Inspection) -> list[str]:
    manifest = found.manifest
    columns = [
        ("tensor", False),
        ("shape", False),
        ("dtype", False),
        ("action", False),
        ("bits", True),
        ("bytes", True),
        ("relative MSE", True),
        ("coded", False),
    ]
    rows = [_row(tensor, record) for tensor, record in manifest.pairs]
    totals = found.totals
    bits = totals["bits_per_weight"]
    lines = [output.table(columns, rows), ""]
    lines.append(
        f"{manifest.kind}: {output.size(totals['output_bytes'])} in safetensors files, {totals['weights']} weights, "
        f"{totals['coverage']:.4%} of them quantized" + ("" if bits is None else f" at {bits:.4f} bits per weight")
    )
    if any(tensor.action == "integer" for tensor in manifest.tensors):
        lines += report.integer_lines(
            manifest.tensors, manifest.records, measured="original_fingerprint" in manifest.made_by
        )
    else:
        lines += report.quality_lines(manifest.tensors, manifest.records)
    return lines


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The options of --distribution."""

    threads: int
    allow_pickle: bool
    plot: Path | None
    json: bool


def _show_distribution(source: Path, asked: _Asked) -> None:
    from pqweights.measure.distribution import measure_distribution

    if asked.plot is not None:
        from pqweights.plots.figure import check_plot_file

        check_plot_file(asked.plot)
    with output.progress("measuring") as progress:
        found = measure_distribution(source, threads=asked.threads, allow_pickle=asked.allow_pickle, progress=progress)
    if asked.plot is not None:
        from pqweights.plots.distribution import plot_distribution

        plot_distribution(found, asked.plot)
    if asked.json:
        output.print_json(found.to_json())
    else:
        typer.echo("\n".join(_distribution_lines(found)))


def _distribution_lines(found: Distribution) -> list[str]:
    from pqweights.measure.distribution import MAX_WEIGHTS

    columns = [("tensor", False), ("role", False), ("weights", True), ("measured", True)]
    columns += [(f"{what} {when}", True) for what in ("KS", "kurtosis") for when in ("before", "after")]
    rows = [[t.name, t.role, str(t.weights), str(t.sampled_weights), *_cells(t.before, t.after)] for t in found.tensors]
    rows.append(
        ["all together", "", str(found.weights), str(found.sampled_weights), *_cells(found.before, found.after)]
    )
    return [
        output.table(columns, rows),
        "",
        "coordinates of whole blocks of 128 weights, divided by the block's norm / sqrt(128), before and after the rotation",
        "KS: Kolmogorov-Smirnov distance to N(0, 1), to 0.00002; kurtosis about zero: 3 for N(0, 1)",
        "dividing by the norm alone leaves Gaussian weights a KS of 0.00108 and a kurtosis of 2.954",
        f"tensors that the recipe {found.recipe} quantizes; of each at most {MAX_WEIGHTS} weights, spread evenly",
    ]


def _cells(before: Normality | None, after: Normality | None) -> list[str]:
    fits = (before, after)
    return ["" if f is None else f"{f.ks:.5f}" for f in fits] + ["" if f is None else f"{f.kurtosis:.3f}" for f in fits]
