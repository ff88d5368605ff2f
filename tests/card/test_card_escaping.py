"""Names, texts and options that could break a card: they are escaped or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from calls import make_card, write_card
from cards import change_manifest, facts, sections
from commands import raises
from huggingface_hub.utils import validate_repo_id

from pqweights.common.markdown import code, words
from pqweights.errors import OptionError, OutputError
from pqweights.publish.card.old_card import NOTES_BEGIN, NOTES_END
from pqweights.storage.addresses import is_repository_id

BRANCHES = ["", "a b", "-x", "a..b", "a-->b", "a\nb", "\u00e4", "x" * 300]
MODELS = ["", "a b", "a/b/c", "x\ny", "\u202e", "a/" + "b" * 5000]


@pytest.mark.parametrize(
    ("key", "name"), [*(("revision", name) for name in BRANCHES), *(("base_model", name) for name in MODELS)]
)
def test_invalid_names_are_refused(key: str, name: str, master: Path) -> None:
    error, named = (OptionError, "`base_model`") if key == "base_model" else (OutputError, "branch")
    with raises(error, named) as caught:
        make_card(master, "a/b", **{key: name})
    assert len(str(caught.value)) < 300


HOSTILE = ["a | b", "`a`", "a\nb", "<script>", "<!-- /notes -->", NOTES_BEGIN, NOTES_END, "-->", "---", "\n---\n"]
HOSTILE += ["# a", "```", "\\|", "[a](javascript:b)", "é\u202e", "x" * 5000, "", "_a_ *b*", "&lt;", "$x$"]
HOSTILE += ["a\u2028b", "\x00"]


@pytest.mark.parametrize("name", HOSTILE)
def test_markup_in_names_of_the_manifest_is_escaped(name: str, master: Path) -> None:
    plain = make_card(master, "a/b").text

    def spoil(data: dict[str, Any]) -> None:
        data["recipe"] |= {"name": name, "description": name, "codec": [name], "bits": {name: name}}
        data["recipe"]["rules"] = [{"name": [name], "role": name, "reason": name, "bits": name}, 3]
        data["awq"] = {"tokens": name, "weights": name}
        data["source"] |= {"fingerprint": name, "id": name, "revision": name}
        data["model"] = {"id": name, "revision": name}
        for tensor in data["tensors"]:
            tensor["name"] = name + tensor["name"]
            tensor["role"], tensor["reason"] = name, name
            for stored in tensor["stored"]:
                stored["name"] = name + stored["name"]

    change_manifest(master, spoil)
    text = make_card(master, "a/b").text
    assert text.count(NOTES_BEGIN) == text.count(NOTES_END) == 1
    assert len(re.findall(r"<!--", text)) == len(re.findall(r"-->", text)) == 3
    assert facts(text)["tags"] == ["pqweights", "quantized", "5-bit"]
    assert sections(text) == sections(plain)
    assert text.count("```") == plain.count("```")
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|") and len(re.findall(r"(?<!\\)\|", line)) in (3, 7, 10)
    assert "<script" not in text and "](java" not in text
    assert make_card(master, old=text).text == text


@pytest.mark.parametrize("text", HOSTILE)
def test_escaped_text_holds_no_markup(text: str) -> None:
    for shown in (words(text), code(text)):
        assert shown.isprintable() and "|" not in shown and "<!" not in shown and "-->" not in shown
    assert code("model.layers.0.mlp-x_y.weight") == "`model.layers.0.mlp-x_y.weight`"
    assert words("lm_head: _a_") == "lm_head: &#95;a&#95;"


def test_licence_of_the_manifest_may_be_any_line(master: Path) -> None:
    hostile = "---: {x}, [y] | `<!-- /notes -->` #"
    change_manifest(master, lambda data: data.update(model={"license": hostile, "language": [hostile, "no", "null"]}))
    text = write_card(master).text
    assert yaml.safe_load(text.split("---\n")[1])["license"] == hostile
    assert not write_card(master).changed


def test_name_of_a_repository_is_recognised() -> None:
    for text in ("a/b", "Qwen/Qwen3-0.6B", "a_b/c.d-e"):
        assert is_repository_id(text) and is_repository_id("gpt2", namespace=False)
        validate_repo_id(text)
    not_names = ["gpt2", "a/b/c", "a//b", "/a", "a/", "a/-b", "a/b.", "a/b--c", "a/b..c", "a/b.git", "ä/b", "a/b c", ""]
    assert not any(is_repository_id(text) for text in [*not_names, "a/" + "b" * 95, "a/b\n"])
