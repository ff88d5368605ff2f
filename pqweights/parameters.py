"""Parameters of functions and commands, each defined once: a field of a dataclass (options.py) with a `Parameter`.

From such fields come the keywords of a function of the API (`takes`), the flags of its command (cli/flags.py), the
checks of both, their help and docs/commands.md. Texts and messages name parameters between backquotes, such as
`max_shard_size`; the command line prints their flags in that place.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pqweights.common.units import parse_size
from pqweights.errors import OptionError, RecipeError

P = ParamSpec("P")
Asked = TypeVar("Asked")
Result = TypeVar("Result")

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What a parameter is for, and which values it takes.

    help: for the docstring and for --help
    kind: checks the type of a value and converts it; a function of this module
    flags: how the command line spells it, if not as --its-name; () for what Python alone takes
    argument: whether it stands on the command line without a flag
    metavar: what help calls its value
    default: what help says of the default, if not its value
    choices: the values that there are
    least, most: bounds of a number
    needs: other parameters, one of which must be given as well, and why
    excludes: another parameter that must not be given as well, and why
    """

    help: str
    kind: Callable[[str, Any], Any]
    flags: tuple[str, ...] | None = None
    argument: bool = False
    metavar: str | None = None
    default: str | None = None
    choices: tuple[str, ...] = ()
    least: float = -math.inf
    most: float = math.inf
    needs: tuple[tuple[str, ...], str] | None = None
    excludes: tuple[str, str] | None = None

    def checked(self, name: str, value: Any) -> Any:
        """Return a value in the type that the library takes.

        Raises TypeError for one of another type, OptionError for one that is out of range.
        """
        if value is None:
            return None
        value = self.kind(name, value)
        if self.choices and value not in self.choices:
            raise OptionError(f"`{name}`: expected {' or '.join(self.choices)}, found {value!r}")
        if isinstance(value, int | float) and (value < self.least or value > self.most):
            least = f"{self.least:g}" if self.most < math.inf else f"at least {self.least:g}"
            most = f" to {self.most:g}" if self.most < math.inf else ""
            raise OptionError(f"`{name}`: expected {least}{most}, found {value:g}")
        return value


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of dataclasses with parameters, which are checked when one is made."""

    def __post_init__(self) -> None:
        known = parameters(type(self))
        for name, parameter in known.items():
            object.__setattr__(self, name, parameter.checked(name, getattr(self, name)))
        given = self.given
        for name in (name for name in known if name in given):
            needs, excludes = known[name].needs, known[name].excludes
            if needs is not None and not given & {*needs[0]}:
                wanted = " or ".join(f"`{other}`" for other in needs[0])
                raise OptionError(f"`{name}`: expected {wanted} as well, {needs[1]}")
            if excludes is not None and excludes[0] in given:
                raise OptionError(f"`{name}`: {excludes[1]}; leave out `{name}` or `{excludes[0]}`")

    @property
    def given(self) -> set[str]:
        """The names of the parameters that have another value than their default."""
        return {field.name for field in fields(self) if getattr(self, field.name) != field.default}


def parameters(options: Any) -> dict[str, Parameter]:
    """Return the parameters of a dataclass of options in the order of its fields."""
    annotations: dict[str, Any] = {}
    for base in reversed(options.__mro__):
        annotations |= inspect.get_annotations(base)
    return {field.name: annotations[field.name].__metadata__[0] for field in fields(options)}


def takes(options: Callable[P, Asked]) -> Callable[[Callable[[Asked], Result]], Callable[P, Result]]:
    """Decorate a function of options so that it takes their parameters instead, and documents them."""

    def decorate(function: Callable[[Asked], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> Result:
            return function(options(*args, **keywords))

        made = inspect.signature(options)
        plain = [p.replace(annotation=_without_metadata(p.annotation)) for p in made.parameters.values()]
        returned = inspect.signature(function).return_annotation
        call.__signature__ = made.replace(parameters=plain, return_annotation=returned)  # type: ignore[attr-defined]
        call.__doc__ = _documented(inspect.getdoc(function) or "", options)
        return call

    return decorate


def _without_metadata(annotation: Any) -> Any:
    return getattr(annotation, "__origin__", annotation)


def _documented(text: str, options: Any) -> str:
    """Return a docstring with the parameters after its first paragraph."""
    first, _, rest = text.partition("\n\n")
    lines = []
    for name in inspect.signature(options).parameters:
        parameter = parameters(options)[name]
        default = f" (default: {parameter.default})" if parameter.default else ""
        lines.append(textwrap.fill(f"{name}: {parameter.help}{default}", 116, subsequent_indent="    "))
    return "\n\n".join(part for part in (first, "\n".join(lines), rest) if part)


# Kinds of values: each returns a value in the type that the library takes, or raises a TypeError that names it.


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
    """A text, which may name a repository on the Hub or an address, or a local path."""
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


def bits_by_pattern(name: str, value: Any) -> tuple[tuple[str, float], ...]:
    """Bit widths by name pattern."""
    pairs = _pairs(name, value, "bit widths by pattern, such as {'*.down_proj.weight': 6}")
    return tuple((patterns(name, [pattern])[0], number(name, bits)) for pattern, bits in pairs)


def types_by_pattern(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Types by name pattern."""
    expected = "types by pattern, such as {'*.attn_v.weight': 'q6_k'}"
    pairs = _pairs(name, value, expected)
    if not all(isinstance(kind, str) for _, kind in pairs):
        raise wrong(name, expected, value)
    return tuple((patterns(name, [pattern])[0], kind) for pattern, kind in pairs)


def anything(name: str, value: Any) -> Any:
    """A value that nothing is asked of here, such as a function."""
    return value


def _pairs(name: str, value: Any, expected: str) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if not isinstance(value, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        raise wrong(name, expected, value)
    return list(value)


def wrong(name: str, expected: str, given: object) -> TypeError:
    """Return the error of a value of a wrong type."""
    return TypeError(f"{name}: expected {expected}, found {given!r}")
