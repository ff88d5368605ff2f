"""The recipe that somebody asks for: one by name or file, changed by options."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from pqweights.common.options import Options, number
from pqweights.errors import OptionError, RecipeError
from pqweights.formats import checked_rate, get_codec, nearest_rate
from pqweights.planning.recipe import (
    KINDS,
    MASTER,
    NOTHING,
    Recipe,
    Rule,
    checked,
    checked_condition,
    load_recipe,
    make_goal,
    with_known_codecs,
)

DEFAULT_RECIPE = "q5"


def choose_recipe(
    recipe: str | PathLike[str] | Recipe | None, options: Options = Options(), target: str = MASTER
) -> Recipe:
    """Load a recipe and change it as the options say.

    recipe: the name of a built-in recipe, a YAML file, or a recipe; None for that of DEFAULT_RECIPE, or in an export
        for none
    target: that of the result

    Raises OptionError for options that contradict each other or have impossible values and for an unknown name, and
    RecipeError for what is wrong in a file.
    """
    if recipe is None:
        recipe = DEFAULT_RECIPE if target == MASTER else NOTHING
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe if isinstance(recipe, str) else Path(recipe))
    if recipe.target not in (None, target):
        raise RecipeError(f"recipe {recipe.name!r}: is for the target {recipe.target}, not for {target}")
    given = partial(make_goal, options.target_size, options.target_bpw, options.max_kl)
    goal = checked("", given, OptionError) or recipe.goal
    if options.eval is not None and (goal is None or goal.divergence is None):
        raise OptionError("`eval`: expected `max_kl` as well, for which the divergence is measured")
    if options.bits is not None and goal is not None:
        raise OptionError("expected either `bits` or a target, which chooses the bit widths; leave `bits` out")
    if target == MASTER:
        if recipe.format is not None or any(rule.format is not None for rule in recipe.rules):
            raise RecipeError(f"recipe {recipe.name!r}: a master has codecs and bits, found formats of exports")
        recipe = _with_defaults(recipe, options)
    return replace(recipe, goal=goal, overrides=(*_overrides(recipe, options, target), *recipe.overrides))


def _with_defaults(recipe: Recipe, options: Options) -> Recipe:
    """Return the recipe of a master with the codec, the effort and the bits that options give."""
    if options.effort is not None:
        recipe = replace(recipe, effort=None)  # nobody asks whether another codec has it
    if (codec := options.codec) is not None:
        checked("", partial(get_codec, codec, "`codec`"), OptionError)
        changed = replace(recipe, codec=codec, bits=nearest_rate(codec, recipe.bits))
        recipe = checked(f"`codec`: recipe {recipe.name!r}", partial(with_known_codecs, changed), OptionError)
    if options.effort is not None:
        recipe = checked("`effort`", partial(with_known_codecs, replace(recipe, effort=options.effort)), OptionError)
    if options.bits is not None:
        number("bits", options.bits)
        recipe = checked("`bits`", partial(with_known_codecs, replace(recipe, bits=options.bits)), OptionError)
    return recipe


def _overrides(recipe: Recipe, options: Options, target: str) -> Iterator[Rule]:
    """Yield the rules that options give, in the order in which they are tried.

    Their reasons are parts of manifests, which say what was asked of the command.

    Raises OptionError for a role, or in a master for a bit width, that there is not.
    """
    for pattern in options.keep:
        yield Rule(keep=True, reason=f"--keep {pattern}", **_condition(f"`keep` {pattern}", pattern))
    for pattern, stated in options.set_format or ():
        where = f"`set_format` {pattern}={stated}"
        condition: dict[str, Any] = {"reason": f"--set {pattern}={stated}", **_condition(where, pattern)}
        if target == MASTER:
            yield Rule(bits=checked(where, partial(_rate, recipe.codec, stated), OptionError), **condition)
        else:
            yield Rule(format=str(stated), **condition)


def _rate(codec: str, stated: object) -> float:
    """Return a bit width that may be a text."""
    try:
        bits = float(str(stated))
    except ValueError:
        bits = math.nan
    if not math.isfinite(bits):
        raise RecipeError(f"expected PATTERN=BITS, such as *.down_proj.weight=6, found {stated!r}")
    return checked_rate(codec, int(bits) if bits == int(bits) else bits)


def _condition(where: str, pattern: str) -> dict[str, Any]:
    """Return the condition that a pattern of the command line stands for: of names, of a role, or of layers."""
    kind, colon, value = pattern.partition(":")
    condition = {kind: (value,)} if colon and kind in KINDS else {"name": (pattern,)}
    return checked(where, partial(checked_condition, condition), OptionError)
