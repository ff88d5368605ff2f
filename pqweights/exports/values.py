"""The values that an export of integers rounds: those of the master or of the original, folded or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor, OriginalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import View
from pqweights.errors import OptionError
from pqweights.exports.integers import Outline, Rounding
from pqweights.exports.target import ExportSource
from pqweights.folding.fold import EQUALIZE, Fold
from pqweights.planning.moments_file import Moments
from pqweights.rewrite.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Values:
    """What is rounded.

    checkpoint: the master, with the values that are rounded
    master: the master, with its own values as far as they can be compared with those
    fold: the fold of the values, unless they are not folded here
    """

    checkpoint: Checkpoint
    master: Checkpoint
    fold: Fold | None


def values_of(
    source: ExportSource,
    original: Checkpoint | None,
    *,
    manifest: Manifest | None,
    outline: Outline,
    moments: Moments | None,
) -> Values:
    """Return the values that an export rounds.

    original: the checkpoint that the master was made from, if its values are rounded
    manifest: that of the master, if it has one
    outline: what the target makes of the master
    moments: second moments of the inputs of the values, if they are known

    Raises OptionError if a master is to be folded twice, SourceError if norms are missing.
    """
    master = source.checkpoint
    made_with = {} if manifest is None else manifest.fold
    if made_with and source.fold:
        raise OptionError(
            f"`fold` {EQUALIZE}: {source.folder} is folded already ({made_with.get('kind')}); leave out `fold`"
        )
    if made_with and original is not None:
        kept = [tensor.name for tensor in master.tensors if not isinstance(tensor, EncodedTensor)]
        used = made_with.get("calibration")
        if used is not None and (moments is None or moments.sha256 != used):
            raise OptionError(
                f"`source`: {source.folder} was folded with the moments of a file (sha256 {str(used)[:12]}); expected "
                "`calibration` with that file"
            )
        fold = Fold(original, plain=kept, moments=None if used is None else moments)
        return Values(checkpoint=_with_values(master, fold.folded), master=master, fold=fold)
    values = master if original is None else _with_values(master, original)
    if not source.fold:
        return Values(checkpoint=values, master=master, fold=None)
    fold = Fold(values, plain=_plain(values, outline), moments=moments)
    return Values(checkpoint=fold.folded, master=fold.over(master), fold=fold)


def _with_values(master: Checkpoint, original: Checkpoint) -> Checkpoint:
    """Return a master with another checkpoint's values for the weights that it holds as codes."""
    by_name = {tensor.name: tensor for tensor in original.tensors}
    tensors: tuple[LogicalTensor, ...] = tuple(
        OriginalTensor.of(tensor, by_name[tensor.name]) if isinstance(tensor, EncodedTensor) else tensor
        for tensor in master.tensors
    )
    return replace(master, tensors=tensors)


def _plain(values: Checkpoint, outline: Outline) -> list[str]:
    """Return the tensors of which an export stores at least a part plainly."""
    rounded: Mapping[str, bool] = {
        tensor.name: isinstance(outline.decisions.get(tensor.name), Rounding) for tensor in outline.tensors
    }
    plain = {tensor.name for tensor in values.tensors}
    for tensor in outline.tensors:
        if rounded[tensor.name]:
            plain -= {part.name for part in (tensor.sources if isinstance(tensor, View) else (tensor,))}
    for tensor in outline.tensors:
        if not rounded[tensor.name] and isinstance(tensor, View):
            plain |= {part.name for part in tensor.sources}
    return sorted(plain)
