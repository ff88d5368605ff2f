"""Folders in which a run was interrupted: how they are recognized, and what to tell about them.

The journal of a run lies in the work folder until the run is finished (rewrite/statement.py). It tells
which command it belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pqweights.checkpoint.names import JOURNAL_FILE, MANIFEST_FILE, WORK_FOLDER
from pqweights.checkpoint.storage import Storage, WorkFolder
from pqweights.errors import MasterError

# The commands that make each kind of result (RunIdentity.kind).
COMMANDS = {"master": "pqweights quantize", "export": "pqweights export"}


def is_interrupted(folder: Path) -> bool:
    """Whether a run into a folder on this machine began and did not reach its end, and it holds no earlier result."""
    return not (folder / MANIFEST_FILE).exists() and (folder / WORK_FOLDER / JOURNAL_FILE).exists()


def describe_interrupted(found: WorkFolder | None) -> str:
    """Say that a run was interrupted in a folder, which command it was, and how to continue it.

    found: its work folder
    """
    command = "" if found is None else _command_in(found.first_line)
    of = f" of {command}" if command else ""
    return f"holds an unfinished run{of}: run the same command again to continue where it stopped"


def check_not_interrupted(storage: Storage) -> None:
    """Raise MasterError if a run into a folder was interrupted, and it holds no earlier result."""
    if MANIFEST_FILE not in storage.files():
        found = storage.work_folder()
        if found is not None and found.has_journal:
            raise MasterError(f"{storage}: {describe_interrupted(found)}")


def _command_in(first_line: bytes) -> str:
    """Return the command to which a journal belongs, as far as its first line tells."""
    try:
        first = json.loads(first_line)
    except (ValueError, RecursionError):
        return ""
    return command_of(first) if isinstance(first, dict) else ""


def command_of(first: Mapping[str, Any]) -> str:
    """Return the command that the first line of a journal names; an empty text if it names none."""
    target = first.get("target")
    target = f" --target {target}" if isinstance(target, str) and target.isprintable() else ""
    command = COMMANDS.get(str(first.get("kind")))
    return f"{command}{target}" if command else ""
