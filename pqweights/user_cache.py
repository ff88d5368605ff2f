"""The user's cache folder: files that a later run finds again, and trusts only if nobody else can have written them."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def users_cache() -> Path | None:
    """Return the folder: PQWEIGHTS_CACHE if set, else one below XDG_CACHE_HOME or ~/.cache; None without a home."""
    chosen = os.environ.get("PQWEIGHTS_CACHE")
    if chosen:
        return Path(chosen)
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(users) / "pqweights" if os.path.isabs(users) else None  # without a home, ~ stays ~


def read_trusted(path: Path) -> bytes | None:
    """Return the content of a file, or None if somebody else could have written it. Raises OSError."""
    with open(path, "rb") as stream:
        status = os.fstat(stream.fileno())
        trusted = status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        return stream.read() if trusted else None


def write_trusted(path: Path, content: bytes) -> None:
    """Write a file at once, so that other processes find all of it or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.chmod(0o644)  # whatever the umask: a file that others may write is not used
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
