"""The user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def users_cache() -> Path | None:
    """Return the folder: PQWEIGHTS_CACHE if set, else one below XDG_CACHE_HOME or ~/.cache; None without a home."""
    chosen = os.environ.get("PQWEIGHTS_CACHE")
    if chosen:
        return Path(chosen)
    users = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(users) / "pqweights" if os.path.isabs(users) else None  # without a home, ~ stays ~
