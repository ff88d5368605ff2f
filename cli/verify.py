"""The command `pqweights verify`."""

from __future__ import annotations

import typer

from . import cluster, options, output


def command(
    folder: options.FolderArgument,
    threads: options.ThreadsOption = None,
    ray: cluster.RayOption = None,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Check every stored byte of a finished folder against its manifest.

    Prints one line for each problem, and exits with code 1 if there are any.
    """
    with output.errors(quiet=quiet):
        from pqweights.distributed.engine import engine_of
        from pqweights.results.shard_checks import ShardChecks
        from pqweights.results.verify import verify
        from pqweights.units import counted

        found = options.found_result(folder, options.access(revision, token))
        with output.progress("verifying") as progress, engine_of(ray, threads, output.note) as engine:
            result = verify(
                found.where,
                threads=options.thread_count(threads),
                beside=found.not_fetched,
                progress=progress,
                run=ShardChecks.run if engine is None else engine.run_checks,
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
