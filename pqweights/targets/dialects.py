"""What config.json says to vLLM of weights that are stored as other libraries than compressed-tensors store them.

Formats: DeepSeek-V3's FP8 in tiles (arXiv:2412.19437, section 3.3; the quant_method fp8 of vLLM and transformers),
NVFP4 of NVIDIA's Model-Optimizer (https://github.com/NVIDIA/Model-Optimizer), whose hf_quant_config.json TensorRT-LLM
reads, the integers of AutoAWQ (https://github.com/casper-hansen/AutoAWQ) and AutoGPTQ
(https://github.com/AutoGPTQ/AutoGPTQ), and the MXFP4 of gpt-oss (https://huggingface.co/openai/gpt-oss-20b). Each of
these has one format for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pqweights.checkpoint.source import Checkpoint
from pqweights.common.strict_json import json_bytes
from pqweights.convert.conversion import SmallFiles
from pqweights.targets.compressed_tensors import linear_layers, quantization_config
from pqweights.targets.linear import Chosen, module_of, patterns
from pqweights.targets.schemes import SCHEMES, Dialect

HEAD = "lm_head"
MODELOPT_FILE = "hf_quant_config.json"
# As published by the makers of gpt-oss.
_EXCEPT_EXPERTS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", HEAD]


def configuration(checkpoint: Checkpoint, chosen: Mapping[str, Chosen], dialect: Dialect) -> dict[str, Any]:
    """Return the quantization_config. chosen: the formats of the weights that are rounded, all of the dialect"""
    if dialect is Dialect.FINE_GRAINED_FP8:
        return _fine_grained_fp8(_plain_modules(checkpoint, chosen))
    if dialect is Dialect.MODELOPT:
        return _modelopt(_plain_modules(checkpoint, chosen))
    if dialect is Dialect.GPT_OSS:
        return {"quant_method": "mxfp4", "modules_to_not_convert": _EXCEPT_EXPERTS}
    if dialect.halves:
        return _integers(checkpoint, chosen, dialect)
    return quantization_config(checkpoint, chosen)


def small_files(quantization: Mapping[str, Any], dialect: Dialect) -> SmallFiles:
    """Return what is written beside config.json, given the quantization_config."""
    if dialect is not Dialect.MODELOPT:
        return {}
    settings = {
        "quant_algo": quantization["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": quantization["group_size"],
        "exclude_modules": quantization["ignore"],
    }
    return {MODELOPT_FILE: lambda: json_bytes({"producer": quantization["producer"], "quantization": settings})}


def _plain_modules(checkpoint: Checkpoint, chosen: Mapping[str, Chosen]) -> list[str]:
    """Return the names of the modules that may be linear layers, and stay plain."""
    return list(dict.fromkeys([HEAD, *(module_of(n) for n in linear_layers(checkpoint) if n not in chosen)]))


def _integers(checkpoint: Checkpoint, chosen: Mapping[str, Chosen], dialect: Dialect) -> dict[str, Any]:
    """Return the configuration of AutoAWQ or AutoGPTQ; the latter's names layers that stay plain by expressions."""
    choice = next(iter(chosen.values()))
    settings = {"bits": SCHEMES[choice.format].bits, "group_size": choice.size}
    if dialect is Dialect.AWQ:
        plain = _plain_modules(checkpoint, chosen)
        return {
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": plain,
            **settings,
        }
    others = [name for name in linear_layers(checkpoint) if name not in chosen]
    skipped = [HEAD, *(expression.removeprefix("re:") for expression in patterns(others, list(chosen)))]
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "dynamic": {f"-:{expression}": {} for expression in skipped},
        **settings,
    }


def _fine_grained_fp8(plain: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(SCHEMES["fp8-deepseek"].tile or ()),
        "modules_to_not_convert": list(plain),
    }


def _modelopt(plain: Sequence[str]) -> dict[str, Any]:
    numbers = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "config_groups": {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}},
        "ignore": list(plain),
        "producer": {"name": "pqweights"},
    }
