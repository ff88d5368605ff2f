"""What calibration and sensitivity read and check before they load a model: checkpoint, plan, windows of a text."""

from __future__ import annotations

from pathlib import Path

from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.errors import EvaluationError, RecipeError, SourceError
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.planning.recipe import Recipe
from pqweights.quantizing import Quantize
from pqweights.runtimes.folders import Folder
from pqweights.runtimes.texts import Ids, check_vocabulary, tokenize
from pqweights.units import counted


def plan_original(source: Path, recipe: Recipe) -> tuple[Checkpoint, list[TensorPlan]]:
    """Open an original checkpoint and return it with the tensors that a recipe quantizes.

    Raises SourceError for a master, RecipeError if the recipe quantizes nothing.
    """
    checkpoint = open_local(source)
    if checkpoint.is_master:
        raise SourceError(
            f"{source}: expected an original checkpoint, found a master; give the checkpoint that it was made from"
        )
    planned = [tensor for tensor in Quantize(recipe=recipe).plan(checkpoint) if tensor.action == QUANTIZE]
    if not planned:
        raise RecipeError(
            f"recipe {recipe.name!r}: expected a recipe that quantizes something here, found one that keeps everything"
        )
    return checkpoint, planned


def window_size(folder: Folder, asked: int | None, default: int) -> int:
    """Return the window that was asked for, or the default one if the model can take it, or the model's limit.

    Raises EvaluationError if the model takes fewer tokens than were asked for.
    """
    size = asked or min(default, folder.context or default)
    if folder.context is not None and size > folder.context:
        raise EvaluationError(
            f"--window: expected at most the {folder.context} tokens that the model takes, found {size}"
        )
    return size


def text_windows(
    folder: Folder, text: str, *, size: int, fewest: int = 1, tokenizer: Path | None, max_tokens: int
) -> list[Ids]:
    """Cut the first tokens of a text into windows of one size; a rest that fills no window is left out.

    folder: the model's folder.
    size: tokens of a window.
    fewest: how many windows are needed.
    tokenizer: the folder of the tokenizer; None for the model's own.
    max_tokens: how many tokens to read at most.

    Raises EvaluationError if there are fewer windows, or if the model does not know one of the tokens.
    """
    ids = tokenize(tokenizer or folder.path, text, max_tokens)
    if len(ids) < fewest * size:
        remedy = "raise --max-tokens" if len(ids) == max_tokens else "give a longer text"
        raise EvaluationError(
            f"the text: expected at least {fewest * size} tokens, {counted(fewest, 'window')} of {size}, found "
            f"{len(ids)}; {remedy}, or pass a smaller --window"
        )
    check_vocabulary(folder, ids)
    return [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
