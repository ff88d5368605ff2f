"""Plain checkpoints that were decoded from few bits: formats with the same grid have the very numbers again.

Each source is an export, decoded by pqweights to BF16 or another dtype, so that nothing but its values tells its codes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import families
import gguf
import language_models
import numpy as np
import numpy.typing as npt
import pytest
import torch
from commands import done
from helpers import as_float32, read_all
from safetensors.torch import load_file, save_file

from pqweights.calibrate import sample
from pqweights.convert.manifest import read_manifest
from pqweights.convert.records import TensorRecord

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q3_K", "Q4_K", "Q6_K")


@pytest.fixture(scope="module")
def model(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copied = shutil.copytree(families.model(base, "llama"), tmp_path_factory.mktemp("model") / "model")
    return language_models.with_tokenizer(Path(copied))


def as_gguf(source: Path, out: Path, kind: str) -> Path:
    done("export", source, out, "--target", "gguf", "--type", "Q8_0", "--set", f"*={kind}")
    return next(out.glob("*.gguf"))


def decoded(source: Path, out: Path) -> Path:
    """A folder of the values of a source in BF16."""
    done("export", source, out, "--target", "bf16")
    return out


def blocks_of(file: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The values of the matrices of a GGUF file, rounded to BF16, by the gguf package."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors if tensor.data.dtype == np.uint8}
    values = {name: gguf.quants.dequantize(of.data, of.tensor_type) for name, of in tensors.items()}
    return {name: torch.tensor(of).to(torch.bfloat16).float().numpy() for name, of in values.items()}


def records_of(out: Path) -> list[TensorRecord]:
    manifest = read_manifest(out)
    integers = {tensor.name for tensor in manifest.tensors if tensor.action == "integer"}
    return [record for record in manifest.records if record.name in integers]


@pytest.mark.parametrize("kind", TYPES)
def test_the_type_of_the_codes_has_the_very_numbers(kind: str, model: Path, tmp_path: Path) -> None:
    published = as_gguf(model, tmp_path / "published", kind)
    source = decoded(published, tmp_path / "source")
    again = blocks_of(as_gguf(source, tmp_path / "again", kind))
    expected = blocks_of(published)
    assert again.keys() == expected.keys()
    assert all(np.array_equal(again[name], expected[name]) for name in expected)
    records = records_of(tmp_path / "again")
    assert len(records) == len(expected)
    assert {(record.relative_mse, str(record.rounding)) for record in records} == {(0, "{'carried': True}")}


def test_the_same_type_of_another_file_has_the_very_numbers(model: Path, tmp_path: Path) -> None:
    """Blocks of a GGUF file are decoded, too, and the rows of some of its matrices are in another order."""
    published = as_gguf(model, tmp_path / "published", "Q4_K")
    again = as_gguf(published, tmp_path / "again", "Q4_K")
    expected = blocks_of(published)
    assert all(np.array_equal(values, expected[name]) for name, values in blocks_of(again).items())
    assert {str(record.rounding) for record in records_of(tmp_path / "again")} == {"{'carried': True}"}


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("vllm", ("--format", "w4a16", "--group-size", "32")),
        ("vllm", ("--format", "w8a16", "--group-size", "128")),
        ("vllm", ("--format", "w4a16-asym", "--group-size", "64")),
        ("mlx", ("--format", "q4", "--group-size", "32")),
    ],
)
def test_groups_of_integers_are_found_again(target: str, options: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    done("export", model, tmp_path / "published", "--target", target, *options)
    source = decoded(tmp_path / "published", tmp_path / "source")
    done("export", source, tmp_path / "again", "--target", target, *options)
    records = records_of(tmp_path / "again")
    assert {(record.relative_mse, str(record.rounding)) for record in records} == {(0, "{'carried': True}")}
    back = decoded(tmp_path / "again", tmp_path / "back")
    expected, found = read_all(source), read_all(back)
    assert all(np.array_equal(as_float32(found[name]), as_float32(of)) for name, of in expected.items())


def test_what_is_not_on_the_grid_is_rounded_beside_what_is(model: Path, tmp_path: Path) -> None:
    """One weight that is changed costs its tensor the word, and its block alone an error."""
    published = as_gguf(model, tmp_path / "published", "Q4_1")
    source = decoded(published, tmp_path / "source")
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 40] = tensors[name][3, 40] * 1.25 + 0.011
    save_file(tensors, file, {"format": "pt"})
    again = blocks_of(as_gguf(source, tmp_path / "again", "Q4_1"))["blk.0.ffn_up.weight"]
    expected = blocks_of(published)["blk.0.ffn_up.weight"]
    differs = again != expected
    assert differs[3, 32:64].any() and not np.delete(differs.reshape(-1, 32), 3 * 8 + 1, axis=0).any()
    without = [record.name for record in records_of(tmp_path / "again") if record.rounding is None]
    assert without == ["blk.0.ffn_up.weight"]


def test_a_master_without_loss_has_its_codes_found(model: Path, tmp_path: Path) -> None:
    published = as_gguf(model, tmp_path / "published", "Q4_0")
    source = decoded(published, tmp_path / "source")
    done("quantize", source, tmp_path / "master", "--lossless")
    again = blocks_of(as_gguf(tmp_path / "master", tmp_path / "again", "Q4_0"))
    expected = blocks_of(published)
    assert all(np.array_equal(again[name], expected[name]) for name in expected)
    assert {str(record.rounding) for record in records_of(tmp_path / "again")} == {"{'carried': True}"}


@pytest.mark.parametrize(
    ("target", "options"), [("gguf", ("--type", "Q4_1")), ("vllm", ("--format", "w4a16", "--group-size", "32"))]
)
def test_inputs_of_a_text_do_not_change_what_is_exact(
    target: str, options: tuple[str, ...], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "WINDOW", 64)
    done("export", model, tmp_path / "published", "--target", target, *options)
    source = decoded(tmp_path / "published", tmp_path / "source")
    (tmp_path / "text.txt").write_text("abc ab c " * 400)
    about = ("--calibrate", tmp_path / "text.txt", "--calibration-tokens", 2048)
    done("export", source, tmp_path / "again", "--target", target, *options, *about)
    exact = [record for record in records_of(tmp_path / "again") if record.relative_mse == 0]
    assert len(exact) >= 14 and {str(record.rounding) for record in exact} == {"{'carried': True}"}


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_plan_says_on_which_grid_weights_lie(kind: str, model: Path, tmp_path: Path) -> None:
    source = decoded(as_gguf(model, tmp_path / "published", kind), tmp_path / "source")
    assert json.loads(done("plan", source, "--json").stdout)["grids"] == {kind: 16}
    assert f"of 16 weights 16 on that of {kind}" in " ".join(done("plan", source).stdout.split())
    assert "grids" not in json.loads(done("plan", model, "--json").stdout)
