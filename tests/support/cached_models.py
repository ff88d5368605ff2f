"""Tiny models in memory, and what they predict with a quantized cache, one token after another."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from pqweights.inference.kv.cache import KVCache

VOCABULARY = 128
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def causal(name: str = "Llama", *, seed: int = 1, **changed: Any) -> Any:
    """A model with random weights.

    name: of its family, in the names of classes
    changed: settings of its configuration; head_dim may be None, for families that have none
    """
    torch.manual_seed(seed)
    settings = {**SETTINGS, **changed}
    if settings["head_dim"] is None:
        del settings["head_dim"]
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def hybrid_model() -> Any:
    """A model of which every fourth layer has attention, and the others recurrent states."""
    config = transformers.Qwen3_5TextConfig(**{**SETTINGS, "num_hidden_layers": 4}, **HYBRID)
    torch.manual_seed(1)
    return transformers.Qwen3_5ForCausalLM(config).eval()


def tokens(batch: int, count: int, seed: int = 3) -> Tensor:
    """Tokens, [batch, count], of which none is special."""
    return torch.randint(3, VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


def read(net: Any, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Let a model read tokens at once; return the last predictions, [batch, vocabulary]."""
    with torch.no_grad():
        logits: Tensor = net(ids, past_key_values=cache, use_cache=True, attention_mask=mask).logits[:, -1]
    return logits


def one_by_one(net: Any, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Let a model read tokens one by one; return the predictions, [batch, tokens, vocabulary].

    mask: [batch, tokens before and these]
    """
    before = 0 if mask is None else mask.shape[1] - ids.shape[1]
    masks = (None if mask is None else mask[:, : before + at + 1] for at in range(ids.shape[1]))
    return torch.stack([read(net, cache, ids[:, at : at + 1], each) for at, each in enumerate(masks)], dim=1)


def layer_states(cache: KVCache) -> list[Any]:
    """The stores of keys and of values of all packed layers."""
    return [states for layer in cache.packed_layers for states in layer.states]
