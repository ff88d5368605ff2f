"""What the files of a model ask of a generation, beside what the user asks of it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.storage import LocalStorage, read_file
from pqweights.common.strict_json import is_number, parse_json
from pqweights.errors import SourceError
from pqweights.inference.runtimes.folders import LLAMA_CPP, Folder
from pqweights.options import GenerationOptions

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
    found = None if folder.kind == LLAMA_CPP else _read(folder)
    stated = {} if found is None else found
    ends = stated.get("eos_token_id")
    if found is None or ends is None:
        text = folder.config.get("text_config")
        ends = (text if isinstance(text, dict) else {}).get("eos_token_id", folder.config.get("eos_token_id"))
    read = _StatedValues(folder.path, stated)
    sampling = {}
    if stated.get("do_sample") is True:
        sampling = {
            "temperature": read.number("temperature", 1.0, lambda value: value >= 0),
            "top_p": read.number("top_p", 1.0, lambda value: 0 < value <= 1),
            "top_k": read.number("top_k", 0, lambda value: value >= 0 and value == int(value)),
        }
    ids = ends if isinstance(ends, list) else [ends]
    return ModelSettings(
        ends=frozenset(token for token in ids if isinstance(token, int)),
        sampling=sampling,
        repetition_penalty=read.number("repetition_penalty", 1.0, lambda value: 1e-6 <= value <= 1e6),
        not_applied=tuple(name for name, idle in NOT_APPLIED.items() if stated.get(name) not in idle),
    )


@dataclass(frozen=True)
class _StatedValues:
    """The values of generation_config.json in a folder."""

    folder: Path
    stated: dict[str, Any]

    def number(self, name: str, default: float, holds: Callable[[float], bool]) -> float:
        """Return a number; raises SourceError for a value of another kind or out of range."""
        value = self.stated.get(name)
        if value is None:
            return default
        if not is_number(value) or not holds(value):
            raise SourceError(
                f"{self.folder / GENERATION_CONFIG}: {name}: expected a number that transformers takes, found {value!r}"
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
