"""What an output folder holds instead of the result that is asked for, in the words of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pqweights.checkpoint.names import CONFIG_FILE, INDEX_FILE
from pqweights.rewrite.identity import RunIdentity
from pqweights.rewrite.listed_files import problems_of_sizes
from pqweights.rewrite.manifest import Manifest
from pqweights.rewrite.task import RewriteTask

# What the keys of a transform's account mean for the user; other keys are options, which are named with their values.
ACCOUNTS = {
    "awq": "other scales (`awq`)",
    "fit": "another `sensitivity`",
    "fold": "another `fold`",
    "original_fingerprint": "another `source`",
    "master_errors": "another master",
}


def difference(task: RewriteTask, found: Manifest) -> str:
    """Say how the result in the output folder of a task differs from the one that is asked for."""
    asked, theirs = task.identity.decisive, found.identity.decisive
    if theirs == asked and _has_same_source(task, found):
        return f"holds this result, but {_what_is_wrong(task, found)}"
    result = _named(theirs)
    if result == _named(asked):
        if not _has_same_source(task, found):
            result += f" made from another {'master' if asked.kind == 'export' else 'source'}"
        elif theirs.same_bytes_since != asked.same_bytes_since:
            result += (
                f" made by another version of pqweights (same bytes since {_short(theirs.same_bytes_since)}, this one "
                f"{asked.same_bytes_since})"
            )
        else:
            result += f" made with {_other_options(theirs, asked)}"
    return f"holds another result: {result}"


def _named(identity: RunIdentity) -> str:
    target = identity.made_by.get("target")
    return f"a {identity.kind}" if target is None else f"an export for {_short(target)}"


def _has_same_source(task: RewriteTask, found: Manifest) -> bool:
    """Whether a result was made from the same commit, or from files with the same fingerprint."""
    theirs, ours = found.identity, task.identity
    if (theirs.origin, theirs.source_bytes) != (ours.origin, ours.source_bytes):
        return False
    return ours.origin is not None or found.source_fingerprint == task.checkpoint.fingerprint()


def _other_options(found: RunIdentity, asked: RunIdentity) -> str:
    """Name the options with which a result was made that differ from those that are asked for."""
    theirs, ours = found.made_by, asked.made_by
    other = []
    for key in theirs.keys() | ours.keys():
        if theirs.get(key) == ours.get(key):
            continue
        if key == "recipe":
            other.append(_other_recipe(theirs[key], ours[key]))
        else:
            other.append(ACCOUNTS.get(key, f"{key.replace('_', ' ')} {_short(theirs.get(key))}"))
    if found.max_shard_bytes != asked.max_shard_bytes:
        other.append(f"`max_shard_size` {found.max_shard_bytes}")
    return ", ".join(sorted(other)) or "other settings"


def _other_recipe(found: Any, asked: Mapping[str, Any]) -> str:
    if not isinstance(found, dict):
        return "another recipe"
    if any(found.get(key) != asked.get(key) for key in ("name", "bits")):
        return f"another recipe ({_short(found.get('name'))}, {_short(found.get('bits'))} bits)"
    if found.get("codec") != asked.get("codec"):
        return f"another codec ({_short(found.get('codec'))})"
    if found.get("effort") != asked.get("effort"):
        return "the default effort" if found.get("effort") is None else f"`effort` {_short(found['effort'])}"
    return "other rules or another target (`keep`, `set_bits`, `target_size`, `target_bpw`)"


def _what_is_wrong(task: RewriteTask, found: Manifest) -> str:
    """Say why a result of the right identity does not count as finished."""
    problems = problems_of_sizes(task.out.sizes().get, found)
    if problems:
        return problems[0]
    expected = {*task.plan.companions, *task.small_files}
    if expected | {INDEX_FILE, CONFIG_FILE} != found.files.keys() | {INDEX_FILE, CONFIG_FILE}:
        return "other files were copied to it (`include_files`)"
    return "files of its source were changed or copied since"


def _short(value: Any) -> str:
    return str(value)[:40]
