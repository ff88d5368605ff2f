"""Options that several commands share, and what commands make of them."""

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
    """The devices that pqweights.kernels.devices.resolve_device takes."""

    CPU = "cpu"
    CUDA = "cuda"
    AUTO = "auto"


class ModelDtype(StrEnum):
    """The dtypes that a model can run in: those of pqweights.runtimes.models.DTYPES, or its own."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def parse_size(text: str | int) -> int:
    """Return bytes from "5GB" (10**9), "5GiB" (2**30) or "1000000"."""
    if isinstance(text, int):  # a default
        return text
    from pqweights import units
    from pqweights.errors import RecipeError

    try:
        return units.parse_size(text)
    except RecipeError as error:
        raise typer.BadParameter(str(error)) from None


def thread_count(asked: int | None) -> int:
    """Return the number of threads that was asked for, or one per core that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return asked or len(os.sched_getaffinity(0)) or 1
    return asked or os.cpu_count() or 1  # macOS has no affinity


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """The options that let a target choose the widths; all None without a target."""

    target_size: int | None = None
    target_bpw: float | None = None
    sensitivity: str | None = None


def chosen_recipe(name: str, bits: float | None, fitting: Fitting = Fitting()) -> Recipe:
    """Load a recipe and change it as the options say.

    Raises RecipeError.
    """
    from pqweights.planning.recipe import load_recipe, make_target

    target = make_target("--target-size and --target-bpw", fitting.target_size, fitting.target_bpw)
    recipe = load_recipe(name)
    if bits is not None and target is not None:
        raise typer.BadParameter("expected either --bits or a target, which chooses the widths; found both")
    if bits is not None:
        recipe = recipe.with_bits(bits)
    return recipe.with_target(target, fitting.sensitivity)


def check_awq(awq: Path | None, any_codec: bool) -> None:
    """Refuse --awq-any-codec without --awq."""
    if any_codec and awq is None:
        raise typer.BadParameter("--awq-any-codec: expected --awq FILE beside it")


def access(revision: str | None, token: str | None) -> Access:
    """Return how the Hub is used; it reports waits on stderr."""
    from pqweights.hub.sources import Access

    return Access(revision, token or None, output.note)


def fetched(source: str, access: Access, *, only: Sequence[str] = (), ours: bool = False) -> Fetched:
    """Return a local folder, or a repository on the Hub as a folder in the cache.

    only, ours: see local_folder.
    """
    from pqweights.hub.sources import local_folder

    with output.progress("fetching") as progress:
        return local_folder(source, access, only=only, ours=ours, progress=progress)


def check_plot(plot: Path | None) -> None:
    """Refuse a file that a plot cannot be written to, before anything is measured."""
    if plot is not None:
        from pqweights.plots.figure import check_plot_file

        check_plot_file(plot)


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="Checkpoint folder (sharded or single safetensors), one safetensors file, or ORG/MODEL on the Hub.",
    ),
]
RevisionOption = Annotated[
    str | None,
    typer.Option("--revision", metavar="REV", help="Branch, tag or commit on the Hub.", show_default="main"),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token", metavar="TOKEN", help="Token for the Hub.", show_default="HF_TOKEN, or that of hf auth login"
    ),
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
    typer.Option("--bits", "-b", metavar="BITS", help="Bits per code.", show_default="the recipe's"),
]
TargetSizeOption = Annotated[
    int | None,
    typer.Option(
        "--target-size",
        metavar="SIZE",
        parser=parse_size,
        show_default=False,
        help="Choose the width of every weight for at most this size of the safetensors files, e.g. 9GB or 9GiB.",
    ),
]
TargetBitsOption = Annotated[
    float | None,
    typer.Option(
        "--target-bpw",
        metavar="BITS",
        show_default=False,
        help="Choose the width of every weight for at most this many bits per weight, all overhead counted.",
    ),
]
SensitivityOption = Annotated[
    str | None,
    typer.Option(
        "--sensitivity",
        metavar="heuristic|FILE",
        show_default="heuristic",
        help="What the widths are chosen by: a rule of thumb, or a file that pqweights sensitivity wrote.",
    ),
]
ShardOption = Annotated[
    int, typer.Option("--max-shard-size", metavar="SIZE", parser=parse_size, help="Largest output file, e.g. 5GB.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", min=1, max=256, help="Worker threads.", show_default="one per core")
]
DeviceOption = Annotated[
    Device,
    typer.Option("--device", help="Device to compute on; auto takes a GPU if there is one. All give the same bytes."),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace an earlier result in OUT, and only the files that it lists.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
AwqOption = Annotated[
    Path | None,
    typer.Option(
        "--awq", metavar="FILE", help="Scale input channels first, with scales that pqweights calibrate wrote."
    ),
]
AnyCodecOption = Annotated[
    bool,
    typer.Option("--awq-any-codec", help="Accept scales that were searched for another codec or width."),
]
WindowOption = Annotated[
    int | None,
    typer.Option("--window", min=2, help="Tokens of a window.", show_default="2048, or the model's limit"),
]
StrideOption = Annotated[
    int | None,
    typer.Option(
        "--stride",
        min=1,
        help="Tokens between the starts of two windows.",
        show_default="a quarter of the window, at most 512",
    ),
]
ScoreFirstOption = Annotated[
    bool, typer.Option("--score-first", help="Score all tokens of the first window, not only its last ones.")
]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", min=2, help="Tokens of the text to use at most.", show_default="all")
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="DIR", help="Folder of the tokenizer.", show_default="the model's own"),
]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(
        "--device-map", help="Where transformers puts the model; auto spreads a large one (needs accelerate)."
    ),
]
RecordOption = Annotated[
    bool, typer.Option("--no-record", help="Do not write pqweights-eval.json beside masters and exports.")
]
BaseModelOption = Annotated[
    str | None,
    typer.Option(
        "--base-model", metavar="ORG/MODEL", help="Original model to name in the card of a result from a local folder."
    ),
]
AdoptOption = Annotated[
    bool,
    typer.Option("--adopt", help="Keep the text of a README.md that pqweights did not write, as notes in the card."),
]
PickleOption = Annotated[
    bool, typer.Option("--allow-pickle", help="Read pickled weights too, through torch's weights_only loader.")
]
