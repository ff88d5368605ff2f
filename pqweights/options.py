"""The options of plan, quantize, export, verify, inspect and generate: each is defined here, once (parameters.py).

A dataclass of options is what the library takes; those that end in `Arguments` are all that a function of the API and
its command take. The flags that only a command has, about what it prints, are in cli/options.py.
"""

# Not `from __future__ import annotations`: the annotations are read, and that must be quick.

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pqweights import parameters as kinds
from pqweights.common.units import BPW_OF, parse_size
from pqweights.errors import OptionError
from pqweights.parameters import Options, Parameter, StrPath

if TYPE_CHECKING:
    from pqweights.planning.recipe import Recipe
    from pqweights.storage.hub.sources import Access

DEFAULT_MAX_SHARD_SIZE = "2GB"
DEFAULT_MAX_TOKENS = 512
MOST_THREADS = 256

MAIN_BRANCH = "main"
DEVICES = ("cpu", "cuda", "auto")
MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")


def _recipe(name: str, value: Any) -> "str | Path | Recipe":
    """Take the name of a recipe, a path or a Recipe."""
    if isinstance(value, str | os.PathLike):
        return kinds.location(name, value)
    if not hasattr(value, "with_target"):  # the class is defined in terms of the options here
        raise kinds.wrong(name, "the name of a recipe, a path or a Recipe", value)
    recipe: Recipe = value
    return recipe


def _temperature(name: str, value: Any) -> float:
    """Take a temperature by which logits can be divided, or 0."""
    if not (kinds.number(name, value) == 0 or 1e-6 <= value <= 1e6):
        raise OptionError(f"`{name}`: expected 0 (the likeliest token) to 1e6, found {value:g}")
    return float(value)


def _probability(name: str, value: Any) -> float:
    """Take a probability that is not 0."""
    if not 0 < kinds.number(name, value) <= 1:
        raise OptionError(f"`{name}`: expected more than 0 and at most 1, found {value:g}")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class HubOptions(Options):
    """How the Hub is used."""

    revision: Annotated[
        str | None,
        Parameter(
            help="Branch, tag or commit of the repository on the Hub.",
            kind=kinds.text,
            metavar="REV",
            default=MAIN_BRANCH,
        ),
    ] = None
    token: Annotated[
        str | None,
        Parameter(
            help="Access token for the Hub.",
            kind=kinds.text,
            metavar="TOKEN",
            default="HF_TOKEN, or the token saved by hf auth login",
        ),
    ] = field(default=None, repr=False)
    tell: Annotated[
        Callable[[str], None] | None,
        Parameter(help="Function that is called with a line about every wait.", kind=kinds.anything, flags=()),
    ] = field(default=None, repr=False)

    @property
    def access(self) -> "Access":
        """How to reach a repository that these options are about."""
        from pqweights.storage.hub.sources import Access

        return Access(self.revision, self.token or None, self.tell or (lambda line: None))

    @property
    def access_to_main(self) -> "Access":
        """How to reach another repository, of which no revision is named."""
        from pqweights.storage.hub.sources import Access

        return Access(None, self.token or None, self.tell or (lambda line: None))


@dataclass(frozen=True, kw_only=True)
class ProgressOption(Options):
    """How progress is shown."""

    progress: Annotated[
        Callable[[int, int, str], None] | None,
        Parameter(
            help="Function that is called with the bytes done, the bytes in all, and the name of a tensor or a file.",
            kind=kinds.anything,
            flags=(),
        ),
    ] = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class ThreadsOption(Options):
    """How many threads compute."""

    threads: Annotated[
        int | None,
        Parameter(
            help="Number of worker threads.",
            kind=kinds.whole,
            default="the number of cores",
            least=1,
            most=MOST_THREADS,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunArguments(ThreadsOption, ProgressOption):
    """How a task is carried out, here or on a cluster."""

    ray: Annotated[
        str | None,
        Parameter(
            help="Have the nodes of a Ray cluster do the work, output file by output file: HOST:PORT of its head node, "
            "auto for the cluster of this machine, local for a new one on it. `threads` is then that of a task. The "
            "output bytes are the same.",
            kind=kinds.text,
            metavar="ADDRESS|auto|local",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class OverwriteOption(Options):
    """What becomes of an earlier result."""

    overwrite: Annotated[
        bool,
        Parameter(
            help="Replace an earlier result in OUT. Only files listed in its manifest are deleted.", kind=kinds.flag
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class ShardOption(Options):
    """How large output files may be."""

    max_shard_size: Annotated[
        int | str,
        Parameter(help="Maximum size of an output file, e.g. 5GB.", kind=kinds.size, metavar="SIZE"),
    ] = DEFAULT_MAX_SHARD_SIZE

    @property
    def max_shard_bytes(self) -> int:
        """The data bytes after which a new output file begins."""
        return parse_size(self.max_shard_size)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Options):
    """What to change in a recipe. None and empty values change nothing."""

    codec: Annotated[
        str | None,
        Parameter(
            help="Default codec, where no rule of the recipe gives another.",
            kind=kinds.text,
            metavar="NAME",
            default="the recipe's",
        ),
    ] = None
    bits: Annotated[
        float | None,
        Parameter(
            help="Default bit width, where no rule of the recipe gives another; a fraction for codecs that have such "
            "rates.",
            kind=kinds.number,
            flags=("--bits", "-b"),
            metavar="BITS",
            default="the recipe's",
        ),
    ] = None
    effort: Annotated[
        int | None,
        Parameter(
            help="How much work goes into encoding, for codecs that have a choice: more takes longer and errs less, in "
            "the same bytes.",
            kind=kinds.whole,
            default="the recipe's, else the codec's least",
        ),
    ] = None
    keep: Annotated[
        str | Sequence[str],
        Parameter(
            help="Keep the tensors whose names match a shell-style PATTERN, e.g. '*.layers.0.*'; before `set_bits`, "
            "and before the rules of the recipe. Can be repeated.",
            kind=kinds.patterns,
            metavar="PATTERN",
        ),
    ] = ()
    set_bits: Annotated[
        Mapping[str, float] | tuple[tuple[str, float], ...] | None,
        Parameter(
            help="Quantize the tensors whose names match a shell-style PATTERN with BITS, e.g. '*.mlp.*=6'; the first "
            "that matches decides, before the rules of the recipe. Can be repeated.",
            kind=kinds.bits_by_pattern,
            flags=("--set",),
            metavar="PATTERN=BITS",
        ),
    ] = None
    target_size: Annotated[
        int | str | None,
        Parameter(
            help="Choose the bit width of each weight so that the safetensors files take at most SIZE, e.g. 9GB or "
            "9GiB.",
            kind=kinds.size,
            metavar="SIZE",
        ),
    ] = None
    target_bpw: Annotated[
        float | None,
        Parameter(
            help="Choose the bit width of each weight so that the mean is at most BITS, all overhead counted: per "
            "weight that the recipe quantizes, or per parameter of the checkpoint (`bpw_of`).",
            kind=kinds.number,
            metavar="BITS",
        ),
    ] = None
    bpw_of: Annotated[
        str | None,
        Parameter(
            help="Mean that `target_bpw` limits: over the weights that the recipe quantizes, or over all parameters of "
            "the checkpoint, with every byte of the safetensors files.",
            kind=kinds.text,
            choices=BPW_OF,
            default="quantized",
        ),
    ] = None
    sensitivity: Annotated[
        StrPath | None,
        Parameter(
            help="Basis for choosing bit widths to meet a target: a rule of thumb, or a FILE written by pqweights "
            "sensitivity.",
            kind=kinds.path,
            metavar="heuristic|FILE",
            default="heuristic",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class FoldOptions(Options):
    """How weights are changed before they are rounded."""

    fold: Annotated[
        str | None,
        Parameter(
            help="Move factors between neighbouring layers first, where channels differ much, so that weights are "
            "easier to quantize; the model computes the same.",
            kind=kinds.text,
            metavar="equalize",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(HubOptions, ShardOption, FoldOptions):
    """How a source is opened and quantized."""

    strict: Annotated[
        bool,
        Parameter(
            help="Fail if the error of a tensor is above the limit of its codec, even after it is rescued.",
            kind=kinds.flag,
        ),
    ] = False
    awq: Annotated[
        StrPath | None,
        Parameter(
            help="Scale input channels before quantizing, with the scales in a FILE written by pqweights calibrate.",
            kind=kinds.path,
            metavar="FILE",
            excludes=("fold", "its scales were searched for weights that are not folded"),
        ),
    ] = None
    awq_any_codec: Annotated[
        bool,
        Parameter(
            help="Accept scales that were searched for another codec or bit width.",
            kind=kinds.flag,
            needs=(("awq",), "whose scales it is about"),
        ),
    ] = False
    calibration: Annotated[
        StrPath | None,
        Parameter(
            help="Moments that pqweights calibrate --moments wrote, from which `fold` learns the sizes of channels.",
            kind=kinds.path,
            metavar="FILE",
            needs=(("fold",), "which alone uses it"),
        ),
    ] = None
    allow_pickle: Annotated[
        bool,
        Parameter(help="Also read pickled weights, with torch's restricted weights_only loader.", kind=kinds.flag),
    ] = False
    include_files: Annotated[
        str | Sequence[str],
        Parameter(
            help="Also copy files of the source that match PATTERN, such as 'data/*'; repeatable. Without it, only "
            "what loading the model needs is copied.",
            kind=kinds.patterns,
            metavar="PATTERN",
        ),
    ] = ()
    low_disk: Annotated[
        bool,
        Parameter(
            help="For a source on the Hub: keep at most two of its files at a time, and delete each when it is done.",
            kind=kinds.flag,
        ),
    ] = False


SOURCE = Parameter(
    help="Checkpoint: a folder of safetensors files, one safetensors file, ORG/MODEL on the Hub, or an address such as "
    "s3://BUCKET/FOLDER.",
    kind=kinds.location,
    argument=True,
    metavar="SRC",
)
OUT = Parameter(
    help="Folder for the result, new or empty: a local one, or an address such as s3://BUCKET/FOLDER.",
    kind=kinds.location,
    argument=True,
    metavar="OUT",
)
RECIPE = Parameter(
    help="Name of a built-in recipe, or a YAML file.",
    kind=_recipe,
    flags=("--recipe", "-r"),
    metavar="NAME|FILE",
)


NOT_TAKEN = Parameter(help="", kind=kinds.flag, flags=())


@dataclass(frozen=True)
class PlanArguments(ThreadsOption, QuantizeOptions, RecipeOptions):
    """What `plan` takes: what `quantize` does, but for what changes nothing in a plan."""

    source: Annotated[StrPath, SOURCE]
    recipe: Annotated["StrPath | Recipe", RECIPE] = "q5"
    strict: Annotated[bool, NOT_TAKEN] = field(default=False, init=False)
    low_disk: Annotated[bool, NOT_TAKEN] = field(default=False, init=False)


@dataclass(frozen=True)
class QuantizeArguments(RunArguments, OverwriteOption, QuantizeOptions, RecipeOptions):
    """What `quantize` takes."""

    source: Annotated[StrPath, SOURCE]
    out: Annotated[StrPath, OUT]
    recipe: Annotated["StrPath | Recipe", RECIPE] = "q5"


@dataclass(frozen=True, kw_only=True)
class ExportOptions(FoldOptions):
    """The options that a user may give for an export; each target takes some. None stands for the target's default."""

    bits: Annotated[
        int | None,
        Parameter(help="Bits per code of an integer target.", kind=kinds.whole, flags=("--bits", "-b"), default="4"),
    ] = None
    group_size: Annotated[
        int | None,
        Parameter(
            help="Weights per scale of an integer target.",
            kind=kinds.whole,
            flags=("--group-size", "-g"),
            default="128, for mlx 64",
        ),
    ] = None
    qparams: Annotated[
        str | None,
        Parameter(
            help="How to choose scales and offsets: best minimizes the squared error, minmax works like the converter "
            "of the runtime.",
            kind=kinds.text,
            metavar="best|minmax",
            default="best",
        ),
    ] = None
    rounding: Annotated[
        str | None,
        Parameter(
            help="How to choose codes: the nearest ones (plain), or, with `calibration`, such that errors within a row "
            "cancel in the outputs (gptq), or weighed by how large inputs are (importance, for gguf).",
            kind=kinds.text,
            metavar="plain|gptq|importance",
            default="not plain with `calibration`",
        ),
    ] = None
    calibration: Annotated[
        StrPath | None,
        Parameter(
            help="For `rounding` and for `fold`: moments that pqweights calibrate --moments wrote.",
            kind=kinds.path,
            metavar="FILE",
        ),
    ] = None
    packing: Annotated[
        str | None,
        Parameter(
            help="For torchao-int4: the layout of the packed codes.",
            kind=kinds.text,
            metavar="PACKING",
            default="tile_packed_to_4d",
        ),
    ] = None
    mode: Annotated[
        str | None,
        Parameter(
            help="For mlx: affine integers, or one of the float formats of MLX.",
            kind=kinds.text,
            metavar="MODE",
            default="affine",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        Parameter(
            help="For bf16: store all weights as BF16, or each in the dtype that it had in the source.",
            kind=kinds.text,
            metavar="bf16|source",
            default="bf16",
        ),
    ] = None
    type: Annotated[
        str | None,
        Parameter(
            help="For gguf: a mix or type of llama.cpp, such as q4_k_m, q5_k_m, q6_k, iq4_xs, q8_0 or bf16.",
            kind=kinds.text,
            metavar="TYPE",
            default="q4_k_m",
        ),
    ] = None
    pure: Annotated[
        bool,
        Parameter(help="For gguf: all matrices in the type of the mix, none of them wider.", kind=kinds.flag),
    ] = False
    set_type: Annotated[
        Mapping[str, str] | tuple[tuple[str, str], ...] | None,
        Parameter(
            help="For gguf: the type of tensors whose name matches; may be repeated, the first that matches counts.",
            kind=kinds.types_by_pattern,
            metavar="PATTERN=TYPE",
        ),
    ] = None
    recipe: Annotated[
        StrPath | None,
        Parameter(help="For gguf: types by pattern, from a YAML file.", kind=kinds.path, metavar="FILE"),
    ] = None
    target_size: Annotated[
        int | str | None,
        Parameter(
            help="For gguf: choose the types so that the file has at most this size.", kind=kinds.size, metavar="SIZE"
        ),
    ] = None
    sensitivity: Annotated[
        StrPath | None,
        Parameter(
            help="For `target_size`: how types are chosen, by a rule of thumb or by what pqweights sensitivity "
            "measured.",
            kind=kinds.path,
            metavar="heuristic|FILE",
            default="heuristic",
        ),
    ] = None
    imatrix: Annotated[
        bool,
        Parameter(
            help="For gguf, with `calibration`: write llama.cpp's importance matrix as well.",
            kind=kinds.flag,
        ),
    ] = False


@dataclass(frozen=True)
class ExportArguments(HubOptions, RunArguments, OverwriteOption, ShardOption, ExportOptions):
    """What `export` takes."""

    master: Annotated[
        StrPath,
        Parameter(
            help="Master written by pqweights: a folder, ORG/NAME on the Hub, or an address such as "
            "s3://BUCKET/FOLDER.",
            kind=kinds.location,
            argument=True,
            metavar="DIR",
        ),
    ]
    out: Annotated[StrPath, OUT]
    target: Annotated[
        str,
        Parameter(
            help="Format of the result, one of those above.",
            kind=kinds.text,
            flags=("--target", "-t"),
            metavar="TARGET",
        ),
    ]
    source: Annotated[
        StrPath | None,
        Parameter(
            help="Make the integers from the original checkpoint, and report what the error of the master would add.",
            kind=kinds.location,
            metavar="SRC",
        ),
    ] = field(default=None, kw_only=True)


FOLDER = Parameter(
    help="Master or export written by pqweights: a folder, ORG/NAME on the Hub, or an address such as "
    "s3://BUCKET/FOLDER.",
    kind=kinds.location,
    argument=True,
    metavar="DIR",
)


@dataclass(frozen=True)
class VerifyArguments(HubOptions, RunArguments):
    """What `verify` takes."""

    folder: Annotated[StrPath, FOLDER]


@dataclass(frozen=True)
class InspectArguments(HubOptions):
    """What `inspect` takes in Python; its command measures other things as well."""

    folder: Annotated[StrPath, FOLDER]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(Options):
    """How text is generated."""

    system: Annotated[
        str | None,
        Parameter(
            help="System message, for models with a chat template that takes one.",
            kind=kinds.text,
            metavar="TEXT",
            excludes=("no_chat", "it is for conversations"),
        ),
    ] = None
    no_chat: Annotated[
        bool,
        Parameter(help="Continue the prompt as it is, even if the model has a chat template.", kind=kinds.flag),
    ] = False
    max_tokens: Annotated[
        int, Parameter(help="Maximum number of tokens of a reply.", kind=kinds.whole, metavar="N", least=1)
    ] = DEFAULT_MAX_TOKENS
    temperature: Annotated[
        float | None,
        Parameter(
            help="Choose tokens at random, with logits divided by T; 0 always takes the likeliest.",
            kind=_temperature,
            flags=("--temperature", "-t"),
            metavar="T",
            default="the model's generation_config.json, else 0",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Parameter(
            help="Choose from the likeliest tokens that together have probability P.",
            kind=_probability,
            metavar="P",
            default="the model's generation_config.json, else 1",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Parameter(
            help="Seed of the random choices.",
            kind=kinds.whole,
            metavar="N",
            default="a random one, printed",
            least=0,
        ),
    ] = None
    packed: Annotated[
        bool | None,
        Parameter(
            help="Keep the weights of a master packed in memory.",
            kind=kinds.flag,
            flags=("--packed/--no-packed",),
            default="packed for scalar codecs; for others only if the decoded model does not fit into memory",
        ),
    ] = None
    kv_cache: Annotated[
        str | None,
        Parameter(
            help="Quantize keys and values: klt, hadamard, polar or polar-rope, with options as in klt:3.",
            kind=kinds.text,
            metavar="SPEC",
            default="as the model computes them",
        ),
    ] = None
    tokenizer: Annotated[
        StrPath | None,
        Parameter(help="Folder of the tokenizer.", kind=kinds.path, metavar="DIR", default="the model's own"),
    ] = None
    dtype: Annotated[
        str,
        Parameter(help="Dtype to run the model in; auto is the model's own.", kind=kinds.text, choices=MODEL_DTYPES),
    ] = "auto"
    device: Annotated[
        str,
        Parameter(help="Device to compute on; auto uses a GPU if there is one.", kind=kinds.text, choices=DEVICES),
    ] = "cpu"


@dataclass(frozen=True)
class ModelArguments(HubOptions, ProgressOption, GenerationOptions):
    """What `generate` takes, but for prompts, which its command can also read."""

    model: Annotated[
        StrPath,
        Parameter(
            help="Master, export or any checkpoint of a language model: a folder, or ORG/NAME on the Hub; or a GGUF "
            "file.",
            kind=kinds.location,
            argument=True,
            metavar="MODEL",
        ),
    ]


@dataclass(frozen=True)
class GenerateArguments(ModelArguments):
    """What `generate` takes in Python."""

    prompt: Annotated[
        str,
        Parameter(
            help="Text to answer or continue.",
            kind=kinds.text,
            flags=("--prompt", "-p"),
            metavar="TEXT",
            default="what comes on stdin; on a terminal, ask for one prompt after another",
        ),
    ]
    on_text: Annotated[
        Callable[[str], None] | None,
        Parameter(
            help="Function that is called with each piece of the text as it comes.", kind=kinds.anything, flags=()
        ),
    ] = field(default=None, kw_only=True)


def located(given: StrPath) -> str | Path:
    """Return a text as it is, since it may name a repository or an address, and everything else as a local path."""
    return given if isinstance(given, str) else Path(given)


def path_of(given: StrPath | None) -> Path | None:
    """Return a local path, or None."""
    return None if given is None else Path(given)
