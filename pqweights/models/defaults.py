"""Defaults that the configurations of many types have."""

from __future__ import annotations

from typing import Any

HEAD_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def sizes(*sizes: int) -> dict[str, Any]:
    """Return the defaults of SHAPE, or of HEAD_SIZES."""
    return dict(zip(SHAPE if len(sizes) == len(SHAPE) else HEAD_SIZES, sizes, strict=True))


TIED: dict[str, Any] = {"tie_word_embeddings": True}
OWN_HEAD: dict[str, Any] = {"tie_word_embeddings": False}
SILU = {"hidden_act": "silu"}
LLAMA = OWN_HEAD | SILU | {"rms_norm_eps": 1e-6}
