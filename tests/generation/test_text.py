"""Text that comes piece by piece is the text of all tokens, and no piece ends within a character."""

from __future__ import annotations

from typing import Any

import language_models
import pytest
import tokenizers
import transformers
from blocks import examples
from hypothesis import given
from hypothesis import strategies as st

from pqweights.inference.prompts import TextStream

FAMILY = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}"
TEXTS = st.text(max_size=30) | st.lists(st.sampled_from(["😀", "é", " ", "€", "a", "\n", FAMILY])).map("".join)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer with a token for each byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, data in language_models.tokenizer_files().items():
        (folder / name).write_bytes(data)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def sentences() -> Any:
    """A tokenizer as SentencePiece makes it: spaces are part of words, and bytes stand for unknown characters."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "at", ".", "▁."]
    model = tokenizers.models.BPE({word: n for n, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def pieces(tokenizer: Any, ids: list[int], before: list[int] | None = None) -> list[str]:
    stream = TextStream(tokenizer, before or [])
    return [*(stream.add(token) for token in ids), stream.end()]


@examples(30)
@given(text=TEXTS)
def test_property_pieces_of_bytes_are_the_text(text, bytewise):
    found = pieces(bytewise, list(text.encode()))
    assert "".join(found) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in found) or "\N{REPLACEMENT CHARACTER}" in text


@examples(30)
@given(ids=st.lists(st.integers(0, 255), max_size=20))
def test_property_bytes_that_are_no_text_are_not_lost(ids, bytewise):
    assert "".join(pieces(bytewise, ids)) == bytewise.decode(ids)


def test_each_character_comes_as_soon_as_it_is_complete(bytewise):
    assert pieces(bytewise, list("a😀é".encode())) == ["a", "", "", "", "😀", "", "é", ""]


# Words by their numbers, and characters as the bytes that stand for them. This decoder shows a character beside an
# invalid byte as no character at all, so bytes that are no text are left out.
ITEMS = st.integers(258, 264).map(lambda word: [word]) | st.sampled_from("é€😀\n").map(
    lambda c: [b + 2 for b in c.encode()]
)


@examples(30)
@given(items=st.lists(ITEMS, max_size=12))
def test_property_pieces_of_words_are_the_text(items, sentences):
    ids = [token for item in items for token in item]
    assert "".join(pieces(sentences, ids)) == sentences.decode(ids, skip_special_tokens=True)


def test_spaces_of_words_stay(sentences):
    the, cat, s = (sentences.convert_tokens_to_ids(word) for word in ("▁the", "▁cat", "s"))
    assert pieces(sentences, [the, cat, s]) == ["the", " cat", "s", ""]
    # A continuation begins with the space that a text of its own would lose.
    assert pieces(sentences, [cat, s], before=[the]) == [" cat", "s", ""]


def test_special_tokens_are_not_shown(bytewise):
    assert pieces(bytewise, [72, language_models.USER, 105, language_models.END]) == ["H", "", "i", "", ""]


def test_a_context_that_begins_within_a_character_does_no_harm(bytewise):
    before = list("😀".encode())[2:]
    assert pieces(bytewise, list("né".encode()), before=before) == ["n", "", "é", ""]
