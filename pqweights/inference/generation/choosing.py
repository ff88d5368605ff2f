"""How tokens are chosen: what the user and the files of a model ask for, and the choice from logits.

The choice is greedy, or random within temperature, top-k and top-p. The definitions are those of the processors of
transformers, in their order: repetition penalty (arXiv:1909.05858), temperature, top-k, top-p (arXiv:1904.09751).
`generate` of transformers with a streamer in place of these lines takes 10% of the tokens per second of a tiny model
with top-p, and gives other texts for a seed.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.storage import LocalStorage, read_file
from pqweights.common.strict_json import is_number, parse_json
from pqweights.errors import GenerationError, SourceError
from pqweights.inference.runtimes.folders import LLAMA_CPP, Folder
from pqweights.inference.runtimes.texts import Ids
from pqweights.options import GenerationOptions

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# So many of the likeliest tokens are sorted first for top-p, and four times as many while they do not suffice: to sort
# a vocabulary of 150000 takes ten milliseconds.
FEW = 512

GENERATION_CONFIG = "generation_config.json"
# Settings of generation_config.json that are not applied, and the values with which they do nothing.
NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "min_p": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0.0),
    "sequence_bias": (None,),
    "suppress_tokens": (None, []),
    "top_h": (None, 1.0),
    "typical_p": (None, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class TokenChoice:
    """How a token is chosen from the logits.

    temperature: 0 for the likeliest token; otherwise logits are divided by it.
    top_p: the probability of the likeliest tokens that are chosen from; 1 for all tokens.
    top_k: how many tokens are chosen from at most; 0 for all.
    repetition_penalty: by what logits of tokens that occurred are divided, or multiplied where they are negative.
    seed: of the random choices; None if there are none.
    """

    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    seed: int | None


@dataclass(frozen=True)
class ModelSettings:
    """What generation_config.json, or config.json without it, says of generation.

    ends: the ids of tokens that end a text.
    sampling: the settings of sampling, if the model is meant to sample: temperature, top_p, top_k.
    repetition_penalty: see TokenChoice.
    not_applied: the names of settings that have an effect in transformers and none here.
    """

    ends: frozenset[int]
    sampling: dict[str, float]
    repetition_penalty: float
    not_applied: tuple[str, ...]


def choose_tokens(options: GenerationOptions, model: ModelSettings) -> TokenChoice:
    """Return how tokens are chosen: as asked, else as the model's files say, else greedily."""
    temperature = model.sampling.get("temperature", 0.0) if options.temperature is None else options.temperature
    samples = temperature > 0
    top_p = model.sampling.get("top_p", 1.0) if options.top_p is None else options.top_p
    return TokenChoice(
        temperature=temperature,
        top_p=top_p if samples else 1.0,
        top_k=int(model.sampling.get("top_k", 0)) if samples else 0,
        repetition_penalty=model.repetition_penalty,
        seed=(secrets.randbits(32) if options.seed is None else options.seed) if samples else None,
    )


def read_settings(folder: Folder) -> ModelSettings:
    """Read what a model's folder says of generation.

    Raises SourceError for a file that cannot be read, or for a value that means nothing.
    """
    own = None if folder.runtime == LLAMA_CPP else _read(folder)
    stated = {} if own is None else own
    ends = stated.get("eos_token_id")
    if own is None or ends is None:
        text = folder.config.get("text_config")
        ends = (text if isinstance(text, dict) else {}).get("eos_token_id", folder.config.get("eos_token_id"))
    number = functools.partial(_number, folder, stated)
    sampling = {}
    if stated.get("do_sample") is True:
        sampling = {
            "temperature": number("temperature", 1.0, lambda value: value >= 0),
            "top_p": number("top_p", 1.0, lambda value: 0 < value <= 1),
            "top_k": number("top_k", 0, lambda value: value >= 0 and value == int(value)),
        }
    ids = ends if isinstance(ends, list) else [ends]
    return ModelSettings(
        ends=frozenset(token for token in ids if isinstance(token, int)),
        sampling=sampling,
        repetition_penalty=number("repetition_penalty", 1.0, lambda value: 1e-6 <= value <= 1e6),
        not_applied=tuple(name for name, idle in NOT_APPLIED.items() if stated.get(name) not in idle),
    )


def _number(folder: Folder, stated: dict[str, Any], name: str, default: float, holds: Callable[[float], bool]) -> float:
    """Return a number of generation_config.json. Raises SourceError for a value of another kind or out of range."""
    value = stated.get(name)
    if value is None:
        return default
    if not is_number(value) or not holds(value):
        raise SourceError(
            f"{folder.path / GENERATION_CONFIG}: {name}: expected a number that transformers takes, found {value!r}"
        )
    return float(value)


def _read(folder: Folder) -> dict[str, Any] | None:
    storage = LocalStorage(folder.path)
    if GENERATION_CONFIG not in storage.files():
        return None
    try:
        value = parse_json(read_file(storage, GENERATION_CONFIG))
    except ValueError as error:
        raise SourceError(f"{folder.path / GENERATION_CONFIG}: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{folder.path / GENERATION_CONFIG}: expected a JSON object, found {type(value).__name__}")
    return value


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
        index = self._index(probabilities)
        return int(index if tokens is None else tokens[index])

    def _index(self, probabilities: Doubles) -> int:
        """Return a random index, with these probabilities, among those that top-p leaves."""
        indices = None
        if self._how.top_p < 1:
            indices = likeliest(probabilities, self._how.top_p)
            probabilities = probabilities[indices]
        reached = probabilities.cumsum()
        index = int(np.searchsorted(reached, self._random.random() * reached[-1], side="right"))
        index = min(index, len(reached) - 1)  # the product may round up to the sum
        return index if indices is None else int(indices[index])


def likeliest(probabilities: Doubles, least: float) -> Ids:
    """Return the fewest indices, the likeliest first, whose probabilities sum up to `least` or more."""
    count = min(FEW, len(probabilities))
    while True:
        indices = np.argpartition(probabilities, -count)[-count:]
        indices = indices[np.argsort(-probabilities[indices], kind="stable")]
        reached = probabilities[indices].cumsum()
        if count == len(probabilities) or reached[-1] >= least:
            return indices[: int(np.searchsorted(reached, least)) + 1]
        count = min(4 * count, len(probabilities))
