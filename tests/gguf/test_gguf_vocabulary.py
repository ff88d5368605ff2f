"""Vocabularies of GGUF files: what they hold, the ids that llama.cpp makes of text, and tokenizers that are refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import trained_tokenizers as trained
from commands import raises
from gguf_files import converted, metadata, write_gguf, write_llama
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from pqweights.checkpoint.gguf.vocabulary import KNOWN_ENDS
from pqweights.errors import ExportError, SourceError
from pqweights.runtime import llama_library
from pqweights.runtime.llama_library import GgufTokenizer

NORMAL, CONTROL, ADDED, UNUSED, BYTE = (int(gguf.TokenType[name]) for name in (
    "NORMAL", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE"
))  # fmt: skip
# transformers puts no space before text that begins with one, or that follows a special token; llama.cpp puts one.
SPACE_DIFFERS = (" a leading space", "   three spaces, trailing   ", " ", *trained.WITH_SPECIAL[1:3])
# llama.cpp takes signs of Korean and of Indian scripts for accents, which the model does without.
DIFFERS = {"metaspace": SPACE_DIFFERS, "bert": [text for text in trained.STRINGS if "\uc548\ub155" in text]}


def folder_with(tokenizer: Tokenizer, folder: Path, rows: int | None = None, **config: Any) -> Path:
    """A model with a tokenizer."""
    trained.save(tokenizer, folder, **config)
    return write_llama(folder, rows=rows or tokenizer.get_vocab_size())


@contextlib.contextmanager
def editing(folder: Path) -> Iterator[dict[str, Any]]:
    """The content of tokenizer.json, which is written back."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    yield stored
    (folder / "tokenizer.json").write_text(json.dumps(stored))


def written(folder: Path) -> dict[str, Any]:
    """The metadata of the file of a folder, by the last part of the key for those of the tokenizer."""
    return {key.removeprefix("tokenizer.ggml."): value for key, value in metadata(converted(folder)).items()}


@pytest.mark.parametrize("kind", trained.KINDS)
def test_llama_cpp_makes_the_tokens_that_transformers_makes(kind: str, tmp_path: Path) -> None:
    import transformers

    folder = folder_with(trained.KINDS[kind](), tmp_path)
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    loaded = GgufTokenizer(write_gguf(folder))
    for text in (*trained.STRINGS, *trained.WITH_SPECIAL):
        if text not in DIFFERS.get(kind, ()):
            assert loaded(text)["input_ids"] == expected(text)["input_ids"], text


def test_text_that_is_not_normalized_makes_other_tokens_with_a_normalizer(tmp_path: Path) -> None:
    """llama.cpp has none. Qwen's tokenizers have one."""
    tokenizer = trained.KINDS["qwen2"]()
    tokenizer.normalizer = normalizers.NFC()
    folder = folder_with(tokenizer, tmp_path)
    assert any("NFC" in note for note in converted(folder).notes)
    loaded = GgufTokenizer(write_gguf(folder))
    assert loaded("caf\u00e9")["input_ids"] == tokenizer.encode("caf\u00e9").ids == tokenizer.encode("cafe\u0301").ids
    assert loaded("cafe\u0301")["input_ids"] != tokenizer.encode("cafe\u0301").ids


def test_byte_level_vocabularies(tmp_path: Path) -> None:
    tokenizer = trained.KINDS["llama3"]()
    rows = tokenizer.get_vocab_size() + 3
    found = written(folder_with(tokenizer, tmp_path, rows, chat_template="{{ messages }}", pad_token=trained.USER))
    assert found["model"], found["pre"] == ("gpt2", "llama-bpe")
    vocab = tokenizer.get_vocab()
    assert found["tokens"][: rows - 3] == sorted(vocab, key=vocab.__getitem__)
    assert found["tokens"][-3:] == [f"[PAD{rows - place}]" for place in (3, 2, 1)]
    types = dict(zip(found["tokens"], found["token_type"], strict=True))
    assert {token: types[token] for token in (trained.BEGIN, trained.USER, trained.PLAIN, "a", f"[PAD{rows - 1}]")} == {
        trained.BEGIN: CONTROL, trained.USER: CONTROL, trained.PLAIN: ADDED, "a": NORMAL, f"[PAD{rows - 1}]": UNUSED,
    }  # fmt: skip
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    assert found["merges"] == [" ".join(pair) for pair in merges]
    assert (found["bos_token_id"], found["eos_token_id"], found["padding_token_id"]) == (
        0, 1, vocab[trained.USER],
    )  # fmt: skip
    assert (found["add_bos_token"], found["add_eos_token"]) == (True, False)
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    assert "scores" not in found


def test_tokens_that_look_special_are_special(tmp_path: Path) -> None:
    tokenizer = trained.KINDS["qwen2"]()
    tokenizer.add_tokens(["<|fim_prefix|>", "<tool>"])
    found = written(folder_with(tokenizer, tmp_path))
    types = dict(zip(found["tokens"], found["token_type"], strict=True))
    assert (types["<|fim_prefix|>"], types["<tool>"]) == (CONTROL, ADDED)


def test_no_token_is_put_before_the_text_unless_the_tokenizer_does(tmp_path: Path) -> None:
    """llama.cpp would put one there by the name of the pre-tokenizer."""
    tokenizer = trained.byte_level(trained.splits.LLAMA3, whole_words=True)
    found = written(folder_with(tokenizer, tmp_path))
    assert (found["pre"], found["add_bos_token"]) == ("llama-bpe", False)


def test_sentencepiece_vocabularies(tmp_path: Path) -> None:
    tokenizer = trained.KINDS["llama2"]()
    found = written(folder_with(tokenizer, tmp_path))
    assert (found["model"], found["pre"], found["add_space_prefix"], found["add_bos_token"]) == (
        "llama", "default", True, True,
    )  # fmt: skip
    place = tokenizer.get_vocab()
    types = dict(zip(found["tokens"], found["token_type"], strict=True))
    assert [types[token] for token in ("<0x00>", "<0xFF>", "<s>", "a", trained.PLAIN)] == [
        BYTE, BYTE, CONTROL, NORMAL, ADDED,
    ]  # fmt: skip
    first, second = json.loads(tokenizer.to_str())["model"]["merges"][:2]
    scores = [found["scores"][place["".join(pair)]] for pair in (first, second)]
    assert scores == [0.0, -1.0] or first[0] + first[1] == second[0] + second[1]
    assert found["scores"][place["a"]] == -1000.0
    assert "merges" not in found


def test_added_tokens_of_gemma_stand_for_spaces(tmp_path: Path) -> None:
    found = written(folder_with(trained.KINDS["gemma"](), tmp_path))
    assert found["add_space_prefix"] is False
    types = dict(zip(found["tokens"], found["token_type"], strict=True))
    assert types["  "] == types["\n\n"] == ADDED
    assert "▁▁" not in types and types["<0x09>"] == BYTE and types["▁"] == NORMAL


@pytest.mark.parametrize(
    ("name", "strips", "expected"),
    [
        ("Phi-3-mini", True, "Phi-3-mini"),
        ("mine", True, "mine (phi-3)"),
        (None, True, "model (phi-3)"),
        ("my-phi3-tune", False, "my-phi 3-tune"),
        ("mine", False, "mine"),
        (None, False, None),
    ],
)
def test_special_tokens_take_spaces_behind_them_by_the_name_of_the_model(
    name: str | None, strips: bool, expected: str | None, tmp_path: Path
) -> None:
    """As llama.cpp goes by this name; and with it, it does not load a model that lacks some tokens."""
    tokenizer = trained.KINDS["llama2"]()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder = folder_with(tokenizer, tmp_path)
    with editing(folder) as stored:
        for token in stored["added_tokens"]:
            token["rstrip"] = strips and token["content"] == trained.USER
    assert metadata(converted(folder, name)).get("general.name") == expected
    loaded = GgufTokenizer(write_gguf(folder, name=name or ""))
    text = f"{trained.USER}   Hello"
    assert loaded(text)["input_ids"] == Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


def changed(folder: Path, **parts: Any) -> Path:
    """A model whose tokenizer.json differs in some parts from one of GPT-2's kind."""
    folder_with(trained.KINDS["gpt2"](), folder)
    with editing(folder) as stored:
        for key, value in parts.items():
            (stored["model"] if key in stored["model"] else stored)[key] = value
    return folder


def test_merges_other_than_those_of_sentencepiece_are_refused(tmp_path: Path) -> None:
    tokenizer = trained.KINDS["llama2"]()
    stored = json.loads(tokenizer.to_str())
    left, right = stored["model"]["merges"].pop()
    with raises(ExportError, f"{left!r} and {right!r}"):
        converted(folder_with(Tokenizer.from_str(json.dumps(stored)), tmp_path))


def test_splits_at_spaces_are_refused_if_tokens_hold_spaces(tmp_path: Path) -> None:
    tokenizer = trained.KINDS["metaspace"]()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    folder = folder_with(tokenizer, tmp_path)
    assert written(folder)["model"] == "llama"
    with editing(folder) as stored:
        stored["model"]["vocab"]["a▁b"] = stored["model"]["vocab"].pop("<0x00>")
    with raises(ExportError, "a▁b"):
        converted(folder)


def test_missing_bytes_are_refused(tmp_path: Path) -> None:
    folder = folder_with(trained.KINDS["llama2"](), tmp_path)
    with editing(folder) as stored:
        stored["model"]["vocab"]["?"] = stored["model"]["vocab"].pop("<0xF5>")
    with raises(ExportError, "<0xF5>"):
        converted(folder)


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    tokenizer = trained.KINDS["gpt2"]()
    count = tokenizer.get_vocab_size()
    with raises(ExportError, "<think>", count - 1):
        converted(folder_with(tokenizer, tmp_path, count - 1))


def test_two_tokens_with_the_same_text_are_refused(tmp_path: Path) -> None:
    """llama.cpp would end the process."""
    tokenizer = trained.KINDS["gpt2"]()
    folder = folder_with(tokenizer, tmp_path, tokenizer.get_vocab_size() + 1)
    with editing(folder) as stored:
        stored["added_tokens"].append(stored["added_tokens"][-1] | {"id": tokenizer.get_vocab_size()})
    with raises(ExportError, "tokenizer.json", "<think>", tokenizer.get_vocab_size()):
        converted(folder)


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model", "vocab.json"])
def test_other_files_of_tokenizers_are_refused(name: str, tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / name).write_bytes(b"{}")
    with raises(ExportError, name):
        converted(tmp_path)


def test_several_chat_templates_are_in_a_fixed_order(tmp_path: Path) -> None:
    """The file has precedence over tokenizer_config.json."""
    folder = folder_with(trained.KINDS["gpt2"](), tmp_path, chat_template="old")
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    for name in ("tools", "rag", "think", "other"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(name)
    found = metadata(converted(folder))
    names = [key for key in found if "chat_template" in key]
    assert names == sorted(names) and len(names) == 6
    assert found["tokenizer.chat_templates"] == ["other", "rag", "think", "tools"]
    assert (found["tokenizer.chat_template"], found["tokenizer.chat_template.rag"]) == ("plain", "rag")


def template(*parts: str) -> dict[str, Any]:
    """A post-processor that puts special tokens around the text, which is A."""
    ids = {trained.BEGIN: 0, trained.END: 1}
    single = [
        {"Sequence": {"id": "A", "type_id": 0}} if part == "A" else {"SpecialToken": {"id": part, "type_id": 0}}
        for part in parts
    ]
    tokens = {token: {"id": token, "ids": [place], "tokens": [token]} for token, place in ids.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens}


@pytest.mark.parametrize(
    ("processor", "first", "last"),
    [
        (None, False, False),
        (template("A"), False, False),
        (template(trained.BEGIN, "A"), True, False),
        (template(trained.BEGIN, "A", trained.END), True, True),
        ({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}, False, False),
        ({"type": "RobertaProcessing", "cls": [trained.BEGIN, 0], "sep": [trained.END, 1]}, True, True),
    ],
)
def test_the_processor_decides_what_stands_around_a_text(
    processor: dict[str, Any] | None, first: bool, last: bool, tmp_path: Path
) -> None:
    """Whatever tokenizer_config.json says of it, as in transformers 5."""
    folder = changed(tmp_path)
    with editing(folder) as stored:
        stored.update({"post_processor": processor})
    about = {"bos_token": trained.BEGIN, "eos_token": trained.END}
    for said in ({}, {"add_bos_token": not first, "add_eos_token": not last}):
        (folder / "tokenizer_config.json").write_text(json.dumps(about | said))
        found = written(folder)
        assert (found["add_bos_token"], found["add_eos_token"]) == (first, last)
        assert (found["bos_token_id"], found["eos_token_id"]) == (0, 1)


def test_another_token_behind_a_text_is_its_end(tmp_path: Path) -> None:
    """Models of embeddings have such a token; what ended a generated text still does."""
    folder = changed(tmp_path)
    with editing(folder) as stored:
        stored.update({"post_processor": template("A", trained.BEGIN)})
    found = written(folder)
    assert (found["eos_token_id"], found["eot_token_id"], found["add_eos_token"]) == (0, 1, True)


def test_ids_in_the_configurations_are_used_where_the_tokenizer_names_no_tokens(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": 5}))
    write_config = json.loads((folder / "config.json").read_text()) | {"bos_token_id": None, "eos_token_id": [7, 8]}
    (folder / "config.json").write_text(json.dumps(write_config))
    found = written(folder)
    assert (found["eos_token_id"], found["bos_token_id"], found["padding_token_id"]) == (7, 7, 5)
    assert found["eom_token_id"] == 8


def test_all_tokens_that_end_a_generation_are_named(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 1, 8, 99999], "pad_token_id": 9}))
    found = written(folder)
    assert (found["eos_token_id"], found["eom_token_id"], found["eot_token_id"]) == (1, 9, 8)
    assert llama_ends(write_gguf(folder)) == {1, 8, 9}


def ended_by(folder: Path, texts: tuple[str, ...], ends: list[int], **about: Any) -> dict[str, int]:
    """Write a model with special tokens whose generation ends at some of all ids; returns the ids of the texts."""
    tokenizer = trained.KINDS["gpt2"]()
    tokenizer.add_special_tokens(list(texts))
    folder_with(tokenizer, folder, **about)
    ids = {text: tokenizer.token_to_id(text) for text in texts}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*ids.values(), *ends]}))
    return ids


def named_ends(folder: Path) -> dict[str, int]:
    """The ends that a file names, by kind."""
    found = written(folder)
    return {kind: found[f"{kind}_token_id"] for kind in ("eos", "eot", "eom") if f"{kind}_token_id" in found}


def llama_ends(file: Path) -> set[int]:
    """The tokens at which llama.cpp ends a text or a turn."""
    functions = llama_library.library()[0]
    model = llama_library.load(file, vocabulary_only=True)
    vocabulary = functions.llama_model_get_vocab(model)
    tokens = range(functions.llama_vocab_n_tokens(vocabulary))
    ends = {token for token in tokens if functions.llama_vocab_is_eog(vocabulary, token)}
    functions.llama_model_free(model)
    return ends


LLAMA_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")


@pytest.mark.parametrize("eos", ["<|eot_id|>", "<|end_of_text|>"])
def test_the_ends_of_llama_3_1_have_their_meanings(eos: str, tmp_path: Path) -> None:
    """Its generation_config.json lists the end of a text, of a message (of a tool call) and of a turn."""
    ids = ended_by(tmp_path, LLAMA_ENDS, [], eos_token=eos)
    assert named_ends(tmp_path) == {"eos": ids[eos], "eot": ids["<|eot_id|>"], "eom": ids["<|eom_id|>"]}
    assert converted(tmp_path).notes == ()
    assert llama_ends(write_gguf(tmp_path)) >= set(ids.values())


def test_ends_that_llama_cpp_knows_by_their_text_leave_the_names_to_others(tmp_path: Path) -> None:
    ids = ended_by(tmp_path, ("<|im_end|>", "<|endoftext|>"), [9], eos_token="<|im_end|>")
    assert named_ends(tmp_path) == {"eos": ids["<|im_end|>"], "eot": ids["<|im_end|>"], "eom": 9}
    assert converted(tmp_path).notes == ()


def test_llama_cpp_knows_the_ends_that_it_is_taken_to_know(tmp_path: Path) -> None:
    texts = tuple(sorted(KNOWN_ENDS - {"<|end|>"}))  # which is none beside <|call|> and <|return|>
    ids = ended_by(tmp_path, texts, [])
    assert llama_ends(write_gguf(tmp_path)) >= set(ids.values())


def test_ends_that_the_file_cannot_name_are_remarked_on(tmp_path: Path) -> None:
    folder = changed(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9, 8]}))
    assert converted(folder).notes == ()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9, 8, 7, 6, 9]}))
    tokens = written(folder)["tokens"]
    (note,) = converted(folder).notes
    assert f" {tokens[7]!r}, {tokens[6]!r}," in note
    assert named_ends(folder) == {"eos": 1, "eom": 9, "eot": 8}


@pytest.mark.parametrize(("flag", "texts"), [("lstrip", "spaces"), ("rstrip", "spaces"), ("single_word", "words")])
def test_what_llama_cpp_does_otherwise_beside_added_tokens_is_said(flag: str, texts: str, tmp_path: Path) -> None:
    folder = folder_with(trained.KINDS["gpt2"](), tmp_path)
    assert converted(folder).notes == ()
    with editing(folder) as stored:
        for token in stored["added_tokens"]:
            token[flag] = token["content"] == trained.PLAIN
    (note,) = converted(folder).notes
    assert texts in note and note.endswith(repr(trained.PLAIN))


def alien(special_tokens: dict[str, Any]) -> dict[str, Any]:
    """A post-processor that puts the token zz before the text."""
    single = [{"SpecialToken": {"id": "zz", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "special_tokens": special_tokens}


SPLIT = {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False}
PREFIXED = {"type": "ByteLevel", "add_prefix_space": True}
UNMAPPED: list[tuple[dict[str, Any], str]] = [
    ({"type": "WordLevel"}, "WordLevel BPE"),
    ({"dropout": 0.1}, "dropout 0.1"),
    ({"ignore_merges": True}, "ignore_merges True"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
    ({"pre_tokenizer": PREFIXED}, "add_prefix_space"),
    ({"pre_tokenizer": SPLIT}, "'a+'"),
    ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
    ({"merges": []}, "merges"),
    ({"byte_fallback": True}, "ByteLevel"),
    ({"post_processor": template(trained.BEGIN, trained.BEGIN, "A")}, "before after"),
    ({"post_processor": {"type": "Unknown"}}, "Unknown"),
]
DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"added_tokens": [{"content": "a"}]}, "'a' -1"),
    ({"added_tokens": [{"content": 3, "id": 3}]}, "added 3"),
    ({"added_tokens": [None]}, "added_tokens None"),
    ({"added_tokens": {"a": 1}}, "added_tokens {'a':"),
    ({"merges": [3]}, "merges"),
    ({"model": [1]}, "model [1]"),
    ({"pre_tokenizer": "x"}, "pre_tokenizer 'x'"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [3]}}, "pretokenizers 3"),
    ({"pre_tokenizer": {"type": "Split", "pattern": "x"}}, "pattern 'x'"),
    ({"pre_tokenizer": {"type": "Metaspace", "prepend_scheme": []}}, "prepend_scheme []"),
    ({"post_processor": alien({})}, "post_processor 'zz'"),
    ({"post_processor": alien({"zz": {"ids": [9999]}})}, "post_processor 9999"),
]


@pytest.mark.parametrize(("parts", "named"), UNMAPPED, ids=str)
def test_tokenizers_that_cannot_be_mapped_are_refused(parts: dict[str, Any], named: str, tmp_path: Path) -> None:
    with raises(ExportError, *named.split(), "use --target bf16"):
        converted(changed(tmp_path, **parts))


@pytest.mark.parametrize(("parts", "named"), DAMAGED, ids=str)
def test_damaged_tokenizers_are_refused(parts: dict[str, Any], named: str, tmp_path: Path) -> None:
    with raises((SourceError, ExportError), "tokenizer.json", *named.split()):
        converted(changed(tmp_path, **parts))


@pytest.mark.parametrize("content", ["[[1]]", '"{{ messages }}"', "{"])
def test_a_file_of_a_template_that_holds_none_is_named(content: str, tmp_path: Path) -> None:
    folder = folder_with(trained.KINDS["gpt2"](), tmp_path)
    (folder / "chat_template.json").write_text(content)
    with raises(SourceError, "chat_template.json"):
        converted(folder)
