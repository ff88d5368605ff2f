"""The tensors of a master, read so that each is checked against the hash that the manifest states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pqweights.checkpoint.digests import REMEDY, CheckedReads
from pqweights.checkpoint.header import StoredTensor, TensorSpec
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor, PlainTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import Storage
from pqweights.errors import MasterError
from pqweights.rewrite.manifest import Manifest


def with_checks(checkpoint: Checkpoint, manifest: Manifest) -> Checkpoint:
    """Return an opened master whose tensors are checked while they are read; see Checkpoint.finish_checks.

    Raises MasterError if the headers of its files are not those of the tensors in the manifest.
    """
    reads = checked_reads(checkpoint.storage, checkpoint.stored, manifest)
    return replace(checkpoint, tensors=tuple(checked(t, reads) for t in checkpoint.tensors), checked=reads)


def checked(tensor: LogicalTensor, reads: CheckedReads) -> LogicalTensor:
    """Return a tensor of a master, read through the checks."""
    if isinstance(tensor, PlainTensor):
        return tensor._replace(storage=reads)
    assert isinstance(tensor, EncodedTensor)
    return replace(tensor, storage=reads)


def checked_reads(storage: Storage, stored: Iterable[StoredTensor], manifest: Manifest) -> CheckedReads:
    """Return reads that check the stored tensors of a master.

    Raises MasterError if they are not those in the manifest.
    """
    stored = tuple(stored)
    digests = {name: digest for record in manifest.records for name, digest in record.digests.items()}
    stated = {spec.name: spec for tensor in manifest.tensors for spec in tensor.stored}
    for tensor in stored:
        spec, found = stated.get(tensor.name), TensorSpec(tensor.name, tensor.dtype, tensor.shape)
        if spec != found:
            expected = "no such tensor" if spec is None else f"{spec.dtype} {list(spec.shape)}"
            raise MasterError(
                f"{storage}: {tensor.file}: tensor {tensor.name!r}: expected {expected}, as {MANIFEST_FILE} says, "
                f"found {found.dtype} {list(found.shape)}; {REMEDY}"
            )
    missing = stated.keys() - {tensor.name for tensor in stored}
    if missing:
        raise MasterError(
            f"{storage}: tensor {min(missing)!r}: expected it, as {MANIFEST_FILE} says, found none; {REMEDY}"
        )
    return CheckedReads(storage, stored, tensor_hash=manifest.tensor_hash, digests=digests)
