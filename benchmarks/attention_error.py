"""How much a quantized cache changes what attention computes, layer by layer, with the same queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from pqweights.runtime.kv.cache import KVCache, PackedLayer

MEASURED = "pqweights_measured"


class _Comparison:
    """Attention computed twice: with keys and values as they are, and as a cache returns them."""

    def __init__(self, cache: KVCache, queries: int) -> None:
        self._layers, self._queries = cache.layers, queries
        self.error = self.energy = 0.0
        self.packed = False

    def end(self) -> None:
        """Let go of the cache, because transformers keeps every attention function that it was given."""
        self._layers = []

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        options["scaling"] = options.get("scaling") or query.shape[-1] ** -0.5
        outputs = _attention(query, key, value, attention_mask, options)
        layer = self._layers[module.layer_idx]
        if isinstance(layer, PackedLayer):
            before = key.shape[2] - self._queries
            layer.update(key[:, :, :before], value[:, :, :before])
            self.packed |= any(states.chunks for states in layer.states)
            kept = layer.update(key[:, :, before:], value[:, :, before:])
            last = slice(query.shape[2] - self._queries, None)
            mask = None if attention_mask is None else attention_mask[:, :, last]
            other = _attention(query[:, :, last], *kept, mask, options)
            self.error += float((other - outputs[:, last]).double().square().sum())
            self.energy += float(outputs[:, last].double().square().sum())
        return outputs, None


def attention_error(net: Any, cache: KVCache, ids: Tensor, queries: int) -> float | None:
    """Return the relative mean squared error of the outputs of all attention layers whose cache is packed.

    None for a model that computes its attention itself, so that it cannot be replaced, for outputs of zero, and if all
    tokens are in windows of recent ones.

    net: a PreTrainedModel; it computes with unquantized keys and values throughout
    cache: an empty one, which is filled
    ids: [1, tokens], more than `queries`
    queries: how many of the last tokens' queries are measured; the tokens before them are in the cache
    """
    comparison = _Comparison(cache, queries)
    AttentionInterface.register(MEASURED, comparison)
    AttentionMaskInterface.register(MEASURED, eager_mask)
    before = net.config._attn_implementation
    net.set_attn_implementation(MEASURED)
    try:
        with torch.no_grad():
            net(ids, past_key_values=DynamicCache(config=net.config.get_text_config(decoder=True)), use_cache=True)
    finally:
        net.set_attn_implementation(before)
        comparison.end()
    return comparison.error / comparison.energy if comparison.packed and comparison.energy else None


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Return softmax(query key^T) value, [batch, tokens, heads, size].

    options: what transformers gives an attention function: the factor of the scores, the bound of Gemma 2 on them,
        and the sinks of gpt-oss, which take their share of the softmax
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(-1, -2)).float() * options["scaling"]
    bound, sinks = options.get("softcap"), options.get("s_aux")
    if bound is not None:
        scores = torch.tanh(scores / bound) * bound
    if mask is not None:
        scores = scores + mask[..., : key.shape[2]]
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return (weights.to(value.dtype) @ value).transpose(1, 2)
