"""The command `pqweights plan`, which `quantize --dry-run` also runs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output, report, report_plan
from .report import warn_if_nothing_is_quantized
from .report_fit import curve_lines, fit_lines

if TYPE_CHECKING:
    from pqweights.planning.recipe import Recipe
    from pqweights.quantizing import QuantizeOptions
    from pqweights.store import Store

PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Plot the bit widths by layer and role to FILE, a .png or .svg."),
]


def command(
    source: options.SourceArgument,
    recipe: options.RecipeOption = "q5",
    codec: options.CodecOption = None,
    bits: options.BitsOption = None,
    effort: options.EffortOption = None,
    keep: options.KeepOption = None,
    set_bits: options.SetOption = None,
    target_size: options.TargetSizeOption = None,
    target_bpw: options.TargetBitsOption = None,
    bpw_of: options.BitsOfOption = None,
    sensitivity: options.SensitivityOption = None,
    summary: options.SummaryOption = None,
    plot: PlotOption = None,
    max_shard_bytes: options.ShardOption = "5GB",  # type: ignore[assignment]  # typer parses it
    threads: options.ThreadsOption = None,
    awq: options.AwqOption = None,
    awq_any_codec: options.AnyCodecOption = False,
    fold: options.FoldOption = None,
    calibration: options.CalibrationOption = None,
    allow_pickle: options.PickleOption = False,
    include_files: options.IncludeOption = None,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Show what quantize would do with each tensor: action, codec, bits, bytes and reason.

    Only the headers of the checkpoint are read.
    """
    with output.errors(quiet=quiet), _no_search_for_cycles():
        from pqweights.planning.choice import RecipeOptions, choose_recipe
        from pqweights.quantizing import QuantizeOptions

        changes = RecipeOptions(
            codec=codec,
            bits=bits,
            effort=effort,
            keep=tuple(keep or ()),
            set_bits=options.settings(set_bits),
            target_size=target_size,
            target_bpw=target_bpw,
            bpw_of=None if bpw_of is None else bpw_of.value,
            sensitivity=sensitivity,
        )
        chosen = choose_recipe(recipe, changes)
        asked = QuantizeOptions(
            access=options.access(revision, token),
            allow_pickle=allow_pickle,
            include_files=tuple(include_files or ()),
            awq=awq,
            awq_any_codec=awq_any_codec,
            fold=fold,
            calibration=calibration,
            max_shard_bytes=max_shard_bytes,
        )
        used = options.thread_count(threads)
        report.warn_of_files_beside(source)
        request = PlanRequest(
            source=source, recipe=chosen, options=asked, threads=used, summary=summary, plot=plot, json=json
        )
        show_plan(request)


@contextlib.contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Turn off the garbage collector's search for reference cycles, which runs again for every 700 objects that stay.

    The plan of a large model is half a million objects without a cycle among them, and the search took a quarter of
    the time, and a thirtieth of that of the imports. It is turned off here and not in the library, whose callers may
    depend on it. As a decorator it comes back only after the plan is freed.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan, and how to show it.

    source: the checkpoint, or its id on the Hub
    recipe: what to do with its tensors
    options: how to read and write them
    threads: number of threads for which the memory is estimated
    out: where the result is to be written, if that is known
    summary: whether to summarize the tensors; None to choose by their number
    plot: where to plot the bit widths, if anywhere
    json: whether to print JSON
    """

    source: str
    recipe: Recipe
    options: QuantizeOptions
    threads: int
    out: Store | None = None
    summary: bool | None = None
    plot: Path | None = None
    json: bool = False


@_no_search_for_cycles()
def show_plan(request: PlanRequest) -> None:
    """Make a plan and print it."""
    from pqweights.results.plan_report import report_plan as plan

    options.check_plot(request.plot)
    with output.status("reading the headers"):
        report = plan(request.source, request.recipe, request.options, request.threads, request.out)
    if request.plot is not None:
        from pqweights.plots.layers import plot_widths

        plot_widths(report.tensors, request.plot)
    warn_if_nothing_is_quantized(report.plan.totals)
    if request.json:
        output.print_json_pieces(piece.decode() for piece in report.to_pieces())
        return
    lines = report_plan.plan_lines(report, request.summary)
    if report.fit is not None:
        lines += ["", *fit_lines(report.fit), "", *curve_lines(report.fit)]
    output.show(*lines)
