"""pqweights-eval.json: what `eval` records beside a result, and how damaged and outdated records are treated."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calls import evaluate
from commands import invoke, raises
from evaluated import TEXT, evaluated
from helpers import folder_bytes
from msgspec.structs import replace

from pqweights.checkpoint.source import open_local
from pqweights.common.documents import as_json
from pqweights.errors import MasterError, OutputError
from pqweights.results.evaluation_record import Figure, read_records, result_folder_of, write_record
from pqweights.results.verify import verify
from pqweights.runtime.report import make_record

FILE = "pqweights-eval.json"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluated(tmp_path_factory, "records")


@pytest.fixture
def copy(work: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(work / name, tmp_path / name))


@pytest.fixture(scope="module")
def with_record(work: Path) -> Path:
    folder = Path(shutil.copytree(work / "q3", work / "with-record/q3"))
    assert invoke("eval", folder, "--text", work / "text.txt", "--window", 64).exit_code == 0
    return folder


@pytest.fixture
def recorded(with_record: Path, tmp_path: Path) -> Path:
    """A master with one record."""
    return Path(shutil.copytree(with_record, tmp_path / "q3"))


def notes(result: Any) -> list[str]:
    """The lines on stderr, without the progress that slow machines print."""
    return [line for line in result.stderr.splitlines() if not line.startswith("evaluating ")]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def records(folder: Path) -> Any:
    return read_records(folder, sha256(folder / "pqweights.json"))


def test_record_holds_protocol_and_figures(work: Path, copy: Callable[[str], Path]) -> None:
    master, exported, source = copy("q3"), copy("bf16"), work / "source"
    before = folder_bytes(source)
    result = invoke("eval", master, exported, source, "--text", work / "text.txt", "--reference", source, "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["models"]  # one document
    assert [note.partition(";")[0] for note in notes(result)] == [
        f"recorded in {folder / FILE}" for folder in (master, exported)
    ]
    assert folder_bytes(source) == before
    data = json.loads((master / FILE).read_text())
    assert (data["evaluation_version"], data["manifest_sha256"]) == (1, sha256(master / "pqweights.json"))
    (entry,) = data["evaluations"]
    said = {name: entry[name] for name in list(entry)[: list(entry).index("perplexity")]}
    assert said == {
        "text": "text.txt",
        "text_sha256": sha256(work / "text.txt"),
        "tokenizer": None,
        "tokens": 300,
        "windows": 6,
        "window": 128,
        "stride": 32,
        "masked": 96,
        "score_first": False,
        "scored_tokens": 192,
        "runtime": "transformers, weights decoded by pqweights",
        "dtype": "float32",
        "device": "cpu",
        "packed": False,
        "reference": "source",
        "reference_fingerprint": open_local(source).fingerprint(),
    }
    for name in ("perplexity", "log_perplexity", "perplexity_change", "log_perplexity_change", "top1_agreement"):
        assert entry[name] == rows[0][name]
    assert {name: entry["kl"][name] for name in ("mean", "maximum")}.items() <= rows[0]["kl"].items()
    assert "speed" not in entry and str(work) not in (master / FILE).read_text()
    assert [as_json(record) for record in records(master)] == [entry]
    for folder in (master, exported):
        assert verify(folder, threads=1).ok


def test_same_protocol_replaces_a_record_and_another_adds_one(recorded: Path, work: Path) -> None:
    first = (recorded / FILE).read_bytes()
    shutil.copy(work / "text.txt", recorded.parent / "other-name.txt")
    assert invoke("eval", recorded, "--text", recorded.parent / "other-name.txt", "--window", 64).exit_code == 0
    (record,) = records(recorded)
    assert record.text == "other-name.txt"
    assert (recorded / FILE).read_bytes() == first.replace(b'"text.txt"', b'"other-name.txt"')
    more = ("--window", 64, "--packed", "--reference", work / "source", "--tokenizer", work / "source")
    for options in (("--window", 32), more, ("--window", 16, "--no-record")):
        result = invoke("eval", recorded, "--text", work / "text.txt", *options)
        assert result.exit_code == 0 and bool(notes(result)) == ("--no-record" not in options)
    assert [(r.window, r.packed, r.reference, r.tokenizer) for r in records(recorded)] == [
        (64, False, None, None),
        (32, False, None, None),
        (64, True, "source", "source"),
    ]


def test_records_of_another_result_are_ignored_and_dropped(recorded: Path, work: Path) -> None:
    (recorded / "code").mkdir()
    shutil.copy(recorded / FILE, recorded / "code")
    assert [problem.partition(": ")[0] for problem in verify(recorded, threads=1).problems] == [f"code/{FILE}"]
    shutil.rmtree(recorded / "code")
    data = json.loads((recorded / FILE).read_text()) | {"manifest_sha256": "0" * 64}
    (recorded / FILE).write_text(json.dumps(data))
    assert records(recorded) == () and verify(recorded, threads=1).ok
    assert invoke("eval", recorded, "--text", work / "text.txt", "--window", 32).exit_code == 0
    assert [r.window for r in records(recorded)] == [32]


def test_what_is_recorded_and_for_which_result(copy: Callable[[str], Path]) -> None:
    """Names without folders, figures that are not finite, and only the result that was evaluated."""
    folder = copy("q3")
    place = result_folder_of(folder)
    assert place is not None
    report = evaluate([folder], TEXT, window=64, name="/some/where/words.txt")
    record = make_record(report, report.rows[0], TEXT, reference="ORG/NAME")
    assert record.text == "words.txt"
    record = replace(record, perplexity=Figure(None, None))
    write_record(place, record)
    assert records(folder) == (record,)
    (folder / FILE).unlink()
    (folder / "pqweights.json").write_bytes((folder / "pqweights.json").read_bytes() + b" ")
    with raises(OutputError, "q3"):
        write_record(place, record)
    assert not (folder / FILE).exists()


def test_foreign_checkpoints_and_links_get_no_record(work: Path, copy: Callable[[str], Path]) -> None:
    """A folder in the cache of the Hub consists of links to blobs."""
    assert result_folder_of(work / "source") is None
    folder = copy("q3")
    (folder / "pqweights.json").rename(folder.parent / "blob")
    (folder / "pqweights.json").symlink_to(folder.parent / "blob")
    assert result_folder_of(folder) is None


CHANGES: dict[str, list[Any]] = {
    "more": [1],
    "tokens": [-1, True, 1.5],
    "text": [None, "\ud800"],
    "packed": [1],
    "perplexity": [None, 3.0, {"value": 1}]
    + [{"value": value, "standard_error": None} for value in ("3", float("nan"), 10**400)],
    "kl": [{}, []],
}


def test_damaged_record_is_refused(recorded: Path) -> None:
    data = json.loads((recorded / FILE).read_text())
    (record,) = data["evaluations"]
    changed = [record | {key: value} for key, values in CHANGES.items() for value in values]
    changed.append({key: value for key, value in record.items() if key != "tokens"})
    files = [data | {"evaluations": [entry]} for entry in changed]
    files += [data | {"evaluation_version": version} for version in (2, True)]
    files += [data | {"evaluations": wrong} for wrong in ({}, [3])]
    files += [{key: value for key, value in data.items() if key != gone} for gone in ("evaluations", "manifest_sha256")]
    contents = [json.dumps(file).encode() for file in files]
    for content in (*contents, b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000):
        (recorded / FILE).write_bytes(content)
        with raises(MasterError, FILE) as caught:
            records(recorded)
        assert str(caught.value) in verify(recorded, threads=1).problems
        assert (recorded / FILE).read_bytes() == content


@pytest.mark.parametrize("fault", ["damaged", "a folder in its place", errno.ENOSPC, errno.EROFS])
def test_record_that_cannot_be_written_is_noted(
    fault: str | int, recorded: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whomever: root may write into folders that nobody else may."""

    def fail(descriptor: int) -> None:
        assert isinstance(fault, int)
        raise OSError(fault, os.strerror(fault))

    if fault == "damaged":
        (recorded / FILE).write_text("{")
    elif fault == "a folder in its place":
        (recorded / FILE).unlink()
        (recorded / FILE).mkdir()
    before = folder_bytes(recorded)
    with monkeypatch.context() as patch:
        if isinstance(fault, int):
            patch.setattr("os.fsync", fail)
        result = invoke("eval", recorded, "--text", work / "text.txt", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["models"]
    (note,) = notes(result)
    assert note.startswith("not recorded: ") and f"{FILE}: " in note
    assert folder_bytes(recorded) == before
