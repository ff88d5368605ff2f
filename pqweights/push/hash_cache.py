"""The SHA-256 of files that were hashed before, in the user's cache folder, one small file for each.

An entry is named after the content of the file that was hashed (FinishedFolder.content_key), not after where it lies or
when it was written. So it is found again for a copy of the folder, and never for other content. Without a folder that
can be written, every push hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from pathlib import Path

from pqweights.user_cache import read_trusted, users_cache, write_trusted

MOST_ENTRIES = 4000  # a few megabytes of disk
_ENTRY = re.compile(r"(?P<sha256>[0-9a-f]{64}) (?P<check>[0-9a-f]{64})\n")


def kept_hash(key: str) -> str | None:
    """Return the SHA-256, in hex, of the file with this content; None if there is none, or none to be trusted."""
    path = _path(key)
    if path is None:
        return None
    try:
        found = _ENTRY.fullmatch((read_trusted(path) or b"").decode("ascii"))
    except (OSError, UnicodeDecodeError):
        return None
    return found["sha256"] if found and found["check"] == _check(key, found["sha256"]) else None


def keep_hash(key: str, sha256: str) -> None:
    """Keep the SHA-256, in hex, of a file for later pushes, and drop the oldest of too many."""
    path = _path(key)
    if path is None:
        return
    with contextlib.suppress(OSError):
        write_trusted(path, f"{sha256} {_check(key, sha256)}\n".encode())
        _drop_oldest(path.parent)


def forget_hash(key: str) -> None:
    """Drop an entry, if there is one."""
    path = _path(key)
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _drop_oldest(folder: Path) -> None:
    entries = list(folder.iterdir())
    if len(entries) <= MOST_ENTRIES:
        return
    ages = []
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):  # another push dropped it
            ages.append((entry.stat().st_mtime_ns, entry))
    for _, entry in sorted(ages)[: len(ages) - MOST_ENTRIES]:
        entry.unlink(missing_ok=True)


def _path(key: str) -> Path | None:
    folder = users_cache()
    return None if folder is None else folder / "sha256" / key


def _check(key: str, sha256: str) -> str:
    """Return what an entry must state beside the hash: a damaged entry does not."""
    return hashlib.sha256(f"{key} {sha256}".encode()).hexdigest()
