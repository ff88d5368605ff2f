"""The options of what measures models: calibrate, sensitivity and eval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pqweights.common import parameters as checks
from pqweights.common.parameters import StrPath, option, options
from pqweights.errors import OptionError
from pqweights.inference.options import MODEL_DTYPES, DeviceOption, TokenizerOption
from pqweights.planning.options import (
    DEFAULT_SAMPLE_TOKENS,
    FEWEST_SAMPLE_TOKENS,
    RECIPE,
    SAMPLES,
    SELF,
    CodecOptions,
    HubOptions,
    RuleOptions,
    ThreadsOption,
    take_recipe,
)

FETCHED_SOURCE = "Checkpoint: a folder of safetensors files, one safetensors file, or ORG/MODEL on the Hub."


@options
class SamplingOptions(ThreadsOption):
    """On which tokens a model is measured, and where the result may go."""

    text: StrPath = option(
        "Text for the model to read: a FILE in UTF-8, a folder of *.txt, or a data set of the Hub; self stands for "
        "text that is sampled from the model itself, mixture for a short one that comes with pqweights.",
        checks.location,
        default=SELF,
        metavar=SAMPLES,
    )
    tokens: int = option("Number of tokens of the text.", default=DEFAULT_SAMPLE_TOKENS, least=FEWEST_SAMPLE_TOKENS)
    overwrite: bool = option("Replace an earlier file.", checks.flag, default=False)


@options
class CalibrateArguments(RuleOptions, CodecOptions, SamplingOptions, HubOptions):
    """What `calibrate` takes."""

    source: StrPath = option(FETCHED_SOURCE, checks.location, kw_only=False, argument=True, metavar="SRC")
    out: Path = option("File for the scales.", checks.path, kw_only=False, argument=True, metavar="OUT.safetensors")
    recipe: StrPath = option(RECIPE, take_recipe, default="q5", flags=("--recipe", "-r"), metavar="NAME|FILE")


@options
class SensitivityArguments(RuleOptions, SamplingOptions, HubOptions):
    """What `sensitivity` takes."""

    source: StrPath = option(FETCHED_SOURCE, checks.location, kw_only=False, argument=True, metavar="SRC")
    out: Path = option("File for the sensitivities.", checks.path, kw_only=False, argument=True, metavar="OUT.json")
    recipe: StrPath = option(RECIPE, take_recipe, default="q5", flags=("--recipe", "-r"), metavar="NAME|FILE")


@options
class TextOptions(TokenizerOption):
    """How a text is cut into windows that are scored."""

    no_bos: bool = option(
        "Do not begin windows with BOS, even if the tokenizer puts it before a text.", checks.flag, default=False
    )
    window: int | None = option(
        "Tokens per window.", checks.whole, default=None, least=2, default_text="2048, or the model's limit if smaller"
    )
    stride: int | None = option(
        "Tokens between the starts of consecutive windows.",
        checks.whole,
        default=None,
        least=1,
        default_text="a quarter of the window, at most 512",
    )
    score_first: bool = option(
        "Score all tokens of the first window, not only its last ones.", checks.flag, default=False
    )
    max_tokens: int | None = option(
        "Maximum number of tokens to read from the text.", checks.whole, default=None, least=2, default_text="all"
    )


@options
class EvaluationOptions(ThreadsOption, DeviceOption, TextOptions):
    """What is measured, and how models are computed."""

    reference: StrPath | None = option(
        "Model to compare with, token by token: KL divergence, top-1 agreement, change of the perplexity.",
        checks.location,
        default=None,
        metavar="SRC",
    )
    dtype: str = option(
        "Dtype to compute in; auto is the model's own.", checks.text, default="float32", choices=MODEL_DTYPES
    )
    packed: bool = option(
        "Keep the weights packed in memory; every MODEL must be a master.", checks.flag, default=False
    )
    kv_caches: str | Sequence[str] = option(
        "Quantize keys and values: klt, hadamard, polar or polar-rope, with options as in hadamard:3. Repeat it to "
        "compare several. Scored tokens are read one by one, as in generation.",
        checks.patterns,
        default=(),
        flags=("--kv-cache",),
        metavar="SPEC",
    )
    text_name: str = option("Name of the text in the report.", checks.text, default="the text", flags=())


@options
class EvaluateArguments(EvaluationOptions, HubOptions):
    """What `eval` takes."""

    models: Sequence[str] = option(
        "Checkpoints, masters and exports: folders, or ORG/NAME on the Hub; also GGUF files.",
        checks.patterns,
        kw_only=False,
        argument=True,
        metavar="MODEL...",
    )
    text: Path | None = option("UTF-8 text to evaluate on.", checks.path, default=None, metavar="FILE")
    dataset: str | None = option(
        "Evaluate on the test split of WikiText-2 (raw) instead of `text`.",
        checks.text,
        default=None,
        choices=("wikitext",),
    )
    no_record: bool = option("Do not write pqweights-eval.json beside masters and exports.", checks.flag, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.text is None) == (self.dataset is None):
            raise OptionError("expected either `text` or `dataset`")
