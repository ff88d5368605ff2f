"""Weights whose codes are ready before a run: masters of them, exports, and codes that do not fit or are damaged."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import column_writer
import numpy as np
import numpy.typing as npt
import pytest
from calls import quantize
from closeness import F32_FEW, F32_SOLVED, approx
from commands import done, raises
from converting import killed_after
from export_decoders import export_weight, values_of
from helpers import as_float32, bf16, folder_bytes, read_all, small_checkpoint

from pqweights.checkpoint.source import open_local
from pqweights.common.options import Options
from pqweights.convert.manifest import read_manifest
from pqweights.convert.ready import ReadyWeights
from pqweights.convert.report import RewriteReport
from pqweights.errors import MasterError, OutputError, SourceChangedError
from pqweights.planning.recipe import load_recipe
from pqweights.results.inspect import inspect
from pqweights.results.verify import verify
from pqweights.targets.master import Learned

CODEC = "hadamard-trellis-columns"
ATTENTION = "model.layers.0.self_attn."
CALIBRATED = (f"{ATTENTION}q_proj.weight", f"{ATTENTION}k_proj.weight", "model.layers.0.mlp.down_proj.weight")
Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `src`, its `ready` codes, and the `master` of both."""
    folder = tmp_path_factory.mktemp("ready")
    small_checkpoint(folder / "src")
    column_writer.write_codes(folder / "src", folder / "ready", CALIBRATED)
    run(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def run(folder: Path, out: str = "master", **options: Any) -> RewriteReport:
    ready = ReadyWeights.open(folder / "ready")
    return quantize(
        folder / "src",
        folder / out,
        load_recipe("q5"),
        options=Options(max_shard_size=20_000, threads=2, **options),
        learned=Learned(ready=ready),
    )


def decoded(folder: Path) -> dict[str, Floats]:
    """The weights of ready codes, as they are decoded."""
    return {tensor.name: values_of(tensor) for tensor in open_local(folder).tensors if tensor.name in CALIBRATED}


def test_master_holds_ready_codes_beside_weights_of_the_recipe(made: Path) -> None:
    assert verify(made / "master", threads=2).problems == ()
    ready, inspection = ReadyWeights.open(made / "ready"), inspect(made / "master")
    tensors = {tensor.name: tensor for tensor in inspection.tensors}
    assert {name for name, tensor in tensors.items() if tensor.codec == CODEC} == set(CALIBRATED)
    assert {tensor.codec for tensor in inspection.tensors} == {CODEC, "hadamard-lloyd-max", None}
    stored, codes = read_all(made / "master"), read_all(made / "ready")
    for name in CALIBRATED:
        tensor, names = (
            tensors[name],
            [name + part for part in ("_trellis", "_lengths", "_row_scales", "_column_scales")],
        )
        parts = [stored[part][1] for part in names]
        assert all(np.array_equal(part, codes[own][1]) for part, own in zip(parts, names, strict=True))
        assert tensor.bytes == sum(part.nbytes for part in parts)
        assert tensor.bits == approx(8 * tensor.bytes / np.prod(tensor.shape), F32_FEW)
        assert tensor.weighed_mse == approx(tensor.relative_mse / 2, F32_FEW)
        assert (tensor.exceeds, tensor.rescued) == (False, False)
    quantized = [tensor for tensor in inspection.tensors if tensor.bits is not None]
    expected = 8 * sum(t.bytes for t in quantized) / sum(int(np.prod(t.shape)) for t in quantized)
    assert inspection.totals.bits_per_weight == expected
    assert read_manifest(made / "master").made_by["calibrated"] == ready.describe()


def test_bf16_export_is_what_the_codes_decode_to(made: Path, tmp_path: Path) -> None:
    done("export", made / "master", tmp_path / "out", "--target", "bf16")
    exported = read_all(tmp_path / "out")
    for name, values in decoded(made / "master").items():
        assert exported[name][0] == "BF16"
        assert np.array_equal(as_float32(exported[name]), as_float32(bf16(values)))


@pytest.mark.parametrize("target", [["vllm"], ["torchao", "--packing", "plain"]])
def test_integer_exports_round_what_the_codes_decode_to(made: Path, tmp_path: Path, target: list[str]) -> None:
    done("export", made / "master", tmp_path / "out", "--target", *target)
    records = {record.name: record for record in read_manifest(tmp_path / "out").records}
    weight, rounded = export_weight(tmp_path / "out"), 0
    for name, values in decoded(made / "master").items():
        record = records[name]
        if record.relative_mse is not None:
            error = ((weight(name) - values).astype(np.float64) ** 2).sum() / (values.astype(np.float64) ** 2).sum()
            assert record.relative_mse == approx(error, F32_SOLVED)
            assert record.total_mse is None  # because these errors are not orthogonal to the weights
            rounded += 1
    assert rounded > 0


def test_commands_show_the_master(made: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made / "master", tmp_path / "master"))
    assert CODEC in done("inspect", copy).stdout
    summary = done("inspect", copy, "--summary").stdout.splitlines()
    assert sum(CODEC in line for line in summary) == 2  # attention and mlp, whatever their weights take
    assert "ok" in done("verify", copy).stdout
    done("card", copy)
    card = (copy / "README.md").read_text()
    assert re.search(r"^- \d+(\.\d)?-bit$", card, re.MULTILINE)
    assert "3 weights were calibrated" in card and "GPTQ" in card and "No calibration data" not in card
    done("push", copy, "some/model", "--dry-run")


def test_result_is_the_same_for_any_threads_and_after_an_interruption(
    made: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_after(monkeypatch, 2, lambda: run(folder, "out"))
    assert 0 < run(folder, "out").resumed < 10
    assert folder_bytes(folder / "out") == folder_bytes(made / "master")
    assert run(folder, "out").already_done


def test_other_codes_are_another_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(monkeypatch, 1, lambda: run(folder, "out"))
    column_writer.write_codes(folder / "src", folder / "ready", CALIBRATED, rate=4.0)
    with raises(SourceChangedError, "0.safetensors"):
        run(folder, "out")
    with pytest.raises(OutputError):
        run(folder)
    run(folder, overwrite=True)
    assert verify(folder / "master", threads=1).problems == ()


def test_damaged_codes_are_found_when_they_are_copied(folder: Path) -> None:
    path = folder / "ready/1.safetensors"
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    with raises(MasterError, "1.safetensors", "k_proj"):
        run(folder, "out")
    assert not (folder / "out/pqweights.json").exists()
