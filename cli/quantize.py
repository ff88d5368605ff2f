"""The command `pqweights quantize`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pqweights.common.parameters import with_options
from pqweights.planning.options import QuantizeArguments

from . import options, output, report
from .plan import fit_lines, show_plan
from .report import is_summarized, quality_lines, summary_table

if TYPE_CHECKING:
    from pqweights.rewrite.task import RewriteReport

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan without writing anything.")]


@options.taking(
    QuantizeArguments,
    continues=lambda asked: options.run_continues(str(asked.source), str(asked.out), asked.calibrate is not None),
)
def command(
    asked: QuantizeArguments,
    *,
    dry_run: DryRunOption = False,
    summary: options.SummaryOption = None,
    json: options.JsonOption = False,
) -> None:
    """Quantize a checkpoint into a master: packed codes and block norms, nearly lossless at 5.125 bits per weight.

    If the run is interrupted, the same command continues it. Memory does not grow with the size of the model.
    """
    from pqweights.api import quantize
    from pqweights.planning.choice import choose_recipe
    from pqweights.storage import open_store

    out = open_store(str(asked.out))
    report.warn_of_files_beside(str(asked.source))
    if dry_run:
        recipe = choose_recipe(asked.recipe, asked)
        show_plan(asked, recipe, threads=asked.threads, out=out, summary=summary, json=json)
        return
    with (
        output.progress("quantizing") as progress,
        output.progress("calibrating", unit="steps") if asked.calibrate else nullcontext() as calibrating,
    ):
        progress.status("reading the headers")
        done = with_options(quantize)(replace(asked, progress=progress, calibration_progress=calibrating))
    _show(done, f"{asked.source} -> {out}", out=str(out), summary=summary, json=json)


def _show(done: RewriteReport, what: str, *, out: str, summary: bool | None, json: bool) -> None:
    """Print a result. what: source and output, for people."""
    report.warn_if_nothing_is_quantized(done.totals)
    for warning in done.warnings:
        output.warn(warning)
    if json:
        output.print_json({"output": out} | done.to_json())
        return
    if done.already_done:
        output.note(f"{out}: already holds this result; nothing was written")
    elif done.resumed:
        output.note(f"continued: {done.resumed} of {len(done.records)} tensors were finished by an earlier run")
    by_role = [*summary_table(done.plan.tensors, done.records), ""] if is_summarized(summary, len(done.records)) else []
    output.summary(what, *by_role, *_lines(done))


def _lines(done: RewriteReport) -> list[str]:
    fit = report.fit_of(done)
    return [
        *report.totals_lines(done.totals),
        *quality_lines(done.pairs),
        *(fit_lines(fit) if fit else []),
        *report.kept_lines(done.plan.tensors),
        *report.already_quantized_lines(done.plan),
        *report.left_out_lines(done.plan),
        *report.export_lines(done.exports),
    ]
