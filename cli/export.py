"""pqweights export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from . import options, output, report

if TYPE_CHECKING:
    from pqweights.rewrite.task import RewriteReport


class ExportCommand(TyperCommand):
    """The command, whose help lists the targets that there are."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See click.Command."""
        from pqweights.exports import EXPORTS

        summaries = [f"{name}: {target.summary}".replace("[", "\\[") for name, target in EXPORTS.items()]
        self.help = "\n\n".join([(self.help or "").strip(), *summaries])
        super().format_help(ctx, formatter)


TargetOption = Annotated[
    str, typer.Option("--target", "-t", metavar="TARGET", help="What is to load the result; see above.")
]
BitsOption = Annotated[int | None, typer.Option("--bits", "-b", help="Width of the integers.", show_default="4")]
GroupSizeOption = Annotated[
    int | None,
    typer.Option("--group-size", "-g", help="Weights that share a scale.", show_default="128; mlx-q4: 64"),
]
QparamsOption = Annotated[
    str | None,
    typer.Option(
        "--qparams",
        metavar="best|minmax",
        help="Scales and offsets: best (least squared error), or minmax, as the runtime's own converter.",
        show_default="best",
    ),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source", metavar="SRC", help="Take the weights of the original checkpoint; prints what the master costs."
    ),
]
BasisOption = Annotated[
    str | None,
    typer.Option("--basis", metavar="plain|rotated", help="vllm-int4: what is rounded.", show_default="plain"),
]
PackingOption = Annotated[
    str | None,
    typer.Option(
        "--packing",
        metavar="tile_packed_to_4d|plain",
        help="torchao-int4: how codes are packed.",
        show_default="tile_packed_to_4d",
    ),
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="affine|mxfp4|mxfp8|nvfp4",
        help="mlx-q4: affine integers, or one of mlx's floats.",
        show_default="affine",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="bf16|source", help="bf16: bf16, or the dtypes that the source had.", show_default="bf16"
    ),
]


def command(
    folder: options.FolderArgument,
    out: options.OutArgument,
    target: TargetOption,
    bits: BitsOption = None,
    group_size: GroupSizeOption = None,
    qparams: QparamsOption = None,
    source: SourceOption = None,
    basis: BasisOption = None,
    packing: PackingOption = None,
    mode: ModeOption = None,
    dtype: DtypeOption = None,
    overwrite: options.OverwriteOption = False,
    max_shard_bytes: options.ShardOption = "5GB",  # type: ignore[assignment]  # typer parses it
    threads: options.ThreadsOption = None,
    device: options.DeviceOption = options.Device.CPU,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
) -> None:
    """Turn a master into a checkpoint that runtimes load. Killed at any moment, the same command continues."""
    with output.errors(continues=True):
        from pqweights.export import MasterFolder, export
        from pqweights.exports import get_target
        from pqweights.exports.options import ExportOptions
        from pqweights.rewrite.task import RunOptions

        asked = ExportOptions(
            dtype=dtype, bits=bits, group_size=group_size, mode=mode, packing=packing, basis=basis, qparams=qparams
        )
        get_target(target).settings(asked)  # refused before anything is fetched
        found = options.fetched(folder, options.access(revision, token), ours=True)
        original = None if source is None else options.fetched(source, options.access(None, token)).path
        with output.progress("exporting") as progress:
            run = RunOptions(
                threads=options.thread_count(threads), device=device.value, overwrite=overwrite, progress=progress
            )
            master = MasterFolder(found.path, found.origin, original)
            done = export(master, out, target, options=asked, max_shard_bytes=max_shard_bytes, run=run)
        if json:
            output.print_json(report.result_json(done, str(out)))
            return
        if done.already_done:
            output.note(f"{out}: already holds this very result; nothing was written")
        typer.echo("\n".join(_lines(done, folder, out)))


def _lines(done: RewriteReport, folder: str, out: Path) -> list[str]:
    plan = done.plan
    sizes = f"{output.size(plan.source_bytes)} -> {output.size(plan.output_bytes)}"
    return [
        f"{folder} -> {out}: {sizes}, {len(plan.tensors)} tensors in {len(plan.shards)} file(s)",
        *report.integer_lines(plan.tensors, done.records, measured=bool(done.transform.also_reads)),
        *report.left_out_lines(plan),
    ]
