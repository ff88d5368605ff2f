"""pqweights quantize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import options, output, report
from .plan import PlanRequest, show_plan

if TYPE_CHECKING:
    from pqweights.rewrite.task import RewriteReport

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Refuse a tensor whose error exceeds what the codec promises, rescued or not.")
]
LowDiskOption = Annotated[
    bool,
    typer.Option(
        "--low-disk", help="Keep at most two files of a repository at a time: each is deleted when it is done."
    ),
]


def command(
    source: options.SourceArgument,
    out: options.OutArgument,
    recipe: options.RecipeOption = "q5",
    bits: options.BitsOption = None,
    target_size: options.TargetSizeOption = None,
    target_bpw: options.TargetBitsOption = None,
    sensitivity: options.SensitivityOption = None,
    dry_run: DryRunOption = False,
    overwrite: options.OverwriteOption = False,
    strict: StrictOption = False,
    max_shard_bytes: options.ShardOption = "5GB",  # type: ignore[assignment]  # typer parses it
    threads: options.ThreadsOption = None,
    device: options.DeviceOption = options.Device.CPU,
    awq: options.AwqOption = None,
    awq_any_codec: options.AnyCodecOption = False,
    allow_pickle: options.PickleOption = False,
    low_disk: LowDiskOption = False,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
) -> None:
    """Turn a checkpoint into a master: packed codes and block norms, nearly lossless at 5.125 bits per weight.

    Killed at any moment, the same command continues. Memory does not grow with the model.
    """
    options.check_awq(awq, awq_any_codec)
    with output.errors(continues=not dry_run):
        from pqweights.quantize import QuantizeOptions, quantize
        from pqweights.rewrite.task import RunOptions

        fitting = options.Fitting(target_size=target_size, target_bpw=target_bpw, sensitivity=sensitivity)
        chosen = options.chosen_recipe(recipe, bits, fitting)
        asked = QuantizeOptions(
            access=options.access(revision, token),
            low_disk=low_disk,
            allow_pickle=allow_pickle,
            awq=awq,
            awq_any_codec=awq_any_codec,
            max_shard_bytes=max_shard_bytes,
            strict=strict,
        )
        if dry_run:
            show_plan(PlanRequest(source, chosen, asked, threads=options.thread_count(threads), json=json))
            return
        with output.progress("quantizing") as progress:
            run = RunOptions(
                threads=options.thread_count(threads), device=device.value, overwrite=overwrite, progress=progress
            )
            done = quantize(source, out, chosen, options=asked, run=run)
        if json:
            output.print_json(report.result_json(done, str(out)))
        else:
            _say_what_was_there(done, str(out))
            typer.echo("\n".join([f"{source} -> {out}", *_lines(done)]))


def _say_what_was_there(done: RewriteReport, out: str) -> None:
    if done.already_done:
        output.note(f"{out}: already holds this very result; nothing was written")
    elif done.resumed:
        output.note(f"continued: {done.resumed} of {len(done.records)} tensors had been finished by the earlier run")


def _lines(done: RewriteReport) -> list[str]:
    lines = [report.totals_text(done.plan.totals()), *report.quality_lines(done.plan.tensors, done.records)]
    if fit := report.fit_of(done):
        lines += report.fit_lines(fit)
    return lines + report.kept_lines(done.plan.tensors) + report.left_out_lines(done.plan)
