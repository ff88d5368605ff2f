"""Texts that models read, and their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf.file import is_gguf
from pqweights.checkpoint.names import CONFIG_FILE, TOKENIZER_FILES
from pqweights.common.strict_json import parse_json
from pqweights.errors import EvaluationError, SourceError
from pqweights.runtime.folders import Folder, transformers_config
from pqweights.runtime.llama_library import GgufTokenizer
from pqweights.runtime.packages import Refused, package, quiet

Ids = npt.NDArray[np.int64]  # [tokens]

WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1")
# How the names of files end whose lines are rows in JSON, and where these have their text: that, or a chat.
ROWS = (".jsonl", ".ndjson")
TEXT_FIELDS = ("text", "content", "messages", "conversations")
SAID = ("content", "value")
# A first guess at how many characters of a text are needed for one token.
CHARACTERS_PER_TOKEN = 8


def read_text(path: Path) -> str:
    """Read a UTF-8 file.

    Raises EvaluationError if it is empty or not UTF-8, OSError.
    """
    text = file_text(path)
    if not text.strip():
        raise EvaluationError(f"{path}: expected a text, found {'only white space' if text else 'an empty file'}")
    return text


def file_text(path: Path) -> str:
    """Return the text in a file: all of it, or that of the rows of a .jsonl, with blank lines between them.

    Raises EvaluationError for what is not UTF-8, and for a line that is no row with a text; OSError.
    """
    text = decoded(path.read_bytes(), str(path))
    if path.suffix.lower() not in ROWS:
        return text
    # Not splitlines: strings of JSON may contain what else Unicode takes for the end of a line, such as U+2028.
    lines = ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())
    return "\n\n".join(_row_text(line, f"{path}: line {number}") for number, line in lines)


def _row_text(line: str, place: str) -> str:
    """Return the text of a row: that of its first field of TEXT_FIELDS, or what the messages of a chat say."""
    try:
        row = parse_json(line.encode())
    except ValueError as error:
        raise EvaluationError(f"{place}: expected a row in JSON: {error}") from None
    if isinstance(row, str):
        return row
    fields = row if isinstance(row, dict) else {}
    value = next((fields[name] for name in TEXT_FIELDS if name in fields), None)
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        said = [next((message[key] for key in SAID if key in message), None) for message in value]
        texts = [part for part in said if isinstance(part, str)]
        value = "\n".join(texts) if texts and len(texts) == len(said) else None
    if not isinstance(value, str):
        found = ", ".join(map(str, list(fields)[:8])) or type(row).__name__
        raise EvaluationError(
            f"{place}: expected a text in one of the fields {', '.join(TEXT_FIELDS)}, found {found[:200]}; give "
            "a plain text, or rows with one of these fields"
        )
    return value


def decoded(data: bytes, name: str) -> str:
    """Decode UTF-8, with or without a mark of the byte order. name: of the input, for the message

    Raises EvaluationError for anything else.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EvaluationError(
            f"{name}: expected UTF-8 text, found the byte 0x{data[error.start]:02x} at offset {error.start}; convert it"
        ) from None


def wikitext() -> str:
    """Return the test split of WikiText-2 (raw), its lines joined by blank lines, as is usual for perplexity.

    Raises EvaluationError if it cannot be loaded, MissingDependencyError.
    """
    datasets = package("datasets", "eval", "`dataset` wikitext")
    try:
        with quiet():
            lines = datasets.load_dataset(*WIKITEXT, split="test")["text"]
    except (OSError, ValueError) as error:
        # There is no network, no such data set, or this version of datasets cannot read it.
        said = " ".join(str(error).split())[:200]
        raise EvaluationError(f"`dataset` wikitext: {said}; give a file: `text`") from None
    return "\n\n".join(lines)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has files of a tokenizer."""
    return any(file for pattern in TOKENIZER_FILES for file in folder.glob(pattern))


def load_tokenizer(folder: Path) -> Any:
    """Load a folder's tokenizer with transformers, or that of a GGUF file with llama.cpp.

    Raises SourceError if there is none or it is broken, MissingDependencyError.
    """
    if is_gguf(folder):
        return GgufTokenizer(folder)
    transformers = package("transformers", "transformers")
    if not has_tokenizer(folder):
        raise SourceError(
            f"{folder}: expected a tokenizer, found none; put its files there (eval takes --tokenizer DIR)"
        )
    try:
        with Refused(f"{folder}: transformers cannot load this tokenizer"), quiet():
            return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except SourceError:
        if (folder / CONFIG_FILE).is_file():  # which transformers reads before the tokenizer
            transformers_config(folder)
        raise


class EncodedText(NamedTuple):
    """A text as a model reads it.

    ids: its tokens without special ones, [tokens]
    bos: the token that each window of them begins with; None for the text's own
    characters: how many characters of the text were read for them
    """

    ids: Ids
    bos: int | None
    characters: int


def encode(folder: Path, text: str, max_tokens: int | None = None, *, bos: bool) -> EncodedText:
    """Return the tokens of a text, and the token that windows of it begin with.

    max_tokens: how many tokens to return at most; only as much of the text is tokenized as they need
    bos: whether windows begin with the token that the tokenizer puts before a text, if it puts one

    Raises what load_tokenizer raises.
    """
    tokenizer = load_tokenizer(folder)
    ids, characters = _ids(tokenizer, text, max_tokens)
    return EncodedText(ids, token_before_texts(tokenizer) if bos else None, characters)


def tokenize(folder: Path, text: str, max_tokens: int | None = None) -> Ids:
    """Return the token ids of a text, without special tokens, and at most `max_tokens` of them: see encode."""
    return encode(folder, text, max_tokens, bos=False).ids


def token_before_texts(tokenizer: Any) -> int | None:
    """Return the token BOS if the tokenizer's own settings put it before a text; None if they do not."""
    with quiet():
        plain, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    added = len(whole) > len(plain) and whole[0] == tokenizer.bos_token_id
    return int(whole[0]) if added else None


def with_bos(window: Ids, bos: int | None) -> Ids:
    """Return a window with BOS in place of its first token, as llama.cpp's perplexity has it; None changes nothing.

    No window scores its first token, so the tokens that are scored are the same with and without BOS.
    """
    return window if bos is None else np.concatenate([np.array([bos], dtype=np.int64), window[1:]])


def _ids(tokenizer: Any, text: str, max_tokens: int | None) -> tuple[Ids, int]:
    """Return the first tokens of a text, and how many of its characters were read for them."""
    characters = len(text) if max_tokens is None else CHARACTERS_PER_TOKEN * max_tokens
    while True:
        with quiet():  # the tokenizer warns of texts that are longer than the model takes
            ids = tokenizer(text[:characters], add_special_tokens=False)["input_ids"]
        # Tokens near the cut may differ from those of the whole text, so a third more than needed is tokenized.
        if characters >= len(text) or (max_tokens is not None and len(ids) - len(ids) // 4 > max_tokens):
            return np.array(ids[:max_tokens], dtype=np.int64), min(characters, len(text))
        characters *= 2


def check_vocabulary(folder: Folder, ids: Ids, bos: int | None = None) -> None:
    """Raise EvaluationError if a text has a token id that the model does not know. bos: the token before it, if any"""
    largest = max(int(ids.max(initial=0)), bos or 0)
    if folder.vocabulary is not None and largest >= folder.vocabulary:
        raise EvaluationError(
            f"{folder.path}: the text contains token {largest}, but the model has only {folder.vocabulary} tokens: the "
            "tokenizer belongs to another model; name this model's with `tokenizer`"
        )
