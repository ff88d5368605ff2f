"""A tiny Llama without torch, for files whose weights do not matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers import Tensor, bf16, gaussian, write_checkpoint

from pqweights.checkpoint.source import open_local
from pqweights.gguf.model import GgufModel, gguf_model

ROWS = 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": ROWS,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES = {
    "input_layernorm": (16,), "self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16), "post_attention_layernorm": (16,), "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24),
}  # fmt: skip


def llama_tensors(rows: int = ROWS) -> dict[str, Tensor]:
    """The tensors of the model. rows: the number of tokens."""
    shapes = {"model.embed_tokens": (rows, 16), "model.norm": (16,), "lm_head": (rows, 16)}
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in SHAPES.items()}
    return {f"{name}.weight": bf16(gaussian(*shape, seed=place)) for place, (name, shape) in enumerate(shapes.items())}


def write_llama(folder: Path, *, rows: int = ROWS, config: dict[str, Any] | None = None, **changed: Tensor) -> Path:
    """Write the model.

    config: keys that differ from CONFIG; None drops a key
    changed: tensors that it has beside its own, with `__` for the dots of their names
    """
    tensors = llama_tensors(rows) | {name.replace("__", "."): value for name, value in changed.items()}
    settings = {key: value for key, value in (CONFIG | (config or {})).items() if value is not None}
    return write_checkpoint(folder, tensors, config=settings)


def converted(folder: Path, name: str | None = "tiny") -> GgufModel:
    """The GGUF model of a folder."""
    return gguf_model(open_local(folder), name=name)
