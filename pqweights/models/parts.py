"""What the layers of some types of models hold, by the names of modules in transformers; of hybrids, in some layers.

Weights of these modules are always there, whatever the configuration says. A test compares them with transformers.
"""

from __future__ import annotations

_NORMS = "input_layernorm post_attention_layernorm "
_HEADS = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
_HEAD_NORMS = "self_attn.q_norm self_attn.k_norm "
_MLP = "mlp.gate_proj mlp.up_proj mlp.down_proj "
_LLAMA = _NORMS + _HEADS + _MLP
_GEMMA2 = _LLAMA + "pre_feedforward_layernorm post_feedforward_layernorm "
_QWEN3 = _LLAMA + _HEAD_NORMS
_MOE = _NORMS + _HEADS + "mlp.gate mlp.experts "
_SHARED = "mlp.shared_expert mlp.shared_expert_gate "
_LINEAR = "linear_attn.conv1d linear_attn.norm linear_attn.out_proj "
_OLMO2 = _HEADS + _HEAD_NORMS + _MLP + "post_attention_layernorm post_feedforward_layernorm"
_LATENT = "self_attn.kv_a_proj_with_mqa self_attn.kv_a_layernorm self_attn.o_proj "

IN_LAYERS = {
    model_type: tuple(modules.split())
    for model_type, modules in {
        **dict.fromkeys(("llama", "mistral", "ministral3", "qwen2", "gemma", "granite", "smollm3", "seed_oss"), _LLAMA),
        "qwen3": _QWEN3,
        "gemma2": _GEMMA2,
        "gemma3_text": _GEMMA2 + _HEAD_NORMS,
        # Layers that share keys and values store neither, and some take the keys for values.
        "gemma4_text": _GEMMA2.replace("self_attn.v_proj ", "") + _HEAD_NORMS,
        "phi3": _NORMS + "self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj",
        "mixtral": _NORMS + _HEADS + "block_sparse_moe.gate block_sparse_moe.experts",
        "qwen2_moe": _MOE + _SHARED,
        "qwen3_moe": _MOE + _HEAD_NORMS,
        "qwen3_next": _MOE + _HEAD_NORMS + _SHARED + _LINEAR,
        "qwen3_5_text": _QWEN3 + _LINEAR,
        "qwen3_5_moe_text": _MOE + _HEAD_NORMS + _SHARED + _LINEAR,
        **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _OLMO2),
        **dict.fromkeys(("cohere", "cohere2"), "input_layernorm " + _HEADS + _MLP),
        "glm4": _NORMS + _HEADS + "mlp.gate_up_proj mlp.down_proj post_self_attn_layernorm post_mlp_layernorm",
        "gpt_oss": _NORMS + _HEADS + "mlp.router mlp.experts",
        "deepseek_v3": _NORMS + _LATENT + "mlp.gate mlp.experts",
        "starcoder2": _NORMS + _HEADS + "mlp.c_fc mlp.c_proj",
    }.items()
}
# How the name of the norm behind the last layer ends in these types.
FINAL_NORM = ".norm.weight"
