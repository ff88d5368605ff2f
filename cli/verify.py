"""The command `pqweights verify`."""

from __future__ import annotations

from dataclasses import replace

import typer

from pqweights.common.parameters import with_options
from pqweights.common.units import counted
from pqweights.planning.options import VerifyArguments

from . import options, output


@options.taking(VerifyArguments)
def command(asked: VerifyArguments, *, json: options.JsonOption = False) -> None:
    """Check every stored byte of a finished folder against its manifest.

    Prints one line for each problem, and exits with code 1 if there are any.
    """
    from pqweights.api import verify

    with output.progress("verifying") as progress:
        result = with_options(verify)(replace(asked, progress=progress))
    if json:
        output.print_json(result.to_json())
    elif result.ok:
        tensors, files = counted(result.tensors, "tensor"), counted(result.files, "file")
        output.summary(f"{asked.folder}: ok: {tensors}, {files}, {counted(result.bytes, 'byte')}")
    else:
        output.show(*result.problems)
    if not result.ok:
        raise typer.Exit(1)
