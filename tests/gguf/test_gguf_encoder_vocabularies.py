"""Vocabularies of encoders in GGUF files: what they hold, and tokenizers that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import trained_tokenizers as trained
from commands import raises
from gguf_files import converted, metadata, write_llama

from pqweights.checkpoint.gguf.contents import MetadataList
from pqweights.checkpoint.gguf.tokenizer_files import tokenizer_files
from pqweights.errors import ExportError, SourceError


def written(kind: str, folder: Path, **parts: Any) -> dict[str, Any]:
    """The metadata of a file with a tokenizer, by the last part of their keys.

    parts: of tokenizer.json that are changed, or of its model
    """
    tokenizer = trained.KINDS[kind]()
    trained.save(tokenizer, folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    for key, part in parts.items():
        (stored if key in stored else stored["model"])[key] = part
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    found = metadata(converted(write_llama(folder, rows=tokenizer.get_vocab_size())))
    return {key.removeprefix("tokenizer.ggml."): value for key, value in found.items()}


@pytest.mark.parametrize("kind", ["bert", "bert cased"])
def test_word_pieces_begin_words_with_the_character_for_spaces(kind: str, tmp_path: Path) -> None:
    found, vocab = written(kind, tmp_path), trained.KINDS[kind]().get_vocab(with_added_tokens=False)
    tokens, types = found["tokens"], found["token_type"]
    marked = {token: tokens[number] for token, number in vocab.items() if types[number] == gguf.TokenType.NORMAL}
    assert all(text == (token[2:] if token[:2] == "##" else f"▁{token}") for token, text in marked.items())
    assert len(marked) > 300 and tokens[vocab["<mask>"]] == "<mask>"
    assert (found["model"], found["unknown_token_id"]) == ("bert", vocab["<unk>"])
    assert (found["bos_token_id"], found["seperator_token_id"]) == (vocab[trained.BEGIN], vocab[trained.END])
    assert found["normalizer.lowercase"] == found["normalizer.strip_accents"] == (kind == "bert")


def test_unigrams_keep_their_scores_and_replacements(tmp_path: Path) -> None:
    found, tokenizer = written("unigrams", tmp_path), trained.KINDS["unigrams"]()
    model = json.loads(tokenizer.to_str())["model"]
    assert found["scores"][: len(model["vocab"])] == [score for _, score in model["vocab"]]
    assert found["token_type"][model["unk_id"]] == gguf.TokenType.UNKNOWN
    assert (found["model"], found["add_space_prefix"], found["remove_extra_whitespaces"]) == ("t5", True, True)
    assert len(found["precompiled_charsmap"]) > 1000


BEGIN_WORDS = {"type": "BertNormalizer", "handle_chinese_chars": False}


@pytest.mark.parametrize(
    ("kind", "parts", "named"),
    [
        ("bert", {"continuing_subword_prefix": "@@"}, "BertPreTokenizer '@@'"),
        ("bert", {"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ("bert", {"normalizer": {"type": "NFC"}}, "NFC"),
        ("bert", {"normalizer": BEGIN_WORDS}, "handle_chinese_chars"),
        ("bert", {"post_processor": None}, "before after"),
        ("unigrams", {"byte_fallback": True}, "byte_fallback True"),
        ("unigrams", {"unk_id": None}, "unk_id None"),
        ("unigrams", {"vocab": [["a", 0.0], ["a", 0.0]]}, "same text"),
        ("unigrams", {"vocab": [["a", 0.0], ["▁a▁b", 0.0]]}, "words"),
        ("unigrams", {"pre_tokenizer": None}, "words"),
        ("unigrams", {"pre_tokenizer": {"type": "Digits"}}, "Digits"),
    ],
)
def test_tokenizers_of_which_llama_cpp_has_no_match_are_refused(
    kind: str, parts: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with raises(ExportError, *named.split()):
        written(kind, tmp_path, **parts)


@pytest.mark.parametrize(
    ("kind", "parts", "named"),
    [
        ("bert", {"vocab": []}, "vocab []"),
        ("bert", {"unk_token": "[none]"}, "unk_token '[none]'"),
        ("unigrams", {"vocab": {"a": 0}}, "vocab {'a':"),
        ("unigrams", {"vocab": [["a", "b"]]}, "vocab 'b'"),
        ("unigrams", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "*"}}, "precompiled_charsmap"),
    ],
)
def test_damaged_tokenizers_are_refused(kind: str, parts: dict[str, Any], named: str, tmp_path: Path) -> None:
    with raises(SourceError, "tokenizer.json", *named.split()):
        written(kind, tmp_path, **parts)


def test_unigrams_without_replacements_differ_on_tabs(tmp_path: Path) -> None:
    tokenizer = trained.KINDS["unigrams"]()
    trained.save(tokenizer, tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text()) | {"normalizer": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    notes = converted(write_llama(tmp_path, rows=tokenizer.get_vocab_size())).notes
    assert any("tabs or line ends" in note for note in notes)


@pytest.mark.parametrize("key", ["tokens", "token_type", "scores", "precompiled_charsmap"])
def test_lists_of_other_items_are_refused_by_their_key(key: str) -> None:
    held = {
        "tokens": MetadataList("string", 1, ("a",)),
        "token_type": MetadataList("int32", 1, (1,)),
        "scores": MetadataList("float32", 1, (0.0,)),
        "precompiled_charsmap": MetadataList("uint8", 1, (7,)),
    }
    wrong = MetadataList("bool", 1, (1.5 if key == "tokens" else "b",))
    lists = {f"tokenizer.ggml.{name}": values for name, values in (held | {key: wrong}).items()}
    with raises(SourceError, key):
        tokenizer_files("m.gguf", {**lists, "tokenizer.ggml.model": "t5"}, None)
