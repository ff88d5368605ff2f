"""Two cards, the one here and the one on the Hub, before one is made of them: whose notes and whose keys stand.

By the marks in the card on the Hub it is known what it was pushed with, and so on which side it was edited since.
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
    """What is kept of both.

    Raises OutputError where both were edited, each in its own way.
    """
    if here is None or there is None:
        return here or there or OldCard()

    def pushed_notes(notes: str) -> bool:
        return not notes.strip() if there.notes_mark is None else mark(notes) == there.notes_mark

    def pushed_keys(keys: dict[str, Any]) -> bool:
        return not keys if there.keys_mark is None else mark(keys) == there.keys_mark

    notes = _decide("notes", here.notes, there.notes, pushed_notes)
    keys = _decide("front matter", own_keys(here), own_keys(there), pushed_keys)
    ours = {key: value for card in (there, here) for key, value in card.facts.items() if key in OURS and key != "tags"}
    return OldCard(notes, ours | keys, (), here.repository or there.repository, here.branch or there.branch)


def _decide(what: str, here: Value, there: Value, was_pushed: Callable[[Value], bool]) -> Value:
    if here == there or was_pushed(there):
        return here
    if was_pushed(here):
        return there
    raise OutputError(
        f"{CARD_FILE}: its {what} on the Hub and here differ, and neither are those of the last push: make them the same, in the "
        f"{CARD_FILE} of the folder or on the Hub; nothing was pushed"
    )
