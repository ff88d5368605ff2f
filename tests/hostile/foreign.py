"""Bad inputs: sources that other tools quantized, or that store weights in packed formats."""

from __future__ import annotations

from typing import Any

from hostile.case import CONFIG, FILE, GOOD, NORM, QUANTIZE, UP, VECTOR, Case, Content, Stored, stored, zeros


def named_by_config(name: str, config: dict[str, Any], *fragments: str) -> Case:
    return Case(name, {QUANTIZE: ("config.json", *fragments)}, {FILE: GOOD, CONFIG: config})


def named_by_method(name: str, method: str, *fragments: str, **settings: Any) -> Case:
    config = {"quantization_config": {"quant_method": method, **settings}}
    return named_by_config(name, config, *fragments)


def compressed(name: str, layout: str, *fragments: str, weights: Any) -> Case:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return named_by_method(name, "compressed-tensors", *fragments, format=layout, config_groups=groups)


def tensors_of(stem: str, text: str) -> dict[str, Stored]:
    """Tensors of zeros, each with the end of its name, its dtype and its shape: `.scales F16 1 128, .weight ...`."""
    parts = [part.split() for part in text.split(",")]
    return {stem + end.strip("-"): zeros(dtype, *map(int, shape)) for end, dtype, *shape in parts}


def named_by_tensors(name: str, text: str, *fragments: str) -> Case:
    files: dict[str, Content] = {FILE: stored({NORM: VECTOR, **tensors_of(Q, text)}), CONFIG: {"model_type": "llama"}}
    return Case(f"{name}-tensors", {QUANTIZE: fragments}, files)


Q = "model.layers.0.self_attn.q_proj"
GROUPS_OF_128 = {"num_bits": 4, "type": "int", "group_size": 128}
MLX = {"group_size": 64, "bits": 4}
CASES = [
    named_by_method("gptq-marlin-config", "gptq", "GPTQ", "marlin", bits=4, checkpoint_format="marlin"),
    named_by_method("gptq-bits-config", "gptq", "GPTQ", "bits 5", bits=5),
    named_by_method("awq-gemv-config", "awq", "AWQ", "gemv", bits=4, version="gemv"),
    named_by_method("bitsandbytes-config", "bitsandbytes", "bitsandbytes", load_in_4bit=True),
    compressed("compressed-tensors-sparse", "marlin-24", "compressed-tensors (marlin-24)", weights=GROUPS_OF_128),
    named_by_method("modelopt-mixed-config", "modelopt", "MIXED_PRECISION", quant_algo="MIXED_PRECISION"),
    named_by_config("mlx-config", {"quantization": MLX}, "MLX"),
    named_by_config("mlx-config-of-two-keys", {"quantization": MLX, "quantization_config": MLX}, "MLX"),
    named_by_method("torchao-config", "torchao", "torchao", quant_type={}),
    named_by_method("quark-config", "quark", "quark"),
    named_by_config("unnamed-config", {"quantization_config": {"bits": 3}}, "unnamed"),
    named_by_config("nested-config", {"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "GPTQ"),
    compressed("compressed-tensors-of-strings", "pack-quantized", weights="int4"),
    named_by_method("modelopt-of-strings", "modelopt", quantization="FP8"),
    named_by_tensors(
        "gptq",
        ".qweight I32 16 128, .qzeros I32 1 16, .scales F16 1 128, .g_idx I32 128",
        "model.safetensors",
        f"{Q}.",
        "GPTQ",
    ),
    named_by_tensors("awq", ".qweight I32 128 16, .qzeros I32 1 16, .scales F16 1 128", f"{Q}.qweight", "AWQ"),
    named_by_tensors(
        "bitsandbytes-4-bit",
        ".weight U8 8192 1, .weight.absmax U8 256, .weight.quant_map F32 16, "
        ".weight.quant_state.bitsandbytes__nf4 U8 80",
        f"{Q}.weight.absmax",
        "bitsandbytes",
    ),
    named_by_tensors("bitsandbytes-8-bit", ".weight I8 128 128, .SCB F32 128", f"{Q}.SCB", "bitsandbytes"),
    named_by_tensors(
        "compressed-tensors-int4",
        ".weight_packed I32 128 16, .weight_scale BF16 128 1, .weight_shape I64 2",
        f"{Q}.weight_packed",
        "compressed-tensors",
    ),
    named_by_tensors("compressed-tensors-int8", ".weight I8 128 128, .weight_scale BF16 128 1", f"{Q}.weight"),
    named_by_tensors(
        "compressed-tensors-nvfp4",
        ".weight_packed U8 128 64, .weight_scale F8_E4M3 128 8, .weight_global_scale F32 1",
        f"{Q}.weight_",
        "NVFP4",
    ),
    named_by_tensors(
        "modelopt-nvfp4",
        ".weight U8 128 64, .weight_scale F8_E4M3 128 8, .weight_scale_2 F32",
        f"{Q}.weight_scale_2",
        "NVFP4",
    ),
    named_by_tensors("mlx", ".weight U32 128 16, .scales BF16 128 2, .biases BF16 128 2", f"{Q}.", "MLX"),
    named_by_tensors(
        "torchao",
        "._weight_qdata I8 128 128, ._weight_scale BF16 128 1, ._weight_zero_point I8 128 1",
        f"{Q}._weight_",
        "torchao",
    ),
]
EXPERTS = "model.layers.0.mlp.experts.down_proj"
INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": GROUPS_OF_128 | {"group_size": 64}}},
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def packed(name: str, settings: dict[str, Any], text: str, *fragments: str) -> Case:
    """A packed weight that is broken. text: see tensors_of"""
    files: dict[str, Content] = {FILE: stored(tensors_of(Q, text)), CONFIG: {"quantization_config": settings}}
    return Case(f"packed-{name}", {QUANTIZE: fragments}, files)


GPTQ4 = {"quant_method": "gptq", "bits": 4, "group_size": 128}
GPTQ_CODES = ".qweight I32 16 128, .scales F16 1 128"
AWQ4 = {"quant_method": "awq", "bits": 4, "group_size": 128}
AWQ_CODES = ".qweight I32 128 16, .qzeros I32 1 16"
CODES, SHAPE = ".weight_packed I32 128 16", ".weight_shape I64 2"
CASES += [
    packed("without-scales", INT4, f"{CODES}, {SHAPE}", f"{Q}.weight_packed", f"{Q}.weight_scale", "found none"),
    packed("without-shape", INT4, f"{CODES}, .weight_scale BF16 128 2", f"{Q}.weight_shape", "found none"),
    packed("scales-of-integers", INT4, f"{CODES}, {SHAPE}, .weight_scale I8 128 2", f"{Q}.weight_scale", "I8"),
    packed("scales-of-other-rows", INT4, f"{CODES}, {SHAPE}, .weight_scale BF16 64 2", f"{Q}.weight_scale", "[64, 2]"),
    packed(
        "scales-of-other-groups", INT4, f"{CODES}, {SHAPE}, .weight_scale BF16 128 3", f"{Q}.weight_packed", "[128, 3]"
    ),
    packed("codes-of-a-vector", INT4, f".weight_packed I32 16, {SHAPE}", f"{Q}.weight_packed", "[16]"),
    packed(
        "zeros-of-a-wrong-shape",
        INT4,
        f"{CODES}, {SHAPE}, .weight_scale BF16 128 2, .weight_zero_point I32 128 1",
        f"{Q}.weight_zero_point",
        "[16, 2]",
    ),
    packed(
        "with-an-order-of-columns",
        INT4,
        f"{CODES}, {SHAPE}, .weight_scale BF16 128 2, .weight_g_idx I32 128",
        f"{Q}.weight_g_idx",
    ),
    packed("gptq-without-zeros", GPTQ4, GPTQ_CODES, f"{Q}.qzeros", "found none"),
    packed("gptq-zeros-of-a-wrong-shape", GPTQ4, f"{GPTQ_CODES}, .qzeros I32 1 8", f"{Q}.qzeros", "[1, 16]"),
    packed("gptq-order-of-a-wrong-length", GPTQ4, f"{GPTQ_CODES}, .qzeros I32 1 16, .g_idx I32 100", f"{Q}.qweight"),
    packed("gptq-order-of-floats", GPTQ4, f"{GPTQ_CODES}, .qzeros I32 1 16, .g_idx F32 128", f"{Q}.g_idx", "F32"),
    packed("gptq-codes-of-bytes", GPTQ4, ".qweight U8 16 128, .scales F16 1 128", f"{Q}.qweight", "U8"),
    packed("awq-without-scales", AWQ4, AWQ_CODES, f"{Q}.scales", "found none"),
    packed("awq-scales-of-other-groups", AWQ4, f"{AWQ_CODES}, .scales F16 2 128", f"{Q}.scales", "[1, 128]"),
    packed("floats-without-unit", NVFP4, ".weight U8 128 64, .weight_scale F8_E4M3 128 8", f"{Q}.weight_scale_2"),
    packed(
        "floats-of-a-wrong-group",
        NVFP4,
        ".weight U8 128 64, .weight_scale F8_E4M3 128 4",
        f"{Q}.weight_scale",
        "[128, 8]",
    ),
    packed("floats-of-a-vector", NVFP4, ".weight U8 64, .weight_scale F8_E4M3 8", f"{Q}.weight", "[64]"),
]


def fp8(name: str, text: str, *fragments: str, block: Any = (128, 128)) -> Case:
    """text: see tensors_of; `-` stands for the weight itself"""
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    return Case(f"fp8-{name}", {QUANTIZE: fragments}, {FILE: stored(tensors_of(UP, text)), CONFIG: config})


def mxfp4(name: str, text: str, *fragments: str) -> Case:
    files: dict[str, Content] = {
        FILE: stored(tensors_of(EXPERTS, text)),
        CONFIG: {"quantization_config": {"quant_method": "mxfp4"}},
    }
    return Case(f"mxfp4-{name}", {QUANTIZE: (EXPERTS, *fragments)}, files)


INFINITE: dict[str, Stored] = {UP: ("F8_E4M3", [2, 128], b"\x38" * 256), UP + "_scale": ("F32", [1], b"\0\0\x80\x7f")}
CASES += [
    fp8("without-scales", "- F8_E4M3 2 128", UP, "without its scales", f"{UP}_scale_inv"),
    fp8("fp4-scales-of-a-wrong-group", "- I8 64 64, _scale F8_E8M0 64 3", UP + "_scale", "[64, 4]"),
    fp8("fp4-scales-of-floats", "- I8 64 64, _scale F32 64 4", UP + "_scale", "F8_E8M0"),
    fp8("fp4-a-vector", "- I8 64, _scale F8_E8M0 2", UP, "[64]"),
    fp8("scales-of-a-wrong-shape", "- F8_E4M3 200 300, _scale_inv F32 2 2", UP + "_scale_inv", "[2, 2]"),
    fp8("scales-per-column", "- F8_E4M3 200 300, _scale F32 300", UP + "_scale", "[300]"),
    fp8("scales-of-integers", "- F8_E4M3 2 128, _scale I32 1", UP + "_scale", "I32"),
    Case(
        "fp8-scales-infinite",
        {QUANTIZE: (UP, "[0, 0]")},
        {
            FILE: stored(INFINITE),
            CONFIG: {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        },
    ),
    fp8("block-of-zero", "- F8_E4M3 2 128, _scale_inv F32 1 1", "config.json", "weight_block_size", block=[0, 128]),
    fp8("block-a-string", "- F8_E4M3 2 128, _scale_inv F32 1 1", "config.json", "weight_block_size", block="128x128"),
    mxfp4("without-scales", "_blocks U8 2 32 2 16"),
    mxfp4("scales-of-a-wrong-shape", "_blocks U8 2 32 2 16, _scales U8 2 32 4"),
    mxfp4("beside-a-plain-weight", "_blocks U8 2 32 2 16, _scales U8 2 32 2, - BF16 2 64 32", "twice"),
]
