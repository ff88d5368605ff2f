"""Tokens that a language model of transformers draws itself, window after window, at temperature 1.

A small model that writes for long ends in nonsense, and what its weights do for texts that people write is then known
worse than it might be. So a sample has both, unless the texts are of a kind that the model does not know;
docs/calibration.md has what that is worth.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from pqweights.common.threads import told_steps
from pqweights.errors import EvaluationError
from pqweights.runtime.kv.states import appended

DRAWING = "drawing the sample"  # as users are told
# A model knows texts if a token of them costs it at most FAMILIAR of what guessing among all tokens would, on average
# over TRIED windows. What it draws costs less the more it repeats itself, so that is nothing to compare with.
FAMILIAR, TRIED = 0.5, 6
# Rows of probabilities whose sums are in memory together: they are in float64.
ROWS_DRAWN = 64


class RoomyLayer(DynamicLayer):
    """The keys and values of a layer, in room for a whole window; a DynamicLayer copies all of them for each token.

    tokens: for how many there is room
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens, self._rooms = tokens, list[Tensor]()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the states of further tokens, [batch, heads, tokens, size], and return all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._rooms = [key_states[:, :, :0], value_states[:, :, :0]]
        used = self.get_seq_length()
        given = (key_states, value_states)
        self._rooms = [
            appended(room, used, states, least=self._tokens) for room, states in zip(self._rooms, given, strict=True)
        ]
        self.keys, self.values = (room[:, :, : used + key_states.shape[2]] for room in self._rooms)
        return self.keys, self.values


def own_sample(model: Any, texts: Tensor, *, windows: int, tokens: int, seed: int) -> Tensor:
    """Return token ids [windows, tokens]: some that a model draws, and texts if it knows such.

    texts: token ids [windows, tokens], fewer than are wanted

    Raises what `draw` raises.
    """
    first = first_token(model)
    drawn = draw(model, windows=windows - len(texts), tokens=tokens, first=first, seed=seed)
    if not len(texts):
        return drawn
    if not _knows(model, texts):
        texts = draw(model, windows=len(texts), tokens=tokens, first=first, seed=seed + 1)
    return torch.cat([drawn, texts])


def _knows(model: Any, ids: Tensor) -> bool:
    """Return whether texts, as ids [windows, tokens], are of a kind that a model knows."""
    tried = ids[:: -(-len(ids) // TRIED)]
    loss, guessed = 0.0, 0.0
    with torch.inference_mode():
        for window in tried:
            logits = model(window[None], use_cache=False).logits[0, :-1].float()
            loss += float(torch.nn.functional.cross_entropy(logits, window[1:]))
            guessed += math.log(logits.shape[-1])
    return loss <= FAMILIAR * guessed


def draw(model: Any, *, windows: int, tokens: int, first: int | None, seed: int) -> Tensor:
    """Draw token ids [windows, tokens] from a causal language model, at temperature 1.

    first: the token with which each window begins; None for any of the vocabulary

    Raises EvaluationError if the model keeps no cache, or its logits are not finite.
    """
    random = torch.Generator().manual_seed(seed)
    ids = torch.full((windows, tokens), first or 0)
    if first is None:
        ids[:, 0] = torch.randint(model.get_input_embeddings().weight.shape[0], (windows,), generator=random)
    cache = None
    with torch.inference_mode():
        _arrange(model)
        for at in told_steps(range(1, tokens), DRAWING, "tokens", each=windows):
            output = model(ids[:, at - 1 : at], past_key_values=cache, use_cache=True)
            if cache is None:
                cache = _with_room(getattr(output, "past_key_values", None), tokens)
            logits = output.logits[:, -1].float()
            if not bool(logits.sum().isfinite()):
                raise EvaluationError("the sample: the model's logits are not finite, so its weights are broken")
            ids[:, at] = drawn(torch.softmax(logits, -1), random)
    return ids


def first_token(model: Any) -> int | None:
    """Return the token with which texts of a model begin, or end; None if it states none."""
    configs = (model.config.get_text_config(), model.generation_config)
    for name in ("bos_token_id", "eos_token_id"):
        for config in configs:
            token = getattr(config, name, None)
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int):
                return token
    return None


def _arrange(model: Any) -> None:
    """Have the weights of linear layers lie as [inputs, outputs]: products of few rows take a quarter less time so."""
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight.dtype == torch.float32:
            module.weight.data = module.weight.data.T.contiguous().T


def _with_room(cache: Any, tokens: int) -> Any:
    """Return a cache after the first token, with room for all; layers of other kinds stay as they are."""
    if cache is None:
        raise EvaluationError("the sample: the model has no KV cache to draw tokens with; give a text, or mixture")
    for number, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[number] = RoomyLayer(tokens)
            cache.layers[number].update(layer.keys, layer.values)
    return cache


def drawn(probabilities: Tensor, random: torch.Generator) -> Tensor:
    """Draw a token for each row of probabilities, [rows].

    It takes one random number, where torch.multinomial takes one for each token of the vocabulary, and so most of the
    time of a small model.
    """
    tokens = []
    shares = torch.rand(len(probabilities), 1, dtype=torch.float64, generator=random)
    for part, share in zip(probabilities.split(ROWS_DRAWN), shares.split(ROWS_DRAWN), strict=True):
        totals = part.cumsum(-1, dtype=torch.float64)
        tokens.append(torch.searchsorted(totals, share * totals[:, -1:], right=True)[:, 0])
    return torch.cat(tokens)
