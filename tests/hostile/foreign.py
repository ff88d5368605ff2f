"""Bad inputs: sources that other tools quantized, or that store weights in packed formats."""

from __future__ import annotations

import json
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
CASES = [
    named_by_method("gptq-bits-config", "gptq", "GPTQ", "bits 5", bits=5),
    named_by_method("awq-gemv-config", "awq", "AWQ", "gemv", bits=4, version="gemv"),
    compressed("compressed-tensors-sparse", "marlin-24", "compressed-tensors (marlin-24)", weights=GROUPS_OF_128),
    named_by_method("modelopt-mixed-config", "modelopt", "MIXED_PRECISION", quant_algo="MIXED_PRECISION"),
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


def converted(name: str, config: dict[str, Any], tensors: dict[str, Stored], *fragments: str) -> Case:
    """A weight of MLX, torchao or bitsandbytes that is broken."""
    return Case(f"packed-{name}", {QUANTIZE: fragments}, {FILE: stored(tensors), CONFIG: config})


def mlx(name: str, text: str, *fragments: str, settings: Any = None) -> Case:
    how = {"group_size": 64, "bits": 4} if settings is None else settings
    return converted(f"mlx-{name}", {"quantization": how}, tensors_of(Q, text), *fragments)


def torchao(name: str, text: str, *fragments: str) -> Case:
    config = {"quantization_config": {"quant_method": "torchao"}}
    return converted(f"torchao-{name}", config, tensors_of(f"{Q}._weight", text), *fragments)


def bitsandbytes(name: str, text: str, *fragments: str, state: Any = None) -> Case:
    """state: what is in the place of the JSON of a weight in 4 bits"""
    config = {"quantization_config": {"quant_method": "bitsandbytes"}}
    raw = state if isinstance(state, bytes) else json.dumps(STATE | (state or {})).encode()
    parts = {f"{Q}.weight.quant_state.bitsandbytes__nf4": ("U8", [len(raw)], raw)} if "SCB" not in text else {}
    return converted(f"bitsandbytes-{name}", config, {**tensors_of(Q, text), **parts}, *fragments)


STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [128, 128]}
NF4_MAP, NF4 = ".weight.quant_map F32 16", ".weight U8 8192 1, .weight.absmax F32 256"
MLX_PARTS = ".scales BF16 128 2, .biases BF16 128 2"
CASES += [
    mlx("without-biases", ".weight U32 128 16, .scales BF16 128 2", f"{Q}.biases", "found none"),
    mlx("scales-of-other-groups", ".weight U32 128 16, .scales BF16 128 4", f"{Q}.scales", "[128, 2]"),
    mlx("scales-of-integers", ".weight U32 128 16, .scales I32 128 2", f"{Q}.scales", "I32"),
    mlx("words-of-no-group", f".weight U32 128 15, {MLX_PARTS}", f"{Q}.weight", "groups of 64", "[128, 15]"),
    mlx("codes-of-a-vector", ".weight U32 16, .scales BF16 2", f"{Q}.weight", "[16]"),
    mlx("a-list", f".weight U32 128 16, {MLX_PARTS}", "quantization: expected keys and values", settings=[4]),
    mlx("bits-of-7", f".weight U32 128 16, {MLX_PARTS}", Q, "bits 7", settings={"group_size": 64, "bits": 7}),
    mlx("mode-a-number", f".weight U32 128 16, {MLX_PARTS}", Q, "mode 4", settings={"group_size": 64, "mode": 4}),
    mlx("groups-of-0", f".weight U32 128 16, {MLX_PARTS}", Q, "group_size 0", settings={"group_size": 0, "bits": 4}),
    mlx(
        "floats-with-scales-of-floats",
        ".weight U32 128 16, .scales BF16 128 4",
        f"{Q}.scales",
        "U8",
        settings={"group_size": 32, "mode": "mxfp4"},
    ),
    torchao("without-scales", "_qdata I8 128 128", f"{Q}._weight_scale", "found none"),
    torchao("scales-of-other-rows", "_qdata I8 128 128, _scale BF16 64 1", f"{Q}._weight_scale", "[64, 1]"),
    torchao(
        "int4-scales-of-other-rows", "_qdata I8 128 64, _scale BF16 2 64, _zero_point BF16 2 64", "_scale", "[2, 64]"
    ),
    torchao(
        "zeros-of-a-wrong-shape", "_qdata I8 128 128, _scale BF16 128 1, _zero_point I8 1 1", "_zero_point", "[1, 1]"
    ),
    torchao("tiles", "_qdata I32 16 1 32 4, _scale_and_zero BF16 2 128 2", f"{Q}._weight_qdata", "tiles for tinygemm"),
    torchao(
        "scaled-inputs",
        "_qdata I8 128 128, _scale BF16 128 1, _act_pre_scale BF16 128",
        "_act_pre_scale",
        "scaled inputs",
    ),
    bitsandbytes("without-scales", f".weight U8 8192 1, {NF4_MAP}", f"{Q}.weight.absmax", "found none"),
    bitsandbytes("without-a-map", NF4, f"{Q}.weight.quant_map", "found none"),
    bitsandbytes("scales-of-other-blocks", f"{NF4}, {NF4_MAP}", "absmax", "[128]", state={"blocksize": 128}),
    bitsandbytes("scales-of-bytes", f".weight U8 8192 1, .weight.absmax U8 256, {NF4_MAP}", "absmax", "F32 [256]"),
    bitsandbytes(
        "nested-without-a-map",
        f".weight U8 8192 1, .weight.absmax U8 256, .weight.nested_absmax F32 1, {NF4_MAP}",
        "nested_quant_map",
        "found none",
        state={"nested_blocksize": 256},
    ),
    bitsandbytes("state-not-json", f"{NF4}, {NF4_MAP}", "bitsandbytes__nf4", state=b"{"),
    bitsandbytes("state-a-list", f"{NF4}, {NF4_MAP}", "bitsandbytes__nf4", state=b"[]"),
    bitsandbytes("state-beyond-memory", f"{NF4}, {NF4_MAP}", "bitsandbytes__nf4", "65536", state=bytes(1 << 17)),
    bitsandbytes(
        "shape-beyond-memory", f"{NF4}, {NF4_MAP}", "bitsandbytes__nf4", "shape", state={"shape": [2**40, 2**40]}
    ),
    bitsandbytes("shape-of-another", f"{NF4}, {NF4_MAP}", f"{Q}.weight", "[128, 130]", state={"shape": [128, 130]}),
    bitsandbytes("blocks-of-0", f"{NF4}, {NF4_MAP}", "blocksize", state={"blocksize": 0}),
    bitsandbytes("offset-a-text", f"{NF4}, {NF4_MAP}", "nested_offset", state={"nested_offset": "x"}),
    bitsandbytes("int8-scales-of-other-rows", ".weight I8 128 128, .SCB F32 64", f"{Q}.SCB", "[128]"),
    bitsandbytes("int8-codes-of-floats", ".weight F16 128 128, .SCB F32 128", f"{Q}.weight", "I8"),
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


CASES += [
    fp8("without-scales", "- F8_E4M3 2 128", UP, "without its scales", f"{UP}_scale_inv"),
    fp8("fp4-scales-of-a-wrong-group", "- I8 64 64, _scale F8_E8M0 64 3", UP + "_scale", "[64, 4]"),
    fp8("fp4-scales-of-floats", "- I8 64 64, _scale F32 64 4", UP + "_scale", "F8_E8M0"),
    fp8("fp4-a-vector", "- I8 64, _scale F8_E8M0 2", UP, "[64]"),
    fp8("scales-of-a-wrong-shape", "- F8_E4M3 200 300, _scale_inv F32 2 2", UP + "_scale_inv", "[2, 2]"),
    fp8("scales-per-column", "- F8_E4M3 200 300, _scale F32 300", UP + "_scale", "[300]"),
    fp8("scales-of-integers", "- F8_E4M3 2 128, _scale I32 1", UP + "_scale", "I32"),
    fp8("block-of-zero", "- F8_E4M3 2 128, _scale_inv F32 1 1", "config.json", "weight_block_size", block=[0, 128]),
    fp8("block-a-string", "- F8_E4M3 2 128, _scale_inv F32 1 1", "config.json", "weight_block_size", block="128x128"),
    mxfp4("without-scales", "_blocks U8 2 32 2 16"),
    mxfp4("scales-of-a-wrong-shape", "_blocks U8 2 32 2 16, _scales U8 2 32 4"),
    mxfp4("beside-a-plain-weight", "_blocks U8 2 32 2 16, _scales U8 2 32 2, - BF16 2 64 32", "twice"),
]

# Formats of tools whose codes are not decoded: by the tensors that they store, without a configuration that says so.
FOREIGN = {
    "quanto": (".weight._data I8 128 128, .weight._scale BF16 128 1, .input_scale F32", "quanto"),
    "quanto-fp8": (".weight._data F8_E4M3 128 128, .weight._scale BF16 128 1", "quanto"),
    "hqq": (".W_q U8 64 128, .scale F16 256 1, .zero F16 256 1", "HQQ"),
    "hqq-as-floats": (".W_q F16 64 64, .scale F16 256 1, .zero F16 256 1", "HQQ"),
    "eetq": (".weight I8 128 128, .weight_scales F16 128", "EETQ"),
    "aqlm": (".codes I32 128 16 1, .codebooks F16 1 256 1 8, .scales F16 128 1 1 1", "AQLM"),
    "vptq": (".indices I32 1 128 16, .centroids.weight F16 1 8192", "VPTQ"),
    "spqr": (".dense_weights I32 128 4, .row_offsets I32 129, .col_vals I32 7", "SpQR"),
    "higgs": (".weight I32 128 32, .scales F16 128 1, .tables F16 16 1, .tables2 F16 16 1 1", "HIGGS"),
    "exl2": (".q_weight I32 16 128, .q_invperm I32 128, .q_scale_max F16 1", "EXL2"),
    "exl3": (".trellis I32 8 8 64, .suh F16 128, .svh F16 128", "EXL3"),
    "quip": (".Qidxs I64 128 16, .SU F16 128, .SV F16 128", "QuIP"),
    "squeezellm": (".lookup_table F16 128 16, .packed I32 16 128", "SqueezeLLM"),
    "ternary": (".weight U8 32 128, .weight_scale BF16 1", f"{Q}.weight"),
    "unknown-bytes": (".weight U8 128 64", f"{Q}.weight"),
    "unknown-words": (".matrix I32 128 16, .levels F32 16", f"{Q}.matrix"),
    "fp8-with-an-unknown-scale": (".weight F8_E4M3 128 128, .weight_inverse BF16 1", f"{Q}.weight_inverse"),
    "fp8-with-a-descale": (".weight F8_E4M3 128 128, .descale BF16 1", f"{Q}.descale"),
    "fp8-with-a-maximum": (".weight F8_E4M3 128 128, .weight_amax BF16 1", f"{Q}.weight_amax"),
    "fp8-with-block-scales": (".weight F8_E4M3 128 128, .weight_block_scale BF16 1", f"{Q}.weight_block_scale"),
}
CASES += [
    named_by_tensors(f"foreign-{name}", text, "model.safetensors", said) for name, (text, said) in FOREIGN.items()
]
SCALED_ELSEWHERE = {f"{Q}.weight": zeros("F8_E4M3", 128, 128), f"scales.{Q}": zeros("F32", 1)}
CASES.append(
    Case("fp8-scales-elsewhere", {QUANTIZE: (f"{Q}.weight", "scales")}, {FILE: stored(SCALED_ELSEWHERE), CONFIG: {}})
)
SCALED_IN_PART = {f"{Q}.weight": zeros("F8_E4M3", 128, 128), **tensors_of(UP, "- F8_E4M3 2 128, _scale F32 1")}
CASES.append(Case("fp8-scaled-in-part", {QUANTIZE: (f"{Q}.weight", UP)}, {FILE: stored(SCALED_IN_PART), CONFIG: {}}))


def foreign_method(method: str) -> Case:
    """A format that the configuration names, with codes of it."""
    config = {"quantization_config": {"quant_method": method}}
    files: dict[str, Content] = {FILE: stored(tensors_of(Q, ".weight U8 128 64, .scales F16 128")), CONFIG: config}
    return Case(f"{method}-method", {QUANTIZE: ("config.json", method)}, files)


CASES += [foreign_method(method) for method in ("hqq", "quanto", "eetq", "aqlm", "vptq", "spqr", "higgs", "bitnet")]
