"""The choice of the next token from logits: greedy, or random within temperature, top-k and top-p.

The definitions are those of the processors of transformers, in their order: repetition penalty (arXiv:1909.05858),
temperature, top-k, top-p (arXiv:1904.09751). `generate` of transformers with a streamer in place of these lines takes
10% of the tokens per second of a tiny model with top-p, and gives other texts for a seed.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pqweights.errors import GenerationError
from pqweights.inference.generation.options import TokenChoice
from pqweights.inference.runtimes.texts import Ids

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# So many of the likeliest tokens are sorted first for top-p, and four times as many while they do not suffice: to sort
# a vocabulary of 150000 takes ten milliseconds.
FEW = 512


class Chooser:
    """What chooses the tokens of one reply.

    how: the settings.
    prompt: the ids of the prompt, which count as having occurred.
    random: where random numbers come from.
    """

    def __init__(self, how: TokenChoice, prompt: Ids, random: np.random.Generator) -> None:
        self._how, self._random = how, random
        self._occurred = set(prompt.tolist()) if how.repetition_penalty != 1 else set()

    def __call__(self, logits: Floats) -> int:
        """Return the next token.

        logits: [vocabulary] f32, not changed

        Raises GenerationError if they are NaN.
        """
        how = self._how
        if how.repetition_penalty != 1:
            logits = self._penalized(logits)
        token = int(logits.argmax())
        if math.isnan(logits[token]):
            raise GenerationError("the logits are NaN: the model is damaged, or overflows in this dtype (`dtype`)")
        if how.temperature > 0 and math.isfinite(logits[token]):
            token = self._sampled(logits)
        if how.repetition_penalty != 1:
            self._occurred.add(token)
        return token

    def _penalized(self, logits: Floats) -> Floats:
        result, occurred = logits.copy(), np.fromiter(self._occurred, dtype=np.int64)
        occurred = occurred[occurred < len(logits)]
        values, penalty = logits[occurred], np.float32(self._how.repetition_penalty)
        result[occurred] = np.where(values < 0, values * penalty, values / penalty)
        return result

    def _sampled(self, logits: Floats) -> int:
        how = self._how
        tokens: Ids | None = None
        if 0 < how.top_k < len(logits):
            tokens = np.argpartition(logits, -how.top_k)[-how.top_k :]
            logits = logits[tokens]
        scaled = (logits.astype(np.float64) - logits.max()) / how.temperature
        probabilities = np.exp(scaled)
        probabilities /= probabilities.sum()
        place = self._place(probabilities)
        return int(place if tokens is None else tokens[place])

    def _place(self, probabilities: Doubles) -> int:
        """Return a random place, with these probabilities, among those that top-p leaves."""
        places = None
        if self._how.top_p < 1:
            places = likeliest(probabilities, self._how.top_p)
            probabilities = probabilities[places]
        reached = probabilities.cumsum()
        found = int(np.searchsorted(reached, self._random.random() * reached[-1], side="right"))
        found = min(found, len(reached) - 1)  # the product may round up to the sum
        return found if places is None else int(places[found])


def likeliest(probabilities: Doubles, least: float) -> Ids:
    """Return the fewest places, the likeliest first, whose probabilities sum up to `least` or more."""
    count = min(FEW, len(probabilities))
    while True:
        places = np.argpartition(probabilities, -count)[-count:]
        places = places[np.argsort(-probabilities[places], kind="stable")]
        reached = probabilities[places].cumsum()
        if count == len(probabilities) or reached[-1] >= least:
            return places[: int(np.searchsorted(reached, least)) + 1]
        count = min(4 * count, len(probabilities))
