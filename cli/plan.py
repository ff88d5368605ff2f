"""The command `pqweights plan`, which `quantize --dry-run` also runs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pqweights.options import PlanArguments, QuantizeArguments

from . import options, output, report, report_plan
from .flags import taking
from .report import warn_if_nothing_is_quantized
from .report_fit import fit_lines

if TYPE_CHECKING:
    from pqweights.planning.recipe import Recipe
    from pqweights.storage import Store


@taking(PlanArguments)
def command(
    asked: PlanArguments,
    *,
    summary: options.SummaryOption = None,
    json: options.JsonOption = False,
) -> None:
    """Show what quantize would do with each tensor: action, codec, bits, bytes and reason.

    Only the headers of the checkpoint are read.
    """
    with _no_search_for_cycles():
        from pqweights.planning.choice import choose_recipe

        chosen = choose_recipe(asked.recipe, asked)
        report.warn_of_files_beside(str(asked.source))
        show_plan(asked, chosen, threads=asked.threads, summary=summary, json=json)


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


@_no_search_for_cycles()
def show_plan(
    asked: PlanArguments | QuantizeArguments,
    recipe: Recipe,
    *,
    threads: int | None,
    out: Store | None = None,
    summary: bool | None = None,
    json: bool = False,
) -> None:
    """Make a plan and print it.

    asked: the source, and how to read and write it
    recipe: what to do with its tensors
    threads: number of threads for which the memory is estimated
    out: where the result is to be written, if that is known
    summary: whether to summarize the tensors; None to choose by their number
    json: whether to print JSON
    """
    from pqweights.rewrite.results.plan_report import report_plan as make_plan

    with output.status("reading the headers"):
        made = make_plan(str(asked.source), recipe, asked, options.thread_count(threads), out)
    warn_if_nothing_is_quantized(made.plan.totals)
    if json:
        output.print_json_pieces(piece.decode() for piece in made.to_pieces())
        return
    lines = report_plan.plan_lines(made, summary)
    if made.fit is not None:
        lines += ["", *fit_lines(made.fit)]
    output.show(*lines)
