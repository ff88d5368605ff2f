"""What an integer export reads: a master's tensors as the runtime holds them, optionally with the original's values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor, OriginalTensor
from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.checkpoint.views import View
from pqweights.errors import OptionError, SourceError
from pqweights.exports import target_name
from pqweights.exports.architectures import check_names
from pqweights.exports.bf16 import is_encoded
from pqweights.exports.compensation import Compensation, inputs_of, sources_of
from pqweights.exports.integer_export import IntegerExport
from pqweights.exports.integers import IntegerTarget, Outline, Rounding
from pqweights.exports.options import GPTQ
from pqweights.exports.remarks import remarks
from pqweights.exports.target import ExportSource
from pqweights.planning.plan import coder_of
from pqweights.planning.statistics_file import MOMENTS, Statistics, open_statistics
from pqweights.rewrite.folding.fold import EQUALIZE, Fold
from pqweights.rewrite.manifest import Manifest
from pqweights.storage.remote.storage import open_address

IN_WEIGHT_FILES = "the weight files already contain what the runtime needs"


def integer_export(source: ExportSource, target: IntegerTarget) -> tuple[Checkpoint, IntegerExport]:
    """Return the checkpoint to be rewritten, and the transform that does it.

    Raises SourceError for an original that the master was not made from, ExportError if the target cannot store the
    model, OptionError for a second fold.
    """
    manifest, original = source.manifest, None
    if source.original is not None:
        given = source.original
        original = open_local(given) if isinstance(given, Path) else open_address(given)
        where = f"`source` {source.original}"
        _check_original(where, original, master=source.checkpoint, manifest=manifest)
    moments = None if source.calibration is None else _moments(source, source.calibration, original, manifest)
    outline = master_outline = target.outline(source.checkpoint)
    values = _values_of(source, original, manifest=manifest, outline=outline, moments=moments)
    if values.checkpoint is not source.checkpoint:
        outline = target.outline(values.checkpoint)
    if values.master is not source.checkpoint and original is not None:
        master_outline = target.outline(values.master)
    errors = {} if original is not None or values.fold is not None else _known_errors(outline, manifest)
    said = remarks(outline, source.checkpoint, from_original=original is not None, known=errors.keys())
    outline = replace(outline, warnings=(*outline.warnings, *said, *_names_warnings(outline, target)))
    transform = IntegerExport(
        target=target,
        outline=outline,
        original=original,
        master={} if original is None else {tensor.name: tensor for tensor in master_outline.tensors},
        master_errors=errors,
        compensation=_compensation(outline, moments if source.rounding == GPTQ else None, values.fold),
        fold=values.fold,
        folded_master=source.checkpoint if original is not None and not source.fold else None,
        master_factors=None if manifest is None else manifest.factors,
    )
    rewritten = replace(values.checkpoint, tensors=outline.tensors)
    return rewritten if outline.companions is None else _with_companions(rewritten, outline.companions), transform


@dataclass(frozen=True, kw_only=True)
class _Values:
    """What is rounded.

    checkpoint: the master, with the values that are rounded
    master: the master, with its own values as far as they can be compared with those
    fold: the fold of the values, unless they are not folded here
    """

    checkpoint: Checkpoint
    master: Checkpoint
    fold: Fold | None


def _values_of(
    source: ExportSource,
    original: Checkpoint | None,
    *,
    manifest: Manifest | None,
    outline: Outline,
    moments: Statistics | None,
) -> _Values:
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
            f"--fold {EQUALIZE}: {source.folder} is folded already ({made_with.get('kind')}); leave out --fold"
        )
    if made_with and original is not None:
        kept = [tensor.name for tensor in master.tensors if not isinstance(tensor, EncodedTensor)]
        used = made_with.get("calibration")
        if used is not None and (moments is None or moments.sha256 != used):
            raise OptionError(
                f"--source: {source.folder} was folded with the moments of a file (sha256 {str(used)[:12]}); expected "
                "--calibration with that file"
            )
        fold = Fold(original, plain=kept, moments=None if used is None else moments)
        return _Values(checkpoint=_with_values(master, fold.folded), master=master, fold=fold)
    values = master if original is None else _with_values(master, original)
    if not source.fold:
        return _Values(checkpoint=values, master=master, fold=None)
    fold = Fold(values, plain=_plain(values, outline), moments=moments)
    return _Values(checkpoint=fold.folded, master=fold.over(master), fold=fold)


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
    rounded: set[str] = set()
    partly_plain: set[str] = set()
    for tensor in outline.tensors:
        parts = tensor.sources if isinstance(tensor, View) else (tensor,)
        is_rounded = isinstance(outline.decisions.get(tensor.name), Rounding)
        (rounded if is_rounded else partly_plain).update(part.name for part in parts)
    return sorted({tensor.name for tensor in values.tensors} - rounded | partly_plain)


def _names_warnings(outline: Outline, target: IntegerTarget) -> tuple[str, ...]:
    """Return a warning if nothing is known of the names that a runtime gives the layers. Raises ExportError."""
    rounded = {name for name, decision in outline.decisions.items() if isinstance(decision, Rounding)}
    plain = [t.name for t in outline.tensors if t.name.endswith(".weight") and t.name not in rounded]
    return check_names(target_name(target.describe()["target"]) or "", outline.config, rounded=rounded, plain=plain)


def _with_companions(checkpoint: Checkpoint, companions: tuple[str, ...]) -> Checkpoint:
    """Return a checkpoint of which only these files are copied."""
    left_out = dict.fromkeys((name for name in checkpoint.companions if name not in companions), IN_WEIGHT_FILES)
    return replace(checkpoint, companions=companions, left_out=dict(sorted((checkpoint.left_out | left_out).items())))


def _moments(source: ExportSource, path: Path, original: Checkpoint | None, manifest: Manifest | None) -> Statistics:
    """Open the file of moments that was given, which must be of a model of which the inputs are those of the values.

    Raises OptionError if nothing uses it, SourceError if it is of another model.
    """
    fold = {} if manifest is None else manifest.fold
    uses_it = source.rounding == GPTQ or source.fold or (original is not None and "calibration" in fold)
    if not uses_it:
        raise OptionError("`calibration`: expected `rounding` gptq or `fold` as well, which use it")
    moments = open_statistics(path, MOMENTS)
    if fold and original is None and manifest is not None and moments.checkpoint == manifest.source_fingerprint:
        raise SourceError(
            f"{path}: these moments are of the model that {source.folder} was folded from, whose inputs are others; "
            "add `source` with that model, or run pqweights calibrate --moments on the master"
        )
    moments.check(_fingerprints(source, original, manifest))
    return moments


def _known_errors(outline: Outline, manifest: Manifest | None) -> dict[str, float]:
    """Return the relative errors of a master's weights that are known and add up with those of rounding, by name."""
    errors = {} if manifest is None else _additive_errors(manifest)
    return {t.name: error for t in outline.tensors if (error := _error(t, errors)) is not None}


def _fingerprints(source: ExportSource, original: Checkpoint | None, manifest: Manifest | None) -> dict[str, str]:
    """Return the fingerprints of the checkpoints whose moments serve, by what messages call them.

    The inputs of a folded master are not those of the model that it was made from. With the original, the factors
    between them are known.
    """
    if original is not None:
        return {"this original": original.fingerprint()}
    result = {"this master": source.checkpoint.fingerprint()}
    if manifest is not None and not manifest.fold:
        result["the model that it was made from"] = manifest.source_fingerprint
    return result


def _compensation(outline: Outline, moments: Statistics | None, fold: Fold | None) -> Compensation | None:
    """Return what is known of the inputs of the weights that are rounded; None if rounding is not compensated."""
    if moments is None:
        return None
    rounded = [(t, d.rule) for t in outline.tensors if isinstance(d := outline.decisions.get(t.name), Rounding)]
    sources = {tensor.name: sources_of(tensor, rule, moments) for tensor, rule in rounded}
    sources |= {tensor.name: inputs_of(tensor, moments) for tensor in outline.measured}
    return Compensation(moments, sources, fold)


def _additive_errors(manifest: Manifest) -> dict[str, float]:
    """Relative errors of the weights whose error and that of later rounding add up, by name.

    A weight whose input channels were scaled is left out, because its error is that of the scaled weight. So is a
    weight of a codec whose errors are not orthogonal to its weights: the sum would not hold.
    """
    return {
        tensor.name: record.relative_mse
        for tensor, record in manifest.pairs
        if record.relative_mse is not None and not tensor.is_scaled and coder_of(tensor).orthogonal_error
    }


def _error(tensor: LogicalTensor, errors: dict[str, float]) -> float | None:
    """Return the relative error of a tensor, or None if it is not known.

    A tensor that the master keeps has none. One that is put together from several has their mean, weighted by size.
    """
    parts = tensor.sources if isinstance(tensor, View) else (tensor,)
    if any(is_encoded(part) and part.name not in errors for part in parts):
        return None
    weights = [math.prod(part.shape) for part in parts]
    total = sum(errors.get(part.name, 0.0) * count for part, count in zip(parts, weights, strict=True))
    return total / sum(weights) if total else 0.0


def _check_original(where: str, original: Checkpoint, *, master: Checkpoint, manifest: Manifest | None) -> None:
    """Raise SourceError if a master was not made from this checkpoint, or if what was done to it cannot be repeated.

    where: what messages call the checkpoint
    """
    if original.is_master:
        raise SourceError(f"{where}: expected the original checkpoint, found a pqweights master")
    if manifest is not None and original.fingerprint() != manifest.source_fingerprint:
        raise SourceError(
            f"{where}: is not the checkpoint that the master was made from: its fingerprint differs from the one in "
            "pqweights.json; give that one, or quantize this one"
        )
    fold = EQUALIZE if manifest is None else manifest.fold.get("kind", EQUALIZE)
    if fold != EQUALIZE:
        raise SourceError(
            f"{where}: the master was folded with --fold {fold}, which this version of pqweights does not have; leave "
            "out --source, or quantize again"
        )
    shapes = {tensor.name: tensor.shape for tensor in original.tensors}
    for tensor in master.tensors:
        shape = shapes.get(tensor.name)
        if shape != tensor.shape:
            raise SourceError(
                f"{where}: tensor {tensor.name!r}: expected shape {list(tensor.shape)} as in the master, found "
                f"{'none' if shape is None else list(shape)}"
            )
