"""What a user asks for: the options of commands, checked when they are put together.

What a user reads about each is in cli/options.py and in the docstrings of api.py.

Messages name options between backquotes, such as `max_shard_size`; the command line prints their flags in that place.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar, dataclass_transform

from pqweights.common.threads import Progress, no_progress, usable_cores
from pqweights.common.units import parse_size
from pqweights.errors import OptionError, RecipeError

Made = TypeVar("Made")

Tell = Callable[[str], None]  # called with a line for the user: what is being waited for

StrPath = str | os.PathLike[str]
DEFAULT_MAX_SHARD_SIZE = "2GB"
MOST_THREADS = 256
DEFAULT_MAX_TOKENS = 512
DEVICES = ("cpu", "cuda", "auto")
MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")

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

# Checks the type of a value, and returns it in the type that the library takes; the first argument is its name.
Check = Callable[[str, Any], Any]


def checked_value(
    name: str,
    value: Any,
    *,
    check: Check,
    choices: tuple[str, ...] = (),
    least: float = -math.inf,
    most: float = math.inf,
    **others: Any,
) -> Any:
    """Return the value of an option in the type that the library takes; None stays None.

    check: checks the type, and converts the value
    choices: the values that there are
    least, most: bounds of a number
    others: what `option` says of other options

    Raises TypeError for a value of another type, OptionError for one that is out of range.
    """
    if value is None:
        return None
    value = check(name, value)
    if choices and value not in choices:
        raise OptionError(f"`{name}`: expected {' or '.join(choices)}, found {value!r}")
    if isinstance(value, int | float) and (value < least or value > most):
        bounds = f"{least:g} to {most:g}" if most < math.inf else f"at least {least:g}"
        raise OptionError(f"`{name}`: expected {bounds}, found {value:g}")
    return value


def option(check: Check | None = None, *, default: Any, repr: bool = True, **limits: Any) -> Any:
    """Return a field of a class of options whose values are limited.

    check: by default that of the annotation in CHECKS
    limits: choices, least and most of `checked_value`; needs: other options, one of which must be given as well, the
        first of which is named, and why; excludes: options that must not be given as well, and why
    """
    limits |= {} if check is None else {"check": check}
    return dataclasses.field(default=default, repr=repr, metadata=limits)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option,))
def options(made: type[Made]) -> type[Made]:
    """Decorate a class of options, which are checked when one is made."""
    made.__post_init__ = _check  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(made)


def _check(made: Any) -> None:
    """Check the values of options, one by one and beside each other. Raises TypeError or OptionError."""
    known = _limits(made)
    for name, limits in known.items():
        object.__setattr__(made, name, checked_value(name, getattr(made, name), **limits))
    given = given_in(made)
    for name in (name for name in known if name in given):
        others, why = known[name].get("needs", ((), ""))
        if others and not given & {*others}:
            raise OptionError(f"`{name}`: expected `{others[0]}` as well, {why}")
        others, why = known[name].get("excludes", ((), ""))
        for other in filter(given.__contains__, others):  # in this order: that of sets differs by process
            raise OptionError(f"`{name}`: {why}; leave out `{name}` or `{other}`")


def options_in(made: type[Made], arguments: Mapping[str, Any]) -> Made:
    """Return the options among arguments, such as the `locals()` of a function; None stands for the default.

    made: a class of options
    """
    names = [of.name for of in fields(made)]  # type: ignore[arg-type]
    return made(**{name: arguments[name] for name in names if arguments.get(name) is not None})


def given_in(made: Any) -> set[str]:
    """Return the names of options that have another value than their default."""
    known = _limits(made)
    defaults = {of.name: checked_value(of.name, of.default, **known[of.name]) for of in fields(made)}
    return {name for name, default in defaults.items() if getattr(made, name) != default}


def _limits(made: Any) -> dict[str, dict[str, Any]]:
    """Return which values each of some options takes."""
    return {
        field.name: {"check": CHECKS.get(str(field.type).removesuffix(" | None")), **field.metadata}
        for field in fields(made)
    }


# Checks of values: each returns a value in the type that the library takes, or raises a TypeError that names it.


def text(name: str, value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise wrong(name, "a text", value)
    return value


def flag(name: str, value: Any) -> bool:
    """Whether something is so."""
    if not isinstance(value, bool):
        raise wrong(name, "True or False", value)
    return value


def number(name: str, value: Any) -> float:
    """A number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong(name, "a number", value)
    return value


def whole(name: str, value: Any) -> int:
    """A whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong(name, "a whole number", value)
    return value


def path(name: str, value: Any) -> Path:
    """A local path."""
    if not isinstance(value, str | os.PathLike):
        raise wrong(name, "a path", value)
    return Path(value)


def location(name: str, value: Any) -> str | Path:
    """A text as it is, since it may name a repository on the Hub or an address, or a local path."""
    return value if isinstance(value, str) else path(name, value)


def size(name: str, value: Any) -> int:
    """A number of bytes, or a text such as "9GB"."""
    if not isinstance(value, str) and number(name, value) != int(value):
        raise OptionError(f"`{name}`: expected a whole number of bytes, found {value}")
    try:
        return parse_size(value if isinstance(value, str) else int(value))
    except RecipeError as error:
        raise OptionError(f"`{name}`: {error}") from None


def patterns(name: str, value: Any) -> tuple[str, ...]:
    """Name patterns; a text is one pattern."""
    several = (value,) if isinstance(value, str) else tuple(value)
    for pattern in several:
        if not isinstance(pattern, str):
            raise wrong(name, "a pattern, or a list of patterns", pattern)
    return several


def formats_by_pattern(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Formats by pattern, as texts: a mapping, pairs, or texts with an equals sign. Bit widths may be numbers."""
    pairs: list[tuple[str, str]] = []
    for item in value.items() if isinstance(value, Mapping) else [value] if isinstance(value, str) else value:
        if isinstance(item, str):
            pattern, _, given = item.rpartition("=")
            if not pattern or not given:
                raise OptionError(f"`{name}`: expected PATTERN=FORMAT, such as *.attn_v.weight=q6_k, found {item!r}")
        elif isinstance(item, tuple) and len(item) == 2:
            pattern, given = item
            given = given if isinstance(given, str) else f"{number(name, given):g}"
        else:
            raise wrong(name, "a mapping, or texts such as PATTERN=FORMAT", value)
        pairs.append((text(name, pattern), given))
    return tuple(pairs)


def anything(name: str, value: Any) -> Any:
    """A value that nothing is asked of here, such as a function."""
    return value


def wrong(name: str, expected: str, given: object) -> TypeError:
    """Return the error of a value of a wrong type."""
    return TypeError(f"{name}: expected {expected}, found {given!r}")


# By the annotation of an option, without "| None"; any other type has to name its check.
CHECKS: dict[str, Check] = {"str": text, "bool": flag, "int": whole, "float": number, "Path": path, "StrPath": path}


def _recipe(name: str, value: Any) -> Any:
    """Take the name of a recipe, a path or a Recipe."""
    if isinstance(value, str | os.PathLike):
        return location(name, value)
    if not hasattr(value, "overrides"):  # the class is defined in terms of the options here
        raise wrong(name, "the name of a recipe, a path or a Recipe", value)
    return value


def _tokens(name: str, value: Any) -> int:
    """Take a number of tokens, or a text such as "32k"."""
    text = value if isinstance(value, str) else str(whole(name, value))
    digits = text.lower().removesuffix("k")
    if not digits.isascii() or not digits.isdigit() or not 0 < (count := int(digits[:19])) < 10**12:
        raise OptionError(f"`{name}`: expected a number of tokens such as 8192 or 32k, found {text[:40]!r}")
    return count * 1024 if text.lower() != digits else count


def _bits(name: str, value: Any) -> float | str:
    """Take a number, or a text of one or of several with commas between them."""
    if not isinstance(value, str):
        return number(name, value)
    numbers = value.replace(" ", "").split(",")
    if not all(digits.isascii() and digits.isdigit() and len(digits) < 4 for digits in numbers):
        raise OptionError(f"`{name}`: expected a whole number such as 4, or several such as 4,8, found {value[:40]!r}")
    return ",".join(numbers)


@options
class Options:
    """What is asked of a source and of what is made of it; each command takes some of these.

    None and () leave a choice to the recipe, the target or the source.
    """

    # How the Hub is reached, and a source opened.
    revision: str | None = None
    token: str | None = option(repr=False, default=None)
    tell: Tell | None = option(anything, repr=False, default=None)  # called with a line about every wait
    adapter: str | Sequence[str] = option(patterns, default=())
    leave_out: str | Sequence[str] = option(patterns, default=())
    allow_pickle: bool = False
    include_files: str | Sequence[str] = option(patterns, default=())
    low_disk: bool = False
    # The recipe, and what changes it.
    recipe: Any = option(_recipe, default=None)  # a name, a path or a Recipe
    codec: str | None = None
    bits: Any = option(_bits, default=None)  # a number, or for exports a text of several
    effort: int | None = None
    keep: str | Sequence[str] = option(patterns, default=())
    set_format: Any = option(formats_by_pattern, default=None)  # from FormatsByPattern to pairs of texts
    target_size: int | str | None = option(size, default=None)
    target_bpw: float | None = None
    max_kl: float | None = None
    # On which tokens a model is calibrated.
    calibrate: StrPath | None = option(location, default=None)
    calibration_tokens: int = option(
        default=DEFAULT_SAMPLE_TOKENS, least=FEWEST_SAMPLE_TOKENS, needs=(("calibrate", "awq"), "for the sample")
    )
    save_sample: StrPath | None = option(location, default=None, needs=(("calibrate", "awq"), "for the sample"))
    eval: StrPath | None = option(location, default=None, needs=(("calibrate",), "with which results are measured"))
    # Of masters.
    strict: bool = False
    awq: StrPath | None = option(
        location, default=None, excludes=(("calibrate",), "the calibration scales channels itself")
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
    # Of exports.
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
    name: str | None = None
    imatrix: StrPath | None = option(
        location, default=None, excludes=(("calibrate",), "which measures importances itself")
    )
    save_imatrix: StrPath | None = option(location, default=None, needs=(("calibrate",), "which measures them"))
    sensitivity: Any = option(anything, default=None)  # a Sensitivity, measured for `calibrate` and a size
    max_shard_size: Any = option(size, default=None)  # a number of bytes, or None
    # What exports are to fit into.
    memory: int | str | None = option(size, default=None)
    context: int | str | None = option(_tokens, needs=(("memory",), "into which it has to fit"), default=None)
    runtime: str | None = option(choices=RUNTIMES, needs=(("memory",), "which it shares out"), default=None)
    # How a result is made. None of it changes a byte of that.
    threads: int | None = option(least=1, most=MOST_THREADS, default=None)
    overwrite: bool = False
    progress: Progress = option(anything, repr=False, default=no_progress)
    engine: Any = option(anything, default=None)  # the RayEngine that makes shards; None for this process
    check: Callable[[], None] = option(
        anything, repr=False, default=lambda: None
    )  # whether what was learned still holds

    @property
    def thread_count(self) -> int:
        """How many threads compute: as many as are asked for, by default one for each core."""
        return self.threads or usable_cores()


# How a source is opened, whatever is made of it; how that is made; and what every export takes.
OPENING = ("revision", "token", "tell", "adapter", "leave_out", "allow_pickle", "include_files", "low_disk")
MAKING = ("threads", "overwrite", "progress", "engine", "check")
OF_ALL_TARGETS = {*OPENING, *MAKING, "max_shard_size"}


def path_of(given: StrPath | None) -> Path | None:
    """Return a local path, or None."""
    return None if given is None else Path(given)


def _temperature(name: str, value: Any) -> float:
    """Take a temperature by which logits can be divided, or 0."""
    if not (number(name, value) == 0 or 1e-6 <= value <= 1e6):
        raise OptionError(f"`{name}`: expected 0 (the likeliest token) to 1e6, found {value:g}")
    return float(value)


@options
class GenerationOptions:
    """How text is generated: see `generate` in api.py."""

    no_chat: bool = False
    max_tokens: int = option(default=DEFAULT_MAX_TOKENS, least=1)
    temperature: float | None = option(_temperature, default=None)
    seed: int | None = option(least=0, most=2**64 - 1, default=None)  # what torch takes
    packed: bool | None = None
    kv_cache: str | None = None
    device: str = option(default="cpu", choices=DEVICES)
    dtype: str = option(default="auto", choices=MODEL_DTYPES)
    threads: int | None = option(least=1, most=MOST_THREADS, default=None)


@options
class EvaluationOptions:
    """What is measured, how a text is cut into windows that are scored, and how models are computed.

    window, stride: in tokens; by default 2048, or the model's limit if smaller, and a quarter of that, at most 512
    score_first: score all tokens of the first window, not only its last ones
    max_tokens: how many tokens of the text are read at most; None for all
    reference: a model to compare with, token by token, or the .pqref file that was saved of one
    save_reference: the .pqref file to write of the reference, or of the only model without one
    kv_caches: how keys and values are quantized, for each measurement
    text_name: the name of the text in the report
    """

    tokenizer: StrPath | None = None
    no_bos: bool = False
    window: int | None = option(least=2, default=None)
    stride: int | None = option(least=1, default=None)
    score_first: bool = False
    max_tokens: int | None = option(least=2, default=None)
    reference: StrPath | None = option(location, default=None)
    save_reference: StrPath | None = option(location, default=None)
    dtype: str = option(default="float32", choices=MODEL_DTYPES)
    device: str = option(default="cpu", choices=DEVICES)
    packed: bool = False
    kv_caches: str | Sequence[str] = option(patterns, default=())
    threads: int | None = option(least=1, most=MOST_THREADS, default=None)
    text_name: str = "the text"
