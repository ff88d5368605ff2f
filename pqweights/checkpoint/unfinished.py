"""What a run that was interrupted leaves in the folder of its result, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pqweights.checkpoint.names import JOURNAL_FILE, MANIFEST_FILE, WORK_FOLDER

# The commands that make each kind of result (RunIdentity.kind).
COMMANDS = {"master": "pqweights quantize", "export": "pqweights export"}


class WorkFolder(NamedTuple):
    """The work folder of a run that is not finished: whether it has a journal, and the first line of that."""

    has_journal: bool
    first_line: bytes = b""


def local_work_folder(folder: Path) -> WorkFolder | None:
    """Look for what an unfinished run into a folder left."""
    if not (folder / WORK_FOLDER).exists():
        return None
    try:
        with open(folder / WORK_FOLDER / JOURNAL_FILE, "rb") as journal:
            return WorkFolder(has_journal=True, first_line=journal.readline())
    except OSError:
        return WorkFolder(has_journal=(folder / WORK_FOLDER / JOURNAL_FILE).exists())


def is_interrupted(folder: Path) -> bool:
    """Whether a run into a folder on this machine began and did not reach its end, and it holds no earlier result."""
    return not (folder / MANIFEST_FILE).exists() and (folder / WORK_FOLDER / JOURNAL_FILE).exists()


def describe_interrupted(work: WorkFolder | None) -> str:
    """Say that a run was interrupted in a folder, by its work folder, which command it was, and how to continue it."""
    command = "" if work is None else _command_in(work.first_line)
    of = f" of {command}" if command else ""
    return f"holds an unfinished run{of}: run the same command again to continue where it stopped"


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
