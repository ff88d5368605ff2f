"""The vocabularies of encoders in llama.cpp's terms: WordPiece (BERT) and SentencePiece's unigrams (T5, XLM-RoBERTa).

WordPiece takes the longest tokens of each word from its beginning on. llama.cpp marks the tokens that begin a word, by
the character for spaces, and not those that go on with one. Of unigrams, the most probable ones are taken.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.tokens import FAST, NO_SCORE, SPACE, Vocabulary, placed_tokens, steps_of, unmapped
from pqweights.errors import SourceError

Around = tuple[tuple[int, ...], tuple[int, ...]]
CONTINUES = "##"
# llama.cpp has no longest word.
LONG_WORDS = "words of more than 100 characters, which are unknown to the tokenizer"
TAKEN_FOR_ACCENTS = "Korean text and text with vowel signs, some of which llama.cpp removes as accents"


def word_pieces(tokenizer: Mapping[str, Any], rows: int, around: Around) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json with WordPiece.

    rows: the number of tokens of the model
    around: the ids before and after a text

    Raises ExportError if it makes other tokens than llama.cpp.
    """
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer") or {}
    splitter = (tokenizer.get("pre_tokenizer") or {}).get("type")
    if (model.get("continuing_subword_prefix", CONTINUES), splitter) != (CONTINUES, "BertPreTokenizer"):
        raise unmapped(f"{FAST} splits words by {splitter} and {model.get('continuing_subword_prefix')!r}")
    if normalizer.get("type") != "BertNormalizer" or not normalizer.get("handle_chinese_chars", True):
        raise unmapped(f"{FAST} changes text by {normalizer}")
    if not all(around):
        raise unmapped("llama.cpp puts a token before and after each text, and it does not")
    vocab, lowercase = _vocab(model), bool(normalizer.get("lowercase"))
    tokens, types = placed_tokens(vocab, tokenizer.get("added_tokens") or [], rows)
    normal = int(gguf_package().TokenType.NORMAL)
    marked = [_marked(token) if kind == normal else token for token, kind in zip(tokens, types, strict=True)]
    if len(set(marked)) < rows:
        raise unmapped("a token that begins a word has the same text as one that continues a word")
    accents = lowercase if normalizer.get("strip_accents") is None else bool(normalizer["strip_accents"])
    return Vocabulary(
        model="bert",
        pre="default",
        tokens=marked,
        types=types,
        surrounding_ids=around,
        strips=False,
        differs=(LONG_WORDS, TAKEN_FOR_ACCENTS) if accents else (LONG_WORDS,),
        special={"unk": _id_of(model.get("unk_token"), vocab), "sep": around[1][0]},
        about={"normalizer.lowercase": lowercase, "normalizer.strip_accents": accents},
    )


def _marked(token: str) -> str:
    return token.removeprefix(CONTINUES) if token.startswith(CONTINUES) else SPACE + token


def _vocab(model: Mapping[str, Any]) -> Mapping[str, int]:
    vocab = model.get("vocab")
    if not isinstance(vocab, dict):
        raise SourceError(f"{FAST}: expected an object as its vocab, found {vocab!r:.80}")
    return vocab


def _id_of(token: Any, vocab: Mapping[str, int]) -> int:
    if token not in vocab:
        raise SourceError(f"{FAST}: its unk_token {token!r:.80} is not in its vocab")
    return vocab[token]


def unigrams(tokenizer: Mapping[str, Any], rows: int, around: Around) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json with unigrams. The parameters are those of word_pieces.

    Raises ExportError if it makes other tokens than llama.cpp.
    """
    model = tokenizer["model"]
    listed, unknown = model.get("vocab"), model.get("unk_id")
    try:
        scores = {str(token): float(score) for token, score in listed}
    except (TypeError, ValueError):
        raise SourceError(f"{FAST}: expected texts with scores as its vocab, found {listed!r:.80}") from None
    if model.get("byte_fallback") or not isinstance(unknown, int) or not 0 <= unknown < len(listed):
        raise unmapped(f"it has unigrams with byte_fallback {model.get('byte_fallback')} and unk_id {unknown!r}")
    if len(scores) < len(listed):
        raise unmapped("several tokens have the same text")
    charsmap, differs = _spaces(tokenizer, scores)
    tokens, types = placed_tokens(
        {token: number for number, token in enumerate(scores)}, tokenizer.get("added_tokens") or [], rows
    )
    types[unknown] = int(gguf_package().TokenType.UNKNOWN)
    return Vocabulary(
        model="t5",
        pre="default",
        tokens=tokens,
        types=types,
        surrounding_ids=around,
        strips=False,
        scores=[scores.get(token, NO_SCORE) for token in tokens],
        special={"unk": unknown},
        differs=differs,
        about={"add_space_prefix": True, "remove_extra_whitespaces": True}
        | ({"precompiled_charsmap": charsmap} if charsmap else {}),
    )


def _spaces(tokenizer: Mapping[str, Any], vocab: Collection[str]) -> tuple[bytes, tuple[str, ...]]:
    """Return the replacements of characters as SentencePiece compiles them, and on which texts llama.cpp differs.

    Several spaces must become one, and each word must get one before it, as llama.cpp has it.
    """
    charsmap, one_space, prefix, trims = b"", False, False, False
    for step in (*steps_of(tokenizer, "normalizer"), *steps_of(tokenizer, "pre_tokenizer")):
        kind, pattern = step.get("type"), step.get("pattern") or {}
        if kind == "Precompiled" and not charsmap:
            charsmap = _decoded(step.get("precompiled_charsmap"))
        elif kind == "WhitespaceSplit":
            one_space = trims = True
        elif kind == "Replace" and pattern.get("Regex") == " {2,}" and step.get("content") in (" ", SPACE):
            one_space = True
        elif kind == "Strip" and step.get("strip_right"):
            trims = True
        elif kind == "Metaspace" and step.get("replacement") == SPACE:
            prefix = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
        else:
            raise unmapped(f"it changes or splits text by {step!r:.200}")
    joined = next((token for token in vocab if SPACE in token[1:] and token.strip(SPACE)), None)
    if not one_space or not prefix or joined is not None:
        raise unmapped("it has unigrams, but does not split text into words with a single space before each")
    differs = ("text that ends with a space",) * (not trims) + ("text with tabs or line ends",) * (not charsmap)
    return charsmap, differs


def _decoded(charsmap: Any) -> bytes:
    try:
        return base64.b64decode(charsmap or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise SourceError(f"{FAST}: its precompiled_charsmap is damaged") from None


# By the type of the model in a tokenizer.json.
ENCODERS: Mapping[str | None, Callable[[Mapping[str, Any], int, Around], Vocabulary]] = {
    "WordPiece": word_pieces,
    "Unigram": unigrams,
}
