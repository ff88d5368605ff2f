"""Which weights share one width: those that runtimes put together into one matrix, or compute with in one kernel.

q, k and v of a layer; gate and up; the down-projections into the latents of MLA (DeepSeek-V2, arXiv:2405.04434); what
enters linear attention; all experts of a layer; embeddings that are tied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Of a module's name, what is put together with its neighbours, and the name of the whole.
_FUSED = (
    (re.compile(r"([qkv]_proj|[qkv]_lin|query|key|value|w[qkv]|[qkv])"), "qkv"),
    (re.compile(r"(q_a_proj|kv_a_proj_with_mqa)"), "qkv_a"),
    (re.compile(r"(gate_proj|up_proj|w1|w3)"), "gate_up"),
    (re.compile(r"in_proj_(qkv|z)"), "in_proj_qkvz"),
)
_EXPERTS = re.compile(r"(.*?\.?(?:experts|\w*_experts))\..+")
# Of tokens: those of positions and the like are never tied.
_INPUT_EMBEDDING = re.compile(r"embed_tokens|wte|word_embeddings?|tok_embeddings|embed_in|shared|embeddings?|embedding")
TIED = "embeddings"


def group_of(name: str, role: str, tied: bool) -> str:
    """The name of the group that a weight belongs to. tied: whether the model's embeddings are."""
    module = name.removesuffix(".weight")
    if tied and (role == "lm_head" or (role == "embedding" and _INPUT_EMBEDDING.fullmatch(module.rpartition(".")[2]))):
        return TIED
    if role == "expert" and (experts := _EXPERTS.fullmatch(module)):
        return experts[1]
    path, _, last = module.rpartition(".")
    whole = fused_name(last)
    return f"{path}.{whole}" if path else whole


def fused_name(module: str) -> str:
    """What a layer is called when it is put together with its neighbours, from the last component of its name."""
    return next((whole for pattern, whole in _FUSED if pattern.fullmatch(module)), module)


def grouped(weights: Iterable[tuple[str, str]], tied: bool) -> dict[str, list[str]]:
    """Groups of weights, given as (name, role): group -> names, both in the order in which they came."""
    groups: dict[str, list[str]] = {}
    for name, role in weights:
        groups.setdefault(group_of(name, role, tied), []).append(name)
    return groups
