"""What an integer export reads: a master's tensors as the runtime holds them, optionally with the original's values."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from pqweights.checkpoint.gguf.sources import open_local_source
from pqweights.checkpoint.models import text_model
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor, OriginalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import View
from pqweights.errors import OptionError, SourceError
from pqweights.exports import target_name
from pqweights.exports.architectures import unexamined_warnings
from pqweights.exports.bf16 import is_encoded
from pqweights.exports.compensation import Compensation
from pqweights.exports.integer_export import IntegerExport, remarks
from pqweights.exports.integers import IntegerTarget, Outline
from pqweights.exports.target import GPTQ, ExportSource
from pqweights.exports.units import reading_together
from pqweights.planning.plan import coding_of
from pqweights.rewrite.manifest import Manifest
from pqweights.storage.sources import open_address

IN_WEIGHT_FILES = "the weight files already contain what the runtime needs"


def integer_export(source: ExportSource, target: IntegerTarget) -> tuple[Checkpoint, IntegerExport]:
    """Return the checkpoint to be rewritten, and the transform that does it.

    Raises SourceError for an original that the master was not made from, ExportError if the target cannot store the
    model, OptionError for a calibration that nothing uses.
    """
    manifest, original = source.manifest, None
    target.assignment.check_model(None if manifest is None else manifest.source_fingerprint)
    if source.original is not None:
        given = source.original
        original = open_local_source(given) if isinstance(given, Path) else open_address(given)
        _check_original(f"`source` {given}", original, master=source.checkpoint, manifest=manifest)
    if source.inputs is not None and source.rounding != GPTQ:
        raise OptionError("`calibrate`: expected `rounding` gptq as well, which uses it")
    values = source.checkpoint if original is None else _with_values(source.checkpoint, original)
    master_outline = target.outline(source.checkpoint)
    outline = master_outline if original is None else target.outline(values)
    errors = {} if manifest is None or original is not None else _known_errors(outline, manifest)
    unexamined = unexamined_warnings(target_name(target.describe()["target"]) or "", outline.config)
    warnings = (*outline.warnings, *remarks(outline, source.checkpoint), *unexamined)
    model = text_model(values.config)
    transform = IntegerExport(
        target=target,
        outline=replace(outline, warnings=warnings),
        original=original,
        master={} if original is None else {tensor.name: tensor for tensor in master_outline.tensors},
        master_errors=errors,
        compensation=None
        if source.inputs is None
        else Compensation(source.inputs, [(t, how.rule) for t, how in outline.rounded], model),
    )
    rewritten = replace(values, tensors=reading_together(outline.tensors, transform.fused))
    return rewritten if outline.companions is None else _with_companions(rewritten, outline.companions), transform


def _with_values(master: Checkpoint, original: Checkpoint) -> Checkpoint:
    """Return a master with another checkpoint's values for the weights that it holds as codes."""
    by_name = {tensor.name: tensor for tensor in original.tensors}
    tensors: tuple[LogicalTensor, ...] = tuple(
        OriginalTensor.of(tensor, by_name[tensor.name]) if isinstance(tensor, EncodedTensor) else tensor
        for tensor in master.tensors
    )
    return replace(master, tensors=tensors)


def _made_of(tensor: LogicalTensor) -> tuple[LogicalTensor, ...]:
    """Return the tensors of the checkpoint that a tensor is put together from, or itself."""
    return tensor.sources if isinstance(tensor, View) else (tensor,)


def _with_companions(checkpoint: Checkpoint, companions: tuple[str, ...]) -> Checkpoint:
    """Return a checkpoint of which only these files are copied."""
    left_out = dict.fromkeys((name for name in checkpoint.companions if name not in companions), IN_WEIGHT_FILES)
    return replace(checkpoint, companions=companions, left_out=dict(sorted((checkpoint.left_out | left_out).items())))


def _known_errors(outline: Outline, manifest: Manifest) -> dict[str, float]:
    """Return the relative errors of a master's weights that are known and add up with those of rounding, by name.

    A weight whose input channels were scaled is left out, because its error is that of the scaled weight. So is a
    weight of a codec whose errors are not orthogonal to its weights: the sum would not hold.
    """
    errors = {
        tensor.name: record.relative_mse
        for tensor, record in manifest.pairs
        if record.relative_mse is not None and not tensor.is_scaled and coding_of(tensor).orthogonal_error
    }
    return {t.name: error for t in outline.tensors if (error := _error(t, errors)) is not None}


def _error(tensor: LogicalTensor, errors: dict[str, float]) -> float | None:
    """Return the relative error of a tensor, or None if it is not known.

    A tensor that the master keeps has none. One that is put together from several has their mean, weighted by size.
    """
    parts = _made_of(tensor)
    if any(is_encoded(part) and part.name not in errors for part in parts):
        return None
    weights = [math.prod(part.shape) for part in parts]
    total = sum(errors.get(part.name, 0.0) * count for part, count in zip(parts, weights, strict=True))
    return total / sum(weights) if total else 0.0


def _check_original(where: str, original: Checkpoint, *, master: Checkpoint, manifest: Manifest | None) -> None:
    """Raise SourceError if a master was not made from this checkpoint.

    where: what messages call the checkpoint
    """
    if original.is_master:
        raise SourceError(f"{where}: expected the original checkpoint, found a pqweights master")
    if manifest is not None and original.fingerprint() != manifest.source_fingerprint:
        raise SourceError(
            f"{where}: is not the checkpoint that the master was made from: its fingerprint differs from the one in "
            "pqweights.json; give that one, or quantize this one"
        )
    shapes = {tensor.name: tensor.shape for tensor in original.tensors}
    for tensor in master.tensors:
        shape = shapes.get(tensor.name)
        if shape != tensor.shape:
            raise SourceError(
                f"{where}: tensor {tensor.name!r}: expected shape {list(tensor.shape)} as in the master, found "
                f"{'none' if shape is None else list(shape)}"
            )
