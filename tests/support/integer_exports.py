"""Exports to integers: independent readers of their formats, and a small checkpoint with an export of each kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import families
import numpy as np
from helpers import Array, Tensor, as_float32, bf16, f32, gaussian, read_all, write_checkpoint

from pqweights.rewrite.manifest import read_manifest


def quantization(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_bytes())["quantization_config"]
    return found


def integer_names(folder: Path) -> list[str]:
    """The names of the weights that an export holds as integers."""
    return [tensor.name for tensor in read_manifest(folder).tensors if tensor.action == "integer"]


def in_memory(name: str) -> str:
    """A parameter name without the prefix that only image-text models have."""
    return name.replace("language_model.", "")


def unpacked(words: Array, bits: int) -> Array:
    """Codes from 32-bit words [N, K * bits / 32], the first code lowest."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return codes.reshape(len(words), -1)


def from_compressed_tensors(tensors: Mapping[str, Tensor], name: str, bits: int = 4) -> Array:
    """A weight in float32: (code - 2**(bits - 1)) * scale."""
    codes = unpacked(tensors[f"{name}_packed"][1], bits).astype(np.float32) - 2 ** (bits - 1)
    assert tensors[f"{name}_shape"][1].tolist() == list(codes.shape)
    scales = as_float32(tensors[f"{name}_scale"])
    return codes * np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


def from_vllm_format(tensors: Mapping[str, Tensor], name: str) -> Array:
    """A weight of any format of the target vllm, in float32, by the specifications of its numbers."""
    import torch

    if f"{name}_shape" in tensors:
        return from_compressed_tensors(tensors, name, 4)
    stored = f"{name}_packed" if f"{name}_packed" in tensors else name
    dtype, values = tensors[stored]
    if dtype == "U8":  # E2M1, the first in the low half of a byte: OCP microscaling formats 1.0
        magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        nibbles = np.stack([values & 15, values >> 4], axis=-1).reshape(len(values), -1)
        numbers = np.where(nibbles & 8, -1, 1).astype(np.float32) * magnitudes[nibbles & 7]
    elif dtype == "F8_E4M3":
        numbers = torch.from_numpy(values.view(np.uint8).copy()).view(torch.float8_e4m3fn).float().numpy()
    else:
        assert dtype == "I8"
        numbers = values.astype(np.float32)
    scale_dtype, scales = tensors[f"{name}_scale"]
    factors = (
        np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
        if scale_dtype == "U8"
        else as_float32((scale_dtype, scales))
    )
    return np.asarray(numbers * np.repeat(factors, numbers.shape[1] // factors.shape[1], axis=1), np.float32)


def as_loaded(weights: Array) -> Array:
    """Round to BF16, as transformers does while it loads: experts, or all weights with dequantize=True."""
    return as_float32(bf16(weights))


def untiled(words: Array) -> Array:
    """Codes [8 * m, 128 * n] from PyTorch's tiles [m, n, 32, 4] i32, as matrix_to_m16n8k16_Bint4_layout in int4mm.cu.

    Each word of a lane holds 2 x 4 values of one row, those with even numbers in its low half.
    """
    rows, columns = words.shape[:2]
    codes = np.full((rows * 8, columns * 128), 255, dtype=np.uint8)
    for lane in range(32):
        for word in range(4):
            for nibble, value in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                column = word * 32 + lane % 4 * 2 + value % 2 + value // 2 % 2 * 8 + value // 4 * 16
                found = (words[:, :, lane, word].view(np.uint32) >> np.uint32(4 * nibble)) & np.uint32(15)
                codes[lane // 4 :: 8, column::128] = found
    return codes


def from_tiles(words: Array, pairs: Array) -> Array:
    """Decode tiles to (code - 8) * scale + zero, padding included; pairs [K / g, N, 2] f32."""
    codes = untiled(words).astype(np.float32) - 8
    scales, zeros = (np.repeat(pairs[..., i].T, codes.shape[1] // len(pairs), axis=1) for i in (0, 1))
    return codes * scales + zeros


def from_nibbles(packed: Array, scales: Array, zeros: Array) -> Array:
    """Decode an Int4Tensor: signed nibbles [N, K / 2] i8, the even column low; scales and zeros [K / g, N] f32."""
    low, high = packed.view(np.uint8) & 15, packed.view(np.uint8) >> 4
    codes = np.stack([low, high], axis=-1).reshape(len(packed), -1).astype(np.int16)
    codes = np.where(codes > 7, codes - 16, codes).astype(np.float32)
    return codes * np.repeat(scales.T, codes.shape[1] // len(scales), 1) + np.repeat(
        zeros.T, codes.shape[1] // len(zeros), 1
    )


def from_torchao(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], tile: bool) -> Array:
    stem = name.removesuffix("weight") + "_weight"
    qdata = tensors[f"{stem}_qdata"][1]
    if tile:
        return from_tiles(qdata, as_float32(tensors[f"{stem}_scale_and_zero"]))[: shape[0], : shape[1]]
    return from_nibbles(qdata, *(as_float32(tensors[f"{stem}_{part}"]) for part in ("scale", "zero_point")))


def expected_layers(base: Path, name: str, kinds: tuple[str, ...]) -> set[str]:
    """The weights of the text model's linear layers whose last name component is in `kinds`."""
    return {
        tensor
        for tensor, (_, values) in read_all(families.model(base, name)).items()
        if tensor.removesuffix(".weight").rsplit(".", 1)[-1] in kinds
        and tensor.endswith(".weight")
        and values.ndim == 2
        and ".visual." not in tensor
    }


LAYER = "model.layers.0"


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


ROUNDED = {f"{LAYER}.{n}.weight" for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
ROUNDED |= {f"{LAYER}.{n}.weight" for n in ("self_attn.o_proj", "mlp.down_proj", "mlp.up_proj")}
KINDS = {
    "tile": {"target": "torchao-int4"},
    "nibbles": {"target": "torchao-int4", "packing": "plain", "qparams": "minmax"},
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
