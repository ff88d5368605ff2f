"""Parameters of functions and commands, each defined once: a field of a class of options, made by `option`.

From such fields come the keywords of a function of the API (`takes`), the flags of its command (cli/options.py), the
checks of both, their help and docs/commands.md. Texts and messages name parameters between backquotes, such as
`max_shard_size`; the command line prints their flags in that place.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, dataclass_transform

from pqweights.common.units import parse_size
from pqweights.errors import OptionError, RecipeError

P = ParamSpec("P")
Asked = TypeVar("Asked")
Result = TypeVar("Result")

StrPath = str | os.PathLike[str]
# Checks the type of a value, and returns it in the type that the library takes; the first argument is its name.
Check = Callable[[str, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """What a parameter is for, and which values it takes.

    help: for the docstring and for --help
    check: checks the type of a value and converts it; by default that of the annotation in CHECKS
    flags: how the command line spells it, if not as --its-name; () for what Python alone takes
    argument: whether it stands on the command line without a flag
    metavar: what help calls its value
    default_text: what help says of the default, if not its value
    choices: the values that there are
    least, most: bounds of a number
    needs: other parameters, one of which must be given as well, and why
    excludes: other parameters that must not be given as well, and why
    """

    help: str
    check: Check
    flags: tuple[str, ...] | None = None
    argument: bool = False
    metavar: str | None = None
    default_text: str | None = None
    choices: tuple[str, ...] = ()
    least: float = -math.inf
    most: float = math.inf
    needs: tuple[tuple[str, ...], str] | None = None
    excludes: tuple[tuple[str, ...], str] | None = None

    def checked(self, name: str, value: Any) -> Any:
        """Return a value in the type that the library takes.

        Raises TypeError for one of another type, OptionError for one that is out of range.
        """
        if value is None:
            return None
        value = self.check(name, value)
        if self.choices and value not in self.choices:
            raise OptionError(f"`{name}`: expected {' or '.join(self.choices)}, found {value!r}")
        if isinstance(value, int | float) and (value < self.least or value > self.most):
            least = f"{self.least:g}" if self.most < math.inf else f"at least {self.least:g}"
            most = f" to {self.most:g}" if self.most < math.inf else ""
            raise OptionError(f"`{name}`: expected {least}{most}, found {value:g}")
        return value


def option(
    help: str,
    check: Check | None = None,
    *,
    default: Any = dataclasses.MISSING,
    kw_only: bool = True,
    init: bool = True,
    repr: bool = True,
    **facts: Any,
) -> Any:
    """Return a field of a class of options. facts: further fields of its Parameter"""
    facts |= {"help": help} | ({} if check is None else {"check": check})
    return dataclasses.field(default=default, kw_only=kw_only, init=init, repr=repr, metadata=facts)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option,))
def options(made: type[Asked]) -> type[Asked]:
    """Decorate a class of options, which are checked when one is made."""
    return dataclass(frozen=True, kw_only=True)(made)


Made = TypeVar("Made", bound="Options")


@options
class Options:
    """Base of classes of options."""

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
            others, why = excludes or ((), "")
            for other in filter(given.__contains__, others):  # in this order: that of sets differs by process
                raise OptionError(f"`{name}`: {why}; leave out `{name}` or `{other}`")

    @property
    def given(self) -> set[str]:
        """The names of the parameters that have another value than their default."""
        known = parameters(type(self))

        def differs(field: dataclasses.Field[Any]) -> bool:
            default, name = field.default, field.name
            return default is dataclasses.MISSING or getattr(self, name) != known[name].checked(name, default)

        return {field.name for field in fields(self) if differs(field)}

    def part(self, kind: type[Made]) -> Made:
        """Return those of the options that a smaller class of options has as well."""
        return kind(**{name: getattr(self, name) for name in parameters(kind) if hasattr(self, name)})


def parameters(options: Any) -> dict[str, Parameter]:
    """Return the parameters of a class of options in the order of its fields."""
    known = {}
    for field in fields(options):
        facts: dict[str, Any] = {"check": CHECKS.get(str(field.type).removesuffix(" | None")), **field.metadata}
        known[field.name] = Parameter(**facts)
    return known


def in_order(options: Any) -> list[str]:
    """Return the names of the parameters as help lists them: arguments, what a class adds, and then its bases."""
    bases = reversed([*enumerate(options.__mro__)])
    order = {name: place for place, base in bases for name in inspect.get_annotations(base)}
    known = parameters(options)
    return sorted(inspect.signature(options).parameters, key=lambda name: (not known[name].argument, order[name]))


def takes(options: Callable[P, Asked]) -> Callable[[Callable[[Asked], Result]], Callable[P, Result]]:
    """Decorate a function of options so that it takes their parameters instead, and documents them."""

    def decorate(function: Callable[[Asked], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> Result:
            return function(options(*args, **keywords))

        returned = inspect.signature(function).return_annotation
        call.__signature__ = inspect.signature(options).replace(return_annotation=returned)  # type: ignore[attr-defined]
        call.__doc__ = _documented(inspect.getdoc(function) or "", options)
        return call

    return decorate


def with_options(function: Callable[..., Result]) -> Callable[[Any], Result]:
    """Return the function that `takes` decorated, which takes the options themselves."""
    return function.__wrapped__  # type: ignore[attr-defined, no-any-return]


def _documented(text: str, options: Any) -> str:
    """Return a docstring with the parameters after its first paragraph."""
    first, _, rest = text.partition("\n\n")
    lines = []
    for name in in_order(options):
        parameter = parameters(options)[name]
        default = f" (default: {parameter.default_text})" if parameter.default_text else ""
        lines.append(textwrap.fill(f"{name}: {parameter.help}{default}", 116, subsequent_indent="    "))
    return "\n\n".join(part for part in (first, "\n".join(lines), rest) if part)


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
    pairs = _pairs(name, value, "PATTERN=BITS, such as *.down_proj.weight=6", _finite)
    return tuple((pattern, number(name, bits)) for pattern, bits in pairs)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def formats_by_pattern(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Formats by name pattern."""
    pairs = _pairs(name, value, "PATTERN=FORMAT, such as *.attn_v.weight=q6_k", str)
    return tuple((pattern, text(name, format_name)) for pattern, format_name in pairs)


def anything(name: str, value: Any) -> Any:
    """A value that nothing is asked of here, such as a function."""
    return value


def _pairs(name: str, value: Any, expected: str, parse: Callable[[str], Any]) -> list[tuple[str, Any]]:
    """Take a mapping, pairs, or texts with an equals sign.

    expected: what a text should be
    parse: returns the value of what stands behind the equals sign, or raises ValueError
    """
    pairs: list[tuple[str, Any]] = []
    for item in value.items() if isinstance(value, Mapping) else [value] if isinstance(value, str) else value:
        if isinstance(item, str):
            pattern, _, of_pattern = item.rpartition("=")
            try:
                parsed = parse(of_pattern) if pattern and of_pattern else None
            except ValueError:
                parsed = None
            if parsed is None:
                raise OptionError(f"`{name}`: expected {expected}, found {item!r}")
            pairs.append((pattern, parsed))
        elif isinstance(item, tuple) and len(item) == 2:
            pairs.append((text(name, item[0]), item[1]))
        else:
            raise wrong(name, f"a mapping, or texts such as {expected}", value)
    return pairs


def wrong(name: str, expected: str, given: object) -> TypeError:
    """Return the error of a value of a wrong type."""
    return TypeError(f"{name}: expected {expected}, found {given!r}")


# By the annotation of an option, without "| None"; any other type has to name its check.
CHECKS: dict[str, Check] = {"str": text, "bool": flag, "int": whole, "float": number, "Path": path, "StrPath": path}
