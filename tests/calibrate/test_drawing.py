"""Tokens that a model draws: from what it predicts after all tokens before them, with the cache of its architecture."""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest
from closeness import F32_MATRIX
from commands import raises

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
    with raises(EvaluationError, "finite"):
        draw(net, windows=2, tokens=3, first=1, seed=SEED)


def test_a_model_without_a_first_token_draws_from_any(tmp_path_factory: pytest.TempPathFactory) -> None:
    from pqweights.calibrate.drawing import draw, first_token

    net = families.load(families.model(tmp_path_factory.getbasetemp(), "llama"), families.FAMILIES["llama"])
    for config in (net.config, net.generation_config):
        config.bos_token_id = config.eos_token_id = None
    assert first_token(net) is None
    ids = draw(net, windows=16, tokens=TOKENS, first=None, seed=SEED)
    assert len(ids[:, 0].unique()) > 8
    assert ids.equal(draw(net, windows=16, tokens=TOKENS, first=None, seed=SEED))


@pytest.mark.parametrize("knows", [True, False])
def test_a_sample_has_texts_beside_what_is_drawn_if_the_model_knows_such(
    knows: bool, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import torch

    from pqweights.calibrate import drawing

    net = families.load(families.model(tmp_path_factory.getbasetemp(), "llama"), families.FAMILIES["llama"])
    first = drawing.first_token(net)
    texts = drawing.draw(net, windows=6, tokens=TOKENS, first=first, seed=SEED + 2)
    drawn, more = (
        drawing.draw(net, windows=count, tokens=TOKENS, first=first, seed=SEED + n) for n, count in enumerate([2, 6])
    )
    monkeypatch.setattr(drawing, "FAMILIAR", 2.0 if knows else 0.0)
    found = drawing.own_sample(net, texts, windows=8, tokens=TOKENS, seed=SEED)
    assert torch.equal(found, torch.cat([drawn, texts if knows else more]))
    assert torch.equal(drawing.own_sample(net, texts[:0], windows=2, tokens=TOKENS, seed=SEED), drawn)


@pytest.mark.parametrize("tokenizer", ["none", "of other words", "of another model", "fitting"])
def test_prose_is_read_if_the_tokenizer_can(tokenizer: str, tmp_path: Path) -> None:
    from pqweights.calibrate.sample import SampleOf, prose
    from pqweights.storage.sources import open_source

    folder = families.build(families.FAMILIES["llama"], tmp_path / "model")  # with a tokenizer of other words
    file = folder / "tokenizer.json"
    if tokenizer == "none":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    elif tokenizer != "of other words":
        whole = json.loads(file.read_text())
        first = 1000 if tokenizer == "of another model" else 0
        characters = {character: first + number % 500 for number, character in enumerate(sorted(set(prose())))}
        whole["model"]["vocab"] = characters | {"<unk>": 500}
        whole["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
        file.write_text(json.dumps(whole))
    sample = SampleOf(source=folder, checkpoint=open_source(folder), text="self", tokens=2048)
    assert tuple(sample.texts(12, 64).shape) == (12 if tokenizer == "fitting" else 0, 64)
