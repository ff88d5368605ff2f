"""Texts of samples: files, data sets of the Hub, and the mixture that comes with the package."""

from __future__ import annotations

import itertools
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from commands import raises

from pqweights.calibrate.sample import sample_text
from pqweights.errors import EvaluationError, MissingDependencyError
from pqweights.runtime.texts import read_text


class OwnError(Exception):
    """As `datasets` has its own."""


def having(monkeypatch: pytest.MonkeyPatch, splits: Any) -> list[Any]:
    """Have a `datasets` that finds these splits, or raises them; returns what it is asked for."""
    asked: list[Any] = []

    def load(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        if isinstance(splits, Exception):
            raise splits
        return splits

    errors = types.SimpleNamespace(DatasetsError=OwnError)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load, exceptions=errors))
    return asked


def test_the_mixture_has_many_languages_and_code_and_is_long_enough() -> None:
    text = sample_text("mixture", 12288)
    assert len(text.split()) > 12288
    for part in ("Lichtgeschwindigkeit", "豆浆", "поезд", "SELECT c.name", '"""The sample of tokens from which'):
        assert part in text
    assert text == sample_text("mixture", 2048)


def test_files_of_a_folder_are_joined_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("second", encoding="utf-8-sig")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "a.md").write_text("no text")
    assert sample_text(str(tmp_path), 2048) == "first\nsecond"


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": "one", "source": "web"}, {"text": "two", "source": "web"}],
        [{"text": "one"}, {"text": "", "url": "nowhere"}, {"text": None, "url": "nowhere"}, {"text": "two"}],
        [{"conversation": [{"content": "one"}]}, {"messages": {"turns": ["two"]}, "score": 3}],
    ],
)
def test_rows_of_a_data_set_are_read_as_far_as_needed(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = itertools.chain(rows, itertools.repeat({"text": "x" * 100}))
    asked = having(monkeypatch, {"test": iter(()), "train": endless})
    text = sample_text("some-lab/chats:small", 1000)
    assert text.split()[:2] == ["one", "two"] and "nowhere" not in text and 8000 <= len(text.replace("\n", "")) < 8200
    assert asked == [(("some-lab/chats", "small"), {"streaming": True})]


def test_a_data_set_without_a_split_for_training_has_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, {"validation": [{"text": "one"}], "test": [{"text": "two"}]})
    assert sample_text("some-lab/chats", 1000) == "one"


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, ImportError, OwnError])
def test_a_data_set_that_cannot_be_read_is_one_line(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, error("Couldn't reach 'some-lab/chats'\non the Hub"))
    with raises(EvaluationError, "some-lab/chats", "Couldn't reach 'some-lab/chats' on the"):
        sample_text("some-lab/chats", 1000)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises(MissingDependencyError, "some-lab/chats", "pip install"):
        sample_text("some-lab/chats", 1000)


def test_a_path_that_no_data_set_can_have_is_a_missing_file(tmp_path: Path) -> None:
    with raises(EvaluationError, "none.txt"):
        sample_text(str(tmp_path / "none.txt"), 1000)


CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
ROWS = {
    "text": ({"text": "one", "id": 3}, "one"),
    "content": ({"content": "one", "meta": {"a": "b"}}, "one"),
    "messages": ({"messages": CHAT}, "one\ntwo"),
    "conversations": (
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
        "one\ntwo",
    ),
    "a text itself": ("one", "one"),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ending", ["jsonl", "JSONL", "ndjson"])
def test_rows_of_a_file_give_their_texts(name: str, ending: str, tmp_path: Path) -> None:
    row, expected = ROWS[name]
    path = tmp_path / f"rows.{ending}"
    path.write_text(f"{json.dumps(row)}\n\n{json.dumps({'text': 'ö'})}\n", encoding="utf-8")
    for read in (sample_text(str(path), 1000), read_text(path)):
        assert read == f"{expected}\n\nö"


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_rows_end_at_newlines_alone(character: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"text": f"a{character}b"}, ensure_ascii=False)
    path.write_bytes(f"{row}\r\n{row}\r\n".encode())
    for read in (sample_text(str(path), 1000), read_text(path)):
        assert read == f"a{character}b\n\na{character}b"


@pytest.mark.parametrize(
    "line", ["a text", '{"prompt": "a"}', '{"text": 3}', '{"messages": [{"role": "user"}]}', "[1]"]
)
def test_rows_without_a_text_are_refused_by_their_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n' + line + "\n")
    for read in (lambda path: sample_text(str(path), 1000), read_text):
        with raises(EvaluationError, "rows.jsonl: line 2"):
            read(tmp_path / "rows.jsonl")


def test_reading_a_data_set_of_short_rows_takes_time_in_proportion_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, {"train": itertools.repeat({"text": "x"}, 40_000)})
    start = time.process_time()
    assert len(sample_text("some-lab/chats", 10**6).split()) == 40_000
    assert time.process_time() - start < 2  # of counting all rows again with each: 15 s
