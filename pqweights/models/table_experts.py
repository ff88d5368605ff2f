"""The types of models whose layers have experts and attention; see table.py."""

from __future__ import annotations

from pqweights.models import llama_cpp_experts
from pqweights.models.defaults import LLAMA, OWN_HEAD, SILU, TIED, sizes
from pqweights.models.description import ModelDescription as Row
from pqweights.models.traits import Trait

TRANSPOSED_EXPERTS = frozenset({Trait.TRANSPOSED_EXPERTS})

_STEP = Row(
    traits=frozenset({Trait.ZERO_CENTRED_NORMS}),
    llama_cpp=llama_cpp_experts.STEP35, defaults=sizes(4096, 11264, 45, 64, 128000) | LLAMA | {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "num_experts": 288, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280, "share_expert_dim": 1280, "moe_router_scaling_factor": 1.0,
        "norm_expert_weight": True, "attention_bias": False,
    },
)  # fmt: skip

_MINIMAX_M3 = Row(
    traits=frozenset({Trait.ZERO_CENTRED_NORMS}),
    llama_cpp=llama_cpp_experts.MINIMAX_M3, defaults=sizes(6144, 3072, 60, 64, 524288) | LLAMA | {
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 4, "dense_intermediate_size": 12288, "shared_intermediate_size": 3072,
        "routed_scaling_factor": 2.0, "norm_topk_prob": True, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0, "index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128,
        "index_topk_blocks": 16, "index_local_blocks": 1,
    },
)  # fmt: skip
ROWS: dict[str, Row] = {
    "deepseek_v2": Row(
        llama_cpp=llama_cpp_experts.DEEPSEEK2_SOFTMAX, defaults=sizes(4096, 11008, 32, 32, 2048) | LLAMA | {
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "num_experts": 64, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
            "n_shared_experts": 2, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
            "attention_bias": False, "topk_method": "greedy",
        },
    ),
    "deepseek_v3": Row(
        llama_cpp=llama_cpp_experts.DEEPSEEK2, defaults=sizes(7168, 18432, 61, 128, 4096) | LLAMA | {
            "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
            "n_group": 8, "topk_group": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
            "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
            "rope_interleave": True, "attention_bias": False,
        },
    ),
    "deepseek_v32": Row(
        llama_cpp=llama_cpp_experts.DEEPSEEK32, defaults=sizes(7168, 18432, 61, 128, 163840) | LLAMA | {
            "num_key_value_heads": 128, "head_dim": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts": 256,
            "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
            "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "attention_bias": False,
        },
    ),
    "deepseek_v4": Row(
        llama_cpp=llama_cpp_experts.DEEPSEEK4, defaults=OWN_HEAD | SILU | {
            "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1,
            "max_position_embeddings": 1048576, "head_dim": 512, "rms_norm_eps": 1e-6, "q_lora_rank": 1024,
            "num_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 2048,
            "routed_scaling_factor": 1.5, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus",
            "sliding_window": 128, "compress_rope_theta": 160000.0, "o_groups": 8, "o_lora_rank": 1024, "hc_mult": 4,
            "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
            "attention_bias": False,
        },
    ),
    "dots1": Row(
        llama_cpp=llama_cpp_experts.DOTS1, defaults=sizes(4608, 10944, 62, 32, 2048) | LLAMA | {
            "num_key_value_heads": 32, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
        },
    ),
    "ernie4_5_moe": Row(
        llama_cpp=llama_cpp_experts.ERNIE4_5_MOE, defaults=sizes(2560, 12288, 28, 20, 131072) | TIED | SILU | {
            "num_key_value_heads": 4, "rms_norm_eps": 1e-05, "num_experts": 64,
            "num_experts_per_tok": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1, "moe_layer_interval": 1, "use_bias": False,
        },
    ),
    "exaone_moe": Row(
        llama_cpp=llama_cpp_experts.EXAONE_MOE, defaults=sizes(4096, 16384, 32, 32, 2048) | LLAMA | {
            "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "num_experts": 64,
            "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1024,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
            "num_shared_experts": 1,
        },
    ),
    "glm4_moe": Row(
        llama_cpp=llama_cpp_experts.GLM4_MOE, defaults=sizes(4096, 10944, 46, 96, 131072) | LLAMA | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "num_experts": 128, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_shared_experts": 1,
            "routed_scaling_factor": 1.0, "norm_topk_prob": True,
        },
    ),
    "glm4_moe_lite": Row(
        llama_cpp=llama_cpp_experts.DEEPSEEK2, defaults=sizes(2048, 10240, 47, 20, 202752) | LLAMA | {
            "num_key_value_heads": 20, "rms_norm_eps": 1e-05, "q_lora_rank": 768, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "num_experts": 64,
            "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 1536,
            "n_shared_experts": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True,
            "rope_interleave": True, "attention_bias": False,
        },
    ),
    "glm_moe_dsa": Row(
        llama_cpp=llama_cpp_experts.GLM_DSA, defaults=sizes(6144, 12288, 78, 64, 202752) | LLAMA | {
            "num_key_value_heads": 64, "head_dim": 64, "rms_norm_eps": 1e-05, "q_lora_rank": 2048,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256,
            "num_experts": 256, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_shared_experts": 1,
            "routed_scaling_factor": 2.5, "norm_topk_prob": True, "index_n_heads": 32,
            "index_head_dim": 128, "index_topk": 2048, "attention_bias": False,
        },
    ),
    "gpt_oss": Row(
        traits=TRANSPOSED_EXPERTS,
        llama_cpp=llama_cpp_experts.GPT_OSS, defaults=sizes(2880, 2880, 36, 64, 131072) | LLAMA | {
            "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-05,
            "num_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
        },
    ),
    "granitemoe": Row(
        llama_cpp=llama_cpp_experts.GRANITE_MOE, defaults=sizes(4096, 11008, 32, 32, 2048) | LLAMA | {
            "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
            "logits_scaling": 1.0, "num_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    "granitemoeshared": Row(
        llama_cpp=llama_cpp_experts.GRANITE_MOE, defaults=sizes(4096, 11008, 32, 32, 2048) | LLAMA | {
            "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
            "logits_scaling": 1.0, "num_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0,
        },
    ),
    "hunyuan_v1_moe": Row(
        llama_cpp=llama_cpp_experts.HUNYUAN_MOE, defaults=sizes(4096, 11008, 32, 32, 2048) | LLAMA | {
            "rms_norm_eps": 1e-05, "num_experts": 1, "num_experts_per_tok": 1,
        },
    ),
    # Of the configuration's own code; what published files leave out is what DeepSeek V3 leaves out.
    "kimi_k2": Row(llama_cpp=llama_cpp_experts.DEEPSEEK2, defaults=OWN_HEAD | SILU | {"rope_interleave": True}),
    "hy_v3": Row(
        llama_cpp=llama_cpp_experts.HY_V3, defaults=sizes(4096, 13312, 80, 64, 131072) | LLAMA | {
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
            "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826, "route_norm": True, "first_k_dense_replace": 1, "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    "llama4_text": Row(
        traits=TRANSPOSED_EXPERTS,
        llama_cpp=llama_cpp_experts.LLAMA4, defaults=sizes(5120, 8192, 48, 40, 131072) | LLAMA | {
            "no_rope_layer_interval": 4, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-05,
            "num_experts": 16, "num_experts_per_tok": 1,
            "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192,
            "use_qk_norm": True, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
        },
    ),
    "mimo_v2_flash": Row(
        llama_cpp=llama_cpp_experts.MIMO2, defaults=sizes(4096, 16384, 48, 64, 131072) | LLAMA | {
            "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "num_experts": 256,
            "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 2048,
            "rms_norm_eps": 1e-5, "attention_value_scale": 0.707, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
            "attention_bias": False,
        },
    ),
    "minimax_m2": Row(
        llama_cpp=llama_cpp_experts.MINIMAX_M2, defaults=sizes(3072, 1536, 62, 48, 196608) | LLAMA | {
            "num_key_value_heads": 8, "head_dim": 128, "num_experts": 256,
            "num_experts_per_tok": 8,
        },
    ),
    "minimax_m3_vl": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
    "mistral4": Row(
        llama_cpp=llama_cpp_experts.MISTRAL4, defaults=sizes(4096, 12288, 36, 32, 1048576) | LLAMA | {
            "num_key_value_heads": 32, "q_lora_rank": 1024,
            "kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 0, "n_shared_experts": 1,
            "routed_scaling_factor": 1.0, "norm_topk_prob": True, "rope_interleave": True,
            "attention_bias": False,
        },
    ),
    "phimoe": Row(llama_cpp_differs="normalizes without the mean, and weighs two experts by one softmax"),
    "olmoe": Row(
        llama_cpp=llama_cpp_experts.OLMOE, defaults=sizes(2048, 2048, 16, 16, 4096) | LLAMA | {
            "rms_norm_eps": 1e-05, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        },
    ),
    "step3p5": _STEP,
    "step3p7": _STEP,
}  # fmt: skip
