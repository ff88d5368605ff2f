"""Options that several commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import output

if TYPE_CHECKING:
    from pqweights.hub.sources import Access, Fetched

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Device(StrEnum):
    """What pqweights.kernels.devices.resolve_device takes."""

    CPU = "cpu"
    CUDA = "cuda"
    AUTO = "auto"


def parse_size(text: str | int) -> int:
    """Bytes from "5GB", "500 MB" or "1000000"; GB is 10**9."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise typer.BadParameter(f"expected a size such as 5GB or 500MB, found {text!r}")
    size = int(Decimal(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise typer.BadParameter(f"expected at least one byte, found {text!r}")
    return size


def thread_count(asked: int | None) -> int:
    """The number that was asked for, or one per core that this process may use."""
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    )  # macOS has no affinity
    return asked or usable or 1


def check_awq(awq: Path | None, any_codec: bool) -> None:
    """Refuse an option that would mean nothing."""
    if any_codec and awq is None:
        raise typer.BadParameter("--awq-any-codec: expected --awq FILE beside it")


def access(revision: str | None, token: str | None) -> Access:
    """How the Hub is used; waits are told on stderr."""
    from pqweights.hub.sources import Access

    return Access(revision, token or None, output.note)


def fetched(source: str, revision: str | None, token: str | None, only: Sequence[str] = ()) -> Fetched:
    """A folder here, or a repository on the Hub as a folder in the cache."""
    from pqweights.hub.sources import local_folder

    with output.progress("fetching") as progress:
        return local_folder(source, access(revision, token), only, progress)


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
    int | None,
    typer.Option("--bits", "-b", min=2, max=8, help="Default width instead of the recipe's.", show_default=False),
]
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
