"""The one verb: a conversion becomes a result. Quantizing and every export run through it.

What is planned is made shard by shard in the work folder of a store, published, and stated by the manifest, which is
written last: a folder with a manifest is a finished result, and in a folder without one, every file with a final name
is complete.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pqweights.checkpoint.names import CONFIG_FILE, MANIFEST_FILE
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import read_bytes
from pqweights.checkpoint.writer import COPY_BYTES
from pqweights.common.strict_json import json_pieces
from pqweights.convert.conversion import Conversion
from pqweights.convert.finished_shards import records_of
from pqweights.convert.identity import RunIdentity, is_under_way
from pqweights.convert.listed_files import file_problems
from pqweights.convert.manifest import Manifest, parse_manifest
from pqweights.convert.records import TensorRecord
from pqweights.convert.run import Run, open_run
from pqweights.convert.shard import LocalEngine
from pqweights.convert.task import RewriteReport, RunOptions
from pqweights.errors import ClusterError, MasterError, OutputError, SourceChangedError, SourceError, SourceReadError
from pqweights.planning.plan import index_json
from pqweights.storage import Store
from pqweights.storage.store import FileRecord

# What another value of a key in a transform's account means for the user. Of other keys, the value is named.
OTHERS = {
    "awq": "other scales (`awq`)",
    "calibrated": "another calibration",
    "calibration": "another sample (`calibrate`)",
    "fit": "other bit widths, by other sensitivities (`calibrate`)",
    "master_errors": "another master",
}


def convert(conversion: Conversion, store: Store, options: RunOptions = RunOptions()) -> RewriteReport:
    """Make a result in a store, continuing what an interrupted run of the same conversion left there.

    Raises SourceError, OutputError or HubError; after any of them every file under a final name is complete.
    """
    assert not conversion.checkpoint.unproven
    if not options.overwrite and MANIFEST_FILE in store.names() and not is_under_way(store):
        records = _finished(conversion, store)
        return _report(conversion, records, already_done=True, resumed=len(records))
    with open_run(store, conversion.statement, overwrite=options.overwrite) as run:
        resumed = sum(len(mark.records) for mark in run.marks.values())
        try:
            records = _make_shards(conversion, run, options)
            conversion.check_sources()
            options.check()
            run.publish()
            _finish(conversion, records, run)
        except SourceChangedError as error:
            if not is_under_way(run.store):
                raise
            # What has changed is checked before a shard is recorded, so those that are finished were all made of the
            # files that the journal states, and count as long as the files are those.
            raise SourceChangedError(
                f"{error}, with `overwrite` for the files as they are now: what is finished was made of the former "
                "ones, and stays for them"
            ) from None
    return _report(conversion, records, already_done=False, resumed=resumed)


def _finished(conversion: Conversion, store: Store) -> tuple[TensorRecord, ...]:
    """Return what was measured of a finished result. Raises OutputError if the store holds another one."""
    manifest = _manifest_in(store)
    if (difference := _difference(conversion, store, manifest)) is not None:
        raise OutputError(f"{store}: {difference}; pass `overwrite` to replace it, or choose another folder")
    for planned, record in manifest.pairs:
        conversion.accept(planned, record)
    store.tidy(lambda: is_under_way(store))
    return manifest.records


def _report(
    conversion: Conversion, records: tuple[TensorRecord, ...], *, already_done: bool, resumed: int
) -> RewriteReport:
    return RewriteReport(
        conversion=conversion,
        records=records,
        already_done=already_done,
        resumed=resumed,
        source_bytes_read=conversion.bytes_read,
        unchecked=conversion.checkpoint.is_master and conversion.checkpoint.checked is None,
    )


def _manifest_in(store: Store) -> Manifest:
    """Read the manifest of a store that has one. Raises MasterError."""
    data = store.read(MANIFEST_FILE)
    if data is None:
        raise MasterError(f"{store}: {MANIFEST_FILE} was removed while it was read; run the same command again")
    return parse_manifest(data)


def _difference(conversion: Conversion, store: Store, manifest: Manifest) -> str | None:
    """Say how the finished result in the output folder differs from the one that is asked for; None if it is that."""
    asked, theirs = conversion.identity.decisive, manifest.identity.decisive
    if _named(theirs) != _named(asked):
        return f"holds another result: {_named(theirs)}"
    # The content of a commit never changes; that of a local folder may.
    if (theirs.origin, theirs.source_bytes) != (asked.origin, asked.source_bytes) or (
        asked.origin is None and manifest.source_fingerprint != conversion.checkpoint.fingerprint()
    ):
        source = "master" if asked.master else "source"
        return f"holds another result: {_named(theirs)} made from another {source}"
    if theirs != asked:
        return f"holds another result: {_named(theirs)} made {_by_other_means(theirs, asked)}"
    files = store.files()
    problems = file_problems(files, manifest)
    if lost := [*problems, *(f"{name} is missing" for name in manifest.files if name not in files)]:
        return f"holds this result, but {lost[0]}"
    contents = _small_files(conversion, manifest.records)
    if contents.keys() | conversion.small_files(conversion.plan.shards).keys() != manifest.files.keys():
        return "holds this result, but other files were copied to it (`include_files`)"
    newest = max(_newest(checkpoint) for checkpoint in conversion.checkpoints)
    # A source that is newer may have changed in bytes that its fingerprint does not cover. What the transform adds
    # follows from its account of itself, which the manifests have in common. A store may tell no times.
    if newest > (files[MANIFEST_FILE].modified or sys.maxsize) or any(
        _sha256_of_pieces(pieces) != manifest.files[name].sha256 for name, pieces in contents.items()
    ):
        return "holds this result, but files of its source were changed or copied since"
    return None


def _newest(checkpoint: Checkpoint) -> int:
    """Return when the last weight file was changed, in nanoseconds since 1970; those of a commit never are."""
    storage = checkpoint.storage
    times = (storage.files()[name].modified for name in checkpoint.weight_files)
    return max(times, default=0) if storage.origin is None else 0


def _named(identity: RunIdentity) -> str:
    target = identity.made_by.get("target")
    return f"a {identity.kind}" if target is None else f"an export for {_short(target)}"


def _by_other_means(theirs: RunIdentity, ours: RunIdentity) -> str:
    """Name the version or the options with which a result was made that differ from ours."""
    if theirs.same_bytes_since != ours.same_bytes_since:
        since = f"same bytes since {_short(theirs.same_bytes_since)}, this one {ours.same_bytes_since}"
        return f"by another version of pqweights ({since})"
    others = [
        _other_recipe(theirs.made_by[key], ours.made_by[key])
        if key == "recipe"
        else OTHERS.get(key, f"{key.replace('_', ' ')} {_short(theirs.made_by.get(key))}")
        for key in theirs.made_by.keys() | ours.made_by.keys()
        if theirs.made_by.get(key) != ours.made_by.get(key)
    ]
    if theirs.max_shard_bytes != ours.max_shard_bytes:
        others.append(f"`max_shard_size` {theirs.max_shard_bytes}")
    return f"with {', '.join(sorted(others)) or 'other settings'}"


def _other_recipe(theirs: Any, ours: Mapping[str, Any]) -> str:
    if not isinstance(theirs, dict) or any(theirs.get(key) != ours.get(key) for key in ("name", "bits")):
        stated = theirs if isinstance(theirs, dict) else {}
        bits = "" if stated.get("bits") is None else f", {_short(stated['bits'])} bits"
        return f"another recipe ({_short(stated.get('name'))}{bits})"
    if theirs.get("effort") != ours.get("effort"):
        return "the default effort" if theirs.get("effort") is None else f"`effort` {_short(theirs['effort'])}"
    return "another codec, other rules or another target (`codec`, `keep`, `set_format`, `target_size`, `target_bpw`)"


def _short(value: Any) -> str:
    return str(value)[:40]


def _make_shards(conversion: Conversion, run: Run, options: RunOptions) -> tuple[TensorRecord, ...]:
    """Make the shards that are not finished, and return the records of all tensors.

    Content that no run can use is found again by every run over the same files, so a run that began here removes what
    it wrote. One that continues another leaves that, and a read that failed leaves what was finished before.
    """
    engine = options.engine or LocalEngine()
    plans = {planned.name: planned for planned in conversion.plan.tensors}
    marks = dict(run.marks)
    try:
        engine.check(conversion, run)
        for mark in marks.values():
            conversion.checkpoint.restore_fingerprints(dict(mark.fingerprints))
            for record in mark.records:
                conversion.accept(plans[record.name], record)
        conversion.learn(options.progress)
        marks |= engine.make(
            conversion, run, [shard for shard in conversion.plan.shards if shard.file not in marks], options
        )
        conversion.finish_checks()
    except (SourceError, MasterError, ClusterError, OutputError) as error:
        may_pass = not isinstance(error, SourceError | MasterError) or isinstance(
            error, SourceReadError | SourceChangedError
        )
        if not (run.holds_work() if may_pass else run.marks):
            run.discard()
        raise
    return records_of((shard.file for shard in conversion.plan.shards), marks)


def _finish(conversion: Conversion, records: tuple[TensorRecord, ...], run: Run) -> None:
    """Write the small files, then the manifest, which marks the folder as finished."""
    storage = conversion.checkpoint.storage
    with storage.fetching(run.fetched, dict.fromkeys(conversion.plan.companions, 1)):
        files = _write_small_files(conversion, records, run)
        fingerprint = conversion.checkpoint.fingerprint()
        conversion.check_sources()  # after everything was read, and before anything states what it was
    manifest = Manifest(
        identity=conversion.identity,
        source_fingerprint=fingerprint,
        records=records,
        files=files,
    )
    run.complete(manifest.to_pieces())


def _write_small_files(conversion: Conversion, records: Sequence[TensorRecord], run: Run) -> dict[str, FileRecord]:
    """Write the files without tensors, and return what the manifest states about each."""
    others = conversion.small_files(conversion.plan.shards)
    contents = {**_small_files(conversion, records), **{name: [content()] for name, content in others.items()}}
    return {name: run.store.write(name, pieces) for name, pieces in contents.items()}


def _small_files(conversion: Conversion, records: Sequence[TensorRecord]) -> dict[str, Iterable[bytes]]:
    """Return companions, index and configuration: the content of each, in pieces, by name."""
    plan = conversion.plan
    contents: dict[str, Iterable[bytes]] = {name: _pieces(conversion.checkpoint, name) for name in plan.companions}
    if plan.container.index_file is not None:
        contents[plan.container.index_file] = json_pieces(index_json(plan.shards))
    if (config := conversion.config) is not None:
        contents[CONFIG_FILE] = json_pieces(config(conversion.checkpoint, plan.tensors, records))
    return contents


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[bytes]:
    size = checkpoint.storage.files()[name].byte_count
    for offset in range(0, max(size, 1), COPY_BYTES):  # an empty file is read, too, which checks that it is there
        yield read_bytes(checkpoint.storage, name, offset, min(COPY_BYTES, size - offset))
    checkpoint.storage.release(name)


def _sha256_of_pieces(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
