"""Sliding windows over a text, and the comparison of two models on them: perplexity, KL divergence, agreement.

The protocol is that of arXiv:2603.29078 v1: "sliding window of 2048 with stride 512, the first 1536 tokens of every
window masked". Standard errors are over windows, never over tokens, whose losses depend on each other. The formulas are
in docs/evaluation.md.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.common.units import counted
from pqweights.errors import EvaluationError
from pqweights.runtime.models import Model
from pqweights.runtime.saved_reference import SavedReference, SavedTokens
from pqweights.runtime.texts import Ids, with_bos

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# How many logits a thread turns into probabilities at once: 16 MB of float64.
LOGITS_AT_ONCE = 1 << 21


@dataclass(frozen=True, kw_only=True)
class TextWindows:
    """Overlapping windows over a text; each scores its last `stride` tokens and masks the others.

    A window has no prediction for its first token, so windows without overlap score one token less than their size.

    size: tokens of a window.
    stride: tokens between the starts of two windows.
    score_first: whether the first window scores all its predictions.
    count: how many windows to use, from the start of the text; None for all that fit.
    bos: the token in place of the first of each window, which is not scored; None for the text's own.
    """

    size: int = 2048
    stride: int = 512
    score_first: bool = False
    count: int | None = None
    bos: int | None = None

    def piece(self, ids: Ids, start: int) -> Ids:
        """Return what a model reads of the window at `start`, [size]. ids: the text, [tokens]"""
        return with_bos(ids[start : start + self.size], self.bos)

    def starts(self, tokens: int, *, max_tokens: int | None = None) -> range:
        """Return the first token of each window in a text of `tokens` tokens, which were cut to `max_tokens` if given.

        Raises EvaluationError if the stride does not fit the window, or if the text is too short.
        """
        if not 1 <= self.stride <= self.size or self.size < 2:
            raise EvaluationError(
                f"`stride` {self.stride}: expected at least 1 and at most the window, "
                f"which has {self.size} tokens (at least 2)"
            )
        needed = self.size + ((self.count or 1) - 1) * self.stride
        if tokens < needed:
            remedy = f"found {tokens}; give a longer text"
            if tokens == max_tokens:
                remedy = f"`max_tokens` {tokens} leaves fewer; raise it"
            raise EvaluationError(
                f"the text: expected at least {needed} tokens for {counted(self.count or 1, 'window')} of {self.size}, "
                f"{remedy}, or pass a smaller `window`"
            )
        fitting = (tokens - self.size) // self.stride + 1
        return range(0, (self.count or fitting) * self.stride, self.stride)

    def scored(self, start: int) -> int:
        """Return how many of its last tokens the window at `start` scores."""
        return self.size - 1 if self.score_first and start == 0 else min(self.stride, self.size - 1)


# Called with how many scored tokens come before those of a window, the first of the rows in that, their
# log-probabilities, [tokens, vocabulary], and the tokens of the text, [tokens]; from several threads.
Save = Callable[[int, int, Doubles, Ids], None]


class Loss(NamedTuple):
    """The loss of one window: the sum of the negative log-likelihoods (nats), and how many tokens were predicted."""

    total: float
    predictions: int


class Estimate(NamedTuple):
    """A measured value and its standard error over windows, which is None for a single window."""

    value: float
    standard_error: float | None


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """KL(reference || model) of the next token's distribution, in nats, over all scored tokens.

    Percentiles are values of single tokens, not interpolated. top1 is the share of tokens for which both models rank
    the same next token first.
    """

    mean: Estimate
    median: float
    percentile_99: float
    percentile_99_9: float
    maximum: float
    top1: Estimate


@dataclass(frozen=True)
class Scores:
    """The result of one model on one text.

    losses: the loss of each window, so that any two models can be paired by perplexity_change.
    reference_losses: the reference's loss of each window; None without a reference.
    divergence: how far the model is from the reference; None without a reference.
    """

    losses: tuple[Loss, ...]
    reference_losses: tuple[Loss, ...] | None = None
    divergence: Divergence | None = None

    @property
    def perplexity(self) -> Estimate:
        """The perplexity: e to the power of the log-perplexity."""
        value, error = self.log_perplexity
        return Estimate(_exp(value), None if error is None else _exp(value) * error)

    @property
    def log_perplexity(self) -> Estimate:
        """The mean loss in nats per scored token."""
        return Estimate(_log_perplexity(self.losses), _standard_error(_per_window(self.losses)))

    @property
    def change(self) -> Estimate | None:
        """The change of the log-perplexity against the reference; None without a reference."""
        return None if self.reference_losses is None else change(self.losses, self.reference_losses)

    @property
    def perplexity_change(self) -> Estimate | None:
        """The change of the perplexity against the reference; None without a reference."""
        return None if self.reference_losses is None else perplexity_change(self.losses, self.reference_losses)


def compare(
    model: Model,
    reference: Model | SavedReference | None,
    *,
    ids: Ids,
    windows: TextWindows,
    save: Save | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scores:
    """Run a model, and a reference beside it, over the windows of a text; keep only the figures of each window.

    model: the model to score.
    reference: the model to compare it with, or what was saved of it; None to compare with nothing.
    ids: the tokens of the text, [tokens].
    windows: how the text is cut.
    save: called with the log-probabilities of the reference, or of the model if there is none.
    progress: called with the windows done and the windows in all.

    Raises EvaluationError if the text is too short for a window, if the vocabularies differ in size, or if logits are
    NaN.
    """
    starts = windows.starts(len(ids))
    of_windows, before = [], 0
    streams = [_predictions(one, ids, windows, starts) for one in (model, reference) if isinstance(one, Model)]
    for done, (start, *logits) in enumerate(zip(starts, *streams, strict=True)):
        count = windows.scored(start)
        saved = reference.tokens(before, count) if isinstance(reference, SavedReference) else None
        keep = None if save is None else functools.partial(save, before)
        of_windows.append(_score(logits, windows.piece(ids, start)[-count:], start, saved=saved, keep=keep))
        before += count
        progress(done + 1, len(starts))
    losses, reference_losses = (
        tuple(Loss(float(one.losses[row].sum()), one.losses.shape[1]) for one in of_windows)
        for row in (0, 0 if reference is None else 1)
    )
    if reference is None:
        return Scores(losses)
    return Scores(losses, reference_losses, _divergence(of_windows))


def _predictions(model: Model, ids: Ids, windows: TextWindows, starts: Sequence[int]) -> Iterator[Floats]:
    """Yield what a model predicts for the scored tokens of each window, [tokens, vocabulary]."""
    for scored, alike in itertools.groupby(starts, windows.scored):
        pieces = (windows.piece(ids, start) for start in alike)
        if model.logits_of is not None:
            logits_of = model.logits_of(list(pieces), scored + 1)
        else:
            logits_of = (model.logits(piece, scored + 1) for piece in pieces)
        yield from (logits[:-1] for logits in logits_of)


def perplexity(losses: Sequence[Loss]) -> float:
    """Return the perplexity over all windows: e to the power of the loss per predicted token."""
    return _exp(_log_perplexity(losses))


def change(losses: Sequence[Loss], reference: Sequence[Loss]) -> Estimate:
    """Return the difference of two models' loss per token on the same windows, as the mean over windows.

    It is the difference of the log-perplexities if all windows score the same number of tokens.
    """
    differences = _per_window(losses) - _per_window(reference)
    return Estimate(float(differences.mean()), _standard_error(differences))


def perplexity_change(losses: Sequence[Loss], reference: Sequence[Loss]) -> Estimate:
    """Return the difference of two models' perplexities on the same windows, with its paired standard error.

    The error is that of PPL_model * loss_model - PPL_reference * loss_reference, which is the change to first order.
    """
    ours, theirs = perplexity(losses), perplexity(reference)
    return Estimate(ours - theirs, _standard_error(ours * _per_window(losses) - theirs * _per_window(reference)))


def _per_window(losses: Sequence[Loss]) -> Doubles:
    """The loss of each window in nats per predicted token, [windows]."""
    return np.array([loss.total / loss.predictions for loss in losses])


def _log_perplexity(losses: Sequence[Loss]) -> float:
    return math.fsum(loss.total for loss in losses) / sum(loss.predictions for loss in losses)


def _standard_error(of_windows: Sequence[float] | Doubles) -> float | None:
    if len(of_windows) < 2:
        return None
    with np.errstate(invalid="ignore"):  # the error of infinite losses is NaN
        return float(np.std(of_windows, ddof=1)) / math.sqrt(len(of_windows))


def _exp(value: float) -> float:
    """Return e to the power of a value, or infinity beyond the range of a float, which huge logits may reach."""
    return math.exp(value) if value < 700 else math.inf


class _Tokens(NamedTuple):
    """The figures of the tokens that one window scores; the last two are meaningless without a reference.

    losses: [1 or 2, tokens], the model's and the reference's.
    divergences: KL of each token, [tokens].
    agreements: whether both models rank the same token first, [tokens].
    """

    losses: Doubles
    divergences: Doubles
    agreements: npt.NDArray[np.bool_]


def _score(
    logits: Sequence[Floats],
    chosen: Ids,
    start: int,
    *,
    saved: SavedTokens | None,
    keep: Callable[[int, Doubles, Ids], None] | None,
) -> _Tokens:
    """Score one window.

    logits: [tokens, vocabulary] of the model, then of the reference if that is a model.
    chosen: the tokens that the text has there, [tokens].
    start: the first token of the window, for messages.
    saved: what was saved of the reference there.
    keep: Save without its first argument.
    """
    sizes = [one.shape[1] for one in logits]
    if len(set(sizes)) > 1:
        raise EvaluationError(
            f"the model has {sizes[0]} logits, the reference {sizes[1]}: expected models with the same vocabulary"
        )
    tokens, step = len(chosen), max(1, LOGITS_AT_ONCE // sizes[0])
    losses = np.empty((len(logits), tokens)) if saved is None else np.stack([saved.losses, saved.losses])
    result = _Tokens(losses, np.zeros(tokens), np.ones(tokens, dtype=np.bool_))

    def rows(first: int) -> None:
        span = slice(first, min(first + step, tokens))
        probabilities = [
            _log_softmax(one[span], f"the window from token {start} on: the {name}'s")
            for one, name in zip(logits, ("model", "reference"), strict=False)
        ]
        for row, one in enumerate(probabilities):
            result.losses[row, span] = -one[np.arange(len(one)), chosen[span]]
        if len(probabilities) == 2:
            result.agreements[span] = probabilities[0].argmax(axis=1) == probabilities[1].argmax(axis=1)
            result.divergences[span] = _kl(*probabilities)
        if saved is not None:
            result.agreements[span] = saved.part(span).agreements(probabilities[0])
            result.divergences[span] = saved.part(span).divergences(probabilities[0])
        if keep is not None:
            keep(first, probabilities[-1], chosen[span])

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for _ in pool.map(rows, range(0, tokens, step)):
            pass
    return result


def _kl(model: Doubles, reference: Doubles) -> Doubles:
    """KL(reference || model) of each row of log-probabilities, [tokens]."""
    likely = np.exp(reference)
    with np.errstate(invalid="ignore"):  # 0 * (-inf - ...) for a token that the reference rules out
        values: Doubles = np.where(likely > 0, likely * (reference - model), 0.0).sum(axis=1)
    return values


def _log_softmax(logits: Floats, name: str) -> Doubles:
    """Return log-probabilities in float64, because KL sums differences that are below the precision of float32."""
    values = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        values -= values.max(axis=1, keepdims=True)
    totals = np.log(np.exp(values).sum(axis=1, keepdims=True))
    if np.isnan(totals).any():
        raise EvaluationError(
            f"{name} logits are NaN or infinite; the weights are broken, or `dtype` float32 is needed"
        )
    values -= totals
    return values


def _divergence(of_windows: Sequence[_Tokens]) -> Divergence:
    divergences = np.concatenate([window.divergences for window in of_windows])
    agreements = np.concatenate([window.agreements for window in of_windows])
    # Without interpolation, which would compute inf - inf.
    median, high, higher = np.quantile(divergences, (0.5, 0.99, 0.999), method="inverted_cdf")
    return Divergence(
        mean=Estimate(float(divergences.mean()), _standard_error([window.divergences.mean() for window in of_windows])),
        median=float(median),
        percentile_99=float(high),
        percentile_99_9=float(higher),
        maximum=float(divergences.max()),
        top1=Estimate(float(agreements.mean()), _standard_error([window.agreements.mean() for window in of_windows])),
    )
