"""What is asked of a generation, checked before a model is opened, and what the model's own files ask."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.storage import LocalStorage, read_file
from pqweights.errors import OptionError, SourceError
from pqweights.runtimes.cached import check_spec
from pqweights.runtimes.folders import LLAMA_CPP, Folder
from pqweights.runtimes.models import AUTO, DTYPES
from pqweights.strict_json import is_number, parse_json

GENERATION_CONFIG = "generation_config.json"
DEFAULT_MAX_TOKENS = 512
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
class GenerationOptions:
    """How text is generated, as the caller asks for it.

    system: what the conversation begins with, for models with a chat template.
    chat: whether the prompt is a turn of a conversation if the model has a chat template.
    max_tokens: the most tokens of a reply.
    temperature: 0 for the likeliest token; by default that of the model.
    top_p: the probability of the likeliest tokens that are chosen from; by default that of the model.
    seed: of the random choices; by default a random one, which the result names.
    packed: whether the weights of a master stay packed; by default choose_packed decides.
    kv_cache: the method that quantizes keys and values, with its options; by default they stay as they are.
    tokenizer: the folder of the tokenizer; by default the model's own.
    dtype: one of DTYPES, or auto for the model's own.
    device: cpu, cuda or auto.
    """

    system: str | None = None
    chat: bool = True
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    packed: bool | None = None
    kv_cache: str | None = None
    tokenizer: Path | None = None
    dtype: str = AUTO
    device: str = "cpu"

    def check(self) -> None:
        """Raise OptionError for values that are wrong for every model."""
        if self.max_tokens < 1:
            raise OptionError(f"--max-tokens: expected at least 1, found {self.max_tokens}")
        if self.temperature is not None and not (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6):
            raise OptionError(f"--temperature: expected 0 (the likeliest token) to 1e6, found {self.temperature:g}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(f"--top-p: expected more than 0 and at most 1, found {self.top_p:g}")
        if self.seed is not None and self.seed < 0:
            raise OptionError(f"--seed: expected 0 or more, found {self.seed}")
        if self.dtype not in (AUTO, *DTYPES):
            raise OptionError(f"--dtype: expected {AUTO} or {', '.join(DTYPES)}, found {self.dtype!r}")
        if self.kv_cache is not None:
            check_spec(self.kv_cache)
        if self.system is not None and not self.chat:
            raise OptionError("--system: it is for conversations; leave out --no-chat")


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
