"""The options of what computes with models: generate, and in part what measures them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pqweights.common import parameters as checks
from pqweights.common.parameters import Options, StrPath, option, options
from pqweights.errors import OptionError
from pqweights.planning.options import HubOptions, ProgressOption, ThreadsOption

DEFAULT_MAX_TOKENS = 512
DEVICES = ("cpu", "cuda", "auto")
MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")


def _temperature(name: str, value: Any) -> float:
    """Take a temperature by which logits can be divided, or 0."""
    if not (checks.number(name, value) == 0 or 1e-6 <= value <= 1e6):
        raise OptionError(f"`{name}`: expected 0 (the likeliest token) to 1e6, found {value:g}")
    return float(value)


def _probability(name: str, value: Any) -> float:
    """Take a probability that is not 0."""
    if not 0 < checks.number(name, value) <= 1:
        raise OptionError(f"`{name}`: expected more than 0 and at most 1, found {value:g}")
    return float(value)


@options
class TokenizerOption(Options):
    """Which tokenizer reads a text."""

    tokenizer: StrPath | None = option(
        "Folder of the tokenizer.", default=None, metavar="DIR", default_text="the model's own"
    )


@options
class DtypeOption(Options):
    """What a model computes in."""

    dtype: str = option("Dtype to run the model in; auto is the model's own.", default="auto", choices=MODEL_DTYPES)


@options
class DeviceOption(Options):
    """What computes."""

    device: str = option("Device to compute on; auto uses a GPU if there is one.", default="cpu", choices=DEVICES)


@options
class GenerationOptions(ThreadsOption, DeviceOption, DtypeOption, TokenizerOption):
    """How text is generated."""

    system: str | None = option(
        "System message, for models with a chat template that takes one.",
        default=None,
        metavar="TEXT",
        excludes=(("no_chat",), "it is for conversations"),
    )
    no_chat: bool = option("Continue the prompt as it is, even if the model has a chat template.", default=False)
    max_tokens: int = option("Maximum number of tokens of a reply.", default=DEFAULT_MAX_TOKENS, metavar="N", least=1)
    temperature: float | None = option(
        "Choose tokens at random, with logits divided by T; 0 always takes the likeliest.",
        _temperature,
        default=None,
        flags=("--temperature", "-t"),
        metavar="T",
        default_text="the model's generation_config.json, else 0",
    )
    top_p: float | None = option(
        "Choose from the likeliest tokens that together have probability P.",
        _probability,
        default=None,
        metavar="P",
        default_text="the model's generation_config.json, else 1",
    )
    seed: int | None = option(
        "Seed of the random choices.", default=None, metavar="N", least=0, default_text="a random one, printed"
    )
    packed: bool | None = option(
        "Keep the weights of a master packed in memory.",
        default=None,
        flags=("--packed/--no-packed",),
        default_text="packed for scalar codecs; for others only if the decoded model does not fit into memory",
    )
    kv_cache: str | None = option(
        "Quantize keys and values: klt, hadamard, polar or polar-rope, with options as in klt:3.",
        default=None,
        metavar="SPEC",
        default_text="as the model computes them",
    )


@options
class ModelArguments(GenerationOptions, ProgressOption, HubOptions):
    """What `generate` takes, but for prompts, which its command can also read."""

    model: StrPath = option(
        "Master, export or any checkpoint of a language model: a folder, or ORG/NAME on the Hub; or a GGUF file.",
        checks.location,
        kw_only=False,
        argument=True,
        metavar="MODEL",
    )


@options
class GenerateArguments(ModelArguments):
    """What `generate` takes in Python."""

    prompt: str = option(
        "Text to answer or continue.",
        kw_only=False,
        flags=("--prompt", "-p"),
        metavar="TEXT",
        default_text="what comes on stdin; on a terminal, ask for one prompt after another",
    )
    on_text: Callable[[str], None] | None = option(
        "Function that is called with each piece of the text as it comes.", checks.anything, default=None, flags=()
    )
