"""An append-only journal: what a run has done, for a run that continues it.

A line is the sha256 of its JSON, a space, and the JSON. A line that a kill cut short is dropped when the journal is
read, with everything behind it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pqweights.checkpoint.writer import disk_errors


def journal_line(value: Any) -> bytes:
    """Return the line of a value that JSON has."""
    content = json.dumps(value).encode()
    return b"%s %s\n" % (hashlib.sha256(content).hexdigest().encode(), content)


def append_line(path: Path, value: Any) -> None:
    """Add a line to a journal, which is created if it does not exist. Raises OutputError."""
    with disk_errors(path), open(path, "ab") as stream:
        stream.write(journal_line(value))


def read_journal(path: Path) -> list[Any]:
    """Return the values of a journal, in order, and cut off what is damaged behind them.

    There are none if there is no journal, or if its first line is damaged; then it stays as it is.
    """
    values: list[Any] = []
    if not path.exists():
        return values
    valid = 0
    for line in path.read_bytes().splitlines(keepends=True):
        digest, _, content = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or hashlib.sha256(content).hexdigest().encode() != digest:
            if values:
                os.truncate(path, valid)
            break
        values.append(json.loads(content))
        valid += len(line)
    return values
