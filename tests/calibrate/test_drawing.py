"""Tokens that a model draws: from what it predicts after all tokens before them, with the cache of its architecture."""

from __future__ import annotations

import families
import pytest
from closeness import F32_MATRIX

WINDOWS, TOKENS, SEED = 3, 40, 5


@pytest.mark.parametrize("name", ["llama-tied", "gpt_oss", "qwen3_5", "gpt2"])
def test_each_token_is_drawn_as_the_model_predicts_it_from_all_before(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import torch

    from pqweights.calibrate.drawing import draw

    net = families.load(families.model(tmp_path_factory.getbasetemp(), name), families.FAMILIES[name])
    ids = draw(net, windows=WINDOWS, tokens=TOKENS, first=1, seed=SEED)
    assert ids.shape == (WINDOWS, TOKENS) and (ids[:, 0] == 1).all()
    with torch.inference_mode():
        totals = torch.softmax(net(ids, use_cache=False).logits.double(), -1).cumsum(-1)[:, :-1]
    random = torch.Generator().manual_seed(SEED)
    numbers = [torch.rand(WINDOWS, 1, dtype=torch.float64, generator=random) for _ in range(1, TOKENS)]
    above = totals.gather(2, ids[:, 1:, None])[..., 0]
    below = torch.where(ids[:, 1:] > 0, totals.gather(2, (ids[:, 1:, None] - 1).clamp(min=0))[..., 0], 0.0)
    assert (torch.cat(numbers, 1) < above + F32_MATRIX).all() and (torch.cat(numbers, 1) > below - F32_MATRIX).all()
    assert len(ids.unique()) > TOKENS


def test_a_model_that_computes_what_is_not_finite_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    import torch

    from pqweights.calibrate.drawing import draw
    from pqweights.errors import EvaluationError

    net = families.load(families.model(tmp_path_factory.getbasetemp(), "llama"), families.FAMILIES["llama"])
    with torch.no_grad():
        net.lm_head.weight[7, 0] = float("inf")
    with pytest.raises(EvaluationError, match="finite"):
        draw(net, windows=2, tokens=3, first=1, seed=SEED)
