"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import output

if TYPE_CHECKING:
    from pqweights.hub.sources import Access, Fetched
    from pqweights.planning.recipe import Recipe


class Device(StrEnum):
    """What pqweights.kernels.devices.resolve_device takes."""

    CPU = "cpu"
    CUDA = "cuda"
    AUTO = "auto"


class ModelDtype(StrEnum):
    """In which dtype a model is run: pqweights.runtimes.models.DTYPES, or its own."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def parse_size(text: str | int) -> int:
    """Bytes from "5GB" (10**9), "5GiB" (2**30) or "1000000"."""
    if isinstance(text, int):  # a default
        return text
    from pqweights import units
    from pqweights.errors import RecipeError

    try:
        return units.parse_size(text)
    except RecipeError as error:
        raise typer.BadParameter(str(error)) from None


def thread_count(asked: int | None) -> int:
    """The number that was asked for, or one per core that this process may use."""
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )  # macOS has no affinity
    return asked or usable or 1


@dataclass(frozen=True)
class Fitting:
    """The options that have widths chosen for a size; all None without one."""

    target_size: int | None
    target_bpw: float | None
    sensitivity: str | None


def chosen_recipe(name: str, bits: float | None, fitting: Fitting = Fitting(None, None, None)) -> Recipe:
    """The recipe, with what the options change in it.

    Raises RecipeError.
    """
    from pqweights.planning.recipe import load_recipe, make_target

    target = make_target("--target-size and --target-bpw", fitting.target_size, fitting.target_bpw)
    recipe = load_recipe(name)
    if bits is not None and target is not None:
        raise typer.BadParameter("--bits: expected it or a target, which chooses the widths, found both")
    if bits is not None:
        recipe = recipe.with_bits(bits)
    return recipe.with_target(target, fitting.sensitivity)


def check_awq(awq: Path | None, any_codec: bool) -> None:
    """Refuse an option that would mean nothing."""
    if any_codec and awq is None:
        raise typer.BadParameter("--awq-any-codec: expected --awq FILE beside it")


def access(revision: str | None, token: str | None) -> Access:
    """How the Hub is used; waits are told on stderr."""
    from pqweights.hub.sources import Access

    return Access(revision, token or None, output.note)


def fetched(source: str, access: Access, *, only: Sequence[str] = (), ours: bool = False) -> Fetched:
    """A folder here, or a repository on the Hub as a folder in the cache. only, ours: see local_folder."""
    from pqweights.hub.sources import local_folder

    with output.progress("fetching") as progress:
        return local_folder(source, access, only=only, ours=ours, progress=progress)


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="Checkpoint folder (sharded or single safetensors), one safetensors file, or ORG/MODEL on the Hub.",
    ),
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit on the Hub.", show_default="main")
]
TokenOption = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN", help="For the Hub.", show_default="HF_TOKEN, or that of hf auth login"),
]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="New or empty folder for the result.")]
FolderArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="Folder that pqweights wrote, or ORG/NAME of one on the Hub.")
]
RecipeOption = Annotated[
    str, typer.Option("--recipe", "-r", metavar="NAME|FILE", help="Recipe by name, or a YAML file.")
]
BitsOption = Annotated[
    float | None,
    typer.Option(
        "--bits", "-b", metavar="BITS", help="Bits per code instead of the recipe's default.", show_default=False
    ),
]
TargetSizeOption = Annotated[
    int | None,
    typer.Option(
        "--target-size", metavar="SIZE", parser=parse_size, show_default=False,
        help="Choose the width of every weight so that the safetensors files have at most this size: 9GB, 9GiB.",
    ),
]  # fmt: skip
TargetBitsOption = Annotated[
    float | None,
    typer.Option(
        "--target-bpw", metavar="BITS", help="The same for so many bits per weight, all overhead counted.",
        show_default=False,
    ),
]  # fmt: skip
SensitivityOption = Annotated[
    str | None,
    typer.Option(
        "--sensitivity", metavar="heuristic|FILE", help="By which the widths are chosen: a rule of thumb, or a file of pqweights sensitivity.",
        show_default="heuristic",
    ),
]  # fmt: skip
ShardOption = Annotated[
    int, typer.Option("--max-shard-size", metavar="SIZE", parser=parse_size, help="Largest output file, e.g. 5GB.")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=256, help="Worker threads; by default one per core.", show_default=False),
]
DeviceOption = Annotated[
    Device,
    typer.Option("--device", help="Where to compute: cpu; cuda; auto: cuda if there is one. The bytes are the same."),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace a result of pqweights in OUT (only the files that it lists).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
AwqOption = Annotated[
    Path | None,
    typer.Option("--awq", metavar="FILE", help="Scale input channels first, by a file of pqweights calibrate."),
]
AnyCodecOption = Annotated[
    bool,
    typer.Option("--awq-any-codec", help="Take the scales although they were searched for another codec or width."),
]
WindowOption = Annotated[
    int | None,
    typer.Option("--window", min=2, help="Tokens of a window.", show_default="2048, or the model's limit"),
]
StrideOption = Annotated[
    int | None,
    typer.Option(
        "--stride", min=1, help="Tokens between windows.", show_default="a quarter of the window, 512 at most"
    ),
]
ScoreFirstOption = Annotated[
    bool, typer.Option("--score-first", help="Score all of the first window, not only its last tokens.")
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", min=2, help="Only the first so many tokens of the text.", show_default=False),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="DIR", help="Folder with the tokenizer, if the model's own has none."),
]
RecordOption = Annotated[
    bool, typer.Option("--no-record", help="Leave out pqweights-eval.json, the figures beside each of our results.")
]
BaseModelOption = Annotated[
    str | None,
    typer.Option(
        "--base-model", metavar="ORG/MODEL", help="The original, for the card, if it was quantized from a local folder."
    ),
]
AdoptOption = Annotated[
    bool,
    typer.Option("--adopt", help="Keep the text of a README.md that pqweights did not write, in the card's notes."),
]
PickleOption = Annotated[
    bool, typer.Option("--allow-pickle", help="Read pickled weights too, through torch's weights_only loader.")
]
