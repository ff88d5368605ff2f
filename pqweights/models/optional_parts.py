"""Parts of layers that a model has only if a key of its configuration says so, as the classes of transformers read it.

A file may hold them all the same, left from another configuration: transformers then computes without them. Found with
version 5.23 by building its models on the meta device, as tests/models/test_optional_parts.py does.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pqweights.models.conventions import TEXT_LAYERS

_MLP = r"(?:mlp|feed_forward)\.(?:shared_experts\.)?(?:gate|up|down)_proj\.bias"
_QKV = r"self_attn\.[qkv]_proj\.bias"
# Keys, and expressions for the names of these parts within a layer.
PARTS = {
    "attention_bias": r"self_attn\.(?:[qkvo]_proj|q_a_proj|kv_a_proj_with_mqa)\.bias",
    "attention_out_bias": r"self_attn\.o_proj\.bias",
    "qkv_bias": _QKV,
    "use_qkv_bias": _QKV,
    "mlp_bias": _MLP,
    "use_bias": rf"self_attn\.[qkvo]_proj\.bias|{_MLP}|mlp\.c_(?:fc|proj)\.bias",
    "use_qk_norm": r"self_attn\.[qk]_norm\.weight",
    "qk_layernorm": r"self_attn\.[qk]_layernorm\..+",
}
# The types that read a key, and those of them that have the parts where it is absent.
READ_BY = {
    "attention_bias": """
afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bitnet cohere cohere2 cohere2_moe deepseek_v2 deepseek_v3
deepseek_v32 diffllama dots1 falcon_h1 flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe
glm4_moe_lite glm_moe_dsa gpt_oss granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense
hunyuan_v1_moe hy_v3 hyperclovax jais2 kimi_linear laguna llama llama4_text mellum mimo_v2_flash minicpm3 nanochat olmo
olmo2 olmo3 olmo_hybrid olmoe phimoe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text
qwen3_vl_text seed_oss smollm3 solar_open vaultgemma youtu
""",
    "attention_out_bias": "seed_oss",
    "qkv_bias": "qwen2_moe",
    "use_qkv_bias": "stablelm",
    "mlp_bias": """
arcee aria_text bamba cwm deepseek_v2 falcon_h1 granite helium hy_v3 hyperclovax jais2 llama minicpm3 seed_oss smollm3
""",
    "use_bias": "ernie4_5 ernie4_5_moe starcoder2",
    "use_qk_norm": "cohere glm4_moe",
    "qk_layernorm": "phi stablelm",
}
THERE_BY_DEFAULT = {
    "attention_bias": "glm glm4 gpt_oss jais2 seed_oss",
    "qkv_bias": "qwen2_moe",
    "mlp_bias": "jais2",
    "use_bias": "starcoder2",
}


def unused_parts(names: Iterable[str], text: Mapping[str, Any]) -> dict[str, str]:
    """Return which tensors the class of a text model has no place for, each with the key that says so.

    names: those of stored tensors
    text: its configuration
    """
    absent = {key: pattern for key, (pattern, is_there) in _parts_of(text).items() if not is_there}
    unused = {}
    for name in names if absent else ():
        layer = TEXT_LAYERS.match(name)
        key = None if layer is None else next((k for k, p in absent.items() if p.fullmatch(name, layer.end())), None)
        if key is not None:
            unused[name] = key
    return unused


def missing_parts(names: Iterable[str], text: Mapping[str, Any]) -> list[str]:
    """Return the keys that promise parts of which no layer has one. names: those of stored tensors"""
    inner = {name[layer.end() :] for name in names if (layer := TEXT_LAYERS.match(name))}
    promised = {key: pattern for key, (pattern, is_there) in _parts_of(text).items() if is_there}
    return [key for key, pattern in promised.items() if not any(map(pattern.fullmatch, inner))]


def _parts_of(text: Mapping[str, Any]) -> dict[str, tuple[re.Pattern[str], bool]]:
    """Return the keys that the class of a text model reads: which parts they are of, and whether it has them."""
    kind = str(text.get("model_type"))
    keys = part_defaults(kind)
    parts = {}
    for key, is_default in keys.items():
        # Outputs of attention have a key of their own in Seed-OSS.
        pattern = _QKV if key == "attention_bias" and "attention_out_bias" in keys else PARTS[key]
        parts[key] = (re.compile(pattern), bool(text.get(key, is_default)))
    return parts


@functools.cache
def part_defaults(kind: str) -> dict[str, bool]:
    """Return the keys that a type reads, and what it takes where they are absent. kind: its `model_type`"""
    read = (key for key, types in READ_BY.items() if kind in types.split())
    return {key: kind in THERE_BY_DEFAULT.get(key, "").split() for key in read}
