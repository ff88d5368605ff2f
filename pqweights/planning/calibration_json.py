"""The JSON in the metadata of the files that `calibrate` writes: scales (awq_file.py) and moments (moments_file.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.errors import PqweightsError, SourceError
from pqweights.strict_json import Fields, parse_json


@dataclass(frozen=True, kw_only=True)
class CalibrationKind:
    """A kind of file that `calibrate` writes.

    key: the key of its metadata
    version: that of the format
    what: what messages call its content
    command: what writes it
    """

    key: str
    version: int
    what: str
    command: str

    def damaged(self, path: Path, what: str) -> SourceError:
        """Return the error for a damaged file."""
        return SourceError(f"{path}: damaged: {what}; run {self.command} again")

    def fields(self, path: Path, metadata: Mapping[str, str]) -> Fields:
        """Return the JSON in the metadata of such a file.

        Raises SourceError for another file, or another version.
        """

        def wrong(key: str, expected: str, found: Any) -> PqweightsError:
            return self.damaged(path, f"{key}: expected {expected}, found {str(found)[:80]!r}")

        try:
            value = parse_json(metadata[self.key].encode("utf-8", "surrogatepass"))
        except (KeyError, ValueError):
            value = None
        if not isinstance(value, dict):
            other = next((kind for kind in (SCALES, MOMENTS) if kind.key in metadata and kind != self), None)
            found = "another file" if other is None else f"{other.what}, which {other.command} writes"
            raise SourceError(f"{path}: expected {self.what} that {self.command} wrote, found {found}")
        version = value.get("version")
        if type(version) is not int or version != self.version:
            raise SourceError(
                f"{path}: version: expected {self.version}, found {version!r}; a newer pqweights may read it"
            )
        return Fields(value, wrong)


SCALES = CalibrationKind(key="pqweights_awq", version=1, what="scales", command="pqweights calibrate")
MOMENTS = CalibrationKind(key="pqweights_moments", version=1, what="moments", command="pqweights calibrate --moments")
