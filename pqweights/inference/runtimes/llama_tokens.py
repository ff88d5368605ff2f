"""The tokenizer in a GGUF file, as llama.cpp runs it, with those methods of transformers' tokenizers that are used."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pqweights.errors import SourceError
from pqweights.gguf.file import open_gguf
from pqweights.inference.runtimes.llama_library import library, load
from pqweights.inference.runtimes.packages import package

NO_VOCABULARY = 0  # llama_vocab_type
# A first guess at how many bytes of text a token has.
BYTES_PER_TOKEN = 16


class GgufTokenizer:
    """The tokenizer of a GGUF file.

    chat_template: the template for conversations, if the file has one
    """

    def __init__(self, path: Path) -> None:
        """Load the vocabulary of a file, without the weights.

        Raises SourceError if the file has none, or llama.cpp does not know it, and what library() raises.
        """
        contents = open_gguf(path)
        self._llama = library().functions
        model = load(contents.path, vocabulary_only=True)
        weakref.finalize(self, self._llama.llama_model_free, model)
        self._vocabulary = self._llama.llama_model_get_vocab(model)
        if self._llama.llama_vocab_type(self._vocabulary) == NO_VOCABULARY:
            raise SourceError(f"{path}: expected a tokenizer, found none; `tokenizer` names a folder that has it")
        self.chat_template = contents.text("tokenizer.chat_template")

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if there is one; the file says whether it is put before texts."""
        return self._special(self._llama.llama_vocab_bos)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        return self._special(self._llama.llama_vocab_eos)

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """All tokens that end a text or a turn."""
        is_end, vocabulary = self._llama.llama_vocab_is_eog, self._vocabulary
        return frozenset(token for token in range(len(self)) if is_end(vocabulary, token))

    def __len__(self) -> int:
        return int(self._llama.llama_vocab_n_tokens(self._vocabulary))

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return the ids of a text, in which special tokens are known by their names, as input_ids.

        add_special_tokens: whether to put those before and behind it with which the model was trained
        """
        data = text.encode()
        room = len(data) + 16
        ids = (ctypes.c_int32 * room)()
        count = self._llama.llama_tokenize(self._vocabulary, data, len(data), ids, room, add_special_tokens, True)
        assert count >= 0  # no token is shorter than a byte, and few are added
        return {"input_ids": list(ids[:count])}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **_: object) -> str:
        """Return the text of tokens, with replacement characters for pieces of characters."""
        given = (ctypes.c_int32 * len(ids))(*ids)
        room = BYTES_PER_TOKEN * len(ids)
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self._llama.llama_detokenize(
                self._vocabulary, given, len(ids), buffer, room, False, not skip_special_tokens
            )
            if count >= 0:
                return buffer.raw[:count].decode(errors="replace")
            room = -count

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, **_: object
    ) -> dict[str, list[int]]:
        """Return the ids of a conversation as input_ids.

        Raises jinja2.TemplateError if the template refuses it.
        """
        formats = package("llama_cpp.llama_chat_format", "llama")
        template_error = package("jinja2", "llama").TemplateError
        begin, end = (
            self._text(self._special(get)) for get in (self._llama.llama_vocab_bos, self._llama.llama_vocab_eos)
        )
        formatter = formats.Jinja2ChatFormatter(
            self.chat_template, eos_token=end, bos_token=begin, add_generation_prompt=add_generation_prompt
        )
        try:
            written = formatter(messages=list(messages)).prompt
        except ValueError as error:  # the template's own raise_exception
            raise template_error(str(error)) from None
        return self(written, add_special_tokens=False)

    def _special(self, get: Any) -> int | None:
        token = int(get(self._vocabulary))
        return None if token < 0 else token

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.decode([token])
