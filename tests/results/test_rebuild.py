"""Results are made again from their manifests, and `verify --from` proves what they were made of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import families
import gguf
import language_models
import numpy as np
import pytest
from commands import answer, invoke, refused
from golden import frozen
from helpers import folder_bytes, narrow_layers_packed
from shared import made_once, run_folder
from tiny_gguf import finish

import pqweights
from pqweights.checkpoint.gguf.model import model_tensors
from pqweights.checkpoint.source import open_local
from pqweights.convert.manifest import read_manifest

TEXT = "The quick brown fox jumps over the lazy dog. " * 200
# What makes a result: a master, or an export of the source.
MASTERS: dict[str, dict[str, Any]] = {
    "q5, a tensor kept": {"keep": "*0.mlp.down_proj*", "max_shard_size": 100_000},
    "bits by pattern and role": {"set_format": ["*.q_proj.weight=3", "role:mlp=6"]},
    "trellis": {"recipe": "t4", "bits": 2.5, "effort": 64},
    "size": {"target_bpw": 4.5},
    "lossless": {"lossless": True},
    "left out": {"leave_out": ["*.k_norm.weight", "*q_norm*"]},
}
EXPORTS: dict[str, dict[str, Any]] = {
    "bf16": {"target": "bf16"},
    "vllm": {"target": "vllm", "format": "nvfp4", "keep": "*0.mlp.down_proj*"},
    "vllm size": {"target": "vllm", "target_bpw": 6.0, "group_size": 32},
    "mlx": {"target": "mlx", "format": "mixed_4_6"},
    "mlx size": {"target": "mlx", "target_bpw": 5.5},
    "mlx rules": {"target": "mlx", "bits": 3, "group_size": 32, "set_format": ["*.q_proj.weight=q8"]},
    "torchao": {"target": "torchao", "packing": "plain", "qparams": "minmax"},
    "gguf": {"target": "gguf", "type": "q4_k_m", "pure": True},
    "gguf size": {"target": "gguf", "target_bpw": 6.5},
    "ladder": {"target": "gguf", "type": "q8_0,q4_0,iq4_nl", "name": "Some-Model"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_folder(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def source(base: Path) -> Path:
    return frozen.source(frozen.MAIN, base)


def made(base: Path, name: str) -> Path:
    """One of the results above."""
    source = frozen.source(frozen.MAIN, base)

    def make(out: Path) -> None:
        with narrow_layers_packed():
            if name in MASTERS:
                pqweights.quantize(source, out, **MASTERS[name])
            else:
                pqweights.export(source, out, **EXPORTS[name])

    return made_once(base / "stated" / name, make)


def files_of(result: Path) -> dict[str, bytes]:
    """All files but the manifest."""
    return {name: data for name, data in folder_bytes(result).items() if name != "pqweights.json"}


@pytest.mark.parametrize("name", [*MASTERS, *EXPORTS])
def test_a_result_is_made_again_from_its_manifest_alone(name: str, base: Path, source: Path, tmp_path: Path) -> None:
    result = made(base, name)
    manifest = shutil.copy(result / "pqweights.json", tmp_path / "manifest.json")
    with narrow_layers_packed():
        rebuilt = pqweights.rebuild(manifest, source, tmp_path / "again")
    assert rebuilt.ok, rebuilt.differences
    assert read_manifest(tmp_path / "again").digest() == read_manifest(result).digest()  # its words may differ
    assert files_of(tmp_path / "again") == files_of(result)


@pytest.mark.parametrize("name", ["size", "lossless", "mlx rules", "ladder"])
def test_a_source_is_proved_and_nothing_is_written(
    name: str, base: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, scratch = made(base, name), tmp_path / "scratch"
    monkeypatch.setenv("PQWEIGHTS_SCRATCH", str(scratch))
    before = folder_bytes(result)
    with narrow_layers_packed():
        assert pqweights.verify(result, source=source).problems == ()
    assert folder_bytes(result) == before and folder_bytes(scratch) == {}


@pytest.mark.parametrize("name", ["bf16", "vllm", "torchao", "mlx", "gguf"])
def test_a_master_without_loss_gives_the_bytes_of_its_source(name: str, base: Path) -> None:
    with narrow_layers_packed():
        assert pqweights.verify(made(base, name), source=made(base, "lossless")).problems == ()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_of_a_ladder_is_made_alone(threads: int, base: Path, source: Path, tmp_path: Path) -> None:
    ladder = made(base, "ladder")
    found = answer("rebuild", ladder, source, tmp_path / "one", "--type", "q4_0", "--threads", threads)
    assert found["ok"] and found["differences"] == []
    (file,) = (tmp_path / "one").glob("*.gguf")
    assert file.read_bytes() == (ladder / file.name).read_bytes()


@pytest.mark.parametrize("name", ["q5, a tensor kept", "ladder"])
def test_another_source_is_found_out_by_its_tensors(name: str, base: Path, source: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(source, tmp_path / "other"))
    (shard,) = other.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    result = made(base, name)
    found = invoke("verify", result, "--from", other)
    assert found.exit_code == 1
    assert any(
        "tensor 'model.norm.weight'" in line or "output_norm.weight'" in line for line in found.stdout.split("\n")
    )
    assert "fingerprint" in found.stdout
    again = invoke("rebuild", result, other, tmp_path / "again")
    assert again.exit_code == 1 and "fingerprint" in again.stdout


def test_a_changed_result_is_found_out_beside_its_source(base: Path, source: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(made(base, "bf16"), tmp_path / "changed"))
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    found = pqweights.verify(changed, source=source).problems
    assert [problem.partition(":")[0] for problem in found] == ["config.json"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that a calibration runs in little time."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    return language_models.with_tokenizer(families.build(families.FAMILIES["llama"], folder))


def test_what_a_manifest_has_only_the_digest_of_is_given_again(trained: Path, tmp_path: Path) -> None:
    """A text of the user's, and a file of importances."""
    text, file = tmp_path / "text.txt", tmp_path / "imatrix.gguf"
    text.write_text(TEXT)
    learned: dict[str, Any] = {"calibrate": text, "calibration_tokens": 4096, "save_imatrix": file}
    pqweights.export(trained, tmp_path / "on-text", target="gguf", type="q4_0", **learned)
    pqweights.export(trained, tmp_path / "by-file", target="gguf", type="q4_0", imatrix=file)
    for result, given in (("on-text", {"calibrate": text}), ("by-file", {"imatrix": file})):
        option = "--" + next(iter(given))
        assert option in refused("verify", tmp_path / result, "--from", trained, code=2)
        assert pqweights.verify(tmp_path / result, source=trained, **given).problems == ()
    text.write_text(TEXT.upper())
    found = pqweights.verify(tmp_path / "on-text", source=trained, calibrate=text)
    assert any("calibration" in line for line in found.problems)


def _importances(path: Path, model: Path, seed: int) -> Path:
    """A file of importances, as llama.cpp's imatrix tool writes it."""
    rng, writer = np.random.default_rng(seed), gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    for tensor in (of for of in model_tensors(open_local(model)) if len(of.shape) > 1):
        squares = np.exp(rng.standard_normal((1, tensor.shape[-1]))).astype(np.float32)
        writer.add_tensor(f"{tensor.name}.in_sum2", squares * np.float32(8))
        writer.add_tensor(f"{tensor.name}.counts", np.full((1, 1), 8, dtype=np.float32))
    finish(writer)
    return path


BY_IMPORTANCES: dict[str, dict[str, Any]] = {
    "vllm": {"target": "vllm", "format": "w4a16"},
    "vllm, nvfp4": {"target": "vllm", "format": "nvfp4"},
    "torchao": {"target": "torchao", "packing": "plain"},
    "mlx": {"target": "mlx", "bits": 3},
    "mlx mix": {"target": "mlx", "format": "mixed_4_6"},
}


@pytest.mark.parametrize("name", BY_IMPORTANCES)
def test_results_by_a_file_of_importances_are_made_again_and_proved(name: str, trained: Path, tmp_path: Path) -> None:
    file, other = (_importances(tmp_path / f"{seed}.gguf", trained, seed) for seed in (3, 4))
    result, again = tmp_path / "result", tmp_path / "again"
    pqweights.export(trained, result, imatrix=file, **BY_IMPORTANCES[name])
    for command in (("verify", result, "--from", trained), ("rebuild", result, trained, again)):
        assert "--imatrix" in refused(*command, code=2)
        assert not again.exists()
    assert pqweights.verify(result, source=trained, imatrix=file).problems == ()
    assert pqweights.rebuild(result, trained, again, imatrix=file).ok
    assert files_of(again) == files_of(result)
    found = pqweights.verify(result, source=trained, imatrix=other).problems
    assert any("calibration" in line for line in found) and any(".safetensors" in line for line in found)


@pytest.mark.parametrize(
    ("result", "type", "words"),
    [("mlx", "q8_0", "mlx"), ("ladder", "q9", "q9"), ("ladder", "q6_k", "not Q6_K"), ("lossless", "q4_0", "master")],
)
def test_a_part_that_a_result_does_not_have_is_refused(
    result: str, type: str, words: str, base: Path, source: Path, tmp_path: Path
) -> None:
    assert words in refused("rebuild", made(base, result), source, tmp_path / "out", "--type", type, code=2)
    assert not (tmp_path / "out").exists()


def test_files_of_a_folder_that_names_no_model_are_proved_from_one_that_does(source: Path, tmp_path: Path) -> None:
    unnamed, named = (Path(shutil.copytree(source, tmp_path / name)) for name in ("model", "tiny"))
    pqweights.export(unnamed, tmp_path / "out", "gguf", type="q8_0,q4_0")
    assert (tmp_path / "out/model-Q8_0.gguf").exists()
    assert pqweights.verify(tmp_path / "out", source=named).problems == ()


def test_a_manifest_is_needed(base: Path, source: Path, tmp_path: Path) -> None:
    assert source.name in refused("rebuild", source, source, tmp_path / "out")
    assert "master" in refused("rebuild", made(base, "lossless"), made(base, "lossless"), tmp_path / "out")


@pytest.mark.parametrize(
    ("result", "changed"),
    [
        ("bf16", {"target": "abacus"}),
        ("bf16", {"dtype": "nothing"}),
        ("bf16", {"target": ["bf16"]}),
        ("mlx", {"group_size": "wide"}),
        ("ladder", {"type": 8}),
        ("ladder", {"calibration": {"tokens": 4096}}),
        ("vllm", {"rules": 5}),
        ("trellis", {"recipe": "t4"}),
        ("trellis", {"recipe": {"codec": 1}}),
        ("trellis", {"calibrated": {"tokens": 4096}}),
        ("trellis", {"fit": []}),
    ],
)
def test_a_manifest_that_does_not_say_how_is_refused(
    result: str, changed: dict[str, Any], base: Path, source: Path, tmp_path: Path
) -> None:
    stated = json.loads((made(base, result) / "pqweights.json").read_text())
    keys = list(stated)
    at = keys.index("source")
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({key: stated[key] for key in keys[:at]} | changed | {k: stated[k] for k in keys[at:]}))
    found = invoke("rebuild", file, source, tmp_path / "out")
    assert found.exit_code in (1, 2) and found.stderr.startswith("error: ") and found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
