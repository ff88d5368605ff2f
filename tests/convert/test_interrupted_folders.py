"""Folders in which a run was interrupted: each command says so, names the command, and how to continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import raises, refused
from converting import command, interrupt
from helpers import run_command

from pqweights.checkpoint.source import open_local
from pqweights.errors import MasterError, OutputError, SourceError
from pqweights.runtime.folders import read_folder

AGAIN = "run the same command again to continue where it stopped"


@pytest.fixture
def folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    interrupt(monkeypatch, command(source), tmp_path / "master")
    return tmp_path / "master"


@pytest.mark.parametrize(
    "words",
    [
        *("inspect {}", "verify {}", "card {}", "push {} me/model", "push {} me/model --dry-run"),
        *("plan {}", "quantize {} OUT", "export {} OUT --target bf16"),
    ],
)
def test_commands_say_how_to_continue(words: str, folder: Path) -> None:
    line = refused(*words.format(folder).split())
    assert line == f"error: {folder}: holds an unfinished run of pqweights quantize: {AGAIN}\n"


def test_models_are_not_loaded_from_it(folder: Path, tmp_path: Path) -> None:
    for read in (read_folder, open_local):
        with raises(MasterError, "pqweights quantize"):
            read(folder)
    with raises(SourceError, "nosuch"):
        read_folder(tmp_path / "nosuch")


def test_interrupted_export_names_its_target(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_command(command(source), tmp_path / "master")
    work: dict[str, Any] = {"export": str(tmp_path / "master"), "target": "bf16"}
    interrupt(monkeypatch, work, tmp_path / "export", shards=0)
    assert "pqweights export --target bf16: " in refused("inspect", tmp_path / "export")
    with raises(OutputError, "pqweights export --target bf16"):
        run_command(command(source), tmp_path / "export")
    assert run_command(work, tmp_path / "export").resumed == 0


def test_journal_that_names_no_command_is_recognized(folder: Path) -> None:
    journal = folder / ".pqweights/journal.jsonl"
    for content in (b"", b"\xff\n", b"[]\n", b'{"work": "x"}\n', b'{"kind": 5, "target": "a\\nb"}\n', b"[" * 100_000):
        journal.write_bytes(content)
        line = refused("export", folder, "out", "--target", "bf16")
        assert line.startswith(f"error: {folder}: ") and line.endswith(f"run: {AGAIN}\n")


def test_older_result_stays_readable_while_it_is_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run_command(command(source), out)
    interrupt(monkeypatch, command(source, recipe="q4", overwrite=True), out)
    run_command({"export": str(out), "target": "bf16"}, tmp_path / "export")
    from pqweights.results.inspect import inspect
    from pqweights.results.verify import verify

    assert inspect(out).manifest.made_by["recipe"]["name"] == "q5"
    (problem,) = verify(out, threads=1).problems
    assert problem.startswith(".pqweights: ")
