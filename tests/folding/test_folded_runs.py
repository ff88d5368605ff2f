"""Runs that fold: the same bytes for any number of threads, after a kill, and from a damaged file of factors."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import plan_quantize
from folding_models import HEAD, KEY_HEADS, LAYERS, WIDE, WIDTH, gains, llama, llama_tensors
from helpers import SMALL_CHUNK, bf16, folder_bytes, killed_runs, run_command, safetensors_bytes
from rewriting import Killed

from pqweights.checkpoint.names import FACTORS_FILE, WORK_FOLDER
from pqweights.planning.recipe import load_recipe
from pqweights.rewrite import jobs
from pqweights.rewrite.finished_shards import FinishedShards
from pqweights.rewrite.folding import fold as folds
from pqweights.rewrite.folding import sizes
from pqweights.rewrite.folding.fold import read_journal
from pqweights.rewrite.manifest import read_manifest
from pqweights.rewrite.task import resource_needs

LINKS = 4 * LAYERS + 1


@pytest.fixture(scope="module", autouse=True)
def _several_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "CHUNK_WEIGHTS", SMALL_CHUNK)
        patch.setattr(sizes, "CHUNK_WEIGHTS", SMALL_CHUNK)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("source") / "model", shards=4)


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    run_command(command(source), out)
    return folder_bytes(out)


def command(source: Path) -> dict[str, Any]:
    return {"quantize": str(source), "fold": "equalize"}


def factors_file(out: Path) -> Path:
    return next((out / WORK_FOLDER).glob(f"*/{FACTORS_FILE}"), out / "none")


def interrupted(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave what a run leaves that is killed when its first shard is made; returns its file of factors."""

    def die(self: FinishedShards, *given: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(FinishedShards, "add", die)
        with pytest.raises(Killed):
            run_command(command(source), out)
    return factors_file(out)


def vectors_measured(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command, and return of how many vectors it found the factors."""
    found = []
    decided = folds.Fold._decided

    def counting(self: folds.Fold, link: Any, sizes: Any) -> Any:
        found.append(link.name)
        return decided(self, link, sizes)

    with monkeypatch.context() as patch:
        patch.setattr(folds.Fold, "_decided", counting)
        run_command(command(source), out)
    return len(found)


@pytest.mark.parametrize("threads", [1, 5])
def test_output_is_the_same_for_any_number_of_threads(
    threads: int, source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    run_command(command(source), tmp_path / "out", threads=threads)
    assert folder_bytes(tmp_path / "out") == undisturbed
    assert not any(name.startswith(WORK_FOLDER) for name in undisturbed)


def test_run_killed_at_any_call_resumes_to_the_same_folder(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    (counts,) = killed_runs(command(source), [{"out": str(tmp_path / "counted")}])
    points = [
        {"out": str(tmp_path / f"{function}-{number}"), "function": function, "number": number, "when": when}
        for function, when in (("pwrite", "after"), ("replace", "before"), ("open", "after"))
        for number in range(1, counts[function] + 1, max(1, counts[function] // 2))
    ]
    points = [point | {"may_end": 1} for point in points]
    killed_runs(command(source), points)
    for point in points:
        run_command(command(source), Path(str(point["out"])))
        assert folder_bytes(Path(str(point["out"]))) == undisturbed, point


@pytest.mark.parametrize("lines", [0, 7])
def test_run_killed_in_the_pass_measures_only_what_is_missing(
    lines: int, source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, measured = tmp_path / "out", iter(range(lines))
    decided = folds.Fold._decided

    def die_later(self: folds.Fold, link: Any, sizes: Any) -> Any:
        if next(measured, None) is None:
            raise Killed
        return decided(self, link, sizes)

    with monkeypatch.context() as patch:
        patch.setattr(folds.Fold, "_decided", die_later)
        with pytest.raises(Killed):
            run_command(command(source), out)
    assert len(read_journal(factors_file(out))) == lines
    assert vectors_measured(source, out, monkeypatch) == LINKS - lines
    assert folder_bytes(out) == undisturbed


def test_run_killed_after_the_pass_does_not_repeat_it(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(source, tmp_path / "out", monkeypatch)
    assert vectors_measured(source, tmp_path / "out", monkeypatch) == 0
    assert folder_bytes(tmp_path / "out") == undisturbed


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def flip(data: bytes) -> bytes:
    middle = data.index(b"\n", len(data) // 2) - 9
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "damage", [cut, flip, lambda _: b"", lambda _: b"\n", lambda data: data + b"x", lambda data: b"\xff\n" + data]
)
def test_damaged_factors_are_found_again(
    damage: Any, source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = interrupted(source, tmp_path / "out", monkeypatch)
    path.write_bytes(damage(path.read_bytes()))
    run_command(command(source), tmp_path / "out")
    assert folder_bytes(tmp_path / "out") == undisturbed


def test_factors_of_an_earlier_version_are_found_again(
    source: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = interrupted(source, tmp_path / "out", monkeypatch)
    entry = json.dumps([0, 0.5, [1, ""]]).encode()  # the form of its entries, in the file of its name
    path.with_name("factors").write_bytes(hashlib.sha256(entry).hexdigest().encode() + b" " + entry + b"\n")
    path.unlink()
    assert vectors_measured(source, tmp_path / "out", monkeypatch) == LINKS
    assert folder_bytes(tmp_path / "out") == undisturbed


def test_changed_source_is_measured_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "model"
    shutil.copytree(source, own)
    interrupted(own, tmp_path / "out", monkeypatch)
    tensors = {name: values for name, values in llama_tensors().items() if "layernorm" in name}
    tensors["model.layers.1.input_layernorm.weight"] = bf16(gains(seed=99))
    (own / "model-00001-of-00004.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(Exception, match="overwrite"):
        run_command(command(own), tmp_path / "out")
    run_command({**command(own), "overwrite": True}, tmp_path / "out")
    run_command(command(own), tmp_path / "fresh")
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "fresh")


def test_plan_and_manifest_say_what_is_folded(source: Path, tmp_path: Path) -> None:
    _, transform, plan = plan_quantize(str(source), load_recipe("q5"), fold="equalize")
    reasons = {tensor.name: tensor.reason for tensor in plan.tensors}
    prefix = "model.layers.1"
    assert "foldable: inputs with input_layernorm" in reasons[f"{prefix}.self_attn.q_proj.weight"]
    assert "foldable: gain with its readers" in reasons[f"{prefix}.input_layernorm.weight"]
    assert "outputs with self_attn.o_proj" in reasons[f"{prefix}.self_attn.v_proj.weight"]
    assert "foldable" not in reasons["model.embed_tokens.weight"]
    fold = transform.notes(()).document["fold"]
    assert fold["kind"] == "equalize" and len(fold["vectors"]) == LINKS and fold["left"] == {}
    assert transform.fold is not None
    held = transform.fold.memory_bytes
    assert held >= 2 * LAYERS * (2 * WIDTH + WIDE + KEY_HEADS * HEAD) + 4 * WIDTH * (2 * LAYERS + 1)
    with_fold, without = resource_needs(plan, 2, fold=transform.fold), resource_needs(plan, 2)
    assert with_fold.peak_memory_bytes == without.peak_memory_bytes + held
    assert with_fold.peak_disk_bytes > without.peak_disk_bytes

    run_command(command(source), tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert manifest.made_by["fold"] == {"kind": "equalize", "vectors": LINKS}
    assert manifest.account["fold"] == {**manifest.made_by["fold"], "factors_sha256": manifest.factors}
    folded = {record.name: record.folded for record in manifest.records}
    assert folded[f"{prefix}.mlp.up_proj.weight"] == (
        f"{prefix}.post_attention_layernorm",
        f"{prefix}.mlp.up_proj",
    )
    assert not folded["model.embed_tokens.weight"]
    assert json.loads((tmp_path / "out/pqweights.json").read_bytes())


def test_unknown_architecture_is_left_with_a_warning(source: Path, tmp_path: Path) -> None:
    own = tmp_path / "model"
    shutil.copytree(source, own)
    config = json.loads((own / "config.json").read_bytes()) | {"model_type": "falcon"}
    (own / "config.json").write_text(json.dumps(config))
    report = run_command(command(own), tmp_path / "folded")
    (warning,) = report.warnings
    assert "'falcon' is not known to `fold`" in warning
    run_command({"quantize": str(own)}, tmp_path / "plain")
    found, expected = folder_bytes(tmp_path / "folded"), folder_bytes(tmp_path / "plain")
    assert found.pop("pqweights.json") != expected.pop("pqweights.json")
    assert found == expected
