"""Sliding windows over a text, and what two models say of the same tokens: perplexity, KL divergence, agreement.

The protocol is that of arXiv:2603.29078 v1, "sliding window of 2048 with stride 512, the first 1536 tokens of every window
masked". Standard errors are over windows and never over tokens, whose losses depend on each other. docs/evaluation.md has
the formulas.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.errors import EvaluationError
from pqweights.runtimes.models import Model
from pqweights.runtimes.texts import Ids

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# Logits that a thread turns into probabilities at once: 16 MB of float64.
LOGITS_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class Windows:
    """Windows of `size` tokens that start every `stride` tokens; each scores its last `stride` tokens, the others are masked.

    A token without one before it has no prediction, so that windows without overlap score one token less. score_first:
    the first window scores all its predictions. count: the first so many; by default all that fit wholly into the text.
    """

    size: int = 2048
    stride: int = 512
    score_first: bool = False
    count: int | None = None

    def starts(self, tokens: int) -> range:
        """Where the windows begin in a text of so many tokens.

        Raises EvaluationError where they are none, or too long for the text.
        """
        if not 1 <= self.stride <= self.size or self.size < 2:
            raise EvaluationError(
                f"--stride {self.stride}: expected at least 1 and at most the window, here {self.size} tokens (at least 2)"
            )
        needed = self.size + ((self.count or 1) - 1) * self.stride
        if tokens < needed:
            raise EvaluationError(
                f"the text: expected at least {needed} tokens for {self.count or 1} window(s) of {self.size}, found {tokens}; "
                "give a longer text or smaller windows"
            )
        fitting = (tokens - self.size) // self.stride + 1
        return range(0, (self.count or fitting) * self.stride, self.stride)

    def scored(self, start: int) -> int:
        """How many tokens the window that begins there scores: its last ones."""
        return self.size - 1 if self.score_first and start == 0 else min(self.stride, self.size - 1)


class Loss(NamedTuple):
    """Of a window: the summed negative log-likelihood, in nats, of so many predicted tokens."""

    total: float
    predictions: int


class Estimate(NamedTuple):
    """A measure, and its standard error over windows; None for a single one."""

    value: float
    standard_error: float | None


@dataclass(frozen=True)
class Divergence:
    """KL(reference || model) of the distributions of the next token, in nats, over all scored tokens.

    Percentiles are values of single tokens, not interpolated. top1: the share of tokens at which both models hold the same
    one for the likeliest.
    """

    mean: Estimate
    median: float
    percentile_99: float
    percentile_99_9: float
    maximum: float
    top1: Estimate


@dataclass(frozen=True)
class Scores:
    """One model on one text. losses: of each window, so that any two models can be paired by perplexity_change.

    reference_losses and what follows: None without a reference.
    """

    losses: tuple[Loss, ...]
    reference_losses: tuple[Loss, ...] | None = None
    divergence: Divergence | None = None

    @property
    def perplexity(self) -> Estimate:
        """e to the log-perplexity."""
        value, error = self.log_perplexity
        return Estimate(_exp(value), None if error is None else _exp(value) * error)

    @property
    def log_perplexity(self) -> Estimate:
        """Nats per scored token."""
        return Estimate(_log_perplexity(self.losses), _standard_error(_per_window(self.losses)))

    @property
    def change(self) -> Estimate | None:
        """Of the log-perplexity, against the reference."""
        return None if self.reference_losses is None else change(self.losses, self.reference_losses)

    @property
    def perplexity_change(self) -> Estimate | None:
        """Of the perplexity, against the reference."""
        return None if self.reference_losses is None else perplexity_change(self.losses, self.reference_losses)


def compare(
    model: Model,
    reference: Model | None,
    ids: Ids,
    windows: Windows,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scores:
    """Run a model, and the reference beside it, over the windows of a text. Only what comes out of a window is kept.

    progress: windows done, windows in all. Raises EvaluationError where the text is too short for a window, the
    vocabularies are not equally large, or logits are no numbers.
    """
    starts = windows.starts(len(ids))
    of_windows = []
    for done, start in enumerate(starts):
        piece, scored = ids[start : start + windows.size], windows.scored(start)
        logits = [each.logits(piece, scored + 1)[:-1] for each in (model, reference) if each is not None]
        of_windows.append(_score(logits, piece[-scored:], start))
        progress(done + 1, len(starts))
    losses, reference_losses = (
        tuple(Loss(float(each.losses[row].sum()), each.losses.shape[1]) for each in of_windows)
        for row in (0, 0 if reference is None else 1)
    )
    if reference is None:
        return Scores(losses)
    return Scores(losses, reference_losses, _divergence(of_windows))


def window_losses(model: Model, ids: Ids, windows: Windows) -> tuple[Loss, ...]:
    """The loss of each window, on the same tokens for every model, so that models can be compared window by window.

    Raises as compare.
    """
    return compare(model, None, ids, windows).losses


def perplexity(losses: Sequence[Loss]) -> float:
    """Of all windows together: e to the loss per predicted token."""
    return _exp(_log_perplexity(losses))


def change(losses: Sequence[Loss], reference: Sequence[Loss]) -> Estimate:
    """By how much the loss per token differs from that of another model on the same windows, as the mean over windows.

    Where all windows score as many tokens, that is the difference of the log-perplexities.
    """
    differences = _per_window(losses) - _per_window(reference)
    return Estimate(float(differences.mean()), _standard_error(differences))


def perplexity_change(losses: Sequence[Loss], reference: Sequence[Loss]) -> Estimate:
    """By how much the perplexity differs from that of another model on the same windows, with its paired standard error.

    That error is of PPL_model * loss_model - PPL_reference * loss_reference, the change to first order.
    """
    ours, theirs = perplexity(losses), perplexity(reference)
    return Estimate(ours - theirs, _standard_error(ours * _per_window(losses) - theirs * _per_window(reference)))


def _per_window(losses: Sequence[Loss]) -> Doubles:
    """Nats per token."""
    return np.array([loss.total / loss.predictions for loss in losses])


def _log_perplexity(losses: Sequence[Loss]) -> float:
    return math.fsum(loss.total for loss in losses) / sum(loss.predictions for loss in losses)


def _standard_error(of_windows: Sequence[float] | Doubles) -> float | None:
    if len(of_windows) < 2:
        return None
    with np.errstate(invalid="ignore"):  # of infinite losses there is none: NaN
        return float(np.std(of_windows, ddof=1)) / math.sqrt(len(of_windows))


def _exp(value: float) -> float:
    """Infinity beyond the range of a float, which a model of huge logits may reach."""
    return math.exp(value) if value < 700 else math.inf


class _Tokens(NamedTuple):
    """Of the tokens that a window scores. losses: [1 or 2, tokens], the model's and the reference's.

    divergences and agreements, [tokens], mean nothing without a reference.
    """

    losses: Doubles
    divergences: Doubles
    agreements: npt.NDArray[np.bool_]


def _score(logits: Sequence[Floats], chosen: Ids, start: int) -> _Tokens:
    """logits: [tokens, vocabulary] of the model and perhaps of the reference. chosen: the tokens that came."""
    widths = [each.shape[1] for each in logits]
    if len(set(widths)) > 1:
        raise EvaluationError(
            f"the model has {widths[0]} logits, the reference {widths[1]}: expected models of one vocabulary"
        )
    tokens, step = len(chosen), max(1, LOGITS_AT_ONCE // widths[0])
    result = _Tokens(np.empty((len(logits), tokens)), np.zeros(tokens), np.ones(tokens, dtype=np.bool_))

    def rows(first: int) -> None:
        place = slice(first, min(first + step, tokens))
        probabilities = [
            _log_softmax(each[place], f"the window from token {start} on: the {whose}'s")
            for each, whose in zip(logits, ("model", "reference"), strict=False)
        ]
        for row, each in enumerate(probabilities):
            result.losses[row, place] = -each[np.arange(len(each)), chosen[place]]
        if len(probabilities) == 2:
            ours, theirs = probabilities
            result.agreements[place] = ours.argmax(axis=1) == theirs.argmax(axis=1)
            likely = np.exp(theirs)
            with np.errstate(invalid="ignore"):  # a token that the reference rules out: 0 * (-inf - ...)
                result.divergences[place] = np.where(likely > 0, likely * (theirs - ours), 0.0).sum(axis=1)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for _ in pool.map(rows, range(0, tokens, step)):
            pass
    return result


def _log_softmax(logits: Floats, whose: str) -> Doubles:
    """In float64 throughout: what KL is made of differs by less than float32 has digits."""
    values = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        values -= values.max(axis=1, keepdims=True)
    totals = np.log(np.exp(values).sum(axis=1, keepdims=True))
    if np.isnan(totals).any():
        raise EvaluationError(
            f"{whose} logits are NaN or infinite; the weights are broken, or --dtype float32 is needed"
        )
    values -= totals
    return values


def _divergence(of_windows: Sequence[_Tokens]) -> Divergence:
    divergences = np.concatenate([each.divergences for each in of_windows])
    agreements = np.concatenate([each.agreements for each in of_windows])
    median, high, higher = np.quantile(divergences, (0.5, 0.99, 0.999), method="inverted_cdf")  # no inf - inf
    return Divergence(
        Estimate(float(divergences.mean()), _standard_error([each.divergences.mean() for each in of_windows])),
        float(median),
        float(high),
        float(higher),
        float(divergences.max()),
        Estimate(float(agreements.mean()), _standard_error([each.agreements.mean() for each in of_windows])),
    )
