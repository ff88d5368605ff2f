"""The vocabulary of a GGUF file: tokens with types and scores, merges, special tokens, chat template.

It is read from the tokenizer's files as they are stored, without a tokenizer. Special tokens, merges and the template
are collected by SpecialVocab of the gguf package, which reads a folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pqweights.checkpoint.storage import Storage, read_file
from pqweights.errors import SourceError
from pqweights.gguf.package import gguf_package
from pqweights.gguf.pretokenizers import CLASSES, DIFFERS, pre_tokenizer
from pqweights.gguf.sentencepiece import MODEL_FILE, from_json, from_model, is_sentencepiece
from pqweights.gguf.special import MERGES, add_special, surrounding
from pqweights.gguf.tokens import (
    CONFIG,
    FAST,
    Vocabulary,
    beside_added,
    placed_tokens,
    read_json,
    read_tokenizer,
    strips_spaces,
    unmapped,
)

SLOW = "vocab.json"
# Of tokenizers that nothing here reads.
OTHERS = ("tekken.json", "spiece.model", "sentencepiece.bpe.model", "qwen.tiktoken", "tokenizer.tiktoken", "vocab.txt")
NOT_NORMALIZED = "text that is not in Unicode's form NFC: llama.cpp does not normalize it"
# llama.cpp lets special tokens take the spaces behind them in models of which the name matches, and then needs these
# tokens.
STRIPS = re.compile(r"phi-?3", re.IGNORECASE)
NEVER_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
STRIPPED = ("</s>", *NEVER_STRIPPED)


def read_vocabulary(storage: Storage, *, rows: int) -> Vocabulary | None:
    """Return the vocabulary of the tokenizer that lies beside a model; None if there is none.

    rows: the rows of the embeddings, each of which is a token

    Raises ExportError for a tokenizer that llama.cpp has no equivalent of, SourceError for damaged files.
    """
    files = storage.files()
    if FAST in files:
        tokenizer = read_tokenizer(storage)
        return _with_added(_of_json(tokenizer, rows), tokenizer.get("added_tokens") or [])
    if MODEL_FILE in files:
        added = _added(storage)
        return _with_added(from_model(read_file(storage, MODEL_FILE), added, rows), added)
    if SLOW in files and MERGES in files:
        return _with_added(_of_slow(storage, rows), _added(storage))
    for name in OTHERS:
        if name in files:
            raise unmapped(f"{name} without {FAST}")
    return None


def _with_added(vocabulary: Vocabulary, added: Sequence[Mapping[str, Any]]) -> Vocabulary:
    """Return a vocabulary that says what llama.cpp does otherwise beside added tokens."""
    strips = _strips(vocabulary)
    stripping = {entry["content"] for entry in added if strips and entry["content"] not in NEVER_STRIPPED}
    return replace(vocabulary, differs=vocabulary.differs + beside_added(added, stripping))


def _strips(vocabulary: Vocabulary) -> bool:
    """Whether llama.cpp can be told that special tokens take the spaces behind them."""
    return vocabulary.strips and set(STRIPPED) <= set(vocabulary.tokens)


def model_name(name: str | None, vocabulary: Vocabulary | None) -> str | None:
    """Return the name that the file gives the model.

    llama.cpp goes by this name when special tokens are to take the spaces behind them.
    """
    if vocabulary is None:
        return name
    if _strips(vocabulary):
        return name if name and STRIPS.search(name) else f"{name or 'model'} (phi-3)"
    return name and STRIPS.sub("phi 3", name)


def add_vocabulary(
    storage: Storage, config: Mapping[str, Any], writer: Any, *, vocabulary: Vocabulary | None
) -> tuple[str, ...]:
    """Write a vocabulary, special tokens and the chat template.

    config: that of the text model
    writer: a GGUFWriter of the gguf package

    Returns the tokens at which transformers ends what it generates, and llama.cpp does not.
    """
    if vocabulary is None:
        writer.add_tokenizer_model(gguf_package().NoVocab.tokenizer_model)
        return ()
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    if vocabulary.space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.space_prefix)
    return add_special(storage, config, writer, vocabulary=vocabulary)


def _of_json(tokenizer: dict[str, Any], rows: int) -> Vocabulary:
    """The vocabulary of a tokenizer.json."""
    model = tokenizer.get("model") or {}
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise unmapped(f"{FAST} has a model of type {model.get('type')}, expected BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise unmapped(f"{FAST} has {key} {model[key]!r}")
    around = surrounding(tokenizer, rows)
    if is_sentencepiece(tokenizer):
        return replace(from_json(tokenizer, rows), around=around)
    pre, rules = pre_tokenizer(tokenizer)
    if pre is None:
        raise unmapped(f"{FAST} splits text by {rules}")
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise unmapped(f"{FAST} changes text by {tokenizer['normalizer']}")
    vocabulary = _byte_level(model["vocab"], tokenizer.get("added_tokens") or [], pre=pre, rows=rows)
    differs = DIFFERS.get(pre, "") if normalizer is None else NOT_NORMALIZED
    return replace(vocabulary, differs=(differs,) if differs else (), around=around)


def _of_slow(storage: Storage, rows: int) -> Vocabulary:
    """The vocabulary of vocab.json and merges.txt, of a class whose way to split text is known."""
    name = str(read_json(storage, CONFIG).get("tokenizer_class"))
    if name.removesuffix("Fast") not in CLASSES:
        raise unmapped(f"there is no {FAST}, and the tokenizer is of class {name}")
    return _byte_level(read_json(storage, SLOW), _added(storage), pre=CLASSES[name.removesuffix("Fast")], rows=rows)


def _byte_level(vocab: Mapping[str, int], added: Sequence[Mapping[str, Any]], *, pre: str, rows: int) -> Vocabulary:
    tokens, types = placed_tokens(vocab, added, rows)
    return Vocabulary(model="gpt2", pre=pre, tokens=tokens, types=types, strips=strips_spaces(added))


def _added(storage: Storage) -> list[dict[str, Any]]:
    """Return the tokens that were added to a vocabulary beside which there is no tokenizer.json."""
    listed = read_json(storage, "added_tokens.json")
    decoder = read_json(storage, CONFIG).get("added_tokens_decoder") or {}
    try:
        added = {int(token_id): {"content": token} for token, token_id in listed.items()}
        added.update({int(token_id): token for token_id, token in decoder.items()})
        return [{"id": token_id, "content": token["content"], **token} for token_id, token in added.items()]
    except (AttributeError, LookupError, TypeError, ValueError):
        raise SourceError(f"{CONFIG}: expected tokens with their ids as added tokens") from None
