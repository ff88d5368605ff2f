"""The command `pqweights verify`."""

from __future__ import annotations

from contextlib import nullcontext

import typer

from pqweights.common.units import counted

from . import options, output


def command(
    ctx: typer.Context,
    folder: options.Folder,
    source: options.From = None,
    adapter: options.Adapter = None,
    calibrate: options.StatedSample = None,
    imatrix: options.StatedImatrix = None,
    eval: options.StatedEval = None,
    allow_pickle: options.AllowPickle = False,
    include_files: options.IncludeFiles = None,
    low_disk: options.LowDisk = False,
    threads: options.Threads = None,
    revision: options.Revision = None,
    token: options.Token = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check every stored byte of a finished folder against its manifest.

    With --from, also makes the result again from its source and compares the hashes. Prints one line for each problem,
    and exits with code 1 if there are any.
    """
    with output.errors(quiet=quiet):
        from pqweights.api import verify

        with (
            output.progress("verifying") as verifying,
            output.progress("making it again") if source else nullcontext() as making,
            output.progress("calibrating", unit="steps") if source else nullcontext() as calibrating,
        ):
            result = verify(
                **options.given(ctx), progress=verifying, making_progress=making, calibration_progress=calibrating
            )
        if json:
            output.print_json(result.to_json())
        elif result.ok:
            tensors, files = counted(result.tensors, "tensor"), counted(result.files, "file")
            made = f"; {source} gives the same bytes" if source else ""
            output.summary(f"{folder}: ok: {tensors}, {files}, {counted(result.bytes, 'byte')}{made}")
        else:
            output.show(*result.problems)
        if not result.ok:
            raise typer.Exit(1)
