"""Samples in files: what is written is read, by models with the same tokenizer alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from commands import raises
from helpers import folder_bytes
from safetensors.numpy import save_file

import pqweights
from pqweights.calibrate import sample
from pqweights.calibrate.sample import read_sample, write_sample
from pqweights.calibrate.sampled_inputs import inputs_of
from pqweights.common.options import Options
from pqweights.errors import EvaluationError
from pqweights.storage import open_store
from pqweights.storage.sources import open_source

IDS = np.random.default_rng(1).integers(0, 500, (40, 64))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.model(tmp_path_factory.getbasetemp(), "llama")


@pytest.fixture
def kept(model: Path, tmp_path: Path) -> Path:
    write_sample(tmp_path / "sample.safetensors", IDS, model)
    return tmp_path / "sample.safetensors"


def test_what_is_written_is_read(kept: Path, model: Path) -> None:
    assert np.array_equal(read_sample(kept, model), IDS)


def test_a_sample_of_another_tokenizer_is_refused(kept: Path, model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    (other / "tokenizer_config.json").write_text("{}")
    assert np.array_equal(read_sample(kept, other), IDS)
    (other / "tokenizer.json").write_text((model / "tokenizer.json").read_text().replace("w17", "w017"))
    with raises(EvaluationError, "tokenizer"):
        read_sample(kept, other)


@pytest.mark.parametrize(
    "ids",
    [IDS.astype(np.int32), IDS[0], IDS[:0], IDS - 1, IDS + 10_000, np.tile(IDS, 1000)],
    ids=["32 bits", "one window", "none", "negative", "beyond the vocabulary", "beyond the context"],
)
def test_tokens_that_the_model_cannot_read_are_refused(ids: np.ndarray, model: Path, tmp_path: Path) -> None:
    write_sample(tmp_path / "sample.safetensors", ids, model)
    with pytest.raises(EvaluationError):
        read_sample(tmp_path / "sample.safetensors", model)


def test_other_files_are_refused(model: Path, tmp_path: Path) -> None:
    save_file({"x": IDS}, tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    for name in ("other", "broken", "missing"):
        with raises(EvaluationError, name):
            pqweights.quantize(model, tmp_path / "out", "t4", calibrate=tmp_path / f"{name}.safetensors")


def test_too_few_tokens_are_refused(model: Path, tmp_path: Path) -> None:
    write_sample(tmp_path / "few.safetensors", IDS[:3], model)
    with raises(EvaluationError, "2048"):
        pqweights.quantize(model, tmp_path / "out", "t4", calibrate=tmp_path / "few.safetensors")


def test_exports_keep_and_take_samples(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "WINDOW", 64)
    kept, results = tmp_path / "sample.safetensors", (tmp_path / "drawn", tmp_path / "given")
    options = {"target": "vllm", "rounding": "gptq", "calibration_tokens": 2048}
    pqweights.export(model, results[0], calibrate="self", save_sample=kept, **options)
    assert read_sample(kept, model).shape == (32, 64)
    pqweights.export(model, results[1], calibrate=kept, **options)
    drawn, given = map(folder_bytes, results)
    assert {name for name in drawn if drawn[name] != given[name]} == {"pqweights.json"}


def test_exports_state_how_many_tokens_a_sample_has(kept: Path, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w17 " * 3000)
    for given, expected in ((kept, 2560), (text, 2816), ("self", 4096)):
        options = Options(calibrate=given, calibration_tokens=4096)
        with inputs_of(model, open_source(model), open_store(tmp_path / "out"), options, 1) as inputs:
            assert inputs.about["tokens"] == expected


@pytest.mark.parametrize(
    "options",
    [{"recipe": "t4", "calibrate": "self"}, {"target_bpw": 4, "calibrate": "self"}, {"awq": "self"}],
    ids=["codes", "sensitivities", "scales"],
)
def test_a_finished_result_keeps_its_sample_when_asked(
    options: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "WINDOW", 64)
    out, first, again = tmp_path / "out", tmp_path / "first.safetensors", tmp_path / "again.safetensors"
    for path in (first, again):
        pqweights.quantize(model, out, calibration_tokens=2048, save_sample=path, **options)
    assert again.read_bytes() == first.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "first.safetensors", "again.safetensors"}
