"""GGUF files as sources: the weights of the model that they were made from, under its names and in its order."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import gguf_cases
import language_models
import numpy as np
import pytest
from closeness import ALIKE, F32_SOLVED, approx, each_near, rounding
from commands import answer, done, refused
from export_decoders import values_of
from gguf_files import without_tokenizer, write_gguf, write_llama
from helpers import as_float32, read_all

from pqweights.checkpoint.gguf.sources import MODEL_TYPES
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import Checkpoint, open_local
from pqweights.common.dtypes import PACKED_DTYPES
from pqweights.kernels.gguf_encoding import BLOCK_TYPES
from pqweights.storage.sources import open_source

FAMILIES = (
    *("llama", "llama with biases, tied", "llama llama3", "mistral", "qwen2", "qwen2 moe", "qwen2 moe tied", "qwen3"),
    *("qwen3 moe", "gemma", "gemma2", "gemma3", "olmo2", "olmo3", "smollm3", "arcee", "seed_oss", "exaone4"),
    "ministral3",
)


def by_name(checkpoint: Checkpoint) -> dict[str, LogicalTensor]:
    return {tensor.name: tensor for tensor in checkpoint.tensors}


def source_of(model: Path, folder: Path, dtype: str) -> Path:
    """The folder of a GGUF file of a model, with what a user puts beside it."""
    folder.mkdir()
    shutil.move(write_gguf(model, dtype), folder / "model.gguf")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (model / name).exists():
            shutil.copy(model / name, folder)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 264}
    return language_models.with_tokenizer(write_llama(tmp_path / "llama", rows=264, sizes=sizes))


def assert_any_range_is_read(tensor: LogicalTensor) -> None:
    whole, count = values_of(tensor).reshape(-1), element_count(tensor)
    generator = np.random.default_rng(1)
    for _ in range(5):
        start = int(generator.integers(count))
        length = int(generator.integers(1, count - start + 1))
        raw = np.empty(4 * length, dtype=np.uint8)
        tensor.read(start, length, "F32", raw)
        assert np.array_equal(raw.view(np.float32), whole[start : start + length])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_gives_back_the_model_that_it_was_made_from(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    gguf_cases.saved(gguf_cases.CASES[name], model)
    original = by_name(open_local(model))
    source = open_source(source_of(model, tmp_path / "src", "F32"))
    found = by_name(source)
    tied = json.loads((model / "config.json").read_text()).get("tie_word_embeddings")
    assert found.keys() == original.keys() - ({"lm_head.weight"} if tied else set())
    assert json.loads((model / "config.json").read_text())["model_type"] in MODEL_TYPES
    for tensor in source.tensors:
        expected = values_of(original[tensor.name])
        assert tensor.shape == expected.shape
        # Gains of which 1 was taken in float32 are rounded by it.
        assert each_near(values_of(tensor), expected, 0, rounding("F32", 2) if "gemma" in name else 0)
        assert_any_range_is_read(tensor)


@pytest.mark.parametrize(("high", "length"), [(3.0, 4096), (8.0, 2048)])
def test_bounds_of_llama3_that_nobody_published_are_found_in_the_factors(
    high: float, length: int, tmp_path: Path
) -> None:
    """The file has the factors alone; of the bounds and the length, only ratios matter."""
    sizes = {"hidden_size": 256, "intermediate_size": 96, "vocab_size": 264, "num_attention_heads": 2}
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": high, "original_max_position_embeddings": length}
    scaling = {"rope_type": "llama3", "factor": 4.0, **bounds}
    config = {"rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 4 * length}
    model = language_models.with_tokenizer(write_llama(tmp_path / "llama", rows=264, sizes=sizes, config=config))
    (tmp_path / "alone").mkdir()
    file = shutil.move(write_gguf(model, "F32"), tmp_path / "alone" / "model.gguf")
    found = open_source(file).config
    assert found is not None and found["rope_scaling"].keys() == scaling.keys()
    assert {key: found["rope_scaling"][key] for key in bounds} == approx(bounds, F32_SOLVED)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "MXFP4", "IQ4_NL"])
def test_the_file_of_a_source_has_the_weights_of_the_file(kind: str, llama: Path, tmp_path: Path) -> None:
    folder = source_of(llama, tmp_path / "src", kind)
    source = open_source(folder / "model.gguf")
    assert {tensor.dtype for tensor in source.tensors} == {kind, "F32"}
    again = {tensor.name: values_of(tensor) for tensor in without_tokenizer(source).tensors}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}
    assert again.keys() == stored.keys()
    for name, tensor in stored.items():
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(again[name].shape)
        assert np.array_equal(again[name], expected.astype(np.float32))
    for tensor in source.tensors:
        assert_any_range_is_read(tensor)


def test_every_type_of_blocks_has_bits() -> None:
    assert BLOCK_TYPES.keys() <= PACKED_DTYPES.keys()
    assert all(PACKED_DTYPES[name] == (kind.bits, "GGUF") for name, kind in BLOCK_TYPES.items() if "FP4" not in name)


def test_an_export_is_a_source(llama: Path, tmp_path: Path) -> None:
    """From safetensors to GGUF in parts and back: a master of the same codes, within the error of 8 bits."""
    master, out, again = tmp_path / "master", tmp_path / "gguf", tmp_path / "again"
    done("quantize", llama, master, "--lossless")
    done("export", master, out, "--target", "gguf", "--type", "Q8_0", "--max-shard-size", "100KB")
    assert len(list(out.glob("*.gguf"))) > 1
    shutil.copy(llama / "config.json", out)
    report = answer("plan", out)
    assert {tensor["dtype"] for tensor in report["tensors"]} == {"Q8_0", "F32"}
    done("quantize", out, again, "--recipe", "q8")
    done("verify", again)
    original = by_name(open_local(llama))
    for tensor in open_local(again).tensors:
        error = values_of(tensor) - values_of(original[tensor.name])
        assert np.square(error).sum() < F32_SOLVED * np.square(values_of(original[tensor.name])).sum()


def test_of_a_file_alone_its_configuration_is_read_as_well(llama: Path, tmp_path: Path) -> None:
    folder = source_of(llama, tmp_path / "src", "Q4_0")
    (folder / "other.gguf").write_bytes(b"another model")
    result = done("quantize", folder / "model.gguf", tmp_path / "out")
    assert "only this file is read" not in result.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} < names
    assert not any(name.endswith(".gguf") for name in names)
    assert "model.gguf, other.gguf" in refused("plan", folder)


def with_config(**changed: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changed))

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (with_config(model_type="mamba"), "mamba"),
        (with_config(model_type="qwen2"), "qwen2 'llama'"),
        (with_config(model_type="unheard"), "unheard"),
        (with_config(intermediate_size=97), "97"),
        (with_config(num_hidden_layers=1), "blk.1."),
        (with_config(num_hidden_layers=3), "blk.2."),
    ],
)
def test_what_is_not_known_is_refused(change: Any, named: str, llama: Path, tmp_path: Path) -> None:
    folder = source_of(llama, tmp_path / "src", "F16")
    change(folder)
    line = refused("plan", folder)
    assert all(name in line for name in named.split())


def test_a_file_is_calibrated_and_exported_from_as_the_model(llama: Path, tmp_path: Path) -> None:
    """A file in F32 has the weights of the model, so that every result has the same bytes."""
    with_config(vocab_size=264)(llama)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number % 97}" for number in range(4096)))
    calibrated = ("--recipe", "t4", "--calibrate", text, "--calibration-tokens", 2048)
    exported = ("--target", "gguf", "--type", "q4_0", "--name", "tiny")
    results = {}
    alone = tmp_path / "alone" / "m.gguf"
    alone.parent.mkdir()
    for source in (llama, source_of(llama, tmp_path / "src", "F32"), alone):
        if source == alone:
            shutil.copy(tmp_path / "src" / "model.gguf", alone)
        master, out = (tmp_path / f"{part}-{source.name}" for part in ("master", "out"))
        done("quantize", source, master, *calibrated)
        done("export", source, out, *exported)
        results[source.name] = (read_all(master), next(out.glob("*.gguf")).read_bytes())
    (weights, file), (others, other_file), (of_alone, file_of_alone) = results.values()
    assert weights.keys() == others.keys() == of_alone.keys() and file == other_file
    for name in weights:  # norms are in F32 in the file
        assert np.array_equal(as_float32(weights[name]), as_float32(others[name])), name
        assert np.array_equal(as_float32(weights[name]), as_float32(of_alone[name])), name
    assert len(file) == approx(len(file_of_alone), ALIKE)  # its tokenizer is stated otherwise


def test_lossless_names_gguf(llama: Path, tmp_path: Path) -> None:
    folder = source_of(llama, tmp_path / "src", "Q8_0")
    assert "safetensors" in refused("quantize", folder, tmp_path / "out", "--lossless")
