"""Prompts as token ids (a text as it is, or a conversation in the model's chat template), and tokens as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pqweights.common.strict_json import is_utf8
from pqweights.errors import EvaluationError, GenerationError
from pqweights.inference.runtimes.folders import Folder
from pqweights.inference.runtimes.packages import Refused, package, silent
from pqweights.inference.runtimes.texts import Ids, check_vocabulary

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are no character, or not yet
# So many tokens of a prompt come before the text that continues it.
CONTEXT_TOKENS = 8
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"


@dataclass(frozen=True)
class Message:
    """A message of a conversation. role: SYSTEM, USER or ASSISTANT"""

    role: str
    text: str


def check_prompt(text: str, name: str = "`prompt`") -> None:
    """Raise GenerationError if a prompt is empty or cannot be written as UTF-8. name: where it comes from"""
    if not text.strip():
        raise GenerationError(f"{name}: expected a text, found {'only white space' if text else 'an empty one'}")
    if not is_utf8(text):
        raise GenerationError(f"{name}: expected UTF-8 text, found other bytes; convert it")


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a tokenizer can write conversations."""
    return bool(getattr(tokenizer, "chat_template", None))


def text_ids(tokenizer: Any, text: str) -> Ids:
    """Return the ids of a text that is to be continued, with the special tokens that the tokenizer begins with."""
    with silent():
        return np.array(tokenizer(text)["input_ids"], dtype=np.int64)


def chat_ids(tokenizer: Any, turns: Sequence[Message], where: Path) -> Ids:
    """Return the ids of a conversation, up to where the model's turn begins.

    where: the folder of the tokenizer

    Raises GenerationError if the template refuses the conversation, SourceError if it is damaged.
    """
    template_error = package("jinja2", "transformers", "a chat template").TemplateError
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    try:
        with Refused(f"{where}: transformers cannot apply the chat template"), silent():
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    except template_error as error:
        said = " ".join(str(error).split())[:200]
        raise GenerationError(
            f"{where}: the chat template refuses this conversation: {said}; leave out `system`, or continue the text "
            "without it: `no_chat`"
        ) from None
    return np.array(ids, dtype=np.int64)


def check_ids(folder: Folder, ids: Ids) -> None:
    """Raise GenerationError if a model cannot take these tokens: none, too many, or unknown ones."""
    if not len(ids):
        raise GenerationError(f"{folder.path}: the prompt has no tokens; give a longer one")
    if folder.context is not None and len(ids) >= folder.context:
        raise GenerationError(
            f"{folder.path}: the prompt has {len(ids)} tokens, and the model takes {folder.context}, its reply "
            "included; give a shorter prompt"
        )
    try:
        check_vocabulary(folder, ids)
    except EvaluationError as error:
        raise GenerationError(str(error)) from None


class TextStream:
    """The text of tokens that come one by one: a piece is given out once no later token can change it.

    A token may end within a character, and how a token is written may depend on those before it (SentencePiece leaves
    out a space at the start of a text). So each piece is the difference of two texts that begin at the same, earlier
    token.

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
