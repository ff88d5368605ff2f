"""pqweights export."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from . import options, output, report


class Target(StrEnum):
    """The keys of pqweights.exports.EXPORTS, which a test compares; --help must not import the library."""

    BF16 = "bf16"


class Dtype(StrEnum):
    """What weights are decoded to."""

    BF16 = "bf16"
    SOURCE = "source"


def command(
    folder: options.FolderArgument,
    out: options.OutArgument,
    target: Annotated[Target, typer.Option("--target", "-t", help="bf16: an ordinary checkpoint, for every runtime.")],
    dtype: Annotated[
        Dtype, typer.Option("--dtype", help="bf16, or source: the dtypes that the source had.")
    ] = Dtype.BF16,
    overwrite: options.OverwriteOption = False,
    max_shard_bytes: options.ShardOption = "5GB",  # type: ignore[assignment]  # typer parses it
    threads: options.ThreadsOption = None,
    device: options.DeviceOption = options.Device.CPU,
    json: options.JsonOption = False,
) -> None:
    """Turn a master into a checkpoint that runtimes load. Killed at any moment, the same command continues."""
    with output.errors():
        from pqweights.exports import export

        with output.progress("exporting") as progress:
            done = export(
                folder, out, target.value, dtype=dtype.value, threads=options.thread_count(threads), device=device.value,
                overwrite=overwrite, max_shard_bytes=max_shard_bytes, progress=progress,
            )  # fmt: skip
        if json:
            output.print_json(report.result_json(done, str(out)))
            return
        if done.already_done:
            output.note(f"{out}: already holds this very result; nothing was written")
        plan = done.plan
        typer.echo(
            f"{folder} -> {out}: {output.size(plan.source_bytes)} -> {output.size(plan.output_bytes)}, "
            f"{len(plan.tensors)} tensors in {len(plan.shards)} file(s)"
        )
        typer.echo("\n".join(report.left_out_lines(plan)), nl=bool(plan.left_out))
