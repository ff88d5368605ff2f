"""A finished result and its manifest: whether its files are all there, and reads that check its tensors.

Whether every byte is right is for results/verify.py to tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pqweights.checkpoint.companions import REASONS, is_needed, outside
from pqweights.checkpoint.digests import REMEDY, CheckedReads
from pqweights.checkpoint.file_reader import FileState
from pqweights.checkpoint.header import StoredTensor, TensorSpec
from pqweights.checkpoint.names import CONFIG_FILE, INDEX_FILE, MANIFEST_FILE, is_inside
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor, PlainTensor
from pqweights.checkpoint.source import Checkpoint, open_files
from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.unfinished import describe_interrupted, is_interrupted, journal_line
from pqweights.convert.manifest import Manifest, find_manifest, shards_of
from pqweights.errors import MasterError
from pqweights.formats.master import MasterFormat
from pqweights.formats.native import Native
from pqweights.planning.layout import QUANTIZE, TensorPlan, format_of

SizeOf = Callable[[str], int | None]

NOT_LISTED = "it is not in the manifest of the master"
GONE = "it was removed from the master"
UNCHECKED = f"there is no readable {MANIFEST_FILE} with the hashes of the tensors, so their bytes cannot be checked"


def open_result(storage: Storage, manifest: Manifest | None) -> Checkpoint:
    """Open a result of pqweights; its companions are the files that its manifest lists, whatever else lies there.

    The tensors of a master are checked while they are read (Checkpoint.checked).

    Raises MasterError if a listed file is missing, if a file of weights has another size or another header, or if the
    configuration describes the weights of a master otherwise than the manifest; SourceError as `open_local`. A result
    without a manifest is opened like any other checkpoint: nothing tells what it should hold.
    """
    if manifest is None:
        return open_files(storage)
    for name in storage.outside_links:
        if name in manifest.files:
            raise MasterError(f"{storage}: {outside(name)}")
    for problem in file_problems(storage.files(), manifest):
        raise MasterError(f"{storage}: {problem}; {REMEDY}")
    checkpoint = open_files(storage)
    if checkpoint.config is not None and checkpoint.is_master:
        check_config(checkpoint.config["quantization_config"], checkpoint.tensors, manifest)
        checked_by = checked_reads(storage, checkpoint.stored, manifest)
        tensors = tuple(checked(tensor, checked_by) for tensor in checkpoint.tensors)
        recipe = manifest.made_by.get("recipe")  # of a damaged manifest, anything
        if isinstance(recipe, dict) and recipe.get("codec") == Native.codec:  # its exports have the order of its source
            order = {tensor.name: index for index, tensor in enumerate(manifest.tensors)}
            tensors = tuple(sorted(tensors, key=lambda tensor: order[tensor.name]))
        checkpoint = replace(checkpoint, tensors=tensors, checked=checked_by)
    listed = manifest.files.keys() - {INDEX_FILE, CONFIG_FILE}
    there = storage.files().keys()
    others = there - listed - {INDEX_FILE, CONFIG_FILE, *checkpoint.weight_files}
    left_out = {name: REASONS.get(name, NOT_LISTED) for name in others} | dict.fromkeys(listed - there, GONE)
    return replace(
        checkpoint,
        remarks=tuple(dict.fromkeys((*manifest.remarks, *checkpoint.remarks))),
        companions=tuple(sorted(name for name in listed & there if is_inside(name))),
        left_out=dict(sorted(left_out.items())),
    )


def check_config(config: Mapping[str, Any], tensors: Iterable[LogicalTensor], manifest: Manifest) -> None:
    """Raise MasterError if the configuration of a master does not describe its weights as the manifest does.

    What decodes them stands in config.json, which people edit; their hashes would not show it. The arguments are those
    of config_problems.
    """
    for problem in config_problems(config, tensors, manifest):
        raise MasterError(f"{problem}; {REMEDY}")


def config_problems(config: Mapping[str, Any], tensors: Iterable[LogicalTensor], manifest: Manifest) -> Iterator[str]:
    """Yield how the configuration of a master describes its weights otherwise than the manifest.

    config: its quantization_config
    tensors: the logical tensors that were found by it
    """
    configured = {t.name: t for t in tensors if isinstance(t, EncodedTensor)}
    quantized = ((tensor, record.state or {}) for tensor, record in manifest.pairs if tensor.action == QUANTIZE)
    expected = {tensor.name: (tensor, format_of(tensor, state)) for tensor, state in quantized}
    for name in sorted(expected.keys() ^ configured.keys()):
        yield f"{CONFIG_FILE}: weight {name!r} is quantized in only one of configuration and manifest"
    for name in sorted(expected.keys() & configured.keys()):
        yield from _weight_problems(*expected[name], configured[name])
    if config.get("kept") != [t.name for t in manifest.tensors if t.action != QUANTIZE]:
        yield f"{CONFIG_FILE}: kept: is not the list of kept tensors in the manifest"


def _weight_problems(expected: TensorPlan, ours: MasterFormat, configured: EncodedTensor) -> Iterator[str]:
    """Yield what a configuration states of a weight, and the manifest does not. ours: its format in the manifest"""
    theirs = configured.format
    settings, others = ours.stated(), theirs.stated()
    stated: dict[str, tuple[Any, Any]] = {
        "shape": (expected.shape, configured.shape),
        "dtype": (expected.dtype, configured.dtype),
        "codec": (ours.codec, theirs.codec),
        "bits": (ours.bits, theirs.bits),
        **{key: (settings.get(key), others.get(key)) for key in settings.keys() | others.keys()},
    }
    for key, (wanted, found) in stated.items():
        if wanted != found:
            yield f"{CONFIG_FILE}: weight {expected.name!r}: {key}: expected {wanted!r}, found {found!r}"


def checked_reads(storage: Storage, stored: Iterable[StoredTensor], manifest: Manifest) -> CheckedReads:
    """Return reads that check the stored tensors of a master against the hashes in its manifest.

    Raises MasterError if they are not those in the manifest.
    """
    stored = tuple(stored)
    digests = {name: digest for record in manifest.records for name, digest in record.digests.items()}
    stated = {spec.name: spec for tensor in manifest.tensors for spec in tensor.stored}
    for tensor in stored:
        spec, header = stated.get(tensor.name), TensorSpec(tensor.name, tensor.dtype, tensor.shape)
        if spec != header:
            expected = "no such tensor" if spec is None else f"{spec.dtype} {list(spec.shape)}"
            raise MasterError(
                f"{storage}: {tensor.file}: tensor {tensor.name!r}: expected {expected}, as {MANIFEST_FILE} says, "
                f"found {header.dtype} {list(header.shape)}; {REMEDY}"
            )
    if missing := stated.keys() - {tensor.name for tensor in stored}:
        raise MasterError(
            f"{storage}: tensor {min(missing)!r}: expected it, as {MANIFEST_FILE} says, found none; {REMEDY}"
        )
    return CheckedReads(storage, stored, digests=digests)


def checked(tensor: LogicalTensor, checked_by: CheckedReads) -> LogicalTensor:
    """Return a tensor of a master, read through the checks."""
    if isinstance(tensor, PlainTensor):
        return tensor._replace(storage=checked_by)
    assert isinstance(tensor, EncodedTensor)
    return replace(tensor, storage=checked_by)


def check_weight_files(folder: Path) -> Manifest | None:
    """Check that a result can be loaded: that no run was interrupted in it, and that its weight files are complete.

    Returns its manifest. A folder without a manifest that can be read, or without any, is not a problem here.

    Raises MasterError.
    """
    if is_interrupted(folder):
        raise MasterError(f"{folder}: {describe_interrupted(journal_line(folder))}")
    manifest = None
    with contextlib.suppress(MasterError):
        manifest = find_manifest(folder)
    for problem in _loading_problems(folder, manifest) if manifest is not None else ():
        raise MasterError(f"{folder}: {problem}; {REMEDY}")
    return manifest


def files_of_result(manifest: Manifest) -> list[str]:
    """Return the names of all files of a result."""
    return [*(shard.file for shard in shards_of(manifest)), *manifest.files, MANIFEST_FILE]


def file_problems(result: Path | Mapping[str, FileState], manifest: Manifest) -> tuple[str, ...]:
    """Return which of the files that a manifest lists are missing, and which weight files have another size.

    result: a folder, or its files; the sizes of small files may differ, as users edit them
    """

    def size_of(name: str) -> int | None:
        if isinstance(result, Path):
            return _size(result / name)
        return result[name].byte_count if name in result else None

    missing = (
        _missing(name, record.bytes)
        for name, record in manifest.files.items()
        if is_inside(name) and is_needed(name) and size_of(name) is None
    )
    return (*_file_problems(size_of, manifest), *missing)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _loading_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield what keeps a model from being loaded: transformers finds weight files by the index."""
    yield from _file_problems(lambda name: _size(folder / name), manifest)
    if INDEX_FILE in manifest.files and not (folder / INDEX_FILE).is_file():
        yield _missing(INDEX_FILE, manifest.files[INDEX_FILE].bytes)


def _file_problems(size_of: SizeOf, manifest: Manifest) -> Iterator[str]:
    for shard in shards_of(manifest):
        size = size_of(shard.file)
        if size is None:
            yield _missing(shard.file, shard.file_bytes)
        elif size != shard.file_bytes:
            yield f"{shard.file}: expected {shard.file_bytes} bytes, as {MANIFEST_FILE} says, found {size}"


def _missing(name: str, byte_count: int) -> str:
    return f"{name} is missing ({MANIFEST_FILE} lists it with {byte_count} bytes)"
