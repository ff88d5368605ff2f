"""What config.json promises, compared with what the files hold; what transformers makes of a difference is the measure.

Where two tensors could be one, their values are compared, and the configuration is made to say what is true, so that
every target reads the same. What cannot be mended is said.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.models import text_config, text_model
from pqweights.checkpoint.models.conventions import EMBEDDINGS_OF, HEADS
from pqweights.checkpoint.models.description import stated_or_default
from pqweights.checkpoint.models.names import is_embedding, role_name
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.storage import Storage, read_bytes
from pqweights.checkpoint.structure import differences

TIED = "tie_word_embeddings"
# What is compared at a time; of files elsewhere, so much at each of so many places.
RUN_BYTES = 1 << 22
SAMPLE_BYTES, SAMPLES = 1 << 16, 8

Config = dict[str, Any]
Remarks = tuple[str, ...]


def with_embeddings(stored: dict[str, StoredTensor], config: Config | None) -> tuple[dict[str, StoredTensor], Remarks]:
    """Return the stored tensors with the head as the embeddings, if they are tied and the head alone is stored.

    transformers then takes it for both, which no other runtime does.
    """
    head = next((name for name in HEADS if f"{name}.weight" in stored), None)
    if head is None or _ties(config or {})[0] is not True or any(map(is_embedding, stored)):
        return stored, ()
    embedding = next((name for layers, name in EMBEDDINGS_OF.items() if any(map(layers.match, stored))), None)
    if embedding is None:
        return stored, ()
    old, new = f"{head}.weight", f"{embedding}.weight"
    renamed = {new if name == old else name: of for name, of in stored.items()}
    renamed[new] = renamed[new]._replace(name=new)
    return renamed, (f"{old} is stored alone, and the embeddings are the same ({TIED}): called {new} from here on",)


def checked_config(
    storage: Storage, tensors: Sequence[LogicalTensor], config: Config | None
) -> tuple[Config | None, Remarks]:
    """Return the configuration with what the tensors show to be otherwise, and remarks on that."""
    if config is None:
        return None, ()
    config, of_head = _with_head(storage, tensors, config)
    of_embeddings = _differing_embeddings(storage, tensors, config)
    return config, (*of_head, *of_embeddings, *differences({tensor.name: tensor.shape for tensor in tensors}, config))


def _with_head(storage: Storage, tensors: Sequence[LogicalTensor], config: Config) -> tuple[Config, Remarks]:
    """Return the configuration of a model whose head is stored, and differs from embeddings that are to be the same.

    transformers computes with such a head, whatever is said; llama.cpp, MLX and vLLM would not.
    """
    pair = None if all(tied is False for tied in _ties(config)) else differing_head(storage, tensors, config)
    if pair is None:
        return config, ()
    remark = f"{pair[0]} is to be the same as {pair[1]} by config.json ({TIED}), and their values differ"
    return untied(config), (f"{remark}: both are kept and computed with, as in transformers, and the result says so",)


def differing_head(
    storage: Storage, tensors: Sequence[LogicalTensor], config: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return the names of head and embeddings, if each is stored, with different values."""
    text = text_model(config)
    weights = [tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.name.endswith(".weight")]
    heads = [tensor for tensor in weights if role_name(tensor.name, tensor.dtype, tensor.shape, text) == "lm_head"]
    embeddings = [tensor for tensor in weights if is_embedding(tensor.name)]
    if len(heads) != 1 or not embeddings:
        return None
    head, embedding = heads[0], embeddings[0]
    is_same = head.shape == embedding.shape and same_values(storage, head, embedding)
    return None if is_same else (head.name, embedding.name)


def _differing_embeddings(storage: Storage, tensors: Sequence[LogicalTensor], config: Config) -> Iterator[str]:
    """Yield which embeddings of encoder and decoder are to be the same, and are not."""
    if all(tied is False for tied in _ties(config)):
        return
    shared = next((tensor for tensor in tensors if tensor.name in ("shared.weight", "model.shared.weight")), None)
    copies = [tensor for tensor in tensors if tensor.name.endswith("coder.embed_tokens.weight")]
    for of in copies:
        if shared is not None and shared.shape == of.shape and not same_values(storage, shared, of):
            yield (
                f"{of.name} is to be the same as {shared.name} by config.json, and their values differ: transformers "
                "computes with both; a GGUF file has room for one"
            )


def untied(config: Mapping[str, Any]) -> Config:
    """Return a copy of a configuration that says that the head has weights of its own."""
    result = {**copy.deepcopy(dict(config)), TIED: False}
    if isinstance(result.get("text_config"), dict):
        result["text_config"][TIED] = False
    return result


def _ties(config: Mapping[str, Any]) -> list[Any]:
    """Return what is said of head and embeddings: of the whole model, of its text model; else what its type has."""
    stated = [place[TIED] for place in (config, text_config(config)) if TIED in place]
    return stated or [stated_or_default({}, text_model(config), TIED)]


def same_values(storage: Storage, one: LogicalTensor, other: LogicalTensor) -> bool:
    """Whether two tensors of one shape hold the same numbers; of files elsewhere, in the places that are looked at."""
    pairs = list(zip(one.parts, other.parts, strict=False))
    if len(one.parts) == len(other.parts) and all(a[1:3] == b[1:3] for a, b in pairs):
        return all(_same_bytes(storage, *pair) for pair in pairs)
    count, size = element_count(one), RUN_BYTES // 4
    runs, buffers = range(0, count, size), [np.empty(RUN_BYTES, dtype=np.uint8) for _ in range(2)]
    if storage.local_folder() is None:
        runs = range(0, count, max(size, -(-count // SAMPLES)))
    for start in runs:
        length = min(size, count - start)
        for tensor, buffer in zip((one, other), buffers, strict=True):
            tensor.read(start, length, "F32", buffer)
        if not np.array_equal(buffers[0][: 4 * length], buffers[1][: 4 * length]):
            return False
    return True


def _same_bytes(storage: Storage, one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors of one dtype and shape hold the same bytes."""
    size, step = (RUN_BYTES,) * 2
    if storage.local_folder() is None:
        size, step = SAMPLE_BYTES, max(SAMPLE_BYTES, -(-one.byte_count // SAMPLES))
    for start in range(0, one.byte_count, step):
        count = min(size, one.byte_count - start)
        pair = [read_bytes(storage, of.file, of.offset + start, count) for of in (one, other)]
        if pair[0] != pair[1]:
            return False
    return True
