"""Importance matrices as files: read in both forms, written as llama.cpp's quantizer takes them, refused by name."""

from __future__ import annotations

import ctypes
import json
import math
import struct
from pathlib import Path
from typing import Any

import families
import gguf
import language_models
import numpy as np
import pytest
from closeness import ALIKE, approx
from commands import done, refused

from pqweights.checkpoint.gguf.model import model_tensors
from pqweights.checkpoint.source import open_local
from pqweights.convert.manifest import read_manifest
from pqweights.runtime import llama_library

TOKENS = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imatrix") / "model"
    return language_models.with_tokenizer(families.build(families.FAMILIES["llama"], folder))


def importances(folder: Path) -> dict[str, np.ndarray]:
    """Mean squares for each matrix of a model, by llama.cpp's names: [matrices, inputs], some channels large."""
    rng = np.random.default_rng(3)
    tensors = [of for of in model_tensors(open_local(folder)) if of.name.endswith(".weight")]
    tensors = [of for of in tensors if len(of.shape) > 1]
    shapes = {tensor.name: (math.prod(tensor.shape[:-2]), tensor.shape[-1]) for tensor in tensors}
    return {name: np.exp(3 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, squares: dict[str, np.ndarray]) -> Path:
    """Write what llama.cpp's imatrix tool writes, with the gguf package."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    for name, values in squares.items():
        writer.add_tensor(f"{name}.in_sum2", values * np.float32(TOKENS))
        writer.add_tensor(f"{name}.counts", np.full((len(values), 1), TOKENS, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_list(path: Path, squares: dict[str, np.ndarray]) -> Path:
    """Write the older form."""
    data = struct.pack("<i", len(squares))
    for name, values in squares.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 8, values.size)
        data += (values * np.float32(8)).tobytes()
    path.write_bytes(data + struct.pack("<ii", 8, 4) + b"text")
    return path


def exported(model: Path, out: Path, *options: Any, kind: str = "q4_k_s") -> dict[str, Any]:
    shown = done("export", model, out, "-t", "gguf", "--type", kind, "--name", "m", *options, "--json").stdout
    result: dict[str, Any] = json.loads(shown)
    return result


def file_of(out: Path) -> bytes:
    return next(out.glob("*.gguf")).read_bytes()


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_both_forms_weigh_all_matrices_alike(family: str, tmp_path: Path) -> None:
    """Stacks of experts have importances of each expert, whether the checkpoint has stacks or single experts."""
    model = language_models.with_tokenizer(families.build(families.FAMILIES[family], tmp_path / "model"))
    squares = importances(model)
    found = exported(model, tmp_path / "new", "--imatrix", write_gguf(tmp_path / "imatrix.gguf", squares))
    exported(model, tmp_path / "old", "--imatrix", write_list(tmp_path / "imatrix.dat", squares))
    assert file_of(tmp_path / "new") == file_of(tmp_path / "old")
    rounded = {tensor["name"]: tensor["rounding"] for tensor in found["tensors"] if "rounding" in tensor}
    assert len(rounded) > 5
    for name, rounding in rounded.items():
        if name != "token_embd.weight":  # it is looked up
            assert rounding["weighed"] == rounding["matrices"] == len(squares[name])
    assert read_manifest(tmp_path / "new").made_by["rounding"] == "importance"
    exported(model, tmp_path / "plain")
    assert file_of(tmp_path / "new") != file_of(tmp_path / "plain")


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("target", ["vllm", "torchao", "mlx"])
def test_other_targets_weigh_errors_by_the_same_file(family: str, target: str, tmp_path: Path) -> None:
    """Weights that the file does not list are rounded plainly, and counted."""
    model = families.build(families.FAMILIES[family], tmp_path / "model")
    squares = importances(model)
    missing = squares.pop("blk.0.attn_q.weight")
    file = write_gguf(tmp_path / "imatrix.gguf", squares)
    packing = ("--packing", "plain") if target == "torchao" else ()
    shown = done("export", model, tmp_path / "out", "-t", target, *packing, "--imatrix", file, "--json").stdout
    found = {of["name"]: of["rounding"] for of in json.loads(shown)["tensors"] if "rounding" in of}
    found.pop("model.embed_tokens.weight", None)
    assert len(found) > 5
    for name, rounding in found.items():
        if name == "model.layers.0.self_attn.q_proj.weight":
            plainly = {"no product of inputs with it was seen": 1}
            assert rounding == {"matrices": 1, "weighed": 0, "rounded_plainly": plainly}
        else:
            assert rounding["weighed"] == rounding["matrices"], name
    about = read_manifest(tmp_path / "out").made_by
    assert about["rounding"] == "importance" and about["calibration"]["sample"] == "imatrix"
    other = write_gguf(tmp_path / "other.gguf", {"blk.9.ffn_down.weight": missing})
    line = refused("export", model, tmp_path / "no", "-t", target, "--imatrix", other)
    assert "other.gguf" in line and "blk.9.ffn_down" in line


def test_what_a_sample_gave_is_written_and_read_again(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words that are not all the same, again and again. " * 400)
    sample = ("--calibrate", text, "--calibration-tokens", str(TOKENS), "--rounding", "importance")
    first = exported(model, tmp_path / "first", *sample, "--save-imatrix", tmp_path / "ours.gguf")
    again = exported(model, tmp_path / "again", "--imatrix", tmp_path / "ours.gguf")
    assert again["totals"]["relative_mse"] == approx(first["totals"]["relative_mse"], ALIKE)
    reader = gguf.GGUFReader(tmp_path / "ours.gguf")
    assert reader.get_field("general.type").contents() == "imatrix"
    assert reader.get_field("imatrix.datasets").contents() == [str(text)]
    matrices = {tensor["name"] for tensor in first["tensors"] if tensor.get("rounding", {}).get("weighed")}
    assert {tensor.name for tensor in reader.tensors} >= {f"{name}.in_sum2" for name in matrices}
    _quantize_with_llama_cpp(model, reader, tmp_path)


def _quantize_with_llama_cpp(model: Path, reader: Any, tmp_path: Path) -> None:
    """Have llama.cpp make a type that it makes with importances only."""
    exported(model, tmp_path / "f32", kind="f32")
    library = llama_library.library()[0]
    by_name = {tensor.name: np.array(tensor.data, dtype=np.float32) for tensor in reader.tensors}
    names = [name.removesuffix(".in_sum2") for name in by_name if name.endswith(".in_sum2")]
    data = (library.llama_model_imatrix_data * (len(names) + 1))()
    kept = [by_name[f"{name}.in_sum2"].ravel() / by_name[f"{name}.counts"].ravel() for name in names]
    encoded = [name.encode() for name in names]
    for entry, name, means in zip(data, encoded, kept, strict=False):
        entry.name, entry.size = name, means.size
        entry.data = means.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    settings = library.llama_model_quantize_default_params()
    settings.ftype, settings.imatrix = int(gguf.LlamaFileType.MOSTLY_IQ2_XS), data
    out = tmp_path / "theirs.gguf"
    source = next((tmp_path / "f32").glob("*.gguf"))
    assert library.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(settings)) == 0
    assert any(tensor.tensor_type.name == "IQ2_XS" for tensor in gguf.GGUFReader(out).tensors)


def test_files_that_do_not_fit_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    squares, name = importances(model), "blk.0.ffn_down.weight"
    other = {"blk.9.ffn_down.weight": squares[name]}
    wider = squares | {name: np.ones((1, 1024), dtype=np.float32)}
    broken = squares | {name: np.full_like(squares[name], np.nan)}
    out = tmp_path / "out"
    for number, (wrong, named) in enumerate(((other, "blk.9.ffn_down"), (wider, name), (broken, name))):
        for write in (write_gguf, write_list):
            path = write(tmp_path / f"{number}-{write.__name__}", wrong)
            line = refused("export", model, out, "-t", "gguf", "--type", "q4_0", "--imatrix", path)
            assert path.name in line and named in line
    cut = tmp_path / "cut.dat"
    cut.write_bytes(write_list(tmp_path / "whole.dat", squares).read_bytes()[:1000])
    for path in (cut, tmp_path / "absent", model / "config.json"):
        assert path.name in refused("export", model, out, "-t", "gguf", "--type", "q4_0", "--imatrix", path)
    assert not out.exists()


def test_options_that_do_not_go_together(model: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "imatrix.gguf", importances(model))
    out = tmp_path / "out"
    assert "--imatrix" in refused("export", model, out, "-t", "bf16", "--imatrix", file, code=2)
    assert "qparams" in refused("export", model, out, "-t", "vllm", "--imatrix", file, "--qparams", "minmax", code=2)
    assert "--calibrate" in refused("export", model, out, "-t", "mlx", "--imatrix", file, "--rounding", "gptq", code=2)
    assert "--imatrix" in refused("export", model, out, "-t", "vllm", "--imatrix", file, "--rounding", "plain", code=2)
    both = ("--calibrate", "self", "--imatrix", file)
    assert "--imatrix" in refused("export", model, out, "-t", "gguf", *both, code=2)
    assert "--save-imatrix" in refused("export", model, out, "-t", "gguf", "--save-imatrix", file, code=2)
    assert done("export", model, out, "-t", "gguf", "--type", "q4_0", "--rounding", "importance", "--imatrix", file)
