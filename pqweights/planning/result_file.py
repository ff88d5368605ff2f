"""The check that `calibrate` and `sensitivity` make before they measure: may their result be written to this path?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pqweights.errors import OutputError, SourceError


def check_free(path: Path, overwrite: bool, *, kind: str, read: Callable[[Path], object]) -> None:
    """Raise OutputError if a result must not be written to a path.

    path: the file to write.
    overwrite: whether an older result may be replaced; other files never are.
    kind: what the file holds, in the plural, for messages.
    read: reads such a file; raises SourceError for any other.
    """
    if not path.absolute().parent.is_dir():
        raise OutputError(f"{path}: its folder does not exist; make it first")
    if path.is_dir():
        raise OutputError(f"{path}: expected the name of a file, found a folder")
    if not path.exists():
        return
    if not overwrite:
        raise OutputError(f"{path}: the file exists; choose another name, or pass `overwrite`")
    try:
        read(path)
    except SourceError:
        raise OutputError(
            f"{path}: expected a file of {kind}, and `overwrite` replaces nothing else; move it away, or choose "
            "another name"
        ) from None
