"""Whether a store holds a finished result already, and whether it is the one that is asked for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.writer import sha256_of
from pqweights.convert.journal import is_under_way
from pqweights.convert.listed_files import file_problems
from pqweights.convert.manifest import Manifest, parse_manifest
from pqweights.convert.plan import Plan
from pqweights.errors import MasterError, OutputError
from pqweights.storage import Store

# What another value of a key of what made a result means for the user. Of other keys, the value is named.
OTHERS = {
    "adapters": "other adapters (`adapter`)",
    "awq": "other scales (`awq`)",
    "calibrated": "another calibration",
    "calibration": "another sample (`calibrate`)",
    "fit": "other bit widths, by other sensitivities (`calibrate`)",
    "master_errors": "another master",
    "rules": "other rules (`recipe`, `keep`, `set_format`)",
}


def finished_result(plan: Plan, store: Store) -> Manifest | None:
    """Return the manifest of the result of a plan, if a store holds it; None if nothing is finished there.

    Raises OutputError if the store holds another one.
    """
    if MANIFEST_FILE not in store.names() or is_under_way(store):
        return None
    data = store.read(MANIFEST_FILE)
    if data is None:
        raise MasterError(f"{store}: {MANIFEST_FILE} was removed while it was read; run the same command again")
    manifest = parse_manifest(data)
    if (difference := _difference(plan, store, manifest)) is not None:
        raise OutputError(f"{store}: {difference}; pass `overwrite` to replace it, or choose another folder")
    for planned, record in manifest.pairs:
        plan.accept(planned, record)
    store.tidy(lambda: is_under_way(store))
    return manifest


def _difference(plan: Plan, store: Store, manifest: Manifest) -> str | None:
    """Say how the finished result in the output folder differs from the one that is asked for; None if it is that."""
    ours, theirs = plan.manifest.decisive, manifest.decisive
    if _named(theirs) != _named(ours):
        return f"holds another result: {_named(theirs)}"
    # The content of a commit never changes; that of a local folder may.
    if (theirs.origin, theirs.source_bytes) != (ours.origin, ours.source_bytes) or (
        ours.origin is None and manifest.source_fingerprint != plan.checkpoint.fingerprint()
    ):
        source = "master" if ours.master else "source"
        return f"holds another result: {_named(theirs)} made from another {source}"
    if theirs != ours:
        return f"holds another result: {_named(theirs)} made {_by_other_means(theirs, ours)}"
    files = store.files()
    problems = file_problems(store.finished_files(), manifest)
    if lost := [*problems, *(f"{name} is missing" for name in manifest.files if name not in files)]:
        return f"holds this result, but {lost[0]}"
    contents = plan.contents(manifest.records)
    if contents.keys() != manifest.files.keys():
        return "holds this result, but other files were copied to it (`include_files`)"
    added = plan.small_files(plan.shards)
    newest = max(_newest(checkpoint) for checkpoint in plan.checkpoints)
    # A source that is newer may have changed in bytes that its fingerprint does not cover. What the target adds follows
    # from its options, which the manifests have in common. A store may tell no times.
    if newest > (files[MANIFEST_FILE].modified or sys.maxsize) or any(
        sha256_of(pieces()) != manifest.files[name].sha256 for name, pieces in contents.items() if name not in added
    ):
        return "holds this result, but files of its source were changed or copied since"
    return None


def _newest(checkpoint: Checkpoint) -> int:
    """Return when the last weight file was changed, in nanoseconds since 1970; those of a commit never are."""
    storage = checkpoint.storage
    times = (storage.files()[name].modified for name in checkpoint.weight_files)
    return max(times, default=0) if storage.origin is None else 0


def _named(identity: Manifest) -> str:
    target = identity.made_by.get("target")
    return f"a {identity.kind}" if target is None else f"an export for {_short(target)}"


def _by_other_means(theirs: Manifest, ours: Manifest) -> str:
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
    return (
        "another codec, other rules or another target (`codec`, `keep`, `set_format`, `target_size`, `target_bpw`, "
        "`max_kl`)"
    )


def _short(value: Any) -> str:
    return str(value)[:40]
