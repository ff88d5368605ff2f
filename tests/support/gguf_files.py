"""A tiny Llama without torch, GGUF files of models in folders, as the gguf package writes them, and llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from export_decoders import values_of
from helpers import Array, Tensor, bf16, gaussian, write_checkpoint
from tiny_gguf import finish

from pqweights.checkpoint.source import open_local
from pqweights.gguf.model import GgufModel, gguf_model
from pqweights.inference.runtimes.llama_library import library

FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
ROWS = 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": ROWS,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYER = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def llama_tensors(rows: int = ROWS, sizes: dict[str, Any] = CONFIG) -> dict[str, Tensor]:
    """The tensors of the model. rows: the number of tokens; sizes: a configuration of layers that are as wide"""
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    keys = width * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    of_layer: tuple[tuple[int, ...], ...] = ((width,), (width, width), (keys, width), (keys, width), (width, width))
    of_layer += ((width,), (inner, width), (inner, width), (width, inner))
    shapes = {"model.embed_tokens": (rows, width), "model.norm": (width,), "lm_head": (rows, width)}
    for layer in range(sizes["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in zip(LAYER, of_layer, strict=True)}
    return {f"{name}.weight": bf16(gaussian(*shape, seed=place)) for place, (name, shape) in enumerate(shapes.items())}


def write_llama(
    folder: Path,
    *,
    rows: int = ROWS,
    sizes: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **changed: Tensor,
) -> Path:
    """Write the model.

    sizes: those of layers that differ from CONFIG
    config: keys of config.json alone that differ from it; None drops a key
    changed: tensors that it has beside its own, with `__` for the dots of their names
    """
    like = CONFIG | (sizes or {})
    tensors = llama_tensors(rows, like) | {name.replace("__", "."): value for name, value in changed.items()}
    settings = {key: value for key, value in (like | (config or {})).items() if value is not None}
    return write_checkpoint(folder, tensors, config=settings)


def converted(folder: Path, name: str | None = "tiny") -> GgufModel:
    """The GGUF model of a folder."""
    return gguf_model(open_local(folder), name=name)


def metadata(model: GgufModel) -> dict[str, Any]:
    """The values of all keys."""
    return {entry.key: entry.value for entry in model.metadata}


def write_gguf(folder: Path, dtype: str = "F32", *, name: str = "tiny") -> Path:
    """Write the model in a folder to a file in it; matrices get the dtype, everything else is F32."""
    model = converted(folder, name)
    path = folder / f"model-{dtype}.gguf"
    writer = gguf.GGUFWriter(path, model.architecture)
    for key, value, kind, item_kind in model.metadata:
        if key != gguf.Keys.General.ARCHITECTURE:
            items = None if item_kind is None else gguf.GGUFValueType(item_kind)
            writer.add_key_value(key, value, gguf.GGUFValueType(kind), items)
    writer.add_file_type(FILE_TYPES[dtype])
    for tensor in model.tensors:
        stored = gguf.GGMLQuantizationType[dtype if len(tensor.shape) > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values_of(tensor), stored), raw_dtype=stored)
    finish(writer)
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
