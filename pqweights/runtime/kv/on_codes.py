"""Attention of one token on packed keys and values, without restoring them, where there are kernels for it.

The cache hands its layer's packed states to the attention as an attribute of the new key; the attention that is
registered here takes products on codes, and adds those with the recent tokens, which are not packed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from pqweights.kernels.attention import MOST_ROWS, MOST_SIZE
from pqweights.runtime.kv.schemes import CachedModel
from pqweights.runtime.kv.states import Chunk, PackedStates

NAME = "pqweights_codes"
PAST = "pqweights_past"
# Arguments of attention functions that mean something that is not computed here.
OTHERS = ("s_aux", "softcap", "position_bias", "output_attentions")
# Sizes of values that the kernels take are multiples of this.
VALUE_UNIT = 32


class Past:
    """The keys or values of a layer before a token: the chunks and how many tokens each had, and the window."""

    def __init__(self, states: PackedStates) -> None:
        self.states, self.window = states, states.window
        self.chunks: list[tuple[Chunk, int]] = [(chunk, chunk.tokens) for chunk in states.chunks]

    def restored(self) -> Tensor:
        """Return the states, [batch, heads, tokens, size], decoded."""
        assert self.window is not None
        parts = [self.states.decoded_chunk(chunk)[:, :, :tokens].to(self.window.dtype) for chunk, tokens in self.chunks]
        return torch.cat([*parts, self.window], dim=2)


class PastOfLayer:
    """The keys and values of a layer before a token, for the attention to take once."""

    def __init__(self, keys: PackedStates, values: PackedStates) -> None:
        self._parts: tuple[Past, Past] | None = Past(keys), Past(values)

    @property
    def used(self) -> bool:
        """Whether the attention took them."""
        return self._parts is None

    def take(self) -> tuple[Past, Past]:
        """Return keys and values, which are not held any longer: windows may be large."""
        assert self._parts is not None
        parts, self._parts = self._parts, None
        return parts


def has_kernels(keys: PackedStates, values: PackedStates) -> bool:
    """Whether attention can run on these states as they are stored."""
    if keys.window is None or values.window is None or keys.window.device.type != "cpu":
        return False
    key_size, value_size = keys.window.shape[-1], values.window.shape[-1]
    takes_keys = keys.quantizer is None or (key_size <= MOST_SIZE and keys.quantizer.can_score())
    takes_values = values.quantizer is None or (
        value_size <= MOST_SIZE and not value_size % VALUE_UNIT and values.quantizer.can_weigh()
    )
    return takes_keys and takes_values


def may_attend_on_codes(net: Any, model: CachedModel) -> bool:
    """Whether a model attends through transformers' interface, with the usual attention or with that of this module.

    net: a PreTrainedModel; model: what is known of it
    """
    usual = net.config._attn_implementation in ("sdpa", NAME)
    shared = getattr(model.config, "num_kv_shared_layers", 0)  # later layers would take the keys a second time
    return bool(getattr(net, "_supports_attention_backend", False)) and usual and not shared


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Any]:
    """Compute attention as transformers calls it; see AttentionInterface."""
    past: PastOfLayer | None = getattr(key, PAST, None)
    whole = past is not None and getattr(value, PAST, None) is past
    if past is None or not whole:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    past_keys, past_values = past.take()
    groups = query.shape[1] // key.shape[1]
    others = any(options.get(name) is not None for name in OTHERS)
    others |= attention_mask is not None and attention_mask.shape[1] != 1  # biases for each head, as those of ALiBi
    if groups > MOST_ROWS or others or query.requires_grad:  # kernels have no gradients
        keys = torch.cat([past_keys.restored(), key], dim=2)
        values = torch.cat([past_values.restored(), value], dim=2)
        return sdpa_attention_forward(module, query, keys, values, attention_mask, **options)  # type: ignore[no-any-return]
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    queries = (query.float() * scaling).view(query.shape[0], key.shape[1], groups, query.shape[-1])
    scores = _scores(queries, past_keys, key)
    if attention_mask is not None:
        mask = attention_mask[..., : scores.shape[-1]]
        bias = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask.float()
        scores = scores + bias  # [batch, 1, 1, tokens]
    sums = _sums(torch.softmax(scores, dim=-1), past_values, value)
    return sums.to(query.dtype).reshape(query.shape[0], 1, query.shape[1], -1), None


def _scores(queries: Tensor, past: Past, key: Tensor) -> Tensor:
    """Return the scores of all tokens, [batch, heads, groups, tokens] f32."""
    assert past.window is not None
    packed: list[Tensor] = []
    for chunk, tokens in past.chunks:
        assert past.states.quantizer is not None
        packed.append(past.states.quantizer.scores(queries, chunk.rows, chunk.shared)[..., :tokens])
    recent = torch.cat([past.window, key], dim=2).float()
    return torch.cat([*packed, queries @ recent.transpose(-1, -2)], dim=-1)


def _sums(weights: Tensor, past: Past, value: Tensor) -> Tensor:
    """Return the weighted sums of all values, [batch, heads, groups, size] f32."""
    assert past.window is not None
    packed = sum(tokens for _, tokens in past.chunks)
    recent = torch.cat([past.window, value], dim=2).float()
    total = weights[..., packed:] @ recent
    start = 0
    for chunk, tokens in past.chunks:
        assert past.states.quantizer is not None
        room = next(iter(chunk.rows.values())).shape[2]
        some = torch.nn.functional.pad(weights[..., start : start + tokens], (0, room - tokens)).contiguous()
        total = total + past.states.quantizer.weighted(some, chunk.rows, chunk.shared)
        start += tokens
    return total


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
