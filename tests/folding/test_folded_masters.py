"""Folded masters in the commands that read masters: verify, inspect, card, export, another run into their folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import done, refused
from folding_models import columns_of, folded_values, llama, measured, say_rotated
from helpers import as_float32, folder_bytes, master_weights, read_all, run_command

from pqweights.checkpoint.source import open_local
from pqweights.rewrite.folding import fold
from pqweights.rewrite.folding.folded import TensorFactors
from pqweights.rewrite.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masters")
    llama(folder / "src")
    run_command({"quantize": str(folder / "src"), "fold": "equalize"}, folder / "folded")
    return folder


def test_commands_read_a_folded_master(folder: Path, tmp_path: Path) -> None:
    """test_folded_exports.py has its exports to integers."""
    master = Path(shutil.copytree(folder / "folded", tmp_path / "folded"))
    assert json.loads(done("verify", master, "--json").stdout)["ok"]
    found = json.loads(done("inspect", master, "--json").stdout)
    assert found["fold"]["kind"] == "equalize"
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert by_name["model.norm.weight"]["folded"] == ["model.norm"]
    planned = json.loads(done("plan", folder / "src", "--fold", "equalize", "--json").stdout)
    assert planned["fold"]["kind"] == "equalize" and planned["fold"]["left"] == {}
    assert "fold" not in json.loads(done("plan", folder / "src", "--json").stdout)
    vectors = len(planned["fold"]["vectors"])
    assert (
        f"fold equalize: {vectors} vectors between layers, each if"
        in done("plan", folder / "src", "--fold", "equalize").stdout
    )
    config = json.loads((folder / "src/config.json").read_text()) | {"model_type": "unheard-of"}
    (tmp_path / "other").mkdir()
    shutil.copy(folder / "src/model.safetensors", tmp_path / "other")
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    shown = done("plan", tmp_path / "other", "--fold", "equalize").stdout
    assert "fold equalize: nothing\n" in shown and "'unheard-of' is not known to --fold" in shown
    done("inspect", master)
    done("card", master)
    assert (master / "README.md").stat().st_size > 500
    for target in ("bf16", "vllm"):
        done("export", master, tmp_path / target, "--target", target)
        assert json.loads(done("verify", tmp_path / target, "--json").stdout)["ok"]
        done("card", tmp_path / target)


def test_target_size_folds_with_the_tensors_that_the_fit_keeps(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "fitted"
    done("quantize", folder / "src", out, "--fold", "equalize", "--target-bpw", "4.6", "--keep", "*.2.mlp.down_proj.*")
    manifest = read_manifest(out)
    kept = {tensor.name for tensor in manifest.tensors if tensor.action == "keep"}
    assert "model.layers.2.mlp.down_proj.weight" in kept
    assert "model.layers.1.mlp.down_proj.weight" not in kept
    folded = {record.name: record.folded for record in manifest.records}
    assert not folded["model.layers.2.mlp.down_proj.weight"]
    assert "model.layers.2.mlp.up_proj" not in folded["model.layers.2.mlp.up_proj.weight"]
    assert "model.layers.1.mlp.up_proj" in folded["model.layers.1.mlp.up_proj.weight"]
    stored, source = read_all(out), read_all(folder / "src")
    name = "model.layers.2.mlp.down_proj.weight"
    assert (stored[name][1] == source[name][1]).all()


def test_decoded_weights_are_folded_without_rounding_them(folder: Path, tmp_path: Path) -> None:
    run_command({"quantize": str(folder / "src")}, tmp_path / "master")
    checkpoint = open_local(tmp_path / "master")
    made = fold.Fold(checkpoint, plain=[])
    made.measure(tmp_path, fetched=tmp_path, threads=1, progress=lambda *_: None)
    found, decoded = folded_values(made), master_weights(tmp_path / "master")
    gate = "model.layers.0.mlp.gate_proj.weight"
    factors = columns_of(made)["model.layers.0.post_attention_layernorm"][0]
    assert (found[gate] == decoded[gate] * factors).all()


def test_original_is_refused_if_its_factors_are_not_those_of_the_master(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a later version found others."""
    command = ("export", folder / "folded", tmp_path / "out", "--target", "vllm", "--source", folder / "src")
    other = fold.Fold.factors

    def changed(self: fold.Fold, tensor: str) -> TensorFactors:
        factors = other(self, tensor)
        return factors if factors.rows is None else replace(factors, rows=factors.rows * np.float32(1.0078125))

    with monkeypatch.context() as patch:
        patch.setattr(fold.Fold, "factors", changed)
        assert "--source: its factors are not those that the master was folded with" in refused(*command)
    done(*command)


def test_digest_of_factors_is_over_the_stated_fields(folder: Path, tmp_path: Path) -> None:
    made = measured(folder / "src", tmp_path)
    expected = hashlib.sha256()
    for name in sorted(tensor.name for tensor in open_local(folder / "src").tensors):
        factors = made.factors(name) if name in made.structure.notes else TensorFactors()
        for part in ("rows", "columns", "values"):
            numbers = getattr(factors, part)
            if numbers is not None:
                expected.update(json.dumps([name, part, list(numbers.shape)]).encode() + b"\n")
                expected.update(numbers.astype("<f4").tobytes())
    manifest = read_manifest(folder / "folded")
    assert manifest.factors == expected.hexdigest()
    assert json.loads((folder / "folded/pqweights.json").read_bytes())["fold"] == {
        "kind": "equalize",
        "vectors": 13,
        "factors_sha256": manifest.factors,
    }


def test_master_without_the_digest_is_not_made_again_and_takes_no_source(folder: Path, tmp_path: Path) -> None:
    master = Path(shutil.copytree(folder / "folded", tmp_path / "folded"))
    manifest = json.loads((master / "pqweights.json").read_bytes())
    del manifest["fold"]["factors_sha256"]  # the first version that folded had none
    (master / "pqweights.json").write_text(json.dumps(manifest, indent=2) + "\n")
    before = folder_bytes(master)
    run_command({"quantize": str(folder / "src"), "fold": "equalize"}, master)
    assert folder_bytes(master) == before
    command = ("export", master, tmp_path / "out", "--target", "vllm")
    assert "leave out --source, or quantize again" in refused(*command, "--source", folder / "src")
    done(*command)


@pytest.fixture
def rotated(folder: Path, tmp_path: Path) -> Path:
    """A master as earlier versions made it with --fold rotate: its manifest alone says so."""
    shutil.copytree(folder / "folded", tmp_path / "rotated")
    say_rotated(tmp_path / "rotated")
    return tmp_path / "rotated"


def test_master_of_a_fold_that_went_is_an_ordinary_one(rotated: Path, tmp_path: Path) -> None:
    assert json.loads(done("verify", rotated, "--json").stdout)["ok"]
    assert json.loads(done("inspect", rotated, "--json").stdout)["fold"]["kind"] == "rotate"
    assert "the residual stream was rotated (`--fold rotate`)" in done("card", rotated, "--print").stdout
    for target in ("vllm", "bf16"):
        done("export", rotated, tmp_path / target, "--target", target)
        assert json.loads(done("verify", tmp_path / target, "--json").stdout)["ok"]


def test_original_is_refused_for_a_master_of_a_fold_that_went(rotated: Path, folder: Path, tmp_path: Path) -> None:
    command = ("export", rotated, tmp_path / "out", "--target", "vllm", "--source", folder / "src")
    assert "the master was folded with --fold rotate, which this version" in refused(*command)
    assert not (tmp_path / "out").exists()


def test_kept_reader_of_a_norm_gets_powers_of_two(folder: Path, tmp_path: Path) -> None:
    out, name = tmp_path / "out", "model.layers.1.mlp.gate_proj.weight"
    done("quantize", folder / "src", out, "--fold", "equalize", "--keep", name)
    stored, source = (as_float32(read_all(path)[name]) for path in (out, folder / "src"))
    ratios = stored / source
    assert (ratios == ratios[:1]).all() and len(set(ratios[0])) > 2
    assert all((ratio.hex().rstrip("0123456789")).startswith("0x1.0") for ratio in ratios[0].astype(float).tolist())
    norm = "model.layers.1.post_attention_layernorm.weight"
    gains = [as_float32(read_all(path)[norm]) for path in (out, folder / "src")]
    assert (gains[0] * ratios[0] == gains[1]).all()
