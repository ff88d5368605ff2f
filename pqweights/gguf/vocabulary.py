"""The vocabulary of a GGUF file: tokens with types and scores, merges, special tokens, chat template.

It is read from the tokenizer's files as they are stored, without a tokenizer. Special tokens, merges and the template
are collected by SpecialVocab of the gguf package, which reads a folder.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.storage import Storage, read_file
from pqweights.errors import ExportError, SourceError
from pqweights.gguf.package import gguf_package, silent
from pqweights.gguf.pretokenizers import CLASSES, pre_tokenizer
from pqweights.strict_json import parse_json

FAST, CONFIG, NAMED = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
SLOW, MERGES = "vocab.json", "merges.txt"
TEMPLATES = ("chat_template.jinja", "chat_template.json")
# Of tokenizers that nothing here reads.
OTHERS = ("tekken.json", "spiece.model", "sentencepiece.bpe.model", "qwen.tiktoken", "tokenizer.tiktoken", "vocab.txt")
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Tokens that are special although the files do not say so: llama.cpp's converter goes by these looks, too.
LOOKS_SPECIAL = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
NAMED_SPECIAL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
SPACE = "▁"
INSTEAD = "use --target bf16, and llama.cpp's convert_hf_to_gguf.py on its result"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens of a model.

    model: the kind of tokenizer: gpt2 (byte-level BPE) or llama (SentencePiece)
    pre: how it splits text
    tokens, types: by id; the types are those of gguf.TokenType
    scores: by id, for the kinds that have some
    space_prefix: whether text gets a space before it; None for kinds to which this means nothing
    starts: whether text gets a token before it where the files do not say so
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None = None
    space_prefix: bool | None = None
    starts: bool = False


def add_vocabulary(storage: Storage, config: Mapping[str, Any], writer: Any, *, rows: int) -> None:
    """Write the vocabulary of the tokenizer that lies beside a model; a model without one gets none.

    config: that of the text model
    writer: a GGUFWriter of the gguf package
    rows: the rows of the embeddings, each of which is a token

    Raises ExportError for a tokenizer that llama.cpp has no equivalent of, SourceError for damaged files.
    """
    files = storage.files()
    if FAST in files:
        vocabulary = _of_json(_json(storage, FAST), rows)
    elif SLOW in files and MERGES in files:
        vocabulary = _of_slow(storage, rows)
    else:
        others = [name for name in (*OTHERS, "tokenizer.model") if name in files]
        if others:
            raise _unmapped(f"{others[0]}: no {FAST} beside it")
        writer.add_tokenizer_model(gguf_package().NoVocab.tokenizer_model)
        return
    if len(set(vocabulary.tokens)) < rows:
        raise _unmapped("several tokens have the same text")
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    if vocabulary.space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.space_prefix)
    _add_special(storage, config, writer, vocabulary=vocabulary)


def _unmapped(why: str) -> ExportError:
    return ExportError(f"the tokenizer cannot be mapped to one of llama.cpp's: {why}; {INSTEAD}")


def _json(storage: Storage, name: str) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no such file."""
    if name not in storage.files():
        return {}
    try:
        found = parse_json(read_file(storage, name))
    except ValueError as error:
        raise SourceError(f"{name}: {error}") from None
    if not isinstance(found, dict):
        raise SourceError(f"{name}: expected a JSON object, found {type(found).__name__}")
    return found


def _of_json(tokenizer: dict[str, Any], rows: int) -> Vocabulary:
    """The vocabulary of a tokenizer.json."""
    model = tokenizer.get("model") or {}
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise _unmapped(f"{FAST} has a model of type {model.get('type')}, expected BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _unmapped(f"{FAST} has {key} {model[key]!r}")
    pre, found = pre_tokenizer(tokenizer)
    if pre is None:
        raise _unmapped(f"{FAST} splits text by {found}")
    return _byte_level(model["vocab"], tokenizer.get("added_tokens") or [], pre=pre, rows=rows)


def _of_slow(storage: Storage, rows: int) -> Vocabulary:
    """The vocabulary of vocab.json and merges.txt, of a class whose way to split text is known."""
    config = _json(storage, CONFIG)
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    if name not in CLASSES:
        raise _unmapped(f"there is no {FAST}, and the tokenizer is of class {config.get('tokenizer_class')}")
    added = [{"id": int(place), **token} for place, token in (config.get("added_tokens_decoder") or {}).items()]
    return _byte_level(_json(storage, SLOW), added, pre=CLASSES[name], rows=rows)


def _byte_level(vocab: Mapping[str, int], added: list[dict[str, Any]], *, pre: str, rows: int) -> Vocabulary:
    """A byte-level BPE vocabulary; ids that nothing has become unused tokens."""
    kinds = gguf_package().TokenType
    tokens, types = [f"[PAD{place}]" for place in range(rows)], [int(kinds.UNUSED)] * rows
    for token, place in vocab.items():
        _check_place(token, place, rows)
        tokens[place], types[place] = token, int(kinds.NORMAL)
    add_tokens(added, tokens, types)
    return Vocabulary(model="gpt2", pre=pre, tokens=tokens, types=types)


def add_tokens(added: list[dict[str, Any]], tokens: list[str], types: list[int]) -> None:
    """Put the tokens that were added to a vocabulary in their places."""
    kinds = gguf_package().TokenType
    for token in added:
        content, place = token["content"], token["id"]
        _check_place(content, place, len(tokens))
        if token.get("special") or _looks_special(content):
            tokens[place], types[place] = content, int(kinds.CONTROL)
        else:
            # llama.cpp looks for these in the text before it replaces spaces.
            tokens[place], types[place] = content.replace(SPACE, " "), int(kinds.USER_DEFINED)


def _check_place(token: str, place: Any, rows: int) -> None:
    if not isinstance(place, int) or not 0 <= place < rows:
        raise ExportError(
            f"{FAST}: token {token!r} has the id {place!r}, and the model has embeddings of {rows} tokens"
        )


def _looks_special(token: str) -> bool:
    return token in NAMED_SPECIAL or any(
        token.startswith(first) and token.endswith(last) for first, last in LOOKS_SPECIAL
    )


def _add_special(storage: Storage, config: Mapping[str, Any], writer: Any, *, vocabulary: Vocabulary) -> None:
    """Write merges, special tokens and the chat template."""
    merged = vocabulary.model == "gpt2"
    with tempfile.TemporaryDirectory() as name, silent():
        _write_files(storage, config, Path(name))
        special = gguf_package().SpecialVocab(
            name, load_merges=merged, special_token_types=SPECIAL, n_vocab=len(vocabulary.tokens)
        )
    ids, added = special.special_token_ids, special.add_special_token
    if "eos" in ids:
        ids.setdefault("bos", ids["eos"])  # llama.cpp would take token 11
    for kind in ("bos", "eos"):
        added[kind] = kind in ids and added.get(kind, vocabulary.starts and kind == "bos")
    if merged and not special.merges:
        raise _unmapped("it has no merges")
    with silent():
        special.add_to_gguf(writer, quiet=True)


def _write_files(storage: Storage, config: Mapping[str, Any], folder: Path) -> None:
    """Write what SpecialVocab reads into a folder."""
    files = storage.files()
    for name in (FAST, MERGES, *TEMPLATES, *(file for file in files if file.startswith("additional_chat_templates/"))):
        if name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(read_file(storage, name))
    named = {key: value for key, value in _json(storage, NAMED).items() if isinstance(value, str | dict)}
    (folder / CONFIG).write_text(json.dumps(named | _json(storage, CONFIG)))
    generation = _json(storage, "generation_config.json")
    ids = {}
    for kind in SPECIAL:
        found = config.get(f"{kind}_token_id", generation.get(f"{kind}_token_id"))
        ids[f"{kind}_token_id"] = found[0] if isinstance(found, list) and found else found
    (folder / "config.json").write_text(json.dumps(ids))
