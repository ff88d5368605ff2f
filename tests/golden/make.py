"""The golden master: a source made with integer arithmetic, and the master that every version must make of it.

    PYTHONPATH=tests:tests/support python -m golden.make

writes `master/` and `expected.json` anew. Do so only when the format changes on purpose, because these bytes define it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import helpers
import independent_reader
import numpy as np
import numpy.typing as npt
from calls import quantize
from commands import done

from pqweights.formats.lloyd_max import LloydMax
from pqweights.planning.recipe import parse_recipe

HERE = Path(__file__).parent
MASTER = HERE / "master"
EXPECTED = HERE / "expected.json"
MAX_SHARD_BYTES = 2200

RECIPE = """
name: golden
description: Every width, and tensors that the default policy would keep.
bits: 5
rules:
  - {name: "*.two.weight", bits: 2}
  - {name: "*.three.weight", bits: 3}
  - {name: "*.four.weight", bits: 4}
  - {name: "*.six.weight", bits: 6}
  - {name: "*.seven.weight", bits: 7}
  - {name: "*.eight.weight", bits: 8}
  - {role: vector, name: "model.positions", bits: 4, reason: a vector by name of its role}
  - {name: "*.kept.weight", keep: true, reason: asked for}
"""

CONFIG = {
    "model_type": "golden",
    "torch_dtype": "bfloat16",
    "text_config": {"hidden_size": 128},
    "vision_config": {"dtype": "float16"},
}


def bell(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Integers from -510 to 510 of a bell-shaped distribution: the bytes of a hash of the index, summed."""
    x = (np.arange(count, dtype=np.uint64) * 2654435761 + seed * 40503) % 2**32
    for _ in range(3):
        x = (x ^ (x >> 15)) * 2246822519 % 2**32
        x = (x ^ (x >> 13)) * 3266489917 % 2**32
    return sum(((x >> shift) & 255).astype(np.int64) for shift in (0, 8, 16, 24)) - 510


def weights(*shape: int, seed: int, exponent: int = -14) -> npt.NDArray[np.float32]:
    """Bell-shaped integers times 2**exponent: exact in float32."""
    count = int(np.prod(shape))
    return np.ldexp(bell(count, seed).astype(np.float32), exponent).astype(np.float32).reshape(shape)


def shards() -> list[dict[str, helpers.Tensor]]:
    """The tensors of the source, file by file."""
    signs = np.where(independent_reader.SIGNS, np.float32(-0.5), np.float32(0.5))
    float8 = (bell(256, seed=17).astype(np.int64) % 256).astype(np.uint8).reshape(2, 128)
    float8[(float8 & 0x7F) == 0x7F] = 1  # not NaN
    float4 = (bell(2 * 3 * 2 * 16, seed=18).astype(np.int64) % 256).astype(np.uint8).reshape(2, 3, 2, 16)
    spike = weights(2, 128, seed=21)
    spike[0, 9], spike[1] = 40.0, 0.0
    first = {
        "model.embed_tokens.weight": helpers.bf16(weights(5, 77, seed=1)),
        "model.layers.two.weight": helpers.bf16(weights(3, 128, seed=2)),
        "model.layers.three.weight": helpers.f16(weights(1, 256, seed=3)),
        "model.layers.four.weight": helpers.f32(weights(2, 128, seed=4)),
        "model.layers.input_layernorm.weight": helpers.bf16(1 + weights(9, seed=5)),
        "model.layers.kept.weight": helpers.f16(weights(3, 5, seed=6)),
        "model.layers.five.weight": helpers.bf16(spike),
    }
    second = {
        "model.layers.six.weight": helpers.bf16(weights(2, 130, seed=7)),
        "model.layers.seven.weight": helpers.f16(weights(129, 2, seed=8)),
        "model.layers.eight.weight": helpers.f32(weights(1, 128, seed=9)),
        "model.layers.mlp.experts.gate_up_proj": helpers.bf16(weights(2, 1, 128, seed=10)),
        "model.layers.mlp.experts.down_proj": helpers.f32(weights(2, 3, 50, seed=11)),
        "model.layers.mlp.gate.weight": helpers.f32(weights(2, 3, seed=12)),
        "model.layers.constant.weight": helpers.bf16(np.full((2, 128), 0.0125, np.float32)),
        "model.layers.aligned.weight": helpers.bf16(np.stack([np.full(128, 0.5, np.float32), signs])),
        "model.layers.small.weight": helpers.f32(weights(2, 100, seed=13, exponent=-60)),
        "model.layers.large.weight": helpers.bf16(weights(2, 128, seed=14, exponent=30)),
        "model.layers.faint.weight": helpers.f32(weights(1, 128, seed=15, exponent=-146)),
        "model.layers.zero.weight": helpers.bf16(np.zeros((1, 128), np.float32)),
        "model.layers.double.weight": ("F64", weights(2, 70, seed=19).astype(np.float64) / 3),
        "model.layers.float8.weight": ("F8_E4M3", float8),
        "model.layers.float8.weight_scale": helpers.f32(np.array([0.0123], np.float32)),
        "model.layers.mlp.experts.other_proj_blocks": ("U8", float4),
        "model.layers.mlp.experts.other_proj_scales": ("U8", np.arange(112, 124, dtype=np.uint8).reshape(2, 3, 2)),
        "model.positions": helpers.f16(weights(300, seed=16)),
        "model.scale": helpers.f32(np.array(0.75, np.float32)),
        "model.position_ids": ("I64", np.arange(7, dtype=np.int64)),
        "model.mask": ("BOOL", np.arange(5) % 2 == 0),
        "model.empty": helpers.f32(np.zeros((0, 4), np.float32)),
    }
    return [first, second]


def write_source(folder: Path) -> Path:
    """Write the source checkpoint."""
    companions = {
        "tokenizer.json": b'{"tokens": ["a", "b"]}\n',
        "code/modeling.py": b"# nothing\n",
        "README.md": b"#\n",
    }
    return helpers.write_checkpoint(folder, *shards(), config=CONFIG, companions=companions)


def write_master(source: Path, out: Path, threads: int = 1) -> None:
    """Quantize the source with the golden recipe, with norms of least squares at all widths as up to version 0.2.0."""
    with mock.patch.object(LloydMax, "gained", ()):
        quantize(source, out, parse_recipe(RECIPE, "golden"), threads=threads, max_shard_bytes=MAX_SHARD_BYTES)


def write_by_command(source: Path, out: Path, recipe: str, threads: int) -> None:
    """Quantize a source with the text of a recipe, by the command."""
    path = source.parent / "golden.yaml"
    path.write_text(recipe, encoding="utf-8")
    done("quantize", source, out, "--recipe", path, "--threads", threads, "--max-shard-size", "5GB")


def mixed_scales(seed: int) -> npt.NDArray[np.float32]:
    """34 blocks with norms from 2**-20 to 2**20, one of zeros, and one of a single weight."""
    norms = np.ldexp(1.0, (np.arange(34) * 7) % 41 - 20).astype(np.float32)
    mixed = weights(34, 128, seed=seed) * norms[:, None]
    mixed[5], mixed[9, 1:] = 0, 0
    return mixed


def described(tensor: independent_reader.Tensor) -> dict[str, Any]:
    """The entry of a decoded tensor in expected.json."""
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "first_bytes": tensor.data[:16].hex(),
        "sha256": hashlib.sha256(tensor.data).hexdigest(),
    }


read_master = independent_reader.read_master


def write_golden(golden: Any) -> None:
    """Write the golden master of a module such as this one, and what it decodes to, anew."""
    shutil.rmtree(golden.MASTER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        golden.write_master(golden.write_source(Path(folder) / "source"), golden.MASTER)
    expected = {tensor.name: described(tensor) for tensor in golden.read_master(golden.MASTER)}
    golden.EXPECTED.write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    size = sum(len(data) for data in helpers.folder_bytes(golden.MASTER).values())
    print(f"{golden.MASTER}: {size} bytes, {len(expected)} tensors", file=sys.stderr)


if __name__ == "__main__":
    write_golden(sys.modules[__name__])
