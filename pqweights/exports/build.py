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
from pqweights.exports.integers import IntegerExport, Target
from pqweights.rewrite.manifest import Manifest, read_manifest


def integer_export(
    folder: Path, checkpoint: Checkpoint, target: Target, original: Path | None
) -> tuple[Checkpoint, IntegerExport]:
    """The checkpoint to be rewritten, and the transform that does it.

    folder: of the master. original: the checkpoint that the master was made from; its weights are taken instead. Raises
    SourceError for one that it was not made from, ExportError where the target has no form for the model.
    """
    manifest = _manifest(folder)
    errors = {}
    if manifest is not None:
        # That of a weight whose input channels were scaled is of the scaled one, and says nothing of the weight's own.
        scaled = {tensor.name for tensor in manifest.tensors if tensor.is_scaled}
        found = {r.name: r.relative_mse for r in manifest.records if r.relative_mse is not None}
        errors = {name: error for name, error in found.items() if name not in scaled}
    outline = target.outline(checkpoint)
    if original is None:
        known = {t.name: error for t in outline.tensors if (error := _error(t, errors)) is not None}
        return replace(checkpoint, tensors=outline.tensors), IntegerExport(target, None, outline, {}, known)
    source = open_local(original)
    _check_original(original, source, checkpoint, manifest)
    by_name = {tensor.name: tensor for tensor in source.tensors}
    originals: list[LogicalTensor] = [
        OriginalTensor(tensor, by_name[tensor.name]) if isinstance(tensor, EncodedTensor) else tensor
        for tensor in checkpoint.tensors
    ]
    masters = {tensor.name: tensor for tensor in outline.tensors}
    outline = target.outline(replace(checkpoint, tensors=tuple(originals)))
    return replace(checkpoint, tensors=outline.tensors), IntegerExport(target, source, outline, masters, {})


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
