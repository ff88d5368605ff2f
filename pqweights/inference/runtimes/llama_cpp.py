"""A GGUF file that llama.cpp computes on the CPU: logits of any tokens, and generation one token at a time."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf.contents import GgufContents
from pqweights.checkpoint.gguf.rope import YARN_BETAS
from pqweights.checkpoint.gguf.settings import is_positive
from pqweights.errors import GenerationError, SourceError
from pqweights.inference.runtimes.llama_library import library, load
from pqweights.inference.runtimes.steps import Continuation, OnToken, Stepper, TokenChoice, nan_error
from pqweights.inference.runtimes.texts import Ids
from pqweights.rewrite.task import usable_cores

# Tokens that llama.cpp reads at once; the logits of so many are in memory twice.
BATCH_TOKENS = 512
# A context has room for a multiple of so many tokens.
ROOM_STEP = 256
FLOAT32 = 0  # ggml_type
NO_FLASH_ATTENTION = 0  # llama_flash_attn_type


class LlamaRun(Stepper):
    """A loaded model."""

    def __init__(self, contents: GgufContents, *, exact: bool, threads: int | None = None) -> None:
        """Load a model.

        exact: keep keys and values in float32, without the approximations of flash attention; by default llama.cpp
            keeps them in float16
        threads: how many compute; by default one for each core

        Raises SourceError if llama.cpp refuses the file, MissingDependencyError.
        """
        super().__init__()
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
        self.forget()
        self._begin(len(ids))
        return self._read(ids, 0, last)

    def _has_room(self, tokens: int) -> bool:
        return tokens <= self._room

    def _begin(self, tokens: int) -> None:
        """See Stepper. Raises GenerationError if there is not enough memory."""
        if not self._has_room(tokens):
            self._make_context(-(-max(tokens, 2 * self._room) // ROOM_STEP) * ROOM_STEP)
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._held.context), True)

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
            raise GenerationError(
                f"{self._path}: llama.cpp cannot make room for {room} tokens: {self._log.first_error()}; give a "
                "smaller `max_tokens`"
            )
        self._room = room

    def _cut(self, count: int) -> bool:
        memory = self._llama.llama_get_memory(self._held.context)
        end = self._llama.llama_memory_seq_pos_max(memory, 0) + 1
        return bool(self._llama.llama_memory_seq_rm(memory, 0, end - count, -1))

    def _generate(self, ids: Ids, kept: int, wanted: Continuation, on_token: OnToken) -> Ids:
        sampler = self._sampler(wanted.choice)
        try:
            held, tokens = ids[:kept], ids[kept:]
            for _ in range(wanted.most):
                if np.isnan(self._read(tokens, len(held), 1)).any():
                    raise nan_error()
                held = np.append(held, tokens)
                token = int(self._llama.llama_sampler_sample(sampler, self._held.context, -1))
                on_token(token)
                if token in wanted.ends:
                    break
                tokens = np.array([token], dtype=np.int64)
            return held
        finally:
            self._llama.llama_sampler_free(sampler)

    def _sampler(self, choice: TokenChoice) -> Any:
        """Return llama.cpp's own sampler; GGUF files state neither top-k nor a penalty."""
        llama = self._llama
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        if choice.temperature > 0:
            steps = [llama.llama_sampler_init_temp(choice.temperature), llama.llama_sampler_init_top_p(choice.top_p, 1)]
            steps.append(llama.llama_sampler_init_dist(choice.seed))
        else:
            steps = [llama.llama_sampler_init_greedy()]
        for step in steps:
            llama.llama_sampler_chain_add(chain, step)
        return chain

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
