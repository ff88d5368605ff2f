"""Exports with error-compensated rounding: outputs err less on inputs held back, in every format; same guarantees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from closeness import F32_FEW, F32_SOLVED, approx
from commands import raises
from export_decoders import export_weight, values_of
from helpers import as_float32, folder_bytes, read_all, run_command
from integer_exports import LAYER, work
from random_inputs import RandomInputs, random_inputs

from pqweights.checkpoint.source import open_local
from pqweights.convert import jobs
from pqweights.convert.manifest import read_manifest
from pqweights.errors import OutputError
from pqweights.results.verify import verify
from pqweights.targets import compensation

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

COMPENSATED = {
    "tile": {"target": "torchao"},
    "nibbles": {"target": "torchao", "packing": "plain"},
    "vllm": {"target": "vllm"},
    "nvfp4": {"target": "vllm", "format": "nvfp4a16"},
}
NAMES = [f"{LAYER}.{name}.weight" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")]


def command(folder: Path, kind: str, inputs: RandomInputs | None, **options: Any) -> dict[str, Any]:
    rounding = {"rounding": "gptq", "inputs": inputs} if inputs else {}
    return work(folder, "vllm", **{"qparams": "best", **COMPENSATED[kind], **rounding, **options})


@pytest.fixture(scope="module")
def calibrated(driven: Path) -> RandomInputs:
    return random_inputs(driven / "src")


@pytest.mark.parametrize(
    ("kind", "original"), [("tile", False), ("nibbles", True), ("vllm", False), ("vllm", True), ("nvfp4", True)]
)
def test_outputs_on_inputs_held_back_err_less_than_with_plain_rounding(
    kind: str, original: bool, driven: Path, calibrated: RandomInputs, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"original": True} if original else {}
    run_command(command(driven, kind, None, **options), tmp_path / "plain")
    report = run_command(command(driven, kind, calibrated, **options), tmp_path / "gptq")
    records = {record.name: record for record in report.records}
    source, gains = read_all(driven / "src"), []
    master = {tensor.name: values_of(tensor) for tensor in open_local(driven / "master").tensors}
    for name in NAMES:
        account = records[name].rounding
        if account is None:
            continue
        weight = as_float32(source[name]) if original else master[name]
        x = calibrated.held_back[name, 0].astype(np.float64)
        before, after = (
            np.square((export_weight(tmp_path / which)(name) - weight) @ x.T).sum() for which in ("plain", "gptq")
        )
        assert after <= before
        assert account["gain"] == approx(1 - after / before, 0, 2 * F32_SOLVED)
        assert (account["matrices"], account["compensated"], account["rounded_plainly"]) == (1, 1, {})
        gains.append(account["gain"])
    assert gains and min(gains) > 0.2
    assert verify(tmp_path / "gptq", threads=2).ok


@pytest.mark.parametrize(("threads", "chunk_weights"), [(3, 1 << 20), (2, 1000)])
def test_output_is_identical_across_thread_counts_and_chunk_sizes(
    threads: int,
    chunk_weights: int,
    driven: Path,
    calibrated: RandomInputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = command(driven, "vllm", calibrated, original=True)
    run_command(asked, tmp_path / "first")
    monkeypatch.setattr(jobs, "CHUNK_WEIGHTS", chunk_weights)
    run_command(asked, tmp_path / "second", threads=threads)
    assert folder_bytes(tmp_path / "first") == folder_bytes(tmp_path / "second")


def test_manifest_says_what_was_done_and_is_read_again(driven: Path, calibrated: RandomInputs, tmp_path: Path) -> None:
    report = run_command(command(driven, "vllm", calibrated), tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert manifest.records == report.records
    assert manifest.made_by["rounding"] == "gptq" and manifest.made_by["calibration"]["sample"] == "text"
    account = manifest.records[[t.name for t in manifest.tensors].index(NAMES[0])].rounding
    assert account is not None and account["dampings"][0] in compensation.DAMPINGS
    entry = next(t for t in report.to_json()["tensors"] if t["name"] == NAMES[0])
    assert entry["rounding"] == account
    json.dumps(report.to_json())
    assert run_command(command(driven, "vllm", calibrated), tmp_path / "out").already_done


def test_other_moments_are_another_run(driven: Path, calibrated: RandomInputs, tmp_path: Path) -> None:
    run_command(command(driven, "vllm", calibrated), tmp_path / "out")
    other = random_inputs(driven / "src", change=lambda parts: parts[0].__imul__(2))
    with raises(OutputError, tmp_path / "out", "`overwrite`"):
        run_command(command(driven, "vllm", other), tmp_path / "out")


def test_few_tokens_are_rounded_plainly_and_named(driven: Path, tmp_path: Path) -> None:
    known = random_inputs(driven / "src", tokens=lambda name, _: 20 if "q_proj" in name else 1500)
    report = run_command(command(driven, "vllm", known), tmp_path / "out")
    found = {record.name: record.rounding for record in report.records if record.rounding}
    (reason,) = found[NAMES[0]]["rounded_plainly"]
    assert reason.startswith("fewer than 256 tokens") and found[NAMES[0]]["compensated"] == 0
    assert found[NAMES[2]]["compensated"] == 1
    run_command(command(driven, "vllm", None), tmp_path / "plain")
    plain, ours = read_all(tmp_path / "plain"), read_all(tmp_path / "out")
    assert np.array_equal(plain[f"{NAMES[0]}_packed"][1], ours[f"{NAMES[0]}_packed"][1])


def test_inputs_that_cannot_be_used_are_named(driven: Path, tmp_path: Path) -> None:
    """Channels along the columns, a vector of another size, and moments without any input."""
    known = random_inputs(driven / "src")
    query, output, down = NAMES
    other = next(n for n, vector in enumerate(known.vectors) if vector.size != known.parts_of(output).shape[1])
    known.weights[query] = replace(known.weights[query], transposed=True)
    known.weights[output] = replace(known.weights[output], vectors=(other,))
    known.parts_of(down)[:] = 0
    report = run_command(command(driven, "vllm", known), tmp_path / "out")
    found = {record.name: record.rounding for record in report.records if record.rounding}
    for name, expected in (
        (query, "its groups run along the outputs"),
        (output, "input channels, found"),
        (down, "its moments could not be factorized"),
    ):
        (reason,) = found[name]["rounded_plainly"]
        assert expected in reason and found[name]["compensated"] == 0


def test_rows_that_gain_nothing_are_rounded_plainly(driven: Path, tmp_path: Path) -> None:
    """The rows held back are of other inputs than the moments."""

    def mislead(parts: Any) -> None:
        parts[1] = np.ascontiguousarray(parts[1][:, ::-1] ** 3)

    known = random_inputs(driven / "src", change=mislead)
    report = run_command(command(driven, "vllm", known, original=True), tmp_path / "out")
    run_command(command(driven, "vllm", None, original=True), tmp_path / "plain")
    source, records = read_all(driven / "src"), {record.name: record for record in report.records}
    account = records[NAMES[2]].rounding
    assert account is not None and account["rows_rounded_plainly"] > 0
    weight, x = as_float32(source[NAMES[2]]), known.held_back[NAMES[2], 0].astype(np.float64)
    before, after = (
        np.square((export_weight(tmp_path / which)(NAMES[2]) - weight) @ x.T).sum(axis=1) for which in ("plain", "out")
    )
    assert (after <= before * (1 + F32_FEW)).all()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_each_expert_of_a_stack_has_its_own_inputs(name: str, base: Path, tmp_path: Path) -> None:
    """mlx stacks Mixtral's experts, and cuts and transposes those of gpt-oss."""
    known = random_inputs(
        families.model(base, name), transposed=lambda tensor: name == "gpt_oss" and ".experts." in tensor
    )
    source = {t.name: values_of(t) for t in open_local(families.model(base, name)).tensors}
    asked = {"export": str(families.master(base, name)), "target": "mlx", "original": families.model(base, name)}
    run_command(asked, tmp_path / "plain")
    report = run_command({**asked, "rounding": "gptq", "inputs": known}, tmp_path / "gptq", threads=3)
    stem = f"model.layers.0.{'block_sparse_moe.switch_mlp' if name == 'mixtral' else 'mlp.experts'}.gate_proj"
    account = {record.name: record.rounding for record in report.records}[f"{stem}.weight"]
    assert account is not None and (account["matrices"], account["compensated"]) == (4, 4)
    plain, ours = (export_weight(tmp_path / which)(f"{stem}.weight") for which in ("plain", "gptq"))
    for expert in range(4):
        if name == "mixtral":
            tensor, matrix = f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight", 0
            weight = source[tensor]
        else:
            tensor, matrix = "model.layers.0.mlp.experts.gate_up_proj", expert
            weight = source[tensor][expert][:, ::2].T
        x = known.held_back[tensor, matrix].astype(np.float64).T
        before, after = (np.square((found[expert] - weight) @ x).sum() for found in (plain, ours))
        assert after < 0.8 * before


def test_embeddings_are_compensated_by_the_inputs_that_are_known_of_them(base: Path, tmp_path: Path) -> None:
    known = random_inputs(families.model(base, "llama"))
    asked = {"export": str(families.master(base, "llama")), "target": "mlx", "rounding": "gptq"}
    report = run_command({**asked, "inputs": known}, tmp_path / "out")
    accounts = {record.name: record.rounding for record in report.records if record.rounding}
    assert accounts["model.embed_tokens.weight"]["gain"] > 0.1
    assert all(account["compensated"] == account["matrices"] == 1 for account in accounts.values())
