"""Sources in the packed formats of other tools, made by their libraries or by their definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import open_local

torch = pytest.importorskip("torch")

UP = "model.layers.0.mlp.up_proj.weight"
GATE = "model.layers.0.mlp.gate.weight"


def save(folder: Path, tensors: dict[str, Any], settings: dict[str, Any] | None) -> Path:
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "llama", **({} if settings is None else {"quantization_config": settings})}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensor_of(folder: Path, name: str = UP) -> LogicalTensor:
    (found,) = [tensor for tensor in open_local(folder).tensors if tensor.name == name]
    return found


def values(tensor: LogicalTensor, dtype: str, start: int = 0, count: int | None = None) -> Any:
    kind = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    count = element_count(tensor) - start if count is None else count
    raw = np.empty(count * kind.itemsize, dtype=np.uint8)
    tensor.read(start, count, dtype, raw)
    return torch.from_numpy(raw).view(kind)


# --- compressed-tensors ---


def scheme(layout: str, bits: int, kind: str = "int", group: int | None = None, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **strategy, **more}
    return {"targets": ["Linear"], "format": layout, "weights": weights, "input_activations": None}


def settings_of(*groups: dict[str, Any], layout: str | None = None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout or groups[0]["format"],
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": ["lm_head", "re:.*gate$"],
    }


def compress(shape: tuple[int, ...], group: dict[str, Any], dtype: Any = None) -> tuple[dict[str, Any], Any]:
    """Random codes in a format of the library, by local names, and the weight that the library decodes."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    generator = torch.Generator().manual_seed(3)
    quantization = QuantizationScheme(**group)
    weights, (rows, columns) = group["weights"], shape
    weight = torch.randn(shape, generator=generator).to(dtype or torch.bfloat16)
    size = weights.get("group_size", columns)
    scale = torch.rand(rows, columns // size, generator=generator) / 2 ** weights["num_bits"] + 0.01
    state = {"weight": weight, "weight_scale": scale.to(weight.dtype)}
    if not weights["symmetric"]:
        half = 2 ** (weights["num_bits"] - 1)
        state["weight_zero_point"] = torch.randint(-half, half, scale.shape, generator=generator).to(torch.int8)
    if weights["strategy"] == "tensor_group":
        state["weight_global_scale"] = torch.tensor([37.3])
        state["weight_scale"] = (scale * 100).to(torch.float8_e4m3fn).to(weight.dtype)
    elif weights["type"] == "float":
        state["weight_scale"] = torch.exp2(torch.randint(-9, 3, scale.shape, generator=generator)).to(weight.dtype)
    compressor = compressors.BaseCompressor.get_value_from_registry(group["format"])
    packed = compressor.compress(state, quantization)
    return packed, compressor.decompress(packed, quantization)["weight"]


def source_of(folder: Path, packed: dict[str, Any], settings: dict[str, Any] | None) -> Path:
    tensors = {UP.removesuffix("weight") + name: tensor for name, tensor in packed.items()}
    return save(folder, {GATE: torch.randn(8, 96).to(torch.bfloat16), **tensors}, settings)


INTEGERS = [
    *((scheme("pack-quantized", bits, group=32), (40, 96)) for bits in (2, 3, 4, 8)),
    *((scheme("pack-quantized", bits, group=32, symmetric=False), (37, 96)) for bits in (2, 3, 4, 8)),
    *((scheme("pack-quantized", bits), (5, 100)) for bits in (3, 4)),
    (scheme("pack-quantized", 4, symmetric=False), (70, 100)),
    (scheme("pack-quantized", 4), (5, 126)),  # whose words have room for more
    (scheme("int-quantized", 8), (40, 96)),
    (scheme("int-quantized", 8, group=32, symmetric=False), (40, 96)),
]
FLOATS = [
    (scheme("mxfp4-pack-quantized", 4, "float", group=32, scale_dtype="torch.uint8"), (40, 96)),
    (
        scheme("nvfp4-pack-quantized", 4, "float", 16, strategy="tensor_group", scale_dtype="torch.float8_e4m3fn"),
        (40, 96),
    ),
    (scheme("mxfp8-quantized", 8, "float", group=32, scale_dtype="torch.uint8"), (40, 96)),
]


# --- GPTQ and AWQ ---

MODULE = UP.removesuffix(".weight")


def words_of(codes: np.ndarray[Any, Any], bits: int) -> Any:
    """Words along the last axis, bit by bit: code i has bits i * bits and on, the lowest first."""
    lines, count = codes.shape
    words = np.zeros((lines, count * bits // 32), dtype=np.uint32)
    for place in range(count * bits):
        code, digit = divmod(place, bits)
        words[:, place // 32] |= (codes[:, code].astype(np.uint32) >> digit & 1) << np.uint32(place % 32)
    return words.view(np.int32)


def gptq(
    bits: int, version: str, *, group: int = 32, order: bool = False, shape: tuple[int, int] = (64, 96)
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The tensors and the configuration of a GPTQ source, and its weight in float32 [N, K]."""
    (rows, columns), generator = shape, np.random.default_rng(bits)
    groups = columns // group
    codes = generator.integers(0, 1 << bits, (columns, rows))
    zeros = generator.integers(0, 1 << bits, (groups, rows))
    scales = generator.random((groups, rows)).astype(np.float16)
    group_of = np.arange(columns) // group
    if order:
        generator.shuffle(group_of)
    stored_zeros = (zeros - (version == "gptq")) % (1 << bits)
    tensors = {
        "qweight": words_of(codes.T, bits).T,
        "qzeros": words_of(stored_zeros, bits),
        "scales": scales,
        "g_idx": group_of.astype(np.int32),
    }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": version}
    weight = (codes - zeros[group_of]).astype(np.float32) * scales.astype(np.float32)[group_of]
    return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in tensors.items()}, settings, weight.T


def awq(shape: tuple[int, int] = (64, 96), group: int = 32) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The tensors and the configuration of an AWQ source, and its weight in float32 [N, K]."""
    (rows, columns), generator = shape, np.random.default_rng(7)
    groups = columns // group
    codes, zeros = (generator.integers(0, 16, (lines, rows)) for lines in (columns, groups))
    scales = generator.random((groups, rows)).astype(np.float16)

    def words(numbers: Any) -> Any:
        return words_of(numbers.reshape(len(numbers), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(numbers.shape), 4)

    tensors = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    weight = (codes - zeros.repeat(group, 0)).astype(np.float32) * scales.astype(np.float32).repeat(group, 0)
    return {name: torch.from_numpy(a) for name, a in tensors.items()}, settings, weight.T


def transposed_source(folder: Path, tensors: dict[str, Any], settings: dict[str, Any]) -> Path:
    named = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    return save(folder, {GATE: torch.randn(8, 96).to(torch.float16), **named}, settings)
