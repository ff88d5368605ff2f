"""The options of commands that run a model over a text."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ModelDtype(StrEnum):
    """The dtypes that a model can run in: those of pqweights.inference.runtimes.models.DTYPES, or its own."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


WindowOption = Annotated[
    int | None,
    typer.Option("--window", min=2, help="Tokens per window.", show_default="2048, or the model's limit if smaller"),
]
StrideOption = Annotated[
    int | None,
    typer.Option(
        "--stride",
        min=1,
        help="Tokens between the starts of consecutive windows.",
        show_default="a quarter of the window, at most 512",
    ),
]
ScoreFirstOption = Annotated[
    bool, typer.Option("--score-first", help="Score all tokens of the first window, not only its last ones.")
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", min=2, help="Maximum number of tokens to read from the text.", show_default="all"),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="DIR", help="Folder of the tokenizer.", show_default="the model's own"),
]
NoBosOption = Annotated[
    bool,
    typer.Option("--no-bos", help="Do not begin windows with BOS, even if the tokenizer puts it before a text."),
]
ModelDtypeOption = Annotated[
    ModelDtype, typer.Option("--dtype", help="Dtype to run the model in; auto is the model's own.")
]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        help="Device map for transformers; auto spreads a large model over the devices (needs accelerate).",
    ),
]
RecordOption = Annotated[
    bool, typer.Option("--no-record", help="Do not write pqweights-eval.json beside masters and exports.")
]
