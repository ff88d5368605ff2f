"""Several formats in one run: each folder as a run of its own makes it, the source read once, kills continued."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import language_models
import memory_storage
import pytest
import safetensors
import transformers
from commands import answer, done, invoke, refused
from converting import finished, killed_after
from helpers import folder_bytes
from tasks_here import use_tasks_here

import pqweights
from pqweights.calibrate import sample
from pqweights.checkpoint.names import WORK_FOLDER
from pqweights.targets import vllm

FORMATS: dict[str, dict[str, Any]] = {
    "vllm": {"format": "w4a16,w8a16,fp8"},
    "vllm, fused": {"target": "vllm", "format": "nvfp4,fp8-block"},
    "torchao": {"format": "int8,int8-dynamic,fp8"},
    "mlx": {"bits": "3,4,8", "group_size": 32},
    "mlx, mixes": {"target": "mlx", "format": "q4,mxfp4,mixed_3_6", "group_size": 32},
}
SHARD = 100_000  # bytes of a file: several of each format


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source and its master."""
    folder = tmp_path_factory.mktemp("several")
    language_models.with_tokenizer(families.build(families.FAMILIES["llama"], folder / "source"))
    pqweights.quantize(folder / "source", folder / "master")
    return folder


def alone(several: str) -> dict[str, dict[str, Any]]:
    """The folder of each result, and the options of a run that makes it alone."""
    option = "bits" if "bits" in FORMATS[several] else "format"
    values = FORMATS[several][option].split(",")
    return {f"{v}bit" if option == "bits" else v: {**FORMATS[several], option: v} for v in values}


def files(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in folder_bytes(folder).items() if not name.endswith("/")}


def export(source: Path, out: Path, several: str, options: dict[str, Any]) -> Any:
    return pqweights.export(source, out, **{"target": several, **options})


@pytest.mark.parametrize("of", ["source", "master"])
@pytest.mark.parametrize("several", FORMATS)
def test_formats_in_one_run_equal_runs_of_their_own(several: str, of: str, base: Path, tmp_path: Path) -> None:
    together = export(base / of, tmp_path / "out", several, FORMATS[several])
    read = []
    for folder, options in alone(several).items():
        own = export(base / of, tmp_path / folder, several, options)
        expected = folder_bytes(tmp_path / folder)
        stated = json.loads(expected.pop("pqweights.json"))
        assert folder_bytes(tmp_path / "out" / folder) == expected
        document = json.loads((tmp_path / "out/pqweights.json").read_text())
        assert document["results"][folder] == {k: v for k, v in stated.items() if k in document["results"][folder]}
        tensors = [t for t in document["tensors"] if t["name"].startswith(f"{folder}/")]
        assert [t.get("relative_mse") for t in tensors] == [t.get("relative_mse") for t in stated["tensors"]]
        read.append(own.source_bytes_read)
    if several != "vllm, fused":  # weights that share a unit are read for it by each
        assert together.source_bytes_read < 1.1 * max(read)
    done("verify", tmp_path / "out")


@pytest.mark.parametrize("several", ["vllm", "mlx", "gguf"])
def test_a_dry_run_shows_the_size_of_each_and_writes_nothing(several: str, base: Path, tmp_path: Path) -> None:
    options = (FORMATS | {"gguf": {"type": "q4_0,q8_0"}})[several]
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    command = ("export", base / "source", tmp_path / "out", "--target", several, *flags)
    planned = done(*command, "--dry-run").stdout.splitlines()
    assert not (tmp_path / "out").exists()
    made = [line.partition(", relative MSE")[0] for line in done(*command).stdout.splitlines()]
    assert planned == made and sum("bits per parameter" in line for line in made) > 1


def test_large_formats_are_cut_at_the_same_tensors(base: Path, tmp_path: Path) -> None:
    """Files of the largest format are those of a run of its own; the others hold the same tensors in as many files."""
    options = FORMATS["vllm"] | {"max_shard_size": SHARD}
    export(base / "source", tmp_path / "out", "vllm", options)
    found = {folder: folder_bytes(tmp_path / "out" / folder) for folder in alone("vllm")}
    assert len({tuple(files) for files in found.values()}) == 1
    assert sum(file.endswith(".safetensors") for file in found["fp8"]) > 2
    export(base / "source", tmp_path / "alone", "vllm", options | {"format": "w8a16"})
    expected = folder_bytes(tmp_path / "alone")
    del expected["pqweights.json"]
    assert found["w8a16"] == expected
    indexes = {folder: json.loads(files["model.safetensors.index.json"]) for folder, files in found.items()}
    for folder, index in indexes.items():
        for file in set(index["weight_map"].values()):
            with safetensors.safe_open(tmp_path / "out" / folder / file, "numpy") as opened:
                assert set(opened.keys()) == {name for name, at in index["weight_map"].items() if at == file}


@pytest.mark.parametrize("shards", [1, 4, 7])
def test_killed_run_continues(shards: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = FORMATS["vllm"] | {"max_shard_size": SHARD, "threads": 2}
    out = tmp_path / "killed"
    killed_after(monkeypatch, shards, lambda: export(base / "source", out, "vllm", options))
    known = finished(out)
    assert export(base / "source", out, "vllm", options).resumed == len(known) > 0
    export(base / "source", tmp_path / "whole", "vllm", options)
    assert folder_bytes(out) == folder_bytes(tmp_path / "whole")
    assert export(base / "source", out, "vllm", options).already_done
    assert not (out / WORK_FOLDER).exists()


def test_formats_in_tasks_have_the_bytes_of_plain_ones(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = FORMATS["torchao"] | {"max_shard_size": SHARD}
    export(base / "source", tmp_path / "plain", "torchao", options)
    ray = use_tasks_here(monkeypatch)
    export(base / "source", tmp_path / "tasks", "torchao", options | {"ray": "here"})
    assert folder_bytes(tmp_path / "tasks") == folder_bytes(tmp_path / "plain") and len(ray.made) > 1


def test_formats_go_to_object_storage(base: Path, tmp_path: Path) -> None:
    export(base / "source", tmp_path / "here", "torchao", FORMATS["torchao"])
    pqweights.export(base / "source", "memory://several/formats", "torchao", **FORMATS["torchao"])
    assert memory_storage.objects("memory://several/formats") == files(tmp_path / "here")


def test_calibrated_formats_equal_runs_of_their_own(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "WINDOW", 64)
    (text := tmp_path / "text.txt").write_text("abc ab c " * 400)
    options = {"format": "w4a16,w8a16", "calibrate": text, "calibration_tokens": 2048}
    export(base / "source", tmp_path / "out", "vllm", options)
    for folder in ("w4a16", "w8a16"):
        export(base / "source", tmp_path / folder, "vllm", options | {"format": folder})
        expected = folder_bytes(tmp_path / folder)
        del expected["pqweights.json"]
        assert folder_bytes(tmp_path / "out" / folder) == expected
    tensors = json.loads((tmp_path / "out/pqweights.json").read_text())["tensors"]
    matrices = sum(tensor["action"] == "integer" for tensor in tensors)
    assert f"compensated rounding: {matrices} of {matrices} weight matrices" in done("inspect", tmp_path / "out").stdout
    line = refused(
        "export", base / "source", tmp_path / "no", "-t", "vllm", "--format", "w4a16,fp8", "--calibrate", "self", code=2
    )
    assert "--calibrate" in line and not (tmp_path / "no").exists()
    sized = ("-t", "vllm", "--target-bpw", 5, "--calibrate", "self", "--dry-run")
    assert "--dry-run" in refused("export", base / "source", tmp_path / "no", *sized, code=2)


@pytest.mark.parametrize(
    ("target", "option", "value"),
    [
        ("vllm", "--format", "w4a16,w4a16"),
        ("vllm", "--format", "w4a16,"),
        ("vllm", "--format", ","),
        ("vllm", "--format", "w4a16,q4"),
        ("vllm", "--bits", "4,3"),
        ("mlx", "--bits", "4,4"),
        ("mlx", "--bits", "3,,4"),
        ("mlx", "--bits", "three"),
        ("torchao", "--format", "int4,../int8"),
    ],
)
def test_formats_that_there_are_not_are_refused(
    target: str, option: str, value: str, base: Path, tmp_path: Path
) -> None:
    line = refused("export", base / "source", tmp_path / "out", "--target", target, option, value, code=2)
    assert option in line and not (tmp_path / "out").exists()


def test_formats_and_bits_cannot_both_be_several(base: Path, tmp_path: Path) -> None:
    refused("export", base / "source", tmp_path / "out", "-t", "vllm", "--format", "w4a16,fp8", "--bits", "4,8", code=2)


def test_formats_that_hold_other_tensors_are_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assign = vllm._assign

    def without_one(name: str, *others: Any) -> Any:
        whole = assign(name, *others)
        return replace(whole, tensors=whole.tensors[1:]) if name == "fp8" else whole

    monkeypatch.setattr(vllm, "_assign", without_one)
    line = refused("export", base / "source", tmp_path / "out", "-t", "vllm", "--format", "w4a16,fp8", code=2)
    assert "--format fp8" in line and not (tmp_path / "out").exists()


def test_carried_codes_stand_beside_others(tmp_path: Path) -> None:
    source = families.build(families.FAMILIES["gpt_oss"], tmp_path / "source")
    for form in ("mxfp4-gpt-oss", "w4a16", "mxfp4-gpt-oss,w4a16"):
        pqweights.export(source, tmp_path / form, "vllm", format=form)
    for form in ("mxfp4-gpt-oss", "w4a16"):
        expected = folder_bytes(tmp_path / form)
        del expected["pqweights.json"]
        assert folder_bytes(tmp_path / "mxfp4-gpt-oss,w4a16" / form) == expected


def test_every_command_knows_the_folder(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reports = done("export", base / "source", out, "--target", "torchao", "--format", "int8,fp8").output
    shown = done("inspect", out).stdout
    for folder in ("int8", "fp8"):
        assert folder in reports and folder in shown
        assert transformers.AutoConfig.from_pretrained(out / folder).model_type == "llama"
    assert answer("inspect", out)["results"].keys() == {"int8", "fp8"}
    done("card", out)
    card = (out / "README.md").read_text()
    assert "int8/model-00001-of-00001.safetensors" in card and '"DIR/int8"' in card
    done("verify", out)
    index = out / "fp8/model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "model-00002"))
    assert "fp8/model.safetensors.index.json" in invoke("verify", out).output
    weights = out / "int8/model-00001-of-00001.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert "int8/model-00001-of-00001.safetensors" in invoke("verify", out).output


@pytest.mark.parametrize("several", FORMATS)
def test_formats_are_proven_and_rebuilt(several: str, base: Path, tmp_path: Path) -> None:
    export(base / "source", tmp_path / "out", several, FORMATS[several])
    assert pqweights.verify(tmp_path / "out", source=base / "source").ok
    pqweights.rebuild(tmp_path / "out/pqweights.json", base / "source", tmp_path / "again")
    assert folder_bytes(tmp_path / "again") == folder_bytes(tmp_path / "out")
