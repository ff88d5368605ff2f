"""The options that several commands share, and what the commands make of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import output

if TYPE_CHECKING:
    from pqweights.hub.sources import Access, Fetched, FoundResult
    from pqweights.remote.addresses import Address


class Device(StrEnum):
    """The devices that a model can run on: pqweights.runtimes.models.choose_device."""

    CPU = "cpu"
    CUDA = "cuda"
    AUTO = "auto"


class BitsOf(StrEnum):
    """What bits per weight are a mean over: pqweights.planning.target.BPW_OF."""

    QUANTIZED = "quantized"
    CHECKPOINT = "checkpoint"


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
    """Return the number of threads that was asked for, by default one for each core that this process may use."""
    from pqweights.rewrite.task import usable_cores

    return asked or usable_cores()


def settings(texts: Sequence[str] | None) -> tuple[tuple[str, float], ...]:
    """Return pattern and bit width from each "PATTERN=BITS" that --set was given."""
    return tuple(map(_setting, texts or ()))


def _setting(text: str) -> tuple[str, float]:
    pattern, equals, width = text.rpartition("=")
    try:
        bits = float(width)
    except ValueError:
        bits = math.nan
    if not pattern or not equals or not math.isfinite(bits):
        raise typer.BadParameter(f"--set: expected PATTERN=BITS, such as *.down_proj.weight=6, found {text!r}")
    return pattern, bits


def run_continues(source: str, out: str) -> bool:
    """Whether an interrupted run left something: finished tensors in its folder, or fetched files of a repository."""
    from pqweights.errors import PqweightsError
    from pqweights.rewrite.statement import is_under_way
    from pqweights.store import open_store

    try:
        under_way = is_under_way(open_store(out))
    except PqweightsError:  # an address that does not answer, or cannot be one
        under_way = False
    return under_way or _is_fetched(source)


def measurement_continues(source: str, out: Path) -> bool:
    """Whether an interrupted measurement left something: what it found, or fetched files of a repository."""
    from pqweights.checkpoint.names import UNFINISHED_SUFFIX

    return out.with_name(out.name + UNFINISHED_SUFFIX).exists() or _is_fetched(source)


def _is_fetched(source: str) -> bool:
    """Whether files of a source are fetched to this machine: those of a repository."""
    from pqweights.remote.addresses import is_address, local_path

    return not is_address(source) and not Path(local_path(source)).exists()


def access(revision: str | None, token: str | None) -> Access:
    """Return how to access the Hub, with waits reported on stderr."""
    from pqweights.hub.sources import Access

    return Access(revision, token or None, output.note)


def fetched(source: str, access: Access, *, only: Sequence[str] = (), ours: bool = False) -> Fetched:
    """Return a local folder, or a repository on the Hub as a folder in the cache.

    source: the folder or file, or the id of the repository
    access: how to access the Hub
    only: the files to fetch; by default all
    ours: whether pqweights must have written it
    """
    from pqweights.hub.sources import local_folder

    with output.progress("fetching") as progress:
        return local_folder(source, access, only=only, ours=ours, progress=progress)


def found_result(source: str, access: Access, *, only: Sequence[str] = ()) -> FoundResult:
    """Return a folder that pqweights wrote: a local one, one in object storage, or a repository as `fetched` does.

    only: the files of a repository to fetch; by default all, and then pqweights must have written it
    """
    from pqweights.hub.sources import find_result

    with output.progress("fetching") as progress:
        return find_result(source, access, only=only, ours=not only, progress=progress)


def found_original(source: str, access: Access) -> Path | Address:
    """Return the original model of a master: a local path, an address, or a repository as `fetched` does."""
    from pqweights.hub.sources import find_original

    with output.progress("fetching") as progress:
        return find_original(source, access, progress)


def check_plot(plot: Path | None) -> None:
    """Refuse a file that cannot hold a plot, before anything is measured."""
    if plot is not None:
        from pqweights.plots.figure import check_plot_file

        check_plot_file(plot)


# The checkpoint, the folders, and the Hub

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="Checkpoint: a folder of safetensors files, one safetensors file, ORG/MODEL on the Hub, or an address "
        "such as s3://BUCKET/FOLDER.",
    ),
]
FetchedSourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="Checkpoint: a folder of safetensors files, one safetensors file, or ORG/MODEL on the Hub."
    ),
]
FolderArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="Master or export written by pqweights: a folder, ORG/NAME on the Hub, or an address such as "
        "s3://BUCKET/FOLDER.",
    ),
]
LocalFolderArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of a master or an export written by pqweights.")
]
OutArgument = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="Folder for the result, new or empty: a local one, or an address such as s3://BUCKET/FOLDER.",
    ),
]
OverwriteOption = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Replace an earlier result in OUT. Only files listed in its manifest are deleted."
    ),
]
ShardOption = Annotated[
    int,
    typer.Option(
        "--max-shard-size", metavar="SIZE", parser=parse_size, help="Maximum size of an output file, e.g. 5GB."
    ),
]
PickleOption = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Also read pickled weights, with torch's restricted weights_only loader."),
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--include-files",
        metavar="PATTERN",
        show_default=False,
        help="Also copy files of the source that match PATTERN, such as 'data/*'; repeatable. Without it, only what "
        "loading the model needs is copied.",
    ),
]
RevisionOption = Annotated[
    str | None,
    typer.Option(
        "--revision", metavar="REV", help="Branch, tag or commit of the repository on the Hub.", show_default="main"
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="Access token for the Hub.",
        show_default="HF_TOKEN, or the token saved by hf auth login",
    ),
]

SummaryOption = Annotated[
    bool | None,
    typer.Option(
        "--summary/--no-summary",
        show_default="a summary on a terminal, above 200 tensors",
        help="Show a line for each role, codec and bit width in place of one for each tensor.",
    ),
]

# How weights are quantized

RecipeOption = Annotated[
    str, typer.Option("--recipe", "-r", metavar="NAME|FILE", help="Name of a built-in recipe, or a YAML file.")
]
CodecOption = Annotated[
    str | None,
    typer.Option(
        "--codec",
        metavar="NAME",
        help="Default codec, where no rule of the recipe gives another.",
        show_default="the recipe's",
    ),
]
EffortOption = Annotated[
    int | None,
    typer.Option(
        "--effort",
        metavar="N",
        help="How much work goes into encoding, for codecs that have a choice: more takes longer and errs less, in the "
        "same bytes.",
        show_default="the recipe's, else the codec's least",
    ),
]
BitsOption = Annotated[
    float | None,
    typer.Option(
        "--bits",
        "-b",
        metavar="BITS",
        help="Default bit width, where no rule of the recipe gives another; a fraction for codecs that have such "
        "rates.",
        show_default="the recipe's",
    ),
]
KeepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--keep",
        metavar="PATTERN",
        show_default=False,
        help="Keep the tensors whose names match a shell-style PATTERN, e.g. '*.layers.0.*'; before --set, and before "
        "the rules of the recipe. Can be repeated.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATTERN=BITS",
        show_default=False,
        help="Quantize the tensors whose names match a shell-style PATTERN with BITS, e.g. '*.mlp.*=6'; "
        "the first that matches decides, before the rules of the recipe. Can be repeated.",
    ),
]
TargetSizeOption = Annotated[
    int | None,
    typer.Option(
        "--target-size",
        metavar="SIZE",
        parser=parse_size,
        show_default=False,
        help="Choose the bit width of each weight so that the safetensors files take at most SIZE, e.g. 9GB or 9GiB.",
    ),
]
TargetBitsOption = Annotated[
    float | None,
    typer.Option(
        "--target-bpw",
        metavar="BITS",
        show_default=False,
        help="Choose the bit width of each weight so that the mean is at most BITS, all overhead counted: per weight "
        "that the recipe quantizes, or per parameter of the checkpoint (--bpw-of).",
    ),
]
BitsOfOption = Annotated[
    BitsOf | None,
    typer.Option(
        "--bpw-of",
        show_default="quantized",
        help="Mean that --target-bpw limits: over the weights that the recipe quantizes, or over all parameters of the "
        "checkpoint, with every byte of the safetensors files.",
    ),
]
SensitivityOption = Annotated[
    str | None,
    typer.Option(
        "--sensitivity",
        metavar="heuristic|FILE",
        show_default="heuristic",
        help="Basis for choosing bit widths to meet a target: a rule of thumb, or a FILE written by pqweights "
        "sensitivity.",
    ),
]
AwqOption = Annotated[
    Path | None,
    typer.Option(
        "--awq",
        metavar="FILE",
        help="Scale input channels before quantizing, with the scales in a FILE written by pqweights calibrate.",
    ),
]
AnyCodecOption = Annotated[
    bool,
    typer.Option("--awq-any-codec", help="Accept scales that were searched for another codec or bit width."),
]
FoldOption = Annotated[
    str | None,
    typer.Option(
        "--fold",
        metavar="equalize",
        help="Move factors between neighbouring layers first, where channels differ much, so that weights are easier "
        "to quantize; the model computes the same.",
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Moments that pqweights calibrate --moments wrote, from which --fold learns the sizes of channels.",
    ),
]

# How a command computes and prints

ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=256, help="Number of worker threads.", show_default="the number of cores"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no progress, notes or summary; errors and warnings stay.")
]

# The model card

BaseModelOption = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        metavar="ORG/MODEL",
        help="Original model on the Hub to name in the card, if the manifest names none.",
    ),
]
AdoptOption = Annotated[
    bool,
    typer.Option("--adopt", help="Keep the text of a README.md that pqweights did not write, as notes in the card."),
]
