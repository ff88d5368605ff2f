"""What the user and the files of a model ask for: how tokens are chosen, and which tokens end a text."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from pqweights.checkpoint.storage import LocalStorage, read_file
from pqweights.common.strict_json import is_number, parse_json
from pqweights.errors import SourceError
from pqweights.inference.runtimes.folders import LLAMA_CPP, Folder
from pqweights.inference.runtimes.steps import TokenChoice
from pqweights.options import GenerationOptions

GENERATION_CONFIG = "generation_config.json"
# The numbers that are read of it, and which of them transformers takes.
NUMBERS: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: value >= 0,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= 0 and value == int(value),
    "repetition_penalty": lambda value: 1e-6 <= value <= 1e6,
}


def choose_tokens(options: GenerationOptions, own: TokenChoice) -> TokenChoice:
    """Return how tokens are chosen: as asked, else as the model's files say. own: what they say"""
    temperature = own.temperature if options.temperature is None else options.temperature
    if not temperature:
        return TokenChoice(repetition_penalty=own.repetition_penalty)
    return TokenChoice(
        temperature=temperature,
        top_p=own.top_p if options.top_p is None else options.top_p,
        top_k=own.top_k,
        repetition_penalty=own.repetition_penalty,
        seed=secrets.randbits(32) if options.seed is None else options.seed,
    )


def read_settings(folder: Folder) -> tuple[frozenset[int], TokenChoice]:
    """Read which tokens end a text by the files of a model, and how tokens are chosen, greedily if they do not say.

    Raises SourceError for a file that cannot be read, or for a value that means nothing.
    """
    stated = {} if folder.runtime == LLAMA_CPP else _read(folder)
    text = folder.config.get("text_config")
    places = (stated, text if isinstance(text, dict) else {}, folder.config)
    ends = next((place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), None)
    ids = ends if isinstance(ends, list) else [ends]
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    if stated.get("do_sample") is not True:
        stated, sampling = {"repetition_penalty": stated.get("repetition_penalty")}, {}
    for name, holds in NUMBERS.items():
        value = stated.get(name)
        if value is None:
            continue
        if not is_number(value) or not holds(value):
            raise SourceError(
                f"{folder.path / GENERATION_CONFIG}: {name}: expected a number that transformers takes, found {value!r}"
            )
        sampling[name] = int(value) if name == "top_k" else float(value)
    return frozenset(token for token in ids if isinstance(token, int)), TokenChoice(**sampling)


def _read(folder: Folder) -> dict[str, Any]:
    """Return the content of generation_config.json; an empty one if there is none."""
    storage = LocalStorage(folder.path)
    if GENERATION_CONFIG not in storage.files():
        return {}
    try:
        value = parse_json(read_file(storage, GENERATION_CONFIG))
    except ValueError as error:
        raise SourceError(f"{folder.path / GENERATION_CONFIG}: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{folder.path / GENERATION_CONFIG}: expected a JSON object, found {type(value).__name__}")
    return value
