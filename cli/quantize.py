"""pqweights quantize."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options, output, report
from .plan import run as run_plan


def command(
    source: options.SourceArgument,
    out: options.OutArgument,
    recipe: options.RecipeOption = "q5",
    bits: options.BitsOption = None,
    target_size: options.TargetSizeOption = None,
    target_bpw: options.TargetBitsOption = None,
    sensitivity: options.SensitivityOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    overwrite: options.OverwriteOption = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Refuse a tensor whose error exceeds what the codec promises, rescued or not."),
    ] = False,
    max_shard_bytes: options.ShardOption = "5GB",  # type: ignore[assignment]  # typer parses it
    threads: options.ThreadsOption = None,
    device: options.DeviceOption = options.Device.CPU,
    awq: options.AwqOption = None,
    awq_any_codec: options.AnyCodecOption = False,
    allow_pickle: options.PickleOption = False,
    low_disk: Annotated[
        bool,
        typer.Option(
            "--low-disk", help="Of a repository keep at most two files at a time: each is deleted when it is done."
        ),
    ] = False,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
) -> None:
    """Turn a checkpoint into a master: packed codes and block norms, nearly lossless at 5.125 bits per weight.

    Killed at any moment, the same command continues. Memory does not grow with the model.
    """
    options.check_awq(awq, awq_any_codec)
    if dry_run:
        run_plan(
            source,
            recipe,
            bits,
            target_size,
            target_bpw,
            sensitivity,
            None,
            max_shard_bytes,
            threads,
            awq,
            awq_any_codec,
            allow_pickle,
            revision,
            token,
            json,
        )
        return
    with output.errors(continues=True):
        from pqweights.quantize import quantize

        chosen = options.chosen_recipe(recipe, bits, target_size, target_bpw, sensitivity)
        with output.progress("quantizing") as progress:
            done = quantize(
                source, out, chosen, access=options.access(revision, token), low_disk=low_disk, threads=options.thread_count(threads), device=device.value, overwrite=overwrite,
                awq=awq, awq_any_codec=awq_any_codec, max_shard_bytes=max_shard_bytes, allow_pickle=allow_pickle,
                strict=strict, progress=progress,
            )  # fmt: skip
        if json:
            output.print_json(report.result_json(done, str(out)))
            return
        if done.already_done:
            output.note(f"{out}: already holds this very result; nothing was written")
        elif done.resumed:
            output.note(
                f"continued: {done.resumed} of {len(done.records)} tensors had been finished by the earlier run"
            )
        lines = [f"{source} -> {out}", report.totals_text(done.plan.totals())]
        lines += report.quality_lines(done.plan.tensors, done.records)
        if fit := report.fit_of(done):
            lines += report.fit_lines(fit)
        lines += report.kept_lines(done.plan.tensors) + report.left_out_lines(done.plan)
        typer.echo("\n".join(lines))
