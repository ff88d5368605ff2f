"""The choice of tokens: greedy, top-k, top-p, temperature and penalty as transformers define them, and seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pqweights.errors import GenerationError
from pqweights.inference.generation import choosing
from pqweights.inference.generation.choosing import Chooser, TokenChoice, likeliest

PROMPT = np.array([3, 5], dtype=np.int64)
LOGITS = np.random.default_rng(1).standard_normal(2000).astype(np.float32) * 3


def chooser(temperature=1.0, top_p=1.0, top_k=0, penalty=1.0, seed=7, prompt=PROMPT) -> Chooser:
    how = TokenChoice(temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=penalty, seed=seed)
    return Chooser(how, prompt, np.random.default_rng(seed))


def allowed(logits, **settings) -> dict[int, float]:
    """The tokens that the processors of transformers leave, with their probabilities."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    scores = torch.from_numpy(logits)[None].double()
    if settings.get("penalty", 1) != 1:
        process = transformers.RepetitionPenaltyLogitsProcessor(settings["penalty"])
        scores = process(torch.from_numpy(PROMPT)[None], scores)
    scores = scores / settings.get("temperature", 1.0)
    if settings.get("top_k"):
        scores = transformers.TopKLogitsWarper(settings["top_k"])(None, scores)
    if settings.get("top_p", 1) < 1:
        scores = transformers.TopPLogitsWarper(settings["top_p"])(None, scores)
    found = torch.softmax(scores, -1)[0].numpy()
    return {int(token): float(found[token]) for token in np.flatnonzero(found)}


def test_zero_temperature_takes_the_first_of_the_likeliest():
    logits = np.array([0, 2, 1, 2], dtype=np.float32)
    assert [chooser(temperature=0.0, seed=None)(logits) for _ in range(5)] == [1] * 5


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"temperature": 0.5, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.7, "top_p": 0.9},
        {"penalty": 1.4, "top_k": 8},
    ],
)
def test_tokens_come_from_those_that_transformers_leaves_as_often(settings):
    logits = LOGITS.copy()
    logits[PROMPT] = [9.0, -1.0]  # so that the penalty matters
    expected = allowed(logits, **settings)
    how = TokenChoice(
        temperature=settings.get("temperature", 1.0),
        top_p=settings.get("top_p", 1.0),
        top_k=settings.get("top_k", 0),
        repetition_penalty=settings.get("penalty", 1.0),
        seed=0,
    )
    random = np.random.default_rng(0)
    found = [Chooser(how, PROMPT, random)(logits) for _ in range(4000)]
    assert set(found) <= expected.keys()
    for token, probability in expected.items():
        error = (probability * (1 - probability) / len(found)) ** 0.5
        assert abs(found.count(token) / len(found) - probability) < 5 * error + 1e-3


def test_the_same_seed_gives_the_same_tokens():
    first, again, other = chooser(seed=4), chooser(seed=4), chooser(seed=5)
    tokens = [first(LOGITS) for _ in range(30)]
    assert tokens == [again(LOGITS) for _ in range(30)] != [other(LOGITS) for _ in range(30)]


def test_tokens_that_were_chosen_are_penalized_from_then_on():
    choose = chooser(temperature=0.0, penalty=4.0, seed=None)
    logits = np.array([8, 7, 6, 0, 0, 0], dtype=np.float32)
    assert [choose(logits) for _ in range(4)] == [0, 1, 2, 0]
    assert logits.tolist() == [8, 7, 6, 0, 0, 0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.floats(0.01, 1.0), st.integers(1, 50))
def test_property_the_likeliest_are_as_few_as_possible(seed, count, least, few):
    probabilities = np.random.default_rng(seed).dirichlet(np.full(count, 0.3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "FEW", few)
        places = likeliest(probabilities, least)
    chosen = probabilities[places]
    assert len(set(places.tolist())) == len(places) and (np.diff(chosen) <= 0).all()
    assert chosen.sum() >= least - 1e-9 and chosen[:-1].sum() < least
    others = np.delete(probabilities, places)
    assert not len(others) or others.max() <= chosen[-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_nan_are_an_error(temperature):
    logits = LOGITS.copy()
    logits[100] = np.nan
    with pytest.raises(GenerationError, match="logits are NaN"):
        chooser(temperature=temperature)(logits)


def test_logits_of_minus_infinity_are_never_chosen():
    logits = np.full(50, -np.inf, dtype=np.float32)
    logits[[3, 9]] = 0
    assert {chooser(seed=seed, top_p=0.99)(logits) for seed in range(40)} == {3, 9}
