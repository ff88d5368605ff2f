"""pqweights plan, which is also quantize --dry-run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output, report

if TYPE_CHECKING:
    from pqweights.planning.recipe import Recipe
    from pqweights.quantize import QuantizeOptions

PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw widths by layer and role: .png or .svg.")
]


def command(
    source: options.SourceArgument,
    recipe: options.RecipeOption = "q5",
    bits: options.BitsOption = None,
    target_size: options.TargetSizeOption = None,
    target_bpw: options.TargetBitsOption = None,
    sensitivity: options.SensitivityOption = None,
    plot: PlotOption = None,
    max_shard_bytes: options.ShardOption = "5GB",  # type: ignore[assignment]  # typer parses it
    threads: options.ThreadsOption = None,
    awq: options.AwqOption = None,
    awq_any_codec: options.AnyCodecOption = False,
    allow_pickle: options.PickleOption = False,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
) -> None:
    """Show what quantize would do, from the headers alone: per tensor action, codec, bits, bytes and reason."""
    options.check_awq(awq, awq_any_codec)
    with output.errors():
        from pqweights.quantize import QuantizeOptions

        fitting = options.Fitting(target_size=target_size, target_bpw=target_bpw, sensitivity=sensitivity)
        chosen = options.chosen_recipe(recipe, bits, fitting)
        asked = QuantizeOptions(
            access=options.access(revision, token),
            allow_pickle=allow_pickle,
            awq=awq,
            awq_any_codec=awq_any_codec,
            max_shard_bytes=max_shard_bytes,
        )
        show_plan(PlanRequest(source, chosen, asked, threads=options.thread_count(threads), plot=plot, json=json))


@contextlib.contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Without the search for garbage in reference cycles, which Python repeats with every 700 new objects that stay.

    The plan of a large model is half a million objects, none of them in a cycle: a quarter of the time went into that
    search. It is turned off here and not in the library, whose callers have other objects to look after; as a
    decorator, so that it comes back only when the plan is gone.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class PlanRequest:
    """What to plan, and how to show it. threads: for which memory is estimated."""

    source: str
    recipe: Recipe
    options: QuantizeOptions
    _: KW_ONLY
    threads: int
    plot: Path | None = None
    json: bool = False


@_no_search_for_cycles()
def show_plan(request: PlanRequest) -> None:
    """Print a plan."""
    from pqweights.quantize import plan_quantize
    from pqweights.rewrite.driver import resource_needs

    if request.plot is not None:
        from pqweights.plots.figure import check_plot_file
        from pqweights.plots.layers import plot_widths

        check_plot_file(request.plot)
    checkpoint, transform, planned = plan_quantize(request.source, request.recipe, request.options)
    needs = resource_needs(planned, request.threads)
    if request.plot is not None:
        plot_widths(planned.tensors, request.plot)
    traffic, fit = report.traffic(checkpoint), transform.fit
    if request.json:
        fitted = {} if fit is None else {"fit": fit.to_json()}
        output.print_json(report.plan_json(planned, needs) | fitted | traffic)
        return
    lines = [report.plan_text(planned, needs), *report.traffic_lines(traffic)]
    if fit is not None:
        lines += ["", *report.fit_lines(fit), "", *report.curve_lines(fit)]
    typer.echo("\n".join(lines))
