"""Refreshing a card: what is kept of the existing card, and of the one on the Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from calls import make_card, write_card
from cards import BASE, change_manifest, edit_card, facts
from commands import raises

from pqweights.errors import OutputError
from pqweights.models.diffusion import COMFYUI, DIFFUSERS
from pqweights.publish.card.old_card import NOTES_BEGIN, NOTES_END, generated_comment, read_old_card
from pqweights.targets import EXPORTS, get_target


def test_of_two_cards_that_of_the_folder_counts_if_it_was_edited(master: Path) -> None:
    text = make_card(master, "a/b").text
    edited = text.replace(NOTES_END, f"Mine.\n{NOTES_END}").replace("tags:\n", "z: 1\ndatasets: [x]\ntags:\n- mine\n")
    again = make_card(master, old=edited).text
    assert make_card(master, old=again).text == again
    theirs = again.replace("Mine.", "Theirs.").replace("z: 1", "z: 2")
    # (in the folder, on the Hub), what is pushed, and whether edits on the Hub are replaced
    for old, pushed, expected, replaced in (
        (again, text, again, False),
        (text, again, again, False),
        (None, again, again, False),
        (again, theirs, again, True),
        (again, again, again, False),
    ):
        card = make_card(master, "a/b", old=old, pushed=pushed)
        assert (card.text, card.replaces_edits) == (expected, replaced)


def test_tags_of_no_target_are_taken_for_edits() -> None:
    programs: list[dict[str, list[str]]] = [{}, {"runs_in": [COMFYUI, DIFFUSERS]}]
    tags = {tag for name in EXPORTS for made_by in programs for tag in get_target(name).tags_of(made_by)}
    facts = {"tags": ["pqweights", "lossless", "quantized", "4-bit", *sorted(tags)]}
    card = f"---\n{json.dumps(facts)}\n---\n{generated_comment(repository=None, branch=None, written=())}\n"
    assert not read_old_card(f"{card}{NOTES_BEGIN}\n{NOTES_END}\n").is_edited


@pytest.mark.parametrize(
    "notes",
    ["", "\n", "\n## Mine\n\n```python\nx\n```\n", "\r\nDOS \r\n\r\n", " é\u2028\x0b| <b>--- \n---\n", "no newline"],
)
def test_notes_are_kept_byte_for_byte(notes: str, master: Path) -> None:
    write_card(master, "a/b")
    edit_card(master, lambda text: text.replace(f"{NOTES_BEGIN}\n{NOTES_END}", f"{NOTES_BEGIN}{notes}{NOTES_END}"))
    before = (master / "README.md").read_bytes()
    assert not write_card(master).changed
    edit_card(master, lambda text: text.replace("# b\n", "# another title\n"))
    change_manifest(master, lambda data: data.update(model=BASE))
    card = write_card(master, "c/d")
    assert card.changed and f"{NOTES_BEGIN}{notes}{NOTES_END}".encode() in (master / "README.md").read_bytes()
    change_manifest(master, lambda data: data.pop("model"))
    write_card(master, "a/b")
    # The base model is still known.
    edit_card(master, lambda text: re.sub(r"(?m)^base_model.*\n", "", text))
    write_card(master)
    assert (master / "README.md").read_bytes() == before


def test_front_matter_keeps_keys_of_the_user_and_rewrites_its_own(master: Path) -> None:
    change_manifest(master, lambda data: data.update(model={k: v for k, v in BASE.items() if k != "language"}))
    write_card(master, "a/b")
    theirs = (
        "datasets:\n- x/y\nlanguage: de\nwidget: {text: 'a: b'}\nlicense: forged\nthumbnail: \"a\\u2028---\\u2028b\"\n"
    )
    edit_card(
        master, lambda text: text.replace("license: other\n", theirs).replace("- quantized", "- quantized\n- mine")
    )
    card = write_card(master)
    found = facts(card.text)
    assert found["license"] == "other"
    assert found["tags"] == ["pqweights", "quantized", "5-bit", "mine"]
    expected = {"datasets": ["x/y"], "language": "de", "widget": {"text": "a: b"}, "thumbnail": "a\u2028---\u2028b"}
    assert {key: found[key] for key in expected} == expected
    assert not write_card(master).changed
    # Keys that an earlier manifest stated and this one does not are removed.
    change_manifest(master, lambda data: data.update(model={"language": ["fr"]}))
    found = facts(write_card(master).text)
    assert "license" not in found and "pipeline_tag" not in found
    assert (found["language"], found["datasets"], found["base_model"]) == (["fr"], ["x/y"], "org/base")


def test_licence_of_the_user_is_kept_if_the_manifest_has_none(master: Path) -> None:
    write_card(master)
    edit_card(master, lambda text: text.replace("---\n", "---\nlicense: mit\nlicense_link: x\n", 1))
    found = facts(write_card(master).text)
    assert (found["license"], found["license_link"]) == ("mit", "x")
    assert not write_card(master).changed
    change_manifest(master, lambda data: data.update(model={"license": "apache-2.0"}))
    found = facts(write_card(master).text)
    assert found["license"] == "apache-2.0" and "license_link" not in found


def test_card_written_by_someone_else_needs_markers(master: Path) -> None:
    foreign = "---\nlicense: mit\nbase_model: org/base\ndatasets: [x]\n---\n\n{}\n# Mine\r\n\nText\n{}\n"
    (master / "README.md").write_bytes(foreign.format("", "").encode())
    with raises(OutputError, "README.md", NOTES_BEGIN):
        write_card(master)
    assert (master / "README.md").read_bytes() == foreign.format("", "").encode()
    (master / "README.md").write_bytes(foreign.format(NOTES_BEGIN, NOTES_END).encode())
    card = write_card(master)
    assert f"{NOTES_BEGIN}\n# Mine\r\n\nText\n{NOTES_END}\n" in card.text
    found = facts(card.text)
    assert (found["license"], found["base_model"], found["datasets"]) == ("mit", "org/base", ["x"])
    assert not write_card(master).changed


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace(NOTES_BEGIN, ""),
        lambda text: text.replace(NOTES_END, ""),
        lambda text: text.replace(NOTES_BEGIN, "").replace(NOTES_END, ""),
        lambda text: text + NOTES_END,
        lambda text: text.replace(NOTES_BEGIN, NOTES_BEGIN * 2),
        lambda text: text.replace(NOTES_BEGIN, "@").replace(NOTES_END, NOTES_BEGIN).replace("@", NOTES_END),
        lambda text: text.replace("tags:", "tags: [", 1),
        lambda text: text.replace("\n---\n", "\n", 1),
    ],
)
def test_damaged_card_is_refused(damage: Callable[[str], str], master: Path) -> None:
    write_card(master)
    edit_card(master, damage)
    before = (master / "README.md").read_bytes()
    with raises(OutputError, "README.md"):
        write_card(master)
    assert (master / "README.md").read_bytes() == before
