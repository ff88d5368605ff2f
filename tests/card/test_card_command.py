"""The card command: what it writes, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

from calls import make_card
from cards import BASE, change_manifest
from commands import invoke

from pqweights.results.verify import verify


def test_command_writes_the_card_and_prints_a_summary(master: Path) -> None:
    result = invoke("card", master, "--repo", "a/b", "--base-model", "org/base")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{master / 'README.md'}: written; 0 evaluations\n"
    assert result.stderr == ""
    text = (master / "README.md").read_text()
    assert text == make_card(master, "a/b", "org/base").text
    result = invoke("card", master, "--json")
    assert json.loads(result.stdout) == {
        "card": str(master / "README.md"),
        "changed": False,
        "repository": "a/b",
        "base_model": "org/base",
        "evaluations": 0,
        "quick_evaluations": 0,
    }
    assert verify(master, threads=1).ok


def test_print_option_writes_no_file(master: Path) -> None:
    before = sorted(path.name for path in master.iterdir())
    result = invoke("card", master, "--print", "--repo", "a/b")
    assert result.stdout == make_card(master, "a/b").text
    assert sorted(path.name for path in master.iterdir()) == before
    assert invoke("card", master, "--print", "--json").exit_code == 2


def test_invalid_options_and_foreign_cards_are_refused(master: Path, tmp_path: Path) -> None:
    for arguments in (("--repo", "name"), ("--base-model", "a b")):
        result = invoke("card", master, *arguments)
        assert result.exit_code == 2 and "ORG/NAME" in result.stderr
    assert not (master / "README.md").exists()
    change_manifest(master, lambda data: data.update(model=BASE))
    result = invoke("card", master, "--base-model", "org/other")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "org/other" in result.stderr and "org/base" in result.stderr
    (tmp_path / "empty").mkdir()
    assert invoke("card", tmp_path / "empty").exit_code == 1
    assert "s3://bucket/folder: " in invoke("card", "s3://bucket/folder").stderr
