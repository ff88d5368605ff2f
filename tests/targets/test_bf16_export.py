"""The bf16 target: dtypes, tensors that must not change, configuration, resuming, and loading by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import invoke
from helpers import as_float32, bf16, f16, f32, folder_bytes, gaussian, read_all, run_command, write_checkpoint

from pqweights.convert.manifest import read_manifest
from pqweights.results.verify import verify
from pqweights.targets import get_target

pytestmark = pytest.mark.usefixtures("narrow_layers_packed")

MAKE = {"BF16": bf16, "F16": f16, "F32": f32}
NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
WEIGHT = "model.layers.0.mlp.up_proj.weight"


def model_of(dtype: str, folder: Path, **config: Any) -> Path:
    """Write a checkpoint whose weights and norms have one dtype, and which has an integer buffer."""
    make = MAKE[dtype]
    tensors = {
        "model.embed_tokens.weight": make(gaussian(64, 130, seed=1)),
        WEIGHT: make(gaussian(64, 128, seed=2)),
        "model.norm.weight": make(1 + gaussian(128, seed=3)),
        "model.position_ids": ("I64", np.arange(5, dtype=np.int64)),
    }
    return write_checkpoint(folder, tensors, config={"torch_dtype": NAMES[dtype], **config})


def master_and_export(source: Path, folder: Path, **options: Any) -> tuple[Path, Path]:
    run_command({"quantize": str(source)}, folder / "master")
    run_command({"export": str(folder / "master"), "target": "bf16", **options}, folder / "exported")
    assert verify(folder / "exported", threads=1).ok
    return folder / "master", folder / "exported"


def relative_error(exact: np.ndarray, decoded: np.ndarray) -> float:
    exact = exact.astype(np.float64)
    return float(((decoded - exact) ** 2).sum() / (exact**2).sum())


@pytest.mark.parametrize("target_dtype", ["bf16", "source"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_tensors_get_the_requested_dtype(dtype: str, target_dtype: str, tmp_path: Path) -> None:
    source = model_of(dtype, tmp_path / "model")
    _, exported = master_and_export(source, tmp_path, dtype=target_dtype)
    before, after = read_all(source), read_all(exported)
    assert after.keys() == before.keys()
    expected = "BF16" if target_dtype == "bf16" else dtype
    for name, (found, values) in after.items():
        assert values.shape == before[name][1].shape
        assert found == ("I64" if name == "model.position_ids" else expected), name
    assert after["model.position_ids"][1].tobytes() == before["model.position_ids"][1].tobytes()
    # A kept tensor has the bytes of the source, or is rounded if its dtype changes.
    kept = before["model.norm.weight"] if expected == dtype else bf16(as_float32(before["model.norm.weight"]))
    assert after["model.norm.weight"][1].tobytes() == kept[1].tobytes()
    for name in ("model.embed_tokens.weight", WEIGHT):
        assert 0.001 < relative_error(as_float32(before[name]), as_float32(after[name])) < 0.003
    config = json.loads((exported / "config.json").read_bytes())
    assert config["torch_dtype"] == config["dtype"] == NAMES[expected]
    assert "quantization_config" not in config


@pytest.mark.parametrize("target_dtype", ["bf16", "source"])
def test_tensors_in_another_dtype_than_the_model_keep_it(target_dtype: str, tmp_path: Path) -> None:
    tensors = {
        WEIGHT: bf16(gaussian(64, 128, seed=2)),
        "model.layers.0.mamba.A_log": f32(gaussian(48, seed=3)),
        "model.layers.0.mamba.dt_bias": f32(gaussian(48, seed=4)),
        "model.layers.0.mlp.gate.e_score_correction_bias": f32(gaussian(8, seed=5)),
        "model.norm.weight": bf16(gaussian(128, seed=6)),
        "mask": ("BF16", np.array([0xFF80, 0x7F80, 0x7FC1], dtype=np.uint16)),  # -inf, inf and a NaN
    }
    source = write_checkpoint(tmp_path / "model", tensors, config={"dtype": "bfloat16"})
    _, exported = master_and_export(source, tmp_path, dtype=target_dtype)
    after = read_all(exported)
    for name in tensors.keys() - {WEIGHT}:
        assert after[name][0] == tensors[name][0], name
        assert after[name][1].tobytes() == tensors[name][1].tobytes(), name


def test_float32_weight_of_a_bf16_model_is_exported_in_the_requested_dtype(tmp_path: Path) -> None:
    """It becomes BF16, or float32 again with --dtype source."""
    tensors = {WEIGHT: f32(gaussian(64, 128)), "model.embed_tokens.weight": bf16(gaussian(64, 128, seed=1))}
    source = write_checkpoint(tmp_path / "model", tensors, config={"dtype": "bfloat16"})
    master, exported = master_and_export(source, tmp_path)
    work = {"export": str(master), "target": "bf16", "dtype": "source"}
    run_command(work, tmp_path / "exact", threads=5)
    (dtype, rounded), exact = read_all(exported)[WEIGHT], read_all(tmp_path / "exact")[WEIGHT]
    assert (dtype, exact[0]) == ("BF16", "F32")
    assert bf16(exact[1])[1].tobytes() == rounded.tobytes()  # rounded once, to nearest even
    run_command(work, tmp_path / "one thread", threads=1)
    assert folder_bytes(tmp_path / "one thread") == folder_bytes(tmp_path / "exact")


def test_configuration_differs_from_the_source_only_in_the_dtype(tmp_path: Path) -> None:
    own = {
        "model_type": "some_vlm",
        "architectures": ["SomeModel"],
        "text_config": {"hidden_size": 128, "torch_dtype": "float16"},
        "vision_config": {"depth": 2, "dtype": "float32"},
        "audio_config": {"depth": 3},
        "rope": {"theta": 1e6},
        "täxt": "ünïcode",
    }
    _, exported = master_and_export(model_of("F16", tmp_path / "model", **own), tmp_path)
    config = json.loads((exported / "config.json").read_bytes())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["text_config"] == {"hidden_size": 128, "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    assert config["vision_config"] == {"depth": 2, "dtype": "float32"}
    assert config["audio_config"]["dtype"] == "bfloat16"
    for key in ("model_type", "architectures", "rope", "täxt"):
        assert config[key] == own[key]


DRAFT = "num_nextn_predict_layers"


@pytest.mark.parametrize(
    ("stated", "expected"), [({}, {DRAFT: 2}), ({"mtp_num_hidden_layers": 2}, {"mtp_num_hidden_layers": 2})]
)
def test_layers_that_predict_further_tokens_are_declared(
    stated: dict[str, int], expected: dict[str, int], tmp_path: Path
) -> None:
    """By the key of the source, if it has one, and said by the plan."""
    tensors = {f"mtp.layers.{layer}.mlp.up_proj.weight": bf16(gaussian(64, 128)) for layer in range(2)}
    source = write_checkpoint(tmp_path / "model", {WEIGHT: bf16(gaussian(64, 128)), **tensors}, config=stated)
    _, exported = master_and_export(source, tmp_path)
    config = json.loads((exported / "config.json").read_bytes())
    assert {key: value for key, value in config.items() if "layers" in key} == expected
    said = invoke("plan", source).stdout
    assert "layers that predict further tokens: 2 tensors, " in said
    assert "as in the source; a recipe's rule with `role: mtp` quantizes them" in said


def test_draft_layers_that_are_not_there_are_not_declared(tmp_path: Path) -> None:
    """As fine-tuned checkpoints have lost them."""
    stated = {"num_mtp_modules": 3, "use_mtp": True, "text_config": {DRAFT: 1}}
    source = write_checkpoint(tmp_path / "model", {WEIGHT: bf16(gaussian(64, 128))}, config=stated)
    _, exported = master_and_export(source, tmp_path)
    config = json.loads((exported / "config.json").read_bytes())
    assert (config["num_mtp_modules"], config["use_mtp"], config["text_config"][DRAFT]) == (0, False, 0)


@pytest.mark.parametrize(("alias", "name"), [("mlx-q4", "mlx"), ("torchao-int4", "torchao")])
def test_alias_makes_the_export_of_the_name(alias: str, name: str, tmp_path: Path) -> None:
    assert get_target(alias) is get_target(name)
    if name == "mlx":
        return  # its packages may be missing
    run_command({"quantize": str(model_of("BF16", tmp_path / "model"))}, tmp_path / "master")
    for target in (alias, name):
        run_command({"export": str(tmp_path / "master"), "target": target}, tmp_path / target)
    assert folder_bytes(tmp_path / alias) == folder_bytes(tmp_path / name)
    assert read_manifest(tmp_path / alias).made_by["target"] == name


def test_older_and_newer_keys_of_positions_agree_in_exports(tmp_path: Path) -> None:
    """What transformers 5 makes of them, for vLLM and earlier versions, which read others; a master keeps them."""
    config = {"model_type": "llama", "max_position_embeddings": 64, "rope_theta": 5e5}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    config |= {"rope_scaling": {"type": "linear", "factor": 2.0}}
    master, exported = master_and_export(model_of("BF16", tmp_path / "src", **config), tmp_path)
    kept, stated = (json.loads((folder / "config.json").read_text()) for folder in (master, exported))
    assert {key: kept[key] for key in config} == config
    assert stated["rope_theta"] == 5e5 and stated["rope_scaling"] == stated["rope_parameters"]
    assert (stated["rope_scaling"]["rope_type"], stated["rope_scaling"]["rope_theta"]) == ("linear", 5e5)
