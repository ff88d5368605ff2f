"""Bad inputs: sources that other tools quantized, or that store weights in packed formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hostile.case import CONFIG, FILE, GOOD, NORM, QUANTIZE, UP, VECTOR, Case, Content, Stored, stored, zeros


def named_by_config(name: str, config: dict[str, Any], *fragments: str) -> Case:
    return Case(name, {QUANTIZE: fragments}, {FILE: GOOD, CONFIG: config})


def named_by_tensors(name: str, tensors: Mapping[str, Stored], *fragments: str) -> Case:
    return Case(name, {QUANTIZE: fragments}, {FILE: stored({NORM: VECTOR, **tensors}), CONFIG: {"model_type": "llama"}})


def compressed(weights: Any, layout: str) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}}


Q = "model.layers.0.self_attn.q_proj"
FOREIGN_CASES = [
    named_by_config("gptq-config", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "config.json", "GPTQ"),
    named_by_config("awq-config", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "config.json", "AWQ"),
    named_by_config(
        "bitsandbytes-config",
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "config.json",
        "bitsandbytes",
    ),
    named_by_config(
        "compressed-tensors-int4-config",
        compressed({"num_bits": 4, "type": "int", "group_size": 128}, "pack-quantized"),
        "config.json",
        "compressed-tensors",
        "pack-quantized",
    ),
    named_by_config(
        "compressed-tensors-int8-config",
        compressed({"num_bits": 8, "type": "int"}, "int-quantized"),
        "config.json",
        "compressed-tensors",
        "int-quantized",
    ),
    named_by_config(
        "compressed-tensors-nvfp4-config",
        compressed({"num_bits": 4, "type": "float", "group_size": 16}, "nvfp4-pack-quantized"),
        "config.json",
        "nvfp4",
    ),
    named_by_config(
        "modelopt-nvfp4-config",
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        "config.json",
        "NVFP4",
    ),
    named_by_config("mlx-config", {"quantization": {"group_size": 64, "bits": 4}}, "config.json", "MLX"),
    named_by_config(
        "mlx-config-of-two-keys",
        {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}},
        "config.json",
        "MLX",
    ),
    named_by_config(
        "torchao-config",
        {"quantization_config": {"quant_method": "torchao", "quant_type": {}}},
        "config.json",
        "torchao",
    ),
    named_by_config("quark-config", {"quantization_config": {"quant_method": "quark"}}, "config.json", "quark"),
    named_by_config("unnamed-config", {"quantization_config": {"bits": 3}}, "config.json", "unnamed"),
    named_by_config(
        "nested-config", {"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "config.json", "GPTQ"
    ),
    named_by_config("compressed-tensors-of-strings", compressed("int4", "pack-quantized"), "config.json"),
    named_by_config(
        "modelopt-of-strings",
        {"quantization_config": {"quant_method": "modelopt", "quantization": "FP8"}},
        "config.json",
    ),
    named_by_tensors(
        "gptq-tensors",
        {
            f"{Q}.qweight": zeros("I32", 16, 128),
            f"{Q}.qzeros": zeros("I32", 1, 16),
            f"{Q}.scales": zeros("F16", 1, 128),
            f"{Q}.g_idx": zeros("I32", 128),
        },
        "model.safetensors",
        f"{Q}.",
        "GPTQ",
    ),
    named_by_tensors(
        "awq-tensors",
        {
            f"{Q}.qweight": zeros("I32", 128, 16),
            f"{Q}.qzeros": zeros("I32", 1, 16),
            f"{Q}.scales": zeros("F16", 1, 128),
        },
        f"{Q}.qweight",
        "AWQ",
    ),
    named_by_tensors(
        "bitsandbytes-4-bit-tensors",
        {
            f"{Q}.weight": zeros("U8", 8192, 1),
            f"{Q}.weight.absmax": zeros("U8", 256),
            f"{Q}.weight.quant_map": zeros("F32", 16),
            f"{Q}.weight.quant_state.bitsandbytes__nf4": zeros("U8", 80),
        },
        f"{Q}.weight.absmax",
        "bitsandbytes",
    ),
    named_by_tensors(
        "bitsandbytes-8-bit-tensors",
        {f"{Q}.weight": zeros("I8", 128, 128), f"{Q}.SCB": zeros("F32", 128)},
        f"{Q}.SCB",
        "bitsandbytes",
    ),
    named_by_tensors(
        "compressed-tensors-int4-tensors",
        {
            f"{Q}.weight_packed": zeros("I32", 128, 16),
            f"{Q}.weight_scale": zeros("BF16", 128, 1),
            f"{Q}.weight_shape": zeros("I64", 2),
        },
        f"{Q}.weight_packed",
        "compressed-tensors",
    ),
    named_by_tensors(
        "compressed-tensors-int8-tensors",
        {f"{Q}.weight": zeros("I8", 128, 128), f"{Q}.weight_scale": zeros("BF16", 128, 1)},
        f"{Q}.weight",
    ),
    named_by_tensors(
        "compressed-tensors-nvfp4-tensors",
        {
            f"{Q}.weight_packed": zeros("U8", 128, 64),
            f"{Q}.weight_scale": zeros("F8_E4M3", 128, 8),
            f"{Q}.weight_global_scale": zeros("F32", 1),
        },
        f"{Q}.weight_",
        "NVFP4",
    ),
    named_by_tensors(
        "modelopt-nvfp4-tensors",
        {
            f"{Q}.weight": zeros("U8", 128, 64),
            f"{Q}.weight_scale": zeros("F8_E4M3", 128, 8),
            f"{Q}.weight_scale_2": zeros("F32"),
        },
        f"{Q}.weight_scale_2",
        "NVFP4",
    ),
    named_by_tensors(
        "mlx-tensors",
        {
            f"{Q}.weight": zeros("U32", 128, 16),
            f"{Q}.scales": zeros("BF16", 128, 2),
            f"{Q}.biases": zeros("BF16", 128, 2),
        },
        f"{Q}.",
        "MLX",
    ),
    named_by_tensors(
        "torchao-tensors",
        {
            f"{Q}._weight_qdata": zeros("I8", 128, 128),
            f"{Q}._weight_scale": zeros("BF16", 128, 1),
            f"{Q}._weight_zero_point": zeros("I8", 128, 1),
        },
        f"{Q}._weight_",
        "torchao",
    ),
]
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
EXPERTS = "model.layers.0.mlp.experts.down_proj"


def scaled(name: str, tensors: Mapping[str, Stored], config: Content, *fragments: str) -> Case:
    return Case(name, {QUANTIZE: fragments}, {FILE: stored(tensors), CONFIG: config})


PACKED_CASES = [
    scaled("fp8-without-scales", {UP: zeros("F8_E4M3", 2, 128)}, FP8, UP, "without its scales", f"{UP}_scale_inv"),
    scaled(
        "fp8-scales-of-a-wrong-shape",
        {UP: zeros("F8_E4M3", 200, 300), UP + "_scale_inv": zeros("F32", 2, 2)},
        FP8,
        UP + "_scale_inv",
        "[2, 2]",
    ),
    scaled(
        "fp8-scales-per-column",
        {UP: zeros("F8_E4M3", 200, 300), UP + "_scale": zeros("F32", 300)},
        FP8,
        UP + "_scale",
        "[300]",
    ),
    scaled(
        "fp8-scales-of-integers",
        {UP: zeros("F8_E4M3", 2, 128), UP + "_scale": zeros("I32", 1)},
        FP8,
        UP + "_scale",
        "I32",
    ),
    scaled(
        "fp8-scales-infinite",
        {UP: ("F8_E4M3", [2, 128], b"\x38" * 256), UP + "_scale": ("F32", [1], b"\0\0\x80\x7f")},
        FP8,
        UP,
        "[0, 0]",
    ),
    scaled(
        "fp8-block-of-zero",
        {UP: zeros("F8_E4M3", 2, 128), UP + "_scale_inv": zeros("F32", 1, 1)},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
        "config.json",
        "weight_block_size",
    ),
    scaled(
        "fp8-block-a-string",
        {UP: zeros("F8_E4M3", 2, 128), UP + "_scale_inv": zeros("F32", 1, 1)},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": "128x128"}},
        "config.json",
        "weight_block_size",
    ),
    scaled("mxfp4-without-scales", {EXPERTS + "_blocks": zeros("U8", 2, 32, 2, 16)}, MXFP4, EXPERTS),
    scaled(
        "mxfp4-scales-of-a-wrong-shape",
        {EXPERTS + "_blocks": zeros("U8", 2, 32, 2, 16), EXPERTS + "_scales": zeros("U8", 2, 32, 4)},
        MXFP4,
        EXPERTS,
    ),
    scaled(
        "mxfp4-beside-a-plain-weight",
        {
            EXPERTS + "_blocks": zeros("U8", 2, 32, 2, 16),
            EXPERTS + "_scales": zeros("U8", 2, 32, 2),
            EXPERTS: zeros("BF16", 2, 64, 32),
        },
        MXFP4,
        EXPERTS,
        "twice",
    ),
]
