"""The codec hadamard-trellis through the commands: what test_seam.py does not show of any codec."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from calls import make_card
from commands import answer, done, refused
from helpers import (
    as_float32,
    bf16,
    gaussian,
    master_weights,
    read_all,
    write_checkpoint,
)
from restated import restate_hashes

import pqweights
from pqweights.checkpoint.source import open_local
from pqweights.codecs import CODECS
from pqweights.errors import MasterError
from pqweights.integrations.packed import PackedTensor
from pqweights.planning.recipe import parse_recipe
from pqweights.rewrite.manifest import read_manifest
from pqweights.rewrite.results.verify import verify

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

TRELLIS = "hadamard-trellis"
RECIPE = """
name: mixed
codec: hadamard-trellis
bits: 4.38
rules:
  - name: "*.down_proj.weight"
    bits: 5.3
  - role: attention
    codec: hadamard-lloyd-max
    bits: 6
"""
UP = "model.layers.0.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, `recipe.yaml` and `master`."""
    folder = tmp_path_factory.mktemp("trellis")
    families.build(families.FAMILIES["llama"], folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE)
    done("quantize", folder / "model", folder / "master", "--recipe", folder / "recipe.yaml")
    return folder


def relative_error(found: Any, exact: Any) -> float:
    difference = np.asarray(found, dtype=np.float64) - exact
    return float(np.square(difference).sum() / np.square(np.asarray(exact, dtype=np.float64)).sum())


# --- masters ---


def test_manifest_states_the_errors_of_the_decoded_weights(folder: Path) -> None:
    weights, decoded = read_all(folder / "model"), master_weights(folder / "master")
    for record in read_manifest(folder / "master").records:
        if record.relative_mse is not None:
            error = relative_error(decoded[record.name], as_float32(weights[record.name]))
            assert record.relative_mse == pytest.approx(error, rel=1e-4), record.name


@pytest.mark.parametrize("bits", [1.5, 2, 3.3, 4.0001, 8])
def test_plan_knows_every_byte(bits: float, tmp_path: Path) -> None:
    """Stacks whose matrices share superblocks, tiny and one-dimensional weights, constants and zeros."""
    shapes = {"a": (3, 5), "b": (7, 130), "experts": (5, 77, 300), "c": (96,), "d": (2, 1024), "e": (1, 1)}
    tensors = {f"{name}.mlp.weight": bf16(gaussian(*shape, seed=7)) for name, shape in shapes.items()}
    tensors["constant.mlp.weight"] = bf16(np.full((64, 256), 0.0125, np.float32))
    tensors["zero.mlp.weight"] = bf16(np.zeros((64, 256), np.float32))
    source = write_checkpoint(tmp_path / "model", tensors, config={"model_type": "llama"})
    (tmp_path / "r.yaml").write_text(f"{{codec: {TRELLIS}, bits: {bits}, rules: [{{name: '*', bits: {bits}}}]}}")
    planned = answer("plan", source, "--recipe", tmp_path / "r.yaml")
    made = answer("quantize", source, tmp_path / "out", "--recipe", tmp_path / "r.yaml")
    files = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert planned["totals"]["output_bytes"] == made["totals"]["output_bytes"] == files
    assert [t["bytes"] for t in planned["tensors"]] == [t["bytes"] for t in made["tensors"]]
    assert verify(tmp_path / "out", threads=2).ok
    decoded = master_weights(tmp_path / "out")
    assert {"experts.mlp.weight", "constant.mlp.weight", "zero.mlp.weight"} <= decoded.keys()
    assert not decoded["zero.mlp.weight"].any()
    assert not made["exceeding"]


def test_default_effort_by_option_is_the_same_result(folder: Path, tmp_path: Path) -> None:
    plain = ("quantize", folder / "model", tmp_path / "out", "--recipe", "t2")
    done(*plain)
    assert "already holds this result" in done(*plain, "--effort", "8").stderr
    assert "made with the default effort" in refused(*plain, "--effort", "64")
    assert "another recipe (t2, 2 bits)" in refused(*plain, "--bits", "2.01")
    named = parse_recipe(f"{{codec: {TRELLIS}, bits: 4, effort: 8}}", "mine.yaml")
    assert named.effort is None


def test_rescue_and_strict(tmp_path: Path) -> None:
    """Rows that the rotation gathers in one coordinate get signs; nothing exceeds its promise."""
    values = np.full((64, 256), 0.0125, np.float32) * np.linspace(0.5, 2, 64, dtype=np.float32)[:, None]
    source = write_checkpoint(tmp_path / "model", {UP: bf16(values)}, config={"model_type": "llama"})
    made = answer("quantize", source, tmp_path / "out", "--recipe", "t2", "--strict")
    (tensor,) = made["tensors"]
    assert not made["exceeding"] and tensor["relative_mse"] <= 1.25 * CODECS[TRELLIS].coder(2).distortion
    assert verify(tmp_path / "out", threads=2).ok


def test_plan_bounds_the_memory_of_both_codecs(folder: Path) -> None:
    scalar, trellis = (
        answer("plan", folder / "model", "--recipe", recipe, "--threads", "1")["totals"]["peak_memory_bytes"]
        for recipe in ("q5", "t5")
    )
    # The headers of the files differ a little. Measured: 75 MB with q5, 77 MB with t4 (docs/running.md).
    assert trellis == pytest.approx(scalar, abs=1e5)
    assert scalar > 140e6


# --- exports ---


@pytest.mark.parametrize(
    ("options", "packages"),
    [
        (("torchao-int4",), ("torchao",)),
        (("torchao-int4", "--packing", "plain"), ("torchao",)),
        (("vllm",), ("compressed_tensors",)),
        (("mlx",), ("mlx_lm",)),
    ],
    ids=" ".join,
)
def test_computed_errors_of_exports_are_those_measured(
    options: tuple[str, ...], packages: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    for package in packages:
        pytest.importorskip(package)
    done("export", folder / "master", tmp_path / "out", "--target", *options)
    assert verify(tmp_path / "out", threads=2).ok
    done("export", folder / "master", tmp_path / "measured", "--target", *options, "--source", folder / "model")
    computed, measured = (
        {r.name: r for t, r in read_manifest(tmp_path / name).pairs if t.action == "integer"}
        for name in ("out", "measured")
    )
    assert computed
    for name, record in computed.items():
        assert record.total_mse == pytest.approx(measured[name].master_mse, rel=0.03), name


# --- loading ---


@pytest.mark.parametrize("packed", [False, True])
def test_loaded_model_generates_and_looks_up(packed: bool, folder: Path) -> None:
    exact = master_weights(folder / "master")
    loaded = pqweights.load_model(folder / "master", packed=packed, dtype="float32")
    weight = dict(loaded.named_parameters())[UP]
    assert isinstance(weight, PackedTensor) == packed
    ids = torch.tensor([[499, 0, 7, 8, 255]])
    with torch.inference_mode():
        rows = loaded.get_input_embeddings()(ids)
        assert np.array_equal(rows[0].numpy(), exact[EMBEDDING][ids[0].numpy()])
        generated = loaded.generate(ids, max_new_tokens=4, do_sample=False)
    assert generated.shape == (1, 9)
    if packed:
        stored = next(t.bytes for t in read_manifest(folder / "master").tensors if t.name == UP)
        assert f"codec={TRELLIS}, bits=4.38, bytes={stored})" in repr(loaded)


# --- damage ---


def test_damaged_byte_is_found_and_named(folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder / "master", tmp_path / "damaged"))
    (tensor,) = (t for t in open_local(damaged).tensors if t.name == UP)
    (part,) = tensor.parts
    with open(damaged / part.file, "r+b") as stream:
        stream.seek(part.offset + part.shape[1] // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 64]))
    assert any(UP in problem for problem in verify(damaged, threads=2).problems)
    line = refused("export", damaged, tmp_path / "out", "--target", "bf16")
    assert f"tensor '{part.name}': blake3_of_pieces: expected" in line and "its bytes are damaged" in line
    restate_hashes(damaged)
    line = refused("export", damaged, tmp_path / "out", "--target", "bf16")
    assert f"tensor '{UP}': block 0: its stream does not end as it should; the master is damaged" in line
    assert not (tmp_path / "out").exists()
    with pytest.raises(MasterError, match="block 0"):
        pqweights.load_model(damaged)


# --- the Hub, cards ---


def test_card_says_codec_rate_effort_and_version(folder: Path, tmp_path: Path) -> None:
    text = make_card(folder / "master", "someone/mixed").text
    assert "Default: `hadamard-trellis`, 4.38 bits, effort 8." in text
    assert "The master has format version 2, because of `hadamard-trellis`." in text
    assert "Marcellin and Fischer" in text and "Vicentino" in text
    done("quantize", folder / "model", tmp_path / "t2", "--recipe", "t2", "--effort", "64")
    text = make_card(tmp_path / "t2").text
    assert "Default: `hadamard-trellis`, 2 bits, effort 64." in text
    assert "Marcellin and Fischer" in text and "Vicentino" not in text
    done("quantize", folder / "model", tmp_path / "q2", "--recipe", "q2")
    text = make_card(tmp_path / "q2").text
    assert "format version" not in text and "effort" not in text and "Marcellin" not in text
