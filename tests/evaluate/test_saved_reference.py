"""References in .pqref files: what is measured with them and what they refuse; a run computes a reference once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import evaluate
from closeness import ESTIMATED, PARTS_OF_NAT, SAMPLE, STATED, approx
from commands import invoke, raises
from evaluated import TEXT, evaluated, model_folder
from safetensors.numpy import load_file, save_file

from pqweights.errors import EvaluationError, SourceError
from pqweights.results.evaluation_record import read_records, result_folder_of
from pqweights.runtime import evaluation
from pqweights.runtime.models import Model, open_model
from pqweights.runtime.protocol import Scores, TextWindows, compare
from pqweights.runtime.saved_reference import METADATA_KEY, Facts, ReferenceWriter, SavedReference

WINDOWS = TextWindows(size=400, stride=400, score_first=True)


def noisy_model(vocabulary: int, noise: float) -> Model:
    """A model whose next tokens are distributed as those of language models are: by Zipf's law, in some order."""
    ranks = np.log(np.arange(1, vocabulary + 1))

    def logits(ids: Any, last: int) -> Any:
        rows = []
        for place in range(len(ids) - last, len(ids)):
            order = np.random.default_rng(place).permutation(vocabulary)
            change = np.random.default_rng((1, place)).standard_normal(vocabulary)
            rows.append(-1.2 * ranks[order] + noise * change)
        return np.array(rows, dtype=np.float32)

    return Model(runtime="a table", dtype="float32", logits=logits)


def saved(path: Path, reference: Model, ids: Any, vocabulary: int) -> SavedReference:
    facts = Facts(
        name="reference",
        fingerprint=None,
        runtime="a table",
        dtype="float32",
        device="cpu",
        bytes=1,
        parameters=None,
        text="words",
        text_sha256="0" * 64,
        window=WINDOWS.size,
        stride=WINDOWS.stride,
        score_first=True,
        bos=None,
        vocabulary=vocabulary,
    )
    writer = ReferenceWriter(path, facts, text="words", ids=ids, scored=len(ids) - 1)
    compare(reference, None, ids=ids, windows=WINDOWS, save=writer.add)
    writer.finish()
    writer.close()
    return SavedReference(path)


@pytest.mark.parametrize("noise", [0.02, 0.5])
def test_divergence_is_estimated_from_a_part_of_a_large_vocabulary(noise, tmp_path):
    vocabulary = 20_000
    ids = np.random.default_rng(5).integers(0, vocabulary, 400)
    reference, model = noisy_model(vocabulary, 0), noisy_model(vocabulary, noise)
    exact = compare(model, reference, ids=ids, windows=WINDOWS)
    kept = saved(tmp_path / "r.pqref", reference, ids, vocabulary)
    found = compare(model, kept, ids=ids, windows=WINDOWS)
    assert found.divergence.mean.value == approx(exact.divergence.mean.value, relative=ESTIMATED)
    assert found.divergence.top1 == exact.divergence.top1
    assert (found.losses, found.reference_losses) == (exact.losses, exact.reference_losses)
    assert kept.path.stat().st_size < len(ids) * 1100 + 2000


def test_all_of_a_small_vocabulary_is_saved(tmp_path):
    ids = np.random.default_rng(5).integers(0, 100, 400)
    reference, model = noisy_model(100, 0), noisy_model(100, 0.3)
    exact = compare(model, reference, ids=ids, windows=WINDOWS)
    found = compare(model, saved(tmp_path / "r.pqref", reference, ids, 100), ids=ids, windows=WINDOWS)
    assert found.divergence.mean.value == approx(exact.divergence.mean.value, relative=PARTS_OF_NAT)
    assert found.divergence.maximum == approx(exact.divergence.maximum, relative=PARTS_OF_NAT)


def test_impossible_tokens_of_the_reference_cost_nothing(tmp_path):
    ids = np.random.default_rng(5).integers(0, 50, 400)

    def without_odd_ones(ids: Any, last: int) -> Any:
        logits = noisy_model(100, 0).logits(ids, last)
        logits[:, 51::2] = -np.inf
        return logits

    reference = Model(runtime="a table", dtype="float32", logits=without_odd_ones)
    kept = saved(tmp_path / "r.pqref", reference, ids, 100)
    found = compare(reference, kept, ids=ids, windows=WINDOWS)
    assert found.divergence.mean.value == approx(0, absolute=STATED)
    scores = compare(noisy_model(100, 0), kept, ids=ids, windows=WINDOWS)
    exact = compare(noisy_model(100, 0), reference, ids=ids, windows=WINDOWS)
    assert scores.divergence.mean.value == approx(exact.divergence.mean.value, relative=PARTS_OF_NAT)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `evaluated` has, and r.pqref of source on text.txt."""
    folder = evaluated(tmp_path_factory, "saved")
    options = ("--text", folder / "text.txt", "--max-tokens", 280, "--score-first")
    result = invoke("eval", folder / "source", *options, "--save-reference", folder / "r.pqref")
    assert result.exit_code == 0, result.stderr
    return folder


def scores(*models: Path, **options: Any) -> list[Scores]:
    return [row.scores for row in evaluate(models, options.pop("text", None), **options).rows]


def test_a_model_is_measured_without_the_original(work, tmp_path):
    (exact,) = scores(work / "q3", text=TEXT, reference=work / "source", max_tokens=280, score_first=True)
    master = Path(shutil.copytree(work / "q3", tmp_path / "q3"))
    result = invoke("eval", master, "--reference", work / "r.pqref", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["settings"]["text"], found["settings"]["tokens"]) == ("text.txt", 280)
    assert found["reference"]["model"] == str(work / "r.pqref")
    (row,) = found["models"]
    assert row["kl"]["mean"]["value"] == approx(exact.divergence.mean.value, relative=SAMPLE)
    assert row["top1_agreement"]["value"] == exact.divergence.top1.value
    assert row["perplexity"]["value"] == exact.perplexity.value
    assert row["perplexity_change"]["value"] == approx(exact.perplexity_change.value)
    (record,) = read_records(*result_folder_of(master)[:2])
    assert (record.reference, record.reference_saved, record.text) == ("source", True, "text.txt")
    assert record.text_sha256 == json.loads(metadata(work / "r.pqref")[METADATA_KEY])["text_sha256"]


def metadata(path: Path) -> Any:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        return file.metadata()


def test_the_reference_of_several_models_is_saved_while_they_are_compared(work, tmp_path):
    options: dict[str, Any] = {"text": TEXT, "reference": work / "source", "max_tokens": 280, "score_first": True}
    scores(work / "q3", work / "bf16", save_reference=tmp_path / "r.pqref", **options)
    ours, theirs = (load_file(path / "r.pqref") for path in (tmp_path, work))
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name])


def test_other_texts_windows_tokens_and_models_are_refused_by_name(work, tmp_path):
    reference = work / "r.pqref"
    for named, options in (
        ("r.pqref text.txt", {"text": TEXT + "."}),
        ("`window` 64 r.pqref", {"window": 64}),
        ("`stride` 64 r.pqref", {"stride": 64}),
        ("`max_tokens` 200 r.pqref", {"max_tokens": 200}),
        ("`save_reference` `reference`", {"save_reference": tmp_path / "r.pqref"}),
    ):
        with raises(EvaluationError, *named.split()):
            scores(work / "q3", reference=reference, **options)
    assert scores(work / "q3", reference=reference, text=TEXT, window=128, max_tokens=280)
    other = Path(shutil.copytree(work / "source", tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["w1"], vocabulary["w2"] = vocabulary["w2"], vocabulary["w1"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with raises(EvaluationError, "other", "tokenizer", "r.pqref"):
        scores(other, reference=reference)
    model_folder(tmp_path / "larger", vocab_size=640)
    with raises(EvaluationError, "larger", 640, 512):
        scores(tmp_path / "larger", reference=reference)


def test_what_cannot_be_saved_is_refused_before_a_model_is_loaded(work, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "open_model", None)
    for named, options in (
        ("r.bin .pqref", {"save_reference": tmp_path / "r.bin"}),
        ("none/r.pqref folder", {"save_reference": tmp_path / "none/r.pqref"}),
        ("`kv_cache`", {"save_reference": tmp_path / "r.pqref", "kv_caches": ("none",)}),
    ):
        with raises(EvaluationError, *named.split()):
            scores(work / "q3", text=TEXT, **options)
    with raises(EvaluationError, "`save_reference`", "2 models"):
        scores(work / "q3", work / "bf16", text=TEXT, save_reference=tmp_path / "r.pqref")


def damaged(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    tensors, facts = load_file(path), json.loads(metadata(path)[METADATA_KEY])
    change(tensors, facts)
    save_file(tensors, path, {METADATA_KEY: json.dumps(facts)})


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, facts: facts.pop("window"),
        lambda tensors, facts: facts.update(version=2),
        lambda tensors, facts: tensors.pop("rest"),
        lambda tensors, facts: tensors.update(rest=tensors["rest"][1:]),
        lambda tensors, facts: tensors.update(top_logs=tensors["top_logs"].astype(np.float32)),
        lambda tensors, facts: tensors["top_tokens"].fill(600),
        lambda tensors, facts: tensors.update(
            {name: t[:-9] for name, t in tensors.items() if len(t) == len(tensors["rest"])}
        ),
    ],
)
def test_damaged_files_are_refused(change, work, tmp_path):
    path = Path(shutil.copy(work / "r.pqref", tmp_path))
    damaged(path, change)
    with raises(EvaluationError, "r.pqref"):
        scores(work / "q3", reference=path)


def test_files_of_others_are_refused(work, tmp_path):
    with raises(EvaluationError, "none.pqref"):
        scores(work / "q3", reference=tmp_path / "none.pqref")
    (tmp_path / "cut.pqref").write_bytes((work / "r.pqref").read_bytes()[:-1])
    with raises(SourceError, "cut.pqref"):
        scores(work / "q3", reference=tmp_path / "cut.pqref")
    shutil.copy(work / "q3/model-00001-of-00001.safetensors", tmp_path / "weights.pqref")
    with raises(EvaluationError, "weights.pqref"):
        scores(work / "q3", reference=tmp_path / "weights.pqref")


def test_nothing_is_left_of_a_reference_that_was_not_finished(work, tmp_path, monkeypatch):
    monkeypatch.setattr(ReferenceWriter, "add", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scores(work / "source", text=TEXT, save_reference=tmp_path / "r.pqref")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("room", "times"), [(0, 1), (1 << 60, 3)])
def test_a_reference_is_computed_once_for_all_models_if_there_is_room(room, times, work, monkeypatch):
    computed: list[bytes] = []

    def counting(path: Path, **options: Any) -> Model:
        model = open_model(path, **options)
        if path != work / "source":
            return model

        def logits(ids: Any, last: int) -> Any:
            computed.append(ids.tobytes())
            return model.logits(ids, last)

        return Model(runtime=model.runtime, dtype=model.dtype, logits=logits, net=model.net)

    alone = [scores(path, text=TEXT, reference=work / "source") for path in (work / "q3", work / "bf16")]
    monkeypatch.setattr(evaluation, "open_model", counting)
    monkeypatch.setattr("pqweights.runtime.evaluation.ROOM_LEFT_BYTES", room)
    together = scores(work / "q3", work / "bf16", work / "q3", text=TEXT, reference=work / "source")
    assert together == [alone[0][0], alone[1][0], alone[0][0]]
    assert len(computed) == times * len(set(computed))
