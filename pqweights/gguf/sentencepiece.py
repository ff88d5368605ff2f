"""Vocabularies of SentencePiece's BPE: from a tokenizer.json that was made from one, or from its own tokenizer.model.

llama.cpp joins the two neighbours whose joint text is the token with the highest score, as SentencePiece does. A
tokenizer.json lists the pairs that may be joined; from these the scores are derived, if they are all pairs.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pqweights.errors import SourceError
from pqweights.gguf.package import gguf_package
from pqweights.gguf.tokens import SPACE, Vocabulary, check_merges, placed_tokens, strips_spaces, unmapped

MODEL_FILE = "tokenizer.model"
# What llama.cpp's converter gives tokens that no merge makes.
NO_SCORE = -1000.0
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
BPE = 2  # TrainerSpec.ModelType in sentencepiece_model.proto
IDENTITY = ("identity", "")
# By the scheme of Metaspace.
DIFFERS = {
    "never": "",
    "always": "text that begins with a space: llama.cpp puts one more before it",
    "first": "text that begins with a space or follows a special token: llama.cpp puts one more before it",
}


def is_sentencepiece(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json is that of a SentencePiece model: characters that it lacks become tokens of bytes."""
    return bool(tokenizer["model"].get("byte_fallback"))


def from_json(tokenizer: Mapping[str, Any], rows: int) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json.

    Raises ExportError if it makes other tokens than SentencePiece would.
    """
    prefix, splits, differs = _spaces(tokenizer)
    vocab, added = tokenizer["model"]["vocab"], tokenizer.get("added_tokens") or []
    merges = check_merges(tokenizer["model"].get("merges") or [])
    fixed = {entry["content"] for entry in added}
    _check_merges(vocab, merges, fixed, splits=splits)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    tokens, types = placed_tokens(vocab, added, rows, spaced=ranks)
    _place_bytes(vocab, tokens, types)
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        types=types,
        scores=[-float(ranks[token]) if token in ranks else NO_SCORE for token in tokens],
        space_prefix=prefix,
        strips=strips_spaces(added),
        differs=(differs,) if differs else (),
    )


def _place_bytes(vocab: Mapping[str, int], tokens: list[str], types: list[int]) -> None:
    """Give the tokens of single bytes their names and type; llama.cpp needs all 256.

    In a tokenizer.json of Gemma, the tabulator has taken the name of its byte.
    """
    for byte in range(256):
        name = f"<0x{byte:02X}>"
        token_id = vocab.get(name, vocab.get(chr(byte)) if byte < 128 else None)
        if token_id is None:
            raise unmapped(f"it has no token {name}")
        tokens[token_id], types[token_id] = name, int(gguf_package().TokenType.BYTE)


def _spaces(tokenizer: Mapping[str, Any]) -> tuple[bool, bool, str]:
    """Return whether text gets a space before it, whether it is split at spaces, and what llama.cpp does otherwise.

    Spaces must become the character that stands for them, and nothing else may happen to the text.
    """
    normalizer = tokenizer.get("normalizer") or {"type": "Sequence", "normalizers": []}
    splitter = tokenizer.get("pre_tokenizer") or {"type": "Sequence", "pretokenizers": []}
    prefix = escapes = splits = False
    differs = ""
    for step in (*normalizer.get("normalizers", [normalizer]), *splitter.get("pretokenizers", [splitter])):
        step_type, pattern = step.get("type"), (step.get("pattern") or {})
        if step_type == "Prepend" and step.get("prepend") == SPACE:
            prefix = True
        elif step_type == "Replace" and pattern.get("String") == " " and step.get("content") == SPACE:
            escapes = True
        elif step_type == "Metaspace" and step.get("replacement") == SPACE:
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            prefix, escapes, splits = scheme != "never", True, bool(step.get("split", True))
            differs = DIFFERS[scheme]
        elif step_type != "Split" or pattern.get("String") != " " or not escapes:
            raise unmapped(f"it changes or splits text by {step}")
    if not escapes:
        raise unmapped("it has tokens of bytes, and no character that stands for spaces")
    return prefix, splits, differs


def _check_merges(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], fixed: set[str], *, splits: bool
) -> None:
    """Raise ExportError unless any two tokens whose joint text is a token may be joined.

    fixed: tokens that are found in the text before anything is joined
    """
    listed = {(left, right) for left, right in merges}
    for token in vocab:
        if token in fixed or BYTE.fullmatch(token):
            continue
        if splits and SPACE in token[1:]:
            raise unmapped(f"it splits text at spaces, and has the token {token!r}")
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab and (left, right) not in listed and not fixed & {left, right}:
                raise unmapped(f"it does not join {left!r} and {right!r} to {token!r}, as SentencePiece would")


def from_model(raw: bytes, added: Sequence[Mapping[str, Any]], rows: int) -> Vocabulary:
    """Return the vocabulary of a tokenizer.model (sentencepiece_model.proto).

    added: tokens that were added to it

    Raises ExportError for models other than BPE, SourceError for a damaged file.
    """
    try:
        pieces, trainer, normalizer = _parsed(raw)
    except (LookupError, TypeError, ValueError, AttributeError, struct.error):
        raise SourceError(f"{MODEL_FILE}: expected a model of SentencePiece, found a damaged file") from None
    if trainer.get(3, 1) != BPE or normalizer.get(1, b"").decode() not in IDENTITY:
        raise unmapped(f"{MODEL_FILE} is not a BPE model, or it changes the text")
    vocab = {text: token_id for token_id, (text, _, _) in enumerate(pieces)}
    tokens, types = placed_tokens(vocab, added, rows)
    scores = [NO_SCORE] * rows
    fixed = {entry["id"] for entry in added}
    for token_id, (text, score, piece_type) in enumerate(pieces):
        if token_id not in fixed:
            # The types of gguf.TokenType are those of SentencePiece.
            types[token_id], scores[token_id] = piece_type, score
            tokens[token_id] = (
                text.replace(SPACE, " ") if piece_type == int(gguf_package().TokenType.USER_DEFINED) else text
            )
    _place_bytes(vocab, tokens, types)
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        types=types,
        scores=scores,
        space_prefix=bool(normalizer.get(3, 1)),
        starts=True,
        strips=strips_spaces(added),
    )


def _parsed(raw: bytes) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """Return the pieces (text, score, type), and the fields of TrainerSpec and NormalizerSpec by number."""
    pieces = []
    specs: dict[int, dict[int, Any]] = {2: {}, 3: {}}
    for number, value in _fields(raw):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append((piece[1].decode(), float(piece.get(2, 0.0)), int(piece.get(3, 1))))
        elif number in specs:
            specs[number] = dict(_fields(value))
    return pieces, specs[2], specs[3]


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: number, and an int, a float, or bytes."""
    offset = 0
    while offset < len(raw):
        key, offset = _varint(raw, offset)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, offset = _varint(raw, offset)
            yield number, value
        elif wire == 5:
            yield number, struct.unpack_from("<f", raw, offset)[0]
            offset += 4
        elif wire == 1:
            offset += 8
        elif wire == 2:
            count, offset = _varint(raw, offset)
            if offset + count > len(raw):
                raise ValueError("a field ends behind its message")
            yield number, raw[offset : offset + count]
            offset += count
        else:
            raise ValueError(f"wire type {wire}")


def _varint(raw: bytes, offset: int) -> tuple[int, int]:
    """Return a number of seven bits per byte, the low ones first, and the position after it."""
    value = shift = 0
    while True:
        byte = raw[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset
