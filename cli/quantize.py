"""The command `pqweights quantize`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import cluster, options, output, report
from .plan import PlanRequest, show_plan
from .report_errors import quality_lines
from .report_fit import fit_lines
from .report_fold import fold_lines
from .report_summary import is_summarized, summary_table

if TYPE_CHECKING:
    from pqweights.rewrite.task import RewriteReport

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the plan without writing anything.")]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict", help="Fail if the error of a tensor is above the limit of its codec, even after it is rescued."
    ),
]
LowDiskOption = Annotated[
    bool,
    typer.Option(
        "--low-disk",
        help="For a source on the Hub: keep at most two of its files at a time, and delete each when it is done.",
    ),
]


def command(
    source: options.SourceArgument,
    out: options.OutArgument,
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
    dry_run: DryRunOption = False,
    summary: options.SummaryOption = None,
    overwrite: options.OverwriteOption = False,
    strict: StrictOption = False,
    max_shard_bytes: options.ShardOption = "2GB",  # type: ignore[assignment]  # typer parses it
    threads: options.ThreadsOption = None,
    ray: cluster.RayOption = None,
    awq: options.AwqOption = None,
    awq_any_codec: options.AnyCodecOption = False,
    fold: options.FoldOption = None,
    calibration: options.CalibrationOption = None,
    allow_pickle: options.PickleOption = False,
    include_files: options.IncludeOption = None,
    low_disk: LowDiskOption = False,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Quantize a checkpoint into a master: packed codes and block norms, nearly lossless at 5.125 bits per weight.

    If the run is interrupted, the same command continues it. Memory does not grow with the size of the model.
    """
    with output.errors(kept=None if dry_run else lambda: options.run_continues(source, out), quiet=quiet):
        from pqweights.planning.choice import RecipeOptions, choose_recipe
        from pqweights.quantizing import QuantizeOptions, quantize
        from pqweights.store import open_store

        place = open_store(out)
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
            low_disk=low_disk,
            allow_pickle=allow_pickle,
            include_files=tuple(include_files or ()),
            awq=awq,
            awq_any_codec=awq_any_codec,
            fold=fold,
            calibration=calibration,
            max_shard_bytes=max_shard_bytes,
            strict=strict,
        )
        used = options.thread_count(threads)
        report.warn_of_files_beside(source)
        if dry_run:
            show_plan(
                PlanRequest(
                    source=source, recipe=chosen, options=asked, threads=used, out=place, summary=summary, json=json
                )
            )
            return
        with (
            output.progress("quantizing") as progress,
            cluster.run_options(ray, threads=threads, overwrite=overwrite, progress=progress) as run,
        ):
            progress.status("reading the headers")
            done = quantize(source, place, chosen, options=asked, run=run)
        _show(done, f"{source} -> {place}", out=str(place), summary=summary, json=json)


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
        *fold_lines(done),
        *report.kept_lines(done.plan.tensors),
        *report.left_out_lines(done.plan),
        *report.export_lines(done.exports),
    ]
