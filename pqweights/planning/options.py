"""The options of all functions and commands: each is defined here, once (common/parameters.py).

A class of options is what the library takes; those that end in `Arguments` are all that a function of the API and
its command take. The flags that only a command has, about what it prints, are in cli/options.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqweights.checkpoint.names import file_stem
from pqweights.common import parameters as checks
from pqweights.common.parameters import Options, StrPath, option, options
from pqweights.common.units import parse_size
from pqweights.errors import OptionError

if TYPE_CHECKING:
    from pqweights.planning.recipe import Recipe
    from pqweights.storage.sources import Access

DEFAULT_MAX_SHARD_SIZE = "2GB"
MOST_THREADS = 256

Progress = Callable[[int, int, str], None]  # called with what is done, how much there is in all, and a name

MAIN_BRANCH = "main"
RUNTIMES = LLAMA_CPP, MLX, VLLM, TRANSFORMERS = ("llama.cpp", "mlx", "vllm", "transformers")

# What the arguments of several functions are
SOURCE = (
    "Checkpoint: a folder of safetensors files, one safetensors file, ORG/MODEL on the Hub, or an address such as "
    "s3://BUCKET/FOLDER."
)
OUT = "Folder for the result, new or empty: a local one, or an address such as s3://BUCKET/FOLDER."
FOLDER = (
    "Master or export written by pqweights: a folder, ORG/NAME on the Hub, or an address such as s3://BUCKET/FOLDER."
)
ALLOW_PICKLE = "Also read pickled weights, with torch's restricted weights_only loader."
RECIPE = "Name of a built-in recipe, or a YAML file."


def take_recipe(name: str, value: Any) -> str | Path | Recipe:
    """Take the name of a recipe, a path or a Recipe."""
    if isinstance(value, str | os.PathLike):
        return checks.location(name, value)
    if not hasattr(value, "with_target"):  # the class is defined in terms of the options here
        raise checks.wrong(name, "the name of a recipe, a path or a Recipe", value)
    recipe: Recipe = value
    return recipe


def _tokens(name: str, value: Any) -> int:
    """Take a number of tokens, or a text such as "32k"."""
    text = value if isinstance(value, str) else str(checks.whole(name, value))
    digits = text.lower().removesuffix("k")
    if not digits.isascii() or not digits.isdigit() or not 0 < (count := int(digits[:19])) < 10**12:
        raise OptionError(f"`{name}`: expected a number of tokens such as 8192 or 32k, found {text[:40]!r}")
    return count * 1024 if text.lower() != digits else count


@options
class HubOptions(Options):
    """How the Hub is used."""

    revision: str | None = option(
        "Branch, tag or commit of the repository on the Hub.", default=None, metavar="REV", default_text=MAIN_BRANCH
    )
    token: str | None = option(
        "Access token for the Hub.",
        default=None,
        repr=False,
        metavar="TOKEN",
        default_text="HF_TOKEN, or the token saved by hf auth login",
    )
    tell: Callable[[str], None] | None = option(
        "Function that is called with a line about every wait.", checks.anything, default=None, repr=False, flags=()
    )

    @property
    def access(self) -> Access:
        """How to reach a repository that these options are about."""
        from pqweights.storage.sources import Access

        return Access(self.revision, self.token or None, self.tell or (lambda line: None))

    @property
    def access_to_main(self) -> Access:
        """How to reach another repository, of which no revision is named."""
        from pqweights.storage.sources import Access

        return Access(None, self.token or None, self.tell or (lambda line: None))


@options
class ProgressOption(Options):
    """How progress is shown."""

    progress: Progress | None = option(
        "Function that is called with the bytes done, the bytes in all, and the name of a tensor or a file.",
        checks.anything,
        default=None,
        repr=False,
        flags=(),
    )


@options
class ThreadsOption(Options):
    """How many threads compute."""

    threads: int | None = option(
        "Number of worker threads.", default=None, least=1, most=MOST_THREADS, default_text="the number of cores"
    )


@options
class RunArguments(ProgressOption, ThreadsOption):
    """How a task is carried out, here or on a cluster."""

    ray: str | None = option(
        "Have the nodes of a Ray cluster do the work, output file by output file: HOST:PORT of its head node, "
        "auto for the cluster of this machine, local for a new one on it. `threads` is then that of a task. The "
        "output bytes are the same.",
        default=None,
        metavar="ADDRESS|auto|local",
    )
    overwrite: bool = option(
        "Replace an earlier result in OUT. Only files listed in its manifest are deleted.", default=False
    )


@options
class ShardOption(Options):
    """How large output files may be."""

    max_shard_size: int | str = option(
        "Maximum size of an output file, e.g. 5GB.", checks.size, default=DEFAULT_MAX_SHARD_SIZE, metavar="SIZE"
    )

    @property
    def max_shard_bytes(self) -> int:
        """The data bytes after which a new output file begins."""
        return parse_size(self.max_shard_size)


@options
class CodecOptions(Options):
    """The codec of a recipe, and its bit width. None stands for the recipe's own."""

    codec: str | None = option(
        "Default codec, where no rule of the recipe gives another.",
        default=None,
        metavar="NAME",
        default_text="the recipe's",
    )
    bits: float | None = option(
        "Default bit width, where no rule of the recipe gives another; a fraction for codecs that have such rates.",
        default=None,
        flags=("--bits", "-b"),
        metavar="BITS",
        default_text="the recipe's",
    )


@options
class RuleOptions(Options):
    """Rules that come before those of a recipe."""

    keep: str | Sequence[str] = option(
        "Keep the tensors whose names match a shell-style PATTERN, e.g. '*.layers.0.*'; before `set_bits`, "
        "and before the rules of the recipe. Can be repeated.",
        checks.patterns,
        default=(),
        metavar="PATTERN",
    )
    set_bits: Mapping[str, float] | tuple[tuple[str, float], ...] | None = option(
        "Quantize the tensors whose names match a shell-style PATTERN with BITS, e.g. '*.mlp.*=6'; the first "
        "that matches decides, before the rules of the recipe. Can be repeated.",
        checks.bits_by_pattern,
        default=None,
        flags=("--set",),
        metavar="PATTERN=BITS",
    )


@options
class RecipeOptions(CodecOptions, RuleOptions):
    """What to change in a recipe. None and empty values change nothing."""

    effort: int | None = option(
        "How much work goes into encoding, for codecs that have a choice: more takes longer and errs less, in "
        "the same bytes.",
        default=None,
        default_text="the recipe's, else the codec's least",
    )
    target_size: int | str | None = option(
        "Choose the bit width of each weight so that the safetensors files take at most SIZE, e.g. 9GB or 9GiB.",
        checks.size,
        default=None,
        metavar="SIZE",
    )
    target_bpw: float | None = option(
        "Choose the bit width of each weight so that the mean over the weights that the recipe quantizes is at "
        "most BITS, all overhead counted.",
        default=None,
        metavar="BITS",
    )
    sensitivity: StrPath | None = option(
        "Basis for choosing bit widths to meet a target: a rule of thumb, or a FILE written by pqweights sensitivity.",
        default=None,
        metavar="heuristic|FILE",
        default_text="heuristic",
    )


@options
class LeaveOutOption(Options):
    """Which tensors a result does not get."""

    leave_out: str | Sequence[str] = option(
        "Leave out the tensors whose name matches a shell-style PATTERN, such as '*.k_scale'; repeatable.",
        checks.patterns,
        default=(),
        metavar="PATTERN",
    )


@options
class QuantizeOptions(LeaveOutOption, ShardOption, HubOptions):
    """How a source is opened and quantized."""

    strict: bool = option(
        "Fail if the error of a tensor is above the limit of its codec, even after it is rescued.", default=False
    )
    awq: StrPath | None = option(
        "Scale input channels before quantizing, with the scales in a FILE written by pqweights calibrate.",
        default=None,
        metavar="FILE",
    )
    awq_any_codec: bool = option(
        "Accept scales that were searched for another codec or bit width.",
        default=False,
        needs=(("awq",), "whose scales it is about"),
    )
    allow_pickle: bool = option(ALLOW_PICKLE, default=False)
    include_files: str | Sequence[str] = option(
        "Also copy files of the source that match PATTERN, such as 'data/*'; repeatable. Without it, only "
        "what loading the model needs is copied.",
        checks.patterns,
        default=(),
        metavar="PATTERN",
    )
    lossless: bool = option(
        "Round nothing: store every weight in the source's own numbers, coded by their entropy, and bit for bit the "
        "same when it is read. The source is read twice.",
        default=False,
        excludes=(
            (
                *("recipe", "codec", "bits", "effort", "keep", "set_bits", "target_size", "target_bpw", "sensitivity"),
                *("awq", "calibrate", "strict"),
            ),
            "it stores the numbers of the source as they are",
        ),
    )
    low_disk: bool = option(
        "For a source on the Hub: keep at most two of its files at a time, and delete each when it is done.",
        default=False,
    )


# Samples of text that need none from the user: drawn from the model, or the one that comes with this package.
SELF, MIXTURE = "self", "mixture"
SAMPLES = "self|mixture|FILE|ORG/DATASET"


# How a calibration shares bits.
BY_MODEL, BY_TENSOR = "model", "tensor"
DEFAULT_SAMPLE_TOKENS, FEWEST_SAMPLE_TOKENS = 12288, 2048


@options
class SampleOptions(Options):
    """On which tokens a model is calibrated."""

    calibrate: StrPath | None = option("", checks.location, default=None, metavar=SAMPLES)
    calibration_tokens: int = option(
        "Number of tokens of the sample.",
        default=DEFAULT_SAMPLE_TOKENS,
        least=FEWEST_SAMPLE_TOKENS,
        needs=(("calibrate",), "which reads them"),
    )


@options
class CalibrateOptions(SampleOptions):
    """How codes are found that cost the outputs of the model least."""

    calibrate: StrPath | None = option(
        "Calibrate the weights of the trellis, layer by layer: on text that is sampled from the model itself, a FILE "
        "or a folder of *.txt, a data set of the Hub, or a short mixture that comes with pqweights. Takes longer, for "
        "much less divergence in the same bytes.",
        checks.location,
        default=None,
        metavar=SAMPLES,
    )
    rate: str = option(
        "How bits are shared: more of them where they matter more (model), or as the recipe gives them to each weight "
        "(tensor).",
        default=BY_MODEL,
        choices=(BY_MODEL, BY_TENSOR),
        needs=(("calibrate",), "which shares them"),
    )
    calibration_progress: Progress | None = option(
        "Function that is called with the steps of the calibration that are done, those in all, and the next one.",
        checks.anything,
        default=None,
        repr=False,
        flags=(),
    )


@options
class MemoryOptions(Options):
    """What exports are to fit into."""

    memory: int | str | None = option(
        "Propose targets and formats with which the model fits into SIZE of memory, e.g. 16GB: that of the GPU, or all "
        "of a Mac's.",
        checks.size,
        default=None,
        metavar="SIZE",
    )
    context: int | str | None = option(
        "For `memory`: how many tokens the model keeps, e.g. 32k.",
        _tokens,
        default=None,
        metavar="TOKENS",
        default_text="the most that the model takes, but not more than 8192",
        needs=(("memory",), "into which it has to fit"),
    )
    runtime: str | None = option(
        "For `memory`: propose what this runtime loads, and nothing else.",
        default=None,
        choices=RUNTIMES,
        needs=(("memory",), "which it shares out"),
    )


@options
class PlanArguments(RecipeOptions, QuantizeOptions, CalibrateOptions, MemoryOptions, ThreadsOption):
    """What `plan` takes: what `quantize` does, but for what changes nothing in a plan."""

    source: StrPath = option(SOURCE, checks.location, kw_only=False, argument=True, metavar="SRC")
    recipe: StrPath | Recipe | None = option(
        *(RECIPE, take_recipe),
        default=None,
        kw_only=False,
        flags=("--recipe", "-r"),
        metavar="NAME|FILE",
        default_text="q5",
    )
    strict: bool = option("", default=False, init=False, flags=())
    low_disk: bool = option("", checks.flag, default=False, init=False, flags=())
    calibration_progress: Progress | None = option("", checks.anything, default=None, init=False, flags=())


@options
class QuantizeArguments(RecipeOptions, QuantizeOptions, CalibrateOptions, RunArguments):
    """What `quantize` takes."""

    source: StrPath = option(SOURCE, checks.location, kw_only=False, argument=True, metavar="SRC")
    out: StrPath = option(OUT, checks.location, kw_only=False, argument=True, metavar="OUT")
    recipe: StrPath | Recipe | None = option(
        *(RECIPE, take_recipe),
        default=None,
        kw_only=False,
        flags=("--recipe", "-r"),
        metavar="NAME|FILE",
        default_text="q5",
    )


def _model_name(name: str, value: Any) -> str:
    """Take a name of a model that may stand in the name of a file."""
    if not value or file_stem(checks.text(name, value)) != value:
        raise OptionError(f"`{name}`: expected letters, digits, '.', '_' and '-', at most 96, found {value[:100]!r}")
    return str(value)


@options
class ExportOptions(SampleOptions):
    """The options that a user may give for an export; each target takes some. None stands for the target's default."""

    bits: int | None = option(
        "Bits per code of an integer target.", default=None, flags=("--bits", "-b"), default_text="4"
    )
    group_size: int | None = option(
        "Weights per scale of an integer target.",
        default=None,
        flags=("--group-size", "-g"),
        default_text="128, for mlx 64",
    )
    qparams: str | None = option(
        "How to choose scales and offsets: best minimizes the squared error, minmax works like the converter "
        "of the runtime.",
        default=None,
        metavar="best|minmax",
        default_text="best",
    )
    rounding: str | None = option(
        "How to choose codes: the nearest ones (plain), or, with `calibrate`, such that errors within a row "
        "cancel in the outputs (gptq), or weighed by how large inputs are (importance, for gguf).",
        default=None,
        metavar="plain|gptq|importance",
        default_text="not plain with `calibrate`",
    )
    calibrate: StrPath | None = option(
        "For `rounding`: learn the inputs of weights, layer by layer, on text as in `quantize`: self is sampled from "
        "the model itself.",
        checks.location,
        default=None,
        metavar=SAMPLES,
    )
    packing: str | None = option(
        "For torchao in INT4: the layout of the packed codes.",
        default=None,
        metavar="PACKING",
        default_text="tile_packed_to_4d",
    )
    mode: str | None = option(
        "For mlx: affine integers, or one of the float formats of MLX.",
        default=None,
        metavar="MODE",
        default_text="affine",
    )
    format: str | None = option(
        "Format of the weights, of those that the target has: w4a16, w8a16, int8, fp8, nvfp4, mxfp4, ... for vllm; q2 "
        "to q8, mxfp4, mxfp8, nvfp4 or a mix for mlx; int4, int8, int8-dynamic or fp8 for torchao; a type for gguf.",
        default=None,
        metavar="FORMAT",
        default_text="w4a16, q4, int4, q4_k_m",
    )
    dtype: str | None = option(
        "For bf16: store all weights as BF16, or each in the dtype that it had in the source.",
        default=None,
        metavar="bf16|source",
        default_text="bf16",
    )
    type: str | None = option(
        "For gguf: a mix or type of llama.cpp, such as q4_k_m, q5_k_m, q6_k, iq4_xs, q8_0 or bf16.",
        default=None,
        metavar="TYPE",
        default_text="q4_k_m",
    )
    pure: bool = option("For gguf: all matrices in the type of the mix, none of them wider.", default=False)
    without_tokenizer: bool = option(
        "For gguf: write the file although the model has no tokenizer, for programs that give llama.cpp the ids of "
        "tokens; its own end at the first text.",
        default=False,
    )
    name: str | None = option(
        "For gguf: the name of the model, with which names of files begin.",
        _model_name,
        default=None,
        metavar="NAME",
        default_text="that of its repository, else that of its folder",
    )
    recipe: StrPath | None = option(
        "YAML FILE that says which format each weight gets: format, rules, target_size, sensitivity.",
        checks.location,
        default=None,
        flags=("--recipe", "-r"),
        metavar="FILE",
    )
    set_format: Mapping[str, str] | tuple[tuple[str, str], ...] | None = option(
        "Format of the weights whose name matches a shell-style PATTERN, or of a role as in role:expert; plain keeps "
        "them. For gguf, a type. Can be repeated, the first that matches counts.",
        checks.formats_by_pattern,
        default=None,
        flags=("--set",),
        metavar="PATTERN=FORMAT",
    )
    target_size: int | str | None = option(
        "Choose the format of each weight so that the files of weights take at most SIZE, e.g. 5GB.",
        checks.size,
        default=None,
        metavar="SIZE",
    )
    sensitivity: StrPath | None = option(
        "For `target_size`: how formats are chosen, by a rule of thumb or by what pqweights sensitivity measured.",
        default=None,
        metavar="heuristic|FILE",
        default_text="heuristic",
    )


@options
class ExportArguments(ExportOptions, LeaveOutOption, ShardOption, RunArguments, HubOptions):
    """What `export` takes."""

    master: StrPath = option(
        "Master written by pqweights: a folder, ORG/NAME on the Hub, or an address such as s3://BUCKET/FOLDER.",
        checks.location,
        kw_only=False,
        argument=True,
        metavar="DIR",
    )
    out: StrPath = option(OUT, checks.location, kw_only=False, argument=True, metavar="OUT")
    target: str = option(
        "Format of the result, one of those above.",
        checks.text,
        kw_only=False,
        flags=("--target", "-t"),
        metavar="TARGET",
    )
    source: StrPath | None = option(
        "Make the integers from the original checkpoint, and report what the error of the master would add.",
        checks.location,
        default=None,
        metavar="SRC",
    )


@options
class VerifyArguments(ProgressOption, ThreadsOption, HubOptions):
    """What `verify` takes."""

    folder: StrPath = option(FOLDER, checks.location, kw_only=False, argument=True, metavar="DIR")


@options
class InspectArguments(HubOptions):
    """What `inspect` takes in Python; its command measures other things as well."""

    folder: StrPath = option(FOLDER, checks.location, kw_only=False, argument=True, metavar="DIR")


def located(given: StrPath) -> str | Path:
    """Return a text as it is, since it may name a repository or an address, and everything else as a local path."""
    return given if isinstance(given, str) else Path(given)


def path_of(given: StrPath | None) -> Path | None:
    """Return a local path, or None."""
    return None if given is None else Path(given)
