"""A GGUF file that llama.cpp computes on the CPU: logits of any tokens."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf.contents import GgufContents
from pqweights.checkpoint.gguf.rope import YARN_BETAS
from pqweights.common.threads import usable_cores
from pqweights.errors import MemoryShortageError, SourceError
from pqweights.models.settings import is_positive
from pqweights.runtime.llama_library import library, load
from pqweights.runtime.texts import Ids

# Tokens that llama.cpp reads at once; the logits of so many are in memory twice.
BATCH_TOKENS = 512
# A context has room for a multiple of so many tokens.
ROOM_STEP = 256
FLOAT32 = 0  # ggml_type
NO_FLASH_ATTENTION = 0  # llama_flash_attn_type


class LlamaRun:
    """A loaded model."""

    def __init__(self, contents: GgufContents, *, exact: bool, threads: int | None = None) -> None:
        """Load a model.

        exact: keep keys and values in float32, without the approximations of flash attention; by default llama.cpp
            keeps them in float16
        threads: how many compute; by default one for each core

        Raises SourceError if llama.cpp refuses the file, MissingDependencyError.
        """
        self._threads = threads or usable_cores()
        self._path, self._exact = contents.path, exact
        betas = {f"yarn_{key}": f"{contents.architecture}.rope.scaling.yarn_{key}" for key in YARN_BETAS}
        # It reads them itself for few architectures.
        self._betas = {
            option: value for option, key in betas.items() if is_positive(value := contents.metadata.get(key))
        }
        self._llama, self._log = library()
        self._held = _Held(self._llama, load(contents.path))
        weakref.finalize(self, self._held.free)
        vocabulary = self._llama.llama_model_get_vocab(self._held.model)
        self._vocabulary = int(self._llama.llama_vocab_n_tokens(vocabulary))
        self._room = 0

    def logits(self, ids: Ids, last: int) -> npt.NDArray[np.float32]:
        """Return the logits after each of the last tokens, [last, vocabulary] f32. ids: [tokens]"""
        if len(ids) > self._room:
            self._make_context(-(-max(len(ids), 2 * self._room) // ROOM_STEP) * ROOM_STEP)
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._held.context), True)
        return self._read(ids, last)

    def _make_context(self, room: int) -> None:
        self._held.free_context()
        self._room = 0
        parameters = self._llama.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = room, BATCH_TOKENS, BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.offload_kqv = parameters.op_offload = False
        for name, value in self._betas.items():
            setattr(parameters, name, value)
        if self._exact:
            parameters.type_k = parameters.type_v = FLOAT32
            parameters.flash_attn_type = NO_FLASH_ATTENTION
        self._log.clear()
        self._held.context = self._llama.llama_init_from_model(self._held.model, parameters)
        if not self._held.context:
            raise MemoryShortageError(
                f"{self._path}: llama.cpp cannot make room for {room} tokens: {self._log.first_error()}; give a "
                "smaller `window`"
            )
        self._room = room

    def _read(self, ids: Ids, last: int) -> npt.NDArray[np.float32]:
        """Read tokens into an empty context, and return the logits after the last ones.

        Raises SourceError if llama.cpp cannot compute them.
        """
        result = np.empty((last, self._vocabulary), dtype=np.float32)
        done = 0
        for begin in range(0, len(ids), BATCH_TOKENS):
            piece = ids[begin : begin + BATCH_TOKENS]
            scored = min(len(piece), max(0, begin + len(piece) - (len(ids) - last)))
            self._log.clear()
            code = self._llama.llama_decode(self._held.context, self._held.batch(piece, begin, scored))
            if code:
                raise SourceError(f"{self._path}: llama.cpp fails with code {code}: {self._log.first_error()}")
            if scored:
                logits = self._llama.llama_get_logits(self._held.context)
                result[done : done + scored] = np.ctypeslib.as_array(logits, (scored, self._vocabulary))
                done += scored
        return result


class _Held:
    """What llama.cpp allocated: a model, a context if there is one, and a batch."""

    def __init__(self, llama: Any, model: Any) -> None:
        self._llama, self.model = llama, model
        self.context: Any = None
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        for slot in range(BATCH_TOKENS):
            self._batch.n_seq_id[slot] = 1
            self._batch.seq_id[slot][0] = 0

    def batch(self, ids: Ids, start: int, scored: int) -> Any:
        """Return the batch with tokens from a position on; the logits of the last ones are computed."""
        count = len(ids)
        self._batch.n_tokens = count
        np.ctypeslib.as_array(self._batch.token, (count,))[:] = ids
        np.ctypeslib.as_array(self._batch.pos, (count,))[:] = np.arange(start, start + count)
        np.ctypeslib.as_array(self._batch.logits, (count,))[:] = np.arange(count) >= count - scored
        return self._batch

    def free_context(self) -> None:
        """Free the context."""
        if self.context:
            self._llama.llama_free(self.context)
            self.context = None

    def free(self) -> None:
        """Free everything."""
        self.free_context()
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_model_free(self.model)
