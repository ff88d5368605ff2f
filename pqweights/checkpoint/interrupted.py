"""Folders in which a run was interrupted: how they are recognized, and what to tell about them.

The journal of a run lies in the work folder until the run is finished (rewrite/journal.py). Its first line tells which
command it belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pqweights.checkpoint.names import JOURNAL_FILE, MANIFEST_FILE, WORK_FOLDER

# The commands that make each kind of result (RunIdentity.kind).
COMMANDS = {"master": "pqweights quantize", "export": "pqweights export"}


def is_interrupted(folder: Path) -> bool:
    """Whether a run into a folder began and did not reach its end, and the folder holds no earlier result."""
    return not (folder / MANIFEST_FILE).exists() and (folder / WORK_FOLDER / JOURNAL_FILE).exists()


def describe_interrupted(folder: Path) -> str:
    """Say that a run was interrupted in a folder, which command it was, and how to continue it."""
    command = _command_of_journal(folder / WORK_FOLDER / JOURNAL_FILE)
    of = f" of {command}" if command else ""
    return f"holds an unfinished run{of}: run the same command again to continue where it stopped"


def _command_of_journal(journal: Path) -> str:
    """Return the command to which a journal belongs, as far as it tells."""
    try:
        with open(journal, "rb") as stream:
            first = json.loads(stream.readline())
    except (OSError, ValueError, RecursionError):
        return ""
    return command_of(first) if isinstance(first, dict) else ""


def command_of(first: Mapping[str, Any]) -> str:
    """Return the command that the first line of a journal names; an empty text if it names none."""
    target = first.get("target")
    target = f" --target {target}" if isinstance(target, str) and target.isprintable() else ""
    command = COMMANDS.get(str(first.get("kind")))
    return f"{command}{target}" if command else ""
