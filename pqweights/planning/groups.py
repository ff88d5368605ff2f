"""Which weights share one bit width: those that runtimes fuse into one matrix, or compute with in one kernel.

These are q, k and v of a layer; gate and up; the down-projections into the latents of MLA (DeepSeek-V2,
arXiv:2405.04434); the inputs of linear attention; all experts of a layer; and tied embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# The last component of the name of a module that is fused with its neighbours, and the name of the fused layer.
_FUSED = (
    (re.compile(r"([qkv]_proj|[qkv]_lin|query|key|value|w[qkv]|[qkv])"), "qkv"),
    (re.compile(r"(q_a_proj|kv_a_proj_with_mqa)"), "qkv_a"),
    (re.compile(r"(gate_proj|up_proj|w1|w3)"), "gate_up"),
    (re.compile(r"in_proj_(qkv|z)"), "in_proj_qkvz"),
)
_EXPERTS = re.compile(r"(.*?\.?(?:experts|\w*_experts))\..+")
# Embeddings of tokens; embeddings of positions and the like are never tied.
_INPUT_EMBEDDING = re.compile(r"embed_tokens|wte|word_embeddings?|tok_embeddings|embed_in|shared|embeddings?|embedding")
TIED = "embeddings"


def group_of(name: str, role: str, tied: bool) -> str:
    """Return the name of the group that a weight belongs to. tied: whether the embeddings of the model are tied."""
    module = name.removesuffix(".weight")
    if tied and (role == "lm_head" or (role == "embedding" and _INPUT_EMBEDDING.fullmatch(module.rpartition(".")[2]))):
        return TIED
    if role == "expert" and (experts := _EXPERTS.fullmatch(module)):
        return experts[1]
    path, _, last = module.rpartition(".")
    whole = fused_name(last)
    return f"{path}.{whole}" if path else whole


def fused_name(module: str) -> str:
    """Return the name of the fused layer for the last component of a module's name; else that component itself."""
    return next((whole for pattern, whole in _FUSED if pattern.fullmatch(module)), module)


def grouped(weights: Iterable[tuple[str, str]], tied: bool) -> dict[str, list[str]]:
    """Group weights, given as (name, role); return the names in each group, groups and names in the given order."""
    groups: dict[str, list[str]] = {}
    for name, role in weights:
        groups.setdefault(group_of(name, role, tied), []).append(name)
    return groups
