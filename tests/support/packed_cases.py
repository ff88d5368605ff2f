"""Sources in the packed formats of other tools, made by their libraries or by their definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import open_local

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


def assert_any_range_is_read(tensor: LogicalTensor) -> None:
    whole, count = values(tensor, "F32"), element_count(tensor)
    generator = np.random.default_rng(1)
    for _ in range(20):
        start = int(generator.integers(count))
        length = int(generator.integers(1, count - start + 1))
        assert torch.equal(values(tensor, "F32", start, length), whole[start : start + length])


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


def compress(shape: tuple[int, ...], group: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Random codes in a format of the library, by local names, and the weight that the library decodes."""
    from compressed_tensors import compressors
    from compressed_tensors.quantization import QuantizationScheme

    generator = torch.Generator().manual_seed(3)
    quantization = QuantizationScheme(**group)
    weights, (rows, columns) = group["weights"], shape
    weight = torch.randn(shape, generator=generator).to(torch.bfloat16)
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
    bits: int, version: str, *, order: bool = False, shape: tuple[int, int] = (64, 96)
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The tensors and the configuration of a GPTQ source, and its weight in float32 [N, K]."""
    (rows, columns), generator = shape, np.random.default_rng(bits)
    groups = columns // 32
    codes = generator.integers(0, 1 << bits, (columns, rows))
    zeros = generator.integers(0, 1 << bits, (groups, rows))
    scales = generator.random((groups, rows)).astype(np.float16)
    group_of = np.arange(columns) // 32
    if order:
        generator.shuffle(group_of)
    stored_zeros = (zeros - (version == "gptq")) % (1 << bits)
    tensors = {
        "qweight": words_of(codes.T, bits).T,
        "qzeros": words_of(stored_zeros, bits),
        "scales": scales,
        "g_idx": group_of.astype(np.int32),
    }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": version}
    weight = (codes - zeros[group_of]).astype(np.float32) * scales.astype(np.float32)[group_of]
    return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in tensors.items()}, settings, weight.T


def awq(shape: tuple[int, int] = (64, 96)) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The tensors and the configuration of an AWQ source, and its weight in float32 [N, K]."""
    (rows, columns), generator = shape, np.random.default_rng(7)
    groups = columns // 32
    codes, zeros = (generator.integers(0, 16, (lines, rows)) for lines in (columns, groups))
    scales = generator.random((groups, rows)).astype(np.float16)

    def words(numbers: Any) -> Any:
        return words_of(numbers.reshape(len(numbers), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(numbers.shape), 4)

    tensors = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    weight = (codes - zeros.repeat(32, 0)).astype(np.float32) * scales.astype(np.float32).repeat(32, 0)
    return {name: torch.from_numpy(a) for name, a in tensors.items()}, settings, weight.T


def transposed_source(folder: Path, tensors: dict[str, Any], settings: dict[str, Any]) -> Path:
    named = {f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}
    return save(folder, {GATE: torch.randn(8, 96).to(torch.float16), **named}, settings)


# --- MLX, torchao and bitsandbytes ---

Made = tuple[dict[str, Any], dict[str, Any], Any]  # tensors by local names, what config.json has, the weight in float32


def mlx(mode: str, bits: int, group: int, shape: tuple[int, int] = (40, 384), dtype: str = "bfloat16") -> Made:
    """What mlx.core rounds a weight to, and what it decodes that to with scales in float32."""
    import mlx.core as mx

    values = mx.array(np.random.default_rng(bits).standard_normal(shape).astype(np.float32)).astype(getattr(mx, dtype))
    made = dict(zip(("weight", "scales", "biases"), mx.quantize(values, group, bits, mode=mode), strict=False))
    exact = {
        name: part.astype(mx.float32) if mode == "affine" and name != "weight" else part for name, part in made.items()
    }
    numbers = [exact["weight"], exact["scales"], exact.get("biases")]
    decoded = mx.dequantize(*numbers, group, bits, mode=mode).astype(mx.float32)
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[dtype]

    def tensor(name: str, part: Any) -> Any:
        if name == "weight":
            return torch.from_numpy(np.array(part).view(np.int32)).view(torch.uint32)
        return (
            torch.from_numpy(np.array(part)) if mode != "affine" else torch.from_numpy(np.array(exact[name])).to(kind)
        )

    settings = {"group_size": group, "bits": bits, **({} if mode == "affine" else {"mode": mode})}
    return {name: tensor(name, part) for name, part in made.items()}, {"quantization": settings}, np.array(decoded)


def torchao(config: Any, shape: tuple[int, int] = (40, 384)) -> Made:
    """What torchao's own quantize_ and its safetensors form make of a layer, and what dequantize returns."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    layer = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16)
    layer.weight.data = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    quantize_(layer, config)
    tensors, _ = flatten_tensor_state_dict({f"{MODULE}.weight": layer.weight.data})
    local = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in tensors.items()}
    settings = {"quant_method": "torchao", "quant_type": {"default": {"_type": type(config).__name__}}}
    return local, {"quantization_config": settings}, layer.weight.data


# Numbers of bitsandbytes 0.50.2 (functional.py, create_normal_map); the highest bit of FP4 is its sign.
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip
FP4 = [number / 12 for number in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)]


def bitsandbytes(
    kind: str, shape: tuple[int, ...] = (40, 97), block: int = 64, nested: int | None = None, dtype: str = "bfloat16"
) -> Made:
    """A weight in 4 bits by its definition, element by element. nested: the size of blocks of scales"""
    generator, count = np.random.default_rng(9), int(np.prod(shape))
    codes, blocks = generator.integers(0, 16, count + count % 2), -(-count // block)
    table = np.array(NF4 if kind == "nf4" else [*FP4, *(-number for number in FP4)], dtype=np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": dtype, "shape": list(shape)}
    scales = generator.random(blocks).astype(np.float32)
    tensors = {"weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None], "weight.quant_map": table}
    if nested is None:
        tensors["weight.absmax"] = scales
    else:
        numbers = np.sort(generator.standard_normal(256)).astype(np.float32)
        of_blocks = generator.random(-(-blocks // nested)).astype(np.float32)
        tensors["weight.absmax"] = generator.integers(0, 256, blocks).astype(np.uint8)
        tensors |= {"weight.nested_absmax": of_blocks, "weight.nested_quant_map": numbers}
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.0625}
        place = np.arange(blocks) // nested
        scales = numbers[tensors["weight.absmax"]] * of_blocks[place] + np.float32(0.0625)
    weight = np.array([table[codes[place]] * scales[place // block] for place in range(count)], dtype=np.float32)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(
        json.dumps(state).encode(), dtype=np.uint8
    ).copy()
    settings = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    return {name: torch.from_numpy(part) for name, part in tensors.items()}, settings, weight.reshape(shape)


def llm_int8(shape: tuple[int, int] = (40, 96)) -> Made:
    """A weight of LLM.int8 of bitsandbytes."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    scales = torch.rand(shape[0], generator=generator)
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    settings = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    return tensors, settings, codes.float() * scales[:, None] * 7.874015718698502e-3


def converted_source(folder: Path, made: Made, module: str = MODULE) -> Path:
    """A source with a layer in one of these formats. made: tensors, what config.json has, and the weight"""
    tensors, settings, _ = made
    named = {f"{module}.{name}": tensor for name, tensor in tensors.items()}
    save(folder, {GATE: torch.randn(8, 96).to(torch.bfloat16), **named}, None)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **settings}))
    return folder
