"""BOS: the first token of each window is the one that the tokenizer puts before a text, if it puts one; everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from calls import evaluate, quantize
from closeness import assert_near, assert_within
from commands import done, refused
from language_models import BEGIN, babbler
from tiny_gguf import llama_gguf

from pqweights.calibrate import sample
from pqweights.checkpoint.source import open_local
from pqweights.planning.recipe import load_recipe
from pqweights.results.evaluation_record import read_records
from pqweights.runtime.texts import encode, load_tokenizer, token_before_texts, tokenize

TEXT = " ".join(f"word{number}" for number in range(250))
SHORT = {"window": 32, "stride": 16, "max_tokens": 80}
COMMAND = ("--window", 32, "--stride", 16, "--max-tokens", 80)


def begin_texts(folder: Path) -> Path:
    """Let a tokenizer put <s> before texts, as those of Llama and Gemma do."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes())
    begin, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BEGIN], "tokens": ["<s>"]}},
    }
    path.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same model twice, of which that in bos begins texts with <s>, and text.txt."""
    folder = tmp_path_factory.mktemp("bos")
    babbler(folder / "plain")
    begin_texts(babbler(folder / "bos"))
    quantize(folder / "bos", folder / "master", load_recipe("q3"), threads=2)
    (folder / "text.txt").write_text(TEXT)
    return folder


def naive_losses(folder: Path, first: int | None) -> list[float]:
    """The loss of each window, computed by transformers itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(tokenize(folder, TEXT)[:80])
    losses = []
    for start in range(0, 49, 16):
        window = ids[start : start + 32].clone()
        window[0] = window[0] if first is None else first
        with torch.no_grad():
            likely = torch.log_softmax(model(window[None]).logits[0].double(), dim=-1)
        losses.append(-float(sum(likely[at - 1, window[at]] for at in range(16, 32))))
    return losses


@pytest.mark.parametrize(
    ("name", "options", "first"), [("bos", {}, BEGIN), ("bos", {"no_bos": True}, None), ("plain", {}, None)]
)
def test_windows_begin_as_the_tokenizer_begins_texts(name, options, first, work):
    report = evaluate([work / name], TEXT, **SHORT, **options)
    found = [loss.total for loss in report.rows[0].scores.losses]
    assert_near(found, naive_losses(work / name, first), "torch")
    assert report.settings.bos == report.to_json()["settings"]["bos"] == (first is not None)
    assert report.settings.scored_tokens == 64


def test_models_of_which_one_begins_texts_are_not_compared(work):
    line = refused("eval", work / "plain", "--reference", work / "bos", "--text", work / "text.txt", *COMMAND)
    assert all(str(named) in line for named in (work / "plain", work / "bos", BEGIN, "--no-bos"))
    done("eval", work / "plain", "--reference", work / "bos", "--text", work / "text.txt", *COMMAND, "--no-bos")


def test_llama_cpp_reads_the_same_windows(work, tmp_path):
    for name in ("bos", "plain"):
        llama_gguf(work / name, tmp_path / f"{name}.gguf", begins=name == "bos")
    assert token_before_texts(load_tokenizer(tmp_path / "bos.gguf")) == BEGIN
    found = evaluate([tmp_path / "bos.gguf"], TEXT, **SHORT, reference=work / "bos")
    assert found.settings.bos
    divergence = found.rows[0].scores.divergence
    assert divergence is not None
    assert_within(divergence.mean.value, "llama.cpp, KL")
    assert not evaluate([tmp_path / "plain.gguf"], TEXT, **SHORT).settings.bos


def test_caches_read_the_same_windows(work):
    own, cached = evaluate([work / "bos"], TEXT, kv_caches=("none",), **SHORT).rows
    assert own.scores.losses == evaluate([work / "bos"], TEXT, **SHORT).rows[0].scores.losses
    assert_near(cached.scores.perplexity.value, own.scores.perplexity.value, "torch, perplexity")


def test_records_say_bos_and_do_not_replace_those_without(work, tmp_path):
    master = Path(shutil.copytree(work / "master", tmp_path / "master"))
    command = ("eval", master, "--text", work / "text.txt", "--window", 32, "--max-tokens", 96)
    file = master / "pqweights-eval.json"
    for extra, bos in ((("--no-bos",), False), ((), True)):
        assert json.loads(done(*command, *extra, "--json").stdout)["settings"]["bos"] == bos
    data = json.loads(file.read_bytes())
    assert [entry.get("bos") for entry in data["evaluations"]] == [None, True]
    assert [record.bos for record in read_records(master, data["manifest_sha256"])] == [False, True]
    assert "stride 8, each begins with BOS, " in " ".join(done(*command, "--no-record").stdout.split())


def test_windows_of_a_calibration_begin_with_bos_where_the_tokenizer_puts_it(work, tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "WINDOW", 32)
    monkeypatch.setattr(sample, "FEWEST_TOKENS", 512)
    found = {}
    for name in ("bos", "plain"):
        (folder := tmp_path / name).mkdir()
        wanted = {"source": work / name, "checkpoint": open_local(work / name), "text": str(work / "text.txt")}
        found[name] = sample.SampleOf(**wanted, tokens=512).ids(folder, 1).numpy()
    assert found["bos"].shape == found["plain"].shape == (16, 32)
    assert (found["bos"][:, 0] == BEGIN).all() and np.array_equal(found["bos"][:, 1:], found["plain"][:, 1:])


def test_only_the_token_that_the_tokenizer_adds_is_bos(work):
    ids, bos, _ = encode(work / "bos", TEXT, 20, bos=True)
    assert bos == BEGIN and np.array_equal(ids, tokenize(work / "plain", TEXT, 20))
    assert encode(work / "bos", TEXT, 20, bos=False).bos is encode(work / "plain", TEXT, 20, bos=True).bos is None
