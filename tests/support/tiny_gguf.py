"""Small GGUF files, written by the gguf package: one of many types, and tiny Llamas that llama.cpp computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from helpers import as_float32, read_all
from language_models import BEGIN, BYTES, CONTEXT, END, SPECIAL, VOCABULARY, letters

NORMAL, CONTROL, UNUSED = 1, 3, 5
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")


def small_gguf(path: Path, more: Mapping[str, Any] | None = None, *, split_max_tensors: int = 0) -> Path:
    """A file with a tensor of each of TYPES and metadata of most kinds, or several files if it is split.

    more: of the metadata: texts, whole numbers and floats
    """
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split_max_tensors)
    writer.add_name("a model")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_head_count_kv([1, 2])
    writer.add_causal_attention(True)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([f"token {number}" for number in range(3000)])
    writer.add_token_types([NORMAL] * 3000)
    writer.add_token_scores([0.5] * 3000)
    writer.add_bos_token_id(7)
    for key, value in (more or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    for number, kind in enumerate(TYPES):
        _add(writer, f"blk.{number}.ffn_up.weight", np.ones((3, 32), dtype=np.float32) * number, kind)
    finish(writer)
    return path


def llama_gguf(
    source: Path,
    path: Path,
    *,
    kind: str = "F32",
    tokenizer: bool = True,
    begins: bool = False,
    split_max_tensors: int = 0,
) -> Path:
    """The model of a folder that language_models.py made, with weights of one type and norms in F32.

    tokenizer: whether the file has one: a token for each byte
    begins: whether the tokenizer puts <s> before texts
    """
    config = json.loads((source / "config.json").read_text())
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split_max_tensors)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(VOCABULARY)
    if tokenizer:
        _add_tokenizer(writer, source, begins=begins)
    else:
        writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in read_all(source).items():
        values = as_float32(tensor)
        for projection, count in (("q_proj", heads), ("k_proj", key_heads)):
            if projection in name:
                values = _interleaved(values, count)
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None
        _add(writer, stored, values, kind if values.ndim > 1 else "F32")
    finish(writer)
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path, *, begins: bool) -> None:
    others = {number: text for text, number in SPECIAL.items()}
    tokens = [*letters(), *(others.get(number, f"[PAD{number}]") for number in range(BYTES, VOCABULARY))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    types = [NORMAL] * BYTES + [CONTROL if n in others else UNUSED for n in range(BYTES, VOCABULARY)]
    writer.add_token_types(types)
    writer.add_token_merges(["\u0100 \u0100"])  # llama.cpp wants one; its result is no token, so that it does nothing
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(begins)
    template = json.loads((source / "tokenizer_config.json").read_text()).get("chat_template")
    if template is not None:
        writer.add_chat_template(template)


def _add(writer: gguf.GGUFWriter, name: str, values: npt.NDArray[np.float32], kind: str) -> None:
    stored = GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)


def _interleaved(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k in llama.cpp's order: it rotates neighbours, transformers the halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def edited(
    file: Path,
    out: Path,
    split_max_tensors: int = 0,
    dropped: str = "",
    tensors: dict[str, Any] | None = None,
    **changed: Any,
) -> Path:
    """A copy of a file with other metadata; None drops a key. `__` stands for the dots of its name.

    dropped: the name of a tensor that it lacks
    tensors: those that it has instead, in float32
    """
    out.parent.mkdir(exist_ok=True)
    reader = gguf.GGUFReader(file)
    changed = {key.replace("__", "."): value for key, value in changed.items()}
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture, split_max_tensors=split_max_tensors)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in (*changed, "general.architecture"):
            continue
        value = field.contents()
        writer.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for key, value in changed.items():
        if value is not None:
            {
                bool: writer.add_bool,
                str: writer.add_string,
                int: writer.add_uint32,
                float: writer.add_float32,
                list: writer.add_array,
            }[type(value)](key, value)
    for tensor in (tensor for tensor in reader.tensors if tensor.name != dropped and tensors is None):
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    finish(writer)
    return out


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
