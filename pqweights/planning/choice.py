"""The recipe that somebody asks for: one by name or file, changed by options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pqweights.codecs import checked_rate, get_codec
from pqweights.errors import OptionError, RecipeError
from pqweights.planning.recipe import Recipe, Rule, load_recipe
from pqweights.planning.target import SizeTarget, make_target


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """What to change in a recipe. None and empty values change nothing.

    codec: another default codec, at the rate nearest to the recipe's unless `bits` gives one
    bits: another default bit width
    effort: how much work codecs that have a choice put into encoding
    keep: patterns; the tensors that match one of them are kept
    set_bits: bit widths by pattern, in the order in which they are tried; patterns in `keep` come before them
    target_size: the largest size of the safetensors files, in bytes or as a text such as "9GB"
    target_bpw: the largest mean of bits per weight
    bpw_of: what that is a mean over: "quantized", the weights that the recipe quantizes, or "checkpoint", all
        parameters with all bytes of the safetensors files
    sensitivity: how bit widths are chosen for a target: "heuristic", or a file that `pqweights sensitivity` wrote
    """

    codec: str | None = None
    bits: float | None = None
    effort: int | None = None
    keep: tuple[str, ...] = ()
    set_bits: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    target_size: int | str | None = None
    target_bpw: float | None = None
    bpw_of: str | None = None
    sensitivity: str | None = None


def choose_recipe(recipe: str | Path | Recipe, options: RecipeOptions = RecipeOptions()) -> Recipe:
    """Load a recipe and change it as the options say.

    recipe: the name of a built-in recipe, a YAML file, or a recipe

    Raises OptionError for options that contradict each other or have impossible values and for an unknown name, and
    RecipeError for what is wrong in a file.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    target = _target(recipe, options)
    if options.bits is not None and (options.target_size is not None or options.target_bpw is not None):
        raise OptionError("expected either --bits or a target, which chooses the bit widths; found both")
    if options.effort is not None:
        recipe = replace(recipe, effort=None)  # nobody asks whether another codec has it
    if options.codec is not None:
        recipe = recipe.with_codec(_known_codec(options.codec))
    if options.effort is not None:
        recipe = recipe.with_effort(options.effort)
    if options.bits is not None:
        recipe = recipe.with_bits(options.bits)
    recipe = recipe.with_target(target, options.sensitivity)
    added = (*map(_keeping, options.keep), *_setting_bits(recipe.codec, options.set_bits))
    return replace(recipe, overrides=(*added, *recipe.overrides))


def _target(recipe: Recipe, options: RecipeOptions) -> SizeTarget | None:
    """Return the target that the options give; None if they leave that of the recipe."""
    bits, bpw_of, old = options.target_bpw, options.bpw_of, recipe.target
    if options.target_size is None and old is not None and old.bits_per_weight is not None:
        # One of the two given alone changes that one.
        if bits is None and bpw_of is not None:
            bits = old.bits_per_weight
        elif bits is not None and bpw_of is None:
            bpw_of = old.bpw_of
    try:
        return make_target(options.target_size, bits, bpw_of=bpw_of)
    except RecipeError as error:
        raise OptionError(str(error)) from None


def _known_codec(name: str) -> str:
    try:
        return get_codec(name).name
    except RecipeError as error:
        raise OptionError(f"--{error}") from None


def _keeping(pattern: str) -> Rule:
    return Rule(names=(pattern,), keep=True, reason=f"--keep {pattern}")


def _setting_bits(codec: str, widths: Mapping[str, float] | tuple[tuple[str, float], ...]) -> list[Rule]:
    """Return a rule for each pattern, which is tried in this order.

    Raises OptionError for a bit width that the codec does not have.
    """
    rules = []
    for pattern, asked in widths.items() if isinstance(widths, Mapping) else widths:
        option = f"--set {pattern}={asked:g}"
        try:
            bits = checked_rate(codec, asked)
        except RecipeError as error:
            raise OptionError(f"{option}: {error}") from None
        rules.append(Rule(names=(pattern,), bits=bits, reason=option))
    return rules
