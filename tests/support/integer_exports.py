"""Exports to integers: a small checkpoint with an export of each kind, and what their folders say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import families
import numpy as np
from helpers import Array, as_float32, bf16, f32, gaussian, read_all, run_command, write_checkpoint

from pqweights.convert.manifest import read_manifest


def quantization(folder: Path) -> dict[str, Any]:
    """The quantization_config of an export."""
    settings: dict[str, Any] = json.loads((folder / "config.json").read_bytes())["quantization_config"]
    return settings


def integer_names(folder: Path) -> list[str]:
    """The names of the weights that an export holds as integers."""
    return [tensor.name for tensor in read_manifest(folder).tensors if tensor.action == "integer"]


def in_memory(name: str) -> str:
    """A parameter name without the prefix that only image-text models have."""
    return name.replace("language_model.", "")


def as_loaded(weights: Array) -> Array:
    """Round to BF16, as transformers does while it loads: experts, or all weights with dequantize=True."""
    return as_float32(bf16(weights))


def expected_layers(base: Path, name: str, kinds: tuple[str, ...]) -> set[str]:
    """The weights of the text model's linear layers whose last name component is in `kinds`."""
    return {
        tensor
        for tensor, (_, values) in read_all(families.model(base, name)).items()
        if tensor.endswith(".weight") and tensor.split(".")[-2] in kinds
        if values.ndim == 2 and ".visual." not in tensor
    }


LAYER = "model.layers.0"


def linear_master(
    folder: Path, columns: Mapping[str, int], *, rows: int = 64, recipe: str = "q5", model_type: str = "llama"
) -> Path:
    """A master, in `folder / "master"`, of linear layers alone, whose rows have these lengths, of `folder / "src"`."""
    tensors = {name: bf16(gaussian(rows, width, seed=i)) for i, (name, width) in enumerate(columns.items())}
    write_checkpoint(folder / "src", tensors, config={"model_type": model_type, "dtype": "bfloat16"})
    run_command({"quantize": str(folder / "src"), "recipe": recipe}, folder / "master")
    return folder / "master"


def several_layers(folder: Path) -> Path:
    """Write two shards with six linear layers that do not fill whole tiles, and tensors that stay plain."""
    heavy = np.random.default_rng(9).standard_t(4, (132, 384)).astype(np.float32) * 0.02
    first = {
        "model.embed_tokens.weight": bf16(gaussian(96, 128, seed=1)),
        f"{LAYER}.self_attn.q_proj.weight": bf16(gaussian(60, 256, seed=2)),
        f"{LAYER}.self_attn.k_proj.weight": bf16(gaussian(36, 256, seed=3)),
        f"{LAYER}.self_attn.v_proj.weight": bf16(gaussian(36, 256, seed=4)),
        f"{LAYER}.self_attn.o_proj.weight": f32(gaussian(130, 128, seed=5)),
    }
    second = {
        f"{LAYER}.mlp.down_proj.weight": bf16(heavy),
        f"{LAYER}.mlp.up_proj.weight": bf16(np.full((64, 128), 0.0125, dtype=np.float32)),  # rescued
        f"{LAYER}.mlp.fc1.weight": bf16(gaussian(40, 130, seed=6)),  # no groups
        f"{LAYER}.mamba.A_log": f32(gaussian(33, seed=7)),
        "model.norm.weight": bf16(1 + gaussian(128, seed=8)),
    }
    return write_checkpoint(
        folder, first, second, config={"model_type": "llama", "dtype": "bfloat16"}, companions={"tokenizer.json": b"{}"}
    )


ROUNDED = {f"{LAYER}.self_attn.{n}_proj.weight" for n in "qkvo"}
ROUNDED |= {f"{LAYER}.mlp.{n}_proj.weight" for n in ("down", "up")}
KINDS = {
    "tile": {"target": "torchao"},
    "nibbles": {"target": "torchao", "packing": "plain", "qparams": "minmax"},
    "vllm": {"target": "vllm", "qparams": "minmax"},
    "original": {"target": "vllm", "original": True},
}


def work(folder: Path, kind: str, **options: Any) -> dict[str, Any]:
    """The command that exports a kind, with shards of 60 kB."""
    asked: dict[str, Any] = {"export": str(folder / "master"), "max_shard_bytes": 60_000, **KINDS[kind], **options}
    asked["narrow_layers_packed"] = True
    if asked.get("original") is True:
        asked["original"] = str(folder / "src")
    return asked
