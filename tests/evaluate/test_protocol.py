"""The protocol of evaluation: windows, losses, divergences and standard errors match a naive implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from closeness import F32_FEW, F32_SOLVED, F64_SUM, approx
from commands import raises
from hypothesis import given
from hypothesis import strategies as st

from pqweights.errors import EvaluationError
from pqweights.runtime.models import Floats, Model
from pqweights.runtime.protocol import LOGITS_AT_ONCE, Loss, TextWindows, change, compare, perplexity, perplexity_change
from pqweights.runtime.texts import Ids

VOCABULARY = 37
IDS = np.random.default_rng(3).integers(0, VOCABULARY, 160)


def window_losses(model: Model, ids: Ids, windows: TextWindows) -> tuple[Loss, ...]:
    return compare(model, None, ids=ids, windows=windows).losses


def scored(logits: Callable[[Ids, int], Floats]) -> Model:
    """A model that only computes logits."""
    return Model(runtime="a table", dtype="float32", logits=logits)


def table_model(seed: int, noise: float = 0.0, vocabulary: int = VOCABULARY) -> Model:
    """A model whose logits depend on the token and its place in the window; `noise` perturbs them a little."""
    rng = np.random.default_rng(seed)
    tokens, places = rng.standard_normal((vocabulary, vocabulary)) * 2, rng.standard_normal((200, vocabulary))
    tokens += np.random.default_rng(99).standard_normal(tokens.shape) * noise

    def logits(ids: Any, last: int) -> Any:
        return (tokens[ids] + places[: len(ids)])[-last:].astype(np.float32)

    return scored(logits)


def naively(models: Sequence[Model], ids: Any, size: int, stride: int, score_first: bool) -> tuple[Any, Any, Any]:
    """For each window, lists over the scored tokens: losses of each model, KL(second || first), agreement.

    Computed by torch, token by token.
    """
    import torch

    losses: list[list[list[float]]] = []
    divergences, agreements = [], []
    for start in range(0, len(ids) - size + 1, stride):
        window = torch.from_numpy(ids[start : start + size])
        masked = 1 if score_first and start == 0 else max(1, size - stride)
        logits = [torch.from_numpy(m.logits(window.numpy(), size)).double() for m in models]
        of_window: list[list[float]] = [[] for _ in models]
        kl, same = [], []
        for place in range(masked, size):
            logs = [torch.log_softmax(each[place - 1], dim=-1) for each in logits]
            for own, each in zip(of_window, logs, strict=True):
                own.append(-float(each[window[place]]))
            if len(models) == 2:
                kl.append(float(torch.nn.functional.kl_div(logs[0], logs[1], reduction="sum", log_target=True)))
                same.append(bool(logs[0].argmax() == logs[1].argmax()))
        losses.append(of_window)
        divergences.append(kl)
        agreements.append(same)
    return losses, divergences, agreements


def error_of_mean(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


@pytest.mark.parametrize("score_first", [False, True])
@pytest.mark.parametrize(("size", "stride"), [(64, 16), (64, 64), (20, 7), (160, 16), (2, 1)])
def test_scores_match_a_naive_implementation(size, stride, score_first):
    model, reference = table_model(1, noise=0.3), table_model(1)
    scores = compare(model, reference, ids=IDS, windows=TextWindows(size=size, stride=stride, score_first=score_first))
    losses, divergences, agreements = naively([model, reference], IDS, size, stride, score_first)
    assert [loss.predictions for loss in scores.losses] == [len(each[0]) for each in losses]
    assert [loss.total for loss in scores.losses] == approx([sum(each[0]) for each in losses], F64_SUM)
    assert [loss.total for loss in scores.reference_losses] == approx([sum(each[1]) for each in losses], F64_SUM)
    tokens = [loss for each in losses for loss in each[0]]
    assert scores.log_perplexity.value == approx(np.mean(tokens), F64_SUM)
    assert scores.perplexity.value == approx(math.exp(np.mean(tokens)), F64_SUM)
    kl = [value for each in divergences for value in each]
    found = scores.divergence
    assert found.mean.value == approx(np.mean(kl), F64_SUM)
    assert [found.median, found.percentile_99, found.percentile_99_9, found.maximum] == approx(
        [*(sorted(kl)[math.ceil(share * len(kl)) - 1] for share in (0.5, 0.99, 0.999)), max(kl)], F64_SUM
    )
    assert found.top1.value == approx(np.mean([same for each in agreements for same in each]))
    if len(losses) == 1:
        assert scores.log_perplexity.standard_error is scores.perplexity.standard_error is None
        assert found.mean.standard_error is found.top1.standard_error is None
        return
    means = [np.mean(each[0]) for each in losses]
    assert scores.log_perplexity.standard_error == approx(error_of_mean(means))
    assert scores.perplexity.standard_error == approx(scores.perplexity.value * error_of_mean(means))
    assert found.mean.standard_error == approx(error_of_mean([np.mean(each) for each in divergences]))
    assert found.top1.standard_error == approx(error_of_mean([np.mean(each) for each in agreements]))
    differences = [np.mean(each[0]) - np.mean(each[1]) for each in losses]
    assert scores.change == approx((np.mean(differences), error_of_mean(differences)), F64_SUM)


def test_default_windows_are_those_of_the_paper():
    """arXiv:2603.29078 v1: windows of 2048, stride 512, the first 1536 tokens of every window masked."""
    windows = TextWindows()
    assert (windows.size, windows.stride, windows.size - windows.stride) == (2048, 512, 1536)
    starts = windows.starts(5000)
    assert list(starts) == [0, 512, 1024, 1536, 2048, 2560]  # 2952 is the last place where a whole window fits
    assert [windows.scored(start) for start in starts] == [512] * 6
    first = TextWindows(score_first=True)
    assert [first.scored(start) for start in starts] == [2047] + [512] * 5


@given(st.integers(2, 50), st.integers(1, 50), st.integers(0, 300), st.booleans())
def test_windows_are_whole_and_no_token_is_scored_twice(size, stride, tokens, score_first):
    windows = TextWindows(size=size, stride=stride, score_first=score_first)
    if stride > size or tokens < size:
        with raises(EvaluationError):
            windows.starts(tokens)
        return
    scored: list[int] = []
    for start in windows.starts(tokens):
        end = start + size
        assert end <= tokens
        scored += range(end - windows.scored(start), end)
        assert scored[-1] == end - 1
        assert end - windows.scored(start) > start  # a token comes before
    assert len(set(scored)) == len(scored)
    assert tokens - end < stride
    if score_first and stride < size:
        assert scored == list(range(1, scored[-1] + 1))


def test_window_count_limits_the_scored_tokens():
    losses = window_losses(table_model(1), IDS, TextWindows(size=64, stride=32, score_first=True, count=4))
    assert [loss.predictions for loss in losses] == [63, 32, 32, 32]
    with raises(EvaluationError, 192, 160):
        window_losses(table_model(1), IDS, TextWindows(size=64, stride=32, score_first=True, count=5))


@pytest.mark.parametrize(("size", "stride"), [(64, 65), (64, 0), (1, 1)])
def test_stride_outside_the_window_is_refused(size, stride):
    with raises(EvaluationError, f"`stride` {stride}", size):
        window_losses(table_model(1), IDS, TextWindows(size=size, stride=stride))


def test_divergence_from_itself_is_zero():
    scores = compare(table_model(1), table_model(1), ids=IDS, windows=TextWindows(size=64, stride=16))
    found = scores.divergence
    assert max(abs(found.mean.value), abs(found.maximum)) <= F32_FEW
    assert found.top1 == (1.0, 0.0)
    assert scores.change == scores.perplexity_change == (0.0, 0.0)


def test_scores_without_a_reference_have_no_divergence():
    scores = compare(table_model(1), None, ids=IDS, windows=TextWindows(size=64, stride=16))
    assert (
        scores.losses
        == compare(table_model(1), table_model(2), ids=IDS, windows=TextWindows(size=64, stride=16)).losses
    )
    assert scores.reference_losses is scores.divergence is scores.change is scores.perplexity_change is None


def test_small_divergences_are_exact():
    """One logit differs by 1e-4, so that KL is about p (1 - p) / 2 * 1e-8, below the resolution of float32."""
    base = np.random.default_rng(5).standard_normal(50_000).astype(np.float32)
    other = base.copy()
    other[7] += np.float32(1e-4)
    models = [scored(lambda ids, last, values=values: np.tile(values, (last, 1))) for values in (other, base)]
    found = compare(models[0], models[1], ids=IDS, windows=TextWindows(size=32, stride=8)).divergence
    share = np.exp(base[7].astype(np.float64)) / np.exp(base.astype(np.float64)).sum()
    step = float(other[7]) - float(base[7])
    assert found.mean.value == approx(share * (1 - share) / 2 * step**2, F32_SOLVED)


def test_large_vocabulary_is_scored_in_pieces():
    vocabulary = LOGITS_AT_ONCE // 3  # so that eight tokens are scored three at a time
    values = np.random.default_rng(6).standard_normal(vocabulary).astype(np.float32)

    def logits(ids: Any, last: int) -> Any:
        return values[None, :] * np.arange(1, last + 1, dtype=np.float32)[:, None] / last

    (loss,) = window_losses(scored(logits), IDS[:12], TextWindows(size=12, stride=8))
    expected = 0.0
    for row, token in zip(logits(IDS[:12], 9)[:-1].astype(np.float64), IDS[4:12], strict=True):
        expected += math.log(np.exp(row).sum()) - row[token]
    assert loss.total == approx(expected, F64_SUM)


def test_infinite_negative_logits_are_impossible_tokens():
    """A token that the reference excludes adds nothing to KL; one that only the model excludes makes it infinite."""

    def ruling_out(*tokens: int) -> Model:
        def logits(ids: Any, last: int) -> Any:
            values = table_model(1).logits(ids, last)
            values[:, list(tokens)] = -np.inf
            return values

        return scored(logits)

    ids = IDS % 30
    both = compare(ruling_out(33, 34), ruling_out(33, 34), ids=ids, windows=TextWindows(size=64, stride=16)).divergence
    fewer = compare(ruling_out(33), ruling_out(33, 34), ids=ids, windows=TextWindows(size=64, stride=16)).divergence
    more = compare(ruling_out(33, 34), ruling_out(33), ids=ids, windows=TextWindows(size=64, stride=16)).divergence
    assert both.maximum == 0.0
    assert 0 < fewer.mean.value < math.inf
    assert more.mean.value == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_or_infinite_logits_are_refused(bad):
    def logits(ids: Any, last: int) -> Any:
        values = table_model(1).logits(ids, last)
        values[-3, 4] = bad
        return values

    broken = scored(logits)
    with raises(EvaluationError, "token 0", "the model"):
        window_losses(broken, IDS, TextWindows(size=64, stride=16))
    with raises(EvaluationError, "token 0", "the reference"):
        compare(table_model(1), broken, ids=IDS, windows=TextWindows(size=64, stride=16))


def test_vocabularies_of_different_sizes_are_refused():
    with raises(EvaluationError, 40, 37):
        compare(table_model(1, vocabulary=40), table_model(1), ids=IDS, windows=TextWindows(size=64, stride=16))


def test_perplexity_that_overflows_is_infinite():
    scores = compare(
        scored(lambda ids, last: np.tile(np.float32([0, 3e6]), (last, 1))),
        None,
        ids=np.zeros(64, dtype=np.int64),
        windows=TextWindows(size=16, stride=8),
    )
    assert scores.perplexity.value == math.inf
    assert scores.log_perplexity.value == approx(3e6)


def test_perplexity_of_a_perfect_and_of_an_ignorant_model():
    """A model that predicts every token has perplexity 1; uniform logits give the size of the vocabulary."""

    def knowing(ids: Any, last: int) -> Any:
        logits = np.zeros((len(ids), 7), dtype=np.float32)
        logits[np.arange(len(ids)), (ids + 1) % 7] = 100
        return logits[-last:]

    ids, windows = np.arange(100) % 7, TextWindows(size=20, stride=10)
    assert perplexity(window_losses(scored(knowing), ids, windows)) == approx(1)
    ignorant = scored(lambda ids, last: np.zeros((last, 7), dtype=np.float32))
    assert perplexity(window_losses(ignorant, ids, windows)) == approx(7)


def test_standard_error_of_a_change_is_paired():
    before = [Loss(100.0, 10), Loss(900.0, 10), Loss(500.0, 20)]
    after = [Loss(101.0, 10), Loss(902.0, 10), Loss(506.0, 20)]
    assert change(after, before) == approx((0.2, 0.1 / math.sqrt(3)))  # 0.1, 0.2 and 0.3 per token
    assert change(after[:1], before[:1]) == (approx(0.1), None)


def test_standard_error_of_a_perplexity_change_is_paired():
    """The windows have 1.5 and 2.5 nats per token against 0.9 and 1.1: perplexities e^2 and e^1."""
    after, before = [Loss(15.0, 10), Loss(25.0, 10)], [Loss(9.0, 10), Loss(11.0, 10)]
    ours, theirs = math.exp(2), math.exp(1)
    first, second = ours * 1.5 - theirs * 0.9, ours * 2.5 - theirs * 1.1
    # The standard deviation of two numbers is their distance over sqrt(2); over sqrt(2) windows.
    assert perplexity_change(after, before) == approx((ours - theirs, abs(second - first) / 2))
    assert perplexity_change(after[:1], before[:1]).standard_error is None
