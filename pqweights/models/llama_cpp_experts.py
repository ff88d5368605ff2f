"""How llama.cpp runs mixtures of experts; see llama_cpp.py."""

from __future__ import annotations

from dataclasses import replace

from pqweights.models.llama_cpp import (
    EXPERT_WIDTH,
    EXPERTS,
    FIXED_DYNAMIC,
    GRANITE,
    LAYERS,
    QKV,
    SILU,
    SLIDING,
    Architecture,
    Cut,
    Setting,
)

SOFTMAX, SIGMOID = (Setting("expert_gating_func", number, of="ExpertGatingFuncType") for number in "12")
DENSE_FIRST = Setting("leading_dense_block_count", "first_k_dense_replace", optional=True)
SCALED = Setting("expert_weights_scale", "routed_scaling_factor", real=True)
NORMED = Setting("expert_weights_norm", "norm_topk_prob", truth=True)
GROUPS = (
    Setting("expert_group_count", "n_group", optional=True),
    Setting("expert_group_used_count", "topk_group", optional=True),
)
SHARED = Setting("expert_shared_count", "n_shared_experts")
ROUTER_BIAS = {r"((?:mlp|block_sparse_moe|mixer)(?:\.gate)?)\.e_score_correction_bias": r"\1.e_score_correction.bias"}

GPT_OSS = Architecture(
    name="GPT_OSS",
    modules={"self_attn.sinks": "self_attn.sinks.weight"},
    settings=(*EXPERTS, Setting("expert_feed_forward_length", "intermediate_size")),
    windows=LAYERS,
    window_period=2,
    window_scaled=True,
    rounds_yarn=True,
    alternating=True,
    biases=QKV | {"ATTN_OUT", "FFN_GATE_INP", "FFN_GATE_EXP", "FFN_UP_EXP", "FFN_DOWN_EXP"},
    values=SILU | {"swiglu_limit": (7.0, None), "swiglu_alpha": (1.702, None)},
)
# Multi-head latent attention: one head of keys and values, from which each head makes its own.
DEEPSEEK2 = Architecture(
    name="DEEPSEEK2",
    modules=ROUTER_BIAS,
    cuts={
        r"self_attn\.kv_b_proj": Cut(
            parts={"self_attn.k_b_proj": (0,), "self_attn.v_b_proj": (1,)},
            blocks=("qk_nope_head_dim", "v_head_dim"),
            times="num_attention_heads",
            stacked=True,
            turned=("self_attn.k_b_proj",),
        ),
    },
    settings=(
        Setting("head_count_kv", "1"),
        Setting("q_lora_rank", "q_lora_rank", optional=True),
        Setting("kv_lora_rank", "kv_lora_rank"),
        Setting("key_length", "kv_lora_rank + qk_rope_head_dim"),
        Setting("value_length", "kv_lora_rank"),
        Setting("key_length_mla", "qk_nope_head_dim + qk_rope_head_dim"),
        Setting("value_length_mla", "v_head_dim"),
        *EXPERTS, *GROUPS, EXPERT_WIDTH, DENSE_FIRST, SHARED, SIGMOID, SCALED, NORMED,
    ),
    shapes={
        "ATTN_Q": ("num_attention_heads * qk_nope_head_dim + num_attention_heads * qk_rope_head_dim", "hidden_size"),
        "ATTN_Q_A": ("q_lora_rank", "hidden_size"),
        "ATTN_Q_B": ("num_attention_heads * qk_nope_head_dim + num_attention_heads * qk_rope_head_dim", "q_lora_rank"),
        "ATTN_KV_A_MQA": ("kv_lora_rank + qk_rope_head_dim", "hidden_size"),
        "ATTN_OUT": ("hidden_size", "num_attention_heads * v_head_dim"),
    },
    rotated="qk_rope_head_dim",
    yarn_scales_attention=True,
    layers_without={"q_lora_rank": (26, 27)},
    drafts=True,
    values=SILU | {"rope_interleave": (True, None), "attention_bias": (False, None)},
)  # fmt: skip
DEEPSEEK2_SOFTMAX = replace(
    DEEPSEEK2,
    settings=(*(setting for setting in DEEPSEEK2.settings if setting != SIGMOID), SOFTMAX),
    values={**DEEPSEEK2.values, "topk_method": ("greedy", None), "norm_topk_prob": (False,)},
)
MISTRAL4 = replace(
    DEEPSEEK2,
    name="MISTRAL4",
    settings=(*(setting for setting in DEEPSEEK2.settings if setting != SIGMOID), SOFTMAX),
    rotated="qk_nope_head_dim + qk_rope_head_dim",
    partial_rope=True,
    yarn_mscale=1.0,
    temperature=True,
    layers_without={},
    drafts=False,
)
INDEXER = (
    Setting("indexer_head_count", "index_n_heads"),
    Setting("indexer_key_length", "index_head_dim"),
    Setting("indexer_top_k", "index_topk"),
)
# Attention to the tokens that an indexer chooses.
GLM_DSA = replace(
    DEEPSEEK2,
    name="GLM_DSA",
    settings=(
        *DEEPSEEK2.settings,
        *INDEXER,
    ),
    rope=frozenset({"default", "linear"}),
    chosen="index_topk",
    multiples={"index_head_dim": 64},
    layers_without={},
    layer_types=frozenset({"indexed_attention"}),
    biases=frozenset({"INDEXER_K_NORM"}),
    values={**DEEPSEEK2.values, "indexer_types": ("full", None)},
)
DEEPSEEK32 = replace(GLM_DSA, label="deepseek32", rope=DEEPSEEK2.rope, yarn_mscale=1.0)
COMPRESSING = frozenset({"compressed 4", "compressed 128"})
# Hyper-connections, and attention to compressed tokens, of which an indexer chooses some.
DEEPSEEK4 = Architecture(
    name="DEEPSEEK2",
    label="deepseek4",
    tensors={
        r"(?:model\.)?embed(?:_tokens)?\.weight": "token_embd.weight", r"head\.weight": "output.weight",
        r"(?:model\.)?norm\.weight": "output_norm.weight", r"(attn|ffn)_norm\.weight": r"\1_norm.weight",
        r"(?:model\.hc_head\.hc|hc_head)_(fn|base|scale)": r"output_hc_\1.weight",
        r"hc_(attn|ffn)_(fn|base|scale)": r"hc_\1_\2.weight", r"attn\.attn_sink": "attn_sinks.weight",
        r"attn\.(?:kv_)?norm\.weight": "attn_kv_a_norm.weight", r"attn\.q_norm\.weight": "attn_q_a_norm.weight",
        r"attn\.wq_([ab])\.weight": r"attn_q_\1.weight", r"attn\.wo_([ab])\.weight": r"attn_output_\1.weight",
        r"attn\.wkv\.weight": "attn_kv.weight", r"attn\.indexer\.weights_proj\.weight": "indexer.proj.weight",
        r"attn\.indexer\.wq_b\.weight": "indexer.attn_q_b.weight", r"ffn\.gate\.bias": "exp_probs_b.bias",
        r"(?:attn\.(?=indexer))?(attn|indexer)\.compressor\.w?(kv|gate|norm)\.weight": r"\1_compressor_\2.weight",
        r"(?:attn\.(?=indexer))?(attn|indexer)\.compressor\.ape": r"\1_compressor_ape.weight",
        r"ffn\.gate\.weight": "ffn_gate_inp.weight", r"ffn\.gate\.tid2eid": "ffn_gate_tid2eid.weight",
        **{
            rf"ffn\.{of}experts\.w{number}\.weight": f"ffn_{name}_{label}.weight"
            for of, label in (("", "exps"), ("shared_", "shexp"))
            for number, name in enumerate(("gate", "down", "up"), 1)
        },
    },
    uneven=r"ffn_gate_tid2eid\..*|exp_probs_b\..*",
    settings=(
        Setting("feed_forward_length", "moe_intermediate_size"), Setting("q_lora_rank", "q_lora_rank"),
        *EXPERTS, EXPERT_WIDTH, SHARED, SCALED, NORMED, Setting(".expert_gating_func", "4"), *INDEXER,
        Setting("swiglu_clamp_exp", "swiglu_limits", real=True, listed=True),
        Setting("swiglu_clamp_shexp", "swiglu_limits", real=True, listed=True),
        Setting(".attention.sliding_window", "sliding_window"),
        Setting(".attention.compress_ratios", "compress_ratios", listed=True),
        Setting(".attention.compress_rope_freq_base", "compress_rope_theta", real=True),
        Setting(".attention.output_group_count", "o_groups"), Setting(".attention.output_lora_rank", "o_lora_rank"),
        Setting(".hyper_connection.count", "hc_mult"), Setting(".hyper_connection.epsilon", "hc_eps", real=True),
        Setting(".hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
        Setting(".hash_layer_count", "num_hash_layers", zero=True),
        Setting(".embedding_length_out", "hidden_size * hc_mult"),
    ),
    shapes={
        "ATTN_Q_A": ("q_lora_rank", "hidden_size"), "ATTN_Q_B": ("num_attention_heads * head_dim", "q_lora_rank"),
        "ATTN_KV": ("head_dim", "hidden_size"),
    },
    layer_types=COMPRESSING | {"compressed 0"}, needed_types=COMPRESSING,
    chosen="index_topk * 4", multiples={"head_dim": 64, "index_head_dim": 64},
    rope=frozenset({"default", "yarn"}), partial_rope=True,
    values=SILU | {"scoring_func": ("sqrtsoftplus",), "norm_topk_prob": (True,), "attention_bias": (False, None)},
)  # fmt: skip
GLM4_MOE = Architecture(
    name="GLM4_MOE",
    modules=ROUTER_BIAS,
    settings=(*EXPERTS, *GROUPS, EXPERT_WIDTH, DENSE_FIRST, SHARED, SIGMOID, SCALED, NORMED),
    partial_rope=True,
    biases=QKV,
    drafts=True,
    values=SILU,
)
DOTS1 = replace(GLM4_MOE, name="DOTS1", partial_rope=False, drafts=False)
HY_V3 = Architecture(
    name="DOTS1",
    label="hy_v3",
    modules={
        r"mlp\.router\.gate": "mlp.gate",
        r"mlp\.expert_bias": "mlp.gate.e_score_correction",
        r"mlp\.shared_mlp\.(\w+)": r"mlp.shared_experts.\1",
        "final_layernorm": "shared_head.norm",  # of a draft layer
    },
    settings=(
        *EXPERTS, EXPERT_WIDTH, DENSE_FIRST, SIGMOID, NORMED._replace(key="route_norm"),
        Setting("expert_shared_feed_forward_length", "moe_intermediate_size * num_shared_experts"),
        SCALED._replace(key="router_scaling_factor"),
    ),
    rope=frozenset({"default"}),
    drafts=True,
    values=SILU | {"attention_bias": (False, None), "mlp_bias": (False, None)},
)  # fmt: skip
MIMO2 = Architecture(
    name="MIMO2",
    modules={**ROUTER_BIAS, r"self_attn\.(attention_sink_bias)": r"self_attn.\1.weight"},
    settings=(
        *EXPERTS, *GROUPS, EXPERT_WIDTH, DENSE_FIRST,
        Setting("head_count_kv", "swa_num_key_value_heads", only=f"{SLIDING}.*", other="num_key_value_heads"),
        Setting("value_length", "v_head_dim"),
        Setting(".attention.value_scale", "attention_value_scale", real=True, optional=True),
    ),
    shapes={
        "ATTN_K": (None, "hidden_size"), "ATTN_V": (None, "hidden_size"),
        "ATTN_OUT": ("hidden_size", "num_attention_heads * v_head_dim"),
    },
    rope=frozenset({"default"}),
    partial_rope=True,
    needed_types=frozenset({SLIDING}),
    windows=LAYERS,
    window_listed=True,
    equal=tuple((f"swa_{key}", key) for key in ("head_dim", "v_head_dim", "num_attention_heads")),
    values=SILU | {"routed_scaling_factor": (1.0, None), "norm_topk_prob": (True,), "attention_bias": (False, None)},
)  # fmt: skip
STEP35 = Architecture(
    name="STEP35",
    modules={
        r"moe\.router_bias": "moe.router_bias.bias",
        r"transformer\.shared_head\.norm": "shared_head.norm", r"transformer\.shared_head\.output": "shared_head.head",
    },
    settings=(
        *EXPERTS, EXPERT_WIDTH, DENSE_FIRST, SIGMOID, SCALED._replace(key="moe_router_scaling_factor"),
        NORMED._replace(key="norm_expert_weight"),
        Setting("head_count", "num_sliding_attention_heads", only=f"({SLIDING}|draft).*", other="num_attention_heads"),
        Setting("expert_shared_feed_forward_length", "share_expert_dim"),
        Setting("swiglu_clamp_exp", "swiglu_limits", real=True, listed=True, optional=True),
        Setting("swiglu_clamp_shexp", "swiglu_limits_shared", real=True, listed=True, optional=True),
    ),
    shapes={"ATTN_Q": (None, "hidden_size"), "ATTN_OUT": ("hidden_size", None)},
    rope=frozenset({"default", "llama3"}),
    half_rotated=True,
    windows=LAYERS,
    window_listed=True,
    own_head=True,
    drafts=True,
    draft_type=SLIDING,
    values=SILU | {"attention_bias": (False, None), "use_bidirectional_attention": (False, None)}
    | {"use_head_wise_attn_gate": (True, None), "moe_router_activation": ("sigmoid", None)},
)  # fmt: skip
MINIMAX_M2 = Architecture(
    name="MINIMAXM2",
    modules=ROUTER_BIAS,
    settings=(*EXPERTS, Setting("expert_feed_forward_length", "intermediate_size"), SIGMOID),
    partial_rope=True,
    values=SILU,
)
# Attention to blocks of tokens that an indexer chooses.
MINIMAX_M3 = Architecture(
    name="DOTS1",
    label="minimax-m3",
    modules={**ROUTER_BIAS, r"block_sparse_moe\.shared_experts\.(\w+)": r"mlp.shared_experts.\1"},
    tensors={r"self_attn\.index(?:_|er\.)([qk])_(proj|norm)\.weight": r"indexer.\1_\2.weight"},
    cuts={  # of the text model alone
        rf"{module}\.gate_up_proj": Cut(
            parts={f"{module}.gate_proj": (0,), f"{module}.up_proj": (1,)}, blocks=(width, width)
        )
        for module, width in (("mlp", "dense_intermediate_size"), ("mlp.shared_experts", "shared_intermediate_size"))
    },
    settings=(
        *EXPERTS, DENSE_FIRST, SIGMOID, SCALED, NORMED,
        Setting("feed_forward_length", "dense_intermediate_size"),
        Setting("expert_feed_forward_length", "intermediate_size"),
        Setting("expert_shared_count", "1"),
        Setting(".attention.indexer.head_count", "index_n_heads"),
        Setting(".attention.indexer.key_length", "index_head_dim"),
        Setting(".attention.indexer.top_k", "index_topk_blocks"),
        Setting(".attention.indexer.block_size", "index_block_size"),
        Setting(".attention.indexer.local_blocks", "index_local_blocks"),
    ),
    shapes={
        "FFN_GATE": ("dense_intermediate_size", "hidden_size"), "FFN_UP": ("dense_intermediate_size", "hidden_size"),
        "FFN_DOWN": ("hidden_size", "dense_intermediate_size"),
    },
    layer_types=frozenset({"full_attention", "minimax_m3_sparse"}),
    with_experts="minimax_m3_sparse",
    chosen="index_topk_blocks * index_block_size",
    chosen_by_flash=True,
    equal=(("shared_intermediate_size", "intermediate_size"), ("index_n_heads", "num_key_value_heads")),
    rope=frozenset({"default"}),
    partial_rope=True,
    own_head=True,
    values={"hidden_act": ("silu", "swigluoai"), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
)  # fmt: skip
ERNIE4_5_MOE = Architecture(
    name="ERNIE4_5_MOE",
    modules={r"mlp\.moe_statics\.e_score_correction_bias": "mlp.moe_statics.e_score_correction.bias"},
    settings=(
        *EXPERTS, EXPERT_WIDTH,
        Setting("expert_shared_count", "moe_num_shared_experts"),
        Setting("expert_shared_feed_forward_length", "moe_intermediate_size * moe_num_shared_experts"),
        Setting("leading_dense_block_count", "moe_layer_start_index"),
        Setting("interleave_moe_layer_step", "moe_layer_interval"),
    ),
    interleaved=False,
    values=SILU | {"use_bias": (False, None)},
)  # fmt: skip
HUNYUAN_MOE = Architecture(
    name="HUNYUAN_MOE",
    rope=FIXED_DYNAMIC,
    settings=(
        *EXPERTS,
        Setting("expert_feed_forward_length", "intermediate_size"),
        Setting("expert_shared_feed_forward_length", "intermediate_size"),
        Setting("expert_shared_count", "1"),
    ),
    values=SILU,
)
OLMOE = Architecture(
    name="OLMOE",
    settings=EXPERTS,
    shapes={"ATTN_K_NORM": ("hidden_size", None)},
    values=SILU | {"norm_topk_prob": (False,), "clip_qkv": (None,)},
)
EXAONE_MOE = Architecture(
    name="EXAONE_MOE",
    modules=ROUTER_BIAS,
    settings=(
        *EXPERTS, *GROUPS, EXPERT_WIDTH, DENSE_FIRST, SIGMOID, SCALED, NORMED,
        Setting("expert_shared_count", "num_shared_experts"),
        Setting("expert_shared_feed_forward_length", "moe_intermediate_size * num_shared_experts"),
    ),
    windows=LAYERS,
    window_period=4,
    window_base=False,
    drafts=True,
    values=SILU,
)  # fmt: skip
LLAMA4 = Architecture(
    name="LLAMA4",
    settings=(
        *EXPERTS,
        Setting("feed_forward_length", "intermediate_size_mlp"),
        Setting("expert_feed_forward_length", "intermediate_size"),
        Setting("interleave_moe_layer_step", "interleave_moe_layer_step"),
    ),
    unrotated_period=4,
    shapes={
        "FFN_GATE": ("intermediate_size_mlp", "hidden_size"),
        "FFN_UP": ("intermediate_size_mlp", "hidden_size"),
        "FFN_DOWN": ("hidden_size", "intermediate_size_mlp"),
    },
    rope=frozenset({"default", "llama3"}),
    layer_types=frozenset({"full_attention", "chunked_attention"}),
    values=SILU
    | {"attention_chunk_size": (8192,), "use_qk_norm": (True,), "attn_temperature_tuning": (True,)}
    | {"floor_scale": (8192,), "attn_scale": (0.1,)},
)
GRANITE_MOE = replace(
    GRANITE,
    name="GRANITE_MOE",
    cuts={
        r"block_sparse_moe\.input_linear": Cut(
            parts={"mlp.experts.gate_proj": (0,), "mlp.experts.up_proj": (1,)},
            blocks=("intermediate_size", "intermediate_size"),
            times="num_experts",
            stacked=True,
        ),
        r"shared_mlp\.input_linear": Cut(
            parts={"mlp.shared_expert.gate_proj": (0,), "mlp.shared_expert.up_proj": (1,)},
            blocks=("shared_intermediate_size", "shared_intermediate_size"),
        ),
    },
    modules={r"shared_mlp\.output_linear": "mlp.shared_expert.down_proj"},
    settings=(
        *GRANITE.settings, *EXPERTS,
        Setting("expert_shared_feed_forward_length", "shared_intermediate_size", optional=True),
    ),
)  # fmt: skip
