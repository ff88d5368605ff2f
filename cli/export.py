"""pqweights export."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from . import options, output, report


class Target(StrEnum):
    """The keys of pqweights.exports.EXPORTS, which a test compares; --help must not import the library."""

    BF16 = "bf16"
    TORCHAO_INT4 = "torchao-int4"
    MLX_Q4 = "mlx-q4"
    VLLM_INT4 = "vllm-int4"


class Dtype(StrEnum):
    """What weights are decoded to."""

    BF16 = "bf16"
    SOURCE = "source"


class Mode(StrEnum):
    """mlx's quantization modes."""

    AFFINE = "affine"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


class Packing(StrEnum):
    """torchao's packing formats."""

    TILE = "tile_packed_to_4d"
    PLAIN = "plain"


class Basis(StrEnum):
    """What the integers are of."""

    PLAIN = "plain"
    ROTATED = "rotated"


class Qparams(StrEnum):
    """How scales and offsets are chosen."""

    BEST = "best"
    MINMAX = "minmax"


def command(
    folder: options.FolderArgument,
    out: options.OutArgument,
    target: Annotated[Target, typer.Option("--target", "-t", help="What is to load the result; see above.")],
    bits: Annotated[int | None, typer.Option("--bits", "-b", help="Width of the integers.", show_default="4")] = None,
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", "-g", help="Weights that share a scale.", show_default="128; mlx-q4: 64"),
    ] = None,
    qparams: Annotated[
        Qparams | None,
        typer.Option(
            "--qparams",
            help="Scales and offsets: best (least squared error), or minmax, as the runtime's own converter.",
            show_default="best",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source", metavar="SRC", help="Take the weights of the original checkpoint; prints what the master costs."
        ),
    ] = None,
    basis: Annotated[
        Basis | None, typer.Option("--basis", help="vllm-int4: plain, or rotated.", show_default="plain")
    ] = None,
    packing: Annotated[
        Packing | None,
        typer.Option("--packing", help="torchao-int4: how codes are packed.", show_default="tile_packed_to_4d"),
    ] = None,
    mode: Annotated[
        Mode | None,
        typer.Option("--mode", help="mlx-q4: affine integers, or one of mlx's floats.", show_default="affine"),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", help="bf16: bf16, or the dtypes that the source had.", show_default="bf16"),
    ] = None,
    overwrite: options.OverwriteOption = False,
    max_shard_bytes: options.ShardOption = "5GB",  # type: ignore[assignment]  # typer parses it
    threads: options.ThreadsOption = None,
    device: options.DeviceOption = options.Device.CPU,
    revision: options.RevisionOption = None,
    token: options.TokenOption = None,
    json: options.JsonOption = False,
) -> None:
    """Turn a master into a checkpoint that runtimes load. Killed at any moment, the same command continues.

    bf16: an ordinary checkpoint. Everything loads it:
    AutoModelForCausalLM.from_pretrained(OUT), vllm serve OUT, ...

    torchao-int4: linear layers in INT4, for PyTorch on CUDA (sm80 or newer; --packing plain needs mslk besides):
    pip install torchao; AutoModelForCausalLM.from_pretrained(OUT, device_map="cuda")

    mlx-q4: for Apple Silicon:
    pip install mlx-lm; mlx_lm.generate --model OUT --prompt ... (pip install 'pqweights\\[mlx]' to make it)

    vllm-int4: compressed-tensors W4A16. vllm serve OUT, or with pip install compressed-tensors:
    AutoModelForCausalLM.from_pretrained(OUT). With --basis rotated for vLLM alone, on a single GPU
    """
    with output.errors(continues=True):
        from pqweights.exports import export
        from pqweights.exports.options import ExportOptions

        asked = ExportOptions(
            dtype=dtype and dtype.value, bits=bits, group_size=group_size, mode=mode and mode.value,
            packing=packing and packing.value, basis=basis and basis.value, qparams=qparams and qparams.value,
        )  # fmt: skip
        found = options.fetched(folder, revision, token, ours=True)
        original = None if source is None else options.fetched(source, None, token).path
        with output.progress("exporting") as progress:
            done = export(
                found.path, out, target.value, asked, origin=found.origin, original=original, threads=options.thread_count(threads),
                device=device.value, overwrite=overwrite, max_shard_bytes=max_shard_bytes, progress=progress,
            )  # fmt: skip
        if json:
            output.print_json(report.result_json(done, str(out)))
            return
        if done.already_done:
            output.note(f"{out}: already holds this very result; nothing was written")
        plan = done.plan
        lines = [
            f"{folder} -> {out}: {output.size(plan.source_bytes)} -> {output.size(plan.output_bytes)}, "
            f"{len(plan.tensors)} tensors in {len(plan.shards)} file(s)"
        ]
        lines += report.integer_lines(plan.tensors, done.records, measured=source is not None)
        typer.echo("\n".join([*lines, *report.left_out_lines(plan)]))
