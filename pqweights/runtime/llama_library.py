"""llama.cpp, through the low-level functions of llama-cpp-python: kept quiet, its errors turned into one line.

A GGUF file's tokenizer is run by llama.cpp, and has those methods of transformers' tokenizers that are used.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from pathlib import Path
from typing import Any

from pqweights.checkpoint.gguf.file import open_gguf
from pqweights.errors import SourceError
from pqweights.runtime.packages import Refused, package

ERROR = 4  # ggml_log_level of ggml.h; the comments of llama-cpp-python name others
LONGEST_LINE = 300
NO_VOCABULARY = 0  # llama_vocab_type


class LlamaLog:
    """What llama.cpp says instead of printing it: the errors since `clear`."""

    def __init__(self, library: Any) -> None:
        self._errors: list[str] = []
        self._callback = library.llama_log_callback(self._add)  # the library does not keep it alive
        library.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _add(self, level: int, text: bytes, _: Any) -> None:
        if level == ERROR:
            self._errors.append(" ".join(text.decode(errors="replace").split()))

    def clear(self) -> None:
        """Forget what was said."""
        self._errors.clear()

    def first_error(self) -> str:
        """Return the first error, which names the cause; those that follow name the functions that it ended."""
        cause = next(filter(None, self._errors), "it does not say why")
        return cause.partition(": ")[2][:LONGEST_LINE] if cause.startswith("llama_") else cause[:LONGEST_LINE]


@functools.cache
def library() -> tuple[Any, LlamaLog]:
    """Load llama.cpp, and return its functions by their names, and its log.

    Raises MissingDependencyError if llama-cpp-python is not installed, SourceError if its library cannot be loaded.
    """
    with Refused("llama-cpp-python cannot load llama.cpp"):
        functions = package("llama_cpp.llama_cpp", "llama", "a GGUF file")
    log = LlamaLog(functions)
    functions.llama_backend_init()
    return functions, log


def load(path: Path, *, vocabulary_only: bool = False) -> Any:
    """Load a model onto the CPU, and return llama.cpp's pointer to it, which the caller frees.

    path: the file, the first one of a split model

    Raises SourceError if llama.cpp refuses it, and what library() raises.
    """
    llama, log = library()
    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.vocab_only = vocabulary_only
    log.clear()
    model = llama.llama_model_load_from_file(os.fsencode(path), parameters)
    if not model:
        raise SourceError(f"{path}: llama.cpp cannot load this model: {log.first_error()}")
    return model


class GgufTokenizer:
    """The tokenizer of a GGUF file."""

    def __init__(self, path: Path) -> None:
        """Load the vocabulary of a file, without the weights.

        Raises SourceError if the file has none, or llama.cpp does not know it, and what library() raises.
        """
        contents = open_gguf(path)
        self._llama, _ = library()
        model = load(contents.path, vocabulary_only=True)
        weakref.finalize(self, self._llama.llama_model_free, model)
        self._vocabulary = self._llama.llama_model_get_vocab(model)
        if self._llama.llama_vocab_type(self._vocabulary) == NO_VOCABULARY:
            raise SourceError(f"{path}: expected a tokenizer, found none; eval takes --tokenizer DIR")

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if there is one; the file says whether it is put before texts."""
        return self._special(self._llama.llama_vocab_bos)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        return self._special(self._llama.llama_vocab_eos)

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

    def _special(self, get: Any) -> int | None:
        token = int(get(self._vocabulary))
        return None if token < 0 else token
