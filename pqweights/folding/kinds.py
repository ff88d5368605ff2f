"""The kinds of folds."""

from __future__ import annotations

from collections.abc import Collection

from pqweights.checkpoint.source import Checkpoint
from pqweights.errors import OptionError
from pqweights.folding.fold import EQUALIZE, ROTATE, Fold
from pqweights.folding.rotation import Rotation
from pqweights.planning.moments_file import Moments
from pqweights.suggestions import instead

FOLDS: dict[str, type[Fold]] = {EQUALIZE: Fold, ROTATE: Rotation}


def checked_fold(kind: str) -> str:
    """Return the name of a fold.

    Raises OptionError for an unknown one.
    """
    if kind not in FOLDS:
        raise OptionError(f"--fold {kind}: {instead(kind, list(FOLDS))}")
    return kind


def make_fold(kind: str, original: Checkpoint, *, plain: Collection[str], moments: Moments | None = None) -> Fold:
    """Return the fold of a checkpoint, see Fold.

    Raises OptionError for an unknown kind, or for moments that it has no use for; SourceError if norms are missing.
    """
    if checked_fold(kind) == ROTATE and moments is not None:
        raise OptionError(
            f"--calibration: moments of the unrotated model do not fit one that --fold {ROTATE} rotates; quantize with "
            f"--fold {ROTATE}, and calibrate that master"
        )
    return FOLDS[kind](kind, original, plain=plain, moments=moments)
