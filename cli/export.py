"""The command `pqweights export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from . import cluster, options, output, report
from .report_errors import integer_form_lines
from .report_fold import fold_lines

if TYPE_CHECKING:
    from pqweights.rewrite.task import RewriteReport


class ExportCommand(TyperCommand):
    """The command export, whose help lists the targets."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See click.Command."""
        from pqweights.exports import ALIASES, EXPORTS

        short = {name: f" (or {alias})" for alias, name in ALIASES.items()}
        summaries = [
            f"{name}{short.get(name, '')}: {target.summary}".replace("[", "\\[") for name, target in EXPORTS.items()
        ]
        self.help = "\n\n".join([(self.help or "").strip(), *summaries])
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click.Command; a missing target is an error that lists the targets."""
        from pqweights.exports import EXPORTS

        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param is not None and error.param.name == "target" and not error.message:
                error.message = f"Expected one of {', '.join(EXPORTS)}"
            raise


TargetOption = Annotated[
    str, typer.Option("--target", "-t", metavar="TARGET", help="Format of the result, one of those above.")
]
BitsOption = Annotated[
    int | None, typer.Option("--bits", "-b", help="Bits per code of an integer target.", show_default="4")
]
GroupSizeOption = Annotated[
    int | None,
    typer.Option("--group-size", "-g", help="Weights per scale of an integer target.", show_default="128, for mlx 64"),
]
QparamsOption = Annotated[
    str | None,
    typer.Option(
        "--qparams",
        metavar="best|minmax",
        help="How to choose scales and offsets: best minimizes the squared error, minmax works like the converter of "
        "the runtime.",
        show_default="best",
    ),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        metavar="SRC",
        help="Make the integers from the original checkpoint, and report what the error of the master would add.",
    ),
]
RoundingOption = Annotated[
    str | None,
    typer.Option(
        "--rounding",
        metavar="plain|gptq|importance",
        help="How to choose codes: the nearest ones (plain), or, with --calibration, such that errors within a row "
        "cancel in the outputs (gptq), or weighed by how large inputs are (importance, for gguf).",
        show_default="not plain with --calibration",
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="For --rounding and for --fold: moments that pqweights calibrate --moments wrote.",
    ),
]
MasterArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="Master written by pqweights: a folder, ORG/NAME on the Hub, or an address such as s3://BUCKET/FOLDER.",
    ),
]
PackingOption = Annotated[
    str | None,
    typer.Option(
        "--packing",
        metavar="PACKING",
        help="For torchao-int4: the layout of the packed codes.",
        show_default="tile_packed_to_4d",
    ),
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="MODE",
        help="For mlx: affine integers, or one of the float formats of MLX.",
        show_default="affine",
    ),
]
TypeOption = Annotated[
    str | None,
    typer.Option(
        "--type",
        metavar="TYPE",
        help="For gguf: a mix or type of llama.cpp, such as q4_k_m, q5_k_m, q6_k, iq4_xs, q8_0 or bf16.",
        show_default="q4_k_m",
    ),
]
PureOption = Annotated[
    bool, typer.Option("--pure", help="For gguf: all matrices in the type of the mix, none of them wider.")
]
SetTypeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set-type",
        metavar="PATTERN=TYPE",
        help="For gguf: the type of tensors whose name matches; may be repeated, the first that matches counts.",
    ),
]
RecipeOption = Annotated[
    Path | None, typer.Option("--recipe", metavar="FILE", help="For gguf: types by pattern, from a YAML file.")
]
TargetSizeOption = Annotated[
    int | None,
    typer.Option(
        "--target-size",
        metavar="SIZE",
        parser=options.parse_size,
        help="For gguf: choose the types so that the file has at most this size.",
    ),
]
SensitivityOption = Annotated[
    str | None,
    typer.Option(
        "--sensitivity",
        metavar="heuristic|FILE",
        help="For --target-size: how types are chosen, by a rule of thumb or by what pqweights sensitivity measured.",
        show_default="heuristic",
    ),
]
ImatrixOption = Annotated[
    bool, typer.Option("--imatrix", help="For gguf, with --calibration: write llama.cpp's importance matrix as well.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="bf16|source",
        help="For bf16: store all weights as BF16, or each in the dtype that it had in the source.",
        show_default="bf16",
    ),
]


def command(
    folder: MasterArgument,
    out: options.OutArgument,
    target: TargetOption,
    bits: BitsOption = None,
    group_size: GroupSizeOption = None,
    qparams: QparamsOption = None,
    fold: options.FoldOption = None,
    rounding: RoundingOption = None,
    calibration: CalibrationOption = None,
    source: SourceOption = None,
    packing: PackingOption = None,
    mode: ModeOption = None,
    dtype: DtypeOption = None,
    type: TypeOption = None,
    pure: PureOption = False,
    set_type: SetTypeOption = None,
    recipe: RecipeOption = None,
    target_size: TargetSizeOption = None,
    sensitivity: SensitivityOption = None,
    imatrix: ImatrixOption = False,
    overwrite: options.OverwriteOption = False,
    max_shard_bytes: options.ShardOption = "2GB",  # type: ignore[assignment]  # typer parses it
    threads: options.ThreadsOption = None,
    ray: cluster.RayOption = None,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
) -> None:
    """Export a master to a checkpoint that runtimes load.

    If the run is interrupted, the same command continues it. The targets are:
    """
    with output.errors(kept=lambda: options.run_continues(folder, out), quiet=quiet):
        from pqweights.exporting import MasterFolder, export
        from pqweights.exports import get_target
        from pqweights.exports.options import ExportOptions, pairs
        from pqweights.store import open_store

        place = open_store(out)
        asked = ExportOptions(
            dtype=dtype,
            bits=bits,
            group_size=group_size,
            mode=mode,
            packing=packing,
            qparams=qparams,
            fold=fold,
            rounding=rounding,
            calibration=calibration,
            type=type,
            pure=pure or None,
            set_type=pairs(set_type) or None,
            recipe=recipe,
            target_size=target_size,
            sensitivity=sensitivity,
            imatrix=imatrix or None,
        )
        get_target(target).settings(asked)  # refuses wrong options before anything is fetched
        found = options.found_result(folder, options.access(revision, token))
        original = None if source is None else options.found_original(source, options.access(None, token))
        master = MasterFolder(found.where, found.origin, original)
        with (
            output.progress("exporting") as progress,
            cluster.run_options(ray, threads=threads, overwrite=overwrite, progress=progress) as run,
        ):
            done = export(master, place, target, options=asked, max_shard_bytes=max_shard_bytes, run=run)
        _show(done, folder, str(place), json=json)


def _show(done: RewriteReport, folder: str, out: str, *, json: bool) -> None:
    for warning in done.warnings:
        output.warn(warning)
    if json:
        output.print_json({"output": out} | done.to_json())
        return
    if done.already_done:
        output.note(f"{out}: already holds this result; nothing was written")
    output.summary(*_lines(done, folder, out))


def _lines(done: RewriteReport, folder: str, out: str) -> list[str]:
    from pqweights.units import counted

    plan = done.plan
    sizes = f"{output.size(plan.source_bytes)} -> {output.size(plan.output_bytes)}"
    stored = f"{counted(len(plan.tensors), 'tensor')} in {counted(len(plan.shards), 'file')}"
    return [
        f"{folder} -> {out}: {sizes}, {stored}",
        *report.bits_and_coverage(done.totals),
        *integer_form_lines(done.pairs, measured="--source" in done.transform.inputs.checkpoints),
        *fold_lines(done),
        *report.left_out_lines(plan),
    ]
