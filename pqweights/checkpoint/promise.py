"""What config.json promises, compared with what the files hold; what transformers makes of a difference is the measure.

Where two tensors could be one, their values are compared, and the configuration is made to say what is true, so that
every target reads the same. What cannot be mended is said.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.readers import LogicalTensor, PlainTensor, element_count
from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.structure import differences
from pqweights.common.dtypes import DTYPE_BITS
from pqweights.common.threads import Progress, no_progress
from pqweights.models import text_config, text_model
from pqweights.models.conventions import EMBEDDINGS_OF, HEADS
from pqweights.models.description import stated_or_default
from pqweights.models.names import is_embedding, is_leftover, role_name

TIED = "tie_word_embeddings"
# So much is looked at in each of so many places; then it is read in runs.
PLACE_BYTES, PLACES = 1 << 16, 8
RUN_BYTES = 1 << 22

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


class Pair(NamedTuple):
    """Two tensors that are to be the same. is_head: whether `one` is the head, not embeddings as well"""

    one: LogicalTensor
    other: LogicalTensor
    is_head: bool

    @property
    def seems(self) -> str:
        """What is said as long as the two were compared in places alone."""
        return (
            f"{self.one.name} should be the same as {self.other.name} by config.json, and is in the {PLACES} places "
            "that were read: what makes a result reads all of both first"
        )


def checked_config(
    storage: Storage, tensors: Sequence[LogicalTensor], config: Config | None
) -> tuple[Config | None, Remarks, tuple[Pair, ...]]:
    """Return the configuration with what the tensors show to be otherwise, remarks on that, and what is not proven yet.

    Of files that are elsewhere, the last are those that were compared in places alone.
    """
    if config is None:
        return None, (), ()
    is_elsewhere = storage.local_folder() is None
    pairs = _pairs_to_be_same(tensors, config)
    differing = [pair for pair in pairs if not same_values(pair, everywhere=not is_elsewhere)]
    unproven = [pair for pair in pairs if is_elsewhere and pair not in differing and _has_more_than_places(pair)]
    changed, remarks = with_differing(config, differing)
    return changed, (*remarks, *unlike_config(tensors, changed)), tuple(unproven)


def unlike_config(tensors: Sequence[LogicalTensor], config: Config) -> Remarks:
    """Return remarks on tensors that a model lacks by its configuration, or has besides."""
    return tuple(differences({t.name: t.shape for t in tensors if not is_leftover(t.name, t.dtype, t.shape)}, config))


def _pairs_to_be_same(tensors: Sequence[LogicalTensor], config: Mapping[str, Any]) -> list[Pair]:
    """Return what is to be the same if head and embeddings are tied, and is stored more than once."""
    if all(tied is False for tied in _ties(config)):
        return []
    head = _head_and_embeddings(tensors, config)
    shared = next((tensor for tensor in tensors if tensor.name in ("shared.weight", "model.shared.weight")), None)
    copies = [tensor for tensor in tensors if tensor.name.endswith("coder.embed_tokens.weight")]
    of_copies = [] if shared is None else [Pair(of, shared, False) for of in copies if of.shape == shared.shape]
    return [*([] if head is None else [head]), *of_copies]


def _head_and_embeddings(tensors: Sequence[LogicalTensor], config: Mapping[str, Any]) -> Pair | None:
    """Return head and embeddings, if each is stored."""
    text = text_model(config)
    weights = [tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.name.endswith(".weight")]
    heads = [tensor for tensor in weights if role_name(tensor.name, tensor.dtype, tensor.shape, text) == "lm_head"]
    embeddings = [tensor for tensor in weights if is_embedding(tensor.name)]
    return Pair(heads[0], embeddings[0], True) if len(heads) == 1 and embeddings else None


def tied_head(tensors: Sequence[LogicalTensor], config: Mapping[str, Any]) -> str | None:
    """Return the name of a head that is stored beside embeddings, and is to be the same."""
    return next((pair.one.name for pair in _pairs_to_be_same(tensors, config) if pair.is_head), None)


def differing_head(tensors: Sequence[LogicalTensor], config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the names of head and embeddings, if each is stored, with different values; all of them are read."""
    pair = _head_and_embeddings(tensors, config)
    return None if pair is None or same_values(pair) else (pair.one.name, pair.other.name)


def with_differing(config: Config, differing: Iterable[Pair]) -> tuple[Config, Remarks]:
    """Return the configuration of a model of which these differ that it says to be the same, and remarks on them.

    transformers computes with a head that is stored, whatever is said; llama.cpp, MLX and vLLM would not.
    """
    remarks = []
    for one, other, is_head in differing:
        if is_head:
            config = untied(config)
            remarks.append(
                f"{one.name} should be the same as {other.name} by config.json ({TIED}), but their values differ: both "
                "are kept, as transformers computes with both, and the result says so"
            )
        else:
            remarks.append(
                f"{one.name} should be the same as {other.name} by config.json, but their values differ: transformers "
                "computes with both, and a GGUF file has room for only one"
            )
    return config, tuple(remarks)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the head shares the embeddings, unless it is stored with other values."""
    return _ties(config)[0] is True


def untied(config: Mapping[str, Any]) -> Config:
    """Return a copy of a configuration that says that the head has weights of its own."""
    result = {**copy.deepcopy(dict(config)), TIED: False}
    if isinstance(result.get("text_config"), dict):
        result["text_config"][TIED] = False
    return result


def _ties(config: Mapping[str, Any]) -> list[Any]:
    """Return what is said of head and embeddings: of the whole model, of its text model; else what its type has."""
    stated = [part[TIED] for part in (config, text_config(config)) if TIED in part]
    return stated or [stated_or_default({}, text_model(config), TIED)]


def _places(pair: Pair) -> tuple[str, int, int]:
    """Return as which dtype two tensors are first compared, how many elements at each place, and how far apart."""
    one, other, _ = pair
    is_plain = isinstance(one, PlainTensor) and isinstance(other, PlainTensor) and one.dtype == other.dtype
    dtype = one.dtype if is_plain else "F32"
    size = PLACE_BYTES * 8 // DTYPE_BITS[dtype]
    return dtype, size, max(size, -(-element_count(one) // PLACES))


def _has_more_than_places(pair: Pair) -> bool:
    _, size, step = _places(pair)
    return size < step


def same_values(pair: Pair, progress: Progress = no_progress, *, everywhere: bool = True) -> bool:
    """Whether two tensors hold the same numbers: all of them, or else those in a few places.

    Places can tell that they differ; only all values tell that they do not.
    """
    one, other, _ = pair
    if one.shape != other.shape:
        return False
    count, (dtype, size, step) = element_count(one), _places(pair)
    for start in range(0, count, step):
        length = min(size, count - start)
        if _values(one, start, length, dtype) != _values(other, start, length, dtype):
            return False
    if not everywhere or size == step:
        return True
    return _digest(one, dtype, progress, 0) == _digest(other, dtype, progress, 1)


def _digest(tensor: LogicalTensor, dtype: str, progress: Progress, number: int) -> bytes:
    """Return the hash of all values of a tensor. number: whether it is the first of two, or the second"""
    digest, count, bits = blake3(), element_count(tensor), DTYPE_BITS[dtype]
    run = RUN_BYTES * 8 // bits
    for start in range(0, count, run):
        length = min(run, count - start)
        digest.update(_values(tensor, start, length, dtype))
        progress((number * count + start + length) * bits // 8, 2 * count * bits // 8, tensor.name)
    return digest.digest()


def _values(tensor: LogicalTensor, start: int, count: int, dtype: str) -> bytes:
    """Return elements [start, start + count) as raw bytes of `dtype`."""
    raw = np.empty(count * DTYPE_BITS[dtype] // 8, dtype=np.uint8)
    tensor.read(start, count, dtype, raw)
    return raw.tobytes()
