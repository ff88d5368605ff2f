"""The command `pqweights quantize`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import typer

from pqweights.common.options import BY_MODEL, DEFAULT_MAX_SHARD_SIZE, DEFAULT_SAMPLE_TOKENS

from . import options, output, report
from .plan import fit_lines, show_plan
from .report import is_summarized, quality_lines, summary_table

if TYPE_CHECKING:
    from pqweights.convert.report import RewriteReport


def command(
    ctx: typer.Context,
    source: options.Source,
    out: options.Out,
    recipe: options.Recipe = None,
    codec: options.Codec = None,
    bits: options.Bits = None,
    effort: options.Effort = None,
    keep: options.Keep = None,
    set_format: options.SetFormat = None,
    target_size: options.TargetSize = None,
    target_bpw: options.TargetBpw = None,
    max_kl: options.MaxKl = None,
    eval: options.Eval = None,
    adapter: options.Adapter = None,
    leave_out: options.LeaveOut = None,
    strict: options.Strict = False,
    awq: options.Awq = None,
    calibrate: options.Calibrate = None,
    calibration_tokens: options.CalibrationTokens = DEFAULT_SAMPLE_TOKENS,
    save_sample: options.SaveSample = None,
    rate: options.Rate = BY_MODEL,
    allow_pickle: options.AllowPickle = False,
    include_files: options.IncludeFiles = None,
    lossless: options.Lossless = False,
    max_shard_size: options.MaxShardSize = DEFAULT_MAX_SHARD_SIZE,
    low_disk: options.LowDisk = False,
    ray: options.Ray = None,
    threads: options.Threads = None,
    overwrite: options.Overwrite = False,
    revision: options.Revision = None,
    token: options.Token = None,
    dry_run: options.DryRun = False,
    summary: options.Summary = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Quantize a checkpoint into a master: packed codes and block norms, by default 5.125 bits per weight.

    If the run is interrupted, the same command continues it. Memory does not grow with the size of the model.
    """
    with output.errors(quiet=quiet, kept=lambda: options.run_continues(source, out, calibrate or awq)):
        from pqweights.api import quantize
        from pqweights.storage import open_store

        store = open_store(out)
        report.warn_of_files_beside(source)
        if dry_run:
            show_plan(options.given(ctx), out=store, summary=summary, json=json)
            return
        with (
            output.progress("quantizing") as progress,
            output.progress("calibrating", unit="steps") if calibrate or awq else nullcontext() as calibrating,
        ):
            progress.status("reading the headers")
            done = quantize(**options.given(ctx), progress=progress, calibration_progress=calibrating)
        _show(done, f"{source} -> {store}", out=str(store), summary=summary, json=json)


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
    for line in report.exceeding_lines(done.pairs):
        output.warn(line)


def _lines(done: RewriteReport) -> list[str]:
    fit = done.plan.fit
    return [
        *report.totals_lines(done.totals),
        *quality_lines(done.pairs),
        *(fit_lines(fit) if fit else []),
        *report.divergence_lines(done.plan.made_by),
        *report.scales_found(done),
        *report.kept_lines(done.plan.tensors),
        *report.already_quantized_lines(done.plan),
        *report.left_out_lines(done.plan),
    ]
