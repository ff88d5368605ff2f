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
from helpers import Array, as_float32, bf16, gaussian, master_weights, read_all, run_command, write_checkpoint
from integer_exports import KINDS, LAYER, ROUNDED, integer_names, work

from pqweights.convert.manifest import read_manifest
from pqweights.errors import OutputError

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
            assert record.master_mse is None
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


def test_total_error_is_unknown_without_the_manifest_of_the_master(driven: Path, tmp_path: Path) -> None:
    master = shutil.copytree(driven / "master", tmp_path / "master")
    (master / "pqweights.json").unlink()
    result = done("export", master, tmp_path / "out", "-t", "torchao")
    assert "relative MSE against the original: unknown" in result.stdout
    assert all(r.total_mse is None for r in read_manifest(tmp_path / "out").records)
    given = done("export", driven / "src", tmp_path / "given", "-t", "torchao")
    assert re.search(r"relative MSE against the original: 0\.0\d+$", given.stdout, re.M)


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
    command = (tmp_path / "out", "-t", "vllm", "--bits", "8", "--json")
    totals = json.loads(done("export", tmp_path / "master", *command).stdout)["totals"]
    assert totals["total_mse"] == totals["master_mse"]
    exact, found = read_all(tmp_path / "src"), export_weight(tmp_path / "out")
    originals = {name: as_float32(exact[name]).astype(np.float64) for name in layers}
    error = sum(((found(name) - weight) ** 2).sum() for name, weight in originals.items())
    assert totals["total_mse"] == approx(error / sum((weight**2).sum() for weight in originals.values()), ALIKE)
    assert json.loads((tmp_path / "out/pqweights.json").read_bytes())["total_mse"] == totals["total_mse"]


def test_total_error_is_unknown_for_a_codec_with_inflated_weights(tmp_path: Path) -> None:
    """At 3 bits weights are enlarged, where the formula assumes them to shrink, so the sum of errors would be wrong."""
    tensors = {f"{LAYER}.mlp.up_proj.weight": bf16(gaussian(256, 1024, seed=3))}
    write_checkpoint(tmp_path / "src", tensors, config={"model_type": "llama", "torch_dtype": "bfloat16"})
    run_command({"quantize": str(tmp_path / "src"), "recipe": "q3"}, tmp_path / "master")
    shown = done("export", tmp_path / "master", tmp_path / "out", "--target", "torchao")
    (record,) = read_manifest(tmp_path / "out").records
    assert record.total_mse is None and "unknown" in shown.stdout
