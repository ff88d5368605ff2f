"""Which files of a folder hold the weights, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import raises
from helpers import bf16, gaussian, write_checkpoint
from safetensors.torch import save_file

from pqweights.checkpoint.source import open_local
from pqweights.errors import SourceError

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def pickles(tmp_path: Path) -> Path:
    """A folder with one pickle, which has a name of its own."""
    source = tmp_path / "pickles"
    source.mkdir()
    torch.save({UP: torch.zeros(4, 128)}, source / "weights.bin")
    return source


def test_single_safetensors_file_may_have_any_name(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {UP: bf16(gaussian(4, 128))})
    os.rename(source / "model.safetensors", source / "weights.safetensors")
    checkpoint = open_local(source)
    assert checkpoint.weight_files == ("weights.safetensors",)
    assert [tensor.name for tensor in checkpoint.tensors] == [UP]


def test_single_pickle_may_have_any_name(pickles: Path) -> None:
    assert open_local(pickles, allow_pickle=True).weight_files == ("weights.bin",)


def test_several_pickles_need_an_index(pickles: Path) -> None:
    os.link(pickles / "weights.bin", pickles / "more.bin")
    with raises(SourceError, "more.bin", "weights.bin", "give one file"):
        open_local(pickles, allow_pickle=True)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with raises(SourceError, tmp_path / "pipe"):
        open_local(tmp_path / "pipe")


NAMES = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(4)]


def write_set(folder: Path, *, parts: int, value: float, name: str = "model-{:05d}-of-{:05d}.safetensors") -> list[str]:
    """Write four tensors of one value into so many files; returns the names of the files."""
    folder.mkdir(exist_ok=True)
    files = [name.format(part + 1, parts) for part in range(parts)]
    for part, file in enumerate(files):
        save_file({tensor: torch.full((2, 128), value) for tensor in NAMES[part::parts]}, folder / file)
    return files


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_value(folder: Path) -> float:
    """Return the value of all four tensors, by what is read of the first."""
    checkpoint = open_local(folder)
    assert sorted(tensor.name for tensor in checkpoint.tensors) == NAMES
    out = np.empty(4, dtype=np.uint8)
    checkpoint.tensors[0].read(0, 1, "F32", out)
    return float(out.view(np.float32)[0])


@pytest.mark.parametrize(
    "name",
    [
        "model-{:05d}-of-{:05d}.safetensors",
        "model-{:05d}-of-{:06d}.safetensors",  # DeepSeek
        "model.safetensors-{:05d}-of-{:05d}.safetensors",  # Qwen
        "pytorch_model-{}-of-{}.safetensors",
        "other-{:02d}-of-{:02d}.safetensors",
    ],
)
def test_complete_shards_without_an_index_are_read(name: str, tmp_path: Path) -> None:
    files = write_set(tmp_path / "a", parts=3, value=2.0, name=name)
    assert read_value(tmp_path / "a") == 2
    checkpoint = open_local(tmp_path / "a")
    assert checkpoint.weight_files == tuple(files)
    assert "model.safetensors.index.json" in checkpoint.left_out


def test_shards_may_be_numbered_from_0(tmp_path: Path) -> None:
    files = write_set(tmp_path / "a", parts=2, value=2.0)
    for number, file in enumerate(files):
        os.rename(tmp_path / "a" / file, tmp_path / "a" / f"model-{number:05d}-of-00002.safetensors")
    assert read_value(tmp_path / "a") == 2


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("beside", [[], ["adapter.safetensors"], ["consolidated.safetensors"]])
def test_a_part_that_is_missing_is_named(parts: int, beside: list[str], tmp_path: Path) -> None:
    """One part of two, alone in its folder, is not a model either."""
    files = write_set(tmp_path / "a", parts=parts, value=2.0)
    os.remove(tmp_path / "a" / files[-1])
    for name in beside:
        save_file({NAMES[-1]: torch.zeros(2, 128)}, tmp_path / "a" / name)
    with raises(SourceError, files[-1]):
        open_local(tmp_path / "a")


def test_complete_set_is_read_beside_an_incomplete_one(tmp_path: Path) -> None:
    stale = write_set(tmp_path / "a", parts=3, value=9.0)
    os.remove(tmp_path / "a" / stale[1])
    write_set(tmp_path / "a", parts=2, value=2.0)
    assert read_value(tmp_path / "a") == 2
    assert set(open_local(tmp_path / "a").left_out) >= {stale[0], stale[2]}


def test_two_complete_sets_without_an_index_are_refused_by_name(tmp_path: Path) -> None:
    write_set(tmp_path / "a", parts=3, value=9.0)
    write_set(tmp_path / "a", parts=2, value=2.0)
    with raises(SourceError, "model-*-of-00002.safetensors", "model-*-of-00003.safetensors"):
        open_local(tmp_path / "a")


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "consolidated-{:05d}-of-{:05d}.safetensors", "x.safetensors"]
)
def test_set_with_the_names_of_transformers_is_read_beside_other_files(name: str, tmp_path: Path) -> None:
    write_set(tmp_path / "a", parts=2, value=2.0)
    others = write_set(tmp_path / "a", parts=2 if "{" in name else 1, value=9.0, name=name)
    assert read_value(tmp_path / "a") == 2
    assert set(open_local(tmp_path / "a").left_out) >= set(others)


def test_two_variants_of_a_file_are_refused_by_name(tmp_path: Path) -> None:
    for variant in ("fp16", "bf16"):
        write_set(tmp_path / "a", parts=1, value=1.0, name=f"model.{variant}.safetensors")
    with raises(SourceError, "model.bf16.safetensors", "model.fp16.safetensors"):
        open_local(tmp_path / "a")
    write_set(tmp_path / "a", parts=1, value=2.0, name="model.safetensors")
    assert read_value(tmp_path / "a") == 2


def test_index_decides_between_two_complete_sets(tmp_path: Path) -> None:
    stale = write_set(tmp_path / "a", parts=3, value=9.0)
    files = write_set(tmp_path / "a", parts=2, value=2.0)
    write_index(tmp_path / "a", {tensor: files[number % 2] for number, tensor in enumerate(NAMES)})
    assert read_value(tmp_path / "a") == 2
    assert set(open_local(tmp_path / "a").left_out) == set(stale)


def test_complete_set_is_read_beside_an_index_of_files_that_are_gone(tmp_path: Path) -> None:
    write_set(tmp_path / "a", parts=2, value=2.0)
    write_index(tmp_path / "a", dict.fromkeys(NAMES, "model-00001-of-00004.safetensors"))
    assert read_value(tmp_path / "a") == 2
    assert "model-00001-of-00004.safetensors" in open_local(tmp_path / "a").left_out["model.safetensors.index.json"]


def test_index_of_files_that_are_gone_is_refused_beside_two_complete_sets(tmp_path: Path) -> None:
    for parts in (2, 3):
        write_set(tmp_path / "a", parts=parts, value=2.0)
    write_index(tmp_path / "a", dict.fromkeys(NAMES, "model-00001-of-00004.safetensors"))
    with raises(SourceError, "model-*-of-00002.safetensors", "model-*-of-00003.safetensors"):
        open_local(tmp_path / "a")


def test_index_that_misplaces_tensors_is_said_to(tmp_path: Path) -> None:
    files = write_set(tmp_path / "a", parts=2, value=2.0)
    write_index(tmp_path / "a", {tensor: files[number // 2] for number, tensor in enumerate(NAMES)})
    assert read_value(tmp_path / "a") == 2
    assert "model.safetensors.index.json" in open_local(tmp_path / "a").left_out


def test_index_that_names_a_tensor_of_no_file_is_refused(tmp_path: Path) -> None:
    files = write_set(tmp_path / "a", parts=2, value=2.0)
    write_index(tmp_path / "a", dict.fromkeys([*NAMES, "lm_head.weight"], files[0]) | {NAMES[0]: files[1]})
    with raises(SourceError, "'lm_head.weight'", "remove model.safetensors.index.json"):
        open_local(tmp_path / "a")


@pytest.mark.parametrize("value", [2.0, 3.0])
def test_tensor_in_two_shards_is_read_once_if_both_are_equal(value: float, tmp_path: Path) -> None:
    files = write_set(tmp_path / "a", parts=2, value=2.0)
    both = {tensor: torch.full((2, 128), 2.0) for tensor in NAMES[1::2]} | {NAMES[0]: torch.full((2, 128), value)}
    save_file(both, tmp_path / "a" / files[1])
    if value == 2:
        assert read_value(tmp_path / "a") == 2
        assert any(NAMES[0] in text and files[1] in text for text in open_local(tmp_path / "a").left_out)
        return
    with raises(SourceError, f"'{NAMES[0]}'", files[0], files[1]):
        open_local(tmp_path / "a")


def test_pickles_without_an_index_are_read_if_they_are_complete(tmp_path: Path) -> None:
    for part in range(2):
        state = {tensor: torch.full((2, 128), 2.0) for tensor in NAMES[part::2]}
        torch.save(state, tmp_path / f"pytorch_model-{part + 1:05d}-of-00002.bin")
    assert len(open_local(tmp_path, allow_pickle=True).tensors) == 4
    os.remove(tmp_path / "pytorch_model-00002-of-00002.bin")
    with raises(SourceError, "pytorch_model-00002-of-00002.bin"):
        open_local(tmp_path, allow_pickle=True)


@pytest.mark.parametrize("metadata", ["null", "{}", '{"format":"pt"}'])
def test_metadata_may_be_null(metadata: str, tmp_path: Path) -> None:
    header = f'{{"__metadata__":{metadata},"{UP}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert [tensor.name for tensor in open_local(tmp_path).tensors] == [UP]


FOLDERS = {
    "sentence-transformers": (["0_Transformer/model.safetensors", "0_Transformer/config.json", "modules.json"], "0_T"),
    "training": (["checkpoint-500/model.safetensors", "checkpoint-1000/model.safetensors"], "checkpoint-1000/"),
    "pickles": (["model/pytorch_model.bin", "model/config.json", "training_args.bin"], "model/"),
    "deeper": (["run/final/model.safetensors", "other/notes.txt"], "run/final/"),
    "diffusers": (["unet/model.safetensors", "vae/model.safetensors", "model_index.json"], "unet, vae"),
    "DeepSpeed": (["global_step7/mp_rank_00_model_states.pt", "zero_to_fp32.py", "latest"], "zero_to_fp32.py"),
    "DeepSpeed, stage 3": (["global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed"),
    "Megatron": (["iter_0000010/mp_rank_00/model_optim_rng.pt"], "Megatron"),
    "FSDP": (["pytorch_model_fsdp_0/__0_0.distcp", "rng_state_0.pth", "scheduler.pt"], "merge-weights"),
    "Meta": (["consolidated.00.pth", "params.json"], "consolidated.00.pth"),
    "Flax": (["flax_model.msgpack", "config.json"], "Flax"),
    "TensorFlow": (["tf_model.h5", "config.json"], "TensorFlow"),
    "ONNX": (["onnx/model.onnx", "config.json"], "ONNX"),
    "OpenVINO": (["openvino_model.bin", "openvino_model.xml"], "OpenVINO"),
    "NeMo": (["model.nemo"], "NeMo"),
    "only the state of a training": (["optimizer.pt", "training_args.bin"], "no weights found"),
}


@pytest.mark.parametrize(("names", "said"), FOLDERS.values(), ids=FOLDERS)
def test_what_lies_in_place_of_weights_is_named(names: list[str], said: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    with raises(SourceError, said):
        open_local(tmp_path)


def test_a_pointer_of_git_lfs_is_named_as_one(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {UP: bf16(gaussian(4, 128))})
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (source / "model.safetensors").write_text(pointer)
    with raises(SourceError, "model.safetensors", "git lfs pull"):
        open_local(source)
