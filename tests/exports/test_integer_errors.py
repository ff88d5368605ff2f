"""The errors that an export to integers states, with and without the original, and originals that are refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from closeness import ALIKE, F32_SUM, ORTHOGONAL, approx
from commands import done
from export_decoders import export_weight
from helpers import (
    Array,
    as_float32,
    bf16,
    gaussian,
    master_weights,
    read_all,
    read_safetensors,
    run_command,
    safetensors_bytes,
    write_checkpoint,
)
from integer_exports import KINDS, LAYER, ROUNDED, integer_names, work

from pqweights.errors import OutputError
from pqweights.rewrite.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")


def decoded(folder: Path) -> dict[str, Array]:
    """Decode the weights of an export, in float64."""
    weight = export_weight(folder)
    return {name: weight(name).astype(np.float64) for name in integer_names(folder)}


def errors(folder: Path, source: Path) -> dict[str, float]:
    """Relative squared errors of the weights of an export against the original."""
    exact = {name: as_float32(tensor).astype(np.float64) for name, tensor in read_all(source).items()}
    return {
        name: float(((values - exact[name]) ** 2).sum() / (exact[name] ** 2).sum())
        for name, values in decoded(folder).items()
    }


MEASURED = {
    **{name: {k: v for k, v in options.items() if k != "original"} for name, options in KINDS.items()},
    "8 bits": {"target": "vllm", "bits": 8},
}


@pytest.mark.parametrize("kind", MEASURED)
def test_errors_are_measured_with_the_original_and_predicted_without(kind: str, driven: Path, tmp_path: Path) -> None:
    """Without the original, the error is computed from that of the master and is within 3 percent."""
    command = {"export": str(driven / "master"), **MEASURED[kind]}
    source = driven / "src"
    without = run_command(command, tmp_path / "without")
    given = run_command({**command, "original": str(source)}, tmp_path / "with")
    from_master, measured = errors(tmp_path / "without", source), errors(tmp_path / "with", source)
    assert measured.keys() == from_master.keys() == ROUNDED
    for record in given.records:
        if record.name not in ROUNDED:
            assert record.total_mse is None
        else:
            assert record.total_mse == record.relative_mse == approx(measured[record.name], F32_SUM)
            assert record.master_mse == approx(from_master[record.name], F32_SUM)
    for record in without.records:
        if record.name in ROUNDED - {f"{LAYER}.mlp.up_proj.weight"}:  # 64 equal blocks, so errors do not average out
            assert record.total_mse == record.master_mse == approx(from_master[record.name], ORTHOGONAL)
            assert measured[record.name] < from_master[record.name]


@pytest.mark.parametrize("kind", KINDS)
def test_relative_error_is_measured_against_the_decoded_master(kind: str, driven: Path, tmp_path: Path) -> None:
    """It refers to the master's float32 weights, also if the rule of a runtime rounds them to BF16 first."""
    exact = master_weights(driven / "master")
    command = {key: value for key, value in work(driven, kind).items() if key != "original"}
    report = run_command(command, tmp_path / "out")
    found = decoded(tmp_path / "out")
    for record in report.records:
        if record.name in ROUNDED:
            wanted = exact[record.name].astype(np.float64)
            energy = (wanted**2).sum()
            assert record.energy == approx(energy, F32_SUM)
            assert record.relative_mse == approx(((found[record.name] - wanted) ** 2).sum() / energy, F32_SUM)


def test_plain_weights_come_from_the_original_and_kept_tensors_from_the_master(driven: Path, tmp_path: Path) -> None:
    source, master = shutil.copytree(driven / "src", tmp_path / "src"), tmp_path / "master"
    shutil.copytree(driven / "master", master)
    (master / "pqweights.json").unlink()  # it holds the fingerprint of the source
    path = source / "model-00002-of-00002.safetensors"
    changed = read_safetensors(path)
    dtype, norm = changed["model.norm.weight"]
    path.write_bytes(safetensors_bytes({**changed, "model.norm.weight": (dtype, np.zeros_like(norm))}))
    command = {"export": str(master), "target": "torchao", "original": str(source)}
    report = run_command(command, tmp_path / "out")
    found, of_master, of_source = read_all(tmp_path / "out"), read_all(master), read_all(source)
    assert found["model.norm.weight"][1].tobytes() == of_master["model.norm.weight"][1].tobytes()
    assert found["model.norm.weight"][1].any()
    for name in ("model.embed_tokens.weight", f"{LAYER}.mlp.fc1.weight"):
        assert found[name][1].tobytes() == of_source[name][1].tobytes(), name
    assert found[f"{LAYER}.mamba.A_log"][0] == "F32"
    assert all(r.total_mse is not None for r in report.records if r.name in ROUNDED)


def test_total_error_is_unknown_without_the_manifest_of_the_master(driven: Path, tmp_path: Path) -> None:
    master = shutil.copytree(driven / "master", tmp_path / "master")
    (master / "pqweights.json").unlink()
    result = done("export", master, tmp_path / "out", "-t", "torchao")
    assert "relative MSE against the original: unknown; pass --source to measure it" in result.stdout
    assert all(r.total_mse is None for r in read_manifest(tmp_path / "out").records)
    given = done("export", master, tmp_path / "given", "-t", "torchao", "--source", driven / "src")
    assert re.search(
        r"relative MSE against the original: 0\.0\d+; exported from the master it would be 0\.0\d+", given.stdout
    )


def test_export_made_without_the_manifest_of_the_master_is_not_recognised(driven: Path, tmp_path: Path) -> None:
    """Its errors differ from those that the same command states once the manifest is back."""
    master = shutil.copytree(driven / "master", tmp_path / "master")
    (master / "pqweights.json").rename(tmp_path / "aside.json")
    command = {"export": str(master), "target": "vllm"}
    run_command(command, tmp_path / "out")
    (tmp_path / "aside.json").rename(master / "pqweights.json")
    with pytest.raises(OutputError):
        run_command(command, tmp_path / "out")
    again = run_command({**command, "overwrite": True}, tmp_path / "out")
    assert not again.already_done
    assert all(r.total_mse is not None for r in again.records if r.relative_mse is not None)


def test_totals_are_weighted_by_the_original(tmp_path: Path) -> None:
    """The weights of 2.6 bits of this master have noticeably smaller norms than their originals."""
    layers = {f"{LAYER}.self_attn.{q}_proj.weight": bf16(gaussian(64, 256, seed=i)) for i, q in enumerate("qkvo")}
    write_checkpoint(tmp_path / "src", layers, config={"model_type": "llama"})
    rules = [{"name": f"*.{q}_proj.weight", "codec": "hadamard-trellis", "bits": 2.6} for q in "qk"]
    (tmp_path / "mixed.yaml").write_text(json.dumps({"bits": 8, "rules": rules}))
    run_command({"quantize": str(tmp_path / "src"), "recipe": str(tmp_path / "mixed.yaml")}, tmp_path / "master")
    command = ("export", tmp_path / "master", tmp_path / "out", "-t", "vllm", "--bits", "8", "--json")
    totals = json.loads(done(*command).stdout)["totals"]
    measured = json.loads(done(*command, "--source", tmp_path / "src", "--overwrite").stdout)["totals"]
    assert totals["total_mse"] == totals["master_mse"]
    assert totals["total_mse"] == approx(measured["master_mse"], ALIKE)
    assert measured["total_mse"] < totals["total_mse"]
    assert json.loads((tmp_path / "out/pqweights.json").read_bytes())["total_mse"] == measured["total_mse"]


def test_total_error_is_unknown_for_a_codec_with_inflated_weights(tmp_path: Path) -> None:
    """At 3 bits weights are enlarged, where the formula assumes them to shrink, so the sum of errors would be wrong."""
    tensors = {f"{LAYER}.mlp.up_proj.weight": bf16(gaussian(256, 1024, seed=3))}
    write_checkpoint(tmp_path / "src", tensors, config={"model_type": "llama", "torch_dtype": "bfloat16"})
    run_command({"quantize": str(tmp_path / "src"), "recipe": "q3"}, tmp_path / "master")
    shown = done("export", tmp_path / "master", tmp_path / "out", "--target", "torchao")
    (record,) = read_manifest(tmp_path / "out").records
    assert record.total_mse is None and "unknown; pass --source to measure it" in shown.stdout
