"""What mlx-lm does not take of a model, in words, from the error that its own code ended with."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import textwrap
import traceback
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pqweights.errors import ExportError

# What mlx-lm's own code raises for configurations and weights that it does not support.
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# The longest message of mlx-lm that is quoted whole.
MOST_QUOTED = 240

_UNKNOWN = re.compile(r"Model type (\S+) not supported\.?")
_LACKING = re.compile(r"\w+\.__init__\(\) missing \d+ required (?:positional|keyword-only) arguments?: (.*)")
_LEFT_OVER = re.compile(r"Received (\d+) parameters? not in model: (.*)", re.DOTALL)
_MISSING = re.compile(r"Missing (\d+) parameters?: (.*)", re.DOTALL)


@contextlib.contextmanager
def refused(what: str, advice: str) -> Iterator[None]:
    """Turn an error of mlx-lm into an ExportError that begins with `what`, and ends with `advice`.

    What mlx-lm prints is dropped.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except SystemExit as error:  # mlx-lm's OLMo, without a package of its own
        raise ExportError(f"{what}: a package that it needs is not installed; {advice}") from error
    except REFUSALS as error:
        raise ExportError(f"{what}: {in_words(error)}; {advice}") from error


def in_words(error: BaseException) -> str:
    """Return what mlx-lm does not take."""
    said = textwrap.shorten(str(error).rstrip(". "), MOST_QUOTED, placeholder=" ...")
    frames = list(traceback.walk_tb(error.__traceback__))
    wrong = [line for frame, _ in frames for value in frame.f_locals.values() for line in _wrong_settings(value)]
    if match := _UNKNOWN.fullmatch(str(error)):
        return f"it has no model of type {match[1]!r}"
    if match := _LACKING.fullmatch(str(error)):
        return f"it needs settings that config.json does not have: {match[1]}"
    if match := _LEFT_OVER.fullmatch(said):
        return f"its model has no place for {match[1]} tensors: {match[2]}"
    if match := _MISSING.fullmatch(said):
        return f"its model needs {match[1]} tensors that the checkpoint does not have: {match[2]}"
    if _is_own_words(error, frames):
        return said
    if wrong:
        return f"it does not take these settings of config.json: {'; '.join(dict.fromkeys(wrong))}"
    if isinstance(error, KeyError):
        return f"its code ({_place(frames)}) looks for a setting or a tensor that is not there: {said}"
    return f"its code ({_place(frames)}) cannot compute with this configuration or these tensors: {said}"


def _is_own_words(error: BaseException, frames: list[tuple[types.FrameType, int]]) -> bool:
    """Whether mlx-lm raised an error to say something, and Python did not because of a mistake."""
    return type(error) in (ValueError, NotImplementedError) and bool(frames) and _is_of_mlx_lm(frames[-1][0])


def _is_of_mlx_lm(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("mlx_lm.")


def _place(frames: list[tuple[types.FrameType, int]]) -> str:
    """Return the last line of mlx-lm's own code that was reached."""
    own = [(frame, line) for frame, line in frames if _is_of_mlx_lm(frame)]
    if not own:
        return "in mlx"
    frame, line = own[-1]
    return f"{Path(frame.f_code.co_filename).name}, line {line}"


def _wrong_settings(value: object) -> list[str]:
    """Return the settings of one of mlx-lm's classes for configurations whose values are of another type."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type) or not _is_configuration(value):
        return []
    try:
        hints = typing.get_type_hints(type(value))
    except (NameError, TypeError):
        return []
    settings = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return [
        f"{name}: expected {_named(hints[name])}, found {_shown(setting)}"
        for name, setting in settings.items()
        if not _fits(setting, hints[name])
    ]


def _is_configuration(value: object) -> bool:
    return type(value).__module__.startswith("mlx_lm.models.")


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of the type that a hint names, as far as it is one that JSON has."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    kind = origin or hint
    if kind is float:
        return isinstance(value, int | float)
    if kind in (int, str, bool, list, dict):
        return isinstance(value, kind)
    return value is None if kind is type(None) else True


def _named(hint: Any) -> str:
    """Return the type of a hint in words."""
    return str(getattr(hint, "__name__", hint) if typing.get_origin(hint) is None else hint).replace("typing.", "")


def _shown(value: object) -> str:
    return "null" if value is None else textwrap.shorten(repr(value), 60, placeholder=" ...")
