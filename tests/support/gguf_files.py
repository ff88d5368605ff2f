"""A tiny Llama without torch, GGUF files of models in folders, as the gguf package writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
from export_decoders import values_of
from helpers import Array, Tensor, bf16, gaussian, write_checkpoint
from tiny_gguf import finish

from pqweights.checkpoint.gguf.contents import TYPE_NUMBERS
from pqweights.checkpoint.gguf.model import GgufModel, gguf_model
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.kernels.gguf_encoding import BLOCK_TYPES, encode_blocks

FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
ROWS = 64
gguf.GGML_QUANT_SIZES[TYPE_NUMBERS["Q2_0"]] = (64, 18)  # the package lacks it
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
    return {key: entry.value for key, entry in model.metadata.items()}


def named(model: GgufModel) -> dict[str, LogicalTensor]:
    return {tensor.name: tensor for tensor in model.tensors}


def all_values(model: GgufModel) -> dict[str, Array]:
    return {tensor.name: numbers_of(tensor) if tensor.dtype == "I32" else values_of(tensor) for tensor in model.tensors}


def numbers_of(tensor: LogicalTensor) -> Array:
    """The values of a tensor of whole numbers."""
    raw = np.empty(4 * math.prod(tensor.shape), dtype=np.uint8)
    tensor.read(0, math.prod(tensor.shape), "I32", raw)
    return raw.view(np.int32).reshape(tensor.shape)


GEMMA3 = {
    "model_type": "gemma3_text", "architectures": None, "hidden_act": None, "head_dim": 8, "query_pre_attn_scalar": 8,
    "tie_word_embeddings": True, "sliding_window": 32,
}  # fmt: skip


def write_gemma(folder: Path, model_type: str, **config: Any) -> Path:
    """A Gemma 2 or 3 with tensors as small as those of the Llama."""
    names = ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    names += ["self_attn__q_norm", "self_attn__k_norm"] if model_type == "gemma3_text" else []
    changed = {
        f"model__layers__{layer}__{name}__weight": bf16(gaussian(8 if "attn" in name else 16))
        for layer in range(2)
        for name in names
    }
    changed["lm_head__weight"] = llama_tensors()["model.embed_tokens.weight"]  # they are tied
    return write_llama(folder, config=GEMMA3 | {"model_type": model_type} | config, **changed)


def edit_config(folder: Path, changed: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))


def write_gguf(folder: Path, dtype: str = "F32", *, name: str = "tiny") -> Path:
    """Write the model in a folder to a file in it; matrices get the dtype or the type, everything else is F32."""
    model = converted(folder, name)
    return write_parts(folder / f"model-{dtype}.gguf", model.architecture, model.metadata, model.tensors, dtype)


def write_both(model: Path, folder: Path, dtype: str = "F32") -> Path:
    """Write the text model of a folder and its tower to two files in another one, without a tokenizer."""
    made = without_tokenizer(open_local(model))
    folder.mkdir(exist_ok=True)
    write_parts(folder / f"mmproj-{dtype}.gguf", "clip", made.tower_metadata, made.tower, dtype)
    write_parts(folder / f"model-{dtype}.gguf", made.architecture, made.metadata, made.tensors, dtype)
    return folder


def write_parts(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Sequence[LogicalTensor], dtype: str
) -> Path:
    """Write a file of metadata and tensors; see write_gguf."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.kv_data[0] |= {key: entry for key, entry in metadata.items() if key != gguf.Keys.General.ARCHITECTURE}
    writer.add_file_type(FILE_TYPES.get(dtype, 0))
    for tensor in tensors:
        if tensor.dtype == "I32":
            writer.add_tensor(tensor.name, numbers_of(tensor))
            continue
        kind, values = dtype if len(tensor.shape) > 1 else "F32", values_of(tensor)
        if kind in BLOCK_TYPES:
            data = encode_blocks(kind, values, None).codes.reshape(len(values), -1)
        else:
            data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(tensor.name, data, raw_dtype=TYPE_NUMBERS[kind])
    finish(writer)
    return path


def without_tokenizer(checkpoint: Checkpoint) -> GgufModel:
    """The GGUF model of a checkpoint whose tokenizer, which tiny models lack or have of another kind, is not read."""
    unread = {"read_vocabulary": lambda *_, **__: None, "add_vocabulary": lambda *_, **__: ()}
    with mock.patch.multiple("pqweights.checkpoint.gguf.model", **unread):
        return gguf_model(checkpoint, name=None)
