"""What the manifest of a finished result says of what was learned for it, so that it is not learned again."""

from __future__ import annotations

from typing import Any

from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.convert.journal import is_under_way
from pqweights.convert.manifest import Manifest, parse_manifest
from pqweights.errors import OutputError
from pqweights.storage import Store


def finished_manifest(out: Store, *, overwrite: bool) -> Manifest | None:
    """Return the manifest of a finished result that is to stay; None if there is none."""
    if overwrite or MANIFEST_FILE not in out.names() or is_under_way(out):
        return None
    data = out.read(MANIFEST_FILE)
    return None if data is None else parse_manifest(data)


def stated_by_result(out: Store, what: str, key: str, *, overwrite: bool) -> dict[str, Any] | None:
    """Return what the manifest of a finished result says of something that was learned; None without a result.

    what: its key in the manifest
    key: on what it depends

    Raises OutputError for another result.
    """
    manifest = finished_manifest(out, overwrite=overwrite)
    if manifest is None:
        return None
    stated = manifest.made_by.get(what)
    if what == "fit" and isinstance(stated, dict):
        stated = stated.get("sensitivity")
    if not isinstance(stated, dict) or stated.get("identity") != key:
        raise OutputError(
            f"{out}: holds another result, which this calibration did not make; pass `overwrite` to replace it, or "
            "choose another folder"
        )
    return stated
