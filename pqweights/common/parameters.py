"""Classes of options, whose values are checked when one is made: types, bounds, and what goes with what.

Messages name options between backquotes, such as `max_shard_size`; the command line prints their flags in that place.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar, dataclass_transform

from pqweights.common.units import parse_size
from pqweights.errors import OptionError, RecipeError

Made = TypeVar("Made")

Tell = Callable[[str], None]  # called with a line for the user: what is being waited for

StrPath = str | os.PathLike[str]
# Checks the type of a value, and returns it in the type that the library takes; the first argument is its name.
Check = Callable[[str, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """Which values an option takes.

    check: checks the type of a value and converts it; by default that of the annotation in CHECKS
    choices: the values that there are
    least, most: bounds of a number
    needs: other options, one of which must be given as well, and why
    excludes: other options that must not be given as well, and why
    """

    check: Check
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


def option(check: Check | None = None, *, default: Any, repr: bool = True, **limits: Any) -> Any:
    """Return a field of a class of options whose values are limited. limits: further fields of its Parameter"""
    limits |= {} if check is None else {"check": check}
    return dataclasses.field(default=default, repr=repr, metadata=limits)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option,))
def options(made: type[Made]) -> type[Made]:
    """Decorate a class of options, which are checked when one is made."""
    return dataclass(frozen=True, kw_only=True)(made)


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
                wanted = " or ".join(f"`{other}`" for other in needs[0] if other in known)
                raise OptionError(f"`{name}`: expected {wanted} as well, {needs[1]}")
            others, why = excludes or ((), "")
            for other in filter(given.__contains__, others):  # in this order: that of sets differs by process
                raise OptionError(f"`{name}`: {why}; leave out `{name}` or `{other}`")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options whose names are among those of arguments, such as the `locals()` of a function."""
        return cls(**{name: arguments[name] for name in parameters(cls) if name in arguments})

    @property
    def given(self) -> set[str]:
        """The names of the options that have another value than their default."""
        known = parameters(type(self))
        defaults = {field.name: known[field.name].checked(field.name, field.default) for field in fields(self)}
        return {name for name, default in defaults.items() if getattr(self, name) != default}


@options
class HubOptions(Options):
    """How the Hub is used.

    revision: a branch, tag or commit; by default the branch main
    token: by default the one that the user logged in with
    tell: called with a line about every wait
    """

    revision: str | None = None
    token: str | None = option(repr=False, default=None)
    tell: Tell | None = option(lambda name, value: value, repr=False, default=None)


def parameters(options: Any) -> dict[str, Parameter]:
    """Return which values each option of a class takes."""
    known = {}
    for field in fields(options):
        limits: dict[str, Any] = {"check": CHECKS.get(str(field.type).removesuffix(" | None")), **field.metadata}
        known[field.name] = Parameter(**limits)
    return known


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
