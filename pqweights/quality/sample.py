"""The sample of tokens from which a calibration learns: drawn from the model itself, or cut from a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pqweights.errors import EvaluationError


def draw(model: Any, *, windows: int, tokens: int, first: int, seed: int) -> Tensor:
    """Draw token ids [windows, tokens] from a causal language model, at temperature 1.

    first: the token with which each window begins
    """
    random = torch.Generator().manual_seed(seed)
    ids = torch.full((windows, 1), first)
    cache = None
    with torch.inference_mode():
        for _ in range(tokens - 1):
            output = model(ids[:, -1:], past_key_values=cache, use_cache=True)
            cache = getattr(output, "past_key_values", None)
            if cache is None:
                raise EvaluationError("the sample: the model keeps no cache of what it read; give a text instead")
            logits = output.logits[:, -1].float()
            if not bool(logits.isfinite().all()):
                raise EvaluationError("the sample: the model's logits are not finite, so its weights are broken")
            ids = torch.cat([ids, torch.multinomial(torch.softmax(logits, -1), 1, generator=random)], dim=1)
    return ids


def first_token(model: Any) -> int:
    """Return the token with which texts of a model begin. Raises EvaluationError if it has none."""
    configs = (model.config.get_text_config(), model.generation_config)
    for name in ("bos_token_id", "eos_token_id"):
        for config in configs:
            token = getattr(config, name, None)
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int):
                return token
    raise EvaluationError("the sample: the model states no token with which a text begins; give a text instead")
