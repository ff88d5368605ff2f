"""What a run that was interrupted leaves in the folder of its result, and what is said of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pqweights.checkpoint.names import JOURNAL_FILE, MANIFEST_FILE, WORK_FOLDER

# The commands that make each kind of result (Manifest.kind).
COMMANDS = {"master": "pqweights quantize", "export": "pqweights export"}


def journal_line(folder: Path) -> bytes | None:
    """Return the first line of the journal that an unfinished run left in a folder on this machine.

    Of a journal that is empty, or that cannot be read, it is a line without content. It is empty if the work folder has
    no journal; None without a work folder.
    """
    if not (folder / WORK_FOLDER).exists():
        return None
    path = folder / WORK_FOLDER / JOURNAL_FILE
    try:
        with open(path, "rb") as journal:
            return journal.readline() or b"\n"
    except OSError:
        return b"\n" if path.exists() else b""


def is_interrupted(folder: Path) -> bool:
    """Whether a run into a folder on this machine began and did not reach its end, and it holds no earlier result."""
    return not (folder / MANIFEST_FILE).exists() and (folder / WORK_FOLDER / JOURNAL_FILE).exists()


def describe_interrupted(journal: bytes | None) -> str:
    """Say that a run was interrupted in a folder, which command it was, and how to continue it.

    journal: the first line of its journal, as far as it is known
    """
    command = ""
    with contextlib.suppress(ValueError, RecursionError):
        first = json.loads(journal or b"")
        command = command_of(first) if isinstance(first, dict) else ""
    of = f" of {command}" if command else ""
    return f"holds an unfinished run{of}: run the same command again to continue where it stopped"


def command_of(first: Mapping[str, Any]) -> str:
    """Return the command that the first line of a journal names; an empty text if it names none."""
    target = first.get("target")
    target = f" --target {target}" if isinstance(target, str) and target.isprintable() else ""
    command = COMMANDS.get(str(first.get("kind")))
    return f"{command}{target}" if command else ""
