"""GGUF files of tiny models, written by the gguf package, and what llama.cpp makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from helpers import Array

from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import open_local
from pqweights.gguf.model import GgufModel, gguf_model
from pqweights.inference.runtimes.llama_library import library

FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}


def values(tensor: LogicalTensor) -> Array:
    """All values of a tensor, f32."""
    count = element_count(tensor)
    raw = np.empty(count * 4, dtype=np.uint8)
    tensor.read(0, count, "F32", raw)
    return raw.view(np.float32).reshape(tensor.shape)


def metadata(model: GgufModel) -> dict[str, Any]:
    """The values of all keys."""
    return {entry.key: entry.value for entry in model.metadata}


def write_gguf(folder: Path, dtype: str = "F32", *, name: str = "tiny") -> Path:
    """Write the model in a folder to a file in it; matrices get the dtype, everything else is F32."""
    model = gguf_model(open_local(folder), name=name)
    path = folder / f"model-{dtype}.gguf"
    writer = gguf.GGUFWriter(path, model.architecture)
    for key, value, kind, item_kind in model.metadata:
        if key != gguf.Keys.General.ARCHITECTURE:
            items = None if item_kind is None else gguf.GGUFValueType(item_kind)
            writer.add_key_value(key, value, gguf.GGUFValueType(kind), items)
    writer.add_file_type(FILE_TYPES[dtype])
    for tensor in model.tensors:
        stored = gguf.GGMLQuantizationType[dtype if len(tensor.shape) > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values(tensor), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class LlamaCpp:
    """A model in llama.cpp, on one thread; to be used as a context."""

    def __init__(self, path: Path, *, context: int = 512, vocabulary_only: bool = False) -> None:
        self._lib = llama_cpp = library().functions  # which keeps the log that it has llama.cpp write to
        settings = llama_cpp.llama_model_default_params()
        settings.vocab_only = vocabulary_only
        settings.use_mmap = False
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        assert self._model, "llama.cpp does not load it"
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._context: Any = None
        if not vocabulary_only:
            parameters = llama_cpp.llama_context_default_params()
            parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = context
            parameters.n_threads = parameters.n_threads_batch = 1
            parameters.flash_attn_type = 0  # whose sums are in half precision
            parameters.type_k = parameters.type_v = 0  # float32
            self._context = llama_cpp.llama_init_from_model(self._model, parameters)
            assert self._context, "llama.cpp makes no context"

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *error: object) -> None:
        if self._context:
            self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def logits(self, ids: Sequence[int]) -> Array:
        """What it predicts after each token: [tokens, vocabulary] f32."""
        batch = self._lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
        assert self._lib.llama_decode(self._context, batch) == 0
        width = self._lib.llama_vocab_n_tokens(self._vocabulary)
        found = self._lib.llama_get_logits(self._context)
        result = np.ctypeslib.as_array(found, shape=(len(ids) * width,)).reshape(len(ids), width).copy()
        self._lib.llama_batch_free(batch)
        return result

    def ends(self) -> set[int]:
        """The tokens at which it ends what it generates."""
        count = self._lib.llama_vocab_n_tokens(self._vocabulary)
        return {token for token in range(count) if self._lib.llama_vocab_is_eog(self._vocabulary, token)}

    def tokens(self, text: str) -> list[int]:
        """The ids of a text, special tokens in it included, and with those that begin and end it."""
        raw = text.encode()
        ids = (self._lib.llama_token * (len(raw) + 8))()
        count = self._lib.llama_tokenize(self._vocabulary, raw, len(raw), ids, len(ids), True, True)
        assert count >= 0
        return list(ids[:count])
