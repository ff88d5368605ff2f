"""A master with one wrong bit: every export ends by its name, whatever reads it, and nothing looks whole."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

import families
import language_models
import numpy as np
import pytest
from commands import raises
from converting import interrupt
from damage import flip, stored_in
from helpers import bf16, f32, folder_bytes, gaussian, run_command, write_checkpoint
from memory_storage import objects, put
from random_inputs import random_inputs
from tasks_here import use_tasks_here

import pqweights
from pqweights.calibrate import sampled_inputs
from pqweights.convert import jobs
from pqweights.convert.manifest import find_manifest
from pqweights.convert.scales import write_scales
from pqweights.errors import MasterError

WEIGHT = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
GROUPS = {"group_size": 32}
TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("bf16", {"dtype": "source"}),
    ("torchao", GROUPS),
    ("vllm", GROUPS),
    ("vllm", {**GROUPS, "rounding": "gptq", "calibrate": "self"}),
    ("mlx", GROUPS),
    ("gguf", {"type": "q4_k_m", "without_tokenizer": True}),
    ("gguf", {"target_size": 500_000, "without_tokenizer": True}),
    ("gguf", {"type": "q3_k_m", "calibrate": "self", "without_tokenizer": True}),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its master at 5 bits."""
    folder = tmp_path_factory.mktemp("damaged")
    language_models.with_tokenizer(families.build(families.FAMILIES["llama"], folder / "source"))
    pqweights.quantize(folder / "source", folder / "master", max_shard_size=300_000)
    return folder


@pytest.fixture
def master(base: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(base / "master", tmp_path / "master"))


def export(base: Path, master: Any, out: Any, target: str = "bf16", **options: Any) -> Any:
    inputs = random_inputs(base / "source") if "calibrate" in options else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled_inputs, "inputs_of", lambda *_: contextlib.nullcontext(inputs))
        return pqweights.export(master, out, target, max_shard_size=300_000, **options)


def damaged(place: str) -> str:
    return re.escape(place) + ": blake3_of_pieces: "


NAMES = (WEIGHT + "_codes", WEIGHT + "_norms", NORM)
PAIRS = [(NAMES[number % 3], *target) for number, target in enumerate(TARGETS)]


@pytest.mark.parametrize(("name", "target", "options"), [*PAIRS, *((name, *TARGETS[0]) for name in NAMES[1:])], ids=str)
def test_every_export_ends_by_the_name_of_a_damaged_tensor(
    name: str,
    target: str,
    options: dict[str, Any],
    base: Path,
    master: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small chunks cut pieces into many parts; nothing of a tensor may stay unread."""
    monkeypatch.setattr(jobs, "CHUNK_WEIGHTS", 4096)
    place = flip(master, name, at=-1)
    with raises(MasterError, place):
        export(base, master, tmp_path / "out", target, **options)
    assert not (tmp_path / "out").exists()


def test_awq_scales_are_checked(tmp_path: Path) -> None:
    """They are read again for each chunk."""
    tensors = {"a.q_proj.weight": bf16(gaussian(64, 256)), "b.experts.up_proj": f32(gaussian(3, 128, 128, seed=2))}
    source = write_checkpoint(tmp_path / "src", tensors, config={"model_type": "llama", "torch_dtype": "bfloat16"})
    about = {name: {"matrices": [{"scaled": False, "tokens": 0}]} for name in tensors}
    scales = {"a.q_proj.weight": np.full(256, 2.0, np.float32), "b.experts.up_proj": np.full((3, 128), 0.5, np.float32)}
    write_scales(tmp_path / "awq.safetensors", about, scales)
    run_command({"quantize": str(source), "scales": str(tmp_path / "awq.safetensors")}, tmp_path / "master")
    export(tmp_path, tmp_path / "master", tmp_path / "sound")
    for name in tensors:
        folder = Path(shutil.copytree(tmp_path / "master", tmp_path / name))
        place = flip(folder, name + "_awq_scale", at=-2)
        with raises(MasterError, place):
            export(tmp_path, folder, tmp_path / "out")


def test_parts_in_other_processes_check_what_they_read(
    base: Path, master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tasks_here(monkeypatch)
    place = flip(master, WEIGHT + "_codes")
    for target, options in (("bf16", {}), ("mlx", GROUPS), ("gguf", {"type": "q4_k_m", "without_tokenizer": True})):
        with raises(MasterError, place):
            export(base, master, tmp_path / target, target, ray="here", **options)
        assert find_manifest(tmp_path / target) is None


def test_masters_in_object_storage_are_checked(base: Path, master: Path) -> None:
    place = flip(master, WEIGHT + "_norms")
    put("memory://damaged/master", folder_bytes(master))
    with raises(MasterError, "memory://damaged/master", place):
        export(base, "memory://damaged/master", "memory://damaged/out")
    assert "pqweights.json" not in objects("memory://damaged/out")


def test_a_run_that_is_continued_checks_what_is_left(
    base: Path, master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = flip(master, WEIGHT + "_codes")  # in the last file
    work = {"export": str(master), "target": "bf16", "max_shard_bytes": 300_000}
    interrupt(monkeypatch, work, tmp_path / "out", shards=1)
    with raises(MasterError, place):
        run_command(work, tmp_path / "out")
    assert not (tmp_path / "out" / "pqweights.json").exists()


def test_a_tensor_that_several_outputs_read_in_part_is_checked_whole(base: Path, tmp_path: Path) -> None:
    """vllm makes single experts of a stack."""
    stacked = tmp_path / "stacked"
    run_command({"quantize": str(families.model(tmp_path, "gpt_oss"))}, stacked)
    names = [name for name in stored_in(stacked) if name.endswith("gate_up_proj_codes")]
    place = flip(stacked, names[0], at=-1)
    for target, options in (("bf16", {}), ("vllm", GROUPS)):
        with raises(MasterError, place):
            export(base, stacked, tmp_path / "out", target, **options)


def test_headers_are_those_of_the_manifest(base: Path, master: Path, tmp_path: Path) -> None:
    """Another dtype leaves the bytes, and so the hash, as they are."""
    path = master / stored_in(master)[NORM].file
    start, entry, rest = path.read_bytes().partition(f'"{NORM}":{{"dtype":"'.encode())
    assert rest.startswith(b'BF16","shape":[256]')
    path.write_bytes(start + entry + b"I" + rest[1:].replace(b"F16", b"16 ", 1).replace(b'16 ",', b'16", ', 1))
    with raises(MasterError, "BF16 [256]", "I16 [256]"):
        export(base, master, tmp_path / "out")


def test_a_master_without_a_manifest_is_exported_and_said_to_be_unchecked(
    base: Path, master: Path, tmp_path: Path
) -> None:
    (master / "pqweights.json").unlink()
    flip(master, WEIGHT + "_codes")
    done = export(base, master, tmp_path / "out")
    assert any("pqweights.json" in line for line in done.warnings)
    assert not any("pqweights.json" in line for line in export(base, base / "master", tmp_path / "sound").warnings)
