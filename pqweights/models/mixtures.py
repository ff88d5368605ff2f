"""Types with experts in the place of some MLPs, and attention in all layers, that are a row otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pqweights.models import tensor_names as parts
from pqweights.models.description import LIKE_LLAMA, SILU, TIED, TRANSPOSED, MlxDifferences, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.llama import HUNYUAN_ROPE, LLAMA, restate_exaone
from pqweights.models.llama_cpp import (
    ALTERNATING,
    DEFAULT,
    DENSE_FIRST,
    EXPERT_WIDTH,
    EXPERTS,
    GROUPS,
    LLAMA3,
    NO_BIAS,
    NORMED,
    QKV,
    ROUTER_BIAS,
    SCALED,
    SHARED,
    SIGMOID,
    SILU_ONLY,
    Architecture,
    Rope,
    Setting,
    Windows,
    mlp_shapes,
)
from pqweights.models.settings import each_fourth_unrotated, needs_windows
from pqweights.models.tensor_names import BIASED, LOCAL, MTP, ROUTED, Names
from pqweights.models.traits import Trait

_TRANSPOSED_EXPERTS = frozenset({Trait.TRANSPOSED_EXPERTS})
_GLM4_MOE = Architecture(
    name="GLM4_MOE", modules=ROUTER_BIAS, rope=Rope(partial=True), biases=QKV, drafts={}, values=SILU_ONLY,
    settings=(*EXPERTS, *GROUPS, EXPERT_WIDTH, DENSE_FIRST, SHARED, SIGMOID, SCALED, NORMED),
)  # fmt: skip
_SHARED_MLP = parts.ATTENTION + parts.MLP + parts.EXPERTS + parts.below("mlp.shared_mlp", parts.MATRICES)


def _exaone_moe_mlx(config: Any) -> dict[str, Any]:
    return {"is_moe_layer": [kind == "sparse" for kind in config["mlp_layer_types"]]}


ROWS: dict[str, Row] = {
    "mixtral": Row(
        llama_cpp=replace(LLAMA, settings=EXPERTS),
        always=parts.NORMS + parts.HEADS + " block_sparse_moe.gate block_sparse_moe.experts",
        names=Names(
            class_name="MixtralForCausalLM", layers=parts.ATTENTION + " block_sparse_moe.gate" + parts.W123, keys=LOCAL,
        ),
        defaults=sizes(4096, 14336, 32, 32, 131072) | LIKE_LLAMA | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    "olmoe": Row(
        llama_cpp=Architecture(
            name="OLMOE", settings=EXPERTS, shapes={"ATTN_K_NORM": ("hidden_size", None)},
            values=SILU_ONLY | {"norm_topk_prob": (False,), "clip_qkv": (None,)},
        ),
        names=Names(class_name="OlmoeForCausalLM"),
        defaults=sizes(2048, 2048, 16, 16, 4096) | LIKE_LLAMA | {
            "rms_norm_eps": 1e-05, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        },
    ),
    "phimoe": Row(llama_cpp_differs="normalizes without the mean, and weighs two experts by one softmax"),
    "hunyuan_v1_moe": Row(
        llama_cpp=Architecture(
            name="HUNYUAN_MOE", rope=HUNYUAN_ROPE, values=SILU_ONLY,
            settings=(
                *EXPERTS, Setting("expert_feed_forward_length", "intermediate_size"),
                Setting("expert_shared_feed_forward_length", "intermediate_size"), Setting("expert_shared_count", 1),
            ),
        ),
        names=Names(
            class_name="HunYuanMoEV1ForCausalLM", keys={"num_experts_per_tok": "moe_topk"}, present=BIASED,
            layers=_SHARED_MLP + " self_attn.query_layernorm self_attn.key_layernorm mlp.gate.wg",
        ),
        defaults=sizes(4096, 11008, 32, 32, 2048) | LIKE_LLAMA | {
            "rms_norm_eps": 1e-05, "num_experts": 1, "num_experts_per_tok": 1,
        },
    ),
    "ernie4_5_moe": Row(
        llama_cpp=Architecture(
            name="ERNIE4_5_MOE",
            modules={r"mlp\.moe_statics\.e_score_correction_bias": "mlp.moe_statics.e_score_correction.bias"},
            settings=(
                *EXPERTS, EXPERT_WIDTH, Setting("expert_shared_count", "moe_num_shared_experts"),
                Setting(
                    "expert_shared_feed_forward_length",
                    lambda n: n("moe_intermediate_size") * n("moe_num_shared_experts"),
                ),
                Setting("leading_dense_block_count", "moe_layer_start_index"),
                Setting("interleave_moe_layer_step", "moe_layer_interval"),
            ),
            values=SILU_ONLY | {"use_bias": (False, None)},
        ),
        names=Names(
            class_name="Ernie4_5_MoeForCausalLM",
            layers=parts.SHARED + " mlp.moe_statics.e_score_correction_bias",
            keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        ),
        defaults=sizes(2560, 12288, 28, 20, 131072) | TIED | SILU | {
            "num_key_value_heads": 4, "rms_norm_eps": 1e-05, "num_experts": 64, "num_experts_per_tok": 6,
            "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
            "moe_layer_interval": 1, "use_bias": False,
        },
    ),
    "dots1": Row(
        llama_cpp=replace(_GLM4_MOE, name="DOTS1", rope=Rope(), drafts=None),
        names=Names(class_name="Dots1ForCausalLM", layers=parts.SHARED + parts.ROUTER_BIAS, keys=ROUTED),
        defaults=sizes(4608, 10944, 62, 32, 2048) | LIKE_LLAMA | {
            "num_key_value_heads": 32, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
        },
    ),
    "glm4_moe": Row(
        llama_cpp=_GLM4_MOE,
        names=Names(
            class_name="Glm4MoeForCausalLM", layers=parts.SHARED + parts.ROUTER_BIAS, keys=ROUTED,
            present=(*BIASED, ("use_qk_norm", "attn_q_norm.weight")),
        ),
        defaults=sizes(4096, 10944, 46, 96, 131072) | LIKE_LLAMA | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "num_experts": 128, "num_experts_per_tok": 8, "n_group": 1,
            "topk_group": 1, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_shared_experts": 1,
            "routed_scaling_factor": 1.0, "norm_topk_prob": True,
        },
    ),
    "exaone_moe": Row(
        llama_cpp=Architecture(
            name="EXAONE_MOE", modules=ROUTER_BIAS, windows=Windows(period=4, own_base=False), drafts={},
            settings=(
                *EXPERTS, *GROUPS, EXPERT_WIDTH, DENSE_FIRST, SIGMOID, SCALED, NORMED,
                Setting("expert_shared_count", "num_shared_experts"),
                Setting(
                    "expert_shared_feed_forward_length",
                    lambda n: n("moe_intermediate_size") * n("num_shared_experts"),
                ),
            ),
            values=SILU_ONLY, checks=(needs_windows,),
        ),
        names=Names(
            class_name="ExaoneMoeForCausalLM", layers=parts.SHARED + " mlp.e_score_correction_bias", drafts=MTP,
        ),
        restate=restate_exaone, mlx=MlxDifferences(computed=_exaone_moe_mlx),
        defaults=sizes(4096, 16384, 32, 32, 2048) | LIKE_LLAMA | {
            "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "num_experts": 64, "num_experts_per_tok": 8, "n_group": 1,
            "topk_group": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
            "norm_topk_prob": True, "num_shared_experts": 1,
        },
    ),
    "hy_v3": Row(
        llama_cpp=Architecture(
            name="DOTS1", label="hy_v3", rope=Rope(DEFAULT), drafts={},
            modules={
                r"mlp\.router\.gate": "mlp.gate", r"mlp\.expert_bias": "mlp.gate.e_score_correction",
                r"mlp\.shared_mlp\.(\w+)": r"mlp.shared_experts.\1",
                "final_layernorm": "shared_head.norm",  # of a draft layer
            },
            settings=(
                *EXPERTS, EXPERT_WIDTH, DENSE_FIRST, SIGMOID, NORMED._replace(key="route_norm"),
                Setting(
                    "expert_shared_feed_forward_length",
                    lambda n: n("moe_intermediate_size") * n("num_shared_experts"),
                ),
                SCALED._replace(key="router_scaling_factor"),
            ),
            values=SILU_ONLY | NO_BIAS | {"mlp_bias": (False, None)},
        ),
        names=Names(
            class_name="HYV3ForCausalLM", layers=_SHARED_MLP + " mlp.router.gate mlp.expert_bias",
            drafts="eh_proj enorm hnorm final_layernorm",
        ),
        in_memory={r"\.shared_mlp\.": ".shared_experts."},
        defaults=sizes(4096, 13312, 80, 64, 131072) | LIKE_LLAMA | {
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "num_experts": 192,
            "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826, "route_norm": True, "first_k_dense_replace": 1, "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    "gpt_oss": Row(
        traits=_TRANSPOSED_EXPERTS,
        llama_cpp=Architecture(
            name="GPT_OSS", modules={"self_attn.sinks": "self_attn.sinks.weight"},
            settings=(*EXPERTS, Setting("expert_feed_forward_length", "intermediate_size")),
            rope=Rope(rounds_yarn=True), windows=Windows(period=2, scaled=True), gate_and_up=ALTERNATING,
            no_window="max_position_embeddings",
            biases=QKV | {"ATTN_OUT", "FFN_GATE_INP", "FFN_GATE_EXP", "FFN_UP_EXP", "FFN_DOWN_EXP"},
            values=SILU_ONLY
            | {"swiglu_limit": (7.0, None), "swiglu_alpha": (1.702, None), "attention_bias": (True, None)},
        ),
        always=parts.NORMS + parts.HEADS + " mlp.router mlp.experts",
        names=Names(
            class_name="GptOssForCausalLM", keys=LOCAL,
            layers=parts.ATTENTION + " self_attn.sinks mlp.router" + parts.below(
                "mlp.experts", "gate_up_proj down_proj gate_up_proj_bias down_proj_bias"
            ),
        ),
        mlx=MlxDifferences(layout=TRANSPOSED),
        defaults=sizes(2880, 2880, 36, 64, 131072) | LIKE_LLAMA | {
            "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-05, "num_experts": 128,
            "num_experts_per_tok": 4, "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
        },
    ),
    "llama4": Row(traits=_TRANSPOSED_EXPERTS),
    "llama4_text": Row(
        traits=_TRANSPOSED_EXPERTS,
        llama_cpp=Architecture(
            name="LLAMA4", rope=Rope(LLAMA3), layer_types=frozenset({"full_attention", "chunked_attention"}),
            settings=(
                *EXPERTS, Setting("feed_forward_length", "intermediate_size_mlp"),
                Setting("expert_feed_forward_length", "intermediate_size"),
                Setting("interleave_moe_layer_step", "interleave_moe_layer_step"),
            ),
            shapes=mlp_shapes("intermediate_size_mlp"), checks=(each_fourth_unrotated,),
            values=SILU_ONLY | {
                "attention_chunk_size": (8192,), "use_qk_norm": (True,), "attn_temperature_tuning": (True,),
                "floor_scale": (8192,), "attn_scale": (0.1,),
            },
        ),
        names=Names(
            class_name="Llama4ForCausalLM", keys=LOCAL,
            layers=parts.ATTENTION + parts.FEED_FORWARD + parts.below(
                "feed_forward", "router experts.gate_up_proj experts.down_proj"
            ) + parts.below("feed_forward.shared_expert", parts.MATRICES),
        ),
        defaults=sizes(5120, 8192, 48, 40, 131072) | LIKE_LLAMA | {
            "no_rope_layer_interval": 4, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-05,
            "num_experts": 16, "num_experts_per_tok": 1, "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1,
            "attention_chunk_size": 8192, "use_qk_norm": True, "attn_temperature_tuning": True, "floor_scale": 8192,
            "attn_scale": 0.1,
        },
    ),
}  # fmt: skip
