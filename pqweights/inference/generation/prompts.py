"""Prompts as token ids: a text as it is, or a conversation in the form of the model's chat template."""

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
            found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    except template_error as error:
        said = " ".join(str(error).split())[:200]
        raise GenerationError(
            f"{where}: the chat template refuses this conversation: {said}; leave out `system`, or continue the text "
            "without it: `no_chat`"
        ) from None
    return np.array(found, dtype=np.int64)


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
