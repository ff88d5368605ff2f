"""The text that models are compared on, and its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.names import TOKENIZER_FILES
from pqweights.errors import EvaluationError, SourceError
from pqweights.runtimes.packages import Refused, package, quiet

Ids = npt.NDArray[np.int64]  # [tokens]

WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1")
# A first guess of how much text so many tokens are.
CHARACTERS_PER_TOKEN = 8


def read_text(path: Path) -> str:
    """A file of UTF-8.

    Raises EvaluationError where it is empty or something else, OSError.
    """
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EvaluationError(
            f"{path}: expected UTF-8 text, found the byte 0x{data[error.start]:02x} at {error.start}; convert the file"
        ) from None
    if not text.strip():
        raise EvaluationError(f"{path}: expected a text, found {'white space alone' if text else 'an empty file'}")
    return text


def wikitext() -> str:
    """The test split of WikiText-2 (raw), its lines joined by empty ones, as perplexities on it are usually computed.

    Raises EvaluationError where it cannot be had, MissingDependencyError.
    """
    datasets = package("datasets", "eval", "--dataset wikitext")
    try:
        with quiet():
            lines = datasets.load_dataset(*WIKITEXT, split="test")["text"]
    except (
        OSError,
        ValueError,
    ) as error:  # no network, no such data set, or one in a form that this version cannot read
        said = " ".join(str(error).split())[:200]
        raise EvaluationError(f"--dataset wikitext: {said}; give a file: --text FILE") from None
    return "\n\n".join(lines)


def load_tokenizer(folder: Path) -> Any:
    """As transformers loads it.

    Raises SourceError where there is none, or a broken one, MissingDependencyError.
    """
    transformers = package("transformers", "transformers")
    if not any(found for pattern in TOKENIZER_FILES for found in folder.glob(pattern)):
        raise SourceError(f"{folder}: expected a tokenizer, found none; --tokenizer DIR names a folder that has it")
    with Refused(f"{folder}: transformers does not take this tokenizer"), quiet():
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def tokenize(folder: Path, text: str, max_tokens: int | None = None) -> Ids:
    """The ids of a text, without special tokens; of the first so many, only as much of the text is read as they need.

    Raises as load_tokenizer.
    """
    tokenizer = load_tokenizer(folder)
    characters = len(text) if max_tokens is None else CHARACTERS_PER_TOKEN * max_tokens
    while True:
        with quiet():  # it warns of texts that are longer than the model takes
            ids = tokenizer(text[:characters], add_special_tokens=False)["input_ids"]
        # What stands at the cut may be other tokens than in the whole text.
        if characters >= len(text) or (max_tokens is not None and len(ids) - len(ids) // 4 > max_tokens):
            return np.array(ids[:max_tokens], dtype=np.int64)
        characters *= 2
