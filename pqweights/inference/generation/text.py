"""Tokens to text while they come: a piece is given out once no later token can change it.

A token may end within a character, and how a token is written may depend on those before it (SentencePiece leaves out a
space at the start of a text). So each piece is the difference of two texts that begin at the same, earlier token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are no character, or not yet
# So many tokens of a prompt come before the text that continues it.
CONTEXT_TOKENS = 8


class TextStream:
    """The text of tokens that come one by one.

    tokenizer: a tokenizer of transformers
    before: the ids that come before the text
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)
        # Tokens [start, done) have been given out, and serve as the context of those that follow.
        self._start, self._done = 0, len(self._ids)

    def add(self, token: int) -> str:
        """Return what is certain of the text now and was not before; often nothing."""
        self._ids.append(token)
        return self._new(last=False)

    def end(self) -> str:
        """Return the rest of the text."""
        return self._new(last=True)

    def _new(self, *, last: bool) -> str:
        known, now = self._text(self._start, self._done), self._text(self._start, len(self._ids))
        if len(now) <= len(known) or (now.endswith(UNFINISHED) and not last):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return now[len(known) :]

    def _text(self, start: int, stop: int) -> str:
        ids = self._ids[start:stop]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
