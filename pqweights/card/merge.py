"""The merge of two cards, the one in the folder and the one on the Hub: whose notes and front matter are kept.

The marks in the card on the Hub tell with which notes and keys it was pushed, and so which side was edited since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pqweights.card.front_matter import OURS, own_keys
from pqweights.card.old_card import OldCard, mark
from pqweights.checkpoint.names import CARD_FILE
from pqweights.errors import OutputError

Value = TypeVar("Value", str, dict[str, Any])


def merge(here: OldCard | None, there: OldCard | None) -> OldCard:
    """Return what is kept of the card in the folder and of the one on the Hub.

    Raises OutputError if both were edited differently.
    """
    if here is None or there is None:
        return here or there or OldCard()

    def pushed_notes(notes: str) -> bool:
        return not notes.strip() if there.notes_mark is None else mark(notes) == there.notes_mark

    def pushed_keys(keys: dict[str, Any]) -> bool:
        return not keys if there.keys_mark is None else mark(keys) == there.keys_mark

    notes = _choose("notes", here.notes, there.notes, was_pushed=pushed_notes)
    keys = _choose("front matter", own_keys(here), own_keys(there), was_pushed=pushed_keys)
    ours = {key: value for card in (there, here) for key, value in card.facts.items() if key in OURS and key != "tags"}
    return OldCard(
        notes=notes,
        facts=ours | keys,
        repository=here.repository or there.repository,
        branch=here.branch or there.branch,
    )


def _choose(part: str, here: Value, there: Value, *, was_pushed: Callable[[Value], bool]) -> Value:
    """Return the side that was edited since the last push, or this one if neither was."""
    if here == there or was_pushed(there):
        return here
    if was_pushed(here):
        return there
    raise OutputError(
        f"{CARD_FILE}: its {part} on the Hub and here differ, and both were edited since the last push: make them the "
        f"same, in the {CARD_FILE} of the folder or on the Hub; nothing was pushed"
    )
