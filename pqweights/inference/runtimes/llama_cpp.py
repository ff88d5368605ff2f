"""A GGUF file that llama.cpp computes on the CPU: logits of any tokens, and generation one token at a time."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.errors import GenerationError, SourceError
from pqweights.gguf.contents import GgufContents
from pqweights.inference.runtimes.llama_library import library, load
from pqweights.inference.runtimes.steps import NOTHING, Step, common_tokens
from pqweights.inference.runtimes.texts import Ids
from pqweights.rewrite.task import usable_cores

# Tokens that llama.cpp reads at once; the logits of so many are in memory twice.
BATCH_TOKENS = 512
# A context has room for a multiple of so many tokens, and for this many more than a prompt.
ROOM_STEP, ROOM_FOR_REPLY = 256, 512
FLOAT32 = 0  # ggml_type
NO_FLASH_ATTENTION = 0  # llama_flash_attn_type


class LlamaRun:
    """A loaded model. It is a Stepper, too."""

    def __init__(self, contents: GgufContents, *, exact: bool) -> None:
        """Load a model.

        exact: keep keys and values in float32, without the approximations of flash attention; by default llama.cpp
            keeps them in float16

        Raises SourceError if llama.cpp refuses the file, MissingDependencyError.
        """
        self._path, self._exact = contents.path, exact
        self._llama, self._log = library()
        self._held = _Held(self._llama, load(contents.path))
        weakref.finalize(self, self._held.free)
        vocabulary = self._llama.llama_model_get_vocab(self._held.model)
        self._vocabulary = int(self._llama.llama_vocab_n_tokens(vocabulary))
        states = (self._llama.llama_model_is_recurrent, self._llama.llama_model_is_hybrid)
        self._can_be_cut = not any(is_one(self._held.model) for is_one in states)
        self._room = 0
        self._ids = NOTHING  # what the context holds

    def logits(self, ids: Ids, last: int) -> npt.NDArray[np.float32]:
        """Return the logits after each of the last tokens, [last, vocabulary] f32. ids: [tokens]"""
        self._ids = NOTHING
        self._make_room(len(ids), kept=0)
        self._keep(0)
        return self._read(ids, 0, last)

    def generate(self, ids: Ids, count: int) -> Ids:
        """Return the likeliest next tokens, [count]. ids: [tokens]"""
        tokens: list[int] = []

        def likeliest(logits: npt.NDArray[np.float32]) -> int | None:
            tokens.append(int(logits.argmax()))
            return tokens[-1] if len(tokens) < count else None

        self._ids = NOTHING
        self.run(ids, likeliest)
        return np.array(tokens, dtype=np.int64)

    def kept(self, ids: Ids) -> int:
        """See Stepper."""
        common = common_tokens(self._ids, ids)
        return common if common == len(self._ids) or self._can_be_cut else 0

    def run(self, ids: Ids, step: Step) -> None:
        """See Stepper."""
        kept, fed = self.kept(ids), ids.tolist()
        self._ids = NOTHING
        self._make_room(len(ids) + ROOM_FOR_REPLY, kept=kept)
        kept = self._keep(kept)
        tokens = ids[kept:]
        while True:
            token = step(self._read(tokens, len(fed) - len(tokens), 1)[0])
            if token is None:
                break
            fed.append(token)
            self._make_room(len(fed), kept=len(fed) - 1)
            tokens = np.array([token], dtype=np.int64)
        self._ids = np.array(fed, dtype=np.int64)

    def _make_room(self, tokens: int, *, kept: int) -> None:
        """Have a context for so many tokens; a new one takes over the state of the old one if some are kept.

        Raises GenerationError if there is not enough memory.
        """
        if tokens <= self._room:
            return
        state = self._state() if kept else None
        room = -(-max(tokens, 2 * self._room if kept else 0) // ROOM_STEP) * ROOM_STEP
        self._held.free_context()
        self._room = 0
        parameters = self._llama.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = room, BATCH_TOKENS, BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = usable_cores()
        parameters.offload_kqv = parameters.op_offload = False
        if self._exact:
            parameters.type_k = parameters.type_v = FLOAT32
            parameters.flash_attn_type = NO_FLASH_ATTENTION
        self._log.clear()
        self._held.context = self._llama.llama_init_from_model(self._held.model, parameters)
        if not self._held.context:
            raise GenerationError(
                f"{self._path}: llama.cpp cannot make room for {room} tokens: {self._log.first_error()}"
            )
        self._room = room
        if state is not None and not self._llama.llama_state_seq_set_data(self._held.context, state, len(state), 0):
            raise GenerationError(f"{self._path}: llama.cpp cannot go on beyond {kept} tokens; give `max_tokens`")

    def _state(self) -> Any:
        """Return what the context holds of the tokens."""
        state = (ctypes.c_uint8 * self._llama.llama_state_seq_get_size(self._held.context, 0))()
        self._llama.llama_state_seq_get_data(self._held.context, state, len(state), 0)
        return state

    def _keep(self, count: int) -> int:
        """Forget all but the first tokens, and return how many are left: none where that is not possible."""
        memory = self._llama.llama_get_memory(self._held.context)
        if count and self._llama.llama_memory_seq_rm(memory, 0, count, -1):
            return count
        self._llama.llama_memory_clear(memory, True)
        return 0

    def _read(self, ids: Ids, start: int, last: int) -> npt.NDArray[np.float32]:
        """Append tokens to those that the context holds, and return the logits after the last ones.

        ids: [tokens]
        start: how many tokens come before

        Raises SourceError if llama.cpp cannot compute them.
        """
        result = np.empty((last, self._vocabulary), dtype=np.float32)
        done = 0
        for begin in range(0, len(ids), BATCH_TOKENS):
            piece = ids[begin : begin + BATCH_TOKENS]
            scored = min(len(piece), max(0, begin + len(piece) - (len(ids) - last)))
            self._log.clear()
            code = self._llama.llama_decode(self._held.context, self._held.batch(piece, start + begin, scored))
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
