"""The command `pqweights verify`."""

from __future__ import annotations

import typer

from pqweights.options import VerifyArguments

from . import options, output
from .flags import taking


@taking(VerifyArguments)
def command(asked: VerifyArguments, *, json: options.JsonOption = False) -> None:
    """Check every stored byte of a finished folder against its manifest.

    Prints one line for each problem, and exits with code 1 if there are any.
    """
    from pqweights.common.units import counted
    from pqweights.rewrite.distributed.engine import engine_of
    from pqweights.rewrite.results.shard_checks import ShardChecks
    from pqweights.rewrite.results.verify import verify

    folder = options.found_result(str(asked.folder), asked.access)
    with output.progress("verifying") as progress, engine_of(asked.ray, asked.threads, output.note) as engine:
        result = verify(
            folder.where,
            threads=options.thread_count(asked.threads),
            beside=folder.not_fetched,
            progress=progress,
            run=ShardChecks.run if engine is None else engine.run_checks,
        )
    if json:
        output.print_json(result.to_json())
    elif result.ok:
        tensors, files = counted(result.tensors, "tensor"), counted(result.files, "file")
        output.summary(f"{asked.folder}: ok: {tensors}, {files}, {counted(result.bytes, 'byte')}")
    else:
        output.show(*result.problems)
    if not result.ok:
        raise typer.Exit(1)
