"""MiniMax M2 and M3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pqweights.models import tensor_names as parts
from pqweights.models.description import LIKE_LLAMA, MlxDifferences, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama_cpp import (
    DEFAULT,
    DENSE_FIRST,
    EXPERTS,
    FULL,
    NORMED,
    ROUTER_BIAS,
    SCALED,
    SIGMOID,
    SILU_ONLY,
    Architecture,
    Rope,
    Setting,
    halved,
    list_experts,
    mlp_shapes,
)
from pqweights.models.settings import Settings, chooses, layer_types, sparse_layers
from pqweights.models.tensor_names import LOCAL, Names, below
from pqweights.models.traits import Trait

_SPARSE = "minimax_m3_sparse"


def _chooses_in_sparse_layers(settings: Settings) -> str:
    if [kind == _SPARSE for kind in layer_types(settings)] == sparse_layers(settings):
        return ""
    first = settings.number_of("leading_dense_block_count", 0)
    return f"llama.cpp has {_SPARSE} in all layers behind the first {first}, and no others"


_M2 = Architecture(
    name="MINIMAXM2", modules=ROUTER_BIAS, rope=Rope(partial=True), values=SILU_ONLY,
    settings=(*EXPERTS, Setting("expert_feed_forward_length", "intermediate_size"), SIGMOID),
)  # fmt: skip
# Attention to blocks of tokens that an indexer chooses.
_M3 = Architecture(
    name="DOTS1", label="minimax-m3",
    modules={**ROUTER_BIAS, r"block_sparse_moe\.shared_experts\.(\w+)": r"mlp.shared_experts.\1"},
    tensors={r"self_attn\.index(?:_|er\.)([qk])_(proj|norm)\.weight": r"indexer.\1_\2.weight"},
    cuts=halved(r"mlp\.gate_up_proj", "mlp", "dense_intermediate_size")  # of the text model alone
    | halved(r"mlp\.shared_experts\.gate_up_proj", "mlp.shared_experts", "shared_intermediate_size"),
    settings=(
        *EXPERTS, DENSE_FIRST, SIGMOID, SCALED, NORMED, Setting("feed_forward_length", "dense_intermediate_size"),
        Setting("expert_feed_forward_length", "intermediate_size"), Setting("expert_shared_count", 1),
        Setting(".attention.indexer.head_count", "index_n_heads"),
        Setting(".attention.indexer.key_length", "index_head_dim"),
        Setting(".attention.indexer.top_k", "index_topk_blocks"),
        Setting(".attention.indexer.block_size", "index_block_size"),
        Setting(".attention.indexer.local_blocks", "index_local_blocks"),
    ),
    shapes=mlp_shapes("dense_intermediate_size"), layer_types=frozenset({FULL, _SPARSE}),
    rope=Rope(DEFAULT, partial=True), own_head=True,
    equal=(("shared_intermediate_size", "intermediate_size"), ("index_n_heads", "num_key_value_heads")),
    values={"hidden_act": ("silu", "swigluoai"), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
    checks=(_chooses_in_sparse_layers,),
    notes=(
        chooses(
            lambda n: n("index_topk_blocks") * n("index_block_size"),
            "; without flash attention it attends to all tokens",
        ),
    ),
)  # fmt: skip


def _restate(values: dict[str, Any]) -> None:
    """State the kinds of layers, which published configurations list as 0 and 1, and the indexer."""
    sparse = values.get("sparse_attention_config")
    sparse = sparse if isinstance(sparse, dict) else {}
    names = {"num_index_heads": "n_heads", "index_dim": "head_dim", "block_size": "block_size"}
    names |= {"topk_blocks": "topk_blocks", "local_block": "local_blocks"}
    values |= {f"index_{name}": sparse[f"sparse_{old}"] for old, name in names.items() if f"sparse_{old}" in sparse}
    if isinstance(chosen := sparse.get("sparse_attention_freq"), list):
        values.setdefault("layer_types", [_SPARSE if of else FULL for of in chosen])
    if isinstance(experts := values.get("moe_layer_freq"), list):
        values.setdefault("mlp_layer_types", ["sparse" if of else "dense" for of in experts])


def _m2_mlx(config: Mapping[str, Any]) -> dict[str, Any]:
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    return {"rotary_dim": int(config["head_dim"] * share)}


_M3_ROW = Row(
    traits=frozenset({Trait.ZERO_CENTRED_NORMS}), llama_cpp=_M3, restate=_restate,
    defaults=sizes(6144, 3072, 60, 64, 524288) | LIKE_LLAMA | {
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 4,
        "dense_intermediate_size": 12288, "shared_intermediate_size": 3072, "routed_scaling_factor": 2.0,
        "norm_topk_prob": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "index_n_heads": 4, "index_head_dim": 128,
        "index_block_size": 128, "index_topk_blocks": 16, "index_local_blocks": 1,
    },
)  # fmt: skip

ROWS: dict[str, Row] = {
    "minimax_m2": Row(
        llama_cpp=_M2,
        names=Names(
            class_name="MiniMaxM2ForCausalLM", keys=LOCAL,
            layers=parts.ATTENTION + below("block_sparse_moe", "gate e_score_correction_bias") + parts.W123,
        ),
        mlx=MlxDifferences(constants={"shared_intermediate_size": 0}, computed=_m2_mlx),
        defaults=sizes(3072, 1536, 62, 48, 196608) | LIKE_LLAMA | {
            "num_key_value_heads": 8, "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
        },
    ),
    "minimax_m3_vl": _M3_ROW,
    "minimax_m3_vl_text": replace(
        _M3_ROW, publish=list_experts,
        names=Names(
            class_name="MiniMaxM3VLForCausalLM", keys=LOCAL,
            layers=parts.ATTENTION + below("self_attn.indexer", "q_proj k_proj q_norm k_norm")
            + below("mlp", "gate_up_proj down_proj gate") + parts.ROUTER_BIAS
            + below("mlp.experts", "gate_up_proj down_proj") + below("mlp.shared_experts", "gate_up_proj down_proj"),
        ),
    ),
}  # fmt: skip
