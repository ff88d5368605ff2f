"""The command `pqweights export`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pqweights.common.options import DEFAULT_SAMPLE_TOKENS
from pqweights.common.units import counted, size_text

from . import options, output, report
from .push import push_lines
from .report import integer_form_lines

if TYPE_CHECKING:
    from pqweights.convert.report import RewriteReport


def with_targets(text: str) -> str:
    """Return a help text with the targets below it."""
    from pqweights.targets import ALIASES, EXPORTS

    short = {name: f" (or {alias})" for alias, name in ALIASES.items()}
    summaries = [f"{name}{short.get(name, '')}: {summary}".replace("[", "\\[") for name, summary in EXPORTS.items()]
    return "\n\n".join([text, *summaries])


def command(
    ctx: typer.Context,
    source: options.Exported,
    out: options.Out,
    target: options.Target,
    bits: options.IntegerBits = None,
    group_size: options.GroupSize = None,
    qparams: options.Qparams = None,
    rounding: options.Rounding = None,
    calibrate: options.CalibrateInputs = None,
    calibration_tokens: options.CalibrationTokens = DEFAULT_SAMPLE_TOKENS,
    save_sample: options.SaveSample = None,
    imatrix: options.Imatrix = None,
    save_imatrix: options.SaveImatrix = None,
    packing: options.Packing = None,
    mode: options.Mode = None,
    format: options.Format = None,
    dtype: options.StoredDtype = None,
    type: options.GgufType = None,
    pure: options.Pure = False,
    without_tokenizer: options.WithoutTokenizer = False,
    name: options.Name = None,
    recipe: options.FormatRecipe = None,
    keep: options.Keep = None,
    set_format: options.SetFormat = None,
    target_size: options.TargetSize = None,
    target_bpw: options.TargetBpw = None,
    max_kl: options.MaxKl = None,
    eval: options.Eval = None,
    adapter: options.Adapter = None,
    leave_out: options.LeaveOut = None,
    allow_pickle: options.AllowPickle = False,
    include_files: options.IncludeFiles = None,
    low_disk: options.LowDisk = False,
    max_shard_size: options.MaxExportedSize = None,
    push: options.Push = None,
    private: options.Private = False,
    dry_run: options.DryRun = False,
    ray: options.Ray = None,
    threads: options.Threads = None,
    overwrite: options.Overwrite = False,
    revision: options.Revision = None,
    token: options.Token = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Export a checkpoint or a master to what a runtime loads.

    If the run is interrupted, the same command continues it. The targets are:
    """
    with output.errors(quiet=quiet, kept=lambda: options.run_continues(source, out, calibrate)):
        from pqweights.api import export
        from pqweights.storage import open_store

        with output.progress("exporting") as progress:
            done = export(**options.given(ctx), dry_run=dry_run, progress=progress)
        _show(done, source, str(open_store(out)), dry_run=dry_run, json=json)


def _show(done: RewriteReport, folder: str, out: str, *, dry_run: bool, json: bool) -> None:
    for warning in done.warnings:
        output.warn(warning)
    if json:
        output.print_json({"output": out} | done.to_json())
        return
    if done.already_done:
        output.note(f"{out}: already holds this result; nothing was written")
    show = output.show if dry_run else output.summary  # a dry run has nothing else to show
    show(*_lines(done, folder, out))
    if done.pushed is not None:
        output.summary(*push_lines(done.pushed, dry_run=False))


def _lines(done: RewriteReport, folder: str, out: str) -> list[str]:
    plan = done.plan
    types = report.type_lines(plan.made_by, done.pairs, plan.shards)
    sizes = f"{size_text(plan.totals.source_bytes)} -> {size_text(plan.output_bytes)}"
    stored = f"{counted(len(plan.tensors), 'tensor')} in {counted(len(plan.shards), 'file')}"
    return [
        f"{folder} -> {out}: {sizes}, {stored}",
        *(types or (*report.bits_and_coverage(done.totals), *integer_form_lines(done.pairs))),
        *report.divergence_lines(plan.made_by),
        *report.already_quantized_lines(plan, done.exact),
        *report.left_out_lines(plan),
    ]
