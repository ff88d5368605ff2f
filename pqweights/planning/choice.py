"""The recipe that somebody asks for: one by name or file, changed by options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path

from pqweights.checkpoint.source import Checkpoint
from pqweights.errors import OptionError, RecipeError
from pqweights.formats import checked_rate, get_codec
from pqweights.models import text_model
from pqweights.planning.decisions import decide
from pqweights.planning.options import RecipeOptions
from pqweights.planning.recipe import Recipe, Rule, load_recipe, make_target

DEFAULT_RECIPE = "q5"


def with_weights(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the weights that an export may round: of a source, those that q5 quantizes."""
    if checkpoint.is_master:
        return checkpoint
    decisions = decide(load_recipe(DEFAULT_RECIPE), checkpoint.tensors, text_model(checkpoint.config))
    pairs = zip(checkpoint.tensors, decisions, strict=True)
    return replace(checkpoint, weights=frozenset(tensor.name for tensor, of in pairs if of.codec is not None))


def choose_recipe(recipe: str | PathLike[str] | Recipe | None, options: RecipeOptions = RecipeOptions()) -> Recipe:
    """Load a recipe and change it as the options say.

    recipe: the name of a built-in recipe, a YAML file, or a recipe; None for that of DEFAULT_RECIPE

    Raises OptionError for options that contradict each other or have impossible values and for an unknown name, and
    RecipeError for what is wrong in a file.
    """
    recipe = DEFAULT_RECIPE if recipe is None else recipe
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe if isinstance(recipe, str) else Path(recipe))
    try:
        target = make_target(options.target_size, options.target_bpw)
    except RecipeError as error:
        raise OptionError(str(error)) from None
    if options.bits is not None and (options.target_size is not None or options.target_bpw is not None):
        raise OptionError("expected either `bits` or a target, which chooses the bit widths; found both")
    if options.effort is not None:
        recipe = replace(recipe, effort=None)  # nobody asks whether another codec has it
    if options.codec is not None:
        recipe = recipe.with_codec(_known_codec(options.codec))
    if options.effort is not None:
        recipe = recipe.with_effort(options.effort)
    if options.bits is not None:
        recipe = recipe.with_bits(options.bits)
    recipe = replace(recipe, target=target or recipe.target)
    return replace(recipe, overrides=(*_overrides(recipe.codec, options), *recipe.overrides))


def _known_codec(name: str) -> str:
    try:
        return get_codec(name, "`codec`").name
    except RecipeError as error:
        raise OptionError(str(error)) from None


def _overrides(codec: str, options: RecipeOptions) -> Iterator[Rule]:
    """Yield the rules that options give, in the order in which they are tried.

    Their reasons are parts of manifests, which say what was asked of the command.

    Raises OptionError for a bit width that the codec does not have.
    """
    for pattern in options.keep:
        yield Rule(names=(pattern,), keep=True, reason=f"--keep {pattern}")
    for pattern, asked in options.set_bits or ():
        try:
            bits = checked_rate(codec, asked)
        except RecipeError as error:
            raise OptionError(f"`set_bits` {pattern}={asked:g}: {error}") from None
        yield Rule(names=(pattern,), bits=bits, reason=f"--set {pattern}={asked:g}")
