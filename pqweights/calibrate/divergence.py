"""The divergence between a model and one with other weights, with one layer of each in memory at a time.

How much a result diverges is predicted from sensitivities, and what a format really does to the model, with errors that
are made up for, or spared where they matter, is neither known before nor alike in all formats. So for a divergence that
is wanted results are made and measured, and the prediction is multiplied by what they say, until they have it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file
from torch import Tensor

from pqweights.calibrate.layer_passes import save_whole
from pqweights.calibrate.layered import OUTSIDE, LayerCall, LayeredModel
from pqweights.common.strict_json import rounded
from pqweights.planning.sensitivity import Sensitivity
from pqweights.runtime.saved_reference import SavedTokens

Doubles = npt.NDArray[np.float64]
# Windows that a layer computes together, and tokens of which there are predictions at a time.
BATCH, TOKENS = 4, 128
# How far a divergence may be below what is wanted, as a share of it; and how many results are made for it.
MOST_BELOW, ATTEMPTS = 0.1, 5


class LayerwiseDivergence:
    """What other weights do to the predictions of a model; the states of all tokens are in memory.

    model: the model
    ids: token ids, [windows, tokens]
    """

    def __init__(self, model: LayeredModel, ids: Tensor) -> None:
        self._model, self._ids = model, ids

    def of(self, other: LayeredModel) -> float:
        """Return KL(model || other), in nats per token. Raises SourceError if one cannot be run."""
        parts = zip(self._reference, self._logs(other), strict=True)
        return float(np.concatenate([saved.divergences(logs) for saved, logs in parts]).mean())

    @functools.cached_property
    def _reference(self) -> list[SavedTokens]:
        """The predictions of the model as it is: its logits take too much room."""
        chosen = np.zeros(TOKENS, dtype=np.int64)  # nothing depends on the losses
        return [SavedTokens.of(logs, chosen[: len(logs)], first=0) for logs in self._logs(self._model)]

    @torch.no_grad()
    def _logs(self, model: LayeredModel) -> Iterator[Doubles]:
        """Yield the log-probabilities of a few tokens at a time, [tokens, vocabulary]."""
        batches = self._ids.split(BATCH)
        with model.loaded(OUTSIDE):
            begun = [model.begin(batch) for batch in batches]
        states = [hidden for hidden, _ in begun]
        calls: list[list[LayerCall]] = [of_layers for _, of_layers in begun]
        for layer in range(model.layers):
            with model.loaded(layer):
                states = [model.run(layer, hidden, of[layer]) for hidden, of in zip(states, calls, strict=True)]
        with model.loaded(OUTSIDE):
            for ids, hidden in zip(self._ids, torch.cat(states), strict=True):
                for part in zip(ids.split(TOKENS), hidden.split(TOKENS), strict=True):
                    logits = model.end(part[0][None], part[1][None])[0]
                    yield torch.log_softmax(logits.double(), -1).numpy()


def scaled_for(
    goal: float,
    sensitivity: Sensitivity,
    divergence: LayerwiseDivergence,
    make: Callable[[Sensitivity], LayeredModel],
    work: Path,
) -> Sensitivity:
    """Return sensitivities with which results that are chosen for a divergence have it.

    goal: in nats per token
    make: makes a result by sensitivities, and returns its model
    work: where what was measured is kept, so that it is not measured again

    Raises what `make` raises, RecipeError among them if no result has so little.
    """
    attempts: list[tuple[float, float]] = []  # by what the prediction was multiplied, and the divergence
    while len(attempts) < ATTEMPTS:
        file, aim = work / f"attempt-{len(attempts)}.safetensors", goal * (1 - MOST_BELOW / 2)
        scale = math.prod(attempts[-1]) / aim if attempts else 1.0
        if not file.exists():
            measured = divergence.of(make(sensitivity.scaled(scale)))
            save_whole(file, {"divergence": np.array(measured)})
        attempts.append((scale, float(load_file(file)["divergence"])))
        if 1 - MOST_BELOW <= attempts[-1][1] / goal <= 1:
            break
    scale, measured = min(attempts, key=lambda attempt: (attempt[1] > goal, abs(attempt[1] - goal)))
    scaled = sensitivity.scaled(scale)
    return replace(scaled, method=scaled.method | {"divergence": rounded(measured), "max_kl": goal})
