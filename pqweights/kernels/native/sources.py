"""A name for what the kernels are compiled from; tools/build_kernels.py loads this file alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent


def sources_digest() -> str | None:
    """A digest that changes with every source; None where there are no sources, as in an installed package."""
    files = sorted(path for kind in ("cpp", "hpp", "inc") for path in FOLDER.glob(f"*.{kind}"))
    content = b"".join(path.name.encode() + b"\0" + path.read_bytes() + b"\0" for path in files)
    return hashlib.sha256(content).hexdigest()[:32] if files else None
