"""What calibration and sensitivity have in common: checkpoint, plan, windows of a text, and the model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.checkpoint.writer import disk_errors
from pqweights.common.threads import slow_step
from pqweights.common.units import counted
from pqweights.errors import EvaluationError, RecipeError, SourceError
from pqweights.inference.runtimes.folders import Folder
from pqweights.inference.runtimes.models import check_loaded
from pqweights.inference.runtimes.packages import Refused, quiet
from pqweights.inference.runtimes.texts import Ids, check_vocabulary, encode, with_bos
from pqweights.planning.plan import QUANTIZE, TensorPlan
from pqweights.planning.recipe import Recipe
from pqweights.rewrite.quantizing import Quantize

if TYPE_CHECKING:
    from pqweights.quality.activations import WeightLocation


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
            f"`window`: expected at most the {folder.context} tokens that the model takes, found {size}"
        )
    return size


def temporary_file(beside: Path) -> IO[bytes]:
    """Open a file without a name, beside another one; it is gone when it is closed, or when its process is killed."""
    with disk_errors(beside):
        return tempfile.TemporaryFile(dir=beside.absolute().parent)


class TextWindows(NamedTuple):
    """The windows of a text.

    ids: the tokens of each, [tokens]
    bos: whether each begins with the token BOS
    """

    ids: list[Ids]
    bos: bool

    @property
    def about(self) -> dict[str, bool]:
        """What a file says of BOS: nothing without, as the files of earlier versions."""
        return {"bos": True} if self.bos else {}


def text_windows(
    folder: Folder, text: str, *, size: int, fewest: int = 1, tokenizer: Path | None, max_tokens: int, bos: bool
) -> TextWindows:
    """Cut the first tokens of a text into windows of one size; a rest that fills no window is left out.

    folder: the model's folder.
    size: tokens of a window.
    fewest: how many windows are needed.
    tokenizer: the folder of the tokenizer; None for the model's own.
    max_tokens: how many tokens to read at most.
    bos: whether windows begin with the token BOS if the tokenizer puts one before a text, in place of their first.

    Raises EvaluationError if there are fewer windows, or if the model does not know one of the tokens.
    """
    encoded = encode(tokenizer or folder.path, text, max_tokens, bos=bos)
    ids = encoded.ids
    if len(ids) < fewest * size:
        remedy = "raise `max_tokens`" if len(ids) == max_tokens else "give a longer text"
        raise EvaluationError(
            f"the text: expected at least {fewest * size} tokens, {counted(fewest, 'window')} of {size}, found "
            f"{len(ids)}; {remedy}, or pass a smaller `window`"
        )
    check_vocabulary(folder, *encoded)
    pieces = (ids[at : at + size] for at in range(0, len(ids) - size + 1, size))
    return TextWindows([with_bos(piece, encoded.bos) for piece in pieces], encoded.bos is not None)


def load_model(source: Path, *, dtype: str, device_map: str | None) -> Any:
    """Load the model of a checkpoint. dtype, device_map: as in CalibrationOptions

    Raises SourceError if it lacks weights: its activations would be those of random ones.
    """
    from pqweights.inference.loading.transformers import load

    with slow_step(f"loading {source}"), Refused(f"{source}: transformers cannot run this model"), quiet():
        loaded = load(source, dtype=dtype, device_map=device_map, experts_implementation="eager")
    name = type(loaded.model).__name__
    check_loaded(source, name, missing=loaded.missing, unexpected=loaded.unexpected)
    return loaded.model


def locate_weights(source: Path, model: Any, names: Sequence[str]) -> dict[str, WeightLocation]:
    """Return where tensors of a checkpoint are in the model that was loaded from it."""
    from pqweights.quality.activations import locate

    with Refused(f"{source}: transformers cannot run this model"), quiet():
        return locate(model, names)
