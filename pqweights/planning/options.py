"""The options of plans, masters and exports: the functions of the API sort what they are given into these classes.

What a user reads about each is in cli/options.py and in the docstrings of api.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pqweights.checkpoint.names import file_stem
from pqweights.common import parameters as checks
from pqweights.common.parameters import HubOptions, Options, StrPath, option, options
from pqweights.errors import OptionError

if TYPE_CHECKING:
    from pqweights.planning.recipe import Recipe
    from pqweights.planning.sensitivity import Sensitivity

DEFAULT_MAX_SHARD_SIZE = "2GB"
MOST_THREADS = 256

# Pairs, or texts with an equals sign between pattern and format. In a master formats are bit widths.
FormatsByPattern = Mapping[str, str | float] | Sequence[tuple[str, str | float]] | Sequence[str]

RUNTIMES = LLAMA_CPP, MLX, VLLM, TRANSFORMERS = ("llama.cpp", "mlx", "vllm", "transformers")
# Samples of text that need none from the user: drawn from the model, or the one that comes with this package.
SELF, MIXTURE = "self", "mixture"
IMATRIX = "imatrix"  # what manifests call a file of importances in the place of a sample
DEFAULT_SAMPLE_TOKENS, FEWEST_SAMPLE_TOKENS = 12288, 2048
# How a calibration shares bits.
BY_MODEL: Final = "model"
BY_TENSOR: Final = "tensor"


def _recipe(name: str, value: Any) -> str | Path | Recipe:
    """Take the name of a recipe, a path or a Recipe."""
    if isinstance(value, str | os.PathLike):
        return checks.location(name, value)
    if not hasattr(value, "overrides"):  # the class is defined in terms of the options here
        raise checks.wrong(name, "the name of a recipe, a path or a Recipe", value)
    recipe: Recipe = value
    return recipe


def _widths(name: str, value: Any) -> int | str:
    """Take a whole number, or a text of one or of several with commas between them."""
    text = value if isinstance(value, str) else str(checks.whole(name, value))
    numbers = text.replace(" ", "").split(",")
    if not all(number.isascii() and number.isdigit() and len(number) < 4 for number in numbers):
        raise OptionError(f"`{name}`: expected a whole number such as 4, or several such as 4,8, found {text[:40]!r}")
    return int(text) if len(numbers) == 1 else ",".join(numbers)


def _tokens(name: str, value: Any) -> int:
    """Take a number of tokens, or a text such as "32k"."""
    text = value if isinstance(value, str) else str(checks.whole(name, value))
    digits = text.lower().removesuffix("k")
    if not digits.isascii() or not digits.isdigit() or not 0 < (count := int(digits[:19])) < 10**12:
        raise OptionError(f"`{name}`: expected a number of tokens such as 8192 or 32k, found {text[:40]!r}")
    return count * 1024 if text.lower() != digits else count


def _model_name(name: str, value: Any) -> str:
    """Take a name of a model that may stand in the name of a file."""
    if not value or file_stem(checks.text(name, value)) != value:
        raise OptionError(f"`{name}`: expected letters, digits, '.', '_' and '-', at most 96, found {value[:100]!r}")
    return str(value)


@options
class RecipeOptions(Options):
    """A recipe, what to change in it, and on which tokens a model is calibrated. None and () change nothing."""

    recipe: StrPath | Recipe | None = option(_recipe, default=None)
    codec: str | None = None
    bits: float | None = None
    effort: int | None = None
    keep: str | Sequence[str] = option(checks.patterns, default=())
    set_format: Any = option(checks.formats_by_pattern, default=None)  # from FormatsByPattern to pairs of texts
    target_size: int | str | None = option(checks.size, default=None)
    target_bpw: float | None = None
    max_kl: float | None = None
    calibrate: StrPath | None = option(checks.location, default=None)
    calibration_tokens: int = option(
        default=DEFAULT_SAMPLE_TOKENS, least=FEWEST_SAMPLE_TOKENS, needs=(("calibrate", "awq"), "for the sample")
    )
    save_sample: StrPath | None = option(checks.location, default=None, needs=(("calibrate", "awq"), "for the sample"))


@options
class SourceOptions(HubOptions):
    """How a source is opened."""

    adapter: str | Sequence[str] = option(checks.patterns, default=())
    leave_out: str | Sequence[str] = option(checks.patterns, default=())
    allow_pickle: bool = False
    include_files: str | Sequence[str] = option(checks.patterns, default=())
    low_disk: bool = False


@options
class QuantizeOptions(RecipeOptions, SourceOptions):
    """How a source is opened and quantized."""

    strict: bool = False
    awq: StrPath | None = option(
        checks.location, default=None, excludes=(("calibrate",), "the calibration scales channels itself")
    )
    rate: str = option(default=BY_MODEL, choices=(BY_MODEL, BY_TENSOR), needs=(("calibrate",), "which shares them"))
    lossless: bool = option(
        default=False,
        excludes=(
            (
                *("recipe", "codec", "bits", "effort", "keep", "set_format", "target_size", "target_bpw", "max_kl"),
                *("adapter", "awq", "calibrate", "strict"),
            ),
            "it stores the numbers of the source as they are",
        ),
    )
    max_shard_size: int = option(checks.size, default=DEFAULT_MAX_SHARD_SIZE)


@options
class RebuildOptions(SourceOptions):
    """How a source is opened of which a result is made again, and what its manifest does not say."""

    calibrate: StrPath | None = option(checks.location, default=None)
    imatrix: StrPath | None = option(checks.location, default=None)
    type: str | None = None


@options
class MemoryOptions(Options):
    """What exports are to fit into."""

    memory: int | str | None = option(checks.size, default=None)
    context: int | str | None = option(_tokens, needs=(("memory",), "into which it has to fit"), default=None)
    runtime: str | None = option(choices=RUNTIMES, needs=(("memory",), "which it shares out"), default=None)


@options
class ExportOptions(RecipeOptions, SourceOptions):
    """How a source is opened and exported; each target takes some of these. None stands for the target's default."""

    bits: Any = option(_widths, default=None)  # a whole number, or a text of several with commas between them
    group_size: int | None = None
    qparams: str | None = None
    rounding: str | None = None
    packing: str | None = None
    mode: str | None = None
    format: str | None = None
    dtype: str | None = None
    type: str | None = None
    pure: bool = False
    without_tokenizer: bool = False
    name: str | None = option(_model_name, default=None)
    imatrix: StrPath | None = option(
        checks.location, default=None, excludes=(("calibrate",), "which measures importances itself")
    )
    save_imatrix: StrPath | None = option(checks.location, default=None, needs=(("calibrate",), "which measures them"))
    sensitivity: Sensitivity | None = option(checks.anything, default=None)  # measured, for `calibrate` and a size
    max_shard_size: int | None = option(checks.size, default=None)


# The options of every export, whatever the target.
OF_ALL_TARGETS = {*SourceOptions.__dataclass_fields__, "max_shard_size"}


def located(name: str, given: StrPath) -> str | Path:
    """Return a text as it is, since it may name a repository or an address, and everything else as a local path."""
    return checks.location(name, given)


def path_of(given: StrPath | None) -> Path | None:
    """Return a local path, or None."""
    return None if given is None else Path(given)
