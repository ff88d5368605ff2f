"""How llama.cpp runs models of which some layers have convolutions or states instead of attention; see llama_cpp.py."""

from __future__ import annotations

from dataclasses import replace

from pqweights.models.llama_cpp import (
    ALL_SPARSE,
    EXPERT_WIDTH,
    EXPERTS,
    FULL,
    GRANITE,
    LINEAR_ATTENTION,
    SILU,
    Architecture,
    Cut,
    Scaled,
    Setting,
    Tiled,
)
from pqweights.models.llama_cpp_experts import (
    DEEPSEEK2,
    GRANITE_MOE,
    GROUPS,
    NORMED,
    ROUTER_BIAS,
    SCALED,
    SHARED,
    SIGMOID,
)

# Layers without attention have no heads of keys and values.
SOME_HEADS = Setting("head_count_kv", "num_key_value_heads", only=f"{FULL}.*")

# Gated DeltaNet. Queries have a gate beside them.
_KEYS, _VALUES = "linear_num_key_heads * linear_key_head_dim * 2", "linear_num_value_heads * linear_value_head_dim"
_GROUP = f"{_VALUES} / linear_num_key_heads"
QWEN3_NEXT = Architecture(
    name="QWEN3NEXT",
    modules={r"linear_attn\.dt_bias": "linear_attn.dt_proj.bias"},
    cuts={
        r"linear_attn\.in_proj_qkvz": Cut(
            parts={"linear_attn.in_proj_qkv": (0, 1, 2), "linear_attn.in_proj_z": (3,)},
            blocks=("linear_key_head_dim", "linear_key_head_dim", _GROUP, _GROUP),
            times="linear_num_key_heads",
        ),
    },
    settings=(
        *EXPERTS,
        EXPERT_WIDTH,
        Setting("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        Setting("ssm_conv_kernel", "linear_conv_kernel_dim"),
        Setting("ssm_state_size", "linear_key_head_dim"),
        Setting("ssm_group_count", "linear_num_key_heads"),
        Setting("ssm_time_step_rank", "linear_num_value_heads"),
        Setting("ssm_inner_size", _VALUES),
        Setting("full_attention_interval", "full_attention_interval"),
    ),
    shapes={
        "ATTN_Q": ("num_attention_heads * head_dim * 2", "hidden_size"),
        "ATTN_QKV": (f"{_KEYS} + {_VALUES}", "hidden_size"),
        "ATTN_GATE": (_VALUES, "hidden_size"),
        "SSM_OUT": ("hidden_size", _VALUES),
    },
    layer_types=frozenset({FULL, LINEAR_ATTENTION}),
    period_key="full_attention_interval",
    window_period=4,
    equal=(("linear_value_head_dim", "linear_key_head_dim"),),
    rope=frozenset({"default", "linear", "yarn"}),
    partial_rope=True,
    drafts=True,
    values=SILU | ALL_SPARSE | {"norm_topk_prob": (True,), "attention_bias": (False, None)},
)
QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    name="QWEN35MOE",
    cuts={},
    settings=(*QWEN3_NEXT.settings, Setting("feed_forward_length", "moe_intermediate_size")),
    tiled={
        r"linear_attn\.(in_proj_qkv|conv1d)": Tiled("linear_value_head_dim", before=_KEYS),
        r"linear_attn\.in_proj_z": Tiled("linear_value_head_dim"),
        r"linear_attn\.(in_proj_[ab]|A_log|dt_proj\.bias)": Tiled("1"),
        r"linear_attn\.out_proj": Tiled("linear_value_head_dim", columns=True),
    },
    rope_sections=(11, 11, 10),
    values=SILU | {"attention_bias": (False, None)},
)
_OF_EXPERTS = (*EXPERTS, EXPERT_WIDTH, QWEN3_NEXT.settings[3])
QWEN3_5 = replace(
    QWEN3_5_MOE, name="QWEN35", settings=tuple(setting for setting in QWEN3_NEXT.settings if setting not in _OF_EXPERTS)
)

# Short convolutions.
LFM2 = Architecture(
    name="LFM2",
    settings=(SOME_HEADS, Setting("shortconv_l_cache", "conv_L_cache")),
    needed=("token_embd_norm.weight",),
    layer_types=frozenset({FULL, "conv"}),
    free_head_dim=False,
    values={"conv_bias": (False, None)},
)
LFM2_MOE = replace(
    LFM2,
    name="LFM2MOE",
    modules={r"feed_forward\.expert_bias": "feed_forward.expert_bias.bias"}
    | {
        rf"feed_forward\.experts\.(\d+)\.w{number}": rf"mlp.experts.\1.{name}_proj"
        for number, name in enumerate(("gate", "down", "up"), 1)
    },
    settings=(
        *LFM2.settings,
        *EXPERTS,
        EXPERT_WIDTH,
        SIGMOID,
        Setting("leading_dense_block_count", "num_dense_layers"),
    ),
    values={**LFM2.values, "use_expert_bias": (True,), "norm_topk_prob": (True,), "routed_scaling_factor": (1.0,)},
)

# Mamba 2.
MAMBA2 = {"SSM_A": ("mamba_n_heads", "1"), "SSM_D": ("mamba_n_heads", "1")}
_MAMBA_WIDTH = "mamba_expand * hidden_size"
_GRANITE_MAMBA = (
    SOME_HEADS,
    Setting("ssm_conv_kernel", "mamba_d_conv"),
    Setting("ssm_inner_size", _MAMBA_WIDTH),
    Setting("ssm_state_size", "mamba_d_state"),
    Setting("ssm_time_step_rank", "mamba_n_heads"),
    Setting("ssm_group_count", "mamba_n_groups"),
    Setting("rope_scaling_finetuned", "position_embedding_type = rope", truth=True),
)
_DENSE_GRANITE = replace(
    GRANITE,
    name="GRANITE_HYBRID",
    modules={r"mamba\.dt_bias": "mamba.dt_proj.bias", r"shared_mlp\.output_linear": "mlp.down_proj"},
    cuts={
        r"shared_mlp\.input_linear": Cut(
            parts={"mlp.gate_proj": (0,), "mlp.up_proj": (1,)},
            blocks=("shared_intermediate_size", "shared_intermediate_size"),
        ),
    },
    settings=(*GRANITE.settings, *_GRANITE_MAMBA, Setting("feed_forward_length", "shared_intermediate_size")),
    shapes={
        "FFN_GATE": ("shared_intermediate_size", "hidden_size"),
        "FFN_UP": ("shared_intermediate_size", "hidden_size"),
        "FFN_DOWN": ("hidden_size", "shared_intermediate_size"),
    },
    reshaped=MAMBA2 | {"SSM_NORM": ("mamba_n_groups", f"{_MAMBA_WIDTH} / mamba_n_groups")},
    layer_types=frozenset({FULL, LINEAR_ATTENTION}),
    biases=frozenset({"SSM_CONV1D"}),
    values={**GRANITE.values, "mamba_expand": (2,)},
)
GRANITE_HYBRID = replace(
    _DENSE_GRANITE,
    modules={**_DENSE_GRANITE.modules, **GRANITE_MOE.modules},
    cuts=GRANITE_MOE.cuts,
    settings=(*GRANITE_MOE.settings, *_GRANITE_MAMBA),
    shapes={},
    dense=_DENSE_GRANITE,
)

# Mamba 1, and experts in some layers.
JAMBA = Architecture(
    name="JAMBA",
    modules={r"feed_forward\.experts\.(\d+)\.(gate|up|down)_proj": r"mlp.experts.\1.\2_proj"},
    settings=(
        SOME_HEADS,
        *EXPERTS,
        Setting("ssm_conv_kernel", "mamba_d_conv"),
        Setting("ssm_inner_size", _MAMBA_WIDTH),
        Setting("ssm_state_size", "mamba_d_state"),
        Setting("ssm_time_step_rank", "mamba_dt_rank"),
    ),
    layer_types=frozenset(f"{kind}{moe}" for kind in (FULL, LINEAR_ATTENTION) for moe in ("", " moe")),
    rope=frozenset({"default"}),
    free_head_dim=False,
    biases=frozenset({"SSM_CONV1D"}),
    values=SILU | {"mamba_conv_bias": (True,), "mamba_proj_bias": (False,)},
)

_NEMOTRON_WIDTH = "mamba_num_heads * mamba_head_dim"
_DENSE_NEMOTRON_H = Architecture(
    name="NEMOTRON_H",
    modules={
        r"mixer\.dt_bias": "mixer.dt_proj.bias",
        r"mixer\.experts\.(\d+)\.(up|down)_proj": r"mlp.experts.\1.\2_proj",
        **ROUTER_BIAS,
    },
    settings=(
        SOME_HEADS,
        Setting("feed_forward_length", "intermediate_size", only="mlp.*"),
        Setting("layer_norm_eps", "rms_norm_eps", real=True),
        Setting("ssm_conv_kernel", "conv_kernel"),
        Setting("ssm_inner_size", _NEMOTRON_WIDTH),
        Setting("ssm_state_size", "ssm_state_size"),
        Setting("ssm_time_step_rank", "mamba_num_heads"),
        Setting("ssm_group_count", "n_groups"),
    ),
    reshaped={
        "SSM_A": ("mamba_num_heads", "1"),
        "SSM_D": ("mamba_num_heads", "1"),
        "SSM_NORM": ("n_groups", f"{_NEMOTRON_WIDTH} / n_groups"),
    },
    layer_types=frozenset({FULL, LINEAR_ATTENTION, "mlp"}),
    biases=frozenset({"SSM_CONV1D"}),
    values={"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",)},
)
NEMOTRON_H = replace(
    _DENSE_NEMOTRON_H,
    name="NEMOTRON_H_MOE",
    settings=(
        *_DENSE_NEMOTRON_H.settings, *EXPERTS, *GROUPS, EXPERT_WIDTH, SHARED, SIGMOID, SCALED, NORMED,
        Setting("head_count_kv", "num_key_value_heads", only=f"{FULL}.*|draft"),
        Setting("feed_forward_length", "moe_intermediate_size", only="moe.*|draft"),
        Setting("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"),
        Setting("moe_latent_size", "moe_latent_size", optional=True),
    ),
    drafts=True,
    # Attention, and experts with the last norm.
    folded_drafts={
        r"mtp\.layers\.1\.norm(\..*)": r"second_norm\1",
        r"mtp\.layers\.1\.final_layernorm(\..*)": r"shared_head.norm\1",
        r"mtp\.layers\.[01]\.(.*)": r"\1",
    },
    layer_types=frozenset({FULL, LINEAR_ATTENTION, "moe"}),
    dense=_DENSE_NEMOTRON_H,
)  # fmt: skip

# Attention and Mamba side by side.
_STATES = "mamba_n_groups * mamba_d_state"
FALCON_H1 = Architecture(
    name="FALCON_H1",
    modules={r"mamba\.dt_bias": "mamba.dt_proj.bias"},
    scaled={
        "model.embed_tokens": Scaled(("embedding_multiplier",)),
        "lm_head": Scaled(("lm_head_multiplier",)),
        r"self_attn\.[qv]_proj": Scaled(("attention_in_multiplier",)),
        r"self_attn\.k_proj": Scaled(("attention_in_multiplier * key_multiplier",)),
        r"self_attn\.o_proj": Scaled(("attention_out_multiplier",)),
        r"feed_forward\.gate_proj": Scaled(("mlp_multipliers.0",)),
        r"feed_forward\.down_proj": Scaled(("mlp_multipliers.1",)),
        r"mamba\.out_proj": Scaled(("ssm_out_multiplier",)),
        r"mamba\.in_proj": Scaled(
            tuple(f"ssm_in_multiplier * ssm_multipliers.{part}" for part in range(5)),
            ("mamba_d_ssm", "mamba_d_ssm", _STATES, _STATES, "mamba_n_heads"),
        ),
    },
    settings=(
        Setting("ssm_conv_kernel", "mamba_d_conv"),
        Setting("ssm_inner_size", "mamba_d_ssm"),
        Setting("ssm_state_size", "mamba_d_state"),
        Setting("ssm_time_step_rank", "mamba_n_heads"),
        Setting("ssm_group_count", "mamba_n_groups"),
    ),
    reshaped=MAMBA2,
    biases=frozenset({"SSM_CONV1D"}),
    values={**SILU, "mamba_rms_norm": (False,), "tie_word_embeddings": (False,)},
)

# Both kinds of layers have these, in different sizes.
_ANY_SHAPE = ("ATTN_Q", "ATTN_K", "ATTN_V", "ATTN_OUT")
# Kimi Delta Attention, and multi-head latent attention in some layers.
_KDA_CONV = ("1", "linear_num_heads * linear_head_dim", "1", "linear_conv_kernel_dim")
KIMI_LINEAR = replace(
    DEEPSEEK2,
    name="KIMI_LINEAR",
    modules={
        **ROUTER_BIAS,
        r"self_attn\.dt_bias": "self_attn.dt_proj.bias",
        r"block_sparse_moe\.(gate|up|down)_proj": r"mlp.\1_proj",  # as transformers writes the layer without experts
    },
    settings=(
        *(setting for setting in DEEPSEEK2.settings if setting not in (*GROUPS, NORMED, SHARED)),
        Setting("head_count_kv", "1", only=f"{FULL}.*"),
        Setting("value_length", "kv_lora_rank", unread=True),
        Setting("expert_shared_count", "num_shared_experts"),
        Setting("ssm_conv_kernel", "linear_conv_kernel_dim"),
        Setting("kda_head_dim", "linear_head_dim"),
    ),
    shapes={"ATTN_KV_A_MQA": DEEPSEEK2.shapes["ATTN_KV_A_MQA"]} | dict.fromkeys(_ANY_SHAPE, (None, None)),
    reshaped=dict.fromkeys(("SSM_CONV1D_Q", "SSM_CONV1D_K", "SSM_CONV1D_V"), _KDA_CONV),
    layer_types=frozenset({FULL, LINEAR_ATTENTION}),
    layers_without={},
    drafts=False,
    equal=(("linear_num_heads", "num_attention_heads"),),
    values={**SILU, "moe_renormalize": (True,), "num_expert_group": (1, None), "q_lora_rank": (None,)},
)
