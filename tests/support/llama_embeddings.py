"""What llama.cpp makes of tokens with models that do not predict the next one: vectors, scores, what a decoder says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.runtime.llama_library import library, load

# llama_pooling_type; by default that of the file.
OF_FILE, NONE = -1, 0
FLOAT32, NO_FLASH_ATTENTION = 0, 0
Vectors = npt.NDArray[np.float32]


@contextlib.contextmanager
def opened(path: Path, *, tokens: int, pooling: int) -> Iterator[tuple[Any, Any, Any]]:
    """The functions of llama.cpp, the model of a file, and a context that gives vectors, in float32."""
    llama, _ = library()
    model = load(path)
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = max(tokens, 256)
    parameters.embeddings, parameters.pooling_type = True, pooling
    parameters.type_k = parameters.type_v = FLOAT32
    parameters.flash_attn_type = NO_FLASH_ATTENTION
    parameters.n_threads = parameters.n_threads_batch = 1
    context = llama.llama_init_from_model(model, parameters)
    assert context
    try:
        yield llama, model, context
    finally:
        llama.llama_free(context)
        llama.llama_model_free(model)


def run(llama: Any, compute: Any, context: Any, ids: Sequence[int]) -> None:
    """Compute with tokens of one text, all of which give something."""
    batch = llama.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for place, token in enumerate(ids):
        batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
    assert compute(context, batch) == 0
    llama.llama_batch_free(batch)


def token_vectors(path: Path, ids: Sequence[int]) -> Vectors:
    """A vector for each token, [tokens, width]."""
    with opened(path, tokens=len(ids), pooling=NONE) as (llama, model, context):
        run(llama, llama.llama_encode, context, ids)
        width = llama.llama_model_n_embd(model)
        return np.ctypeslib.as_array(llama.llama_get_embeddings(context), (len(ids), width)).copy()


def pooled(path: Path, ids: Sequence[int], *, scores: int | None = None) -> Vectors:
    """One vector for all tokens as the file says, [width], or so many scores."""
    with opened(path, tokens=len(ids), pooling=OF_FILE) as (llama, model, context):
        run(llama, llama.llama_decode, context, ids)
        width = scores or llama.llama_model_n_embd(model)
        return np.ctypeslib.as_array(llama.llama_get_embeddings_seq(context, 0), (width,)).copy()


def decoded(path: Path, ids: Sequence[int], answer: Sequence[int]) -> Vectors:
    """The logits after each token of an answer to an encoded text, [tokens, vocabulary]."""
    with opened(path, tokens=len(ids) + len(answer), pooling=NONE) as (llama, model, context):
        run(llama, llama.llama_encode, context, ids)
        llama.llama_set_embeddings(context, False)
        run(llama, llama.llama_decode, context, answer)
        vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        return np.ctypeslib.as_array(llama.llama_get_logits(context), (len(answer), vocabulary)).copy()
