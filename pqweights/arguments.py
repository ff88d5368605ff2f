"""Checks of the arguments of the Python API, which nothing has parsed: a wrong type is a TypeError that names it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pqweights.errors import OptionError, RecipeError
from pqweights.planning.choice import RecipeOptions, choose_recipe
from pqweights.planning.recipe import Recipe
from pqweights.rewrite.task import usable_cores
from pqweights.store import Store, open_store
from pqweights.units import parse_size

MOST_THREADS = 256


def local_or_hub(name: str, value: str | os.PathLike[str]) -> str | Path:
    """Return a text as it is, since it may name a repository on the Hub, and everything else as a local path."""
    return value if isinstance(value, str) else local(name, value)


def local(name: str, value: str | os.PathLike[str]) -> Path:
    """Return a local path."""
    if not isinstance(value, str | os.PathLike):
        raise _wrong(name, "a path", value)
    return Path(value)


def place(name: str, value: str | os.PathLike[str]) -> Store:
    """Return the place of a result: a local folder, or an address in object storage.

    Raises OptionError, see open_store.
    """
    return open_store(value if isinstance(value, str) else local(name, value))


def chosen_recipe(
    recipe: str | os.PathLike[str] | Recipe,
    *,
    codec: str | None,
    bits: float | None,
    effort: int | None,
    keep: str | Sequence[str],
    set_bits: Mapping[str, float] | None,
    target_size: int | str | None,
    target_bpw: float | None,
    bpw_of: str | None,
    sensitivity: str | os.PathLike[str] | None,
) -> Recipe:
    """Return the recipe that the arguments of plan and quantize describe.

    Raises OptionError or RecipeError, see choose_recipe.
    """
    if not isinstance(recipe, str | os.PathLike | Recipe):
        raise _wrong("recipe", "the name of a recipe, a path or a Recipe", recipe)
    asked = RecipeOptions(
        codec=codec,
        bits=number("bits", bits),
        effort=whole("effort", effort),
        keep=patterns("keep", keep),
        set_bits=bits_by_pattern(set_bits),
        target_size=size("target_size", target_size),
        target_bpw=number("target_bpw", target_bpw),
        bpw_of=bpw_of,
        sensitivity=None if sensitivity is None else str(local("sensitivity", sensitivity)),
    )
    return choose_recipe(recipe if isinstance(recipe, str | Recipe) else Path(recipe), asked)


def patterns(name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Return name patterns; a text is one pattern."""
    found = (value,) if isinstance(value, str) else tuple(value)
    for each in found:
        if not isinstance(each, str):
            raise _wrong(name, "a pattern, or a list of patterns", each)
    return found


def bits_by_pattern(value: Mapping[str, float] | None) -> dict[str, float]:
    """Return bit widths by name pattern."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong("set_bits", "bit widths by pattern, such as {'*.down_proj.weight': 6}", value)
    return {patterns("set_bits", [key])[0]: _number("set_bits", bits) for key, bits in value.items()}


def number(name: str, value: float | None) -> float | None:
    """Return a number, or None."""
    return None if value is None else _number(name, value)


def whole(name: str, value: int | None) -> int | None:
    """Return a whole number, or None."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise _wrong(name, "a whole number", value)


def size(name: str, value: int | str | None) -> int | str | None:
    """Return a size in bytes, or a text such as "9GB", or None."""
    if value is None or isinstance(value, str):
        return value
    if _number(name, value) != int(value):
        raise OptionError(f"{name}: expected a whole number of bytes, found {value}")
    return int(value)


def byte_size(name: str, value: int | str) -> int:
    """Return a size in bytes."""
    checked = size(name, value)
    assert checked is not None
    try:
        return parse_size(checked)
    except RecipeError as error:
        raise OptionError(f"{name}: {error}") from None


def types_by_pattern(value: Mapping[str, str] | None) -> tuple[tuple[str, str], ...] | None:
    """Return types of tensors by name pattern."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(kind, str) for kind in value.values()):
        raise _wrong("set_type", "types by pattern, such as {'*.attn_v.weight': 'q6_k'}", value)
    return tuple((patterns("set_type", [key])[0], kind) for key, kind in value.items())


def threads(value: int | None) -> int:
    """Return a number of threads; by default one for each core."""
    if value is None:
        return usable_cores()
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong("threads", "a number of threads", value)
    if not 1 <= value <= MOST_THREADS:
        raise OptionError(f"threads: expected 1 to {MOST_THREADS}, found {value}")
    return value


def _number(name: str, value: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(name, "a number", value)
    return value


def _wrong(name: str, expected: str, found: object) -> TypeError:
    return TypeError(f"{name}: expected {expected}, found {found!r}")
