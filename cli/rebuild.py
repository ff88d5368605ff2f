"""The command `pqweights rebuild`."""

from __future__ import annotations

from contextlib import nullcontext

import typer

from pqweights.common.units import counted

from . import options, output


def command(
    ctx: typer.Context,
    manifest: options.Stated,
    source: options.MadeOf,
    out: options.Out,
    type: options.StatedTypes = None,
    adapter: options.Adapter = None,
    calibrate: options.StatedSample = None,
    imatrix: options.StatedImatrix = None,
    eval: options.StatedEval = None,
    allow_pickle: options.AllowPickle = False,
    include_files: options.IncludeFiles = None,
    low_disk: options.LowDisk = False,
    ray: options.Ray = None,
    threads: options.Threads = None,
    overwrite: options.Overwrite = False,
    revision: options.Revision = None,
    token: options.Token = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Make a result again from its manifest, and compare every byte with what the manifest states.

    Prints a line for each difference, and exits with code 1 if there are any. If the run is interrupted, the same
    command continues it.
    """
    with output.errors(quiet=quiet, kept=lambda: options.run_continues(source, out, calibrate)):
        from pqweights.api import rebuild

        with (
            output.progress("rebuilding") as progress,
            output.progress("calibrating", unit="steps") if calibrate else nullcontext() as calibrating,
        ):
            done = rebuild(**options.given(ctx), progress=progress, calibration_progress=calibrating)
        if json:
            output.print_json({"output": out} | done.to_json())
        elif done.ok:
            tensors, files = counted(len(done.report.records), "tensor"), counted(len(done.report.plan.shards), "file")
            output.summary(f"{source} -> {out}: {tensors} in {files}, all bytes as the manifest states them")
        else:
            output.show(*done.differences)
        if not done.ok:
            raise typer.Exit(1)
