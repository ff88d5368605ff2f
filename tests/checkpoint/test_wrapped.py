"""Weights that were saved from inside something else: prefixes come off, adapters are refused, with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import done, invoke, refused
from helpers import bf16, gaussian, write_checkpoint

from pqweights.checkpoint.source import open_local

CONFIG = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False}
Q = "model.layers.0.self_attn.q_proj.weight"
MODEL = {
    name: bf16(gaussian(*shape, seed=len(name)))
    for name, shape in {
        "model.embed_tokens.weight": (64, 128),
        Q: (128, 128),
        **{f"model.layers.0.self_attn.{part}_proj.weight": (128, 128) for part in "kvo"},
        **{f"model.layers.0.mlp.{part}_proj.weight": (256, 128) for part in ("gate", "up")},
        "model.layers.0.mlp.down_proj.weight": (128, 256),
        **{f"model.layers.0.{norm}_layernorm.weight": (128,) for norm in ("input", "post_attention")},
        "model.norm.weight": (128,),
        "lm_head.weight": (64, 128),
    }.items()
}


def saved(folder: Path, *shards: dict[str, Any], files: dict[str, Any] | None = None) -> Path:
    companions = {name: json.dumps(content).encode() for name, content in (files or {}).items()}
    return write_checkpoint(folder, *shards, config=CONFIG, companions=companions)


WRAPPED = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "inner model compiled": lambda name: name.replace("model.", "model._orig_mod.", 1),
    "layers compiled": lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    "data parallel": lambda name: f"module.{name}",
    "compiled and parallel": lambda name: f"module._orig_mod.{name}",
    "data parallel inside": lambda name: name.replace("model.", "model.module.", 1),
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name.replace('layers.0.', 'layers.0._fsdp_wrapped_module.')}",
    "activation checkpoints": lambda name: name.replace("layers.0.", "layers.0._checkpoint_wrapped_module."),
    "Lightning with a strategy": lambda name: f"_forward_module.model.{name}",
    "Lightning": lambda name: f"model.{name}",
    "PEFT after its merge": lambda name: f"base_model.model.{name}",
    "a student": lambda name: f"student.{name}",
    "a student in a wrapper": lambda name: f"module.student.{name}",
    "averaged": lambda name: f"ema.{name}",
    "a name of one's own": lambda name: f"my_own_lm.{name}",
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_prefixes_of_wrappers_are_taken_off_and_named(wrap: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "src", {wrap(name): tensor for name, tensor in MODEL.items()})
    opened = open_local(source)
    assert sorted(tensor.name for tensor in opened.tensors) == sorted(MODEL)
    (remark,) = opened.remarks
    wrapped = next(wrap(name) for name in MODEL if wrap(name) != name)
    assert wrapped in remark
    planned = done("plan", source, "--json")
    assert remark in planned.stderr and json.loads(planned.stdout)["warnings"] == [remark]
    made = done("quantize", source, tmp_path / "out")
    assert remark in made.stderr
    assert sorted(tensor.name for tensor in open_local(tmp_path / "out").tensors) == sorted(MODEL)


def test_an_index_names_tensors_with_their_prefixes(tmp_path: Path) -> None:
    wrapped = [{f"module.{name}": tensor} for name, tensor in MODEL.items()]
    source = saved(tmp_path / "src", *wrapped)
    assert sorted(tensor.name for tensor in open_local(source).tensors) == sorted(MODEL)


def test_names_without_wrappers_stay_without_a_remark(tmp_path: Path) -> None:
    opened = open_local(saved(tmp_path / "src", MODEL))
    assert sorted(tensor.name for tensor in opened.tensors) == sorted(MODEL) and opened.remarks == ()


@pytest.mark.parametrize(
    ("one", "other"), [("student.", "teacher"), ("student.", "ema"), ("student.", "policy"), ("", "ema")]
)
def test_several_models_in_one_file_are_refused(one: str, other: str, tmp_path: Path) -> None:
    both = {prefix + name: tensor for prefix in (one, f"{other}.") for name, tensor in MODEL.items()}
    assert other in refused("plan", saved(tmp_path / "src", both))


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_two_tensors_that_would_have_one_name_are_refused(wrapped_first: bool, tmp_path: Path) -> None:
    wrapped = {f"_orig_mod.{Q}": MODEL[Q]}
    both = wrapped | MODEL if wrapped_first else MODEL | wrapped
    line = refused("plan", saved(tmp_path / "src", both))
    assert f"_orig_mod.{Q}" in line and "model.safetensors" in line


MODULE = Q.removesuffix(".weight")
# By method: the names of what it stores, with shapes.
ADAPTERS: dict[str, dict[str, tuple[int, ...]]] = {
    "LORA": {
        f"base_model.model.{MODULE}.lora_A.weight": (8, 128),
        f"base_model.model.{MODULE}.lora_B.weight": (128, 8),
    },
    "ADALORA": {f"base_model.model.{MODULE}.lora_E": (8, 1), f"base_model.model.{MODULE}.lora_A": (8, 128)},
    "IA3": {f"base_model.model.{MODULE}.ia3_l": (128, 1)},
    "LOHA": {f"base_model.model.{MODULE}.hada_w1_a": (128, 8)},
    "LOKR": {f"base_model.model.{MODULE}.lokr_w1": (8, 8)},
    "OFT": {f"base_model.model.{MODULE}.oft_R.weight": (8, 120)},
    "VERA": {f"base_model.model.{MODULE}.vera_lambda_b": (128,)},
    "PROMPT_TUNING": {"prompt_embeddings": (20, 128)},
    "A_LATER_METHOD": {"base_model.model.something_else": (20, 128)},
}


@pytest.mark.parametrize("method", ADAPTERS)
@pytest.mark.parametrize("has_config", [False, True])
def test_folders_of_adapters_are_refused_with_their_base(method: str, has_config: bool, tmp_path: Path) -> None:
    tensors = {name: bf16(gaussian(*shape)) for name, shape in ADAPTERS[method].items()}
    settings = {"peft_type": method, "base_model_name_or_path": "ORG/BASE"}
    source = write_checkpoint(
        tmp_path / "src",
        tensors,
        config=CONFIG if has_config else None,
        companions={"adapter_config.json": json.dumps(settings).encode()},
    )
    (source / "model.safetensors").rename(source / "adapter_model.safetensors")
    for command in (("plan", source), ("quantize", source, tmp_path / "out")):
        line = refused(*command)
        assert "adapter_model.safetensors" in line and "ORG/BASE" in line and method in line and "adapter" in line
    assert not (tmp_path / "out").exists()
    alone = invoke("plan", source / "adapter_model.safetensors")  # which also says what lies beside the file
    assert alone.exit_code == 1 and "adapter" in alone.stderr


@pytest.mark.parametrize(
    "file", ["adapters.safetensors", "pytorch_lora_weights.safetensors", "0000100_adapters.safetensors"]
)
def test_files_of_adapters_of_other_tools_are_refused(file: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "src", {f"{MODULE}.lora_a": bf16(gaussian(128, 8))})
    (source / "model.safetensors").rename(source / file)
    assert "adapter" in refused("plan", source)


def test_a_pickled_adapter_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "ORG/BASE"}')
    for file in ("adapter_model.bin", "training_args.bin", "optimizer.pt"):
        (tmp_path / file).write_bytes(b"x")
    line = refused("plan", tmp_path)
    assert "adapter_model.bin" in line and "ORG/BASE" in line


def test_an_adapter_beside_a_whole_model_is_left_out_and_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "src", MODEL, files={"adapter_config.json": {"peft_type": "LORA"}})
    (source / "adapter_model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    assert "left out: adapter_model.safetensors" in done("plan", source).stdout


AROUND = {
    "LoRA beside weights": [f"{MODULE}.base_layer.weight", f"{MODULE}.lora_A.default.weight"],
    "a base layer alone": [f"{MODULE}.base_layer.weight"],
    "modules that were trained whole": ["lm_head.modules_to_save.default.weight", "lm_head.original_module.weight"],
    "a flattened parameter": ["model._fsdp_wrapped_module._flat_param"],
}


@pytest.mark.parametrize("names", AROUND.values(), ids=AROUND)
def test_adapters_around_weights_are_refused_by_name(names: list[str], tmp_path: Path) -> None:
    rest = {name: tensor for name, tensor in MODEL.items() if not name.startswith(names[0].rpartition(".")[0])}
    source = saved(tmp_path / "src", rest | {name: bf16(gaussian(128, 128)) for name in names})
    line = refused("plan", source)
    assert any(name in line for name in names) and "model.safetensors" in line


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"peft_type": 3, "base_model_name_or_path": ["a"]}', b"\xff"])
def test_a_damaged_adapter_config_does_not_hide_the_adapter(content: bytes, tmp_path: Path) -> None:
    source = saved(tmp_path / "src", {f"base_model.model.{MODULE}.lora_A.weight": bf16(gaussian(8, 128))})
    (source / "adapter_config.json").write_bytes(content)
    assert "adapter" in refused("plan", source)
