"""The command `pqweights verify`."""

from __future__ import annotations

import typer

from pqweights.common.units import counted

from . import options, output


def command(
    folder: options.Folder,
    threads: options.Threads = None,
    revision: options.Revision = None,
    token: options.Token = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Check every stored byte of a finished folder against its manifest.

    Prints one line for each problem, and exits with code 1 if there are any.
    """
    with output.errors(quiet=quiet):
        from pqweights.api import verify

        with output.progress("verifying") as progress:
            result = verify(
                folder, threads=threads, revision=revision, token=token, progress=progress, tell=output.note
            )
        if json:
            output.print_json(result.to_json())
        elif result.ok:
            tensors, files = counted(result.tensors, "tensor"), counted(result.files, "file")
            output.summary(f"{folder}: ok: {tensors}, {files}, {counted(result.bytes, 'byte')}")
        else:
            output.show(*result.problems)
        if not result.ok:
            raise typer.Exit(1)
