"""Added tokens that other files than tokenizer.json state: the file has those of transformers, with their ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import trained_tokenizers as trained
from commands import raises
from gguf_files import converted, metadata, write_gguf, write_llama

from pqweights.errors import ExportError, SourceError
from pqweights.runtime.llama_library import GgufTokenizer

CONTROL, ADDED, UNUSED = (int(gguf.TokenType[name]) for name in ("CONTROL", "USER_DEFINED", "UNUSED"))
CHAT, TOOL = ("<|im_start|>", "<|im_end|>"), "<tool>"
CONVERSATION = f"{CHAT[0]}user\nhi {TOOL} there{CHAT[1]}\n{CHAT[0]}"
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
Files = Callable[[dict[str, int]], dict[str, Any]]


def decoder(ids: dict[str, int]) -> dict[str, Any]:
    tokens = {str(ids[text]): {"content": text, **FLAGS, "special": text in CHAT} for text in reversed(ids)}
    return {"tokenizer_config.json": {"added_tokens_decoder": tokens}}


def listed(ids: dict[str, int], **about: Any) -> dict[str, Any]:
    return {"added_tokens.json": ids, "tokenizer_config.json": about}


PLACES: dict[str, Files] = {
    "added_tokens_decoder": decoder,
    "added_tokens.json": lambda ids: listed(ids, extra_special_tokens=[*CHAT]),
    "special_tokens_map.json": lambda ids: (
        listed(ids) | {"special_tokens_map.json": {"additional_special_tokens": [*CHAT], "eos_token": CHAT[1]}}
    ),
    "additional_special_tokens": lambda ids: listed({TOOL: ids[CHAT[0]]}, additional_special_tokens=[*CHAT]),
    "extra_special_tokens": lambda ids: {"tokenizer_config.json": {"extra_special_tokens": [*CHAT, TOOL]}},
    "names": lambda ids: {
        "tokenizer_config.json": {"extra_special_tokens": {"begin_token": CHAT[0]}, "eos_token": CHAT[1]}
    },
    "two places": lambda ids: decoder(ids) | {"added_tokens.json": ids},
}


def folder_with(kind: str, folder: Path, files: Files, *, more_rows: int = 5) -> Path:
    """A model whose chat tokens follow those of tokenizer.json in the order in which transformers adds them."""
    tokenizer = trained.KINDS[kind]()
    count = tokenizer.get_vocab_size()
    trained.save(tokenizer, folder)
    for name, content in files({text: count + place for place, text in enumerate((*CHAT, TOOL))}).items():
        path = folder / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | content))
    return write_llama(folder, rows=count + more_rows)


def tokens_of(folder: Path) -> tuple[list[str], list[int]]:
    found = metadata(converted(folder))
    return found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]


# Every place with two kinds of tokenizers, and every kind with some places.
OTHER_KINDS = ("llama2", "gemma", "bert", "unigrams")
WITH_KINDS = [(place, kind) for n, place in enumerate(PLACES) for kind in ("qwen2", OTHER_KINDS[n % 4])]


@pytest.mark.parametrize(("place", "kind"), WITH_KINDS)
def test_the_file_has_the_tokens_of_transformers(place: str, kind: str, tmp_path: Path) -> None:
    import transformers

    folder = folder_with(kind, tmp_path, PLACES[place])
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    tokens, types = tokens_of(folder)
    held = [text for text in (*CHAT, TOOL) if text in expected.get_vocab()]
    assert CHAT[1] in held
    for text in held:
        token_id = expected.convert_tokens_to_ids(text)
        special = expected.added_tokens_decoder[token_id].special
        assert (tokens[token_id], types[token_id]) == (text, CONTROL if special or text in CHAT else ADDED)
    assert types[len(expected) :] == [UNUSED] * (len(tokens) - len(expected))
    loaded = GgufTokenizer(write_gguf(folder))
    same = loaded(CONVERSATION)["input_ids"] == expected(CONVERSATION)["input_ids"]
    assert same != any("in normalized text" in note for note in converted(folder).notes)
    assert same or kind == "llama2"


def test_special_tokens_are_named_by_id(tmp_path: Path) -> None:
    folder = folder_with("qwen2", tmp_path, PLACES["special_tokens_map.json"])
    found = metadata(converted(folder))
    assert found["tokenizer.ggml.tokens"][found["tokenizer.ggml.eos_token_id"]] == CHAT[1]


def test_a_map_of_special_tokens_does_not_count_beside_a_decoder(tmp_path: Path) -> None:
    """As in transformers 5."""
    folder = folder_with("qwen2", tmp_path, decoder)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": CHAT[1]}))
    found = metadata(converted(folder))
    assert found["tokenizer.ggml.tokens"][found["tokenizer.ggml.eos_token_id"]] == trained.END


def test_tokens_of_the_vocabulary_keep_their_ids(tmp_path: Path) -> None:
    """Only their kind changes."""
    folder = folder_with("qwen2", tmp_path, lambda ids: {"tokenizer_config.json": {"extra_special_tokens": ["re"]}})
    vocab = trained.KINDS["qwen2"]().get_vocab()
    tokens, types = tokens_of(folder)
    assert (tokens[vocab["re"]], types[vocab["re"]]) == ("re", CONTROL)


@pytest.mark.parametrize("shift", [1, -1, 7])
@pytest.mark.parametrize("place", ["added_tokens_decoder", "added_tokens.json"])
def test_ids_other_than_those_of_transformers_are_refused(place: str, shift: int, tmp_path: Path) -> None:
    def moved(ids: dict[str, int]) -> dict[str, Any]:
        return PLACES[place]({text: token_id + shift for text, token_id in ids.items()})

    file = "added_tokens.json" if place == "added_tokens.json" else "tokenizer_config.json"
    with raises(ExportError, file, "<|im_start|>"):
        converted(folder_with("qwen2", tmp_path, moved, more_rows=20))


def test_a_token_for_which_the_model_has_no_embedding_is_left_out_or_refused(tmp_path: Path) -> None:
    """The first if only its text is stated, as is that of a token for padding which a fine-tune added."""
    folder = folder_with(
        "llama2", tmp_path / "a", lambda ids: {"tokenizer_config.json": {"pad_token": "[P]"}}, more_rows=0
    )
    model = converted(folder)
    assert any("'[P]'" in note for note in model.notes)
    assert "[P]" not in metadata(model)["tokenizer.ggml.tokens"]
    assert "tokenizer.ggml.padding_token_id" not in metadata(model)
    with raises(ExportError, "tokenizer.json"):
        converted(folder_with("llama2", tmp_path / "b", decoder, more_rows=0))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", {"<a>": "1"}),
        ("added_tokens.json", {"<a>": -1}),
        ("added_tokens.json", [1]),
        ("special_tokens_map.json", [1]),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<a>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": "<a>"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"content": 1}}}),
    ],
)
def test_damaged_files_are_refused_by_name(name: str, content: Any, tmp_path: Path) -> None:
    folder = folder_with("qwen2", tmp_path, lambda ids: {})
    (folder / name).write_text(json.dumps(content))
    with raises(SourceError, name):
        converted(folder)
