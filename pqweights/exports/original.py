"""An integer export from a master: its tensors as the runtime holds them, and, where it is given, the original's values."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor, OriginalTensor
from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.checkpoint.views import MovedTensor
from pqweights.errors import SourceError
from pqweights.exports.bf16 import is_encoded
from pqweights.exports.integers import IntegerExport, IntegerTarget
from pqweights.exports.target import ExportSource
from pqweights.rewrite.manifest import Manifest, coder_of, read_manifest


def integer_export(source: ExportSource, target: IntegerTarget) -> tuple[Checkpoint, IntegerExport]:
    """The checkpoint to be rewritten, and the transform that does it.

    Raises SourceError for an original that the master was not made from, ExportError where the target has no form for the model.
    """
    checkpoint, manifest = source.checkpoint, _manifest(source.folder)
    outline = target.outline(checkpoint)
    if source.original is None:
        errors = {} if manifest is None else _additive_errors(manifest)
        known = {t.name: error for t in outline.tensors if (error := _error(t, errors)) is not None}
        transform = IntegerExport(target=target, outline=outline, original=None, master={}, master_errors=known)
        return replace(checkpoint, tensors=outline.tensors), transform
    original = open_local(source.original)
    _check_original(source.original, original, checkpoint, manifest)
    by_name = {tensor.name: tensor for tensor in original.tensors}
    originals: list[LogicalTensor] = [
        OriginalTensor(tensor, by_name[tensor.name]) if isinstance(tensor, EncodedTensor) else tensor
        for tensor in checkpoint.tensors
    ]
    masters = {tensor.name: tensor for tensor in outline.tensors}
    outline = target.outline(replace(checkpoint, tensors=tuple(originals)))
    transform = IntegerExport(target=target, outline=outline, original=original, master=masters, master_errors={})
    return replace(checkpoint, tensors=outline.tensors), transform


def _additive_errors(manifest: Manifest) -> dict[str, float]:
    """Relative errors of the weights to which the error of later rounding adds up, by name.

    That of a weight whose input channels were scaled is of the scaled one, and says nothing of the weight's own. That of a codec
    whose errors are not orthogonal to its weights says too little.
    """
    return {
        tensor.name: record.relative_mse
        for tensor, record in manifest.pairs
        if record.relative_mse is not None and not tensor.is_scaled and coder_of(tensor).orthogonal_error
    }


def _error(tensor: LogicalTensor, errors: dict[str, float]) -> float | None:
    """The relative error of a tensor of the master, or of what was put together from several: their mean by size.

    What the master keeps has none.
    """
    parts = tensor.sources if isinstance(tensor, MovedTensor) else (tensor,)
    if any(is_encoded(part) and part.name not in errors for part in parts):
        return None
    weights = [math.prod(part.shape) for part in parts]
    total = sum(errors.get(part.name, 0.0) * count for part, count in zip(parts, weights, strict=True))
    return total / sum(weights) if total else 0.0


def _manifest(folder: Path) -> Manifest | None:
    """A master can be exported without its manifest; only the errors against the original are unknown then.

    Raises MasterError for a damaged one.
    """
    return read_manifest(folder) if (folder / MANIFEST_FILE).is_file() else None


def _check_original(path: Path, source: Checkpoint, master: Checkpoint, manifest: Manifest | None) -> None:
    if source.is_master:
        raise SourceError(f"--source {path}: expected the original checkpoint, found a pqweights master")
    if manifest is not None and source.fingerprint() != manifest.source_fingerprint:
        raise SourceError(
            f"--source {path}: is not the checkpoint that the master was made from: its fingerprint differs from the one in "
            "pqweights.json; give that one, or quantize this one"
        )
    shapes = {tensor.name: tensor.shape for tensor in source.tensors}
    for tensor in master.tensors:
        if shapes.get(tensor.name) != tensor.shape:
            found = shapes.get(tensor.name)
            raise SourceError(
                f"--source {path}: tensor {tensor.name!r}: expected shape {list(tensor.shape)} as in the master, found "
                f"{'none' if found is None else list(found)}"
            )
