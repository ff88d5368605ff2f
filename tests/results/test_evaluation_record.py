"""pqweights-eval.json: what `eval` records beside a result, and how damaged and outdated records are treated."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import evaluate, export, quantize
from commands import invoke
from families import ATTENTION, Family, build
from msgspec.structs import replace

from pqweights.checkpoint.source import open_local
from pqweights.common.documents import as_json
from pqweights.errors import MasterError, OutputError
from pqweights.planning.recipe import load_recipe
from pqweights.quality.evaluate.report import make_record
from pqweights.rewrite.results.evaluation_record import Figure, find_place, read_records, write_record
from pqweights.rewrite.results.verify import verify

pytest.importorskip("transformers")
pytest.importorskip("torch")

FILE = "pqweights-eval.json"
TEXT = " ".join(f"w{number}" for number in np.random.default_rng(8).integers(0, 500, 300))
LLAMA = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "bos_token_id": 500,
    "eos_token_id": 501,
    "pad_token_id": None,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """source, its master q3 and the master's BF16 export bf16; text.txt."""
    folder = tmp_path_factory.mktemp("records")
    build(Family("LlamaForCausalLM", "LlamaConfig", LLAMA, ATTENTION), folder / "source")
    quantize(folder / "source", folder / "q3", load_recipe("q3"), threads=2)
    export(folder / "q3", folder / "bf16", "bf16", threads=2)
    (folder / "text.txt").write_text(TEXT)
    return folder


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
    master, exported = copy("q3"), copy("bf16")
    before = {path.name: path.read_bytes() for path in (work / "source").iterdir()}
    result = invoke(
        "eval", master, exported, work / "source", "--text", work / "text.txt", "--reference", work / "source", "--json"
    )
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["models"]  # one document
    assert [note.partition(";")[0] for note in notes(result)] == [
        f"recorded in {folder / FILE}" for folder in (master, exported)
    ]
    assert {path.name: path.read_bytes() for path in (work / "source").iterdir()} == before
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
        "reference_fingerprint": open_local(work / "source").fingerprint(),
    }
    for name in ("perplexity", "log_perplexity", "perplexity_change", "log_perplexity_change", "top1_agreement"):
        assert entry[name] == rows[0][name]
    assert entry["kl"]["mean"] == rows[0]["kl"]["mean"]
    assert entry["kl"]["maximum"] == rows[0]["kl"]["maximum"]
    assert "speed" not in entry and str(work) not in (master / FILE).read_text()
    (record,) = records(master)
    assert as_json(record) == entry
    for folder in (master, exported):
        assert verify(folder, threads=1).ok


def test_no_record_option_writes_nothing(copy: Callable[[str], Path], work: Path) -> None:
    folder = copy("q3")
    result = invoke("eval", folder, "--text", work / "text.txt", "--no-record")
    assert (result.exit_code, notes(result)) == (0, [])
    assert not (folder / FILE).exists()


def test_same_protocol_replaces_a_record_and_another_adds_one(recorded: Path, work: Path) -> None:
    first = (recorded / FILE).read_bytes()
    shutil.copy(work / "text.txt", recorded.parent / "other-name.txt")
    assert invoke("eval", recorded, "--text", recorded.parent / "other-name.txt", "--window", 64).exit_code == 0
    (record,) = records(recorded)
    assert record.text == "other-name.txt"
    assert (recorded / FILE).read_bytes() == first.replace(b'"text.txt"', b'"other-name.txt"')
    for more in (("--window", 32), ("--window", 64, "--packed"), ("--window", 64, "--reference", work / "source")):
        assert invoke("eval", recorded, "--text", work / "text.txt", *more).exit_code == 0
    assert [(r.window, r.packed, r.reference) for r in records(recorded)] == [
        (64, False, None),
        (32, False, None),
        (64, True, None),
        (64, False, "source"),
    ]


def test_tokenizer_of_another_model_is_recorded(copy: Callable[[str], Path], work: Path) -> None:
    folder = copy("q3")
    assert invoke("eval", folder, "--text", work / "text.txt", "--tokenizer", work / "source").exit_code == 0
    assert records(folder)[0].tokenizer == "source"


def test_records_of_another_result_are_ignored_and_dropped(recorded: Path, work: Path) -> None:
    manifest = recorded / "pqweights.json"
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    assert records(recorded) == ()
    assert invoke("eval", recorded, "--text", work / "text.txt", "--window", 32).exit_code == 0
    assert [r.window for r in records(recorded)] == [32]


def test_result_that_changed_during_evaluation_is_not_recorded(copy: Callable[[str], Path]) -> None:
    folder = copy("q3")
    place = find_place(folder)
    assert place is not None
    report = evaluate([folder], TEXT, window=64)
    (folder / "pqweights.json").write_bytes((folder / "pqweights.json").read_bytes() + b" ")
    with pytest.raises(OutputError, match="changed while it was evaluated"):
        write_record(place, make_record(report, report.rows[0], TEXT))
    assert not (folder / FILE).exists()


def test_foreign_checkpoints_and_links_get_no_record(work: Path, copy: Callable[[str], Path]) -> None:
    """A folder in the cache of the Hub consists of links to blobs."""
    assert find_place(work / "source") is None
    folder = copy("q3")
    (folder / "pqweights.json").rename(folder.parent / "blob")
    (folder / "pqweights.json").symlink_to(folder.parent / "blob")
    assert find_place(folder) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_is_noted(recorded: Path, work: Path) -> None:
    recorded.chmod(0o555)
    try:
        result = invoke("eval", recorded, "--text", work / "text.txt")
    finally:
        recorded.chmod(0o755)
    assert result.exit_code == 0
    assert "not recorded: " in result.stderr


def test_failed_write_is_noted(recorded: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pqweights.rewrite.results import evaluation_record as record

    def refuse(*arguments: object) -> None:
        raise OutputError(f"{recorded / FILE}: cannot be written (Read-only file system); choose another output folder")

    monkeypatch.setattr(record, "write_whole", refuse)
    result = invoke("eval", recorded, "--text", work / "text.txt", "--json")
    assert result.exit_code == 0
    (note,) = notes(result)
    assert note.startswith("not recorded: ") and "cannot be written" in note
    json.loads(result.stdout)


def test_reference_may_be_named_by_its_repository(work: Path) -> None:
    report = evaluate([work / "q3"], TEXT, reference=work / "source", name="/some/where/words.txt")
    record = make_record(report, report.rows[0], TEXT, reference="ORG/NAME")
    assert (record.reference, record.text) == ("ORG/NAME", "words.txt")


def test_figures_that_are_not_finite_are_recorded_as_null(work: Path, copy: Callable[[str], Path]) -> None:
    folder = copy("q3")
    report = evaluate([folder], TEXT, window=64)
    record = replace(make_record(report, report.rows[0], TEXT), perplexity=Figure(None, None))
    place = find_place(folder)
    assert place is not None
    write_record(place, record)
    assert records(folder) == (record,)


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data["evaluations"][0].pop(name)


def with_value(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data["evaluations"][0].update({name: value})


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.update(evaluation_version=3),
        lambda data: data.update(evaluation_version=True),
        lambda data: data.pop("evaluations"),
        lambda data: data.update(evaluations={}),
        lambda data: data.update(evaluations=[3]),
        lambda data: data.pop("manifest_sha256"),
        without("tokens"),
        with_value("more", 1),
        with_value("tokens", -1),
        with_value("tokens", True),
        with_value("tokens", 1.5),
        with_value("text", None),
        with_value("packed", 1),
        with_value("perplexity", None),
        with_value("perplexity", 3.0),
        with_value("perplexity", {"value": "3", "standard_error": None}),
        with_value("perplexity", {"value": 1}),
        with_value("perplexity", {"value": float("nan"), "standard_error": None}),
        with_value("perplexity", {"value": 10**400, "standard_error": None}),
        with_value("kl", {}),
        with_value("kl", []),
        with_value("text", "\ud800"),
    ],
)
def test_damaged_record_is_refused(damage: Callable[[dict[str, Any]], Any], recorded: Path, work: Path) -> None:
    data = json.loads((recorded / FILE).read_text())
    damage(data)
    (recorded / FILE).write_text(json.dumps(data))
    check_damage(recorded, work)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_file_that_is_not_a_record_is_refused(content: bytes, recorded: Path, work: Path) -> None:
    (recorded / FILE).write_bytes(content)
    check_damage(recorded, work)


def check_damage(folder: Path, work: Path) -> None:
    damaged = (folder / FILE).read_bytes()
    with pytest.raises(MasterError, match=r"^pqweights-eval\.json: damaged: ") as caught:
        records(folder)
    assert "\n" not in str(caught.value)
    assert str(caught.value) in verify(folder, threads=1).problems
    assert (folder / FILE).read_bytes() == damaged


def test_damaged_record_does_not_fail_the_evaluation(recorded: Path, work: Path) -> None:
    (recorded / FILE).write_text("{")
    result = invoke("eval", recorded, "--text", work / "text.txt", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["models"]
    (note,) = notes(result)
    assert note.startswith("not recorded: pqweights-eval.json: damaged")
    assert (recorded / FILE).read_text() == "{"


def test_verify_accepts_records_of_another_result(recorded: Path) -> None:
    data = json.loads((recorded / FILE).read_text()) | {"manifest_sha256": "0" * 64}
    (recorded / FILE).write_text(json.dumps(data))
    assert verify(recorded, threads=1).ok
    (recorded / "code").mkdir()
    shutil.copy(recorded / FILE, recorded / "code")
    assert verify(recorded, threads=1).problems == (f"code/{FILE}: is not in the manifest",)
