"""What measures a model for a recipe begins with: the original, and the weights that the recipe quantizes."""

from __future__ import annotations

from pathlib import Path

from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.errors import RecipeError, SourceError
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.planning.recipe import Recipe
from pqweights.rewrite.quantizing import rate_planner


def plan_original(source: Path, recipe: Recipe) -> tuple[Checkpoint, list[TensorPlan]]:
    """Open an original checkpoint and return it with the tensors that a recipe quantizes.

    Raises SourceError for a master, RecipeError if the recipe quantizes nothing.
    """
    checkpoint = open_local(source)
    if checkpoint.is_master:
        raise SourceError(
            f"{source}: expected an original checkpoint, found a master; give the checkpoint that it was made from"
        )
    planned = [tensor for tensor in rate_planner(checkpoint, recipe).planned({}) if tensor.action == QUANTIZE]
    if not planned:
        raise RecipeError(
            f"recipe {recipe.name!r}: expected a recipe that quantizes something here, found one that keeps everything"
        )
    return checkpoint, planned
